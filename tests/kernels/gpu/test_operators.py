"""The fused kernels against the reference: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the fused kernels need triton")

from lbq import models
from lbq.cli import doctor
from lbq.kernels import memory, reference
from lbq.kernels.arguments import AT_REST, StateArguments, neuron_arguments
from lbq.kernels.differentiable import DifferentiableKernel
from lbq.kernels.gpu import launch, layout, operators
from lbq.kernels.gpu.tiles import bursts
from lbq.kernels.surrogate import SURROGATES
from lbq.models import fire
from lbq.native.choose import use
from lbq.neuron import ILIF, LIF, LMHT, MLF, BurstNeuron, LadderNeuron, ReLU, SpikingNeuron, Ternary
from tests.support.small_nets import ONE_BLOCK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEP = 0.37


@pytest.fixture(autouse=True)
def _fused_and_seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with use("fused"):
        yield


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, device=DEVICE)


def channels_last(x: Tensor) -> Tensor:
    """`[T, B, C, H, W]` whose timesteps are channels_last."""
    return x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])


def both_ways(
    run: Callable[[Tensor, SpikingNeuron], Tensor], neuron: SpikingNeuron, x: Tensor, grad: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and gradients of x and of every parameter (zero where autograd gave none)."""
    neuron.zero_grad()
    x = x.detach().requires_grad_()
    out = run(x, neuron)
    out.backward(grad)
    assert x.grad is not None
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in neuron.named_parameters()}
    return out.detach(), {"x": x.grad, **grads}


def by_reference(x: Tensor, neuron: SpikingNeuron) -> Tensor:
    return reference.burst_sequence(x, neuron.constants(x), neuron.rule)[0]


def by_kernel(x: Tensor, neuron: SpikingNeuron) -> Tensor:
    assert operators.supports(x, neuron.constants(x), neuron.rule)
    return operators.burst(x, neuron.constants(x), neuron.rule)


def assert_same(neuron: SpikingNeuron, x: Tensor, kinks: bool = False) -> None:
    """Outputs equal bit for bit; gradients as the reference's in float32, and as those in float64 where no input lies so
    near a kink that float64 has it on the other side."""
    neuron.to(DEVICE)
    grad = torch.randn(x.shape, device=DEVICE)
    expected, exact = both_ways(by_reference, neuron, x, grad)
    out, grads = both_ways(by_kernel, neuron, x, grad)
    assert torch.equal(out, expected)
    precise, truth = both_ways(by_reference, copy.deepcopy(neuron).double(), x.double(), grad.double())
    if kinks or not torch.equal(precise.float(), expected):
        truth = exact
    for name, value in grads.items():
        for right in (exact[name].double(), truth[name].double()):
            size = max(1.0, float(right.abs().max())) if right.numel() else 1.0
            torch.testing.assert_close(value.double(), right, rtol=2e-4, atol=2e-5 * size, msg=name)


def at_thresholds(n_max: int, step: float) -> Tensor:
    """Exact multiples of the step, the kinks of every surrogate, and their neighbours in float32."""
    places = torch.tensor([k * 0.5 for k in range(-3, min(2 * n_max + 4, 60))] + [n_max, n_max + 0.5, n_max - 0.5])
    exact = places * torch.tensor(step)
    up, down = (torch.nextafter(exact, torch.tensor(end)) for end in (9e9, -9e9))
    return torch.cat([exact, up, down]).to(DEVICE)


# The neuron alone


@pytest.mark.parametrize(
    ("timesteps", "n_max"),
    [*((t, 5) for t in (1, 2, 3, 4, 7, 10, 16)), *((3, n) for n in (1, 2, 10, 20, 255)), (1, 1), (16, 255)],
)
def test_sequences_of_every_length_and_number_of_levels(timesteps: int, n_max: int) -> None:
    neuron = BurstNeuron(n_max, step=STEP, learn_beta=True, learn_alpha=True)
    assert_same(neuron, randn(timesteps, 3, 5, scale=max(1.0, n_max * STEP / 2)))


