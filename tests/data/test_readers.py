"""What all image datasets have in common."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq.data import dataset
from lbq.data.dataset import Dataset, Images
from lbq.errors import DataError
from tests.support.reading import RNG


def test_readers_need_neither_torch_nor_pillow() -> None:
    code = (
        "import sys, lbq.data.dataset, lbq.data.cifar, lbq.data.download, lbq.data.folder, lbq.data.idx;"
        "sys.exit(bool({'torch', 'PIL'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def some_images(count: int = 6, **changes: Any) -> Images:
    pixels = RNG(0).integers(0, 256, (count, 3, 4, 5), np.uint8)
    labels = np.arange(count, dtype=np.int64) % 2
    fields = {"images": pixels, "labels": labels, "classes": ("a", "b"), "mean": (0.5,) * 3, "std": (0.2,) * 3}
    return Images(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": np.zeros((6, 3, 4), np.uint8)}, r"uint8 \[N, C, H, W\], not uint8 \[6, 3, 4\]"),
        ({"images": np.zeros((6, 3, 4, 5), np.float32)}, "not float32"),
        ({"labels": np.zeros(6, np.int32)}, "labels must be int64"),
        ({"labels": np.zeros((6, 1), np.int64)}, r"int64 \[6, 1\]"),
        ({"labels": np.zeros(5, np.int64)}, "6 images but 5 labels"),
        ({"labels": np.full(6, 2)}, r"in 0..1 for 2 classes, but run from 2 to 2"),
        ({"labels": np.full(6, -1)}, "run from -1"),
        ({"mean": (0.5,)}, "each of 3 channels, not 1 and 3"),
        ({"std": (0.2, 0.2)}, "not 3 and 2"),
        ({"std": (0.2, 0.0, 0.2)}, "std must be above 0"),
        ({"std": (0.2, math.nan, 0.2)}, "std must be above 0"),
        ({"scale": 0}, "scale must be in 1..255"),
        ({"scale": 16}, "scale is 16, but pixels reach"),
    ],
)
def test_images_check_what_they_hold(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        some_images(**changes)


def test_subsets_keep_order_and_facts() -> None:
    images = some_images(scale=255)
    chosen = images.subset([4, 1, 1])
    assert len(chosen) == 3
    assert np.array_equal(chosen.images, images.images[[4, 1, 1]])
    assert chosen.labels.tolist() == [0, 1, 1]
    assert (chosen.classes, chosen.mean, chosen.scale) == (images.classes, images.mean, images.scale)
    assert np.array_equal(images.subset(images.labels == 1).images, images.images[1::2])
    assert len(images.subset([])) == 0


def test_checksum_is_of_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = some_images(6), some_images(4)
    expected = hashlib.sha256()
    for part in (train, test):
        expected.update(part.images.tobytes())
        expected.update(part.labels.tobytes())
    assert dataset.checksum(train, test) == expected.hexdigest()
    monkeypatch.setattr(dataset, "CHUNK", 100)  # several parts, not a multiple of an image
    mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=train.images.shape)
    mapped[:] = train.images
    views = Images(mapped[::-1][::-1], train.labels, train.classes, train.mean, train.std)
    assert dataset.checksum(views, test) == expected.hexdigest()
    pixels = train.images.copy()
    pixels[5, 2, 3, 4] ^= 1
    assert dataset.checksum(replace(train, images=pixels), test) != expected.hexdigest()


def test_a_dataset_is_of_one_kind() -> None:
    train = some_images()
    data = Dataset.build("x", train, train.subset([1]), "here")
    assert data.checksum == dataset.checksum(train, train.subset([1]))
    for test, what in (
        (some_images(classes=("a", "c")), "classes"),
        (some_images(images=np.zeros((6, 3, 4, 4), np.uint8)), "image shapes"),
        (some_images(mean=(0.4,) * 3), "mean, std and scale"),
    ):
        with pytest.raises(DataError, match=f"x: {what} of train and test differ"):
            Dataset.build("x", train, test, "here")
    with pytest.raises(DataError, match="checksum must be 64"):
        Dataset("x", train, train, "here", "abc")
    for parts, what in (((train, train.subset([])), "test"), ((train.subset([]), train), "train")):
        with pytest.raises(DataError, match=rf"^x: there are no {what} images \(here\): get its files again$"):
            Dataset.build("x", *parts, "here")
