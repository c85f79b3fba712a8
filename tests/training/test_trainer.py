"""Data, augmentation, the training loop and run folders."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lbq
from lbq import models
from lbq.batches.sources import open_source
from lbq.config import Config
from lbq.data import load_digits
from lbq.errors import LbqError, RunError
from lbq.measuring.measure import measure, measure_run
from lbq.neuron import BurstNeuron
from lbq.runs import run_folder
from lbq.runs.build import build
from lbq.training import job
from lbq.training import trainer as train
from lbq.training.position import EpochRecord
from tests.support import small_runs
from tests.support.paths import ROOT
from tests.support.reading import normalised_by
from tests.support.small_runs import Silent

SMALL: dict[str, Any] = {
    "model": {"id": "resnet8w4"},
    "augment": {"shift": 1},
    "train": {"epochs": 2, "batch_size": 128, "warmup_epochs": 1},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, models.BurstNet, Config]:
    config = Config.from_dict({**SMALL, "seed": 5})
    folder = tmp_path_factory.mktemp("runs") / "small"
    job.train(config, folder, Silent())
    return folder, run_folder.load(folder), config


def test_soft_targets_are_not_rounded() -> None:
    """Labels smoothed over many classes: their sum, and so the loss, would be 0.2 % too small in half precision."""
    made = small_runs.trainer(small_runs.config())
    logits = torch.randn(4, 1000).bfloat16()
    targets = torch.full((4, 1000), 1e-4)
    targets[:, 3] += 0.9
    expected = torch.nn.functional.cross_entropy(logits.double(), targets.double())
    torch.testing.assert_close(made.loss(logits, targets).double(), expected, rtol=1e-6, atol=0)


def test_an_epochs_loss_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = small_runs.trainer(small_runs.config())

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return logits.sum() * 0 * targets.sum() + made.position.epoch + made.position.batch

    monkeypatch.setattr(made, "loss", loss)
    records = list(made.fit())
    mean = (made.batches - 1) / 2
    assert [record.loss for record in records] == [mean, 1 + mean, 2 + mean]


def test_training_accuracy_is_that_of_what_was_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = small_runs.trainer(small_runs.config("train.epochs=2"))
    mixing, right = made.mixing, []

    def mix(x: Tensor, labels: Tensor, *where: int) -> tuple[Tensor, Tensor]:
        right.append(labels)
        return mixing(x, labels, *where)

    def look(_net: nn.Module, _inputs: Any, logits: Tensor) -> None:
        if made.net.training:
            right[-1] = right[-1] == logits.argmax(1)

    monkeypatch.setattr(made, "mixing", mix)
    made.net.register_forward_hook(look)
    accuracies = [record.train_accuracy for record in made.fit()]
    epochs = torch.cat(right).view(2, -1)
    assert accuracies == pytest.approx((100 * epochs.double().mean(1)).tolist())


def test_every_part_of_every_batch_is_mixed_by_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = small_runs.trainer(small_runs.config("train.accumulate=2", "train.epochs=2"))
    mixing, numbers = made.mixing, []

    def mix(x: Tensor, labels: Tensor, seed: int, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        numbers.append((epoch, number))
        return mixing(x, labels, seed, epoch, number)

    monkeypatch.setattr(made, "mixing", mix)
    list(made.fit())
    assert numbers == [(epoch, number) for epoch in range(2) for number in range(2 * made.batches)]


def test_digits_are_the_real_ones() -> None:
    data = load_digits()
    assert torch.from_numpy(data.train.images).stride() == (
        64,
        64,
        8,
        1,
    )  # no dimension of 1 that looks like channels last
    assert (len(data.train), len(data.test)) == (1198, 599)
    assert data.train.images.shape == (1198, 1, 8, 8)
    assert data.train.images.max() == 16
    assert np.bincount(np.concatenate([data.train.labels, data.test.labels])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    pixels = normalised_by(data.inputs, data.train.images)
    assert pixels.dtype == np.float32
    assert pixels.mean() == pytest.approx(0, abs=1e-5)
    assert pixels.std() == pytest.approx(1, abs=1e-5)
    seen = {image.tobytes() for image in data.train.images}
    assert not any(image.tobytes() in seen for image in data.test.images)  # nothing is in both


def test_source_gives_what_the_dataset_holds() -> None:
    config = Config.from_dict({"data": {"holdout": 0.25}, "train": {"batch_size": 100}})
    source = open_source(config)
    assert (source.train_size, source.holdout_size) == (898, 300)
    x = torch.cat([x for x, _ in source.eval_batches("test")])
    y = torch.cat([y for _, y in source.eval_batches("test")])
    data = load_digits()
    np.testing.assert_allclose(x.numpy(), normalised_by(data.inputs, data.test.images), rtol=1e-5, atol=1e-6)
    assert np.array_equal(y.numpy(), data.test.labels)
    halves = [torch.cat([y for _, y in source.eval_batches("test", rank, 2)]) for rank in (0, 1)]
    assert sorted(torch.cat(halves).tolist()) == sorted(y.tolist())
    # without augmentation, every training sample and no held-out one comes out once
    ((x, _),) = source.train_batches([torch.arange(898)], 0, 0)
    ((kept, _), *_rest) = source.eval_batches("holdout")
    trains = {row.numpy().tobytes() for row in x}
    assert not any(row.numpy().tobytes() in trains for row in kept)


@pytest.mark.parametrize(("samples", "fit", "reach"), [(1, 1, 1), (24, 2, 2), (25, 2, 3), (10_000, 4, 4)])
def test_statistics_are_measured_on_whole_batches(
    samples: int, fit: int, reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 samples, of which an epoch has 4: as many as fit into the number of samples, or as reach it."""
    monkeypatch.setattr(train, "NORM_SAMPLES", samples)
    made = small_runs.trainer(small_runs.config())
    for at_least, batches in ((False, fit), (True, reach)):
        numbers = made.norm_samples(at_least=at_least)
        assert len(numbers) == batches
        assert torch.equal(torch.cat(numbers), made.order(0).flatten()[: 12 * batches])


