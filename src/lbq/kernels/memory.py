"""How tensors lie in memory, and copies of them that lie as a kernel needs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


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
