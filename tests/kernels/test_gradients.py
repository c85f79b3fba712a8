"""Gradients of the neuron, in float64, against the frozen form.

The forward pass is piecewise constant, so plain gradcheck fails on it. Freezing the rounding offset c = S - B(r) and
the reset's indicator at the point gives the smooth function gamma * [B(r) + c], unrolled over time, that Eq. ste_level
differentiates; its gradients must be the neuron's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lbq import BurstNeuron
from lbq.kernels.reference import Constants, Rule, burst_levels, burst_sequence
from lbq.kernels.surrogate import SURROGATES
from lbq.neuron import LIF, LMHT, MLF, LadderNeuron, QuantReLU
from tests.support import oracle

Frozen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def normalised(x: Tensor, step: Tensor, beta: Tensor, alpha: Tensor, n_max: int) -> Tensor:
    _, membranes = oracle.burst_loop(x.numpy(), step.item(), n_max, beta.item(), alpha.item())
    return torch.from_numpy(membranes) / step


def case(timesteps: int, n_max: int, seed: int) -> tuple[Tensor, ...]:
    """Currents and constants whose membranes keep away from the kinks r = 1 and r = n_max, in all three regions."""
    generator = torch.Generator().manual_seed(seed)
    step, tail, beta, alpha = (torch.tensor(v, dtype=torch.float64) for v in (0.37, 0.3, 0.6, 0.8))
    while True:
        x = torch.randn(timesteps, 2, 6, generator=generator, dtype=torch.float64) * step * n_max
        r = normalised(x, step, beta, alpha, n_max)
        covered = (r < 1).any() and (r > n_max).any() and (n_max == 1 or ((r > 1) & (r < n_max)).any())
        if covered and min((r - 1).abs().min(), (r - n_max).abs().min()) > 1e-3:
            return x, step, tail, beta, alpha


def frozen_form(
    point: tuple[Tensor, ...], n_max: int, surrogate: Callable[[Tensor, int, Tensor], Tensor]
) -> tuple[Frozen, Tensor]:
    """gamma * [B(r) + c] over time, with c and [S > 0] held at `point`; also r at the point."""
    x, step, tail, beta, alpha = point
    levels, membranes = oracle.burst_loop(x.numpy(), step.item(), n_max, beta.item(), alpha.item())
    level = torch.from_numpy(levels).double()
    r0 = torch.from_numpy(membranes) / step
    offset = level - surrogate(r0, n_max, tail)
    fired = (level > 0).double()

    def frozen(x: Tensor, step: Tensor, tail: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
        v = torch.zeros_like(x[0])
        out = []
        for t in range(x.shape[0]):
            u = beta * v + x[t]
            out.append(step * (surrogate(u / step, n_max, tail) + offset[t]))
            v = u - alpha * step * fired[t]
        return torch.stack(out)

    return frozen, r0


def gradients(output: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    return torch.autograd.grad((output * weights).sum(), inputs, allow_unused=True, materialize_grads=True)


def assert_gradients_are_the_frozen_forms(inputs: tuple[Tensor, ...], n_max: int, frozen: Frozen, name: str) -> None:
    """For U, gamma, lambda, beta and alpha, through time."""
    x, step, tail, beta, alpha = inputs
    out, _ = burst_sequence(x, Constants(step, tail, beta, alpha), Rule(n_max, SURROGATES[name]))
    expected = frozen(*inputs)
    torch.testing.assert_close(out, expected)
    names = ("x", "gamma", "lambda", "beta", "alpha")
    for label, ours, theirs in zip(names, gradients(out, inputs), gradients(expected, inputs), strict=True):
        trained = label != "lambda" or SURROGATES[name].tail == "learned"
        torch.testing.assert_close(ours, theirs if trained else 0 * theirs, rtol=1e-9, atol=1e-9, msg=label)


@pytest.mark.parametrize("timesteps", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("n_max", [1, 2, 5, 10, 20, 255])
def test_gradients_equal_the_frozen_form(timesteps: int, n_max: int) -> None:
    point = case(timesteps, n_max, seed=100 * timesteps + n_max)
    frozen, _ = frozen_form(point, n_max, oracle.relsg_et)
    inputs = tuple(p.clone().requires_grad_() for p in point)
    if timesteps <= 4:
        torch.autograd.gradcheck(frozen, inputs, eps=1e-7, atol=1e-5)
    assert_gradients_are_the_frozen_forms(inputs, n_max, frozen, "relsg_et")


def test_module_gradients_chain_through_softplus_and_sigmoid() -> None:
    """rho and eta receive the core's gradients times softplus' and sigmoid'."""
    x, step, tail, beta, alpha = case(3, 5, seed=7)
    neuron = BurstNeuron(5, step.item(), tail=tail.item(), learn_beta=True, learn_alpha=True).double()
    with torch.no_grad():  # the module was built in float32
        neuron.rho.copy_(torch.log(torch.expm1(step - 1e-6)))
        neuron.eta.copy_(torch.logit(tail))
        neuron.beta.copy_(beta)
        neuron.alpha.copy_(alpha)
    frozen, _ = frozen_form((x, step, tail, beta, alpha), 5, oracle.relsg_et)
    inputs = tuple(p.clone().requires_grad_() for p in (x, step, tail, beta, alpha))
    g_x, g_step, g_tail, g_beta, g_alpha = gradients(frozen(*inputs), inputs)
    x_ = x.clone().requires_grad_()
    ours = gradients(neuron(x_), (x_, neuron.rho, neuron.eta, neuron.beta, neuron.alpha))
    expected = (g_x, g_step * torch.sigmoid(neuron.rho), g_tail * tail * (1 - tail), g_beta, g_alpha)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_every_surrogate_reaches_the_neuron(name: str) -> None:
    point = case(3, 5, seed=11)
    frozen, r = frozen_form(point, 5, SURROGATES[name].level)
    assert ((r - 0.5) % 1 - 0.5).abs().min() > 1e-6  # off the other surrogates' kinks too
    inputs = tuple(p.clone().requires_grad_() for p in point)
    assert_gradients_are_the_frozen_forms(inputs, 5, frozen, name)


