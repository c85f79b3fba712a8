"""Which kernel runs a convolution, and with which method: by what is installed, and by measured density."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lbq.engine import numpy_kernels
from lbq.engine.levels import Integers, popcount
from lbq.engine.numpy_kernels import Backend, Counts, Method
from lbq.graph import Synapse

EngineName = Literal["auto", "dense", "bitplane"]


class Conv(Protocol):
    """A packed convolution: native or NumPy."""

    def run(
        self,
        levels: Integers,
        method: Method,
        backend: Backend = "horner",
        threads: int = 1,
        out: NDArray[Any] | None = None,
    ) -> tuple[NDArray[Any], Counts]: ...


@dataclass(frozen=True)
class Choice:
    """How a synapse was run: the kernel and method, and why. density: set bits per input, where it was measured."""

    kernel: Literal["native", "numpy", "torch"]
    method: Method
    reason: str
    density: float | None = None


def native_kernels() -> Any | None:
    """The module of native kernels, or None (with a warning, once) where they are not built."""
    return None


@dataclass
class Prepared:
    """One convolution, packed at first use, and what has been learnt about its speed."""

    synapse: Synapse
    largest: int  # of the levels it reads
    signed: bool
    crossover: float | None = None  # density at which the dense kernel is as fast as the planes
    _convs: dict[str, Conv] = field(default_factory=dict)

    def conv(self, kernel: Literal["native", "numpy"]) -> Conv:
        if kernel not in self._convs:
            s = self.synapse
            self._convs[kernel] = numpy_kernels.pack(s.weight, s.stride, s.padding, s.dilation, s.groups)
        return self._convs[kernel]

    def native_refused(self) -> str | None:
        """Why the native kernels do not run this synapse."""
        if self.synapse.groups != 1 or self.synapse.dilation != (1, 1):
            return "grouped or dilated"
        if self.largest > (127 if self.signed else 255):
            return "pooled sums above 8 bits"
        return "native kernels are not built" if native_kernels() is None else None

    def choose(self, engine: EngineName, levels: Integers) -> Choice:
        """For these levels; `auto` times both methods once and from then on compares densities."""
        if engine == "dense":
            return Choice("numpy", "dense", "asked for")
        refused = self.native_refused()
        kernel: Literal["native", "numpy"] = "numpy" if refused else "native"
        if engine == "bitplane":
            return Choice(kernel, "bitplane", "asked for" if refused is None else f"asked for; NumPy: {refused}")
        density = float(popcount(levels).sum(dtype=np.int64)) / max(levels.size, 1)
        if refused:
            return Choice("numpy", "dense", f"NumPy: {refused}, and dense products are its fastest", density)
        if self.crossover is None:
            self.crossover = self._measure(levels, density)
        if density < self.crossover:
            return Choice(kernel, "bitplane", f"density {density:.3f} below cross-over {self.crossover:.3f}", density)
        return Choice(kernel, "dense", f"density {density:.3f} above cross-over {self.crossover:.3f}", density)

    def _measure(self, levels: Integers, density: float) -> float:
        """The density at which both methods would take the same time: planes take time in proportion to it."""
        conv, times = self.conv("native"), {}
        for method in ("bitplane", "dense"):
            conv.run(levels, method)
            started = time.perf_counter()
            conv.run(levels, method)
            times[method] = time.perf_counter() - started
        return max(density, 1e-4) * times["dense"] / times["bitplane"]


def warn_fallback(reason: str) -> None:
    warnings.warn(
        f"the native kernels are not used ({reason}): NumPy's are right but slow", RuntimeWarning, stacklevel=3
    )
