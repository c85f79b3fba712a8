"""What is proved of frames that never end: bounds of membranes over all time, of a readout over a window. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lbq.errors import GraphError
from lbq.graph.integer import (
    MEMBRANE_BOUND,
    MOST_TIMESTEPS,
    SATURATED,
    IntegerLayer,
    IntegerNetwork,
    beyond_currents,
    inflow_bound,
    membrane_bound,
    readout_fits,
)


def endless_bound(layer: IntegerLayer, largest: Mapping[str, int]) -> int:
    """The most that |U|, |V| and every partial sum of U can be at any timestep, however many there are.

    One timestep takes a bound V of the membranes to at most max(leak(V) + inflow + pending, undershoot), as
    `membrane_bound` has it. The bound B given here is at least undershoot, and B - leak(B) at least inflow + pending. So a
    timestep that begins within B ends within B, and the first begins at 0.

    largest: for each synapse, the largest magnitude of the levels that it reads.
    """
    neuron = layer.neuron
    if neuron is None or neuron.leak is None or (lost := (1 << neuron.leak[1]) - neuron.leak[0]) <= 0:
        raise GraphError(
            f"layer {layer.name!r} has no leak, so its membrane has no bound over endless frames: use a neuron that leaks, or "
            "begin anew after some frames, which lbq watch --restart and stream(restart=...) do"
        )
    inflow = inflow_bound(layer, largest)
    if (total := int(inflow.max(initial=0))) >= SATURATED:
        return total
    undershoot = (beyond_currents(neuron) * (neuron.thresholds < MEMBRANE_BOUND)).max(1)  # at the bound: never reached
    pending = 0 if neuron.decay_reset else undershoot
    halves = (2 * (inflow + pending) + 1) << (neuron.leak[1] - 1)  # for leak(B) is at most B * m / 2^k + 1/2
    at_rest = -(-halves // lost)
    return int(np.maximum(at_rest, undershoot).max(initial=0))


def check_membranes(network: IntegerNetwork, restart: int | None = None) -> None:
    """Refuse a network whose membranes are not proved to fit over endless frames, or over `restart` frames from rest."""
    if mixed := network.mixed_layers:
        raise GraphError(f"layer {mixed[0]!r} mixes all timesteps (LM-HT), so it has no streams: use another neuron")
    largest = {s.name: network.largest(s) for s in network.synapses}
    for layer in network.layers:
        if restart is not None:
            if membrane_bound(layer, largest, restart) >= MEMBRANE_BOUND:
                raise GraphError(
                    f"layer {layer.name!r}: its membrane may reach 2^30 in {restart} frames: restart earlier"
                )
        elif endless_bound(layer, largest) >= MEMBRANE_BOUND:
            raise GraphError(
                f"layer {layer.name!r}: its membrane may reach 2^30 over endless frames: deploy its run with --stream, or "
                "begin anew after some frames, which lbq watch --restart and stream(restart=...) do"
            )


def over_window(network: IntegerNetwork, window: int) -> IntegerNetwork:
    """The network whose readout sums so many timesteps. Refused where its logits are not proved to stay below 2^53."""
    if type(window) is not int or not 1 <= window <= MOST_TIMESTEPS:
        raise GraphError(f"window must be a whole number of frames in 1..{MOST_TIMESTEPS}, got {window!r}")
    other = network.over(window)
    if not readout_fits(other):
        raise GraphError(f"over a window of {window} frames logits may reach 2^53: use a shorter one")
    return other
