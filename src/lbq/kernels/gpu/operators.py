"""The fused kernels as PyTorch operators: a whole burst sequence in one pass each way, alone or after BatchNorm.

`burst` replaces `reference.burst_sequence` from rest, `burst_chunk` from a state on; `norm_burst` computes BatchNorm, a
residual add and the sequence together. All save the input and recompute the rest; a second derivative is refused (the
reference has it). They are registered with torch.library for torch.compile; outside it autograd functions launch the
kernels directly. `launch` starts the device code of `tiles`.

In half precision the fused form is the more exact one: between BatchNorm and the neuron nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lbq.kernels.gpu import launch
from lbq.kernels.gpu.launch import Neuron, Norm, decode, encode
from lbq.kernels.gpu.layout import sequence_like, settled
from lbq.kernels.reference import AT_REST, BurstState, Constants, Rule, check_plain
from lbq.kernels.surrogate import SURROGATES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST = 32  # timesteps that one program holds in registers
LARGEST = 1 << 20  # levels that the kernel's rounding is exact for
SLOPES = {"relsg_et", "box", "box_et", "clip", "arctan", "rectangular", "sigmoid", "triangle"}


# The neuron alone
# --------------------------------------------------------------------------------------------------------------------

NEURON = "Tensor step, Tensor tail, Tensor alpha, Tensor? leak, Tensor? gain, Tensor? scale, int n_max, str rule"
STATE = "Tensor? v, Tensor? pending"
NEURON_INPUTS = ("step", "tail", "alpha", "leak", "gain", "scale")


def _burst(x: Tensor, *neuron: Any) -> Tensor:
    return launch.forward(x, x.shape[0], Neuron(*neuron))


def _burst_chunk(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """From membrane and pending reset on; returns the outputs, and both after them, which have no gradient."""
    *neuron, v, pending = rest
    return launch.chunk(x, Neuron(*neuron), (v, pending))


def _burst_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *neuron, v, pending, wanted = rest
    return launch.backward(grad, x, Neuron(*neuron), wanted.split(), before=(v, pending))


def _burst_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:7], *(inputs[9:] or AT_REST))
    ctx.settings = inputs[7:9]
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(*output[1:])


def _burst_grads(ctx: Any, grad: Tensor, *_: Tensor, backward: Any = None) -> tuple[Tensor | None, ...]:
    saved, needs = ctx.saved_tensors, ctx.needs_input_grad
    wanted = _wanted(saved[1:7], needs[1:7], ctx.settings[1])
    backward = backward or torch.ops.lbq.burst_backward
    gx, sums = backward(grad, *saved[:7], *ctx.settings, *saved[7:], " ".join(wanted))
    return gx, *_spread(sums, wanted, saved[1:7]), *[None] * (len(needs) - 7)


def _wanted(neuron: Sequence[Tensor | None], needed: Sequence[bool], rule: str) -> list[str]:
    """Which of the neuron's constants need a gradient that exists."""
    named = zip(NEURON_INPUTS, needed, neuron, strict=True)
    wanted = [name for name, need, value in named if need and value is not None]
    if decode(rule)["SURROGATE"] != "relsg_et":  # the others have no tail that learns
        wanted = [name for name in wanted if name != "tail"]
    return wanted


