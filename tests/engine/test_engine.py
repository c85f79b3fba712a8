"""The integer engines on whole networks: against a scalar restatement, and against each other.

Guarantee (b): every engine gives identical levels and logits, bit for bit.
"""

from __future__ import annotations

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lbq.counting.operations import count
from lbq.engine import Network
from lbq.engine import convolution as native_kernels
from lbq.engine.convolution import Backend, Counts, Method
from lbq.engine.file.container import forget
from lbq.engine.memory import Plan, Workspace
from lbq.engine.method import Prepared
from lbq.engine.runner import Runner
from lbq.errors import LbqError
from lbq.graph import INPUT
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from tests.support.oracle import integer_network
from tests.support.small_nets import (
    CASES,
    MIXED_CASES,
    Functional,
    branched,
    deploy_warmed,
    deployed,
    eventful,
    mean_logits,
    pixels,
    same,
)

Ints = np.ndarray[Any, Any]


def agrees_with_the_definition(net: Network, x: Ints) -> None:
    out = net.run(x, "dense", trace=True)
    assert out.levels is not None
    assert any(level.any() for level in out.levels.values())
    for i in range(len(out.logits)):
        logits, steps = integer_network(net.network, x[i] if net.network.static else x[:, i])
        assert out.logits[i].tolist() == logits
        for t, levels in enumerate(steps):
            for name in out.levels:
                assert {at: int(out.levels[name][t, i][at]) for at in levels[name]} == levels[name], (name, t)


@pytest.mark.parametrize(("id", "neuron", "shape", "options"), [*CASES, *MIXED_CASES])
def test_engines_equal_the_definition(
    id: str, neuron: Any, shape: tuple[int, int, int], options: dict[str, Any]
) -> None:
    """docs/explanation/integers.md in Python's own integers, one number at a time, asserting the bounds as it goes."""
    agrees_with_the_definition(deployed(id, neuron, shape, **options), pixels(1, *shape))


