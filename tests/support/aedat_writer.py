"""Writes event files from the descriptions of their formats, one event at a time. For tests; shares nothing with `lbq`.

An event is (t, x, y, p): microseconds, pixels as an image viewer counts them (y downward), 1 = ON.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

Event = tuple[int, int, int, int]

JAER_HEADER = (
    b"#!AER-DAT2.0\r\n"
    b"# This is a raw AE data file - do not edit\r\n"
    b"# Data format is int32 address, int32 timestamp (8 bytes total), repeated for each event\r\n"
    b"# Timestamps tick is 1 us\r\n"
    b"# AEChip: ch.unizh.ini.jaer.chip.retina.DVS128\r\n"
)
CAER_HEADER = (
    b"#!AER-DAT3.1\r\n"
    b"#Format: RAW\r\n"
    b"#Source 1: DVS128\r\n"
    b"#Start-Time: 2016-06-01 10:00:00 (TZ+0200)\r\n"
    b"#!END-HEADER\r\n"
)


def aedat2_event(event: Event) -> bytes:
    """DVS128 camera: columns from the right edge, rows from the bottom, lowest bit set for OFF; a 32-bit clock."""
    t, x, y, p = event
    address = (127 - y) * 256 + (127 - x) * 2 + (0 if p else 1)
    return struct.pack(">II", address, t % 2**32)


def aedat2(events: Iterable[Event], header: bytes = JAER_HEADER) -> bytes:
    return header + b"".join(map(aedat2_event, events))


def aedat3_event(event: Event, valid: bool = True) -> bytes:
    t, x, y, p = event
    return struct.pack("<Ii", x * 2**17 + y * 2**2 + p * 2 + int(valid), t % 2**31)


def packet(kind: int, bodies: Sequence[bytes], overflow: int = 0, valid: int | None = None, spare: int = 0) -> bytes:
    """A packet whose events all have the size of the first; `spare` is capacity beyond the events in use."""
    size = len(bodies[0]) if bodies else 8
    count = len(bodies)
    header = struct.pack("<hh", kind, 1)
    header += struct.pack("<iii", size, 4, overflow)
    header += struct.pack("<iii", count + spare, count, count if valid is None else valid)
    return header + b"".join(bodies) + bytes(size * spare)


def aedat3(events: Sequence[Event], per_packet: int = 100, header: bytes = CAER_HEADER) -> bytes:
    """Polarity packets of at most `per_packet` events; a packet never spans a wrap of the 31-bit clock."""
    packets = []
    group: list[Event] = []
    for event in events:
        if group and (len(group) == per_packet or event[0] // 2**31 != group[0][0] // 2**31):
            packets.append(packet(1, [aedat3_event(e) for e in group], group[0][0] // 2**31))
            group = []
        group.append(event)
    if group:
        packets.append(packet(1, [aedat3_event(e) for e in group], group[0][0] // 2**31))
    return header + b"".join(packets)


def nmnist(events: Iterable[Event]) -> bytes:
    return b"".join(struct.pack(">Q", x << 32 | y << 24 | p << 23 | t)[3:] for t, x, y, p in events)
