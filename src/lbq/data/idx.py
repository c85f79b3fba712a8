"""MNIST and Fashion-MNIST from their four idx files, gzipped or plain.

NumPy only. An idx file is a magic number (two zero bytes, the type, the number of dimensions), the sizes as
big-endian 32-bit integers, then the values, last dimension fastest. Nothing in a file is believed before it fits:
sizes are bounded, and compared with the file's length, before anything is allocated.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lbq.data.dataset import Dataset, Images
from lbq.errors import DataError, nearest

UINT8 = 8  # the type code of unsigned bytes
MAX_BYTES = 256 << 20  # of values in one file; the real ones hold 47 MB
MAX_RATIO = 1032  # bytes that one byte of deflate can stand for, at most
CHUNK = 1 << 20

STEMS = {
    "train-images": "-idx3-ubyte",
    "train-labels": "-idx1-ubyte",
    "t10k-images": "-idx3-ubyte",
    "t10k-labels": "-idx1-ubyte",
}
CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion_mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
}  # fmt: skip
HOMES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion_mnist": "https://github.com/zalandoresearch/fashion-mnist",
}


def load_idx(root: Path, name: str) -> Dataset:
    """The dataset `name` ("mnist" or "fashion_mnist") from `root` or a folder in it: images `[N, 1, H, W]`.

    Mean and deviation are the training pixels', to four digits, as they are usually quoted.
    """
    if name not in CLASSES:
        raise DataError(f"unknown dataset {name!r}{nearest(name, CLASSES)}")
    folder, files = _locate(Path(root), name)
    train, test = (_pair(files[f"{part}-images"], files[f"{part}-labels"], name) for part in ("train", "t10k"))
    mean, std = _statistics(train[0], folder)
    of_train, of_test = (
        Images(images, labels, CLASSES[name], mean=(mean,), std=(std,)) for images, labels in (train, test)
    )
    return Dataset.build(name, of_train, of_test, source=f"idx files in {folder}")


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The values of one idx file of unsigned bytes with so many dimensions."""
    try:
        length = path.stat().st_size
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not zipped:
                return _values(raw, path, dimensions, length)
            with gzip.open(raw) as stream:
                return _values(stream, path, dimensions, length * MAX_RATIO)
    except (OSError, EOFError, zlib.error) as error:
        raise _bad(path, f"cannot be read ({error})") from error


def _values(stream: BufferedReader | gzip.GzipFile, path: Path, dimensions: int, at_most: int) -> NDArray[np.uint8]:
    """Read header and values; `at_most` bytes can be in the stream."""
    header = 4 + 4 * dimensions
    head = stream.read(header)
    if head[:2] != b"\0\0" or len(head) < 4:
        raise _bad(path, "is not an idx file")
    if head[2] != UINT8 or head[3] != dimensions:
        raise _bad(path, f"holds type {head[2]:#x} in {head[3]} dimensions, not unsigned bytes (0x8) in {dimensions}")
    if len(head) < header:
        raise _bad(path, "ends within its header")
    shape = struct.unpack(f">{dimensions}I", head[4:])
    count = math.prod(shape)
    if count > MAX_BYTES or max(shape) > MAX_BYTES:
        raise _bad(path, f"claims the absurd size {' x '.join(map(str, shape))}")
    if count > at_most - header:
        raise _bad(path, f"is truncated: it claims {count} values")
    values = bytearray()
    while chunk := stream.read(min(CHUNK, count + 1 - len(values))):
        values += chunk
    if len(values) < count:
        raise _bad(path, f"is truncated: {len(values)} of {count} values")
    if len(values) > count:
        raise _bad(path, f"goes on after its {count} values")
    return np.frombuffer(values, np.uint8).reshape(shape)


def _pair(image_file: Path, label_file: Path, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images `[N, 1, H, W]` and labels `[N]`."""
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if len(images) != len(labels):
        raise _bad(label_file, f"has {len(labels)} labels for the {len(images)} images of {image_file.name}")
    if labels.size and labels.max() >= len(CLASSES[name]):
        raise _bad(label_file, f"has a label {labels.max()}, but there are {len(CLASSES[name])} classes")
    return images[:, None], labels.astype(np.int64)


def _statistics(images: NDArray[np.uint8], folder: Path) -> tuple[float, float]:
    """Mean and deviation of pixels in [0, 1], exact, then rounded to four digits."""
    if not images.size:
        raise DataError(f"{folder} holds no training images: get the official files again")
    histogram = np.zeros(256, np.int64)
    for start in range(0, len(images), 1000):  # in parts: counting needs eight times the memory
        histogram += np.bincount(images[start : start + 1000].ravel(), minlength=256)
    pixels = np.arange(256) / 255
    mean = float(np.average(pixels, weights=histogram))
    return round(mean, 4), round(math.sqrt(np.average((pixels - mean) ** 2, weights=histogram)), 4)


def _locate(root: Path, name: str) -> tuple[Path, dict[str, Path]]:
    """`root` or the first folder in it that holds all four files, and the files by what they hold."""
    best: tuple[Path, dict[str, Path]] = (root, {})
    try:
        for folder in [root, *sorted(path for path in root.iterdir() if path.is_dir())]:
            files = {stem: path for stem in STEMS if (path := _file(folder, stem)) is not None}
            if len(files) > len(best[1]):
                best = folder, files
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise DataError(f"cannot read {error.filename or root}: {error.strerror}") from error
    missing = [f"{stem}{end}.gz" for stem, end in STEMS.items() if stem not in best[1]]
    if missing:
        raise DataError(f"{name} is not in {best[0]}: download {', '.join(missing)} from {HOMES[name]} into it")
    return best


def _file(folder: Path, stem: str) -> Path | None:
    """The file, under its official name or that which some tools give it on unpacking."""
    end = STEMS[stem]
    names = (stem + end, stem + end + ".gz", f"{stem}.{end[1:]}", f"{stem}.{end[1:]}.gz")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _bad(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}: get the official file again")