@pytest.mark.parametrize("n_max", [1, 2, 5, 10, 20, 255])
@pytest.mark.parametrize("step", [0.4, 0.3, 1 / 3, 0.036])
def test_levels_at_thresholds_and_beside_them(n_max: int, step: float) -> None:
    """A product with 1 / step would give another level here; one sequence of one step, and one with history."""
    x = at_thresholds(n_max, step)
    neuron = BurstNeuron(n_max, step=step, learn_step=False).to(DEVICE)
    assert_same(neuron, x[None, None], kinks=True)
    assert_same(neuron, torch.stack([x, x.roll(1), x.flip(0)])[:, None], kinks=True)


@pytest.mark.parametrize("surrogate", sorted(SURROGATES))
@pytest.mark.parametrize(
    "make",
    [
        lambda s: BurstNeuron(4, step=STEP, surrogate=s),
        lambda s: BurstNeuron(4, step=STEP, surrogate=s, reset_grad=False, learn_alpha=True),
        lambda s: LIF(threshold=0.7, surrogate=s, learn_beta=True),
        lambda s: Ternary(step=STEP, learn_step=True, surrogate=s),
        lambda s: Ternary(step=STEP, learn_step=True, surrogate=s, rule="half"),
        lambda s: ILIF(3, step=STEP, learn_step=True, surrogate=s),
        lambda s: LIF(membrane="plif", surrogate=s),
        lambda s: LIF(membrane="if", surrogate=s),
    ],
    ids=["burst", "no_reset_grad", "lif", "ternary", "ternary_half", "ilif", "plif", "if"],
)
def test_every_neuron_with_every_surrogate(make: Callable[[str], SpikingNeuron], surrogate: str) -> None:
    neuron = make(surrogate)
    x = torch.cat([randn(3, 2, 50, scale=2.0), at_thresholds(4, STEP)[:50].expand(3, 2, 50)], dim=2)
    assert_same(neuron, x, kinks=True)


def test_gradients_where_the_rule_is_none_of_the_neurons() -> None:
    """Combinations that only `Rule` allows: hard reset with a learned alpha, delayed reset of whole levels, cut state."""
    neuron = BurstNeuron(3, step=STEP, learn_alpha=True, learn_beta=True, alpha=0.6)
    for rule in (
        reference.Rule(3, neuron.surrogate, reset="hard"),
        reference.Rule(3, neuron.surrogate, reset="level", decay_reset=False),
        reference.Rule(3, neuron.surrogate, rounding="half", reset="level", detach_state=True),
        reference.Rule(3, neuron.surrogate, rounding="strict", decay_reset=False, reset_grad=False),
    ):
        neuron.rule = rule
        assert_same(neuron, randn(4, 2, 40, scale=1.5))


@pytest.mark.parametrize(
    "shape", [(2, 3), (2, 0), (0, 3), (1, 1), (3, 1, 1), (2, 3, 5), (2, 3, 5, 7), (2, 2, 6, 3, 3), (2, 1, 129, 1, 9)]
)
def test_shapes(shape: tuple[int, ...]) -> None:
    assert_same(BurstNeuron(step=STEP), randn(*shape))


@pytest.mark.parametrize("channels", [None, 6])
@pytest.mark.parametrize(
    "lay",
    [
        lambda x: x,
        channels_last,
        lambda x: x[:, :, :, ::2],
        lambda x: x[::2],
        lambda x: x.transpose(3, 4),
        lambda x: channels_last(x)[:, 1:],
        lambda x: x[:1].expand(3, *x.shape[1:]),
        lambda x: channels_last(x)[:, :, :, :1],
    ],
    ids=["contiguous", "channels_last", "sliced", "every_second", "transposed", "narrowed", "repeated", "thin"],
)
def test_layouts(lay: Callable[[Tensor], Tensor], channels: int | None) -> None:
    x = lay(randn(4, 3, 6, 4, 5))
    neuron = BurstNeuron(step=STEP, channels=channels).to(DEVICE)
    if channels:
        with torch.no_grad():
            neuron.rho.uniform_(-2, 0)
    assert_same(neuron, x)


