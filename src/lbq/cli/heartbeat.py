"""Where no terminal shows bars, a line on stderr at least every half minute says that the work goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 30.0  # without a line


class Heartbeat:
    """Writes a line if nothing was written for `seconds`. `doing` says what is under way; whoever knows sets it."""

    def __init__(self, write: Callable[[str], object], seconds: float = SECONDS) -> None:
        self.write, self.seconds = write, seconds
        self.started = self.last = time.monotonic()
        self.ended = threading.Event()
        self.doing: Callable[[], str] = lambda: ""

    def written(self) -> None:
        """Something else was written just now."""
        self.last = time.monotonic()

    def run(self) -> None:
        while not self.ended.wait(max(self.last + self.seconds - time.monotonic(), 0.01)):
            if time.monotonic() - self.last >= self.seconds:
                so_far = time.monotonic() - self.started
                self.write(f"still working, {so_far:.0f} s so far{', ' * bool(text := self.doing())}{text}\n")
                self.written()


current: Heartbeat | None = None  # of the command that runs, where there is no terminal


@contextmanager
def beating(write: Callable[[str], object], enabled: bool) -> Iterator[Heartbeat | None]:
    """Within the context, the main process of a command writes such lines if `enabled`."""
    global current
    if not enabled or os.environ.get("RANK", "0") != "0":
        yield None
        return
    current = Heartbeat(write)
    thread = threading.Thread(target=current.run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield current
    finally:
        current.ended.set()
        thread.join(1)  # it may hang in a pipe that nobody reads
        current = None
