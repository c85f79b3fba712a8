"""From integers back to a network that trains: what deployment did, undone.

Deployment multiplies into each weight what stands around it: the step of its source, the 1/n of pools, a gain, the
normalisation of pixels. How much that is comes from deployment itself: a network with weights of 1 goes through the same
rewrites. Integers in their units, divided by it, are weights again. Steps come from thresholds.

Of BatchNorm, which is folded away, only the bias is left. Here each BatchNorm passes its input on, and one in each layer adds
the bias. The statistics that training needs are measured on data afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lbq.deploy.lowering.faithful import exact_copy
from lbq.deploy.lowering.lower import lower, norms_of
from lbq.deploy.lowering.trace import NORMS
from lbq.errors import GraphError
from lbq.graph import INPUT, Array, Graph, Layer, NeuronSpec, Synapse
from lbq.graph.integer import MEMBRANE_BOUND, IntegerLayer, IntegerNetwork, IntegerNeuron
from lbq.graph.quantise import bias_in_units, integer_neuron
from lbq.graph.rewrites import absorb, fold_gain, on_pixels
from lbq.graph.rules import threshold_shift
from lbq.neuron import SpikingNeuron
from lbq.neuron.burst import SteppedNeuron
from lbq.neuron.checks import logit

ROUNDING_UNITS, ROUNDING_SHARE = 2.0, 1e-3  # by so much may constants differ that were rounded to whole units
LEAK_ROUNDING = 2.0**-15
TAIL = "eta"  # of a surrogate: files hold none
AS_THE_FILE = "set the model as the file's network had it (model.id, model.stem_stride)"
# of two synapses
COMPARED = ("source", "kind", "pools", "stride", "padding", "dilation", "groups", "copy_of", "sources", "heads")


@dataclass(frozen=True)
class Unfolded:
    """weights: in float64, by their names in the network's state; tails are not among them. border: the most, in steps, by
    which currents at the border differ from the file's, because padding stands for another mean of the pixels."""

    weights: dict[str, Tensor]
    border: float


@torch.no_grad()
def unfold(
    net: nn.Module,
    network: IntegerNetwork,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    scale: int = 255,
    head: bool = True,
) -> Unfolded:
    """Weights with which `net` deploys to `network`, where both have the same layers. `net` itself stays as it is.

    mean, std, scale: how pixels are normalised for `net`, as in `deploy`; it need not be as it was for the file's network.
    head: False leaves out the readout, for other classes.
    """
    exact = exact_copy(net)
    exact.timesteps = network.timesteps  # type: ignore[assignment]  # for others the weights are the same
    form = network.input_shape, network.timesteps, network.static
    _compare(lower(exact, *form, weights=False), network, head)
    layers, norms = network.all_layers if head else network.layers, norms_of(exact, *form)
    for layer in network.layers:
        _adopt(layer, exact.get_submodule(layer.name))
    branches = {layer.name: list(_branches(layer, exact, norms)) for layer in layers}
    holders = {name: _pass_on(modules) for name, modules in branches.items()}
    for holder in filter(None, holders.values()):
        holder.bias.fill_(1)
    units = lower(exact, *form)  # of each layer, what a weight and a bias of 1 become
    units = absorb(fold_gain(on_pixels(units, mean, std, scale) if len(mean) else units))
    border = 0.0
    for layer, unit in zip(layers, units.all_layers, strict=False):
        for synapse, one in zip(layer.synapses, unit.synapses, strict=True):
            _set_weight(exact, layer, synapse, one.weight)
        bias, odd = _bias(layer, network, units.offset)
        border = max(border, odd)
        _set_bias(layer, holders[layer.name], bias, unit.bias)
    known = {id(module) for modules in branches.values() for branch in modules for module in branch}
    known |= {id(exact.get_submodule(layer.name)) for layer in network.layers}
    owned = {
        f"{n}.{key}" for n, m in exact.named_modules() if id(m) in known for key in {**m._parameters, **m._buffers}
    }
    weights = {k: v for k, v in exact.state_dict().items() if k in owned and not k.endswith(f".{TAIL}")}
    return Unfolded(weights, border)


# The same layers?
# ---------------------------------------------------------------------------------------------------------------------


def _compare(graph: Graph, network: IntegerNetwork, head: bool) -> None:
    """Refuse the first layer in which a network differs from the file's."""
    for ours, theirs in zip_longest(graph.layers, network.layers):
        _same_name(ours, theirs)
        _compare_synapses(ours, theirs)
    if graph.gates != network.gates:
        raise GraphError(f"its gates are {network.gate_names} in the file and {graph.gate_names} here: {AS_THE_FILE}")
    classes, here = network.readout.shape[0], graph.readout.shape[0]
    if head and classes != here:
        raise GraphError(
            f"its classifier knows {classes} classes, this network {here}: set train.new_head=true to train a new one"
        )
    if head:
        _compare_synapses(graph.readout, network.readout)


