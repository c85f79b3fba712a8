"""Recordings of Prophesee cameras: RAW files in EVT 2.0 and EVT 3.0, and DAT files. NumPy only.

All begin with lines of text, `% keyword value`. A RAW file's may end with `% end`; they name the encoding (`% evt 3.0`, or
`% format EVT3;height=720;width=1280`) and often the sensor's size (`% geometry 1280x720`; DAT: `% Width`, `% Height`). What
follows is little-endian. Pixels count from the upper left corner, time in microseconds. Words of other kinds, such as
triggers, are passed over, and so are events in front of the first full timestamp.

**EVT 2.0** is words of 32 bits, their kind in bits 28-31. 0, 1: an OFF or ON event, with the lowest 6 bits of its time in
bits 22-27, x in 11-21, y in 0-10. 8: bits 0-27 are the upper 28 bits of the time of what follows.

**EVT 3.0** is words of 16 bits, their kind in bits 12-15. 0: y of what follows, in bits 0-10. 2: an event, x in bits 0-10,
ON in bit 11. 3: x and ON for vectors that follow. 4, 5: a vector of 12 or 8 pixels, a set bit i is an event at x + i; then x
grows by 12 or 8. 6, 8: the lower and upper 12 bits of the time of what follows; when the upper ones change, the lower are 0.

**DAT** has two bytes after the text, the kind of events (0 or 12) and their size, 8. An event is 32 bits of time, then x in
bits 0-13, y in 14-27 and ON above.

The time wraps after 2^34, 2^24 and 2^32 us; a step is read as signed, modulo that. Source: Prophesee, "RAW File Format",
"EVT 2.0 Format", "EVT 3.0 Format", "DAT File Format".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.data.events import CHUNK_EVENTS, COLUMNS, MAX_HEADER_BYTES, Events, cut_off, in_order
from lbq.errors import DataError

MAX_EVENTS = 2**24  # of one recording: a vector of 2 bytes holds up to 12
Columns = tuple[NDArray[np.int64], NDArray[Any], NDArray[Any], NDArray[Any]]  # t, x, y, p
Size = tuple[int, int]


def decode_prophesee(
    data: bytes, where: str, *, size: Size | None = None, sort_within_us: int = 0, max_events: int = MAX_EVENTS
) -> Events:
    """Events of a whole file. size: the sensor's width and height, where the file does not say; errors name `where`."""
    start, text = _header(data, where)
    kind = _encoding(text, where)
    said = re.search(r"^% geometry (\d{1,5})x(\d{1,5})\s*$", text, re.M | re.I)
    lengths = [
        re.search(rf"^% (?:format .*\b)?{side}[ =](\d{{1,5}})\b", text, re.M | re.I) for side in ("width", "height")
    ]
    if said is not None:
        size = int(said[1]), int(said[2])
    elif lengths[0] is not None and lengths[1] is not None:
        size = int(lengths[0][1]), int(lengths[1][1])
    if size is None:
        raise DataError(
            f"{where} does not say how large its sensor is: give size=(width, height), lbq watch --sensor 640x480"
        )
    if not all(1 <= side <= 2**14 for side in size):
        raise DataError(f"{where}: a sensor of {size[0]} x {size[1]} pixels: the file is damaged")
    if kind == "DAT":
        start = _dat_start(data, start, where)
    dtype = {"EVT2": "<u4", "EVT3": "<u2", "DAT": "<u8"}[kind]
    count, rest = divmod(len(data) - start, np.dtype(dtype).itemsize)
    if rest:
        raise cut_off(where, len(data) - rest, f"{rest} bytes after word {count} are no whole word of {kind}")
    words = np.frombuffer(data, dtype, offset=start)
    events = sum(_count(kind, part) for part in _parts(words))
    if events > max_events:
        raise DataError(
            f"{where} has {events:,} events, more than the limit of {max_events:,}: raise max_events to read it"
        )
    decoders: dict[str, Callable[[NDArray[Any]], Iterator[Columns]]] = {"EVT2": _evt2, "EVT3": _evt3, "DAT": _dat}
    columns = [np.empty(events, dtype) for dtype in COLUMNS.values()]
    written = 0
    for some in decoders[kind](words):
        for column, values in zip(columns, some, strict=True):
            column[written : written + len(values)] = values
        written += len(some[0])
    t, x, y, p = (column[:written] for column in columns)
    return in_order(t, x, y, p, size, where, sort_within_us)


def _header(data: bytes, where: str) -> tuple[int, str]:
    """Where the text ends, and the text."""
    position = 0
    while data.startswith(b"% ", position):
        end = data.find(b"\n", position, MAX_HEADER_BYTES)
        if end < 0:
            raise DataError(f"{where}: the text header is cut off, or longer than {MAX_HEADER_BYTES:,} bytes")
        line, position = data[position:end], end + 1
        if line.strip() == b"% end":
            break
    if not position:
        raise DataError(f"{where} is not of a Prophesee camera: it does not begin with '% '")
    return position, data[:position].decode("ascii", "replace")


