"""Datasets of one's own: arrays in .npz files or on the disk, from training to integers, and what is refused."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lbq import deploy
from lbq.batches.event_augment import EventAugment
from lbq.batches.sources import EventSource, ImageSource, open_source
from lbq.config import Config
from lbq.data import dataset
from lbq.data.arrays import load_archive, load_array
from lbq.data.digits import load_digits
from lbq.data.testset import open_test
from lbq.data.user_arrays import load_own
from lbq.errors import ConfigError, DataError
from lbq.training.fit import check_fit
from tests.support import aedat_writer as writer
from tests.support.commands import Call, status
from tests.support.paths import ROOT
from tests.support.reading import refused

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (7, 3, 6, 5), np.uint8)
SQUARE = IMAGES[..., :5, :]
FRAMES = RNG.integers(0, 9, (7, 4, 2, 6, 6), np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2, 1])


def write(
    root: Path, images: NDArray[Any] = IMAGES, labels: NDArray[Any] = LABELS, part: str = "", **more: Any
) -> Path:
    """Both parts, or one of them again."""
    for name in [part] if part else ["train", "test"]:
        np.savez(root / f"{name}.npz", images=images, labels=labels, **more)
    return root


def test_images(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, IMAGES[:2], LABELS[:2].astype(np.uint8), part="test")
    data = load_own(tmp_path)
    assert (data.inputs.name, data.source, data.inputs.classes) == ("arrays", str(tmp_path), ("0", "1", "2"))
    assert np.array_equal(data.train.images, IMAGES)
    assert np.array_equal(data.test.labels, LABELS[:2])
    scaled = IMAGES / 255
    assert data.inputs.mean == pytest.approx(scaled.mean((0, 2, 3)), abs=1e-12)
    assert data.inputs.std == pytest.approx(scaled.std((0, 2, 3)), abs=1e-12)


def test_moments_of_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dataset.moments(IMAGES)
    monkeypatch.setattr(dataset, "CHUNK_BYTES", 2 * IMAGES[0].nbytes)
    assert dataset.moments(IMAGES) == whole


def test_a_narrow_image_is_none_with_its_channels_last(tmp_path: Path) -> None:
    """Signals of many channels are images of one column."""
    signals = RNG.integers(0, 256, (7, 8, 16, 1), np.uint8)
    data = load_own(write(tmp_path, signals))
    assert np.array_equal(data.train.images, signals)


def test_channels_that_seem_to_be_last_are_pointed_at(tmp_path: Path) -> None:
    write(tmp_path, RNG.integers(0, 256, (7, 8, 16, 3), np.uint8))
    arguments = {"model": {"in_channels": 3, "num_classes": 3}, "data": {"name": "arrays", "root": str(tmp_path)}}
    config = Config.from_dict({**arguments, "train": {"batch_size": 2}})
    with pytest.raises(
        ConfigError, match=r"must be 8 for arrays, got 3; if channels are the last axis .*\(0, 3, 1, 2\)"
    ):
        check_fit(config, open_source(config), 1)


def test_names_of_classes(tmp_path: Path) -> None:
    data = load_own(write(tmp_path, classes=np.array(["a", "b", "c", "never seen"])))
    assert data.inputs.classes == ("a", "b", "c", "never seen")


def test_frames_stay_on_the_disk(tmp_path: Path) -> None:
    for part, count in (("train", 7), ("test", 3)):
        (tmp_path / part).mkdir()
        np.save(tmp_path / part / "images.npy", FRAMES[:count])
        np.save(tmp_path / part / "labels.npy", LABELS[:count])
    data = load_own(tmp_path)
    assert not data.inputs.static
    assert isinstance(data.train.images, np.memmap)
    settings: dict[str, dict[str, Any]] = {
        "data": {"name": "arrays", "root": str(tmp_path)},
        "model": {"timesteps": 4},
        "train": {"batch_size": 2},
    }
    source = open_source(Config.from_dict(settings))
    assert isinstance(source, EventSource)
    assert (source.shape, source.classes, source.train_size, source.test_size) == ((2, 6, 6), 3, 7, 3)
    assert re.fullmatch("[0-9a-f]{64}", source.about["sha256"])
    x, y = next(iter(source.eval_batches("test")))
    assert np.array_equal(x.numpy(), FRAMES[:2].swapaxes(0, 1))
    assert y.tolist() == [0, 1]
    test = open_test("arrays", tmp_path, timesteps=4)
    assert (test.static, test.size, test.shape) == (False, 3, (2, 6, 6))
    with pytest.raises(DataError, match="has 4 frames a sample, the network reads 2"):
        open_test("arrays", tmp_path, timesteps=2)
    for change, message in (
        ({"model": {"timesteps": 2}}, "model.timesteps must be 4"),
        ({"data": {**settings["data"], "size": 8}}, "data.size must be 0 or 6 for arrays, got 8"),
        ({"augment": {"crop": 1}}, "are for images"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_source(Config.from_dict({**settings, **change}))


def test_signals_are_not_turned_round_in_time(tmp_path: Path) -> None:
    signals = RNG.integers(0, 256, (7, 2, 1, 9), np.uint8)
    for part in ("train", "test"):
        write(tmp_path, signals, part=part)
    settings = {
        "data": {"name": "arrays", "root": str(tmp_path)},
        "model": {"num_classes": 3, "in_channels": 2},
        "train": {"batch_size": 2},
    }
    for change, message in (
        ({"crop": 2}, "augment.crop must be at most 0 for .*, half of the height 1, got 2: set augment.crop=0"),
        ({"shift": 1}, "augment.shift must be at most 0 for .*: set augment.shift=0"),
        ({"flip": True}, "augment.flip turns the last axis round, .* signals or features, .*: set augment.flip=false"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_source(Config.from_dict({**settings, "augment": {"crop": 0, "flip": False, **change}}))
    plain = open_source(Config.from_dict({**settings, "augment": {"crop": 0, "flip": False}}))
    assert plain.shape == (2, 1, 9)


def test_images_stay_on_the_disk_without_a_warning(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        np.save(tmp_path / part / "images.npy", IMAGES)
        np.save(tmp_path / part / "labels.npy", LABELS)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        source = open_source(
            Config.from_dict({"data": {"name": "arrays", "root": str(tmp_path)}, "train": {"batch_size": 2}})
        )
    finally:
        torch.set_warn_always(always)
    assert isinstance(source, ImageSource)
    images, _ = source.parts["train"]
    assert images.data_ptr() == source.dataset.train.images.ctypes.data  # nothing was copied
    assert np.array_equal(images.numpy(), IMAGES)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES.astype(np.float32), LABELS, "'images' must be uint8 .*, not float32"),
        (IMAGES[:, 0], LABELS, r"add the axis of channels, images\[:, None\]"),
        (SQUARE.transpose(0, 2, 3, 1), LABELS, r"channels last: give images.transpose\(0, 3, 1, 2\)"),
        (FRAMES.transpose(0, 1, 3, 4, 2), LABELS, r"channels last: give images.transpose\(0, 1, 4, 2, 3\)"),
        (IMAGES[:0], LABELS[:0], r"not uint8 \[0, 3, 6, 5\]: it holds no image"),
        (IMAGES, LABELS[:6], r"'labels' must be 7 whole numbers from 0.*int64 \[6\]"),
        (IMAGES, LABELS[:, None], "'labels' must be 7 whole numbers"),
        (IMAGES, LABELS[:0], r"'labels' must be 7 whole numbers from 0.*int64 \[0\]"),
        (IMAGES, LABELS - 1, "'labels' run from -1 to 1: number the classes from 0, np.unique"),
        (IMAGES, LABELS + 10**12, "'labels' run from 1000000000000"),
        (IMAGES, LABELS.astype(np.uint64) + 2**63, "'labels' run from 9223372036854775808"),
        (IMAGES, LABELS / 2, "not float64"),
        (IMAGES, np.array(list("abcabca")), "not <U1"),
        (
            np.full_like(IMAGES, 3),
            LABELS,
            r"every pixel of channel .* has the same value \(.*\): leave the channel out",
        ),
        (IMAGES, LABELS.astype(object), r"labels.npy holds objects: store numbers, of labels np.unique"),
        (
            IMAGES,
            LABELS.astype(str),
            r"not <U\d+ \[7\]: np.unique\(labels, return_inverse=True\) gives names and numbers",
        ),
    ],
)
def test_arrays_that_make_no_sense(images: NDArray[Any], labels: NDArray[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load_own(write(tmp_path, images, labels))


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    def says(message: str) -> None:
        with refused(message):
            load_own(tmp_path)

    says(r"train.npz does not exist: put arrays .* np.savez\('train.npz'")
    write(tmp_path, part="train")
    says(r"test.npz does not exist")
    write(tmp_path, FRAMES, part="test")
    says(r"other shapes: \[3, 6, 5\] and \[4, 2, 6, 6\]")
    write(tmp_path, IMAGES, LABELS + 1, part="test")
    says("the test part has label 3, the classes are 0 to 2")
    write(tmp_path, classes=np.array(["a", "b"]))
    says("the train part has label 2, the classes are 0 to 1")
    write(tmp_path, classes=np.array(["a", "b", "c"]))
    write(tmp_path, part="test", classes=np.array(["a", "c"]))  # as np.unique gives them where one is missing
    says(r"test part has other classes than the training part \(class 1 is 'c', not 'b'\)")
    write(tmp_path, classes=np.array([1, 2, 3]))
    says("'classes' must be a list of names")
    write(tmp_path)
    np.savez(tmp_path / "test.npz", images=IMAGES)
    says("has no array 'labels'")
    (tmp_path / "test.npz").write_bytes(b"PK\x03\x04 no archive")
    says("cannot be read as .npz")
    with pytest.raises(ConfigError, match="data.root must name the folder of arrays"):
        open_test("arrays")


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    write(tmp_path, part="train")
    (tmp_path / "test").mkdir()
    np.save(tmp_path / "test" / "images.npy", np.array([Path("x"), None], object))
    np.save(tmp_path / "test" / "labels.npy", LABELS)
    with pytest.raises(DataError, match=r"images.npy cannot be read as .npy"):
        load_own(tmp_path)
    (tmp_path / "train.npz").replace(tmp_path / "test" / "images.npy")
    write(tmp_path, part="train")
    with pytest.raises(DataError, match=r"images.npy cannot be read as .npy: it is an archive of arrays"):
        load_own(tmp_path)


@pytest.mark.parametrize("header", ["(((", '"""', "  x\n y", "-" * 3000 + "1", "{[]: 1}", "\0"])
def test_headers_that_python_cannot_parse(header: str, tmp_path: Path) -> None:
    path = tmp_path / "images.npy"
    path.write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode())
    for mapped in (False, True):
        with pytest.raises(DataError, match=r"images.npy cannot be read as .npy: ."):
            load_array(path, mapped)


