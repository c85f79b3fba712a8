"""Signals [C, L] as images [C, 1, L], and their layers as those of images that do the same, so that lowering need know these
alone; features [F] as images [F, 1, 1]."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from lbq.errors import GraphError
from lbq.graph import Shape

POOLS = (nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d)
SIGNAL_LAYERS = (nn.Conv1d, nn.ConstantPad1d, *POOLS)
InputShape = Shape | tuple[int, int] | tuple[int]  # of one input: (C, H, W), (C, L) or (F,)
IMAGE_LAYERS = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.ConstantPad2d)


def as_image(shape: tuple[int, ...]) -> Shape:
    """The shape that the integer network reads."""
    channels, *sides = shape
    height, width = {0: (1, 1), 1: (1, *sides)}.get(len(sides), tuple(sides))
    return channels, height, width


def lifted(name: str, module: nn.Module, signals: bool) -> nn.Module:
    """A layer of signals as one of images of height 1; others as they are. signals: whether that is what the network reads."""
    if isinstance(module, nn.ConstantPad1d):  # of images, it pads the width
        return nn.ConstantPad2d((*module.padding, 0, 0), module.value)
    if isinstance(module, IMAGE_LAYERS if signals else SIGNAL_LAYERS):
        reads, shape = ("signals", "(C, 1, L)") if signals else ("images", "(C, L)")
        raise GraphError(
            f"layer {name!r}: {type(module).__name__} in a network that reads {reads}: give input_shape as {shape}"
        )
    if isinstance(module, nn.Conv1d):
        return _conv(module)
    if isinstance(module, nn.MaxPool1d):
        sizes = _wide(module.kernel_size), _wide(module.stride), _wide(module.padding, 0), _wide(module.dilation)
        return nn.MaxPool2d(*sizes, ceil_mode=module.ceil_mode)
    if isinstance(module, nn.AvgPool1d):
        kernel, stride, padding = _wide(module.kernel_size), _wide(module.stride), _wide(module.padding, 0)
        return nn.AvgPool2d(kernel, stride, padding, module.ceil_mode, module.count_include_pad)
    return nn.AdaptiveAvgPool2d(_wide(module.output_size)) if isinstance(module, nn.AdaptiveAvgPool1d) else module


def _conv(module: nn.Conv1d) -> nn.Conv2d:
    padding = module.padding if isinstance(module.padding, str) else _wide(module.padding, 0)
    made = nn.Conv2d(
        module.in_channels, module.out_channels, _wide(module.kernel_size), _wide(module.stride), padding,
        _wide(module.dilation), module.groups, bias=False, padding_mode=module.padding_mode, device="meta",
    )  # fmt: skip
    made.weight, made.bias = nn.Parameter(module.weight.detach().unsqueeze(2)), module.bias
    return made


def _wide(size: Any, high: int = 1) -> tuple[int, int]:
    """A size along the length, beside that of a height of 1."""
    return high, cast(int, size[0] if isinstance(size, tuple | list) else size)
