"""Products of levels with levels: every engine gives the same integers, bounds are proved, files are not trusted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lbq import engine
from lbq.deploy import absorb, deploy, lower
from lbq.engine import Network
from lbq.engine.attention import dense_products, gate_counts, gate_levels, multiply
from lbq.engine.cuda import plain
from lbq.engine.file import artefact
from lbq.engine.file.reading import Reader
from lbq.engine.products import GateStep, ProductStep
from lbq.errors import ArtefactError, GraphError
from lbq.graph import Synapse
from lbq.graph.integer import MEMBRANE_BOUND, largest_read, synapse_bound
from lbq.graph.levels import gated, synapse_product
from lbq.graph.quantise import quantise
from lbq.models import attention, fire, over_time
from lbq.models.transformer import QKFormer
from lbq.neuron import BurstNeuron, Ternary
from tests.support.products import check_native
from tests.support.reading import memory_under
from tests.support.small_nets import MEAN, STD, Functional, deployed, normalised, pixels, small, warmed

Ints = np.ndarray[Any, Any]


def both(m: Any, x: Tensor) -> Tensor:
    """Attention of signed levels beside a convolution, an identity and a static image; a gate of a gate behind it."""
    y = m.sn(over_time(x, m.conv, timesteps=2))
    q, k, v = m.q(over_time(y, m.to_q)), m.k(over_time(y, m.to_k)), m.v(over_time(y, m.to_v))
    z = over_time(y, m.beside) + attention.attend(q, k, v, 2, 3.0) + y + over_time(x, m.skip, timesteps=2)
    z = fire(z := m.out(z), m.to_out, m.norm, m.last, residual=k)
    z = attention.gate(m.factor(attention.head_sums(z, 2, 0.3)), z) * q
    return m.fc(z.mean((-2, -1))).mean(0)


def mixture() -> nn.Module:
    torch.manual_seed(3)
    convs = {name: nn.Conv2d(4, 4, 1) for name in ("to_q", "to_k", "to_v", "beside", "to_out")}
    neurons = {name: BurstNeuron(3) for name in ("sn", "q", "v", "out", "last")}
    stem = {name: nn.Conv2d(3, 4, 2, 2) for name in ("conv", "skip")}
    others = {"k": Ternary(), "factor": BurstNeuron(5), "norm": nn.BatchNorm2d(4), "fc": nn.Linear(4, 3)}
    return warmed(Functional(both, 2, **stem, **convs, **neurons, **others), 3, 8, 8)


@pytest.fixture(scope="module")
def nets() -> dict[str, Network]:
    torch.manual_seed(0)
    qkformer = QKFormer(lambda _: BurstNeuron(), depth=3, width=32, heads=4, num_classes=5, timesteps=2, in_channels=3)
    return {
        "spikformer": deployed("spikformer1x16", shape=(3, 16, 16)),
        "qkformer": deploy(warmed(qkformer, 3, 8, 8), (3, 8, 8), mean=MEAN, std=STD),
        "mixture": deploy(mixture(), (3, 8, 8), mean=MEAN, std=STD),
    }


@pytest.mark.parametrize("name", ["spikformer", "qkformer", "mixture"])
def test_all_engines_are_equal(nets: dict[str, Network], name: str, tmp_path: Path) -> None:
    engine.save(tmp_path / "net.lbq", nets[name])
    net = engine.load(tmp_path / "net.lbq")
    x = pixels(5, *net.network.input_shape)
    expected = net.run(x, "dense", trace=True)
    assert expected.levels is not None
    moved = [layer.name for layer in net.network.layers if layer.matmuls or "attention" in layer.name]
    assert any(expected.levels[n].any() for n in moved)
    ways = [net.run(x, way, trace=True, threads=2) for way in ("bitplane", "auto", "auto")]
    ways += [net.on_device("cpu").run(x, trace=True)]
    for out in ways:
        assert out.levels is not None
        np.testing.assert_array_equal(out.logits, expected.logits)
        for layer, levels in expected.levels.items():
            np.testing.assert_array_equal(out.levels[layer], levels, err_msg=layer)
    assert net.verify("bitplane") == 8
    for gate in net.network.gates:
        assert ways[0].counts[gate.name].additions > 0
        assert ways[0].counts[gate.name].formations > 0  # of both operands
    assert {n: c.products for n, c in expected.counts.items()} == {n: c.products for n, c in ways[-1].counts.items()}


@pytest.mark.parametrize(
    ("id", "neuron"), [("spikformer1x16-sew", "ternary"), ("qkformer3x32-membrane", "lbq"), ("mixture", "")]
)
def test_absorbed_levels_are_the_trainings(id: str, neuron: str) -> None:
    """At every layer and timestep, in float64; integers with 16-bit weights differ nearly nowhere."""
    from lbq.deploy.float_execution import execute
    from lbq.neuron.recorder import record_levels

    shape = (3, 8, 8)
    net = mixture() if id == "mixture" else small(id, neuron, shape)
    x = pixels(4, *shape, seed=7)
    with torch.no_grad(), record_levels(net) as levels:
        logits = net(normalised(x)).numpy()
    result = execute(absorb(lower(net, shape)), normalised(x).numpy())
    clear = result.ties == 0
    assert clear.any()
    for name, level in result.levels.items():
        np.testing.assert_array_equal(levels[name].reshape(level.shape)[:, clear], level[:, clear], err_msg=name)
    np.testing.assert_allclose(logits[clear], result.logits[clear], rtol=1e-9, atol=1e-9)
    out = deploy(net, shape, mean=MEAN, std=STD, bits=16).run(x, "dense", trace=True)
    assert out.levels is not None
    same = [(out.levels[name] == level).mean() for name, level in result.levels.items()]
    assert np.mean(same) > 0.97


# One product
# ---------------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    sides=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    heads=st.integers(1, 3),
    width=st.sampled_from([1, 2, 5, 33, 65]),
    highest=st.sampled_from([1, 5, 127]),
    signs=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_every_way_to_a_product_is_the_same(
    sides: Any, heads: int, width: int, highest: int, signs: Any, seed: int
) -> None:
    rng, shape = np.random.default_rng(seed), (heads * width, *sides)
    q, k, v = (
        rng.integers(-highest if signed else 0, highest + 1, (2, *shape)).astype(np.int8 if signed else np.uint8)
        for signed in signs
    )
    synapse = Synapse("a", "q", "matmul", np.ones(shape[0]), shape, shape, keys="k", values="v", heads=heads)
    tokens = sides[0] * sides[1]
    expected = np.zeros((2, shape[0], tokens), np.int64)
    wide = [x.astype(np.int64).reshape(2, shape[0], tokens) for x in (q, k, v)]
    for h in range(heads):
        a, b, c = (x[:, h * width : (h + 1) * width] for x in wide)
        expected[:, h * width : (h + 1) * width] = np.einsum("bdn,bdm,bem->ben", a, b, c)
    expected = expected.reshape(2, *shape)
    np.testing.assert_array_equal(synapse_product(synapse, [x.astype(np.int64) for x in (q, k, v)]), expected)
    q_last, k_last, v_last = [x.transpose(0, 2, 3, 1).copy() for x in (q, k, v)]
    largest = largest_read(synapse, dict.fromkeys("qkv", highest))
    for planes in (True, False):
        out, counts = multiply(synapse, (q_last, k_last, v_last), largest, planes)
        np.testing.assert_array_equal(out.transpose(0, 3, 1, 2), expected)
        check_native(ProductStep(synapse, (q_last, k_last, v_last), planes), out, counts)
        assert (counts.products, counts.ands) == ((0, counts.popcounts) if planes else (2 * dense_products(synapse), 0))
    assert synapse.linear == (width < tokens)
    queries, keys, values = [torch.from_numpy(x.astype(np.int32)) for x in (q, k, v)]
    np.testing.assert_array_equal(plain.attend(synapse, queries, keys, values, torch.float64).numpy(), expected)
    factor = q[:, :: width if width > 1 else 1][:, :heads]
    gate = gated(factor.astype(np.int64), k.astype(np.int64))
    for channel in range(shape[0]):
        np.testing.assert_array_equal(gate[:, channel], factor[:, channel // width].astype(np.int64) * k[:, channel])
    np.testing.assert_array_equal(plain.gated(*(torch.from_numpy(x.astype(np.int32)) for x in (factor, k))), gate)
    if highest < 6:
        one, other = (x.transpose(0, 2, 3, 1) for x in (factor, k))
        levels = gate_levels(one, other, signed=signs[0] or signs[1])
        np.testing.assert_array_equal(levels.transpose(0, 3, 1, 2), gate)
        for planes, place in itertools.product((True, False), (slice(None), slice(1))):
            some = np.ascontiguousarray(one[:, place, place])  # one for each position, or for all
            step = GateStep(some, other.copy(), signs[0] or signs[1], planes)
            check_native(step, gate_levels(some, other, signs[0] or signs[1]), gate_counts(some, other, planes))


@pytest.mark.parametrize(("depth", "side"), [(3, 5), (70, 4)])
def test_scores_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch, depth: int, side: int) -> None:
    """Also where an operand is zero, and where blocks do not divide the queries. Counts are the same too."""
    rng, shape = np.random.default_rng(0), (2 * depth, side, side)
    synapse = Synapse("a", "q", "matmul", np.ones(shape[0]), shape, shape, keys="k", values="v", heads=2)
    q, k, v = rng.integers(-5, 6, (3, 2, side, side, shape[0])).astype(np.int8)
    q[1] = 0
    whole, counts = multiply(synapse, (q, k, v), 2**20, True)
    np.testing.assert_array_equal(whole, multiply(synapse, (q, k, v), 2**20, False)[0])
    for scores in (1, 7 * 2 * side**2 * -(-depth // 64)):
        monkeypatch.setattr("lbq.engine.attention.SCORES_AT_A_TIME", scores)
        some, counted = multiply(synapse, (q, k, v), 2**20, True)
        np.testing.assert_array_equal(some, whole)
        assert counted == counts


def test_memory_does_not_grow_with_the_square_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 2304^2 scores of this image take 42 MB, as int64."""
    monkeypatch.setattr("lbq.engine.attention.SCORES_AT_A_TIME", 2**16)
    synapse = Synapse("a", "q", "matmul", np.ones(1), (1, 48, 48), (1, 48, 48), keys="k", values="v", heads=1)
    levels = np.ones((1, 48, 48, 1), np.uint8)
    with memory_under(4 << 20):
        assert (multiply(synapse, (levels, levels, levels), 2304, True)[0] == 2304).all()
        wide = levels.astype(np.int64).reshape(1, 1, 48, 48)
        assert (synapse_product(synapse, [wide] * 3) == 2304).all()


