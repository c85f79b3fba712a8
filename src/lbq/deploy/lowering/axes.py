"""Where the parts of a tensor stand: which of time, batch, channels and positions each of its axes joins.

A network may lay tensors out as it likes: tokens [T, B, N, D], heads split off, time folded into the batch. An axis is the
tuple of the parts that it joins, outermost first. Flattening joins axes, reshaping splits and joins them, transposing exchanges
them: nothing here knows more of an operation than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from lbq.deploy.lowering.currents import Time
from lbq.graph import Shape

BATCH_SIZE = 2**61 - 1  # stands for the batch's size: a prime, so that products of sizes stay distinct
CHANNELS, POSITIONS, FRONT = "chd", "yx", "tb"  # roles; heads and the channels of one are channels
FRONTS: dict[Time, tuple[str, ...]] = {
    "none": ("b",), "one": ("", "b"), "all": ("t", "b"), "folded": ("tb",),
    "one behind": ("b", ""), "behind": ("b", "t"), "folded behind": ("bt",),
}  # fmt: skip
WORDS = {"t": "T", "b": "B", "c": "channels", "h": "heads", "d": "channels of a head", "y": "height", "x": "width"}


class Atom(NamedTuple):
    """A part: time `t`, batch `b`, channels `c`, or heads `h` and the channels `d` of one, rows `y` and columns `x`.

    Those of size 1 are left out, but for time. operand: of a product, which of its two operands it comes from.
    """

    role: str
    size: int
    operand: int = 0


Axis = tuple[Atom, ...]
Axes = tuple[Axis, ...]


def sides(shape: Shape) -> Axes:
    """Channels, height and width, an axis each."""
    return tuple((Atom(role, size),) if size > 1 else () for role, size in zip("cyx", shape, strict=True))


def plain_axes(shape: Shape, time: Time, flat: bool, steps: int, signals: bool) -> Axes:
    """Of a value as layers read it: [C, H, W], [C, L] of signals or [C * H * W], with time and batch in front."""
    sizes = {"t": steps, "b": BATCH_SIZE}
    front = tuple(tuple(Atom(role, sizes[role]) for role in roles) for roles in FRONTS[time])
    channels, rows, columns = sides(shape)
    if flat:
        return *front, (*channels, *rows, *columns)
    return (*front, channels, columns) if signals else (*front, channels, rows, columns)


def sizes_of(axes: Sequence[Axis]) -> tuple[int, ...]:
    return tuple(math.prod(atom.size for atom in axis) for axis in axes)


def bare(axis: Axis) -> list[tuple[str, int]]:
    """Roles and sizes, whatever operand they come from."""
    return [(atom.role, atom.size) for atom in axis]


def roles(axis: Sequence[Atom]) -> str:
    return "".join(atom.role for atom in axis)


def behind(axes: Axes) -> Axes:
    """Those behind the last that holds time or batch."""
    return axes[max(i for i, axis in enumerate(axes) if set(roles(axis)) & set(FRONT)) + 1 :]


def words(axes: Axes) -> str:
    """As in [T, B, tokens, channels]."""
    named = (" * ".join(WORDS[role] for role in roles(axis)) or "1" for axis in axes)
    return f"[{', '.join(named)}]".replace("height * width", "tokens")


# What operations on shapes make of axes; None where that has no such form
# ---------------------------------------------------------------------------------------------------------------------


def merged(axis: Sequence[Atom]) -> Axis:
    """Heads and the channels of each, where they stand together again, as channels."""
    atoms = list(axis)
    for i in range(len(atoms) - 1):
        if roles(atoms[i : i + 2]) == "hd":
            atoms[i : i + 2] = [Atom("c", atoms[i].size * atoms[i + 1].size, atoms[i + 1].operand)]
            break
    return tuple(atoms)


def split(atoms: Sequence[Atom], sizes: Sequence[int]) -> Axes | None:
    """Atoms as axes of these sizes; channels may be split into heads."""
    axes, left = [], list(atoms)
    for at, wanted in enumerate(sizes):
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
        if left and left[0].size == 1 and (wanted == 1 or sizes[at + 1 : at + 2] != (1,)):
            axis.append(left.pop(0))  # time of one step; joined to the batch, where it has no axis of its own
        axes.append(merged(axis))
    return None if left else tuple(axes)


def flattened(axes: Axes, start: Any, end: Any) -> Axes | None:
    first, last = start % len(axes), end % len(axes)
    if first > last:
        return None
    return *axes[:first], merged(tuple(chain(*axes[first : last + 1]))), *axes[last + 1 :]


def unflattened(axes: Axes, dim: Any, sizes: Any) -> Axes | None:
    if not isinstance(sizes, tuple) or not all(isinstance(size, int) for size in sizes):
        return None
    at = dim % len(axes)
    parts = split(axes[at], completed(sizes, sizes_of(axes)[at]))
    return None if parts is None else (*axes[:at], *parts, *axes[at + 1 :])


def reshaped(axes: Axes, sizes: Any) -> Axes | None:
    if not isinstance(sizes, tuple) or not all(isinstance(size, int) for size in sizes):
        return None
    return split(tuple(chain(*axes)), completed(sizes, math.prod(sizes_of(axes))))


def permuted(axes: Axes, name: str, dims: tuple[Any, ...]) -> Axes | None:
    """name: of the operation, such as transpose."""
    rank = len(axes)
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple) else dims
    if name == "movedim":
        dims = tuple(dim if isinstance(dim, tuple) else (dim,) for dim in dims)
        return _moved(axes, *dims) if len(dims) == 2 else None
    if not all(isinstance(dim, int) for dim in dims):
        return None
    order = list(range(rank))
    if name == "permute":
        order = [dim % rank for dim in dims]
    elif len(dims) == 2:
        one, other = (dim % rank for dim in dims)
        order[one], order[other] = other, one
    return tuple(axes[dim] for dim in order) if sorted(order) == list(range(rank)) else None


def _moved(axes: Axes, source: Sequence[int], destination: Sequence[int]) -> Axes | None:
    places = dict(zip((to % len(axes) for to in destination), (dim % len(axes) for dim in source), strict=False))
    if not len(set(places.values())) == len(places) == len(source) == len(destination):
        return None
    rest = iter(dim for dim in range(len(axes)) if dim not in places.values())
    return tuple(axes[places[to] if to in places else next(rest)] for to in range(len(axes)))


def completed(sizes: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Sizes with the one that -1 stands for."""
    known = math.prod(size for size in sizes if size != -1)
    return tuple(total // known if size == -1 and known else size for size in sizes)