@pytest.mark.parametrize(("id", "neuron", "shape", "options"), [*CASES, *MIXED_CASES])
def test_all_engines_give_the_same_bits(
    id: str, neuron: Any, shape: tuple[int, int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = deployed(id, neuron, shape, **options)
    x = pixels(5, *shape, seed=3)
    dense = net.run(x, "dense", trace=True)
    backends: tuple[Backend, ...] = ("horner", "preshifted", "fused", "explicit")
    outputs = [net.run(x, "bitplane", trace=True, backend=backend) for backend in backends]
    outputs += [net.run(x, "auto", trace=True, threads=2), net.run(x, "bitplane", trace=True, threads=3)]
    outputs.append(net.on_device("cpu").run(x, trace=True))
    for other in outputs:
        assert same(dense, other)
    monkeypatch.setenv("LBQ_NATIVE", "off")
    for engine in ("bitplane", "auto"):
        with pytest.warns(
            RuntimeWarning, match="running in NumPy, which is right but slow: switched off by LBQ_NATIVE=off"
        ):
            assert same(dense, net.run(x, engine, trace=True))
    monkeypatch.undo()
    one = net.run(x[2], "bitplane", trace=True)
    assert one.logits[0].tolist() == dense.logits[2].tolist()
    assert net.run(x).levels is None


def test_branches_pools_groups_and_a_static_image_beside_levels() -> None:
    net, x = branched(), pixels(3, 3, 6, 6, seed=5)
    agrees_with_the_definition(net, x[:2])
    dense = net.run(x, "dense", trace=True)
    for engine in ("bitplane", "auto"):
        assert same(dense, net.run(x, engine, trace=True))
    assert same(dense, net.on_device("cpu").run(x, trace=True))


def test_what_runs_densely_counts_products_and_no_accumulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense engine and a GPU count the account's MACs; `auto` counts those of the synapses that it runs densely."""
    net, x = branched(), pixels(3, 3, 6, 6, seed=5)
    dense = net.run(x, "dense", trace=True)
    account = count(net.network, dense.levels)
    macs = {name: counted.macs for name, counted in account.synapses.items()}
    macs |= {s.name: s.valid_macs for s in net.network.synapses if s.source == INPUT}
    for out in (dense, net.on_device("cpu").run(x)):
        assert {name: out.counts[name] for name in macs} == {
            name: Counts(products=round(3 * n)) for name, n in macs.items()
        }
        assert out.total.products == 3 * (account.fp_macs + account.total.macs)  # shortcuts have none
    planes = net.run(x, "bitplane")
    assert planes.total.products == 0
    monkeypatch.setattr(
        Prepared, "_measure", lambda self, _, density: density * (2 if "2" in self.synapse.name else 0.5)
    )
    for _ in range(3):  # chosen, recorded, replayed
        mixed = net.run(x, "auto")
        assert set(mixed.choices) == {s.name for s in net.network.synapses if s.kind == "conv"}
        for name, choice in mixed.choices.items():
            assert choice.reason
            theirs = dense if choice.method == "dense" else planes
            assert mixed.counts[name] == theirs.counts[name], name
    assert 0 < mixed.total.products < dense.total.products
    assert 0 < mixed.total.accumulations < planes.total.accumulations


def test_three_currents_of_one_layer_do_not_overwrite_each_other() -> None:
    """The first is the image's own, which is the same at every timestep."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        s = m.sn(over_time(x, m.conv, timesteps=2))
        u = m.sn1(over_time(x, m.a, timesteps=2) + over_time(s, m.b) + over_time(s, m.c))
        return mean_logits(m, u)

    torch.manual_seed(2)
    conv, a, b, c = (nn.Conv2d(i, 4, 3, padding=1) for i in (3, 3, 4, 4))
    head = {"pool": nn.AdaptiveAvgPool2d(1), "fc": nn.Linear(4, 3)}
    made = Functional(forward, conv=conv, sn=BurstNeuron(), a=a, b=b, c=c, sn1=BurstNeuron(), **head)
    net, x = deploy_warmed(made, 3, 6, 6), pixels(3, 3, 6, 6, seed=1)
    agrees_with_the_definition(net, x[:2])
    assert same(net.run(x, "dense", trace=True), net.run(x, "bitplane", trace=True))


def test_event_networks_read_frames_at_every_timestep() -> None:
    net, x = eventful(), pixels(3, 4, 2, 4, 4) // 32
    agrees_with_the_definition(net, x[:, :2])
    dense = net.run(x, "dense", trace=True)
    for other in (net.run(x, "bitplane", trace=True), net.on_device("cpu").run(x, trace=True)):
        assert same(dense, other)
    assert net.run(x[:, 1], "dense").logits[0].tolist() == dense.logits[1].tolist()
    assert net.verify("bitplane") == 8


def test_first_calls_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms of weights that one thread has just made, another may drop."""

    def slow(tensor: Any) -> None:
        time.sleep(0.001)
        forget(tensor)

    monkeypatch.setattr(native_kernels, "forget", slow)
    x = pixels(2, 3, 8, 8)
    expected = deployed().run(x).logits
    for _ in range(3):
        net = Network(deployed().network)
        with ThreadPoolExecutor(8) as pool:
            for output in pool.map(net.run, [x] * 8):
                assert np.array_equal(output.logits, expected)


def test_batches_chunks_and_threads_do_not_matter() -> None:
    net = deployed()
    x = pixels(23, 3, 8, 8)
    whole = net.run(x, "bitplane", trace=True)
    runner = Runner(net.network)
    runner.images_per_piece = 4
    done: list[int] = []
    pieces = runner.run(x, "bitplane", trace=True, threads=2, progress=done.append)
    assert same(whole, pieces)
    assert sum(done) == 23
    assert max(done) == 4
    for name, counts in whole.counts.items():
        assert replace(counts, horner_shifts=0) == replace(pieces.counts[name], horner_shifts=0)
    assert len(runner._spaces) <= 2  # memory is planned once and reused


@pytest.mark.parametrize("threads", [1, 2])
def test_a_function_sees_every_level_once(threads: int) -> None:
    net = deployed()
    x = pixels(9, 3, 8, 8)
    whole = net.run(x, "dense", trace=True)
    assert whole.levels is not None
    runner = Runner(net.network)
    runner.images_per_piece = 2
    seen: dict[str, list[tuple[int, int]]] = {}

    def note(name: str, levels: np.ndarray) -> None:
        seen.setdefault(name, []).append((levels.shape[1], int(levels.sum(dtype=np.int64))))

    out = runner.run(x, "bitplane", note, threads)
    assert out.levels is None
    np.testing.assert_array_equal(out.logits, whole.logits)
    on_torch: dict[str, int] = {}
    net.on_device("cpu").run(x, lambda name, levels: on_torch.update({name: int(levels.sum(dtype=np.int64))}))
    for name, levels in whole.levels.items():
        assert sum(images for images, _ in seen[name]) == 9
        assert sum(total for _, total in seen[name]) == levels.sum(dtype=np.int64) == on_torch[name]


def test_memory_is_reused_as_soon_as_the_last_reader_is_done() -> None:
    net = deployed("resnet20w4", shape=(3, 8, 8)).network
    plan = Plan(net)
    assert len(plan.slots) == 3  # a block's input, its inner layer, its output
    space = Workspace(plan, 2)
    held = sum(slot.nbytes for slot in space.slots) + space.currents.nbytes
    assert held <= 2 * 2 * (3 + 8) * net.layers[0].units
    for i, layer in enumerate(net.layers):  # nothing that is still to be read is overwritten
        for other in net.layers[:i]:
            if plan.last[other.name] >= i:
                assert plan.levels[other.name] != plan.levels[layer.name]


def test_golden_vectors_find_an_engine_that_errs() -> None:
    net = deployed()
    assert net.verify("dense") == net.verify("bitplane") == 8
    layer = net.network.layers[2]
    broken = replace(layer, bias=layer.bias + 40_000)
    network = replace(net.network, layers=(*net.network.layers[:2], broken, *net.network.layers[3:]))
    with pytest.raises(
        LbqError, match="layer 'layer1.0.sn2': its levels at timestep 0 are not the golden ones: .* --against"
    ):
        Network(network, net.golden).verify()
    readout = replace(net.network.readout, bias=net.network.readout.bias + 1)
    with pytest.raises(LbqError, match="the logits are not the golden ones: .* --against"):
        Network(replace(net.network, readout=readout), net.golden).verify()
    with pytest.raises(LbqError, match="no golden vectors"):
        Network(net.network).verify()


def test_kernels_too_large_for_the_native_library_run_in_numpy() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return mean_logits(m, m.sn1(over_time(m.sn(over_time(x, m.conv, timesteps=2)), m.wide)))

    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(3, 2, 3, padding=1), "sn": BurstNeuron(), "wide": nn.Conv2d(2, 2, 17, padding=8)}
    layers |= {"sn1": BurstNeuron(), "pool": nn.AdaptiveAvgPool2d(1), "fc": nn.Linear(2, 3)}
    net, x = deploy_warmed(Functional(forward, **layers), 3, 6, 6), pixels(2, 3, 6, 6)
    expected = net.run(x, "dense", trace=True)
    for engine in ("auto", "bitplane"):
        assert same(net.run(x, engine, trace=True), expected)


class Slow:
    """A convolution that takes so many seconds with each method."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def run(self, levels: Ints, method: Method, **_: Any) -> tuple[Ints, Counts]:
        end = time.thread_time() + self.seconds[method]
        while time.thread_time() < end:
            pass
        return levels, Counts()

    def keep(self, method: Method) -> None:
        assert method in self.seconds

    def pairs_refused(self, *_: Any) -> str | None:
        return None if "pairs" in self.seconds else "not here"


def test_auto_compares_the_density_with_a_measured_cross_over(monkeypatch: pytest.MonkeyPatch) -> None:
    net = deployed("resnet8w2", shape=(3, 4, 4)).network
    prepared = Prepared(net.layers[1].convs[0], 5, False)
    monkeypatch.setattr(Prepared, "native_refused", lambda self: None)
    monkeypatch.setattr(Prepared, "native", Slow({"bitplane": 0.01, "dense": 0.02}))
    level = np.zeros((1, 4, 4, 2), np.uint8)
    level[0, :2] = 1  # density 0.5; planes take half the time there, so that both would take the same at about 1
    choice = prepared.choose("auto", level, 0.5)
    assert (choice.kernel, choice.method) == ("native", "bitplane")
    assert prepared.crossover == pytest.approx(1.0, rel=0.3)
    assert re.fullmatch(r"density 0\.500 below cross-over [\d.]+", choice.reason)
    level[:] = 3
    choice = prepared.choose("auto", level, 2.0)
    assert (choice.method, choice.density) == ("dense", 2.0)
    assert "above cross-over" in choice.reason
    prepared.crossover = 1.0
    chosen = [prepared.choose("auto", level, density).method for density in (0.95, 0.85, 1.05, 1.15)]
    assert chosen == ["dense", "bitplane", "bitplane", "dense"]  # near the cross-over it stays as it was
    assert prepared.choose("auto", level, 0.95).reason == "density 0.950 near cross-over 1.000"


def test_auto_takes_the_fastest_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prepared, "native_refused", lambda self: None)
    levels, synapse = np.ones((2, 4, 4, 2), np.uint8), deployed("resnet8w2", shape=(3, 4, 4)).network.layers[1].convs[0]
    for seconds, method in (
        ({"bitplane": 0.02, "pairs": 0.01, "dense": 0.03}, "pairs"),
        ({"bitplane": 0.01, "pairs": 0.02, "dense": 0.03}, "bitplane"),
        ({"bitplane": 0.03, "pairs": 0.02, "dense": 0.01}, "dense"),
    ):
        slow = Slow(seconds)
        monkeypatch.setattr(Prepared, "native", slow)
        prepared = Prepared(synapse, 5, False, 2)
        assert prepared.choose("auto", levels, 0.5).method == method
        assert prepared.lists is not None
        assert prepared.crossover == pytest.approx(
            0.5 * seconds["dense"] / min(seconds["bitplane"], seconds["pairs"]), rel=0.3
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((1, 3, 8, 8)),), "images must be uint8"),
        ((np.zeros((1, 3, 8, 9), np.uint8),), r"images must be \[B, 3, 8, 8\], got \[1, 3, 8, 9\]"),
        ((np.zeros((0, 3, 8, 8), np.uint8),), "images must not be empty"),
        ((np.zeros((8, 8), np.uint8),), r"got \[8, 8\]"),
        ((np.zeros((1, 3, 8, 8), np.uint8), "fast"), "engine must be one of auto, dense, bitplane, cuda, got 'fast'"),
        ((np.zeros((1, 3, 8, 8), np.uint8), "auto", "sn1"), "trace must be True, False or a function .*, got 'sn1'"),
        ((np.zeros((1, 3, 8, 8), np.uint8), "auto", False, 0), "threads must be a whole number in 1..256, got 0"),
        (
            (np.zeros((1, 3, 8, 8), np.uint8), "auto", False, 1, "shifted"),
            "backend must be one of horner, preshifted, fused, explicit",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LbqError, match=message):
        deployed().run(*arguments)


def test_a_network_refuses_values_above_those_it_was_trained_on() -> None:
    """Of a network of one's own too, which names no dataset: pixels 0..255 for 0..16 would be classified, wrongly."""
    net = deployed("resnet8w2", shape=(3, 4, 4))
    narrow = Network(replace(net.network, input_max=16))
    x = pixels(2, 3, 4, 4)
    with pytest.raises(
        LbqError, match=r"^images have values up to 2\d\d, the network was trained on 0 to 16: scale them"
    ):
        narrow.run(x)
    output = narrow.run(x // 16, trace=True)
    layers = len(net.network.layers)
    assert re.fullmatch(rf"Output\(logits \[2, 5\], scale \S+, \d+ synapses, levels of {layers} layers\)", repr(output))


def test_the_gpu_engine_needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(LbqError, match="needs a GPU"):
            deployed().run(pixels(1, 3, 8, 8), "cuda")


def test_the_gpu_engine_needs_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    net = deployed()
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "lbq.engine.cuda.runner", raising=False)
    with pytest.raises(LbqError, match=r"engine cuda needs PyTorch, which is not installed: pip install torch"):
        net.run(pixels(1, 3, 8, 8), "cuda")


def test_the_gpu_engine_gives_the_same_bits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    net = deployed("resnet8w64", shape=(3, 16, 16))
    x = pixels(9, 3, 16, 16)
    before = torch.get_float32_matmul_precision()
    assert same(net.run(x, "dense", trace=True), net.run(x, "cuda", trace=True))
    assert torch.get_float32_matmul_precision() == before


def test_a_readout_of_levels_alone() -> None:
    """Logits that are a sum of a convolution and of levels themselves: an identity in the readout."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = over_time(m.sn(over_time(x, m.conv, timesteps=2)), m.pool)
        return (over_time(x, m.fc) + x).mean(0)

    torch.manual_seed(1)
    layers = {"conv": nn.Conv2d(3, 4, 3), "pool": nn.AdaptiveAvgPool2d(1), "fc": nn.Conv2d(4, 4, 1)}
    net, x = deploy_warmed(Functional(forward, sn=BurstNeuron(), **layers), 3, 6, 6), pixels(2, 3, 6, 6)
    assert {s.kind for s in net.network.readout.synapses} == {"conv", "identity"}
    agrees_with_the_definition(net, x)
    assert same(net.run(x, "dense"), net.run(x, "bitplane"))
    assert same(net.run(x, "dense"), net.on_device("cpu").run(x))
    assert INPUT not in net.run(x, "dense", trace=True).levels  # type: ignore[operator]
