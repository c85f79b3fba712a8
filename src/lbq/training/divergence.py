"""When training goes wrong: a loss that is no number, weights that are not finite, steps that collapse. The error names the
layer, and what to change."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lbq.config import Config
from lbq.errors import LbqError
from lbq.neuron import SpikingNeuron
from lbq.neuron.base import neurons_of
from lbq.neuron.burst import STEP_EPS
from lbq.neuron.hooks import attached
from lbq.training import evaluation
from lbq.training.distributed import SyncBatchNorm2d
from lbq.training.position import Position

COLLAPSED_SHARE = 1e-3  # of a layer's first step, below which it has collapsed; trained steps stay above a hundredth


class Diverged(LbqError):
    """Training cannot go on from here."""


class Sentinel:
    """Watches one network in training. first_steps: of its neurons, when training began."""

    def __init__(self, net: nn.Module, config: Config, device: torch.device) -> None:
        self.net, self.config, self.device = net, config, device
        self.first_steps = evaluation.neuron_steps(net)
        self._unchecked: tuple[Tensor, Position, Any] | None = None

    def look(self, loss: Tensor, x: Tensor, position: Position) -> None:
        """Stop on a loss that is not a number. On a GPU this checks the loss of the step before, so that nothing waits."""
        self.settle()
        if self.device.type == "cuda":
            value = loss.detach().to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._unchecked = (value, replace(position), (event, x))
        else:
            self._refuse(loss.detach(), position, x)

    def settle(self) -> None:
        """Look at a loss that is still unchecked."""
        if self._unchecked is not None:
            (value, position, (event, x)), self._unchecked = self._unchecked, None
            event.synchronize()
            self._refuse(value, position, x)

    def check_weights(self, position: Position) -> None:
        """Stop on a loss that is not finite, and on a weight that is not though its loss was; called before saving."""
        self.settle()
        bad = [n for n, v in self.net.state_dict().items() if v.is_floating_point() and not v.isfinite().all()]
        if bad:
            raise Diverged(
                f"{bad[0]} is no longer finite after epoch {position.epoch + 1}, step {position.batch}: {self._remedy}"
            )
        self.check_steps(position)

    def check_steps(self, position: Position) -> None:
        """Stop where a learned step has collapsed: softplus has no slope there, so no training would bring it back."""
        self.settle()
        o = self.config.optim
        for name, step in evaluation.neuron_steps(self.net).items():
            first = self.first_steps[name]
            if step < first and step < max(COLLAPSED_SHARE * first, 2 * STEP_EPS):
                raise Diverged(
                    f"the step of layer {name!r} fell from {first:.3g} to {step:.3g} by epoch {position.epoch + 1}, "
                    f"step {position.batch}: lower optim.neuron_lr ({o.neuron_lr:g}) or optim.lr ({o.lr:g}), use a longer "
                    f"warm-up, or set neuron.step_gradient=lsq"
                )

    def _refuse(self, loss: Tensor, position: Position, x: Tensor) -> None:
        value = float(loss)
        if not math.isfinite(value):
            # half precision overflows where float32 would not
            with evaluation.autocast(self.config.train, self.device):
                layer = first_bad_layer(self.net, x)
            raise Diverged(
                f"loss became {value} in epoch {position.epoch + 1}, step {position.batch + 1}, first in "
                f"{layer}: {self._remedy}"
            )

    @property
    def _remedy(self) -> str:
        o = self.config.optim
        learned = any(p.requires_grad for neuron in neurons_of(self.net).values() for p in neuron.parameters())
        price = self.config.train.level_cost
        lower = [
            f"optim.lr ({o.lr:g})",
            *[f"optim.neuron_lr ({o.neuron_lr:g})"] * learned,
            *[f"train.level_cost ({price:g})"] * bool(price),
        ]
        return f"lower {' or '.join(lower)}, or use a longer warm-up"


@torch.no_grad()
def first_bad_layer(net: nn.Module, x: Tensor) -> str:
    """The first layer, in execution order, whose output or parameters are not finite. The network is of no use afterwards.

    No other process is waited for: it may have stopped already.
    """
    bad: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
            if not all(p.isfinite().all() for p in module.parameters(recurse=False)):
                bad.append(f"the weights of layer {name!r}")  # a bad gradient spreads to all layers that it reaches
            elif isinstance(output, Tensor) and not output.isfinite().all():
                bad.append(f"layer {name!r}")

        return hook

    if not x.isfinite().all():
        return "the input"
    for module in net.modules():
        if isinstance(module, SyncBatchNorm2d):
            module.alone = True
    leaves = [(n, m) for n, m in net.named_modules() if n and (not list(m.children()) or isinstance(m, SpikingNeuron))]
    handles = [m.register_forward_hook(watch(n)) for n, m in leaves]
    with attached(handles):
        net(x)
    return bad[0] if bad else "the loss"
