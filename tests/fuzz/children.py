"""Reads a file in a child process with limits, and says what came of it."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lbq.errors import LbqError

SECONDS, MEMORY_BYTES = 5.0, 2**30
MOST_LINE = 2000


def outcome(read: Callable[[Path], str], path: Path, seconds: float = SECONDS) -> tuple[str, str]:
    """What reading a file comes to: ("result", its result), ("refused", the line), or one of "traceback", "hang", "crash".

    The child may take `MEMORY_BYTES` more than this process has mapped already.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        with suppress(BaseException):
            os.write(theirs, json.dumps(_attempt(read, path)).encode()[:60_000])
        os._exit(0)
    os.close(theirs)
    try:
        ready, _, _ = select.select([ours], [], [], seconds)
        data = os.read(ours, 65_536) if ready else b""
    finally:
        os.close(ours)
        if not ready:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if not ready:
        return "hang", f"no answer within {seconds:g} s"
    if not data:
        return "crash", f"ended with status {status}"
    kind, text = json.loads(data)
    return kind, text


def _attempt(read: Callable[[Path], str], path: Path) -> tuple[str, str]:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        return "result", read(path)
    except LbqError as error:
        line = str(error)
        if "\n" in line or len(line) > MOST_LINE or not line:
            return "traceback", f"its error is no line: {line[:300]!r}"
        return "refused", line
    except BaseException as error:
        return "traceback", "".join(traceback.format_exception(error))[-3000:]
