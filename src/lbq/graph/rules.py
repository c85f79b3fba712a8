"""The words for what a neuron does: how a membrane becomes a level, and what a reset takes away.

`lbq.kernels.reference.Rule` explains each.
"""

from __future__ import annotations

from typing import Literal

Rounding = Literal["floor", "strict", "round", "trunc", "half"]
Reset = Literal["once", "level", "hard"]
SIGNED: frozenset[str] = frozenset({"trunc", "half"})


def threshold_shift(rounding: Rounding) -> float:
    """Level k begins at k steps, or half a step below that where levels are rounded to the nearest."""
    return 0.5 if rounding in ("round", "half") else 0.0
