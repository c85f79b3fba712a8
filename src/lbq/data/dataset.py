"""What every image reader returns: raw pixels with labels and the numbers needed to normalise them.

NumPy only. Pixels stay uint8 until they are on the device that trains; normalisation is
`(pixels / scale - mean) / std` per channel.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lbq.errors import DataError

MOST_CLASSES = 1 << 20  # a larger label is a number of something else, and every class has a name
CHUNK = 1 << 24  # bytes hashed at a time, so that a memory-mapped file need not fit in memory


@dataclass(frozen=True)
class Inputs:
    """What a network reads: images of `shape` (C, H, W) or, where not `static`, event frames of it. In training they were
    (pixel / scale - mean) / std, or as they are where mean is empty."""

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
        if labels.ndim != 1 or labels.dtype != np.int64:
            raise DataError(f"labels must be int64 [N], not {labels.dtype} {list(labels.shape)}")
        if len(images) != len(labels):
            raise DataError(f"there are {len(images)} images but {len(labels)} labels")
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(self.classes):
            raise DataError(
                f"labels must be in 0..{len(self.classes) - 1} for {len(self.classes)} classes, "
                f"but run from {labels.min()} to {labels.max()}"
            )
        if not len(self.mean) == len(self.std) == images.shape[1]:
            raise DataError(
                f"mean and std need one value for each of {images.shape[1]} channels, "
                f"not {len(self.mean)} and {len(self.std)}"
            )
        if not all(deviation > 0 for deviation in self.std):
            raise DataError(f"std must be above 0 in every channel, not {self.std}: are all images the same?")
        if not 1 <= self.scale <= 255:
            raise DataError(f"scale must be in 1..255, not {self.scale}")
        if self.scale < 255 and images.size and images.max() > self.scale:
            raise DataError(f"scale is {self.scale}, but pixels reach {images.max()}")

    def __len__(self) -> int:
        return len(self.labels)

    def normalised(self) -> NDArray[np.float32]:
        """All images as a network sees them: `(pixels / scale - mean) / std`."""
        mean, std = (np.array(v, np.float32)[:, None, None] for v in (self.mean, self.std))
        return (self.images.astype(np.float32) / np.float32(self.scale) - mean) / std

    def subset(self, indices: Sequence[int] | NDArray[np.integer] | NDArray[np.bool_]) -> Images:
        """The chosen images in the given order (or those where a mask `[N]` is true), copied."""
        chosen = np.asarray(indices)
        if chosen.size == 0 and chosen.dtype != np.bool_:
            chosen = chosen.astype(np.int64)  # an empty list has no integer type of its own
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])


def checksum(*parts: Images) -> str:
    """SHA-256 over each part's image bytes (C order), then its labels (little-endian int64)."""
    return checksum_of(*((part.images, part.labels) for part in parts))


def checksum_of(*parts: tuple[NDArray[np.uint8], NDArray[np.int64]]) -> str:
    """The same of images or frames and their labels."""
    digest = hashlib.sha256()
    for images, labels in parts:
        rows = max(CHUNK // max(images[:1].nbytes, 1), 1)
        for start in range(0, len(images), rows):
            digest.update(np.ascontiguousarray(images[start : start + rows]).data)
        digest.update(labels.astype("<i8").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Dataset:
    """Train and test images of one kind; `source` says where they came from, `checksum` what they are."""

    name: str
    train: Images
    test: Images
    source: str
    checksum: str

    def __post_init__(self) -> None:
        train, test = self.train, self.test
        if empty := [part for part, images in (("train", train), ("test", test)) if not len(images)]:
            raise DataError(f"{self.name}: there are no {empty[0]} images ({self.source}): get its files again")
        for what, a, b in (
            ("image shapes", train.images.shape[1:], test.images.shape[1:]),
            ("classes", train.classes, test.classes),
            ("mean, std and scale", (train.mean, train.std, train.scale), (test.mean, test.std, test.scale)),
        ):
            if a != b:
                raise DataError(f"{self.name}: {what} of train and test differ: {a} and {b}")
        if not re.fullmatch(r"[0-9a-f]{64}", self.checksum):
            raise DataError(f"{self.name}: checksum must be 64 hexadecimal digits, not {self.checksum!r}")

    @classmethod
    def build(cls, name: str, train: Images, test: Images, source: str) -> Dataset:
        """A dataset with its checksum computed."""
        return cls(name, train, test, source, checksum(train, test))


def unlike(found: tuple[str, ...], known: tuple[str, ...]) -> str:
    """Where two lists of classes differ first."""
    at = next((i for i, (one, other) in enumerate(zip(found, known, strict=False)) if one != other), None)
    return f"{len(found)}, not {len(known)}" if at is None else f"class {at} is {found[at]!r}, not {known[at]!r}"
