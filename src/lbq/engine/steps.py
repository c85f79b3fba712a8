"""What lies between convolutions, by the native library: neurons, sums of currents, pooling, the readout; and tallies of
levels. No torch.

`..._step` makes a step that can be performed again (see tape.py); all arrays are channels last and contiguous.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lbq import native
from lbq.engine.convolution import Backend, Counts
from lbq.engine.tape import Step, address, library, perform, ready
from lbq.graph import Pool, output_size
from lbq.graph.levels import highest_level

RESETS: dict[str, int] = {"once": 0, "level": 1, "hard": 2}  # the enum of native.h


# Neurons
# ---------------------------------------------------------------------------------------------------------------------


class _NeuronCall(ctypes.Structure):
    """struct lbq_neuron of native.h."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("timesteps", "batch", "sites", "channels", "n_max", "identities")),
        *((n, ctypes.c_void_p) for n in ("currents", "bias", "thresholds", "reset")),
        *((n, ctypes.c_void_p) for n in ("identity_weights", "identity_levels", "levels", "counts", "identity_signed")),
        ("membranes", ctypes.c_void_p),
        *((n, ctypes.c_int32) for n in ("is_static", "bias_map", "fraction", "leak_m", "leak_k", "reset_kind")),
        *((n, ctypes.c_int32) for n in ("decay_reset", "is_signed", "isa")),
    )


@dataclass(frozen=True)
class Emitted:
    """What a layer emitted: levels that are not zero, and the set bits of all."""

    active: int
    bits: int


class NeuronStep(Step):
    """A layer of neurons; `emitted` says what they emitted when it was last performed."""

    def __init__(self, call: _NeuronCall, counted: NDArray[np.int64], *held: Any) -> None:
        super().__init__("neuron", call, counted, *held)
        self.counted = counted

    def emitted(self) -> Emitted:
        return Emitted(int(self.counted[0]), int(self.counted[1]))


def neuron_step(
    currents: NDArray[np.int32] | None,
    out: NDArray[Any],
    *,
    timesteps: int,
    thresholds: NDArray[np.int32],
    reset: NDArray[np.int32],
    bias: NDArray[np.int32],
    fraction: int = 0,
    leak: tuple[int, int] | None = None,
    reset_kind: Literal["once", "level", "hard"] = "once",
    decay_reset: bool = True,
    shortcuts: Sequence[tuple[NDArray[np.int32], NDArray[Any]]] = (),
    static: bool = False,
    membranes: NDArray[np.int32] | None = None,
) -> NeuronStep:
    """Levels of a layer over a sequence, from rest, written to `out` [T * B, H, W, C], uint8 or, where signed, int8.

    currents: int32 `[T * B, H, W, C]`, `[B, H, W, C]` where `static` (the same at every timestep), or None.
    thresholds: int32 `[C, n_max]`; S counts those that U reaches (|U| where signed, S then having U's sign).
    reset: int32 `[C]`, subtracted where S != 0 (`once`, with the sign of S) or times S (`level`); `hard` sets V to 0.
    bias: int32 `[C]` or `[H, W, C]`; leak: (m, k) for V * m / 2^k rounded half up, None for no leak.
    decay_reset: False subtracts the reset at the next timestep, after the leak.
    shortcuts: weights int32 `[C]` and levels `[T * B, H, W, C]` of identity synapses.
    membranes: written where given, int32 `[T * B, H, W, C]`: U at every timestep.
    The caller has proved that every sum fits int32.
    """
    if out.ndim != 4 or out.dtype not in (np.uint8, np.int8) or not out.flags.c_contiguous or timesteps < 1:
        raise ValueError(f"out must be contiguous uint8 or int8 [T * B, H, W, C], got {out.dtype} {list(out.shape)}")
    batch, channels = len(out) // timesteps, out.shape[3]
    signed = out.dtype == np.int8
    expected = (batch if static else len(out), *out.shape[1:])
    if len(out) != timesteps * batch or (currents is not None and currents.shape != expected):
        raise ValueError(f"currents must be {list(expected)} for {timesteps} timesteps of out {list(out.shape)}")
    if thresholds.ndim != 2 or len(thresholds) != channels or thresholds.shape[1] > highest_level(signed):
        raise ValueError(f"thresholds must be [{channels}, n_max] with 8-bit levels, got {list(thresholds.shape)}")
    if reset.shape != (channels,) or bias.shape not in ((channels,), out.shape[1:]):
        raise ValueError(f"reset must be [{channels}] and bias that or {list(out.shape[1:])}")
    if leak is not None and not (1 <= leak[1] <= 30 and 0 <= leak[0] <= 1 << leak[1]):
        raise ValueError(f"leak must be (m, k) with k in 1..30 and m <= 2^k, got {leak}")
    if any(w.shape != (channels,) or s.shape != out.shape or s.itemsize != 1 for w, s in shortcuts):
        raise ValueError(f"shortcuts must be weights [{channels}] with 8-bit levels {list(out.shape)}")
    if membranes is not None and not (
        membranes.shape == out.shape and membranes.dtype == np.int32 and membranes.flags.c_contiguous
    ):
        raise ValueError(f"membranes must be contiguous int32 {list(out.shape)}")
    weights = [ready(w) for w, _ in shortcuts]
    levels = [ready(s, s.dtype) for _, s in shortcuts]
    signs = np.array([s.dtype == np.int8 for s in levels], np.int32)
    pointers = ctypes.c_void_p * max(len(weights), 1)
    weights_at, levels_at = pointers(*map(address, weights)), pointers(*map(address, levels))
    held = [None if currents is None else ready(currents), ready(bias), ready(thresholds.T), ready(reset)]
    counts = np.zeros(2, np.int64)
    call = _NeuronCall(timesteps, batch, out.shape[1] * out.shape[2], channels, thresholds.shape[1], len(weights))
    call.currents, call.bias, call.thresholds, call.reset = map(address, held)
    call.identity_weights, call.identity_levels = ctypes.addressof(weights_at), ctypes.addressof(levels_at)
    call.levels, call.counts, call.identity_signed = address(out), address(counts), address(signs)
    call.membranes = address(membranes)
    call.is_static, call.bias_map, call.fraction = static, bias.ndim == 3, fraction
    call.leak_m, call.leak_k = leak or (1, 0)
    call.reset_kind, call.decay_reset, call.is_signed = RESETS[reset_kind], decay_reset, signed
    call.isa = native.ISAS[native.isa()]
    return NeuronStep(call, counts, out, membranes, *held, *weights, *levels, signs, weights_at, levels_at)


