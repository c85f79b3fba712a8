"""Download one file: resumed where it was cut, verified, and under its final name only when it is whole.

Standard library only. A download that fails ends in a `DataError` that says how to fetch the file by hand.
"""

from __future__ import annotations

import hashlib
import http.client
import itertools
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from lbq._version import __version__
from lbq.errors import DataError
from lbq.system.files import holding, sync_folder

Progress = Callable[[int, int | None], None]
"""Called with the bytes done and the bytes in all (None if unknown)."""

CHUNK_BYTES = 1 << 18
ATTEMPTS = 3  # transfers tried in one call; each resumes where the last was cut
TIMEOUT_SECONDS = 30.0  # without a byte


def file_md5(path: Path) -> str:
    """The MD5 of a file's bytes, in hexadecimal. It identifies a published file; it is no defence against a forger."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def fetch(url: str, target: Path, md5: str, size: int, progress: Progress | None = None) -> None:
    """Download `url`, a file of `size` bytes, to `target` and verify its MD5.

    Bytes go to `target` + ".partial", which stays when the connection is cut: the next call continues it if the
    server can, else starts again. A correct target that is already there stays. A folder takes one download at a time.
    """
    by_hand = f"download {url} by hand (md5 {md5}) to {target}"
    partial = target.with_name(target.name + ".partial")
    try:
        if target.is_file() and file_md5(target) == md5:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        busy = DataError(f"another process downloads to {target.parent}: wait for it, then run the same command again")
        with holding(target.parent, busy):
            _fetch(url, partial, md5, size, progress, by_hand)
            os.replace(partial, target)
            sync_folder(target.parent)
    except OSError as error:  # of the disk: _transfer handles those of the network
        raise DataError(
            f"cannot write {target}: {error.strerror or error}: free space or choose another root"
        ) from error


def _fetch(url: str, partial: Path, md5: str, size: int, progress: Progress | None, by_hand: str) -> None:
    """Make `partial` the whole file, on disk and verified."""
    if _length(partial) > size:
        partial.unlink()
    if not any(_transfer(url, partial, size, progress, by_hand) for _ in range(ATTEMPTS)):
        raise DataError(
            f"the connection for {url} was cut {ATTEMPTS} times after {_length(partial)} bytes in all: "
            f"run the same command again to continue, or {by_hand}"
        )
    received_md5 = file_md5(partial)
    if received_md5 != md5:
        partial.unlink()
        raise DataError(f"{url} gave a file with md5 {received_md5} instead of {md5}: it was removed; {by_hand}")
    with partial.open("rb") as file:
        os.fsync(file.fileno())


def _length(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _transfer(url: str, partial: Path, size: int, progress: Progress | None, by_hand: str) -> bool:
    """Append the missing bytes to `partial`. True when it has all its bytes, False when the connection was cut."""
    have = _length(partial)
    if have == size:
        return True
    headers = {"User-Agent": f"lbq/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and have:  # the host's file ends before ours: the MD5 will show that it is another one
                return True
            raise DataError(f"the host answered {url} with HTTP {error.code} {error.reason}: {by_hand}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"cannot reach {url} ({reason}): {by_hand}") from error
    with response:
        start = have if response.status == 206 else 0  # some servers ignore ranges and begin again
        if start and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            partial.unlink()  # another range: begin again
            return False
        chunks = _chunks(response)
        first = next(chunks, b"")
        if problem := _problem(response, first, start, size):
            raise DataError(f"the host answered {url} with {problem}: {by_hand}")
        if not first:
            return False
        with partial.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            done = start
            for chunk in itertools.chain([first], chunks):
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, size)
                if done > size:
                    break
    if done > size:
        partial.unlink()
        raise DataError(f"the host answered {url} with more than {size} bytes: {by_hand}")
    return done == size


def _problem(response: http.client.HTTPResponse, first: bytes, start: int, size: int) -> str | None:
    """What the answer is, if it is not the file. `first` are its first bytes; nothing is written yet."""
    page = first[:512].lstrip().lower()
    if response.headers.get_content_type() == "text/html" or page.startswith((b"<!doctype html", b"<html")):
        return "a web page instead of the file"
    length = response.headers.get("Content-Length", "")
    if length.isdecimal() and start + int(length) != size:
        return f"a file of {start + int(length)} bytes instead of {size}"
    return None


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """What the host sends, until it ends or the connection is cut."""
    with suppress(OSError, http.client.HTTPException):
        while chunk := response.read(CHUNK_BYTES):
            yield chunk
