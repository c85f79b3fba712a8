"""Recordings of event cameras: what a recording is, and the rules that all readers share. NumPy only.

Coordinates are those of an image viewer everywhere: x grows to the right, y grows **downward**, (0, 0) is the upper
left pixel. Polarity 1 is ON (brighter), 0 is OFF. Time is in microseconds and never goes back.

Any file may be hostile. A size that a file merely claims allocates nothing, and files over `MAX_BYTES` are refused
unread. So a bad file costs at most about a second and 512 MB before its `DataError`; LZ4 (AEDAT 4) a second for every 4 MB.
"""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.errors import DataError
from lbq.system.lazy import submodules as _submodules

MAX_BYTES = 128 * 2**20  # 16.8 million 8-byte events; with the decoded arrays it stays under 512 MB
MAX_HEADER_BYTES = 2**20  # text in front of the events; jAER's dump of camera settings takes about 3 kB
COLUMNS: dict[str, type[np.integer[Any]]] = {"t": np.int64, "x": np.uint16, "y": np.uint16, "p": np.uint8}
LATE_US = 10_000  # early cameras deliver some events late: readers sort within 10 ms and refuse beyond
MAX_TIME_US = 2**62  # of events, on both sides of 0: differences of two times fit 64 bits
CHUNK_EVENTS = 2**20  # decoded at a time: bounds the temporaries


@dataclass(frozen=True, eq=False)
class Events:
    """Events of one recording, all arrays `[N]`, in order of time.

    `t` int64 microseconds, never decreasing, less than 2^62 from 0; `x`, `y` uint16 pixels below `width` and `height`; `p`
    uint8, 1 = ON.
    Arrays of these types are not copied. Other whole numbers and bool are converted if every value fits. A polarity of
    -1 means OFF if there is no 0; with both, it would not be known which of them means OFF.
    """

    t: NDArray[np.int64]
    x: NDArray[np.uint16]
    y: NDArray[np.uint16]
    p: NDArray[np.uint8]
    width: int
    height: int

    def __post_init__(self) -> None:
        for name, limit in (("width", self.width), ("height", self.height)):
            if not isinstance(limit, int | np.integer) or not 1 <= limit <= 2**16:
                raise ValueError(f"{name} must be 1 to 65536 pixels, got {limit!r}")
        for name in "txyp":
            _check_whole(name, getattr(self, name), self.t)
        if self.p.dtype.kind == "i":
            object.__setattr__(self, "p", _unsigned_polarity(self.p))
        for name, limit in (("x", self.width), ("y", self.height), ("p", 2)):
            object.__setattr__(self, name, _fitted(name, getattr(self, name), 0, limit, COLUMNS[name]))
        object.__setattr__(self, "t", _fitted("t", self.t, 1 - MAX_TIME_US, MAX_TIME_US, COLUMNS["t"]))
        if (back := _first_step_back(self.t)) is not None:
            raise DataError(
                f"time goes back at event {back}, from {self.t[back - 1]} to {self.t[back]} us: "
                f"np.argsort(t, kind='stable') is the order that they must have"
            )

    @classmethod
    def from_array(cls, events: NDArray[Any], width: int, height: int) -> Events:
        """From one structured array, as most readers give: fields `x`, `y`, `t` (or `timestamp`) and `p` (or `polarity`)."""
        fields = events.dtype.names if isinstance(events, np.ndarray) else None
        if fields is None:
            raise ValueError("events must be a structured array of x, y, t and p; Events(t, x, y, p, ...) takes four")
        columns = []
        for name, other in (("t", "timestamp"), ("x", ""), ("y", ""), ("p", "polarity")):
            if name not in fields and other not in fields:
                raise ValueError(f"events has no field {name!r}: its fields are {', '.join(fields)}")
            columns.append(events[name if name in fields else other])
        return cls(columns[0], columns[1], columns[2], columns[3], width, height)

    def __len__(self) -> int:
        return len(self.t)

    def window(self, start: int, stop: int) -> Events:
        """The events with start <= t < stop (microseconds), as views."""
        first, last = np.searchsorted(self.t, [start, stop])
        part = slice(int(first), max(int(first), int(last)))
        return Events(self.t[part], self.x[part], self.y[part], self.p[part], self.width, self.height)


