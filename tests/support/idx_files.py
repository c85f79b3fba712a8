"""Small idx files, as MNIST has them."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.support.reading import RNG


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">2xBB{array.ndim}I", 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(root: Path, zipped: bool = True, dash: str = "-") -> tuple[list[NDArray[np.uint8]], list[Path]]:
    rng = RNG(3)
    arrays, paths = [], []
    root.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 30), ("t10k", 7)):
        for what, shape, top in (("images-idx3", (count, 6, 5), 256), ("labels-idx1", (count,), 10)):
            array = rng.integers(0, top, shape, np.uint8)
            data = idx_bytes(array)
            path = root / (f"{part}-{what}-ubyte".replace("-idx", f"{dash}idx") + (".gz" if zipped else ""))
            path.write_bytes(gzip.compress(data) if zipped else data)
            arrays.append(array)
            paths.append(path)
    return arrays, paths
