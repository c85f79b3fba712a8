"""Trace a network with torch.fx for lowering: which layers are leaves, what is known of the sizes of tensors, and which
tensors share memory."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from lbq.deploy.lowering.faithful import own_method
from lbq.deploy.lowering.remedies import untraced
from lbq.deploy.lowering.shapes import TRANSPOSES
from lbq.errors import GraphError
from lbq.models.time import fold_time, unfold_time
from lbq.neuron import ReLU, SpikingNeuron

ACTIVATIONS = (SpikingNeuron, ReLU, nn.ReLU)
PASSES = (nn.Dropout, nn.Dropout2d, nn.Identity)
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
SIGNAL_POOLS = (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d)
STATELESS = (*PASSES, *POOLS, nn.Flatten, nn.ConstantPad2d, *SIGNAL_POOLS, nn.ConstantPad1d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
LEAVES = (*ACTIVATIONS, *NORMS, *STATELESS, nn.Conv1d, nn.Conv2d, nn.Linear)
IN_PLACE: dict[Any, str] = {operator.iadd: "+", operator.isub: "-", operator.imul: "*", operator.itruediv: "/"}
# of all operations that can be lowered, those whose output may share the memory of their first tensor
VIEWS: frozenset[Any] = frozenset((
    fold_time, unfold_time, torch.flatten, torch.unflatten, torch.reshape, torch.unsqueeze, torch.detach, operator.getitem,
    F.dropout, F.dropout2d, *TRANSPOSES, *IN_PLACE, "flatten", "unflatten", "reshape", "view", "unsqueeze", "expand",
    "contiguous", "detach", "float", "double", "to",
))  # fmt: skip


class Follower:
    """Follows a trace as it grows. This one knows how many dimensions the network's input has, and nothing else."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions

    def see(self, node: fx.Node) -> None:
        """Note a node. It comes after the nodes that it reads."""

    def sizes(self, node: fx.Node) -> tuple[int, ...] | None:
        """The shape of a node's tensor; None where it is not known.

        Numbers below 0 stand for sizes that depend on the batch, equal ones for equal sizes.
        """
        return tuple(range(-self.dimensions, 0)) if node.op == "placeholder" else None


def traced(net: nn.Module, follower: Follower) -> fx.Graph:
    """The calls of the network's forward on one input; `follower` sees each of them as it is made."""
    try:
        options = {  # arguments with defaults, such as per_step=False, keep them
            name: parameter.default
            for name, parameter in inspect.signature(net.forward).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        return _Tracer(follower).trace(net, options)
    except GraphError:
        raise
    except Exception as error:  # whatever the network's own forward raises on symbolic tensors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GraphError(f"{type(net).__name__} cannot be traced by torch.fx: {untraced(reason)}") from error


class _Tracer(fx.Tracer):
    """Layers that lowering knows are leaves, those that only derive from them too."""

    def __init__(self, follower: Follower | None = None) -> None:  # torch.load of a traced network makes one without
        super().__init__()
        self.follower = follower or Follower(4)
        self.following = False
        self.unknown: dict[int, _Size] = {}  # sizes that depend on the batch

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, PASSES) and own_method(m):
            return False  # its own forward is traced like any other
        return isinstance(m, LEAVES) or super().is_leaf_module(m, module_qualified_name)

    def path_of_module(self, mod: nn.Module) -> str:
        try:
            return super().path_of_module(mod)
        except NameError as error:
            raise GraphError(
                f"{type(self.root).__name__} cannot be traced by torch.fx: {type(mod).__name__} is made in its forward: make "
                "it in __init__, as an attribute, or call the function"
            ) from error

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self._check_inputs(node)
        self.following = True
        self.follower.see(node)
        self.following = False
        return node

    def _check_inputs(self, node: fx.Node) -> None:
        """Refuse what reads another input than the first; torch.fx itself reads arguments with defaults, under other names."""
        for read in node.all_input_nodes:
            if read.op == "placeholder" and read.target in list(inspect.signature(self.root.forward).parameters)[1:]:
                raise GraphError(f"{type(self.root).__name__} reads a second input, {read.name!r}: deploy one input")

    # The follower looks at layers while the trace grows: to it they are layers with real parameters

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        return attr_val if self.following else super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self.following else super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)


