"""Does a batch stand where a neuron reads time? Layers of PyTorch know no time, and the number of dimensions says nothing.

So the autograd graph is asked what fed the neuron, once, at its first call with gradients. From the neuron's input back to the
layer before it, no operation may have put another axis in front: the first axis is then that layer's batch.
"""

from __future__ import annotations

import re
import sys
import warnings
from types import FrameType
from typing import Any

from torch import Tensor, nn

from lbq.kernels.reference import transformed

# Operations whose first axis is a batch, by the names of their nodes. Linear layers take any axes: one of two is a batch.
BATCHED = {
    "Convolution": "a convolution",
    "BatchNorm": "a BatchNorm",
    "Addmm": "a linear layer",
    "Mm": "a linear layer",
}
PRODUCTS = ("Addmm", "Mm")
VIEWS = ("View", "UnsafeView", "ReshapeAlias")
# Operations that keep the first axis, so that what stands before them is asked.
KEEPING = re.compile(
    "Add|Sub|Mul|Div|Neg|Clamp|Clone|ToCopy|Alias|ConstantPadNd|NativeDropout|NativeLayerNorm|NativeGroupNorm|Relu|LeakyRelu"
    "|PreluKernel|Elu|Gelu|Silu|Mish|Hardswish|Hardsigmoid|Hardtanh|Sigmoid|Tanh|Softplus|Threshold|MaxPool.*|AvgPool.*"
    "|AdaptiveAvgPool.*|AdaptiveMaxPool.*|Upsample.*"
)
ALONG = ("Mean", "Sum", "Amax", "Cat", "Slice")  # keep it too, unless it is among the axes that they work along
LEAK = "stands the batch of {}: samples leak into each other"
MOST_NODES = 200  # asked; a layer's input is a few nodes away
Edge = tuple[Any, int]  # a node of the autograd graph, and which of its outputs
TRANSFORMER = nn.TransformerEncoderLayer.__module__


def look(neuron: Any, x: Tensor) -> None:
    """Warn if the first axis of `x`, which a neuron reads as time, is the batch of the layers before it.

    It marks the neuron as looked at, unless there is no graph to ask. Nothing happens in traced code.
    """
    if type(x) is not Tensor or x.grad_fn is None or transformed():
        return
    neuron.origin_seen = True
    frames = _callers()
    first = _in_transformer(frames) or _batch_of(x)
    if first is None:
        return
    level = next((i for i, f in enumerate(frames) if not _name(f).startswith(("lbq.", "torch."))), len(frames) - 1)
    warnings.warn(
        f"{type(neuron).__name__} reads the first axis of its input {list(x.shape)} as time, and there {first}. "
        "Call layers that know no time by y = lbq.models.over_time(x, layer, timesteps=T), then neuron(y); "
        "lbq.check(net, images) checks a network",
        stacklevel=level + 2,
    )


def _callers() -> list[FrameType]:
    """The frames above `look`."""
    frame: FrameType | None = sys._getframe(2)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _in_transformer(frames: list[FrameType]) -> str | None:
    """What stands in front within PyTorch's own transformer layers, which never have time."""
    for frame in frames:
        if _name(frame) == TRANSFORMER:
            attention = getattr(frame.f_locals.get("self"), "self_attn", None)
            first = (
                LEAK if getattr(attention, "batch_first", False) else "stand the tokens of {}, which become timesteps"
            )
            return first.format(type(frame.f_locals.get("self")).__name__)
    return None


def _batch_of(x: Tensor) -> str | None:
    """The layer whose batch is the first axis of `x`; None if there is none, or if it cannot be known."""
    waiting: list[Edge] = [(x.grad_fn, x.output_nr)]
    asked: set[Edge] = set()
    while waiting and len(asked) < MOST_NODES:
        edge = waiting.pop()
        if edge in asked:
            continue
        asked.add(edge)
        shape, kind = _shape(edge), _kind(edge)
        layer = next((words for name, words in BATCHED.items() if kind.endswith(name)), None)
        if layer is not None and (len(shape) == 2 or kind not in PRODUCTS):
            return LEAK.format(layer)
        waiting += _before(edge)
    return None


def _shape(edge: Edge) -> tuple[int, ...]:
    """Of the tensor that an edge of the graph stands for."""
    node, output = edge
    return tuple(node._input_metadata[output].shape)


def _kind(edge: Edge) -> str:
    return re.sub(r"Backward\d*$", "", edge[0].name())


def _inputs(edge: Edge) -> list[Edge]:
    """The tensors that an operation was given, if they have gradients and are no parameters."""
    return [(node, output) for node, output in edge[0].next_functions if node and hasattr(node, "_input_metadata")]


def _before(edge: Edge) -> list[Edge]:
    """The tensors whose first axis an operation kept."""
    node, kind, shape, inputs = edge[0], _kind(edge), _shape(edge), _inputs(edge)
    if kind in VIEWS and inputs and len(_shape(inputs[0])) < len(shape):
        # the first axis was split, if not around a linear layer
        flat = [y for y in _inputs(inputs[0]) if _kind(y) in VIEWS] if _kind(inputs[0]) in PRODUCTS else []
        return [x for y in flat for x in _inputs(y) if _shape(x)[:-1] == shape[:-1]]
    if kind in VIEWS and inputs and _kind(inputs[0]).endswith("BatchNorm") and _shape(inputs[0])[0] == 1 < shape[0]:
        # InstanceNorm
        return [x for y in _inputs(inputs[0]) if _kind(y) in VIEWS for x in _inputs(y) if _shape(x) == shape]
    if kind in VIEWS or KEEPING.fullmatch(kind):
        return [x for x in inputs if len(before := _shape(x)) >= len(shape) and before[0] == shape[0]]
    if kind in ALONG and getattr(node, "_saved_dim", None) is not None:
        saved = node._saved_dim if isinstance(node._saved_dim, tuple) else (node._saved_dim,)
        return [x for x in inputs if not _is_first(saved, len(_shape(x)))]
    if kind == "Transpose":
        return inputs if not _is_first((node._saved_dim0, node._saved_dim1), len(shape)) else []
    return inputs if kind == "Permute" and node._saved_dims[0] == 0 else []


def _is_first(saved: tuple[int, ...], rank: int) -> bool:
    """Whether the first axis is among those that a node notes, negative ones modulo 2^64."""
    return any(axis in (0, 2**64 - rank) for axis in saved)
