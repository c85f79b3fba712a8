"""Images in tar shards, `root/train-*.tar` and `root/val-*.tar`: many machines read them faster than a million small files.

The layout is webdataset's. Members that share a name up to its first dot belong together: `KEY.jpg` (or jpeg, png, bmp,
webp) is the image and `KEY.cls` its label, a whole number. `root/classes.txt` may name the classes, one a line. An index
says where each image begins, so order, resuming and the division among processes are those of a folder. It is kept in
`root/.lbq-index.npz` if that can be written. NumPy only.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.data.arrays import ARCHIVE_ERRORS, Arrays, load_archive, members
from lbq.data.dataset import MAX_CLASSES
from lbq.data.image_files import EXTENSIONS, FileIndex, FileSplit, Member
from lbq.errors import DataError
from lbq.system import files

INDEX = ".lbq-index.npz"
MAX_IMAGE_BYTES = 64 * 2**20  # one encoded image
MAX_LABEL_BYTES = 32
MOST_INDEX_BYTES = 2**31  # of 60 million images


@dataclass(frozen=True, eq=False)
class ShardSplit(FileSplit):
    """Images by shard and place: `places` int64 [N, 3] holds shard number, first byte and size."""

    shards: tuple[Path, ...]
    places: NDArray[np.int64]

    def path(self, index: int) -> Member:
        shard, offset, size = (int(v) for v in self.places[index])
        return Member(self.shards[shard], offset, size)


def scan_shards(root: Path) -> FileIndex:
    """Index all shards of `root`, or use the stored index if the shards have not changed."""
    root = Path(root)
    parts = {part: tuple(sorted(root.glob(f"{part}-*.tar"))) for part in ("train", "val")}
    for part, shards in parts.items():
        if not shards:
            raise DataError(f"{root} has no {part}-*.tar: shards are train-000.tar ... and val-000.tar ...")
    stamp = hashlib.sha256(
        "\n".join(f"{s.name} {s.stat().st_size} {s.stat().st_mtime_ns}" for ss in parts.values() for s in ss).encode()
    ).hexdigest()
    tables = _stored(root / INDEX, stamp, parts)
    if tables is None:
        tables = {part: _scan(shards) for part, shards in parts.items()}
        _store(root / INDEX, stamp, tables)
    count = 1 + max(int(table[:, 3].max()) for table in tables.values())
    names = _class_names(root / "classes.txt", count)
    train, test = (ShardSplit(tables[p][:, 3].copy(), parts[p], tables[p][:, :3]) for p in ("train", "val"))
    return FileIndex(root, names, train, test)


def _scan(shards: tuple[Path, ...]) -> NDArray[np.int64]:
    """Shard, first byte, size and label of every image, `[N, 4]`, sorted by shard and place."""
    rows = [(number, *image) for number, shard in enumerate(shards) for image in _images(shard)]
    return np.array(sorted(rows), np.int64)


def _images(shard: Path) -> list[tuple[int, int, int]]:
    """First byte, size and label of every image of a shard."""
    files.refuse_pipe(shard, DataError)
    try:
        with tarfile.open(shard, "r:") as archive:
            images, labels, others = _keyed(archive, shard)
    except ARCHIVE_ERRORS as error:
        raise DataError(f"{shard} cannot be read ({error}): copy or make it again") from error
    if lost := sorted(others[key] for key in others.keys() - images.keys()):
        raise DataError(f"{shard}: {lost[0]} belongs to no image, since a key ends at its first dot: rename it")
    unlabelled = sorted(images.keys() - labels.keys())
    if unlabelled or not images:
        problem = f"{unlabelled[0]!r} has no .cls beside it" if unlabelled else "it holds no image"
        raise DataError(f"{shard}: {problem}; shards hold KEY.jpg and KEY.cls")
    return [(*place, labels[key]) for key, place in images.items()]


def _keyed(archive: tarfile.TarFile, shard: Path) -> tuple[dict[str, tuple[int, int]], dict[str, int], dict[str, str]]:
    """By key: the first byte and size of each image, each label, and the names of other images, such as masks."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    others: dict[str, str] = {}
    for member in members(archive):
        folder, _, name = member.name.rpartition("/")
        if not member.isfile() or name.startswith("."):
            continue
        key, _, kind = name.partition(".")
        key = f"{folder}/{key}"
        if f".{kind.lower()}" in EXTENSIONS:
            if not 0 < member.size <= MAX_IMAGE_BYTES:
                raise DataError(f"{shard}: {member.name} has {member.size} bytes: make the shard again")
            if key in images:
                raise DataError(f"{shard}: {member.name} is a second image of its key: a key has one")
            images[key] = (member.offset_data, member.size)
        elif kind == "cls":
            labels[key] = _label(archive, member, shard)
        elif f".{kind.lower().rpartition('.')[2]}" in EXTENSIONS:
            others[key] = member.name
    return images, labels, others


