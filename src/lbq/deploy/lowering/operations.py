"""Functions and methods in a network's forward, on symbolic values: one handler for each operation that can be lowered.

`HANDLERS` names them. A handler returns None where an operation is used in a way that has no integer form. `apply` refuses
that, and what has no handler: it says where the operation was written and what to write instead.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional as F

from lbq.deploy.lowering import arranging, products
from lbq.deploy.lowering.arranged import Arranged, added
from lbq.deploy.lowering.call import Call, refusal
from lbq.deploy.lowering.currents import Levels, Value, add, join, scaled
from lbq.deploy.lowering.layers import LAYER_OF_FUNCTION
from lbq.deploy.lowering.shapes import AXIS, ONE_STEP, TRANSPOSES, UNFOLDED, new_time
from lbq.deploy.lowering.trace import PASSES
from lbq.errors import GraphError
from lbq.graph import INPUT
from lbq.models.attention import attend, gate, head_sums, scores, weigh
from lbq.models.time import fold_time, unfold_time

SUBTRACTIONS = (operator.sub, operator.isub, torch.sub, "sub")
MULTIPLICATIONS = (operator.mul, operator.imul, torch.mul, "mul")


def apply(call: Call) -> Value | Arranged:
    """What an operation makes of its input; refused where it has no integer form."""
    target = call.node.target
    arranged = next((value for value in call.inputs if isinstance(value, Arranged)), None)
    handler = (HANDLERS if arranged is None else ARRANGED_HANDLERS).get(target)
    if handler is None and arranged is not None and target in HANDLERS:
        raise arranged.refusal(call.where)
    value = None if handler is None else handler(call)
    if value is None:
        raise refusal(call)
    return value


def takes_scores(call: Call, module: nn.Module | None) -> bool:
    """Whether a call, of this module where it is of one, may read scores as they are. What has no form at all is refused for
    itself."""
    target = call.node.target
    return isinstance(module, PASSES) if module is not None else target in SCORE_HANDLERS or target not in HANDLERS


# Time
# ---------------------------------------------------------------------------------------------------------------------


def _fold_time(call: Call) -> Value:
    call.shapes.check_spatial(call.where, call.value, call.arguments[0])
    return call.shapes.fold(call.value)


def _unfold_time(call: Call) -> Value:
    """Time begins where a static input unfolds; it must begin with the timesteps that the graph will run."""
    bound = inspect.signature(unfold_time).bind(*call.node.args, **call.node.kwargs).arguments
    like = cast(Value | None, call.values.get(bound["like"]))
    if like is None or like.time in UNFOLDED or call.value.time != call.shapes.fold(like).time:
        raise GraphError(f"{call.where}: it must unfold what was computed from fold_time of the same tensor")
    call.shapes.check_spatial(call.where, like, bound.get("spatial", 3))
    if like.time != "none":
        return replace(call.value, time=like.time)
    return call.shapes.begin(call.where, call.value, bound.get("timesteps"))


def _add_axis(call: Call) -> Value | None:
    """unsqueeze, [None] and [:, None], which put time in front of the batch or behind it."""
    at = (*call.arguments, *call.options.values())[0]
    time = new_time(at, call.node.target is operator.getitem)
    if call.value.time != "none" or time is None:
        return None
    value = replace(call.value, time=time)
    return value if call.shapes.timesteps > 1 else call.shapes.begin(call.where, value, 1)


def _stack(call: Call) -> Value:
    """torch.stack([x] * T), which shows an image at every timestep."""
    copies, at = cast(Sequence[Any], call.node.args[0]), (*call.arguments, *call.options.values())
    if any(x is not copies[0] for x in copies) or at not in ((), (0,), (1,)):
        raise GraphError(f"{call.where}: only the same image, stacked in front for every timestep, is supported")
    behind = at == (1,) and call.value.time == "none"
    value = replace(call.value, time="one behind") if behind else call.value
    return call.shapes.begin(call.where, value, len(copies))


def _repeat(call: Call) -> Value:
    """expand and repeat, which show an image at every timestep."""
    value, shapes = call.value, call.shapes
    if shapes.timesteps == 1:
        value = replace(value, time=ONE_STEP.get(value.time, value.time))
    sizes = list(call.arguments[0] if len(call.arguments) == 1 else call.arguments)
    allowed = [{-1, size} if call.name == "expand" else {1} for size in shapes.sizes(value)]
    at = 1 if value.time == "one behind" else 0
    if value.time != "none":
        del allowed[at]
    steps = sizes.pop(at) if len(sizes) > at else None
    fits = len(sizes) == len(allowed) and all(size in some for size, some in zip(sizes, allowed, strict=True))
    if call.options or not fits:
        raise GraphError(
            f"{call.where}: {call.name} is supported only to show an image at every timestep, in front, as in "
            "x.expand(T, *x.shape)"
        )
    return shapes.begin(call.where, value, steps)


# Shapes
# ---------------------------------------------------------------------------------------------------------------------


def _flatten(call: Call) -> Value:
    dims = call.named("start_dim", "end_dim")
    return call.shapes.flatten(call.where, call.value, dims.get("start_dim", 0), dims.get("end_dim", -1))


def _unflatten(call: Call) -> Value | None:
    """The first dimension, time and batch folded, into two."""
    if call.value.time not in UNFOLDED or len(call.arguments) != 2 or call.arguments[0] != 0:
        return None
    front = call.arguments[1]
    sizes = (*front, *call.shapes.sizes(call.value)[1:]) if isinstance(front, tuple) else None
    return call.shapes.reshape(call.where, call.value, sizes)


def _transpose(call: Call) -> Value | None:
    return None if call.options else call.shapes.transposed(call.where, call.value, call.arguments)


def _reshape(call: Call) -> Value | None:
    if call.options:
        return None
    sizes = call.arguments[0] if len(call.arguments) == 1 else call.arguments
    return call.shapes.reshape(call.where, call.value, sizes)


def _matrix_transpose(call: Call) -> Value | None:
    """x.mT."""
    return call.shapes.transposed(call.where, call.value, (-2, -1)) if call.arguments == ("mT",) else None


def _join(call: Call) -> Value:
    """torch.cat along channels."""
    named: dict[str, Any] = {**dict(zip(("tensors", "dim"), call.node.args, strict=False)), **call.node.kwargs}
    values = [call.values.get(tensor) for tensor in named["tensors"]]
    known = cast(list[Value], [value for value in values if value is not None])
    rank = len(call.shapes.sizes(known[0]))
    channels = rank - len(call.shapes.behind(known[0]))
    if len(known) != len(values) or named.get("dim", named.get("axis", 0)) not in (channels, channels - rank):
        raise GraphError(f"{call.where}: neurons' outputs can be joined along channels alone: dim={channels}")
    return join(call.where, known)


# Arithmetic
# ---------------------------------------------------------------------------------------------------------------------


def _unchanged(call: Call) -> Value | Arranged:
    """The same numbers, wherever they lie and whatever holds them."""
    return call.inputs[0]


def _cast(call: Call) -> Value | Arranged | None:
    """to(dtype), for dtypes that hold all levels and pixels exactly."""
    exact = all(to in (torch.float32, torch.float64) for to in (*call.arguments, *call.options.values()))
    return call.inputs[0] if exact else None


def _add(call: Call) -> Value | Arranged:
    """The sum or the difference of two tensors, or 0 + tensor, as sum() begins."""
    operands = [call.values.get(a, a) if isinstance(a, fx.Node) else a for a in call.node.args]
    values = [x for x in operands if isinstance(x, Value | Arranged)]
    subtracts = call.node.target in SUBTRACTIONS
    if len(operands) == 2 and not call.options:
        if len(values) == 2:
            left, right = values
            return _sum(call, left, products.multiple(right, -1, call.layers.numbers) if subtracts else right)
        if 0 in operands and not subtracts:
            return values[0]
    constants = "constants into a bias"
    if any(isinstance(value, Levels) and value.source == INPUT for value in values):
        constants = "normalise images before the network, not in it: mean= and std= say how"
    raise GraphError(
        f"{call.where}: only sums and differences of two tensors are supported: write x + y, and {constants}"
    )


def _sum(call: Call, left: Value | Arranged, right: Value | Arranged) -> Value | Arranged:
    if isinstance(left, Arranged) or isinstance(right, Arranged):
        return call.shapes.settled(added(call.where, call.shapes.arranged(left), call.shapes.arranged(right)))
    return add(call.where, left, right)


def _multiply(call: Call) -> Value | Arranged | None:
    """A tensor times a number, or divided by one; or levels times levels."""
    operands = call.node.args
    values = [call.values[a] for a in operands if isinstance(a, fx.Node) and a in call.values]
    if call.node.target in MULTIPLICATIONS and len(values) > 1:
        return products.broadcast_gate(call, *values)
    numbers = [a for a in operands if isinstance(a, int | float) and math.isfinite(a)]
    if call.options or len(operands) != 2 or len(numbers) != 1:
        return None
    (number,) = numbers
    factor = float(number)
    if call.node.target not in MULTIPLICATIONS:
        if number == 0 or number is not operands[1]:
            return None
        factor = 1 / number
    return products.multiple(call.inputs[0], factor, call.layers.numbers)


def _negate(call: Call) -> Value | Arranged:
    return products.multiple(call.inputs[0], -1, call.layers.numbers)


def _mean_or_sum(call: Call) -> Value:
    """The mean or the sum over time, over height and width, or over both."""
    value, name = call.value, call.name
    options = call.named("dim", "keepdim")
    options.pop("input", None)  # the tensor, by its name
    dims, keeps = options.pop("axis", options.pop("dim", ())), options.pop("keepdim", False)
    sizes = call.shapes.sizes(value)
    rank, axis = len(sizes), AXIS.get(value.time, 0)
    over = {dim % rank for dim in ((dims,) if isinstance(dims, int) else dims or ())}
    height_and_width = set(range(rank - len(call.shapes.behind(value)) + 1, rank))
    sides = height_and_width & over
    others = over - sides - {axis}
    if options or others or sides not in (set(), height_and_width) or not over or (axis in over and keeps):
        both = f"length, {name}(-1)" if call.shapes.signals else f"height and width, {name}((-2, -1))"
        raise GraphError(
            f"{call.where}: operation {name!r} has no integer form here but as the {name} over time, {name}({axis}), or over "
            f"{both}"
        )
    if axis in over and value.time not in AXIS:
        raise GraphError(
            f"{call.where}: {name}({axis}) must be over time, and there is no time in front: use [T, B, ...]"
        )
    if sides:
        value = replace(call.layers.read(call.where, nn.AdaptiveAvgPool2d(1), value), flat=not keeps)
    if axis in over:
        value = replace(value, averaged=True, time="none")
    count = math.prod(sizes[dim] for dim in over)
    return scaled(value, count, call.layers.numbers) if name == "sum" else value


# Layers that are called as functions
# ---------------------------------------------------------------------------------------------------------------------


def _layer(call: Call) -> Value | Arranged | None:
    options = {name: option for name, option in call.options.items() if name != "input"}
    layer = LAYER_OF_FUNCTION[call.node.target](*call.arguments, **options)
    return None if layer is None else call.layers.module(call.node.name, layer, call.inputs[0])


def _relu(call: Call) -> Value | Arranged:
    return call.layers.module(call.node.name, nn.ReLU(), call.inputs[0])


Handler = Callable[[Call], Value | Arranged | None]
SHAPES: dict[Any, Handler] = {
    target: arranging.rearranging(plain)
    for plain, targets in {
        _flatten: (torch.flatten, "flatten"),
        _unflatten: (torch.unflatten, "unflatten"),
        _transpose: TRANSPOSES,
        _reshape: (torch.reshape, "reshape", "view"),
        _matrix_transpose: (getattr,),
    }.items()
    for target in targets
}
SCALINGS: dict[Any, Handler] = {
    **dict.fromkeys(("contiguous", "clone", torch.clone, "detach", torch.detach, "float", "double"), _unchanged),
    "to": _cast,
    **dict.fromkeys(MULTIPLICATIONS, _multiply),
    **dict.fromkeys((operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div"), _multiply),
    **dict.fromkeys((operator.neg, torch.neg, "neg"), _negate),
}
SCORE_HANDLERS: dict[Any, Handler] = {
    **SHAPES,
    **SCALINGS,
    **dict.fromkeys((operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm"), products.matmul),
    **dict.fromkeys((F.dropout, F.dropout2d), _layer),
}
EITHER: dict[Any, Handler] = {  # of values as layers read them, and of arranged ones
    **SCORE_HANDLERS,
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", *SUBTRACTIONS), _add),
    **dict.fromkeys(LAYER_OF_FUNCTION, _layer),
    **dict.fromkeys((torch.relu, F.relu, "relu"), _relu),
}
AXES_ADDED, REPEATED, AVERAGED = (
    (torch.unsqueeze, "unsqueeze", operator.getitem),
    ("expand", "repeat"),
    (torch.mean, "mean", torch.sum, "sum"),
)
HANDLERS: dict[Any, Handler] = {
    **EITHER,
    fold_time: _fold_time,
    unfold_time: _unfold_time,
    **dict.fromkeys(AXES_ADDED, _add_axis),
    torch.stack: _stack,
    **dict.fromkeys(REPEATED, _repeat),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _join),
    **dict.fromkeys(AVERAGED, _mean_or_sum),
    attend: products.attention_of_ours,
    gate: products.gate_of_ours,
    head_sums: products.sums_of_ours,
    scores: products.scores_of_ours,
    weigh: products.values_of_ours,
}
ARRANGED_HANDLERS: dict[Any, Handler] = {
    **EITHER,
    fold_time: arranging.fold,
    unfold_time: arranging.unfold,
    **dict.fromkeys(AXES_ADDED, arranging.add_axis),
    torch.stack: arranging.stack,
    **dict.fromkeys(REPEATED, arranging.repeat),
    **dict.fromkeys(AVERAGED, arranging.mean_or_sum),
}
