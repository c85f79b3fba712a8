"""The layers of a PyTorch network, on symbolic values, and the layers of the graph that neurons make of them.

A convolution, a linear layer or a pool reads levels, or a sum of levels, or levels joined along channels. BatchNorm folds into
a current. A neuron ends a current: it becomes a layer of the graph, and its levels are what comes next. Signals [C, L] are
images [C, 1, L] here, so their layers become those of images; functions become the layers that do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain, count
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from lbq.deploy.lowering import currents, tokens
from lbq.deploy.lowering.arranged import Arranged
from lbq.deploy.lowering.axes import flattened
from lbq.deploy.lowering.currents import Current, Joined, Levels, Numbers, Value
from lbq.deploy.lowering.faithful import own_method
from lbq.deploy.lowering.remedies import remedy
from lbq.deploy.lowering.shapes import SWAPPED, Shapes
from lbq.deploy.lowering.trace import ACTIVATIONS, LEAVES, NORMS, PASSES, POOLS, SIGNAL_POOLS, STATELESS
from lbq.errors import GraphError
from lbq.graph import INPUT, Gate, Layer, Layout, NeuronSpec, Shape, Synapse
from lbq.neuron import SpikingNeuron

READOUT = "readout"  # the name of the last layer, which has no neuron
SIGNAL_LAYERS = (nn.Conv1d, nn.ConstantPad1d, *SIGNAL_POOLS)
IMAGE_LAYERS = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.ConstantPad2d)


class Layers:
    """Lowers a network's layers one by one; `made` are the layers of the graph so far.

    signals: the network reads [C, L], here [C, 1, L]. weights: False where the structure is enough.
    """

    def __init__(self, timesteps: int, signals: bool, weights: bool) -> None:
        self.numbers, self.shapes = Numbers(weights), Shapes(timesteps, signals)
        self.made: list[Layer] = []
        self.gates: dict[str, Gate] = {}
        self._used: set[str] = set()
        self._synapse_names: set[str] = set()
        self._product_names: set[str] = set()
        self._first_names: dict[str, str] = {}  # which name each convolution got first

    def module(self, name: str, module: nn.Module, value: Value | Arranged) -> Value | Arranged:
        """What a layer of the network makes of a value."""
        kind = type(module).__name__
        if isinstance(module, LEAVES) and (method := own_method(module)):
            raise GraphError(
                f"layer {name!r}: {kind} has a {method} of its own, which the integer network would leave out: use the "
                "layer that it derives from, and write what it adds as layers of the network"
            )
        if name in self._used and not isinstance(module, STATELESS):
            raise GraphError(f"layer {name!r} is used twice: give each place its own {kind}")
        self._used.add(name)
        if isinstance(value, Arranged):
            return self._arranged(name, module, value)
        module = lifted(name, module, self.shapes.signals)
        if isinstance(module, ACTIVATIONS):
            return self.activation(name, module, value)
        if isinstance(module, PASSES):
            return value
        if isinstance(module, nn.Flatten):
            return self.shapes.flatten(name, value, module.start_dim, module.end_dim)
        if isinstance(module, (*NORMS, *POOLS, nn.Conv2d)) and value.time in SWAPPED:
            raise GraphError(f"layer {name!r}: {kind} knows no time in front: use lbq.models.over_time(x, layer)")
        if isinstance(module, NORMS):
            return currents.batch_norm(name, module, value, self.numbers)
        if not isinstance(module, (nn.Conv2d, nn.Linear, nn.ConstantPad2d, *POOLS)):
            raise _without_form(name, kind)
        return self.read(name, module, value)

    def _arranged(self, name: str, module: nn.Module, arranged: Arranged) -> Value | Arranged:
        """What a layer makes of a tensor that does not stand as an image."""
        value, kind = cast(Value, arranged.value), type(module).__name__
        if isinstance(module, PASSES):
            return arranged
        if isinstance(module, nn.Flatten):
            axes = flattened(arranged.axes, module.start_dim, module.end_dim)
            return self.shapes.settled(Arranged(value, cast(Any, axes)))
        if isinstance(module, ACTIVATIONS):
            layout = tokens.layout_for(name, module, arranged) if isinstance(module, SpikingNeuron) else None
            return Arranged(self.activation(name, module, value, layout), arranged.axes)
        if not isinstance(module, tokens.READERS):
            known = isinstance(module, LEAVES)
            raise arranged.refusal(f"layer {name!r}") if known else _without_form(name, kind)
        same = tokens.layer_of_images(name, module, arranged)
        if isinstance(module, NORMS):
            made: Any = currents.batch_norm(name, cast(Any, same), value, self.numbers)
        elif isinstance(value, Current) and not currents.summands(value):
            raise GraphError(f"layer {name!r}: {_must_read(module)}")
        else:
            made = self.read(name, same, value)
        return self.shapes.settled(Arranged(made, tokens.axes_behind(module, arranged.axes, made)))

    def read(self, name: str, module: nn.Module, value: Value) -> Value:
        """What a convolution, linear layer or pool makes of levels, or of a sum of them: what it makes of each, added up."""
        if isinstance(value, Levels):
            return self._read_levels(name, module, value)
        if isinstance(value, Joined):
            return self._read_joined(name, module, value)
        if isinstance(module, nn.MaxPool2d) or not (parts := currents.summands(value)):
            raise GraphError(f"layer {name!r}: {_must_read(module)}")
        outputs = [self.read(name, module, part) for part in parts]
        for i, output in enumerate(outputs[1:], 1):
            if isinstance(output, Current):  # a convolution's bias, which the first has already
                outputs[i] = replace(output, bias=np.zeros_like(output.bias))
        total = cast(Current, self._sum(name, outputs))
        return replace(total, averaged=value.averaged, mixed=value.mixed)

    def _read_levels(self, name: str, module: nn.Module, value: Levels) -> Value:
        if isinstance(module, nn.Conv2d):
            return currents.conv(name, module, value, self.numbers)
        if isinstance(module, nn.Linear):
            return currents.linear(name, module, value, self.numbers)
        if isinstance(module, nn.ConstantPad2d):
            return currents.padded(name, module, value)
        return currents.pooled(name, cast(Any, module), value)

    def _read_joined(self, name: str, module: nn.Module, value: Joined) -> Value:
        """The sum of what a layer makes of each part, with the weights for its channels; pools act on each alone."""
        parts = value.parts(f"layer {name!r}")
        if isinstance(module, (nn.ConstantPad2d, *POOLS)):
            return currents.join(f"layer {name!r}", [self.read(name, module, part) for part in parts])
        layers = currents.split(name, cast(Any, module), parts)
        return self._sum(name, [self.read(f"{name}.part{i}", layers[i], part) for i, part in enumerate(parts)])

    def _sum(self, name: str, values: Sequence[Value]) -> Value:
        return reduce(lambda a, b: currents.add(f"layer {name!r}", a, b), values)

    def activation(self, name: str, module: nn.Module | None, value: Value, layout: Layout | None = None) -> Levels:
        """A neuron, or a ReLU (also where `module` is None): its current becomes a layer of the graph."""
        value = currents.as_current(f"layer {name!r}", value)
        if value.averaged or value.mixed:
            raise GraphError(f"layer {name!r}: a neuron cannot follow the mean over time: take the mean at the end")
        if name in (INPUT, READOUT):
            raise GraphError(
                f"layer {name!r}: {INPUT} and {READOUT} are names of the graph: give the neuron another name"
            )
        spec = _spec(name, module, value) if isinstance(module, SpikingNeuron) else None
        weighted = tuple(s for s in value.synapses if s.kind != "identity")
        shortcuts = (s for s in value.synapses if s.kind == "identity")
        synapses = weighted + tuple(replace(s, name=f"{name}.shortcut{i or ''}") for i, s in enumerate(shortcuts))
        self.made.append(Layer(name, self._named(synapses), value.bias, value.shape, spec, layout))
        return Levels(name, value.shape, flat=value.flat, time=value.time)

    def product_name(self, wanted: str) -> str:
        """A name for one product of levels, which no other has."""
        names = chain([wanted], (f"{wanted}_{i}" for i in count(2)))
        name = next(name for name in names if name not in self._product_names)
        self._product_names.add(name)
        return name

    def gate(self, factor: str, source: str, shape: Shape) -> str:
        """The name of the tensor of these two levels' products, which is the same wherever they meet again."""
        name = f"{factor}*{source}"
        self.gates[name] = Gate(name, factor, source, shape)
        return name

    def readout(self, value: Current) -> Layer:
        """The last layer, whose current is the logits."""
        return Layer(READOUT, self._named(value.synapses), value.bias, value.shape)

    def _named(self, synapses: Sequence[Synapse]) -> tuple[Synapse, ...]:
        """With names of their own: a current that two layers read is computed for each of them, in its own units."""
        named = []
        for synapse in synapses:
            names = chain([synapse.name], (f"{synapse.name}_{i}" for i in count(2)))
            name = next(name for name in names if name not in self._synapse_names)
            copied = self._first_names.setdefault(synapse.name, name) if synapse.kind != "identity" else name
            named.append(replace(synapse, name=name, copy_of="" if copied == name else copied))
            self._synapse_names.add(name)
        return tuple(named)


