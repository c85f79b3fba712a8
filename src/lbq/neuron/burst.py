"""The paper's neuron: a burst neuron whose step is learned (or fixed), and its generalisation to any ladder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from lbq.config import INITIAL_STEP
from lbq.kernels import surrogate as surrogates
from lbq.kernels.reference import LARGEST_LEVEL, Rule
from lbq.neuron.base import MembraneKind, SpikingNeuron
from lbq.neuron.checks import check_choice, check_count, check_flag, check_positive

STEP_EPS = 1e-6  # gamma = softplus(rho) + STEP_EPS
LEAST_STEP = 2 * STEP_EPS  # softplus comes no nearer to 0
FIXED_STEP = "fixed_step"  # the buffer of a step that is not learned


def gamma(rho: Tensor) -> Tensor:
    """The positive step of an unconstrained parameter: softplus(rho) + STEP_EPS."""
    return F.softplus(rho) + STEP_EPS


def rho_of(step: Tensor) -> Tensor:
    """The inverse of `gamma`, of any shape."""
    y = step.detach().double() - STEP_EPS
    return (y + torch.log(-torch.expm1(-y))).to(step.dtype)


class SteppedNeuron(SpikingNeuron):
    """A neuron with a positive step, per layer or per channel.

    A learned step is gamma(rho), with the parameter `rho`. A fixed one is the buffer `fixed_step`, exactly as given.
    """

    fixed_names = (*SpikingNeuron.fixed_names, FIXED_STEP)
    rho: Tensor
    fixed_step: Tensor

    def __init__(
        self,
        *,
        step: float | Tensor,
        learn_step: bool,
        channels: int | None = None,
        step_gradient: Literal["sum", "lsq"] = "sum",
        **membrane: Any,
    ) -> None:
        super().__init__(**membrane)
        if (first := check_positive("step", step)) <= LEAST_STEP:
            raise ValueError(f"step must be larger than {LEAST_STEP:g}, got {step!r}")
        size = () if channels is None else (check_count("channels", channels),)
        steps, dtype = torch.full(size, first, dtype=torch.float64), torch.get_default_dtype()
        if check_flag("learn_step", learn_step):
            self.register_parameter("rho", nn.Parameter(rho_of(steps).to(dtype)))
        else:
            self.register_buffer(FIXED_STEP, steps.to(dtype))
        self.channels = channels
        self.step_gradient = check_choice("step_gradient", step_gradient, ("sum", "lsq"))

    @property
    def step(self) -> Tensor:
        """gamma: a scalar, or `[channels]`."""
        return gamma(self.rho) if self.learn_step else self.fixed_step

    @step.setter
    def step(self, value: float | Tensor) -> None:
        """One number, or one for each channel."""
        wrong = f"step must be above {LEAST_STEP:g} and finite, one number or one per channel, got {value!r}"
        if isinstance(value, bool):
            raise TypeError(wrong)
        try:
            steps = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(wrong) from error
        within = (steps > LEAST_STEP) & (steps < torch.finfo(torch.float32).max)
        if steps.shape not in ((), self.step.shape) or not within.all():
            raise ValueError(wrong)
        self.set_step(steps.expand(self.step.shape))

    @torch.no_grad()
    def set_step(self, step: Tensor) -> None:
        """Change the step without checks: to one number, or one for each channel."""
        if not self.learn_step:
            self.fixed_step.copy_(step)
        elif is_parametrized(self, "rho"):  # computed from others: reading gives a copy
            self.rho = rho_of(step).to(self.rho)
        else:
            self.rho.copy_(rho_of(step))

    @property
    def learn_step(self) -> bool:
        return FIXED_STEP not in self._buffers

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A learned step may be loaded as a fixed one, and the other way round."""
        rho, fixed = f"{prefix}rho", f"{prefix}{FIXED_STEP}"
        if not self.learn_step and rho in state_dict and fixed not in state_dict:
            state_dict[fixed] = gamma(state_dict.pop(rho).detach())
        elif self.learn_step and fixed in state_dict and rho not in state_dict:
            state_dict[rho] = rho_of(state_dict.pop(fixed))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _scaled_step(self, x: Tensor) -> Tensor:
        """The step; for LSQ with its gradient scaled by 1 / sqrt(features that share it * n_max), for `x` [T, B, ...]."""
        step = self.step
        if self.step_gradient == "sum":
            return step
        features = max(math.prod(x.shape[2:]) // step.numel(), 1)
        return step.detach() + 1 / math.sqrt(features * self.n_max) * (step - step.detach())

    def check_input(self, x: Tensor) -> Tensor:
        super().check_input(x)
        channels = self.channels
        if channels is not None and (x.dim() < 3 or x.shape[2] != channels):
            raise ValueError(
                f"x must be [T, B, {channels}, ...] for channels={channels}, got {tuple(x.shape)}: of tokens [T, B, N, D], "
                "neuron(x.movedim(-1, 2)).movedim(2, -1)"
            )
        return x


class BurstNeuron(SteppedNeuron):
    """Burst neuron with integer levels 0..n_max and a learned step (Eqs. 5 to 12 of the paper).

    Maps currents `[T, B, ...]` to gamma * S, starts every call from a zero state and keeps nothing.

    Args:
        n_max: highest level, >= 1.
        step: initial step gamma, whatever n_max is.
        learn_step: False makes it the fixed-step burst neuron (Eq. fixed_burst_quantizer).
        beta, alpha: membrane decay and reset factor, in [0, 1].
        surrogate: a name in `lbq.kernels.surrogate.SURROGATES`.
        tail: initial coefficient lambda = sigmoid(eta) of the surrogate's tails; `learn_tail` trains it.
        membrane: `lif`, `if` or `plif`.
        channels: give one step to each of that many channels (dimension 2 of the input) instead of one per layer. Where they
            stand last, as in tokens [T, B, N, D], move them: `neuron(x.movedim(-1, 2)).movedim(2, -1)`.
        learn_beta, learn_alpha: train them, kept in [0, 1].
        reset_grad: let gradients reach gamma and alpha through the reset.
        step_gradient: `sum`, as it comes, or `lsq`: scaled by 1 / sqrt(features * n_max).
        detach_state: stop gradients at the membrane of the timestep before, as LM-HT does. The forward pass is the same.
    """

    def __init__(
        self,
        n_max: int = 5,
        step: float | Tensor = INITIAL_STEP,
        learn_step: bool = True,
        beta: float = 0.5,
        alpha: float = 1.0,
        surrogate: str = "relsg_et",
        *,
        tail: float = surrogates.BOX_ET_TAIL,
        learn_tail: bool = True,
        membrane: MembraneKind = "lif",
        channels: int | None = None,
        learn_beta: bool = False,
        learn_alpha: bool = False,
        reset_grad: bool = True,
        step_gradient: Literal["sum", "lsq"] = "sum",
        detach_state: bool = False,
    ) -> None:
        check_count("n_max", n_max, LARGEST_LEVEL)
        super().__init__(
            step=step,
            learn_step=learn_step,
            channels=channels,
            step_gradient=step_gradient,
            surrogate=surrogate,
            membrane=membrane,
            beta=beta,
            alpha=alpha,
            learn_beta=learn_beta,
            learn_alpha=learn_alpha,
            tail=tail,
            learn_tail=learn_tail,
        )
        with_gradient, detached = check_flag("reset_grad", reset_grad), check_flag("detach_state", detach_state)
        self.rule = Rule(n_max, self.surrogate, reset_grad=with_gradient, detach_state=detached)


class LadderNeuron(SpikingNeuron):
    """Burst neuron with any ordered thresholds (Eq. burst_count): S counts the thresholds that U reaches.

    The output is scale * S, the reset subtracts alpha * thresholds[0]. The surrogate acts on the piecewise-linear
    coordinate r(U) that is i at the i-th threshold; for thresholds k * step this is BurstNeuron with a fixed step.

    Args:
        thresholds: increasing positive numbers.
        scale: what one level is worth; default the mean spacing thresholds[-1] / n_max.
        detach_state: as of BurstNeuron.
    """

    fixed_names = (*SpikingNeuron.fixed_names, "ladder", "level_scale")
    ladder: Tensor
    level_scale: Tensor

    def __init__(
        self,
        thresholds: Sequence[float] = (0.4, 0.8, 1.2, 1.6, 2.0),
        scale: float | None = None,
        beta: float = 0.5,
        alpha: float = 1.0,
        surrogate: str = "relsg_et",
        *,
        tail: float = surrogates.BOX_ET_TAIL,
        learn_tail: bool = True,
        membrane: MembraneKind = "lif",
        detach_state: bool = False,
    ) -> None:
        super().__init__(
            surrogate=surrogate, membrane=membrane, beta=beta, alpha=alpha, tail=tail, learn_tail=learn_tail
        )
        if not isinstance(thresholds, Iterable):
            raise ValueError(f"thresholds must be a list of numbers, got {thresholds!r}")
        values = [check_positive("thresholds", t) for t in thresholds]
        if not values or any(b <= a for a, b in pairwise(values)):
            raise ValueError(f"thresholds must be strictly increasing and not empty, got {list(thresholds)!r}")
        self.register_buffer("ladder", torch.tensor(values))
        worth = values[-1] / len(values) if scale is None else check_positive("scale", scale)
        self.register_buffer("level_scale", torch.tensor(worth))
        self.rule = Rule(len(values), self.surrogate, detach_state=check_flag("detach_state", detach_state))

    @property
    def step(self) -> Tensor:
        return self.ladder[0]

    @property
    def scale(self) -> Tensor:
        return self.level_scale

    @property
    def thresholds(self) -> Tensor:
        return self.ladder
