"""Writes AEDAT 4 and Prophesee's files from the descriptions of their formats, one event at a time. For tests; shares nothing
with `lbq`. Events are (t, x, y, p), as in aedat_writer."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tests.support.aedat_writer import Event

XML = """<dv version="2.0">
    <node name="outInfo" path="/mainloop/Recorder/outInfo/">
        <node name="0" path="/outInfo/0/"><attr key="typeIdentifier" type="string">{kind}</attr>
            <node name="info" path="/outInfo/0/info/"><attr key="sizeX" type="int">{width}</attr>
            <attr key="sizeY" type="int">{height}</attr></node></node>
        <node name="1" path="/outInfo/1/"><attr key="typeIdentifier" type="string">{other}</attr></node>
    </node></dv>"""


def io_header(compression: int, table: int, text: bytes) -> bytes:
    """A FlatBuffer of three fields: an int32, an int64 and a text."""
    fields = struct.pack("<HHHHH2x", 10, 20, 4, 8, 16)
    body = struct.pack("<iiqI", 12, compression, table, 4)
    buffer = struct.pack("<I4s", 20, b"IOHE") + fields + body + struct.pack("<I", len(text)) + text + b"\0"
    return struct.pack("<I", len(buffer)) + buffer


def event_packet(events: Sequence[Event], identifier: bytes = b"EVTS") -> bytes:
    """A FlatBuffer of one field, a vector of structures of 16 bytes."""
    items = b"".join(struct.pack("<qhhB3x", t, x, y, p) for t, x, y, p in events)
    table = struct.pack("<HHH2x", 6, 8, 4) + struct.pack("<iI4x", 8, 8) + struct.pack("<I", len(events))
    buffer = struct.pack("<I4s", 16, identifier) + table + items
    return struct.pack("<I", len(buffer)) + buffer


def lz4_block(data: bytes) -> bytes:
    """Sequences: repeat what came before wherever four bytes did, else copy. The last five bytes are copied."""
    out, start, i, seen = b"", 0, 0, dict[bytes, int]()

    def more(length: int) -> bytes:
        return b"" if length < 15 else b"\xff" * ((length - 15) // 255) + bytes([(length - 15) % 255])

    while i < len(data) - 12:
        at = seen.get(data[i : i + 4], -(2**20))
        seen[data[i : i + 4]] = i
        if i - at > 65535:
            i += 1
            continue
        length = 4
        while i + length < len(data) - 5 and data[at + length] == data[i + length]:
            length += 1
        copied = data[start:i]
        out += bytes([min(len(copied), 15) << 4 | min(length - 4, 15)]) + more(len(copied)) + copied
        out += struct.pack("<H", i - at) + more(length - 4)
        i = start = i + length
    rest = data[start:]
    return out + bytes([min(len(rest), 15) << 4]) + more(len(rest)) + rest


def lz4_frame(data: bytes, block_bytes: int = 300, checks: bool = False) -> bytes:
    """Blocks of so many bytes, every third one not compressed. checks: with sizes and checksums, which are not looked at."""
    flags = 0x60 | (0x1C if checks else 0)
    out = struct.pack("<IBB", 0x184D2204, flags, 0x40) + (struct.pack("<Q", len(data)) if checks else b"") + b"?"
    for number, begin in enumerate(range(0, len(data), block_bytes)):
        part = data[begin : begin + block_bytes]
        block = part if number % 3 == 2 else lz4_block(part)
        out += struct.pack("<I", len(block) | (number % 3 == 2) << 31) + block + (b"sums" if checks else b"")
    return out + bytes(4) + (b"sums" if checks else b"")


def aedat4(
    events: Sequence[Event],
    size: tuple[int, int] = (128, 128),
    compression: int = 0,
    per_packet: int = 30,
    kinds: tuple[str, str] = ("EVTS", "IMUS"),
    table: bool = False,
) -> bytes:
    text = XML.format(width=size[0], height=size[1], kind=kinds[0], other=kinds[1]).encode()
    packets = b""
    for number, begin in enumerate(range(0, len(events), per_packet)):
        body = event_packet(events[begin : begin + per_packet])
        body = lz4_frame(body, checks=number % 2 == 1) if compression in (1, 2) else body
        packets += struct.pack("<ii", 0, len(body)) + body + struct.pack("<ii4s", 1, 4, b"imu!")
    start = b"#!AER-DAT4.0\r\n"
    header = io_header(compression, -1, text)
    if table:
        header = io_header(compression, len(start) + len(header) + len(packets), text)
    return start + header + packets + (b"a table of packets" if table else b"")


def raw_header(evt: str, size: tuple[int, int]) -> bytes:
    return f"% date 2023-03-29 16:37:46\n% evt {evt}\n% geometry {size[0]}x{size[1]}\n% end\n".encode()


def evt2(events: Sequence[Event], size: tuple[int, int] = (128, 128), header: bytes | None = None) -> bytes:
    out, high = raw_header("2.0", size) if header is None else header, None
    for t, x, y, p in events:
        if t >> 6 != high:
            high = t >> 6
            out += struct.pack("<I", 0x8 << 28 | high % 2**28)
        out += struct.pack("<I", p << 28 | (t & 63) << 22 | x << 11 | y)
    return out


def evt3(events: Sequence[Event], size: tuple[int, int] = (128, 128), header: bytes | None = None) -> bytes:
    """Everything that changes is said; what comes from one row at one time, to the right of the last, is put into vectors."""
    words, i = list[int](), 0
    high = low = row = None
    while i < len(events):
        t, x, y, p = events[i]
        if t >> 12 != high:
            high = t >> 12
            words.append(0x8000 | high % 2**12)
        if t & 0xFFF != low:
            low = t & 0xFFF
            words.append(0x6000 | low)
        if y != row:
            row = y
            words.append(y)
        end = i + 1
        while (
            end < len(events)
            and (t, y, p) == (events[end][0], *events[end][2:])
            and events[end][1] > events[end - 1][1]
        ):
            end += 1
        if end == i + 1:
            words.append(0x2000 | p << 11 | x)
        else:
            words.append(0x3000 | p << 11 | x)
            columns, width = {e[1] - x for e in events[i:end]}, events[end - 1][1] - x
            for begin in range(0, width + 1, 20):  # in turns of 12 and 8
                words.append(0x4000 | sum(1 << k for k in range(12) if begin + k in columns))
                words.append(0x5000 | sum(1 << k for k in range(8) if begin + 12 + k in columns))
        i = end
    head = raw_header("3.0", size) if header is None else header
    return head + struct.pack(f"<{len(words)}H", *words)


def dat(events: Sequence[Event], size: tuple[int, int] | None = (128, 128), kind: int = 12) -> bytes:
    out = b"% Data file containing CD events\n% Version 2\n"
    if size is not None:
        out += f"% Width {size[0]}\n% Height {size[1]}\n".encode()
    out += bytes([kind, 8])
    return out + b"".join(struct.pack("<II", t % 2**32, p << 28 | y << 14 | x) for t, x, y, p in events)