def test_dense_layouts_are_kept_and_none_is_copied() -> None:
    """A timestep's memory order goes through; gradients in another order are brought into it."""
    x = channels_last(randn(2, 3, 4, 5, 5))
    neuron = BurstNeuron().to(DEVICE)
    assert memory.settled(x) is x
    assert neuron(x).stride() == x.stride()
    repeated = x[:1].expand(2, *x.shape[1:])
    assert memory.settled(repeated) is repeated
    assert_same(neuron, x)  # with a contiguous gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    neuron, x = BurstNeuron(step=STEP).to(DEVICE), randn(3, 4, 33).to(dtype)
    grad = torch.randn_like(x)
    expected, exact = both_ways(by_reference, neuron, x, grad)
    out, grads = both_ways(by_kernel, neuron, x, grad)
    assert out.dtype == dtype
    if DEVICE == "cuda":
        assert torch.equal(out, expected)
    else:  # the interpreter cuts bfloat16 off where the GPU rounds
        assert torch.equal((out / STEP).round(), (expected / STEP).round())
    torch.testing.assert_close(grads["x"], exact["x"], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(grads["rho"], exact["rho"], rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("make", [BurstNeuron, LIF, Ternary, lambda: ILIF(3)])
def test_nan_and_infinity(make: Callable[[], SpikingNeuron]) -> None:
    neuron = make().to(DEVICE)
    x = randn(2, 1, 6)
    x[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])
    assert torch.equal(by_kernel(x, neuron).isnan(), by_reference(x, neuron).isnan())
    out, expected = by_kernel(x, neuron).nan_to_num(77.0), by_reference(x, neuron).nan_to_num(77.0)
    assert torch.equal(out, expected)
    _, grads = both_ways(by_kernel, BurstNeuron().to(DEVICE), x[..., :1], torch.ones_like(x[..., :1]))
    assert grads["x"].isnan().any()


def test_same_bytes_every_time() -> None:
    neuron, x = BurstNeuron().to(DEVICE), randn(2, 9, 700)
    grad = torch.randn_like(x)
    first, second = (both_ways(by_kernel, neuron, x, grad) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][n], second[1][n]) for n in first[1])


def test_a_second_derivative_is_refused() -> None:
    neuron, x = BurstNeuron().to(DEVICE), randn(2, 2, 3).requires_grad_()
    (grad,) = torch.autograd.grad(by_kernel(x, neuron).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_no_gradients_that_nobody_asked_for() -> None:
    neuron, x = BurstNeuron(learn_step=False, learn_tail=False).to(DEVICE), randn(2, 2, 5).requires_grad_()
    by_kernel(x, neuron).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not by_kernel(x, neuron).requires_grad


# With BatchNorm and a residual


def norm_of(channels: int, training: bool = True) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.3).to(DEVICE).train(training)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.weight[0] = 0
        norm.bias.normal_()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return norm


def assert_same_block(
    neuron: SpikingNeuron, norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None, timesteps: int | None
) -> None:
    """`fire` in one pass against its parts: outputs, gradients, running statistics."""
    seen = []
    for kernel in ("reference", "fused"):
        ours, theirs = copy.deepcopy(norm), copy.deepcopy(neuron).to(DEVICE)
        inputs = [None if v is None else v.detach().clone(memory_format=torch.preserve_format) for v in (x, residual)]
        for v in inputs:
            if v is not None:
                v.requires_grad_()
        torch.manual_seed(1)
        with use(kernel):
            assert inputs[0] is not None
            assert theirs.fuses(inputs[0].flatten(0, -4), ours, timesteps or x.shape[0]) == (kernel == "fused")
            out = fire(inputs[0], nn.Identity(), ours, theirs, residual=inputs[1], timesteps=timesteps)
            out.backward(torch.randn(out.shape, device=DEVICE))
        grads = {n: p.grad for n, p in [*ours.named_parameters(prefix="norm"), *theirs.named_parameters()]}
        state = dict(ours.state_dict())
        seen.append({"out": out.detach(), "x": inputs[0].grad, **state, **grads})
        if inputs[1] is not None:
            seen[-1]["residual"] = inputs[1].grad
    expected, found = seen
    # a level may differ where rounding decides; inputs are chosen so that none does
    assert torch.equal(found["out"], expected["out"])
    for name, value in expected.items():
        size = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4 * size, msg=name)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", ["plain", "residual", "other_order", "shown", "per_channel", "one_step", "lif"])
