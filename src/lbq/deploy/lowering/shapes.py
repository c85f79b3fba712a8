"""What folding, unfolding, transposing and flattening make of a symbolic value: where time stands in it, and which of its
sizes are joined."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from lbq.deploy.lowering.arranged import Arranged, Scores
from lbq.deploy.lowering.axes import BATCH_SIZE, Axes, behind, plain_axes, words
from lbq.deploy.lowering.currents import Time, Value
from lbq.errors import GraphError
from lbq.graph import Shape

InputShape = Shape | tuple[int, int] | tuple[int]  # of one input: (C, H, W), (C, L) or (F,)

FOLDED: dict[Time, Time] = {"one": "none", "all": "folded", "one behind": "none", "behind": "folded behind"}
UNFOLDED: dict[Time, Time] = {"folded": "all", "folded behind": "behind"}
SWAPPED: dict[Time, Time] = {"one": "one behind", "all": "behind", "one behind": "one", "behind": "all"}
SHOWN: dict[Time, Time] = {"none": "all", "one": "all", "one behind": "behind"}  # at every timestep
ONE_STEP: dict[Time, Time] = {"all": "one", "behind": "one behind"}  # the same where there is one timestep
AXIS: dict[Time, int] = {"all": 0, "behind": 1}  # of time
WITH_TIME: tuple[Time, ...] = ("all", "folded", "behind", "folded behind")
WITHOUT_TIME: tuple[Time, ...] = ("none", "one", "one behind")

TRANSPOSES = (torch.transpose, torch.permute, torch.swapaxes, torch.swapdims, torch.movedim, "transpose", "permute",
              "swapaxes", "swapdims", "movedim")  # fmt: skip


def as_image(shape: tuple[int, ...]) -> Shape:
    """The shape that the integer network reads."""
    channels, *sides = shape
    height, width = {0: (1, 1), 1: (1, *sides)}.get(len(sides), tuple(sides))
    return channels, height, width


def front(time: Time, steps: int) -> tuple[int, ...]:
    """The sizes in front of channels."""
    if time == "none":
        return (BATCH_SIZE,)
    if time in UNFOLDED:
        return (steps * BATCH_SIZE,)
    count = 1 if time in ("one", "one behind") else steps
    return (count, BATCH_SIZE) if time in ("one", "all") else (BATCH_SIZE, count)


def new_time(at: Any, by_index: bool) -> Time | None:
    """Where time is that x[at], or x.unsqueeze(at), puts before a static tensor; None where that does something else."""
    if not by_index:
        return "one" if at == 0 else "one behind" if at == 1 else None
    index = at if isinstance(at, tuple) else (at,)
    index = index[:-1] if index[-1:] == (...,) else index
    return "one" if index == (None,) else "one behind" if index == (slice(None), None) else None


@dataclass(frozen=True)
class Shapes:
    """Of values in a network that runs `timesteps`. signals: [C, L], which are [C, 1, L] here."""

    timesteps: int
    signals: bool

    def sizes(self, value: Value | Arranged) -> tuple[int, ...]:
        if isinstance(value, Arranged):
            return value.sizes
        return front(value.time, self.timesteps) + self.behind(value)

    def behind(self, value: Value | Arranged) -> tuple[int, ...]:
        """The sizes behind the batch."""
        if isinstance(value, Arranged):
            return value.sizes[len(value.axes) - len(behind(value.axes)) :]
        channels, height, width = value.shape
        return (channels * height * width,) if value.flat else (channels, width) if self.signals else value.shape

    def arranged(self, value: Value | Arranged) -> Arranged:
        """A value with the axes that it stands in."""
        if isinstance(value, Arranged):
            return value
        time: Time = "all" if value.time in WITH_TIME else "none"
        return Arranged(replace(value, time=time, flat=False), self._axes(value))

    def settled(self, arranged: Arranged) -> Value | Arranged:
        """The value itself where it stands again as layers read it."""
        value = arranged.value
        if isinstance(value, Scores) or (self.signals and value.shape[1] > 1):
            return arranged
        for time, flat in product(WITH_TIME if value.time == "all" else WITHOUT_TIME, (False, True)):
            plain = replace(value, time=time, flat=flat)
            if self._axes(plain) == arranged.axes:
                return plain
        return arranged

    def _axes(self, value: Value) -> Axes:
        return plain_axes(value.shape, value.time, value.flat, self.timesteps, self.signals)

    def fold(self, value: Value) -> Value:
        return replace(value, time=FOLDED.get(value.time, value.time))

    def flatten(self, where: str, value: Value, start: Any, end: Any) -> Value:
        """Time and batch folded, or everything behind the batch joined; with time in front, that begins at dimension 2."""
        if (start, end) == (0, 1) and value.time in FOLDED:
            return self.fold(value)
        rank = len(self.sizes(value))
        if start % rank != rank - len(self.behind(value)) or end not in (-1, rank - 1):
            raise GraphError(f"{where}: flatten channels, height and width together, and nothing else")
        return replace(value, flat=True)

    def transposed(self, where: str, value: Value, axes: tuple[Any, ...]) -> Value:
        """Time and batch exchanged: by their two dimensions, or by the order of all."""
        rank = len(self.sizes(value))
        dims = axes[0] if len(axes) == 1 else axes
        order = [dim % rank if isinstance(dim, int) else dim for dim in dims]
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
            full_sizes = tuple(total // known if size == -1 and known else size for size in sizes)
            other = (FOLDED | UNFOLDED).get(value.time, value.time)
            for time, flat in product((value.time, other), (False, True)):
                if self.sizes(reshaped := replace(value, time=time, flat=flat)) == full_sizes:
                    return reshaped
        raise GraphError(f"{where}: it may only join or split time and batch, or channels, height and width")

    def check_spatial(self, where: str, value: Value | Arranged, spatial: Any) -> None:
        """Folding tells time by the number of dimensions: with another one it would take it for the batch."""
        behind = len(self.behind(value))
        if spatial != behind and isinstance(value, Arranged):
            raise GraphError(
                f"{where}: spatial={spatial}, but the tensor is {words(value.axes)}: give spatial={behind}"
            )
        if spatial != behind:
            more = ", or input_shape as (C, H, W)" if spatial == 3 else ""
            raise GraphError(f"{where}: spatial={spatial}, but the tensor has {behind}: give spatial={behind}{more}")

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
