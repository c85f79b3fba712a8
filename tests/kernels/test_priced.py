"""A price on levels: the sums of |S| and of their set bits that kernels return, and the gradient of the first one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lbq import BurstNeuron, native
from lbq.kernels import cpu, reference
from lbq.kernels.reference import Constants, Rule, burst_levels, burst_sequence, priced_sequence
from lbq.kernels.surrogate import SURROGATES
from lbq.native.choose import use
from lbq.neuron import ILIF, LIF, LadderNeuron, SpikingNeuron, Ternary
from lbq.neuron.base import summing_levels

PRICE = 0.7
Priced = Callable[[Tensor, Constants, Rule], tuple[Tensor, Tensor]]

needs_library = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.report().reason}")


def currents(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=dtype) * 1.2 + 0.3


def numbers(step: Any = 0.37, scale: float | None = None, dtype: torch.dtype = torch.float32) -> Constants:
    def learned(value: Any) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).clone().requires_grad_()

    worth = None if scale is None else learned(scale)
    return Constants(learned(step), learned(0.45), learned(0.6), learned(0.9), learned(0.8), worth)


def gradients(out: Tensor, sums: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Of a loss with its own gradient of every output, and the price on the sum of |S|."""
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).reshape(out.shape).to(out)
    loss = (out * weights).sum() + PRICE * sums[0]
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


# Against the frozen form, in float64


def frozen(x: Tensor, constants: Constants, rule: Rule) -> tuple[Tensor, Tensor]:
    """The smooth function that the surrogate differentiates: levels are B(r) + c with c and resets held at this point."""
    levels = burst_levels(x, constants, rule)
    step, tail, leak, alpha, gain, scale, _ = constants

    def smooth(r: Tensor) -> Tensor:
        b = rule.surrogate.level
        return (
            torch.where(r < 0, -b(-r, rule.n_max, tail), b(r, rule.n_max, tail))
            if rule.signed
            else b(r, rule.n_max, tail)
        )

    v, outputs, sizes = torch.zeros_like(x[0]), [], []
    for current, level in zip(x, levels, strict=True):
        u = leak * v + gain * current
        b = smooth(u / step)
        spikes = b + (level - b).detach()
        outputs.append((step if scale is None else scale) * spikes)
        sizes.append((spikes * (u.detach().sign() if rule.signed else 1)).sum())
        drop = alpha * step * (level if rule.reset == "level" else level.sign())
        v = u - (drop if rule.reset_grad else drop.detach())
    bits = sum(bin(abs(int(level))).count("1") for level in levels.flatten().tolist())
    return torch.stack(outputs), torch.stack([sum(sizes, torch.zeros(())), torch.tensor(float(bits))])


RULES = {
    "burst": Rule(5, SURROGATES["relsg_et"]),
    "many levels": Rule(20, SURROGATES["relsg_et"]),
    "one level": Rule(1, SURROGATES["relsg_et"]),
    "box": Rule(5, SURROGATES["box"]),
    "ilif": Rule(4, SURROGATES["clip"], rounding="round", reset="level", reset_grad=False),
    "ternary": Rule(1, SURROGATES["relsg_et"], rounding="trunc"),
    "signed levels": Rule(3, SURROGATES["relsg_et"], rounding="half"),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("timesteps", [1, 3])
@pytest.mark.parametrize("step", [0.37, [[0.2], [0.37], [0.6]]], ids=["layer", "channel"])
@pytest.mark.parametrize("scale", [None, 0.8], ids=["step", "scale"])
def test_gradients_equal_the_frozen_form(rule: Rule, timesteps: int, step: Any, scale: float | None) -> None:
    x = currents((timesteps, 4, 3, 7), torch.float64).requires_grad_()
    constants = numbers(step, scale, torch.float64)
    leaves = [v for v in (x, *constants) if isinstance(v, Tensor) and v.requires_grad]
    ours, theirs = priced_sequence(x, constants, rule), frozen(x, constants, rule)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.to(a))
    for a, b in zip(gradients(*ours, leaves), gradients(*theirs, leaves), strict=True):
        expected = b if a is not None else torch.zeros_like(b)
        torch.testing.assert_close(a, expected, rtol=1e-9, atol=1e-9)


