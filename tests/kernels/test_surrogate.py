"""Each surrogate is a pair B, B': B' must be the derivative of B, and ReLSG-ET must be the paper's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lbq.errors import ConfigError
from lbq.kernels import surrogate
from lbq.kernels.surrogate import SURROGATES
from lbq.neuron import LIF, BurstNeuron, Ternary
from tests.support import oracle

TAIL = torch.tensor(0.3, dtype=torch.float64)


def slope_of(name: str, r: Tensor, n_max: int, tail: Tensor = TAIL) -> Tensor:
    found = SURROGATES[name].slope
    assert found is not None
    return found(r, n_max, tail)


def kinks_of(name: str, n_max: int) -> list[float]:
    """Where B' jumps or bends."""
    kinks: dict[str, list[float]] = {
        "relsg_et": [1, n_max],
        "box": [0.5, n_max + 0.5],
        "box_et": [0.5, n_max + 0.5],
        "clip": [0, n_max],
        "rectangular": [k + 0.5 for k in range(n_max + 1)],
        "triangle": [float(k) for k in range(n_max + 2)],
    }
    return kinks.get(name, [])


def away_from_kinks(name: str, n_max: int, count: int = 400) -> torch.Tensor:
    r = torch.linspace(-3, n_max + 4, count, dtype=torch.float64)
    for kink in kinks_of(name, n_max):
        r = r[(r - kink).abs() > 1e-3]
    return r


@pytest.mark.parametrize("n_max", [1, 2, 5, 20])
@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_slope_is_the_derivative(name: str, n_max: int) -> None:
    s = SURROGATES[name]
    few = away_from_kinks(name, n_max, 60).requires_grad_()
    torch.autograd.gradcheck(lambda r: s.level(r, n_max, TAIL), (few,), eps=1e-6, atol=1e-7)
    r = away_from_kinks(name, n_max).requires_grad_()
    (grad,) = torch.autograd.grad(s.level(r, n_max, TAIL).sum(), r)
    torch.testing.assert_close(slope_of(name, r.detach(), n_max), grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n_max", [1, 5])
def test_tail_slope_is_the_derivative_by_the_tail(n_max: int) -> None:
    for s in SURROGATES.values():
        if s.tail_slope is None:
            continue
        tail = torch.full((400,), 0.3, dtype=torch.float64, requires_grad=True)
        r = torch.linspace(-3, n_max + 4, 400, dtype=torch.float64)
        (grad,) = torch.autograd.grad(s.level(r, n_max, tail).sum(), tail)
        torch.testing.assert_close(s.tail_slope(r, n_max, TAIL), grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_max", [1, 2, 5, 255])
def test_relsg_et_is_the_papers(n_max: int) -> None:
    r = torch.linspace(-4, n_max + 4, 1001, dtype=torch.float64)
    torch.testing.assert_close(surrogate.relsg_et(r, n_max, TAIL), oracle.relsg_et(r, n_max, TAIL))
    slope = surrogate.relsg_et_slope(r, n_max, TAIL)
    inside = (r >= 1) & (r <= n_max)
    assert (slope[inside] == 1).all()
    assert (slope[~inside] < TAIL + 1e-12).all()
    assert (slope > 0).all()  # no dead zone anywhere, unlike a box


def test_relsg_et_is_finite_far_from_the_range() -> None:
    r = torch.tensor([-1e30, 1e30, -torch.inf, torch.inf])
    tail = torch.tensor(0.5)
    assert surrogate.relsg_et(r, 5, tail).isfinite().all()
    assert torch.equal(surrogate.relsg_et_slope(r, 5, tail), torch.zeros(4))


def test_box_has_hard_edges_and_box_et_has_tails() -> None:
    r = torch.tensor([0.49, 0.5, 3.0, 5.5, 5.51])
    assert slope_of("box", r, 5).tolist() == [0, 1, 1, 1, 0]
    tails = slope_of("box_et", torch.tensor([-0.5, 6.5]), 5, torch.tensor(0.5))
    torch.testing.assert_close(tails, torch.full((2,), 0.5 / torch.e))


@pytest.mark.parametrize("n_max", [1, 3, 5])
def test_rectangles_of_all_thresholds_tile_the_box(n_max: int) -> None:
    r = torch.linspace(-2, n_max + 3, 333, dtype=torch.float64)
    torch.testing.assert_close(SURROGATES["rectangular"].level(r, n_max, TAIL), SURROGATES["box"].level(r, n_max, TAIL))
    seams = torch.arange(n_max + 1) + 0.5
    assert (slope_of("rectangular", seams[:-1], n_max) == 1).all()


@pytest.mark.parametrize("name", sorted(set(SURROGATES) - {"clip"}))
def test_single_threshold_surrogates_peak_or_plateau_at_one(name: str) -> None:
    at = slope_of(name, torch.tensor([1.0]), 1, torch.tensor(0.5)).item()
    assert at == pytest.approx(1.0)


@pytest.mark.parametrize("name", SURROGATES)
def test_nan_has_no_slope(name: str) -> None:
    """It must not look like a number to what follows; a hard edge has none there."""
    found = slope_of(name, torch.tensor(float("nan")), 3, torch.tensor(0.5))
    assert found.isnan() or (name in ("box", "clip", "rectangular") and found == 0)


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="surrogate.*did you mean 'relsg_et'"):
        surrogate.get("relsg")
    with pytest.raises(ValueError, match="surrogate must be a known name"):
        surrogate.get(["relsg_et"])  # type: ignore[arg-type]


# One of a user's own


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(surrogate, "SURROGATES", dict(SURROGATES))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("neuron", [BurstNeuron, LIF, Ternary])
def test_one_of_your_own_has_the_gradients_of_its_level(
    neuron: Callable[..., torch.nn.Module], dtype: torch.dtype, own: None
) -> None:
    surrogate.register("mine", tail="learned")(surrogate.relsg_et)
    torch.manual_seed(2)
    x = torch.randn(3, 2, 50, dtype=dtype)
    found = []
    for name in ("relsg_et", "mine"):
        module = neuron(surrogate=name).to(dtype)
        out = module(leaf := x.clone().requires_grad_())
        out.square().sum().backward()
        found.append([out, leaf.grad, *(p.grad for p in module.parameters())])
    assert len(found[0]) > 2
    for usual, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, usual)


