"""The folder for a model hub: a card that a hub reads, the same integers, and the run's weights where they belong to it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import lbq
from lbq import engine
from lbq.config import Config
from lbq.deploy import deploy_run
from lbq.engine import published
from lbq.export.hub import card, facts_of, write_folder
from lbq.runs.build import build
from tests.support import small_runs
from tests.support.commands import Call

HEADLINE = "cifar10_resnet20w128_t2_lbq"


def front_matter(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---\n")[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that names a folder of this machine, and what was deployed from it."""
    folder = tmp_path_factory.mktemp("hub")
    config = Config.from_dict({"model": {"id": "resnet8w4"}, "data": {"root": "/a/folder/of/mine"}})
    small_runs.save_run(folder / "run", build(config), config)
    engine.save(folder / "digits.lbq", deploy_run(folder / "run", noise=True))
    return folder


def test_the_card_of_the_published_network(tmp_path: Path) -> None:
    path = published.resolve(HEADLINE)
    net = engine.load(path)
    text = card(facts_of(HEADLINE, path, net), net, published.card_of(path) or "", "apache-2.0", trained=False)
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    head = front_matter(tmp_path)
    assert (head["license"], head["library_name"]) == ("apache-2.0", "lbq")
    (metric,) = head["model-index"][0]["results"][0]["metrics"]
    assert metric["value"] == 97.49
    assert "](.." not in text
    assert "## Caveats" in text


def test_a_network_as_a_folder(trained: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    made = call.json("models", "export", trained / "digits.lbq", "-o", tmp_path / "hub", "--license", "mit")
    assert made["files"] == sorted(path.name for path in (tmp_path / "hub").iterdir())
    assert made["verified"] == 8
    data = (tmp_path / "hub/model.lbq").read_bytes()
    assert data == (trained / "digits.lbq").read_bytes()
    assert front_matter(tmp_path / "hub")["license"] == "mit"
    config = json.loads((tmp_path / "hub/config.json").read_text())
    assert config["sha256"] == hashlib.sha256(data).hexdigest()
    assert config["id2label"]["3"] == "3"
    again = ["models", "export", trained / "digits.lbq", "-o"]
    monkeypatch.chdir(tmp_path)
    shutil.copy(trained / "digits.lbq", tmp_path / "net.t1.lbq")
    monkeypatch.setenv("LBQ_MODELS", str(tmp_path))
    assert call.json("models", "export", "net.t1")["path"] == "net.t1"
    assert "exists already" in call.refused(*again, tmp_path / "hub")
    assert "no identifier" in call.refused(*again, tmp_path / "b", "--license", "a b")
    assert not (tmp_path / "b").exists()


def test_a_run_adds_its_weights_and_the_folder_loads_both_ways(trained: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "both"
    made = call.printed("models", "export", trained / "digits.lbq", "--run", trained / "run", "-o", out)
    assert "README.md, config.json, config.toml, model.lbq, weights.safetensors" in made
    assert (out / "weights.safetensors").read_bytes() == (trained / "run/weights.safetensors").read_bytes()
    assert "/a/folder" not in (out / "config.toml").read_text()
    assert engine.load(out).verify() > 0
    assert lbq.load(out).state_dict().keys() == lbq.load(trained / "run").state_dict().keys()
    assert "license" not in front_matter(out)


def test_another_run_is_refused(trained: Path, tmp_path: Path) -> None:
    config = Config.from_dict({"model": {"id": "resnet8w4"}, "seed": 1})
    small_runs.save_run(tmp_path / "other", build(config), config)
    for run, words in (
        (tmp_path / "other", "is not the run that the network was deployed from, its weights.safetensors differs"),
        (tmp_path / "nowhere", "cannot be read: No such file"),
    ):
        with pytest.raises(lbq.LbqError, match=words):
            write_folder(trained / "digits.lbq", tmp_path / "out", run)
    assert not (tmp_path / "out").exists()
