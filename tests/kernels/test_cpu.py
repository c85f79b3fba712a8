"""The native kernel against the reference: levels bit for bit, every gradient, every layout, path and thread count."""

from __future__ import annotations

import copy
import ctypes
import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lbq import BurstNeuron, native
from lbq.errors import LbqError
from lbq.kernels import cpu as kernel
from lbq.kernels.arguments import StateArguments
from lbq.kernels.reference import BurstState, Constants, Rule, burst_sequence
from lbq.kernels.surrogate import SURROGATES, Surrogate
from lbq.models import create
from lbq.native.choose import choose, use

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.report().reason}")

RESETS = [(reset, decayed) for reset in kernel.RESETS for decayed in (True, False)]


def learned(value: float) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def numbers(step: Any = 0.37, scale: Any = None) -> Constants:
    def tensor(value: Any) -> Any:
        return value if value is None or isinstance(value, Tensor) else learned(value)

    return Constants(tensor(step), learned(0.45), learned(0.6), learned(0.9), learned(0.8), tensor(scale))


def both(x: Tensor, constants: Constants, rule: Rule, seed: int = 0, state: BurstState | None = None) -> None:
    """Forward bit for bit, all gradients to float32's rounding of the sums they are; as a chunk, where there is a state."""
    assert kernel.supports(x, constants, rule)
    leaves = [v for v in (x, *constants) if isinstance(v, Tensor) and v.requires_grad]
    expected, end = burst_sequence(x, constants, rule, state)
    if state is None:
        found = kernel.burst(x, constants, rule)
    else:
        found, after = kernel.burst_chunk(x, constants, rule, state)
        assert end is not None
        torch.testing.assert_close(after, end.detach(), rtol=0, atol=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.dtype)
    true = torch.autograd.grad(expected, leaves, weight, allow_unused=True)
    ours = torch.autograd.grad(found, leaves, weight, allow_unused=True)
    for leaf, a, b in zip(leaves, true, ours, strict=True):
        a, b = (torch.zeros_like(leaf) if g is None else g for g in (a, b))
        terms = 1 if leaf is x else x.numel() ** 0.5
        ulp = 1e-5 if leaf.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(b, a, rtol=ulp, atol=2e-6 * rule.n_max * max(terms, 1), equal_nan=True)


