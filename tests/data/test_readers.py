"""What all image datasets have in common."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lbq.config import DATASETS
from lbq.data import dataset
from lbq.data.dataset import Dataset, Inputs, Samples
from lbq.data.registry import FILES, REGISTRY
from lbq.data.testset import load_whole
from lbq.errors import DataError
from tests.support.reading import RNG

INPUTS = Inputs("x", (3, 4, 5), True, ("a", "b"), (0.5,) * 3, (0.2,) * 3)


def some_images(count: int = 6, height: int = 4) -> Samples:
    pixels = RNG(0).integers(0, 256, (count, 3, height, 5), np.uint8)
    return Samples(pixels, np.arange(count, dtype=np.int64) % 2)


@pytest.mark.parametrize("deviation", [0.0, math.nan])
def test_pixels_that_are_all_the_same_cannot_be_normalised(deviation: float) -> None:
    with pytest.raises(DataError, match="x: every pixel of channel 1 has the same value"):
        Dataset(replace(INPUTS, std=(0.2, deviation, 0.2)), some_images(), some_images(), "here")


def test_checksum_is_of_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = some_images(6), some_images(4)
    expected = hashlib.sha256()
    for part in (train, test):
        expected.update(part.images.tobytes())
        expected.update(part.labels.tobytes())
    assert Dataset(INPUTS, train, test, "here").checksum == expected.hexdigest()
    assert Dataset(INPUTS, train, test, "here", hashed=False).checksum == ""
    monkeypatch.setattr(dataset, "CHUNK_BYTES", 100)  # several parts, not a multiple of an image
    mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=train.images.shape)
    mapped[:] = train.images
    parts = [Samples(mapped[::-1][::-1], train.labels), test]
    assert dataset.checksum(*parts) == expected.hexdigest()
    mapped[5, 2, 3, 4] ^= 1
    assert dataset.checksum(*parts) != expected.hexdigest()


def test_a_dataset_is_of_one_kind() -> None:
    train = some_images()
    with pytest.raises(DataError, match="x: image shapes of train and test differ"):
        Dataset(INPUTS, train, some_images(height=3), "here")
    for parts, what in (((train, some_images(0)), "test"), ((some_images(0), train), "train")):
        with pytest.raises(DataError, match=rf"^x: there are no {what} images \(here\): get its files again$"):
            Dataset(INPUTS, *parts, "here")


def test_every_dataset_of_a_configuration_is_registered() -> None:
    assert set(REGISTRY) == set(DATASETS)
    assert {name for name, dataset in REGISTRY.items() if dataset.load is None} == set(FILES)
    titles = [dataset.title for dataset in REGISTRY.values()]
    assert len(set(titles)) == len(titles)
    for name in ("imagenet", "svhn"):
        with pytest.raises(
            DataError, match=f"^{name} is no dataset that lies in memory: scan_files opens imagenet and fol"
        ):
            load_whole(name, "")
