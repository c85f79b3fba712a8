"""What all image datasets have in common."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq.data import dataset
from lbq.data.dataset import Dataset, Images
from lbq.errors import DataError
from tests.support.reading import RNG


def some_images(count: int = 6, **changes: Any) -> Images:
    pixels = RNG(0).integers(0, 256, (count, 3, 4, 5), np.uint8)
    labels = np.arange(count, dtype=np.int64) % 2
    fields = {"images": pixels, "labels": labels, "classes": ("a", "b"), "mean": (0.5,) * 3, "std": (0.2,) * 3}
    return Images(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.zeros(5, np.int64)}, "6 images but 5 labels"),
        ({"labels": np.full(6, 2)}, "labels run from 2 to 2, for 2 classes from 0 on"),
        ({"labels": np.full(6, -1)}, "run from -1"),
        ({"scale": 16}, "scale is 16, but pixels reach"),
        ({"mean": (0.5,)}, "mean and std need one value for each of 3 channels"),
        ({"images": np.zeros((2, 3, 4, 4))}, "images must be uint8"),
        ({"std": (0.2, 0.0, 0.2)}, "std must be above 0"),
        ({"std": (0.2, math.nan, 0.2)}, "std must be above 0"),
    ],
)
def test_images_check_what_they_hold(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        some_images(**changes)


def test_checksum_is_of_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = some_images(6), some_images(4)
    expected = hashlib.sha256()
    for part in (train, test):
        expected.update(part.images.tobytes())
        expected.update(part.labels.tobytes())
    assert Dataset("x", train, test, "here").checksum == expected.hexdigest()
    monkeypatch.setattr(dataset, "CHUNK_BYTES", 100)  # several parts, not a multiple of an image
    mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=train.images.shape)
    mapped[:] = train.images
    parts = [(mapped[::-1][::-1], train.labels), (test.images, test.labels)]
    assert dataset.checksum(*parts) == expected.hexdigest()
    mapped[5, 2, 3, 4] ^= 1
    assert dataset.checksum(*parts) != expected.hexdigest()


def test_a_dataset_is_of_one_kind() -> None:
    train = some_images()
    with pytest.raises(DataError, match="x: image shapes of train and test differ"):
        Dataset("x", train, some_images(images=np.zeros((6, 3, 4, 4), np.uint8)), "here")
    for parts, what in (((train, some_images(0)), "test"), ((some_images(0), train), "train")):
        with pytest.raises(DataError, match=rf"^x: there are no {what} images \(here\): get its files again$"):
            Dataset("x", *parts, "here")