def _without_form(name: str, kind: str) -> GraphError:
    return GraphError(f"layer {name!r}: {kind} has no integer form here: {remedy(kind)}")


def _must_read(module: nn.Module) -> str:
    """Why a layer cannot read a current, and what to write instead."""
    kind, pools = type(module).__name__.removesuffix("2d"), isinstance(module, POOLS)  # of signals, it was lifted
    levels = "a neuron's output" if pools else "the input, a neuron's output or a sum of these"
    averages = pools and not isinstance(module, nn.MaxPool2d)
    other = ", or average in front of a 1x1 convolution, which is the same" if averages else ""
    return f"{kind} must read {levels}: put a neuron in front of it{other}"


def _spec(name: str, neuron: SpikingNeuron, current: Current) -> NeuronSpec:
    """A neuron as plain numbers, where its current has time in front and its steps fit the channels."""
    if current.time != "all":
        way = "lbq.models.over_time(x, layer, timesteps=T) shows an image at every timestep"
        if current.time == "behind":
            way = "x.transpose(0, 1) puts it there"
        raise GraphError(f"layer {name!r}: a neuron needs time in front, [T, B, ...]: {way}")
    try:
        spec = neuron.spec()
    except GraphError as error:
        raise GraphError(f"layer {name!r}: {error}") from error
    channels, *sides = current.shape
    if (steps := np.size(spec.step)) not in (1, channels):
        raise GraphError(
            f"layer {name!r}: it has {steps} steps for {channels} channels of {tuple(sides)}: flatten behind the neuron, or "
            "give it one step"
        )
    return spec