def test_a_damaged_archive_of_any_compression(tmp_path: Path) -> None:
    for kind in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "test.npz", "w", kind) as archive:
            archive.writestr("images.npy", np.random.default_rng(0).bytes(5000))
        data = bytearray((tmp_path / "test.npz").read_bytes())
        data[60:160] = bytes(b ^ 255 for b in data[60:160])
        (tmp_path / "test.npz").write_bytes(data)
        with pytest.raises(DataError, match=r"test.npz cannot be read as .npz: ."):
            load_archive(tmp_path / "test.npz", "images")


def test_from_training_to_integers(tmp_path: Path, call: Call) -> None:
    """Normalisation is the training's, also where the files have changed since."""
    digits = load_digits()
    data, run, model = tmp_path / "data", tmp_path / "run", tmp_path / "model.lbq"
    data.mkdir()
    for part in (digits.train, digits.test):
        pixels = part.images[:64] * 15
        write(data, pixels, part.labels[:64], part="train" if part is digits.train else "test")
    config = tmp_path / "own.toml"
    config.write_text('[model]\nid = "resnet8w2"\n[data]\nname = "arrays"\n[train]\nepochs = 1\nbatch_size = 32\n')
    assert status("train", str(config), f"data.root={data}", "--out", str(run), "--device", "cpu") == 0
    before = deploy.deploy_run(run)
    assert call.printed("eval", str(run), "--device", "cpu").endswith(" %\n")
    write(data, digits.train.images[:64], digits.train.labels[:64], part="train")  # other moments
    assert call.printed("eval", str(run), "--device", "cpu").endswith(" %, of other data than this\n")
    after = deploy.deploy_run(run)
    for old, new in zip(before.network.layers, after.network.layers, strict=True):
        assert np.array_equal(old.bias, new.bias)
    assert status("deploy", str(run), "-o", str(model)) == 0
    whole, alone = (call.json("run", model, images) for images in (data, data / "test.npz"))
    assert whole["accuracy"] == alone["accuracy"]
    assert whole["images"] == 64


