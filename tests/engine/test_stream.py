"""Frames without end: the first T as a run gives them, by definition after that, within the proved bound or refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lbq.engine import Network
from lbq.errors import GraphError, LbqError
from lbq.graph import INPUT, Synapse
from lbq.graph.endless import endless_bound
from lbq.graph.integer import MEMBRANE_BOUND, IntegerLayer, IntegerNetwork, IntegerNeuron, membrane_bound
from tests.support.paths import ROOT
from tests.support.random_networks import random_networks, reset_beyond_the_last_timestep
from tests.support.small_nets import MIXED_CASES, deployed, pixels

ENGINES = "auto", "dense", "bitplane"


@pytest.fixture(scope="module")
def nets() -> dict[str, tuple[Network, NDArray[np.uint8]]]:
    return {**random_networks(), "last": reset_beyond_the_last_timestep()}


def frames_of(net: Network, x: NDArray[np.uint8], image: int) -> list[NDArray[np.uint8]]:
    return [x[image]] * net.network.timesteps if net.network.static else list(x[:, image])


def streamable(net: Network) -> bool:
    try:
        net.stream()
    except GraphError:
        return False
    return True


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_frames_give_what_a_run_gives(nets: dict[str, Any], engine: Any) -> None:
    endless = 0
    for name, (net, x) in nets.items():
        steps, goes_on = net.network.timesteps, streamable(net)
        expected = net.run(x, "dense", trace=True)
        stream = net.stream(restart=None if goes_on else steps, engine=engine)
        endless += goes_on
        for image in (0, 1):
            if goes_on:
                stream.reset()  # the others begin anew by themselves
            for t, frame in enumerate(frames_of(net, x, image)):
                out = stream.step(frame, trace=True)
                for layer, levels in expected.levels.items():
                    np.testing.assert_array_equal(out.levels[layer][0, 0], levels[t, image], f"{name} {layer} {t}")
            np.testing.assert_array_equal(out.logits[0], expected.logits[image], name)
            assert (stream.frames, out.scale) == (steps, expected.scale)
    assert endless >= 3


def over(net: Network, timesteps: int) -> Network:
    """The same network over more timesteps, as the engine runs it: every bound of the tests' networks holds for these too."""
    return Network(replace(net.network, timesteps=timesteps))


