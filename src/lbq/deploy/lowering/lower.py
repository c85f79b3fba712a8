"""Lower a PyTorch network to an `lbq.graph.Graph`.

torch.fx traces the network; neurons and PyTorch's own layers are leaves. Each call is interpreted as it is made, on the
symbolic values of `currents`. BatchNorm folds into the synapses of a current. An addition joins two currents, and levels
enter it through an identity synapse. A neuron turns a current into a new layer. `layers` knows the network's layers,
`operations` all other calls. Each value knows where time stands in it. What does not fit is refused with the layer's name.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional as F

from lbq.deploy.lowering import hidden_causes, operations, products
from lbq.deploy.lowering.arranged import Arranged, Rearranged, Scores
from lbq.deploy.lowering.axes import BATCH_SIZE
from lbq.deploy.lowering.call import Call
from lbq.deploy.lowering.currents import SEVERAL_HEADS, Current, Levels, Time, Value, as_current
from lbq.deploy.lowering.faithful import own_method
from lbq.deploy.lowering.layers import Layers
from lbq.deploy.lowering.shapes import InputShape, as_image
from lbq.deploy.lowering.trace import NORMS, Follower, check_in_place, traced
from lbq.errors import GraphError, TooSmall
from lbq.graph import INPUT, Graph
from lbq.graph.integer import MOST_TIMESTEPS
from lbq.neuron import SpikingNeuron

SOFTMAX = (torch.softmax, torch.log_softmax, F.softmax, F.log_softmax, "softmax", "log_softmax")
MATRIX_DIMENSIONS = 2
TABLE_DIMENSIONS = 3  # [1, N, D], as tables of positions and class tokens have them
NO_NEURONS = (
    "the network has no spiking neurons: train with them, or replace its ReLUs with lbq.convert.convert(net, images)"
)


@torch.no_grad()
def lower(
    net: nn.Module,
    input_shape: InputShape,
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
        if not any(isinstance(module, SpikingNeuron) for module in net.modules()):
            raise GraphError(NO_NEURONS)
        if isinstance(input_shape, Sequence):
            lower(net, input_shape, 1, static, weights=False)  # what else is wrong with it is said first
        raise GraphError(f"{type(net).__name__} has no attribute 'timesteps': pass timesteps=")
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        raise GraphError(f"timesteps must be a whole number of at least 1, got {steps!r}")
    if int(steps) > MOST_TIMESTEPS:
        raise GraphError(f"timesteps must be at most {MOST_TIMESTEPS}, got {steps}")
    shape: tuple[Any, ...] = tuple(input_shape) if isinstance(input_shape, Sequence) else ()
    if len(shape) not in (1, 2, 3) or not all(isinstance(size, Integral) and int(size) > 0 for size in shape):
        images = hasattr(input_shape, "shape")  # given in place of their shape
        got = f"an array of shape {tuple(input_shape.shape)}" if images else repr(input_shape)  # type: ignore[union-attr]
        raise GraphError(f"input_shape must be (channels, height, width), (channels, length) or (features,), got {got}")
    return _Lowering(net, tuple(map(int, shape)), int(steps), static, weights).run()


def norms_of(net: nn.Module, input_shape: InputShape, timesteps: int, static: bool) -> dict[str, tuple[str, ...]]:
    """The BatchNorms of a network in the order in which they run, each with the convolutions whose currents it reads."""
    lowering = _Lowering(net, tuple(input_shape), timesteps, static, weights=False)
    lowering.run()
    values = ((node, v.value if isinstance(v, Arranged) else v) for node, v in lowering.values.items())
    return {
        str(node.target): tuple(synapse.name for synapse in value.synapses)
        for node, value in values
        if node.op == "call_module"
        and isinstance(value, Current)
        and isinstance(lowering.modules[str(node.target)], NORMS)
    }


class _Lowering(Follower):
    """Turns each call of a network into a value as it is made, so that the forward may ask for sizes.

    values: of tensors. integers: sizes of tensors, and what is computed from them. logits: what a last softmax, or its
    logarithm, reads.
    """

    def __init__(self, net: nn.Module, shape: tuple[int, ...], timesteps: int, static: bool, weights: bool) -> None:
        super().__init__(len(shape) + 1)
        self.net, self.modules = net, dict(net.named_modules())
        self.input_shape, self.timesteps, self.static = as_image(shape), timesteps, static
        self.seen_shape = shape if static else (timesteps, *shape)  # of the input, behind its first dimension
        self.flat = len(shape) == 1  # features [F], here [F, 1, 1]
        self.layers = Layers(timesteps, len(shape) == 2, weights)
        self.values: dict[fx.Node, Value | Arranged] = {}
        self.integers: dict[fx.Node, Any] = {}
        self.logits: dict[fx.Node, fx.Node] = {}

    def run(self) -> Graph:
        try:
            trace = traced(self.net, self)
        except TooSmall:
            raise
        except Rearranged:
            hidden_causes.check(self.net, self.seen_shape, lowered={node.name for node in self.values})
            raise
        check_in_place(trace, self.modules, self.values)
        return self._finish(trace.output_node())

    def see(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if not self.values:
                time: Time = "none" if self.static else "all"
                self.values[node] = Levels(INPUT, self.input_shape, flat=self.flat, time=time)
        elif node.op == "get_attr":
            raise GraphError(
                f"layer {node.target!r}: a bare parameter in the network's forward is not supported, nor a constant tensor: "
                f"{self._instead(str(node.target))}"
            )
        elif node.op == "output" or self._is_size(node) or self._is_softmax(node):
            pass
        elif inputs := [self.values[a] for a in node.all_input_nodes if a in self.values]:
            self.values[node] = self._apply(node, inputs)
        # what does not depend on the input are fx's checks of the arguments with defaults

    def _instead(self, name: str) -> str:
        """What to write instead of a bare parameter or buffer."""
        shape: tuple[int, ...] = getattr(operator.attrgetter(name)(self.net), "shape", ())
        table = (
            "a table of positions has no integer form here: let a 3x3 convolution on [T * B, channels, height, width] in "
            "front of a neuron tell tokens where they are; in place of a class token, average tokens"
        )
        if len(shape) >= TABLE_DIMENSIONS and shape[-1] > 1:
            return table
        if len(shape) == MATRIX_DIMENSIONS and min(shape) > 1:
            return f"weights belong into a layer, such as nn.Linear; {table}"
        return "put it into a layer's weights or bias, and normalise images before the network (mean= and std= say how)"

    def sizes(self, node: fx.Node) -> tuple[int, ...] | None:
        if node not in self.values:
            return None
        sizes = self.layers.shapes.sizes(self.values[node])
        return tuple(size if size % BATCH_SIZE else -size for size in sizes)

    def _apply(self, node: fx.Node, inputs: list[Value | Arranged]) -> Value | Arranged:
        options = {key: self._resolved(option) for key, option in node.kwargs.items()}
        call = Call(node, inputs, self._resolved(node.args[1:]), options, self.values, self.layers)
        module = self.modules[str(node.target)] if node.op == "call_module" else None
        if not operations.takes_scores(call, module):
            for read in node.all_input_nodes:
                if isinstance(value := self.values.get(read), Arranged) and isinstance(value.value, Scores):
                    self.values[read] = inputs[inputs.index(value)] = products.scores_read(call, value)
        if module is not None:
            return self.layers.module(str(node.target), module, call.inputs[0])
        return operations.apply(call)

    def _is_size(self, node: fx.Node) -> bool:
        """Whether a node is `x.shape`, a part of it or a product of parts; notes its value."""
        if node.target in (operator.mul, operator.imul, operator.floordiv):
            factors = self._resolved(node.args)
            if known := all(isinstance(size, int) for size in factors):
                self.integers[node] = cast(Any, node.target)(*factors)
            return known
        source = cast(fx.Node, node.args[0] if node.args else None)
        if node.target is getattr and node.args[1] == "shape" and source in self.values:
            self.integers[node] = self.layers.shapes.sizes(self.values[source])
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

    def _is_softmax(self, node: fx.Node) -> bool:
        """Whether a node is the softmax of the logits, or its logarithm, over classes: it keeps their order."""
        target: Any = self.modules[str(node.target)] if node.op == "call_module" else node.target
        logits = node.all_input_nodes[0] if node.all_input_nodes else None
        value = None if logits is None else self.values.get(logits)
        if not isinstance(value, Current | Levels) or not (value.averaged and value.flat and value.time == "none"):
            return False
        options: dict[str, Any] = {**dict(zip(("dim", "dtype"), node.args[1:], strict=False)), **node.kwargs}
        if isinstance(target, nn.Softmax | nn.LogSoftmax) and own_method(target) is None:
            options = {"dim": target.dim}
        elif target not in SOFTMAX:
            return False
        if options.get("dim") in (1, -1) and options.get("dtype") is None:
            self.logits[node] = cast(fx.Node, logits)
        return node in self.logits

    def _finish(self, node: fx.Node) -> Graph:
        result = node.args[0]
        value = self.values.get(self.logits.get(result, result)) if isinstance(result, fx.Node) else None
        if value is None:
            raise GraphError(
                f"the network must return one tensor, the current of its last linear layer (its logits): {SEVERAL_HEADS}"
            )
        if isinstance(value, Arranged):
            raise value.refusal("what the network returns")
        value = as_current("what the network returns", value)
        layers = self.layers.made
        if not value.averaged and not any(layer.neuron for layer in layers):
            raise GraphError(NO_NEURONS)
        if not value.averaged:
            raise GraphError("the network must average its logits over time: return logits.mean(0)")
        if value.time != "none":
            raise GraphError("the network must return its logits as [B, classes], without time in front of their mean")
        return Graph(
            self.input_shape,
            self.timesteps,
            self.static,
            tuple(layers),
            self.layers.readout(value),
            gates=tuple(self.layers.gates.values()),
        )
