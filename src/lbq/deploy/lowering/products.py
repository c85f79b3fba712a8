"""Products of levels with levels: attention and gates, and what has to be rearranged around them.

`lbq.models.attention` has functions for both. A network's own forward may also write q @ k and a * k.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import fx

from lbq.deploy.lowering import arranged
from lbq.deploy.lowering.arranged import Arranged, attention, operand
from lbq.deploy.lowering.call import Call
from lbq.deploy.lowering.currents import Current, Levels, Numbers, Value, scaled, together
from lbq.errors import GraphError
from lbq.graph import Pool

# Attention
# ---------------------------------------------------------------------------------------------------------------------


def _name(call: Call, kind: str) -> str:
    """Of a product's synapse: that of the module whose forward has it, and `attention` or `scores`."""
    stack = call.node.meta.get("nn_module_stack") or {"": ("", None)}
    layer = str(list(stack.values())[-1][0])
    return call.layers.product_name(f"{layer}.{kind}" if layer else kind)


def matmul(call: Call) -> Value | Arranged | None:
    """Two tensors multiplied as matrices."""
    named = [call.node.kwargs[name] for name in ("input", "other", "mat2") if name in call.node.kwargs]
    operands = [*call.node.args, *named]
    values = [call.values.get(a) for a in operands if isinstance(a, fx.Node)]
    others = len(call.node.kwargs) - len(named)
    if len(values) != 2 or len(operands) != 2 or others or any(value is None for value in values):
        return None
    left, right = (call.shapes.arranged(value) for value in values if value is not None)
    return call.shapes.settled(arranged.multiplied(call.where, left, right, partial(_name, call)))


def attention_of_ours(call: Call) -> Current:
    """`lbq.models.attention.attend`."""
    q, k, v = (operand(call.where, call.values.get(a)) for a in call.node.args[:3])  # type: ignore[arg-type]
    heads, scale = call.arguments[2:]
    if not q.shape == k.shape == v.shape or len({x.time for x in (q, k, v)}) > 1:
        raise GraphError(f"{call.where}: q, k and v must have one shape, got {q.shape}, {k.shape} and {v.shape}")
    _check_heads(call, q, heads)
    tokens = q.shape[1] * q.shape[2]
    return attention(_name(call, "attention"), q, k, v, heads, scale / tokens * q.factor * k.factor * v.factor)


def scores_of_ours(call: Call) -> Current:
    """`lbq.models.attention.scores`."""
    q, k = (operand(call.where, call.values.get(a)) for a in call.node.args[:2])  # type: ignore[arg-type]
    heads, scale = call.arguments[1:]
    if q.shape != k.shape or q.time != k.time:
        raise GraphError(f"{call.where}: q and k must have one shape, got {q.shape} and {k.shape}")
    _check_heads(call, q, heads)
    _check_images(call)
    return arranged.score_current(_name(call, "scores"), q, k, heads, scale * q.factor * k.factor)


def values_of_ours(call: Call) -> Current:
    """`lbq.models.attention.weigh`."""
    scores, v = (operand(call.where, call.values.get(a)) for a in call.node.args[:2])  # type: ignore[arg-type]
    tokens = v.shape[1] * v.shape[2]
    if scores.shape[1:] != (tokens, tokens) or scores.time != v.time:
        raise GraphError(f"{call.where}: a must be scores of the {tokens} tokens of v, got {scores.shape}")
    _check_heads(call, v, scores.shape[0])
    return arranged.value_current(_name(call, "attention"), scores, v, call.arguments[1] / tokens)


def scores_read(call: Call, value: Arranged) -> Value | Arranged:
    """Scores as what else than a product reads them."""
    if (current := value.as_scores()) is None:
        raise value.refusal(call.where)
    return call.shapes.settled(current)


def _check_images(call: Call) -> None:
    if call.shapes.signals:
        raise GraphError(f"{call.where}: scores of signals for a neuron: give input_shape as (C, 1, L)")


def _check_heads(call: Call, levels: Levels, heads: Any) -> None:
    if type(heads) is not int or heads < 1 or levels.shape[0] % heads:
        raise GraphError(f"{call.where}: heads must divide the {levels.shape[0]} channels, got {heads!r}")


def multiple(value: Value | Arranged, factor: float, numbers: Numbers) -> Value | Arranged:
    """A value times a number."""
    return arranged.multiple(value, factor, numbers) if isinstance(value, Arranged) else scaled(value, factor, numbers)


# Gates
# ---------------------------------------------------------------------------------------------------------------------


def gate_of_ours(call: Call) -> Levels:
    """`lbq.models.attention.gate`."""
    factor, source = (operand(call.where, call.values.get(a)) for a in call.node.args)  # type: ignore[arg-type]
    _check_heads(call, source, factor.shape[0])
    return _gate(call, factor, source)


def broadcast_gate(call: Call, left: Value | Arranged, right: Value | Arranged) -> Value | Arranged:
    """a * k: one of them has the shape of both, the other that, or one channel, or one position."""
    if isinstance(left, Arranged) or isinstance(right, Arranged):
        a, k = call.shapes.arranged(left), call.shapes.arranged(right)
        axes = arranged.aligned(call.where, a, k, missing="tcyx")
        gated = broadcast_gate(call, operand(call.where, a.value), operand(call.where, k.value))
        return call.shapes.settled(Arranged(cast(Levels, gated), axes))
    factor, source = (operand(call.where, value) for value in (left, right))
    if source.shape != tuple(map(max, factor.shape, source.shape)):
        factor, source = source, factor
    if factor.shape[0] not in (1, source.shape[0]):
        raise GraphError(
            f"{call.where}: a gate of {factor.shape} does not fit {source.shape}: let one of the two have all channels and "
            "positions, and the other the same, or one channel, or one position"
        )
    return _gate(call, factor, source)


def _gate(call: Call, factor: Levels, source: Levels) -> Levels:
    time = together(factor.time, source.time)
    if factor.shape[1:] not in (source.shape[1:], (1, 1)) or factor.flat != source.flat or time is None:
        raise GraphError(
            f"{call.where}: a gate of {factor.shape} does not fit {source.shape}: it has as many positions or one, and time "
            "stands in the same place"
        )
    name = call.layers.gate(factor.source, source.source, source.shape)
    return replace(source, source=name, factor=factor.factor * source.factor, time=time)


def sums_of_ours(call: Call) -> Levels:
    """`lbq.models.attention.head_sums`: sums over the channels of each head, as pools give sums over windows."""
    heads, scale = call.arguments
    levels = operand(call.where, call.value)
    _check_heads(call, levels, heads)
    return channel_sums(levels, heads, scale)


def channel_sums(levels: Levels, outputs: int, scale: float) -> Levels:
    """scale * the sums of neighbouring channels, so many of them."""
    channels, height, width = levels.shape
    pool = Pool("sum", (1, 1), (1, 1), channels=channels // outputs)
    return replace(levels, shape=(outputs, height, width), pools=(*levels.pools, pool), factor=levels.factor * scale)
