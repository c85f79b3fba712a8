"""Convolutions of integer levels and integer neurons by the native library. No torch.

`pack` prepares the weights of a convolution once, `PackedConv.run` gives int32 currents of 8-bit levels and counts what
it did. Three methods give the same bytes: `bitplane` adds a weight row for every set bit of a level, `level` a multiple
of it for every level that is not zero, and `dense` multiplies everything. `neuron` runs a layer of neurons over a
sequence, `tally` counts what they emitted. All arrays are channels last, which makes a weight row contiguous.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lbq import native
from lbq.engine.container import forget
from lbq.engine.levels import row_sums
from lbq.errors import LbqError

Method = Literal["bitplane", "dense", "level"]
Backend = Literal["horner", "preshifted", "explicit"]
METHODS: dict[str, int] = {"bitplane": 0, "dense": 1, "level": 2}  # the enums of native.h
BACKENDS: dict[str, int] = {"horner": 0, "preshifted": 1, "explicit": 2}
RESETS: dict[str, int] = {"once": 0, "level": 1, "hard": 2}
MOST_ROWS = 2**16  # weight rows are numbered in 16 bits
MOST_TAPS = 256
CACHE_LINE = 64
LARGEST_CURRENT = 2**31 - 1


@dataclass
class Counts:
    """What a call did.

    accumulations: weights added, one for each set bit (for each active input, in the method `level`), valid tap and
        output; formations: set bits formed, once each; shifts: weights shifted before they were added (backend
        `explicit`); horner_shifts: accumulators shifted between planes (backend `horner`), one for each output and plane
        below the highest that any level of the call has; neurons_active: inputs that are not zero.
    A dense product does none of these and counts nothing. Machine instructions are fewer: they add many weights at once,
    and with levels up to 7 the backend `horner` adds the rows of equal levels up before it gives the sum to their planes.
    """

    accumulations: int = 0
    formations: int = 0
    shifts: int = 0
    horner_shifts: int = 0
    neurons_active: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name in COUNTED))


COUNTED = tuple(f.name for f in fields(Counts))


class _ConvCall(ctypes.Structure):
    """struct lbq_conv of native.h."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("batch", "height", "width", "inputs", "out_height", "out_width", "outputs")),
        *((n, ctypes.c_int64) for n in ("kh", "kw", "stride_y", "stride_x", "pad_y", "pad_x", "block")),
        *((n, ctypes.c_void_p) for n in ("levels", "out", "bytes", "words", "shifted", "quads", "pairs", "totals")),
        ("counts", ctypes.c_void_p),
        *((n, ctypes.c_int32) for n in ("bias", "range", "planes", "largest", "is_signed")),
        *((n, ctypes.c_int32) for n in ("method", "backend", "threads", "isa")),
    )


def _library() -> ctypes.CDLL:
    found = native.library()
    if found is None:
        raise LbqError(f"the native kernels are not available: {native.report().reason}")
    return found


