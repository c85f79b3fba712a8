"""Rewrites of a lowered network, each named after what it moves. All are exact in real arithmetic. NumPy only.

`fold_gain` moves a neuron's input gain into what leads to it, `on_pixels` the normalisation of images into the first
layer, `absorb` each step into every weight that reads it. BatchNorm, the 1/n of average pools and residual merges are
moved while the network is lowered (`lbq.deploy.lower`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lbq.errors import GraphError
from lbq.graph import INPUT, Array, Graph, Layer, Synapse


def fold_gain(graph: Graph) -> Graph:
    """A parametric LIF integrates gain * current: the gain goes into the weights and the bias."""

    def folded(layer: Layer) -> Layer:
        if layer.neuron is None or layer.neuron.gain == 1.0:
            return layer
        gain = layer.neuron.gain
        synapses = tuple(replace(s, weight=s.weight * gain) for s in layer.synapses)
        return replace(layer, synapses=synapses, bias=layer.bias * gain, neuron=replace(layer.neuron, gain=1.0))

    return replace(graph, layers=tuple(folded(layer) for layer in graph.layers))


def on_pixels(graph: Graph, mean: Sequence[float], std: Sequence[float], scale: float) -> Graph:
    """Weights for (pixel / scale - mean) / std become weights for pixel - offset, with offset = scale * mean.

    The offset is kept apart: folded into a constant bias it would be wrong at borders, where padding stands for the
    mean pixel and not for a black one.
    """
    channels = graph.input_shape[0]
    if len(mean) != channels or len(std) != channels:
        raise GraphError(f"mean and std need one value for each of {channels} channels, got {len(mean)} and {len(std)}")
    if graph.offset is not None:
        raise GraphError("the network reads pixels already")
    factor = 1 / (np.asarray(std, np.float64) * scale)

    def moved(layer: Layer) -> Layer:
        return replace(layer, synapses=tuple(_scaled(s, factor) if s.source == INPUT else s for s in layer.synapses))

    return replace(
        graph,
        layers=tuple(moved(layer) for layer in graph.layers),
        readout=moved(graph.readout),
        offset=np.asarray(mean, np.float64) * scale,
    )


def absorb(graph: Graph) -> Graph:
    """Multiply each source layer's scale into every weight that reads it: W_hat = gamma * W (Eq. absorb).

    A tensor with several readers is absorbed into each of them; a residual identity becomes a diagonal synapse with
    the source's scale as weight, so that operands meet in one scale whatever the learned steps are.
    """

    def absorbed(synapse: Synapse) -> Synapse:
        if synapse.source == INPUT or synapse.absorbed:
            return synapse
        return replace(_scaled(synapse, graph.spec(synapse.source).scale), absorbed=True)

    def over(layer: Layer) -> Layer:
        return replace(layer, synapses=tuple(absorbed(s) for s in layer.synapses))

    return replace(graph, layers=tuple(over(layer) for layer in graph.layers), readout=over(graph.readout))


def _scaled(synapse: Synapse, factor: Array) -> Synapse:
    """A synapse whose source is multiplied by `factor`, a scalar or one for each of the source's channels."""
    if synapse.kind == "conv" and factor.ndim:
        per_group = synapse.weight.shape[0] // synapse.groups
        factor = factor.reshape(synapse.groups, -1).repeat(per_group, axis=0)[:, :, None, None]
    return replace(synapse, weight=synapse.weight * factor)
