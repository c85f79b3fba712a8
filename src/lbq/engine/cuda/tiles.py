"""An integer layer on a GPU, in Triton: convolutions of 8-bit levels on matrix units, and the neuron behind them.

A program computes BM positions times BN channels. It goes through all timesteps and keeps the membrane in registers, so that
a layer reads its levels and writes its own once, as bytes. A convolution is a product of matrices that are never laid out:
for each tap of the kernel, the positions read their neighbours. Sums are int32, exact.

Levels lie as `[T, B, height, width, channels]`, int8, with a border that holds what padding stands for, so that no tap asks
whether it is inside. Channels are filled up to a multiple of 32 with weights of 0 and thresholds that nothing reaches.
"""
# ruff: noqa: E741, RET505, SIM108
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolved(
    acc, levels, weights, at, inside, n,
    ROW: tl.constexpr, C: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + the convolution at the offsets `at` of each position's first tap. weights [KH * KW, O, C]: 8-bit matrix units want
    both operands contiguous along the sum."""
    k = tl.arange(0, BK)
    for i in range(KH * KW * (C // BK)):
        tap = i // (C // BK)
        first = (i % (C // BK)) * BK
        a = tl.load(
            levels + (at + (tap // KW) * ROW + (tap % KW) * C + first)[:, None] + k[None, :], inside[:, None], 0
        )
        b = tl.load(weights + ((tap * O + n) * C + first)[:, None] + k[None, :])
        acc = tl.dot(a, tl.trans(b), acc, out_dtype=tl.int32)
    return acc


@triton.jit
def leaked(v, M: tl.constexpr, K: tl.constexpr):
    """v * M / 2^K, rounding half up. |v| < 2^30."""
    if M == 1:
        return (v + (1 << (K - 1))) >> K
    else:
        return ((v.to(tl.int64) * M + (1 << (K - 1))) >> K).to(tl.int32)


@triton.jit
def conv_fire(
    levels_0, weights_0, levels_1, weights_1, shortcut, shortcut_weight, bias, thresholds, reset, out,
    batch, time_0, image_0, time_1, image_1, shortcut_time, shortcut_image, out_time, out_image,
    T: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, O: tl.constexpr,
    ROW_0: tl.constexpr, C_0: tl.constexpr, KH_0: tl.constexpr, KW_0: tl.constexpr, SY_0: tl.constexpr, SX_0: tl.constexpr,
    BK_0: tl.constexpr,
    ROW_1: tl.constexpr, C_1: tl.constexpr, KH_1: tl.constexpr, KW_1: tl.constexpr, SY_1: tl.constexpr, SX_1: tl.constexpr,
    BK_1: tl.constexpr,
    SHORTCUT_ROW: tl.constexpr, OUT_ROW: tl.constexpr,
    CONVS: tl.constexpr, SHORTCUT: tl.constexpr, STATIC: tl.constexpr, BIAS_MAP: tl.constexpr, FRACTION: tl.constexpr,
    N: tl.constexpr, SIGNED: tl.constexpr, RESET: tl.constexpr, DECAY: tl.constexpr, LEAK_M: tl.constexpr,
    LEAK_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """All timesteps of a layer with one or two convolutions (CONVS) and an identity shortcut (SHORTCUT).

    levels_*, shortcut, out: pointers to the first tap of the first position, and to the first position. ROW: bytes from one
    row of pixels to the next. STATIC: the levels are those of an image, whose current is the same at every timestep.
    LEAK_K = 0: no leak.
    """
    pid = tl.program_id(0)
    m = (pid // (O // BN)) * BM + tl.arange(0, BM)
    n = (pid % (O // BN)) * BN + tl.arange(0, BN)
    inside = m < batch * (HO * WO)
    image = m // (HO * WO)
    place = m % (HO * WO)
    y = place // WO
    x = place % WO
    at_0 = image * image_0 + y * (SY_0 * ROW_0) + x * (SX_0 * C_0)
    if BIAS_MAP:
        offset = tl.load(bias + (place * O)[:, None] + n[None, :])
    else:
        offset = tl.load(bias + n)[None, :]
    drop = tl.load(reset + n)[None, :]
    zero = tl.zeros((BM, BN), tl.int32)
    if STATIC:
        image_current = convolved(zero, levels_0, weights_0, at_0, inside, n, ROW_0, C_0, O, KH_0, KW_0, BK_0)
    v = zero
    pending = zero
    for t in range(T):
        if STATIC:
            u = image_current
        else:
            u = convolved(zero, levels_0 + t * time_0, weights_0, at_0, inside, n, ROW_0, C_0, O, KH_0, KW_0, BK_0)
        if CONVS == 2:
            at_1 = image * image_1 + y * (SY_1 * ROW_1) + x * (SX_1 * C_1)
            u = convolved(u, levels_1 + t * time_1, weights_1, at_1, inside, n, ROW_1, C_1, O, KH_1, KW_1, BK_1)
        u = (u << FRACTION) + offset
        if SHORTCUT:
            from_ = t * shortcut_time + image * shortcut_image + y * SHORTCUT_ROW + x * O
            read = tl.load(shortcut + from_[:, None] + n[None, :], inside[:, None], 0).to(tl.int32)
            u += read * tl.load(shortcut_weight + n)[None, :]
        if LEAK_K > 0:
            u += leaked(v, LEAK_M, LEAK_K)
        else:
            u += v
        if not DECAY and RESET != "hard":
            u -= pending
        size = tl.abs(u) if SIGNED else u
        s = zero
        for level in range(N):
            s += (size >= tl.load(thresholds + level * O + n)[None, :]).to(tl.int32)
        fired = s > 0
        if SIGNED:
            s = tl.where(u < 0, -s, s)
        if RESET == "hard":
            v = tl.where(fired, 0, u)
        else:
            if RESET == "level":
                lost = s * drop
            elif SIGNED:
                lost = tl.where(fired, tl.where(u < 0, -drop, drop), 0)
            else:
                lost = tl.where(fired, drop, 0)
            if DECAY:
                v = u - lost
            else:
                v = u
                pending = lost
        to = t * out_time + image * out_image + y * OUT_ROW + x * O
        tl.store(out + to[:, None] + n[None, :], s.to(tl.int8), inside[:, None])


@triton.jit
def summed(
    levels, out, time, image, T: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """out [batch, C], int32: levels added up over all positions and timesteps."""
    b = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BP, BC), tl.int32)
    p = tl.arange(0, BP)
    for t in range(T):
        for first in range(0, H * W, BP):
            place = first + p
            at = t * time + b * image + (place // W) * ROW + (place % W) * C
            total += tl.load(levels + at[:, None] + c[None, :], (place < H * W)[:, None], 0).to(tl.int32)
    tl.store(out + b * C + c, tl.sum(total, axis=0))


@triton.jit
def pooled(
    levels, out, total, time, image, out_time, out_image, images, H, W, HO, WO, KH, KW, SY, SX, PY, PX,
    ROW: tl.constexpr, OUT_ROW: tl.constexpr, C: tl.constexpr, MAX: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Levels pooled over windows of KH * KW positions: the largest, or the sum. total: positions of all images and steps."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    place = m % (HO * WO)
    rest = m // (HO * WO)
    from_ = (rest // images) * time + (rest % images) * image
    y0 = (place // WO) * SY - PY
    x0 = (place % WO) * SX - PX
    result = tl.full((BM, BC), -128 if MAX else 0, tl.int32)
    for k in range(KH * KW):
        y = y0 + k // KW
        x = x0 + k % KW
        valid = (m < total) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        read = tl.load(levels + (from_ + y * ROW + x * C)[:, None] + c[None, :], valid[:, None], -128 if MAX else 0)
        if MAX:
            result = tl.maximum(result, read.to(tl.int32))
        else:
            result += read.to(tl.int32)
    to = (rest // images) * out_time + (rest % images) * out_image + (place // WO) * OUT_ROW + (place % WO) * C
    tl.store(out + to[:, None] + c[None, :], result.to(tl.int8), (m < total)[:, None])
