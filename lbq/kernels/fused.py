"""The fused kernels as PyTorch operators: a whole burst sequence in one pass each way, alone or after BatchNorm.

`burst` replaces `reference.burst_sequence` (from rest); `norm_burst` computes BatchNorm, a residual add and the sequence
together. Both save the input and recompute the rest; a second derivative is refused (the reference has it). They are
registered with torch.library for torch.compile; outside it autograd functions launch the kernels directly. `tiles` holds
the device code.

In half precision the fused form is the more exact one: between BatchNorm and the neuron nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lbq.kernels import tiles
from lbq.kernels.reference import SIGNED, Constants, Rule

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST = 32  # timesteps that one program holds in registers
LARGEST = 1 << 20  # levels that the kernel's rounding is exact for
PROGRAMS = 4224  # of a kernel that passes over data: many on each of a large GPU's processors, and the same everywhere
ADDING_ROWS, ADDING = 2112, 528  # of one that also adds up: all into one sum, or each its own by channel
SURROGATES = {"relsg_et", "box", "box_et", "clip", "arctan", "rectangular", "sigmoid", "triangle"}
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # a fused multiply-add would give other levels
SUMS = ("current", "hat", "step", "scale", "tail", "leak", "alpha", "gain")
WIDTH = 128  # columns of a tile, and length of the rows that a slab is cut into where channels do not matter
FMA = isinstance(tiles.burst_forward, triton.JITFunction)  # the interpreter's fused multiply-add rounds twice


# Layouts
# --------------------------------------------------------------------------------------------------------------------


class Slab(NamedTuple):
    """How kernels go over one dense timestep (see `tiles`): in tiles of br rows and bc columns."""

    rows: int
    channels: int
    inner: int
    elements: int
    layout: str
    br: int
    bc: int

    def share(self, programs: int) -> tuple[int, int, int]:
        """About so many programs: rows of programs, columns of programs, tiles for each. A function of the shape alone."""
        columns, blocks = -(-self.channels // self.bc), -(-self.rows // self.br)
        each = -(-blocks // max(1, programs // columns))
        return -(-blocks // each), columns, each


def slab_of(shape: Sequence[int], stride: Sequence[int], by_channel: bool, tile: int) -> Slab:
    """A dense `[B, C, ...]`: rows and channels where something depends on the channel (dimension 1), else just rows."""
    elements = 1
    for size in shape:
        elements *= size
    if not by_channel:
        return Slab(-(-elements // WIDTH), WIDTH, 1, elements, "flat", tile // WIDTH, WIDTH)
    channels = shape[1]
    inner = stride[1] if channels > 1 else 1
    bc = min(WIDTH, 1 << max(channels - 1, 0).bit_length())
    return Slab(elements // channels, channels, inner, elements, "last" if inner == 1 else "any", tile // bc, bc)


def tile_for(timesteps: int) -> int:
    """Elements of a tile: fewer where the backward pass keeps more of each in registers."""
    return 1024 if timesteps <= 2 else 512 if timesteps <= 8 else 256


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their range of memory, in any order of dimensions."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether one timestep of both lies in memory in the same order."""
    pairs = zip(a.shape[1:], a.stride()[1:], b.stride()[1:], strict=True)
    return all(size == 1 or one == other for size, one, other in pairs)


def settled(x: Tensor) -> Tensor:
    """`x` [T, B, ...] with dense timesteps: itself, or a copy. Time may have any stride, also 0."""
    return x if x.numel() == 0 or is_dense(x.shape[1:], x.stride()[1:]) else x.contiguous()


def ordered_like(y: Tensor, x: Tensor) -> Tensor:
    """`y` with its timesteps in the memory order of those of `x`: itself, or a copy."""
    return y if same_order(y, x) else sequence_like(x, y.shape[0], y.dtype).copy_(y)