def neuron(currents: NDArray[np.int32] | None, out: NDArray[Any], threads: int = 1, **options: Any) -> Emitted:
    """The same, performed at once."""
    step = neuron_step(currents, out, **options)
    perform(step, threads)
    return step.emitted()


# Currents, pooling, readout
# ---------------------------------------------------------------------------------------------------------------------


class _AddCall(ctypes.Structure):
    """struct lbq_add of native.h."""

    _fields_ = (*((n, ctypes.c_int64) for n in ("size", "period")), *((n, ctypes.c_void_p) for n in ("out", "more")))


def add_step(out: NDArray[np.int32], more: NDArray[np.int32]) -> Step:
    """out += more, int32; where `more` is shorter, it is added again and again (the same at every timestep)."""
    if not more.size or out.size % more.size or out.dtype != np.int32 or more.dtype != np.int32:
        raise ValueError(f"cannot add {more.dtype} {list(more.shape)} to {out.dtype} {list(out.shape)}")
    return Step("add", _AddCall(out.size, more.size, address(out), address(more)), out, more)


class _PoolCall(ctypes.Structure):
    """struct lbq_pool of native.h."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("batch", "height", "width", "channels", "out_height", "out_width")),
        *((n, ctypes.c_int64) for n in ("kh", "kw", "stride_y", "stride_x", "pad_y", "pad_x")),
        *((n, ctypes.c_void_p) for n in ("levels", "bytes", "wide")),
        *((n, ctypes.c_int32) for n in ("is_signed", "is_sum")),
    )


class PoolStep(Step):
    """Windows of levels to their largest or their sums, in `out` [B, OH, OW, C]: of the levels' type, or int32 where
    `wide`, which sums above 8 bits need."""

    def __init__(self, levels: NDArray[Any], pool: Pool, wide: bool = False) -> None:
        if levels.ndim != 4 or levels.dtype not in (np.uint8, np.int8) or not levels.flags.c_contiguous:
            raise ValueError(f"levels must be contiguous uint8 or int8 [B, H, W, C], got {levels.dtype} {levels.shape}")
        batch, height, width, channels = levels.shape
        size = output_size((height, width), pool.kernel, pool.stride, pool.padding)
        covered = all(2 * p <= k for p, k in zip(pool.padding, pool.kernel, strict=True))  # no window of padding alone
        if min(size) < 1 or not covered or (wide and pool.kind == "max"):
            raise ValueError(f"levels {list(levels.shape)} cannot be pooled by {pool}")
        self.out: NDArray[Any] = np.empty((batch, *size, channels), np.int32 if wide else levels.dtype)
        call = _PoolCall(batch, height, width, channels, *size, *pool.kernel, *pool.stride, *pool.padding)
        call.levels, call.is_signed, call.is_sum = address(levels), levels.dtype == np.int8, pool.kind == "sum"
        call.bytes, call.wide = (None, address(self.out)) if wide else (address(self.out), None)
        super().__init__("pool", call, levels, self.out)


class _ReadoutCall(ctypes.Structure):
    """struct lbq_readout of native.h."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("timesteps", "batch", "features", "classes", "planes")),
        *((n, ctypes.c_void_p) for n in ("levels", "sums", "weights", "bias", "logits", "counts")),
        ("is_signed", ctypes.c_int32),
    )


