"""The neurons the paper compares with, on the same core, and the two activations of the fairness baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq.config import INITIAL_STEP
from lbq.errors import GraphError
from lbq.graph import NeuronSpec
from lbq.graph.rules import Reset
from lbq.kernels import surrogate as surrogates
from lbq.kernels.dispatch import fuses_norm
from lbq.kernels.reference import LARGEST_LEVEL, BurstState, Rule, compute_dtype, straight_through, transformed
from lbq.neuron.base import MembraneKind, SpikingNeuron
from lbq.neuron.burst import SteppedNeuron
from lbq.neuron.checks import check_alone, check_choice, check_count, check_flag, check_positive
from lbq.neuron.hooks import is_watched


class LIF(SpikingNeuron):
    """Binary leaky integrate-and-fire neuron, exactly Eqs. lif and bispiking.

    U[t] = beta U[t-1] + x[t] - alpha V_th S[t-1]: the reset is not decayed; S = [U > V_th]: strictly above. It is not
    BurstNeuron(n_max=1), whose reset is decayed and which fires at U >= step.
    """

    fixed_names = (*SpikingNeuron.fixed_names, "threshold")
    threshold: Tensor

    def __init__(
        self,
        threshold: float = 1.0,
        beta: float = 0.5,
        alpha: float = 1.0,
        surrogate: str = "arctan",
        *,
        membrane: MembraneKind = "lif",
        learn_beta: bool = False,
        tail: float = surrogates.BOX_ET_TAIL,
        learn_tail: bool = True,
        detach_state: bool = False,
    ) -> None:
        super().__init__(
            surrogate=surrogate,
            membrane=membrane,
            beta=beta,
            alpha=alpha,
            learn_beta=learn_beta,
            tail=tail,
            learn_tail=learn_tail,
        )
        self.register_buffer("threshold", torch.tensor(check_positive("threshold", threshold)))
        detached = check_flag("detach_state", detach_state)
        self.rule = Rule(1, self.surrogate, rounding="strict", decay_reset=False, detach_state=detached)

    @property
    def step(self) -> Tensor:
        return self.threshold

    @property
    def scale(self) -> Tensor:
        return torch.ones_like(self.threshold)


class Ternary(SteppedNeuron):
    """Ternary spikes gamma * clip(trunc(U / gamma), -1, 1), step fixed or learned, with an odd surrogate.

    rule `trunc` fires at |U| >= gamma and subtracts alpha * gamma * S; rule `half` is the released Ternary Spike code:
    dead zone |U| < gamma / 2 and hard reset (there with beta = 0.25, step 1, surrogate `clip`).

    reset: `once` subtracts, `hard` clears the membrane; default the rule's own.
    """

    def __init__(
        self,
        step: float = 1.0,
        learn_step: bool = False,
        beta: float = 0.5,
        alpha: float = 1.0,
        surrogate: str = "box",
        *,
        rule: Literal["trunc", "half"] = "trunc",
        reset: Literal["once", "hard"] | None = None,
        channels: int | None = None,
        step_gradient: Literal["sum", "lsq"] = "sum",
        membrane: MembraneKind = "lif",
        tail: float = surrogates.BOX_ET_TAIL,
        learn_tail: bool = True,
        detach_state: bool = False,
    ) -> None:
        super().__init__(
            step=step,
            learn_step=learn_step,
            channels=channels,
            step_gradient=step_gradient,
            surrogate=surrogate,
            membrane=membrane,
            beta=beta,
            alpha=alpha,
            tail=tail,
            learn_tail=learn_tail,
        )
        check_choice("rule", rule, ("trunc", "half"))
        kind: Reset = reset if reset is not None else "hard" if rule == "half" else "once"
        check_choice("reset", kind, ("once", "hard"))
        detached = check_flag("detach_state", detach_state)
        self.rule = Rule(1, self.surrogate, rounding=rule, reset=kind, detach_state=detached)


class ILIF(SteppedNeuron):
    """Integer LIF: S = clip(round(U / step), 0, n_max), and the reset subtracts the whole level (Luo et al. 2024)."""

    def __init__(
        self,
        n_max: int = 4,
        step: float = 1.0,
        beta: float = 0.25,
        alpha: float = 1.0,
        surrogate: str = "clip",
        *,
        learn_step: bool = False,
        membrane: MembraneKind = "lif",
        detach_state: bool = False,
    ) -> None:
        check_count("n_max", n_max, LARGEST_LEVEL)
        super().__init__(
            step=step, learn_step=learn_step, surrogate=surrogate, membrane=membrane, beta=beta, alpha=alpha
        )
        detached = check_flag("detach_state", detach_state)
        self.rule = Rule(
            n_max, self.surrogate, rounding="round", reset="level", reset_grad=False, detach_state=detached
        )


class _MixRows(torch.autograd.Function):
    """weights [T, T] @ x [T, N] for long rows. The gradient of the weights has few outputs and very long sums, which matrix
    products are not made for: it is taken as one dot product for each."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(weights, x)
        return weights @ x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        weights, x = ctx.saved_tensors
        products = [torch.dot(g, row) for g in grad.contiguous().unbind(0) for row in x.unbind(0)]
        return torch.stack(products).view_as(weights), weights.t() @ grad


