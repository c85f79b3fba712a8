"""LZ4 frames, decompressed in Python: for the packets of AEDAT 4. Source: "LZ4 Frame Format", "LZ4 Block Format".

A frame is the number 0x184D2204, a byte of flags, a byte of block sizes, what the flags announce, a byte of checksum; then
blocks, each behind its length, of which the highest bit says that it is not compressed; a length of 0 ends the frame. A block
is sequences: a byte with two lengths, bytes to copy, and how far back to repeat from. Checksums are passed over.
"""

from __future__ import annotations

import struct

from lbq.errors import DataError

MAGIC = 0x184D2204
REPEATED_BYTES = 2**16  # appended at a time: bounds the temporaries


def decompress(data: bytes, where: str, most: int) -> bytes:
    """The content of one frame, refused where it is more than `most` bytes; errors name `where`."""
    out = bytearray()
    try:
        magic, flags = struct.unpack_from("<IB", data)
        if magic != MAGIC or flags >> 6 != 1:
            raise DataError(f"{where} is no LZ4 frame: the file is damaged")
        position = 6 + 8 * (flags >> 3 & 1) + 4 * (flags & 1) + 1
        while size := struct.unpack_from("<I", data, position)[0]:
            start = position + 4
            position = start + (size & 0x7FFFFFFF)
            if position > len(data):
                raise IndexError
            if size >> 31:
                _check_room(out, position - start, most, where)
                out += data[start:position]
            else:
                _block(data[start:position], out, most, where)
            position += 4 * (flags >> 4 & 1)
    except (IndexError, struct.error):
        raise DataError(f"{where}: its LZ4 frame is cut off or damaged") from None
    return bytes(out)


def _check_room(out: bytearray, length: int, most: int, where: str) -> None:
    """Refuse `length` more bytes before they take memory: few bytes of a file can ask for very many."""
    if len(out) + length > most:
        raise DataError(f"{where} holds more than {most:,} bytes: the file is damaged")


def _block(data: bytes, out: bytearray, most: int, where: str) -> None:
    """Append the content of a block to `out`, which it may repeat parts of. An IndexError where it makes no sense."""
    position = 0
    while True:
        token = data[position]
        position += 1
        length = token >> 4
        while length >= 15:  # more bytes of the length follow, up to one below 255
            length, position = length + data[position], position + 1
            if data[position - 1] < 255:
                break
        _check_room(out, length, most, where)
        out += data[position : position + length]
        position += length
        if position >= len(data):
            if position > len(data):
                raise IndexError
            return  # the last sequence repeats nothing
        back = data[position] | data[position + 1] << 8
        position += 2
        length = token & 15
        while length >= 15:
            length, position = length + data[position], position + 1
            if data[position - 1] < 255:
                break
        length += 4
        begin = len(out) - back
        if back == 0 or begin < 0:
            raise IndexError
        _check_room(out, length, most, where)
        part = out[begin : begin + length]
        part *= min(length, REPEATED_BYTES) // len(part)  # what it appends is repeated too
        while length > 0:
            out += part[:length]
            length -= len(part)
