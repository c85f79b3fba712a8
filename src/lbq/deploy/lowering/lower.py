"""Lower a PyTorch network to an `lbq.graph.Graph`.

The network is traced with torch.fx, neurons and PyTorch's own layers being leaves, and each call is interpreted, as it is
made, on the symbolic values of `currents`: BatchNorm folds into the synapses of a current, an addition joins two currents,
levels entering it through an identity synapse, and a neuron turns a current into a new layer. Each value knows where time
stands in it: a static input gets it once, by `over_time`, expand, repeat or stack. What does not fit is refused with the
layer's name.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain, count
from numbers import Integral
from typing import Any, cast

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional as F

from lbq.deploy.lowering.aliases import AS, check_in_place
from lbq.deploy.lowering.currents import (
    Current,
    Joined,
    Levels,
    Numbers,
    Value,
    add,
    as_current,
    batch_norm,
    conv,
    join,
    linear,
    padded,
    pooled,
    scaled,
    split,
    summands,
)
from lbq.deploy.lowering.faithful import own_method
from lbq.deploy.lowering.functional import as_layer
from lbq.deploy.lowering.remedies import remedy
from lbq.deploy.lowering.shapes import Shapes
from lbq.deploy.lowering.signal_layers import Given, as_image, lifted
from lbq.deploy.lowering.times import AXIS, BATCH, SWAPPED, TRANSPOSES, UNFOLDED, Time
from lbq.deploy.lowering.trace import ACTIVATIONS, LAYERS, NORMS, PASSES, POOLS, STATELESS, traced
from lbq.errors import GraphError
from lbq.graph import INPUT, Graph, Layer, NeuronSpec, Synapse
from lbq.models.time import fold_time, unfold_time
from lbq.neuron import SpikingNeuron

READOUT = "readout"  # the name of the last layer, which has no neuron
PLUS = (operator.add, operator.iadd, torch.add, "add")
MINUS = (operator.sub, operator.isub, torch.sub, "sub")
TIMES = (operator.mul, operator.imul, torch.mul, "mul")
OVER = (operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div")
# the same numbers, wherever they lie and whatever holds them
SAME = ("contiguous", "clone", torch.clone, "detach", torch.detach, "float", "double")
WIDE = (torch.float32, torch.float64)  # which hold all levels and pixels
SOFTMAX = (torch.softmax, torch.log_softmax, F.softmax, F.log_softmax, "softmax", "log_softmax")


@torch.no_grad()
def lower(
    net: nn.Module,
    input_shape: Given,
    timesteps: int | None = None,
    static: bool = True,
    weights: bool = True,
) -> Graph:
    """The network as numbers (float64), for inputs of `input_shape` (C, H, W), in evaluation mode; signals (C, L) become
    images (C, 1, L), and features (F,) images (F, 1, 1).

    timesteps: default `net.timesteps`. static: one image shown at every timestep, or event frames.
    weights: False where the structure is enough, as for counting: weights are then NaN in their shapes, and nothing folds.
    """
    steps: Any = getattr(net, "timesteps", None) if timesteps is None else timesteps
    if steps is None:
        raise GraphError(f"{type(net).__name__} has no attribute 'timesteps': pass timesteps=")
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        raise GraphError(f"timesteps must be a whole number of at least 1, got {steps!r}")
    shape: tuple[Any, ...] = tuple(input_shape) if isinstance(input_shape, Sequence) else ()
    if len(shape) not in (1, 2, 3) or not all(isinstance(size, Integral) and int(size) > 0 for size in shape):
        images = hasattr(input_shape, "shape")  # given in place of their shape
        got = f"an array of shape {tuple(input_shape.shape)}" if images else repr(input_shape)  # type: ignore[union-attr]
        raise GraphError(
            f"input_shape must be (channels, height, width), (channels, length) of signals or (features,), got {got}"
        )
    return _Lowering(net, tuple(map(int, shape)), int(steps), static, weights).run()


def _forward_of(node: fx.Node) -> str:
    """Where an operation was written: the network's own forward, or that of a module inside it, a neuron of one's own say."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    name, kind = list(stack.values())[-1]
    return f"the forward of layer {name!r}, a {kind.__name__}" if name else "the network's forward"


