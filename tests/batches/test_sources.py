"""Sources of image files and event frames: from files on disk to a trained network."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import shutil
import signal
import tarfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lbq import engine
from lbq.batches import sources
from lbq.batches.sources import Batch, EventSource, FolderSource, fingerprint, held_out, open_source
from lbq.config import Config
from lbq.counting import deployed, inputs
from lbq.counting.deployed_counts import measure as measure_deployed
from lbq.data import shards
from lbq.data.dataset import Dataset, Inputs, Samples
from lbq.data.testset import open_test
from lbq.deploy import deploy_run
from lbq.deploy.pipeline import test_set
from lbq.errors import ConfigError, DataError
from lbq.measuring.measure import measure
from lbq.training.job import train
from lbq.training.trainer import Trainer
from tests.support import aedat_writer as writer
from tests.support import small_runs
from tests.support.reading import real, refused


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes that a network can tell apart: bright and dark noise."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 7)):
        for label, centre in (("bright", 190), ("dark", 60)):
            folder = root / part / label
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.normal(centre, 25, (20 + i % 3, 24, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


def folder_config(root: Path, **train: Any) -> Config:
    return Config.from_dict(
        {
            "model": {"id": "resnet8w4", "num_classes": 2, "in_channels": 3},
            "data": {"name": "folder", "root": str(root), "size": 16, "workers": 0},
            "augment": {"flip": True, "policy": "imagenet"},
            "optim": {"lr": 0.05},
            "train": {"epochs": 4, "batch_size": 8, **train},
        }
    )


def test_a_folder_of_pictures_trains(pictures: Path) -> None:
    config = folder_config(pictures)
    source = open_source(config)
    assert (source.classes, source.train_size, source.shape) == (2, 32, (3, 16, 16))
    records = list(Trainer(config, source).fit())
    assert records[-1].test_accuracy is not None
    assert records[-1].loss < records[0].loss


def check_equal(batches: list[Batch], others: list[Batch]) -> None:
    for (x, y), (x2, y2) in zip(batches, others, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)


def test_workers_change_nothing(pictures: Path) -> None:
    batches = [torch.tensor([3, 1, 30]), torch.tensor([5, 5])]
    results = []
    for workers in (0, 2):
        source = FolderSource(folder_config(pictures), torch.device("cpu"))
        source.workers = workers
        results.append([*source.train_batches(batches, 4, 1), *source.eval_batches("test")])
    check_equal(*results)
    again = list(FolderSource(folder_config(pictures), torch.device("cpu")).train_batches(batches, 5, 1))
    assert not torch.equal(again[0][0], results[0][0][0])  # another epoch crops otherwise


@pytest.mark.skipif(os.name == "nt", reason="signals do not end processes there")
def test_a_worker_that_was_killed_is_one_line(pictures: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As systems do that run out of memory."""
    trainer = os.getpid()

    def killed(*_: Any) -> Any:
        assert os.getpid() != trainer
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(sources, "load_train", killed)
    config = folder_config(pictures)
    config = replace(config, data=replace(config.data, workers=1))
    with refused(r"a process that decodes images was killed.*: lower data.workers \(now 1\), or data.size"):
        list(open_source(config).train_batches([torch.tensor([0])], 0, 0))
    with refused("a process that decodes images was killed"):
        train(config, tmp_path / "run")
    assert sources.lost_worker(RuntimeError("shapes differ"), 1) is None


@pytest.mark.skipif(os.name == "nt", reason="signals do not end processes there")
def test_workers_stay_when_signals_end_a_whole_job(pictures: Path) -> None:
    """Their process notes it, saves and ends, and needs them until then; they end with it."""
    source = FolderSource(folder_config(pictures), torch.device("cpu"))
    source.workers = 1
    batches = source.train_batches([torch.tensor([i]) for i in range(8)], 0, 0)
    received = [next(batches)]
    (worker,) = multiprocessing.active_children()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker.pid or 0, number)
    received += batches
    assert len(received) == 8
    worker.join(60)
    assert worker.exitcode == 0


def test_parts_of_a_folder_divide_among_processes(pictures: Path) -> None:
    source = open_source(folder_config(pictures))
    labels = [y for rank in range(3) for _, ys in source.eval_batches("test", rank, 3) for y in ys.tolist()]
    assert sorted(labels) == [0] * 7 + [1] * 7