def _address(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.__array_interface__["data"][0]  # array.ctypes takes twice as long


def _aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros that begin at a cache line: a row that lay across two would cost both."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(size + CACHE_LINE, np.uint8)
    start = -room.ctypes.data % CACHE_LINE
    return room[start : start + size].view(dtype).reshape(shape)


def pack(weights: NDArray[Any], stride: tuple[int, int] = (1, 1), padding: tuple[int, int] = (0, 0)) -> PackedConv:
    """Prepare weights `[O, I, kh, kw]`, int8 or int16. A linear layer is a 1x1 kernel on a 1x1 image."""
    if weights.dtype not in (np.int8, np.int16) or weights.ndim != 4 or 0 in weights.shape:
        raise ValueError(f"weights must be int8 or int16 [O, I, kh, kw], got {weights.dtype} {list(weights.shape)}")
    if min(stride) < 1 or min(padding) < 0:
        raise ValueError(f"stride must be positive and padding not negative, got {stride} and {padding}")
    if weights[0].size >= MOST_ROWS or weights[0, 0].size > MOST_TAPS:
        raise LbqError(
            f"a kernel of {weights[0].size} weights per output is too large for the native kernels, which take "
            f"{MOST_ROWS - 1} and {MOST_TAPS} taps: use the NumPy engine"
        )
    return PackedConv(weights, stride, padding)


class PackedConv:
    """One convolution, ready to run on many inputs. Forms of its weights are made when a method first needs them."""

    def __init__(self, weights: NDArray[Any], stride: tuple[int, int], padding: tuple[int, int]) -> None:
        self.outputs, self.inputs, self.kh, self.kw = weights.shape
        self.stride, self.padding, self.weights = stride, padding, weights
        self.heaviest = int(row_sums(weights).max())
        low, high = int(weights.min()), int(weights.max())
        self.bias, self.range = max(-low, 0), max(max(high, 0) + max(-low, 0), 1)
        self._forms: dict[tuple[str, int], NDArray[Any]] = {}

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        (sh, sw), (ph, pw) = self.stride, self.padding
        return (height + 2 * ph - self.kh) // sh + 1, (width + 2 * pw - self.kw) // sw + 1

    def run(
        self,
        levels: NDArray[Any],
        method: Method = "bitplane",
        backend: Backend = "horner",
        threads: int = 1,
        out: NDArray[np.int32] | None = None,
    ) -> tuple[NDArray[np.int32], Counts]:
        """Currents `[B, OH, OW, O]` of `levels` [B, H, W, I], uint8 or int8, and what was done for them.

        out: written where given, int32 and contiguous. The bytes do not depend on method, backend or threads.
        """
        levels = self._checked(levels)
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        height, width = self.output_size(*levels.shape[1:3])
        shape = (len(levels), height, width, self.outputs)
        if height < 1 or width < 1:
            raise ValueError(f"levels {list(levels.shape)} are smaller than the kernel of {self.kh}x{self.kw}")
        if out is None:
            out = np.empty(shape, np.int32)
        elif out.shape != shape or out.dtype != np.int32 or not out.flags.c_contiguous:
            raise ValueError(f"out must be contiguous int32 {list(shape)}, got {out.dtype} {list(out.shape)}")
        lowest = int(levels.min(initial=0)) if levels.dtype == np.int8 else 0
        largest = max(int(levels.max(initial=0)), -lowest, 1)
        if self.heaviest * largest > LARGEST_CURRENT:
            raise LbqError(
                f"levels up to {largest} reach currents of {self.heaviest * largest}, which int32 does not hold"
            )
        counted = np.zeros(4, np.int64)
        call = self._call(levels, out, counted, largest, method, backend)
        call.threads = max(int(threads), 1)
        if _library().lbq_conv(ctypes.byref(call)):
            raise MemoryError("no memory left for a convolution's lists")
        counts = Counts()
        if method != "dense":
            added, formed, shifted, active = map(int, counted)
            counts = Counts(added, formed, neurons_active=active)
            if method == "bitplane" and backend == "explicit":
                counts.shifts = shifted
            if method == "bitplane" and backend == "horner":
                counts.horner_shifts = (call.planes - 1) * out.size
        return out, counts

    def _checked(self, levels: NDArray[Any]) -> NDArray[Any]:
        if levels.ndim != 4 or levels.shape[3] != self.inputs or levels.dtype not in (np.uint8, np.int8):
            raise ValueError(
                f"levels must be uint8 or int8 [B, H, W, {self.inputs}], got {levels.dtype} {list(levels.shape)}"
            )
        return np.ascontiguousarray(levels)

    def _call(
        self,
        levels: NDArray[Any],
        out: NDArray[np.int32],
        counted: NDArray[np.int64],
        largest: int,
        method: Method,
        backend: Backend,
    ) -> _ConvCall:
        isa, signed, narrow = native.isa(), levels.dtype == np.int8, self.weights.dtype == np.int8
        block = 128 if isa == "avx512" and self.outputs > 64 else 64  # outputs whose sums fit the registers
        call = _ConvCall(*levels.shape, *out.shape[1:], self.kh, self.kw, *self.stride, *self.padding, block)
        call.levels, call.out, call.counts = _address(levels), _address(out), _address(counted)
        call.bias, call.range = self.bias, self.range
        call.largest, call.planes, call.is_signed = largest, largest.bit_length(), signed
        call.method, call.backend, call.isa = METHODS[method], BACKENDS[backend], native.ISAS[isa]
        if method == "dense":
            features = native.report().features
            quads = narrow and (
                (isa == "avx512" and "vnni" in features) or (isa == "neon" and "dotprod" in features and largest <= 127)
            )
            call.quads = _address(self._form("quads")) if quads else None
            call.pairs = None if quads else _address(self._form("pairs"))
            call.totals = _address(self._form("totals"))
        elif method == "bitplane" and backend == "preshifted":
            call.shifted = _address(self._shifted(block, call.planes))
        elif not narrow or (method == "bitplane" and backend == "explicit"):
            call.words = _address(self._form("words", block))
        else:
            call.bytes = _address(self._form("bytes", block))
        return call

    def _form(self, name: str, block: int = 0) -> NDArray[Any]:
        if (name, block) not in self._forms:
            form: dict[str, Callable[[], NDArray[Any]]] = {
                "bytes": lambda: self._bytes(block),
                "words": lambda: self._blocks(block, np.int16),
                "quads": lambda: self._dense(64, 4, np.int8),
                "pairs": lambda: self._dense(16, 2, np.int16),
                "totals": lambda: self.weights.sum((1, 2, 3), dtype=np.int32),
            }
            self._forms[name, block] = form[name]()
            forget(self.weights)
        return self._forms[name, block]

    def keep(self, method: Method) -> None:
        """Drop the forms that other methods read; they are made again if needed."""
        dense = {"quads", "pairs", "totals"}
        self._forms = {k: form for k, form in self._forms.items() if (k[0] in dense) == (method == "dense")}

    # A form is filled block by block: whole intermediate copies would be the peak of memory.

    def _rows(self, block: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """By block of outputs, weights `[(ky * kw + kx) * I + c, outputs]`."""
        for i, start in enumerate(range(0, self.outputs, block)):
            part = self.weights[start : start + block]
            yield i, part.transpose(2, 3, 1, 0).reshape(-1, len(part))

    def _blocks(self, block: int, dtype: type[np.generic]) -> NDArray[Any]:
        """`[blocks, rows, block]`."""
        out = _aligned((-(-self.outputs // block), self.kh * self.kw * self.inputs, block), dtype)
        for i, rows in self._rows(block):
            out[i, :, : rows.shape[1]] = rows
        return out

    def _bytes(self, block: int) -> NDArray[np.uint8]:
        """int8 weights plus bias, `[blocks, rows + 1, block]`, the last row 0; in each 64 outputs, j and 32 + j are neighbours
        (see conv.h)."""
        out = _aligned((-(-self.outputs // block), self.kh * self.kw * self.inputs + 1, block), np.uint8)
        for i, rows in self._rows(block):
            biased = np.full((len(rows), block), self.bias, np.uint8)
            biased[:, : rows.shape[1]] += rows.view(np.uint8)
            out[i, :-1].reshape(-1, 32, 2)[...] = biased.reshape(-1, 2, 32).swapaxes(1, 2)
        return out

    def _shifted(self, block: int, planes: int) -> NDArray[np.int32]:
        have = self._forms.get(("shifted", block))
        if have is None or len(have) < planes:
            rows = self._blocks(block, np.int32)
            have = _aligned((planes, *rows.shape), np.int32)
            for k in range(planes):
                np.left_shift(rows, k, out=have[k])
            self._forms["shifted", block] = have
        return have

    def _dense(self, outputs: int, inputs: int, dtype: type[np.generic]) -> NDArray[Any]:
        """`[blocks of outputs, taps, groups of inputs, outputs, inputs]`."""
        blocks, groups = -(-self.outputs // outputs), -(-self.inputs // inputs)
        out = _aligned((blocks, self.kh * self.kw, groups, outputs, inputs), dtype)
        for i in range(blocks):
            part = self.weights[i * outputs : (i + 1) * outputs]
            padded = np.zeros((len(part), groups * inputs, self.kh * self.kw), dtype)
            padded[:, : self.inputs] = part.reshape(len(part), self.inputs, -1)
            out[i, :, :, : len(part)] = padded.reshape(len(part), groups, inputs, -1).transpose(3, 1, 0, 2)
        return out


# Neurons
# ---------------------------------------------------------------------------------------------------------------------


class _NeuronCall(ctypes.Structure):
    """struct lbq_neuron of native.h."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("timesteps", "batch", "sites", "channels", "n_max", "identities")),
        *((n, ctypes.c_void_p) for n in ("currents", "bias", "thresholds", "reset")),
        *((n, ctypes.c_void_p) for n in ("identity_weights", "identity_levels", "levels", "counts", "identity_signed")),
        *((n, ctypes.c_int32) for n in ("is_static", "bias_map", "fraction", "leak_m", "leak_k", "reset_kind")),
        *((n, ctypes.c_int32) for n in ("decay_reset", "is_signed", "threads", "isa")),
    )


@dataclass(frozen=True)
class Emitted:
    """What a layer emitted: levels that are not zero, and the set bits of all."""

    active: int
    bits: int


def neuron(
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
    threads: int = 1,
) -> Emitted:
    """Levels of a layer over a sequence, from rest, written to `out` [T * B, H, W, C], uint8 or, where signed, int8.

    currents: int32 `[T * B, H, W, C]`, `[B, H, W, C]` where `static` (the same at every timestep), or None.
    thresholds: int32 `[C, n_max]`; S counts those that U reaches (|U| where signed, S then having U's sign).
    reset: int32 `[C]`, subtracted where S != 0 (`once`, with the sign of S) or times S (`level`); `hard` sets V to 0.
    bias: int32 `[C]` or `[H, W, C]`; leak: (m, k) for V * m / 2^k rounded half up, None for no leak.
    decay_reset: False subtracts the reset at the next timestep, after the leak.
    shortcuts: weights int32 `[C]` and levels `[T * B, H, W, C]` of identity synapses.
    The caller has proved that every sum fits int32.
    """
    if out.ndim != 4 or out.dtype not in (np.uint8, np.int8) or not out.flags.c_contiguous or timesteps < 1:
        raise ValueError(f"out must be contiguous uint8 or int8 [T * B, H, W, C], got {out.dtype} {list(out.shape)}")
    batch, channels = len(out) // timesteps, out.shape[3]
    signed = out.dtype == np.int8
    expected = (batch if static else len(out), *out.shape[1:])
    if len(out) != timesteps * batch or (currents is not None and currents.shape != expected):
        raise ValueError(f"currents must be {list(expected)} for {timesteps} timesteps of out {list(out.shape)}")
    if thresholds.ndim != 2 or len(thresholds) != channels or thresholds.shape[1] > (127 if signed else 255):
        raise ValueError(f"thresholds must be [{channels}, n_max] with 8-bit levels, got {list(thresholds.shape)}")
    if reset.shape != (channels,) or bias.shape not in ((channels,), out.shape[1:]):
        raise ValueError(f"reset must be [{channels}] and bias that or {list(out.shape[1:])}")
    if leak is not None and not (1 <= leak[1] <= 31 and 0 <= leak[0] <= 1 << leak[1]):
        raise ValueError(f"leak must be (m, k) with k in 1..31 and m <= 2^k, got {leak}")
    if any(w.shape != (channels,) or s.shape != out.shape or s.itemsize != 1 for w, s in shortcuts):
        raise ValueError(f"shortcuts must be weights [{channels}] with 8-bit levels {list(out.shape)}")

    def ready(array: NDArray[Any], dtype: Any = np.int32) -> NDArray[Any]:
        return np.ascontiguousarray(array, dtype)

    weights = [ready(w) for w, _ in shortcuts]
    levels = [ready(s, s.dtype) for _, s in shortcuts]
    signs = np.array([s.dtype == np.int8 for s in levels], np.int32)
    pointers = ctypes.c_void_p * max(len(weights), 1)
    weights_at, levels_at = pointers(*map(_address, weights)), pointers(*map(_address, levels))
    held = [None if currents is None else ready(currents), ready(bias), ready(thresholds.T), ready(reset)]
    counts = np.zeros(2, np.int64)
    call = _NeuronCall(timesteps, batch, out.shape[1] * out.shape[2], channels, thresholds.shape[1], len(weights))
    call.currents, call.bias, call.thresholds, call.reset = map(_address, held)
    call.identity_weights, call.identity_levels = ctypes.addressof(weights_at), ctypes.addressof(levels_at)
    call.levels, call.counts, call.identity_signed = _address(out), _address(counts), _address(signs)
    call.is_static, call.bias_map, call.fraction = static, bias.ndim == 3, fraction
    call.leak_m, call.leak_k = leak or (1, 0)
    call.reset_kind, call.decay_reset, call.is_signed = RESETS[reset_kind], decay_reset, signed
    call.threads, call.isa = max(int(threads), 1), native.ISAS[native.isa()]
    _library().lbq_neuron(ctypes.byref(call))
    return Emitted(int(counts[0]), int(counts[1]))


# Tallies
# ---------------------------------------------------------------------------------------------------------------------


class _TallyCall(ctypes.Structure):
    """struct lbq_tally of native.h."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("timesteps", "batch", "sites", "channels", "n_max")),
        *((n, ctypes.c_void_p) for n in ("levels", "counts")),
        *((n, ctypes.c_int32) for n in ("is_signed", "threads", "isa")),
    )


def tally(levels: NDArray[Any], n_max: int, threads: int = 1) -> NDArray[np.int64]:
    """How often each magnitude 0..n_max occurs at each position, `[T, H * W, n_max + 1]`, in levels `[T, B, H, W, C]`."""
    if levels.ndim != 5 or levels.dtype not in (np.uint8, np.int8) or not levels.flags.c_contiguous:
        raise ValueError(f"levels must be contiguous uint8 or int8 [T, B, H, W, C], got {levels.dtype} {levels.shape}")
    if max(int(levels.max(initial=0)), -int(levels.min(initial=0))) > n_max:
        raise ValueError(f"levels must not exceed {n_max}")
    steps, batch, height, width, channels = levels.shape
    counts = np.zeros((steps, height * width, n_max + 1), np.int64)
    call = _TallyCall(steps, batch, height * width, channels, n_max, _address(levels), _address(counts))
    call.is_signed, call.threads, call.isa = levels.dtype == np.int8, threads, native.ISAS[native.isa()]
    _library().lbq_tally(ctypes.byref(call))
    return counts
