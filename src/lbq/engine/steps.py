"""Sums of currents, pooling, the readout and tallies of levels by the native library. No torch.

A step can be performed again (see tape.py). All arrays are channels last and contiguous.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq import native
from lbq.engine.convolution import Backend, Counts, plane_counts
from lbq.engine.tape import Step, address, library, ready
from lbq.graph import Pool, output_size
from lbq.native import structure

AddCall = structure(int64="size period", pointer="out more")  # struct lbq_add
PoolCall = structure(  # struct lbq_pool
    int64="batch height width channels together out_height out_width kh kw stride_y stride_x pad_y pad_x",
    pointer="levels bytes wide",
    int32="is_signed is_sum",
)
ReadoutCall = structure(  # struct lbq_readout
    int64="timesteps batch features classes planes",
    pointer="levels sums weights bias logits counts",
    int32="is_signed",
)
TallyCall = structure(  # struct lbq_tally
    int64="timesteps batch sites channels n_max", pointer="levels counts", int32="is_signed isa"
)
HistogramCall = structure(  # struct lbq_histogram
    int64="n channels bins", pointer="values step counts", double="low width"
)


def add_step(out: NDArray[np.int32], more: NDArray[np.int32]) -> Step:
    """out += more, int32. A shorter `more` is repeated: it is the same at every timestep."""
    assert out.size % more.size == 0
    assert out.dtype == more.dtype == np.int32
    return Step("add", AddCall(out.size, more.size, address(out), address(more)), out, more)


class PoolStep(Step):
    """The largest level or the sum of each window, in `out` [B, OH, OW, C]: int32 if `wide`, else of the levels' type."""

    def __init__(self, levels: NDArray[Any], pool: Pool, wide: bool = False) -> None:
        assert levels.dtype in (np.uint8, np.int8)
        assert levels.flags.c_contiguous
        assert pool.channels == 1 or pool.kind == "sum"
        batch, height, width, channels = (*levels.shape[:3], levels.shape[3] // pool.channels)
        size = output_size((height, width), pool.kernel, pool.stride, pool.padding)
        self.out: NDArray[Any] = np.empty((batch, *size, channels), np.int32 if wide else levels.dtype)
        call = PoolCall(batch, height, width, channels, pool.channels, *size, *pool.kernel, *pool.stride, *pool.padding)
        call.levels, call.is_signed, call.is_sum = address(levels), levels.dtype == np.int8, pool.kind == "sum"
        call.bytes, call.wide = (None, address(self.out)) if wide else (address(self.out), None)
        super().__init__("pool", call, levels, self.out)


class ReadoutStep(Step):
    """Logits, int64 `[B, classes]`: the bias plus the weights of the features' set bits.

    levels: `[T * B, ...]`, with as many features as `weights` [features, classes] has rows. They are summed over time first.
    bias: None adds to the logits that are there. largest: the largest sum over time.
    """

    def __init__(
        self,
        levels: NDArray[Any],
        weights: NDArray[np.int64],
        bias: NDArray[np.int64] | None,
        logits: NDArray[np.int64],
        timesteps: int,
        largest: int,
        backend: Backend,
    ) -> None:
        features, classes = weights.shape
        narrow = levels.dtype in (np.uint8, np.int8)
        assert narrow or levels.dtype == np.int32
        assert levels.size == timesteps * len(logits) * features
        assert levels.flags.c_contiguous
        assert logits.flags.c_contiguous
        self.backend, self.counted = backend, np.zeros(5, np.int64)
        self.shifts = (largest.bit_length() - 1) * logits.size
        weights, bias = ready(weights, np.int64), None if bias is None else ready(bias, np.int64)
        call = ReadoutCall(timesteps, len(logits), features, classes)
        call.planes = max(largest.bit_length(), 1) if backend == "horner" else 1
        call.levels, call.sums = (address(levels), None) if narrow else (None, address(levels))
        call.weights, call.bias, call.logits = address(weights), address(bias), address(logits)
        call.counts, call.is_signed = address(self.counted), levels.dtype == np.int8
        super().__init__("readout", call, levels, weights, bias, logits, self.counted)

    def counts(self) -> Counts:
        self.counted[4] = self.counted[0]  # one by one
        return plane_counts(self.counted, self.backend, self.shifts)


class Tally:
    """How often each magnitude 0..n_max occurs at each position, `[T, H * W, n_max + 1]`, in levels `[T, B, H, W, C]`.

    Each call adds the levels that are then in memory to `counts`. into: the array to use for `counts`.
    """

    def __init__(self, levels: NDArray[Any], n_max: int, into: NDArray[np.int64] | None = None) -> None:
        assert levels.dtype in (np.uint8, np.int8)
        assert levels.flags.c_contiguous
        steps, batch, height, width, channels = levels.shape
        shape = (steps, height * width, n_max + 1)
        self.counts: NDArray[np.int64] = np.zeros(shape, np.int64) if into is None else into
        assert self.counts.shape == shape
        assert self.counts.flags.c_contiguous
        call = TallyCall(steps, batch, height * width, channels, n_max, address(levels), address(self.counts))
        call.is_signed, call.isa = levels.dtype == np.int8, native.ISAS[native.isa()]
        self._levels, self._call, self._count = levels, call, library().lbq_tally

    def __call__(self) -> NDArray[np.int64]:
        if self._count(ctypes.byref(self._call)):
            raise ValueError(f"levels must not exceed {self._call.n_max}")
        return self.counts


def histogram(
    values: NDArray[np.int32], step: NDArray[np.float64], low: float, width: float, bins: int
) -> NDArray[np.int64]:
    """How many of the values `[..., C]`, divided by their channel's step, lie in each bin.

    Bins are `width` wide and begin at `low`. The first and the last bin also hold what lies beyond.
    """
    assert values.dtype == np.int32
    assert step.shape == values.shape[-1:]
    values, step, counts = ready(values), ready(step, np.float64), np.zeros(bins, np.int64)
    call = HistogramCall(values.size // max(len(step), 1), len(step), bins)
    call.values, call.step, call.counts = address(values), address(step), address(counts)
    call.low, call.width = low, width
    library().lbq_histogram(ctypes.byref(call))
    return counts
