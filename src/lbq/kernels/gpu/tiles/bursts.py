"""Burst neurons over a whole sequence, with BatchNorm and a residual add in the same pass.

A program works on tiles of BR rows and BC channels and carries the membrane through all timesteps in registers. The
backward kernel recomputes the membrane from the input, then goes back in time. Sums over elements (gradients of the step,
the tail, ...) leave each program as one partial sum per channel, added up in a fixed order: no atomics, same bytes.
"""
# ruff: noqa: RUF005, SIM108
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lbq.kernels.gpu.tiles.slab import affine, columns, inverse_deviation, per_channel, place
from lbq.kernels.gpu.tiles.timestep import (
    after_reset,
    divide,
    dropped,
    integrate,
    quantise,
    set_bits,
    sign,
    slope,
    tail_slope,
)


@triton.jit
def burst_forward(
    x, residual, out, weight, bias, mean, var, step, scale, leak, alpha, gain, v_before, pending_before,
    n_max, eps, rows, channels, inner, elements, x_time, residual_time, out_time, programs, tiles,
    v_after, pending_after, emitted,
    T: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, BEFORE: tl.constexpr, PENDING: tl.constexpr,
    SCALE: tl.constexpr, STEPS: tl.constexpr, LEAK: tl.constexpr, GAIN: tl.constexpr, ROUNDING: tl.constexpr,
    RESET: tl.constexpr, DECAY: tl.constexpr, SIGNED: tl.constexpr, FMA: tl.constexpr, LAYOUT: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, AFTER: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Scaled outputs of all timesteps. x_time = 0 shows one slab at every timestep.

    BEFORE, PENDING: there is a membrane before the first timestep, and a reset to be subtracted from it. AFTER: both are
        written after the last one, the reset where the rule delays it.
    BITS > 0: each program writes to `emitted` [2, all programs] the sums of its |S| and of their lowest bits.
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
    if NORM:
        factor, shift = affine(weight, bias, mean, var, eps, column, known)

    sizes = tl.zeros([BR, BC], tl.float32)
    bits = sizes
    for tile in range(tiles):
        row0 = (tile * programs + tl.program_id(0)) * BR
        base, offset, mask = place(row0, rows, channels, inner, elements, LAYOUT, BR, BC)
        px = x + base
        pr = residual + base
        po = out + base
        v = tl.zeros([BR, BC], tl.float32)
        pending = v
        if BEFORE:
            v = tl.load(v_before + base + offset, mask, 0.0)
        if PENDING:
            pending = tl.load(pending_before + base + offset, mask, 0.0)
        for t in tl.static_range(T):
            z = tl.load(px + offset, mask, 0.0).to(tl.float32)
            if NORM:
                z = tl.fma(z, factor, shift)
            if RESIDUAL:
                z = z + tl.load(pr + offset, mask, 0.0).to(tl.float32)
            u = integrate(v, pending, z, beta, drive, t == 0 and not BEFORE, LEAK, GAIN, DECAY)
            s = quantise(divide(u, gamma, over, FMA), n_max, ROUNDING)
            tl.store(po + offset, (worth * s).to(out.dtype.element_ty), mask)
            if BITS > 0:
                sizes += tl.where(mask, tl.abs(s), 0.0)
                bits += tl.where(mask, set_bits(s, BITS), 0.0)
            pending = dropped(s, share, gamma, RESET, SIGNED)
            v = after_reset(u, s, pending, share, RESET, DECAY)
            px += x_time
            pr += residual_time
            po += out_time
        if AFTER:
            tl.store(v_after + base + offset, v, mask)
            if not DECAY and RESET != "hard":
                tl.store(pending_after + base + offset, pending, mask)
    if BITS > 0:
        row = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(emitted + row, tl.sum(tl.sum(sizes, axis=0), axis=0))
        tl.store(emitted + tl.num_programs(0) * tl.num_programs(1) + row, tl.sum(tl.sum(bits, axis=0), axis=0))


@triton.jit
def burst_backward(
    x, residual, out, weight, bias, mean, var, step, scale, leak, alpha, gain, v_before, pending_before,
    n_max, eps, rows, channels, inner, elements, x_time, residual_time, out_time, programs, tiles,
    grad, partial, tail, price, grad_time,
    T: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, BEFORE: tl.constexpr, PENDING: tl.constexpr,
    SCALE: tl.constexpr, STEPS: tl.constexpr, LEAK: tl.constexpr, GAIN: tl.constexpr, ROUNDING: tl.constexpr,
    RESET: tl.constexpr, DECAY: tl.constexpr, SIGNED: tl.constexpr, FMA: tl.constexpr, LAYOUT: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, SURROGATE: tl.constexpr, RESET_GRAD: tl.constexpr, DETACH: tl.constexpr,
    SUM_CURRENT: tl.constexpr, SUM_HAT: tl.constexpr, SUM_STEP: tl.constexpr, SUM_SCALE: tl.constexpr,
    SUM_TAIL: tl.constexpr, SUM_LEAK: tl.constexpr, SUM_ALPHA: tl.constexpr, SUM_GAIN: tl.constexpr,
    SHOWN: tl.constexpr, WHOLE: tl.constexpr, PRICED: tl.constexpr,
):  # fmt: skip
    """From the outputs' gradients to `out`, the gradient of what the neuron receives, and to sums over all elements.

    BEFORE, PENDING: as in the forward pass; both are constants.
    SHOWN: x is one slab, shown at every timestep; its gradient is summed over time.
    SUM_*: the place of each sum in `partial` [places, programs, channels], -1 where it is not needed. CURRENT and HAT are
        the gradients of BatchNorm's bias and weight, the others those of the neuron's constants.
    WHOLE: one sum for all channels, `partial` [places, programs].
    PRICED: every |S| has the gradient `price`, beside that of the outputs.
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
    if PRICED:
        fee = tl.load(price).to(tl.float32) / worth  # the same as a gradient of the output
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
        if BEFORE:
            v = tl.load(v_before + base + offset, mask, 0.0)
        if PENDING:
            pending = tl.load(pending_before + base + offset, mask, 0.0)
        rs, vs, us, zs = (), (), (), ()
        for t in tl.static_range(T):
            z = xs[0 if SHOWN else t].to(tl.float32)
            if NORM:
                z = tl.fma(z, factor, shift)
            if RESIDUAL:
                z = z + es[t].to(tl.float32)
            u = integrate(v, pending, z, beta, drive, t == 0 and not BEFORE, LEAK, GAIN, DECAY)
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
            h = g  # and with the price
            if PRICED:
                h = g + tl.where(mask, fee * sign(r, SIGNED) if SIGNED else fee, 0.0)
            gu = h * slope(m, n_max, strength, SURROGATE)
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
                sum_tail = tl.fma(h, lean * sign(r, SIGNED) if SIGNED else lean, sum_tail)
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
            if SUM_LEAK >= 0 and (t > 0 or BEFORE):
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
