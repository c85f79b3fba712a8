"""What every reader returns: raw pixels or event frames with labels, and what a network must know to read them.

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
class Samples:
    """Images `[N, C, H, W]`, or event frames `[N, T, C, H, W]`, uint8 (an array or a memory map); labels `[N]` int64."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def checksum(*parts: Samples) -> str:
    """SHA-256 over the bytes of each part's images or frames (C order), then over its labels (little-endian int64)."""
    digest = hashlib.sha256()
    for part in parts:
        images, labels = part.images, part.labels
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
    """A training and a test part of one kind; `inputs` says which.

    source: where they came from; split: the rule that divided them, where there are several. checksum: of all samples, empty
    if not `hashed`, for a source that says itself what its files are.
    """

    inputs: Inputs
    train: Samples
    test: Samples
    source: str
    split: str = ""
    hashed: bool = True
    checksum: str = field(init=False)

    def __post_init__(self) -> None:
        name, train, test = self.inputs.name, self.train, self.test
        if empty := [part for part, samples in (("train", train), ("test", test)) if not len(samples)]:
            raise DataError(f"{name}: there are no {empty[0]} images ({self.source}): get its files again")
        shapes = train.images.shape[1:], test.images.shape[1:]
        if shapes[0] != shapes[1]:
            raise DataError(f"{name}: image shapes of train and test differ: {shapes[0]} and {shapes[1]}")
        if constant := [str(c) for c, deviation in enumerate(self.inputs.std) if not deviation > 0]:
            raise DataError(
                f"{name}: every pixel of channel {', '.join(constant)} has the same value ({self.source}): leave the channel "
                "out, or get its files again"
            )
        object.__setattr__(self, "checksum", checksum(train, test) if self.hashed else "")


def unlike(classes: tuple[str, ...], known: tuple[str, ...]) -> str:
    """The first difference between two lists of classes, in words."""
    at = next((i for i, (one, other) in enumerate(zip(classes, known, strict=False)) if one != other), None)
    return f"{len(classes)}, not {len(known)}" if at is None else f"class {at} is {classes[at]!r}, not {known[at]!r}"
