"""The embedded default dataset: UCI handwritten digits, 1,797 real 8x8 images (see DIGITS.md). NumPy only.

The split: image i tests if i % 3 == 2 (599 images), else it trains (1,198). The file is ordered by writer, so both parts
hold all thirteen writers. The test part shows that the software works, not how it reads new handwriting.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from lbq.data.dataset import Dataset, Inputs, Samples

MAX_PIXEL = 16
SPLIT = "test where index % 3 == 2"


def load_digits() -> Dataset:
    """Images `[N, 1, 8, 8]` with values 0..16; mean and deviation are the training images'."""
    with files("lbq.data").joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as archive:
        images, labels = archive["images"].reshape(-1, 1, 8, 8), archive["labels"].astype(np.int64)
    held_out = np.arange(len(labels)) % 3 == 2
    pixels = images[~held_out] / MAX_PIXEL
    mean, std = (float(pixels.mean()),), (float(pixels.std()),)
    inputs = Inputs("digits", (1, 8, 8), True, tuple(map(str, range(10))), mean, std, MAX_PIXEL)
    train, test = (Samples(images[part], labels[part]) for part in (~held_out, held_out))
    return Dataset(inputs, train, test, f"embedded; {SPLIT}")
