"""How tensors lie in memory, and in which tiles kernels go over them. Shapes alone decide it: the same bytes every time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their range of memory, in any order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


def settled(x: Tensor, outer: int = 1) -> Tensor:
    """`x` [T, B, ...] with dense timesteps: itself, or a copy. The first `outer` dimensions may have any stride, also 0."""
    return x if x.numel() == 0 or is_dense(x.shape[outer:], x.stride()[outer:]) else x.contiguous()


def ordered_like(y: Tensor, x: Tensor) -> Tensor:
    """`y` with its timesteps in the memory order of those of `x`: itself, or a copy."""
    strides = zip(y.shape[1:], y.stride()[1:], x.stride()[1:], strict=True)
    same = all(size == 1 or mine == other for size, mine, other in strides)
    return y if same else sequence_like(x, y.shape[0], y.dtype).copy_(y)


def sequence_like(x: Tensor, timesteps: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Empty `[T, B, ...]` whose timesteps lie as those of `x`, one after the other."""
    elements = math.prod(x.shape[1:])
    shape = (x.shape[0] if timesteps is None else timesteps, *x.shape[1:])
    return torch.empty_strided(shape, (elements, *x.stride()[1:]), dtype=dtype or x.dtype, device=x.device)


def shaped_like(y: Tensor, x: Tensor) -> Tensor:
    """`y` in the shape of `x`: itself where it has it, as a view costs as much as all the rest around a small tensor."""
    return y if y.shape == x.shape else y.reshape(x.shape)


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
