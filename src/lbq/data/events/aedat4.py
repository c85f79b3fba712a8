r"""AEDAT 4.0 recordings, as iniVation's DV writes them. NumPy only.

The file is the line `#!AER-DAT4.0\r\n`, a header and packets, everything little-endian. Header and packets are FlatBuffers
behind their length in 32 bits. The header holds the compression, where a table of packets begins (-1: there is none; nothing
follows it), and an XML text that says of each stream what it holds and how large its sensor is. A packet is two int32, the
stream's number and the length, then that many bytes, which may be one LZ4 frame. Events (`EVTS`) are 16 bytes each: int64
microseconds, int16 x and y from the upper left corner, a byte that is 1 for ON, 3 unused. Other streams are passed over.
Zstandard is refused by name. Source: iniVation, "AEDAT 4.0" and its FlatBuffers schemas; Google, "FlatBuffers Internals".
"""

from __future__ import annotations

import re
import struct

import numpy as np

from lbq.data.events import MAX_HEADER_BYTES, Events, in_order, text_header
from lbq.data.events.lz4 import decompress
from lbq.errors import DataError

MAX_PACKETS = 2**19
MAX_EVENTS = 2**23  # of one recording: with the decoded arrays they stay under 512 MB
EVENT = np.dtype([("t", "<i8"), ("x", "<i2"), ("y", "<i2"), ("on", "?"), ("unused", "V3")])
COMPRESSIONS = "none", "LZ4", "LZ4", "Zstandard", "Zstandard"
_MARK = re.compile(r'<node name="(\d{1,4})"|key="(typeIdentifier|sizeX|sizeY)"[^<>]{0,60}>(\w{1,20})<')


def decode_aedat4(data: bytes, where: str, *, sort_within_us: int = 0, max_events: int = MAX_EVENTS) -> Events:
    """Events of a whole file. LZ4 is decompressed in Python: about a second for 4 MB of a file. Errors name `where`."""
    start = text_header(data, b"4.0", where)
    try:
        return _decode(data, start, where, sort_within_us, max_events)
    except (struct.error, IndexError):
        raise DataError(f"{where} is cut off, or its tables are damaged") from None


def _decode(data: bytes, start: int, where: str, sort_within_us: int, max_events: int) -> Events:
    (length,) = struct.unpack_from("<I", data, start)
    if length > MAX_HEADER_BYTES:
        raise DataError(f"{where}: its header is longer than {MAX_HEADER_BYTES:,} bytes: the file is damaged")
    header = _Table(data[start + 4 : start + 4 + length])
    compressed, end = header.number(0, "<i", 0), header.number(1, "<q", -1)
    if not 0 <= compressed < len(COMPRESSIONS) or COMPRESSIONS[compressed] == "Zstandard":
        name = COMPRESSIONS[compressed] if 0 <= compressed < len(COMPRESSIONS) else f"kind {compressed}"
        raise DataError(f"{where} is compressed with {name}; none and LZ4 can be read: save it again with one of these")
    stream, size = _event_stream(header.bytes(2, 1).decode("utf-8", "replace"), where)
    position, end = start + 4 + length, len(data) if end == -1 else end
    if not position <= end <= len(data):
        raise DataError(f"{where} is cut off: its table of packets would begin at byte {end:,} of {len(data):,}")
    parts, count = [np.zeros(0, EVENT)], 0
    for number in range(MAX_PACKETS + 1):
        if position == end:
            break
        if number == MAX_PACKETS:
            raise DataError(f"{where} has more than {MAX_PACKETS:,} packets: the file is damaged")
        which, length = struct.unpack_from("<ii", data, position)
        position += 8 + length
        if length < 0 or position > end:
            raise DataError(f"{where} is cut off inside packet {number}, or that packet claims a wrong size")
        if which == stream:
            body = data[position - length : position]
            room = EVENT.itemsize * (max_events - count) + 1024
            body = body if not compressed else decompress(body, f"{where}, packet {number}", room)
            if body[8:12] != b"EVTS":
                raise DataError(f"{where}: packet {number} holds no events, as its stream should: the file is damaged")
            parts.append(np.frombuffer(_Table(body[4:]).bytes(0, EVENT.itemsize), EVENT))
            count += len(parts[-1])
            if count > max_events:
                raise DataError(f"{where} has more than {max_events:,} events: raise max_events to read it")
    events = np.concatenate(parts)
    if len(events) and (int(events["x"].min()) < 0 or int(events["y"].min()) < 0):
        raise DataError(f"{where} has an event at a negative pixel: the file is damaged")
    x, y, p = (events[name].astype(np.uint16) for name in ("x", "y", "on"))
    return in_order(events["t"].copy(), x, y, p.astype(np.uint8), size, where, sort_within_us)


def _event_stream(text: str, where: str) -> tuple[int, tuple[int, int]]:
    """The number of the stream of events, and its sensor's width and height."""
    streams: dict[int, dict[str, str]] = {}
    latest: dict[str, str] = {}
    for mark in _MARK.finditer(text):
        number, key, value = mark.groups()
        if number:
            latest = streams.setdefault(int(number), {})
        else:
            latest.setdefault(key, value)
    events = {number: said for number, said in streams.items() if said.get("typeIdentifier") == "EVTS"}
    if len(events) != 1:
        raise DataError(f"{where} has {len(events)} streams of events, and one can be read: save one alone")
    ((stream, said),) = events.items()
    sides = [said.get("sizeX", ""), said.get("sizeY", "")]
    if not all(re.fullmatch(r"\d{1,5}", side) and 0 < int(side) <= 2**15 for side in sides):
        raise DataError(f"{where} does not say how large its sensor is: the file is damaged")
    return stream, (int(sides[0]), int(sides[1]))


class _Table:
    """The root table of a FlatBuffer. Offsets count from where they stand. An IndexError where they lead out of it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        (self.at,) = struct.unpack_from("<I", data)
        (back,) = struct.unpack_from("<i", data, self.at)
        self.fields = self.at - back
        if self.fields < 0:
            raise IndexError
        (self.size,) = struct.unpack_from("<H", data, self.fields)

    def _field(self, number: int) -> int | None:
        """Where a field stands; None where the table leaves it out."""
        entry = 4 + 2 * number
        offset = struct.unpack_from("<H", self.data, self.fields + entry)[0] if entry + 2 <= self.size else 0
        return self.at + offset if offset else None

    def number(self, field: int, form: str, default: int) -> int:
        at = self._field(field)
        return default if at is None else int(struct.unpack_from(form, self.data, at)[0])

    def bytes(self, field: int, item_bytes: int) -> bytes:
        """A vector or text; nothing where it is left out."""
        if (at := self._field(field)) is None:
            return b""
        at += struct.unpack_from("<I", self.data, at)[0]
        size = struct.unpack_from("<I", self.data, at)[0] * item_bytes
        if at + 4 + size > len(self.data):
            raise IndexError
        return self.data[at + 4 : at + 4 + size]
