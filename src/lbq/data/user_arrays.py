"""A user's own dataset, as arrays. NumPy only.

The folder holds `train.npz` and `test.npz`, or folders `train` and `test` of .npy files if the arrays should stay on the
disk. Each part has `images`, uint8 [N, C, H, W] (or event frames [N, T, C, H, W]), and `labels`, N whole numbers from 0.
The training part may have `classes`, their names. The test part may repeat them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.data.arrays import Arrays, load_archive, load_array
from lbq.data.dataset import MAX_CLASSES, Dataset, Inputs, Samples, moments, unlike
from lbq.errors import DataError

ARRAY_NAMES = ("images", "labels", "classes")
MOST_NAME_BYTES = 2**26  # of all classes


def load_own(root: Path | str) -> Dataset:
    """The images or event frames of a folder. Images are normalised by the mean and deviation of the training part."""
    root = Path(root)
    (train, names), (test, test_names) = _part(root, "train"), _part(root, "test")
    images, labels = train.images, train.labels
    if images.shape[1:] != test.images.shape[1:]:
        shapes = " and ".join(str(list(part.images.shape[1:])) for part in (train, test))
        raise DataError(f"{root}: samples of the training and the test part have other shapes: {shapes}")
    if names and test_names and names != test_names:
        raise DataError(
            f"{root}: the test part has other classes than the training part ({unlike(test_names, names)}): give it "
            "those, and labels that number them"
        )
    if names is None and labels.min() > 0:
        raise DataError(
            f"{root}: no training sample has label 0, the least is {labels.min()}: number the classes from 0, labels - "
            f"{labels.min()}, in both parts; or name all of them in an array 'classes'"
        )
    classes = tuple(map(str, range(int(labels.max()) + 1))) if names is None else names
    for part, largest in (("train", labels.max()), ("test", test.labels.max())):
        if largest >= len(classes):
            raise DataError(f"{root}: the {part} part has label {largest}, the classes are 0 to {len(classes) - 1}")
    channels, height, width = images.shape[-3:]
    static = images.ndim == 4
    mean, std = moments(images) if static else ((), ())
    inputs = Inputs("arrays", (channels, height, width), static, classes, mean, std)
    return Dataset(inputs, train, test, str(root), "" if static else "as given")


def _part(root: Path, part: str) -> tuple[Samples, tuple[str, ...] | None]:
    """Images and labels of one part, and its names of classes if it has any."""
    file, folder = root / f"{part}.npz", root / part
    if file.is_file():
        where, arrays = file, load_archive(file, *ARRAY_NAMES, check=partial(_check_declared, where=file))
    elif folder.is_dir():
        where = folder
        paths = {name: folder / f"{name}.npy" for name in ARRAY_NAMES}
        arrays = {name: load_array(path, mapped=True) for name, path in paths.items() if path.is_file()}
    else:
        raise DataError(
            f"{file} does not exist: put arrays 'images' and 'labels' there, np.savez({file.name!r}, images=..., labels=...)"
        )
    _check_declared(arrays, where)
    images, labels = arrays["images"], arrays["labels"]
    if labels.min() < 0 or labels.max() >= MAX_CLASSES:
        raise DataError(
            f"{where}: 'labels' run from {labels.min()} to {labels.max()}: number the classes from 0, "
            f"np.unique(labels, return_inverse=True)[1]"
        )
    return Samples(images, labels.astype(np.int64)), _names(arrays.get("classes"), where)


def _check_declared(arrays: Arrays, where: Path) -> None:
    """Refuse arrays of other shapes and types than a dataset has. This needs none of their values."""
    for name in ("images", "labels"):
        if name not in arrays:
            raise DataError(f"{where} has no array {name!r}: it needs 'images' and 'labels'")
    images, labels = arrays["images"], arrays["labels"]
    _check_images(images, where)
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        stored = f"{labels.dtype} {list(labels.shape)}"
        names = labels.dtype.kind in "US"
        remedy = ": np.unique(labels, return_inverse=True) gives names and numbers" if names else ""
        raise DataError(
            f"{where}: 'labels' must be {len(images)} whole numbers from 0, as many as images, not {stored}{remedy}"
        )
    check_names(arrays.get("classes"), where)


def check_names(classes: NDArray[Any] | None, where: Path) -> None:
    """Refuse names of classes that would fill the memory."""
    if classes is not None and classes.nbytes > MOST_NAME_BYTES:
        raise DataError(f"{where}: 'classes' takes {classes.nbytes:,} bytes, at most {MOST_NAME_BYTES:,} are read")


def bytes_hint(images: NDArray[Any], largest: int = 255) -> str:
    """How to make bytes of floating-point images, whatever their values are; empty for others. largest: the brightest pixel."""
    if images.dtype.kind != "f":
        return ""
    return (
        ": store pixels from before normalisation, which training does; of values from 0 to 1 make "
        f"np.rint(images * {largest}).astype(np.uint8)"
    )


def _check_images(images: NDArray[Any], where: Path) -> None:
    if images.dtype != np.uint8 or images.ndim not in (4, 5) or not images.size:
        hint = ": add the axis of channels, images[:, None]" if images.ndim == 3 else ""
        hint = bytes_hint(images) or hint
        if not images.size:
            hint = ": it holds no image"
        raise DataError(
            f"{where}: 'images' must be uint8 [N, C, H, W], or [N, T, C, H, W] for events, not {images.dtype} "
            f"{list(images.shape)}{hint}"
        )
    if images.shape[-1] in (1, 2, 3) and images.shape[-3] == images.shape[-2] > 3:
        axes = ", ".join(map(str, [*range(images.ndim - 3), images.ndim - 1, images.ndim - 3, images.ndim - 2]))
        raise DataError(
            f"{where}: 'images' {list(images.shape)} has its channels last: give images.transpose({axes}), channels first"
        )


def _names(classes: NDArray[Any] | None, where: Path) -> tuple[str, ...] | None:
    if classes is None:
        return None
    if classes.dtype.kind != "U" or classes.ndim != 1 or len(classes) < 2:
        raise DataError(f"{where}: 'classes' must be a list of names, not {classes.dtype} {list(classes.shape)}")
    return tuple(map(str, classes))