def _check_whole(name: str, array: NDArray[Any], t: NDArray[Any]) -> None:
    """Refuse anything but an array of whole numbers, as long as `t`."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iub" or array.ndim != 1 or len(array) != len(t):
        kind = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        hint = ", (1e6 * t).astype(np.int64) of seconds" if name == "t" and kind.startswith("float") else ""
        raise ValueError(f"{name} must be an array [N] of whole numbers{hint}, as long as t, not {kind}")
    if isinstance(array, np.ma.MaskedArray):  # some of NumPy's functions heed the mask, others do not
        unmasked = f"np.asarray(a)[~np.ma.getmaskarray({name})]"
        raise ValueError(f"{name} must not be a masked array: give {unmasked} for each a of t, x, y and p")


def _unsigned_polarity(p: NDArray[Any]) -> NDArray[Any]:
    """Polarities with OFF as 0, also if it was -1."""
    if not (p == -1).any():
        return p
    if (strange := np.abs(p) != 1).any():
        first = int(np.argmax(strange))
        raise DataError(f"event {first} has p = {p[first]} where others have -1: OFF is either 0 or -1, and ON is 1")
    return (p > 0).view(np.uint8)


def _fitted(name: str, array: NDArray[Any], low: int, limit: int, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """`array` as `dtype`, without a copy if it is that already. Refuses the first value outside low <= value < limit."""
    if array.dtype.kind == "b":
        array = array.view(np.uint8)
    range_ = np.iinfo(array.dtype)  # a type that holds no value out of range needs no search
    if (range_.max >= limit and array.max(initial=0) >= limit) or (range_.min < low and array.min(initial=0) < low):
        first = int(np.argmax((array >= limit) | (array < low)))
        bound = f"below {limit}" if array[first] >= limit else f"at least {low}"
        raise DataError(f"event {first} has {name} = {array[first]}, but {name} must be {bound}")
    return array.astype(dtype, copy=False)


def _first_step_back(t: NDArray[np.int64]) -> int | None:
    back = t[1:] < t[:-1]
    return int(np.argmax(back)) + 1 if back.any() else None


def _largest_delay(t: NDArray[np.int64]) -> int:
    """The most microseconds by which an event comes after a newer one."""
    worst, newest = 0, int(t[0])
    for begin in range(0, len(t), CHUNK_EVENTS):
        part = t[begin : begin + CHUNK_EVENTS]
        reached = np.maximum.accumulate(np.maximum(part, newest))
        worst, newest = max(worst, int((reached - part).max())), int(reached[-1])
    return worst


def in_order(
    t: NDArray[np.int64],
    x: NDArray[np.uint16],
    y: NDArray[np.uint16],
    p: NDArray[np.uint8],
    size: tuple[int, int],
    where: str,
    sort_within_us: int = 0,
) -> Events:
    """`Events` of `size` (width, height) from decoded arrays; errors name `where`.

    Formats promise that time never goes back, but early cameras sometimes delivered an event late. A stable sort puts
    events that are late by at most `sort_within_us` in their place; a later one is an error.
    """
    if int(t.max(initial=0)) >= MAX_TIME_US or int(t.min(initial=0)) <= -MAX_TIME_US:
        first = int(np.argmax((t >= MAX_TIME_US) | (t <= -MAX_TIME_US)))
        raise DataError(
            f"{where}: event {first} has the time {t[first]} us, which no clock reaches: the file is damaged"
        )
    if (back := _first_step_back(t)) is not None and sort_within_us > 0 and _largest_delay(t) <= sort_within_us:
        order = np.argsort(t, kind="stable")
        t, x, y, p = t[order], x[order], y[order], p[order]
        back = None
    if back is not None:
        raise DataError(
            f"{where}: time goes back at event {back}, from {t[back - 1]} to {t[back]} us: the file is damaged "
            f"(events that are late by at most {sort_within_us} us are sorted, sort_within_us of the reader)"
        )
    try:
        return Events(t, x, y, p, *size)
    except DataError as error:
        raise DataError(f"{where}: {error}: the file is damaged or from another sensor") from None


def read_bounded(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """A regular file's bytes. A file over `max_bytes` is refused unread."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for somebody to write into it
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{path} is not a regular file")
            check_size(str(path), status.st_size, max_bytes)
            return file.read(max_bytes)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def check_size(where: str, size: int, max_bytes: int) -> None:
    """Refuse a file of `size` bytes if that is over the limit."""
    if size > max_bytes:
        raise DataError(f"{where} has {size:,} bytes, more than the limit of {max_bytes:,}: raise max_bytes to read it")


def cut_off(where: str, whole_bytes: int, what: str) -> DataError:
    """For a recording that ends within something, as after a power failure. whole_bytes: how many come before that."""
    return DataError(
        f"{where} is cut off: {what}; copy it again, or keep what is whole: truncate -s {whole_bytes} {shlex.quote(where)}"
    )


def text_header(data: bytes, version: bytes, where: str) -> int:
    """Check the first line of an AEDAT file, which names its version. The length of that line."""
    end = data.find(b"\n", 0, 64)
    first = data[: end if end >= 0 else 64].rstrip(b"\r")
    if first != b"#!AER-DAT" + version or end < 0:
        shown = first[:20].decode("ascii", "replace") if data else "nothing"
        raise DataError(f"{where} is not AEDAT {version.decode()}: its first line is {shown!r}")
    return end + 1


_submodules(__name__)
