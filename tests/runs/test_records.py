"""Records of runs, finished or not, and the command that writes them."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lbq import models
from lbq.cli.render import render_deployed
from lbq.config import Config
from lbq.errors import RunError
from lbq.neuron import NEURONS
from lbq.runs import records
from lbq.runs.build import build, outline
from tests.support.commands import Call
from tests.support.report_runs import runs_folder


def test_a_record_holds_what_a_reader_needs() -> None:
    folder = runs_folder() / "lbq-0"
    made = records.record_of(folder, "a note")
    result = json.loads((folder / "result.json").read_text())
    assert (made["format"], made["version"], made["name"]) == ("lbq record", 1, "LBQ")
    assert (made["dataset"], made["model"], made["variant"]) == ("digits", "resnet8w2", "lbq")
    assert (made["step"], made["surrogate"], made["n_max"]) == ("learned", "relsg_et", 5)
    assert made["split"] == "test where index % 3 == 2"
    assert made["static"] is True  # images, not event frames
    assert made["test_accuracy"] == result["accuracy"]
    assert made["config_hash"] == result["config_hash"]
    assert len(made["weights_sha256"]) == 64
    assert (made["versions"]["torch"], made["versions"]["numpy"]) == (torch.__version__, np.__version__)
    assert [e["epoch"] for e in made["log"]] == [1, 2]
    assert made["log"][0]["step_min"] <= made["log"][0]["step_max"]
    assert made["note"] == "a note"
    assert made["analysis"]["facts"]["weights_sha256"] == made["weights_sha256"]
    assert "note" not in records.record_of(runs_folder() / "lbq-1")


@pytest.mark.parametrize("command", [["eval"], ["deploy", "-o", "model.lbq"], ["record", "-o", "record.json"]])
def test_a_configuration_that_was_changed_after_the_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, command: list[str]
) -> None:
    """Else weights would run under settings that they were not trained under, and a record would claim these."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs_folder() / "lbq-0", "run")
    name, *options = command
    file = Path("run/config.toml")
    file.write_text(file.read_text().replace('root = ""', 'root = "moved"'))  # which changes no result
    assert call(name, "run", *options)[0] == 0
    file.write_text(file.read_text().replace("timesteps = 2", "timesteps = 3"))
    err = call.refused(name, "run", *options)
    assert err.startswith("lbq: run/config.toml was changed after the run: its hash is ")
    (Path("run") / "result.json").write_text(json.dumps({"config_hash": 5}))
    assert "result.json is damaged: config_hash" in call(name, "run", *options)[2]


@pytest.mark.parametrize(
    ("name", "data", "split"),
    [
        ("digits", {}, "test where index % 3 == 2, 0.1 held out of training"),
        ("cifar100", {}, "official 50,000 / 10,000, 0.1 held out of training"),
        ("mnist", {}, "official, 0.1 held out of training"),
        ("folder", {"images": "7 + 3"}, "the folder's own train and val, 7 + 3 images, 0.1 held out of training"),
        ("cifar10_dvs", {"split": "our list"}, "our list, 0.1 held out of training"),
    ],
)
def test_the_split_is_what_the_data_says(name: str, data: dict[str, str], split: str) -> None:
    tree = {"data": {"name": name, "holdout": 0.1, "root": "x"}}
    assert records.split_of(Config.from_dict(tree), data) == split


def test_what_was_held_out_is_recorded(tmp_path: Path) -> None:
    run = shutil.copytree(runs_folder() / "lbq-1", tmp_path / "run")
    assert "holdout_accuracy" not in records.record_of(run)
    assert not any("holdout_accuracy" in epoch for epoch in records.log_of(run))
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "holdout_accuracy": 62.5}))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = zip(lines, (None, 62.5), strict=True)  # not at every epoch
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps({**x, 'holdout_accuracy': y})}\n" for x, y in measured))
    made = records.record_of(run)
    assert made["holdout_accuracy"] == 62.5
    assert [epoch.get("holdout_accuracy") for epoch in made["log"]] == [None, 62.5]


