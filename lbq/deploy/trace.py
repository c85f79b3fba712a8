"""Trace a network with torch.fx for lowering: which layers are leaves, and what is known of its input."""

from __future__ import annotations

import inspect
import operator
from typing import Any

from torch import fx, nn

from lbq.deploy.faithful import own_method
from lbq.errors import GraphError
from lbq.neuron import ReLU, SpikingNeuron

ACTIVATIONS = (SpikingNeuron, ReLU, nn.ReLU)
PASSES = (nn.Dropout, nn.Dropout2d, nn.Identity)
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
STATELESS = (*PASSES, *POOLS, nn.Flatten)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
LAYERS = (*ACTIVATIONS, *NORMS, *STATELESS, nn.Conv2d, nn.Linear)


def traced(net: nn.Module, dimensions: int) -> fx.Graph:
    """The calls of the network's forward on one input of so many dimensions."""
    try:
        options = {  # arguments with defaults, such as per_step=False, keep them
            name: parameter.default
            for name, parameter in inspect.signature(net.forward).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        graph = _Tracer(dimensions).trace(net, options)
    except Exception as error:  # whatever the network's own forward raises on symbolic tensors
        reason = " ".join(str(error).split()) or type(error).__name__
        if reason.endswith("got _Value"):  # a neuron was asked for something else than its outputs
            reason = "forward_step and levels cannot be deployed; give neurons whole sequences, as in neuron(currents)"
        raise GraphError(f"{type(net).__name__} cannot be traced by torch.fx: {reason}") from error
    _, *others = (node for node in graph.nodes if node.op == "placeholder")
    if used := [
        node.name for node in others if node.users and node.target in inspect.signature(net.forward).parameters
    ]:
        raise GraphError(f"{type(net).__name__} reads a second input, {used[0]!r}: a deployed network has one")
    return graph


class _Tracer(fx.Tracer):
    """Layers that lowering knows are leaves, those that only derive from them too."""

    def __init__(self, dimensions: int = 4) -> None:  # torch.load of a traced network makes one without arguments
        super().__init__()
        self.dimensions = dimensions  # of the input

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, PASSES) and own_method(m):
            return False  # its own forward is traced like any other
        return isinstance(m, LAYERS) or super().is_leaf_module(m, module_qualified_name)

    def path_of_module(self, mod: nn.Module) -> str:
        try:
            return super().path_of_module(mod)
        except NameError as error:
            raise GraphError(
                f"{type(mod).__name__} is made in its forward: make it in __init__, as an attribute, or call the function"
            ) from error

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Input(node, self, self.dimensions) if node.op == "placeholder" else _Value(node, self)


class _Value(fx.Proxy):
    """A tensor whose `+=` is told from `+`: others may read it afterwards."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})


class _Input(_Value):
    """The network's input, whose number of dimensions is known, so that `*x.shape` and `x.dim()` can be traced."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, dimensions: int) -> None:
        super().__init__(node, tracer)
        self.dimensions = dimensions

    @property
    def shape(self) -> tuple[Any, ...]:
        sizes: Any = self.tracer.create_proxy("call_function", getattr, (self, "shape"), {})
        return tuple(sizes[i] for i in range(self.dimensions))

    def dim(self) -> int:
        return self.dimensions
