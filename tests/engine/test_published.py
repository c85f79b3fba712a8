"""Networks by name: where they are looked for, what a folder stands for, and what is refused."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lbq
from lbq import engine, export
from lbq.config import Config
from lbq.engine import published
from lbq.errors import ArtefactError
from tests.support.commands import Call
from tests.support.small_nets import deployed, pixels


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's own folder of networks, with one in it."""
    engine.save(tmp_path / "own" / "tiny.lbq", deployed().with_golden(pixels(2, 3, 8, 8)))
    monkeypatch.setenv("LBQ_MODELS", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own"


def test_a_name_stands_for_its_file(own: Path, call: Call) -> None:
    assert published.resolve("tiny") == own / "tiny.lbq"
    assert engine.load("tiny").verify() > 0
    assert published.resolve("cifar10_resnet20w128_t2_lbq").parent == published.CHECKOUT
    rows = call.json("models")
    accuracies = {row["name"]: row["test_accuracy"] for row in rows}
    assert rows[0]["name"] == "tiny"
    assert (accuracies["tiny"], accuracies["cifar10_resnet20w128_t2_lbq"]) == (None, 97.49)
    assert "tiny" in call.printed("models")
    assert "golden" in call.json("account", "tiny")["inputs"]
    assert call.json("export", "tiny", "-o", "out")["path"] == "out"


def test_a_file_or_folder_goes_before_a_name(own: Path, call: Call) -> None:
    folder = Path("tiny")
    folder.mkdir()
    os.link(own / "tiny.lbq", folder / "model.lbq")
    with pytest.raises(ArtefactError, match="as a folder for a hub it lacks config.json"):
        engine.load(folder)  # it may be a run folder
    (folder / "config.json").write_text("{}")
    assert published.resolve("tiny") == folder / "model.lbq"
    assert engine.load(folder).verify() > 0
    assert "golden" in call.json("account", "tiny")["inputs"]
    assert call.json("deploy", "tiny", "--timesteps", "1", "-o", "one.lbq")["timesteps"] == 1


def test_what_is_no_network_is_refused_in_one_line(own: Path, call: Call) -> None:
    Path("empty").mkdir()
    for given, words in (
        ("tinny", "neither a file nor a network that `lbq models` lists; did you mean 'tiny'?"),
        ("empty", "empty is not a file, and as a folder for a hub it lacks config.json: give a"),
        ("tiny.lbq", "tiny.lbq cannot be read: No such file"),
        ("a/tiny", "a/tiny cannot be read: No such file"),
    ):
        assert words in call.refused("run", given)
    with pytest.raises(ArtefactError, match="empty is not a file"):
        engine.load("empty")
    Path("empty/config.toml").touch()
    assert "deploy it first, `lbq deploy empty -o model.lbq`" in call.refused("run", "empty")
    Path("m ine").mkdir()
    Path("m ine/config.toml").touch()
    assert "deploy it first, `lbq deploy 'm ine' -o model.lbq`" in call.refused("run", "m ine")
    Path("empty/model.lbq").touch()
    assert "empty is a run folder, not a deployed network: give empty/model.lbq" in call.refused("run", "empty")


def test_what_is_no_path_or_no_network_is_named(tmp_path: Path) -> None:
    network = deployed("one-block", shape=(3, 8, 8))
    calls: list[Any] = [engine.load, partial(export.export, out=tmp_path / "c")]
    for call in calls:
        with pytest.raises(
            ValueError, match=r"^name_or_path must be a path, got Network: give a file, as lbq.engine.save"
        ):
            call(network)
    with pytest.raises(ValueError, match="^run must be a path, got int: a run folder is needed"):
        lbq.load(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^network must be what lbq.deploy or lbq.engine.load gives, got str"):
        engine.save(network, "x.lbq")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^path must be a path, got NoneType: give a TOML file"):
        Config.load(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='^changes must be a list of "key=value"'):
        Config.load(tmp_path / "x.toml", "train.epochs=3")


def test_nothing_is_listed_where_nothing_is(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr(published, "CHECKOUT", Path("nowhere/models"))
    assert published.names() == {}
    assert call.printed("models") == "no networks: name a folder of model files with LBQ_MODELS\n"


def test_a_folder_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("LBQ_MODELS", "nowhere")
    assert "LBQ_MODELS names nowhere, which is not a folder: give a folder" in call.refused("models")


def test_names_with_dots_and_files_that_cannot_be_read(own: Path, call: Call) -> None:
    (own / "tiny.v2.lbq").write_bytes((own / "tiny.lbq").read_bytes())
    (own / "broken.lbq").write_bytes(b"no network")
    (own / "README.md").write_text("## `tiny.lbq`\n\n| accuracy, integer | 9.8.7 % |\n")
    assert engine.load("tiny.v2").verify() > 0
    code, out, err = call("models")
    assert (code, "tiny.v2" in out) == (0, True)
    assert "broken: " in err