def test_scale_gradient_in_the_middle() -> None:
    """Eq. scale_grad_middle: dS_fwd/dgamma = S - r where 1 <= r <= n_max."""
    step = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    r = torch.tensor([1.0, 1.25, 2.0, 3.7, 4.999, 5.0], dtype=torch.float64)
    for value in r:
        u = (value * step.detach()).reshape(1, 1)
        constants = Constants(step, torch.tensor(0.5, dtype=torch.float64), 0.5, 1.0)
        out, _ = burst_sequence(u, constants, Rule(5, SURROGATES["relsg_et"]))
        (grad,) = torch.autograd.grad(out.sum(), step)
        exact_r = u.item() / step.item()
        level = burst_levels(u, constants, Rule(5, SURROGATES["relsg_et"])).item()
        assert grad.item() == pytest.approx(level - exact_r, abs=1e-12)


def test_membrane_gradient_is_eq_surrogate_grad() -> None:
    """dS_fwd/dU = B'(r): 1 on the plateau, lambda e^(r-1) below, lambda e^(n_max-r) above."""
    step, tail = torch.tensor(0.4, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    r = torch.tensor([[-2.0, 0.5, 1.0, 3.3, 5.0, 6.5]], dtype=torch.float64)
    u = (r * step).requires_grad_()
    out, _ = burst_sequence(u, Constants(step, tail, 0.5, 1.0), Rule(5, SURROGATES["relsg_et"]))
    (grad,) = torch.autograd.grad(out.sum(), u)
    low, high = 0.3 * torch.exp(r - 1), 0.3 * torch.exp(5 - r)
    expected = torch.where(r < 1, low, torch.where(r > 5, high, torch.ones_like(r)))
    torch.testing.assert_close(grad, expected)


def test_lsq_scales_the_step_gradient_alone() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 5, 5)
    grads: dict[str, Any] = {}
    for kind in ("sum", "lsq"):
        neuron = BurstNeuron(step_gradient=kind)
        x_ = x.clone().requires_grad_()
        grads[kind] = gradients(neuron(x_), (x_, neuron.rho, neuron.eta))
    assert torch.equal(grads["sum"][0], grads["lsq"][0])
    torch.testing.assert_close(grads["lsq"][1], grads["sum"][1] / (100 * 5) ** 0.5)
    torch.testing.assert_close(grads["lsq"][2], grads["sum"][2])
    channel = BurstNeuron(step_gradient="lsq", channels=4)
    plain = BurstNeuron(channels=4)
    (scaled,), (summed,) = gradients(channel(x), (channel.rho,)), gradients(plain(x), (plain.rho,))
    torch.testing.assert_close(scaled, summed / (25 * 5) ** 0.5)