def test_variants_say_what_they_are() -> None:
    ann = records.record_of(runs_folder() / "ann")
    assert (ann["variant"], ann["step"], ann["n_max"], ann["timesteps"]) == ("ann", "none", 0, 1)


@pytest.mark.parametrize(
    ("neuron", "variant"),
    [
        ({"name": "lbq"}, "lbq"),
        ({"name": "lbq", "learn_step": False, "surrogate": "box"}, "v1"),
        ({"name": "lbq", "learn_step": False}, "v2"),
        ({"name": "v1", "learn_step": True, "surrogate": "box_et"}, "v3"),
        ({"name": "lbq", "surrogate": "arctan"}, "burst_learned"),
        ({"name": "v2", "surrogate": "arctan"}, "burst_fixed"),
        ({"name": "burst_fixed"}, "burst_fixed"),
        ({"name": "ternary", "learn_step": True}, "ternary_learned"),
        ({"name": "qann"}, "qann"),
    ],
)
def test_a_variant_is_what_its_options_make_it(neuron: dict[str, Any], variant: str) -> None:
    tree = {"model": {"id": "resnet8w2", "timesteps": 1}, "neuron": neuron}
    assert records.describe(Config.from_dict(tree))["variant"] == variant


@pytest.mark.parametrize("name", ["resnet8w2", "vgg11w2", "careful"])
@pytest.mark.parametrize("neuron", sorted(NEURONS))
def test_a_network_is_described_without_its_weights(name: str, neuron: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def careful(make: Any, **sizes: Any) -> models.BurstNet:
        assert torch.ones(1).item() == 1  # it reads what it makes
        return models.create("resnet8w2", neuron=make, **sizes)

    monkeypatch.setitem(models.OWN, "careful", careful)
    config = Config.from_dict({"model": {"id": name}, "neuron": {"name": neuron}})
    description = records.describe(config)
    monkeypatch.setattr(records, "outline", build)
    assert records.describe(config) == description


@pytest.mark.parametrize("name", ["resnet19w64fc256", "vgg11w2"])
def test_an_outline_draws_nothing(name: str) -> None:
    """Which would take most of the time: every weight of a layer is 0."""
    net = outline(Config.from_dict({"model": {"id": name}}))
    assert not any(bool(p.any()) for p in net.parameters() if p.ndim > 1)


def test_the_command(call: Call, tmp_path: Path) -> None:
    run, out = str(runs_folder() / "lbq-1"), tmp_path / "deep" / "r.json"
    assert f"{out}: lbq on digits" in call.printed("record", run, "-o", str(out), "--note", "second seed")
    stored = json.loads(out.read_text())
    assert stored["note"] == "second seed"
    printed = call.printed("record", run)
    assert json.loads(printed)["weights_sha256"] == stored["weights_sha256"]
    assert not list(out.parent.glob(".*"))


def test_a_long_path_is_printed_in_one_piece(capsys: pytest.CaptureFixture[str], call: Call, tmp_path: Path) -> None:
    place = tmp_path / ("deep" * 40)
    made, page = place / "r.json", place / "r.md"
    printed = call.printed("record", str(runs_folder() / "lbq-1"), "-o", str(made))
    assert printed.startswith(f"{made}: lbq on digits")
    printed = call.printed("report", str(made), "--format", "md", "-o", str(page))
    assert printed.startswith(f"{page}: ")
    facts = {"bytes": 1, "weights": 2, "bits": 8, "layers": 3, "timesteps": 2, "verified": 4}
    render_deployed({**facts, "path": str(place / "model.lbq"), "levels": str(place / "levels")})
    printed = capsys.readouterr().out
    assert f"{place / 'model.lbq'}: " in printed
    assert printed.endswith(f" in {place / 'levels'}\n")


ZEROS = "0" * 64
FOLDER = "a folder of that name"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nowhere", {}, "nowhere does not exist: a run folder is needed"),
        ("half", {}, "is not finished, 1 of 2 epochs are: continue it with lbq train "),
        ("lbq-1", {"config.toml": None}, "config.toml is missing: give one that `lbq demo` or `lbq train` wrote"),
        ("lbq-1", {"result.json": '{"accuracy": 1.0}'}, "it was written by another version of lbq, or by hand"),
        ("lbq-1", {"result.json": "{"}, "result.json cannot be read as JSON"),
        ("lbq-1", {"result.json": "[]"}, "must hold a JSON object"),
        ("lbq-1", {"metrics.jsonl": "{}\n"}, "is not the log of a run, line 1 is no epoch (KeyError"),
        ("lbq-1", {"metrics.jsonl": "\xff\n"}, "metrics.jsonl is not text in UTF-8, from byte 0 on; restore the file"),
        ("lbq-1", {"weights.safetensors": FOLDER}, "cannot read "),
        ("lbq-1", {"weights.safetensors": None}, "has neither weights.safetensors nor weights.sha256"),
        (
            "lbq-0",
            {"weights.safetensors": None, "weights.sha256": ZEROS},
            "weights.sha256 is damaged or of another run",
        ),
        ("lbq-0", {"analysis/analysis.json": ZEROS}, "is of other weights"),
    ],
)
def test_bad_folders_get_one_line(
    call: Call, tmp_path: Path, name: str, changes: dict[str, str | None], message: str
) -> None:
    folder = tmp_path / name
    if (runs_folder() / name).exists():
        shutil.copytree(runs_folder() / name, folder)
    for file, text in changes.items():
        if text is None:
            (folder / file).unlink()
        elif text == FOLDER:
            (folder / file).unlink()
            (folder / file).mkdir()
        elif file == "analysis/analysis.json":
            stored = json.loads((folder / file).read_text())
            stored["facts"]["weights_sha256"] = text
            (folder / file).write_text(json.dumps(stored))
        else:
            (folder / file).write_bytes(text.encode("latin-1"))
    assert message in call.refused("record", str(folder))


