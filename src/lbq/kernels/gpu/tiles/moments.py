"""BatchNorm's statistics: mean and variance by channel in a fixed order of additions, and their running averages."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lbq.kernels.gpu.tiles.slab import columns, place


@triton.jit
def moments_partial(
    x, partial, rows, channels, inner, elements, programs, tiles,
    LAYOUT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Each program's mean and sum of squared deviations by channel: `partial` [2, programs, channels]."""
    column, known = columns(channels, BC)
    # sums are taken about the program's first row, so that a large mean costs no digits
    base0, offset0, mask0 = place(tl.program_id(0) * BR, rows, channels, inner, elements, LAYOUT, 1, BC)
    pivot = tl.load(x + base0 + offset0, mask0, 0.0).to(tl.float32)  # [1, BC]
    total = tl.zeros([BR, BC], tl.float32)
    square = total
    for tile in range(tiles):
        row0 = (tile * programs + tl.program_id(0)) * BR
        base, offset, mask = place(row0, rows, channels, inner, elements, LAYOUT, BR, BC)
        d = tl.load(x + base + offset, mask, 0.0).to(tl.float32) - pivot
        d = tl.where(mask, d, 0.0)
        total += d
        square = tl.fma(d, d, square)
    n = part_rows(tl.program_id(0), rows, programs, tiles, BR)
    shift = tl.sum(total, axis=0)
    mean = tl.sum(pivot, axis=0) + shift / n
    spread = tl.sum(square, axis=0) - shift * shift / n
    at = tl.cast(tl.program_id(0), tl.int64) * channels + column
    tl.store(partial + at, mean, known)
    tl.store(partial + tl.cast(programs, tl.int64) * channels + at, spread, known)


@triton.jit
def moments_total(
    partial, mean, var, rows, channels, programs, tiles, BR_PARTIAL: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    """Mean and variance (biased) by channel from the programs' own."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    known = column < channels
    centre = tl.zeros([BC], tl.float32)
    for first in range(0, programs, BP):
        p = first + tl.arange(0, BP)
        share = part_rows(p, rows, programs, tiles, BR_PARTIAL) / rows
        m = tl.load(partial + p[:, None] * channels + column[None, :], (p < programs)[:, None] & known[None, :], 0.0)
        centre += tl.sum(m * share[:, None], axis=0)
    square = tl.zeros([BC], tl.float32)
    for first in range(0, programs, BP):
        p = first + tl.arange(0, BP)
        mask = (p < programs)[:, None] & known[None, :]
        share = part_rows(p, rows, programs, tiles, BR_PARTIAL) / rows
        m = tl.load(partial + p[:, None] * channels + column[None, :], mask, 0.0)
        s = tl.load(partial + (programs + p)[:, None] * channels + column[None, :], mask, 0.0)
        d = tl.where(mask, m - centre[None, :], 0.0)
        square += tl.sum(s / rows + d * d * share[:, None], axis=0)
    tl.store(mean + column, centre, known)
    tl.store(var + column, square, known)


@triton.jit
def part_rows(p, rows, programs, tiles, BR: tl.constexpr):
    """How many rows program p went over, as a float: whole rounds, and its part of the last."""
    whole = (tiles - 1) * BR
    left = rows - (tiles - 1) * programs * BR - p * BR
    left = tl.minimum(tl.maximum(left, 0), BR)
    return tl.where(p < programs, (whole + left) * 1.0, 0.0)


@triton.jit
def track(mean, var, running_mean, running_var, batches, momentum, correction, channels, BC: tl.constexpr):
    """BatchNorm's running statistics: (1 - momentum) * old + momentum * new, the variance unbiased."""
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    known = column < channels
    old = tl.load(running_mean + column, known, 0.0).to(tl.float32)
    new = tl.load(mean + column, known, 0.0)
    moved = momentum * new + (1.0 - momentum) * old
    tl.store(running_mean + column, moved.to(running_mean.dtype.element_ty), known)
    old = tl.load(running_var + column, known, 0.0).to(tl.float32)
    new = tl.load(var + column, known, 0.0) * correction
    moved = momentum * new + (1.0 - momentum) * old
    tl.store(running_var + column, moved.to(running_var.dtype.element_ty), known)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)
