"""`lbq convert`: the run folder of an ANN to one of a burst network, tested, deployed, trained on; and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lbq import engine
from lbq.config import Config
from lbq.convert import Fit, convert_run
from lbq.data.digits import load_digits
from lbq.neuron import BurstNeuron
from lbq.runs import run_folder
from lbq.training import job
from lbq.training.distributed import World
from tests.support.commands import Call
from tests.support.small_runs import Silent


@pytest.fixture(scope="module")
def ann_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "ann"
    settings = Config.from_dict(
        {
            "model": {"id": "resnet8w8", "timesteps": 1},
            "neuron": {"name": "relu"},
            "augment": {"shift": 1},
            "optim": {"lr": 0.1},
            "train": {"epochs": 4, "batch_size": 32},
        }
    )
    job.train(settings, folder, Silent(), device=torch.device("cpu"), world=World(), resume=False)
    return folder


def copy_of(run: Path, folder: Path, old: str = "", new: str = "") -> Path:
    """Its weights, and its configuration with `new` for `old`: without its result, which would name other ones."""
    folder.mkdir()
    (folder / "weights.safetensors").write_bytes((run / "weights.safetensors").read_bytes())
    (folder / "config.toml").write_text((run / "config.toml").read_text().replace(old, new))
    return folder


def test_a_run_is_converted_tested_deployed_and_trained_on(call: Call, tmp_path: Path, ann_run: Path) -> None:
    out = tmp_path / "snn"
    changes = ("neuron.n_max=7", "neuron.name=lbq", "model.timesteps=3")
    facts = call.json("convert", ann_run, "-o", out, *changes)
    assert facts["accuracy"] > facts["ann_accuracy"] - 5 > 80
    assert facts["from_sha256"] == run_folder.weights_checksum(ann_run)
    assert json.loads((out / "conversion.json").read_text())["layers"] == facts["layers"]
    config = run_folder.load_config(out)
    assert (config.neuron, config.model.timesteps) == ({"name": "lbq", "n_max": 7, "step": 0.4}, 3)
    net = run_folder.load(out)
    assert {n: pytest.approx(float(m.step.detach())) for n, m in net.named_modules() if isinstance(m, BurstNeuron)} == {
        n: layer["step"] for n, layer in facts["layers"].items()
    }
    assert call.json("eval", out)["accuracy"] == facts["accuracy"]
    assert call("deploy", out, "-o", tmp_path / "m.lbq")[0] == 0
    deployed = engine.load(tmp_path / "m.lbq").run(load_digits().test.images).predictions
    assert 100 * (deployed == load_digits().test.labels).mean() > facts["accuracy"] - 3
    for command in (["record", out], ["report", out, "-o", tmp_path / "r.html"]):
        assert f"{out} was converted from an ANN, not trained" in call.refused(*command)
    (tmp_path / "m.lbq").unlink()
    assert "holds no runs, no records" in call.refused("report", tmp_path, "-o", tmp_path / "r.html")
    weights = (out / "weights.safetensors").read_bytes()
    assert f"{out} holds a converted network: train from it with train.init_from={out}" in call.refused(
        "train", out / "config.toml", "--out", out, "--resume", "auto"
    )
    assert not (out / ".lock").exists()
    assert (out / "weights.safetensors").read_bytes() == weights
    further = ("train.epochs=1", f"train.init_from={out}", "optim.lr=0.001")
    trained = call.json("train", out / "config.toml", *further, "--out", tmp_path / "on")
    assert trained["accuracy"] > facts["accuracy"] - 5


def test_steps_are_chosen_from_images_as_they_are(
    tmp_path: Path, ann_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the ANN's training has shifted."""
    seen: list[Tensor] = []

    def watched(_net: nn.Module, _ann: nn.Module, images: Tensor) -> dict[str, Fit]:
        seen.append(images)
        return {}

    monkeypatch.setattr("lbq.convert.run.calibrate", watched)
    monkeypatch.setattr("lbq.convert.run.evaluate", lambda *_: 0.0)
    convert_run(ann_run, tmp_path / "snn", images=898)
    digits = load_digits()
    plain, inputs = {image.tobytes() for image in digits.train.images}, digits.inputs
    mean, std = (torch.tensor(v)[:, None, None] for v in (inputs.mean, inputs.std))
    pixels = ((seen[0] * std + mean) * inputs.scale).round().to(torch.uint8).numpy()
    assert len(pixels) == 898
    assert {image.tobytes() for image in pixels} <= plain


def test_both_are_tested_in_fp32_whatever_the_precision(
    tmp_path: Path, ann_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = copy_of(ann_run, tmp_path / "ann", 'precision = "fp32"', 'precision = "bf16"')
    used: list[str] = []

    def watched(*arguments: Any) -> float:
        used.append(arguments[3].precision)
        return 0.0

    monkeypatch.setattr("lbq.convert.run.evaluate", watched)
    convert_run(copied, tmp_path / "snn")
    assert used == ["fp32", "fp32"]
    assert run_folder.load_config(tmp_path / "snn").train.precision == "bf16"


def test_it_shows_the_steps_and_takes_only_anns_and_new_folders(call: Call, tmp_path: Path, ann_run: Path) -> None:
    code, text, err = call("convert", copy_of(ann_run, tmp_path / "ann"), "neuron.name=v3")
    assert code == 0
    assert "layer3.0.sn2" in text
    assert f"{tmp_path / 'ann-converted'}: test accuracy" in text
    assert "choosing steps from 256 training images" in err
    assert run_folder.load_config(tmp_path / "ann-converted").neuron == {"name": "v3"}
    made = tmp_path / "ann-converted"
    assert f"{made} is no ANN, its neurons are v3" in call.refused("convert", made, "-o", tmp_path / "again")
    assert f"{made} exists already" in call.refused("convert", tmp_path / "ann")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.epochs=3"], "train.epochs cannot be changed, the ANN is trained already"),
        (["neuron.nmax=3"], "neuron 'lbq' has no option 'nmax'; did you mean 'n_max'"),
        (["neuron.name=lif"], "LIF has no step to choose"),
        (["model.timesteps=0"], "model.timesteps must be"),
        (["--images", "1"], "images must be from 2 to the 1198"),
        (["--images", "5000"], "images must be from 2 to the 1198"),
        (["neuron"], "must have the form key=value"),
        (["neuron.step=0.3"], "neuron.step is what a conversion chooses"),
    ],
)
def test_mistakes_leave_no_folder(
    call: Call, tmp_path: Path, ann_run: Path, arguments: list[str], message: str
) -> None:
    code, out, err = call("convert", ann_run, "-o", tmp_path / "far" / "out", *arguments)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_an_ann_that_was_shown_images_twice_is_the_same(
    call: Call, tmp_path: Path, ann_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy_of(ann_run, tmp_path / "ann", "timesteps = 1", "timesteps = 2"))
    facts = [call.json("convert", run, "-o", tmp_path / name) for run, name in ((".", "a"), (ann_run, "b"))]
    assert facts[0]["layers"] == facts[1]["layers"]
    assert call("convert", ".")[0] == 0
    assert (tmp_path / "ann-converted" / "conversion.json").exists()
