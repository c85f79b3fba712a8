"""Integer levels: pooling, bit planes and set bits. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.graph import Pool, Synapse

Integers = NDArray[np.integer[Any]]
EXACT_BITS = 53  # of integers in float64


def highest_level(signed: bool) -> int:
    """The highest level that 8 bits hold."""
    return 127 if signed else 255


def pool(x: NDArray[Any], pools: tuple[Pool, ...], axes: tuple[int, int] = (2, 3)) -> NDArray[Any]:
    """Max- or sum-pool over the two axes of height and width, pool after pool.

    Padding never wins a maximum and adds nothing to a sum. Sums of integers are int32.
    """
    for p in pools:
        if p.kind == "sum" and x.dtype.kind in "iu":
            x = x.astype(np.int32, copy=False)
        if p.channels > 1:
            axis = 3 if axes == (1, 2) else 1
            x = x.reshape(*x.shape[:axis], -1, p.channels, *x.shape[axis + 1 :]).sum(axis + 1, x.dtype)
        if any(p.padding):
            floor: Any = 0
            if p.kind == "max":
                floor = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
            widths = [(0, 0)] * x.ndim
            for axis, padding in zip(axes, p.padding, strict=True):
                widths[axis] = (padding, padding)
            x = np.pad(x, widths, constant_values=floor)
        if all(x.shape[axis] == kernel for axis, kernel in zip(axes, p.kernel, strict=True)):
            x = x.max(axes, keepdims=True) if p.kind == "max" else x.sum(axes, x.dtype, keepdims=True)
            continue
        combine = np.maximum if p.kind == "max" else np.add
        out = None
        for dy in range(p.kernel[0]):
            for dx in range(p.kernel[1]):
                part = x[_window(x, p, axes, (dy, dx))]
                out = part.copy() if out is None else combine(out, part, out=out)
        x = out  # type: ignore[assignment]
    return x


def _window(x: NDArray[Any], p: Pool, axes: tuple[int, int], offset: tuple[int, int]) -> tuple[slice, ...]:
    """The values that one place of the pooling window reads, for every output."""
    index = [slice(None)] * x.ndim
    for axis, kernel, stride, start in zip(axes, p.kernel, p.stride, offset, strict=True):
        last = (x.shape[axis] - kernel) // stride * stride
        index[axis] = slice(start, start + last + 1, stride)
    return tuple(index)


def gated(factor: NDArray[Any], levels: NDArray[Any]) -> NDArray[Any]:
    """A gate's levels `[..., C, H, W]`. factor: `[..., C / n, H, W]`, or one position for all."""
    channels, sides = factor.shape[-3], levels.shape[-2:]
    parts = levels.reshape(*levels.shape[:-3], channels, -1, *sides)
    return (parts * factor[..., :, None, :, :]).reshape(levels.shape)


def synapse_product(synapse: Synapse, operands: Sequence[Integers]) -> Integers:
    """What the weight of a synapse of kind `matmul` meets: of levels `[..., C, H, W]`, and of scores `[..., heads, N, N]`.

    In their own type. (Q K^T) V takes the order with fewer products, so nothing in between is larger than the levels.
    """
    heads, bits = synapse.heads, sum(map(planes_of, operands)) + synapse.summed.bit_length()
    kind: Any = np.float64 if bits <= EXACT_BITS else operands[-1].dtype  # float64 is exact below 2^53
    # [..., heads, channels of a head, positions]
    one, other, *values = (x.reshape(*x.shape[:-3], heads, x.shape[-3] // heads, -1).astype(kind) for x in operands)
    if values:
        keys = other.swapaxes(-2, -1)
        result = (values[0] @ keys) @ one if synapse.linear else values[0] @ (keys @ one)
    else:
        scores = one.reshape(operands[0].shape)
        result = one.swapaxes(-2, -1) @ other if synapse.keys else other @ scores.swapaxes(-2, -1)
    return result.astype(operands[-1].dtype).reshape(*operands[-1].shape[:-3], *synapse.out_shape)


def bit_planes(level: Integers, planes: int) -> NDArray[np.bool_]:
    """b_k of the magnitudes, `[K, ...]` (Eq. bitplane_decomp)."""
    magnitude = np.abs(level.astype(np.int64))
    return (magnitude[None] >> np.arange(planes).reshape(-1, *[1] * level.ndim) & 1).astype(bool)


def popcount(level: Integers) -> NDArray[np.uint8]:
    """Set bits of |S|."""
    return np.bitwise_count(level if level.dtype.kind == "u" else np.abs(level.astype(np.int64)))


def planes_of(level: Integers) -> int:
    """How many planes these levels need."""
    return int(max(level.max(initial=0), -int(level.min(initial=0)))).bit_length()


def row_sums(weights: Integers) -> NDArray[np.int64]:
    """The sum of |W| for each index of the first dimension.

    It takes a few rows at a time: wider copies of all weights would be the peak of memory.
    """
    rows, sums = weights.reshape(len(weights), -1), np.empty(len(weights), np.int64)
    for i in range(0, len(rows), 16):
        sums[i : i + 16] = np.abs(rows[i : i + 16].astype(np.int64)).sum(1)
    return sums
