"""Arrays from .npy and .npz files, members of tar archives, and what damaged or hostile files of both raise. NumPy only."""

from __future__ import annotations

import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.errors import DataError

try:
    from lzma import LZMAError
except ImportError:  # Python can be built without lzma; zipfile then refuses such members itself
    LZMAError = EOFError  # type: ignore[misc, assignment]

# The archive modules' own errors, those of the decompressors, and those of numbers that make no sense.
ARCHIVE_ERRORS: tuple[type[Exception], ...] = (
    OSError, EOFError, ValueError, RuntimeError, ArithmeticError, zipfile.BadZipFile, tarfile.TarError, zlib.error,
    LZMAError,
)  # fmt: skip


def members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """All members of a tar. tarfile takes a damaged header for the end and silently loses what follows; this raises."""
    yield from archive
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if any(archive.fileobj.read(tarfile.BLOCKSIZE)):  # an archive ends with zeros, or with the file
        raise tarfile.ReadError(f"the header at byte {archive.offset} is damaged")


# NumPy raises these for a damaged file: a header of 64 TiB ends in MemoryError, a header of brackets in the errors of
# Python's own parser.
_READ_ERRORS: tuple[type[Exception], ...] = (
    *ARCHIVE_ERRORS, TypeError, KeyError, AttributeError, MemoryError, SyntaxError, tokenize.TokenError,
)  # fmt: skip


def load_array(path: Path, mapped: bool = False) -> NDArray[Any]:
    """The array of a .npy file; `mapped` leaves it on the disk until it is read."""
    try:
        with open(path, "rb") as file:  # NumPy can map a path only, not an open file
            array = np.load(path, "r", allow_pickle=False) if mapped else np.load(file, allow_pickle=False)
            if not isinstance(array, np.ndarray):
                raise ValueError("it is an archive of arrays")
            return array
    except _READ_ERRORS as error:
        raise _unreadable(path, ".npy", error) from error


def load_archive(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """The arrays called `names` of a .npz file, without those that it lacks."""
    try:
        with open(path, "rb") as file:  # NumPy would leave it open after a failure
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it is a single array")
            return {name: archive[name] for name in names if name in archive.files}
    except _READ_ERRORS as error:
        raise _unreadable(path, ".npz", error) from error


def _unreadable(path: Path, kind: str, error: BaseException) -> DataError:
    reason = " ".join(str(error).split())[:100] or type(error).__name__
    return DataError(f"{path} cannot be read as {kind}: {reason}")