class _Lowering:
    """Who follows a network's trace, and turns each call into a value as it is made, so that the forward may ask for sizes."""

    def __init__(self, net: nn.Module, shape: tuple[int, ...], timesteps: int, static: bool, weights: bool) -> None:
        self.net, self.modules = net, dict(net.named_modules())
        self.input_shape, self.timesteps, self.static = as_image(shape), timesteps, static
        self.features, self.signals = len(shape) == 1, len(shape) == 2  # [F] and [C, L], here [F, 1, 1] and [C, 1, L]
        self.numbers, self.shapes = Numbers(weights), Shapes(timesteps, self.signals)
        self.values: dict[fx.Node, Value] = {}
        self.integers: dict[fx.Node, Any] = {}  # of values, and what is computed from them
        self.logits: dict[fx.Node, fx.Node] = {}  # of softmax and its logarithm, which the network may return
        self.layers: list[Layer] = []
        self.used: set[str] = set()
        self.synapses: set[str] = set()  # names given
        self.first: dict[str, str] = {}  # and which of them each convolution got first

    def run(self) -> Graph:
        trace = traced(self.net, self)
        check_in_place(trace, self.modules, self.values)
        return self._finish(trace.output_node())

    def see(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if not self.values:
                time: Time = "none" if self.static else "all"
                self.values[node] = Levels(INPUT, self.input_shape, flat=self.features, time=time)
        elif node.op == "get_attr":
            raise GraphError(
                f"layer {node.target!r}: a bare parameter in the network's forward is not supported, nor a constant tensor: "
                "put it into a layer's weights or bias, and normalise images before the network (mean= and std= say how)"
            )
        elif node.op == "output" or self._is_size(node) or self._is_softmax(node):
            pass
        elif inputs := [self.values[a] for a in node.all_input_nodes if a in self.values]:
            self.values[node] = self._apply(node, inputs)
        # what does not depend on the input are fx's checks of the arguments with defaults

    def sizes(self, node: fx.Node) -> tuple[int, ...] | None:
        if node not in self.values:
            return None
        return tuple(size if size % BATCH else -size for size in self.shapes.sizes(self.values[node]))

    def _finish(self, node: fx.Node) -> Graph:
        result = node.args[0]
        value = self.values.get(self.logits.get(result, result)) if isinstance(result, fx.Node) else None
        if value is None:
            raise GraphError("the network must return one tensor, the current of its last linear layer (its logits)")
        value = as_current("what the network returns", value)
        if not value.averaged and not any(layer.neuron for layer in self.layers):
            raise GraphError(
                "the network has no spiking neurons: train it with them, or put them in place of ReLUs with "
                "lbq.convert.convert(net, images)"
            )
        if not value.averaged:
            raise GraphError("the network must average its logits over time: return logits.mean(0)")
        if value.time != "none":
            raise GraphError("the network must return its logits as [B, classes], without time in front of their mean")
        readout = Layer(READOUT, self._named(value.synapses), value.bias, value.shape)
        return Graph(self.input_shape, self.timesteps, self.static, tuple(self.layers), readout)

    def _is_softmax(self, node: fx.Node) -> bool:
        """Whether a node is the softmax of the logits, or its logarithm, over classes: it keeps their order."""
        target: Any = self.modules[str(node.target)] if node.op == "call_module" else node.target
        logits = node.all_input_nodes[0] if node.all_input_nodes else None
        value = None if logits is None else self.values.get(logits)
        if not isinstance(value, Current | Levels) or not (value.averaged and value.flat and value.time == "none"):
            return False
        given: dict[str, Any] = {**dict(zip(("dim", "dtype"), node.args[1:], strict=False)), **node.kwargs}
        if isinstance(target, nn.Softmax | nn.LogSoftmax) and own_method(target) is None:
            given = {"dim": target.dim}
        elif target not in SOFTMAX:
            return False
        if given.get("dim") in (1, -1) and given.get("dtype") is None:
            self.logits[node] = cast(fx.Node, logits)
        return node in self.logits

    # One fx node ---------------------------------------------------------------------------------------------------

    def _apply(self, node: fx.Node, inputs: list[Value]) -> Value:
        where = str(node.target) if node.op == "call_module" else f"{node.name} in {_forward_of(node)}"
        value = inputs[0]
        if node.op == "call_module":
            return self._module(str(node.target), self.modules[str(node.target)], value)
        target, rest = node.target, self._resolved(node.args[1:])
        if target is fold_time:
            self.shapes.check_spatial(where, value, rest[0])
            return self.shapes.fold(value)
        if target is unfold_time:
            return self._unfold(where, node, value)
        if (shown := self.shapes.shown(where, node, value, rest)) is not None:
            return shown
        options = {key: self._resolved(option) for key, option in node.kwargs.items()}
        if target in SAME or (target == "to" and all(to in WIDE for to in (*rest, *options.values()))):
            return value
        if (layer := as_layer(target, rest, options)) is not None:
            return self._module(node.name, layer, value)
        if target in (torch.cat, torch.concat, torch.concatenate):
            return self._join(where, node)
        if target in (*PLUS, *MINUS):
            return self._add(where, node)
        if target in (torch.flatten, "flatten"):
            given: dict[str, Any] = {**dict(zip(("start_dim", "end_dim"), rest, strict=False)), **node.kwargs}
            first, last = given.get("start_dim", 0), given.get("end_dim", -1)
            return self.shapes.flatten(where, value, first, last)
        if target in (torch.unflatten, "unflatten") and value.time in UNFOLDED and len(rest) == 2 and rest[0] == 0:
            sizes = (*rest[1], *self.shapes.sizes(value)[1:]) if isinstance(rest[1], tuple) else None
            return self.shapes.reshape(where, value, sizes)
        if target in TRANSPOSES and not node.kwargs:
            return self.shapes.transposed(where, value, rest)
        if target in (torch.reshape, "reshape", "view") and not node.kwargs:
            return self.shapes.reshape(where, value, rest[0] if len(rest) == 1 else rest)
        if target in AS and len(inputs) == 2:
            return self.shapes.reshape(where, value, self.shapes.sizes(inputs[1]))
        if target in ("mean", torch.mean):
            return self._mean(where, "mean", value, rest, node.kwargs)[0]
        if target in ("sum", torch.sum):
            mean, summed = self._mean(where, "sum", value, rest, node.kwargs)
            return scaled(mean, summed, self.numbers)
        if target in (*TIMES, *OVER) and (factor := _factor(node)) is not None:
            return scaled(value, factor, self.numbers)
        if target in (operator.neg, torch.neg, "neg"):
            return scaled(value, -1, self.numbers)
        if target in (torch.relu, nn.functional.relu, "relu"):
            return self._activation(node.name, None, value)
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        raise GraphError(f"{where}: operation {name!r} has no integer form here: {remedy(name)}")

    def _join(self, where: str, node: fx.Node) -> Value:
        given: dict[str, Any] = {**dict(zip(("tensors", "dim"), node.args, strict=False)), **node.kwargs}
        values = [self.values.get(tensor) for tensor in given["tensors"]]
        known = [value for value in values if value is not None]
        rank = len(self.shapes.sizes(known[0]))
        channels = rank - len(self.shapes.behind(known[0]))
        if len(known) != len(values) or given.get("dim", given.get("axis", 0)) not in (channels, channels - rank):
            raise GraphError(f"{where}: neurons' outputs can be joined along channels alone: dim={channels}")
        return join(where, known)

    def _add(self, where: str, node: fx.Node) -> Value:
        operands = [self.values.get(a, a) if isinstance(a, fx.Node) else a for a in node.args]
        values = [x for x in operands if isinstance(x, Value)]
        if len(operands) == 2 and not node.kwargs:
            if len(values) == 2:
                left, right = values
                return add(where, left, scaled(right, -1, self.numbers) if node.target in MINUS else right)
            if 0 in operands and node.target in PLUS:  # as sum() begins
                return values[0]
        constants = "constants into a bias"
        if any(isinstance(value, Levels) and value.source == INPUT for value in values):
            constants = "normalise images before the network, not in it: mean= and std= say how"
        raise GraphError(
            f"{where}: only the plain sum or difference of two tensors is supported: write x + y, and {constants}"
        )

    # Time ----------------------------------------------------------------------------------------------------------

    def _is_size(self, node: fx.Node) -> bool:
        """Whether a node is `x.shape`, a part of it or a product of parts; what it is, is noted."""
        if node.target in (operator.mul, operator.imul, operator.floordiv):
            factors = self._resolved(node.args)
            if known := all(isinstance(size, int) for size in factors):
                self.integers[node] = cast(Any, node.target)(*factors)
            return known
        source = cast(fx.Node, node.args[0] if node.args else None)
        if node.target is getattr and node.args[1] == "shape" and source in self.values:
            self.integers[node] = self.shapes.sizes(self.values[source])
        elif node.target is operator.getitem and source in self.integers:
            self.integers[node] = self.integers[source][node.args[1]]
        else:
            return False
        return True

    def _resolved(self, args: Any) -> Any:
        """Arguments of a node with the sizes in them as numbers."""
        if isinstance(args, (tuple, list)):
            return tuple(self._resolved(a) for a in args)
        return self.integers.get(args, args) if isinstance(args, fx.Node) else args

    def _unfold(self, where: str, node: fx.Node, value: Value) -> Value:
        """Time begins where a static input unfolds; it must begin with the timesteps that the graph will run."""
        bound = inspect.signature(unfold_time).bind(*node.args, **node.kwargs).arguments
        like = self.values.get(bound["like"])
        if like is None or like.time in UNFOLDED or value.time != self.shapes.fold(like).time:
            raise GraphError(f"{where}: it must unfold what was computed from fold_time of the same tensor")
        self.shapes.check_spatial(where, like, bound.get("spatial", 3))
        return (
            replace(value, time=like.time)
            if like.time != "none"
            else self.shapes.begin(where, value, bound.get("timesteps"))
        )

    def _mean(
        self, where: str, name: str, value: Value, rest: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Value, int]:
        """The mean over time, over height and width, or over both, and of how many numbers it is."""
        given = dict(zip(("dim", "keepdim"), rest, strict=False)) | options
        given.pop("input", None)  # the tensor, by its name
        dims, keeps = given.pop("axis", given.pop("dim", ())), given.pop("keepdim", False)
        sizes = self.shapes.sizes(value)
        rank, axis = len(sizes), AXIS.get(value.time, 0)
        over = {dim % rank for dim in ((dims,) if isinstance(dims, int) else dims or ())}
        whole = set(range(rank - len(self.shapes.behind(value)) + 1, rank))  # height and width
        sides = whole & over
        if given or over - sides - {axis} or sides not in (set(), whole) or not over or (axis in over and keeps):
            both = f"length, {name}(-1)" if self.signals else f"height and width, {name}((-2, -1))"
            raise GraphError(
                f"{where}: operation {name!r} has no integer form here but as the {name} over time, {name}({axis}), or over "
                f"{both}"
            )
        if axis in over and value.time not in AXIS:
            raise GraphError(
                f"{where}: {name}({axis}) must be over time, and there is no time in front: return [T, B, ...] to it"
            )
        if sides:
            value = replace(self._read(where, nn.AdaptiveAvgPool2d(1), value), flat=not keeps)
        if axis in over:
            value = replace(value, averaged=True, time="none")
        return value, math.prod(sizes[dim] for dim in over)

    # Layers --------------------------------------------------------------------------------------------------------

    def _module(self, name: str, module: nn.Module, value: Value) -> Value:
        kind = type(module).__name__
        if isinstance(module, LAYERS) and (method := own_method(module)):
            raise GraphError(
                f"layer {name!r}: {kind} has a {method} of its own, which the integer network would leave out: use the "
                "layer that it derives from, and write what it adds as layers of the network"
            )
        if name in self.used and not isinstance(module, STATELESS):
            raise GraphError(f"layer {name!r} is used twice: give each place its own {kind}")
        self.used.add(name)
        module = lifted(name, module, self.signals)
        if isinstance(module, ACTIVATIONS):
            return self._activation(name, module, value)
        if isinstance(module, PASSES):
            return value
        if isinstance(module, nn.Flatten):
            return self.shapes.flatten(name, value, module.start_dim, module.end_dim)
        if isinstance(module, (*NORMS, *POOLS, nn.Conv2d)) and value.time in SWAPPED:
            raise GraphError(
                f"layer {name!r}: {kind} knows no time in front: apply it with lbq.models.over_time(x, layer)"
            )
        if isinstance(module, NORMS):
            return batch_norm(name, module, value, self.numbers)
        if not isinstance(module, (nn.Conv2d, nn.Linear, nn.ConstantPad2d, *POOLS)):
            raise GraphError(f"layer {name!r}: {kind} has no integer form here: {remedy(kind)}")
        return self._read(name, module, value)

    def _read(self, name: str, module: nn.Module, value: Value) -> Value:
        """What a convolution, linear layer or pool makes of levels, or of a sum of them: what it makes of each, added up."""
        if isinstance(value, Levels):
            if isinstance(module, nn.Conv2d):
                return conv(name, module, value, self.numbers)
            if isinstance(module, nn.Linear):
                return linear(name, module, value, self.numbers)
            if isinstance(module, nn.ConstantPad2d):
                return padded(name, module, value)
            return pooled(name, cast(Any, module), value)
        if isinstance(value, Joined):
            return self._read_joined(name, module, value)
        if isinstance(module, nn.MaxPool2d) or not (parts := summands(value)):
            kind, pools = type(module).__name__, isinstance(module, POOLS)
            what = "a neuron's output" if pools else "the input, a neuron's output or a sum of these"
            same = pools and not isinstance(module, nn.MaxPool2d)
            other = ", or average in front of a 1x1 convolution, which is the same" if same else ""
            raise GraphError(f"layer {name!r}: {kind} must read {what}: put a neuron in front of it{other}")
        found = [self._read(name, module, part) for part in parts]
        for i, one in enumerate(found[1:], 1):
            if isinstance(one, Current):  # a convolution's bias, which the first has already
                found[i] = replace(one, bias=np.zeros_like(one.bias))
        total = reduce(lambda a, b: add(f"layer {name!r}", a, b), found)
        return replace(cast(Current, total), averaged=value.averaged, mixed=value.mixed)

    def _read_joined(self, name: str, module: nn.Module, value: Joined) -> Value:
        """The sum of what a layer makes of each part, with the weights for its channels; pools act on each alone."""
        parts = value.parts(f"layer {name!r}")
        if isinstance(module, (nn.ConstantPad2d, *POOLS)):
            return join(f"layer {name!r}", [self._read(name, module, part) for part in parts])
        layers = split(name, cast(Any, module), parts)
        found = [self._read(f"{name}.part{i}", layers[i], part) for i, part in enumerate(parts)]
        return reduce(lambda a, b: add(f"layer {name!r}", a, b), found)

    def _activation(self, name: str, module: nn.Module | None, value: Value) -> Levels:
        value = as_current(f"layer {name!r}", value)
        if value.averaged or value.mixed:
            raise GraphError(
                f"layer {name!r}: a neuron cannot follow the mean over time: take the mean behind the last one"
            )
        if name in (INPUT, READOUT):
            raise GraphError(
                f"layer {name!r}: the graph has an {INPUT} and a {READOUT} itself: give the neuron another name"
            )
        spec: NeuronSpec | None = None
        if isinstance(module, SpikingNeuron):
            if value.time != "all":
                way = "lbq.models.over_time(x, layer, timesteps=T) shows an image at every timestep"
                if value.time == "behind":
                    way = "x.transpose(0, 1) puts it there"
                raise GraphError(f"layer {name!r}: a neuron needs time in front, [T, B, ...]: {way}")
            try:
                spec = module.spec()
            except GraphError as error:
                raise GraphError(f"layer {name!r}: {error}") from error
            if (steps := np.size(spec.step)) not in (1, value.shape[0]):
                raise GraphError(
                    f"layer {name!r}: it has {steps} steps for {value.shape[0]} channels of {value.shape[1:]}: flatten behind "
                    "the neuron, or give it one step"
                )
        convs = tuple(s for s in value.synapses if s.kind == "conv")
        shortcuts = (s for s in value.synapses if s.kind == "identity")
        synapses = convs + tuple(replace(s, name=f"{name}.shortcut{i or ''}") for i, s in enumerate(shortcuts))
        self.layers.append(Layer(name, self._named(synapses), value.bias, value.shape, spec))
        return Levels(name, value.shape, flat=value.flat, time=value.time)

    def _named(self, synapses: Sequence[Synapse]) -> tuple[Synapse, ...]:
        """With names of their own: a current that two layers read is computed for each of them, in its own units."""
        made = []
        for synapse in synapses:
            names = chain([synapse.name], (f"{synapse.name}_{i}" for i in count(2)))
            name = next(name for name in names if name not in self.synapses)
            copied = self.first.setdefault(synapse.name, name) if synapse.kind == "conv" else name
            made.append(replace(synapse, name=name, copy_of="" if copied == name else copied))
            self.synapses.add(name)
        return tuple(made)


def _factor(node: fx.Node) -> float | None:
    """The number by which a node multiplies or divides a tensor; None where it does something else."""
    numbers = [a for a in node.args if isinstance(a, int | float) and math.isfinite(a)]
    if node.kwargs or len(node.args) != 2 or len(numbers) != 1:
        return None
    if node.target in TIMES:
        return float(numbers[0])
    return 1 / numbers[0] if numbers[0] and numbers[0] is node.args[1] else None