def sequence_like(x: Tensor, timesteps: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Empty `[T, B, ...]` whose timesteps lie as those of `x`, one after the other."""
    elements = 1
    for size in x.shape[1:]:
        elements *= size
    shape = (x.shape[0] if timesteps is None else timesteps, *x.shape[1:])
    return torch.empty_strided(shape, (elements, *x.stride()[1:]), dtype=dtype or x.dtype, device=x.device)


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


# Rules as strings, which operators can take
# --------------------------------------------------------------------------------------------------------------------


def encode(rule: Rule) -> str:
    flags = f"{int(rule.decay_reset)}{int(rule.reset_grad)}{int(rule.detach_state)}"
    return f"{rule.surrogate.name} {rule.rounding} {rule.reset} {flags}"


@lru_cache(maxsize=64)
def decode(rule: str) -> dict[str, Any]:
    """The compile-time constants of both kernels."""
    surrogate, rounding, reset, flags = rule.split()
    decay, reset_grad, detach = (flag == "1" for flag in flags)
    return {
        "SURROGATE": surrogate,
        "ROUNDING": rounding,
        "RESET": reset,
        "DECAY": decay,
        "RESET_GRAD": reset_grad,
        "DETACH": detach,
        "SIGNED": rounding in SIGNED,
        "FMA": FMA,
    }


def forward_constants(rule: str) -> dict[str, Any]:
    return {k: v for k, v in decode(rule).items() if k in ("ROUNDING", "RESET", "DECAY", "SIGNED", "FMA")}


# Launches
# --------------------------------------------------------------------------------------------------------------------


class Norm(NamedTuple):
    """BatchNorm as the kernels see it. elements: how many by channel its statistics are of, 0 where they are frozen."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    eps: float
    elements: int = 0


class Neuron(NamedTuple):
    step: Tensor
    tail: Tensor
    alpha: Tensor
    leak: Tensor | None
    gain: Tensor | None
    scale: Tensor | None
    n_max: int
    rule: str


def _forward(
    x: Tensor, timesteps: int, neuron: Neuron, norm: Norm | None = None, residual: Tensor | None = None
) -> Tensor:
    """x `[T, B, ...]`, or `[1, B, ...]` to be shown at every timestep."""
    x = settled(x)
    out = sequence_like(x, timesteps)
    if out.numel() == 0:
        return out
    many = neuron.step.numel() > 1
    slab = slab_of(x.shape[1:], x.stride()[1:], norm is not None or many, tile_for(timesteps))
    programs, columns, tiles_each = slab.share(PROGRAMS)
    if residual is not None:
        residual = ordered_like(residual, x)
    absent = neuron.step
    with on_device(x):
        tiles.burst_forward[(programs, columns)](
            x,
            x if residual is None else residual,
            out,
            *((absent,) * 4 if norm is None else norm[:4]),
            neuron.step,
            absent if neuron.scale is None else neuron.scale,
            absent if neuron.leak is None else neuron.leak,
            neuron.alpha,
            absent if neuron.gain is None else neuron.gain,
            neuron.n_max,
            0.0 if norm is None else norm.eps,
            *slab[:4],
            x.stride(0) if x.shape[0] > 1 else 0,
            0 if residual is None else residual.stride(0),
            out.stride(0),
            programs,
            tiles_each,
            T=timesteps,
            NORM=norm is not None,
            RESIDUAL=residual is not None,
            STEPS=many,
            SCALE=neuron.scale is not None,
            LEAK=neuron.leak is not None,
            GAIN=neuron.gain is not None,
            **forward_constants(neuron.rule),
            LAYOUT=slab.layout,
            BR=slab.br,
            BC=slab.bc,
            **OPTIONS,
        )
    return out


def _backward(
    grad: Tensor,
    x: Tensor,
    neuron: Neuron,
    wanted: Sequence[str],
    norm: Norm | None = None,
    residual: Tensor | None = None,
    shown: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradient of what the neuron receives, and the sums that `wanted` names, `[sums, channels]`, or `[sums, 1]` where
    nothing depends on the channel."""
    timesteps = grad.shape[0]
    x = settled(x)
    grad = ordered_like(grad, x)
    many = neuron.step.numel() > 1
    by_channel = norm is not None or many
    slab = slab_of(x.shape[1:], x.stride()[1:], by_channel, tile_for(timesteps))
    out = sequence_like(x, 1 if shown else timesteps)
    width = slab.channels if by_channel else 1
    if grad.numel() == 0:
        return out, x.new_zeros((len(wanted), width), dtype=torch.float32)
    if residual is not None:
        residual = ordered_like(residual, x)
    programs, columns, tiles_each = slab.share(ADDING if by_channel else ADDING_ROWS)
    partial = x.new_empty((len(wanted), programs, width), dtype=torch.float32)
    absent = neuron.step
    with on_device(x):
        tiles.burst_backward[(programs, columns)](
            grad,
            x,
            x if residual is None else residual,
            out,
            partial,
            *((absent,) * 4 if norm is None else norm[:4]),
            neuron.step,
            absent if neuron.scale is None else neuron.scale,
            neuron.tail,
            absent if neuron.leak is None else neuron.leak,
            neuron.alpha,
            absent if neuron.gain is None else neuron.gain,
            neuron.n_max,
            0.0 if norm is None else norm.eps,
            *slab[:4],
            x.stride(0) if x.shape[0] > 1 else 0,
            0 if residual is None else residual.stride(0),
            grad.stride(0),
            0 if shown else out.stride(0),
            programs,
            tiles_each,
            T=timesteps,
            NORM=norm is not None,
            RESIDUAL=residual is not None,
            SHOWN=shown,
            STEPS=many,
            SCALE=neuron.scale is not None,
            LEAK=neuron.leak is not None,
            GAIN=neuron.gain is not None,
            **decode(neuron.rule),
            **{f"SUM_{name.upper()}": wanted.index(name) if name in wanted else -1 for name in SUMS},
            WHOLE=not by_channel,
            LAYOUT=slab.layout,
            BR=slab.br,
            BC=slab.bc,
            **OPTIONS,
        )
    return out, partial.sum(1)


def _norm_backward(grad: Tensor, x: Tensor, norm: Norm, totals: Tensor) -> Tensor:
    """From the gradient of BatchNorm's output `[T, B, C, ...]` to that of its input."""
    x = settled(x)
    grad = ordered_like(grad, x)
    out = sequence_like(x)
    if out.numel() == 0:
        return out
    slab = slab_of(x.shape[1:], x.stride()[1:], True, 2048)
    programs, columns, tiles_each = slab.share(PROGRAMS // x.shape[0])
    with on_device(x):
        tiles.norm_backward[(programs, columns, x.shape[0])](
            grad,
            x,
            out,
            totals,
            norm.weight,
            norm.mean,
            norm.var,
            norm.eps,
            1 / norm.elements if norm.elements else 0.0,
            *slab[:4],
            x.stride(0),
            grad.stride(0),
            out.stride(0),
            programs,
            tiles_each,
            LAYOUT=slab.layout,
            BR=slab.br,
            BC=slab.bc,
            **OPTIONS,
        )
    return out


# The neuron alone
# --------------------------------------------------------------------------------------------------------------------

NEURON = "Tensor step, Tensor tail, Tensor alpha, Tensor? leak, Tensor? gain, Tensor? scale, int n_max, str rule"
NEURON_INPUTS = ("step", "tail", "alpha", "leak", "gain", "scale")


def _burst(x: Tensor, *neuron: Any) -> Tensor:
    return _forward(x, x.shape[0], Neuron(*neuron))


def _burst_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *neuron, wanted = rest
    return _backward(grad, x, Neuron(*neuron), wanted.split())


def _burst_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:]


def _burst_grads(ctx: Any, grad: Tensor, backward: Any = None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    wanted = _wanted(saved[1:7], ctx.needs_input_grad[1:7], ctx.settings[1])
    backward = backward or torch.ops.lbq.burst_backward
    gx, sums = backward(grad, *saved, *ctx.settings, " ".join(wanted))
    return gx, *_spread(sums, wanted, saved[1:7]), None, None


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
        return _burst_grads(ctx, grad, _burst_backward)


# BatchNorm's statistics
# --------------------------------------------------------------------------------------------------------------------


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance by channel of `x` [N, C, ...], float32."""
    x = x if is_dense(x.shape, x.stride()) else x.contiguous()
    slab = slab_of(x.shape, x.stride(), True, 4096)
    programs, columns, tiles_each = slab.share(ADDING)
    partial = x.new_empty((2, programs, slab.channels), dtype=torch.float32)
    mean, var = (x.new_empty(slab.channels, dtype=torch.float32) for _ in range(2))
    with on_device(x):
        tiles.moments_partial[(programs, columns)](
            x, partial, *slab[:4], programs, tiles_each, LAYOUT=slab.layout, BR=slab.br, BC=slab.bc, **OPTIONS
        )
        tiles.moments_total[(-(-slab.channels // 8),)](
            partial, mean, var, slab.rows, slab.channels, programs, tiles_each, slab.br, BP=128, BC=8, **OPTIONS
        )
    return mean, var


def _track_moments(
    running_mean: Tensor, running_var: Tensor, batches: Tensor, mean: Tensor, var: Tensor, momentum: float, count: int
) -> None:
    """Move BatchNorm's running statistics towards those of a batch of `count` elements by channel."""
    channels = len(mean)
    with on_device(mean):
        tiles.track[(-(-channels // 128),)](
            mean, var, running_mean, running_var, batches, momentum, count / (count - 1), channels, BC=128, **OPTIONS
        )


# The neuron after BatchNorm and a residual add
# --------------------------------------------------------------------------------------------------------------------

NORM = "Tensor weight, Tensor bias, Tensor mean, Tensor var, Tensor? residual"
NORM_SETTINGS = "float eps, int count, int timesteps"


def _norm_burst(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *rest: Any) -> Tensor:
    """x `[T, B, C, ...]`, or `[1, B, C, ...]` shown at every timestep. Where count > 0, mean and var are those of x, and
    the gradient of x goes through them too; else they are given numbers."""
    residual, *neuron, eps, _count, timesteps = rest
    return _forward(x, timesteps, Neuron(*neuron), Norm(weight, bias, mean, var, eps), residual)


def _norm_burst_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias, mean, var, residual, *more = rest
    *constants, eps, count, _timesteps, names = more
    norm, neuron = Norm(weight, bias, mean, var, eps, count), Neuron(*constants)
    wanted = ["current", "hat", *names.split()]
    current, totals = _backward(grad, x, neuron, wanted, norm, residual, shown=x.shape[0] == 1)
    gx = _norm_backward(current, x, norm, totals)
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
        return _norm_burst_grads(ctx, grad, _norm_burst_backward)


# The same as operators
# --------------------------------------------------------------------------------------------------------------------


def _operator(name: str, function: Any, schema: str, mutates: tuple[str, ...] = ()) -> Any:
    return torch.library.custom_op(f"lbq::{name}", function, mutates_args=mutates, schema=schema)


BURST = _operator("burst", _burst, f"(Tensor x, {NEURON}) -> Tensor")
BURST_BACKWARD = _operator(
    "burst_backward", _burst_backward, f"(Tensor grad, Tensor x, {NEURON}, str wanted) -> (Tensor, Tensor)"
)
MOMENTS = _operator("moments", _moments, "(Tensor x) -> (Tensor, Tensor)")
TRACK_MOMENTS = _operator(
    "track_moments",
    _track_moments,
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
NORM_BURST.register_autograd(_norm_burst_grads, setup_context=_norm_burst_setup)


# What they return, without computing it
# --------------------------------------------------------------------------------------------------------------------


def _burst_fake(x: Tensor, *_neuron: Any) -> Tensor:
    return sequence_like(settled(x))


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
    if rule.surrogate.name not in SURROGATES:
        return f"the surrogate {rule.surrogate.name} is not in the kernel"
    return None


def supports_norm(norm: nn.Module) -> bool:
    """Plain BatchNorm with weights and running statistics, and no hooks that would go unheard."""
    if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return False
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    hooks = norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
    return norm.affine and norm.track_running_stats and norm.momentum is not None and not hooks


def burst(x: Tensor, constants: Constants, rule: Rule) -> Tensor:
    """Scaled outputs of the sequence `x` [T, B, ...] from rest: `reference.burst_sequence`, fused."""
    inputs = (x, *_flat(constants), rule.n_max, encode(rule))
    out: Tensor = torch.ops.lbq.burst(*inputs) if torch.compiler.is_compiling() else _Burst.apply(*inputs)  # type: ignore[no-untyped-call]
    return out


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
    return _normalised(x, norm, (*_flat(constants), rule.n_max, encode(rule)), residual, timesteps)


def norm_relu(x: Tensor, norm: nn.BatchNorm2d, one: Tensor, zero: Tensor, residual: Tensor | None = None) -> Tensor:
    """relu(BatchNorm(x) + residual) of `x` [N, C, ...], for the ANN beside which a burst network is measured."""
    neuron = (one, zero, zero, None, None, None, 1, "relu relu once 100")
    return _normalised(x, norm, neuron, None if residual is None else residual[None], timesteps=1)[0]


def _normalised(
    x: Tensor, norm: nn.BatchNorm2d, neuron: tuple[Any, ...], residual: Tensor | None, timesteps: int | None
) -> Tensor:
    compiling = torch.compiler.is_compiling()
    folded = x.flatten(0, 1) if timesteps is None else x
    count = 0
    if norm.training:
        count = folded.numel() // folded.shape[1]
        moments: Any = torch.ops.lbq.moments if compiling else _moments
        track: Any = torch.ops.lbq.track_moments if compiling else _track_moments
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


def _flat(constants: Constants) -> tuple[Tensor | None, ...]:
    """step, tail, alpha, leak, gain, scale as the operators take them; None for a leak or gain of 1."""
    step = constants.step.reshape(-1)

    def tensor(value: Tensor | float) -> Tensor | None:
        if isinstance(value, Tensor):
            return value
        return None if value == 1.0 else step.new_full((), value)

    alpha = constants.alpha if isinstance(constants.alpha, Tensor) else step.new_full((), constants.alpha)
    scale = None if constants.scale is None else constants.scale.reshape(-1).expand_as(step)
    return step, constants.tail, alpha, tensor(constants.leak), tensor(constants.gain), scale
