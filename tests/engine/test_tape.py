"""Runs that repeat what was recorded: the same bits and counts as the first time, on every network, and when not to."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lbq import native
from lbq.engine import Network
from lbq.engine.runner import IMAGES_PER_CHOICE, MOST_RECORDINGS, Runner
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from tests.support.small_nets import CASES, Functional, branched, deploy_warmed, deployed, mean_logits, pixels, same

Ints = np.ndarray[Any, Any]
TRANSFORMERS: tuple[tuple[str, Any, tuple[int, int, int], dict[str, Any]], ...] = (
    ("spikformer1x16", "lbq", (3, 16, 16), {}),
    ("spikformer1x16-sew", "ternary", (3, 8, 8), {}),
    ("spikformer1x64-scores", "lbq", (3, 16, 16), {}),
    ("qkformer3x32", "lbq", (3, 8, 8), {}),
)


def traced_sums(net: Network, x: Ints, engine: Any, backend: Any) -> dict[str, int]:
    """The sum of every layer's levels, as a function sees them."""
    sums: dict[str, int] = {}
    net.run(x, engine, lambda name, levels: sums.update({name: int(levels.sum())}), backend=backend)
    return sums


@pytest.mark.parametrize(("id", "neuron", "shape", "options"), [*CASES, *TRANSFORMERS])
def test_recordings_do_what_the_first_run_did(
    id: str, neuron: Any, shape: tuple[int, int, int], options: dict[str, Any]
) -> None:
    net = deployed(id, neuron, shape, **options)
    runner = net._runner = Runner(net.network)
    runner.images_per_piece = 2
    for engine, backend in (("bitplane", "horner"), ("bitplane", "explicit"), ("auto", "horner")):
        for i in range(4):
            x = pixels(2, *shape, seed=10 + i)
            dense = net.run(x, "dense", trace=True)
            found = net.run(x, engine, i % 2 == 1, 1 + i % 2, backend)  # type: ignore[arg-type]
            np.testing.assert_array_equal(found.logits, dense.logits)
            if i % 2:
                assert same(dense, found)
            watched = runner.run(x, engine, backend=backend, watch=lambda *_: None)  # type: ignore[arg-type]
            assert found.counts == watched.counts, "watching is never recorded"
            assert dense.levels is not None
            assert traced_sums(net, x, engine, backend) == {
                name: int(levels.sum()) for name, levels in dense.levels.items()
            }
    assert any(space.recordings for space in runner._spaces)


def test_pooling_is_recorded_too() -> None:
    """Max-pooled, sum-pooled within 8 bits, and beyond them before the readout."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        a = m.sn(over_time(x, m.conv, timesteps=2))
        b = m.sn1(over_time(a, m.max, m.conv1))
        return mean_logits(m, m.sn2(over_time(b, m.avg, m.conv2)))

    torch.manual_seed(1)
    layers = {"conv": nn.Conv2d(3, 6, 3, padding=1), "sn": BurstNeuron(), "max": nn.MaxPool2d(3, 2, 1)}
    layers |= {"conv1": nn.Conv2d(6, 5, 3, padding=1), "sn1": BurstNeuron(7), "avg": nn.AvgPool2d(2)}
    layers |= {"conv2": nn.Conv2d(5, 8, 3, padding=1), "sn2": BurstNeuron(100), "pool": nn.AvgPool2d(2)}
    net = deploy_warmed(Functional(forward, **layers, fc=nn.Linear(8 * 2 * 2, 3)), 3, 16, 16)
    for i in range(4):
        x = pixels(2, 3, 16, 16, seed=i)
        assert same(net.run(x, "bitplane", trace=True), net.run(x, "dense", trace=True))
        assert net.run(x, "bitplane").counts == net.run(x, "bitplane", backend="horner", threads=2).counts
    assert net._runner is not None
    assert any(space.recordings for space in net._runner._spaces)


@pytest.mark.parametrize("in_numpy", [False, True])
def test_what_numpy_did_is_not_recorded(in_numpy: bool) -> None:
    """Sums of four levels up to 100 need more than 8 bits; a grouped convolution runs natively."""
    torch.manual_seed(1)
    layers: dict[str, Any] = {"conv": nn.Conv2d(3, 6, 3, padding=1), "sn": BurstNeuron(100), "avg": nn.AvgPool2d(2)}
    layers |= {"conv1": nn.Conv2d(6, 4, 3, padding=1), "sn1": BurstNeuron()}

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return mean_logits(m, m.sn1(over_time(m.sn(over_time(x, m.conv, timesteps=2)), m.avg, m.conv1)))

    network = Functional(forward, **layers, pool=nn.AdaptiveAvgPool2d(1), fc=nn.Linear(4, 3))
    net = deploy_warmed(network, 3, 6, 6) if in_numpy else branched()
    for i in range(4):
        x = pixels(2, 3, 6, 6, seed=i)
        np.testing.assert_array_equal(net.run(x).logits, net.run(x, "dense").logits)
        np.testing.assert_array_equal(net.run(x, "bitplane").logits, net.run(x, "dense").logits)
    assert net._runner is not None
    assert any(space.recordings for space in net._runner._spaces) is not in_numpy


def test_choices_are_made_anew_now_and_then() -> None:
    net = deployed()
    x = pixels(1, 3, 8, 8)
    first = net.run(x).choices
    runner = net._runner
    assert runner is not None
    for prepared in runner.prepared.values():
        prepared.crossover = 0.0  # everything is too dense now
    for _ in range(IMAGES_PER_CHOICE - 1):
        assert net.run(x).choices == first
    assert {c.method for name, c in net.run(x).choices.items() if name in runner.prepared} == {"dense"}
    assert {c.method for name, c in net.run(x).choices.items() if name in runner.prepared} == {"dense"}
    np.testing.assert_array_equal(net.run(x).logits, net.run(x, "dense").logits)


def test_only_a_few_recordings_are_kept() -> None:
    net = deployed()
    runner = net._runner = Runner(net.network)
    runner.images_per_piece = 3
    for _ in range(3):
        for engine, images in itertools.product(("bitplane", "auto"), (1, 2, 3)):
            x = pixels(images, 3, 8, 8, seed=images)
            np.testing.assert_array_equal(net.run(x, engine).logits, net.run(x, "dense").logits)  # type: ignore[arg-type]
    assert 0 < max(len(space.recordings) for space in runner._spaces) <= MOST_RECORDINGS


def test_a_recording_is_of_one_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    net = deployed()
    keys = set()
    for isa in ("portable", native.isas()[-1]):
        monkeypatch.setenv("LBQ_NATIVE_ISA", isa)
        for i in range(3):
            x = pixels(1, 3, 8, 8, seed=i)
            np.testing.assert_array_equal(net.run(x, "bitplane").logits, net.run(x, "dense").logits)
        assert net._runner is not None
        keys |= {key for space in net._runner._spaces for key in space.recordings}
    assert len(keys) == 2


def test_without_a_library_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    net = deployed()
    x = pixels(3, 3, 8, 8)
    expected = net.run(x, "dense").logits
    monkeypatch.setattr(native, "_opened", lambda: "the native library was not built")
    monkeypatch.setattr(native, "_features", tuple)
    runner = net._runner = Runner(net.network)
    runner.images_per_piece = 1
    with pytest.warns(RuntimeWarning, match="right but slow: the native library was not built"):
        np.testing.assert_array_equal(net.run(x).logits, expected)
    assert not any(space.recordings for space in runner._spaces)
