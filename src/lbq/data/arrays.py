"""Arrays from .npy and .npz files that a user names, whatever these hold. NumPy only, nothing is unpickled."""

from __future__ import annotations

import tokenize
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.data.archives import BROKEN
from lbq.errors import DataError

# what NumPy raises for files that are not what their name says: a header of 64 TiB ends in MemoryError, one of brackets in
# the errors of Python's own parser
_FAULTS: tuple[type[Exception], ...] = (
    *BROKEN, TypeError, KeyError, AttributeError, MemoryError, SyntaxError, tokenize.TokenError,
)  # fmt: skip


def load_array(path: Path, mapped: bool = False) -> NDArray[Any]:
    """The array of a .npy file; `mapped`: on the disk, until it is read."""
    try:
        with open(path, "rb") as file:  # only a path can be mapped
            found = np.load(path, "r", allow_pickle=False) if mapped else np.load(file, allow_pickle=False)
            if not isinstance(found, np.ndarray):
                raise ValueError("it is an archive of arrays")
            return found
    except _FAULTS as error:
        raise _unreadable(path, ".npy", error) from error


def load_archive(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Those of the arrays `names` that a .npz file holds."""
    try:
        with open(path, "rb") as file:  # which NumPy itself would leave open where it fails
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                raise ValueError("it is a single array")
            return {name: found[name] for name in names if name in found.files}
    except _FAULTS as error:
        raise _unreadable(path, ".npz", error) from error


def _unreadable(path: Path, kind: str, error: BaseException) -> DataError:
    why = " ".join(str(error).split())[:100] or type(error).__name__
    return DataError(f"{path} cannot be read as {kind}: {why}")
