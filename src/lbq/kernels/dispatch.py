"""Run a burst sequence by the chosen kernel, or by the reference where that kernel cannot."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lbq.kernels import cpu
from lbq.kernels.reference import BurstState, Constants, Rule, burst_sequence, transformed
from lbq.native.choose import choose


def kernel_on(device: str) -> str:
    """The chosen kernel's name; a constant while torch.compile traces."""
    return choose(device).kernel


kernel_on._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's own marker imports the compiler


def _in_memory(tensors: Iterable[object]) -> bool:
    """Whether a kernel can read these tensors where they lie: not inside torch.func, not fake, not lazily negated.

    torch.compile and torch.export are told of the kernels as operators and may trace what they like.
    """
    if transformed():
        return False
    return torch.compiler.is_compiling() or all(
        type(t) in (Tensor, nn.Parameter) and not t.is_neg() for t in tensors if isinstance(t, Tensor)
    )


def kernel_for(x: Tensor, constants: Constants, rule: Rule, state: Iterable[object] = ()) -> str:
    """What runs this sequence: the chosen kernel where it can, else the reference."""
    kernel = kernel_on(x.device.type) if _in_memory((x, *constants, *state)) else "reference"
    refused: str | None = None
    if kernel == "native":
        refused = cpu.supports(x, constants, rule)
    elif kernel == "fused":
        from lbq.kernels.gpu import operators

        refused = operators.supports(x.dtype, x.shape[0], rule, constants.thresholds is not None)
    return kernel if refused is None else "reference"


def burst(x: Tensor, constants: Constants, rule: Rule) -> Tensor:
    """Scaled outputs of the sequence of currents `x` [T, B, ...], from rest."""
    kernel = kernel_for(x, constants, rule)
    if kernel == "native":
        return cpu.burst_sequence(x, constants, rule)
    if kernel == "fused":
        from lbq.kernels.gpu import operators

        return operators.burst(x, constants, rule)
    return burst_sequence(x, constants, rule)[0]


def burst_chunk(
    x: Tensor, constants: Constants, rule: Rule, state: BurstState | None
) -> tuple[Tensor, BurstState | None]:
    """Scaled outputs of the currents `x` [T, B, ...] from `state` on (None: at rest), and the state after them. Gradients
    know neither state."""
    before = None if state is None else state.detach()
    kernel = kernel_for(x, constants, rule, before or ())
    if kernel == "native":
        return cpu.burst_chunk(x, constants, rule, before)
    if kernel == "fused" and x.shape[0]:  # without timesteps there is no state to write
        from lbq.kernels.gpu import operators

        return operators.burst_chunk(x, constants, rule, before)
    out, after = burst_sequence(x, constants, rule, before)
    return out, None if after is None else _copied(after.detach())


def _copied(state: BurstState) -> BurstState:
    """In memory of its own: a membrane at rest takes over the current's."""
    return BurstState(state.v.clone(), None if state.pending is None else state.pending.clone())


def fuses_norm(x: Tensor, norm: nn.Module, rule: Rule, timesteps: int) -> bool:
    """Whether BatchNorm `norm` of `x` [N, C, ...] can run in one pass with the neuron behind it."""
    if kernel_on(x.device.type) != "fused" or not _in_memory((x, *norm.parameters())):
        return False
    from lbq.kernels.gpu import operators

    return operators.supports(x.dtype, timesteps, rule) is None and operators.supports_norm(norm, x)


def fuses_relu(x: Tensor, norm: nn.Module) -> bool:
    """Whether BatchNorm `norm` of `x` [N, C, ...] can run in one pass with a ReLU behind it."""
    if kernel_on(x.device.type) != "fused" or not _in_memory((x, *norm.parameters())):
        return False
    from lbq.kernels.gpu import operators

    return x.dtype in operators.DTYPES and operators.supports_norm(norm, x)


def norm_relu(x: Tensor, norm: nn.BatchNorm2d, one: Tensor, zero: Tensor, residual: Tensor | None) -> Tensor:
    """`fused.norm_relu`, for what `fuses_relu` allows."""
    from lbq.kernels.gpu import operators

    return operators.norm_relu(x, norm, one, zero, residual)


def norm_burst(
    x: Tensor, norm: nn.BatchNorm2d, constants: Constants, rule: Rule, residual: Tensor | None, timesteps: int | None
) -> Tensor:
    """`fused.norm_burst`, for what `fuses_norm` allows."""
    from lbq.kernels.gpu import operators

    return operators.norm_burst(x, norm, constants, rule, residual, timesteps)
