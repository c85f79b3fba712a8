"""Write files whole or not at all, and check before long work that they can be written. No torch.

A file is written under another name beside its own, `.NAME.RANDOM.partial`, flushed to disk and renamed. Every writer has
its own such name: if several write one file at once, each writes it whole and the last to rename wins. Only regular files
are ever replaced. A device, a pipe or a folder of that name is refused; for a symbolic link, the file it leads to is
replaced. The next writer of a file removes the leftovers of killed processes after a day.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lbq.errors import LbqError

ABANDONED_SECONDS = 86_400.0  # nobody is still writing a leftover of this age
MOST_TEXT_BYTES = 2**26  # of a record or a log


def path_of(value: Path | str, name: str, instead: str) -> Path:
    """The path that a caller gave as `name`. Of another object the error says what to give `instead`."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} must be a path, got {type(value).__name__}: {instead}")
    return Path(value)


def write(path: Path | str, data: bytes | str, error: type[LbqError] = LbqError, keep_as: Path | None = None) -> int:
    """Make or replace `path`, and folders above it that are missing; returns its size in bytes.

    error: the class raised, with one line, when that fails; nothing half-written is left then. keep_as: a name for the file
    that was at `path` before.
    """
    return _write({Path(path): data}, error, keep_as)


def write_all(folder: Path | str, contents: Mapping[str, bytes | str], error: type[LbqError] = LbqError) -> int:
    """The same for several files of a folder, by name: none gets its name before all are on disk."""
    return _write({Path(folder, name): data for name, data in contents.items()}, error)


def _write(contents: Mapping[Path, bytes | str], error: type[LbqError], keep_as: Path | None = None) -> int:
    targets = {path: _target(path, error) for path in contents}
    staged: dict[Path, Path] = {}  # temporary file -> final name
    made = _missing(target.parent for target in targets.values())
    path, size = Path(), 0
    try:
        for path, data in contents.items():
            target = targets[path]
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(target, ABANDONED_SECONDS)
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


@contextmanager
def new_folder(path: Path | str, error: type[LbqError] = LbqError) -> Iterator[Path]:
    """A folder to fill, renamed to `path` on success and removed on failure. `path` must not exist yet."""
    path = Path(path)
    if path.exists():
        raise error(f"{path} exists already: choose another folder or remove it")
    made = _missing([path.parent])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    except OSError as reason:
        raise error(f"cannot write under {path.parent}: {reason.strerror}; choose another place") from reason
    try:
        yield partial
        partial.chmod(0o755)
        try:
            os.rename(partial, path)
            sync_folder(path.parent)
        except OSError as reason:
            if path.exists():
                raise error(f"{path} was made by another process meanwhile: choose another folder") from reason
            raise error(_cannot(path, reason)) from reason
    except BaseException as reason:
        shutil.rmtree(partial, ignore_errors=True)
        remove_folders(made)
        if isinstance(reason, LbqError) and str(partial) in str(reason):  # a name that nobody gave
            reason.args = (str(reason).replace(str(partial), str(path)),)
        raise


