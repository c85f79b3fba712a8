"""The neuron's timestep on NumPy arrays: the same arithmetic as `lbq.kernels.reference`, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lbq.graph import Array, NeuronSpec

Levels = NDArray[np.int64]


@dataclass
class Membrane:
    """State of one layer between timesteps: the membrane after reset, and a reset delayed past the leak."""

    v: Array | None = None
    pending: Array | None = None


def emit(spec: NeuronSpec, current: Array, membrane: Membrane) -> tuple[Levels, Array]:
    """Integrate `current` [B, C, H, W], emit levels, reset; updates `membrane`. Also returns U, to look at ties."""
    u = current if spec.gain == 1.0 else spec.gain * current
    if membrane.v is not None:
        u = spec.leak * membrane.v + u
        if membrane.pending is not None:
            u = u - membrane.pending
    level = levels_of(spec, u)
    if spec.reset == "hard":
        membrane.v = u * (1 - spec.alpha * (level != 0))
        return level, u
    drop = spec.alpha * per_channel(spec.step) * (level if spec.reset == "level" else np.sign(level))
    if spec.decay_reset:
        membrane.v = u - drop
    else:
        membrane.v, membrane.pending = u, drop
    return level, u


def levels_of(spec: NeuronSpec, u: Array) -> Levels:
    n = spec.n_max
    if spec.thresholds is not None:
        return np.searchsorted(spec.thresholds, u, side="right").astype(np.int64)
    r = u / per_channel(spec.step)
    if spec.rounding == "floor":
        s = np.clip(np.floor(r), 0, n)
    elif spec.rounding == "strict":
        s = np.clip(np.ceil(r) - 1, 0, n)
    elif spec.rounding == "round":
        s = np.clip(_half_up(r), 0, n)
    elif spec.rounding == "trunc":
        s = np.clip(np.trunc(r), -n, n)
    else:
        s = np.clip(np.sign(r) * _half_up(np.abs(r)), -n, n)
    return s.astype(np.int64)


def _half_up(r: Array) -> Array:
    below = np.floor(r)
    return below + (r - below >= 0.5)


def distance_to_threshold(spec: NeuronSpec, u: Array) -> Array:
    """How far each membrane is from the nearest threshold, in steps."""
    if spec.thresholds is not None:
        gaps = np.abs(u[..., None] - spec.thresholds) / spec.thresholds[0]
        return np.asarray(gaps.min(-1), np.float64)
    r = u / per_channel(spec.step)
    if spec.signed:
        r = np.abs(r)
    if spec.rounding in ("round", "half"):
        r = r + 0.5
    return np.abs(r - np.clip(np.rint(r), 1, spec.n_max))


def per_channel(value: Array) -> Array:
    """A scalar, or `[C]` shaped to broadcast over `[B, C, H, W]`."""
    return value[:, None, None] if value.ndim else value
