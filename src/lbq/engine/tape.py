"""Native calls that can be made again: recorded while a network runs, and then replayed as one call. No torch.

Every native call of a layer is a `Step`: a C structure and all the memory that it points to. `perform` makes it; while a
tape is recording in this thread it is also put on the tape. As long as the memory stays where it is, `Tape.run` does the
same to whatever the memory then holds, without coming back to Python between layers.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq import native
from lbq.errors import LbqError

CACHE_LINE = 64
KINDS = {"conv": 0, "neuron": 1, "add": 2, "pool": 3, "readout": 4}  # the enum of native.h


class _StepCall(ctypes.Structure):
    """struct lbq_step of native.h."""

    _fields_ = (("kind", ctypes.c_int64), ("call", ctypes.c_void_p))


class Step:
    """One native call. held: what its structure points to, which must live as long as it."""

    def __init__(self, kind: str, call: ctypes.Structure, *held: Any) -> None:
        self.kind, self.call, self.held = KINDS[kind], call, held

    def struct(self) -> _StepCall:
        return _StepCall(self.kind, ctypes.addressof(self.call))


class Tape:
    """Steps in the order in which they were made."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._packed: ctypes.Array[_StepCall] | None = None

    def add(self, step: Step) -> None:
        self.steps.append(step)
        self._packed = None

    def run(self, threads: int, start: int = 0, stop: int | None = None) -> None:
        """Make the calls from `start` to before `stop` again."""
        if self._packed is None:
            self._packed = (_StepCall * len(self.steps))(*(step.struct() for step in self.steps))
        count = (len(self.steps) if stop is None else stop) - start
        _make(ctypes.byref(self._packed, start * ctypes.sizeof(_StepCall)), count, threads)


_here = threading.local()


@contextmanager
def recording() -> Iterator[Tape]:
    """Put the steps that this thread performs on a tape."""
    tape = _here.tape = Tape()
    try:
        yield tape
    finally:
        _here.tape = None


def perform(step: Step, threads: int) -> None:
    packed = step.struct()
    _make(ctypes.byref(packed), 1, threads)
    tape: Tape | None = getattr(_here, "tape", None)
    if tape is not None:
        tape.add(step)


def _make(steps: Any, count: int, threads: int) -> None:
    if library().lbq_steps(steps, ctypes.c_int64(count), max(int(threads), 1)):
        raise MemoryError("no memory left for a layer's lists")


def library() -> ctypes.CDLL:
    found = native.library()
    if found is None:
        raise LbqError(f"the native kernels are not available: {native.report().reason}")
    return found


def address(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.__array_interface__["data"][0]  # array.ctypes takes twice as long


def ready(array: NDArray[Any], dtype: Any = np.int32) -> NDArray[Any]:
    """As the library reads it."""
    return np.ascontiguousarray(array, dtype)


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros that begin at a cache line: a row of weights or sums that lay across two would cost both."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(size + CACHE_LINE, np.uint8)
    start = -room.ctypes.data % CACHE_LINE
    return room[start : start + size].view(dtype).reshape(shape)