def test_the_formulas_of_a_price() -> None:
    """With h the price: U gets (g + h / gamma) B', gamma gets g S - (g + h / gamma) r B', lambda (g gamma + h) dB/dlambda."""
    step, tail = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.4, 0.3))
    r = torch.tensor([[[-2.0, 0.5, 1.5, 3.3, 6.5]]], dtype=torch.float64)
    u, g = (r * step.detach()).requires_grad_(), torch.linspace(-1, 1, 5, dtype=torch.float64)
    rule = Rule(5, SURROGATES["relsg_et"])
    out, sums = priced_sequence(u, Constants(step, tail, 0.5, 1.0), rule)
    by_u, by_step, by_tail = torch.autograd.grad((out * g).sum() + PRICE * sums[0], (u, step, tail))
    slope, bend = (f(r, 5, tail).detach() for f in (rule.surrogate.slope, rule.surrogate.tail_slope))  # type: ignore[misc]
    level = r.floor().clamp(0, 5)
    torch.testing.assert_close(by_u, (g + PRICE / 0.4) * slope)
    torch.testing.assert_close(by_step, (g * level - (g + PRICE / 0.4) * r * slope).sum())
    torch.testing.assert_close(by_tail, ((g * 0.4 + PRICE) * bend).sum())


# Kernels against the reference


def both(kernel: Priced, x: Tensor, constants: Constants, rule: Rule) -> None:
    """Outputs and sums bit for bit, gradients to the rounding of sums."""
    x = x.detach().requires_grad_()
    leaves = [v for v in (x, *constants) if isinstance(v, Tensor) and v.requires_grad]
    expected, exact = priced_sequence(x, constants, rule)
    out, sums = kernel(x, constants, rule)
    assert torch.equal(out, expected)
    torch.testing.assert_close(sums, exact, rtol=1e-6, atol=0)
    for leaf, a, b in zip(leaves, gradients(expected, exact, leaves), gradients(out, sums, leaves), strict=True):
        terms = 1 if leaf is x else x.numel() ** 0.5
        ulp = 1e-5 if leaf.dtype == torch.float32 else 2**-7
        torch.testing.assert_close(b, a, rtol=ulp, atol=4e-6 * rule.n_max * max(terms, 1))


@needs_library
@pytest.mark.parametrize("rounding", cpu.ROUNDINGS)
def test_native_kernel_equals_the_reference(isa: str, rounding: Any) -> None:
    rules = itertools.product(cpu.RESETS, (True, False), (True, False), ("relsg_et", "triangle"))
    for number, (reset, decayed, detached, surrogate) in enumerate(rules):
        scale = 0.7 if number.bit_count() % 2 else None
        rule = Rule(3, SURROGATES[surrogate], rounding, reset, decayed, True, detached)
        both(cpu.burst_priced, currents((3, 5, 3, 3)), numbers(scale=scale), rule)


@needs_library
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5, 1), (2, 3, 5, 33), (2, 0, 4), (1, 70, 3, 300)])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("dtype", cpu.DTYPES)
def test_native_kernel_in_every_layout(isa: str, shape: tuple[int, ...], by_channel: bool, dtype: torch.dtype) -> None:
    """Long runs with one step, rows in which every neighbour has another, and last columns that are not full."""
    steps = torch.linspace(0.2, 0.7, shape[2]).reshape(-1, *[1] * (len(shape) - 3))
    both(cpu.burst_priced, currents(shape, dtype), numbers(steps if by_channel else 0.37), RULES["burst"])


def neurons() -> dict[str, SpikingNeuron]:
    return {
        "burst": BurstNeuron(5, learn_beta=True, learn_alpha=True),
        "channels": BurstNeuron(5, channels=130),
        "lif": LIF(0.7),
        "ternary": Ternary(0.4, learn_step=True, surrogate="relsg_et"),
        "ilif": ILIF(4, 0.4, learn_step=True),
        "plif": BurstNeuron(3, membrane="plif"),
    }


