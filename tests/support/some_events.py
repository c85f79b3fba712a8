"""Events for the tests that read them: as tuples of the independent writer, random or drawn by hypothesis."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from lbq.data.events import Events
from tests.support import aedat_writer as writer


def as_tuples(events: Events) -> list[writer.Event]:
    return list(zip(events.t.tolist(), events.x.tolist(), events.y.tolist(), events.p.tolist(), strict=True))


def random_events(count: int, size: int = 128, seed: int = 0, step: int = 500, start: int = 0) -> list[writer.Event]:
    rng = np.random.default_rng(seed)
    t = start + np.cumsum(rng.integers(0, step, count))
    x, y, p = rng.integers(0, size, count), rng.integers(0, size, count), rng.integers(0, 2, count)
    return list(zip(t.tolist(), x.tolist(), y.tolist(), p.tolist(), strict=True))


def events_of(tuples: list[writer.Event], width: int = 128, height: int = 128) -> Events:
    t, x, y, p = (np.array(column) for column in zip(*tuples, strict=True)) if tuples else [np.zeros(0)] * 4
    return Events(t.astype(np.int64), x.astype(np.uint16), y.astype(np.uint16), p.astype(np.uint8), width, height)


def event_lists(size: int, longest: int = 60) -> st.SearchStrategy[list[writer.Event]]:
    pixel = st.integers(0, size - 1)
    event = st.tuples(st.integers(0, 2**22), pixel, pixel, st.integers(0, 1))
    return st.lists(event, max_size=longest).map(lambda events: sorted(events, key=lambda e: e[0]))


EVENTS = random_events(40)
SMALL = [(t, x % 34, y % 34, p) for t, x, y, p in EVENTS]