def test_a_checksum_may_stand_for_weights(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs_folder() / "lbq-1", folder)
    whole = records.record_of(folder)
    (folder / "weights.safetensors").unlink()
    (folder / "weights.sha256").write_text(whole["weights_sha256"] + "  weights.safetensors\n")
    assert records.record_of(folder)["weights_sha256"] == whole["weights_sha256"]
    for text in (b"", b"weights.safetensors\n", b"\xff\n"):
        (folder / "weights.sha256").write_bytes(text)
        with pytest.raises(RunError, match=r"weights\.sha256 does not begin with a SHA-256"):
            records.record_of(folder)


@pytest.mark.parametrize("command", ["eval", "account", "analyze", "deploy", "record"])
def test_an_unfinished_run_is_named_with_what_continues_it(call: Call, tmp_path: Path, command: str) -> None:
    folder = tmp_path / "a run"
    shutil.copytree(runs_folder() / "lbq-1", folder)
    for name in ("weights.safetensors", "result.json"):
        (folder / name).unlink()
    out = ["-o", str(tmp_path / "out")] if command in ("analyze", "deploy", "record") else []
    error = call.refused(command, str(folder), *out)
    assert f"the run {folder} is not finished, 2 of 2 epochs are: continue it with lbq train " in error
    if command == "record":  # does it, and can the run be used then?
        remedy = shlex.split(error.partition("with lbq ")[2])
        assert call(*remedy)[0] == 0
        assert call(command, str(folder), *out)[0] == 0
    else:  # stopped in the first epoch
        (folder / "metrics.jsonl").unlink()
        assert "is not finished, 0 of 2 epochs are" in call(command, str(folder), *out)[2]


def test_an_unfinished_run_has_a_log_but_no_accuracy() -> None:
    record = records.read(runs_folder() / "half")
    assert record["unfinished"] is True
    assert record["epochs_done"] == 1  # the second line was cut off
    assert "test_accuracy" not in record
    assert records.read(runs_folder() / "lbq-0")["test_accuracy"] is not None


def test_a_log_of_another_training_is_no_record(tmp_path: Path) -> None:
    run = shutil.copytree(runs_folder() / "lbq-0", tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(lines[0] + "\n")
    with pytest.raises(
        RunError, match=r"metrics.jsonl ends with epoch 1 .* result.json says epoch 2 .* not of one training"
    ):
        records.record_of(run)