def test_ladder_gradient_follows_its_coordinate() -> None:
    """In the interval between thresholds i and i+1 the slope is scale * B' / spacing."""
    neuron = LadderNeuron([1.0, 1.5, 4.0], scale=1.0, surrogate="relsg_et").double()
    x = torch.tensor([[1.2, 2.0, 3.9]], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(neuron(x).sum(), x)
    torch.testing.assert_close(grad, torch.tensor([[2.0, 0.4, 0.4]], dtype=torch.float64))


def test_lif_gradient_is_arctans_over_the_threshold() -> None:
    neuron = LIF(threshold=0.5).double()
    x = torch.tensor([[0.2, 0.5, 0.9]], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(neuron(x).sum(), x)
    expected = 1 / (1 + (torch.pi * (x.detach() / 0.5 - 1)) ** 2) / 0.5
    torch.testing.assert_close(grad, expected)


def test_quantised_relu_is_lsq() -> None:
    neuron = QuantReLU(4, 0.5).double()
    x = torch.tensor([[-0.3, 0.2, 0.3, 1.6, 2.6]], dtype=torch.float64)[..., None].requires_grad_()
    out = neuron(x)
    torch.testing.assert_close(out.flatten().detach(), torch.tensor([0, 0, 0.5, 1.5, 2.0], dtype=torch.float64))
    g_x, g_rho = gradients(out, (x, neuron.rho))
    weights = torch.linspace(-1, 2, 5, dtype=torch.float64)
    assert torch.equal(g_x.flatten(), weights * torch.tensor([0, 1, 1, 1, 0]))
    r = x.detach().flatten() / neuron.step.detach()
    per_element = torch.tensor([0, 0, 1, 3, 4]) - r * torch.tensor([0, 1, 1, 1, 0])
    expected = (weights * per_element).sum() * torch.sigmoid(neuron.rho.detach()) / (1 * 4) ** 0.5
    torch.testing.assert_close(g_rho, expected)
    plain = QuantReLU(4, 0.5, step_gradient="sum").double()
    torch.testing.assert_close(gradients(plain(x), (plain.rho,))[0], expected * (1 * 4) ** 0.5)


RULES = {
    "lif": Rule(1, SURROGATES["arctan"], rounding="strict", decay_reset=False),
    "delayed, levels": Rule(4, SURROGATES["relsg_et"], reset="level", decay_reset=False),
    "level reset": Rule(4, SURROGATES["sigmoid"], rounding="round", reset="level"),
    "hard reset": Rule(1, SURROGATES["triangle"], rounding="half", reset="hard"),
    "ternary": Rule(1, SURROGATES["sigmoid"], rounding="trunc"),
    "detached state": Rule(4, SURROGATES["sigmoid"], reset="level", reset_grad=False, detach_state=True),
}


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_through_time(name: str) -> None:
    """The frozen form of the other neurons' resets and roundings: levels constant, gradients through the membrane."""
    rule = RULES[name]
    generator = torch.Generator().manual_seed(17)
    x0 = torch.randn(4, 2, 7, generator=generator, dtype=torch.float64) * 1.5
    step0, tail0, beta0, alpha0 = (torch.tensor(v, dtype=torch.float64) for v in (0.7, 0.3, 0.6, 0.8))
    inputs = tuple(v.clone().requires_grad_() for v in (x0, step0, tail0, beta0, alpha0))
    x, step, tail, beta, alpha = inputs
    out, _ = burst_sequence(x, Constants(step, tail, beta, alpha), rule)
    levels = burst_levels(x0, Constants(step0, tail0, beta0, alpha0), rule)
    assert levels.abs().sum() > 0

    v, pending = torch.zeros_like(x0[0]), torch.zeros_like(x0[0])
    expected = []
    for t in range(4):
        u = beta * (v.detach() if rule.detach_state else v) + x[t] - pending
        r = u / step
        b = rule.surrogate.level(r.abs() if rule.signed else r, rule.n_max, tail)
        b = r.sign() * b if rule.signed else b
        expected.append(step * (b + (levels[t] - b).detach()))
        drop = alpha * step * (levels[t] if rule.reset == "level" else levels[t].sign())
        drop = drop if rule.reset_grad else drop.detach()
        if rule.reset == "hard":
            v = u * (1 - alpha * levels[t].abs())
        elif rule.decay_reset:
            v = u - drop
        else:
            v, pending = u, drop
    ours, theirs = gradients(out, inputs), gradients(torch.stack(expected), inputs)
    for label, a, e in zip(("x", "gamma", "lambda", "beta", "alpha"), ours, theirs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9, msg=f"{name}, {label}: {a} {e}")


def test_lmht_cuts_gradients_through_its_membrane() -> None:
    neuron = LMHT(2).double()
    with torch.no_grad():  # hardly any mixing: what could remain is the membrane
        neuron.mixing.copy_(torch.tensor([[9.0, -50.0], [-50.0, 9.0]]))
    x = torch.full((2, 1), 0.9, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(neuron(x)[1].sum(), x)
    assert grad[0].abs().item() < 1e-15
    assert grad[1].item() == pytest.approx(torch.sigmoid(torch.tensor(9.0)).item())


def test_mlf_gradient_through_its_membranes() -> None:
    """Two membranes, thresholds 0.6 and 1.6, rectangle of width 1: by hand for x = (0.5, 0.9)."""
    neuron = MLF(n_max=2).double()
    x = torch.tensor([[0.5], [0.9]], dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(neuron(x)[1].sum(), x)
    # nothing fired at first, so U = 0.25 * 0.5 + 0.9 = 1.025: within 1/2 of 0.6, not of 1.6
    torch.testing.assert_close(grad, torch.tensor([[0.25], [1.0]], dtype=torch.float64))
