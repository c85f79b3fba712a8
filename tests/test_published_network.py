"""The networks under models/: what their card says of them is true. The records under results/: so are their hashes."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from lbq import engine
from lbq.config import Config
from lbq.counting.deployed import evaluate
from lbq.counting.inputs import open_data
from tests.support.paths import ROOT
from tests.support.reading import real

MODELS = ROOT / "models"
HEADLINE = MODELS / "cifar10_resnet20w128_t2_lbq.lbq"
RECORD = MODELS.parent / "results" / "cifar10_resnet20w128_t2_lbq_nd_sam_300ep_s0.json"


def test_they_are_the_files_that_the_card_names() -> None:
    card = (MODELS / "README.md").read_text(encoding="utf-8")
    files = sorted(MODELS.glob("*.lbq"))
    assert sum(path.stat().st_size for path in files) <= 20e6
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert set(re.findall(r"`([0-9a-f]{64})`", card)) == digests
    assert all(path.name in card for path in files)


def test_the_headline_network_gives_its_golden_levels() -> None:
    net = engine.load(HEADLINE)
    assert net.verify("auto") == 8
    assert net.network.classes[3] == "cat"
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert net.network.facts["weights_sha256"] == record["weights_sha256"]
    recipe = MODELS.parent / "configs" / "quick" / "cifar10_300epochs_sam.toml"
    assert Config.load(recipe).hash == record["config_hash"]


@pytest.mark.parametrize("name", ["digits_resnet8w16_t2_lbq_20ep_s0", "cifar10_resnet8w16_t2_lbq_8ep_s0"])
def test_the_small_networks_are_those_of_their_records(name: str) -> None:
    net = engine.load(MODELS / f"{name.rsplit('_', 2)[0]}.lbq")
    assert net.verify("auto") == 8
    record = json.loads((ROOT / "results" / "small" / f"{name}.json").read_text(encoding="utf-8"))
    assert net.network.facts["weights_sha256"] == record["weights_sha256"]


def test_the_headline_network_on_real_images() -> None:
    """Integers are the same everywhere: so is the number of images that it gets right, of the first 64."""
    folder = real("cifar10")
    net = engine.load(HEADLINE)
    found = evaluate(net, open_data(net.network, str(folder)), threads=2, limit=64)
    assert found.accuracy is not None
    assert round(found.accuracy * 64 / 100) == 59


def test_hashes_are_of_the_configurations_that_records_hold() -> None:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in (MODELS.parent / "results").rglob("*.json")]
    for value in records:
        if "config" in value:
            assert Config.from_dict(value["config"]).hash == value["config_hash"], value["weights_sha256"]
