"""Convolutions of integer levels in plain NumPy: the native kernels must equal them, and they run where those are not built.

They take and return the same as the native kernels, and also dilated and grouped convolutions, levels above 8 bits and int64
accumulators. The method `dense` multiplies in BLAS: float32 while every partial sum stays below 2^24, float64 below 2^53.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lbq.engine.convolution import Backend, Counts, Method, check_names
from lbq.graph import output_size
from lbq.graph.integer import FLOAT32_BOUND, FLOAT64_BOUND
from lbq.graph.levels import Integers, bit_planes, planes_of, row_sums

WEIGHTS_PER_GATHER = 2**22  # about as many are gathered at a time


class PackedConv:
    """One convolution of weights `[O, I / groups, kh, kw]`, int8 or int16. Currents have the type of `accumulator`."""

    def __init__(
        self,
        weights: NDArray[Any],
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] = (0, 0),
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
        accumulator: type[np.signedinteger[Any]] = np.int32,
    ) -> None:
        if weights.dtype not in (np.int8, np.int16) or weights.ndim != 4:
            raise ValueError(f"weights must be int8 or int16 [O, I, kh, kw], got {weights.dtype} {list(weights.shape)}")
        self.outputs, self.per_group, self.kh, self.kw = weights.shape
        self.inputs = self.per_group * groups
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.accumulator = accumulator
        self.rows = np.ascontiguousarray(weights.transpose(2, 3, 1, 0)).astype(accumulator)  # [kh, kw, I, O]
        self.heaviest = int(row_sums(weights).max(initial=0))
        self._dense: dict[type, NDArray[Any]] = {}

    def run(
        self,
        levels: Integers,
        method: Method = "bitplane",
        backend: Backend = "horner",
        out: NDArray[Any] | None = None,
        largest: int | None = None,
    ) -> tuple[NDArray[Any], Counts]:
        """Currents of `levels` [B, H, W, I], and what was done. largest: the largest level, where it is known already."""
        if levels.ndim != 4 or levels.shape[3] != self.inputs or levels.dtype.kind not in "iu":
            raise ValueError(f"levels must be integers [B, H, W, {self.inputs}], got {levels.dtype} {levels.shape}")
        check_names(method, backend)
        size = output_size(levels.shape[1:3], (self.kh, self.kw), self.stride, self.padding, self.dilation)
        if out is None:
            out = np.empty((len(levels), *size, self.outputs), self.accumulator)
        if method == "dense":
            self._multiply(levels, out)
            return out, Counts()
        counts, planes = Counts(), planes_of(levels) if largest is None else largest.bit_length()
        images = max(WEIGHTS_PER_GATHER // max(levels[0].size * self.outputs if len(levels) else 1, 1), 1)
        for start in range(0, len(levels), images):  # a few images at a time, so that gathered rows stay small
            some, acc = levels[start : start + images], out[start : start + images].reshape(-1, self.outputs)
            acc[:] = 0
            counts += self._by_planes(some, acc, size, planes, backend)
        return out, counts

    def _multiply(self, levels: Integers, out: NDArray[Any]) -> None:
        largest = self.heaviest * max(int(levels.max(initial=0)), -int(levels.min(initial=0)))
        kind = np.float32 if largest < FLOAT32_BOUND else np.float64
        if largest >= FLOAT64_BOUND:
            raise ValueError(f"levels reach sums of {largest}, which float64 does not hold exactly")
        if kind not in self._dense:
            self._dense[kind] = self.rows.reshape(-1, self.outputs).astype(kind)
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

    def _by_planes(
        self, levels: Integers, acc: NDArray[Any], size: tuple[int, int], planes: int, backend: Backend
    ) -> Counts:
        """Add the rows of every plane's set bits. The backend decides which shifts count, and not the currents."""
        signs = np.sign(levels.astype(self.accumulator))
        counts = Counts(neurons_active=int(np.count_nonzero(levels)))
        for k, plane in enumerate(bit_planes(levels, planes)):
            at = np.nonzero(plane)
            added = self._gather(at, signs[at] << k, acc, size)
            counts.formations += len(at[0])
            counts.accumulations += added
            counts.additions += added
            counts.shifts += added if backend == "explicit" and k else 0
            counts.horner_shifts += acc.size if backend == "horner" and k else 0
        return counts

    def _gather(
        self, at: tuple[NDArray[np.intp], ...], factors: Integers, acc: NDArray[Any], size: tuple[int, int]
    ) -> int:
        """Add the weight rows that some inputs meet to `acc` [B * OH * OW, O]; return how many weights were added.

        at: image, y, x and channel of the inputs, sorted by image and position. factors: what each multiplies its rows by.
        """
        step, added = self.outputs // self.groups, 0
        for g in range(self.groups):
            mine = slice(None) if self.groups == 1 else np.flatnonzero(at[3] // self.per_group == g)
            b, y, x, c = (index[mine] for index in at)
            c, factor = c - g * self.per_group, factors[mine].astype(self.accumulator)
            columns = slice(g * step, (g + 1) * step)
            for ky in range(self.kh):
                oy, ry = np.divmod(y + self.padding[0] - ky * self.dilation[0], self.stride[0])
                in_y = (ry == 0) & (oy >= 0) & (oy < size[0])
                for kx in range(self.kw):
                    ox, rx = np.divmod(x + self.padding[1] - kx * self.dilation[1], self.stride[1])
                    hit = np.flatnonzero(in_y & (rx == 0) & (ox >= 0) & (ox < size[1]))
                    if not hit.size:
                        continue
                    target = (b[hit] * size[0] + oy[hit]) * size[1] + ox[hit]
                    met = self.rows[ky, kx, :, columns][c[hit]] * factor[hit, None]
                    starts = np.flatnonzero(np.diff(target, prepend=-1))
                    acc[target[starts], columns] += np.add.reduceat(met, starts, axis=0)
                    added += hit.size * step
        return added