def _encoding(text: str, where: str) -> str:
    """EVT2, EVT3 or DAT; others are refused by name."""
    if "data file containing" in text.lower():
        return "DAT"
    match = re.search(r"^% (?:format|evt) ([\w.]+)", text, re.M)
    name = match[1] if match else "one that it does not name"
    kinds = {"EVT2": "EVT2", "2.0": "EVT2", "EVT3": "EVT3", "3.0": "EVT3"}
    if name not in kinds:
        raise DataError(
            f"{where} is encoded as {name}; EVT 2.0, EVT 3.0 and DAT can be read: convert it to one of them"
        )
    if re.search(r"^% endianness big", text, re.M):
        raise DataError(f"{where} is big-endian; only little-endian words can be read: convert it first")
    return kinds[name]


def _parts(words: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Some words at a time, which bounds the temporaries."""
    for begin in range(0, len(words), CHUNK_EVENTS // 4):
        yield words[begin : begin + CHUNK_EVENTS // 4]


def _count(kind: str, words: NDArray[Any]) -> int:
    """The most events that these words can be."""
    if kind == "EVT2":
        return int((words >> 28 < 2).sum())
    if kind == "DAT":
        return len(words)
    above = words >> 12
    vectors = np.where(above == 4, words & 0xFFF, np.where(above == 5, words & 0xFF, above == 2))
    return int(np.bitwise_count(vectors.astype(np.uint16)).sum(dtype=np.int64))


class _Clock:
    """The upper part of a time that wraps: the sum of its signed steps."""

    def __init__(self, bits: int) -> None:
        self.bits, self.last = bits, -1

    def unwrapped(self, values: NDArray[Any]) -> NDArray[np.int64]:
        values = values.astype(np.int64)
        if not len(values):
            return values
        before = self.last if self.last >= 0 else int(values[0])
        half = 1 << (self.bits - 1)
        steps = np.diff(values, prepend=before % (2 * half))
        times = before + np.cumsum((steps + half) % (2 * half) - half)
        self.last = max(int(times[-1]), 0)  # never back beyond the start
        return np.asarray(np.maximum(times, 0))


def _latest(values: NDArray[Any], which: NDArray[np.bool_], before: int) -> NDArray[np.int64]:
    """At each word, what the latest of the marked words said: `values` has one for each of these, `before` is in front."""
    return np.concatenate(([before], values)).astype(np.int64)[np.cumsum(which)]


def _evt2(words: NDArray[np.uint32]) -> Iterator[Columns]:
    clock, high = _Clock(28), -1
    for part in _parts(words):
        kind = part >> 28
        highs = _latest(clock.unwrapped(part[kind == 8] & 0xFFFFFFF), kind == 8, high)
        high = int(highs[-1])
        chosen = (kind < 2) & (highs >= 0)
        event = part[chosen]
        yield highs[chosen] << 6 | event >> 22 & 63, event >> 11 & 0x7FF, event & 0x7FF, event >> 28


def _evt3(words: NDArray[np.uint16]) -> Iterator[Columns]:
    clock, high, low, y, vector, moved = _Clock(12), -1, 0, -1, -1, 0
    for part in _parts(words):
        kind, value = part >> 12, (part & 0xFFF).astype(np.int64)
        highs = _latest(clock.unwrapped(value[kind == 8]), kind == 8, high)
        anew = np.diff(highs, prepend=high) != 0  # a new upper part begins with a lower one of 0
        lows = _latest(np.where(anew, 0, value)[anew | (kind == 6)], anew | (kind == 6), low)
        rows = _latest(value[kind == 0] & 0x7FF, kind == 0, y)
        vectors = _latest(value[kind == 3], kind == 3, vector)  # x and, in bit 11, ON
        passed = np.concatenate(([moved], moved + np.cumsum(np.where(kind == 4, 12, np.where(kind == 5, 8, 0)))))
        since = passed[:-1] - _latest(passed[:-1][kind == 3], kind == 3, 0)  # pixels of vectors in front of this one
        single = kind == 2
        start = np.where(single, value & 0x7FF, (vectors & 0x7FF) + since)
        known = (highs >= 0) & (rows >= 0) & (single | (vectors >= 0))
        masks = np.where(kind == 4, value, np.where(kind == 5, value & 0xFF, single)) * known
        word, bit = np.nonzero(masks[:, None] >> np.arange(12) & 1)
        on = np.where(single, value, vectors)[word] >> 11 & 1
        yield (highs << 12 | lows)[word], np.minimum(start[word] + bit, 2**16 - 1), rows[word], on
        high, low, y, vector = int(highs[-1]), int(lows[-1]), int(rows[-1]), int(vectors[-1])
        moved = int(passed[-1] - _latest(passed[:-1][kind == 3], kind == 3, 0)[-1])


def _dat_start(data: bytes, position: int, where: str) -> int:
    if len(data) < position + 2:
        raise DataError(f"{where} is cut off behind its text")
    kind, size = data[position], data[position + 1]
    if kind not in (0, 12) or size != 8:
        raise DataError(
            f"{where} holds events of kind {kind} and {size} bytes; those of pixels are 0 or 12, of 8 bytes"
        )
    return position + 2


def _dat(words: NDArray[np.uint64]) -> Iterator[Columns]:
    clock = _Clock(32)
    for part in _parts(words):
        event = (part >> 32).astype(np.uint32)
        yield (
            clock.unwrapped(part & 0xFFFFFFFF),
            event & 0x3FFF,
            event >> 14 & 0x3FFF,
            (event >> 28 != 0).astype(np.uint8),
        )
