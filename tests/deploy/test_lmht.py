"""LM-HT on integers: currents of all timesteps are mixed before the first emission. Engines, files, counts and exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lbq import engine, models
from lbq.counting.costs import costs
from lbq.counting.measurement import account_from
from lbq.counting.operations import count
from lbq.deploy import absorb, deploy, fold_gain, lower, quantise
from lbq.deploy.float_execution import execute
from lbq.engine import Network
from lbq.engine.file import container
from lbq.engine.file.artefact import proved
from lbq.errors import ArtefactError, GraphError, LbqError
from lbq.export import export
from lbq.export.c99 import Sources
from lbq.export.nir import nir_graph
from lbq.export.onnx import onnx_model
from lbq.graph.integer import MEMBRANE_BOUND, Mixing, membrane_bound
from lbq.graph.quantise import check_mixing, fixed_point
from lbq.neuron import LMHT
from tests.support.small_nets import deployed, normalised, pixels, same, small, warmed


def mixed(timesteps: int = 3) -> Network:
    return deployed("resnet8w4", "lmht", timesteps=timesteps)


def test_mixing_is_a_product_of_integers_rounded_half_up() -> None:
    mixing = Mixing(np.array([[3, 1], [0, 4]], np.int32), 1)
    currents = np.array([[5, -5, 0, 2**29], [2, -2, 1, -(2**29)]], np.int32)
    expected = [
        [(3 * a + b + 1) // 2 for a, b in currents.T.tolist()],
        [(4 * b + 1) // 2 for b in currents[1].tolist()],
    ]
    assert mixing.of(currents).tolist() == expected
    real = torch.sigmoid(torch.randn(3, 3)).double().numpy()
    assert np.abs(fixed_point(real).weights / 2**16 - real).max() <= 2**-17


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds_for_every_current(seed: int) -> None:
    """Currents at the ends of their bounds, in all signs."""
    random = np.random.default_rng(seed)
    mixing = Mixing(random.integers(0, 2**17, (3, 3)).astype(np.int32), 16)
    most = random.integers(0, 2**20, 5)
    for signs in np.ndindex(2, 2, 2):
        currents = (most * np.array(signs)[:, None] * 2 - most).astype(np.int32)
        assert (np.abs(mixing.of(currents)) <= mixing.bounds(most)).all()


def test_a_leak_above_1_is_in_the_proved_bound() -> None:
    network = mixed().network
    leaks = [layer.neuron.leak for layer in network.layers if layer.neuron is not None]
    assert any(leak is not None and leak[0] > 2 ** leak[1] for leak in leaks)
    for layer in network.layers:
        largest = {s.name: network.largest(s) for s in layer.synapses}
        bounds = [membrane_bound(layer, largest, timesteps) for timesteps in (1, network.timesteps)]
        assert bounds[1] < MEMBRANE_BOUND


def test_event_frames() -> None:
    torch.manual_seed(0)
    net = models.create("resnet8w2", neuron="lmht", in_channels=2, num_classes=3, timesteps=2)
    network = deploy(warmed(net, 2, 4, 4, static=False), (2, 4, 4), timesteps=2, static=False)
    x = pixels(2, 3, 2, 4, 4) // 40
    dense = network.run(x, "dense", trace=True)
    assert dense.levels is not None
    assert any(level.any() for level in dense.levels.values())
    for other in (network.run(x, "bitplane", trace=True), network.on_device("cpu").run(x, trace=True)):
        assert same(dense, other)


def test_sixteen_bit_weights_lose_almost_nothing() -> None:
    net = small("resnet8w4", "lmht", timesteps=3)
    x = pixels(20, 3, 8, 8, seed=7)
    real = execute(absorb(fold_gain(lower(net, (3, 8, 8)))), normalised(x).numpy())
    out = deployed("resnet8w4", "lmht", timesteps=3, bits=16).run(x, "dense", trace=True)
    assert out.levels is not None
    different = sum(int((out.levels[name] != level).sum()) for name, level in real.levels.items())
    assert different <= 0.005 * sum(level.size for level in real.levels.values())  # as of other neurons without leak


def test_repeated_runs_mix_anew() -> None:
    """A tape of native calls would replay the first images' mixed currents."""
    net = mixed()
    for seed in range(4):
        x = pixels(3, 3, 8, 8, seed=seed)
        assert same(net.run(x, "dense", trace=True), net.run(x, "bitplane", trace=True))


def test_membranes_can_be_watched() -> None:
    net, seen = mixed(), []
    x = pixels(2, 3, 8, 8)
    out = net.watch(x, lambda name, t, u: seen.append((name, t, u.copy())), trace=True)
    assert out.levels is not None
    assert len(seen) == 3 * len(net.network.layers)
    for name, t, u in seen:
        thresholds = net.network.spec(name).thresholds
        reached = (u[..., None] >= thresholds).sum(-1)
        np.testing.assert_array_equal(reached.transpose(0, 3, 1, 2), out.levels[name][t])


