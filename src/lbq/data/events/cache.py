"""Decoded frames kept on disk, so that the second load decodes nothing. NumPy only.

An entry is a folder named after the dataset and a hash of the parameters that made the frames. It holds, for each part,
`<part>.frames.npy` and `<part>.labels.npy`, and `index.json` with the parameters, a fingerprint of the source files and the
SHA-256 of every array. It is written under another name and renamed when it is whole. Every load hashes every byte: a
damaged entry, or one made from files that have changed since, is built anew.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lbq.data.events import read_bounded
from lbq.errors import DataError
from lbq.system.files import sync_folder

Sample = tuple[NDArray[np.uint8], int]  # frames [T, 2, H, W] and a label
PARTS = ("train", "test")
_FORMAT = 1
_HASH_CHUNK_BYTES = 8 * 2**20
_ABANDONED_SECONDS = 86_400  # an unfinished entry of this age was left by a killed process


@dataclass(frozen=True, eq=False)
class EventSplit:
    """Frames `[N, T, 2, H, W]` uint8, memory-mapped and read-only, and labels `[N]` int64."""

    frames: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def cached(
    folders: Sequence[Path],
    name: str,
    parameters: Mapping[str, Any],
    sources: str,
    build: Callable[[], Mapping[str, Iterable[Sample]]],
    shape: tuple[int, ...],
    classes: int,
) -> dict[str, EventSplit]:
    """The parts of a dataset, from the first of `folders` that holds them. Else `build()` makes them, and the last of
    `folders` keeps them.

    `parameters` (JSON values) are all that shapes the frames. `sources` is a fingerprint of the files they come from.
    `shape` is [T, 2, H, W], labels are below `classes`, and the parts are `PARTS`; an entry that says otherwise is ignored,
    because anybody may have written it.
    """

    made_by = {"format": _FORMAT, "name": name, "parameters": dict(parameters)}
    entries = [folder / f"{name}-{hashlib.sha256(_canonical(made_by)).hexdigest()[:16]}" for folder in folders]
    facts = json.loads(_canonical({**made_by, "sources": sources}))  # as JSON gives them back: lists for tuples
    for entry in entries:
        if (parts := _load(entry, facts, shape, classes)) is not None:
            return parts
    try:
        _write(entry, facts, build(), lambda: _load(entry, facts, shape, classes) is not None)
    except OSError as error:
        raise DataError(f"cannot write {entry}: {error.strerror or error}; give another folder as cache=DIR") from error
    if (parts := _load(entry, facts, shape, classes)) is None:
        raise DataError(f"the cache {entry} does not read back as it was written: check the disk, or delete it")
    return parts


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _header(shape: tuple[int, ...], dtype: str) -> bytes:
    """The beginning of a .npy file. NumPy pads it so that the first number of the shape may grow in place."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def _write(
    entry: Path, facts: Mapping[str, Any], parts: Mapping[str, Iterable[Sample]], is_whole: Callable[[], bool]
) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    for old in entry.parent.glob(f".{entry.name}.*"):
        with suppress(OSError):  # another process may have finished it meanwhile
            if time.time() - old.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
    tag = f"{os.getpid()}.{secrets.token_hex(4)}"
    temporary, discarded = (entry.with_name(f".{entry.name}.{kind}.{tag}") for kind in ("new", "old"))
    temporary.mkdir()
    try:
        arrays: dict[str, Any] = {}
        for part, samples in parts.items():
            arrays |= _write_part(temporary, part, samples)
        index = {**facts, "parts": list(parts), "arrays": arrays}
        text = json.dumps({"sha256": hashlib.sha256(_canonical(index)).hexdigest(), "index": index}, indent=1)
        with open(temporary / "index.json", "w", encoding="utf-8") as file:
            file.write(text + "\n")
            _sync(file)
        sync_folder(temporary)
        _put_in_place(temporary, entry, discarded, is_whole)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(discarded, ignore_errors=True)


def _put_in_place(temporary: Path, entry: Path, discarded: Path, is_whole: Callable[[], bool]) -> None:
    """Give a finished entry its name, unless another process has finished the same one meanwhile."""
    if entry.exists():
        if is_whole():
            return
        with suppress(FileNotFoundError):  # another process may have removed the damaged one meanwhile
            os.rename(entry, discarded)
    try:
        os.rename(temporary, entry)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    sync_folder(entry.parent)


def _write_part(folder: Path, part: str, samples: Iterable[Sample]) -> dict[str, Any]:
    """Stream samples to disk; the index entries of the part's two files."""
    labels: list[int] = []
    shape: tuple[int, ...] | None = None
    digest = hashlib.sha256()
    with open(folder / f"{part}.frames.npy", "wb") as file:
        for frames, label in samples:
            if shape is None:
                shape = frames.shape
                file.write(_header((0, *shape), "|u1"))
            if frames.shape != shape or frames.dtype != np.uint8:
                raise ValueError(f"frames must all be uint8 {shape}, got {frames.dtype} {frames.shape}")
            data = frames.tobytes()
            digest.update(data)
            file.write(data)
            labels.append(label)
        if shape is None:
            raise DataError(f"the {part} part of the dataset has no samples")
        file.seek(0)
        file.write(_header((len(labels), *shape), "|u1"))
        _sync(file)
    values = np.array(labels, "<i8").tobytes()
    with open(folder / f"{part}.labels.npy", "wb") as file:
        file.write(_header((len(labels),), "<i8") + values)
        _sync(file)
    return {
        f"{part}.frames": {"shape": [len(labels), *shape], "dtype": "|u1", "sha256": digest.hexdigest()},
        f"{part}.labels": {"shape": [len(labels)], "dtype": "<i8", "sha256": hashlib.sha256(values).hexdigest()},
    }


def _load(entry: Path, facts: Mapping[str, Any], shape: tuple[int, ...], classes: int) -> dict[str, EventSplit] | None:
    """The entry's parts; None if it is absent, damaged or made from other files. No type or rank comes from the index."""
    try:
        stored = json.loads(read_bounded(entry / "index.json", 2**20))
        index = stored["index"]
        if stored["sha256"] != hashlib.sha256(_canonical(index)).hexdigest():
            return None
        if any(index[name] != value for name, value in facts.items()):
            return None
        parts = {}
        for part in PARTS:
            frames = _open(entry / f"{part}.frames.npy", index["arrays"][f"{part}.frames"], "|u1", 5)
            labels = _open(entry / f"{part}.labels.npy", index["arrays"][f"{part}.labels"], "<i8", 1)
            if frames is None or labels is None or frames.shape != (len(labels), *shape):
                return None
            if not ((labels >= 0) & (labels < classes)).all():
                return None
            parts[part] = EventSplit(frames, np.array(labels, np.int64))
    except (DataError, OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return parts


def _open(path: Path, facts: Mapping[str, Any], dtype: str, rank: int) -> NDArray[Any] | None:
    """The array in `path`, mapped read-only, if it is byte for byte what was written."""
    shape = tuple(facts["shape"])
    if facts["dtype"] != dtype or len(shape) != rank or not all(type(n) is int and n > 0 for n in shape):
        return None
    header = _header(shape, dtype)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size != len(header) + math.prod(shape) * np.dtype(dtype).itemsize:
            return None
        if file.read(len(header)) != header:
            return None
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return np.memmap(path, dtype, "r", len(header), shape) if digest.hexdigest() == facts["sha256"] else None


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
