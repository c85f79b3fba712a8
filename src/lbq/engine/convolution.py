"""Convolutions of integer levels by the native library. No torch.

Three methods give the same int32 currents of 8-bit levels: `bitplane` adds a weight row for every set bit of a level,
`pairs` adds the row once for two timesteps (see pairs.py), and `dense` multiplies everything. All arrays are channels last,
which makes a weight row contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lbq import native
from lbq.engine.file.container import forget
from lbq.engine.pairs import LARGEST_LEVEL, PairLists, all_lists
from lbq.engine.tape import Step, address, aligned, perform
from lbq.errors import LbqError
from lbq.graph import output_size
from lbq.graph.levels import row_sums

Method = Literal["bitplane", "dense", "pairs"]
Backend = Literal["horner", "preshifted", "fused", "explicit"]
METHODS: dict[str, int] = {"bitplane": 0, "dense": 1, "pairs": 2}  # enum lbq_method
BACKENDS: dict[str, int] = {"horner": 0, "preshifted": 1, "fused": 2, "explicit": 3}  # enum lbq_backend
MOST_WEIGHT_ROWS = 2**16 - 1  # weight rows, and the row of zeros behind them, are numbered in 16 bits
MOST_TAPS = 256
MOST_LEVELS_IN_A_ROW = 2**26  # entries of a pixel row's lists, at most 16 for each level, are numbered in 31 bits
LARGEST_CURRENT = 2**31 - 1


@dataclass
class Counts:
    """What a call did. Machine instructions are fewer: one adds many weights.

    accumulations: weights added, one for each set bit, valid tap and output.
    formations: set bits, each counted once.
    shifts: weights that were shifted before they were added (backend `explicit`).
    horner_shifts: accumulators that were shifted between planes (backend `horner`), one for each output and plane below the
        highest plane that the levels may have.
    neurons_active: inputs that are not zero.
    products: weights multiplied, one for each input, valid tap and output. A network's synapse that ran densely has these
        and none of the others. Kernels by themselves count nothing for it.
    additions: weights really added by the kernels, one for each row and output. Rows of equal levels, or of equal pairs of
        levels, are added once for all their set bits. Doublings and multiples of the sums are not counted here.
    ands, popcounts: of words of 64 channels, where levels meet levels. Each set bit that is left is an accumulation.
    """

    accumulations: int = 0
    formations: int = 0
    shifts: int = 0
    horner_shifts: int = 0
    neurons_active: int = 0
    products: int = 0
    additions: int = 0
    ands: int = 0
    popcounts: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)))


def add_counts(totals: dict[str, Counts], more: Mapping[str, Counts]) -> None:
    """Add each synapse's counts to its total."""
    for name, counts in more.items():
        totals[name] = totals.get(name, Counts()) + counts


def plane_counts(counted: NDArray[np.int64], backend: Backend, horner_shifts: int) -> Counts:
    """Counts of a call by planes; counted: its accumulations, formations, shifts, active inputs and additions."""
    added, formed, shifted, active, additions = counted.tolist()
    explicit = shifted if backend == "explicit" else 0
    return Counts(added, formed, explicit, horner_shifts if backend == "horner" else 0, active, additions=additions)


