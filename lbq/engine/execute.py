"""Run a whole `Graph`, timestep by timestep, and say what it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lbq.engine.neuron import Membrane, distance_to_threshold, emit
from lbq.engine.synapse import Levels, Tally, bitplane, dense, pool
from lbq.errors import GraphError
from lbq.graph import INPUT, Array, Graph, Layer

Accumulate = Literal["bitplane", "dense"]
TIE = 1e-9  # a membrane this close to a threshold, in steps, may round either way in another order of summation


@dataclass
class Result:
    """What a run gave.

    logits `[B, classes]`; levels of each layer `[T, B, C, H, W]`; tallies by synapse (bit planes only); ties: how many
    membranes of each image lay within `TIE` of a threshold.
    """

    logits: Array
    levels: dict[str, Levels]
    tallies: dict[str, Tally] = field(default_factory=dict)
    ties: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def predictions(self) -> NDArray[np.int64]:
        return self.logits.argmax(1)


def execute(graph: Graph, x: NDArray[np.floating], accumulate: Accumulate = "bitplane") -> Result:
    """Run `x` ([B, C, H, W] for a static graph, else [T, B, C, H, W]) through an absorbed graph on integer levels.

    The layers that read the input are real-valued convolutions, done once for a static image; everything else acts on
    integer levels.
    """
    if not graph.absorbed:
        raise GraphError("the graph's steps are not absorbed yet: call lbq.graph.absorb(graph) first")
    inputs: Array = np.asarray(x, np.float64)
    if inputs.shape[-3:] != graph.input_shape or inputs.ndim != (4 if graph.static else 5):
        lead = "[B, " if graph.static else f"[{graph.timesteps}, B, "
        raise GraphError(f"x must be {lead}{str(graph.input_shape)[1:-1]}], got {list(inputs.shape)}")
    if accumulate not in ("bitplane", "dense"):
        raise ValueError(f"accumulate must be 'bitplane' or 'dense', got {accumulate!r}")
    run = _Run(graph, accumulate)
    logits = [run.timestep(inputs if graph.static else inputs[t]) for t in range(graph.timesteps)]
    levels = {name: np.stack(steps) for name, steps in run.levels.items()}
    return Result(np.mean(logits, axis=0)[:, :, 0, 0], levels, run.tallies, run.ties)


class _Run:
    def __init__(self, graph: Graph, accumulate: Accumulate) -> None:
        self.graph, self.accumulate = graph, accumulate
        self.membranes = {layer.name: Membrane() for layer in graph.layers}
        self.levels: dict[str, list[Levels]] = {layer.name: [] for layer in graph.layers}
        self.ties: NDArray[np.int64] = np.zeros((), np.int64)
        self.tallies = {s.name: Tally() for layer in graph.all_layers for s in layer.synapses if s.source != INPUT}
        self.stem: dict[str, Array] = {}  # currents of a static input, computed once

    def timestep(self, x: Array) -> Array:
        for layer in self.graph.layers:
            spec = self.graph.spec(layer.name)
            current = self._current(layer, x)
            if np.isnan(current).any():
                raise GraphError(f"the current of layer {layer.name!r} is NaN: check the input and the weights")
            level, u = emit(spec, current, self.membranes[layer.name])
            self.levels[layer.name].append(level)
            self.ties = self.ties + (distance_to_threshold(spec, u) < TIE).sum((1, 2, 3))
        return self._current(self.graph.readout, x)

    def _current(self, layer: Layer, x: Array) -> Array:
        total: Array = layer.bias[None, :, None, None]
        for synapse in layer.synapses:
            if synapse.source == INPUT:
                if not self.graph.static or synapse.name not in self.stem:
                    self.stem[synapse.name] = dense(synapse, x)
                total = total + self.stem[synapse.name]
                continue
            level = pool(self.levels[synapse.source][-1], synapse.pools)
            if self.accumulate == "dense":
                total = total + dense(synapse, level.astype(np.float64))
            else:
                # a sum pool raises levels above n_max, and with them the planes
                planes = max(self.graph.spec(synapse.source).planes, int(np.abs(level).max(initial=0)).bit_length())
                total = total + bitplane(synapse, level.astype(np.int64), planes, self.tallies[synapse.name])
        return total
