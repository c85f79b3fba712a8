"""MNIST and Fashion-MNIST from their four idx files, gzipped or plain.

NumPy only. An idx file is a magic number (two zero bytes, the type, the number of dimensions), the sizes as
big-endian 32-bit integers, then the values, last dimension fastest. Sizes are bounded, and compared with the file's
length, before anything is allocated.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lbq.data.dataset import Dataset, Inputs, Samples, moments
from lbq.data.download import Progress, fetch
from lbq.errors import DataError
from lbq.system import files

UINT8 = 8  # the type code of unsigned bytes
MAX_BYTES = 256 << 20  # values in one file; the real files hold 47 MB
MAX_INFLATION = 1032  # one byte of deflate stands for at most so many bytes
READ_CHUNK_BYTES = 1 << 20

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
MIRRORS = {
    **HOMES,
    "fashion_mnist": "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
}
FILES = {  # gzipped, in the order of `STEMS`: md5 and bytes
    "mnist": (
        ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422), ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        ("9fb629c4189551a2d022fa330f9573f3", 1_648_877), ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    ),
    "fashion_mnist": (
        ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880), ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
        ("bef4ecab320f06d8554ea6380940ec79", 4_422_102), ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
    ),
}  # fmt: skip


def prepare_idx(name: str, root: Path, source: Path | None = None, progress: Progress | None = None) -> Path:
    """Put the four files of a dataset into `root` and return their folder: those already there stay, others come from the
    folder `source`, where they may be gzipped or not, or by download, which is verified."""
    root = Path(root)
    if source is not None:
        load_idx(source, name)  # what is damaged stays there
        _, there = _locate(Path(source), name)
        files.write_all(root, {path.name: path.read_bytes() for path in there.values()}, DataError)
    else:
        for (stem, end), (md5, size) in zip(STEMS.items(), FILES[name], strict=True):
            if _file(root, stem) is None:
                fetch(f"{MIRRORS[name]}{stem}{end}.gz", root / f"{stem}{end}.gz", md5, size, progress)
    return _locate(root, name)[0]


def is_official(root: Path, name: str) -> bool:
    """Whether the four files are the published ones, byte for byte, by their MD5. Unpacked ones cannot be told."""
    _, there = _locate(Path(root), name)
    known = [md5 for md5, _ in FILES[name]]
    return [hashlib.md5(there[stem].read_bytes(), usedforsecurity=False).hexdigest() for stem in STEMS] == known


def load_idx(root: Path, name: str) -> Dataset:
    """The dataset `name` ("mnist" or "fashion_mnist") from `root` or a folder in it: images `[N, 1, H, W]`.

    Mean and deviation are the training pixels', to four digits, as they are usually quoted.
    """
    folder, files = _locate(Path(root), name)
    train, test = (_samples(files[f"{part}-images"], files[f"{part}-labels"], name) for part in ("train", "t10k"))
    if not train.images.size:
        raise DataError(f"{folder} holds no training images: get the official files again")
    mean, std = (tuple(round(value, 4) for value in values) for values in moments(train.images))
    inputs = Inputs(name, train.images.shape[1:], True, CLASSES[name], mean, std)
    return Dataset(inputs, train, test, source=f"idx files in {folder}")


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The values of one idx file, unsigned bytes in `dimensions` dimensions."""
    try:
        length = path.stat().st_size
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not zipped:
                return _values(raw, path, dimensions, length)
            with gzip.open(raw) as stream:
                return _values(stream, path, dimensions, length * MAX_INFLATION)
    except (OSError, EOFError, zlib.error) as error:
        raise _bad(path, f"cannot be read ({error})") from error


def _values(stream: BufferedReader | gzip.GzipFile, path: Path, dimensions: int, max_bytes: int) -> NDArray[np.uint8]:
    """Read header and values from a stream that can hold at most `max_bytes`."""
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
    if count > max_bytes - header:
        raise _bad(path, f"is truncated: it claims {count} values")
    values = bytearray()
    while chunk := stream.read(min(READ_CHUNK_BYTES, count + 1 - len(values))):
        values += chunk
    if len(values) < count:
        raise _bad(path, f"is truncated: {len(values)} of {count} values")
    if len(values) > count:
        raise _bad(path, f"goes on after its {count} values")
    return np.frombuffer(values, np.uint8).reshape(shape)


def _samples(image_file: Path, label_file: Path, name: str) -> Samples:
    """Images `[N, 1, H, W]` and labels `[N]`."""
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if len(images) != len(labels):
        raise _bad(label_file, f"has {len(labels)} labels for the {len(images)} images of {image_file.name}")
    if labels.size and labels.max() >= len(CLASSES[name]):
        raise _bad(label_file, f"has a label {labels.max()}, but there are {len(CLASSES[name])} classes")
    return Samples(images[:, None], labels.astype(np.int64))


def _locate(root: Path, name: str) -> tuple[Path, dict[str, Path]]:
    """The folder with most of the four files, `root` or one in it, and the files by their stem."""
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
        raise DataError(
            f"{name} is not in {best[0]}: `lbq data {name} --root {best[0]}` fetches it, or download {', '.join(missing)} "
            f"from {HOMES[name]} into it"
        )
    return best


def _file(folder: Path, stem: str) -> Path | None:
    """The file, under its official name or the one that some tools give it on unpacking."""
    end = STEMS[stem]
    names = (stem + end, stem + end + ".gz", f"{stem}.{end[1:]}", f"{stem}.{end[1:]}.gz")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _bad(path: Path, problem: str) -> DataError:
    return DataError(f"{path} {problem}: get the official file again")
