"""Levels laid out for a product: channels split into heads, positions joined to tokens, axes exchanged.

Attention multiplies matrices, so a network's forward rearranges neurons' outputs [T, B, C, H, W] before it and the current
behind it. `Arranged` follows this, axis by axis. Only rearranging, scaling and products read such a tensor; where anything
else does, the refusal of the first operation that rearranged it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from lbq.deploy.lowering.currents import Current, Levels, Time, Value, scaled
from lbq.errors import GraphError
from lbq.graph import INPUT, Shape, Synapse

SCORE_AXES = 3  # heads, queries and keys
TOKEN_ROLES, CHANNEL_ROLES = {"y", "x"}, {"c", "d"}


class Rearranged(GraphError):
    """The refusal of an operation on shapes. It may be a symptom of a product that comes later."""


class Atom(NamedTuple):
    """A part of an axis: channels `c`, or heads `h` and the channels `d` of one; rows `y` and columns `x` of positions.

    operand: of a product, which of its two operands it comes from.
    """

    role: str
    size: int
    operand: int = 0


Axis = tuple[Atom, ...]


@dataclass(frozen=True)
class Scores:
    """A product of two levels: Q K^T where it sums over a head's `channels`, K^T V where it sums over `tokens`.

    name: makes that of its synapse, where a neuron reads it.
    """

    operands: tuple[Levels, Levels]
    over: Literal["channels", "tokens"]
    factor: float
    time: Time
    shape: Shape  # of the operands
    name: Callable[[], str]


@dataclass(frozen=True)
class Arranged:
    """A value whose axes behind time and batch stand as `axes` say. refusal: for all that cannot read it so."""

    value: Levels | Current | Scores
    axes: tuple[Axis, ...]
    refusal: GraphError

    @property
    def time(self) -> Time:
        return self.value.time

    @property
    def behind(self) -> tuple[int, ...]:
        """Sizes behind the batch."""
        return tuple(math.prod(atom.size for atom in axis) for axis in self.axes)

    def settled(self, rank: int) -> Value | Arranged:
        """The value itself where it stands again as layers read it, with so many axes behind the batch."""
        if not isinstance(self.value, Scores) and self.axes == plain_axes(self.value.shape, rank):
            return self.value
        return self

    def as_scores(self) -> Current | None:
        """Q K^T [heads, queries, keys] as a current that a neuron may read; None for all else."""
        scores = self.value
        if not isinstance(scores, Scores) or scores.over != "channels" or len(self.axes) != SCORE_AXES:
            return None
        heads, *sides = self.axes
        if not _is_heads(heads) or any(_bare(axis) != in_order(scores.shape) for axis in sides):
            return None
        q, k = (scores.operands[axis[0].operand] for axis in sides)
        return score_current(scores.name(), q, k, math.prod(atom.size for atom in heads), scores.factor)


def plain_axes(shape: Shape, rank: int) -> tuple[Axis, ...]:
    """Of a value as layers read it: [C, H, W], or [C, L] of signals."""
    atoms = zip("cyx", shape, strict=True)
    axes = tuple((Atom(role, size),) if size > 1 else () for role, size in atoms)
    return axes if rank == 3 else (axes[0], axes[2])


def merged(axis: Sequence[Atom]) -> Axis:
    """Heads and the channels of each, where they stand together again, as channels."""
    atoms = list(axis)
    for i in range(len(atoms) - 1):
        if [atom.role for atom in atoms[i : i + 2]] == ["h", "d"]:
            atoms[i : i + 2] = [Atom("c", atoms[i].size * atoms[i + 1].size, atoms[i + 1].operand)]
            break
    return tuple(atoms)


def split(atoms: Sequence[Atom], sizes: Sequence[int]) -> tuple[Axis, ...] | None:
    """Atoms as axes of these sizes; channels may be split into heads. None where they do not fit."""
    axes, left = [], list(atoms)
    for wanted in sizes:
        axis, size = [], wanted
        while size > 1:
            if not left:
                return None
            atom = left.pop(0)
            if atom.role == "c" and size < atom.size and atom.size % size == 0:
                left.insert(0, Atom("d", atom.size // size, atom.operand))
                atom = Atom("h", size, atom.operand)
            if size % atom.size:
                return None
            axis.append(atom)
            size //= atom.size
        axes.append(merged(axis))
    return None if left else tuple(axes)


# What operations on shapes make of it; None where it has no such form. front: sizes of time and batch
# ---------------------------------------------------------------------------------------------------------------------


def flattened(arranged: Arranged, front: tuple[int, ...], start: Any, end: Any) -> tuple[Axis, ...] | None:
    rank = len(front) + len(arranged.axes)
    first, last = start % rank - len(front), end % rank - len(front)
    if not 0 <= first <= last:
        return None
    joined = merged(tuple(chain(*arranged.axes[first : last + 1])))
    return *arranged.axes[:first], joined, *arranged.axes[last + 1 :]


def unflattened(arranged: Arranged, front: tuple[int, ...], dim: Any, sizes: Any) -> tuple[Axis, ...] | None:
    at = dim % (len(front) + len(arranged.axes)) - len(front)
    if at < 0 or not isinstance(sizes, tuple) or not all(isinstance(size, int) for size in sizes):
        return None
    axes = split(arranged.axes[at], completed(sizes, arranged.behind[at]))
    return None if axes is None else (*arranged.axes[:at], *axes, *arranged.axes[at + 1 :])


def reshaped(arranged: Arranged, front: tuple[int, ...], sizes: Any) -> tuple[Axis, ...] | None:
    if not isinstance(sizes, tuple) or not all(isinstance(size, int) for size in sizes):
        return None
    whole = completed(sizes, math.prod(front) * math.prod(arranged.behind))
    if whole[: len(front)] != front:
        return None
    return split(tuple(chain(*arranged.axes)), whole[len(front) :])


def permuted(arranged: Arranged, front: tuple[int, ...], name: str, dims: tuple[Any, ...]) -> tuple[Axis, ...] | None:
    rank = len(front) + len(arranged.axes)
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple) else dims
    if not all(isinstance(dim, int) for dim in dims) or name == "movedim":
        return None
    order = list(range(rank))
    if name == "permute":
        order = [dim % rank for dim in dims]
    elif len(dims) == 2:
        one, other = (dim % rank for dim in dims)
        order[one], order[other] = other, one
    lead = len(front)
    if sorted(order) != list(range(rank)) or order[:lead] != list(range(lead)):
        return None
    return tuple(arranged.axes[dim - lead] for dim in order[lead:])


def completed(sizes: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Sizes with the one that -1 stands for."""
    known = math.prod(size for size in sizes if size != -1)
    return tuple(total // known if size == -1 and known else size for size in sizes)


# Products
# ---------------------------------------------------------------------------------------------------------------------


def multiplied(where: str, left: Arranged, right: Arranged, name: Callable[[str], str]) -> Arranged:
    """left @ right: scores of two levels, or the current of scores and the third. name: makes that of a kind of synapse."""
    if (weighed := _weighed(where, left, right, name)) is not None:
        return weighed
    *batch, rows, inner = left.axes
    *other_batch, other_inner, columns = right.axes
    heads = list(chain(*batch))
    kinds = [_kind(axis) for axis in (rows, inner, columns)]
    fits = (
        [_bare(axis) for axis in batch] == [_bare(axis) for axis in other_batch]
        and [atom.role for atom in heads] in ([], ["h"])
        and _bare(inner) == _bare(other_inner)
        and left.time == right.time
    )
    values = left.value, right.value
    levels = [operand(where, value) for value in values if isinstance(value, Levels)]
    if not fits or len({value.shape for value in values}) > 1 or any(isinstance(value, Current) for value in values):
        raise _refused(where)
    count = heads[0].size if heads else 1
    if len(levels) == 2 and kinds in (["tokens", "channels", "tokens"], ["channels", "tokens", "channels"]):
        over: Any = kinds[1]
        factor = levels[0].factor * levels[1].factor
        scores = Scores((levels[0], levels[1]), over, factor, left.time, levels[0].shape, lambda: name("scores"))
        axes = (*batch, _of(rows, 0), _of(columns, 1))
        return Arranged(
            scores,
            axes,
            GraphError(
                f"{where}: scores, Q K^T, are read by their product with V, or by a neuron as [T, B, heads, queries, keys]: "
                "bring them into this order, and leave out what else stands between them and V"
            ),
        )
    if len(levels) == 1 and sorted((kinds[0], kinds[2])) == ["channels", "tokens"]:
        scores_at = 0 if isinstance(values[0], Scores) else 1
        scores = values[scores_at]  # type: ignore[assignment]
        contracted = (inner, other_inner)[scores_at]
        keys = scores.operands[contracted[0].operand]
        other = scores.operands[1 - contracted[0].operand]
        third = levels[0]
        # kinds[1] is what this product sums over, the scores' is the other one
        if kinds[1] != scores.over:
            q, v = (other, third) if scores.over == "channels" else (third, other)
            current = attention(name("attention"), q, keys, v, count, scores.factor * third.factor)
            return _rearranged(where, current, (*batch, _of(rows, 0), _of(columns, 0)))
    raise _refused(where)


def _rearranged(where: str, current: Current, axes: tuple[Axis, ...]) -> Arranged:
    back = f"{where}: what attention gives stands in another order: bring it back to [T, B, channels, height, width]"
    return Arranged(current, axes, GraphError(back))


def _weighed(where: str, left: Arranged, right: Arranged, name: Callable[[str], str]) -> Arranged | None:
    """S @ V or V @ S^T, where S is a neuron's levels of scores [heads, queries, keys]; None for all else."""
    for scores, values, transposed in ((left, right, False), (right, left, True)):
        s, v = scores.value, values.value
        if not isinstance(s, Levels) or not isinstance(v, Levels) or len(scores.axes) != SCORE_AXES:
            continue
        *batch, first, second = values.axes
        tokens, channels = (second, first) if transposed else (first, second)
        heads, heads_of_values = s.shape[0], list(chain(*batch))
        count = v.shape[1] * v.shape[2]
        plain = plain_axes(s.shape, SCORE_AXES)
        if (
            s.shape == (heads, count, count)
            and scores.axes == ((plain[0], plain[2], plain[1]) if transposed else plain)
            and [(atom.role, atom.size) for atom in heads_of_values] == ([("h", heads)] if heads > 1 else [])
            and _bare(tokens) == in_order(v.shape)
            and _kind(channels) == "channels"
            and s.time == v.time
        ):
            current = value_current(name("attention"), operand(where, s), operand(where, v))
            return _rearranged(where, current, values.axes)
    return None


def in_order(shape: Shape) -> list[tuple[str, int]]:
    """Positions joined row by row to tokens, as `_bare` gives them."""
    return _bare(tuple(chain(*plain_axes(shape, SCORE_AXES)[1:])))


def _is_heads(axis: Axis) -> bool:
    return [atom.role for atom in axis] in ([], ["h"])


def _kind(axis: Axis) -> str:
    roles = {atom.role for atom in axis}
    return (
        "tokens" if roles and roles <= TOKEN_ROLES else "channels" if len(axis) == 1 and roles <= CHANNEL_ROLES else ""
    )


def _bare(axis: Axis) -> list[tuple[str, int]]:
    return [(atom.role, atom.size) for atom in axis]


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
