"""Arrays from .npy and .npz files that a user names. NumPy only; nothing is unpickled."""

from __future__ import annotations

import tokenize
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.data.archives import ARCHIVE_ERRORS
from lbq.errors import DataError

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