def place_of(node: fx.Node) -> str:
    """Where a call was written: in the network's own forward, or in that of a module inside it."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    layer, kind = list(stack.values())[-1]
    forward = f"the forward of layer {layer!r}, a {kind.__name__}" if layer else "the network's forward"
    return f"{node.name} in {forward}"


def _in_place(operation: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    """An operation in place, which stays apart from the one that makes a new tensor."""

    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    return method


class _Value(fx.Proxy):
    """A tensor of which `+=` is another operation than `+`, because others may read it afterwards. Its sizes are numbers, but
    for those that depend on the batch."""

    tracer: _Tracer

    __iadd__, __isub__ = _in_place(operator.iadd), _in_place(operator.isub)
    __imul__, __itruediv__ = _in_place(operator.imul), _in_place(operator.itruediv)

    @property
    def shape(self) -> Any:
        known = self.tracer.follower.sizes(self.node)
        if known is None:
            return fx.proxy.Attribute(self, "shape")
        return tuple(size if size >= 0 else self._unknown(i, size) for i, size in enumerate(known))

    def _unknown(self, dim: int, which: int) -> _Size:
        """One object for each size that depends on the batch, so that shapes can be compared."""
        if which not in self.tracer.unknown:
            shape: Any = self.tracer.create_proxy("call_function", getattr, (self, "shape"), {})
            self.tracer.unknown[which] = _Size(shape[dim].node, self.tracer)
        return self.tracer.unknown[which]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> Any:
        known = self.tracer.follower.sizes(self.node)
        return self.tracer.create_proxy("call_method", "dim", (self,), {}) if known is None else len(known)

    @property
    def ndim(self) -> Any:
        return self.dim()

    @property
    def mT(self) -> fx.Proxy:  # an attribute of fx would know no sizes
        return self.tracer.create_proxy("call_function", getattr, (self, "mT"), {})


class _Size(_Value):
    """A size that depends on the batch: it equals itself, whatever it is."""

    __hash__ = _Value.__hash__

    def __eq__(self, other: object) -> Any:
        return self is other or self.tracer.create_proxy("call_function", operator.eq, (self, other), {})

    def __ne__(self, other: object) -> Any:
        return self is not other and self.tracer.create_proxy("call_function", operator.ne, (self, other), {})


def check_in_place(trace: fx.Graph, modules: Mapping[str, nn.Module], tensors: Container[fx.Node]) -> None:
    """Refuse a sum or product in place that changes memory which an earlier tensor shares and which is read afterwards.

    Lowering knows values only, and would not see the change.
    """
    owner: dict[fx.Node, fx.Node] = {}  # the node whose memory each node may share; itself where it makes a tensor
    for node in trace.nodes:
        module = modules[str(node.target)] if node.op == "call_module" else None
        shares = isinstance(module, (*PASSES, nn.Flatten)) or (
            module is None and (node.target in VIEWS or _turns(node))
        )
        owner[node] = owner[node.all_input_nodes[0]] if shares and node.all_input_nodes else node
    for node in trace.nodes:
        if node.target not in IN_PLACE or node not in tensors:
            continue
        earlier = (other for other, first in owner.items() if first is owner[node] and other < node)
        if any(node < user and _reads(user, other) for other in earlier for user in other.users):
            sign = IN_PLACE[node.target]
            raise GraphError(
                f"{node.name} in the network's forward: {sign}= changes a tensor that is read again afterwards, itself or by a "
                f"view: write x = x {sign} y"
            )


def _reads(user: fx.Node, tensor: fx.Node) -> bool:
    """Whether a node reads the numbers of a tensor, and not its shape alone."""
    return user.args[0] is tensor if user.target is unfold_time else user.target is not getattr or _turns(user)


def _turns(node: fx.Node) -> bool:
    """Whether a node is x.mT."""
    return node.target is getattr and node.args[1] == "mT"
