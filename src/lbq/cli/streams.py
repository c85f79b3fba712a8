"""The command line's streams: output that fails is an error of one line, and progress that nobody reads ends no work."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

from lbq.errors import LbqError

READER_GONE = 128 + 13  # as shells say of SIGPIPE; 1 is for results that differ


class OutputError(LbqError):
    """The standard output takes no more."""


class _Stream:
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        """Encoding, isatty, fileno: the stream's own."""
        return getattr(self.stream, name)


class Results(_Stream):
    """What a command was run for: where it cannot be written, the command has failed. A pipe whose reader has had enough ends
    the program in silence."""

    def write(self, text: str) -> int:
        with _named():
            return self.stream.write(text)

    def flush(self) -> None:
        with _named():
            self.stream.flush()


class Remarks(_Stream):
    """Progress, warnings and errors: what cannot be written is dropped."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise SystemExit(READER_GONE) from error
    except OSError as error:
        raise OutputError(f"cannot write to the standard output: {error.strerror}") from error


@contextmanager
def guarded() -> Iterator[None]:
    """stdout and stderr as above for a while. A letter that their encoding lacks is written as its code."""
    out, err = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115 - or closed
    for stream in (out, err):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with redirect_stdout(cast("TextIO", Results(out))), redirect_stderr(cast("TextIO", Remarks(err))):
            yield
    finally:
        for stream in (out, err):
            _let_go(stream)


def _let_go(stream: TextIO) -> None:
    """What a stream still holds and cannot write goes nowhere: the interpreter would try again at its end, with a traceback
    and an exit code of its own."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
