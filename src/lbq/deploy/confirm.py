"""Does a network compute what was read off its trace? It is run once, on a few inputs, and compared.

torch.fx follows a symbolic tensor. What a forward does to a real one only, behind `isinstance(x, Tensor)` or in a hook on all
modules, is in no trace, and no look at the network's layers finds it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lbq.deploy.float_execution import execute
from lbq.errors import GraphError
from lbq.graph import Array, Graph
from lbq.neuron.recorder import record_levels

CLOSE = 1e-6  # of logits, beside the largest: the same sums in another order differ by far less


@torch.no_grad()
def confirm(net: nn.Module, graph: Graph, x: Array, inputs: Array) -> None:
    """Refuse a network (in float64) whose levels or logits for `x` are not those of its absorbed graph for `inputs`.

    x: as the network reads it, [B, ...] or [T, B, ...]; inputs: the same as the graph reads it, which may be pixels. Images
    with a membrane at a threshold, where rounding decides, are not compared.
    """
    try:
        with record_levels(net) as levels, _InFloat64():
            logits = net(torch.from_numpy(x.copy())).numpy()  # x may be `inputs`, and a forward may change what it gets
    except Exception as error:  # whatever the network's own forward raises
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GraphError(f"{type(net).__name__} does not run on inputs {list(x.shape)}: {reason}") from error
    expected = execute(graph, inputs)
    compared = expected.ties == 0
    for name, level in expected.levels.items():
        found = levels.get(name)
        same = found is not None and found.size == level.size
        if not same or (found.reshape(level.shape) != level)[:, compared].any():  # type: ignore[union-attr]
            raise GraphError(f"layer {name!r}: {_other(net)}")
    same = logits.size == expected.logits.size and len(logits) == len(expected.logits)
    if not same or not _agree(logits.reshape(expected.logits.shape)[compared], expected.logits[compared]):
        raise GraphError(f"its logits: {_other(net)}")


class _InFloat64(TorchFunctionMode):
    """Casts to float leave the float64 that all else here is in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        to_float = func is Tensor.float or (
            func is Tensor.to and torch.float32 in (*args[1:], *(kwargs or {}).values())
        )
        return Tensor.double(args[0]) if to_float else func(*args, **(kwargs or {}))


def _agree(found: Array, logits: Array) -> bool:
    """Whether a network gives these logits or, which lowering leaves out, their softmax or its logarithm."""
    logarithms = torch.from_numpy(logits).log_softmax(1).numpy()
    return any(
        bool((np.abs(found - given) <= CLOSE * (1 + np.abs(given).max(initial=0))).all())
        for given in (logits, logarithms, np.exp(logarithms))
    )


def _other(net: nn.Module) -> str:
    return (
        f"{type(net).__name__} computes something else than its trace by torch.fx says: forward must not ask what a tensor is "
        "(isinstance, hasattr), nor may hooks on all modules change what they give"
    )
