"""Currents of one synapse from integer levels: densely (the oracle), or by its non-zero bit planes.

Bit planes (Eqs. bitplane_decomp, bit_sparse_product): a level S is the sum of 2^k over its set bits, so its product
with a weight is one accumulation of 2^k * weight for each set bit, and nothing for the others. This executor does just
that, gathering weight rows for the list of set bits, and counts each accumulation as it happens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lbq.graph import Array, Pool, Synapse

Levels = NDArray[np.int64]


@dataclass
class Tally:
    """What an executor did for one synapse: weight accumulations, and those that came from a plane k >= 1."""

    accumulations: int = 0
    shifted: int = 0


def pool(x: NDArray[np.generic], pools: tuple[Pool, ...]) -> NDArray[np.generic]:
    """Max- or sum-pool `[B, C, H, W]`, in order."""
    for p in pools:
        (ph, pw), floor = p.padding, 0
        if p.kind == "max" and x.dtype.kind in "if":
            floor = int(x.min(initial=0)) - 1 if x.dtype.kind == "i" else -np.inf  # type: ignore[assignment]
        x = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=floor)
        windows = sliding_window_view(x, p.kernel, (2, 3))[:, :, :: p.stride[0], :: p.stride[1]]
        x = windows.max((-2, -1)) if p.kind == "max" else windows.sum((-2, -1))
    return x


def dense(synapse: Synapse, x: Array) -> Array:
    """Currents `[B, O, OH, OW]` of `x` [B, C, H, W] by a plain convolution."""
    if synapse.kind == "identity":
        return x * synapse.weight[:, None, None]
    (ph, pw), (sh, sw), (dh, dw) = synapse.padding, synapse.stride, synapse.dilation
    outputs, per_group, kh, kw = synapse.weight.shape
    x = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    windows = sliding_window_view(x, ((kh - 1) * dh + 1, (kw - 1) * dw + 1), (2, 3))
    windows = windows[:, :, ::sh, ::sw, ::dh, ::dw]
    out = np.empty((x.shape[0], outputs, *windows.shape[2:4]))
    step = outputs // synapse.groups
    for g in range(synapse.groups):
        rows = slice(g * step, (g + 1) * step)
        part = windows[:, g * per_group : (g + 1) * per_group]
        out[:, rows] = np.moveaxis(np.tensordot(part, synapse.weight[rows], axes=((1, 4, 5), (1, 2, 3))), -1, 1)
    return out


def bit_planes(level: Levels, planes: int) -> NDArray[np.bool_]:
    """b_k of the magnitudes, `[K, ...]` (Eq. bitplane_decomp)."""
    return (np.abs(level)[None] >> np.arange(planes).reshape(-1, *[1] * level.ndim) & 1).astype(bool)


def bitplane(synapse: Synapse, level: Levels, planes: int, tally: Tally) -> Array:
    """Currents `[B, O, OH, OW]` of integer levels `[B, C, H, W]`, one accumulation per set bit and weight."""
    batch, channels = level.shape[:2]
    outputs, height, width = synapse.out_shape
    acc = np.zeros((batch * height * width, outputs))
    nhwc = level.transpose(0, 2, 3, 1)  # events sorted by position: their output rows come out sorted too
    sign = np.sign(nhwc)
    for k, plane in enumerate(bit_planes(nhwc, planes)):
        if not plane.any():
            continue  # a zero plane costs nothing
        b, y, x, c = np.nonzero(plane)
        events = Events(b, y, x, c, sign[plane], 2.0**k)
        before = tally.accumulations
        if synapse.kind == "identity":
            row = (events.b * height + events.y) * width + events.x
            acc[row, events.c] += events.weight * events.signs * synapse.weight[events.c]
            tally.accumulations += events.b.size
        else:
            for g in range(synapse.groups):
                _gather(synapse, g, events.of_group(g, channels // synapse.groups), acc, tally)
        if k:
            tally.shifted += tally.accumulations - before
    return acc.reshape(batch, height, width, outputs).transpose(0, 3, 1, 2)


@dataclass
class Events:
    """Set bits of one plane, sorted by sample and position; `weight` is 2^k."""

    b: NDArray[np.int64]
    y: NDArray[np.int64]
    x: NDArray[np.int64]
    c: NDArray[np.int64]
    signs: NDArray[np.int64]
    weight: float

    def of_group(self, group: int, channels: int) -> Events:
        mine = self.c // channels == group
        if mine.all():
            return Events(self.b, self.y, self.x, self.c - group * channels, self.signs, self.weight)
        b, y, x, c = (v[mine] for v in (self.b, self.y, self.x, self.c))
        return Events(b, y, x, c - group * channels, self.signs[mine], self.weight)


def _gather(synapse: Synapse, group: int, events: Events, acc: Array, tally: Tally) -> None:
    """Add the weight rows that a group's events meet into `acc` [B * OH * OW, O], tap by tap."""
    _, height, width = synapse.out_shape
    step = synapse.weight.shape[0] // synapse.groups
    mine = slice(group * step, (group + 1) * step)
    rows_of = synapse.weight[mine].transpose(2, 3, 1, 0) * events.weight  # [kh, kw, C, O]: 2^k is exact
    for ky in range(rows_of.shape[0]):
        oy, ry = np.divmod(events.y + synapse.padding[0] - ky * synapse.dilation[0], synapse.stride[0])
        in_y = (ry == 0) & (oy >= 0) & (oy < height)
        for kx in range(rows_of.shape[1]):
            ox, rx = np.divmod(events.x + synapse.padding[1] - kx * synapse.dilation[1], synapse.stride[1])
            hit = np.flatnonzero(in_y & (rx == 0) & (ox >= 0) & (ox < width))
            if not hit.size:
                continue
            target = (events.b[hit] * height + oy[hit]) * width + ox[hit]
            rows = rows_of[ky, kx, events.c[hit]] * events.signs[hit, None]
            starts = np.flatnonzero(np.diff(target, prepend=-1))
            acc[target[starts], mine] += np.add.reduceat(rows, starts, axis=0)
            tally.accumulations += hit.size * step