# What is refused
# ---------------------------------------------------------------------------------------------------------------------


def test_other_timesteps_are_refused() -> None:
    net = mixed()
    assert net.over(3).network.timesteps == 3
    with pytest.raises(LbqError, match="^layer 'sn1' mixes 3 timesteps: train another network over 2$"):
        net.over(2)
    graph = absorb(fold_gain(lower(small("resnet8w4", "lmht", timesteps=3), (3, 8, 8))))
    with pytest.raises(GraphError, match="layer 'sn1': it mixes 3 timesteps, the network has 4: train it over so many"):
        quantise(replace(graph, timesteps=4))
    with pytest.raises(GraphError, match="the neurons mix 3 timesteps, the network has 4"):
        execute(replace(graph, timesteps=4), np.zeros((1, 3, 8, 8)))
    with pytest.raises(GraphError, match="layer 'sn': it mixes 65 timesteps, at most 64 fit a file"):
        check_mixing("sn", LMHT(65).spec(), 65)
    with pytest.raises(GraphError, match="layer 'sn': its mixing has values beyond 0..2"):
        check_mixing("sn", replace(LMHT(2).spec(), mixing=np.full((2, 2), 3.0)), 2)


def test_exports_refuse_it_by_name(tmp_path: Path) -> None:
    net = mixed()
    refused = "layer 'sn1' mixes the currents of all timesteps .LM-HT., which has no form in"
    with pytest.raises(GraphError, match=f"{refused} C: use model.lbq"):
        Sources(net.network)
    with pytest.raises(GraphError, match=f"{refused} ONNX: use model.lbq"):
        onnx_model(net)
    graph = absorb(fold_gain(lower(small("resnet8w4", "lmht", timesteps=3), (3, 8, 8))))
    with pytest.raises(GraphError, match=f"{refused} NIR: use model.lbq"):
        nir_graph(graph, "subtract")
    engine.save(tmp_path / "model.lbq", net)
    for format in ("c", "c-step", "onnx", "onnx-step"):
        with pytest.raises(GraphError, match=refused):
            export(tmp_path / "model.lbq", tmp_path / "out", format)
    with pytest.raises(GraphError, match=f"{refused} WebAssembly: use model.lbq"):
        export(tmp_path / "model.lbq", tmp_path / "out", "wasm")
    assert not (tmp_path / "out").exists()


# Counts
# ---------------------------------------------------------------------------------------------------------------------


def test_mixing_is_counted_and_priced() -> None:
    net = mixed()
    out = net.run(pixels(2, 3, 8, 8), trace=True)
    for mode in ("exact", "rate"):
        account = count(net.network, out.levels, mode)
        assert account.mixing_macs == 3 * 3 * net.network.units
        assert account.operations().fp_macs == account.fp_macs + account.mixing_macs
    account = count(net.network, out.levels)
    ours = costs(account).methods[0]
    (line,) = [line for line in ours.lines if line.what == "mixing of currents over time, 32-bit MACs"]
    assert (line.count, line.price, line.regime) == (account.mixing_macs, 3.2, "integer")
    without = costs(replace(account, mixing_macs=0.0)).methods[0]
    assert ours.integer_uj - without.integer_uj == pytest.approx(line.microjoules)
    assert ours.paper_uj is not None
    assert without.paper_uj is not None
    assert ours.paper_uj - without.paper_uj == pytest.approx(1e-6 * 4.6 * account.mixing_macs)


def test_counts_of_the_trained_and_of_the_deployed_network_agree() -> None:
    net = small("resnet8w4", "lmht", timesteps=3)
    graph = absorb(fold_gain(lower(net, (3, 8, 8))))
    x = pixels(2, 3, 8, 8)
    levels = execute(graph, normalised(x).numpy()).levels
    assert count(graph, levels).mixing_macs == count(mixed().network, mixed().run(x, trace=True).levels).mixing_macs


# The file
# ---------------------------------------------------------------------------------------------------------------------


def test_a_file_round_trips_and_says_version_2(tmp_path: Path) -> None:
    net = mixed()
    engine.save(tmp_path / "a.lbq", net)
    again = engine.load(tmp_path / "a.lbq")
    assert again.verify("dense") == again.verify("bitplane") == 8
    for one, other in zip(net.network.layers, again.network.layers, strict=True):
        assert one.neuron is not None
        assert other.neuron is not None
        assert one.neuron.mixing is not None
        assert other.neuron.mixing is not None
        assert one.neuron.mixing.weights.tolist() == other.neuron.mixing.weights.tolist()
        assert (one.neuron.mixing.bits, one.neuron.leak) == (other.neuron.mixing.bits, other.neuron.leak)
    engine.save(tmp_path / "b.lbq", again)
    assert (tmp_path / "a.lbq").read_bytes() == (tmp_path / "b.lbq").read_bytes()
    assert proved(net.network)[1]["version"] == 2


