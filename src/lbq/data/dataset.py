"""What every image reader returns: raw pixels with labels and the numbers needed to normalise them.

NumPy only. Pixels stay uint8 until they are on the device that trains; normalisation is
`(pixels / scale - mean) / std` per channel.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lbq.errors import DataError

MAX_CLASSES = 1 << 20  # a larger label is no class number, and the names of so many classes would fill the memory
CHUNK_BYTES = 1 << 24  # pixels read at a time, so that a memory-mapped file need not fit in memory


@dataclass(frozen=True)
class Inputs:
    """What a network reads: images of `shape` (C, H, W), or event frames of that shape if not `static`.

    Training normalised them as (pixel / scale - mean) / std, or not at all if `mean` is empty.
    """

    name: str
    shape: tuple[int, int, int]
    static: bool = True
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    scale: int = 255


@dataclass(frozen=True, eq=False)
class Images:
    """Images `[N, C, H, W]` uint8 (an array or a memory map) and labels `[N]` int64 in 0..len(classes)-1.

    `scale` is the largest value a pixel can have; `mean` and `std` are per channel, of pixels divided by `scale`.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: int = 255

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.ndim != 4 or images.dtype != np.uint8:
            raise DataError(f"images must be uint8 [N, C, H, W], not {images.dtype} {list(images.shape)}")
        if len(images) != len(labels):
            raise DataError(f"there are {len(images)} images but {len(labels)} labels")
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(self.classes):
            raise DataError(
                f"labels run from {labels.min()} to {labels.max()}, for {len(self.classes)} classes from 0 on"
            )
        if not len(self.mean) == len(self.std) == images.shape[1]:
            counts = f"{len(self.mean)} and {len(self.std)}"
            raise DataError(f"mean and std need one value for each of {images.shape[1]} channels, not {counts}")
        if self.scale < 255 and images.size and images.max() > self.scale:
            raise DataError(f"scale is {self.scale}, but pixels reach {images.max()}")
        if not all(deviation > 0 for deviation in self.std):
            raise DataError(f"std must be above 0 in every channel, not {self.std}: are all images the same?")

    def __len__(self) -> int:
        return len(self.labels)

    def normalised(self) -> NDArray[np.float32]:
        """All images as a network sees them: `(pixels / scale - mean) / std`."""
        mean, std = (np.array(v, np.float32)[:, None, None] for v in (self.mean, self.std))
        return (self.images.astype(np.float32) / np.float32(self.scale) - mean) / std


def checksum(*parts: tuple[NDArray[np.uint8], NDArray[np.int64]]) -> str:
    """SHA-256 over the bytes of each part's images or frames (C order), then over its labels (little-endian int64)."""
    digest = hashlib.sha256()
    for images, labels in parts:
        rows = max(CHUNK_BYTES // max(images[:1].nbytes, 1), 1)
        for start in range(0, len(images), rows):
            digest.update(np.ascontiguousarray(images[start : start + rows]).data)
        digest.update(labels.astype("<i8").tobytes())
    return digest.hexdigest()


def moments(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of pixels / 255, from exact sums over `[N, C, ...]`."""
    histograms = np.zeros((images.shape[1], 256), np.int64)
    rows = max(CHUNK_BYTES // images[:1].nbytes, 1)
    for start in range(0, len(images), rows):
        for channel, histogram in enumerate(histograms):
            histogram += np.bincount(images[start : start + rows, channel].ravel(), minlength=256)
    count = images.size // images.shape[1]
    sums, squares = ([int(histogram @ np.arange(256) ** power) for histogram in histograms] for power in (1, 2))
    variances = [count * square - total**2 for total, square in zip(sums, squares, strict=True)]
    return tuple(s / (255 * count) for s in sums), tuple(math.sqrt(v) / (255 * count) for v in variances)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Train and test images of one kind; `source` says where they came from, `checksum` what they are."""

    name: str
    train: Images
    test: Images
    source: str
    checksum: str = field(init=False)

    def __post_init__(self) -> None:
        train, test = self.train, self.test
        if empty := [part for part, images in (("train", train), ("test", test)) if not len(images)]:
            raise DataError(f"{self.name}: there are no {empty[0]} images ({self.source}): get its files again")
        shapes = train.images.shape[1:], test.images.shape[1:]
        if shapes[0] != shapes[1]:
            raise DataError(f"{self.name}: image shapes of train and test differ: {shapes[0]} and {shapes[1]}")
        parts = ((part.images, part.labels) for part in (train, test))
        object.__setattr__(self, "checksum", checksum(*parts))


def unlike(classes: tuple[str, ...], known: tuple[str, ...]) -> str:
    """The first difference between two lists of classes, in words."""
    at = next((i for i, (one, other) in enumerate(zip(classes, known, strict=False)) if one != other), None)
    return f"{len(classes)}, not {len(known)}" if at is None else f"class {at} is {classes[at]!r}, not {known[at]!r}"
