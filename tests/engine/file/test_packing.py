"""Weights of 4 bits, two to a byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbq import engine
from lbq.engine import Network
from lbq.engine.file import artefact
from lbq.engine.file.packing import pack, packed_synapses, unpack
from lbq.engine.file.reading import Reader
from lbq.errors import ArtefactError
from tests.support.small_nets import deployed, pixels, same


@pytest.fixture(scope="module")
def net() -> Network:
    return deployed("resnet8w4", bits=4)


@given(st.lists(st.integers(-7, 7), min_size=1, max_size=40))
def test_unpacking_is_the_inverse(weights: list[int]) -> None:
    weight = np.array(weights, np.int8)
    packed = pack(weight)
    assert packed.dtype == np.uint8
    assert len(packed) == -(-len(weights) // 2)
    assert unpack(packed, weight.shape).tolist() == weights


def test_halves_lie_as_documented() -> None:
    assert pack(np.array([1, -1, 7], np.int8)).tolist() == [0xF1, 0x07]


def test_a_file_of_four_bits_gives_the_same_network(net: Network, tmp_path: Path) -> None:
    path = tmp_path / "four.lbq"
    size = engine.save(path, net)
    loaded = engine.load(path)
    assert loaded.verify() == 8
    x = pixels(3, 3, 8, 8, seed=3)
    assert same(net.run(x, "dense", trace=True), loaded.run(x, "bitplane", trace=True))
    hidden = sum(s.weight.size for layer in net.network.layers[1:] for s in layer.convs)
    eight = deployed("resnet8w4")
    assert engine.save(tmp_path / "eight.lbq", eight) - size == pytest.approx(
        hidden / 2, abs=2000
    )  # but for the headers
    again = tmp_path / "again.lbq"
    engine.save(again, loaded)
    assert again.read_bytes() == path.read_bytes()


def test_other_networks_are_written_as_before(net: Network) -> None:
    _, text = artefact.proved(deployed("resnet8w4").network)
    assert text["version"] == 1
    assert "packed" not in json.dumps(text["layers"])
    assert packed_synapses(deployed("resnet8w4", bits=5).network) == frozenset()
    _, text = artefact.proved(net.network)
    assert text["version"] == 2


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([4, 4, 3], "packed is '[4, 4, 3]', which is not possible"),
        ([4, 4, 3, 0], "packed is"),
        ([4, 4, 3, 2.0], "packed is"),
        ([4, 4, 3, 4], "must be uint8 [96], not uint8 [72]"),
        ([2**14, 2**14, 3, 3], "it may have 2^28 weights at most"),
        ([4, 2, 3, 6], "does not fit"),
    ],
)
def test_files_that_lie_about_shapes_are_refused(net: Network, shape: list[Any], message: str) -> None:
    tensors, text = artefact.proved(net.network)
    forged = json.loads(json.dumps(text))
    forged["layers"][1]["synapses"][0]["packed"] = shape
    with pytest.raises(ArtefactError) as error:
        Reader(tensors).network(forged)
    assert message in str(error.value)


def test_the_ninth_half_is_refused(net: Network) -> None:
    """-8 has no counterpart: bounds count on symmetric weights."""
    tensors, text = artefact.proved(net.network)
    name = text["layers"][1]["synapses"][0]["name"]
    forged = tensors[f"{name}/weight"].copy()
    forged[0] = 0x88
    with pytest.raises(ArtefactError, match="its weights must be symmetric around zero"):
        Reader({**tensors, f"{name}/weight": forged}).network(text)
    with pytest.raises(ArtefactError, match="wrong or missing: 'packed'"):
        Reader(tensors).network({**text, "version": 1})
