"""Download one file: resumed where it was cut, verified, and under its final name only when it is whole.

Standard library only. What cannot be had ends in a `DataError` that says how to fetch the file by hand.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from lbq._version import __version__
from lbq.errors import DataError
from lbq.system.files import holding, sync_folder

Progress = Callable[[int, int | None], None]
"""Called with the bytes done and the bytes in all (None where unknown)."""

CHUNK = 1 << 18
ATTEMPTS = 3  # transfers tried in one call; each resumes where the last was cut
TIMEOUT = 30.0  # seconds without a byte


def file_md5(path: Path) -> str:
    """The MD5 of a file's bytes, in hexadecimal. It names a published file; it is no defence against a forger."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def fetch(url: str, target: Path, md5: str, size: int | None = None, progress: Progress | None = None) -> None:
    """Download `url` to `target`, of `size` bytes where known, and verify its MD5.

    Bytes go to `target` + ".partial", which stays when the connection is cut: the next call continues it if the
    server can, else starts again. A target that is already there and right is left as it is. The folder takes one download
    at a time.
    """
    by_hand = f"download {url} by hand (md5 {md5}) to {target}"
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"{url} is not an http or https address")
    partial = target.with_name(target.name + ".partial")
    try:
        if target.is_file() and file_md5(target) == md5:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        busy = DataError(f"another process downloads to {target.parent}: wait for it, then run the same command again")
        with holding(target.parent, busy):
            _fetch(url, partial, target, md5, size, progress, by_hand)
    except OSError as error:  # of the disk: errors of the network end in _transfer
        raise DataError(
            f"cannot write {target}: {error.strerror or error}: free space or choose another root"
        ) from error


def _fetch(
    url: str, partial: Path, target: Path, md5: str, size: int | None, progress: Progress | None, by_hand: str
) -> None:
    if partial.is_file() and size is not None and partial.stat().st_size > size:
        partial.unlink()
    complete = False
    for _ in range(ATTEMPTS):
        complete = _transfer(url, partial, size, progress, by_hand)
        if complete:
            break
    if not complete:
        have = partial.stat().st_size if partial.is_file() else 0
        raise DataError(
            f"the connection for {url} was cut {ATTEMPTS} times after {have} bytes in all: "
            f"run the same command again to continue, or {by_hand}"
        )
    found = file_md5(partial)
    if found != md5:
        partial.unlink()
        raise DataError(f"{url} gave a file with md5 {found} instead of {md5}: it was removed; {by_hand}")
    _publish(partial, target)


def _transfer(url: str, partial: Path, size: int | None, progress: Progress | None, by_hand: str) -> bool:
    """Append what is missing to `partial`. True when it has all its bytes, False when the connection was cut."""
    have = partial.stat().st_size if partial.is_file() else 0
    if size is not None and have == size:
        return True
    headers = {"User-Agent": f"lbq/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and have:  # nothing after what we have: it is complete, or not this file
                return True
            raise DataError(f"the host answered {url} with HTTP {error.code} {error.reason}: {by_hand}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"cannot reach {url} ({reason}): {by_hand}") from error
    with response:
        start = _start(response, have)
        if start is None:  # a range that we did not ask for: begin again
            partial.unlink()
            return False
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdecimal() else size
        try:
            first = response.read(CHUNK)
        except (OSError, http.client.HTTPException):
            return False
        if wrong := _wrong(response, first, size, total):
            raise DataError(f"the host answered {url} with {wrong}: {by_hand}")
        if not first:
            return False
        with partial.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            done = _copy(response, first, file, start, total, progress)
    if total is not None and done > total:
        partial.unlink()
        raise DataError(f"the host answered {url} with more than {total} bytes: {by_hand}")
    return total is None or done == total


def _start(response: http.client.HTTPResponse, have: int) -> int | None:
    """Where the answer's bytes belong: after what we have, or at the beginning where the server ignores ranges."""
    if response.status != 206:
        return 0
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return have if found and int(found[1]) == have else None


def _wrong(response: http.client.HTTPResponse, first: bytes, size: int | None, total: int | None) -> str | None:
    """What the answer is, if not the file; asked before anything is written."""
    page = first[:512].lstrip().lower()
    if response.headers.get_content_type() == "text/html" or page.startswith((b"<!doctype html", b"<html")):
        return "a web page instead of the file"
    if not first and not total:
        return "zero bytes"
    if size is not None and total is not None and total != size:
        return f"a file of {total} bytes instead of {size}"
    return None


def _copy(
    response: http.client.HTTPResponse,
    chunk: bytes,
    file: BinaryIO,
    done: int,
    total: int | None,
    progress: Progress | None,
) -> int:
    """Write `chunk` and what follows it, no more than one chunk beyond `total`; the position reached."""
    while chunk:
        file.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done, total)
        if total is not None and done > total:
            break
        try:
            chunk = response.read(CHUNK)
        except (OSError, http.client.HTTPException):
            break
    return done


def _publish(partial: Path, target: Path) -> None:
    """Give a complete file its final name, so that a crash leaves the old state or the new one."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, target)
    sync_folder(target.parent)
