"""Data, augmentation, the training loop and run folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import lbq
from lbq import models, runs, train
from lbq.config import Config
from lbq.data import Split, load_digits
from lbq.data.augment import random_shift
from lbq.errors import LbqError, RunError
from lbq.measure import measure, measure_run
from lbq.neuron import BurstNeuron

SMALL = {"model": {"id": "resnet8w4"}, "train": {"epochs": 2, "batch_size": 128, "warmup_epochs": 1}}


def small_split(split: Split, count: int = 256) -> Split:
    return Split(split.images[:count], split.labels[:count])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, models.BurstNet, Config]:
    config = Config.from_dict({**SMALL, "seed": 5})
    net = train.build(config)
    metrics = list(train.fit(net, small_split(load_digits()[0]), config))
    folder = tmp_path_factory.mktemp("runs") / "small"
    runs.save(folder, net, config, metrics, {"accuracy": 12.5})
    return folder, net, config


def test_digits_are_the_real_ones() -> None:
    train_split, test_split = load_digits()
    assert (len(train_split), len(test_split)) == (1198, 599)
    assert train_split.images.shape == (1198, 1, 8, 8)
    assert train_split.images.dtype == np.float32
    assert np.bincount(np.concatenate([train_split.labels, test_split.labels])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    assert train_split.images.mean() == pytest.approx(0, abs=1e-5)
    assert train_split.images.std() == pytest.approx(1, abs=1e-5)
    seen = {image.tobytes() for image in train_split.images}
    assert not any(image.tobytes() in seen for image in test_split.images)  # nothing is in both


def test_random_shift_moves_each_image_by_itself() -> None:
    x = torch.rand(64, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    out = random_shift(x, 1, torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1), mode="replicate")
    moves = set()
    for i in range(64):
        found = [
            (dy, dx)
            for dy in range(3)
            for dx in range(3)
            if torch.equal(out[i], padded[i, :, dy : dy + 8, dx : dx + 8])
        ]
        assert len(found) == 1
        moves.add(found[0])
    assert len(moves) == 9
    assert random_shift(x, 0, torch.Generator()) is x


def test_learning_rate_warms_up_and_decays_to_zero() -> None:
    rates = [train.learning_rate(i, 100, 10, 0.2) for i in range(101)]
    assert rates[0] == pytest.approx(0.02)
    assert rates[9] == rates[10] == pytest.approx(0.2)
    assert rates[55] == pytest.approx(0.1)
    assert rates[100] == pytest.approx(0)


def test_every_parameter_is_in_one_group_and_only_weights_decay() -> None:
    net = models.create("resnet8w4", neuron={"name": "lbq", "learn_beta": True, "learn_alpha": True})
    decayed, others = (group["params"] for group in train.parameter_groups(net, 0.1))
    assert isinstance(decayed, list)
    assert isinstance(others, list)
    assert len({id(p) for p in decayed + others}) == len(decayed + others) == len(list(net.parameters()))
    names = {id(p): name for name, p in net.named_parameters()}
    assert all(
        "conv" in names[id(p)] or names[id(p)] in ("fc.weight",) or "downsample.0" in names[id(p)] for p in decayed
    )
    assert {names[id(p)].rsplit(".", 1)[1] for p in others} == {
        "weight",
        "bias",
        "rho",
        "eta",
        "beta",
        "alpha",
    }
    assert all(
        "bn" in names[id(p)] or "downsample.1" in names[id(p)] for p in others if names[id(p)].endswith("weight")
    )


def test_same_seed_same_bytes(trained: tuple[Path, models.BurstNet, Config]) -> None:
    folder, _, config = trained
    before = torch.get_rng_state()
    again = train.build(config)
    records = list(train.fit(again, small_split(load_digits()[0]), config))
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random state is his own
    saved = load_file(folder / "weights.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in again.state_dict().items())
    other = train.build(Config.from_dict({**SMALL, "seed": 6}))
    assert not torch.equal(other.state_dict()["conv1.weight"], train.build(config).state_dict()["conv1.weight"])
    assert records[1].loss < records[0].loss
    assert set(records[0].steps) == set(records[0].tails) == set(train.neuron_steps(again))


def test_training_moves_steps_and_tails(trained: tuple[Path, models.BurstNet, Config]) -> None:
    _, net, _ = trained
    steps, tails = train.neuron_steps(net), train.neuron_tails(net)
    assert len(steps) == 7
    assert all(abs(step - 0.4) > 1e-6 for step in steps.values())
    assert all(abs(tail - 0.5) > 1e-6 for tail in tails.values())


def test_diverging_loss_is_named() -> None:
    config = Config.from_dict({**SMALL, "train": {"epochs": 3, "lr": 1e30, "warmup_epochs": 0}})
    with pytest.raises(LbqError, match=r"loss became (nan|inf) in epoch 1.*lower train.lr"):
        list(train.fit(train.build(config), small_split(load_digits()[0]), config))


def test_accuracy_restores_the_mode() -> None:
    net = models.create("resnet8w4", in_channels=1).train()
    split = small_split(load_digits()[1], 50)
    value = train.accuracy(net, split)
    assert 0 <= value <= 100
    assert net.training
    logits = train.predict(net, split.images, batch_size=7)
    assert value == pytest.approx(100 * (logits.argmax(1).numpy() == split.labels).mean())


def test_a_run_folder_loads_back(trained: tuple[Path, models.BurstNet, Config]) -> None:
    folder, net, config = trained
    loaded = lbq.load(folder)
    assert not loaded.training
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(loaded(x), net.eval()(x))
    result = json.loads((folder / "result.json").read_text())
    assert result["config_hash"] == config.hash
    assert result["environment"]["torch"] == torch.__version__
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]


def test_a_shared_tail_survives_saving(tmp_path: Path) -> None:
    config = Config.from_dict({"model": {"id": "resnet8w4", "share_tail": True}})
    net = train.build(config)
    first = next(m for m in net.modules() if isinstance(m, BurstNeuron))
    with torch.no_grad():
        first.eta.fill_(1.5)
    runs.save(tmp_path / "run", net, config, [], {})
    etas = [m.eta for m in lbq.load(tmp_path / "run").modules() if isinstance(m, BurstNeuron)]
    assert all(eta is etas[0] for eta in etas)
    assert etas[0].item() == 1.5


def test_broken_run_folders_are_named(trained: tuple[Path, models.BurstNet, Config], tmp_path: Path) -> None:
    folder, net, config = trained
    with pytest.raises(RunError, match="nowhere is not a run folder"):
        lbq.load(tmp_path / "nowhere")
    with pytest.raises(RunError, match="config.toml is missing"):
        lbq.load(tmp_path)
    broken = tmp_path / "broken"
    runs.save(broken, net, config, [], {})
    good = (folder / "weights.safetensors").read_bytes()
    (broken / "weights.safetensors").write_bytes(good[:1000])
    with pytest.raises(RunError, match="weights.safetensors cannot be read"):
        lbq.load(broken)
    tensors = load_file(folder / "weights.safetensors")
    del tensors["fc.bias"]
    save_file(tensors, broken / "weights.safetensors")
    with pytest.raises(RunError, match=r"does not belong to .*fc\.bias"):
        lbq.load(broken)
    (broken / "config.toml").write_text("[model]\nid = 'resnet8w4'\nwidth = 3\n")
    with pytest.raises(RunError, match=r"unknown key 'model\.width'"):
        lbq.load(broken)


def test_folders_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    with runs.new_folder(tmp_path / "deep" / "run") as partial:
        (partial / "file").write_text("x")
        assert not (tmp_path / "deep" / "run").exists()
    assert (tmp_path / "deep" / "run" / "file").read_text() == "x"
    with pytest.raises(RunError, match="exists already"), runs.new_folder(tmp_path / "deep" / "run"):
        pass
    with pytest.raises(ZeroDivisionError), runs.new_folder(tmp_path / "failed"):
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write under"), runs.new_folder(tmp_path / "file" / "run"):
        pass
    assert runs.next_free(tmp_path / "demo").name == "demo-001"
    (tmp_path / "demo-001").mkdir()
    assert runs.next_free(tmp_path / "demo").name == "demo-002"


def test_measuring_a_run(trained: tuple[Path, models.BurstNet, Config]) -> None:
    folder, net, _ = trained
    measured = measure_run(folder)
    test_split = load_digits()[1]
    assert measured.images == 599
    assert measured.accuracy == pytest.approx(train.accuracy(net, test_split))
    assert measured.exact is not None
    assert measured.rate is not None
    facts = measured.to_dict()
    assert facts["exact"]["total"]["bit_sparse"] < facts["rate"]["total"]["bit_sparse"]
    assert facts["exact"]["shifts"]["fused"] == 0 < facts["exact"]["shifts"]["explicit"]
    for name, histogram in measured.histograms.items():
        assert histogram.active_ratio == pytest.approx(measured.exact.layers[name].active)
    ann = measure(models.create("resnet8w4", in_channels=1, neuron="relu", timesteps=1), test_split)
    assert ann.exact is None
    assert ann.to_dict()["ann_energy_mj"] == pytest.approx(ann.to_dict()["valid_macs"] * 4.6e-9)
    net.train()
    measure(net, test_split)
    assert net.training  # measuring changes nothing
