"""The GPU engine against the dense one, bit for bit: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels need triton")

from lbq.counting.deployed import evaluate
from lbq.data.testset import TestSet
from lbq.engine import Network, cuda
from lbq.engine.cuda import fused
from lbq.engine.cuda.plain import PlainLayer, convolve, matrices
from lbq.engine.cuda.runner import GpuRunner
from lbq.engine.output import Output
from lbq.graph import Synapse
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from tests.support.small_nets import (
    CASES,
    Functional,
    branched,
    deploy_warmed,
    deployed,
    eventful,
    pixels,
    same,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_gpu(net: Network, x: np.ndarray[Any, Any], kernels: bool = True) -> Output:
    return GpuRunner(net.network, DEVICE, kernels).run(x, trace=True)


def kinds(out: Output) -> set[str]:
    """What ran the layers, the readout left out."""
    return {choice.kernel for name, choice in out.choices.items() if name != "fc"}


@pytest.mark.parametrize(("id", "neuron", "shape", "options"), CASES)
def test_every_neuron_gives_the_same_bits(
    id: str, neuron: Any, shape: tuple[int, int, int], options: dict[str, Any]
) -> None:
    """In the smallest network of a kind: the interpreter is slow."""
    net = deployed("one-block-fc" if id == "narrow-fc" else "one-block", neuron, shape, **options)
    x = pixels(2, *shape, seed=3)
    out = on_gpu(net, x)
    assert same(net.run(x, "dense", trace=True), out)
    assert kinds(out) == {"triton"}


def test_event_frames_and_the_last_piece() -> None:
    """Three samples in pieces of two, as event frames and as images."""
    for net, x in (
        (eventful("one-block"), pixels(3, 3, 2, 4, 4)),
        (deployed("one-block", shape=(3, 4, 4)), pixels(3, 3, 4, 4)),
    ):
        runner = GpuRunner(net.network, DEVICE, True)
        runner.images_per_piece = 2
        done: list[int] = []
        out = runner.run(x, trace=True, progress=done.append)
        assert done == [2, 1]
        assert same(net.run(x, "dense", trace=True), out)
        if DEVICE == "cuda":  # without a trace: recorded
            assert np.array_equal(runner.run(x).logits, out.logits)


def test_layers_that_kernels_do_not_take_run_in_pytorch() -> None:
    """Beside those that they take: groups, dilations, an image beside levels; the output says why."""
    net, x = branched(), pixels(3, 3, 6, 6, seed=5)
    out = on_gpu(net, x)
    assert same(net.run(x, "dense", trace=True), out)
    assert kinds(out) == {"triton", "torch"}
    reasons = " ".join(choice.reason for choice in out.choices.values())
    assert "not by the kernels: grouped or dilated" in reasons


@pytest.mark.parametrize("padding", [(0, 0), (2, 1)])
@pytest.mark.parametrize("stride", [(1, 1), (3, 2)])
@pytest.mark.parametrize("dilation", [(1, 1), (1, 2)])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_in_pytorch_are_pytorchs_own(
    padding: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int], groups: int
) -> None:
    """Sides that differ, and levels that do not lie one after the other in memory."""
    options: dict[str, Any] = {"padding": padding, "stride": stride, "dilation": dilation, "groups": groups}
    random = np.random.default_rng(1)
    weight = random.integers(-127, 128, (6, 4 // groups, 3, 2)).astype(np.int8)
    x = torch.from_numpy(random.integers(0, 6, (2, 9, 7, 4))).permute(0, 3, 1, 2)
    expected = nn.functional.conv2d(x.double(), torch.from_numpy(weight).double(), **options)
    height, width = expected.shape[2:]
    synapse = Synapse("conv", "sn", "conv", weight, (4, 9, 7), (6, height, width), **options)
    assert torch.equal(convolve(synapse, matrices(synapse, torch.device("cpu")).double(), x), expected)


def pooling(m: Any, x: Tensor) -> Tensor:
    """Max and sum pools in front of convolutions, and a readout of everything."""
    x = m.sn1(over_time(x, m.conv1, m.norm1, timesteps=2))
    x = m.sn2(over_time(x, m.maximum, m.conv2, m.norm2))
    x = m.sn3(over_time(x, m.mean, m.conv3, m.norm3))
    return over_time(x.flatten(2), m.fc, spatial=1).mean(0)


@pytest.mark.parametrize("n_max", [5, 60, 200])
def test_pools_and_many_levels(n_max: int) -> None:
    """60 levels pooled by four pass a signed byte, 200 levels do so by themselves: PyTorch takes over."""
    torch.manual_seed(0)
    parts = {
        "conv1": nn.Conv2d(3, 4, 3, padding=1, bias=False),
        "norm1": nn.BatchNorm2d(4),
        "sn1": BurstNeuron(n_max, 0.4 if n_max == 5 else 0.05),
        "maximum": nn.MaxPool2d(3, 1, 1),
        "conv2": nn.Conv2d(4, 4, 1, bias=False),
        "norm2": nn.BatchNorm2d(4),
        "sn2": BurstNeuron(n_max, 0.4 if n_max == 5 else 0.05),
        "mean": nn.AvgPool2d(2),
        "conv3": nn.Conv2d(4, 4, (1, 2), stride=(2, 1), bias=False),
        "norm3": nn.BatchNorm2d(4),
        "sn3": BurstNeuron(5),
        "fc": nn.Linear(4 * 2 * 2, 5),
    }
    net = deploy_warmed(Functional(pooling, **parts), 3, 6, 6)
    x = pixels(2, 3, 6, 6, seed=4)
    out = on_gpu(net, x)
    dense = net.run(x, "dense", trace=True)
    assert dense.levels is not None
    assert dense.levels["sn2"].any()
    assert same(dense, out)
    assert kinds(out) == {5: {"triton"}, 60: {"triton", "torch"}, 200: {"torch"}}[n_max]


def test_sums_beyond_float32_are_taken_in_float64() -> None:
    """Nothing that a CPU takes is refused: 255 levels times weights of 127, and 16-bit weights."""
    network = deployed("resnet8w16", {"name": "lbq", "n_max": 255}, (3, 4, 4)).network
    runner = GpuRunner(network, DEVICE, False)
    first = runner.layers["sn1"]
    assert isinstance(first, PlainLayer)
    assert first.weights["conv1"].dtype == torch.float32
    heavy = tuple(replace(s, weight=np.full_like(s.weight, 127)) for s in network.layers[-1].synapses)
    last = PlainLayer(network, replace(network.layers[-1], synapses=heavy), torch.device(DEVICE))
    assert torch.float64 in {weights.dtype for weights in last.weights.values()}
    wide = deployed("resnet8w2", shape=(3, 4, 4), bits=16)
    x = pixels(2, 3, 4, 4)
    assert same(wide.run(x, "dense", trace=True), on_gpu(wide, x))


def test_tiles_leave_work_for_all_processors() -> None:
    for positions, channels in ((1024 * 1024, 128), (1024, 128), (64, 512), (1, 32), (700, 96)):
        tile = fused.tile_for(positions, channels)
        assert channels % tile.channels == 0
        programs = -(-positions // tile.positions) * (channels // tile.channels)
        smallest = tile.positions == 32 and tile.channels == 32
        assert programs >= fused.PROGRAMS_WANTED or smallest


COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lbq.engine.cuda import tiles
layer = dict(
    T=2, HO=32, WO=32, O=128, ROW_0=34 * 128, C_0=128, KH_0=3, KW_0=3, SY_0=1, SX_0=1, BK_0=128,
    ROW_1=34 * 128, C_1=128, KH_1=1, KW_1=1, SY_1=2, SX_1=2, BK_1=128,
    SHORTCUT_ROW=34 * 128, OUT_ROW=34 * 128, CONVS=2, SHORTCUT=True, STATIC=False,
    BIAS_MAP=False, FRACTION=4, N=5, SIGNED=False, RESET="once", DECAY=True, LEAK_M=1, LEAK_K=1, BM=128, BN=128)
image = {**layer, "CONVS": 1, "STATIC": True, "SHORTCUT": False, "BIAS_MAP": True, "C_0": 32, "BK_0": 32, "LEAK_M": 3}
pool = dict(ROW=34 * 128, OUT_ROW=16 * 128, C=128, MAX=True, BM=32, BC=128)
total = dict(T=2, H=8, W=8, ROW=10 * 128, C=128, BC=128, BP=16)
kernels = [(tiles.conv_fire, layer), (tiles.conv_fire, image), (tiles.pooled, pool), (tiles.summed, total)]
integers = ("shortcut_weight", "bias", "thresholds", "reset")
for kernel, constants in kernels:
    signature, attributes, values = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        elif name.partition("_")[0] in ("levels", "weights", "out") and "time" not in name and "image" not in name:
            signature[name] = "*i32" if kernel is tiles.summed and name == "out" else "*i8"
        elif name in ("shortcut", *integers):
            signature[name] = "*i8" if name == "shortcut" else "*i32"
        else:
            signature[name] = "i32"
        if name not in (*constants, "batch", "images", "total"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "num_stages": 3}).asm["ptx"]
    print(kernel.__name__, len(re.findall("wgmma[^;]*s8", ptx)) > 0, ".local" in ptx)
"""


