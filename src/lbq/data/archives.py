"""What zip and tar archives raise when they are damaged or hostile, and a safe walk over a tar. Standard library only."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Iterator

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