def _label(archive: tarfile.TarFile, member: tarfile.TarInfo, shard: Path) -> int:
    file = archive.extractfile(member) if member.size <= MAX_LABEL_BYTES else None
    text = file.read().decode("ascii", "replace").strip() if file else ""
    if not text.isdigit() or int(text) >= MAX_CLASSES:
        raise DataError(f"{shard}: {member.name} is not a label: write a whole number from 0 on, below {MAX_CLASSES:,}")
    return int(text)


def _class_names(path: Path, count: int) -> tuple[str, ...]:
    if not path.exists():
        return tuple(map(str, range(count)))
    names = tuple(files.text_of(path, DataError, remedy="save it in UTF-8").split("\n"))
    names = names[:-1] if names[-1] == "" else names
    if len(names) < count:
        raise DataError(f"{path} names {len(names)} classes, but labels reach {count - 1}: add the missing lines")
    return names


def _stored(path: Path, stamp: str, parts: Mapping[str, tuple[Path, ...]]) -> dict[str, NDArray[np.int64]] | None:
    """The index in `path`; None if it is absent, damaged or of other shards. Anybody may have written it."""

    def check(declared: Arrays) -> None:
        if sum(array.nbytes for array in declared.values()) > MOST_INDEX_BYTES:
            raise DataError(f"{path} is no index of shards")

    try:
        stored = load_archive(path, "stamp", "sha256", *parts, check=check)
        if str(stored["stamp"]) != stamp or str(stored["sha256"]) != _checksum(stamp, stored):
            return None
        if not all(_possible(stored[part], len(parts[part])) for part in parts):
            return None
        return {part: stored[part] for part in parts}
    except (DataError, KeyError, ValueError):
        return None


def _possible(table: NDArray[Any], shards: int) -> bool:
    """Whether `_scan` could have made these rows from so many shards."""
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != 4 or not len(table) or table.min() < 0:
        return False
    number, _, size, label = table.max(0)
    return bool(number < shards and table[:, 2].min() > 0 and size <= MAX_IMAGE_BYTES and label < MAX_CLASSES)


def _checksum(stamp: str, tables: Mapping[str, NDArray[Any]]) -> str:
    """Binds the places and labels to the shards that `stamp` names."""
    digest = hashlib.sha256(stamp.encode())
    for part in ("train", "val"):
        digest.update(str(tables[part].shape).encode() + tables[part].astype("<i8").tobytes())
    return digest.hexdigest()


def _store(path: Path, stamp: str, tables: dict[str, NDArray[np.int64]]) -> None:
    file = io.BytesIO()
    np.savez(
        file, stamp=np.array(stamp), sha256=np.array(_checksum(stamp, tables)), train=tables["train"], val=tables["val"]
    )
    with suppress(DataError):  # a read-only folder is scanned each time
        files.write(path, file.getvalue(), DataError)
