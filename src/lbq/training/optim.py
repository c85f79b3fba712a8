"""What moves the parameters: groups by role, the learning-rate schedule, sharpness-aware steps, averaged weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lbq.config import Config, OptimConfig
from lbq.neuron.base import neurons_of

WEIGHT_LAYERS = (_ConvNd, nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
STEP_NAMES = ("rho", "parametrizations.rho")  # parameters that a neuron's step is computed from
NEURON_ROLES = ("steps", "neurons")
NEURON_DECAYS: dict[str, tuple[str, ...]] = {"none": (), "step": ("steps",), "all": ("neurons",)}  # roles that decay


def check_decay(name: str, value: Any) -> None:
    if not isinstance(value, Real) or not float(value) >= 0:
        raise ValueError(f"{name} must be a number >= 0, got {value!r}")


def parameter_groups(
    net: nn.Module,
    weight_decay: float,
    *,
    norm_decay: bool = False,
    neuron_decay: str = "none",
    neuron_decay_factor: float = 1.0,
    lr: float | None = None,
    neuron_lr: float = 1.0,
) -> list[dict[str, Any]]:
    """The parameters of a network for any optimiser of PyTorch, `torch.optim.SGD(parameter_groups(net, 5e-4), lr=0.1)`.

    There are three roles. "weights" are those of convolutions, linear, attention and recurrent layers, or the parameters
    that these are computed from; they decay. "norms" are BatchNorm, biases and all else; they decay where `norm_decay`.
    "neurons" are steps, tails, leaks, resets and mixing. `neuron_decay` says which of these decay, by weight_decay times
    `neuron_decay_factor`: "none", "step" (rho alone, which then has a role of its own, "steps") or "all". Decay of rho pulls
    a step towards softplus(0) = 0.69: coarser steps, fewer and lower levels, fewer accumulations. lr: the learning rate of
    all groups, times `neuron_lr` for neurons; without it, the optimiser's.
    """
    if not isinstance(net, nn.Module):
        raise ValueError(f"net must be a torch.nn.Module, got {type(net).__name__}")
    check_decay("weight_decay", weight_decay)
    check_decay("neuron_decay_factor", neuron_decay_factor)
    if lr is None and neuron_lr != 1.0:
        raise ValueError(f"neuron_lr is a factor on lr, got {neuron_lr!r}: give lr too")
    if neuron_decay not in NEURON_DECAYS:
        raise ValueError(f"neuron_decay must be one of {', '.join(NEURON_DECAYS)}, got {neuron_decay!r}")
    decays = {"weights": weight_decay, "norms": weight_decay if norm_decay else 0.0}
    decays |= dict.fromkeys(NEURON_DECAYS[neuron_decay], weight_decay * neuron_decay_factor)
    weights = {
        id(p)
        for layer in net.modules()
        if isinstance(layer, WEIGHT_LAYERS)
        for name, p in layer.named_parameters()  # such as weight, in_proj_weight, weight_hh_l0
        if name.startswith("parametrizations.weight") or ("." not in name and "weight" in name)
    }
    neuron_names = {id(p): name for neuron in neurons_of(net).values() for name, p in neuron.named_parameters()}
    groups: dict[str, list[nn.Parameter]] = {role: [] for role in ("weights", "norms", *NEURON_ROLES)}
    for parameter in net.parameters():
        role = "weights" if id(parameter) in weights else "norms"
        if role == "norms" and (name := neuron_names.get(id(parameter))):
            role = "steps" if neuron_decay == "step" and name.startswith(STEP_NAMES) else "neurons"
        groups[role].append(parameter)
    return [
        {
            "params": members,
            "role": role,
            "weight_decay": decays.get(role, 0.0),
            "factor": (factor := neuron_lr if role in NEURON_ROLES else 1.0),
            **({} if lr is None else {"lr": lr * factor}),
        }
        for role, members in groups.items()
        if members
    ]


def make_optimiser(net: nn.Module, settings: OptimConfig) -> torch.optim.Optimizer:
    """The configured optimiser. On a GPU its learning rates lie there too, so that a CUDA graph can record an update."""
    o = settings
    groups = parameter_groups(
        net,
        o.weight_decay,
        norm_decay=o.norm_decay,
        neuron_decay=o.neuron_decay,
        neuron_decay_factor=o.neuron_decay_factor,
        lr=o.lr,
        neuron_lr=o.neuron_lr,
    )
    device = groups[0]["params"][0].device
    gpu = device.type == "cuda"
    for group in groups if gpu else ():
        group["lr"] = torch.tensor(group["lr"], device=device)
    fused = True if gpu else None
    if o.name == "adamw":
        return torch.optim.AdamW(groups, capturable=gpu, fused=fused)
    return torch.optim.SGD(groups, momentum=o.momentum, nesterov=o.momentum > 0, fused=fused)


def weight_decays(optimiser: torch.optim.Optimizer) -> dict[str, float]:
    """The weight decay of each role that has parameters: "weights", "norms", "steps", "neurons"."""
    return {group["role"]: group["weight_decay"] for group in optimiser.param_groups}


def learning_rate(step: int, steps_per_epoch: int, config: Config) -> float:
    """Linear warm-up from `warmup_lr`, then cosine to 0 at the end: a function of the step alone."""
    t, base = config.train, config.optim.lr
    total, warmup = t.epochs * steps_per_epoch, t.warmup_epochs * steps_per_epoch
    if step < warmup:
        return t.warmup_lr + (base - t.warmup_lr) * (step + 1) / warmup
    return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * group["factor"])
        else:
            group["lr"] = rate * group["factor"]


@contextmanager
def uphill(optimiser: torch.optim.Optimizer, radius: float) -> Iterator[None]:
    """Within the context, weights are moved by `radius` along their gradient. The gradient there leads to flat minima:
    sharpness-aware minimisation, Foret et al. 2021. Parameters of neurons stay, since a step may be less than the radius."""
    groups = [group["params"] for group in optimiser.param_groups if group["role"] not in NEURON_ROLES]
    moved = [p for group in groups for p in group if p.grad is not None]
    with torch.no_grad():
        gradients = [p.grad for p in moved if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        before = [p.clone() for p in moved]
        torch._foreach_add_(moved, torch._foreach_mul(gradients, radius / (norm + 1e-12)))
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(moved, before)


class Average:
    """Exponential moving average of a network's floating-point state; other entries are copied."""

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self._average = get_ema_multi_avg_fn(decay)
        self.state = {name: value.detach().clone() for name, value in net.state_dict().items()}

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        pairs = [(self.state[name], value) for name, value in net.state_dict().items()]
        averages, values = zip(*[pair for pair in pairs if pair[1].is_floating_point()], strict=True)
        self._average(averages, values, 0)  # a few launches for all of them
        for average, value in pairs:
            if not value.is_floating_point():
                average.copy_(value)


def optimiser_state(net: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's tensors under `parameter name/slot`."""
    names = {id(p): name for name, p in net.named_parameters()}
    return {
        f"{names[id(p)]}/{slot}": value
        for p, slots in optimiser.state.items()
        for slot, value in slots.items()
        if isinstance(value, Tensor)
    }


@torch.no_grad()
def restore_optimiser(net: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(net.named_parameters())
    optimiser.state.clear()
    for key, value in tensors.items():
        name, slot = key.rsplit("/", 1)
        parameter = parameters[name]
        if slot == "step":  # AdamW's count of steps lies beside the learning rate
            rate = optimiser.param_groups[0]["lr"]
            optimiser.state[parameter][slot] = value.to(rate.device if isinstance(rate, Tensor) else "cpu", copy=True)
        else:  # in the parameter's memory layout: another order of elements may round differently
            optimiser.state[parameter][slot] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