def test_products_beyond_float64_stay_exact() -> None:
    odd = np.full((1, 1, 1, 3), 2**19 + 1, np.int64)
    synapse = Synapse("a", "q", "matmul", np.ones(1), (1, 1, 3), (1, 1, 3), keys="k", values="v")
    assert (synapse_product(synapse, [odd] * 3) == 3 * (2**19 + 1) ** 3).all()


def squared(n_max: int) -> Network:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.sn(over_time(x, m.conv, timesteps=1))
        return m.fc((y * y).mean((-2, -1))).mean(0)

    net = Functional(forward, 1, conv=nn.Conv2d(3, 4, 4), sn=BurstNeuron(n_max), fc=nn.Linear(4, 3))
    return deploy(net, (3, 8, 8), scale=255)


# Bounds
# ---------------------------------------------------------------------------------------------------------------------


def test_bounds_are_reached_and_not_exceeded() -> None:
    """12 heads of 32 channels, 64 tokens, levels up to 5: 800 for a score, 256,000 for a current."""
    shape = (12 * 32, 8, 8)
    synapse = Synapse("a", "q", "matmul", np.ones(384, np.int32), shape, shape, keys="k", values="v", heads=12)
    largest = largest_read(synapse, dict.fromkeys("qkv", 5))
    assert (32 * 5 * 5, largest) == (800, 256_000)
    full = np.full((1, 8, 8, 384), 5, np.uint8)
    for planes in (True, False):
        assert (multiply(synapse, (full, full, full), largest, planes)[0] == largest).all()
    assert (synapse_bound(synapse, largest) == largest).all()


