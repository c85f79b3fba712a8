"""The files of a dataset by their path, extracted or inside .zip and .tar archives.

Members of archives are read in place: no path of a member is ever opened or written.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from lbq.data.arrays import ARCHIVE_ERRORS, members
from lbq.data.events import check_size, read_bounded
from lbq.errors import DataError
from lbq.system import files

MAX_TEXT_BYTES = 2**20  # a list or table


@dataclass(frozen=True)
class File:
    """A file of a dataset, on disk or inside an archive. `stamp` changes when its content does."""

    where: str
    stamp: str
    archived: bool
    read: Callable[[int], bytes]  # takes the most bytes to accept

    def text(self) -> str:
        try:
            return self.read(MAX_TEXT_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where} is not text: the file is damaged") from error


def pick(tree: Mapping[str, File], pattern: str, fold: bool = True) -> dict[tuple[str, ...], File]:
    """Files whose path ends in `pattern`, by its groups (in lower case if `fold`). Extracted files win over archived ones."""
    end = re.compile(rf"(?:.*/)?{pattern}", re.IGNORECASE if fold else 0)
    files: dict[tuple[str, ...], File] = {}
    for name, file in tree.items():
        if match := end.fullmatch(name):
            key = tuple(g.lower() for g in match.groups()) if fold else match.groups()
            if key not in files:
                files[key] = file
            elif not file.archived or files[key].archived:
                raise DataError(f"{files[key].where} and {file.where} are the same recording: keep one of them")
    return files


@contextmanager
def tree_of(root: Path | str) -> Iterator[dict[str, File]]:
    """All files under a folder, then those in its .zip and .tar archives, by their path; or those of one archive."""
    top = Path(root)
    tree: dict[str, File] = {}
    if not top.exists():
        raise DataError(f"{top} does not exist: give the folder that holds the dataset")
    archives = [] if top.is_dir() else [top]
    for path in _walk(top):
        if path.suffix.lower() in (".zip", ".tar"):
            archives.append(path)
        else:
            tree[path.relative_to(top).as_posix()] = _on_disk(path)
    with ExitStack() as stack:
        for archive in archives:
            where = archive.name if archive == top else archive.relative_to(top).as_posix()
            for name, file in _members(archive, stack):
                tree[f"{where}/{name}"] = file
        yield tree


def _walk(top: Path) -> Iterator[Path]:
    """The files under a folder, without hidden ones. None if `top` is a file."""
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _on_disk(path: Path) -> File:
    status = path.lstat() if path.is_symlink() and not path.exists() else path.stat()
    return File(str(path), f"{status.st_size}:{status.st_mtime_ns}", False, lambda limit: read_bounded(path, limit))


def _members(archive: Path, stack: ExitStack) -> Iterator[tuple[str, File]]:
    """The regular files of an archive, by name."""
    files.refuse_pipe(archive, DataError)
    try:
        if archive.suffix.lower() == ".zip":
            zipped = stack.enter_context(zipfile.ZipFile(archive))
            for info in zipped.infolist():
                if not info.is_dir() and not _clutter(info.filename):
                    opened = partial(zipped.open, info)
                    yield info.filename, _member(archive, info.filename, info.file_size, f"{info.CRC:08x}", opened)
        elif archive.suffix.lower() == ".tar":
            tar = stack.enter_context(tarfile.TarFile(archive))
            changed = archive.stat().st_mtime_ns
            for member in members(tar):
                if member.isreg() and not _clutter(member.name):
                    stamp = f"{changed}:{member.offset}"
                    yield (
                        member.name,
                        _member(archive, member.name, member.size, stamp, partial(tar.extractfile, member)),
                    )
        else:
            raise DataError(f"{archive} is no folder, .zip or .tar: extract it and give the folder")
    except ARCHIVE_ERRORS as error:
        raise DataError(f"{archive} is damaged or cannot be read ({error}): download it again") from error


def _clutter(name: str) -> bool:
    """Whether a member is hidden, an addition of macOS, or has a path that climbs."""
    return any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)


def _member(archive: Path, name: str, size: int, stamp: str, opened: Callable[[], IO[bytes] | None]) -> File:
    where = f"{archive}/{name}"

    def bounded(limit: int) -> bytes:
        check_size(where, size, limit)
        try:
            with opened() or io.BytesIO() as file:
                data = file.read(size + 1)  # no bomb inflates beyond that
        except ARCHIVE_ERRORS as error:
            raise DataError(f"{where} cannot be read ({error}): the archive is damaged, or encrypted") from error
        if len(data) != size:
            raise DataError(f"{where} has not the {size:,} bytes that the archive states: the archive is damaged")
        return data

    return File(where, f"{size}:{stamp}", True, bounded)
