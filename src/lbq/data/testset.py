"""Test parts of datasets as raw uint8 arrays, for networks that run on integers. NumPy only.

`load_whole` and `scan_files` open whole datasets by name, for `lbq.batches.sources` too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.config import DATASETS
from lbq.data.arrays import Arrays, load_archive
from lbq.data.dataset import Dataset, Inputs
from lbq.data.folder import scan_folder
from lbq.data.image_files import FileIndex, load_eval
from lbq.data.registry import FILES, REGISTRY, Frames
from lbq.data.shards import scan_shards
from lbq.data.user_arrays import bytes_hint, check_names
from lbq.errors import ConfigError, DataError, nearest
from lbq.graph import Shape, shortest, with_sides

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGES_PER_BATCH = 256  # that engines run at a time
EVAL_RATIO = 256 / 224  # the shorter side before the central crop, by the crop's side, as usual for ImageNet


def check_limit(limit: int | None) -> None:
    """Refuse a number of samples below 1; None means all of them."""
    if limit is not None and limit < 1:
        raise DataError(f"limit must be at least 1 sample, got {limit}: leave it out for all of them")


def load_whole(
    name: str, root: Path | str, timesteps: int = 1, size: int = 0, frames: str = "count", window_ms: int = 1000
) -> Dataset:
    """A dataset of images in memory, or of event frames; the arguments are those of a configuration's [data]."""
    known = REGISTRY.get(name)
    if known is None or known.load is None:
        raise DataError(f"{name} is no dataset that lies in memory: scan_files opens {' and '.join(FILES)}")
    folder = Path() if name == "digits" else _folder(name, root)  # digits are part of lbq
    return known.load(folder, Frames(timesteps, size, frames, window_ms))


def scan_files(name: str, root: Path | str) -> FileIndex:
    """Image files in class folders or tar shards."""
    folder = _folder(name, root)
    index = scan_shards(folder) if any(folder.glob("train-*.tar")) else scan_folder(folder)
    if name == "imagenet" and len(index.classes) != 1000:
        raise DataError(f"{index.root} holds {len(index.classes)} classes, ImageNet-1K has 1000: give its folder")
    return index


def _folder(name: str, root: Path | str) -> Path:
    """The dataset's folder, which must be named."""
    if not str(root):
        raise ConfigError(f"data.root must name the folder of {name}: add data.root=DIR")
    return Path(root)


@dataclass(frozen=True, kw_only=True)
class TestSet(Inputs):
    """Samples by number: `read(start, stop)` gives uint8 `[B, C, H, W]`, or `[T, B, C, H, W]` if not `static`.

    labels: `[N]`, or None if they are not known.
    """

    __test__ = False  # not for pytest

    size: int
    read: Callable[[int, int], NDArray[np.uint8]]
    labels: NDArray[np.int64] | None = None

    def batches(
        self, size: int = IMAGES_PER_BATCH, limit: int | None = None
    ) -> Iterator[tuple[NDArray[np.uint8], slice]]:
        """Batches of at most `size` inputs, each with the slice of samples it holds."""
        check_limit(limit)
        if not self.size:
            raise DataError(f"{self.name} has no samples to run")
        end = self.size if limit is None else min(limit, self.size)
        for start in range(0, end, size):
            stop = min(start + size, end)
            yield self.read(start, stop), slice(start, stop)


def open_test(
    name: str, root: Path | str = "", timesteps: int = 1, size: int = 0, frames: str = "count", window_ms: int = 1000
) -> TestSet:
    """The test part of a dataset; the arguments are those of a configuration's [data]."""
    if name not in DATASETS:
        raise DataError(f"unknown dataset {name!r}{nearest(name, DATASETS)}")
    if name in FILES:
        return _files(name, scan_files(name, root), size or 224)
    data = load_whole(name, root, timesteps, size, frames, window_ms)
    if not data.inputs.static and (stored := data.test.images.shape[1]) != timesteps:
        raise DataError(f"{name}: {data.source} has {stored} frames a sample, the network reads {timesteps}")
    return _from_array(replace(data.inputs, name=name), data.test.images, data.test.labels)


def _from_array(inputs: Inputs, samples: NDArray[np.uint8], labels: NDArray[np.int64] | None) -> TestSet:
    """Samples `[N, C, H, W]`, or `[N, T, C, H, W]` if not `static`."""

    def read(start: int, stop: int) -> NDArray[np.uint8]:
        part = samples[start:stop]
        return np.ascontiguousarray(part if inputs.static else part.swapaxes(0, 1))

    return TestSet(**vars(inputs), size=len(samples), read=read, labels=labels)


def file_inputs(name: str, index: FileIndex, side: int) -> Inputs:
    """What a network reads of image files, cropped to squares."""
    return Inputs(name, (3, side, side), True, index.classes, IMAGENET_MEAN, IMAGENET_STD)


def _files(name: str, index: FileIndex, side: int) -> TestSet:
    def read(start: int, stop: int) -> NDArray[np.uint8]:
        paths = (index.test.path(i) for i in range(start, stop))
        return np.stack([load_eval(path, round(side * EVAL_RATIO), side) for path in paths])

    inputs = file_inputs(name, index, side)
    return TestSet(**vars(inputs), size=len(index.test), read=read, labels=index.test.labels)


def open_arrays(
    path: Path | str, static: bool, shape: Shape | None = None, timesteps: int | None = None, largest: int = 255
) -> TestSet:
    """A user's inputs from a .npz file: `images` uint8 `[N, C, H, W]` (or `[N, T, C, H, W]`), perhaps `labels` [N] and
    `classes`, the names that labels number.

    shape: one input of the network; signals and features may lack the axes of length 1. timesteps: those of the network;
    event frames must be as many. largest: the value of its brightest pixel.
    """
    path, lead = Path(path), ("N",) if static else ("N", "T")

    def fitting(arrays: Arrays) -> NDArray[Any]:
        stored, labels = arrays.get("images"), arrays.get("labels")
        images = stored if stored is None or shape is None else with_sides(stored, shape, len(lead))
        if images is None or images.dtype != np.uint8 or images.ndim != len(lead) + 3:
            expected = ", ".join(map(str, (*lead, *("CHW" if shape is None else shortest(shape)))))
            actual = "" if stored is None else f", not {stored.dtype} {list(stored.shape)}"
            hint = "" if stored is None else bytes_hint(stored, largest)
            raise DataError(f"{path} must hold 'images', uint8 [{expected}]{actual}{hint}")
        if not static and timesteps not in (None, images.shape[1]):
            raise DataError(f"{path} has {images.shape[1]} frames a sample, the network reads {timesteps}")
        if labels is not None and (labels.shape != images.shape[:1] or labels.dtype.kind not in "iu"):
            raise DataError(f"{path}: 'labels' must be {len(images)} whole numbers, one for each of 'images'")
        check_names(arrays.get("classes"), path)
        return images

    arrays = load_archive(path, "images", "labels", "classes", check=fitting)
    images, labels, classes = fitting(arrays), arrays.get("labels"), arrays.get("classes")
    names = () if classes is None or classes.dtype.kind != "U" else tuple(map(str, classes.ravel()))
    channels, height, width = images.shape[-3:]
    inputs = Inputs(path.name, (channels, height, width), static, names)
    return _from_array(inputs, images, None if labels is None else labels.astype(np.int64))
