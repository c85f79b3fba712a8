"""Where a tile lies in memory, and the constants of its channels.

One timestep of a tensor is a *slab* of `rows * channels` elements, dense in any order of dimensions: the element of
row q and channel c lies at (q // inner) * channels * inner + c * inner + q % inner, so inner = 1 is channels_last and
inner = H * W is the contiguous layout. Where nothing depends on the channel, the slab is cut into rows of any length.
"""
# ruff: noqa: RET505, SIM108
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(row0, rows, channels, inner, elements, LAYOUT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """The tile at row `row0`: base offset (64 bits), offsets from it [BR, BC], and which of them exist.

    LAYOUT: `flat` for rows of which the last may be cut short by `elements`, `last` for inner = 1, else `any`.
    """
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    row = tl.arange(0, BR)
    if LAYOUT == "any":
        base = tl.cast(row0, tl.int64)
        q = base + row
        offset = ((q // inner) * channels * inner + q % inner - base)[:, None] + (column * inner)[None, :]
        mask = (q < rows)[:, None] & (column < channels)[None, :]
    else:
        base = tl.cast(row0, tl.int64) * channels
        offset = row[:, None] * channels + column[None, :]
        if LAYOUT == "flat":
            mask = base + offset < elements
        else:
            mask = (row0 + row < rows)[:, None] & (column < channels)[None, :]
    return base, offset, mask


@triton.jit
def columns(channels, BC: tl.constexpr):
    """The channels of this program's columns, and which of them exist."""
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    return column, column < channels


@triton.jit
def per_channel(pointer, column, known, other, MANY: tl.constexpr):
    """One value for each column, [1, BC], or one for all."""
    if MANY:
        return tl.load(pointer + column, known, other).to(tl.float32)[None, :]
    else:
        return tl.load(pointer).to(tl.float32)


@triton.jit
def inverse_deviation(var, eps, column, known):
    return tl.div_rn(1.0, tl.sqrt_rn(per_channel(var, column, known, 1.0, True) + eps))


@triton.jit
def affine(weight, bias, mean, var, eps, column, known):
    """BatchNorm as factor * x + shift."""
    factor = inverse_deviation(var, eps, column, known) * per_channel(weight, column, known, 1.0, True)
    shift = tl.fma(-per_channel(mean, column, known, 0.0, True), factor, per_channel(bias, column, known, 0.0, True))
    return factor, shift
