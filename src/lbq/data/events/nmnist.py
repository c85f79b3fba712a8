"""N-MNIST recordings: 34x34 pixels, 40 bits per event. NumPy only.

A file is events of 5 bytes without a header: bits 39-32 x, 31-24 y, 23 polarity (1 = ON), 22-0 time in microseconds,
most significant byte first. Pixels count from the upper left corner: digits appear upright. An event with y = 240 is no
pixel: the sensor's clock has overflowed, and 2^13 us are added to its time and to all that follow. That is the
convention of the dataset's published readers; the 1,100 real recordings of the tests hold no such event.

Source: Orchard et al., "Converting Static Image Datasets to Spiking Neuromorphic Datasets Using Saccades", 2015.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lbq.data.events import Events, cut_off, in_order, read_bounded

SIZE = 34
MAX_BYTES = 16 * 2**20  # 3.4 million events; a real recording has about 20 kB
OVERFLOW_ROW = 240
OVERFLOW_US = 2**13


def read_nmnist(path: Path | str, *, sort_within_us: int = 0, max_bytes: int = MAX_BYTES) -> Events:
    """The recording in `path` (`.bin` or `.bs2`); see `decode_nmnist`."""
    return decode_nmnist(read_bounded(path, max_bytes), str(path), sort_within_us=sort_within_us)


def decode_nmnist(data: bytes, where: str, *, sort_within_us: int = 0) -> Events:
    """Events of a whole file; errors name `where`."""
    count, rest = divmod(len(data), 5)
    if rest:
        raise cut_off(where, len(data) - rest, f"{rest} bytes after event {count} are no whole event")
    raw = np.frombuffer(data, np.uint8).reshape(-1, 5)
    x, y = raw[:, 0].astype(np.uint16), raw[:, 1].astype(np.uint16)
    p = (raw[:, 2] >> 7).astype(np.uint8)
    t = (raw[:, 2] & 127).astype(np.int64) << 16 | raw[:, 3].astype(np.int64) << 8 | raw[:, 4]
    overflow = y == OVERFLOW_ROW
    if overflow.any():
        t += OVERFLOW_US * np.cumsum(overflow)
        t, x, y, p = t[~overflow], x[~overflow], y[~overflow], p[~overflow]
    return in_order(t, x, y, p, (SIZE, SIZE), where, sort_within_us)
