"""The kernel and method that run a convolution: chosen by what is installed, and by measured density."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from numpy.typing import NDArray

from lbq import native as library
from lbq.engine import convolution, numpy_kernels
from lbq.engine.convolution import Method
from lbq.graph import Synapse
from lbq.graph.levels import Integers, highest_level

EngineName = Literal["auto", "dense", "bitplane"]
TIMED_RUNS = 3  # of each method: in the first the caches are cold, and other programs use the machine


@dataclass(frozen=True)
class Choice:
    """How a synapse was run: the kernel and method, and why. density: set bits per input, where it was measured."""

    kernel: Literal["native", "numpy", "torch", "triton"]
    method: Method
    reason: str
    density: float | None = None


def fallback() -> str | None:
    """Why the native kernels cannot be used at all, or None."""
    return None if library.library() is not None else library.report().reason


@dataclass
class Prepared:
    """One convolution, packed for a kernel at its first use, and what has been measured of its speed."""

    synapse: Synapse
    largest: int  # the largest level that it reads
    signed: bool
    crossover: float | None = None  # density at which the dense kernel is as fast as the planes
    chosen: Literal["bitplane", "dense"] | None = None  # the latest choice

    @cached_property
    def native(self) -> convolution.PackedConv:
        return convolution.PackedConv(self.synapse.weight, self.synapse.stride, self.synapse.padding)

    @cached_property
    def numpy(self) -> numpy_kernels.PackedConv:
        s = self.synapse
        return numpy_kernels.PackedConv(s.weight, s.stride, s.padding, s.dilation, s.groups)

    def native_refused(self) -> str | None:
        """Why the native kernels do not run this synapse, or None."""
        weight = self.synapse.weight
        if self.synapse.groups != 1 or self.synapse.dilation != (1, 1):
            return "grouped or dilated"
        if self.largest > highest_level(self.signed):
            return "pooled sums above 8 bits"
        if weight[0].size > convolution.MOST_WEIGHT_ROWS or weight[0, 0].size > convolution.MOST_TAPS:
            return "a kernel of very many weights"
        if self.synapse.in_shape[0] * self.synapse.in_shape[2] > convolution.MOST_LEVELS_IN_A_ROW:
            return "very long rows of pixels"
        return None if fallback() is None else "no native library"

    def choose(self, engine: EngineName, levels: Integers, density: float) -> Choice:
        """The kernel and method for these levels. `auto` times both native methods once, then it compares densities."""
        if engine == "dense":
            return Choice("numpy", "dense", "asked for")
        refused = self.native_refused()
        if engine == "bitplane":
            reason = f"asked for; not native: {refused}" if refused else "asked for"
            return Choice("numpy" if refused else "native", "bitplane", reason)
        if refused:
            return Choice("numpy", "dense", f"not native: {refused}", density)
        if self.crossover is None:
            self.crossover = self._measure(levels, density)
        margin = {None: 1.0, "bitplane": 1.1, "dense": 0.9}[self.chosen]  # near the cross-over the choice stays
        below = density < self.crossover * margin
        self.chosen = "bitplane" if below else "dense"
        where = "near" if below != (density < self.crossover) else "below" if below else "above"
        reason = f"density {density:.3f} {where} cross-over {self.crossover:.3f}"
        return Choice("native", self.chosen, reason, density)

    def _measure(self, levels: Integers, density: float) -> float:
        """The density at which both methods would take the same time: the time of planes is proportional to it."""
        times: dict[Method, float] = {}
        methods: tuple[Method, ...] = ("bitplane", "dense")
        out: NDArray[Any] | None = None
        for method in methods:
            self.native.keep(method)
            out, _ = self.native.run(levels, method, out=out)
            times[method] = float("inf")
            for _ in range(TIMED_RUNS):
                started = time.perf_counter()
                self.native.run(levels, method, out=out)
                times[method] = min(times[method], time.perf_counter() - started)
        self.native.keep(min(methods, key=times.__getitem__))
        return max(density, 1e-4) * times["dense"] / times["bitplane"]
