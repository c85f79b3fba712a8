"""Operations on tensors that do not stand as images: shapes, time and means, on the axes that they stand in.

Operations on shapes may also bring a tensor out of [T, B, C, H, W], or back: `Shapes.settled` gives the value itself then.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, cast

from torch import nn

from lbq.deploy.lowering import axes as axes_of
from lbq.deploy.lowering.arranged import Arranged, Rearranged
from lbq.deploy.lowering.axes import CHANNELS, POSITIONS, Atom, Axes, roles, sides, words
from lbq.deploy.lowering.call import Call, refusal
from lbq.deploy.lowering.currents import Current, Joined, Value, scaled, summands
from lbq.deploy.lowering.shapes import new_time
from lbq.errors import GraphError
from lbq.models.time import unfold_time

Result = Value | Arranged
HEAD_SUMS = "; the sum over a head's channels is lbq.models.attention.head_sums, of [T, B, channels, height, width]"

# Shapes
# ---------------------------------------------------------------------------------------------------------------------


def rearranging(plain: Callable[[Call], Value | None]) -> Callable[[Call], Result]:
    """The handler of an operation on shapes. What `plain` refuses may be another order of axes."""

    def handler(call: Call) -> Result:
        value, reason = call.inputs[0], None
        if not isinstance(value, Arranged):
            try:
                if (made := plain(call)) is not None:
                    return made
                reason = Rearranged(str(refusal(call)))
            except GraphError as error:
                reason = Rearranged(str(error))
            if isinstance(value, Joined) and value.flat:
                raise reason
        arranged = call.shapes.arranged(value)
        if (axes := _axes(call, arranged.axes)) is None:
            raise reason or Rearranged(
                f"{call.where}: {call.name} may join and exchange parts of {words(arranged.axes)}, and split channels into "
                f"heads, but nothing else: {_instead(arranged.axes)}"
            )
        return call.shapes.settled(replace(arranged, axes=axes))

    return handler


def _instead(axes: Axes) -> str:
    """What to write, where heads stand apart from their channels and where they do not."""
    parts = [roles(axis) for axis in axes]
    if "h" in parts and "d" in parts and abs(parts.index("h") - parts.index("d")) > 1:
        between = len(axes) - 1 - parts.index("h")
        return f"bring heads beside their channels first, as in x.transpose(-{between + 1}, -2).flatten(-2)"
    return "give it other sizes or dimensions, without names"


def _axes(call: Call, axes: Axes) -> Axes | None:
    name, arguments = call.name, call.arguments
    if name == "flatten":
        dims = call.named("start_dim", "end_dim")
        return axes_of.flattened(axes, dims.get("start_dim", 0), dims.get("end_dim", -1))
    if call.options:
        return None
    if name == "unflatten":
        return axes_of.unflattened(axes, *arguments) if len(arguments) == 2 else None
    if name in ("reshape", "view"):
        return axes_of.reshaped(axes, arguments[0] if len(arguments) == 1 else arguments)
    if name == "getattr":
        return axes_of.permuted(axes, "transpose", (-2, -1)) if arguments == ("mT",) else None
    return axes_of.permuted(axes, name, arguments)


# Time
# ---------------------------------------------------------------------------------------------------------------------


def fold(call: Call) -> Result:
    """`fold_time`."""
    value = _first(call)
    call.shapes.check_spatial(call.where, value, call.arguments[0])
    if len(axes_of.behind(value.axes)) == len(value.axes) - 1:
        return value
    return call.shapes.settled(replace(value, axes=cast(Axes, axes_of.flattened(value.axes, 0, 1))))


def unfold(call: Call) -> Result:
    """`unfold_time`: time begins where a static input unfolds."""
    bound = inspect.signature(unfold_time).bind(*call.node.args, **call.node.kwargs).arguments
    value, like = call.shapes.arranged(call.inputs[0]), call.values.get(bound["like"])
    if like is not None:
        call.shapes.check_spatial(call.where, like, bound.get("spatial", 3))
        sizes = call.shapes.sizes(like)
        if len(sizes) == bound.get("spatial", 3) + 1 and value.value.time == "none":
            return _begun(call, value, bound.get("timesteps"), 0)
        if (axes := axes_of.unflattened(value.axes, 0, sizes[:2])) is not None and value.value.time == "all":
            return call.shapes.settled(replace(value, axes=axes))
    raise GraphError(f"{call.where}: it must unfold what was computed from fold_time of the same tensor")


def add_axis(call: Call) -> Result | None:
    """unsqueeze, [None] and [:, None]."""
    value, at = _first(call), (*call.arguments, *call.options.values())[0]
    if call.node.target is operator.getitem:
        at = {"one": 0, "one behind": 1}.get(str(new_time(at, by_index=True)))
    if not isinstance(at, int):
        return None
    at %= len(value.axes) + 1
    if call.shapes.timesteps == 1 and at == 0 and value.value.time == "none":
        return _begun(call, value, 1, 0)
    return call.shapes.settled(replace(value, axes=(*value.axes[:at], (), *value.axes[at:])))


def stack(call: Call) -> Result:
    """torch.stack([x] * T), which shows an image at every timestep."""
    copies, at = cast(Any, call.node.args[0]), (*call.arguments, *call.options.values())
    if any(x is not copies[0] for x in copies) or at not in ((), (0,), (1,)):
        raise GraphError(f"{call.where}: only the same image, stacked in front for every timestep, is supported")
    return _begun(call, _first(call), len(copies), at[0] if at else 0)


def repeat(call: Call) -> Result:
    """expand and repeat, which show an image at every timestep."""
    value = _first(call)
    sizes = call.arguments[0] if isinstance(call.arguments[0], tuple) else call.arguments
    axes = ((),) * (len(sizes) - len(value.axes)) + value.axes
    kept = [{-1, size} if call.name == "expand" else {1} for size in axes_of.sizes_of(axes)]
    changed = [at for at, size in enumerate(sizes) if size not in kept[at]]
    if not changed and len(sizes) == len(value.axes) and value.value.time == "all":
        return value
    at = changed[0] if changed else 0  # of one timestep, nothing changes
    if call.options or len(changed) > 1 or at > 1 or axes[at] or len(axes) - len(value.axes) > 1:
        raise GraphError(
            f"{call.where}: {call.name} is supported only to show an image at every timestep, in front, as in "
            "x.expand(T, *x.shape)"
        )
    return _begun(call, replace(value, axes=(*axes[:at], *axes[at + 1 :])), sizes[at], at)


def _begun(call: Call, value: Arranged, steps: Any, at: int) -> Result:
    """A static value, shown at each of `steps` timesteps, along a new axis."""
    shown = call.shapes.begin(call.where, cast(Value, value.value), steps)
    axes = (*value.axes[:at], (Atom("t", call.shapes.timesteps),), *value.axes[at:])
    return call.shapes.settled(Arranged(shown, axes))


# Means and sums
# ---------------------------------------------------------------------------------------------------------------------


def mean_or_sum(call: Call) -> Result:
    """The mean or the sum over time, over all tokens, or over both."""
    arranged, name = _first(call), call.name
    axes, value = arranged.axes, cast(Value, arranged.value)
    options = call.named("dim", "keepdim")
    options.pop("input", None)  # the tensor, by its name
    dims, keeps = options.pop("axis", options.pop("dim", ())), options.pop("keepdim", False)
    over = {dim % len(axes) for dim in ((dims,) if isinstance(dims, int) else dims or ())}
    taken = set(roles([atom for dim in over for atom in axes[dim]]))
    positions = set(roles(list(chain(*sides(value.shape)[1:]))))
    if (
        options
        or not over
        or not taken <= {"t", *POSITIONS}
        or taken - {"t"} not in (set(), positions)
        or ("t" in taken and keeps)
    ):
        raise GraphError(
            f"{call.where}: operation {name!r} has no integer form here but as the {name} over time or over all tokens: of "
            f"{words(axes)}, {_ways(name, axes)}{HEAD_SUMS if name == 'sum' and taken <= set(CHANNELS) else ''}"
        )
    if taken - {"t"}:
        if isinstance(value, Current) and not summands(value):
            raise GraphError(
                f"{call.where}: {name} over tokens must read a neuron's output: put a neuron in front of it"
            )
        value = call.layers.read(call.where, nn.AdaptiveAvgPool2d(1), value)
    if "t" in taken:
        value = replace(value, averaged=True, time="none")
    if name == "sum":
        value = scaled(value, math.prod(arranged.sizes[dim] for dim in over), call.layers.numbers)
    left = tuple(() if at in over else axis for at, axis in enumerate(axes) if keeps or at not in over)
    return call.shapes.settled(Arranged(value, left))


def _ways(name: str, axes: Axes) -> str:
    """The calls that would do."""
    found: list[tuple[int, ...]] = [
        tuple(at for at, axis in enumerate(axes) if axis and set(roles(axis)) <= set(wanted))
        for wanted in ("t", POSITIONS)
    ]
    calls = [f"{name}({some[0] if len(some) == 1 else some})" for some in found if some]
    return " or ".join(calls) or "bring it back to [T, B, channels, height, width] first"


def _first(call: Call) -> Arranged:
    """The tensor that a call reads; scores are currents by then."""
    return call.shapes.arranged(call.inputs[0])
