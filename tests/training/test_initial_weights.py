"""Trainings that start from a deployed network or from a file of weights: nothing is lost, and mistakes are named."""

from __future__ import annotations

import hashlib
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lbq import engine, models
from lbq.batches.sources import ImageSource
from lbq.config import Config
from lbq.data.digits import load_digits
from lbq.deploy import deploy_run
from lbq.deploy.pipeline import deploy_trained
from lbq.errors import RunError, Stopped
from lbq.neuron.recorder import record_levels
from lbq.runs import records, run_folder
from lbq.training import initial_weights
from lbq.training.initial_weights import give_statistics
from lbq.training.trainer import Trainer
from tests.support.small_nets import pixels
from tests.support.small_runs import AtStep, Silent, config, run, use_few_digits

SHORT = ("train.epochs=1", "train.warmup_epochs=0", "train.ema=0.0", "model.dropout=0.0")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_digits(monkeypatch)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and its network on integers beside it."""
    folder = tmp_path_factory.mktemp("first") / "run"
    with pytest.MonkeyPatch.context() as patch:
        use_few_digits(patch)
        run(config(*SHORT, "train.epochs=2", "model.id=resnet8w4"), folder)
        engine.save(folder.with_name("model.lbq"), deploy_run(folder))
    return folder


def settings(start: Path | str, *changes: str) -> Config:
    return config(*SHORT, "model.id=resnet8w4", "neuron.name=lbq", "seed=8", f"train.init_from={start}", *changes)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# A deployed network
# ---------------------------------------------------------------------------------------------------------------------


def _source(settings: Config) -> ImageSource:
    return ImageSource(settings, load_digits(), torch.device("cpu"))


def started(settings: Config) -> Trainer:
    """A trainer on all digits, that stands where training begins."""
    made = Trainer(settings, _source(settings))
    start = initial_weights.read(settings, made.net, made.source.inputs)
    made.start_from(start.weights)
    give_statistics(made)
    return made


def levels_of(net: models.BurstNet, x: Tensor) -> dict[str, Any]:
    with torch.no_grad(), record_levels(net) as levels:
        net(x)
    return levels


def test_a_deployed_network_deploys_to_the_same_levels_and_trains_as_it_is_evaluated(first: Path) -> None:
    path = first.with_name("model.lbq")
    made = started(settings(path, "train.batch_size=64", "augment.shift=0"))
    x = pixels(300, 1, 8, 8) // 16
    file, again = engine.load(path), deploy_trained(made.net.eval(), made.config, made.source.inputs, None)
    theirs, ours = (network.run(x, trace=True).levels for network in (file, again))
    assert theirs is not None
    assert ours is not None
    assert np.concatenate([(ours[name] == level).ravel() for name, level in theirs.items()]).mean() > 0.999
    norm: Any = made.net.bn1
    torch.testing.assert_close(norm.weight, (norm.running_var + norm.eps).sqrt())
    images = made.source.train_samples(made.order(0).flatten())[0]  # those that were measured, in one batch
    evaluated, trained = levels_of(made.net.eval(), images), levels_of(made.net.train(), images)
    assert np.concatenate([(trained[name] == level).ravel() for name, level in evaluated.items()]).mean() > 0.999


def test_a_network_with_a_name_is_found_by_it(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(first.with_name("model.lbq"), tmp_path / "mine.lbq")
    monkeypatch.setenv("LBQ_MODELS", str(tmp_path))
    named, by_path = (started(settings(path)).net.state_dict() for path in (Path("mine"), tmp_path / "mine.lbq"))
    assert all(torch.equal(value, by_path[name]) for name, value in named.items())


def test_statistics_are_those_of_what_batchnorm_gets(first: Path) -> None:
    made = started(settings(first.with_name("model.lbq"), "train.batch_size=50"))
    batches = made.source.train_batches(list(made.order(0)[:, 0, 0]), 0, made.config.seed)
    net: Any = made.net
    with torch.no_grad():
        current = torch.cat([net.conv1(x) for x, _ in batches])
    torch.testing.assert_close(net.bn1.running_mean, current.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.bn1.running_var, current.var((0, 2, 3)), rtol=1e-3, atol=1e-5)


def test_a_run_starts_from_a_deployed_network_and_says_so(first: Path, tmp_path: Path) -> None:
    path, seen = first.with_name("model.lbq"), Silent()
    result = run(settings(path, "optim.lr=1e-30", "train.ema=0.5"), tmp_path / "tuned", seen)
    (start,) = seen.starts
    assert start[0] == str(path)
    assert {name.rpartition(".")[2] for name in start[2]} == {"eta"}
    assert any(f"{path} has no BatchNorm" in remark for remark in seen.plans[0].remarks)
    assert result["init_sha256"] == sha256(path)
    record = records.record_of(tmp_path / "tuned")
    assert record["init_sha256"] == sha256(path)
    assert record["config"]["train"]["init_from"] == str(path)
    theirs, ours = run_folder.read_result(first)["steps"], result["steps"]
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_run_that_began_does_without_its_deployed_network(first: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.lbq"
    shutil.copy(first.with_name("model.lbq"), path)
    changes = settings(path, "train.epochs=2")
    with pytest.raises(Stopped):
        run(changes, tmp_path / "tuned", AtStep(0, 1, lambda: signal.raise_signal(signal.SIGTERM)))
    began_with = sha256(path)
    path.unlink()
    assert run(changes, tmp_path / "tuned")["init_sha256"] == began_with
    with pytest.raises(RunError, match=r"train\.init_from: .*model\.lbq does not exist"):
        run(changes, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_one_epoch_at_a_small_rate_loses_nothing(first: Path, tmp_path: Path) -> None:
    """On all digits: a network that has learned them stays as good."""
    whole = load_digits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lbq.data.digits.load_digits", lambda: whole)
        good = ("train.batch_size=32", "optim.lr=0.1", "augment.shift=0")
        run(config(*SHORT, *good, "train.epochs=3", "model.id=resnet8w4"), tmp_path / "good")
        engine.save(tmp_path / "good.lbq", deploy_run(tmp_path / "good"))
        before = run_folder.read_result(tmp_path / "good")["accuracy"]
        after = run(settings(tmp_path / "good.lbq", *good, "optim.lr=1e-3"), tmp_path / "tuned")["accuracy"]
    assert before > 70
    assert after > before - 1


def test_classes_timesteps_and_sizes_of_your_own(first: Path, tmp_path: Path) -> None:
    path = first.with_name("model.lbq")
    changes = settings(path, "model.timesteps=3", "train.new_head=true")
    seen = Silent()
    run(changes, tmp_path / "three", seen)
    assert {"fc.weight", "fc.bias"} <= set(seen.starts[0][2])
    assert any("ran over 2 timesteps, this network runs over 3" in remark for remark in seen.plans[0].remarks)
    made = Trainer(settings(path), _source(settings(path)))
    other = made.source.inputs.__class__("digits", (1, 12, 12), True, ("a",) * 10, (0.5,), (0.2,), 16)
    start = initial_weights.read(made.config, made.net, other)
    assert [next(w for w in ("BatchNorm", "read", "mean", "classes") if w in note) for note in start.notes] == [
        "BatchNorm", "read", "mean", "classes",
    ]  # fmt: skip
    for inputs, message in {
        (False, 1, 255): r"reads images of 1 channels, and digits has event frames of 1 channels",
        (True, 3, 16): r"reads images of 1 channels, and digits has images of 3 channels",
        (True, 1, 255): r"reads pixels up to 16, those of digits go to 255",
    }.items():
        static, channels, scale = inputs
        wrong = other.__class__("digits", (channels, 8, 8), static, scale=scale)
        with pytest.raises(RunError, match=rf"train\.init_from: .*model\.lbq {message}"):
            initial_weights.read(made.config, made.net, wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    {
        "model.id=resnet8w2": r"layer 'conv1': its weight's shape .*; its network is resnet8w4: set model\.id",
        "neuron.n_max=3": r"layer 'sn1': its levels go to 5 in the file and to 3 here: set neuron\.n_max=5",
        "neuron.beta=0.25": r"layer 'sn1': its leak is 0\.5 in the file and 0\.25 here: set neuron\.beta=0\.5",
    }.items(),
)
def test_another_network_is_refused_before_a_folder_is_made(
    change: str, message: str, first: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=rf"train\.init_from: .*model\.lbq: {message}") as error:
        run(settings(first.with_name("model.lbq"), change), tmp_path / "new")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


def test_files_that_are_no_start(first: Path, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"PK")
    (tmp_path / "model.lbq").write_bytes(first.with_name("model.lbq").read_bytes()[:-9])
    (tmp_path / "weights.safetensors").write_bytes(b"nothing")
    for name, message in {
        "model.pt": r"model\.pt is none of a run folder, a model\.lbq or a weights\.safetensors: give one",
        "model.lbq": r"model\.lbq: it is damaged: its SHA-256 does not match",
        "weights.safetensors": r"weights\.safetensors cannot be read \(.*\): give a safetensors file",
    }.items():
        with pytest.raises(RunError, match=rf"^train\.init_from: .*{message}"):
            run(settings(tmp_path / name), tmp_path / "new")
        assert not (tmp_path / "new").exists()


# A file of weights
# ---------------------------------------------------------------------------------------------------------------------


def test_a_run_starts_from_a_file_of_weights(first: Path, tmp_path: Path) -> None:
    path = first / "weights.safetensors"
    seen = Silent()
    result = run(settings(path, "optim.lr=1e-30"), tmp_path / "tuned", seen)
    theirs, ours = load_file(path), run_folder.read_weights(tmp_path / "tuned")
    assert torch.allclose(theirs["layer1.0.conv1.weight"], ours["layer1.0.conv1.weight"])
    assert seen.starts == [(str(path), len(theirs), ())]
    assert result["init_sha256"] == sha256(path)
    counted = {k: v.half() if v.is_floating_point() else v for k, v in theirs.items() if not k.endswith("tracked")}
    save_file(counted, tmp_path / "half.safetensors")  # other programs have no counters, and other precisions
    run(settings(tmp_path / "half.safetensors"), tmp_path / "half")


def changed(weights: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    both = {**weights, **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: value for name, value in both.items() if value is not None}


WRONG: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "missing": ({"conv1__weight": None}, r"it lacks conv1\.weight: name the tensors as resnet8w4 does"),
    "unexpected": (
        {f"module__{i}": torch.zeros(1) for i in range(5)},
        r"it has, and the network has not, module\.0, module\.1, module\.2 and 2 more: name",
    ),
    "misshapen": (
        {"conv1__weight": torch.zeros(2, 1, 3, 3)},
        r"of another shape are conv1\.weight \(\[2, 1, 3, 3\] there, \[4, 1, 3, 3\] here\): give the id",
    ),
    "head": (
        {"fc__weight": torch.zeros(7, 16), "fc__bias": torch.zeros(7)},
        r"of another shape are fc\.weight \(\[7, 16\] there, \[10, 16\] here\).*: set train\.new_head=true to train a new",
    ),
    "infinite": ({"fc__bias": torch.full((10,), torch.inf)}, r"not finite are fc\.bias"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_tensors_that_do_not_fit_are_refused_by_name(kind: str, first: Path, tmp_path: Path) -> None:
    changes, message = WRONG[kind]
    path = tmp_path / "weights.safetensors"
    save_file(changed(load_file(first / "weights.safetensors"), **changes), path)
    with pytest.raises(RunError, match=rf"^train\.init_from: .*safetensors does not fit resnet8w4: {message}") as error:
        run(settings(path), tmp_path / "new")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()
    if kind == "head":
        seen = Silent()
        run(settings(path, "train.new_head=true"), tmp_path / "new", seen)
        assert seen.starts[0][2] == ("fc.weight", "fc.bias")


def test_constants_of_neurons_must_be_the_files(first: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"sn1\.beta is 0\.5 there and 0\.25 here, where it is not learned: set the neuron's"
    ):
        run(settings(first / "weights.safetensors", "neuron.beta=0.25"), tmp_path / "new")


def test_a_new_head_for_a_run_folder_too(first: Path, tmp_path: Path) -> None:
    seen = Silent()
    run(settings(first, "train.new_head=true"), tmp_path / "new", seen)
    assert seen.starts[0][2] == ("fc.weight", "fc.bias")
    run(config(*SHORT, "train.new_head=true"), tmp_path / "plain", seen)
    assert seen.plans[1].remarks == ("train.new_head has no effect without train.init_from",)
