"""In which tiles kernels go over tensors. Shapes alone decide it: the same bytes every time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 128  # columns of a tile, and length of the rows that a slab is cut into where channels do not matter


class Slab(NamedTuple):
    """How kernels go over one dense timestep (see `tiles.slab`): in tiles of br rows and bc columns."""

    rows: int
    channels: int
    inner: int
    elements: int
    layout: str
    br: int
    bc: int

    def share(self, programs: int) -> tuple[int, int, int]:
        """About so many programs: rows of programs, columns of programs, tiles for each. A function of the shape alone."""
        columns, blocks = -(-self.channels // self.bc), -(-self.rows // self.br)
        each = -(-blocks // max(1, programs // columns))
        return -(-blocks // each), columns, each


def slab_of(shape: Sequence[int], stride: Sequence[int], by_channel: bool, tile: int) -> Slab:
    """A dense `[B, C, ...]`: rows and channels where something depends on the channel (dimension 1), else just rows."""
    elements = math.prod(shape)
    if not by_channel:
        return Slab(-(-elements // WIDTH), WIDTH, 1, elements, "flat", tile // WIDTH, WIDTH)
    channels = shape[1]
    inner = stride[1] if channels > 1 else 1
    bc = min(WIDTH, 1 << max(channels - 1, 0).bit_length())
    return Slab(elements // channels, channels, inner, elements, "last" if inner == 1 else "any", tile // bc, bc)


def tile_for(timesteps: int) -> int:
    """Elements of a tile: fewer where the backward pass keeps more of each in registers."""
    return 1024 if timesteps <= 2 else 512 if timesteps <= 8 else 256
