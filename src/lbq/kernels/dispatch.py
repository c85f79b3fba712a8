"""Run a burst sequence by the chosen kernel, or by the reference where that kernel cannot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lbq.kernels import cpu
from lbq.kernels.reference import BurstState, Constants, Rule, burst_sequence, priced_sequence, transformed
from lbq.native.choose import choose


def kernel_on(device: str) -> str:
    """The chosen kernel's name; a constant while torch.compile traces."""
    return choose(device).kernel


kernel_on._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's own marker imports the compiler


def _in_memory(tensors: Iterable[object]) -> bool:
    """Whether a kernel can read these tensors where they lie: not inside torch.func, not fake, not lazily negated.

    torch.compile and torch.export know the kernels as operators and may trace any tensors.
    """
    if transformed():
        return False
    return torch.compiler.is_compiling() or all(
        type(t) in (Tensor, nn.Parameter) and not t.is_neg() for t in tensors if isinstance(t, Tensor)
    )


def _fast(kernel: str) -> Any:
    """The module of a fast kernel; that for GPUs is loaded when it is first needed."""
    if kernel == "native":
        return cpu
    from lbq.kernels.gpu import operators

    return operators


def kernel_for(x: Tensor, constants: Constants, rule: Rule, state: Iterable[object] = ()) -> str:
    """What runs this sequence: the chosen kernel where it can, else the reference."""
    kernel = kernel_on(x.device.type) if _in_memory((x, *constants, *state)) else "reference"
    return kernel if kernel == "reference" or _fast(kernel).supports(x, constants, rule) else "reference"


def burst(x: Tensor, constants: Constants, rule: Rule) -> Tensor:
    """Scaled outputs of the sequence of currents `x` [T, B, ...], from rest."""
    if (kernel := kernel_for(x, constants, rule)) != "reference":
        out: Tensor = _fast(kernel).burst(x, constants, rule)
        return out
    return burst_sequence(x, constants, rule)[0]


def burst_priced(x: Tensor, constants: Constants, rule: Rule) -> tuple[Tensor, Tensor]:
    """Scaled outputs from rest, and the sums of `reference.priced_sequence`."""
    if (kernel := kernel_for(x, constants, rule)) != "reference":
        out, sums = _fast(kernel).burst_priced(x, constants, rule)
        return out, sums
    return priced_sequence(x, constants, rule)


def burst_chunk(
    x: Tensor, constants: Constants, rule: Rule, state: BurstState | None
) -> tuple[Tensor, BurstState | None]:
    """Scaled outputs of the currents `x` [T, B, ...] from `state` on (None: at rest), and the state after them. Gradients
    stop at both states."""
    before = None if state is None else state.detach()
    kernel = kernel_for(x, constants, rule, before or ())
    if kernel != "reference" and x.shape[0]:  # without timesteps there is no state to write
        out, after = _fast(kernel).burst_chunk(x, constants, rule, before)
        return out, after
    out, after = burst_sequence(x, constants, rule, before)
    if after is None:
        return out, None
    after = after.detach()  # and in memory of its own: a membrane at rest takes over the current's
    return out, BurstState(after.v.clone(), None if after.pending is None else after.pending.clone())


def fuses_norm(x: Tensor, norm: nn.Module, rule: Rule | None = None, timesteps: int = 1) -> bool:
    """Whether BatchNorm `norm` of `x` [N, C, ...] can run in one pass with the neuron behind it. rule None: with a ReLU."""
    if kernel_on(x.device.type) != "fused" or not _in_memory((x, *norm.parameters())):
        return False
    from lbq.kernels.gpu import operators

    return operators.supports_sequence(x.dtype, timesteps, rule) and operators.supports_norm(norm, x)
