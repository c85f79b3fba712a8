"""Products of two tensors that depend on the input, as in attention: what they are called, and why they are refused."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn import functional as F

from lbq.deploy.lowering.trace import ACTIVATIONS, Follower, place_of, traced
from lbq.errors import GraphError
from lbq.models.attention import attend, gate

PRODUCTS: frozenset[Any] = frozenset((
    attend, gate, operator.matmul, torch.matmul, torch.bmm, torch.einsum, F.scaled_dot_product_attention, "matmul", "bmm",
))  # fmt: skip
GATES = (gate, operator.mul, operator.imul, torch.mul, "mul")
ATTENTION_LAYERS = (
    nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.TransformerDecoderLayer,
    nn.TransformerDecoder, nn.Transformer,
)  # fmt: skip
BATCH = 2


def product(place: str, target: Any = None) -> GraphError:
    """The refusal of a product, made by calling `target`."""
    kind = "a gate" if target in GATES else "attention"
    return GraphError(
        f"{place}: a product of two levels ({kind}) has no integer form yet: train and test this network in float (lbq train, "
        "lbq eval), and deploy one in which levels meet weights alone, such as resnet20w128"
    )


def check_product(node: fx.Node) -> None:
    """Refuse a node that multiplies two tensors, neither of them a parameter."""
    if node.target not in PRODUCTS:
        return
    operands: list[fx.Node] = []  # with repetitions: x @ x has two
    map_arg((node.args, node.kwargs), operands.append)
    if len([operand for operand in operands if operand.op != "get_attr"]) > 1:
        raise product(place_of(node), node.target)


def check_products(net: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuse a network's first product, if it can be traced; `shape` is that of its input, without the batch.

    Attention reshapes its operands first. Lowering stops there, at a symptom; this names the cause.
    """
    try:
        follower = _Shapes(copy.deepcopy(net).to("meta"), shape)
    except Exception:  # a network that cannot be copied; what lowering said of it stands
        return
    try:
        traced(net, follower)
    except GraphError:
        if follower.refusal is not None:
            raise follower.refusal from None


class _Shapes(Follower):
    """Knows the shapes of all tensors, from a run of the network on PyTorch's meta device. `refusal`: of the first product."""

    refusal: GraphError | None = None

    def __init__(self, net: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__(len(shape) + 1)
        self.net, self.shape = net, shape
        self.tensors: dict[fx.Node, Any] = {}

    def see(self, node: fx.Node) -> None:
        try:
            check_product(node)
            if node.op == "call_module" and isinstance(layer := self._layer(node), ATTENTION_LAYERS):
                raise product(f"layer {node.target!r}, a {type(layer).__name__}")
        except GraphError as error:
            self.refusal = error
            raise
        if node.op == "placeholder":
            if not self.tensors:
                self.tensors[node] = torch.empty(BATCH, *self.shape, device="meta")
        elif node.op == "get_attr" or any(read in self.tensors for read in node.all_input_nodes):
            self.tensors[node] = self._run(node)

    def sizes(self, node: fx.Node) -> tuple[int, ...] | None:
        value = self.tensors.get(node)
        return tuple(value.shape) if isinstance(value, torch.Tensor) else None

    def _layer(self, node: fx.Node) -> nn.Module:
        return self.net.get_submodule(str(node.target))

    def _run(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.net)
        args, kwargs = map_arg((node.args, node.kwargs), self.tensors.__getitem__)
        if node.op == "call_module":
            layer = self._layer(node)
            return args[0] if isinstance(layer, ACTIVATIONS) else layer.forward(*args, **kwargs)  # without hooks
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs) if callable(node.target) else None
