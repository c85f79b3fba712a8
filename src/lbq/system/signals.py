"""The signals that end a process. Long work catches them, to save first or to pass them on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPS = (signal.SIGTERM, signal.SIGINT)
_interrupted = False


def remember_interrupts() -> None:
    """Have SIGINT remembered beside what it raises: what a library imports may swallow that, or turn it into another error."""

    def handle(*_: Any) -> None:
        global _interrupted
        _interrupted = True
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handle)


def interrupted() -> bool:
    """Whether SIGINT came since then, outside of work that catches it."""
    return _interrupted


def check() -> None:
    """End now where an interrupt was swallowed."""
    if _interrupted:
        raise KeyboardInterrupt


@contextmanager
def noting(note: Callable[[int, Any], None]) -> Iterator[None]:
    """Within the context, call `note(number, usual)` when SIGTERM or SIGINT arrives; `usual` is the handler before.

    Only the main thread may set handlers. In another thread the signals keep their effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = {int(number): signal.getsignal(number) for number in STOPS}

    def handle(number: int, _: FrameType | None) -> None:
        note(number, usual[number])

    for number in usual:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
