"""What a network contains that has no integer form, where lowering stops earlier, at a symptom.

Attention rearranges its operands first. Where lowering cannot follow that, this looks further, and names the cause: a
transformer layer of PyTorch, a softmax, a LayerNorm, or a product of tensors that cannot be followed.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Set
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn import functional as F

from lbq.deploy.lowering.remedies import TRANSFORMER_LAYERS, TUTORIAL, remedy
from lbq.deploy.lowering.trace import ACTIVATIONS, NORMS, Follower, place_of, traced
from lbq.errors import GraphError
from lbq.models.attention import attend, gate, scores, weigh

PRODUCTS: frozenset[Any] = frozenset(
    (attend, scores, weigh, gate, operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm")
)
FUNCTIONS: frozenset[Any] = frozenset((
    torch.einsum, F.scaled_dot_product_attention, torch.softmax, F.softmax, "softmax", F.gelu, F.layer_norm,
))  # fmt: skip
LAYERS = frozenset(f"layernorm gelu softmax {TRANSFORMER_LAYERS}".split())
UNSUITABLE = (
    "attention whose operands have no integer form: let each be a neuron's output, split its channels alone into heads, and "
    f"join all positions to tokens, as {TUTORIAL} does"
)
BATCH = 2
LOGIT_DIMENSIONS = 2


def check(net: nn.Module, shape: tuple[int, ...], lowered: Set[str]) -> None:
    """Refuse a network for what it contains, as far as it can be traced.

    shape: that of its input, without the batch. lowered: the names of the calls that have an integer form.
    """
    try:
        follower = _Causes(copy.deepcopy(net).to("meta").float(), shape, lowered)
    except Exception:  # a network that cannot be copied; what lowering said of it stands
        return
    with suppress(GraphError):  # what does not run was refused for that already
        traced(net, follower)
    for cause in (follower.cause, follower.product):
        if cause is not None:
            raise cause


class _Causes(Follower):
    """Knows the shapes of all tensors, from a run of the network on PyTorch's meta device.

    cause: the refusal of the first call that has no integer form anywhere. product: that of the first product.
    """

    cause: GraphError | None = None
    product: GraphError | None = None

    def __init__(self, net: nn.Module, shape: tuple[int, ...], lowered: Set[str]) -> None:
        super().__init__(len(shape) + 1)
        self.net, self.shape, self.lowered = net, shape, lowered
        self.tensors: dict[fx.Node, Any] = {}

    def see(self, node: fx.Node) -> None:
        self.cause = self.cause or self._cause(node)
        if self.product is None and _multiplies(node) and node.name not in self.lowered:
            self.product = GraphError(f"{place_of(node)}: {UNSUITABLE}")
        if node.op == "placeholder":
            if not self.tensors:
                self.tensors[node] = torch.empty(BATCH, *self.shape, device="meta")
        elif node.op == "get_attr" or any(read in self.tensors for read in node.all_input_nodes):
            self.tensors[node] = self._run(node)

    def _cause(self, node: fx.Node) -> GraphError | None:
        if node.op == "call_module":
            kind = type(self._layer(node)).__name__
            known, where = kind.lower() in LAYERS, f"layer {node.target!r}: {kind}"
        else:
            kind = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            known, where = node.target in FUNCTIONS, f"{place_of(node)}: operation {kind!r}"
        if "softmax" in kind.lower() and len(self.sizes(node.all_input_nodes[0]) or ()) <= LOGIT_DIMENSIONS:
            return None
        return GraphError(f"{where} has no integer form: {remedy(kind)}") if known else None

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
            # `forward` runs no hooks
            return args[0] if isinstance(layer, (*ACTIVATIONS, *NORMS)) else layer.forward(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs) if callable(node.target) else None


def _multiplies(node: fx.Node) -> bool:
    """Whether a node multiplies two tensors as matrices, neither of them a parameter."""
    operands: list[fx.Node] = []  # with repetitions: x @ x has two
    map_arg((node.args, node.kwargs), operands.append)
    return node.target in PRODUCTS and len([operand for operand in operands if operand.op != "get_attr"]) > 1
