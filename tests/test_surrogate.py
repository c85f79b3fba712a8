"""Each surrogate is a pair B, B': B' must be the derivative of B, and ReLSG-ET must be the paper's."""

from __future__ import annotations

import pytest
import torch

from lbq import surrogate
from lbq.surrogate import SURROGATES
from tests import oracle

TAIL = torch.tensor(0.3, dtype=torch.float64)


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
    r = away_from_kinks(name, n_max).requires_grad_()
    torch.autograd.gradcheck(lambda r: s.level(r, n_max, TAIL), (r,), eps=1e-6, atol=1e-7)
    (grad,) = torch.autograd.grad(s.level(r, n_max, TAIL).sum(), r)
    torch.testing.assert_close(s.slope(r.detach(), n_max, TAIL), grad, rtol=1e-9, atol=1e-9)


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
    assert SURROGATES["box"].slope(r, 5, TAIL).tolist() == [0, 1, 1, 1, 0]
    tails = SURROGATES["box_et"].slope(torch.tensor([-0.5, 6.5]), 5, torch.tensor(0.5))
    torch.testing.assert_close(tails, torch.full((2,), 0.5 / torch.e))


@pytest.mark.parametrize("n_max", [1, 3, 5])
def test_rectangles_of_all_thresholds_tile_the_box(n_max: int) -> None:
    r = torch.linspace(-2, n_max + 3, 333, dtype=torch.float64)
    torch.testing.assert_close(SURROGATES["rectangular"].level(r, n_max, TAIL), SURROGATES["box"].level(r, n_max, TAIL))
    seams = torch.arange(n_max + 1) + 0.5
    assert (SURROGATES["rectangular"].slope(seams[:-1], n_max, TAIL) == 1).all()


@pytest.mark.parametrize("name", sorted(set(SURROGATES) - {"clip"}))
def test_single_threshold_surrogates_peak_or_plateau_at_one(name: str) -> None:
    at = SURROGATES[name].slope(torch.tensor([1.0]), 1, torch.tensor(0.5)).item()
    assert at == pytest.approx(1.0)


@pytest.mark.parametrize("name", SURROGATES)
def test_nan_has_no_slope(name: str) -> None:
    """It must not look like a number to what follows; a hard edge has none there."""
    found = SURROGATES[name].slope(torch.tensor(float("nan")), 3, torch.tensor(0.5))
    assert found.isnan() or (name in ("box", "clip", "rectangular") and found == 0)


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="surrogate.*did you mean 'relsg_et'"):
        surrogate.get("relsg")
    with pytest.raises(ValueError, match="surrogate must be a known name"):
        surrogate.get(["relsg_et"])  # type: ignore[arg-type]