def test_batchnorm_add_and_neuron_in_one_pass(case: str, layout: str, training: bool) -> None:
    channels = 6
    neuron: SpikingNeuron = BurstNeuron(step=STEP, channels=channels if case == "per_channel" else None)
    if case == "lif":
        neuron = LIF(membrane="plif")
    timesteps = 1 if case == "one_step" else 3
    x = randn(timesteps, 4, channels, 3, 5)
    x += 5 * torch.arange(channels, device=DEVICE)[:, None, None]  # means far from 0
    residual = None
    if case in ("residual", "other_order", "one_step"):
        residual = randn(*x.shape)
    if layout == "channels_last":
        x = channels_last(x)
        residual = channels_last(residual) if residual is not None and case != "other_order" else residual
    if case == "shown":
        assert_same_block(neuron, norm_of(channels, training), x[0], None, timesteps=3)
    else:
        assert_same_block(neuron, norm_of(channels, training), x, residual, None)


@pytest.mark.parametrize(
    ("shape", "centre"),
    [
        *((shape, 1e4) for shape in [(1, 1, 1, 1), (3, 1, 5, 5), (260, 130, 1, 1), (24, 3, 9, 9)]),
        ((3, 1, 5, 5), 0),
        ((2, 140, 2, 2), 0),
    ],
)
def test_statistics(shape: tuple[int, ...], centre: float) -> None:
    """float32 has seven digits: sums of squares about 0 would leave none of a variance of 1 at a mean of 10^4."""
    x = randn(*shape) + centre
    for laid in (x, x.contiguous(memory_format=torch.channels_last), x[:, :, ::2]):
        mean, var = torch.ops.lbq.moments(laid)
        torch.testing.assert_close(mean.double(), laid.double().mean((0, 2, 3)), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(var.double(), laid.double().var((0, 2, 3), unbiased=False), rtol=1e-3, atol=1e-5)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    for name in ("burst", "norm_burst"):
        original = getattr(operators, name)

        def note(*arguments: Any, _name: str = name, _original: Any = original) -> Tensor:
            calls.append(_name)
            out: Tensor = _original(*arguments)
            return out

        monkeypatch.setattr(operators, name, note)
    return calls


def test_a_network_uses_it_wherever_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch)
    net = models.create(ONE_BLOCK, timesteps=2, in_channels=1).to(DEVICE)
    net(randn(4, 1, 8, 8))
    assert calls == ["norm_burst"] * 3


