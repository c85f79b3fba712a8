"""Values that stand otherwise than as [T, B, C, H, W]: tokens, heads split off, positions joined; and products of them.

`Arranged` is a value with the axes that it stands in. Layers of tokens, sums, means and products read it; where anything else
does, the refusal names those axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, cast

import numpy as np

from lbq.deploy.lowering.axes import (
    FRONT,
    POSITIONS,
    Axes,
    Axis,
    bare,
    roles,
    sides,
    sizes_of,
    words,
)
from lbq.deploy.lowering.currents import Current, Joined, Levels, Time, scaled
from lbq.deploy.lowering.currents import add as add_currents
from lbq.errors import GraphError
from lbq.graph import INPUT, Shape, Synapse

Kind = Literal["channels", "tokens"]


class Rearranged(GraphError):
    """The refusal of an operation on shapes. It may be a symptom of a product that comes later."""


@dataclass(frozen=True)
class Scores:
    """A product of two levels: Q K^T where it sums over a head's `channels`, K^T V where it sums over `tokens`.

    name: makes that of its synapse, where a neuron reads it.
    """

    operands: tuple[Levels, Levels]
    over: Kind
    factor: float
    time: Time
    shape: Shape  # of the operands
    where: str
    name: Callable[[], str]


@dataclass(frozen=True)
class Arranged:
    """A value [C, H, W] that stands in `axes`, time and batch among them. In itself it is not flat, and its time is `all` or
    `none`: whether there is any."""

    value: Levels | Current | Joined | Scores
    axes: Axes

    @property
    def sizes(self) -> tuple[int, ...]:
        return sizes_of(self.axes)

    def refusal(self, where: str) -> GraphError:
        """For all that cannot read it so."""
        if isinstance(self.value, Scores):
            return GraphError(
                f"{self.value.where}: scores, Q K^T, are read by their product with V, or by a neuron as [T, B, heads, "
                "queries, keys]: bring them into this order, and leave out what else stands between them and V"
            )
        return GraphError(
            f"{where}: it cannot read {words(self.axes)}: bring it back to [T, B, channels, height, width] first"
        )

    def as_scores(self) -> Arranged | None:
        """Q K^T [heads, queries, keys] as a current that a neuron may read; None for all else."""
        scores = self.value
        if not isinstance(scores, Scores) or scores.over != "channels":
            return None
        *batch, queries, keys = self.axes
        heads = _heads(batch)
        if heads is None or any(bare(axis) != in_order(scores.shape) for axis in (queries, keys)):
            return None
        q, k = (scores.operands[_operand_of(axis, at)] for at, axis in enumerate((queries, keys)))
        current = score_current(scores.name(), q, k, heads, scores.factor)
        as_channels = (tuple(atom._replace(role="c") if atom.role == "h" else atom for atom in axis) for axis in batch)
        return Arranged(current, (*as_channels, *sides(current.shape)[1:]))


def aligned(where: str, left: Arranged, right: Arranged, missing: str) -> Axes:
    """The axes of both together, as PyTorch broadcasts them. missing: the roles of those that one of them may lack."""
    rank = max(len(left.axes), len(right.axes))
    pairs = list(zip(*(((),) * (rank - len(side.axes)) + side.axes for side in (left, right)), strict=True))
    for one, other in pairs:
        if one != other and ((one and other) or not set(roles(one + other)) <= set(missing)):
            raise GraphError(
                f"{where}: {words(left.axes)} and {words(right.axes)} do not fit: bring one of them into the order of the other"
            )
    return tuple(max(pair, key=len) for pair in pairs)


def added(where: str, left: Arranged, right: Arranged) -> Arranged:
    """The sum of two values whose axes stand alike; time may be missing in one of them."""
    axes = aligned(where, left, right, missing="t")
    return Arranged(add_currents(where, cast(Any, left.value), cast(Any, right.value)), axes)


# Products
# ---------------------------------------------------------------------------------------------------------------------


def multiplied(where: str, left: Arranged, right: Arranged, name: Callable[[str], str]) -> Arranged:
    """left @ right: scores of two levels, or the current of scores and the third. name: makes that of a kind of synapse."""
    if (weighed := _weighed(where, left, right, name)) is not None:
        return weighed
    *batch, rows, inner = left.axes
    *other_batch, other_inner, columns = right.axes
    heads, values = _heads(batch), (left.value, right.value)
    levels = [operand(where, value) for value in values if not isinstance(value, Scores)]
    fits = [bare(axis) for axis in (*batch, inner)] == [bare(axis) for axis in (*other_batch, other_inner)]
    if not fits or heads is None or len({value.shape for value in values}) > 1:
        raise _refused(where)
    shape = values[0].shape

    def fit(*kinds: Kind) -> bool:
        return all(_holds(axis, kind, shape, heads) for axis, kind in zip((rows, inner, columns), kinds, strict=True))

    sums: tuple[Kind, ...] = ("channels", "tokens")
    over = next((kind for kind in sums if fit(_other(kind), kind, _other(kind))), None)
    if len(levels) == 2 and over is not None:
        one, other = levels
        scores = Scores(
            (one, other), over, one.factor * other.factor, one.time, one.shape, where, lambda: name("scores")
        )
        return Arranged(scores, (*batch, _of(rows, 0), _of(columns, 1)))
    at = 0 if isinstance(values[0], Scores) else 1
    if len(levels) == 1 and isinstance(values[at], Scores):
        scores, contracted, third = cast(Scores, values[at]), (inner, other_inner)[at], levels[0]
        of_keys = _operand_of(contracted, 1 - at)
        keys, rest = scores.operands[of_keys], scores.operands[1 - of_keys]
        inside = _other(scores.over)
        if fit("tokens", inside, "channels") or fit("channels", inside, "tokens"):
            q, v = (rest, third) if scores.over == "channels" else (third, rest)
            current = attention(name("attention"), q, keys, v, heads, scores.factor * third.factor)
            return Arranged(current, (*batch, _of(rows, 0), _of(columns, 0)))
    raise _refused(where)


def _weighed(where: str, left: Arranged, right: Arranged, name: Callable[[str], str]) -> Arranged | None:
    """S @ V or V @ S^T, where S is a neuron's levels of scores [heads, queries, keys]; None for all else."""
    for scores, values, transposed in ((left, right, False), (right, left, True)):
        s, v = scores.value, values.value
        if not isinstance(s, Levels) or not isinstance(v, Levels):
            continue
        *batch, first, second = values.axes
        tokens, channels = (second, first) if transposed else (first, second)
        count = v.shape[1] * v.shape[2]
        heads, queries, keys = sides(s.shape)
        as_heads = [
            bare(tuple(atom._replace(role="h") if atom in heads else atom for atom in axis))
            for axis in scores.axes[:-2]
        ]
        of_values = [
            bare(tuple(atom._replace(role="h") if atom.role == "c" else atom for atom in axis)) for axis in batch
        ]
        if (
            s.shape[1:] == (count, count)
            and scores.axes[-2:] == ((keys, queries) if transposed else (queries, keys))
            and as_heads == of_values
            and bare(tokens) == in_order(v.shape)
            and _holds(channels, "channels", v.shape, s.shape[0])
        ):
            current = value_current(name("attention"), operand(where, s), operand(where, v))
            return Arranged(current, values.axes)
    return None