@pytest.mark.parametrize(
    ("augment", "expected"),
    [
        ({}, None),
        ({"flip": True}, EventAugment(0.5, plain_from=0)),  # alone
        ({"events": True}, EventAugment(0.0, plain_from=20)),
        ({"events": True, "flip": True}, EventAugment(0.5, plain_from=20)),
    ],
)
def test_frames_of_ones_own_are_mirrored_only_where_asked_for(
    augment: dict[str, bool], expected: EventAugment | None, tmp_path: Path
) -> None:
    write(tmp_path, FRAMES)
    settings = {
        "data": {"name": "arrays", "root": str(tmp_path)},
        "model": {"timesteps": 4},
        "train": {"batch_size": 2},
        "augment": augment,
    }
    source = open_source(Config.from_dict(settings))
    assert isinstance(source, EventSource)
    assert source.augment == expected
    index = torch.arange(7)
    frames, _ = next(iter(source.train_batches([index], 0, 0)))
    seen = [np.array_equal(frames[:, i].numpy(), FRAMES[i]) for i in range(7)]
    mirrored = [np.array_equal(frames[:, i].numpy(), FRAMES[i, ..., ::-1]) for i in range(7)]
    if "events" not in augment:
        assert all(a or b for a, b in zip(seen, mirrored, strict=True))
        assert any(mirrored) == (expected is not None)