def check_names(method: str, backend: str) -> None:
    """Refuse an unknown method or backend."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")


class CountedStep(Step, ABC):
    """A convolution of certain levels, written to `out`; `counts` says what its last performance did."""

    out: NDArray[np.int32]

    @abstractmethod
    def counts(self) -> Counts: ...


class Conv(ABC):
    """A convolution of integer weights, ready to run on many inputs.

    heaviest: the largest sum of one output's magnitudes of weights.
    """

    inputs: int
    outputs: int
    kh: int
    kw: int
    heaviest: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int] = (1, 1)

    @abstractmethod
    def step(
        self,
        levels: NDArray[Any],
        method: Method = "bitplane",
        backend: Backend = "horner",
        out: NDArray[np.int32] | None = None,
        largest: int | None = None,
        timesteps: int = 1,
        lists: PairLists | None = None,
    ) -> CountedStep:
        """The call of `run`, ready to be performed."""

    @abstractmethod
    def pairs_refused(self, signed: bool, largest: int, timesteps: int) -> str | None:
        """Why method `pairs` does not run these levels, or None."""

    @abstractmethod
    def keep(self, method: Method) -> None:
        """Drop what other methods read; it is made again if needed."""

    def run(
        self,
        levels: NDArray[Any],
        method: Method = "bitplane",
        backend: Backend = "horner",
        threads: int = 1,
        out: NDArray[np.int32] | None = None,
        largest: int | None = None,
        timesteps: int = 1,
        lists: PairLists | None = None,
    ) -> tuple[NDArray[np.int32], Counts]:
        """Currents `[B, OH, OW, O]` of `levels` [B, H, W, I], uint8 or int8, and what was done for them.

        out: the array to write to, int32 and contiguous. largest: the largest level, where it is known already.
        timesteps: so many lie one after the other in levels, [T * B, H, W, I]. lists: those of method `pairs`, by default one
        for every pair. Only that method reads both. The bytes do not depend on method, backend, threads or lists.
        """
        step = self.step(levels, method, backend, out, largest, timesteps, lists)
        perform(step, threads)
        return step.out, step.counts()

    def _checked(
        self, levels: NDArray[Any], out: NDArray[np.int32] | None, largest: int | None
    ) -> tuple[NDArray[Any], NDArray[np.int32], int]:
        """Contiguous levels, where their currents go, and the largest level; an error where the library could not run them."""
        if levels.ndim != 4 or levels.shape[3] != self.inputs or levels.dtype not in (np.uint8, np.int8):
            raise ValueError(
                f"levels must be uint8 or int8 [B, H, W, {self.inputs}], got {levels.dtype} {levels.shape}"
            )
        levels = np.ascontiguousarray(levels)
        height, width = output_size(levels.shape[1:3], (self.kh, self.kw), self.stride, self.padding, self.dilation)
        shape = (len(levels), height, width, self.outputs)
        if height < 1 or width < 1:
            raise ValueError(f"levels {list(levels.shape)} are smaller than the kernel of {self.kh}x{self.kw}")
        if out is None:
            out = np.empty(shape, np.int32)
        elif out.shape != shape or out.dtype != np.int32 or not out.flags.c_contiguous:
            raise ValueError(f"out must be contiguous int32 {list(shape)}, got {out.dtype} {list(out.shape)}")
        if largest is None:
            lowest = int(levels.min(initial=0)) if levels.dtype == np.int8 else 0
            largest = max(int(levels.max(initial=0)), -lowest, 1)
        if self.heaviest * largest > LARGEST_CURRENT:
            raise LbqError(f"levels up to {largest} reach currents of {self.heaviest * largest}, beyond int32")
        return levels, out, largest


ConvCall = native.structure(  # struct lbq_conv
    int64="batch height width inputs out_height out_width outputs kh kw stride_y stride_x pad_y pad_x block apart",
    pointer="levels out bytes words shifted quads pairs tiles totals pair_levels pair_table counts",
    int32="bias range planes largest is_signed method backend isa pair_lists pair_columns",
)


class ConvStep(CountedStep):
    """One of a PackedConv."""

    def __init__(
        self,
        conv: PackedConv,
        levels: NDArray[Any],
        out: NDArray[np.int32],
        largest: int,
        method: Method,
        backend: Backend,
        timesteps: int,
        lists: PairLists | None,
    ) -> None:
        self.out, self.method, self.backend, self.counted = out, method, backend, np.zeros(5, np.int64)
        self.timesteps = timesteps
        isa, signed, narrow = native.isa(), levels.dtype == np.int8, conv.weights.dtype == np.int8
        block = 128 if isa == "avx512" and conv.outputs > 64 else 64  # outputs whose sums fit the registers
        call = ConvCall(*levels.shape, *out.shape[1:], conv.kh, conv.kw, *conv.stride, *conv.padding, block)
        call.levels, call.out, call.counts = address(levels), address(out), address(self.counted)
        call.bias, call.range = conv.bias, conv.range
        call.largest, call.planes, call.is_signed = largest, largest.bit_length(), signed
        call.method, call.backend, call.isa = METHODS[method], BACKENDS[backend], native.ISAS[isa]
        forms: dict[str, NDArray[Any]] = {}
        if method == "dense":
            name = conv.dense_form(isa, largest)
            forms = {n: conv.form(n) for n in (name, *(("totals",) if name == "quads" else ()))}
        elif method == "bitplane" and backend == "preshifted":
            forms = {"shifted": conv.shifted(block, call.planes)}
        else:
            wide = not narrow or (method == "bitplane" and backend != "horner")
            forms = {"words": conv.form("words", block)} if wide else {"bytes": conv.form("bytes", block)}
        for name, form in forms.items():
            setattr(call, name, address(form))
        if lists is not None and method == "pairs":
            call.apart, call.pair_lists, call.pair_columns = len(levels) // timesteps, len(lists.pairs), lists.columns
            call.pair_levels, call.pair_table = address(lists.levels), address(lists.table)
            forms |= {"pair_levels": lists.levels, "pair_table": lists.table}
        super().__init__("conv", call, levels, out, self.counted, *forms.values())

    def counts(self) -> Counts:
        if self.method == "dense":
            return Counts()
        by_planes = self.out.size
        if self.method == "pairs":  # only a last timestep without a partner
            by_planes = by_planes // self.timesteps * (self.timesteps % 2)
        return plane_counts(self.counted, self.backend, (self.call.planes - 1) * by_planes)


class PackedConv(Conv):
    """One convolution of weights `[O, I, kh, kw]`, int8 or int16, ready to run on many inputs.

    A linear layer is a 1x1 kernel on a 1x1 image. Forms of the weights are made when a method first needs them.
    """

    def __init__(
        self, weights: NDArray[Any], stride: tuple[int, int] = (1, 1), padding: tuple[int, int] = (0, 0)
    ) -> None:
        if weights.dtype not in (np.int8, np.int16) or weights.ndim != 4 or 0 in weights.shape:
            raise ValueError(f"weights must be int8 or int16 [O, I, kh, kw], got {weights.dtype} {list(weights.shape)}")
        if min(stride) < 1 or min(padding) < 0:
            raise ValueError(f"stride must be positive and padding not negative, got {stride} and {padding}")
        if weights[0].size > MOST_WEIGHT_ROWS or weights[0, 0].size > MOST_TAPS:
            size = weights[0].size
            raise LbqError(f"a kernel of {size} weights is too large for these kernels: use GeneralConv")
        self.outputs, self.inputs, self.kh, self.kw = weights.shape
        self.stride, self.padding, self.weights = stride, padding, weights
        self.heaviest = int(row_sums(weights).max())
        low, high = int(weights.min()), int(weights.max())
        self.bias, self.range = max(-low, 0), max(max(high, 0) + max(-low, 0), 1)
        self._forms: dict[tuple[str, int], NDArray[Any]] = {}

    def step(
        self,
        levels: NDArray[Any],
        method: Method = "bitplane",
        backend: Backend = "horner",
        out: NDArray[np.int32] | None = None,
        largest: int | None = None,
        timesteps: int = 1,
        lists: PairLists | None = None,
    ) -> ConvStep:
        check_names(method, backend)
        levels, out, largest = self._checked(levels, out, largest)
        if levels.shape[2] * self.inputs > MOST_LEVELS_IN_A_ROW:
            raise LbqError(
                f"a row of {levels.shape[2]} pixels of {self.inputs} channels is too long for these kernels: use GeneralConv"
            )
        if method == "pairs":
            if reason := self.pairs_refused(levels.dtype == np.int8, largest, timesteps):
                raise ValueError(f"method pairs does not run {reason}: use bitplane")
            if len(levels) % timesteps or backend != "horner":
                raise ValueError(
                    f"method pairs takes whole timesteps and no backend, got {len(levels)} images of {timesteps}"
                )
            lists = lists or all_lists(largest)
            if lists.missing(largest):
                raise ValueError(f"lists must make up every pair of levels up to {largest}, got {lists.pairs}")
        return ConvStep(self, levels, out, largest, method, backend, timesteps, lists)

    def pairs_refused(self, signed: bool, largest: int, timesteps: int) -> str | None:
        if timesteps < 2:
            return "one timestep"
        if signed or largest > LARGEST_LEVEL:
            return f"signed levels, or levels above {LARGEST_LEVEL}"
        return None if self.weights.dtype == np.int8 else "weights above 8 bits"

    def dense_form(self, isa: str, largest: int) -> str:
        """The name of the form that the fastest dense method of this CPU reads."""
        features, equal = native.report().features, self.stride[0] == self.stride[1]
        if self.weights.dtype != np.int8:
            return "pairs"
        if isa == "avx512" and "amx" in features and self.inputs % 64 == 0 and equal:
            return "tiles"
        if (isa == "avx512" and "vnni" in features) or (isa == "neon" and "dotprod" in features and largest <= 127):
            return "quads"
        return "pairs"

    def form(self, name: str, block: int = 0) -> NDArray[Any]:
        """The weights as a method reads them."""
        form = self._forms.get((name, block))  # another thread may drop it meanwhile
        if form is None:
            makers: dict[str, Callable[[], NDArray[Any]]] = {
                "bytes": lambda: self._bytes(block),
                "words": lambda: self._blocks(block, np.int16),
                "quads": lambda: self._dense(64, 4, np.int8),
                "pairs": lambda: self._dense(16, 2, np.int16),
                "tiles": self._tiles,
                "totals": lambda: self.weights.sum((1, 2, 3), dtype=np.int32),
            }
            form = self._forms[name, block] = makers[name]()
            forget(self.weights)
        return form

    def keep(self, method: Method) -> None:
        dense = {"quads", "pairs", "tiles", "totals"}
        forms = dict(self._forms)  # another thread may add one meanwhile
        self._forms = {k: form for k, form in forms.items() if (k[0] in dense) == (method == "dense")}

    # Each form is filled block by block, and the pages of the file that were read are released: otherwise this would be
    # the peak of memory.

    def _rows(self, block: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """For each block of outputs, its number and weights `[(ky * kw + kx) * I + c, outputs]`."""
        for i, start in enumerate(range(0, self.outputs, block)):
            part = self.weights[start : start + block]
            yield i, part.transpose(2, 3, 1, 0).reshape(-1, len(part))
            forget(part)

    def _blocks(self, block: int, dtype: type[np.generic]) -> NDArray[Any]:
        """`[blocks, rows, block]`."""
        out = aligned((-(-self.outputs // block), self.kh * self.kw * self.inputs, block), dtype)
        for i, rows in self._rows(block):
            out[i, :, : rows.shape[1]] = rows
        return out

    def _bytes(self, block: int) -> NDArray[np.uint8]:
        """int8 weights plus bias, `[blocks, rows + 1, block]`; the last row is 0. In each 64 outputs, j and 32 + j are
        neighbours (see conv.h)."""
        out = aligned((-(-self.outputs // block), self.kh * self.kw * self.inputs + 1, block), np.uint8)
        for i, rows in self._rows(block):
            biased = np.full((len(rows), block), self.bias, np.uint8)
            biased[:, : rows.shape[1]] += rows.view(np.uint8)
            out[i, :-1].reshape(-1, 32, 2)[...] = biased.reshape(-1, 2, 32).swapaxes(1, 2)
        return out

    def shifted(self, block: int, planes: int) -> NDArray[np.int32]:
        """`[planes, blocks, rows, block]`, each plane shifted once more."""
        form = self._forms.get(("shifted", block))
        if form is None or len(form) < planes:
            rows = self._blocks(block, np.int32)
            form = aligned((planes, *rows.shape), np.int32)
            for k in range(planes):
                np.left_shift(rows, k, out=form[k])
            self._forms["shifted", block] = form
        return form

    def _dense(self, outputs: int, inputs: int, dtype: type[np.generic]) -> NDArray[Any]:
        """`[blocks of outputs, taps, groups of inputs, outputs, inputs]`."""
        blocks, groups = -(-self.outputs // outputs), -(-self.inputs // inputs)
        out = aligned((blocks, self.kh * self.kw, groups, outputs, inputs), dtype)
        for i in range(blocks):
            part = self.weights[i * outputs : (i + 1) * outputs]
            padded = np.zeros((len(part), groups * inputs, self.kh * self.kw), dtype)
            padded[:, : self.inputs] = part.reshape(len(part), self.inputs, -1)
            out[i, :, :, : len(part)] = padded.reshape(len(part), groups, inputs, -1).transpose(3, 1, 0, 2)
            forget(part)
        return out

    def _tiles(self) -> NDArray[np.int8]:
        """`[groups of 16 outputs, taps, groups of 64 inputs, 16, 16 outputs, 4]`; the number of groups of outputs is even."""
        taps, chunks = self.kh * self.kw, self.inputs // 64
        out = aligned((2 * -(-self.outputs // 32), taps, chunks, 16, 16, 4), np.int8)
        for i, tile in enumerate(out):
            part = self.weights[16 * i : 16 * (i + 1)]
            tile[:, :, :, : len(part)] = part.reshape(-1, chunks, 16, 4, taps).transpose(4, 1, 2, 0, 3)
            forget(part)
        return out
