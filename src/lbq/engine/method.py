"""Which kernel runs a convolution, and with which method: by what is installed, and by measured density."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from lbq import native as library
from lbq.engine import convolution, numpy_kernels
from lbq.engine.convolution import Backend, Counts, Method
from lbq.graph import Synapse
from lbq.graph.levels import Integers, highest_level

EngineName = Literal["auto", "dense", "bitplane"]
Kernel = Literal["native", "numpy"]
TRIALS = 3  # of each method: the first finds caches cold, and others use the machine


class Conv(Protocol):
    """A packed convolution: native or NumPy."""

    def run(
        self,
        levels: Integers,
        method: Method,
        backend: Backend = "horner",
        threads: int = 1,
        out: NDArray[Any] | None = None,
        largest: int | None = None,
    ) -> tuple[NDArray[Any], Counts]: ...

    def keep(self, method: Method) -> None: ...


@dataclass(frozen=True)
class Choice:
    """How a synapse was run: the kernel and method, and why. density: set bits per input, where it was measured."""

    kernel: Literal["native", "numpy", "torch"]
    method: Method
    reason: str
    density: float | None = None


def fallback() -> str | None:
    """Why the native kernels cannot be used at all, or None."""
    return None if library.library() is not None else library.report().reason


@dataclass
class Prepared:
    """One convolution, packed at first use, and what has been learnt about its speed."""

    synapse: Synapse
    largest: int  # of the levels it reads
    signed: bool
    crossover: float | None = None  # density at which the dense kernel is as fast as the planes
    chosen: Literal["bitplane", "dense"] | None = None  # last
    _convs: dict[Kernel, Conv] = field(default_factory=dict)

    def conv(self, kernel: Kernel) -> Conv:
        if kernel not in self._convs:
            s = self.synapse
            self._convs[kernel] = (
                convolution.pack(s.weight, s.stride, s.padding)
                if kernel == "native"
                else numpy_kernels.pack(s.weight, s.stride, s.padding, s.dilation, s.groups)
            )
        return self._convs[kernel]

    def native_refused(self) -> str | None:
        """Why the native kernels do not run this synapse, or None."""
        if self.synapse.groups != 1 or self.synapse.dilation != (1, 1):
            return "grouped or dilated"
        if self.largest > highest_level(self.signed):
            return "pooled sums above 8 bits"
        if (
            self.synapse.weight[0].size >= convolution.MOST_ROWS
            or self.synapse.weight[0, 0].size > convolution.MOST_TAPS
        ):
            return "a kernel of very many weights"
        if self.synapse.in_shape[0] * self.synapse.in_shape[2] > convolution.MOST_IN_A_ROW:
            return "very long rows of pixels"
        return None if fallback() is None else "no native library"

    def choose(self, engine: EngineName, levels: Integers, density: float) -> Choice:
        """For these levels; `auto` times both native methods once, keeps the weights in the form that the faster one reads,
        and from then on compares densities."""
        if engine == "dense":
            return Choice("numpy", "dense", "asked for")
        refused = self.native_refused()
        if engine == "bitplane":
            return Choice(
                "numpy" if refused else "native",
                "bitplane",
                f"asked for; not native: {refused}" if refused else "asked for",
            )
        if refused:
            return Choice("numpy", "dense", f"not native: {refused}", density)
        if self.crossover is None:
            self.crossover = self._measure(levels, density)
        margin = {None: 1.0, "bitplane": 1.1, "dense": 0.9}[self.chosen]  # near the cross-over it stays as it was
        below = density < self.crossover * margin
        self.chosen = "bitplane" if below else "dense"
        where = "near" if below != (density < self.crossover) else "below" if below else "above"
        reason = f"density {density:.3f} {where} cross-over {self.crossover:.3f}"
        return Choice("native", self.chosen, reason, density)

    def _measure(self, levels: Integers, density: float) -> float:
        """The density at which both methods would take the same time: planes take time in proportion to it."""
        conv, times = self.conv("native"), {}
        methods: tuple[Method, ...] = ("bitplane", "dense")
        out: NDArray[Any] | None = None
        for method in methods:
            conv.keep(method)
            out, _ = conv.run(levels, method, out=out)
            times[method] = float("inf")
            for _ in range(TRIALS):
                started = time.perf_counter()
                conv.run(levels, method, out=out)
                times[method] = min(times[method], time.perf_counter() - started)
        conv.keep(min(methods, key=times.__getitem__))
        return max(density, 1e-4) * times["dense"] / times["bitplane"]