# Layers of signals as layers of images, so that the rest need know these alone
# ---------------------------------------------------------------------------------------------------------------------


def lifted(name: str, module: nn.Module, signals: bool) -> nn.Module:
    """A layer of signals as one of images of height 1; others as they are. signals: whether the network reads signals."""
    if isinstance(module, nn.ConstantPad1d):  # of images, it pads the width
        return nn.ConstantPad2d((*module.padding, 0, 0), module.value)
    if isinstance(module, IMAGE_LAYERS if signals else SIGNAL_LAYERS):
        reads, shape = ("signals", "(C, 1, L)") if signals else ("images", "(C, L)")
        raise GraphError(
            f"layer {name!r}: {type(module).__name__} in a network of {reads}: give input_shape as {shape}"
        )
    if isinstance(module, nn.Conv1d):
        return _conv(module)
    if isinstance(module, nn.MaxPool1d):
        sizes = _sides(module.kernel_size), _sides(module.stride), _sides(module.padding, 0), _sides(module.dilation)
        return nn.MaxPool2d(*sizes, ceil_mode=module.ceil_mode)
    if isinstance(module, nn.AvgPool1d):
        kernel, stride, padding = _sides(module.kernel_size), _sides(module.stride), _sides(module.padding, 0)
        return nn.AvgPool2d(kernel, stride, padding, module.ceil_mode, module.count_include_pad)
    return nn.AdaptiveAvgPool2d(_sides(module.output_size)) if isinstance(module, nn.AdaptiveAvgPool1d) else module


def _conv(module: nn.Conv1d) -> nn.Conv2d:
    padding = module.padding if isinstance(module.padding, str) else _sides(module.padding, 0)
    made = nn.Conv2d(
        module.in_channels, module.out_channels, _sides(module.kernel_size), _sides(module.stride), padding,
        _sides(module.dilation), module.groups, bias=False, padding_mode=module.padding_mode, device="meta",
    )  # fmt: skip
    made.weight, made.bias = nn.Parameter(module.weight.detach().unsqueeze(2)), module.bias
    return made


def _sides(size: Any, height: int = 1) -> tuple[int, int]:
    """Height and width: a size along the length of a signal, behind that along its height."""
    return height, cast(int, size[0] if isinstance(size, tuple | list) else size)


# Functions as layers
# ---------------------------------------------------------------------------------------------------------------------


def _max_pool(
    layer: type[nn.MaxPool1d | nn.MaxPool2d],
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: Any = False,
    return_indices: Any = False,
) -> nn.Module:
    """A layer from the function's arguments, which stand in another order."""
    as_kernel = stride in ((), [])
    return layer(kernel_size, None if as_kernel else stride, padding, dilation, return_indices, ceil_mode)


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module | None:  # noqa: ARG001
    return None if training else nn.Identity()


def _pad(pad: Any, mode: str = "constant", value: float | None = None) -> nn.Module | None:
    """Of the width, or the length of a signal, or of height and width."""
    if mode != "constant" or len(pad) not in (2, 4):
        return None
    return (nn.ConstantPad1d if len(pad) == 2 else nn.ConstantPad2d)(tuple(pad), value or 0.0)


# makes the layer that does the same, of the arguments behind the input; None where there is none
LAYER_OF_FUNCTION: dict[Any, Callable[..., nn.Module | None]] = {
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), partial(_max_pool, nn.MaxPool2d)),
    **dict.fromkeys((F.max_pool1d, torch.max_pool1d), partial(_max_pool, nn.MaxPool1d)),
    F.avg_pool1d: nn.AvgPool1d,
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.pad: _pad,
    F.dropout: _dropout,
    F.dropout2d: _dropout,
}
