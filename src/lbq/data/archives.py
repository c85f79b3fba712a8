"""What zip and tar archives raise where they are damaged or hostile, and the members of a tar. Standard library only."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Iterator


def _of_lzma() -> tuple[type[Exception], ...]:
    try:
        import lzma
    except ImportError:  # Python can be built without it; zipfile then refuses such members itself
        return ()
    return (lzma.LZMAError,)


# besides their own errors those of what they unpack with, and of numbers that make no sense
BROKEN: tuple[type[Exception], ...] = (
    OSError, EOFError, ValueError, RuntimeError, ArithmeticError, zipfile.BadZipFile, tarfile.TarError, zlib.error,
    *_of_lzma(),
)  # fmt: skip


def members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """All members of a tar: tarfile itself takes a damaged header for the end, and loses what follows in silence."""
    yield from archive
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if any(archive.fileobj.read(tarfile.BLOCKSIZE)):  # an archive ends with zeros, or with the file
        raise tarfile.ReadError(f"the header at byte {archive.offset} is damaged")
