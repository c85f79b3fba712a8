"""Data that asks for more than it holds, never ends, or says other labels than its shards."""

from __future__ import annotations

import io
import os
import signal
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq.config import Config
from lbq.counting import analysis, technology
from lbq.data import arrays, shards, user_arrays
from lbq.data.cifar import load_cifar10
from lbq.data.image_files import load_eval
from lbq.data.testset import open_arrays
from lbq.data.user_arrays import load_own
from lbq.errors import DataError, LbqError
from lbq.results.gather import gather
from lbq.runs import run_folder

IMAGES = np.arange(12 * 64, dtype=np.uint8).reshape(12, 1, 8, 8)


def npz(path: Path, **stored: Any) -> Path:
    np.savez_compressed(path, **{"images": IMAGES, "labels": np.arange(12) % 3, **stored})
    return path


def test_nothing_is_inflated_that_no_dataset_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inflate(*_: Any) -> Any:
        raise AssertionError("inflated")

    monkeypatch.setattr(arrays, "_inflated", inflate)
    monkeypatch.setattr(user_arrays, "MOST_NAME_BYTES", 1000)
    for name, array in {
        "images": np.zeros((4, 1, 8, 8)),
        "labels": np.zeros((12, 1000), np.int64),
        "classes": np.zeros(3, "U200"),
    }.items():
        path = npz(tmp_path / "train.npz", **{name: array})
        for read in (lambda: load_own(tmp_path), lambda path=path: open_arrays(path, True)):
            with pytest.raises(DataError, match=f"'{name}'"):
                read()


def test_what_would_not_fit_the_memory_is_refused_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = npz(tmp_path / "some.npz")
    assert len(open_arrays(path, True).read(0, 12)) == 12
    monkeypatch.setattr(arrays, "_free_bytes", lambda: 100.0)
    with pytest.raises(DataError, match=r"images.npy would take 0.0 GiB, 0.0 are free: give folders of .npy files"):
        open_arrays(path, True)


@pytest.mark.parametrize("shape", [(12, 1, 8, 9), (11, 1, 8, 8), (2**40, 2**40), (-12, 1, 8, -8)])
def test_a_header_declares_what_follows_it(shape: Any, tmp_path: Path) -> None:
    text = repr({"descr": "|u1", "fortran_order": False, "shape": shape}).encode() + b"\n"
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + IMAGES.tobytes())
    with pytest.raises(DataError, match=r"images.npy does not hold the numbers that its header declares"):
        open_arrays(tmp_path / "bad.npz", True)


@pytest.fixture
def impatience() -> Iterator[None]:
    """A call that waits is interrupted."""

    def interrupt(*_: Any) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 20)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


PIPES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a record": ("record.json", lambda pipe: gather([pipe])),
    "a configuration": ("own.toml", lambda pipe: Config.load(pipe)),
    "a record as configuration": ("own.json", lambda pipe: Config.load(pipe)),
    "prices": ("prices.toml", lambda pipe: technology.load(pipe)),
    "an analysis": ("analysis.json", lambda pipe: analysis.load(pipe)),
    "inputs": ("images.npz", lambda pipe: open_arrays(pipe, True)),
    "one input": ("image.npy", lambda pipe: arrays.load_array(pipe)),
    "an image": ("image.png", lambda pipe: load_eval(pipe, 8, 8)),
    "a dataset": ("train.npz", lambda pipe: load_own(pipe.parent)),
    "a shard": ("train-0.tar", lambda pipe: shards._images(pipe)),
    "an index of shards": (shards.INDEX, lambda pipe: shards._class_names(pipe, 1)),
    "an archive": ("cifar-10-binary.tar.gz", lambda pipe: load_cifar10(pipe)),
    "the lock of a run": (".lock", lambda pipe: run_folder.held(pipe.parent)),
    "the checksum of weights": ("weights.sha256", lambda pipe: run_folder.weights_checksum(pipe.parent)),
}


@pytest.mark.parametrize("what", PIPES)
@pytest.mark.usefixtures("impatience")
def test_nothing_waits_for_a_pipe(what: str, tmp_path: Path) -> None:
    name, read = PIPES[what]
    os.mkfifo(tmp_path / name)
    with pytest.raises(LbqError):
        read(tmp_path / name)


def test_an_index_with_other_labels_is_not_believed(tmp_path: Path) -> None:
    for part in ("train", "val"):
        with tarfile.open(tmp_path / f"{part}-0.tar", "w") as archive:
            for number in range(4):
                for kind, data in (("png", b"image"), ("cls", str(number % 2).encode())):
                    member = tarfile.TarInfo(f"{number}.{kind}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    first = shards.scan_shards(tmp_path)
    assert first.train.labels.tolist() == [0, 1, 0, 1]
    index = tmp_path / shards.INDEX
    with np.load(index) as stored:
        tables = dict(stored)
    tables["train"][:, 3] = 1 - tables["train"][:, 3]
    np.savez(index, **tables)
    assert shards.scan_shards(tmp_path).train.labels.tolist() == [0, 1, 0, 1]
    tables.pop("sha256")
    np.savez(index, **tables)
    assert shards.scan_shards(tmp_path).train.labels.tolist() == [0, 1, 0, 1]
