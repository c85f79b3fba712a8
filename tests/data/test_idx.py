"""idx files, as MNIST has them."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbq.data import idx
from lbq.errors import DataError
from tests.support.idx_files import idx_bytes, idx_files
from tests.support.reading import QUICK, RNG, memory_under, refused


@pytest.mark.parametrize(("zipped", "dash", "below"), [(True, "-", ""), (False, ".", "raw"), (True, ".", "raw")])
def test_idx_datasets(tmp_path: Path, zipped: bool, dash: str, below: str) -> None:
    arrays, _ = idx_files(tmp_path / below, zipped, dash)
    for name, first in (("mnist", "0"), ("fashion_mnist", "T-shirt/top")):
        data = idx.load_idx(tmp_path, name)
        assert np.array_equal(data.train.images, arrays[0][:, None])
        assert np.array_equal(data.train.labels, arrays[1])
        assert np.array_equal(data.test.images, arrays[2][:, None])
        assert np.array_equal(data.test.labels, arrays[3])
        assert data.inputs.mean == (round((arrays[0] / 255).mean(), 4),)
        assert data.inputs.std == (round((arrays[0] / 255).std(), 4),)
        assert data.inputs.classes[0] == first
        assert len(data.inputs.classes) == 10


def test_missing_idx_files_are_named(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            DataError,
            match=r"mnist is not in .*: `lbq data mnist .* or download train-images-idx3-ubyte.gz, ",
        ):
            idx.load_idx(root, "mnist")
    _, paths = idx_files(tmp_path / "raw")
    paths[3].unlink()
    with pytest.raises(
        DataError, match=r"mnist is not in .*raw: `lbq data mnist .* download t10k-labels-idx1-ubyte.gz from"
    ):
        idx.load_idx(tmp_path, "mnist")


def test_idx_files_that_do_not_belong_together(tmp_path: Path) -> None:
    _, paths = idx_files(tmp_path)
    for which, array, message in (
        (1, np.zeros(29, np.uint8), "train-labels-idx1-ubyte.gz has 29 labels for the 30 images"),
        (1, np.full(30, 10, np.uint8), "has a label 10, but there are 10 classes"),
        (2, np.zeros((7, 6, 6), np.uint8), "image shapes of train and test differ"),
        (0, np.zeros((30, 6, 5), np.uint8), "every pixel of channel 0 has the same value"),
    ):
        before = paths[which].read_bytes()
        paths[which].write_bytes(gzip.compress(idx_bytes(array)))
        with refused(message):
            idx.load_idx(tmp_path, "mnist")
        paths[which].write_bytes(before)
    for which, array in ((0, np.zeros((0, 6, 5), np.uint8)), (1, np.zeros(0, np.uint8))):
        paths[which].write_bytes(idx_bytes(array))
    with pytest.raises(DataError, match="holds no training images"):
        idx.load_idx(tmp_path, "mnist")


GOOD_IDX = idx_bytes(RNG(1).integers(0, 256, (5, 4, 3), np.uint8))
BAD_IDX = {
    "empty": (b"", "is not an idx file"),
    "short": (GOOD_IDX[:3], "is not an idx file"),
    "text": (b"hello world, this is text", "is not an idx file"),
    "float": (b"\0\0\x0d\x03" + GOOD_IDX[4:], "holds type 0xd in 3 dimensions"),
    "labels": (idx_bytes(np.zeros(9, np.uint8)), "holds type 0x8 in 1 dimensions, not unsigned bytes"),
    "header": (GOOD_IDX[:10], "ends within its header"),
    "absurd": (struct.pack(">2xBB3I", 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "claims the absurd size 4294967295 x"),
    "absurd and empty": (struct.pack(">2xBB3I", 8, 3, 2**32 - 1, 0, 28), "claims the absurd size"),
    "large": (struct.pack(">2xBB3I", 8, 3, 200_000, 28, 28) + GOOD_IDX[16:], "is truncated: it claims 156800000"),
    "truncated": (GOOD_IDX[:-1], "is truncated"),
    "trailing": (GOOD_IDX + b"\0", "goes on after its 60 values"),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("case", BAD_IDX)
def test_bad_idx_files(tmp_path: Path, case: str, zipped: bool) -> None:
    data, message = BAD_IDX[case]
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(data) if zipped else data)
    with memory_under(3_000_000), refused(f"x {message}.*get the official file again"):
        idx.read_idx(path, 3)


def test_gzip_bombs_and_broken_gzips(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(GOOD_IDX + bytes(100_000_000), 1))
    with memory_under(3_000_000), pytest.raises(DataError, match="goes on after its 60 values"):
        idx.read_idx(path, 3)
    good = gzip.compress(GOOD_IDX)
    for bad in (good[:-1], good[:20], good[:-6] + b"\0\0" + good[-4:], good + b"garbage", good[:12] + b"\xff" * 9):
        path.write_bytes(bad)
        with pytest.raises(DataError, match="x cannot be read"):
            idx.read_idx(path, 3)
    with pytest.raises(DataError, match="y cannot be read"):
        idx.read_idx(tmp_path / "y", 3)


@QUICK
@given(shape=st.lists(st.integers(0, 6), min_size=1, max_size=4), seed=st.integers(0, 99), data=st.data())
def test_idx_files_round_trip_and_no_cut_passes(
    tmp_path: Path, shape: list[int], seed: int, data: st.DataObject
) -> None:
    array = RNG(seed).integers(0, 256, shape, np.uint8)
    path = tmp_path / "x"
    whole = idx_bytes(array)
    path.write_bytes(gzip.compress(whole, 1) if seed % 2 else whole)
    assert np.array_equal(idx.read_idx(path, len(shape)), array)
    path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, path.stat().st_size - 1))])
    with pytest.raises(DataError):
        idx.read_idx(path, len(shape))