def test_same_seed_same_bytes(trained: tuple[Path, models.BurstNet, Config]) -> None:
    folder, _, config = trained
    trainer = train.Trainer(config, open_source(config))
    records = list(trainer.fit())
    saved = load_file(folder / "weights.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in trainer.net.state_dict().items())
    other = build(Config.from_dict({**SMALL, "seed": 6}))
    assert not torch.equal(other.state_dict()["conv1.weight"], build(config).state_dict()["conv1.weight"])
    before = torch.get_rng_state()
    build(config)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random state is his own
    assert records[1].loss < records[0].loss
    assert set(records[0].steps) == set(records[0].tails) == set(records[-1].active)
    assert [record.test_accuracy is None for record in records] == [True, False]  # the last epoch alone is tested


def test_the_tet_loss_by_hand() -> None:
    """Two timesteps, two samples, two classes: cross-entropy of each timestep's logits, and how far these are from 1."""
    trainer = small_runs.trainer(small_runs.config("train.loss=tet", "train.tet_weight=0.25"))
    a = math.log(3)  # logits (0, a) are probabilities 1/4 and 3/4
    logits = torch.tensor([[[0, a], [0, 0]], [[a, 0], [1, 1]]], dtype=torch.float64)
    entropy = (math.log(4 / 3) + math.log(2) + math.log(4) + math.log(2)) / 4
    distance = (1 + (a - 1) ** 2 + 1 + 1 + (a - 1) ** 2 + 1 + 0 + 0) / 8
    loss = trainer.loss(logits, torch.tensor([[0, 1], [1, 0]]))
    assert loss.item() == pytest.approx(0.75 * entropy + 0.25 * distance, rel=1e-12)


def test_an_epoch_that_was_interrupted_took_all_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def tick(trainer: train.Trainer) -> bool:
        nonlocal now
        now += 1.0
        return trainer.position.step == stop

    settings = small_runs.config("train.epochs=2", "train.warmup_epochs=0")  # of four steps
    stop, first = 7, small_runs.trainer(settings, between_steps=tick)
    assert [(r.seconds, r.samples_per_second) for r in first.fit()] == [(4.0, 12.0)]
    now += 1000.0  # in which nothing runs
    stop, second = 0, small_runs.trainer(settings, between_steps=tick)
    tensors, values = first.state()
    values["seconds"] -= 1000.0  # saved at once
    now += 1000.0
    second.restore(tensors, values)
    assert [(r.seconds, r.samples_per_second) for r in second.fit()] == [(4.0, 12.0)]


def test_every_epoch_has_an_order_of_its_own() -> None:
    trainer = small_runs.trainer(small_runs.config("model.dropout=0", "train.ema=0.0"))
    right, read = trainer.source.train_batches, []

    def batches(chosen: Sequence[Tensor], epoch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        read.append(torch.cat(list(chosen)).tolist())
        return right(chosen, epoch, seed)

    trainer.source.train_batches = batches  # type: ignore[method-assign, assignment]
    assert [record.epoch for record in trainer.fit()] == [1, 2, 3]
    assert [len(set(order)) for order in read] == [48, 48, 48]  # four batches of twelve, none of the 50 samples twice
    for one, other in ((0, 1), (0, 2), (1, 2)):
        # two independent orders agree at one place on the average, and at ten hardly ever
        assert sum(a == b for a, b in zip(read[one], read[other], strict=True)) < 10


def test_plain_epochs_end_a_run_that_was_trained_alike_until_then() -> None:
    strong = ("augment.cutout=4", "augment.mixup=0.5", "train.ema=0.5")

    def logged(*changes: str) -> list[EpochRecord]:
        return list(small_runs.trainer(small_runs.config(*strong, *changes)).fit())

    whole, ends = logged(), logged("augment.plain_epochs=1")
    assert [r.loss for r in whole[:2]] == [r.loss for r in ends[:2]]
    assert whole[2].loss != ends[2].loss


def test_averaged_weights_are_measured_on_images_like_the_last_ones() -> None:
    """BatchNorm's statistics of an average are those of plain images once epochs are plain."""
    trainer = small_runs.trainer(small_runs.config("augment.cutout=6", "augment.plain_epochs=1"))
    right, zeros = trainer.source.train_batches, []

    def batches(chosen: Sequence[Tensor], epoch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        made = list(right(chosen, epoch, seed))
        zeros.append(torch.cat([x for x, _ in made]).eq(0).float().mean().item())
        return iter(made)

    trainer.source.train_batches = batches  # type: ignore[method-assign, assignment]
    list(trainer.fit())
    trained, measured = zeros[0::2], zeros[1::2]  # of three epochs each
    assert min(trained[:2] + measured[:2]) > max(trained[2], measured[2])


def test_tensorboard_is_asked_for_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it was not installed, or could not be imported
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    config = Config.from_dict({**SMALL, "train": {"epochs": 1, "tensorboard": True}})
    with pytest.raises(LbqError, match=r"needs the package tensorboard \(.*\): pip install"):
        job.train(config, tmp_path / "run", Silent())
    assert not (tmp_path / "run").exists()


def test_a_shared_tail_survives_saving(tmp_path: Path) -> None:
    config = Config.from_dict({"model": {"id": "resnet8w4", "share_tail": True}})
    net = build(config)
    first = next(m for m in net.modules() if isinstance(m, BurstNeuron))
    with torch.no_grad():
        first.eta.fill_(1.5)
    small_runs.save_run(tmp_path / "run", net, config)
    loaded = lbq.load(tmp_path / "run")
    assert not loaded.training
    etas = [m.eta for m in loaded.modules() if isinstance(m, BurstNeuron)]
    assert all(eta is etas[0] for eta in etas)
    assert etas[0].item() == 1.5


def test_broken_run_folders_are_named(trained: tuple[Path, models.BurstNet, Config], tmp_path: Path) -> None:
    folder, net, config = trained
    with pytest.raises(RunError, match="nowhere does not exist"):
        lbq.load(tmp_path / "nowhere")
    with pytest.raises(RunError, match="is not a run folder, config.toml is missing: give one"):
        lbq.load(tmp_path)
    with pytest.raises(RunError, match="is a deployed network, not a run folder: load it with lbq.engine.load"):
        lbq.load(ROOT / "models/digits_resnet8w16_t2_lbq.lbq")
    broken = tmp_path / "broken"
    small_runs.save_run(broken, net, config)
    good = (folder / "weights.safetensors").read_bytes()
    (broken / "weights.safetensors").write_bytes(good[:1000])
    with pytest.raises(RunError, match="weights.safetensors cannot be read"):
        lbq.load(broken)
    (broken / "weights.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(RunError, match=r"weights.safetensors is damaged or of another run: SHA-256 .*restore the file"):
        lbq.load(broken)
    (broken / "result.json").unlink()  # which says whose weights they are
    tensors = load_file(folder / "weights.safetensors")
    del tensors["fc.bias"]
    save_file(tensors, broken / "weights.safetensors")
    with pytest.raises(RunError, match=r"does not belong to .*fc\.bias"):
        lbq.load(broken)
    (broken / "config.toml").write_text("[model]\nid = 'resnet8w4'\nwidth = 3\n")
    with pytest.raises(RunError, match=r"unknown key 'model\.width'"):
        lbq.load(broken)


def test_folders_are_numbered(tmp_path: Path) -> None:
    assert run_folder.next_free(tmp_path / "demo").name == "demo-001"
    (tmp_path / "demo-001").mkdir()
    assert run_folder.next_free(tmp_path / "demo").name == "demo-002"


def test_measuring_a_run(trained: tuple[Path, models.BurstNet, Config]) -> None:
    folder, net, config = trained
    measured = measure_run(folder)
    assert measured.images == 599
    assert measured.accuracy == pytest.approx(json.loads((folder / "result.json").read_text())["accuracy"])
    assert measured.exact is not None
    assert measured.rate is not None
    facts = measured.to_dict()
    assert facts["exact"]["total"]["bit_sparse"] < facts["rate"]["total"]["bit_sparse"]
    assert facts["exact"]["shifts"]["fused"] == 0 < facts["exact"]["shifts"]["explicit"]
    for name, histogram in measured.histograms.items():
        assert histogram.active_ratio == pytest.approx(measured.exact.layers[name].active)
    source = open_source(config)
    ann = measure(models.create("resnet8w4", in_channels=1, neuron="relu", timesteps=1), source)
    assert ann.exact is None
    assert ann.to_dict()["ann_energy_mj"] == pytest.approx(ann.to_dict()["valid_macs"] * 4.6e-9)
    net.train()
    measure(net, source)
    assert net.training  # measuring changes nothing
    net.eval()
