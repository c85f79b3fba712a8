"""Where time enters a network: folding `[T, B, ...]` into a batch for layers without memory, and back.

torch.fx takes both functions for leaves. So a network that uses them can be traced whatever its input's dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.fx
from torch import Tensor, nn

from lbq.neuron import ReLU, SpikingNeuron


def fold_time(x: Tensor, spatial: int = 3) -> Tensor:
    """`[T, B, ...]` to `[T * B, ...]`; a static batch `[B, ...]` (one dimension fewer) passes unchanged."""
    if (traced := traced_leaf(fold_time, x, spatial)) is not None:
        return traced
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if x.dim() not in (spatial + 1, spatial + 2):
        behind = {1: "F", 2: "C, L", 3: "C, H, W"}.get(spatial, f"{spatial} more")
        raise ValueError(
            f"x must be [B, {behind}] or [T, B, {behind}], got shape {tuple(x.shape)}; spatial={spatial} says how many "
            "dimensions stand behind the batch"
        )
    return x.flatten(0, 1) if x.dim() == spatial + 2 else x


def unfold_time(y: Tensor, like: Tensor, timesteps: int | None = None, spatial: int = 3) -> Tensor:
    """The inverse, for `y` computed from `fold_time(like)`. A static batch is repeated at every timestep by a view with
    stride 0 in time, without a copy."""
    if (traced := traced_leaf(unfold_time, y, like, timesteps, spatial)) is not None:
        return traced
    if like.dim() == spatial + 2:
        return y.unflatten(0, like.shape[:2])
    if timesteps is None:
        raise ValueError("timesteps must be given where a static batch, without time in front, enters the network")
    _check(timesteps)
    return y.unsqueeze(0).expand(timesteps, *y.shape)


def _check(timesteps: int) -> None:
    if not isinstance(timesteps, int | np.integer | torch.SymInt) or timesteps < 1:
        raise ValueError(f"timesteps must be a whole number above 0, got {timesteps!r}")


def traced_leaf(function: Callable[..., Tensor], x: Any, *args: Any) -> Tensor | None:
    """While torch.fx traces, the call of `function` as one node; else None. Its tensors stand in front."""
    if not isinstance(x, torch.fx.Proxy):
        return None
    return cast(Tensor, x.tracer.create_proxy("call_function", function, (x, *args), {}))


def over_time(
    x: Tensor, *layers: nn.Module | Callable[[Tensor], Tensor], timesteps: int | None = None, spatial: int = 3
) -> Tensor:
    """Apply layers without memory, or functions, to every timestep of `x` [T, B, ...] at once.

    BatchNorm then takes its statistics over T * B. A static `x` [B, ...] goes through the layers once and becomes
    `[timesteps, B, ...]` after them. An `x` with time keeps its own T, whatever `timesteps` says. `spatial` is the number
    of dimensions behind the batch: 3 for images, 2 for signals [C, L], 1 for features.
    """
    y = fold_time(x, spatial)
    for layer in layers:
        if isinstance(layer, nn.Module) and any(isinstance(module, SpikingNeuron) for module in layer.modules()):
            name = type(layer).__name__
            raise ValueError(f"layers must not hold a neuron, which needs time in front: call {name} on [T, B, ...]")
        if not callable(layer):
            raise TypeError(f"layers must be modules or functions, got {type(layer).__name__}")
        y = layer(y)
    return unfold_time(y, x, timesteps, spatial)


def fire(
    x: Tensor,
    layer: nn.Module,
    norm: nn.Module,
    neuron: nn.Module,
    *,
    residual: Tensor | None = None,
    timesteps: int | None = None,
    spatial: int = 3,
) -> Tensor:
    """neuron(over_time(x, layer, norm) + residual), `[T, B, ...]`; `timesteps` and `spatial` as in `over_time`.

    A kernel computes BatchNorm, the add and the neuron in one pass if there is one. They stay apart if `norm` has hooks,
    if a hook looks at the neuron's input, or if the residual must be broadcast or promoted.
    """
    y = layer(fold_time(x, spatial))
    if isinstance(neuron, SpikingNeuron | ReLU) and not isinstance(y, torch.fx.Proxy):
        static = x.dim() == spatial + 1
        if static and timesteps is not None:
            _check(timesteps)
        steps = timesteps if static else x.shape[0]
        if steps is not None and not (static and residual is not None) and neuron.fuses(y, norm, steps):
            sequence = y if static else y.unflatten(0, x.shape[:2])
            if residual is None or (residual.shape, residual.dtype) == (sequence.shape, sequence.dtype):
                return neuron(sequence, norm=norm, residual=residual, timesteps=steps if static else None)
    y = unfold_time(norm(y), x, timesteps, spatial)
    return neuron(y if residual is None else y + residual)
