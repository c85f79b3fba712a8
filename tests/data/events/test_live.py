"""Frames one after the other: of recordings, and of events at a UDP port, whoever sends them."""

from __future__ import annotations

import itertools
import re
import socket
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lbq.data.events import LATE_US, live
from lbq.data.events.frames import to_frames
from lbq.data.events.live import UdpEvents, time_frames
from lbq.errors import DataError
from tests.support.aedat_writer import Event, aedat2
from tests.support.paths import ROOT
from tests.support.some_events import EVENTS, SMALL, events_of


def datagram(*events: Event) -> bytes:
    return b"".join(struct.pack("<II", t % 2**32, p << 28 | y << 14 | x) for t, x, y, p in events)


@pytest.fixture
def port() -> Iterator[UdpEvents]:
    events = UdpEvents(0, 34, 34)
    yield events
    events.close()
    assert list(events.frames(10)) == []


def send(port: UdpEvents, *datagrams: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for data in datagrams:
            sender.sendto(data, ("127.0.0.1", port.port))


def test_frames_of_a_recording_divide_its_time() -> None:
    events = events_of(SMALL, 34, 34)
    first, last = SMALL[0][0], SMALL[-1][0]
    frames = np.stack(list(time_frames(events, 700, 17)))
    assert len(frames) == (last - first) // 700 + 1
    np.testing.assert_array_equal(
        frames, to_frames(events, len(frames), "time", 17, (first, first + 700 * len(frames)))
    )
    assert list(time_frames(events.window(0, 0), 700)) == []


def test_events_at_a_port_give_the_frames_of_the_recording(port: UdpEvents) -> None:
    expected = list(time_frames(events_of(SMALL, 34, 34), 700, 17))
    begin = time.monotonic()
    send(port, *(datagram(*SMALL[i : i + 7]) for i in range(0, len(SMALL), 7)), datagram((SMALL[-1][0] + 700, 0, 0, 0)))
    frames = list(itertools.islice(port.frames(700, 17), len(expected)))
    np.testing.assert_array_equal(np.stack([frame for _, frame in frames]), np.stack(expected))
    assert all(begin <= arrival <= time.monotonic() for arrival, _ in frames)
    assert (port.lost, port.strange, port.late, port.jumps) == (0, 0, 0, 0)


def test_what_is_no_event_of_the_sensor_is_counted_and_dropped(port: UdpEvents) -> None:
    send(
        port,
        b"hello",
        b"",
        datagram((5, 34, 0, 0), (6, 1, 2, 1), (7, 0, 9999, 1)),
        datagram((106, 0, 0, 0)),
        datagram((50, 3, 3, 1)),
    )
    send(port, datagram((250, 0, 0, 0)))
    (_, first), (_, second) = itertools.islice(port.frames(100), 2)
    assert (first.sum(), first[1, 2, 1], second.sum()) == (1, 1, 1)
    assert (port.strange, port.late, port.jumps) == (3, 1, 0)


STEP = 10 * LATE_US  # a step of time that counts when a second event agrees


@pytest.mark.parametrize(
    ("times", "frames", "strange", "jumps"),
    [
        ([0, 5 * STEP, 3, 12], 1, 1, 0),  # one event from ahead ends no frame
        ([9 * STEP, 9 * STEP + 3, 0, 9 * STEP + 12], 1, 1, 0),  # one from behind begins nothing
        ([9 * STEP, 5, 7, 15], 1, 0, 1),  # a clock that was set back
        ([5, 2**32 - 9, 2**32 - 8, 40, 42, 50], 1, 0, 2),  # one that wraps; never a million empty frames
        ([0, STEP, 2 * STEP, 3 * STEP], 1000, 0, 0),  # a sender with little to say; its last event waits
        ([0, 1, STEP, STEP + 1], 500, 0, 0),  # nothing moved for a while
        ([0, 10**9, 2 * 10**9, 3, 12], 1, 2, 0),  # strays do not agree with one another
        ([0, 9 * STEP, 5 * STEP, 3, 12], 1, 2, 0),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_a_step_of_time_counts_when_a_second_event_agrees(
    times: list[int], frames: int, strange: int, jumps: int, together: bool, port: UdpEvents
) -> None:
    """Whether the events come in one datagram or in one each."""
    events = [datagram((t, 1, 1, 0)) for t in times]
    for data in [b"".join(events)] if together else events:  # as if they had arrived
        port._waiting.append((0.0, data))
        port._arrived.release()
    frame_us = 10 if frames == 1 else STEP // 500
    assert len(list(itertools.islice(port.frames(frame_us), frames))) == frames
    assert (port.strange, port.late, port.jumps) == (strange, 0, jumps)


def test_a_datagram_gives_so_many_frames_and_no_more(port: UdpEvents) -> None:
    """What it has beyond them is dropped, and the next one begins anew."""
    first, long, last = [0], [1 + LATE_US * i for i in range(3000)], [10**8, 10**8 + 1, 10**8 + 1001]
    for times in (first, long, last):
        port._waiting.append((0.0, datagram(*[(t, 1, 1, 0) for t in times])))
        port._arrived.release()
    kept = [t for t in long if t <= 1000 * live.FAR_FRAMES]
    whole = kept[-1] // 1000  # frames, before the last event's own, which is not over
    *frames, anew = (frame.sum() for _, frame in itertools.islice(port.frames(1000), whole + 1))
    assert whole <= live.FAR_FRAMES
    assert sum(frames) == len(first) + len(kept) - 1
    assert anew == 2  # of the last datagram
    assert (port.strange, port.jumps) == (len(long) - len(kept), 1)


def test_datagrams_in_another_order_are_late_and_do_not_set_the_clock_back(port: UdpEvents) -> None:
    for times in ([0, 90_000], [60_000, 61_000], [95_000, 100_000]):
        port._waiting.append((0.0, datagram(*[(t, 1, 1, 0) for t in times])))
        port._arrived.release()
    frames = [frame.sum() for _, frame in itertools.islice(port.frames(10_000), 10)]
    assert frames == [1, *[0] * 8, 2]
    assert (port.late, port.jumps) == (2, 0)


def test_a_clock_that_stands_still_takes_no_memory(port: UdpEvents) -> None:
    """Nor do events from far ahead that come among others: they are counted and dropped."""
    still = datagram(*[(5, 1, 1, 1)] * 4000, (6 + 10 * STEP, 2, 2, 1))
    for data in [still] * 200 + [datagram((15, 0, 0, 0))]:  # as if they had arrived
        port._waiting.append((0.0, data))
        port._arrived.release()
    tracemalloc.start()
    _, frame = next(port.frames(10))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (frame.sum(), frame[1, 1, 1]) == (255, 255)
    assert (port.strange, port.late, port.jumps) == (200, 0, 0)
    assert peak_bytes < 2**20


def test_datagrams_that_nobody_reads_are_lost_and_counted(port: UdpEvents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_WAITING", 2)
    send(port, *[datagram((0, 0, 0, 0))] * 5)
    deadline = time.monotonic() + 60
    while port.lost < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert port.lost == 3


def test_a_port_that_fails_is_an_error_and_no_endless_wait(port: UdpEvents) -> None:
    """Frames that came before it are still read."""
    send(port, datagram((0, 1, 1, 1)), datagram((1500, 2, 2, 0)))
    frames = port.frames(700)
    assert next(frames)[1].sum() == 1
    port._socket.close()
    with pytest.raises(DataError, match=rf"UDP port {port.port} cannot be read any more: "):
        list(frames)


def test_a_port_that_is_taken_is_one_line(port: UdpEvents) -> None:
    with pytest.raises(DataError, match=f"cannot listen at UDP port {port.port}: Address already in use; name another"):
        UdpEvents(port.port, 34, 34)


def test_the_documentations_sender_sends_a_recording(port: UdpEvents, tmp_path: Path) -> None:
    """As docs/tutorials/watch.md does, to another port."""
    path = tmp_path / "r.aedat"
    path.write_bytes(aedat2(EVENTS))
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorials" / "watch.md").read_text(), re.S)
    exec(block.replace("data/dvs128_objects/DataSet2/Caneca.aedat", str(path)).replace("9000", str(port.port)), {})
    port.width = port.height = 128
    last = EVENTS[-1][0] - EVENTS[0][0]
    send(port, datagram((last // 3000 * 3000 + 3000, 0, 0, 0)))
    expected = list(time_frames(events_of(EVENTS), 3000))
    frames = [frame for _, frame in itertools.islice(port.frames(3000), len(expected))]
    np.testing.assert_array_equal(np.stack(frames), np.stack(expected))
