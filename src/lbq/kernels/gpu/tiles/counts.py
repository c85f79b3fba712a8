"""Counts of levels and of membranes. They are whole numbers, so atomics add them up: the order does not matter."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lbq.kernels.gpu.tiles.slab import columns, per_channel, place
from lbq.kernels.gpu.tiles.timestep import after_reset, divide, dropped, integrate, quantise


@triton.jit(do_not_specialize=["batch", "each"])
def tally(
    x, scale, counts, batch, channels, positions, n_max, x_time, x_batch, x_channel, x_position, groups, each,
    SCALES: tl.constexpr, FIELDS: tl.constexpr, BITS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Add to `counts` [T, positions, n_max + 1] (int64) how often each magnitude 1..n_max of x / scale occurs.

    x is [T, batch, channels, positions] with any strides; scale one number, or one for each channel (SCALES). A program
    counts FIELDS neighbouring levels in one word, BITS for each, over `each` < 2^BITS tiles of BP positions and BC channels,
    and only then writes. Whole numbers: the order of the atomics does not matter.
    """
    t = tl.cast(tl.program_id(1), tl.int64)
    position = tl.program_id(0) // groups * BP + tl.arange(0, BP)
    first = tl.program_id(0) % groups * FIELDS + 1
    column = tl.arange(0, BC)
    tile = tl.program_id(2) * each
    b = tile // tl.cdiv(channels, BC)
    c = tile % tl.cdiv(channels, BC) * BC
    exists = (position < positions)[:, None]
    offset = (position * x_position)[:, None] + (column * x_channel)[None, :]
    over_all = 1.0 / tl.load(scale).to(tl.float32)
    packed = tl.zeros([BP, BC], tl.int32)
    for _ in range(each):
        known = c + column < tl.where(b < batch, channels, 0)
        over = 1.0 / per_channel(scale, c + column, known, 1.0, True) if SCALES else over_all
        base = t * x_time + tl.cast(b, tl.int64) * x_batch + tl.cast(c, tl.int64) * x_channel
        value = tl.load(x + base + offset, exists & known[None, :], 0.0).to(tl.float32)
        # the sum's last bits are the magnitude, rounded; a product will do, as x / scale is near a whole number
        level = (tl.abs(value) * over + 8388608.0).to(tl.int32, bitcast=True) & 0x7FFFFF
        field = level - first
        packed += tl.where((field >= 0) & (field < FIELDS), 1 << (field * BITS), 0)
        c += BC
        b += tl.where(c < channels, 0, 1)
        c = tl.where(c < channels, c, 0)
    for k in tl.static_range(FIELDS):
        number = tl.sum((packed >> (k * BITS)) & ((1 << BITS) - 1), axis=1)
        at = counts + (t * positions + position) * (n_max + 1) + first + k
        known = position < tl.where(first + k <= n_max, positions, 0)
        tl.atomic_add(at, number.to(tl.int64), known, sem="relaxed")


@triton.jit(do_not_specialize=["programs", "tiles"])  # which a last, smaller batch changes
def membranes(
    x, counts, step, leak, alpha, gain, n_max, low, fineness, bins, rows, channels, inner, elements, x_time, programs, tiles,
    T: tl.constexpr, STEPS: tl.constexpr, LEAK: tl.constexpr, GAIN: tl.constexpr, ROUNDING: tl.constexpr,
    RESET: tl.constexpr, DECAY: tl.constexpr, SIGNED: tl.constexpr, FMA: tl.constexpr, LAYOUT: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Add to `counts` [T, bins] (int64) the histogram of r = U / step before emission, of the neuron that receives x.

    Bin i begins at low + i / fineness; the first and the last also hold what lies beyond. BINS > bins is a power of 2.
    """
    column, known = columns(channels, BC)
    gamma = per_channel(step, column, known, 1.0, STEPS)
    over = tl.div_rn(1.0, gamma)
    beta = tl.load(leak).to(tl.float32) if LEAK else 1.0
    share = tl.load(alpha).to(tl.float32)
    drive = tl.load(gain).to(tl.float32) if GAIN else 1.0
    slot = tl.arange(0, BINS)
    for tile in range(tiles):
        row0 = (tile * programs + tl.program_id(0)) * BR
        base, offset, mask = place(row0, rows, channels, inner, elements, LAYOUT, BR, BC)
        px = x + base
        v = tl.zeros([BR, BC], tl.float32)
        pending = v
        for t in tl.static_range(T):
            z = tl.load(px + offset, mask, 0.0).to(tl.float32)
            u = integrate(v, pending, z, beta, drive, t == 0, LEAK, GAIN, DECAY)
            r = divide(u, gamma, over, FMA)
            s = quantise(r, n_max, ROUNDING)
            pending = dropped(s, share, gamma, RESET, SIGNED)
            v = after_reset(u, s, pending, share, RESET, DECAY)
            bin = tl.minimum(tl.maximum((r - low) * fineness, 0.0), bins - 1.0).to(tl.int32)
            bin = tl.where(mask, bin, bins)  # the slot behind them takes what does not exist
            number = tl.histogram(tl.reshape(bin, [BR * BC]), BINS)
            tl.atomic_add(counts + t * bins + slot, number.to(tl.int64), (slot < bins) & (number > 0), sem="relaxed")
            px += x_time