def test_one_of_your_own_goes_where_neurons_go(own: None) -> None:
    @surrogate.register("wide")
    def wide(r: Tensor, n_max: int, _tail: Tensor) -> Tensor:
        return r.clamp(-1, n_max + 1)

    neuron = BurstNeuron(surrogate="wide")
    assert [name for name, _ in neuron.named_parameters()] == ["rho"]  # it has no tail
    x = torch.full((1, 1, 1), -0.3)  # which no built-in surrogate but those with tails gives a slope
    for other in (neuron, copy.deepcopy(neuron), pickle.loads(pickle.dumps(neuron))):
        other(leaf := x.clone().requires_grad_()).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.item() == pytest.approx(1)
    x = torch.randn(4, 3, 20)
    assert torch.equal(neuron.levels(x), BurstNeuron().levels(x))


def test_neurons_keep_theirs_where_a_name_gets_another_one(own: None) -> None:
    surrogate.register("mine")(lambda r, n_max, tail: r * 1)
    neuron = BurstNeuron(surrogate="mine")
    surrogate.register("mine")(lambda r, n_max, tail: r * 7)
    for other, slope in ((neuron, 1), (copy.deepcopy(neuron), 1), (BurstNeuron(surrogate="mine"), 7)):
        other(x := torch.ones(1, 1, requires_grad=True)).sum().backward()
        assert x.grad is not None
        assert x.grad.item() == pytest.approx(slope)


def test_one_of_your_own_that_is_not_finite_leaves_the_levels_alone(own: None) -> None:
    with torch.inference_mode():  # wherever it is registered
        surrogate.register("steep")(lambda r, n_max, tail: (30 * r).exp() + r.sqrt())
    x = torch.linspace(-2, 5, 40).view(2, 2, 10)
    assert torch.equal(BurstNeuron(surrogate="steep")(x), BurstNeuron()(x))


@pytest.mark.parametrize(
    ("name", "level", "told"),
    [
        ("box", surrogate.box, "'box' is a surrogate of lbq: choose another name"),
        ("1st", surrogate.box, "a name is letters"),
        ("short", lambda r: r, r"'short' must be callable as B\(r, n_max, tail\): .*3 were given"),
        ("one", lambda r, n, t: r.sum(), "'one' must give a differentiable tensor of the shape of r"),
        ("hard", lambda r, n, t: r.detach().floor(), "'hard' must give a differentiable tensor"),
        ("list", lambda r, n, t: [0], "'list' must give a differentiable tensor"),
    ],
)
def test_what_is_no_surrogate_is_refused(name: str, level: surrogate.Curve, told: str, own: None) -> None:
    with pytest.raises(ConfigError, match=told):
        surrogate.register(name)(level)
    with pytest.raises(ConfigError, match="tail must be 'learned', 'fixed' or None, got True"):
        surrogate.register("mine", tail=True)  # type: ignore[arg-type]