def currents(shape: tuple[int, ...], seed: int = 0, spread: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread + 0.3
    return values.to(dtype).requires_grad_()


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("rounding", kernel.ROUNDINGS)
def test_every_rule_equals_the_reference(surrogate: str, rounding: Any) -> None:
    for seed, ((reset, decayed), with_gradient, detached) in enumerate(
        itertools.product(RESETS, (True, False), (True, False))
    ):
        scale = 0.7 if seed.bit_count() % 2 else None  # each with every pair of the others
        rule = Rule(3, SURROGATES[surrogate], rounding, reset, decayed, with_gradient, detached)
        both(currents((4, 5, 3, 3), seed), numbers(scale=scale), rule, seed)
        both(currents((4, 5, 3, 3), seed, dtype=torch.bfloat16), numbers(scale=scale), rule, seed)


def before(x: Tensor, rule: Rule) -> BurstState:
    """A membrane anywhere in the range, and a reset that is pending where the rule delays it."""
    v = currents(tuple(x.shape[1:]), seed=77).detach()
    return BurstState(v, v.relu().flip(0) if rule.delayed else None)


def test_every_rule_goes_on_from_a_state(isa: str) -> None:
    for seed, (rounding, (reset, decayed), with_gradient, detached, surrogate) in enumerate(
        itertools.product(kernel.ROUNDINGS, RESETS, (True, False), (True, False), ("relsg_et", "triangle"))
    ):
        rule = Rule(3, SURROGATES[surrogate], rounding, reset, decayed, with_gradient, detached)
        dtype = kernel.DTYPES[seed // 2 % 2]
        x = currents((3 if seed.bit_count() % 2 else 1, 5, 3, 3), seed, dtype=dtype)
        both(x, numbers(scale=0.7 if seed % 3 else None), rule, seed, before(x, rule))


@pytest.mark.parametrize("timesteps", [1, 2, 3, 4, 7, 10, 16])
@pytest.mark.parametrize("n_max", [1, 2, 5, 10, 20, 255])
def test_timesteps_and_levels(isa: str, timesteps: int, n_max: int) -> None:
    step = 2 / n_max
    for surrogate in ("relsg_et", "sigmoid") if n_max < 100 else ("relsg_et",):
        both(currents((timesteps, 3, 23)), numbers(step), Rule(n_max, SURROGATES[surrogate]))


@pytest.mark.parametrize("rounding", kernel.ROUNDINGS)
@pytest.mark.parametrize("reset", kernel.RESETS)
def test_levels_at_thresholds_and_one_ulp_beside(isa: str, rounding: Any, reset: Any) -> None:
    step = torch.tensor(0.3)
    halves = torch.arange(-14, 15) / 2
    exact = torch.cat([halves * step, halves.double().mul(0.3).float()])
    beside = [torch.nextafter(exact, torch.full_like(exact, to)) for to in (-math.inf, math.inf)]
    x = torch.cat([exact, *beside, torch.tensor([0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38])]).expand(3, 1, -1)
    for decayed, surrogate in itertools.product((True, False), ("relsg_et", "box", "box_et", "rectangular", "clip")):
        rule = Rule(5, SURROGATES[surrogate], rounding, reset, decayed)
        expected, _ = burst_sequence(x, numbers(step), rule)
        assert torch.equal(kernel.burst(x, numbers(step), rule), expected)
        small = x[..., :-2].detach().clone().requires_grad_()
        both(small, numbers(step), rule)


def test_every_float_becomes_the_nearest_bfloat16(isa: str) -> None:
    """Outputs of one level each: the steps themselves, rounded as PyTorch rounds them."""
    upper = torch.arange(1, 0x7F80, 37, dtype=torch.int32) << 16  # from the smallest to near the largest
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    scale = (upper[:, None] | lower).flatten().view(torch.float32)
    x, rule = torch.full((1, 1, scale.numel()), 2, dtype=torch.bfloat16), Rule(5, SURROGATES["clip"])
    out = kernel.burst(x, numbers(torch.ones_like(scale), scale), rule)
    assert torch.equal(out[0, 0], scale.bfloat16())


@pytest.mark.parametrize("dtype", kernel.DTYPES)
@pytest.mark.parametrize("rounding", kernel.ROUNDINGS)
def test_infinite_and_missing_numbers(isa: str, rounding: Any, dtype: torch.dtype) -> None:
    x = torch.tensor(
        [[[math.nan, math.inf, -math.inf, 1.0]], [[1.0, 1.0, 1.0, math.nan]], [[1.0, -math.inf, 2.0, 3.0]]], dtype=dtype
    )
    for reset, surrogate in itertools.product(kernel.RESETS, SURROGATES):
        rule = Rule(3, SURROGATES[surrogate], rounding, reset)
        expected, _ = burst_sequence(x, numbers(), rule)
        torch.testing.assert_close(kernel.burst(x, numbers(), rule), expected, rtol=0, atol=0, equal_nan=True)
    leaf = x.clone().requires_grad_()
    out = kernel.burst(leaf, numbers(), Rule(3, SURROGATES["relsg_et"], rounding))
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    assert grad[0, 0, 0].isnan()  # and a NaN spoils the gradient where it came from
    assert grad[:, 0, 1:3].nan_to_num(nan=9.0).abs().max() <= 9


@pytest.mark.parametrize(
    "shape", [(2, 0), (1, 1), (3, 0, 4), (2, 1, 1, 1), (2, 7, 3, 5, 1), (3, 2, 4, 3, 3), (2, 3, 2000)]
)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", kernel.DTYPES)
def test_sizes(isa: str, shape: tuple[int, ...], per_channel: bool, dtype: torch.dtype) -> None:
    step: Any = 0.37
    if per_channel and len(shape) > 2:
        step = torch.linspace(0.2, 0.6, shape[2]).reshape(-1, *[1] * (len(shape) - 3)).requires_grad_()
    both(currents(shape, dtype=dtype), numbers(step), Rule(5, SURROGATES["relsg_et"]))


def channels_last(x: Tensor) -> Tensor:
    """`[T, B, C, H, W]` whose timesteps are channels_last."""
    return x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": channels_last,
    "transposed": lambda x: x.transpose(3, 4).contiguous().transpose(3, 4),
    "batch_inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "same_at_every_timestep": lambda x: x[:1].expand(x.shape),
    "sliced": lambda x: torch.cat([x, x], 4)[..., : x.shape[4]],
    "sliced_in_time": lambda x: torch.stack([x, x], 1).flatten(0, 1)[::2],
    "time_behind": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("steps", ["one", "per_channel", "both"])
@pytest.mark.parametrize("size", [(4, 3), (6, 7)])
@pytest.mark.parametrize("dtype", kernel.DTYPES)
def test_layouts(isa: str, layout: str, steps: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](currents((3, 4, 5, *size), dtype=dtype).detach())
    each = torch.linspace(0.2, 0.6, 5).reshape(5, 1, 1)
    constants = {
        "one": numbers(0.4),
        "per_channel": numbers(each.clone().requires_grad_()),
        "both": numbers(each.clone().requires_grad_(), learned(0.7)),
    }[steps]
    out = kernel.burst(x, constants, Rule(5, SURROGATES["relsg_et"]))
    assert out.stride(0) == x[0].numel()
    if layout in ("contiguous", "channels_last", "transposed", "batch_inside"):
        assert out.stride() == x.stride()
    both(x.requires_grad_(), constants, Rule(5, SURROGATES["relsg_et"]))
    rule = Rule(5, SURROGATES["relsg_et"], decay_reset=False)
    v, pending = before(x, rule)
    assert pending is not None
    for pair in ((v, pending), (channels_last(v[None])[0], v), (v, v[:1, :1].expand(v.shape))):
        both(x, constants, rule, state=BurstState(*pair))


def test_a_time_step_shown_at_every_timestep_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("copied")

    x = currents((1, 4, 5, 3, 3)).detach().expand(4, 4, 5, 3, 3)
    constants, rule = Constants(torch.tensor(0.4), torch.tensor(0.5), 0.5, 1.0), Rule(5, SURROGATES["box"])
    inputs = kernel.inputs_of(x, constants, rule)
    monkeypatch.setattr(Tensor, "contiguous", refuse)
    out = kernel.BURST.forward(inputs)
    monkeypatch.undo()
    assert torch.equal(out, burst_sequence(x, constants, rule)[0])


def gradients(x: Tensor, constants: Constants, rule: Rule) -> list[Tensor]:
    out = kernel.burst(x, constants, rule)
    leaves = [v for v in (x, *constants) if isinstance(v, Tensor) and v.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out))]


