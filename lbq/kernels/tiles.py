"""The Triton kernels: burst neurons over a whole sequence, with BatchNorm and a residual add in the same pass.

One timestep of a tensor is a *slab* of `rows * channels` elements, dense in any order of dimensions: the element of
row q and channel c lies at (q // inner) * channels * inner + c * inner + q % inner, so inner = 1 is channels_last and
inner = H * W is the contiguous layout. Where nothing depends on the channel, the slab is cut into rows of any length.

A program works on tiles of BR rows and BC channels and carries the membrane through all timesteps in registers. The
backward kernel recomputes the membrane from the input, then goes back in time. Sums over elements (gradients of the step,
the tail, ...) leave each program as one partial sum per channel, added up in a fixed order: no atomics, same bytes. Counts
of levels and membranes are whole numbers and use them.

Arithmetic is float32 without fused multiply-adds (launches pass enable_fp_fusion=False) and with the correctly rounded
division, so that levels equal those of `lbq.kernels.reference`. NaN propagates: comparisons with NaN are written so that
they leave it in place.
"""
# Names in capitals are compile-time constants. Triton reads this source, so types are given to those alone, and branches
# on constants stay statements: what is not taken is not compiled.
# ruff: noqa: RET505, RUF005, SIM108
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

# What a neuron does at one timestep
# --------------------------------------------------------------------------------------------------------------------


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
# --------------------------------------------------------------------------------------------------------------------


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


# Addresses, constants, BatchNorm
# --------------------------------------------------------------------------------------------------------------------


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


# The neuron
# --------------------------------------------------------------------------------------------------------------------