class LMHT(SteppedNeuron):
    """Learnable multi-hierarchical threshold neuron (Hao et al. 2024) with n_max equidistant thresholds.

    Currents are first mixed over time, x'[t] = sum_j 2 sigmoid(M[t, j]) / T * x[j], with M learned from 0; the leak
    sigmoid(a) + 1/2 is learned from 1; the reset subtracts the level; gradients do not flow through the membrane unless
    `detach_state` is False.
    """

    def __init__(
        self,
        timesteps: int,
        n_max: int = 2,
        step: float | None = None,
        surrogate: str = "box",
        learn_step: bool = False,
        *,
        detach_state: bool = True,
    ) -> None:
        check_count("n_max", n_max)
        super().__init__(
            step=2 / n_max if step is None else step,
            learn_step=learn_step,
            surrogate=surrogate,
            membrane="if",
            beta=0.0,
            alpha=1.0,
        )
        self.timesteps = check_count("timesteps", timesteps)
        self.mixing = nn.Parameter(torch.zeros(timesteps, timesteps))
        self.leak_logit = nn.Parameter(torch.zeros(()))
        detached = check_flag("detach_state", detach_state)
        self.rule = Rule(n_max, self.surrogate, reset="level", reset_grad=False, detach_state=detached)

    @property
    def leak(self) -> Tensor:
        return torch.sigmoid(self.leak_logit) + 0.5

    def check_input(self, x: Tensor) -> Tensor:
        super().check_input(x)
        if x.shape[0] != self.timesteps:
            raise ValueError(f"x must have timesteps={self.timesteps} as its first dimension, got {x.shape[0]}")
        return x

    @property
    def weights(self) -> Tensor:
        """`[T, T]`: how much of each timestep's current goes into each, 2 sigmoid(M) / T."""
        return 2 * torch.sigmoid(self.mixing) / self.timesteps

    def mix(self, x: Tensor) -> Tensor:
        order = [0, *sorted(range(1, x.dim()), key=lambda d: -x.stride()[d])]  # as in memory, which the result keeps
        back = sorted(range(x.dim()), key=order.__getitem__)
        laid = x.permute(order).to(compute_dtype(x))
        rows, weights = laid.flatten(1), self.weights.to(laid.dtype)
        device = "cpu" if x.is_meta else x.device.type  # meta has no autocast
        with torch.autocast(device, enabled=False):  # which would multiply in half precision
            mixed: Tensor = weights @ rows if transformed() else _MixRows.apply(weights, rows)  # type: ignore[no-untyped-call]
        return mixed.view(laid.shape).permute(back)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # mixes time first, so it fuses nothing
        self.look_at_origin(x)
        return super().forward(self.mix(self.check_input(x))).to(x.dtype)

    def _levels(self, x: Tensor) -> Tensor:
        return super()._levels(self.mix(x))

    def forward_step(self, x: Tensor, state: BurstState | None = None) -> tuple[Tensor, BurstState]:
        raise NotImplementedError("LMHT mixes all timesteps, so it has no step-by-step form: pass the whole sequence")

    def forward_chunk(self, x: Tensor, state: BurstState | None = None) -> tuple[Tensor, BurstState | None]:
        raise NotImplementedError("LMHT mixes all timesteps, so it has no chunks: pass the whole sequence")

    @torch.no_grad()
    def spec(self) -> NeuronSpec:
        return replace(super().spec(), mixing=self.weights.cpu().double().numpy())