def in_order(shape: Shape) -> list[tuple[str, int]]:
    """Positions joined row by row to tokens, as `bare` gives them."""
    return bare(tuple(chain(*sides(shape)[1:])))


def _heads(batch: Sequence[Axis]) -> int | None:
    """How many heads stand beside time and batch, all channels if each is a head; None where anything else does."""
    others = [atom for atom in chain(*batch) if atom.role not in FRONT]
    return None if roles(others) not in ("", "h", "c") else others[0].size if others else 1


def _holds(axis: Axis, kind: Kind, shape: Shape, heads: int) -> bool:
    """Whether an axis holds tokens, or the channels of a head. One without parts does where there is one of them."""
    if not axis:
        return (shape[1] * shape[2] if kind == "tokens" else shape[0] // heads) == 1
    return set(roles(axis)) <= set(POSITIONS) if kind == "tokens" else roles(axis) in ("c", "d")


def _other(kind: Kind) -> Kind:
    return "tokens" if kind == "channels" else "channels"


def _operand_of(axis: Axis, otherwise: int) -> int:
    """Which operand of a product an axis comes from. One without parts does not tell: the product is the same either way."""
    return axis[0].operand if axis else otherwise


def _of(axis: Axis, operand: int) -> Axis:
    return tuple(atom._replace(operand=operand) for atom in axis)


def _refused(where: str) -> GraphError:
    return GraphError(
        f"{where}: of products of neurons' outputs, attention alone has an integer form: (Q K^T) V or Q (K^T V) of three "
        "tensors of one shape, where heads are neighbouring channels and tokens all positions; behind a neuron on Q K^T, A @ V "
        "or V @ A^T of its output A [T, B, heads, queries, keys]"
    )


def operand(where: str, value: Any) -> Levels:
    """Levels of a layer as they are, which alone can be multiplied with levels."""
    if (
        not isinstance(value, Levels)
        or value.source == INPUT
        or value.pools
        or value.averaged
        or value.padding != (0, 0)
    ):
        raise GraphError(
            f"{where}: it multiplies something else than neurons' outputs: put a neuron in front of it, behind sums, pools "
            "and layers"
        )
    return value


def attention(name: str, q: Levels, k: Levels, v: Levels, heads: int, factor: float) -> Current:
    """The current factor * (Q K^T) V."""
    return _product(name, (q.source, k.source, v.source), q.shape, q.shape, heads, factor, q.time)


def score_current(name: str, q: Levels, k: Levels, heads: int, factor: float) -> Current:
    """The current factor * Q K^T, for a neuron."""
    tokens = q.shape[1] * q.shape[2]
    return _product(name, (q.source, k.source, ""), q.shape, (heads, tokens, tokens), heads, factor, q.time)


def value_current(name: str, scores: Levels, v: Levels, factor: float = 1.0) -> Current:
    """The current factor * S V of a neuron's levels of scores."""
    factor *= scores.factor * v.factor
    return _product(name, (scores.source, "", v.source), scores.shape, v.shape, scores.shape[0], factor, v.time)


def _product(
    name: str, sources: tuple[str, str, str], reads: Shape, gives: Shape, heads: int, factor: float, time: Time
) -> Current:
    source, keys, values = sources
    weight = np.full(gives[0], factor)
    synapse = Synapse(name, source, "matmul", weight, reads, gives, keys=keys, values=values, heads=heads)
    return Current((synapse,), np.zeros(gives[0]), gives, time=time)


def multiple(arranged: Arranged, factor: float, numbers: Any) -> Arranged:
    """It times a number."""
    value = arranged.value
    if isinstance(value, Scores):
        return replace(arranged, value=replace(value, factor=value.factor * factor))
    return replace(arranged, value=cast(Any, scaled(value, factor, numbers)))
