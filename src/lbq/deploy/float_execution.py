"""Run an absorbed network on integer levels with real-valued weights, in float64: the exact meaning of a trained network.

Its levels equal training's at every layer and timestep; only the order of summation differs. Rounding its weights to
integers is all that separates it from what is deployed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from lbq.errors import GraphError
from lbq.graph import INPUT, Array, Graph, Layer, NeuronSpec, Synapse
from lbq.graph.levels import gated, pool, synapse_product
from lbq.graph.rules import threshold_shift
from lbq.kernels import surrogate as surrogates
from lbq.kernels.reference import Constants, Rule, emissions

Levels = NDArray[np.int64]
TIE = 1e-9  # a membrane this close to a threshold, in steps, may round either way in another order of summation


@dataclass(frozen=True)
class Result:
    """logits `[B, classes]`; levels of each layer `[T, B, C, H, W]`; ties: membranes of each image within `TIE`."""

    logits: Array
    levels: dict[str, Levels]
    ties: NDArray[np.int64]


@torch.no_grad()
def execute(graph: Graph, x: NDArray[np.generic]) -> Result:
    """Run `x` ([B, C, H, W] for a static graph, else [T, B, C, H, W]) through an absorbed graph."""
    if not graph.absorbed:
        raise GraphError("the graph's steps are not absorbed yet: call lbq.deploy.absorb(graph) first")
    inputs: Array = np.asarray(x, np.float64)
    if inputs.shape[-3:] != graph.input_shape or inputs.ndim != (4 if graph.static else 5):
        lead = "[B, " if graph.static else f"[{graph.timesteps}, B, "
        raise GraphError(f"x must be {lead}{str(graph.input_shape)[1:-1]}], got {list(inputs.shape)}")
    if graph.offset is not None:
        inputs = inputs - graph.offset[:, None, None]
    levels: dict[str, Levels] = {}
    ties: NDArray[np.int64] = np.zeros((), np.int64)

    def currents(layer: Layer) -> list[Array]:
        """By timestep. The current of a static input is the same at all of them, and computed once."""
        totals: list[Array] = [layer.bias[None, :, None, None]] * graph.timesteps
        for synapse in layer.synapses:
            if synapse.source == INPUT:
                parts = [synapse_current(synapse, frame) for frame in (inputs[None] if graph.static else inputs)]
                parts = parts * (graph.timesteps if graph.static else 1)
            elif synapse.kind == "matmul":
                products = synapse_product(synapse, [levels[source] for source in synapse.sources])
                parts = [part * synapse.weight[:, None, None] for part in products]
            else:
                pooled = (pool(level, synapse.pools) for level in levels[synapse.source])
                parts = [synapse_current(synapse, level.astype(np.float64)) for level in pooled]
            totals = [total + part for total, part in zip(totals, parts, strict=True)]
        return totals

    for layer in graph.layers:
        spec, emitted = graph.spec(layer.name), []
        x_all = np.stack(mixed(spec, currents(layer)))
        if np.isnan(x_all).any():
            raise GraphError(f"the current of layer {layer.name!r} is NaN: check the input and the weights")
        for emission, _ in emissions(torch.from_numpy(x_all), *neuron_of(spec)):
            emitted.append(emission.level.numpy().astype(np.int64))
            ties = ties + (distance_to_threshold(spec, emission.membrane.numpy()) < TIE).sum((1, 2, 3))
        levels[layer.name] = np.stack(emitted)
        for gate in graph.gates_behind(layer.name):
            levels[gate.name] = gated(levels[gate.factor], levels[gate.source])
    logits = np.mean(currents(graph.readout), axis=0)[:, :, 0, 0]
    return Result(logits, {layer.name: levels[layer.name] for layer in graph.layers}, ties)


def mixed(spec: NeuronSpec, currents: list[Array]) -> list[Array]:
    """Currents by timestep, mixed over time where the neuron does so (LM-HT)."""
    if spec.mixing is None:
        return currents
    if spec.mixing.shape != (len(currents),) * 2:
        raise GraphError(f"the neurons mix {len(spec.mixing)} timesteps, the network has {len(currents)}")
    return list(np.tensordot(spec.mixing, np.stack(currents), 1))


def synapse_current(synapse: Synapse, x: Array) -> Array:
    """Currents `[B, O, OH, OW]` of `x` [B, C, H, W]."""
    if synapse.kind == "identity":
        return x * synapse.weight[:, None, None]
    weight = torch.from_numpy(np.ascontiguousarray(synapse.weight))
    out: Array = F.conv2d(
        torch.from_numpy(x), weight, None, synapse.stride, synapse.padding, synapse.dilation, synapse.groups
    ).numpy()
    return out


def neuron_of(spec: NeuronSpec) -> tuple[Constants, Rule]:
    """A neuron as the reference kernel takes it. Nothing is differentiated here, so any surrogate will do."""
    thresholds = None if spec.thresholds is None else torch.from_numpy(spec.thresholds)
    step = torch.from_numpy(np.asarray(per_channel(spec.step)))
    constants = Constants(step, torch.zeros(()), spec.leak, spec.alpha, spec.gain, thresholds=thresholds)
    return constants, Rule(spec.n_max, surrogates.get("box"), spec.rounding, spec.reset, spec.decay_reset)


def distance_to_threshold(spec: NeuronSpec, u: Array) -> Array:
    """How far each membrane is from the nearest threshold, in steps."""
    if spec.thresholds is not None:
        gaps = np.abs(u[..., None] - spec.thresholds) / spec.thresholds[0]
        return np.asarray(gaps.min(-1), np.float64)
    r = u / per_channel(spec.step)
    if spec.signed:
        r = np.abs(r)
    r = r + threshold_shift(spec.rounding)
    return np.abs(r - np.clip(np.rint(r), 1, spec.n_max))


def per_channel(value: Array) -> Array:
    """A scalar, or `[C]` shaped to broadcast over `[B, C, H, W]`."""
    return value[:, None, None] if value.ndim else value