def test_kernels_compile_for_a_gpu_with_matrix_units() -> None:
    """Triton compiles without a GPU: convolutions are products of bytes there, and nothing leaves the registers."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environ, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = dict.fromkeys(done.stdout.splitlines())
    assert list(compiled) == [
        "conv_fire True False", "pooled False False", "summed False False"
    ]  # fmt: skip


def test_a_choice_says_what_ran() -> None:
    net, x = deployed("resnet8w2", shape=(3, 4, 4)), pixels(1, 3, 4, 4)
    plain = GpuRunner(net.network, DEVICE, False).run(x)
    assert {choice.kernel for choice in plain.choices.values()} == {"torch"}
    assert all(re.match(rf"dense on {DEVICE}", choice.reason) for choice in plain.choices.values())
    assert same(plain, net.run(x, "dense"))


def test_auto_takes_a_gpu_for_many_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in on the CPU shows it; the whole first batch warms it up, since each size of batch is recorded by itself."""
    net, x = deployed("resnet8w2", shape=(3, 4, 4)), pixels(cuda.LEAST_IMAGES, 3, 4, 4)
    net._on_device["cuda"] = stand_in = GpuRunner(net.network, "cpu", False)
    monkeypatch.setattr(cuda, "available", lambda: True)
    many, few = net.run(x), net.run(x[1:])
    assert kinds(many) == {"torch"}
    assert "torch" not in kinds(few)
    assert np.array_equal(many.logits[1:], few.logits)
    sizes: list[int] = []
    whole = stand_in.run

    def noted(x: np.ndarray[Any, Any], *more: Any) -> Output:
        sizes.append(len(x))
        return whole(x, *more)

    monkeypatch.setattr(stand_in, "run", noted)
    evaluate(net, TestSet("some", (3, 4, 4), size=len(x), read=lambda a, b: x[a:b]))
    assert sizes == [len(x), len(x)]