def _spread(sums: Tensor, wanted: Sequence[str], neuron: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The neuron's gradients from the rows of `sums`, each in the shape of what it belongs to."""
    if not wanted:
        return [None] * len(NEURON_INPUTS)
    scalars = sums.sum(1) if sums.shape[1] > 1 else sums[:, 0]
    grads: list[Tensor | None] = []
    for name, value in zip(NEURON_INPUTS, neuron, strict=True):
        if name not in wanted or value is None:
            grads.append(None)
        else:
            row = wanted.index(name)
            grads.append((sums[row] if value.numel() > 1 else scalars[row]).reshape(value.shape))
    return grads


class _Burst(torch.autograd.Function):
    """The operator without the dispatcher, which costs as much as several launches: what runs outside torch.compile."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out = _burst(*inputs)
        _burst_setup(ctx, inputs, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_plain(grad)
        return _burst_grads(ctx, grad, backward=_burst_backward)


class _BurstChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        found = _burst_chunk(*inputs)
        _burst_setup(ctx, inputs, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        check_plain(grad)
        return _burst_grads(ctx, grad, backward=_burst_backward)


# The neuron after BatchNorm and a residual add
# --------------------------------------------------------------------------------------------------------------------

NORM = "Tensor weight, Tensor bias, Tensor mean, Tensor var, Tensor? residual"
NORM_SETTINGS = "float eps, int count, int timesteps"


def _norm_burst(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *rest: Any) -> Tensor:
    """x `[T, B, C, ...]`, or `[1, B, C, ...]` shown at every timestep. Where count > 0, mean and var are those of x, and
    the gradient of x goes through them too; else they are given numbers."""
    residual, *neuron, eps, _count, timesteps = rest
    return launch.forward(x, timesteps, Neuron(*neuron), Norm(weight, bias, mean, var, eps), residual)


def _norm_burst_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias, mean, var, residual, *more = rest
    *constants, eps, count, _timesteps, names = more
    norm, neuron = Norm(weight, bias, mean, var, eps, count), Neuron(*constants)
    wanted = ["current", "hat", *names.split()]
    current, totals = launch.backward(grad, x, neuron, wanted, norm, residual, shown=x.shape[0] == 1)
    gx = launch.norm_backward(current, x, norm, totals)
    return gx, x.new_empty(0) if residual is None else current, totals


def _norm_burst_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:12])
    ctx.settings = inputs[12:]


def _norm_burst_grads(ctx: Any, grad: Tensor, backward: Any = None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    wanted = _wanted(saved[6:12], ctx.needs_input_grad[6:12], ctx.settings[1])
    backward = backward or torch.ops.lbq.norm_burst_backward
    gx, current, totals = backward(grad, *saved, *ctx.settings, " ".join(wanted))
    weight, bias, residual = saved[1], saved[2], saved[5]
    return (
        gx,
        totals[1].to(weight.dtype),
        totals[0].to(bias.dtype),
        None,
        None,
        None if residual is None else current,
        *_spread(totals[2:], wanted, saved[6:12]),
        *(None,) * 5,
    )


class _NormBurst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out = _norm_burst(*inputs)
        _norm_burst_setup(ctx, inputs, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_plain(grad)
        return _norm_burst_grads(ctx, grad, _norm_burst_backward)


# The same as operators
# --------------------------------------------------------------------------------------------------------------------


def _operator(name: str, function: Any, schema: str, mutates: tuple[str, ...] = ()) -> Any:
    return torch.library.custom_op(f"lbq::{name}", function, mutates_args=mutates, schema=schema)


BURST = _operator("burst", _burst, f"(Tensor x, {NEURON}) -> Tensor")
BURST_CHUNK = _operator("burst_chunk", _burst_chunk, f"(Tensor x, {NEURON}, {STATE}) -> (Tensor, Tensor, Tensor)")
BURST_BACKWARD = _operator(
    "burst_backward", _burst_backward, f"(Tensor grad, Tensor x, {NEURON}, {STATE}, str wanted) -> (Tensor, Tensor)"
)
MOMENTS = _operator("moments", launch.moments, "(Tensor x) -> (Tensor, Tensor)")
TRACK_MOMENTS = _operator(
    "track_moments",
    launch.track_moments,
    "(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) batches, Tensor mean, Tensor var, float momentum, "
    "int count) -> ()",
    ("running_mean", "running_var", "batches"),
)
NORM_BURST = _operator("norm_burst", _norm_burst, f"(Tensor x, {NORM}, {NEURON}, {NORM_SETTINGS}) -> Tensor")
NORM_BURST_BACKWARD = _operator(
    "norm_burst_backward",
    _norm_burst_backward,
    f"(Tensor grad, Tensor x, {NORM}, {NEURON}, {NORM_SETTINGS}, str wanted) -> (Tensor, Tensor, Tensor)",
)
BURST.register_autograd(_burst_grads, setup_context=_burst_setup)
BURST_CHUNK.register_autograd(_burst_grads, setup_context=_burst_setup)
NORM_BURST.register_autograd(_norm_burst_grads, setup_context=_norm_burst_setup)


# What they return, without computing it
# --------------------------------------------------------------------------------------------------------------------


def _burst_fake(x: Tensor, *_neuron: Any) -> Tensor:
    return sequence_like(settled(x))


def _burst_chunk_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, rule = settled(x), rest[7]
    return sequence_like(x), *launch.states_like(x, rule)


def _burst_backward_fake(_grad: Tensor, x: Tensor, step: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return sequence_like(settled(x)), x.new_empty((len(rest[-1].split()), step.numel()), dtype=torch.float32)


def _moments_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1], dtype=torch.float32), x.new_empty(x.shape[1], dtype=torch.float32)


def _track_moments_fake(*_arguments: Any) -> None:
    return None


def _norm_burst_fake(x: Tensor, *rest: Any) -> Tensor:
    return sequence_like(settled(x), rest[-1])


def _norm_burst_backward_fake(_grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, residual, wanted = settled(x), rest[4], rest[-1].split()
    totals = x.new_empty((2 + len(wanted), x.shape[2]), dtype=torch.float32)
    return sequence_like(x), x.new_empty(0) if residual is None else sequence_like(x), totals


BURST.register_fake(_burst_fake)
BURST_CHUNK.register_fake(_burst_chunk_fake)
BURST_BACKWARD.register_fake(_burst_backward_fake)
MOMENTS.register_fake(_moments_fake)
TRACK_MOMENTS.register_fake(_track_moments_fake)
NORM_BURST.register_fake(_norm_burst_fake)
NORM_BURST_BACKWARD.register_fake(_norm_burst_backward_fake)


# What neurons call
# --------------------------------------------------------------------------------------------------------------------


def supports(dtype: torch.dtype, timesteps: int, rule: Rule, ladder: bool = False) -> str | None:
    """None where the fused kernel computes such a sequence, else why not. ladder: unequal thresholds."""
    if dtype not in DTYPES:
        return f"{dtype} is computed by the reference"
    if ladder:
        return "unequal thresholds are computed by the reference"
    if timesteps > LONGEST:
        return f"more than {LONGEST} timesteps are computed by the reference"
    if rule.n_max > LARGEST:
        return f"more than {LARGEST} levels are computed by the reference"
    if rule.surrogate.name not in SLOPES or SURROGATES[rule.surrogate.name] is not rule.surrogate:
        return f"the surrogate {rule.surrogate.name!r} is not in the kernel"
    return None


def supports_norm(norm: nn.Module, x: Tensor) -> bool:
    """Plain BatchNorm with weights and running statistics, and no hooks that would go unheard, which takes `x` [N, C, ...].
    What it does not take it refuses itself, in words of its own."""
    if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return False
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    if x.dim() not in _dimensions(norm) or x.shape[1] != norm.num_features:
        return False
    if norm.training and x.numel() <= x.shape[1]:  # one value by channel
        return False
    hooks = norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
    plain = norm.affine and norm.track_running_stats and norm.momentum is not None and not hooks
    return plain and norm.weight.device == x.device


def _dimensions(norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> tuple[int, ...]:
    """That its input may have."""
    if isinstance(norm, nn.BatchNorm1d):
        return (2, 3)
    return (4,) if isinstance(norm, nn.BatchNorm2d) else (5,)


def burst(x: Tensor, constants: Constants, rule: Rule) -> Tensor:
    """Scaled outputs of the sequence `x` [T, B, ...] from rest: `reference.burst_sequence`, fused."""
    inputs = (x, *neuron_of(constants, rule))
    out: Tensor = torch.ops.lbq.burst(*inputs) if torch.compiler.is_compiling() else _Burst.apply(*inputs)  # type: ignore[no-untyped-call]
    return out


def burst_chunk(x: Tensor, constants: Constants, rule: Rule, state: BurstState | None) -> tuple[Tensor, BurstState]:
    """The same of one timestep or more from `state` on (None: at rest), and the state after them, of which gradients know
    nothing."""
    inputs = (x, *neuron_of(constants, rule), *(state or AT_REST))
    run: Any = torch.ops.lbq.burst_chunk if torch.compiler.is_compiling() else _BurstChunk.apply
    out, v, pending = run(*inputs)
    return out, BurstState(v, pending if rule.delayed else None)


def norm_burst(
    x: Tensor,
    norm: nn.BatchNorm2d,
    constants: Constants,
    rule: Rule,
    residual: Tensor | None = None,
    timesteps: int | None = None,
) -> Tensor:
    """Outputs `[T, B, C, ...]` of the neuron that receives BatchNorm of `x` [T, B, C, ...], plus `residual` of that shape.

    With `timesteps`, x is `[B, C, ...]` and shown that many times. Updates the running statistics while training.
    """
    return _normalised(x, norm, neuron_of(constants, rule), residual, timesteps)


def norm_relu(x: Tensor, norm: nn.BatchNorm2d, one: Tensor, zero: Tensor, residual: Tensor | None = None) -> Tensor:
    """relu(BatchNorm(x) + residual) of `x` [N, C, ...], for the ANN beside which a burst network is measured."""
    neuron = (one, zero, zero, None, None, None, 1, "relu relu once 100")
    return _normalised(x, norm, neuron, None if residual is None else residual[None], timesteps=1).squeeze(0)


def _normalised(
    x: Tensor, norm: nn.BatchNorm2d, neuron: tuple[Any, ...], residual: Tensor | None, timesteps: int | None
) -> Tensor:
    compiling = torch.compiler.is_compiling()
    folded = x.flatten(0, 1) if timesteps is None else x
    count = 0
    if norm.training:
        count = folded.numel() // folded.shape[1]
        moments: Any = torch.ops.lbq.moments if compiling else launch.moments
        track: Any = torch.ops.lbq.track_moments if compiling else launch.track_moments
        mean, var = moments(folded.detach())
        track(norm.running_mean, norm.running_var, norm.num_batches_tracked, mean, var, norm.momentum, count)
    else:
        mean, var = norm.running_mean, norm.running_var
    inputs = (
        x if timesteps is None else x[None],
        *(norm.weight, norm.bias, mean, var, residual),
        *neuron,
        *(norm.eps, count, x.shape[0] if timesteps is None else timesteps),
    )
    out: Tensor = torch.ops.lbq.norm_burst(*inputs) if compiling else _NormBurst.apply(*inputs)  # type: ignore[no-untyped-call]
    return out


def neuron_of(constants: Constants, rule: Rule) -> Neuron:
    """A neuron as the operators take it; None for a leak or gain of 1."""
    step = constants.step.reshape(-1)

    def tensor(value: Tensor | float) -> Tensor | None:
        if isinstance(value, Tensor):
            return value
        return None if value == 1.0 else step.new_full((), value)

    alpha = constants.alpha if isinstance(constants.alpha, Tensor) else step.new_full((), constants.alpha)
    scale = None if constants.scale is None else constants.scale.reshape(-1).expand_as(step)
    leak, gain = tensor(constants.leak), tensor(constants.gain)
    return Neuron(step, constants.tail, alpha, leak, gain, scale, rule.n_max, encode(rule))