class ReadoutStep(Step):
    """Logits, int64 `[B, classes]`: bias, or what they are where it is None, plus the weights of features' set bits.

    levels: `[T * B, ...]` of as many features as `weights` [features, classes] has rows; they are summed over time
    first. largest: of these sums.
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
        if (
            not (narrow or levels.dtype == np.int32)
            or levels.size != timesteps * len(logits) * features
            or logits.shape != (len(logits), classes)
            or (bias is not None and bias.shape != (classes,))
            or not (levels.flags.c_contiguous and logits.flags.c_contiguous)
        ):
            raise ValueError(f"levels {list(levels.shape)} do not fit weights {list(weights.shape)}")
        self.backend, self.counted = backend, np.zeros(4, np.int64)
        self.shifts = (largest.bit_length() - 1) * logits.size
        weights, bias = ready(weights, np.int64), None if bias is None else ready(bias, np.int64)
        call = _ReadoutCall(timesteps, len(logits), features, classes)
        call.planes = max(largest.bit_length(), 1) if backend == "horner" else 1
        call.levels, call.sums = (address(levels), None) if narrow else (None, address(levels))
        call.weights, call.bias, call.logits = address(weights), address(bias), address(logits)
        call.counts, call.is_signed = address(self.counted), levels.dtype == np.int8
        super().__init__("readout", call, levels, weights, bias, logits, self.counted)

    def counts(self) -> Counts:
        added, formed, shifted, active = map(int, self.counted)
        horner = self.shifts if self.backend == "horner" else 0
        return Counts(added, formed, shifted if self.backend == "explicit" else 0, horner, active)


# Tallies
# ---------------------------------------------------------------------------------------------------------------------


class _TallyCall(ctypes.Structure):
    """struct lbq_tally of native.h."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("timesteps", "batch", "sites", "channels", "n_max")),
        *((n, ctypes.c_void_p) for n in ("levels", "counts")),
        *((n, ctypes.c_int32) for n in ("is_signed", "isa")),
    )


class Tally:
    """How often each magnitude 0..n_max occurs at each position, `[T, H * W, n_max + 1]`, in levels `[T, B, H, W, C]`.

    A call adds what the levels' memory then holds to `counts`, which are `into` where that is given.
    """

    def __init__(self, levels: NDArray[Any], n_max: int, into: NDArray[np.int64] | None = None) -> None:
        if levels.ndim != 5 or levels.dtype not in (np.uint8, np.int8) or not levels.flags.c_contiguous:
            raise ValueError(
                f"levels must be contiguous uint8 or int8 [T, B, H, W, C], got {levels.dtype} {levels.shape}"
            )
        steps, batch, height, width, channels = levels.shape
        shape = (steps, height * width, n_max + 1)
        self.counts: NDArray[np.int64] = np.zeros(shape, np.int64) if into is None else into
        if self.counts.shape != shape or self.counts.dtype != np.int64 or not self.counts.flags.c_contiguous:
            raise ValueError(
                f"counts must be contiguous int64 {list(shape)}, got {self.counts.dtype} {self.counts.shape}"
            )
        call = _TallyCall(steps, batch, height * width, channels, n_max, address(levels), address(self.counts))
        call.is_signed, call.isa = levels.dtype == np.int8, native.ISAS[native.isa()]
        self._levels, self._call, self._count = levels, call, library().lbq_tally

    def __call__(self) -> NDArray[np.int64]:
        if self._count(ctypes.byref(self._call)):
            raise ValueError(f"levels must not exceed {self._call.n_max}")
        return self.counts


class _HistogramCall(ctypes.Structure):
    """struct lbq_histogram of native.h."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("n", "channels", "bins")),
        *((n, ctypes.c_void_p) for n in ("values", "step", "counts")),
        *((n, ctypes.c_double) for n in ("low", "width")),
    )


def histogram(
    values: NDArray[np.int32], step: NDArray[np.float64], low: float, width: float, bins: int
) -> NDArray[np.int64]:
    """How many of the values, `[..., C]`, divided by their channel's step, lie in each bin: `width` wide, from `low` on.

    The first bin and the last also hold what lies beyond.
    """
    if values.dtype != np.int32 or step.shape != values.shape[-1:] or not 0 < bins < 2**31 or width <= 0:
        raise ValueError(f"cannot make {bins} bins of {values.dtype} {list(values.shape)} over {list(step.shape)}")
    values, step, counts = ready(values), ready(step, np.float64), np.zeros(bins, np.int64)
    call = _HistogramCall(values.size // max(len(step), 1), len(step), bins)
    call.values, call.step, call.counts = address(values), address(step), address(counts)
    call.low, call.width = low, width
    library().lbq_histogram(ctypes.byref(call))
    return counts
