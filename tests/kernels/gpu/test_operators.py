"""The fused kernels as operators of PyTorch: what they take, how they are compiled and launched."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="the fused kernels need triton")

from lbq import models
from lbq.cli import doctor
from lbq.kernels import reference
from lbq.kernels.arguments import AT_REST, StateArguments, neuron_arguments
from lbq.kernels.differentiable import DifferentiableKernel
from lbq.kernels.gpu import launch, layout, operators
from lbq.kernels.gpu.tiles import bursts
from lbq.neuron import ILIF, LIF, LMHT, MLF, BurstNeuron, LadderNeuron, SpikingNeuron
from tests.support.fused import DEVICE, by_reference, channels_last, randn
from tests.support.small_nets import ONE_BLOCK

# As operators


def flat_inputs(kernel: DifferentiableKernel[Any], inputs: Any, learned: bool = False) -> tuple[Any, ...]:
    """As its operator takes them; with tensors that need gradients, where they may, if `learned`."""
    tensors, others = kernel.flattening.flatten(inputs)
    detached = [None if tensor is None else tensor.detach() for tensor in tensors]
    names = kernel.flattening.tensors
    if learned:
        constants = ("mean", "var", "v", "pending")
        detached = [
            t if t is None or n in constants else t.requires_grad_() for t, n in zip(detached, names, strict=True)
        ]
    return *detached, *others


OTHER_LAYOUTS: dict[str, Any] = {"test_utils": ("test_schema", "test_faketensor")}  # what an input's layout decides


def test_opcheck_of_every_operator() -> None:
    ops = torch.ops.lbq
    x = channels_last(randn(2, 3, 4, 3, 3))
    neuron = LIF(membrane="plif").to(DEVICE)
    constants = neuron.constants(x)
    arguments = neuron_arguments(constants, neuron.rule)
    at_once = arguments._replace(rule=arguments.rule._replace(rounding="floor", decay_reset=True))
    state = StateArguments(x[0].contiguous(), torch.randn_like(x[0]))
    burst = operators.Burst(x, arguments, AT_REST)
    chunk = burst._replace(before=state)
    torch.library.opcheck(ops.burst, flat_inputs(operators.BURST, burst, learned=True))
    for laid in (x[:1].expand(3, *x.shape[1:]), x[:, :, ::2].contiguous()[:, :, :, :2]):
        torch.library.opcheck(ops.burst, flat_inputs(operators.BURST, burst._replace(x=laid)), **OTHER_LAYOUTS)
    torch.library.opcheck(ops.burst_chunk, flat_inputs(operators.BURST_CHUNK, chunk, learned=True))
    alone = flat_inputs(operators.BURST_CHUNK, burst._replace(neuron=at_once))
    torch.library.opcheck(ops.burst_chunk, alone, **OTHER_LAYOUTS)
    for inputs, options in ((burst, {}), (chunk, OTHER_LAYOUTS)):
        flat = flat_inputs(operators.BURST, inputs)
        torch.library.opcheck(ops.burst_backward, (torch.randn_like(x), *flat, "x step leak"), **options)

    mean, var = torch.ops.lbq.moments(x.flatten(0, 1))
    torch.library.opcheck(ops.moments, (x.flatten(0, 1),))
    torch.library.opcheck(
        ops.track_moments,
        (torch.zeros_like(mean), torch.ones_like(mean), torch.tensor(0, device=DEVICE), mean, var, 0.1, 9),
    )
    norm = launch.NormArguments(torch.ones_like(mean), torch.zeros_like(mean), mean, var, 1e-5, x.numel() // 4)
    added = operators.NormBurst(x, norm, torch.randn_like(x), arguments, 2)
    shown = operators.NormBurst(x[:1], norm, None, arguments, 2)
    torch.library.opcheck(ops.norm_burst, flat_inputs(operators.NORM_BURST, added, learned=True))
    torch.library.opcheck(ops.norm_burst, flat_inputs(operators.NORM_BURST, shown), **OTHER_LAYOUTS)
    for whole, wanted, options in ((added, "x residual weight step tail", {}), (shown, "", OTHER_LAYOUTS)):
        flat = flat_inputs(operators.NORM_BURST, whole)
        torch.library.opcheck(ops.norm_burst_backward, (torch.randn_like(x), *flat, wanted), **options)


def test_goes_through_torch_compile_without_a_break() -> None:
    net = models.create(ONE_BLOCK, timesteps=2, in_channels=1).to(DEVICE)
    x, labels = randn(4, 1, 8, 8), torch.arange(4, device=DEVICE)
    eager = copy.deepcopy(net)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    losses = [nn.functional.cross_entropy(n(x), labels) for n in (eager, compiled)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for (name, ours), theirs in zip(net.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)
    for kept, expected in zip(net.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(kept, expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own doing
@pytest.mark.parametrize("make", [lambda: LMHT(timesteps=2), MLF, LadderNeuron, lambda: ILIF(3)])
def test_neurons_with_dynamics_of_their_own_go_through_torch_compile(make: Callable[[], SpikingNeuron]) -> None:
    neuron, x = make().to(DEVICE), randn(2, 3, 8)
    torch.testing.assert_close(torch.compile(neuron, backend="aot_eager", fullgraph=True)(x), neuron(x))


# What it takes, and how it is launched


def test_what_it_leaves_to_the_reference() -> None:
    x = torch.zeros(2, 1, 3)
    own = BurstNeuron()
    own.rule = reference.Rule(3, dataclasses.replace(own.surrogate))  # a curve of one's own, whatever it is called
    for neuron, value in (
        (BurstNeuron(), x.double()),
        (BurstNeuron(), torch.zeros(33, 1, 3)),
        (LadderNeuron(), x),
        (BurstNeuron(2**21, step=1.0), x),
        (own, x),
    ):
        assert not operators.supports(value, neuron.constants(value), neuron.rule)
        assert torch.equal(neuron(value), by_reference(value, neuron))


def test_doctor_names_the_kernel() -> None:
    assert doctor.examine()["kernels"][DEVICE] == {"kernel": "fused", "reason": "asked for by name"}


def test_slabs_cover_everything_once() -> None:
    """Rows of programs times tiles times rows of a tile reach the last row, and no program has nothing to do."""
    for rows, channels in ((1, 1), (7, 3), (1000, 128), (123457, 130), (65536, 512)):
        slab = layout.slab_of((rows, channels, 1, 1), (channels, 1, channels, channels), True, 1024)
        for wanted in (1, 528, 4224):
            programs, columns, each = slab.share(wanted)
            assert programs * each * slab.br >= rows > (each - 1) * programs * slab.br
            assert (programs - 1) * slab.br < rows
            assert columns * slab.bc >= channels
    assert all(a >= b for a, b in pairwise(layout.tile_for(t) for t in range(1, 33)))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lbq.kernels.gpu import launch
from lbq.kernels.gpu.tiles import bursts, counts, moments
from lbq.kernels.arguments import RuleArguments
from lbq.kernels.gpu.operators import RELU
def variant(rule, *sums, **more):
    steps = launch.neuron_constants(rule, False, True, False)
    return {**shared, **steps, **launch.backward_constants(rule, sums), **more}
shared = dict(T=2, NORM=True, RESIDUAL=True, SCALE=False, LAYOUT="last", BR=8, BC=128, BEFORE=False, PENDING=False,
              AFTER=False, SHOWN=False, WHOLE=False, BITS=0, PRICED=False)
rule = RuleArguments(5, "relsg_et", "floor", "once", True, True, False)
late = RuleArguments(5, "arctan", "strict", "once", False, True, False)
alone = dict(NORM=False, RESIDUAL=False, WHOLE=True, LAYOUT="flat")
both = variant(rule, "current", "hat", "step")
assert both["FMA"]
chunk = variant(late, "leak", **alone, BEFORE=True, PENDING=True)
kernels = [
    (bursts.burst_forward, both), (bursts.burst_backward, both), (bursts.burst_backward, variant(rule, "step", **alone)),
    (bursts.burst_forward, {**chunk, "AFTER": True}), (bursts.burst_backward, chunk),
    (bursts.burst_forward, {**both, "BITS": 3}), (bursts.burst_backward, {**both, "PRICED": True}),
    (bursts.burst_forward, variant(RELU, T=1, LEAK=False)),
    (bursts.burst_backward, variant(RELU, "current", "hat", T=1, LEAK=False, SHOWN=True)),
    (bursts.norm_backward, dict(LAYOUT="any", BR=8, BC=128)), (moments.moments_partial, dict(LAYOUT="last", BR=32, BC=128)),
    (moments.moments_total, dict(BR_PARTIAL=32, BP=128, BC=8)), (moments.track, dict(BC=128)),
    (counts.tally, dict(x_channel=1, groups=1, SCALES=False, FIELDS=5, BITS=6, BP=8, BC=128)),
    (counts.tally, dict(x_position=1, SCALES=True, FIELDS=5, BITS=6, BP=128, BC=8)),
    (counts.membranes, variant(rule, LAYOUT="flat", BINS=128)),
]
whole = ("channels", "elements", "positions", "x_time", "x_batch", "x_channel", "x_position")
integers = ("n_max", "rows", "inner", "programs", "tiles", "batch", "groups", "each", "bins", *whole)
data, numbers = ("x", "residual", "out", "grad"), ("eps", "portion", "momentum", "correction", "low", "fineness")
for kernel, constants in kernels:
    signature, attributes, values = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        elif name in numbers or name in integers or "_time" in name:
            signature[name] = "fp32" if name in numbers else "i32"
            attributes[(i,)] = [["tt.divisibility", 16]] if name in whole or "_time" in name else []
        else:
            signature[name] = "*bf16" if name in data else "*i64" if name in ("batches", "counts") else "*fp32"
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    print(kernel.__name__, "v4.b32" in ptx)
"""


def test_both_burst_kernels_begin_with_the_arguments_of_a_launch() -> None:
    """A launch gives them by position."""
    x, neuron = torch.zeros(1, 2, 3), BurstNeuron()
    slab = layout.slab_of(x.shape[1:], x.stride()[1:], False, 1024)
    arguments = neuron_arguments(neuron.constants(x), neuron.rule)
    _, shared, _ = launch.burst_launch(x, x, 1, arguments, None, None, AT_REST, slab, 1)
    forward, backward = (kernel.arg_names[: len(shared)] for kernel in (bursts.burst_forward, bursts.burst_backward))
    assert forward == backward


def test_kernels_compile_for_a_gpu_with_vectorised_loads() -> None:
    """Triton compiles without a GPU: what the interpreter accepts the compiler may still refuse."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environ, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in compiled][:3] == ["burst_forward", "burst_backward", "burst_backward"]
    assert [name for name, _ in compiled][3:5] == ["burst_forward", "burst_backward"]  # from a state on
    assert [name for name, _ in compiled][-3:] == ["tally", "tally", "membranes"]
    assert all(wide == "True" for name, wide in compiled[:5] + compiled[-3:])
