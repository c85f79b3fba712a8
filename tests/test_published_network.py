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
LARGE = {  # by file: the record, the recipe, and how many of the first 64 test images it gets right
    "cifar10_resnet20w128_t2_lbq": ("cifar10_resnet20w128_t2_lbq_nd_sam_300ep_s0", "cifar10_300epochs_sam", 59),
    "cifar10_resnet20w128_t1_lbq": (
        "cifar10_resnet20w128_t1_lbq_nd_sam_above450_8bits_300ep_s0",
        "cifar10_300epochs_price_t1",
        61,
    ),
}


SMALL = (
    "digits_resnet8w16_t2_lbq_20ep_s0",
    "cifar10_resnet8w16_t2_lbq_8ep_s0",
    "cifar10_resnet14w32_t1_lbq_34ep_s0",
    "cifar10_spikformer2x64_t1_lbq_26ep_s0",
)


def test_they_are_the_files_that_the_card_names() -> None:
    card = (MODELS / "README.md").read_text(encoding="utf-8")
    files = sorted(MODELS.glob("*.lbq"))
    assert sum(path.stat().st_size for path in files) <= 40e6
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert set(re.findall(r"`([0-9a-f]{64})`", card)) == digests
    assert all(path.name in card for path in files)


@pytest.mark.parametrize("name", LARGE)
def test_the_large_networks_give_their_golden_levels(name: str) -> None:
    net = engine.load(MODELS / f"{name}.lbq")
    assert net.verify("auto") == 8
    assert (net.network.classes[3], net.network.facts["golden"]) == ("cat", "noise")
    of, recipe, _ = LARGE[name]
    record = json.loads((ROOT / "results" / f"{of}.json").read_text(encoding="utf-8"))
    assert net.network.facts["weights_sha256"] == record["weights_sha256"]
    assert Config.load(ROOT / "configs" / "quick" / f"{recipe}.toml").hash == record["config_hash"]


@pytest.mark.parametrize("name", SMALL)
def test_the_small_networks_are_those_of_their_records(name: str) -> None:
    net = engine.load(MODELS / f"{name.rsplit('_', 2)[0]}.lbq")
    assert net.verify("auto") == 8
    record = json.loads((ROOT / "results" / "small" / f"{name}.json").read_text(encoding="utf-8"))
    assert net.network.facts["weights_sha256"] == record["weights_sha256"]


@pytest.mark.parametrize("name", LARGE)
def test_the_large_networks_on_real_images(name: str) -> None:
    """Integers are the same everywhere: so is the number of images that they get right."""
    folder = real("cifar10")
    net = engine.load(MODELS / f"{name}.lbq")
    found = evaluate(net, open_data(net.network, str(folder)), threads=2, limit=64)
    assert found.accuracy is not None
    assert round(found.accuracy * 64 / 100) == LARGE[name][2]


def test_hashes_are_of_the_configurations_that_records_hold() -> None:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in (MODELS.parent / "results").rglob("*.json")]
    for value in records:
        if "config" in value:
            assert Config.from_dict(value["config"]).hash == value["config_hash"], value["weights_sha256"]