def _compare_synapses(ours: Layer, theirs: IntegerLayer) -> None:
    for own, other in zip_longest(ours.synapses, theirs.synapses):
        _same_name(own, other)
        facts = ((key, getattr(own, key), getattr(other, key)) for key in COMPARED)
        for key, here, there in (("weight's shape", own.weight.shape, other.weight.shape), *facts):
            if here != there:
                raise GraphError(
                    f"layer {own.name!r}: its {key} is {there} in the file and {here} in this network: {AS_THE_FILE}"
                )


def _same_name(ours: Layer | Synapse | None, theirs: IntegerLayer | Synapse | None) -> None:
    names = [None if part is None else part.name for part in (ours, theirs)]
    if names[0] != names[1]:
        here, there = ("nothing" if name is None else f"layer {name!r}" for name in names)
        raise GraphError(f"where the file has {there}, this network has {here}: {AS_THE_FILE}")


# Neurons
# ---------------------------------------------------------------------------------------------------------------------


def _adopt(layer: IntegerLayer, neuron: nn.Module) -> None:
    """Give a neuron the step, leak and reset of the file's where it learns them. Where it does not, they must be equal."""
    where, theirs = f"layer {layer.name!r}", layer.neuron
    assert theirs is not None
    if not isinstance(neuron, SpikingNeuron):
        raise GraphError(f"{where}: {type(neuron).__name__} is no spiking neuron, as the file's is: set neuron.name")
    spec, fine = neuron.spec(), layer.unit / 2**layer.fraction
    if spec.mixing is not None or theirs.mixing is not None:
        raise GraphError(
            f"{where}: LM-HT's mixing of timesteps cannot be taken from a deployed network: start from its run folder, or from "
            "a weights.safetensors"
        )
    if spec.n_max != theirs.n_max:
        raise GraphError(
            f"{where}: its levels go to {theirs.n_max} in the file and to {spec.n_max} here: set neuron.n_max={theirs.n_max}"
        )
    kinds = {
        "signed levels": (theirs.signed, spec.signed),
        "reset": (theirs.reset_kind, spec.reset),
        "decayed reset": (theirs.decay_reset, spec.decay_reset),
    }
    for kind, (there, here) in kinds.items():
        if there != here:
            raise GraphError(
                f"{where}: it is another kind of neuron in the file ({kind}: {there} there, {here} here): set neuron.name to "
                "that kind"
            )
    steps = _steps(where, spec, theirs.thresholds, fine)
    if isinstance(neuron, SteppedNeuron) and neuron.learn_step:
        try:
            neuron.step = torch.from_numpy(steps) if neuron.step.dim() else float(np.median(steps))
        except ValueError as error:
            raise GraphError(f"{where}: {error}") from error
    leak = 1.0 if theirs.leak is None else theirs.leak[0] / 2 ** theirs.leak[1]
    if neuron.membrane == "plif":
        neuron.decay_logit.fill_(logit(min(max(1 - leak, 2 * LEAK_ROUNDING), 1 - 2 * LEAK_ROUNDING)))
    elif isinstance(getattr(neuron, "beta", None), nn.Parameter):
        neuron.beta.fill_(leak)
    if isinstance(neuron.alpha, nn.Parameter):
        neuron.alpha.fill_(float(np.median(theirs.reset * fine / steps)))
    _check_constants(where, neuron.spec(), theirs, fine, leak)


def _steps(where: str, spec: NeuronSpec, thresholds: NDArray[np.int32], fine: Array) -> Array:
    """The step of each channel, from its last threshold that can be reached; the median for channels without any."""
    reached = (thresholds < MEMBRANE_BOUND).sum(1)
    if not reached.any():
        raise GraphError(f"{where}: none of its channels ever fires in the file, so its step is not known")
    last = thresholds[np.arange(len(reached)), reached - 1] - (spec.rounding == "strict")
    steps = last * fine / (np.maximum(reached, 1) - threshold_shift(spec.rounding))
    return np.where(reached > 0, steps, np.median(steps[reached > 0]))


def _check_constants(where: str, spec: NeuronSpec, theirs: IntegerNeuron, fine: Array, leak: float) -> None:
    """Refuse a neuron whose thresholds, leak or reset are not the file's."""
    if abs(spec.leak - leak) > LEAK_ROUNDING:
        raise GraphError(
            f"{where}: its leak is {leak:.4g} in the file and {spec.leak:.4g} here: set neuron.beta={leak:.4g}"
        )
    ours = integer_neuron(spec, fine)
    if not _close(ours.thresholds, theirs.thresholds):
        there, here = (float(np.median(n.thresholds[:, 0] * fine)) for n in (theirs, ours))
        raise GraphError(
            f"{where}: its thresholds begin at {there:.4g} in the file and at {here:.4g} here, where they do not adapt: set "
            "the neuron's name, step, learn_step and per_channel as the file's network had them"
        )
    if spec.reset != "hard" and not _close(ours.reset, theirs.reset):
        there = float(np.median(theirs.reset / np.maximum(ours.reset, 1))) * spec.alpha
        raise GraphError(
            f"{where}: its reset is {there:.4g} steps in the file and {spec.alpha:.4g} here: set neuron.alpha={there:.4g}"
        )


