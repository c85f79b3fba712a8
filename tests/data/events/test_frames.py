"""Frames of events: the laws of slices and bins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lbq.data.events import frames
from lbq.data.events.frames import slice_bounds, to_frames
from lbq.errors import DataError
from tests.support import aedat_writer as writer
from tests.support.some_events import EVENTS, event_lists, events_of


def slow_frames(events: list[writer.Event], bounds: NDArray[np.int64], size: tuple[int, int], sensor: int) -> Any:
    out = np.zeros((len(bounds) - 1, 2, *size), np.int64)
    for i in range(len(bounds) - 1):
        for _, x, y, p in events[bounds[i] : bounds[i + 1]]:
            out[i, p, y * size[0] // sensor, x * size[1] // sensor] += 1
    return np.minimum(out, 255)


@settings(max_examples=60)
@given(
    event_lists(8),
    st.integers(1, 9),
    st.sampled_from(["count", "time"]),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
)
def test_frames_against_a_loop(
    events: list[writer.Event], timesteps: int, by: frames.By, size: tuple[int, int]
) -> None:
    recording = events_of(events, 8, 8)
    bounds = slice_bounds(recording, timesteps, by)
    result = to_frames(recording, timesteps, by, size)
    assert result.dtype == np.uint8
    assert result.shape == (timesteps, 2, *size)
    np.testing.assert_array_equal(result, slow_frames(events, bounds, size, 8))
    assert result.sum() == len(events)  # at most 60 events: nothing saturates


def test_one_size_is_a_square() -> None:
    recording = events_of([], 8, 6)
    assert to_frames(recording, 3, size=4).shape == (3, 2, 4, 4)
    assert to_frames(recording, 3, size=tuple(np.array([4, 3]))).shape == (3, 2, 4, 3)
    with pytest.raises(ValueError, match="^size must be at most the sensor's 6 x 8, got 8 x 8$"):
        to_frames(recording, 3, size=8)


@given(event_lists(8), st.integers(1, 9))
def test_slices_partition_the_events(events: list[writer.Event], timesteps: int) -> None:
    recording = events_of(events, 8, 8)
    for by in ("count", "time"):
        bounds = slice_bounds(recording, timesteps, by)
        assert bounds[0] == 0
        assert bounds[-1] == len(events)
        assert (np.diff(bounds) >= 0).all()
    counts = np.diff(slice_bounds(recording, timesteps, "count"))
    assert counts.max() - counts.min() <= 1
    if events:
        first, duration = events[0][0], events[-1][0] - events[0][0] + 1
        expected = [(t - first) * timesteps // duration for t, *_ in events]
        got = np.repeat(np.arange(timesteps), np.diff(slice_bounds(recording, timesteps, "time")))
        assert got.tolist() == expected


def test_frames_saturate_and_keep_polarities_apart() -> None:
    result = to_frames(events_of([(0, 3, 5, 1)] * 300 + [(1, 3, 5, 0)] * 7), 1)
    assert result[0, 1, 5, 3] == 255
    assert result[0, 0, 5, 3] == 7
    assert int(result.sum()) == 262


def test_frames_of_nothing_and_of_one_instant() -> None:
    for by in ("count", "time"):
        assert not to_frames(events_of([]), 4, by, (6, 7)).any()
    instant = events_of([(2**62 - 1, 0, 0, 1)] * 5)
    assert to_frames(instant, 3, "time").sum(axis=(1, 2, 3)).tolist() == [5, 0, 0]
    assert to_frames(instant, 5, "count").sum(axis=(1, 2, 3)).tolist() == [1] * 5


@pytest.mark.parametrize("t", [2**62, 2**63 - 1, -(2**62), -(2**63)])
def test_times_whose_differences_have_no_room_are_refused(t: int) -> None:
    with pytest.raises(DataError, match="event 0 has t = "):
        events_of([(t, 0, 0, 1)])


def test_time_slices_of_a_given_span() -> None:
    events = events_of([(t, 0, 0, 1) for t in range(0, 100, 10)])
    assert to_frames(events, 4, "time", span=(20, 60)).sum(axis=(1, 2, 3)).tolist() == [1, 1, 1, 1]
    assert to_frames(events, 2, "time", span=(0, 1000)).sum(axis=(1, 2, 3)).tolist() == [10, 0]


def test_wrong_frame_arguments() -> None:
    events = events_of(EVENTS)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("timesteps", {"timesteps": 0}), ("timesteps", {"timesteps": 10**6}), ("by", {"timesteps": 2, "by": "energy"}),
        ("size", {"timesteps": 2, "size": (0, 5)}), ("size", {"timesteps": 2, "size": (2**20, 2**20)}),
        ("span", {"timesteps": 2, "by": "time", "span": (5, 5)}), ("span", {"timesteps": 2, "span": (0, 5)}),
    ]  # fmt: skip
    for name, arguments in cases:
        with pytest.raises(ValueError, match=f"^{name} "):
            to_frames(events, **arguments)