def refuse_pipe(path: Path | str, error: type[LbqError] = LbqError) -> None:
    """Refuse a pipe or a device before it is opened: that may wait, and reading it may never end."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # whoever opens it says why it cannot be read
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise error(f"{path} is no regular file but a pipe or a device: give a file")


RESTORE = "restore it, or make it again"


def bytes_of(
    path: Path | str, error: type[LbqError] = LbqError, most_bytes: int = MOST_TEXT_BYTES, remedy: str = RESTORE
) -> bytes:
    """The bytes of a regular file of moderate size."""
    refuse_pipe(path, error)
    try:
        with open(path, "rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as reason:
        raise error(_cannot_read(path, reason, remedy)) from reason
    if len(data) > most_bytes:
        raise error(f"{path} is too large: at most {most_bytes // 1024:,} KiB are read")
    return data


def text_of(
    path: Path | str, error: type[LbqError] = LbqError, most_bytes: int = MOST_TEXT_BYTES, remedy: str = RESTORE
) -> str:
    """The text of such a file, which must be UTF-8."""
    try:
        return bytes_of(path, error, most_bytes, remedy).decode().replace("\r\n", "\n")
    except UnicodeDecodeError as reason:
        raise error(f"{path} is not text in UTF-8, from byte {reason.start} on; {remedy}") from reason


def json_of(path: Path | str, error: type[LbqError] = LbqError, remedy: str = RESTORE) -> dict[str, Any]:
    """The object that a JSON file holds."""
    text = text_of(path, error, remedy=remedy)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"{path} cannot be read as JSON: {' '.join(str(reason).split())[:100]}; {remedy}") from reason
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, such as a record or an analysis; {remedy}")
    return value


def sha256_of(path: Path | str, error: type[LbqError] = LbqError, remedy: str = RESTORE) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as reason:
        raise error(_cannot_read(path, reason, remedy)) from reason


def lock(file: IO[str] | int, shared: bool = False) -> bool:
    """Lock an open file or folder for as long as it is open. Returns False if another process has it.

    The system releases the lock when this process ends, however it ends. Windows and some file systems have no such locks;
    there this returns True.
    """
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
    """Hold a folder against other processes that call this; raise `busy` if one of them holds it."""
    if os.name == "nt":  # Windows cannot open folders
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
    """The temporary files of `path`: leftovers of killed writers, and those being written now."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.partial")
    return [place for place in path.parent.iterdir() if pattern.fullmatch(place.name)]


def remove_leftovers(path: Path, older_than: float = 0.0) -> None:
    """Remove leftovers of at least so many seconds. The default removes all, if the caller knows that nobody is writing."""
    with suppress(OSError):  # leftovers do no harm
        for leftover in leftovers(path):
            if time.time() - leftover.lstat().st_mtime >= older_than:
                leftover.unlink()


def _missing(folders: Iterable[Path]) -> list[Path]:
    """The folders, and those above them, that do not exist yet, innermost first."""
    missing = {place for folder in folders for place in (folder, *folder.parents) if not os.path.exists(place)}
    return sorted(missing, key=lambda place: len(place.parts), reverse=True)


def check_file(path: Path | str, error: type[LbqError] = LbqError) -> None:
    """Refuse now a file that `write` would refuse after the work."""
    path = Path(path)
    _refuse_option(path, "file", error)
    _check_place(_target(path, error).parent, path, error)


def check_folder(path: Path | str, error: type[LbqError] = LbqError) -> None:
    """The same for a folder that will hold files: it must accept them, or it must be possible to make it."""
    path = Path(path)
    _refuse_option(path, "folder", error)
    if os.path.exists(path) and not path.is_dir():
        raise error(f"cannot write {path}: it is a file, give a folder")
    _check_place(path, path, error)


def _refuse_option(path: Path, kind: str, error: type[LbqError]) -> None:
    """Refuse the next option of a command, taken for the name that was left out before it."""
    if str(path).startswith("-"):
        raise error(f"cannot write {path}: a name does not begin with '-': did you forget the {kind}'s name?")


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
        mode = stat.S_IFREG  # will be made; a link may lead to nothing yet
    except OSError as reason:
        raise error(_cannot(path, reason)) from reason
    if stat.S_ISDIR(mode):
        raise error(f"cannot write {path}: it is a folder, give the name of a file")
    if not stat.S_ISREG(mode):
        raise error(f"cannot write {path}: it is a device or a pipe, give the name of a file")
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _check_place(folder: Path, path: Path, error: type[LbqError]) -> None:
    """Refuse unless the first existing folder from `folder` upwards accepts files."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass  # will be made, or is refused below
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


def _cannot_read(path: Path | str, reason: OSError, remedy: str) -> str:
    return f"cannot read {path}: {reason.strerror or reason}; {remedy}"


def remove_folders(made: list[Path]) -> None:
    """Remove folders that were made before a failure; those that are not empty stay."""
    for folder in made:
        with suppress(OSError):
            folder.rmdir()