@pytest.mark.parametrize("kind", neurons())
@pytest.mark.parametrize("timesteps", [1, 3])
def test_fused_kernel_equals_the_reference(kind: str, timesteps: int) -> None:
    """130 channels: several programs beside each other."""
    operators = pytest.importorskip("lbq.kernels.gpu.operators", reason="the fused kernels need triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    neuron = neurons()[kind].to(device)
    x = currents((timesteps, 2, 130, 3, 3)).to(device)

    def run(kernel: Priced) -> tuple[Tensor, Tensor, list[Tensor]]:
        leaf = x.clone().requires_grad_()
        with use("fused"):
            out, sums = kernel(leaf, neuron.constants(leaf), neuron.rule)
        return out.detach(), sums.detach(), gradients(out, sums, [leaf, *neuron.parameters()])

    expected, exact, theirs = run(priced_sequence)
    out, sums, ours = run(operators.burst_priced)
    assert torch.equal(out, expected)
    torch.testing.assert_close(sums, exact, rtol=1e-6, atol=0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5 * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize("shown", [False, True], ids=["sequence", "image"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_fused_kernel_after_batchnorm(shown: bool, residual: bool, training: bool) -> None:
    """Rows that do not exist are neither counted nor priced: BatchNorm's shift alone would make them fire."""
    operators = pytest.importorskip("lbq.kernels.gpu.operators", reason="the fused kernels need triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    timesteps, channels = 2, 6
    neuron, norm = BurstNeuron(5).to(device), nn.BatchNorm2d(channels).to(device).train(training)
    with torch.no_grad():
        norm.bias.copy_(torch.linspace(0.5, 3, channels))
    x = currents((3, channels, 5, 3)).to(device) if shown else currents((timesteps, 3, channels, 5, 3)).to(device)
    added = currents((timesteps, 3, channels, 5, 3)).to(device).abs() if residual else None

    def plain(x: Tensor) -> tuple[Tensor, Tensor]:
        normed = norm(x).expand(timesteps, *x.shape) if shown else norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        normed = normed if added is None else normed + added
        return priced_sequence(normed, neuron.constants(normed), neuron.rule)

    def fused(x: Tensor) -> tuple[Tensor, Tensor]:
        sequence = x.expand(timesteps, *x.shape) if shown else x
        steps, constants = timesteps if shown else None, neuron.constants(sequence)
        out: tuple[Tensor, Tensor] = operators.norm_burst(x, norm, constants, neuron.rule, added, steps, priced=True)
        return out

    results = []
    for run in (plain, fused):
        leaf = x.clone().requires_grad_()
        with use("fused"):
            out, sums = run(leaf)
        results.append(
            (out.detach(), sums.detach(), *gradients(out, sums, [leaf, *norm.parameters(), neuron.rho, neuron.eta]))
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=4e-5 * max(1.0, float(b.abs().max())))


# The neuron


def test_neurons_sum_what_they_emit_within_the_context() -> None:
    net = nn.Sequential(BurstNeuron(5), Ternary(0.3), LadderNeuron())
    x = currents((2, 3, 4))
    with summing_levels(net) as emitted:
        net(x)
        net(x)
    assert {name: len(sums) for name, sums in emitted.items()} == {"0": 2, "1": 2, "2": 2}
    levels = net[0].levels(x).long()  # type: ignore[operator]
    bits = sum(bin(int(level)).count("1") for level in levels.flatten())
    assert emitted["0"][0].tolist() == [levels.sum(), bits]
    net(x)  # outside of it, nothing is kept
    assert len(emitted["0"]) == 2
    assert net[0].emitted is None


def test_a_price_alone_lowers_levels() -> None:
    """Without any loss, the gradient leads to smaller currents and a larger step."""
    neuron, x = BurstNeuron(5), currents((2, 3, 40)).requires_grad_()
    with summing_levels(neuron) as emitted:
        neuron(x)
    emitted[""][0][0].backward()
    assert x.grad is not None
    assert (x.grad >= 0).all()
    assert neuron.rho.grad is not None
    assert neuron.rho.grad < 0


def test_set_bits_are_those_of_the_magnitude() -> None:
    level = torch.arange(-20, 21).double()
    expected = [bin(abs(k)).count("1") for k in range(-20, 21)]
    assert reference.set_bits(level, 20).tolist() == expected


@needs_library
def test_torch_compile_knows_the_operator() -> None:
    neuron, x = BurstNeuron(5), currents((2, 3, 40))
    compiled = torch.compile(neuron, backend="aot_eager")
    with summing_levels(neuron) as emitted:
        out = compiled(x)
        assert torch.equal(out, burst_sequence(x, neuron.constants(x), neuron.rule)[0])
        (emitted[""][0][0] + out.sum()).backward()
    assert neuron.rho.grad is not None
