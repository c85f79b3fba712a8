r"""AEDAT 2.0 recordings of a DVS128 camera (128x128), the format of CIFAR10-DVS. NumPy only.

The file is lines of text that begin with '#', the first of them `#!AER-DAT2.0`, then events of 8 bytes: a 32-bit
address and a 32-bit timestamp in microseconds, both big-endian. The address of a DVS128 event:

| bits | meaning |
|---|---|
| 0 | polarity: **0 = ON, 1 = OFF** |
| 1-7 | column, counted from the **right** edge of the image |
| 8-14 | row, counted from the **bottom** edge |
| 15, 31 | external or special event, no pixel: dropped |
| 16-30 | unused: an event that sets them is refused |

So a pixel is x = 127 - column, y = 127 - row. This agrees with the camera's drivers and with jAER's display (x
mirrored, y upward). The format's description says "1 = ON", the drivers invert the bit, and so do we: in real
recordings the background is then mostly ON, as it should be, because leak currents make a DVS pixel's spontaneous
events ON.

Timestamps are 32 bits and wrap every 71.6 minutes. A step is read modulo 2^32: up to 2^31 - 1 is forward, over a wrap
or not; anything else is a step back. Sources: iniVation, "AEDAT file formats"; public drivers of the DVS128.
"""

from __future__ import annotations

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

SIZE = 128
_SPECIAL_BITS = 0x80008000
_MAX_PIXEL_ADDRESS = 0x00007FFF


def read_aedat2(
    path: Path | str, *, transpose: bool = False, sort_within_us: int = 0, max_bytes: int = MAX_BYTES
) -> Events:
    """The recording in `path`; see `decode_aedat2`."""
    data = read_bounded(path, max_bytes)
    return decode_aedat2(data, str(path), transpose=transpose, sort_within_us=sort_within_us)


def decode_aedat2(data: bytes, where: str, *, transpose: bool = False, sort_within_us: int = 0) -> Events:
    """Events of a whole file. `transpose` swaps x and y (CIFAR10-DVS was filmed so); errors name `where`."""
    start = _header(data, where)
    count, rest = divmod(len(data) - start, 8)
    if rest:
        raise cut_off(where, len(data) - rest, f"{rest} bytes after event {count} are no whole event")
    words = np.frombuffer(data, ">u4", offset=start).reshape(-1, 2)
    t = np.empty(count, np.int64)
    x, y, p = np.empty(count, np.uint16), np.empty(count, np.uint16), np.empty(count, np.uint8)
    written, time, last = 0, 0, np.uint32(0)
    for begin in range(0, count, CHUNK_EVENTS):
        address, stamp = words[begin : begin + CHUNK_EVENTS].astype(np.uint32).T
        special = (address & _SPECIAL_BITS) != 0
        if special.any():
            address, stamp = address[~special], stamp[~special]
        if (strange := address > _MAX_PIXEL_ADDRESS).any():
            value = int(address[np.argmax(strange)])
            raise DataError(f"{where}: address {value:#010x} is not of a DVS128: another camera, or damaged")
        if not len(address):
            continue
        if not written:
            last, time = stamp[0], int(stamp[0])
        part = slice(written, written + len(address))
        steps = np.diff(stamp, prepend=last).view(np.int32)  # modulo 2^32, read as signed
        np.cumsum(steps, out=t[part])
        t[part] += time
        x[part] = SIZE - 1 - ((address >> 1) & 127)
        y[part] = SIZE - 1 - (address >> 8)
        p[part] = 1 - (address & 1)
        written, time, last = part.stop, int(t[part.stop - 1]), stamp[-1]
    if transpose:
        x, y = y, x
    return in_order(t[:written], x[:written], y[:written], p[:written], (SIZE, SIZE), where, sort_within_us)


def _header(data: bytes, where: str) -> int:
    """Where the events begin: after the last line that begins with '#'.

    An event cannot be mistaken for a line: the first byte of a DVS128 address is 0, or 128 for a special event.
    """
    position = text_header(data, b"2.0", where)
    while data[position : position + 1] == b"#":
        end = data.find(b"\n", position, MAX_HEADER_BYTES)
        if end < 0:
            raise DataError(f"{where}: the text header is cut off, or longer than {MAX_HEADER_BYTES:,} bytes")
        line = data[position:end]
        if line.startswith(b"# AEChip:") and b"DVS128" not in line:
            chip = line[9:60].decode("ascii", "replace").strip()
            raise DataError(f"{where} comes from the camera {chip!r}; only the DVS128's addresses are known here")
        position = end + 1
    return position