@pytest.mark.parametrize("window", [1, 3, 7])
def test_logits_are_of_the_latest_frames(nets: dict[str, Any], window: int) -> None:
    """By definition: what a run over all frames adds to the bias, less what a run over all but the latest adds."""
    net = next(net for net, _ in nets.values() if not net.network.static and streamable(net))
    frames = pixels(9, 1, *net.network.input_shape, seed=2)
    stream, bias = net.stream(window), net.network.readout.bias
    for n, frame in enumerate(frames[:, 0], 1):
        out = stream.step(frame)
        added = over(net, n).run(frames[:n], "dense").logits - bias
        if n > window:
            added -= over(net, n - window).run(frames[: n - window], "dense").logits - bias
        share = [(2 * b * window + net.network.timesteps) // (2 * net.network.timesteps) for b in bias.tolist()]
        np.testing.assert_array_equal(out.logits, added + np.array(share))
        assert out.scale == net.network.scale * net.network.timesteps / window
    assert f"{stream!r}".startswith(f"Stream(9 frames so far, logits of the latest {window};")


@pytest.mark.parametrize("restart", [1, 2])
def test_a_window_ends_where_the_stream_begins_anew(nets: dict[str, Any], restart: int) -> None:
    """Its logits are then those of a network over so many timesteps, with the bias of as many."""
    net = next(net for net, _ in nets.values() if net.network.timesteps > 2 and not net.network.mixed_layers)
    stream, steps = net.stream(restart=restart), net.network.timesteps
    assert stream.window == restart
    assert net.stream(restart=steps + 1).window == steps
    shorter = Network(net.network.over(restart))
    frames = pixels(2 * restart, 1, *net.network.input_shape, seed=3)
    if net.network.static:
        frames = frames[:1].repeat(len(frames), 0)
    for begin in (0, restart):
        for frame in frames[begin : begin + restart, 0]:
            out = stream.step(frame)
        x = frames[0] if net.network.static else frames[begin : begin + restart]
        assert out.logits.tolist() == shorter.run(x, "dense").logits.tolist()


def test_bounds_hold_over_all_time_and_are_close(nets: dict[str, Any]) -> None:
    seen = 0
    for net, _ in nets.values():
        largest = {s.name: net.network.largest(s) for s in net.network.synapses}
        for layer in net.network.layers:
            if layer.neuron.leak is not None and layer.neuron.reset.max() < MEMBRANE_BOUND:
                late = membrane_bound(layer, largest, 300)  # the slowest leak here is 3 / 4: this is its fixed point
                assert late <= endless_bound(layer, largest) <= late + 12
                seen += 1
    assert seen > 30


def worst_network(leak: tuple[int, int] | None, weight: int) -> IntegerNetwork:
    """One neuron that only ever falls, and whose membrane comes to rest at the bound: bright pixels, one negative weight."""
    shape = (1, 1, 1)
    neuron = IntegerNeuron(1, False, np.array([[64]], np.int32), np.array([64], np.int32), "once", leak, True)
    into = Synapse("in", INPUT, "conv", np.full((1, 1, 1, 1), weight, np.int16), shape, shape, absorbed=True)
    head = Synapse("head", "sn", "conv", np.ones((1, 1, 1, 1), np.int16), shape, shape, absorbed=True)
    layer = IntegerLayer("sn", (into,), np.zeros(1, np.int32), shape, 10, neuron, np.ones(1))
    readout = IntegerLayer("readout", (head,), np.zeros(1, np.int64), shape, 0, None, np.ones(1))
    return IntegerNetwork(shape, 2, False, (layer,), readout, 1.0)


def test_the_worst_frames_come_to_the_bound_and_stay_there() -> None:
    net = Network(worst_network((15, 4), -240))
    bound = endless_bound(net.network.layers[0], {"in": 255})
    assert bound < MEMBRANE_BOUND < 2 * bound
    frame = np.full((1, 1, 1), 255, np.uint8)
    for engine in ("auto", "dense"):
        stream = net.stream(engine=engine)
        for _ in range(400):
            stream.step(frame)
        at_rest = -int(stream._carried["sn"].item()) + 240 * 255 * 1024
        assert bound - 16 <= at_rest <= bound


def test_what_is_not_proved_is_refused_by_name() -> None:
    close = worst_network((15, 4), -260)  # beyond 2^30 in the end, but not in two timesteps
    with pytest.raises(
        GraphError, match=r"layer 'sn': its membrane may reach 2\^30 over endless frames: deploy .* --stream"
    ):
        Network(close).stream()
    assert Network(close).stream(restart=2).step(np.zeros((1, 1, 1), np.uint8)).logits.tolist() == [[0]]
    with pytest.raises(GraphError, match=r"layer 'sn': its membrane may reach 2\^30 in 4000 frames: restart earlier"):
        Network(close).stream(restart=4000)
    for leak in (None, (4, 2)):
        with pytest.raises(GraphError, match="layer 'sn' has no leak, so its membrane has no bound"):
            Network(worst_network(leak, -1)).stream()
    id, neuron, shape, options = MIXED_CASES[0]
    with pytest.raises(GraphError, match="mixes all timesteps"):
        deployed(id, neuron, shape, **options).stream()
    large = worst_network((1, 1), -1)
    huge = replace(large.readout, bias=np.array([2**50]))
    with pytest.raises(GraphError, match=r"over a window of 4096 frames logits may reach 2\^53"):
        Network(replace(large, readout=huge)).stream(4096)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be a whole number of frames in 1..4096, got 0"),
        ({"window": 2.0}, "window must be a whole number"),
        ({"restart": 0}, "restart must be a whole number of frames in 1..4096, got 0"),
        (
            {"window": 3, "restart": 2},
            "window must be at most 2, the frames between two restarts, got 3: restart later",
        ),
        ({"threads": 0}, "threads must be a whole number in 1..256, got 0"),
        ({"engine": "cuda"}, "engine must be one of auto, dense, bitplane for a stream, got 'cuda'"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LbqError, match=message):
        Network(worst_network((1, 1), 1)).stream(**options)


def test_wrong_frames_are_one_line_and_change_nothing() -> None:
    stream = Network(replace(worst_network((1, 1), 1), input_max=16)).stream()
    cases: list[tuple[Any, str]] = [
        (np.zeros((1, 1, 1)), "frame must be uint8, as frames are stored, got float64"),
        (np.zeros((2, 1, 1), np.uint8), r"frame must be \[1\], got \[2, 1, 1\]"),
        (np.full((1, 1, 1), 17, np.uint8), "frame has values up to 17, the network was trained on 0 to 16: scale it"),
    ]
    for frame, message in cases:
        with pytest.raises(LbqError, match=message):
            stream.step(frame)
    assert stream.frames == 0
    assert stream.step(np.zeros(1, np.uint8)).predictions.tolist() == [0]


def test_the_documentations_stream_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "streams.md").read_text(), re.S)
    exec(blocks[1], {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "] == list(
        map(str, range(1, 11))
    )