class Louder(nn.BatchNorm2d):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda norm, neuron: norm.register_forward_hook(lambda *a: None),
        lambda norm, neuron: norm.register_full_backward_hook(lambda *a: None),
        lambda norm, neuron: neuron.register_forward_pre_hook(lambda *a: None),
        lambda norm, neuron: setattr(norm, "momentum", None),
        lambda norm, neuron: setattr(norm, "__class__", Louder),
    ],
    ids=["hook", "backward_hook", "pre_hook", "cumulative", "subclass"],
)
def test_what_it_would_not_honour_keeps_the_modules_apart(
    change: Callable[[nn.Module, nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch)
    norm, neuron, x = norm_of(4), BurstNeuron().to(DEVICE), randn(2, 3, 4, 2, 2)
    change(norm, neuron)
    out = fire(x, nn.Identity(), norm, neuron)
    assert calls == ["burst"]
    assert out.shape == x.shape


def test_a_residual_that_broadcasts_or_promotes_and_levels_beyond_the_kernel_are_left_to_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = count_calls(monkeypatch)
    x, residual = randn(2, 3, 4, 2, 2), randn(3, 4, 2, 2)
    fire(x, nn.Identity(), norm_of(4), BurstNeuron().to(DEVICE), residual=residual)
    assert calls == ["burst"]
    out = fire(x.bfloat16(), nn.Identity(), norm_of(4), BurstNeuron().to(DEVICE), residual=randn(2, 3, 4, 2, 2))
    assert calls == ["burst", "burst"]
    assert out.dtype == torch.float32  # as the sum of both has it
    calls.clear()
    fire(x, nn.Identity(), norm_of(4), BurstNeuron(2**21, step=1.0).to(DEVICE))
    assert calls == []


def test_features_without_height_and_width() -> None:
    """A linear layer and BatchNorm1d, spatial=1: in one pass, and as its parts."""
    torch.manual_seed(2)
    linear, norm = nn.Linear(5, 4).to(DEVICE), nn.BatchNorm1d(4).to(DEVICE)
    x, seen = randn(2, 6, 5), []
    for kernel in ("reference", "fused"):
        ours, neuron = copy.deepcopy(norm), BurstNeuron().to(DEVICE)
        with use(kernel):
            out = fire(x, linear, ours, neuron, spatial=1)
        (grad,) = torch.autograd.grad(out.square().sum(), neuron.rho)
        seen.append((out, grad, ours.running_mean))
    for found, expected in zip(*seen, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["fused", "reference"])
def test_layers_that_change_the_number_of_dimensions(kernel: str) -> None:
    """What has time is said by the input and `spatial`, not by what a layer makes of it."""
    flatten = nn.Sequential(nn.Flatten(), nn.Linear(16, 5)).to(DEVICE)
    unflatten = nn.Sequential(nn.Linear(16, 6), nn.Unflatten(1, (3, 2))).to(DEVICE)
    with use(kernel):
        grey = fire(randn(4, 1, 4, 4), flatten, nn.BatchNorm1d(5).to(DEVICE), BurstNeuron().to(DEVICE), timesteps=2)
        moving = fire(randn(2, 4, 1, 4, 4), flatten, nn.BatchNorm1d(5).to(DEVICE), BurstNeuron().to(DEVICE))
        signal = fire(randn(2, 4, 16), unflatten, nn.BatchNorm1d(3).to(DEVICE), BurstNeuron().to(DEVICE), spatial=1)
    assert grey.shape == moving.shape == (2, 4, 5)
    assert signal.shape == (2, 4, 3, 2)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (nn.BatchNorm2d(3), "running_mean should contain 4 elements not 3"),
        (nn.BatchNorm2d(5), "running_mean should contain 4 elements not 5"),
        (nn.BatchNorm1d(4), "expected 2D or 3D input"),
        (nn.BatchNorm3d(4), "expected 5D input"),
    ],
    ids=["narrow", "wide", "1d", "3d"],
)
def test_a_batchnorm_that_does_not_fit_is_refused_as_it_refuses_itself(norm: nn.Module, message: str) -> None:
    for neuron in (BurstNeuron(), ReLU()):
        with pytest.raises((RuntimeError, ValueError), match=message):
            fire(randn(2, 3, 4, 2, 2), nn.Identity(), norm.to(DEVICE), neuron.to(DEVICE))


def test_a_hook_on_the_neuron_sees_the_output() -> None:
    seen: list[Tensor] = []
    norm, neuron, x = norm_of(4), BurstNeuron().to(DEVICE), randn(2, 3, 4, 2, 2)
    neuron.register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert fire(x, nn.Identity(), norm, neuron) is seen[0]


