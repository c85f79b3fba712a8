"""Images in folders, `root/train/<class>/*` and `root/val/<class>/*` (or `test`): ImageNet's usual layout, or your own.

NumPy only: nothing is opened here, `lbq.data.image_files` decodes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lbq.data.image_files import EXTENSIONS, FileIndex, FileSplit
from lbq.errors import DataError

ARCHIVES = (".tar", ".zip", ".gz", ".tgz", ".xz", ".bz2", ".7z", ".rar")  # each may be a class that is not extracted
IGNORED = ("thumbs.db", "desktop.ini")  # Windows leaves these in folders that it has shown


@dataclass(frozen=True, eq=False)
class FolderSplit(FileSplit):
    """Paths `[N]`, relative to `root`, sorted by class and name.

    Paths are encoded bytes in one array, because a million string objects would be copied, page by page, into every
    forked worker that touches them.
    """

    root: Path
    paths: NDArray[np.bytes_]

    def path(self, index: int) -> Path:
        return self.root / os.fsdecode(bytes(self.paths[index]))


def scan_folder(root: Path) -> FileIndex:
    """Index `root/train` and `root/val`, or `root/test` where there is no `val`, without opening images."""
    root = Path(root)
    try:
        train = root / "train"
        if not train.is_dir():
            raise DataError(f"{train} is not there: image folders are train/CLASS/*.jpg and val/CLASS/*.jpg")
        held_out = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
        if held_out is None:
            raise DataError(f"{root} has neither val nor test: image folders are train/CLASS/*.jpg and val/CLASS/*.jpg")
        classes = _classes(train)
        test_classes = _classes(held_out)
        if test_classes != classes:
            extra, lacking = sorted({*test_classes} - {*classes}), sorted({*classes} - {*test_classes})
            facts = [
                f"{len(names)} {kind} ({names[0]})" for kind, names in (("more", extra), ("less", lacking)) if names
            ]
            raise DataError(f"{held_out} has other classes than train: {' and '.join(facts)}; make the folders agree")
        return FileIndex(root, classes, _scan_split(train, classes), _scan_split(held_out, classes))
    except OSError as error:
        raise DataError(f"cannot read {error.filename or root}: {error.strerror}") from error


def _scan_split(folder: Path, classes: tuple[str, ...]) -> FolderSplit:
    """Index one folder of class folders."""
    paths: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        files = sorted(entry.name for entry in _entries(folder / name))
        if not files:
            raise DataError(f"{folder / name} is empty: add images or remove the class")
        for file in files:
            if not file.lower().endswith(EXTENSIONS):
                raise DataError(f"{folder / name / file} is not an image ({', '.join(EXTENSIONS)}): move it away")
        paths += [os.fsencode(f"{name}/{file}") for file in files]
        labels += [label] * len(files)
    return FolderSplit(np.array(labels, np.int64), folder, np.array(paths, np.bytes_))


def _classes(folder: Path) -> tuple[str, ...]:
    """The sorted names of the class folders in `folder`.

    Images, archives and broken links beside them are refused: a class left out would shift the labels of the others.
    Other files are ignored.
    """
    entries = _entries(folder)
    classes = {entry.name for entry in entries if entry.is_dir()}
    others = sorted((e for e in entries if e.name not in classes), key=lambda e: e.name)
    for entry in others:
        if not entry.is_file():
            raise DataError(f"{entry.path} is neither a file nor a folder: restore what it links to, or remove it")
        if entry.name.lower().endswith(ARCHIVES):
            raise DataError(f"{entry.path} is an archive beside class folders: extract it, or move it elsewhere")
        if entry.name.lower().endswith(EXTENSIONS):
            raise DataError(f"{entry.path} is not in a class folder: sort images into {folder}/CLASS")
    if not classes:
        raise DataError(f"{folder} has no class folders: image folders are {folder.name}/CLASS/*.jpg")
    return tuple(sorted(classes))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, without hidden files and those that Windows leaves."""
    return [e for e in os.scandir(folder) if not e.name.startswith(".") and e.name.lower() not in IGNORED]
