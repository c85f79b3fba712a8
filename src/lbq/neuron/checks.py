"""What a neuron's numbers may be: options are checked when they are set, learned numbers are kept in [0, 1]."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from lbq.kernels.reference import transformed

LEARNED = {"eta": "tail"}  # parameters whose option has another name


def check_count(name: str, value: Any, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    if most is not None and int(value) > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def check_positive(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_meta:  # such as another neuron's step
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name} must be a positive finite number (of float32), got {value!r}")
    return float(value)


def check_unit(name: str, value: Any, open_ends: bool = False) -> float:
    """A number in [0, 1], or strictly between where `open_ends`."""
    ok = not isinstance(value, bool) and isinstance(value, Real)
    if not ok or not (0 < value < 1 if open_ends else 0 <= value <= 1):
        interval = "strictly between 0 and 1" if open_ends else "in [0, 1]"
        raise ValueError(f"{name} must be a number {interval}, got {value!r}")
    return float(value)


def check_choice(name: str, value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
    return str(value)


def logit(p: float) -> float:
    return math.log(p / (1 - p))


class _UnitInterval(torch.autograd.Function):
    """Clamp to [0, 1] whose gradient vanishes only where a descent step would leave the interval further.

    A plain clamp would freeze a parameter for good once the optimiser has stepped over an end.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        (value,) = ctx.saved_tensors
        return torch.where(((value < 0) & (grad > 0)) | ((value > 1) & (grad < 0)), torch.zeros_like(grad), grad)


def unit_interval(value: Tensor) -> Tensor:
    """`value` clamped to [0, 1]; under torch.func its gradient passes beyond the ends both ways."""
    if transformed():
        return value.detach().clamp(0, 1) + (value - value.detach())
    out: Tensor = _UnitInterval.apply(value)  # type: ignore[no-untyped-call]
    return out


def register_number(module: nn.Module, name: str, value: Tensor, learned: bool) -> None:
    """A parameter where learned, else a buffer under the same name: its value is in every state_dict."""
    if check_flag(f"learn_{LEARNED.get(name, name)}", learned):
        module.register_parameter(name, nn.Parameter(value))
    else:
        module.register_buffer(name, value)


def check_alone(residual: Tensor | None, timesteps: int | None) -> None:
    """Refuse what only a neuron that computes BatchNorm too would look at."""
    if residual is not None or timesteps is not None:
        raise ValueError("norm must be given with residual and timesteps: add and repeat x yourself, or use fire")