def test_one_value_per_channel_is_refused_as_batchnorm_refuses_it() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fire(randn(1, 1, 4, 1, 1), nn.Identity(), norm_of(4), BurstNeuron().to(DEVICE))


@pytest.mark.parametrize("case", ["plain", "residual", "shown", "frozen"])
def test_relu_after_batchnorm_in_one_pass(case: str) -> None:
    seen = []
    x = channels_last(randn(2, 4, 6, 3, 3))
    x[0, 0, 0, 0, 0] = float("nan") if case == "frozen" else 0.0
    for kernel in ("reference", "fused"):
        torch.manual_seed(1)
        norm, relu = norm_of(6, training=case != "frozen"), ReLU().to(DEVICE)
        ours = (x[0] if case == "shown" else x).detach().clone(memory_format=torch.preserve_format).requires_grad_()
        other = randn(*x.shape).requires_grad_() if case == "residual" else None
        with use(kernel):
            assert relu.fuses(ours.flatten(0, -4), norm, 2) == (kernel == "fused")
            out = fire(ours, nn.Identity(), norm, relu, residual=other, timesteps=2)
            torch.manual_seed(2)
            out.backward(torch.randn(out.shape, device=DEVICE))
        values = [out.detach(), ours.grad, norm.weight.grad, norm.bias.grad, *norm.buffers()]
        seen.append(values if other is None else [*values, other.grad])
    for expected, found in zip(*seen, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("neuron", ["lbq", "lif", "ilif", "lmht", "qann", "relu"])
def test_channels_last_stays_channels_last_both_ways(neuron: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient is laid out anew on its way back: copies that no result shows, and that cost half of the speed."""
    kept = []
    original = memory.ordered_like

    def watch(y: Tensor, x: Tensor) -> Tensor:
        out = original(y, x)
        kept.append(out is y)
        return out

    monkeypatch.setattr(launch, "ordered_like", watch)
    steps = 1 if neuron in ("qann", "relu") else 2
    net = models.create(ONE_BLOCK, timesteps=steps, neuron=neuron, in_channels=1).to(DEVICE)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net(randn(2, 1, 8, 8).contiguous(memory_format=torch.channels_last)).sum().backward()
    assert kept
    assert kept.count(False) <= 1  # the pooled features' gradient, which is spread over the image


@pytest.mark.parametrize("neuron", ["lbq", "lif", "ternary", "ilif", "lmht", "mlf", "ladder", "qann", "relu"])
def test_networks_train_alike(neuron: str) -> None:
    """Loss and gradients of a network in float32 under both kernels; what the fused kernel cannot do falls back.

    Every parameter has a gradient, if only zeros: several processes wait for all of them.
    """
    losses, grads = [], []
    for kernel in ("reference", "fused"):
        torch.manual_seed(3)
        net = models.create(ONE_BLOCK, timesteps=2, neuron=neuron, in_channels=1).to(DEVICE)
        x, labels = randn(6, 1, 8, 8), torch.arange(6, device=DEVICE)
        with use(kernel):
            loss = nn.functional.cross_entropy(net(x), labels)
        loss.backward()
        losses.append(loss.detach())
        assert all(p.grad is not None for p in net.parameters())
        grads.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-3)
    assert nn.functional.cosine_similarity(grads[0], grads[1], dim=0) > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    """Convolutions in half precision, neurons in float32: outputs are step * level in the convolution's dtype."""
    conv, norm, neuron = nn.Conv2d(2, 4, 3).to(DEVICE), norm_of(4), BurstNeuron(step=0.5, learn_step=False).to(DEVICE)
    with torch.autocast(DEVICE, dtype=dtype):
        out = fire(randn(3, 2, 2, 5, 5), conv, norm, neuron)
    assert out.dtype == dtype
    assert torch.equal(out * 2, (out * 2).round())
    out.float().sum().backward()
    assert conv.weight.grad is not None
    assert conv.weight.grad.dtype == torch.float32
    assert conv.weight.grad.isfinite().all()


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
