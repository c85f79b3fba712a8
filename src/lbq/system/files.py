"""Files that appear whole or not at all, and the question whether they could, before long work. No torch.

A file is written under another name beside its own, `.NAME.RANDOM.partial`, flushed to disk and renamed. Every writer has
such a name to itself: of several that write one file at once, each writes it whole and the last to rename stays. Only regular
files are ever replaced: a device, a pipe or a folder of that name is refused, and of a symbolic link the file it leads to is
replaced. What a killed process left is removed by the next to write that file, a day later or more.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lbq.errors import LbqError

ABANDONED = 86_400.0  # seconds after which nobody can still be writing a file


def write(path: Path | str, data: bytes | str, error: type[LbqError] = LbqError, keep_as: Path | None = None) -> int:
    """Make or replace `path`, and folders above it that are missing; returns its size in bytes.

    error: what is raised, in one line, when that fails; nothing half-written is left then. keep_as: a name for what `path`
    held before.
    """
    return _write({Path(path): data}, error, keep_as)


def write_all(folder: Path | str, contents: Mapping[str, bytes | str], error: type[LbqError] = LbqError) -> int:
    """The same for several files of a folder, by name: none gets its name before all are on disk."""
    return _write({Path(folder, name): data for name, data in contents.items()}, error)


def _write(contents: Mapping[Path, bytes | str], error: type[LbqError], keep_as: Path | None = None) -> int:
    targets = {path: _target(path, error) for path in contents}
    staged: dict[Path, Path] = {}  # what is written already, and which name it gets
    made = _missing(target.parent for target in targets.values())
    path, size = Path(), 0
    try:
        for path, data in contents.items():
            target = targets[path]
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(target, ABANDONED)
            staged[temporary] = target
            with open(temporary, "xb") as file:
                size += file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
        for temporary, target in staged.items():
            if keep_as is not None and target.exists():
                os.replace(target, keep_as)
            os.replace(temporary, target)
        for folder in {target.parent for target in staged.values()}:
            sync_folder(folder)
    except (Exception, KeyboardInterrupt) as reason:
        for leftover in staged:
            with suppress(OSError):
                leftover.unlink()
        remove_folders(made)
        if isinstance(reason, OSError):
            raise error(_cannot(path, reason)) from reason
        raise
    return size


def lock(file: IO[str] | int, shared: bool = False) -> bool:
    """Lock an open file or folder for as long as it is open; whether no other process has it. The system releases it with this
    process, however that ends. Where the system (Windows) or the file system knows no such locks, nobody has any."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


@contextmanager
def holding(folder: Path, busy: LbqError) -> Iterator[None]:
    """Hold a folder against other processes that ask for it so; `busy` is raised where one has it."""
    if os.name == "nt":  # which cannot open folders
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not lock(handle):
            raise busy
        yield
    finally:
        os.close(handle)


def leftovers(path: Path) -> list[Path]:
    """What writers of `path` that were killed have left, and what living ones are writing now."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.partial")
    return [place for place in path.parent.iterdir() if pattern.fullmatch(place.name)]


def remove_leftovers(path: Path, older_than: float = 0.0) -> None:
    """Remove those that are at least so many seconds old: all of them, for a caller who knows that nobody is writing."""
    with suppress(OSError):  # they are in nobody's way
        for leftover in leftovers(path):
            if time.time() - leftover.lstat().st_mtime >= older_than:
                leftover.unlink()


def _missing(folders: Iterable[Path]) -> list[Path]:
    """Those folders and the ones above them that do not exist yet, the innermost first."""
    found = {place for folder in folders for place in (folder, *folder.parents) if not os.path.exists(place)}
    return sorted(found, key=lambda place: len(place.parts), reverse=True)


def check_file(path: Path | str, error: type[LbqError] = LbqError) -> None:
    """Refuse now what `write` would refuse after the work."""
    path = Path(path)
    _check_place(_target(path, error).parent, path, error)


def check_folder(path: Path | str, error: type[LbqError] = LbqError) -> None:
    """The same for a folder that is to hold files: it is one that takes them, or can be made."""
    path = Path(path)
    if os.path.exists(path) and not path.is_dir():
        raise error(f"cannot write {path}: it is a file, give a folder")
    _check_place(path, path, error)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` last, where the system can (Windows cannot open folders)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _target(path: Path, error: type[LbqError]) -> Path:
    """The file that writing to `path` makes or replaces: at the end of its symbolic links."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG  # to be made; a link may lead to nothing yet
    except OSError as reason:
        raise error(_cannot(path, reason)) from reason
    if stat.S_ISDIR(mode):
        raise error(f"cannot write {path}: it is a folder, give the name of a file")
    if not stat.S_ISREG(mode):
        raise error(f"cannot write {path}: it is a device or a pipe, give the name of a file")
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _check_place(folder: Path, path: Path, error: type[LbqError]) -> None:
    """The first folder from `folder` upwards that exists must take files."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass  # to be made, or told below
    except OSError as reason:  # a name that is too long, for instance
        raise error(_cannot(path, reason)) from reason
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise error(f"cannot write {path}: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise error(f"cannot write {path}: {folder} may not be written, choose another place")


def _cannot(path: Path | str, reason: OSError) -> str:
    remedy = ""
    if reason.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "; free some space or choose another place"
    elif reason.errno == errno.ENAMETOOLONG:
        remedy = "; choose a shorter one"
    return f"cannot write {path}: {reason.strerror or reason}{remedy}"


def make_folders(path: Path) -> list[Path]:
    """Make a folder and those on the way to it, and say which were missing, innermost first."""
    missing = _missing([path])
    path.mkdir(parents=True, exist_ok=True)
    return missing


def remove_folders(made: list[Path]) -> None:
    """Undo `make_folders` after a failure, as far as nothing lies in them."""
    for folder in made:
        with suppress(OSError):
            folder.rmdir()
