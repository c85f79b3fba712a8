"""Integer networks of random numbers: every kind of neuron, synapse and pool, for the tests of exports."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine import Network
from lbq.graph import INPUT, Pool, Shape, Synapse, output_size
from lbq.graph.integer import (
    MEMBRANE_BOUND,
    IntegerLayer,
    IntegerNetwork,
    IntegerNeuron,
    membrane_bound,
    readout_bound,
)
from lbq.graph.rules import Reset
from tests.support.small_nets import pixels


def random_network(seed: int, reset: Reset, decay_reset: bool, signed: bool) -> IntegerNetwork:
    random = np.random.default_rng(seed)
    static, timesteps = bool(random.integers(2)), int(random.integers(2, 5))
    input_shape = (2, int(random.integers(5, 8)), int(random.integers(5, 8)))
    shapes: dict[str, Shape] = {INPUT: input_shape}

    def conv(name: str, source: str, kind: Any, kernel: tuple[int, int], **options: Any) -> Synapse:
        pools, groups = options.pop("pools", ()), options.get("groups", 1)
        shape = shapes[source]
        for p in pools:
            shape = p.output(shape)
        most = 9 if kind == np.int8 else 300
        weight = random.integers(-most, most, (4, shape[0] // groups, *kernel), kind, endpoint=True)
        size = output_size(shape[1:], kernel, *({**GEOMETRY, **options}[key] for key in GEOMETRY))
        return Synapse(name, source, "conv", weight, shape, (4, *size), pools, absorbed=True, **options)

    def identity(name: str, source: str, pools: tuple[Pool, ...] = ()) -> Synapse:
        shape = shapes[source]
        for p in pools:
            shape = p.output(shape)
        return Synapse(name, source, "identity", random.integers(-90, 90, 4, np.int32), shape, shape, pools)

    def layer(name: str, *synapses: Synapse, pixels: bool = False) -> IntegerLayer:
        shape, n_max, fraction = synapses[0].out_shape, int(random.integers(1, 7)), int(random.integers(0, 5))
        step = random.integers(64, 90 if not pixels else 900, (4, 1)) << (fraction if pixels else 0)
        ladder = np.sort(step * random.uniform(1, 4, (4, n_max)), 1).astype(np.int32)
        leak = [None, (1, 1), (3, 2), (40000, 16), (0, 1)][int(random.integers(5))]
        drop = (step[:, 0] * random.uniform(0, 1.5)).astype(np.int32)
        neuron = IntegerNeuron(n_max, signed, ladder, drop, reset, leak, decay_reset)
        bias = random.integers(-99, 200, shape if pixels and static else 4, np.int32)
        shapes[name] = shape
        return IntegerLayer(name, synapses, bias, shape, fraction, neuron, np.ones(4))

    a = layer("a", conv("a1", INPUT, np.int8, (3, 3), padding=(1, 1)), pixels=True)
    b = layer(
        "b",
        conv("b1", "a", np.int8, (3, 2), padding=(2, 1), dilation=(2, 2), groups=2),
        conv("b2", "a", np.int16, (1, 3), padding=(0, 1), pools=(Pool("max", (3, 3), (1, 1), (1, 1)),)),
        conv("b3", INPUT, np.int8, (1, 3), padding=(0, 1)),
    )
    c = layer(
        "c", identity("c1", "b"), conv("c2", "b", np.int8, (1, 1), groups=4)
    )  # cannot take b's place: it is read again
    d = layer("d", conv("d1", "a", np.int8, (1, 3), padding=(0, 1)), identity("d2", "c"))  # takes c's
    twice = (Pool("max", (2, 2), (2, 1), (1, 0)), Pool("sum", (2, 3), (1, 2), (0, 1)))
    e = layer(
        "e", identity("e1", "d", twice), identity("e2", "b", twice), conv("e3", "a", np.int8, (2, 2), stride=(2, 2))
    )
    f = layer("f", identity("f1", "e"), conv("f2", "e", np.int8, (3, 3), padding=(1, 1)))  # nor e's: neighbours read it
    whole = (Pool("sum", shapes["d"][1:], (1, 1)),)
    end = (*twice, Pool("sum", e.shape[1:], (1, 1)))
    synapses = (
        conv("r1", "f", np.int16, f.shape[1:]),
        conv("r2", "d", np.int8, (1, 1), pools=whole),
        identity("r3", "b", end),
    )
    bias = random.integers(-(2**40), 2**40, 4, np.int64)
    readout = IntegerLayer("readout", synapses, bias, (4, 1, 1), 0, None, np.ones(4))
    return IntegerNetwork(input_shape, timesteps, static, (a, b, c, d, e, f), readout, 1.0)


GEOMETRY = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
KINDS: list[tuple[Reset, bool, bool]] = list(itertools.product(("once", "level", "hard"), (True, False), (True, False)))


def random_networks() -> dict[str, tuple[Network, NDArray[np.uint8]]]:
    return {f"net{seed}": with_inputs(random_network(seed, *kind), seed) for seed, kind in enumerate(KINDS)}


def with_inputs(network: IntegerNetwork, seed: int) -> tuple[Network, NDArray[np.uint8]]:
    """A network whose bounds hold, and four inputs."""
    largest = {s.name: network.largest(s) for s in network.synapses}
    assert max(membrane_bound(layer, largest, network.timesteps) for layer in network.layers) < MEMBRANE_BOUND
    assert readout_bound(network) < 2**53
    lead = (4,) if network.static else (network.timesteps, 4)
    return Network(network), pixels(*lead, *network.input_shape, seed=seed)


def reset_beyond_the_last_timestep() -> tuple[Network, NDArray[np.uint8]]:
    """A file may hold it: taken off at the timestep after, which there is not, it leaves every bound as it was."""
    made = random_network(len(KINDS), "level", decay_reset=False, signed=False)
    neurons = {layer.name: made.spec(layer.name) for layer in made.layers}
    huge = {name: replace(n, reset=np.full_like(n.reset, 2**31 - 1)) for name, n in neurons.items()}
    layers = tuple(replace(layer, neuron=huge[layer.name]) for layer in made.layers)
    return with_inputs(replace(made, timesteps=1, layers=layers), 0)
