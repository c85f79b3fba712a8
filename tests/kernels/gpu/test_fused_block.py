"""BatchNorm, residual and neuron in one pass, against the modules one after another; and networks that use it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the fused kernels need triton")

from lbq import models
from lbq.kernels import memory
from lbq.kernels.gpu import launch, operators
from lbq.models import fire
from lbq.native.choose import use
from lbq.neuron import LIF, BurstNeuron, ReLU, SpikingNeuron
from tests.support.fused import DEVICE, STEP, channels_last, randn
from tests.support.small_nets import ONE_BLOCK


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
