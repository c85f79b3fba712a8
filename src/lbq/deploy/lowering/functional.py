"""Functions as the layers that do the same, so that lowering need know layers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def _max_pool(layer: type[nn.MaxPool1d | nn.MaxPool2d]) -> Callable[..., nn.Module]:
    """In the function's order of arguments, which is not the layer's."""

    def made(
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: Any = False,
        return_indices: Any = False,
    ) -> nn.Module:
        as_large = isinstance(stride, (tuple, list)) and not stride  # as its kernel
        return layer(kernel_size, None if as_large else stride, padding, dilation, return_indices, ceil_mode)

    return made


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module | None:  # noqa: ARG001
    return None if training else nn.Identity()


def _pad(pad: Any, mode: str = "constant", value: float | None = None) -> nn.Module | None:
    """Of the width, or the length of a signal, or of height and width."""
    if mode != "constant" or len(pad) not in (2, 4):
        return None
    return (nn.ConstantPad1d if len(pad) == 2 else nn.ConstantPad2d)(tuple(pad), value or 0.0)


LAYER_OF_FUNCTION: dict[Any, Callable[..., nn.Module | None]] = {
    F.max_pool2d: _max_pool(nn.MaxPool2d),
    torch.max_pool2d: _max_pool(nn.MaxPool2d),
    F.max_pool1d: _max_pool(nn.MaxPool1d),
    torch.max_pool1d: _max_pool(nn.MaxPool1d),
    F.avg_pool1d: nn.AvgPool1d,
    F.adaptive_avg_pool1d: nn.AdaptiveAvgPool1d,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.pad: _pad,
    F.dropout: _dropout,
    F.dropout2d: _dropout,
}


def as_layer(target: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> nn.Module | None:
    """The layer that the function `target` is with these arguments behind its input; None for other functions."""
    make = LAYER_OF_FUNCTION.get(target)
    return None if make is None else make(*arguments, **{k: v for k, v in options.items() if k != "input"})
