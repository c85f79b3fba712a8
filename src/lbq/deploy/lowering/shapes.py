"""What folding, unfolding, transposing, flattening and repeating make of a symbolic value: where time stands in it, and which
of its sizes are joined."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import torch
from torch import fx

from lbq.deploy.lowering.currents import Value
from lbq.deploy.lowering.times import FOLDED, ONE, SHOWN, SWAPPED, UNFOLDED, added, front
from lbq.errors import GraphError


@dataclass(frozen=True)
class Shapes:
    """Of values in a network that runs `timesteps`. signals: [C, L], which are [C, 1, L] here."""

    timesteps: int
    signals: bool

    def sizes(self, value: Value) -> tuple[int, ...]:
        return front(value.time, self.timesteps) + self.behind(value)

    def behind(self, value: Value) -> tuple[int, ...]:
        """The sizes behind the batch."""
        channels, height, width = value.shape
        return (channels * height * width,) if value.flat else (channels, width) if self.signals else value.shape

    def fold(self, value: Value) -> Value:
        return replace(value, time=FOLDED.get(value.time, value.time))

    def flatten(self, where: str, value: Value, start: Any, end: Any) -> Value:
        """Time and batch folded, or everything behind the batch joined; with time in front, that begins at dimension 2."""
        if (start, end) == (0, 1) and value.time in FOLDED:
            return self.fold(value)
        rank = len(self.sizes(value))
        if start % rank != rank - len(self.behind(value)) or end not in (-1, rank - 1):
            raise GraphError(
                f"{where}: flatten all of channels, height and width together, and nothing in front of them"
            )
        return replace(value, flat=True)

    def transposed(self, where: str, value: Value, axes: tuple[Any, ...]) -> Value:
        """Time and batch exchanged: by their two dimensions, or by the order of all."""
        rank = len(self.sizes(value))
        given = axes[0] if len(axes) == 1 else axes
        order = [axis % rank if isinstance(axis, int) else axis for axis in given]
        if (
            value.time not in SWAPPED
            or order[:2] not in ([0, 1], [1, 0])
            or order[2:] not in ([], list(range(2, rank)))
        ):
            raise GraphError(f"{where}: only time and batch can be exchanged, as in x.transpose(0, 1)")
        if len(order) > 2 and order[0] == 0:  # permuted into the same order
            return value
        return replace(value, time=SWAPPED[value.time])

    def reshape(self, where: str, value: Value, sizes: Any) -> Value:
        """What view and reshape may do: fold or unfold time and batch, flatten channels, height and width or undo it."""
        if isinstance(sizes, (tuple, list)) and all(isinstance(size, int) for size in sizes):
            known, total = math.prod(size for size in sizes if size != -1), math.prod(self.sizes(value))
            wanted = tuple(total // known if size == -1 and known else size for size in sizes)
            other = (FOLDED | UNFOLDED).get(value.time, value.time)
            for time, flat in product((value.time, other), (False, True)):
                if self.sizes(found := replace(value, time=time, flat=flat)) == wanted:
                    return found
        raise GraphError(
            f"{where}: it may join or split time and batch, or channels, height and width, in that order; nothing else"
        )

    def check_spatial(self, where: str, value: Value, spatial: Any) -> None:
        """Folding tells time by the number of dimensions: with another one it would take it for the batch."""
        behind = len(self.behind(value))
        if spatial != behind:
            more = ", or input_shape as (C, H, W)" if spatial == 3 else ""
            raise GraphError(
                f"{where}: spatial={spatial}, but behind the batch it has {behind}: give spatial={behind}{more}"
            )

    def begin(self, where: str, value: Value, steps: Any) -> Value:
        """A static value, shown at each of `steps` timesteps."""
        if value.time not in SHOWN:
            raise GraphError(f"{where}: only an image without time in front can be shown at every timestep")
        if steps is None:
            raise GraphError(
                f"{where}: an image enters here, and timesteps= does not say how often it is shown; for event frames, which "
                "have time in front, pass static=False"
            )
        if steps != self.timesteps:
            raise GraphError(
                f"{where}: the network runs {steps} timesteps, not {self.timesteps}: give timesteps={steps}, or change what "
                "its forward runs"
            )
        return replace(value, time=SHOWN[value.time])

    def shown(self, where: str, node: fx.Node, value: Value, rest: tuple[Any, ...]) -> Value | None:
        """The plain ways to put time in front of the batch, or behind it, or None where `node` is none of them: unsqueeze,
        [None] or [:, None], and then expand or repeat; expand and repeat alone; torch.stack([x] * T)."""
        target = node.target
        if target in (torch.unsqueeze, "unsqueeze", operator.getitem):
            new = added((*rest, *node.kwargs.values())[0], target is operator.getitem)
            if value.time != "none" or new is None:
                return None
            value = replace(value, time=new)
            return value if self.timesteps > 1 else self.begin(where, value, 1)
        if target is torch.stack:
            copies, at = cast(Sequence[Any], node.args[0]), (*rest, *node.kwargs.values())
            if any(x is not copies[0] for x in copies) or at not in ((), (0,), (1,)):
                raise GraphError(f"{where}: only the same image, stacked in front for every timestep, is supported")
            behind = at == (1,) and value.time == "none"
            return self.begin(where, replace(value, time="one behind") if behind else value, len(copies))
        return self.repeated(where, node, value, rest) if target in ("expand", "repeat") else None

    def repeated(self, where: str, node: fx.Node, value: Value, rest: tuple[Any, ...]) -> Value:
        if self.timesteps == 1:
            value = replace(value, time=ONE.get(value.time, value.time))
        sizes = list(rest[0] if len(rest) == 1 else rest)
        kept = [{-1, size} if node.target == "expand" else {1} for size in self.sizes(value)]
        at = 1 if value.time == "one behind" else 0
        if value.time != "none":
            del kept[at]
        steps = sizes.pop(at) if len(sizes) > at else None
        if node.kwargs or len(sizes) != len(kept) or any(s not in k for s, k in zip(sizes, kept, strict=True)):
            raise GraphError(
                f"{where}: {node.target} is supported only to show an image at every timestep, in front, as in "
                "x.expand(T, *x.shape)"
            )
        return self.begin(where, value, steps)
