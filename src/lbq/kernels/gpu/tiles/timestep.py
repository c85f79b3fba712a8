"""What a neuron does at one timestep, and the slopes of its surrogate.

Arithmetic is float32 without fused multiply-adds (launches pass enable_fp_fusion=False) and with the correctly rounded
division, so that levels equal those of `lbq.kernels.reference`. NaN propagates: comparisons with NaN are written so that
they leave it in place.
"""
# ruff: noqa: RET505, SIM108
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def clamp(value, low, high):
    """To [low, high]; NaN stays."""
    return least(tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL), high)


@triton.jit
def least(value, high):
    return tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def floor(value):
    """Of 0 <= value < 2^22, by rounding to a whole number as 2^23 + value: an eighth of the time of the instruction."""
    near = (value + 8388608.0) - 8388608.0
    return near - tl.where(near > value, 1.0, 0.0)


@triton.jit
def half_up(value):
    below = floor(value)
    return below + tl.where(value - below >= 0.5, 1.0, 0.0)


@triton.jit
def quantise(r, n_max, ROUNDING: tl.constexpr):
    """The level of the normalised membrane, as a float. n_max < 2^22. `relu` is the ANN's activation, for one timestep."""
    top = n_max * 1.0
    if ROUNDING == "relu":
        return tl.maximum(r, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ROUNDING == "floor":
        return floor(clamp(r, 0.0, top))
    elif ROUNDING == "strict":
        whole = clamp(r, 0.0, top + 1.0)
        below = floor(whole)
        return clamp(below + tl.where(below < whole, 0.0, -1.0), 0.0, top)
    elif ROUNDING == "round":
        return half_up(clamp(r, 0.0, top))
    else:
        size = least(tl.abs(r), top)
        size = floor(size) if ROUNDING == "trunc" else half_up(size)
        return tl.where(r < 0, -size, size)


@triton.jit
def set_bits(s, BITS: tl.constexpr):
    """How many of the lowest bits of a level's magnitude are 1, as a float."""
    size = tl.abs(s).to(tl.int32)
    count = tl.zeros_like(size)
    for bit in tl.static_range(BITS):
        count += (size >> bit) & 1
    return count.to(tl.float32)


@triton.jit
def divide(u, step, over, FMA: tl.constexpr):
    """u / step, correctly rounded, for over = 1 / step correctly rounded.

    Two corrections by the exact remainder (Markstein 1990) cost half of a general division. Without fused multiply-adds
    (Triton's interpreter) there is no exact remainder, so the division is left to the machine.
    """
    if FMA:
        first = u * over
        q = tl.fma(tl.fma(first, -step, u), over, first)
        q = tl.fma(tl.fma(q, -step, u), over, q)
        return tl.where(tl.abs(first) < 1e30, q, first)  # infinities have no remainder
    else:
        return tl.div_rn(u, step)


@triton.jit
def sign(value, SIGNED: tl.constexpr):
    if SIGNED:
        return tl.where(value > 0, 1.0, tl.where(value < 0, -1.0, 0.0))
    else:
        return tl.where(value > 0, 1.0, 0.0)


@triton.jit
def integrate(v, pending, z, leak, gain, T0: tl.constexpr, LEAK: tl.constexpr, GAIN: tl.constexpr, DECAY: tl.constexpr):
    """U of this timestep from the state before it (at rest where T0) and the current z."""
    u = z
    if GAIN:
        u = gain * u
    if not T0:
        if LEAK:
            u = leak * v + u
        else:
            u = v + u
        if not DECAY:
            u = u - pending
    return u


@triton.jit
def dropped(s, alpha, step, RESET: tl.constexpr, SIGNED: tl.constexpr):
    """What the reset subtracts; 0 for a hard reset, which multiplies."""
    if RESET == "level":
        return alpha * step * s
    elif RESET == "once":
        return alpha * step * sign(s, SIGNED)
    else:
        return tl.zeros_like(s)


@triton.jit
def after_reset(u, s, drop, alpha, RESET: tl.constexpr, DECAY: tl.constexpr):
    if RESET == "hard":
        return u * (1.0 - alpha * tl.where(s != 0, 1.0, 0.0))
    elif DECAY:
        return u - drop
    else:
        return u


# Surrogates: B'(m) and dB/dlambda over the normalised membrane m (its magnitude, where levels are signed)


@triton.jit
def beyond(m, low, high):
    """How far m lies below [low, high] (negative) or above it (positive); 0 inside."""
    return m - clamp(m, low, high)


@triton.jit
def decayed(off):
    """exp(-distance to the plateau)."""
    return tl.exp2(tl.abs(off) * -1.4426950408889634)


@triton.jit
def bump(d, SURROGATE: tl.constexpr):
    """The slope that one threshold contributes at the distance d from it."""
    if SURROGATE == "arctan":
        return 1.0 / (1.0 + (3.141592653589793 * d) * (3.141592653589793 * d))
    elif SURROGATE == "rectangular":
        return tl.where((d >= -0.5) & (d < 0.5), 1.0, 0.0)
    elif SURROGATE == "sigmoid":
        s = 1.0 / (1.0 + tl.exp(-4.0 * d))
        return 4.0 * s * (1.0 - s)
    else:  # triangle
        height = 1.0 - tl.abs(d)
        return tl.where(height < 0, 0.0, height)


@triton.jit
def slope(m, n_max, tail, SURROGATE: tl.constexpr):
    top = n_max * 1.0
    if SURROGATE == "relsg_et":
        off = beyond(m, 1.0, top)
        return tl.where(off == 0, 1.0, tail * decayed(off))
    elif SURROGATE == "box":
        return tl.where(beyond(m, 0.5, top + 0.5) == 0, 1.0, 0.0)
    elif SURROGATE == "box_et":
        off = beyond(m, 0.5, top + 0.5)
        return tl.where(off == 0, 1.0, tail * decayed(off))
    elif SURROGATE == "clip":
        return tl.where(beyond(m, 0.0, top) == 0, 1.0, 0.0)
    elif SURROGATE == "relu":
        return tl.where(m <= 0, 0.0, 1.0)
    else:
        total = bump(m - 1.0, SURROGATE)
        for k in range(2, n_max + 1):
            total += bump(m - k * 1.0, SURROGATE)
        return total


@triton.jit
def tail_slope(m, n_max):
    """dB/dlambda of relsg_et, the surrogate whose tail is learned."""
    off = beyond(m, 1.0, n_max * 1.0)
    e = decayed(off)
    return tl.where(off < 0, e - 1.0, 1.0 - e)
