"""How a trained network lays out a tensor that is `[C, H, W]` in its graph, such as tokens `[N, D]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Layout:
    """axes: the parts that each axis behind time and batch joins, by their sizes. order: where the parts stand that are
    channels, rows and columns, in this order: of tokens [H * W, D], `axes` is ((H, W), (D,)) and `order` (2, 0, 1)."""

    axes: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(math.prod, self.axes))

    def channels_first(self, levels: Any) -> Any:
        """Levels `[T, B, *sizes]`, an array or a tensor, with channels, rows and columns in order."""
        parts = levels.reshape(*levels.shape[:2], *(size for axis in self.axes for size in axis))
        order = 0, 1, *(2 + at for at in self.order)
        return (
            parts.permute(order).contiguous()
            if hasattr(parts, "permute")
            else np.ascontiguousarray(parts.transpose(order))
        )