@triton.jit
def burst_forward(
    x, residual, out, weight, bias, mean, var, step, scale, leak, alpha, gain,
    n_max, eps, rows, channels, inner, elements, x_time, residual_time, out_time, programs, tiles,
    T: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, STEPS: tl.constexpr, SCALE: tl.constexpr,
    LEAK: tl.constexpr, GAIN: tl.constexpr, ROUNDING: tl.constexpr, RESET: tl.constexpr, DECAY: tl.constexpr,
    SIGNED: tl.constexpr, FMA: tl.constexpr, LAYOUT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Scaled outputs of all timesteps. x_time = 0 shows one slab at every timestep."""
    column, known = columns(channels, BC)
    gamma = per_channel(step, column, known, 1.0, STEPS)
    over = tl.div_rn(1.0, gamma)
    worth = gamma
    if SCALE:
        worth = per_channel(scale, column, known, 1.0, STEPS)
    beta = tl.load(leak).to(tl.float32) if LEAK else 1.0
    share = tl.load(alpha).to(tl.float32)
    drive = tl.load(gain).to(tl.float32) if GAIN else 1.0
    if NORM:
        factor, shift = affine(weight, bias, mean, var, eps, column, known)

    for tile in range(tiles):
        row0 = (tile * programs + tl.program_id(0)) * BR
        base, offset, mask = place(row0, rows, channels, inner, elements, LAYOUT, BR, BC)
        px = x + base
        pr = residual + base
        po = out + base
        v = tl.zeros([BR, BC], tl.float32)
        pending = v
        for t in tl.static_range(T):
            z = tl.load(px + offset, mask, 0.0).to(tl.float32)
            if NORM:
                z = tl.fma(z, factor, shift)
            if RESIDUAL:
                z = z + tl.load(pr + offset, mask, 0.0).to(tl.float32)
            u = integrate(v, pending, z, beta, drive, t == 0, LEAK, GAIN, DECAY)
            s = quantise(divide(u, gamma, over, FMA), n_max, ROUNDING)
            tl.store(po + offset, (worth * s).to(out.dtype.element_ty), mask)
            pending = dropped(s, share, gamma, RESET, SIGNED)
            v = after_reset(u, s, pending, share, RESET, DECAY)
            px += x_time
            pr += residual_time
            po += out_time


@triton.jit
def burst_backward(
    grad, x, residual, out, partial, weight, bias, mean, var, step, scale, tail, leak, alpha, gain,
    n_max, eps, rows, channels, inner, elements, x_time, residual_time, grad_time, out_time, programs, tiles,
    T: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, SHOWN: tl.constexpr,
    STEPS: tl.constexpr, SCALE: tl.constexpr, LEAK: tl.constexpr, GAIN: tl.constexpr, SURROGATE: tl.constexpr,
    ROUNDING: tl.constexpr, RESET: tl.constexpr, DECAY: tl.constexpr, RESET_GRAD: tl.constexpr, DETACH: tl.constexpr,
    SIGNED: tl.constexpr, FMA: tl.constexpr, SUM_CURRENT: tl.constexpr, SUM_HAT: tl.constexpr, SUM_STEP: tl.constexpr,
    SUM_SCALE: tl.constexpr, SUM_TAIL: tl.constexpr, SUM_LEAK: tl.constexpr, SUM_ALPHA: tl.constexpr,
    SUM_GAIN: tl.constexpr, WHOLE: tl.constexpr, LAYOUT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """From the outputs' gradients to `out`, the gradient of what the neuron receives, and to sums over all elements.

    SHOWN: x is one slab, shown at every timestep; its gradient is summed over time.
    SUM_*: the place of each sum in `partial` [places, programs, channels], -1 where it is not wanted. CURRENT and HAT are
        the gradients of BatchNorm's bias and weight, the others those of the neuron's constants.
    WHOLE: one sum for all channels, `partial` [places, programs].
    """
    column, known = columns(channels, BC)
    gamma = per_channel(step, column, known, 1.0, STEPS)
    over = tl.div_rn(1.0, gamma)
    worth = gamma
    if SCALE:
        worth = per_channel(scale, column, known, 1.0, STEPS)
    beta = tl.load(leak).to(tl.float32) if LEAK else 1.0
    share = tl.load(alpha).to(tl.float32)
    drive = tl.load(gain).to(tl.float32) if GAIN else 1.0
    strength = tl.load(tail).to(tl.float32)
    if NORM:
        factor, shift = affine(weight, bias, mean, var, eps, column, known)
        centre = per_channel(mean, column, known, 0.0, True)

    zero = tl.zeros([BR, BC], tl.float32)
    sum_current, sum_hat, sum_step, sum_scale = zero, zero, zero, zero
    sum_tail, sum_leak, sum_alpha, sum_gain = zero, zero, zero, zero
    for tile in range(tiles):
        row0 = (tile * programs + tl.program_id(0)) * BR
        base, offset, mask = place(row0, rows, channels, inner, elements, LAYOUT, BR, BC)

        px = x + base
        pr = residual + base
        pg = grad + base
        po = out + base
        xs, es, gs = (), (), ()  # all loads first, so that none waits for arithmetic
        for t in tl.static_range(T):
            if t == 0 or not SHOWN:
                xs = xs + (tl.load(px + offset, mask, 0.0),)
            if RESIDUAL:
                es = es + (tl.load(pr + offset, mask, 0.0),)
            gs = gs + (tl.load(pg + offset, mask, 0.0),)
            px += x_time
            pr += residual_time
            pg += grad_time

        # forward again: the normalised membrane, and what else a sum needs (the rest is never computed)
        v = zero
        pending = zero
        rs, vs, us, zs = (), (), (), ()
        for t in tl.static_range(T):
            z = xs[0 if SHOWN else t].to(tl.float32)
            if NORM:
                z = tl.fma(z, factor, shift)
            if RESIDUAL:
                z = z + es[t].to(tl.float32)
            u = integrate(v, pending, z, beta, drive, t == 0, LEAK, GAIN, DECAY)
            r = divide(u, gamma, over, FMA)
            s = quantise(r, n_max, ROUNDING)
            rs, vs, us, zs = rs + (r,), vs + (v,), us + (u,), zs + (z,)
            pending = dropped(s, share, gamma, RESET, SIGNED)
            v = after_reset(u, s, pending, share, RESET, DECAY)
            if t < T - 1:
                po += out_time

        # and back in time: gu is dL/dU; the state after this timestep receives gv, its reset -gd
        gv = zero
        gd = zero
        shown = zero
        for t in tl.static_range(T - 1, -1, -1):
            r = rs[t]
            s = quantise(r, n_max, ROUNDING)
            g = gs[t].to(tl.float32)
            m = tl.abs(r) if SIGNED else r
            gu = g * slope(m, n_max, strength, SURROGATE)
            if SCALE:
                gu = gu * (worth * over)
                if SUM_SCALE >= 0:
                    sum_scale = tl.fma(g, s, sum_scale)
            elif SUM_STEP >= 0:
                sum_step = tl.fma(g, s, sum_step)
            if SUM_STEP >= 0:
                sum_step = tl.fma(gu, -r, sum_step)
            if SUM_TAIL >= 0:
                lean = tail_slope(m, n_max)
                sum_tail = tl.fma(g, lean * sign(r, SIGNED) if SIGNED else lean, sum_tail)
            if RESET == "hard":
                mark = tl.where(s != 0, 1.0, 0.0)
                gu = tl.fma(gv, 1.0 - share * mark, gu)
                if SUM_ALPHA >= 0:
                    sum_alpha -= gv * us[t] * mark
            else:
                gu += gv
                if RESET_GRAD:
                    amount = s if RESET == "level" else sign(s, SIGNED)
                    if SUM_STEP >= 0:
                        sum_step = tl.fma(gd, amount * -share, sum_step)
                    if SUM_ALPHA >= 0:
                        sum_alpha = tl.fma(gd, amount * -gamma, sum_alpha)
            if SUM_LEAK >= 0 and t > 0:
                sum_leak += gu * vs[t]
            if SUM_GAIN >= 0:
                sum_gain += gu * zs[t]
            gz = gu * drive if GAIN else gu
            if SHOWN:
                shown += gz
                gz = shown
            if not SHOWN or t == 0:
                if SUM_HAT >= 0:
                    sum_current += gz
                    sum_hat = tl.fma(gz, xs[t].to(tl.float32) - centre, sum_hat)
                tl.store(po + offset, gz.to(out.dtype.element_ty), mask)
            if DETACH:
                gv = zero
            else:
                gv = gu * beta if LEAK else gu
            gd = gv if DECAY else gu
            if t > 0:
                po -= out_time

    deliver(partial, sum_current, SUM_CURRENT, column, known, programs, channels, WHOLE)
    if SUM_HAT >= 0:
        sum_hat = sum_hat * inverse_deviation(var, eps, column, known)
    deliver(partial, sum_hat, SUM_HAT, column, known, programs, channels, WHOLE)
    deliver(partial, sum_step, SUM_STEP, column, known, programs, channels, WHOLE)
    deliver(partial, sum_scale, SUM_SCALE, column, known, programs, channels, WHOLE)
    deliver(partial, sum_tail * worth, SUM_TAIL, column, known, programs, channels, WHOLE)
    deliver(partial, sum_leak, SUM_LEAK, column, known, programs, channels, WHOLE)
    deliver(partial, sum_alpha, SUM_ALPHA, column, known, programs, channels, WHOLE)
    deliver(partial, sum_gain, SUM_GAIN, column, known, programs, channels, WHOLE)


@triton.jit
def deliver(partial, tile, SLOT: tl.constexpr, column, known, programs, channels, WHOLE: tl.constexpr):
    """Write this program's share of a sum."""
    if SLOT >= 0:
        row = SLOT * programs + tl.program_id(0)
        if WHOLE:
            tl.store(partial + row, tl.sum(tl.sum(tile, axis=0), axis=0))
        else:
            tl.store(partial + tl.cast(row, tl.int64) * channels + column, tl.sum(tile, axis=0), known)


@triton.jit
def norm_backward(
    grad, x, out, sums, weight, mean, var, eps, portion, rows, channels, inner, elements,
    x_time, grad_time, out_time, programs, tiles, LAYOUT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of BatchNorm's input from that of its output.

    `sums` [2, channels] are the gradients of bias and weight; `portion` is 1 / count, 0 where statistics are frozen.
    """
    column, known = columns(channels, BC)
    centre = per_channel(mean, column, known, 0.0, True)
    narrow = inverse_deviation(var, eps, column, known)
    factor = narrow * per_channel(weight, column, known, 1.0, True)
    total = per_channel(sums, column, known, 0.0, True) * portion
    total_hat = per_channel(sums + channels, column, known, 0.0, True) * (portion * narrow)
    t = tl.cast(tl.program_id(2), tl.int64)
    grad += t * grad_time
    x += t * x_time
    out += t * out_time
    for tile in range(tiles):
        row0 = (tile * programs + tl.program_id(0)) * BR
        base, offset, mask = place(row0, rows, channels, inner, elements, LAYOUT, BR, BC)
        g = tl.load(grad + base + offset, mask, 0.0).to(tl.float32)
        d = tl.load(x + base + offset, mask, 0.0).to(tl.float32) - centre
        through = tl.where(portion > 0, total + d * total_hat, 0.0)  # frozen statistics pass no NaN on either
        tl.store(out + base + offset, (factor * (g - through)).to(out.dtype.element_ty), mask)


# Counting
# --------------------------------------------------------------------------------------------------------------------


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
        found = tl.sum((packed >> (k * BITS)) & ((1 << BITS) - 1), axis=1)
        at = counts + (t * positions + position) * (n_max + 1) + first + k
        known = position < tl.where(first + k <= n_max, positions, 0)
        tl.atomic_add(at, found.to(tl.int64), known, sem="relaxed")


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
            found = tl.histogram(tl.reshape(bin, [BR * BC]), BINS)
            tl.atomic_add(counts + t * bins + slot, found.to(tl.int64), (slot < bins) & (found > 0), sem="relaxed")
            px += x_time


# Statistics
# --------------------------------------------------------------------------------------------------------------------


@triton.jit
def moments_partial(
    x, partial, rows, channels, inner, elements, programs, tiles,
    LAYOUT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Each program's mean and sum of squared deviations by channel: `partial` [2, programs, channels].

    Sums are taken about the program's first row, so that a large mean costs no digits.
    """
    column, known = columns(channels, BC)
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
    kept = momentum * new + (1.0 - momentum) * old
    tl.store(running_mean + column, kept.to(running_mean.dtype.element_ty), known)
    old = tl.load(running_var + column, known, 0.0).to(tl.float32)
    new = tl.load(var + column, known, 0.0) * correction
    kept = momentum * new + (1.0 - momentum) * old
    tl.store(running_var + column, kept.to(running_var.dtype.element_ty), known)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)