def write_tar(path: Path, *members: tuple[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def write_shards(pictures: Path, root: Path, per_shard: int = 9) -> None:
    """The same pictures as webdataset shards, two members each."""
    for part in ("train", "val"):
        files = sorted((pictures / part).rglob("*.png"))
        for start in range(0, len(files), per_shard):
            members = []
            for i, file in enumerate(files[start : start + per_shard], start):
                label = b"%d\n" % (file.parent.name == "dark")
                members += [(f"{i:05d}.png", file.read_bytes()), (f"{i:05d}.cls", label)]
            write_tar(root / f"{part}-{start:03d}.tar", *members)


def test_shards_give_what_the_folder_gives(pictures: Path, tmp_path: Path) -> None:
    write_shards(pictures, tmp_path)
    (tmp_path / "classes.txt").write_text("bright\ndark\n")
    batches = [torch.tensor([3, 1, 30]), torch.tensor([17, 5])]
    results = []
    for root in (pictures, tmp_path):
        source = FolderSource(folder_config(root), torch.device("cpu"))
        assert source.index.classes == ("bright", "dark")
        results.append([*source.train_batches(batches, 4, 1), *source.eval_batches("test")])
    check_equal(*results)
    stored = (tmp_path / shards.INDEX).stat().st_mtime_ns
    assert len(shards.scan_shards(tmp_path).train) == 32
    assert (tmp_path / shards.INDEX).stat().st_mtime_ns == stored  # the second time reads the index
    whole = (tmp_path / shards.INDEX).read_bytes()
    for damaged in (b"damaged", whole[:-30], whole[:60] + bytes(8) + whole[68:]):
        (tmp_path / shards.INDEX).write_bytes(damaged)
        assert len(shards.scan_shards(tmp_path).test) == 14  # and a damaged one is made again
    stamp, row = np.load(tmp_path / shards.INDEX)["stamp"], [0, 512, 10, 0]
    forged: tuple[Any, ...] = (
        row,
        np.zeros((0, 4), np.int64),
        [row[:3]],
        [[9, *row[1:]]],
        [[0, -512, 10, 0]],
        [[0, 512, 0, 0]],
        [[0, 512, 2**40, 0]],
        [[0, 512, 10, 2**40]],
        [[0.0, 512, 10, 0]],
        np.array([b"x" * 32] * 4).reshape(1, 4),
    )
    for table in forged:
        np.savez(tmp_path / shards.INDEX, stamp=stamp, train=np.array(table), val=np.array(table))
        assert len(shards.scan_shards(tmp_path).test) == 14  # and so is one that somebody else made up


def test_bad_shards_are_refused(pictures: Path, tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message):
            shards.scan_shards(tmp_path)

    refused("has no train-")
    write_shards(pictures, tmp_path)
    first = tmp_path / "train-000.tar"
    good = first.read_bytes()
    first.write_bytes(good[: len(good) // 3])
    refused("train-000.tar")
    first.write_bytes(b"not a tar")
    refused("train-000.tar cannot be read")
    first.write_bytes(good.replace(b"00000.cls", b"00000.txt"))
    refused("train-000.tar")  # its header's checksum no longer matches
    write_tar(first, ("a.png", b"x"), ("b.cls", b"1"))
    refused("'/a' has no .cls beside it")
    for label in (b"one", b"2000000000"):  # the names of so many classes would take all memory
        write_tar(first, ("a.png", b"x"), ("a.cls", label))
        refused("a.cls is not a label")
    for odd in ({"GNU.sparse.size": "x"}, {"GNU.sparse.map": "x", "GNU.sparse.size": "4"}):
        with tarfile.open(first, "w", format=tarfile.PAX_FORMAT) as archive:
            info = tarfile.TarInfo("a.png")
            info.pax_headers = odd
            archive.addfile(info)
        refused("train-000.tar cannot be read .*: copy or make it again")
    torn = bytearray(good)
    torn[torn.index(b"00003.png") + 100] ^= 1  # what follows this header would be lost in silence
    first.write_bytes(torn)
    refused("train-000.tar cannot be read .*the header at byte [0-9]+ is damaged.*: copy or make it again")
    first.write_bytes(good)
    (tmp_path / "classes.txt").write_text("bright\n")
    refused("names 1 classes, but labels reach 1")
    (tmp_path / "classes.txt").write_bytes("hell\ndüster\n".encode("latin-1"))
    refused("classes.txt is not text in UTF-8, from byte 6 on; save it in UTF-8")
    (tmp_path / "classes.txt").unlink()
    split = shards.scan_shards(tmp_path).train
    os.truncate(first, 600)
    with pytest.raises(DataError, match="the shard ends early"):
        split.path(0).open()
    first.unlink()
    with pytest.raises(DataError, match=r"cannot read .*train-000.tar: No such file"):
        split.path(0).open()


def test_folder_refusals(pictures: Path, tmp_path: Path) -> None:
    tree = folder_config(pictures).to_dict()
    with pytest.raises(ConfigError, match="augment.cutout must be less than .*, the side of an image of folder"):
        open_source(Config.from_dict({**tree, "augment": {"cutout": tree["data"]["size"] or 224}}))
    tree["data"]["name"] = "imagenet"
    with pytest.raises(DataError, match="holds 2 classes, ImageNet-1K has 1000"):
        open_source(Config.from_dict(tree))
    with pytest.raises(DataError, match="train is not there"):
        open_source(folder_config(tmp_path))


def test_real_imagenet_sample_goes_through_the_network(tmp_path: Path) -> None:
    sample = real("imagenet1k_sample")
    for part in ("train", "val"):
        (tmp_path / part).symlink_to(sample / "val")
    config = Config.from_dict(
        {
            "model": {"id": "resnet18", "num_classes": 1000, "in_channels": 3, "timesteps": 1},
            "data": {"name": "imagenet", "root": str(tmp_path), "size": 64, "workers": 0},
            "augment": {"flip": True, "policy": "imagenet", "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1},
            "train": {"epochs": 1, "batch_size": 8},
        }
    )
    source = open_source(config)
    assert (source.classes, source.train_size) == (1000, 1000)
    trainer = Trainer(config, source, between_steps=lambda t: t.position.step == 2)
    assert list(trainer.fit()) == []
    assert trainer.position.step == 2
    assert trainer.tally[0].item() / trainer.tally[2].item() > 6  # about log 1000 at the start


def write_nmnist(folder: Path, numbers: range, part: str, rng: np.random.Generator) -> None:
    """Recordings in N-MNIST's 40-bit form: digit d lights the columns around 10 d."""
    for number in numbers:
        times = np.sort(rng.integers(0, 300_000, 300)).tolist()
        x = (10 * (number % 3) + rng.integers(0, 8, 300)).tolist()
        y, p = rng.integers(0, 34, 300).tolist(), rng.integers(0, 2, 300).tolist()
        (folder / f"{number}.bs2").write_bytes(writer.nmnist(zip(times, x, y, p, strict=True)))
    (folder / f"{part}.txt").write_text("".join(f"{number} {number % 3}\n" for number in numbers))


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nmnist")
    rng = np.random.default_rng(0)
    write_nmnist(folder, range(48), "train", rng)
    write_nmnist(folder, range(48, 60), "test", rng)
    return folder


def event_config(root: Path, **augment: Any) -> Config:
    return Config.from_dict(
        {
            "model": {"id": "resnet8w4", "in_channels": 2, "timesteps": 3, "stem_stride": 2},
            "data": {"name": "nmnist", "root": str(root), "size": 16},
            "augment": augment or {"events": True},
            "optim": {"name": "adamw", "lr": 0.005, "weight_decay": 0.01},
            "train": {"epochs": 6, "batch_size": 12},
        }
    )


def test_event_frames_train_and_are_counted(recordings: Path) -> None:
    config = event_config(recordings)
    source = open_source(config)
    assert not source.static
    assert (source.train_size, source.shape) == (48, (2, 16, 16))
    x, y = next(source.eval_batches("test"))
    assert x.shape == (3, 12, 2, 16, 16)
    assert x.sum().item() == 12 * 300  # every event is in a frame
    assert y.tolist() == [0, 1, 2] * 4
    trainer = Trainer(config, source)
    records = list(trainer.fit())
    assert records[-1].loss < records[0].loss
    assert records[-1].test_accuracy is not None
    assert records[-1].test_accuracy > 60  # chance is 33 for these three, 10 for the network's ten classes
    measured = measure(trainer.net, source)
    assert measured.accuracy == pytest.approx(records[-1].test_accuracy)
    assert measured.exact is not None
    assert measured.exact.fp_macs == 3 * sum(s.valid_macs for s in measured.graph.synapses if s.source == "input")


def test_event_refusals(recordings: Path) -> None:
    with pytest.raises(
        ConfigError, match="are for images; nmnist has event frames, .*: set augment.crop=0 augment.cutout=0$"
    ):
        open_source(event_config(recordings, crop=4, cutout=2))
    with pytest.raises(ConfigError, match="augment.flip is for images and for arrays; augment.events says"):
        open_source(event_config(recordings, flip=True))


def test_plain_epochs_end_runs_on_files_and_on_events_too(pictures: Path, recordings: Path) -> None:
    off: dict[str, Any] = {"policy": "", "events": False}
    for config in (folder_config(pictures), event_config(recordings)):
        ends = replace(config, augment=replace(config.augment, plain_epochs=1))
        plain = replace(config, augment=replace(config.augment, **off))
        last = config.train.epochs - 1
        for epoch, like, unlike in ((last - 1, config, plain), (last, plain, config)):
            actual, same, other = (
                next(iter(open_source(c).train_batches([torch.arange(8)], epoch, 0)))[0] for c in (ends, like, unlike)
            )
            assert torch.equal(actual, same)
            assert not torch.equal(actual, other)


def test_test_sets_are_what_evaluation_reads(pictures: Path, recordings: Path) -> None:
    """The same samples in the same order, as bytes: what a deployed network gets."""
    for config in (folder_config(pictures), event_config(recordings), Config.from_dict({})):
        source, d = open_source(config), config.data
        test = open_test(d.name, d.root, config.model.timesteps, d.size, d.frames, d.window_ms)
        for both in (test, test_set(config)):
            assert {f.name: getattr(both, f.name) for f in fields(Inputs)} == vars(source.inputs)
        seen = 0
        for x, y in source.eval_batches("test"):
            pixels = test.read(seen, seen + len(y))
            assert test.labels is not None
            assert test.labels[seen : seen + len(y)].tolist() == y.tolist()
            expected = torch.from_numpy(pixels).float()
            if test.mean:
                mean, std = (torch.tensor(v)[:, None, None] for v in (test.mean, test.std))
                expected = (expected / test.scale - mean) / std
            torch.testing.assert_close(expected, x)
            seen += len(y)
        assert seen == test.size
        assert sum(which.stop - which.start for _, which in test.batches(5, 7)) == 7


def test_training_samples_can_be_had_as_they_would_be_tested(pictures: Path, recordings: Path) -> None:
    digits = Config.from_dict({"augment": {"shift": 1}})
    for config in (folder_config(pictures), event_config(recordings), digits):
        source, apart = open_source(config), open_source(replace(config, data=replace(config.data, holdout=0.125)))
        along = 0 if source.static else 1
        training, holdout = held_out(source.train_size, 0.125)
        x, y = source.train_samples(torch.from_numpy(holdout))
        tested, labels = zip(*apart.eval_batches("holdout"), strict=True)
        assert torch.equal(x, torch.cat(tested, along))
        assert torch.equal(y, torch.cat(labels))
        first, again = apart.train_samples(torch.arange(3)), source.train_samples(torch.from_numpy(training[:3]))
        assert torch.equal(first[0], again[0])


def test_an_event_network_from_training_to_its_deployed_file(recordings: Path, tmp_path: Path) -> None:
    """Frames are read at every timestep, as counts; the file knows which dataset it is for."""
    config = event_config(recordings)
    trainer = Trainer(config, open_source(config))
    for _ in trainer.fit():
        pass
    small_runs.save_run(tmp_path / "run", trainer.net, config)
    engine.save(tmp_path / "model.lbq", deploy_run(tmp_path / "run", bits=16))
    net = engine.load(tmp_path / "model.lbq")
    assert not net.network.static
    assert net.verify("bitplane") == 8
    test = inputs.open_data(net.network, str(recordings))
    evaluation = deployed.evaluate(net, test)
    with torch.no_grad():
        logits = trainer.net.eval()(torch.from_numpy(test.read(0, test.size)).float())
    out = net.run(test.read(0, test.size))
    assert evaluation.images == 12
    assert (out.predictions == logits.argmax(1).numpy()).mean() > 0.9
    measured = measure_deployed(net, test)
    assert measured.exact is not None
    assert measured.exact.fp_macs == 3 * sum(s.valid_macs for s in net.network.layers[0].synapses)
    np.save(tmp_path / "frames.npy", test.read(0, 1)[:, 0])
    assert inputs.read_input(tmp_path / "frames.npy", net.network).shape == (3, *net.network.input_shape)
    np.savez(tmp_path / "frames.npz", images=test.read(0, 4).swapaxes(0, 1))
    own = inputs.open_data(net.network, str(tmp_path / "frames.npz"))
    assert np.array_equal(own.read(1, 3), test.read(1, 3))


def test_a_damaged_picture_is_one_line_whoever_decodes_it(pictures: Path, tmp_path: Path) -> None:
    root = shutil.copytree(pictures, tmp_path / "copy")
    (root / "train" / "dark" / "3.png").write_bytes(b"\x89PNG but no more")
    for workers in (0, 1):
        source = FolderSource(folder_config(root), torch.device("cpu"))
        source.workers = workers
        with pytest.raises(DataError) as caught:
            list(source.train_batches([torch.arange(source.train_size)], 0, 0))
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(
            f"{root / 'train' / 'dark' / '3.png'} cannot be decoded as JPEG, PNG, BMP, WEBP"
        )
        assert multiprocessing.active_children() == []  # they would hold up the end of the process


def test_other_labels_are_other_data(pictures: Path, tmp_path: Path) -> None:
    root = shutil.copytree(pictures, tmp_path / "copy")
    (first, second), config = ((open_source(folder_config(r)).about for r in (pictures, root)), folder_config(root))
    assert first["labels"] == second["labels"]  # wherever they lie
    (root / "train" / "dark" / "3.png").rename(root / "train" / "bright" / "z.png")
    assert open_source(config).about["labels"] != second["labels"]
    assert fingerprint(np.array([0, 1])) != fingerprint(np.array([1, 0]))


def test_other_images_of_the_same_labels_are_other_data(pictures: Path, tmp_path: Path) -> None:
    def checksum(root: Path) -> str:
        return open_source(folder_config(root)).about["sha256"]

    root = shutil.copytree(pictures, tmp_path / "copy")
    whole = checksum(pictures)
    assert re.fullmatch("[0-9a-f]{64}", whole)
    assert checksum(root) == whole  # wherever they lie
    (tmp_path / "shards").mkdir()
    write_shards(pictures, tmp_path / "shards")
    assert checksum(tmp_path / "shards") == whole
    file = root / "train" / "dark" / "3.png"
    image = file.read_bytes()
    file.write_bytes(image[:-1] + b"?")
    assert checksum(root) != whole
    file.write_bytes(image)
    assert checksum(root) == whole
    file.unlink()
    file.symlink_to("nowhere.png")
    with pytest.raises(DataError, match=r"cannot read .*/train/dark/3.png: No such file"):
        checksum(root)


def test_the_same_samples_are_held_out_for_every_seed() -> None:
    trees = [{"seed": seed, "data": {"name": "digits", "holdout": 0.1}} for seed in (0, 1)]
    one, other = (torch.cat([x for x, _ in open_source(Config.from_dict(t)).eval_batches("holdout")]) for t in trees)
    assert len(one) == 120
    assert torch.equal(one, other)


@pytest.mark.parametrize("share", [0.0001, 0.9999])
def test_a_holdout_leaves_some_on_both_sides(share: float) -> None:
    with pytest.raises(
        ConfigError, match=r"data.holdout .* of 1198 samples keeps .* apart: it must leave some on both sides"
    ):
        open_source(Config.from_dict({"data": {"name": "digits", "holdout": share}}))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("a.jpg", "a.cls", "b.1.jpg", "b.1.cls"),
            "b.1.jpg belongs to no image, since a key ends at its first dot: rename it",
        ),
        (("a.jpg", "a.png", "a.cls"), "a.png is a second image of its key"),
    ],
)
def test_shards_lose_no_image_in_silence(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    for part in ("train", "val"):
        write_tar(tmp_path / f"{part}-000.tar", *((name, b"0") for name in names))
    with pytest.raises(DataError, match=message):
        shards.scan_shards(tmp_path)


def test_shards_may_hold_more_than_images(tmp_path: Path) -> None:
    names = ("a.jpg", "a.cls", "a.seg.png", "._a.jpg", "__MACOSX/._a.jpg", "a.json")
    for part in ("train", "val"):
        write_tar(tmp_path / f"{part}-000.tar", *((name, b"0") for name in names))
    assert len(shards.scan_shards(tmp_path).train) == 1


@pytest.mark.parametrize(("name", "flip"), [("dvs_gesture", 0.0), ("nmnist", 0.0), ("cifar10_dvs", 0.5)])
def test_what_has_a_left_and_a_right_is_not_mirrored(name: str, flip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Samples(np.zeros((4, 2, 2, 8, 8), np.uint8), np.array([0, 1, 0, 1]))
    data = Dataset(Inputs(name, (2, 8, 8), False, ("a", "b")), part, part, "somewhere", "rule")
    monkeypatch.setattr(sources, "load_whole", lambda *_: data)
    tree: dict[str, Any] = {
        "data": {"name": name, "root": "x"},
        "augment": {"events": True},
        "model": {"in_channels": 2, "num_classes": 2},
    }
    source = open_source(Config.from_dict(tree))
    assert isinstance(source, EventSource)
    assert source.augment is not None
    assert source.augment.flip == flip
    tree["data"]["holdout"] = 0.25
    if name == "dvs_gesture":
        with pytest.raises(ConfigError, match="several samples of each recording, which would lie on both sides"):
            open_source(Config.from_dict(tree))
    else:
        assert open_source(Config.from_dict(tree)).holdout_size == 1
