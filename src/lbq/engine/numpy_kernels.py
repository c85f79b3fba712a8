"""Convolutions of integer levels in plain NumPy: what the native kernels must equal, and what runs where they are not built.

Faces and results are the native kernels': levels `[B, H, W, I]` and weights `[O, I, kh, kw]` to int32 currents
`[B, OH, OW, O]` and what was done for them. Three methods give the same currents:

- `bitplane` adds one weight row for every set bit of every level, plane by plane, and nothing for the others;
- `level` adds one weight row times the level for every level that is not zero;
- `dense` multiplies everything, in BLAS: float32 while every partial sum stays below 2^24, float64 below 2^53.

Beyond the native kernels' face they take dilated and grouped convolutions, levels above 8 bits, and int64 accumulators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lbq.engine.convolution import BACKENDS, METHODS, Backend, Counts, Method
from lbq.graph import output_size
from lbq.graph.levels import Integers, bit_planes, planes_of, row_sums

EXACT_IN_FLOAT32, EXACT_IN_FLOAT64 = 2**24, 2**53
GATHERED = 2**22  # weights gathered at a time, about


def pack(
    weights: NDArray[Any],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    accumulator: type[np.signedinteger[Any]] = np.int32,
) -> PackedConv:
    """Prepare weights `[O, I / groups, kh, kw]`, int8 or int16; currents have the type of `accumulator`."""
    if weights.dtype not in (np.int8, np.int16) or weights.ndim != 4:
        raise ValueError(f"weights must be int8 or int16 [O, I, kh, kw], got {weights.dtype} {list(weights.shape)}")
    return PackedConv(weights, stride, padding, dilation, groups, accumulator)


@dataclass
class _Events:
    """Inputs that act, sorted by image and position: `factor` is what each multiplies its weights by."""

    b: NDArray[np.int64]
    y: NDArray[np.int64]
    x: NDArray[np.int64]
    c: NDArray[np.int64]
    factor: Integers


class PackedConv:
    """One convolution, ready to run on many inputs."""

    def __init__(
        self,
        weights: NDArray[Any],
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        groups: int,
        accumulator: type[np.signedinteger[Any]],
    ) -> None:
        self.outputs, self.per_group, self.kh, self.kw = weights.shape
        self.inputs = self.per_group * groups
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.accumulator = accumulator
        self.rows = np.ascontiguousarray(weights.transpose(2, 3, 1, 0)).astype(accumulator)  # [kh, kw, I, O]
        self.heaviest = int(row_sums(weights).max(initial=0))
        self._dense: dict[type, NDArray[Any]] = {}

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return output_size((height, width), (self.kh, self.kw), self.stride, self.padding, self.dilation)

    def run(
        self,
        levels: Integers,
        method: Method = "bitplane",
        backend: Backend = "horner",
        threads: int = 1,  # noqa: ARG002 - the native kernels' face; NumPy's BLAS has threads of its own
        out: NDArray[Any] | None = None,
        largest: int | None = None,
    ) -> tuple[NDArray[Any], Counts]:
        """Currents of `levels` [B, H, W, I], and what was done. largest: of the levels, where it is known."""
        if levels.ndim != 4 or levels.shape[3] != self.inputs or levels.dtype.kind not in "iu":
            raise ValueError(
                f"levels must be integers [B, H, W, {self.inputs}], got {levels.dtype} {list(levels.shape)}"
            )
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        size = self.output_size(*levels.shape[1:3])
        if out is None:
            out = np.empty((len(levels), *size, self.outputs), self.accumulator)
        if method == "dense":
            self._multiply(levels, out)
            return out, Counts()
        counts, planes = Counts(), planes_of(levels) if largest is None else largest.bit_length()
        together = max(GATHERED // max(levels[0].size * self.outputs if len(levels) else 1, 1), 1)
        for start in range(0, len(levels), together):  # a few images at a time, so that gathered rows stay small
            some, acc = levels[start : start + together], out[start : start + together].reshape(-1, self.outputs)
            acc[:] = 0
            if method == "level":
                counts += self._by_level(some, acc, size)
            else:
                counts += self._by_planes(some, acc, size, planes, backend)
        return out, counts

    def keep(self, method: Method) -> None:
        """Drop what other methods need; it is made again if needed."""
        if method != "dense":
            self._dense.clear()

    def _multiply(self, levels: Integers, out: NDArray[Any]) -> None:
        largest = self.heaviest * max(int(levels.max(initial=0)), -int(levels.min(initial=0)))
        kind = np.float32 if largest < EXACT_IN_FLOAT32 else np.float64
        if largest >= EXACT_IN_FLOAT64:
            raise ValueError(f"levels reach sums of {largest}, which float64 does not hold exactly")
        if kind not in self._dense:
            rows = self.rows.reshape(-1, self.outputs)
            self._dense[kind] = rows.astype(kind)
        weights, step = self._dense[kind], self.outputs // self.groups
        (ph, pw), (sh, sw), (dh, dw) = self.padding, self.stride, self.dilation
        for i in range(len(levels)):
            x = np.pad(levels[i].astype(kind), ((ph, ph), (pw, pw), (0, 0)))
            windows = sliding_window_view(x, ((self.kh - 1) * dh + 1, (self.kw - 1) * dw + 1), (0, 1))
            windows = windows[::sh, ::sw, :, ::dh, ::dw].transpose(0, 1, 3, 4, 2)  # [OH, OW, kh, kw, I]
            for g in range(self.groups):
                part = windows[..., g * self.per_group : (g + 1) * self.per_group]
                mine = slice(g * step, (g + 1) * step)
                out[i, :, :, mine] = np.matmul(part.reshape(-1, weights.shape[0]), weights[:, mine]).reshape(
                    *out.shape[1:3], step
                )

    def _by_level(self, level: Integers, acc: NDArray[Any], size: tuple[int, int]) -> Counts:
        b, y, x, c = np.nonzero(level)
        events = _Events(b, y, x, c, level[b, y, x, c].astype(self.accumulator))
        return Counts(self._gather(events, acc, size, self.rows), 0, 0, 0, len(b))

    def _by_planes(
        self, level: Integers, acc: NDArray[Any], size: tuple[int, int], planes: int, backend: Backend
    ) -> Counts:
        signs = np.sign(level.astype(self.accumulator))
        counts = Counts(neurons_active=int(np.count_nonzero(level)))
        formed = bit_planes(level, planes)
        for k in reversed(range(planes)):
            if backend == "horner" and k != planes - 1:
                acc <<= 1
                counts.horner_shifts += acc.size
            b, y, x, c = np.nonzero(formed[k])
            counts.formations += len(b)
            if not len(b):
                continue  # a zero plane costs nothing
            events = _Events(b, y, x, c, signs[b, y, x, c])
            rows = self.rows << k if backend == "preshifted" else self.rows
            added = self._gather(events, acc, size, rows, k if backend in ("fused", "explicit") else 0)
            counts.accumulations += added
            if backend == "explicit" and k:
                counts.shifts += added
        return counts

    def _gather(
        self, events: _Events, acc: NDArray[Any], size: tuple[int, int], rows: NDArray[Any], shift: int = 0
    ) -> int:
        """Add the weight rows that the events meet into `acc` [B * OH * OW, O]; says how many weights that were."""
        step, added = self.outputs // self.groups, 0
        for g, mine in self._groups(events):
            columns = slice(g * step, (g + 1) * step)
            for ky in range(self.kh):
                oy, ry = np.divmod(mine.y + self.padding[0] - ky * self.dilation[0], self.stride[0])
                in_y = (ry == 0) & (oy >= 0) & (oy < size[0])
                for kx in range(self.kw):
                    ox, rx = np.divmod(mine.x + self.padding[1] - kx * self.dilation[1], self.stride[1])
                    hit = np.flatnonzero(in_y & (rx == 0) & (ox >= 0) & (ox < size[1]))
                    if not hit.size:
                        continue
                    target = (mine.b[hit] * size[0] + oy[hit]) * size[1] + ox[hit]
                    met = (rows[ky, kx, :, columns][mine.c[hit]] << shift) * mine.factor[hit, None]
                    starts = np.flatnonzero(np.diff(target, prepend=-1))
                    acc[target[starts], columns] += np.add.reduceat(met, starts, axis=0)
                    added += hit.size * step
        return added

    def _groups(self, events: _Events) -> Iterator[tuple[int, _Events]]:
        if self.groups == 1:
            yield 0, events
            return
        group = events.c // self.per_group
        for g in range(self.groups):
            chosen = group == g
            parts = (v[chosen] for v in (events.b, events.y, events.x, events.c - g * self.per_group, events.factor))
            yield g, _Events(*parts)
