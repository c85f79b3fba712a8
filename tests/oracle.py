"""Independent restatements of the paper's equations, in scalar loops, for the tests to compare with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def burst_loop(
    x: np.ndarray[Any, Any], step: float, n_max: int, beta: float, alpha: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Levels and membranes of Eqs. lbq_level, lif_burst_integrate, lif_burst_reset, one neuron and timestep at a time.

    Every operation rounds to x's dtype, as the vectorised code does.
    """
    kind = x.dtype.type
    step_, beta_, alpha_ = kind(step), kind(beta), kind(alpha)
    levels = np.zeros(x.shape, np.int64)
    membranes = np.zeros_like(x)
    for index in np.ndindex(*x.shape[1:]):
        v = kind(0)
        for t in range(x.shape[0]):
            u = beta_ * v + x[(t, *index)]
            s = min(max(math.floor(u / step_), 0), n_max)
            levels[(t, *index)], membranes[(t, *index)] = s, u
            v = u - alpha_ * step_ if s > 0 else u
    return levels, membranes


def lif_loop(x: np.ndarray[Any, Any], threshold: float, beta: float, alpha: float) -> np.ndarray[Any, Any]:
    """Spikes of Eqs. lif and bispiking: the reset is not decayed, the threshold is strict."""
    spikes = np.zeros(x.shape, np.int64)
    for index in np.ndindex(*x.shape[1:]):
        u, s = 0.0, 0
        for t in range(x.shape[0]):
            u = beta * u + float(x[(t, *index)]) - alpha * threshold * s
            s = int(u > threshold)
            spikes[(t, *index)] = s
    return spikes


def relsg_et(r: Tensor, n_max: int, tail: Tensor) -> Tensor:
    """Eq. surrogate_level, case by case."""
    low = 1 + tail * (torch.exp(r.clamp(max=1) - 1) - 1)
    high = n_max + tail * (1 - torch.exp(n_max - r.clamp(min=n_max)))
    return torch.where(r < 1, low, torch.where(r > n_max, high, r))
