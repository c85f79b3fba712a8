"""Event frames one after the other: of a recording, or of events that arrive at a UDP port of this machine. NumPy only.

A datagram holds whole events of 8 bytes, little-endian, as in Prophesee's DAT: 32 bits of time in microseconds, then x in bits
0-13, y in 14-27 and ON above. Anybody may send to a port: what is no event of this sensor is counted and dropped.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.data.events import LATE_US, Events
from lbq.data.events.frames import Size, to_frames
from lbq.errors import DataError

Frame = NDArray[np.uint8]  # [2, H, W]
MOST_WAITING = 4096  # datagrams that have arrived and are not read yet; newer ones are lost
NEAR_FRAMES = 10  # a step of time by more frames than this needs a second event that agrees
FAR_FRAMES = 1000  # time that steps ahead by more frames than this begins anew
DATAGRAM_BYTES = 65536


def time_frames(events: Events, frame_us: int, size: Size | None = None) -> Iterator[Frame]:
    """The frames of a recording, each of `frame_us` microseconds from its first event on, also those without events."""
    if frame_us < 1:
        raise ValueError(f"frame_us must be at least 1 microsecond, got {frame_us}")
    if len(events):
        first, last = int(events.t[0]), int(events.t[-1])
        for start in range(first, last + 1, frame_us):
            span = start, start + frame_us
            yield to_frames(events.window(*span), 1, "time", size, span)[0]


class UdpEvents:
    """Events that arrive at a UDP port of 127.0.0.1. A thread of its own receives them, so that none waits for a network.

    lost: datagrams that came while too many waited. strange: datagrams or events that are none of this sensor, that step to
    another time alone, or that are more than `FAR_FRAMES` ahead in one datagram. late: events of frames that were over.
    jumps: how often time began anew.
    """

    def __init__(self, port: int, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.lost = self.strange = self.late = self.jumps = 0
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._arrived, self._closed = threading.Semaphore(0), False
        self._error: OSError | None = None
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            why = getattr(error, "strerror", None) or error
            raise DataError(
                f"cannot listen at UDP port {port}: {why}; name another one, or 0 for a free one"
            ) from error
        self.port = int(self._socket.getsockname()[1])
        self._socket.settimeout(0.1)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop to listen; `frames` ends."""
        self._closed = True
        self._arrived.release()
        self._thread.join()
        self._socket.close()

    def _receive(self) -> None:
        while not self._closed:
            try:
                data = self._socket.recv(DATAGRAM_BYTES)
            except TimeoutError:
                continue
            except OSError as error:
                self._error = error
                self._arrived.release()
                return
            if len(self._waiting) >= MOST_WAITING:
                self.lost += 1
                continue
            self._waiting.append((time.monotonic(), data))
            self._arrived.release()

    def frames(self, frame_us: int, size: Size | None = None) -> Iterator[tuple[float, Frame]]:
        """Frames of `frame_us` microseconds by the events' time, and when (`time.monotonic`) the datagram came that ended it.

        Where events are silent for a while, frames without events come with the next ones. A step of time by more than
        `NEAR_FRAMES` and `LATE_US` waits for the next event, and counts if that agrees. A step back then begins anew, and so
        does one of more than `FAR_FRAMES` ahead. Events are counted as they come, so that a sender whose clock stands still
        takes no memory, and what is more than `FAR_FRAMES` ahead in one datagram is dropped.
        """
        start: int | None = None
        none: NDArray[Any] = np.zeros(0, np.int64)
        shape = to_frames(Events(none, none, none, none, self.width, self.height), 1, size=size)[0].shape
        counts = np.zeros(shape, np.int64)  # of the frame that is not over yet
        far = FAR_FRAMES * frame_us
        for arrival, events, back in self._runs(NEAR_FRAMES * frame_us + LATE_US, far):
            first = int(events[0, 0])
            if start is None or back or first > start + far:
                self.jumps += start is not None
                start = first
                counts[:] = 0
            late, ahead = events[0] < start, events[0] > start + far
            self.late += int(late.sum())
            self.strange += int(ahead.sum())
            events = events[:, ~(late | ahead)]
            while events.size and int(events[0].max()) >= start + frame_us:
                over = events[0] < start + frame_us
                self._count(events[:, over], counts)
                yield arrival, np.minimum(counts, 255).astype(np.uint8)
                start, events = start + frame_us, events[:, ~over]
                counts[:] = 0
            self._count(events, counts)

    def _runs(self, near: int, far: int) -> Iterator[tuple[float, NDArray[np.int64], bool]]:
        """Events [4, N] as they come, cut where time steps by more than `near`; when they came, or were believed; whether time
        stepped back.

        A lone event behind a step waits for the next one, and is dropped unless that follows within `far` and is not nearer
        to the time before.
        """
        newest: int | None = None
        lone: NDArray[np.int64] = np.zeros((4, 0), np.int64)
        while self._arrived.acquire() and not self._closed:
            if not self._waiting and self._error is not None:
                raise DataError(f"UDP port {self.port} cannot be read any more: {self._error}") from self._error
            arrival, data = self._waiting.popleft()
            some = np.concatenate([lone, self._decoded(data)], axis=1)
            runs = np.split(some, np.flatnonzero(np.abs(np.diff(some[0])) > near) + 1, axis=1) if some.size else []
            lone = some[:, :0]
            for number, run in enumerate(runs):
                first = int(run[0, 0])
                if newest is not None and run.shape[1] == 1 and abs(first - newest) > near:
                    if number == len(runs) - 1:
                        lone = run
                        continue
                    following = int(runs[number + 1][0, 0])
                    agrees = -near <= following - first <= far
                    if not agrees or abs(following - newest) < abs(following - first):
                        self.strange += 1
                        continue
                back = newest is not None and first < newest - near
                newest = max(int(run[0].max()), first if back or newest is None else newest)
                yield arrival, run, back

    def _decoded(self, data: bytes) -> NDArray[np.int64]:
        """t, x, y and p `[4, N]` of the events of one datagram that this sensor can have."""
        if len(data) % 8:
            self.strange += 1
            return np.zeros((4, 0), np.int64)
        t, word = np.frombuffer(data, "<u4").astype(np.int64).reshape(-1, 2).T
        events = np.stack([t, word & 0x3FFF, word >> 14 & 0x3FFF, word >> 28 != 0])
        inside = (events[1] < self.width) & (events[2] < self.height)
        self.strange += int((~inside).sum())
        return events[:, inside]

    def _count(self, events: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Add events to the `counts` [2, H, W] of a frame, at the pixels where `to_frames` puts them."""
        _, height, width = counts.shape
        _, x, y, p = events
        cell = (p * height + y * height // self.height) * width + x * width // self.width
        np.add.at(counts.reshape(-1), cell, 1)
