"""A subset of a dataset, a title for one's own, hints for arrays, and MNIST by `lbq data`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq.batches.sources import limited, open_source
from lbq.config import Config
from lbq.data import idx
from lbq.data.user_arrays import load_own
from lbq.errors import ConfigError, DataError
from lbq.runs.records import _plan, split_of
from tests.support.commands import Call
from tests.support.idx_files import idx_files


def test_a_limit_takes_the_same_samples_of_both_parts_for_every_seed() -> None:
    whole = open_source(Config())
    sources = [open_source(Config.from_dict({"seed": s, "data": {"limit": 100, "holdout": 0.2}})) for s in (0, 1)]
    for source in sources:
        assert (source.train_size, source.holdout_size, source.test_size) == (80, 20, 100)
        assert source.about["limit"] == "100"
        np.testing.assert_array_equal(source.train_numbers, sources[0].train_numbers)
        assert sum(len(y) for _, y in source.eval_batches("test")) == 100
        assert (
            len({int(label) for _, y in source.eval_batches("test") for label in y}) == 10
        )  # mixed, not the first ones
    assert set(sources[0].train_numbers) | set(sources[0].holdout_numbers) == set(limited(whole.train_size, 100))
    np.testing.assert_array_equal(limited(5, 0), np.arange(5))
    np.testing.assert_array_equal(limited(5, 9), np.arange(5))


def test_a_limit_is_part_of_what_a_run_is() -> None:
    config = Config.from_dict({"data": {"limit": 100}})
    assert config.hash != Config().hash
    assert Config.from_dict({"data": {"limit": 0}}).hash == Config().hash
    assert "limited to 100 samples of each part" in split_of(config, {})


def test_data_of_ones_own_has_a_title() -> None:
    config = Config.from_dict({"data": {"name": "arrays", "title": "Leaves"}})
    assert config.hash == Config.from_dict({"data": {"name": "arrays"}}).hash
    assert _plan(config)["dataset"] == "Leaves"
    assert _plan(Config())["dataset"] == "digits"
    with pytest.raises(
        ConfigError, match=r"data.title is for data of your own \(folder, arrays\): digits has its name"
    ):
        open_source(Config.from_dict({"data": {"title": "Leaves"}}))


def arrays(folder: Path, images: np.ndarray, labels: np.ndarray, **more: Any) -> Path:
    for part in ("train", "test"):
        np.savez(folder / f"{part}.npz", images=images, labels=labels, **more)
    return folder


def test_labels_that_do_not_start_at_0_have_a_hint(tmp_path: Path) -> None:
    images = np.arange(64, dtype=np.uint8).reshape(4, 1, 4, 4)
    with pytest.raises(
        DataError, match="no training sample has label 0, the least is 1: .* from 0, labels - 1, in both parts"
    ):
        load_own(arrays(tmp_path, images, np.arange(1, 5)))
    assert len(load_own(arrays(tmp_path, images, np.arange(1, 5), classes=list("abcde"))).train) == 4


def test_float_images_have_a_hint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"of values from 0 to 1 make np.rint\(images \* 255\).astype\(np.uint8\)"):
        load_own(arrays(tmp_path, np.full((4, 1, 4, 4), 0.5, np.float32), np.arange(4)))


def test_mnist_by_the_command(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder, and by a download of what is not there yet."""
    _, paths = idx_files(tmp_path / "source")
    facts = call.json("data", "fashion_mnist", "--root", tmp_path / "root", "--from", tmp_path / "source")
    assert facts["path"] == str(tmp_path / "root")
    assert sorted(p.name for p in (tmp_path / "root").iterdir()) == sorted(p.name for p in paths)
    files = [path.read_bytes() for path in paths]
    monkeypatch.setitem(idx.FILES, "mnist", tuple((hashlib.md5(f).hexdigest(), len(f)) for f in files))
    monkeypatch.setitem(idx.MIRRORS, "mnist", (tmp_path / "source").as_uri() + "/")
    paths[0].rename(tmp_path / "kept")
    (tmp_path / "new").mkdir()
    (tmp_path / "kept").rename(tmp_path / "new" / paths[0].name)
    asked: list[str] = []

    def fetch(url: str, target: Path, md5: str, size: int, _: Any) -> None:
        asked.append(url.rsplit("/", 1)[-1])
        data = next(f for f in files if hashlib.md5(f).hexdigest() == md5)
        assert len(data) == size
        target.write_bytes(data)

    monkeypatch.setattr(idx, "fetch", fetch)
    call.json("data", "mnist", "--root", tmp_path / "new")
    assert asked == [path.name for path in paths[1:]]
    assert "cannot be prepared; known: cifar10, cifar100, mnist, fashion_mnist" in call.refused(
        "data", "svhn", "--root", tmp_path
    )


def test_the_published_files_are_four_of_each() -> None:
    for name in idx.CLASSES:
        assert len(idx.FILES[name]) == len(idx.STEMS)
        assert idx.MIRRORS[name].startswith("https://")
        assert all(len(md5) == 32 for md5, _ in idx.FILES[name])
