"""Rewrites of a lowered network, each named after what it moves. All are exact in real arithmetic. NumPy only.

`fold_gain` moves a neuron's input gain into the weights and bias that lead to it. `on_pixels` moves the normalisation of
images into the first layer. `absorb` moves each step into every weight that reads it. `lbq.deploy.lower` has already
moved BatchNorm, the 1/n of average pools and residual merges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lbq.errors import GraphError
from lbq.graph import INPUT, Array, Graph, Layer, Synapse


def fold_gain(graph: Graph) -> Graph:
    """A parametric LIF integrates gain * current: the gain goes into the weights and the bias."""

    def fold(layer: Layer) -> Layer:
        if layer.neuron is None or layer.neuron.gain == 1.0:
            return layer
        gain = layer.neuron.gain
        synapses = tuple(replace(s, weight=s.weight * gain) for s in layer.synapses)
        return replace(layer, synapses=synapses, bias=layer.bias * gain, neuron=replace(layer.neuron, gain=1.0))

    return replace(graph, layers=tuple(fold(layer) for layer in graph.layers))


def on_pixels(graph: Graph, mean: Sequence[float], std: Sequence[float], scale: float) -> Graph:
    """Weights for (pixel / scale - mean) / std become weights for pixel - offset, with offset = scale * mean.

    The offset stays apart. In a constant bias it would be wrong at borders, where padding stands for the mean pixel and
    not for a black one.
    """
    channels = graph.input_shape[0]
    if len(mean) != channels or len(std) != channels:
        raise GraphError(f"mean and std need one value for each of {channels} channels, got {len(mean)} and {len(std)}")
    if graph.offset is not None:
        raise GraphError("the network reads pixels already")
    factor = 1 / (np.asarray(std, np.float64) * scale)

    def on_pixel(synapse: Synapse) -> Synapse:
        return _scaled(synapse, factor) if synapse.source == INPUT else synapse

    return replace(_with_synapses(graph, on_pixel), offset=np.asarray(mean, np.float64) * scale)


def absorb(graph: Graph) -> Graph:
    """Multiply each source layer's scale into every weight that reads it: W_hat = gamma * W (Eq. absorb).

    The scale of a tensor with several readers goes into each of them. A residual identity becomes a diagonal synapse with
    the source's scale as weight, so that operands meet in one scale whatever the learned steps are. A product of levels has
    the scales of all its operands in one factor.
    """

    def absorbed(synapse: Synapse) -> Synapse:
        if synapse.source == INPUT or synapse.absorbed:
            return synapse
        if synapse.kind == "matmul":
            return replace(synapse, weight=synapse.weight * _product_scale(graph, synapse), absorbed=True)
        return replace(_scaled(synapse, _summed(scale_of(graph, synapse.source), synapse)), absorbed=True)

    return _with_synapses(graph, absorbed)


def check_products(graph: Graph) -> None:
    """Refuse products of levels whose steps cannot leave the sum, before anything is trained."""
    for synapse in graph.synapses:
        if synapse.kind == "matmul":
            _product_scale(graph, synapse)


def scale_of(graph: Graph, source: str) -> Array:
    """The value of a level of a layer or a gate: a scalar, or one for each channel."""
    gate = next((g for g in graph.gates if g.name == source), None)
    if gate is None:
        return graph.spec(source).scale
    factor, scale = scale_of(graph, gate.factor), scale_of(graph, gate.source)
    return factor.repeat(gate.shape[0] // len(factor)) * scale if factor.ndim else factor * scale


def _product_scale(graph: Graph, synapse: Synapse) -> Array:
    """What a unit of a product of levels is worth. Scales of V may differ between channels, those of scores between heads."""
    factor = np.ones(())
    for operand in ("source", "keys", "values"):
        if not (source := getattr(synapse, operand)):
            continue
        scale = scale_of(graph, source)
        if scale.size > 1 and operand != "values":
            if synapse.keys:
                raise GraphError(
                    f"layer {source!r}: its steps differ between channels, which the product {synapse.name!r} sums over: train "
                    "with one step for the layer, neuron.per_channel=false"
                )
            scale = scale.repeat(synapse.per_head)
        factor = factor * scale
    return factor


def _summed(scale: Array, synapse: Synapse) -> Array:
    """The scale of levels that may be added up over channels, whose scale must then be one."""
    channels = math.prod(pool.channels for pool in synapse.pools)
    if channels == 1 or not scale.ndim:
        return scale
    if (scale.reshape(-1, channels) != scale[::channels, None]).any():
        raise GraphError(
            f"layer {synapse.source!r}: its steps differ between channels, which {synapse.name!r} sums over: train with one "
            "step for the layer, neuron.per_channel=false"
        )
    return scale[::channels]


def _with_synapses(graph: Graph, changed: Callable[[Synapse], Synapse]) -> Graph:
    """The graph with every synapse changed."""

    def rewired(layer: Layer) -> Layer:
        return replace(layer, synapses=tuple(changed(s) for s in layer.synapses))

    return replace(graph, layers=tuple(rewired(layer) for layer in graph.layers), readout=rewired(graph.readout))


def _scaled(synapse: Synapse, factor: Array) -> Synapse:
    """A synapse whose source is multiplied by `factor`, a scalar or one for each of the source's channels."""
    if synapse.kind == "conv" and factor.ndim:
        per_group = synapse.weight.shape[0] // synapse.groups
        factor = factor.reshape(synapse.groups, -1).repeat(per_group, axis=0)[:, :, None, None]
    return replace(synapse, weight=synapse.weight * factor)
