"""Arrays from .npy and .npz files, members of tar archives, and what damaged or hostile files of both raise. NumPy only."""

from __future__ import annotations

import math
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.errors import DataError
from lbq.system.files import refuse_pipe

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
    refuse_pipe(path, DataError)
    try:
        with open(path, "rb") as file:  # NumPy can map a path only, not an open file
            array = np.load(path, "r", allow_pickle=False) if mapped else np.load(file, allow_pickle=False)
            if not isinstance(array, np.ndarray):
                raise ValueError("it is an archive of arrays")
            return array
    except _READ_ERRORS as error:
        raise _unreadable(path, ".npy", error) from error


Arrays = dict[str, NDArray[Any]]


def load_archive(path: Path, *names: str, check: Callable[[Arrays], object] = len) -> Arrays:
    """The arrays called `names` of a .npz file, without those that it lacks.

    A small file may inflate to any size, so nothing is inflated before `check` has seen what the headers declare: arrays of
    the declared shapes and types, without memory and values. Nothing is inflated beyond that.
    """
    refuse_pipe(path, DataError)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: f"{name}.npy" for name in names if f"{name}.npy" in archive.namelist()}
            declared = {name: _declared(archive, member) for name, member in members.items()}
            check(declared)
            return {name: _inflated(archive, member, declared[name].nbytes) for name, member in members.items()}
    except _READ_ERRORS as error:
        raise _unreadable(path, ".npz", error) from error


def _declared(archive: zipfile.ZipFile, member: str) -> NDArray[Any]:
    """An array of the shape and type in a member's header, all of whose values are the same."""
    size = archive.getinfo(member).file_size
    with archive.open(member) as file:
        major, _ = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        bytes_declared = math.prod(shape) * dtype.itemsize
        if dtype.hasobject:
            raise ValueError(
                f"{member} holds objects: store numbers, of labels np.unique(labels, return_inverse=True)[1]"
            )
        if not dtype.itemsize or min(shape, default=0) < 0 or file.tell() + bytes_declared != size:
            raise ValueError(f"{member} does not hold the numbers that its header declares")
    return np.broadcast_to(np.zeros((), dtype), shape)


def _inflated(archive: zipfile.ZipFile, member: str, size: int) -> NDArray[Any]:
    if size > (free := _free_bytes()):
        raise ValueError(
            f"{member} would take {size / 2**30:.1f} GiB, {free / 2**30:.1f} are free: give folders of .npy files, which stay "
            "on the disk"
        )
    with archive.open(member) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _free_bytes() -> float:
    """What this process can still allocate, where the system says so (Linux)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):
        return math.inf


def _unreadable(path: Path, kind: str, error: BaseException) -> DataError:
    if isinstance(error, OSError) and error.strerror:
        return DataError(f"cannot read {path}: {error.strerror}; give a {kind} file")
    reason = " ".join(str(error).split())[:100] or type(error).__name__
    if "pickle" in reason:  # NumPy says so of any file that it does not know, and how to read it unsafely
        reason = "it holds no array that NumPy saved, or one of objects"
    return DataError(f"{path} cannot be read as {kind}: {reason}")