class MLF(SpikingNeuron):
    """Multi-level firing (Feng et al. 2022): n_max membranes with fixed equidistant thresholds, each a binary LIF
    with hard reset; the output is the number of membranes that fire (0.6, 1.6, 2.6 in the published code)."""

    fixed_names = (*SpikingNeuron.fixed_names, "ladder")
    ladder: Tensor

    def __init__(
        self,
        n_max: int = 3,
        threshold: float = 0.6,
        spacing: float = 1.0,
        beta: float = 0.25,
        surrogate: str = "rectangular",
        *,
        detach_state: bool = False,
    ) -> None:
        super().__init__(surrogate=surrogate, membrane="lif", beta=beta, alpha=1.0, learn_tail=False)
        check_count("n_max", n_max)
        first, gap = check_positive("threshold", threshold), check_positive("spacing", spacing)
        self.register_buffer("ladder", first + gap * torch.arange(n_max, dtype=torch.float32))
        detached = check_flag("detach_state", detach_state)
        self.rule = Rule(n_max, self.surrogate, rounding="strict", reset="hard", detach_state=detached)

    @property
    def step(self) -> Tensor:
        """What one fired membrane is worth: a unit spike."""
        return torch.ones_like(self.ladder[0])

    @property
    def thresholds(self) -> Tensor:
        return self.ladder

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # several membranes, so it fuses nothing
        self.look_at_origin(x)
        return self._run(self.check_input(x), None)[0]

    def _run(self, x: Tensor, state: BurstState | None) -> tuple[Tensor, BurstState | None]:
        """Spike counts of all timesteps `x` [T, B, ...] over membranes `[n_max, B, ...]`, and the state after them."""
        dtype, outputs = compute_dtype(x), []
        theta = self.ladder.to(dtype).reshape(-1, *[1] * (x.dim() - 1))
        for current in x.unbind(0):
            u = current.to(dtype) + torch.zeros_like(theta)
            if state is not None:
                u = u + self.beta.to(dtype) * (state.v.detach() if self.rule.detach_state else state.v)
            fired = torch.where(u.isnan(), u, (u > theta).to(dtype)).detach()
            spikes = straight_through(u - theta + 1, fired, self.tail.to(dtype), 1, self.surrogate)
            state = BurstState(u * (1 - fired))
            outputs.append(spikes.sum(0).to(x.dtype))
        return torch.stack(outputs) if outputs else x.clone(), state

    def forward_step(self, x: Tensor, state: BurstState | None = None) -> tuple[Tensor, BurstState]:
        state = self.checked_state(self.check_input(x[None]), state)
        out, after = self._run(x[None], state)
        assert after is not None
        return out[0], after

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        return (self.n_max, *x.shape[1:])

    def forward_chunk(self, x: Tensor, state: BurstState | None = None) -> tuple[Tensor, BurstState | None]:
        state = self.checked_state(self.check_input(x), state)
        out, after = self._run(x, None if state is None else state.detach())
        return out, None if after is None else after.detach()

    def _levels(self, x: Tensor) -> Tensor:
        return self.forward(x.to(compute_dtype(x)))

    def spec(self) -> NeuronSpec:
        raise GraphError("MLF keeps several membranes per neuron, which have no integer form; use LadderNeuron")


class ReLU(nn.Module):
    """The ANN's activation, with the neurons' interface: `[T, B, ...]` in and out, BatchNorm and a residual in the same
    pass where a kernel has it."""

    one: Tensor
    zero: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(()), persistent=False)  # the kernel's step, and its other constants
        self.register_buffer("zero", torch.zeros(()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ReLU:
        before = self.one
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.one is not before:  # to_empty leaves whatever lies in memory, and no state_dict has them
            self.one, self.zero = torch.ones_like(self.one), torch.zeros_like(self.zero)
        return self

    def forward(
        self,
        x: Tensor,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
        timesteps: int | None = None,
    ) -> Tensor:
        """As `SpikingNeuron.forward`."""
        if norm is None:
            check_alone(residual, timesteps)
            return F.relu(x)
        from lbq.kernels.gpu.operators import norm_relu

        constants = self.one.float(), self.zero.float()
        if timesteps is not None:
            out = norm_relu(x, norm, *constants, None)  # type: ignore[arg-type]
            return out.unsqueeze(0).expand(timesteps, *out.shape)
        added = None if residual is None else residual.flatten(0, 1)
        return norm_relu(x.flatten(0, 1), norm, *constants, added).unflatten(0, x.shape[:2])  # type: ignore[arg-type]

    def fuses(self, x: Tensor, norm: nn.Module, timesteps: int) -> bool:  # noqa: ARG002 - time is nothing to it
        return not is_watched(self) and fuses_norm(x, norm)


class QuantReLU(SteppedNeuron):
    """Activation of the quantised ANN with the same levels: gamma * clip(round(x / gamma), 0, n_max), learned step.

    A neuron whose membrane forgets everything: every timestep is for itself. It is the fairness baseline that separates
    what the levels give from what the spiking dynamics give. Trained as LSQ (Esser et al. 2020): `clip` surrogate and a
    step gradient scaled by 1 / sqrt(features * n_max), or with `step_gradient="sum"` by its plain sum, as burst neurons are.
    """

    origin_seen = True  # without memory, a batch in place of time does no harm

    def __init__(
        self,
        n_max: int = 5,
        step: float = INITIAL_STEP,
        learn_step: bool = True,
        step_gradient: Literal["sum", "lsq"] = "lsq",
    ) -> None:
        check_count("n_max", n_max, LARGEST_LEVEL)
        super().__init__(
            step=step,
            learn_step=learn_step,
            step_gradient=step_gradient,
            surrogate="clip",
            membrane="lif",
            beta=0.0,
            alpha=0.0,
        )
        self.rule = Rule(n_max, self.surrogate, rounding="round", reset_grad=False)
