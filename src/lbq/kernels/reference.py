"""The burst neuron over time in plain PyTorch: what "correct" means for every other kernel.

One timestep is integrate, emit, reset, on explicit state:

    U[t] = leak * V[t-1] + gain * x[t]                      Eq. lif_burst_integrate
    S[t] = clip(floor(U[t] / step), 0, n_max)               Eq. lbq_level
    V[t] = U[t] - alpha * step * [S[t] > 0]                 Eq. lif_burst_reset

and the output is step * S[t] with the gradients of Eq. ste_level. `Rule` holds what differs between the neurons
that share this core (rounding, reset), `Constants` the numbers and learned tensors of one layer.

Arithmetic is float32 for float32 and narrower inputs and float64 for float64; r = U / step is a correctly rounded
division, never a product with 1 / step, which gives another level at exact multiples of the step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lbq.graph.rules import SIGNED, Reset, Rounding
from lbq.kernels.surrogate import Surrogate

LARGEST_LEVEL = 2**22  # levels and thresholds are exact in float32, and so is half a step between them


@dataclass(frozen=True)
class Rule:
    """What kind of neuron it is; no numbers that training could change.

    rounding: how r = U / step becomes a level. `floor` reaches k at r >= k (the paper's), `strict` at r > k (binary LIF),
        `round` at r >= k - 1/2 (I-LIF); `trunc` and `half` are `floor` and `round` made odd, with signed levels (ternary).
    reset: `once` subtracts alpha * step where S != 0, with the sign of S (the paper's); `level` subtracts
        alpha * step * S; `hard` multiplies the membrane by 1 - alpha there.
    decay_reset: False delays the subtraction past the leak, U[t] = leak * U[t-1] + x[t] - reset[t-1] (Eq. lif).
    reset_grad: whether step and alpha receive gradients through the reset; the indicator never does.
    detach_state: cut gradients through time (LM-HT).
    """

    n_max: int
    surrogate: Surrogate
    rounding: Rounding = "floor"
    reset: Reset = "once"
    decay_reset: bool = True
    reset_grad: bool = True
    detach_state: bool = False

    @property
    def signed(self) -> bool:
        return self.rounding in SIGNED

    @property
    def delayed(self) -> bool:
        """Whether a reset is still to be subtracted at the next timestep."""
        return not self.decay_reset and self.reset != "hard"


class Constants(NamedTuple):
    """The numbers of one layer, broadcastable against one timestep `[B, ...]`; tensors may require gradients.

    scale: what a level is worth in the output where that is not the step (binary spikes are worth 1).
    thresholds: for a ladder of unequal thresholds, `[n_max]` increasing; `step` is then only the unit of the reset.
    """

    step: Tensor
    tail: Tensor
    leak: Tensor | float
    alpha: Tensor | float
    gain: Tensor | float = 1.0
    scale: Tensor | None = None
    thresholds: Tensor | None = None


class BurstState(NamedTuple):
    """What a neuron carries to the next timestep: the membrane after reset, and a reset still to be subtracted
    where the rule delays it past the leak."""

    v: Tensor
    pending: Tensor | None = None

    def detach(self) -> BurstState:
        """The same numbers as constants, at which gradients stop."""
        return BurstState(self.v.detach(), None if self.pending is None else self.pending.detach())


class Emission(NamedTuple):
    """One timestep's output: `scaled` = step * S and `size` = |S|, both with the gradients of B, `level` = S, as floats, and
    `membrane` = U, before the reset."""

    scaled: Tensor
    level: Tensor
    size: Tensor
    membrane: Tensor


def exporting() -> bool:
    """Whether torch.onnx is at work, which has no use for gradients."""
    onnx = sys.modules.get("torch.onnx")  # importing it takes a second
    return onnx is not None and bool(onnx.is_in_onnx_export())


def transformed() -> bool:
    """Whether torch.func, forward-mode differentiation, torch.jit.trace or torch.onnx is at work, which take plain operations
    only."""
    differentiated = torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
    return differentiated or torch._C._is_tracing() or exporting()


# torch.compiler's own marker imports the compiler
exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]
transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _StraightThrough(torch.autograd.Function):
    """S in the forward pass, dB in the backward pass: B(r) + sg(S - B(r)) without its rounding error."""

    @staticmethod
    def forward(
        ctx: Any, r: Tensor, level: Tensor, tail: Tensor, n_max: int, surrogate: Surrogate, signed: bool
    ) -> Tensor:
        ctx.save_for_backward(r, tail)
        ctx.n_max, ctx.surrogate, ctx.signed = n_max, surrogate, signed
        return level.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        r, tail = ctx.saved_tensors
        surrogate: Surrogate = ctx.surrogate
        magnitude = r.abs() if ctx.signed else r
        assert surrogate.slope is not None
        grad_r = grad * surrogate.slope(magnitude, ctx.n_max, tail) if ctx.needs_input_grad[0] else None
        grad_tail = None
        if ctx.needs_input_grad[2] and surrogate.tail_slope is not None:
            bend = surrogate.tail_slope(magnitude, ctx.n_max, tail)
            grad_tail = (grad * (bend * r.sign() if ctx.signed else bend)).sum_to_size(tail.shape)
        return grad_r, None, grad_tail, None, None, None


def straight_through(
    r: Tensor, level: Tensor, tail: Tensor, n_max: int, surrogate: Surrogate, signed: bool = False
) -> Tensor:
    """Eq. ste_level without its outer step: `level` forward, gradients of B(r) (odd in r where `signed`)."""
    if surrogate.slope is not None and not transformed():
        out: Tensor = _StraightThrough.apply(r, level, tail, n_max, surrogate, signed)  # type: ignore[no-untyped-call]
        return out
    if exporting():
        return level
    if surrogate.tail != "learned":
        tail = tail.detach()
    if signed:  # sign(r) * B(|r|), with its slope at 0, where tails do not move it
        tail = torch.where(r == 0, tail.detach(), tail)
        smooth = torch.where(r < 0, -surrogate.level(-r, n_max, tail), surrogate.level(r, n_max, tail))
    else:
        smooth = surrogate.level(r, n_max, tail)
    return level + torch.nan_to_num(smooth - smooth.detach())  # 0 also where B of one's own is infinite or NaN


def quantise(r: Tensor, n_max: int, rounding: Rounding = "floor") -> Tensor:
    """Levels of the normalised membrane (Eqs. fixed_burst_quantizer, lbq_level); NaN stays NaN."""
    if rounding == "floor":
        return torch.floor(r).clamp(0, n_max)
    if rounding == "strict":
        return (torch.ceil(r) - 1).clamp(0, n_max)
    if rounding == "round":
        return _half_up(r).clamp(0, n_max)
    if rounding == "trunc":
        return torch.trunc(r).clamp(-n_max, n_max)
    return (torch.sign(r) * _half_up(r.abs())).clamp(-n_max, n_max)


def _half_up(r: Tensor) -> Tensor:
    """Rounding that reaches k exactly at k - 1/2: floor(r + 1/2) would also do so just below."""
    below = torch.floor(r)
    return below + (r - below >= 0.5).to(r.dtype)


def count_thresholds(u: Tensor, thresholds: Tensor) -> Tensor:
    """Eq. burst_count: how many of the ordered thresholds the membrane reaches, as integers."""
    return torch.bucketize(u.detach().contiguous(), thresholds, right=True)


def ladder_coordinate(u: Tensor, thresholds: Tensor, reached: Tensor) -> Tensor:
    """Piecewise-linear r(U) with r = i at the i-th threshold, continued with the outer spacings.

    For thresholds k * step it is U / step, so a ladder has the surrogate of the neuron it generalises.
    """
    below = reached.clamp(max=thresholds.numel() - 1)
    edges = torch.cat([thresholds.new_zeros(1), thresholds])
    low = edges[below]
    return below.to(u.dtype) + (u - low) / (edges[below + 1] - low)


def integrated(x: Tensor, state: BurstState | None, constants: Constants, rule: Rule) -> Tensor:
    """Eq. lif_burst_integrate: the membrane before emission of current `x` [B, ...] and the state before it."""
    gain = constants.gain
    u = x if isinstance(gain, float) and gain == 1.0 else gain * x
    if state is None:
        return u
    u = constants.leak * (state.v.detach() if rule.detach_state else state.v) + u
    return u if state.pending is None else u - state.pending


def burst_step(x: Tensor, state: BurstState | None, constants: Constants, rule: Rule) -> tuple[Emission, BurstState]:
    """One timestep: current `x` [B, ...] and the state before it (None: at rest) to the emission and the next state."""
    step, tail, _, alpha, _, scale, thresholds = constants
    u = integrated(x, state, constants, rule)
    if thresholds is None:
        r = u / step
        level = quantise(r.detach(), rule.n_max, rule.rounding)
    else:
        reached = count_thresholds(u, thresholds)
        r = ladder_coordinate(u, thresholds, reached)
        level = torch.where(u.isnan(), u.detach(), reached.to(u.dtype))
    spikes = straight_through(r, level, tail, rule.n_max, rule.surrogate, rule.signed)
    size = spikes * r.detach().sign() if rule.signed else spikes
    emission = Emission((step if scale is None else scale) * spikes, level, size, u)

    if rule.reset == "hard":
        return emission, BurstState(u * (1 - alpha * level.sign().abs()))
    drop = alpha * step * (level if rule.reset == "level" else level.sign())
    if not rule.reset_grad:
        drop = drop.detach()
    if rule.decay_reset:
        return emission, BurstState(u - drop)
    return emission, BurstState(u, drop)


def compute_dtype(x: Tensor) -> torch.dtype:
    """float64 stays float64, everything narrower is computed in float32 (bfloat16 has steps of 1/32 at r = 4)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def burst_sequence(
    x: Tensor, constants: Constants, rule: Rule, state: BurstState | None = None
) -> tuple[Tensor, BurstState | None]:
    """Scaled outputs step * S of a whole sequence of currents `x` [T, B, ...], and the state after it."""
    outputs, after = [], state
    for emission, after in emissions(x, constants, rule, state):  # noqa: B007 - the last one is returned
        outputs.append(emission.scaled.to(x.dtype))
    return _joined(x, outputs, constants, rule), after


def priced_sequence(x: Tensor, constants: Constants, rule: Rule) -> tuple[Tensor, Tensor]:
    """Scaled outputs from rest, and two sums over all of them, `[2]`: of |S|, with the gradients of B, and of the set bits of
    |S|, which have none. A price on the first sum is a price on every level."""
    outputs, sums = [], x.new_zeros(2, dtype=compute_dtype(x))
    for emission, _ in emissions(x, constants, rule):
        outputs.append(emission.scaled.to(x.dtype))
        sums = sums + torch.stack([emission.size.sum(), set_bits(emission.level, rule.n_max).sum()])
    return _joined(x, outputs, constants, rule), sums


def set_bits(level: Tensor, n_max: int) -> Tensor:
    """How many bits of |S| are 1."""
    size = level.detach().abs().to(torch.int32)
    bits = (size >> bit & 1 for bit in range(n_max.bit_length()))
    return sum(bits, torch.zeros_like(size)).to(level.dtype)


def emissions(
    x: Tensor, constants: Constants, rule: Rule, state: BurstState | None = None
) -> Iterator[tuple[Emission, BurstState]]:
    """What is emitted at each timestep of `x` [T, B, ...], and the state after it."""
    dtype = compute_dtype(x)
    for current in x.unbind(0):
        emission, state = burst_step(current.to(dtype), state, constants, rule)
        yield emission, state


def _joined(x: Tensor, outputs: list[Tensor], constants: Constants, rule: Rule) -> Tensor:
    out = torch.stack(outputs) if outputs else x.clone()
    alone = len(outputs) == 1
    unused = (constants.leak if alone else 1.0, constants.alpha if alone or not rule.reset_grad else 1.0)
    for value in unused:  # their gradient is 0 and not None, as that of the other kernels, and as DDP expects it
        if isinstance(value, Tensor) and value.requires_grad:
            out = out + 0 * value.to(out.dtype)
    return out


def check_plain(grad: Tensor) -> None:
    """Refuse batched gradients (autograd's `is_grads_batched`), which have no memory that a faster kernel could read."""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(grad) or functorch.is_legacy_batchedtensor(grad):
        raise NotImplementedError(
            "batched gradients run by the reference kernel alone: set LBQ_KERNEL=reference, or take "
            'lbq.native.choose.use("reference")'
        )


@torch.no_grad()
def burst_levels(x: Tensor, constants: Constants, rule: Rule) -> Tensor:
    """Levels S of a whole sequence `x` [T, B, ...] from rest, as a float tensor of the same shape."""
    levels = [emission.level for emission, _ in emissions(x, constants, rule)]
    return torch.stack(levels) if levels else torch.empty_like(x, dtype=compute_dtype(x))
