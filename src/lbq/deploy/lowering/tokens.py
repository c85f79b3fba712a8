"""Layers on tensors that do not stand as images, such as tokens [T, B, N, D]: each is a layer of images at every position.

What matters of such a layer is which axis it reads as channels. Where all channels stand there, and nothing else, it computes
what a layer of [C, H, W] computes: a linear layer of tokens is a 1x1 convolution. The other axes may stand as they like.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lbq.deploy.lowering.arranged import Arranged
from lbq.deploy.lowering.axes import POSITIONS, Axes, Axis, roles, sides, words
from lbq.deploy.lowering.currents import Current, Levels
from lbq.deploy.lowering.trace import NORMS
from lbq.errors import GraphError
from lbq.graph import Layout
from lbq.neuron import SpikingNeuron

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
AVERAGES = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
READERS = (*CONVOLUTIONS, *AVERAGES, *NORMS, nn.Linear)  # layers that may read such tensors, beside neurons
DIMENSIONS: dict[type[nn.Module], tuple[int, ...]] = {  # that PyTorch takes for one batch
    nn.Conv1d: (3,), nn.Conv2d: (4,), nn.AdaptiveAvgPool1d: (3,), nn.AdaptiveAvgPool2d: (4,), nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
}  # fmt: skip


def layer_of_images(name: str, module: nn.Module, value: Arranged) -> nn.Module:
    """What computes the same on [C, H, W]."""
    kind, where = type(module).__name__, f"layer {name!r}"
    if isinstance(module, nn.Linear):
        _check_channels(f"{where}: Linear", value, -1)
        return _pointwise(module)
    wanted = next((sizes for known, sizes in DIMENSIONS.items() if isinstance(module, known)), (len(value.axes),))
    if len(value.axes) not in wanted:
        raise GraphError(
            f"{where}: {kind} cannot read {words(value.axes)}: let it read [T * B, channels, tokens], as x.flatten(0, 1) and "
            "x.transpose(-2, -1) give it"
        )
    _check_channels(f"{where}: {kind}", value, 1)
    if isinstance(module, CONVOLUTIONS):
        padding = () if isinstance(module.padding, str) else module.padding  # of a kernel of 1, 'same' pads nothing
        if any(size != 1 for size in (*module.kernel_size, *module.stride)) or any(padding):
            raise GraphError(
                f"{where}: {kind} of a kernel, stride or padding cannot read {words(value.axes)}, where neighbours are not "
                "those of the image: bring it back to [T * B, channels, height, width] for a Conv2d, or use a kernel of 1"
            )
        return _pointwise(module)
    if isinstance(module, AVERAGES):
        sizes = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,)
        if any(size != 1 for size in sizes) or set(roles(value.axes[0])) & set(POSITIONS):
            raise GraphError(
                f"{where}: {kind} of {words(value.axes)} must average all tokens: give it an output of 1, or bring the tensor "
                "back to [T * B, channels, height, width]"
            )
        return nn.AdaptiveAvgPool2d(1)
    return module


def axes_behind(module: nn.Module, axes: Axes, made: Levels | Current) -> Axes:
    """Where what a layer makes of a tensor stands."""
    at = len(axes) - 1 if isinstance(module, nn.Linear) else 1
    rest = ((),) * (len(axes) - 2) if isinstance(module, AVERAGES) else axes[at + 1 :]
    return *axes[:at], sides(made.shape)[0], *rest


def layout_for(name: str, neuron: SpikingNeuron, value: Arranged) -> Layout:
    """Of a neuron's tensor. Refused are tensors without time in front, and steps for something else than channels."""
    if [roles(axis) for axis in value.axes[:2]] != ["t", "b"]:
        way = "unflatten and transpose put it there"
        if value.value.time == "none":
            way = "x.expand(T, *x.shape) shows an image at every timestep"
        raise GraphError(
            f"layer {name!r}: a neuron needs time in front, [T, B, ...], and reads {words(value.axes)}: {way}"
        )
    if neuron.step.numel() > 1 and value.axes[2] != sides(value.value.shape)[0]:
        raise GraphError(
            f"layer {name!r}: it has steps for channels, which must stand behind the batch, and reads {words(value.axes)}: "
            "write neuron(x.movedim(-1, 2)).movedim(2, -1), or give it one step"
        )
    parts = [atom.role for axis in value.axes[2:] for atom in axis]
    order = sorted(range(len(parts)), key=lambda at: "chdyx".index(parts[at]))
    return Layout(tuple(tuple(atom.size for atom in axis) for axis in value.axes[2:]), tuple(order))


def _check_channels(where: str, value: Arranged, at: int) -> None:
    """Refuse a layer that does not read all channels, and them alone, along an axis."""
    axis, channels = value.axes[at], sides(value.value.shape)[0]
    if axis == channels:
        return
    reads = f"{where} reads dimension {at % len(value.axes)} of {words(value.axes)} as channels"
    raise GraphError(f"{reads}: {_remedy(axis, value)}")


def _remedy(axis: Axis, value: Arranged) -> str:
    found = set(roles(axis))
    if found & set(POSITIONS) and found & set("chd"):
        return "where tokens are flattened, write x.transpose(-2, -1).flatten(2), so that channels stand in front of tokens"
    if found and found <= set(POSITIONS):
        return (
            "where channels are meant, put x.transpose(-2, -1) in front of it; a layer that mixes tokens has no integer form "
            "here: let attention mix them, or a Conv2d on [T * B, channels, height, width]"
        )
    if roles(axis) == "dh":
        return (
            "they stand in another order, and a channel shuffle has no integer form: leave it out, and the groups of the "
            "layer behind it, which then mixes them"
        )
    if found & set("hd"):
        return "join heads and their channels first, as x.flatten(-2) does where they stand last"
    where = "last" if axis is value.axes[-1] else "behind the batch, [T * B, channels, tokens]"
    return f"transpose and flatten(0, 1) bring channels where it reads them, {where}"


def _pointwise(module: Any) -> nn.Conv2d:
    """A linear layer, or a convolution with a kernel of 1, as a 1x1 convolution."""
    weight = module.weight.detach()
    made = nn.Conv2d(
        getattr(module, "in_channels", weight.shape[1]), weight.shape[0], 1, groups=getattr(module, "groups", 1), bias=False,
        device="meta",
    )  # fmt: skip
    made.weight, made.bias = nn.Parameter(weight.reshape(*weight.shape[:2], 1, 1)), module.bias
    return made