def _close(ours: NDArray[Any], theirs: NDArray[Any]) -> bool:
    """Whether constants in whole units are equal, up to rounding."""
    return bool((np.abs(ours - 1.0 * theirs) <= ROUNDING_UNITS + ROUNDING_SHARE * np.abs(theirs)).all())


# Weights and biases
# ---------------------------------------------------------------------------------------------------------------------


def _branches(layer: IntegerLayer, net: nn.Module, norms: Mapping[str, Sequence[str]]) -> Iterator[list[Any]]:
    """For each convolution that leads to a layer, its module and the BatchNorms behind it."""
    for synapse in layer.synapses:
        if synapse.kind == "conv":
            conv = _module(synapse, net)
            name = synapse.copy_of or synapse.name
            yield [conv, *(net.get_submodule(norm) for norm, convs in norms.items() if name in convs)]


def _module(synapse: Synapse, net: nn.Module) -> Any:
    try:
        return net.get_submodule(synapse.copy_of or synapse.name)
    except AttributeError as error:
        raise GraphError(f"layer {synapse.name!r} reads joined tensors: such a network cannot be read back") from error


def _pass_on(branches: list[list[Any]]) -> Any:
    """Set weights to 1 and biases to 0; BatchNorms pass on what they get. Returns the module that takes the layer's bias: of
    the first branch that can, the last one; None where there is none."""
    for module in (module for branch in branches for module in branch):
        factor = 1.0
        if isinstance(module, NORMS):
            if not module.affine or module.running_mean is None or module.running_var is None:
                raise GraphError(
                    f"a BatchNorm of {module.num_features} channels has no weight and bias: use affine=True"
                )
            module.running_mean.zero_()
            module.running_var.fill_(1)
            factor = math.sqrt(1 + module.eps)
        module.weight.fill_(factor)
        if module.bias is not None:
            module.bias.zero_()
    able = ([module for module in branch if module.bias is not None] for branch in branches)
    return next((modules[-1] for modules in able if modules), None)


def _set_weight(net: nn.Module, layer: IntegerLayer, synapse: Synapse, one: Array) -> None:
    """Give a convolution its weights. one: what weights of 1 become in deployment. An identity must be as in the file."""
    if synapse.kind == "conv":
        module = _module(synapse, net)
        weight = synapse.weight * layer.unit[:, None, None, None] / one
        module.weight.copy_(torch.from_numpy(weight).reshape(module.weight.shape))
    elif not _close(one / (layer.unit / 2**layer.fraction), synapse.weight):
        raise GraphError(f"layer {synapse.name!r}: this shortcut is scaled in the file, and cannot be here")


def _bias(layer: IntegerLayer, network: IntegerNetwork, offset: Array | None) -> tuple[Array, float]:
    """The real bias of each channel, and the most by which it differs at a border, in steps.

    Where pixels come in, the file's bias cancels its mean pixel, at borders less of it than elsewhere, and ours must do so
    too. It is taken where no tap meets padding.
    """
    if layer.neuron is None:
        return layer.bias * network.scale, 0.0
    convs = {s.name: s for s in layer.synapses if s.kind == "conv"}
    nothing = Layer(layer.name, layer.synapses, np.zeros(layer.shape[0]), layer.shape)
    ours, theirs = bias_in_units(nothing, convs, layer.unit, offset), layer.bias / 2**layer.fraction
    if ours.ndim == theirs.ndim == 1:
        return (theirs - ours) * layer.unit, 0.0
    rest = np.broadcast_to(_map(theirs), layer.shape) - _map(ours)
    inside = np.ones(layer.shape[1:], bool)
    for s in layer.synapses:
        if s.source == INPUT:
            inside &= np.logical_and.outer(*(s.positions(axis)[1].all(1) for axis in (0, 1)))
    bias = (rest[:, inside] if inside.any() else rest.reshape(len(rest), -1)).mean(1)
    odd = np.abs(rest - bias[:, None, None]).max((1, 2)) * 2**layer.fraction - ROUNDING_UNITS
    return bias * layer.unit, float((np.maximum(odd, 0) / layer.neuron.steps).max())


def _map(bias: Array) -> Array:
    return bias if bias.ndim == 3 else bias[:, None, None]


def _set_bias(layer: IntegerLayer, holder: Any, bias: Array, one: Array) -> None:
    """Give the bias to the module that holds it. one: what a bias of 1 becomes in deployment."""
    if holder is not None:
        holder.bias.copy_(torch.from_numpy(bias / one))
    elif (np.abs(bias) > ROUNDING_UNITS * layer.unit / 2**layer.fraction).any():
        raise GraphError(f"layer {layer.name!r} has a bias in the file, and nothing in this network can add one")
