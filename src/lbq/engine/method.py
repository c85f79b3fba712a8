"""The kernel and method that run a convolution: chosen by what is installed, and by measured density."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal

from lbq import native as library
from lbq.engine import convolution, numpy_kernels
from lbq.engine.convolution import Backend, Method
from lbq.engine.general import GeneralConv
from lbq.engine.pairs import PairLists, chosen_lists, rows_by_pair
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
    timesteps: int = 1  # that lie one after the other in what it reads
    crossover: float | None = None  # density at which the dense kernel is as fast as the lists of planes or pairs
    chosen: Literal["lists", "dense"] | None = None  # the latest choice
    lists: PairLists | None = None  # chosen on the first images
    gain: float = 1.0  # time of planes over that of pairs

    @cached_property
    def native(self) -> convolution.Conv:
        s = self.synapse
        plain = s.groups == 1 and s.dilation == (1, 1)
        few = s.weight[0].size <= convolution.MOST_WEIGHT_ROWS and s.weight[0, 0].size <= convolution.MOST_TAPS
        if plain and few and s.in_shape[0] * s.in_shape[2] <= convolution.MOST_LEVELS_IN_A_ROW:
            return convolution.PackedConv(s.weight, s.stride, s.padding)
        return GeneralConv(s.weight, s.stride, s.padding, s.dilation, s.groups)

    @cached_property
    def numpy(self) -> numpy_kernels.PackedConv:
        s = self.synapse
        return numpy_kernels.PackedConv(s.weight, s.stride, s.padding, s.dilation, s.groups)

    def native_refused(self) -> str | None:
        """Why the native kernels do not run this synapse, or None."""
        if self.largest > highest_level(self.signed):
            return "pooled sums above 8 bits"
        return None if fallback() is None else "no native library"

    def choose(self, engine: EngineName, levels: Integers, density: float, backend: Backend = "horner") -> Choice:
        """The kernel and method for these levels. `auto` times the native methods once, then it compares densities."""
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
        margin = {None: 1.0, "lists": 1.1, "dense": 0.9}[self.chosen]  # near the cross-over the choice stays
        below = density < self.crossover * margin
        self.chosen = "lists" if below else "dense"
        where = "near" if below != (density < self.crossover) else "below" if below else "above"
        reason = f"density {density:.3f} {where} cross-over {self.crossover:.3f}"
        if not below:
            return Choice("native", "dense", reason, density)
        if self.gain <= 1 or backend != "horner":
            return Choice("native", "bitplane", reason, density)
        return Choice("native", "pairs", f"{reason}, {self.gain:.2f} x planes", density)

    def _measure(self, levels: Integers, density: float) -> float:
        """The density at which the dense method and lists would take the same time: that of lists is proportional to it."""
        by_lists: list[Method] = ["bitplane"]
        if self.native.pairs_refused(self.signed, self.largest, self.timesteps) is None:
            rows = rows_by_pair(levels, self.timesteps, self.synapse.weight[0, 0].size)
            self.lists = chosen_lists(rows, self.largest)
            by_lists.append("pairs")
        # dense behind each, so that all lists find equally cold caches
        in_turn: list[Method] = [method for each in by_lists for method in (each, "dense")]
        times = self._timed(in_turn, levels)
        self.native.keep(min(times, key=times.__getitem__))
        if "pairs" in times:
            self.gain = times["bitplane"] / times["pairs"]
        return max(density, 1e-4) * times["dense"] / min(times[method] for method in by_lists)

    def _timed(self, methods: list[Method], levels: Integers) -> dict[Method, float]:
        """Seconds of each method, the best of some turns: clocks change from one moment to the next."""
        given: dict[str, Any] = {"largest": self.largest, "timesteps": self.timesteps, "lists": self.lists}
        times, out = dict.fromkeys(methods, float("inf")), None
        for run, method in product(range(1 + TIMED_RUNS), methods):
            started = time.thread_time()  # of the processor: other programs may use it meanwhile
            out, _ = self.native.run(levels, method, out=out, **given)
            if run:
                times[method] = min(times[method], max(time.thread_time() - started, 1e-9))
        return times
