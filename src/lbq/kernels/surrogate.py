"""Surrogate level functions B(r) and their derivatives B'(r), over the normalised membrane r = U / step.

The forward pass emits integer levels; the backward pass differentiates B instead (Eq. ste_level). Thresholds lie at
r = 1, 2, ..., n_max. `tail` is the coefficient lambda of exponential tails, where a surrogate has them. The surrogates of
binary networks (arctan, rectangular, sigmoid, triangle) are sums of one copy for each threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lbq.errors import YOUR_OWN, ConfigError, check_new, nearest

Curve = Callable[[Tensor, int, Tensor], Tensor]
Tail = Literal["learned", "fixed"] | None

SIGMOID_SLOPE = 4.0  # makes the sigmoid's derivative 1 at its threshold, like the others
BOX_ET_TAIL = 0.5  # the paper leaves it silent; ReLSG-ET starts from the same value


@dataclass(frozen=True)
class Surrogate:
    """`level` is B, `slope` is B' = dB/dr, `tail_slope` is dB/dlambda (only where there is a tail to learn).

    Without a slope, `level` itself is differentiated. code: its number in the C kernels (enum lbq_surrogate of
    burst_rules.h), None where the fast kernels do not have it. The Triton kernels know it by its name.
    """

    name: str
    level: Curve
    slope: Curve | None = None
    tail: Tail = None
    tail_slope: Curve | None = None
    code: int | None = None

    @property
    def in_kernels(self) -> bool:
        """Whether the fast kernels compute it; they know it by its name, which a copy may have too."""
        return self.code is not None and SURROGATES.get(self.name) is self

    def __deepcopy__(self, _memo: dict[int, object]) -> Surrogate:
        return self  # not by name, which another may have by now

    def __reduce__(self) -> tuple[Callable[[str], Surrogate], tuple[str]]:
        return get, (self.name,)  # by name: some curves are closures


def _tails(r: Tensor, low: float, high: float) -> Tensor:
    """exp(-distance to [low, high]): 1 inside, decaying outside, never overflowing."""
    outside = torch.minimum(r - low, high - r)
    return torch.exp(torch.where(outside >= 0, 0, outside))  # a clamp would have a slope at the edge; NaN stays NaN


def _tail_bend(r: Tensor, low: float, high: float) -> Tensor:
    """Integral of the tails beyond [low, high]: e^(r-low)-1 below, 1-e^(high-r) above, 0 inside."""
    return (1 - _tails(r, low, high)) * (r - low).sign()


def _plateau(r: Tensor, low: float, high: float, outside: Tensor | None = None) -> Tensor:
    """1 on [low, high], `outside` (default 0) elsewhere."""
    inside = (r >= low) & (r <= high)
    return inside.to(r.dtype) if outside is None else torch.where(inside, 1.0, outside)


def relsg_et(r: Tensor, n_max: int, tail: Tensor) -> Tensor:
    """Eq. surrogate_level: r on [1, n_max], bent into exponential tails of strength `tail` on both sides."""
    return r.clamp(1, n_max) + tail * _tail_bend(r, 1, n_max)


def relsg_et_slope(r: Tensor, n_max: int, tail: Tensor) -> Tensor:
    """Eq. surrogate_grad: 1 on [1, n_max], tail * e^(-distance) outside."""
    return _plateau(r, 1, n_max, tail * _tails(r, 1, n_max))


def relsg_et_tail_slope(r: Tensor, n_max: int, _tail: Tensor) -> Tensor:
    return _tail_bend(r, 1, n_max)


def box(r: Tensor, n_max: int, _tail: Tensor) -> Tensor:
    return (r - 0.5).clamp(0, n_max)


def box_slope(r: Tensor, n_max: int, _tail: Tensor) -> Tensor:
    return _plateau(r, 0.5, n_max + 0.5)


def box_et(r: Tensor, n_max: int, tail: Tensor) -> Tensor:
    return box(r, n_max, tail) + tail * _tail_bend(r, 0.5, n_max + 0.5)


def box_et_slope(r: Tensor, n_max: int, tail: Tensor) -> Tensor:
    return _plateau(r, 0.5, n_max + 0.5, tail * _tails(r, 0.5, n_max + 0.5))


def clip(r: Tensor, n_max: int, _tail: Tensor) -> Tensor:
    """The quantised-activation surrogate (I-LIF, LSQ): identity on [0, n_max]."""
    return r.clamp(0, n_max)


def clip_slope(r: Tensor, n_max: int, _tail: Tensor) -> Tensor:
    return _plateau(r, 0, n_max)


def _per_threshold(curve: Callable[[Tensor], Tensor]) -> Curve:
    """Sum one copy of `curve(distance)` for each threshold 1..n_max."""

    def summed(r: Tensor, n_max: int, _tail: Tensor) -> Tensor:
        total = curve(r - 1)
        for k in range(2, n_max + 1):
            total = total + curve(r - k)
        return total

    return summed


def _arctan(d: Tensor) -> Tensor:
    return torch.atan(math.pi * d) / math.pi + 0.5


def _arctan_slope(d: Tensor) -> Tensor:
    return 1 / (1 + (math.pi * d) ** 2)


def _rectangular(d: Tensor) -> Tensor:
    return torch.where(d < 0.5, d + 0.5, 1).clamp(min=0)


def _rectangular_slope(d: Tensor) -> Tensor:
    # Half-open, so that neighbouring thresholds tile the range instead of doubling the gradient at their seam.
    return _plateau(d, -0.5, 0.5) - (d == 0.5).to(d.dtype)


def _sigmoid(d: Tensor) -> Tensor:
    return torch.sigmoid(SIGMOID_SLOPE * d)


def _sigmoid_slope(d: Tensor) -> Tensor:
    s = torch.sigmoid(SIGMOID_SLOPE * d)
    return SIGMOID_SLOPE * s * (1 - s)


def _triangle(d: Tensor) -> Tensor:
    c = d.clamp(-1, 1)
    return 0.5 + c - 0.5 * c * c.abs()


def _triangle_slope(d: Tensor) -> Tensor:
    return (1 - d.abs()).clamp(min=0)


SURROGATES: dict[str, Surrogate] = {
    s.name: s
    for s in (
        Surrogate("relsg_et", relsg_et, relsg_et_slope, "learned", relsg_et_tail_slope, code=0),
        Surrogate("box", box, box_slope, code=1),
        Surrogate("box_et", box_et, box_et_slope, "fixed", code=2),
        Surrogate("clip", clip, clip_slope, code=3),
        Surrogate("arctan", _per_threshold(_arctan), _per_threshold(_arctan_slope), code=4),
        Surrogate("rectangular", _per_threshold(_rectangular), _per_threshold(_rectangular_slope), code=5),
        Surrogate("sigmoid", _per_threshold(_sigmoid), _per_threshold(_sigmoid_slope), code=6),
        Surrogate("triangle", _per_threshold(_triangle), _per_threshold(_triangle_slope), code=7),
    )
}
BUILT_IN = frozenset(SURROGATES)


def register(name: str, *, tail: Tail = None) -> Callable[[Curve], Curve]:
    """`@register("mine")` makes a level function of your own known by this name, to neurons and configurations.

    To decorate: a function B(r, n_max, tail) of PyTorch's operations, of r's shape. Neurons emit the integer levels as ever,
    and have B's gradient by r = U / step and, where tail="learned", by `tail`. It runs by the reference kernel. A name that
    was registered before gets the new function; neurons that exist keep theirs.
    """
    check_new(name, BUILT_IN, "surrogate")
    if tail not in ("learned", "fixed", None):
        raise ConfigError(f"register: tail must be 'learned', 'fixed' or None, got {tail!r}")

    def add(level: Curve) -> Curve:
        try:
            with torch.inference_mode(False), torch.enable_grad():
                r = torch.linspace(-1, 4, 6, requires_grad=True)
                curve = level(r, 3, torch.tensor(0.5))
        except Exception as error:
            raise ConfigError(f"register: {name!r} must be callable as B(r, n_max, tail): {error}") from error
        if not isinstance(curve, Tensor) or curve.shape != r.shape or not curve.requires_grad:
            raise ConfigError(f"register: {name!r} must give a differentiable tensor of the shape of r")
        SURROGATES[name] = Surrogate(name, level, tail=tail)
        return level

    return add


def get(name: str) -> Surrogate:
    """The surrogate of that name; an unknown one raises a ValueError that names the nearest."""
    if not isinstance(name, str) or name not in SURROGATES:
        raise ValueError(f"surrogate must be a known name, got {name!r}{nearest(str(name), SURROGATES)}{YOUR_OWN}")
    return SURROGATES[name]
