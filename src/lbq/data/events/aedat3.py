r"""AEDAT 3.1 recordings, the format of DVS128-Gesture. NumPy only.

The file is text lines from `#!AER-DAT3.1\r\n` to `#!END-HEADER\r\n`, then packets, everything little-endian. A packet
is a header of 28 bytes and `eventCapacity` events of `eventSize` bytes, of which the first `eventNumber` are in use:

    int16 eventType, int16 eventSource, int32 eventSize, int32 eventTSOffset, int32 eventTSOverflow,
    int32 eventCapacity, int32 eventNumber, int32 eventValid

Polarity events (type 1) have 8 bytes: data with validity in bit 0, polarity in bit 1 (1 = ON), y in bits 2-16 and x in
bits 17-31, then an int32 timestamp in microseconds; the packet's eventTSOverflow counts how often that has wrapped,
2^31 us each. Pixels count from the upper **left** corner, so nothing is flipped. Invalid events are dropped, other
packet types skipped. Source: iniVation, "AEDAT 3.1".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lbq.data.events import (
    CHUNK_EVENTS,
    MAX_BYTES,
    MAX_HEADER_BYTES,
    Events,
    cut_off,
    in_order,
    read_bounded,
    text_header,
)
from lbq.errors import DataError

MAX_PACKETS = 2**19  # a gesture recording has some ten thousand; a file of empty packets must not take a minute
_PACKET_HEADER = struct.Struct("<hhiiiiii")
_POLARITY = 1
_END = b"#!END-HEADER\r\n"


def read_aedat3(
    path: Path | str, *, width: int = 128, height: int = 128, sort_within_us: int = 0, max_bytes: int = MAX_BYTES
) -> Events:
    """The polarity events in `path`; see `decode_aedat3`."""
    data = read_bounded(path, max_bytes)
    return decode_aedat3(data, str(path), width=width, height=height, sort_within_us=sort_within_us)


def decode_aedat3(data: bytes, where: str, *, width: int = 128, height: int = 128, sort_within_us: int = 0) -> Events:
    """Polarity events of a whole file from a sensor of `width` x `height` pixels; errors name `where`."""
    packets = _packets(data, where)
    count = sum(number for _, number, _ in packets)
    t = np.empty(count, np.int64)
    x, y, p = np.empty(count, np.uint16), np.empty(count, np.uint16), np.empty(count, np.uint8)
    written = 0
    view = memoryview(data)
    for group in _groups(packets):
        body = b"".join([view[offset : offset + 8 * number] for offset, number, _ in group])
        word, stamp = np.frombuffer(body, "<u4").reshape(-1, 2).astype(np.uint32).T
        overflow = np.repeat([wraps for _, _, wraps in group], [number for _, number, _ in group])
        valid = (word & 1) == 1
        if not valid.all():
            word, stamp, overflow = word[valid], stamp[valid], overflow[valid]
        if (stamp >> 31).any():
            raise DataError(f"{where} has an event with a negative timestamp: the file is damaged")
        part = slice(written, written + len(word))
        t[part] = (overflow << 31) | stamp
        x[part] = word >> 17
        y[part] = (word >> 2) & 0x7FFF
        p[part] = (word >> 1) & 1
        written = part.stop
    return in_order(t[:written], x[:written], y[:written], p[:written], (width, height), where, sort_within_us)


def _header(data: bytes, where: str) -> int:
    """Where the packets begin."""
    first = text_header(data, b"3.1", where)
    end = data.find(b"\n" + _END, first - 1, MAX_HEADER_BYTES)
    if end < 0:
        raise DataError(f"{where}: the text header is cut off, or longer than {MAX_HEADER_BYTES:,} bytes")
    for line in data[first:end].splitlines():
        if not line.startswith(b"#"):
            raise DataError(f"{where}: the text header is damaged, one of its lines does not begin with '#'")
        if line.startswith(b"#Format:") and line[8:].strip() != b"RAW":
            kind = line[8:40].decode("ascii", "replace").strip()
            raise DataError(f"{where} is in the format {kind!r}; only RAW can be read: convert it first")
    return end + 1 + len(_END)


def _packets(data: bytes, where: str) -> list[tuple[int, int, int]]:
    """(offset of the first event, number of events, overflow) of every polarity packet."""
    packets = []
    position, length = _header(data, where), len(data)
    seen = 0
    while position < length:
        if seen == MAX_PACKETS:
            raise DataError(f"{where} has more than {MAX_PACKETS:,} packets: the file is damaged")
        if length - position < _PACKET_HEADER.size:
            raise cut_off(where, position, f"it ends inside the header of packet {seen}")
        kind, _, size, offset, overflow, capacity, number, valid = _PACKET_HEADER.unpack_from(data, position)
        if kind < 0 or size <= 0 or overflow < 0 or not 0 <= valid <= number <= capacity:
            raise DataError(f"{where} is damaged: the header of packet {seen} (byte {position}) makes no sense")
        if kind == _POLARITY:
            if size != 8 or offset != 4:
                raise DataError(f"{where} is damaged: packet {seen} has polarity events of {size} bytes, not 8")
            packets.append((position + _PACKET_HEADER.size, number, overflow))
        end = position + _PACKET_HEADER.size + size * capacity
        if end > length:
            raise cut_off(where, position, f"it ends inside packet {seen}, or that packet claims a wrong size")
        position = end
        seen += 1
    return packets


def _groups(packets: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Packets in groups of at most CHUNK_EVENTS events. Larger packets are divided."""
    group: list[tuple[int, int, int]] = []
    total = 0
    for offset, number, overflow in packets:
        for begin in range(0, number, CHUNK_EVENTS):
            size = min(CHUNK_EVENTS, number - begin)
            if total + size > CHUNK_EVENTS:
                yield group
                group, total = [], 0
            group.append((offset + 8 * begin, size, overflow))
            total += size
    if group:
        yield group
