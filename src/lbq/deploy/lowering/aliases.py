"""Which tensors of a trace share memory: a sum in place changes all of them, and lowering knows values only."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from lbq.deploy.lowering.times import TRANSPOSES
from lbq.deploy.lowering.trace import PASSES
from lbq.errors import GraphError
from lbq.models.time import fold_time, unfold_time

IN_PLACE: dict[Any, str] = {operator.iadd: "+", operator.isub: "-", operator.imul: "*", operator.itruediv: "/"}
# What may show the memory of its first tensor, of all that can be lowered
FUNCTIONS = (fold_time, unfold_time, torch.flatten, torch.unflatten, torch.reshape, torch.unsqueeze, torch.detach,
             operator.getitem)  # fmt: skip
LIKE_ANOTHER = ("view_as", "reshape_as")
METHODS = ("flatten", "unflatten", "reshape", "view", "unsqueeze", "expand", "contiguous", "detach", "float", "double", "to",
           *LIKE_ANOTHER)  # fmt: skip
VIEWS: frozenset[Any] = frozenset((*FUNCTIONS, *METHODS, *TRANSPOSES, *IN_PLACE, F.dropout, F.dropout2d))


def owners(trace: fx.Graph, modules: Mapping[str, nn.Module]) -> dict[fx.Node, fx.Node]:
    """For each node, the one whose memory it may show; itself where it makes a tensor of its own."""
    owner: dict[fx.Node, fx.Node] = {}
    for node in trace.nodes:
        if node.op == "call_module":
            shows = isinstance(modules[str(node.target)], (*PASSES, nn.Flatten))
        else:
            shows = node.target in VIEWS
        owner[node] = owner[node.all_input_nodes[0]] if shows and node.all_input_nodes else node
    return owner


def check_in_place(trace: fx.Graph, modules: Mapping[str, nn.Module], tensors: Container[fx.Node]) -> None:
    """Refuse a sum or product in place where a tensor from before it, in the memory that it changes, is read after it."""
    owner = owners(trace, modules)
    for node in trace.nodes:
        if node.target not in IN_PLACE or node not in tensors:
            continue
        same = (other for other, first in owner.items() if first is owner[node] and other < node)
        if any(node < user and _reads(user, other) for other in same for user in other.users):
            sign = IN_PLACE[node.target]
            raise GraphError(
                f"{node.name} in the network's forward: {sign}= changes a tensor that is read again afterwards, itself or by a "
                f"view: write x = x {sign} y"
            )


def _reads(user: fx.Node, tensor: fx.Node) -> bool:
    """Whether a node reads the numbers of a tensor, and not its shape alone."""
    if user.target in (unfold_time, *LIKE_ANOTHER):
        return user.args[0] is tensor
    return user.target is not getattr