def test_constants_take_the_units_of_the_layer(nets: dict[str, Network]) -> None:
    """Products alone: the unit is their factor, so the constant is 2^f. Beside weights it is round(s 2^f / q_c)."""
    layer = nets["spikformer"].network["blocks.1.sn_attention"]
    (synapse,) = layer.matmuls
    assert (synapse.weight == 2**layer.fraction).all()
    graph = absorb(lower(mixture(), (3, 8, 8)))
    (real,) = (s for s in graph["out"].synapses if s.kind == "matmul")
    beside = nets["mixture"].network["out"]
    np.testing.assert_array_equal(beside.matmuls[0].weight, np.rint(real.weight * 2**beside.fraction / beside.unit))
    for net in nets.values():
        text = artefact.proved(net.network)[1]
        assert all(value["bound"] < MEMBRANE_BOUND for value in text["layers"] if "bound" in value)
        assert text["version"] == 2


def test_a_dead_channel_takes_no_precision_from_others() -> None:
    """A BatchNorm behind a product may scale a channel to nothing, and turn its sign."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.sn(over_time(x, m.conv, timesteps=2))
        return m.fc(m.out(over_time(attention.attend(y, y, y, 1, 1.0), m.norm)).mean((-2, -1))).mean(0)

    layers = {"conv": nn.Conv2d(3, 4, 4), "sn": BurstNeuron(), "norm": nn.BatchNorm2d(4), "out": BurstNeuron()}
    net: Any = warmed(Functional(forward, 2, **layers, fc=nn.Linear(4, 3)), 3, 8, 8)
    whole = quantise(absorb(lower(net, (3, 8, 8))))["out"].fraction
    with torch.no_grad():
        net.norm.weight.copy_(torch.tensor([1.0, -1.0, 1e-12, 0.0]))
        net.norm.bias.copy_(torch.tensor([0.0, 0.1, 3.0, -2.0]))
    layer = quantise(absorb(lower(net, (3, 8, 8))))["out"]
    assert layer.fraction >= whole - 1
    assert layer.matmuls[0].weight.tolist() == [2**layer.fraction, -(2**layer.fraction), 0, 0]
    x = pixels(3, 3, 8, 8)
    out = deploy(net, (3, 8, 8), mean=MEAN, std=STD)
    np.testing.assert_array_equal(out.run(x, "bitplane").logits, out.run(x, "dense").logits)


@pytest.mark.parametrize(
    ("n_max", "message"), [(16, "may reach 256, but levels are 8-bit: use a smaller n_max"), (15, "")]
)
def test_gates_fit_8_bits(n_max: int, message: str) -> None:
    if not message:
        assert squared(n_max).network.n_max("sn*sn") == 225
        return
    with pytest.raises(GraphError, match=message):
        squared(n_max)


def test_too_many_tokens_are_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.sn(over_time(x, m.conv, timesteps=1))
        return m.fc(m.out(attention.attend(y, y, y, 1, 1.0)).mean((-2, -1))).mean(0)

    layers = {"conv": nn.Conv2d(1, 8, 1), "sn": BurstNeuron(15), "out": BurstNeuron(), "fc": nn.Linear(8, 3)}
    graph = absorb(lower(Functional(forward, 1, **layers), (1, 256, 256)))
    with pytest.raises(GraphError, match=r"^layer 'out': its membrane may reach 2\^30: .* \(tokens, in attention\)"):
        quantise(graph)


def test_a_product_that_weights_beside_it_drown_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.sn(over_time(x, m.conv, timesteps=1))
        z = over_time(y, m.beside) + attention.attend(y, y, y, 1, m.scale)
        return m.fc(m.out(z).mean((-2, -1))).mean(0)

    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(1, 8, 1), "sn": BurstNeuron(7), "beside": nn.Conv2d(8, 8, 3, padding=1)}
    net: Any = Functional(forward, 1, **layers, out=BurstNeuron(), fc=nn.Linear(8, 3))
    net.scale = 1.0
    assert quantise(absorb(lower(net, (1, 16, 16))))["out"].matmuls[0].weight.min() > 64
    net.scale = 1e-3
    with pytest.raises(GraphError, match="the product 'attention' is too small .* put a neuron of its own behind"):
        quantise(absorb(lower(net, (1, 64, 64))))
    net.scale = 1e-12  # moves nothing
    quantise(absorb(lower(net, (1, 64, 64))))


# Files
# ---------------------------------------------------------------------------------------------------------------------


def find(text: Any, name: str) -> Any:
    """A synapse of a description, or a gate or layer."""
    parts = [*text["layers"], *(s for layer in text["layers"] for s in layer.get("synapses", ()))]
    return next(part for part in parts if part["name"] == name)


ONE = {"kind": "max", "kernel": [1, 1], "stride": [1, 1], "padding": [0, 0]}
PRODUCT, GATE, SUMS = (
    "stages.2.0.attention",
    "stages.0.0.sn_attention*stages.0.0.k.sn",
    "stages.0.0.sn_attention.shortcut",
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: find(t, PRODUCT).update(heads=5), "5 heads must divide 32 channels"),
        (lambda t: find(t, PRODUCT).update(heads=0), "heads must be in 1..65536, not 0"),
        (lambda t: find(t, PRODUCT).update(heads=1), "its sums may reach 3145728000, beyond 2^30"),
        (lambda t: find(t, PRODUCT).update(heads=8), "its bound is stated as"),
        (lambda t: find(t, PRODUCT).update(keys="stem.sn"), "'stem.sn' is no layer before it of the shape (32, 2, 2)"),
        (lambda t: find(t, PRODUCT).update(values="stages.2.1.sn"), "'stages.2.1.sn' is no layer before it"),
        (lambda t: find(t, PRODUCT).update(source="input"), "'input' is no layer before it"),
        (lambda t: find(t, PRODUCT).update(keys=3), "keys is '3', which is not possible"),
        (lambda t: find(t, PRODUCT).update(copy_of="stem.conv"), "which is another convolution"),
        (lambda t: find(t, PRODUCT).update(kind="einsum"), "wrong or missing: 'heads, keys, values'"),
        (
            lambda t: find(t, PRODUCT).update(pools=[ONE]),
            "it must have no pools",
        ),
        (lambda t: t.update(version=1), "wrong or missing"),
        (lambda t: find(t, GATE).update(gate=["stages.2.1.sn", "stem.sn"]), "which is no layer before it"),
        (lambda t: find(t, GATE).update(gate=["input", "stem.sn"]), "reads 'input', which is no layer before it"),
        (lambda t: find(t, GATE).update(gate=["stem.sn"]), "gate is"),
        (lambda t: find(t, GATE).update(gate=["stages.0.0.k.sn", "stem.sn"]), "is no factor of"),
        (lambda t: find(t, GATE).update(name="stem.sn"), "is used by more than one layer"),
        (lambda t: find(t, GATE).update(more=1), "wrong or missing: 'more'"),
        (lambda t: find(t, SUMS)["pools"][0].update(channels=3), "a pool over 3 channels does not divide 8"),
        (lambda t: find(t, SUMS)["pools"][0].update(channels=1), "channels must be in 2..65536, not 1"),
        (lambda t: find(t, SUMS)["pools"][0].update(kind="max"), "a pool over channels must be a sum"),
        (lambda t: find(t, SUMS)["pools"][0].update(kernel=[2, 2]), "must be a sum, and of one position"),
        (lambda t: t.update(layers=[find(t, GATE)]), "which is no layer before it"),
    ],
)
def test_files_that_lie_are_refused(
    nets: dict[str, Network], change: Callable[[dict[str, Any]], None], message: str
) -> None:
    tensors, text = _described(nets["qkformer"])
    forged = json.loads(text)
    change(forged)
    with pytest.raises(ArtefactError) as error:
        Reader(tensors).network(forged)
    assert message in str(error.value)


def _described(net: Network) -> tuple[Any, str]:
    tensors, text = artefact.proved(net.network)
    return tensors, json.dumps(text)


def test_a_long_chain_of_gates_is_read_at_once() -> None:
    """Each squares the one before: what it consists of doubles each time, and must not be written out."""
    tensors, text = _described(squared(1))
    forged, last = json.loads(text), "sn"
    for i in range(2000):
        forged["layers"].append({"name": f"square{i}", "gate": [last, last]})
        last = f"square{i}"
    network, _ = Reader(tensors).network({**forged, "golden": None})
    assert network.n_max(last) == 1
    assert len(network.gates_behind("sn")) == 2001


def test_a_readout_cannot_read_products(nets: dict[str, Network]) -> None:
    tensors, text = _described(nets["spikformer"])
    forged = json.loads(text)
    forged["readout"]["synapses"] = [{**find(forged, "blocks.1.attention"), "name": "product"}]
    with pytest.raises(ArtefactError):
        Reader({**tensors, "product/weight": tensors["blocks.1.attention/weight"]}).network(forged)
