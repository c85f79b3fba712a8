"""One recording of an event camera, whatever its format: AEDAT 2.0, 3.1 and 4.0, Prophesee's RAW and DAT. NumPy only."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lbq.data.events import LATE_US, MAX_BYTES, Events, read_bounded
from lbq.data.events.aedat2 import decode_aedat2
from lbq.data.events.aedat3 import decode_aedat3
from lbq.data.events.aedat4 import decode_aedat4
from lbq.data.events.nmnist import decode_nmnist
from lbq.data.events.prophesee import decode_prophesee
from lbq.errors import DataError


def read_recording(
    path: Path | str,
    size: tuple[int, int] | None = None,
    max_bytes: int = MAX_BYTES,
    max_events: int | None = None,
    sort_within_us: int = LATE_US,
) -> Events:
    """The recording in `path`. Its first bytes say its format; N-MNIST's `.bin` and `.bs2` have none, and go by their name.

    size: the sensor's width and height, for formats that may not say: AEDAT 3.1 (default 128 x 128), RAW and DAT. A file of
    more bytes, or of more events where the format can pack them, is refused. Events later than `sort_within_us` are an error.
    """
    if size is not None and (np.shape(size) != (2,) or not all(1 <= side <= 2**14 for side in size)):
        raise ValueError(f"size must be (width, height) in pixels, such as (640, 480), got {size!r}")
    data, where, late = read_bounded(path, max_bytes), str(path), sort_within_us
    limit = {} if max_events is None else {"max_events": max_events}
    if data.startswith(b"#!AER-DAT2"):
        return decode_aedat2(data, where, sort_within_us=late)
    if data.startswith(b"#!AER-DAT3"):
        width, height = size or (128, 128)
        return decode_aedat3(data, where, width=width, height=height, sort_within_us=late)
    if data.startswith(b"#!AER-DAT4"):
        return decode_aedat4(data, where, sort_within_us=late, **limit)
    if data.startswith(b"% "):
        return decode_prophesee(data, where, size=size, sort_within_us=late, **limit)
    if Path(path).suffix.lower() in (".bin", ".bs2"):
        return decode_nmnist(data, where, sort_within_us=late)
    raise DataError(
        f"{where} is no recording that can be read: AEDAT 2.0, 3.1, 4.0, Prophesee RAW or DAT, N-MNIST's .bin"
    )