def test_the_documented_recordings_become_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.chdir(tmp_path)
    root = ROOT
    page = (root / "docs/tutorials/own-data.md").read_text(encoding="utf-8").partition("## Event recordings")[2]
    exec(re.findall(r"```python\n(.*?)```", page, re.S)[0], {})
    train, *others = (line.partition("#")[0].split()[1:] for line in page.partition("```sh\n")[2].splitlines()[1:4])
    train[1] = str(root / train[1])
    quick = "model.id=resnet8w4", "model.stem_stride=2", "train.epochs=3", "train.warmup_epochs=1"
    assert status(*train, *quick, "--device", "cpu") == 0
    for command in others:
        assert status(*command) == 0
    assert call.json("run", "events.lbq", "events/test.npz")["accuracy"] > 90


def test_the_documented_files_of_a_camera_become_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for part, seconds in (("train", 2), ("test", 1)):
        for way in ("left", "right"):
            moved = [(t, t // 20_000) for t in range(0, seconds * 10**6, 100)]
            recorded = [(t, x if way == "right" else 127 - x, 5, 1) for t, x in moved]
            (folder := tmp_path / "recordings" / part / way).mkdir(parents=True)
            (folder / "one.aedat").write_bytes(writer.aedat2(recorded))
    page = (ROOT / "docs/tutorials/own-data.md").read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(.*?)```", page.partition("### Files that need no other reader")[2], re.S)[0], {})
    for part, each in (("train", 3), ("test", 1)):  # the last event comes before the last half second is over
        with np.load(f"events/{part}.npz") as arrays:
            assert arrays["images"].shape == (2 * each, 4, 2, 16, 16)
            assert arrays["images"][:, :, 0].max() == 0
            assert arrays["labels"].tolist() == [0] * each + [1] * each
            assert arrays["classes"].tolist() == ["left", "right"]
