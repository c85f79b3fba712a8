"""The embedded default dataset: UCI handwritten digits, 1,797 real 8x8 images (see DIGITS.md).

NumPy only.

Split: image i is held out for testing where i % 3 == 2 (599 images), else it trains (1,198). The file is ordered by
writer, so both parts hold all thirteen writers: it is a test of the software and its digits, not of new handwriting.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

MAX_VALUE = 16
CLASSES = 10


@dataclass(frozen=True)
class Split:
    """Normalised images `[N, C, H, W]` float32 and labels `[N]` int64."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def load_digits() -> tuple[Split, Split]:
    """Train and test. Pixels are scaled to [0, 1], then normalised by the training images' mean and deviation."""
    with (
        files("lbq.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        images = archive["images"].astype(np.float64)[:, None] / MAX_VALUE
        labels = archive["labels"].astype(np.int64)
    held_out = np.arange(len(labels)) % 3 == 2
    mean, deviation = images[~held_out].mean(), images[~held_out].std()
    images = ((images - mean) / deviation).astype(np.float32)
    train, test = (Split(images[part], labels[part]) for part in (~held_out, held_out))
    return train, test