def test_networks_without_mixing_are_written_as_before() -> None:
    """Version 1, and no word of mixing: readers of before read them."""
    text = proved(deployed("resnet8w4", "lbq").network)[1]
    assert text["version"] == 1
    assert "mixing" not in json.dumps(text)


Change = Callable[[dict[str, Any]], None]


def _neuron(change: Change) -> Change:
    return lambda tree: change(tree["layers"][1]["neuron"])


def _set(*path: Any, value: Any) -> Change:
    def change(where: Any) -> None:
        for key in path[:-1]:
            where = where[key]
        where[path[-1]] = value

    return change


ROWS = "its mixing must be 3 rows of 3 whole numbers in 0..131072"
ATTACKS: dict[str, tuple[Change, str]] = {
    "version 1": (_set("version", value=1), "its neuron must have the entries n_max, .*wrong or missing: 'mixing'"),
    "version 3": (_set("version", value=3), "its format has version 3, this lbq reads 1 and 2"),
    "no object": (_neuron(_set("mixing", value=[])), "its mixing must be an object"),
    "an entry more": (_neuron(_set("mixing", "more", value=1)), "its mixing must have the entries bits, weights"),
    "no bits": (_neuron(lambda n: n["mixing"].pop("bits")), "its mixing must have the entries bits, weights"),
    "bits 0": (_neuron(_set("mixing", "bits", value=0)), "bits must be in 1..16, not 0"),
    "bits 17": (_neuron(_set("mixing", "bits", value=17)), "bits must be in 1..16, not 17"),
    "bits true": (_neuron(_set("mixing", "bits", value=True)), "bits is 'True', which is not possible"),
    "a row less": (_neuron(lambda n: n["mixing"]["weights"].pop()), "weights is .* which is not possible"),
    "a weight less": (_neuron(lambda n: n["mixing"]["weights"][0].pop()), ROWS),
    "text for a row": (_neuron(_set("mixing", "weights", 1, value="123")), ROWS),
    "a negative weight": (_neuron(_set("mixing", "weights", 1, 1, value=-1)), ROWS),
    "a weight too large": (_neuron(_set("mixing", "weights", 1, 1, value=2**17 + 1)), ROWS),
    "a huge weight": (_neuron(_set("mixing", "weights", 1, 1, value=2**80)), ROWS),
    "a float": (_neuron(_set("mixing", "weights", 1, 1, value=1.5)), ROWS),
    "a boolean": (_neuron(_set("mixing", "weights", 1, 1, value=True)), ROWS),
    "a leak above 2": (_neuron(_set("leak", value=[2**17 + 1, 16])), "leak must be in 0..131072"),
    "a leak of 2^16 / 2": (
        _neuron(_set("leak", value=[2**16, 1])),
        r"leak must be m / 2\^k in \[0, 2\] with k in 1..16",
    ),
    "another weight": (_neuron(_set("mixing", "weights", 0, 0, value=2**17)), "its bound is stated as"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_mixings_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    change, message = ATTACKS[name]
    tensors, tree = proved(mixed().network)
    tree = json.loads(json.dumps(tree))
    change(tree)
    path = tmp_path / "attack.lbq"
    path.write_bytes(container.encode(tensors, json.dumps(tree)))
    with pytest.raises(ArtefactError, match=message) as error:
        engine.load(path)
    assert str(error.value).startswith(str(path))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500


def test_version_2_without_mixing_and_too_many_timesteps_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "attack.lbq"
    tensors, tree = proved(deployed("resnet8w4", "lbq").network)
    path.write_bytes(container.encode(tensors, json.dumps({**tree, "version": 2})))
    with pytest.raises(ArtefactError, match="its format has version 2, but nothing in it needs more than 1"):
        engine.load(path)
    tensors, tree = proved(mixed().network)
    path.write_bytes(container.encode(tensors, json.dumps({**tree, "input": {**tree["input"], "timesteps": 65}})))
    with pytest.raises(ArtefactError, match="mixes 65 timesteps, at most 64 are read"):
        engine.load(path)


def test_an_account_of_before_has_no_mixing() -> None:
    net = deployed("resnet8w4", "lbq")
    account = count(net.network, net.run(pixels(2, 3, 8, 8), trace=True).levels)
    stored = {name: getattr(account, name) for name in account.__dataclass_fields__ if name not in ("mode", "images")}
    stored |= {
        part: {k: vars(v) for k, v in stored[part].items()} for part in ("synapses", "shortcuts", "stem", "layers")
    }
    stored.pop("mixing_macs")
    assert account_from(stored, "exact", 2).mixing_macs == 0
