"""Attention and gates as C and as ONNX give the engine's integers: of every transformer, and at the edge of what is proved."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lbq.deploy import deploy, graph_of
from lbq.engine import Network
from lbq.errors import GraphError
from lbq.export import nir
from lbq.export.c99 import Sources
from lbq.export.schedule import Schedule
from lbq.graph import INPUT, Gate, Pool, Synapse
from lbq.graph.integer import MEMBRANE_BOUND, IntegerLayer, IntegerNetwork, IntegerNeuron, membrane_bound
from lbq.models.transformer import Spikformer
from lbq.neuron import BurstNeuron
from tests.deploy.test_scores import block, normed
from tests.engine.test_attention import mixture
from tests.export.test_c99 import run_together, sanitizers
from tests.support.paths import ROOT
from tests.support.small_nets import MEAN, STD, deploy_warmed, deployed, eventful, eventful_transformer, pixels, warmed

SHAPE = (3, 8, 8)
EDGE = 64 * 255**3  # tokens times channels of a head is 64, or 8 with a factor of 8
NAMES = ["spikformer", "sew", "qkformer", "mixture", "tutorial", "scores", "beside"]


def tutorial() -> Network:
    """The block that docs/tutorials/attention.md writes."""
    page = (ROOT / "docs" / "tutorials" / "attention.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)\ntorch.manual_seed", page, re.S)
    names: dict[str, Any] = {"__name__": "tutorial"}
    exec(block, names)
    torch.manual_seed(0)
    return deploy_warmed(names["Digits"](), 1, 8, 8)


@pytest.fixture(scope="module")
def nets() -> dict[str, Network]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"width": 8, "num_classes": 3, "timesteps": 2, "in_channels": 3}
    spikformer = Spikformer(lambda _: BurstNeuron(), depth=1, heads=4, scale=16.0, **options)
    return {
        "spikformer": deploy(warmed(spikformer, *SHAPE), SHAPE, mean=MEAN, std=STD),
        "sew": deployed("spikformer1x8-sew", "ternary", SHAPE),
        "qkformer": eventful_transformer(),
        "mixture": deploy(mixture(), SHAPE, mean=MEAN, std=STD),
        "tutorial": tutorial(),
        "scores": deployed("spikformer1x64-scores", shape=(3, 16, 16)),
        "beside": deploy_warmed(block(normed, signed=True), *SHAPE),  # with a convolution and an identity beside them
    }


def inputs(net: Network) -> NDArray[np.uint8]:
    """Noise, and the brightest input."""
    shape = net.network.input_shape if net.network.static else (net.network.timesteps, *net.network.input_shape)
    x = np.concatenate([pixels(2, *shape, seed=3), np.full((1, *shape), 255, np.uint8)])
    return x if net.network.static else np.ascontiguousarray(x.swapaxes(0, 1)) // 32


def at_the_edge() -> IntegerNetwork:
    """Levels of pixels, 0 to 255, in products that end at the edge of what 2^30 leaves, in both orders; gates up to 255, of
    one position and of channels that share a factor; sums over channels. One image of 2 x 2 pixels."""

    def layer(
        name: str, shape: tuple[int, int, int], synapse: Synapse, thresholds: Any, signed: bool = False
    ) -> IntegerLayer:
        ladder = np.broadcast_to(np.array(thresholds, np.int32), (shape[0], np.shape(thresholds)[-1])).copy()
        reset = np.zeros(shape[0], np.int32)
        neuron = IntegerNeuron(ladder.shape[1], signed, ladder, reset, "once", None, True)
        return IntegerLayer(name, (synapse,), reset, shape, 0, neuron, np.ones(shape[0]))

    def conv(name: str, source: str, weight: Any, seen: Any, out: Any) -> Synapse:
        return Synapse(name, source, "conv", weight, seen, out, absorbed=True)

    def attention(name: str, heads: int, factor: int) -> IntegerLayer:
        weight = np.tile(np.array([factor, factor, -factor, -factor], np.int32), 4)
        synapse = Synapse(
            f"{name}.x", "a", "matmul", weight, wide, wide, absorbed=True, keys="a", values="a", heads=heads
        )
        return layer(name, wide, synapse, np.tile([[EDGE], [EDGE + 1]], (8, 1)), signed=True)

    image, wide = (1, 2, 2), (16, 2, 2)
    one, all_of_it = np.ones((16, 1, 1, 1), np.int8), np.ones((2, 1, 2, 2), np.int8)
    sums = Synapse(
        "h.sums",
        "a",
        "identity",
        np.ones(2, np.int32),
        (2, 2, 2),
        (2, 2, 2),
        (Pool("sum", (1, 1), (1, 1), channels=8),),
    )
    layers = (
        layer("a", wide, conv("a.x", INPUT, one, image, wide), np.arange(1, 256)),
        attention("rows", 8, 8),
        attention("scores", 1, 1),
        layer("few", wide, conv("few.x", INPUT, one, image, wide), 51 * np.arange(1, 6)),
        layer("place", (2, 1, 1), conv("place.x", INPUT, all_of_it, image, (2, 1, 1)), 20 * np.arange(1, 52)),
        layer("h", (2, 2, 2), sums, [[2040], [2041]]),
    )
    gates = Gate("one", "place", "few", wide), Gate("shared", "h", "few", wide)
    weights = np.random.default_rng(0).integers(-127, 128, (4, 3, 16, 2, 2), np.int8)
    names = ("rows", "scores", "one", "shared")
    read = tuple(conv(f"fc.{n}", n, w, wide, (3, 1, 1)) for n, w in zip(names, weights, strict=True))
    readout = IntegerLayer("readout", read, np.zeros(3, np.int64), (3, 1, 1), 0, None, np.ones(3))
    return IntegerNetwork(image, 1, True, layers, readout, scale=1.0, gates=gates)


@pytest.fixture(scope="module")
def edge() -> tuple[Network, NDArray[np.uint8]]:
    """With inputs that reach it, that miss it by one, and others."""
    net, x = Network(at_the_edge()), np.full((4, 1, 2, 2), 255, np.uint8)
    x[1, 0, 1, 1], x[2:] = 254, pixels(2, 1, 2, 2)
    for name in ("rows", "scores"):
        largest = {s.name: net.network.largest(s) for s in net.network[name].synapses}
        assert membrane_bound(net.network[name], largest, 1) == EDGE < MEMBRANE_BOUND < EDGE + 255**3
        levels = net.run(x[:1], "bitplane", trace=True).levels
        assert levels is not None
        assert (levels[name][0, 0].reshape(4, 4, 4) == np.array([1, 0, -1, 0])[None, :, None]).all()
    return net, x


def test_transformers_in_c_give_the_engines_logits(nets: dict[str, Network], tmp_path: Path) -> None:
    run_together(tmp_path, {name: (net, inputs(net)) for name, net in nets.items()}, "-O0")
    for net in nets.values():
        levels = net.run(inputs(net), trace=True).levels
        assert levels is not None
        assert all(levels[layer.name].any() for layer in net.network.layers if layer.matmuls)
    orders = {name: bool(Schedule(net.network).products) for name, net in nets.items()}
    assert {name for name, linear in orders.items() if linear} == {"spikformer", "mixture", "tutorial"}


def test_c_at_the_edge_of_the_bounds(
    nets: dict[str, Network], edge: tuple[Network, NDArray[np.uint8]], tmp_path: Path
) -> None:
    beside = nets["beside"], inputs(nets["beside"])
    run_together(tmp_path, {"edge": edge, "beside": beside}, *sanitizers())


def test_memory_holds_what_products_need(nets: dict[str, Network]) -> None:
    """K^T V of each timestep, the currents of one position, and no gate beside what it gates."""
    net = nets["tutorial"].network  # 16 channels in 2 heads
    (synapse,) = net["attention.reader"].matmuls
    for stepwise, rows, frames in ((False, 4, 2), (True, 3, 1)):
        plan = Schedule(net, stepwise=stepwise)
        assert plan.words == rows * 16 + frames * 16 * 8
        ((_, _, product),) = plan.products
        keys, target = plan.tensors[plan.tensor(synapse.keys)], plan.tensors[product]
        assert (keys.dies, target.dies) == (target.born, target.born + 1)
    plan = Schedule(at_the_edge())
    assert plan.tensors[plan.tensor("shared")].offset == plan.tensors[plan.tensor("few")].offset
    assert plan.tensors[plan.tensor("one")].offset != plan.tensors[plan.tensor("few")].offset
    plan = Schedule(nets["scores"].network)  # 2 heads, 16 tokens, 2 timesteps, a byte each
    assert plan.tensors[plan.tensor("blocks.1.sn_scores")].size == 2 * 2 * 16 * 16


def test_only_networks_with_products_have_their_code() -> None:
    """Sums over channels, which may stand alone, belong to it."""
    whole = at_the_edge()
    read = replace(whole.readout.synapses[0], source="h", weight=np.ones((3, 2, 2, 2), np.int8), in_shape=(2, 2, 2))
    layers, readout = (whole["a"], whole["h"]), replace(whole.readout, synapses=(read,))
    alone = replace(whole, layers=layers, gates=(), readout=readout)
    for network, multiplies in ((whole, 1), (alone, 1), (eventful().network, 0)):
        assert f"MODEL_PRODUCTS = {multiplies} }}" in Sources(network).files()["model_net.h"]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_in_onnx_give_the_engines_integers(nets: dict[str, Network], name: str) -> None:
    onnx = pytest.importorskip("tests.export.test_onnx")
    onnx.check(nets[name], inputs(nets[name]), "reference")


def test_onnx_at_the_edge_of_the_bounds(edge: tuple[Network, NDArray[np.uint8]]) -> None:
    """Beyond 2^24 matrices are int32."""
    onnx = pytest.importorskip("tests.export.test_onnx")
    onnx.check(*edge, "reference")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install onnx onnxruntime")
    onnx.check(*edge, "onnxruntime")


def test_nir_refuses_them_by_name() -> None:
    with pytest.raises(
        GraphError, match=r"multiplies levels with levels .* no form in NIR: .* model.lbq with lbq run, C or"
    ):
        nir.nir_graph(graph_of(mixture(), SHAPE), "subtract")
