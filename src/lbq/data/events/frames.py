"""Events binned into frames: how many ON and OFF events each pixel saw in each slice of a recording. NumPy only."""

from __future__ import annotations

import operator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lbq.data.events import Events

By = Literal["count", "time"]
Size = tuple[int, int] | int  # height and width, or the side of a square
MAX_FRAME_BYTES = 2**30  # all frames of one recording


def to_frames(
    events: Events,
    timesteps: int,
    by: By = "count",
    size: Size | None = None,
    span: tuple[int, int] | None = None,
) -> NDArray[np.uint8]:
    """Frames `[T, 2, H, W]` uint8 of event counts, saturated at 255; channel 0 is OFF, channel 1 is ON.

    `by="count"`: slice i holds the events from `i * N // T` up to `(i + 1) * N // T`, so that sizes differ by at most one.
    `by="time"`: slices of equal duration, over `span` = (start, stop) in microseconds, start <= t < stop; events
    outside belong to no slice. Without a span, from the first event to the last, which is included.
    `size` = (H, W), or the side of a square: a pixel moves to (x * W // width, y * H // height); None keeps the sensor's
    resolution. A recording without events gives zeros.
    """
    bounds = slice_bounds(events, timesteps, by, span)
    height, width = _checked_size(events, size, timesteps)
    column = (np.arange(events.width) * width // events.width).astype(np.int32)
    row = (np.arange(events.height) * height // events.height * width).astype(np.int32)
    frames = np.zeros((timesteps, 2 * height * width), np.uint8)
    for frame, begin, end in zip(frames, bounds[:-1], bounds[1:], strict=True):
        if begin < end:
            part = slice(int(begin), int(end))
            cell = events.p[part] * np.int32(height * width) + row[events.y[part]] + column[events.x[part]]
            frame[:] = np.minimum(np.bincount(cell, minlength=frame.size), 255)
    return frames.reshape(timesteps, 2, height, width)


def slice_bounds(
    events: Events, timesteps: int, by: By = "count", span: tuple[int, int] | None = None
) -> NDArray[np.int64]:
    """Indices `[T + 1]`: slice i holds the events bounds[i] up to bounds[i + 1]. Events are in order of time."""
    if not 1 <= operator.index(timesteps) <= 4096:
        raise ValueError(f"timesteps must be 1 to 4096, got {timesteps}")
    if by == "count":
        if span is not None:
            raise ValueError("span is for by='time'; cut the events with Events.window instead")
        return np.array([i * len(events) // timesteps for i in range(timesteps + 1)], np.int64)
    if by != "time":
        raise ValueError(f"by must be 'count' or 'time', got {by!r}")
    if span is None:
        span = (int(events.t[0]), int(events.t[-1]) + 1) if len(events) else (0, 1)
    start, stop = span
    if start >= stop:
        raise ValueError(f"span must end after it starts, got {span}")
    # ceilings, in Python's integers: t is in slice i if i * duration <= (t - start) * T < (i + 1) * duration
    edges = [start - (-i * (stop - start) // timesteps) for i in range(timesteps + 1)]
    return np.searchsorted(events.t, np.array(edges, np.int64)).astype(np.int64)


def _checked_size(events: Events, size: Size | None, timesteps: int) -> tuple[int, int]:
    if size is None:
        size = events.height, events.width
    height, width = map(operator.index, np.broadcast_to(size, 2))
    if height < 1 or width < 1 or 2 * height * width * timesteps > MAX_FRAME_BYTES:
        raise ValueError(f"size must be (H, W) from 1 to {MAX_FRAME_BYTES:,} bytes of frames, got {size}")
    if height > events.height or width > events.width:  # some rows and columns would never see an event
        raise ValueError(f"size must be at most the sensor's {events.height} x {events.width}, got {height} x {width}")
    return height, width
