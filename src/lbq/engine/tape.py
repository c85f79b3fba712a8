"""Native calls that can be repeated: a tape records them while a network runs and replays them as one call. No torch.

A `Step` is a C structure and all the memory that it points to. `perform` makes the call, and puts the step on the tape that
records in this thread. While the memory stays where it is, `Tape.run` repeats the steps on whatever the memory then holds.
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

CACHE_LINE_BYTES = 64
KINDS = ("conv", "neuron", "add", "pool", "readout", "product", "gate", "general")  # enum lbq_step_kind
StepCall = native.structure(int64="kind", pointer="call")  # struct lbq_step


class Step:
    """One native call. memory: everything that its structure points to; it must live as long as the step."""

    def __init__(self, kind: str, call: ctypes.Structure, *memory: Any) -> None:
        self.kind, self.call, self.memory = KINDS.index(kind), call, memory

    def struct(self) -> ctypes.Structure:
        return StepCall(self.kind, ctypes.addressof(self.call))


class Tape:
    """Steps in the order in which they were performed."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._packed: ctypes.Array[Any] | None = None

    def add(self, step: Step) -> None:
        self.steps.append(step)
        self._packed = None

    def run(self, threads: int, start: int = 0, stop: int | None = None) -> None:
        """Repeat the calls from `start` to before `stop`."""
        if self._packed is None:
            self._packed = (StepCall * len(self.steps))(*(step.struct() for step in self.steps))
        count = (len(self.steps) if stop is None else stop) - start
        _call(ctypes.byref(self._packed, start * ctypes.sizeof(StepCall)), count, threads)


_recorder = threading.local()


@contextmanager
def recording() -> Iterator[Tape]:
    """Put the steps that this thread performs on a tape."""
    tape = _recorder.tape = Tape()
    try:
        yield tape
    finally:
        _recorder.tape = None


def perform(step: Step, threads: int) -> None:
    """Make the call of a step, and record it where this thread records."""
    packed = step.struct()
    _call(ctypes.byref(packed), 1, threads)
    tape: Tape | None = getattr(_recorder, "tape", None)
    if tape is not None:
        tape.add(step)


def _call(steps: Any, count: int, threads: int) -> None:
    if library().lbq_steps(steps, ctypes.c_int64(count), max(int(threads), 1)):
        raise MemoryError("no memory left for a layer's lists")


def library() -> ctypes.CDLL:
    """The native library; an error where there is none."""
    library = native.library()
    if library is None:
        raise LbqError(f"the native kernels are not available: {native.report().reason}")
    return library


def address(array: NDArray[Any] | None) -> int | None:
    """Where an array's numbers begin in memory."""
    return None if array is None else array.__array_interface__["data"][0]  # array.ctypes takes twice as long


def ready(array: NDArray[Any], dtype: Any = np.int32) -> NDArray[Any]:
    """An array as the library reads it: contiguous, of this type."""
    return np.ascontiguousarray(array, dtype)


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros that begin at a cache line: a row of weights or sums across two lines would cost both."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(size + CACHE_LINE_BYTES, np.uint8)
    start = -room.ctypes.data % CACHE_LINE_BYTES
    return room[start : start + size].view(dtype).reshape(shape)
