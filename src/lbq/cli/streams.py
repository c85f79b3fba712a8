"""The command line's streams: output that fails is an error of one line, and progress that nobody reads ends no work."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from typing import Any, TextIO, cast

from lbq.cli import heartbeat
from lbq.errors import LbqError
from lbq.system.shown import HIDDEN_IN_OUTPUT, shown

READER_GONE = 128 + 13  # as shells say of SIGPIPE; 1 is for results that differ


class OutputError(LbqError):
    """The standard output takes no more."""


class _Stream:
    """A stream that writes within contexts of `guard`."""

    def __init__(self, stream: TextIO, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self.stream, self.guard = stream, guard
        self.written: Callable[[], None] = lambda: None  # called after each text

    def write(self, text: str) -> int:
        with self.guard():
            self.stream.write(shown(text, HIDDEN_IN_OUTPUT))
        self.written()
        return len(text)

    def flush(self) -> None:
        with self.guard():
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Encoding, isatty, fileno: the stream's own."""
        return getattr(self.stream, name)


@contextmanager
def _failing() -> Iterator[None]:
    """A result that cannot be written is an error. A pipe whose reader is gone ends the program in silence."""
    try:
        yield
    except BrokenPipeError as error:
        raise SystemExit(READER_GONE) from error
    except OSError as error:
        raise OutputError(f"cannot write to the standard output: {error.strerror}") from error


@contextmanager
def guarded() -> Iterator[None]:
    """Within the context, stdout and stderr are guarded: progress, warnings and errors that cannot be written are dropped.

    A letter that their encoding lacks is written as its code.
    """
    out, err = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115 - or closed
    for stream in (out, err):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with (
            redirect_stdout(cast("TextIO", _Stream(out, _failing))),
            redirect_stderr(cast("TextIO", progress := _Stream(err, partial(suppress, OSError)))),
            heartbeat.beating(progress.write, not err.isatty()) as beat,
        ):
            if beat is not None:
                progress.written = beat.written
            yield
    finally:
        for stream in (out, err):
            try:
                stream.flush()
            except OSError:  # else the interpreter would try again at its end, with a traceback and its own exit code
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