@pytest.mark.parametrize("channels", [None, 6])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", kernel.DTYPES)
def test_threads_and_paths_give_the_same_bytes(
    channels: int | None, last: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = currents((4, 9, 6, 15, 17), dtype=dtype).detach()
    x = (LAYOUTS["channels_last"](x) if last else x).requires_grad_()
    step: Any = 0.4 if channels is None else torch.linspace(0.2, 0.6, 6).reshape(6, 1, 1).requires_grad_()
    for surrogate in ("relsg_et", "sigmoid"):
        rule = Rule(5, SURROGATES[surrogate])
        constants = numbers(step)
        results = []
        for path, threads in itertools.product(native.isas(), (1, 2, 3)):
            monkeypatch.setenv("LBQ_NATIVE_ISA", path)
            monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
            results.append(gradients(x, constants, rule))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_sums_over_many_neurons_are_exact_to_rounding() -> None:
    """A sum of two million float32 terms of one sign, where plain float32 addition loses digits."""
    x = torch.full((2, 1 << 20), 0.55, requires_grad=True)
    step = learned(0.5)
    out = kernel.burst(x, Constants(step, torch.tensor(0.5), 0.0, 1.0), Rule(5, SURROGATES["clip"]))
    (grad,) = torch.autograd.grad(out.sum(), step)
    slope = torch.tensor(0.55) / torch.tensor(0.5)
    assert grad.item() == pytest.approx(float(2 * (1 << 20) * (1 - slope.double())), rel=1e-6)


def test_exp_is_within_two_units_in_the_last_place(isa: str) -> None:
    x = np.concatenate([np.linspace(-87, 0, 300001), -np.logspace(-30, 1.9, 50001), [0.0, -0.0]]).astype(np.float32)
    out = np.empty_like(x)
    library = native.library()
    assert library is not None
    address = ctypes.c_void_p
    library.lbq_exp(address(x.ctypes.data), address(out.ctypes.data), ctypes.c_int64(x.size), native.ISAS[isa])
    true = np.exp(x.astype(np.float64))
    assert (np.abs(out - true) <= 1.5 * np.spacing(true.astype(np.float32))).all()
    assert (out[-2:] == 1).all()


# In networks


def step_of_training(native_switch: str, monkeypatch: pytest.MonkeyPatch, **neuron: Any) -> list[Tensor]:
    monkeypatch.setenv("LBQ_NATIVE", native_switch)
    torch.manual_seed(3)
    net = create("resnet8w16", num_classes=10, in_channels=1, timesteps=2, neuron={"name": "lbq", **neuron})
    x, y = torch.randn(8, 1, 8, 8), torch.arange(8)
    loss = torch.nn.functional.cross_entropy(net(x), y)
    loss.backward()
    return [loss, *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("neuron", [{}, {"per_channel": True}, {"membrane": "plif", "surrogate": "arctan"}])
def test_a_training_step_of_a_network(neuron: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = step_of_training("off", monkeypatch, **neuron)
    fast = step_of_training("on", monkeypatch, **neuron)
    assert torch.equal(plain[0], fast[0])  # the forward pass is the same
    for a, b in zip(plain, fast, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-3, atol=2e-5 * float(1 + a.detach().abs().max()))


@pytest.mark.no_cover  # PyTorch's checks are Python, which coverage makes twice as slow
def test_operators_are_well_formed() -> None:
    delayed, at_once = (Rule(5, SURROGATES["relsg_et"], decay_reset=on) for on in (False, True))
    v, pending = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    layouts = (
        (currents((2, 3, 4, 5)), 0.4, None, delayed, (v, pending)),
        (channels_last(currents((2, 3, 4, 5, 5)).detach()), torch.full((4, 1, 1), 0.4), None, delayed, (None, None)),
        (
            currents((1, 3, 4)).detach().expand(2, 3, 4),
            torch.full((4,), 0.4),
            torch.full((4,), 0.7).requires_grad_(),
            at_once,
            (v[..., 0], None),
        ),
        (currents((2, 6, 4)).detach()[:, ::2].requires_grad_(), 0.4, 1.0, at_once, (None, None)),
    )
    for number, (x, step, scale, rule, before) in enumerate(layouts):
        options: Any = {"test_utils": ("test_schema", "test_faketensor")} if number % 2 else {}  # what a layout decides
        values = kernel.inputs_of(x, numbers(step, scale), rule, StateArguments(*before))
        inputs = tuple(itertools.chain(*kernel.BURST.flattening.flatten(values)))
        torch.library.opcheck(torch.ops.lbq.burst_cpu.default, inputs, **options)
        torch.library.opcheck(torch.ops.lbq.burst_chunk_cpu.default, inputs, **options)
        plain = (value.detach() if isinstance(value, Tensor) else value for value in inputs)
        arguments = (torch.randn(x.shape), *plain, "x step tail leak alpha gain")
        torch.library.opcheck(torch.ops.lbq.burst_cpu_backward.default, arguments, **options)


def test_compiled_without_a_graph_break() -> None:
    torch._dynamo.reset()
    neuron, plain = BurstNeuron(5, membrane="plif"), BurstNeuron(5, membrane="plif")
    plain.load_state_dict(neuron.state_dict())
    x = currents((2, 3, 4, 5))
    compiled = torch.compile(neuron, fullgraph=True, backend="aot_eager")
    weight = torch.randn(x.shape)
    for module, leaf in ((compiled, x), (plain, x.detach().clone().requires_grad_())):
        (module(leaf) * weight).sum().backward()
        assert leaf.grad is not None
    assert torch.equal(compiled(x), plain(x))
    for name, p in plain.named_parameters():
        torch.testing.assert_close(neuron.get_parameter(name).grad, p.grad)
    assert not neuron.origin_seen  # what feeds it is not looked at in compiled code
    assert torch.equal(copy.deepcopy(neuron)(x), plain(x))


def test_gradients_under_another_default_dtype() -> None:
    neuron, x = BurstNeuron(5, learn_beta=True, learn_alpha=True), currents((3, 4, 5))
    parameters = list(neuron.parameters())
    expected = torch.autograd.grad(neuron(x).square().sum(), parameters)
    torch.set_default_dtype(torch.float64)
    try:
        found = torch.autograd.grad(neuron(x).square().sum(), parameters)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_no_second_derivative_and_it_says_so() -> None:
    x = currents((2, 3, 4))
    with pytest.raises(NotImplementedError, match="no second derivative: set LBQ_KERNEL=reference"):
        torch.autograd.grad(BurstNeuron(5)(x).sum(), x, create_graph=True)
    with use("reference"):
        (slope,) = torch.autograd.grad(BurstNeuron(5)(x).sum(), x, create_graph=True)
    assert slope.requires_grad


def test_what_it_leaves_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    x, rule = torch.randn(2, 3, 4, 5), Rule(5, SURROGATES["relsg_et"])
    c = Constants(torch.tensor(0.4), torch.tensor(0.5), 0.5, 1.0)
    own = Surrogate("relsg_et", SURROGATES["box"].level, SURROGATES["box"].slope)
    for value, constants, kind in (
        (x.double(), c, rule),
        (x.half(), c, rule),
        (x.to("meta"), c, rule),
        (x[:0], c, rule),
        (x, c._replace(thresholds=torch.arange(1.0, 6)), rule),
        (x, c._replace(step=torch.tensor(0.4).double()), rule),
        (x, c._replace(leak=torch.full((4, 1), 0.5)), rule),
        (x, c._replace(step=torch.full((4, 5), 0.4)), rule),  # which varies over two dimensions
        (x, c._replace(step=torch.full((4, 1), 0.4), scale=torch.full((5,), 0.4)), rule),
        (x, c, Rule(2**23, SURROGATES["relsg_et"])),
        (x, c, Rule(5, own)),  # a curve of one's own, whatever it is called
        (x, c, Rule(5, Surrogate("mine", own.level))),
    ):
        assert not kernel.supports(value, constants, kind)
    assert kernel.supports(x, c, rule)
    assert choose("cpu").kernel == "native"
    monkeypatch.setenv("LBQ_NATIVE", "off")
    assert not kernel.supports(x, c, rule)
    assert choose("cpu").kernel == "reference"
    assert "switched off" in choose("cpu").reason
    with pytest.raises(LbqError, match="needs the native library: switched off"):
        kernel.burst(x, c, rule)


# Loading


def test_report_and_forced_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    found = native.report()
    assert found.reason is None
    assert found.isa == native.isas()[-1]
    assert "portable" in found.features
    monkeypatch.setenv("LBQ_NATIVE_ISA", "portable")
    assert native.report().isa == "portable"
    monkeypatch.setenv("LBQ_NATIVE_ISA", "altivec")
    with pytest.raises(LbqError, match="LBQ_NATIVE_ISA=altivec: this CPU and build have portable"):
        native.isa()


def test_a_missing_stale_or_broken_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "_lbq.so"
    with monkeypatch.context() as patch:
        patch.delenv("LBQ_NATIVE_LIBRARY", raising=False)
        assert native.find(tmp_path) is None
        broken.write_bytes(b"not a library")
        assert native.find(tmp_path) == broken
    missing = str(native.open_library(None))
    assert "was not built" in missing
    assert ": install a C compiler, then install lbq again" in missing
    assert "cannot be loaded" in str(native.open_library(broken))
    with monkeypatch.context() as patch:
        patch.setattr(native, "source_hash", lambda: "other")
        assert "built from other sources" in str(native.open_library(native.find()))
    monkeypatch.setattr(native, "_opened", lambda: "the native library was not built")
    native._features.cache_clear()
    assert native.library() is None
    assert native.report() == native.Report(None, (), None, "the native library was not built")
    assert native.isas() == ()
    native._features.cache_clear()


def test_threads_survive_a_fork() -> None:
    code = """
import os, torch
from lbq import BurstNeuron
torch.set_num_threads(2)
x = torch.randn(2, 64, 1000)
expected = BurstNeuron(5)(x)
child = os.fork()
same = torch.equal(BurstNeuron(5)(x), expected)
if child == 0:
    os._exit(0 if same else 1)
raise SystemExit(0 if same and os.waitpid(child, 0)[1] == 0 else 1)
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False, timeout=120).returncode == 0
