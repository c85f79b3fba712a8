"""Decoded frames kept on disk, so that the second load decodes nothing. NumPy only.

An entry is a file named after the dataset and a hash of the parameters that made the frames. It holds the frames of the
training part, then of the test part; an index in JSON with the parameters, a fingerprint of the source files and all
labels; the index's length in 8 bytes, and the SHA-256 of everything before. It gets its name when it is whole. Every load
hashes every byte: a damaged entry, or one made from files that have changed since, is built anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.data.dataset import Samples
from lbq.errors import DataError
from lbq.system import files

Sample = tuple[NDArray[np.uint8], int]  # frames [T, 2, H, W] and a label
PARTS = ("train", "test")
_FORMAT = 2
_DIGEST_BYTES, _LENGTH_BYTES = 32, 8
_MAX_INDEX_BYTES = 2**24  # labels of some million samples


def cached(
    folders: Sequence[Path],
    name: str,
    parameters: Mapping[str, Any],
    sources: str,
    build: Callable[[], Mapping[str, Iterable[Sample]]],
    shape: tuple[int, ...],
    classes: int,
) -> dict[str, Samples]:
    """The parts of a dataset, from the first of `folders` that holds them. Else `build()` makes them, and the last of
    `folders` keeps them.

    `parameters` (JSON values) are all that shapes the frames. `sources` is a fingerprint of the files they come from.
    `shape` is [T, 2, H, W], labels are below `classes`, and the parts are `PARTS`; an entry that says otherwise is ignored,
    because anybody may have written it.
    """

    made_by = {"format": _FORMAT, "name": name, "parameters": dict(parameters)}
    stem = f"{name}-{hashlib.sha256(_canonical(made_by)).hexdigest()[:16]}"
    entries = [folder / f"{stem}.frames" for folder in folders]
    facts = json.loads(_canonical({**made_by, "sources": sources}))  # as JSON gives them back: lists for tuples
    for entry in entries:
        if (parts := _load(entry, facts, shape, classes)) is not None:
            return parts
    try:
        _write(entry, facts, build())
    except OSError as error:
        raise DataError(f"cannot write {entry}: {error.strerror or error}; give another folder as cache=DIR") from error
    if (parts := _load(entry, facts, shape, classes)) is None:
        raise DataError(f"the cache {entry} does not read back as it was written: check the disk, or delete it")
    return parts


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _write(entry: Path, facts: Mapping[str, Any], parts: Mapping[str, Iterable[Sample]]) -> None:
    """Stream samples to disk, under another name until all are there."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    files.remove_leftovers(entry, files.ABANDONED_SECONDS)
    temporary = entry.with_name(f".{entry.name}.{secrets.token_hex(4)}.partial")
    labels: dict[str, list[int]] = {part: [] for part in parts}
    digest = hashlib.sha256()
    try:
        with open(temporary, "xb") as file:
            for part, samples in parts.items():
                for frames, label in samples:
                    data = frames.tobytes()
                    digest.update(data)
                    file.write(data)
                    labels[part].append(label)
                if not labels[part]:
                    raise DataError(f"the {part} part of the dataset has no samples")
            index = _canonical({**facts, "labels": labels})
            end = index + len(index).to_bytes(_LENGTH_BYTES, "little")
            digest.update(end)
            file.write(end + digest.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, entry)
        files.sync_folder(entry.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _load(entry: Path, facts: Mapping[str, Any], shape: tuple[int, ...], classes: int) -> dict[str, Samples] | None:
    """The entry's parts, mapped read-only; None if it is absent, damaged or made from other files."""
    if not entry.is_file():  # opening a pipe would wait
        return None
    try:
        data = np.memmap(entry, np.uint8, "r")
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if hashlib.sha256(body.data).digest() != digest.tobytes():
            return None
        frames_and_index, length = body[:-_LENGTH_BYTES], int.from_bytes(body[-_LENGTH_BYTES:].tobytes(), "little")
        end = len(frames_and_index) - length
        if end < 0 or length > _MAX_INDEX_BYTES:
            return None
        index = json.loads(frames_and_index[end:].tobytes())
        labels = [index["labels"][part] for part in PARTS]
        if any(index[name] != value for name, value in facts.items()) or not all(labels):
            return None
        if not all(type(label) is int and 0 <= label < classes for part in labels for label in part):
            return None
        if end != math.prod(shape) * sum(map(len, labels)):
            return None
        frames = frames_and_index[:end].reshape(-1, *shape)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    both = np.split(frames, [len(labels[0])])
    return {part: Samples(x, np.array(y, np.int64)) for part, x, y in zip(PARTS, both, labels, strict=True)}
