"""The burst neuron on a CPU: a whole sequence in one pass of C forward and one backward, float32.

It computes what `reference` defines: the same levels bit for bit, and its gradients up to the rounding of sums, which
here run in double and in an order that depends on the shape alone. Only x, and a chunk's state before it, is kept for the
backward pass, which recomputes the membrane; a second derivative is refused (the reference has it).

The C code sees a sequence as `[T, outer, channels, inner]`, each timestep a dense slab. Any dense layout of `[B, ...]`
(contiguous, channels_last) is only read that way, also where all timesteps are the same memory.

In eager mode a small autograd function calls C directly; under torch.compile the same calls are the operators
lbq::burst_cpu, lbq::burst_chunk_cpu and lbq::burst_cpu_backward, which the compiler can place in its graph.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lbq import native
from lbq.errors import LbqError
from lbq.kernels.gpu.layout import is_dense
from lbq.kernels.reference import AT_REST, BurstState, Constants, Rule, check_plain
from lbq.kernels.surrogate import SURROGATES

ROUNDINGS = {"floor": 0, "strict": 1, "round": 2, "trunc": 3, "half": 4}  # the enums of burst_rules.h
RESETS = {"once": 0, "level": 1, "hard": 2}
CURVES = {
    "relsg_et": 0,
    "box": 1,
    "box_et": 2,
    "clip": 3,
    "arctan": 4,
    "rectangular": 5,
    "sigmoid": 6,
    "triangle": 7,
}
LARGEST_LEVEL = 2**22  # levels and thresholds are exact in float32, and so is half a step between them


class _Call(ctypes.Structure):
    """struct lbq_burst of native.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("timesteps", "outer", "channels", "inner", "x_time")),
        *((name, ctypes.c_void_p) for name in ("x", "step", "scale", "out", "grad")),
        *((name, ctypes.c_void_p) for name in ("by_step", "by_scale", "by_scalars")),
        *((name, ctypes.c_void_p) for name in ("v", "pending", "v_after", "pending_after")),
        *((name, ctypes.c_float) for name in ("tail", "leak", "alpha", "gain")),
        *((name, ctypes.c_int32) for name in ("n_max", "rounding", "reset", "surrogate")),
        *((name, ctypes.c_int32) for name in ("decay_reset", "reset_grad", "detach_state")),
        *((name, ctypes.c_int32) for name in ("need_tail", "need_scalars", "threads", "isa")),
    )


# Which calls it can take
# ---------------------------------------------------------------------------------------------------------------------


def _missing() -> str | None:
    """Why there is no library; a constant while torch.compile traces."""
    return None if native.library() is not None else native.report().reason


# torch.compiler.assume_constant_result sets this mark, but imports the whole compiler to do so
_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def supports(x: Tensor, constants: Constants, rule: Rule) -> str | None:
    """None where this kernel can run the call, else the reason why not."""
    if x.device.type != "cpu":
        return f"x is on {x.device.type}"
    if x.dtype != torch.float32:
        return f"x is {str(x.dtype).removeprefix('torch.')}, not float32"
    if constants.thresholds is not None:
        return "a ladder of thresholds"
    if x.shape[0] == 0:
        return "no timesteps"
    if rule.n_max > LARGEST_LEVEL:
        return f"n_max is above {LARGEST_LEVEL}"
    if rule.surrogate.name not in CURVES or SURROGATES[rule.surrogate.name] is not rule.surrogate:
        return f"the surrogate {rule.surrogate.name!r} is not in the kernel"
    for name, value in zip(Constants._fields, constants, strict=True):
        if isinstance(value, Tensor):
            if value.dtype != torch.float32 or value.device.type != "cpu":
                return f"{name} is not float32 on the CPU"
            if value.numel() != 1 and name not in ("step", "scale"):
                return f"{name} is not one number"
    if _channel_dim(x, constants) is None:
        return "step and scale vary over more than one dimension"
    return _missing()


def _channel_dim(x: Tensor, constants: Constants) -> int | None:
    """The dimension of x along which step or scale vary; 0 where they do not, None where there are several."""
    found = 0
    for value in (constants.step, constants.scale):
        if value is None or value.numel() == 1:
            continue
        first = x.dim() - value.dim()
        wide = [first + i for i, size in enumerate(value.shape) if size != 1]
        if len(wide) != 1 or wide[0] < 1 or x.shape[wide[0]] != value.numel() or found not in (0, wide[0]):
            return None
        found = wide[0]
    return found


# Seen as [T, outer, channels, inner]
# ---------------------------------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """order: the dimensions, time first, in which a timestep is contiguous; dense: whether x is so already."""

    order: tuple[int, ...]
    dense: bool
    outer: int
    channels: int
    inner: int


def _find_layout(shape: tuple[int, ...], strides: tuple[int, ...], channel: int) -> _Layout:
    order, dense = tuple(range(len(shape))), is_dense(shape[1:], strides[1:])
    if dense:
        order = (0, *sorted(order[1:], key=lambda d: (-strides[d] if shape[d] != 1 else -math.inf, d)))
    sizes = [shape[d] for d in order]
    if channel == 0:
        return _Layout(order, dense, 1, 1, math.prod(sizes[1:]))
    at = order.index(channel)
    return _Layout(order, dense, math.prod(sizes[1:at]), shape[channel], math.prod(sizes[at + 1 :]))


_layout = lru_cache(maxsize=1024)(_find_layout)


def _like(x: Tensor, order: tuple[int, ...]) -> Tensor:
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device)


def _in_order(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """x with its dimensions in that order in memory, without gaps: itself where they are."""
    out = _like(x, order)
    return x if x.stride() == out.stride() else out.copy_(x)


def _states_like(x: Tensor, order: tuple[int, ...], rule: Any) -> tuple[Tensor, Tensor]:
    """An empty membrane and pending reset, the latter without elements where the rule delays none."""
    _, _, reset, _, decay_reset, *_ = rule
    v = _like(x[:1], order)[0]
    return v, x.new_empty(0) if decay_reset or reset == RESETS["hard"] else torch.empty_like(v)


# Calls into C
# ---------------------------------------------------------------------------------------------------------------------


def _numbers(rule: Rule) -> tuple[int, int, int, int, bool, bool, bool]:
    """n_max, rounding, reset, surrogate, decay_reset, reset_grad, detach_state."""
    kinds = ROUNDINGS[rule.rounding], RESETS[rule.reset], CURVES[rule.surrogate.name]
    return rule.n_max, *kinds, rule.decay_reset, rule.reset_grad, rule.detach_state


def _call(
    x: Tensor, layout: _Layout, step: Tensor, scale: Tensor | None, scalars: tuple[float, ...], rule: Any
) -> tuple[ctypes.CDLL, _Call]:
    library = native.library()
    if library is None:
        raise LbqError(f"lbq::burst_cpu needs the native library: {native.report().reason}")
    call = _Call(x.shape[0], layout.outer, layout.channels, layout.inner, x.stride(0))
    call.x, call.step = x.data_ptr(), step.data_ptr()
    call.scale = None if scale is None else scale.data_ptr()
    call.tail, call.leak, call.alpha, call.gain = scalars
    call.n_max, call.rounding, call.reset, call.surrogate, call.decay_reset, call.reset_grad, call.detach_state = rule
    call.threads, call.isa = torch.get_num_threads(), native.ISAS[native.isa()]
    return library, call


def _forward(
    x: Tensor,
    step: Tensor,
    scale: Tensor | None,
    scalars: tuple[float, ...],
    rule: Any,
    channel: int,
    before: Sequence[Tensor | None] = AT_REST,
    after: Sequence[Tensor | None] = AT_REST,
) -> Tensor:
    """Scaled outputs. before, after: membrane and pending reset; those after are written to, laid as a timestep of x."""
    layout = _layout(x.shape, x.stride(), channel)
    out = _like(x, layout.order)
    x = x if layout.dense else x.contiguous()
    v, pending = (None if value is None else _in_order(value[None], layout.order) for value in before)
    library, call = _call(x, layout, step, scale, scalars, rule)
    call.out = out.data_ptr()
    call.v, call.pending = _address(v), _address(pending)
    call.v_after, call.pending_after = map(_address, after)
    if library.lbq_burst_forward(ctypes.byref(call)):
        raise MemoryError("no memory left for the burst neuron")
    return out


def _chunk(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same of `_forward`'s arguments up to `before`, with the membrane and the pending reset after it."""
    step, scale, scalars, rule, channel, before = rest
    after = _states_like(x, _layout(x.shape, x.stride(), channel).order, rule)
    return _forward(x, step, scale, scalars, rule, channel, before, after), *after


def _address(value: Tensor | None) -> int | None:
    return value.data_ptr() if value is not None and value.numel() else None


def _backward(
    grad: Tensor,
    x: Tensor,
    step: Tensor,
    scale: Tensor | None,
    scalars: tuple[float, ...],
    rule: Any,
    channel: int,
    need: tuple[bool, bool, bool],
    before: Sequence[Tensor | None] = AT_REST,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x (empty where not needed), of step and scale in their shapes, and of tail, leak, alpha, gain.

    need: of x; of the tail; of leak, alpha or gain. before: membrane and pending reset, constants."""
    layout = _layout(x.shape, x.stride(), channel)
    x, grad = x if layout.dense else x.contiguous(), _in_order(grad, layout.order)
    by_x = _like(x, layout.order) if need[0] else x.new_empty(0)
    by_step, by_scale = torch.empty_like(step), torch.empty_like(step if scale is None else scale)
    by_scalars = x.new_empty(4)
    v, pending = (None if value is None else _in_order(value[None], layout.order) for value in before)
    library, call = _call(x, layout, step, scale, scalars, rule)
    call.v, call.pending = _address(v), _address(pending)
    call.grad, call.out = grad.data_ptr(), by_x.data_ptr() if need[0] else None
    call.by_step, call.by_scale, call.by_scalars = by_step.data_ptr(), by_scale.data_ptr(), by_scalars.data_ptr()
    call.need_tail, call.need_scalars = need[1:]
    if library.lbq_burst_backward(ctypes.byref(call)):
        raise MemoryError("no memory left for the burst neuron")
    return by_x, by_step, by_scale, by_scalars


class _Burst(torch.autograd.Function):
    """x, step, scale, tail, leak, alpha, gain, rule, channel dimension; for a chunk then membrane and pending reset before,
    and both after behind the outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, scale: Tensor | None, *rest: Any) -> Any:
        scalars, ctx.rule, ctx.channel, before = rest[:4], rest[4], rest[5], rest[6:]
        ctx.scalars = tuple(v.item() if isinstance(v, Tensor) else v for v in scalars)
        ctx.save_for_backward(x, step, scale, *before)
        if not before:
            return _forward(x, step, scale, ctx.scalars, ctx.rule, ctx.channel)
        found = _chunk(x, step, scale, ctx.scalars, ctx.rule, ctx.channel, before)
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # as under create_graph=True
            raise NotImplementedError("the native neuron kernel has no second derivative: set LBQ_KERNEL=reference")
        check_plain(grad)
        x, step, scale, *before = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = needs[0], needs[3], any(needs[4:7])
        found = _backward(grad, x, step, scale, ctx.scalars, ctx.rule, ctx.channel, wanted, before or AT_REST)
        return *_handed_out(found, needs), *[None] * (len(needs) - 7)


def _handed_out(found: tuple[Tensor, Tensor, Tensor, Tensor], needs: tuple[bool, ...]) -> list[Tensor | None]:
    """Gradients in the order of the arguments x, step, scale, tail, leak, alpha, gain; None where not needed."""
    *tensors, scalars = found
    each = [*tensors, *(scalars.unbind() if any(needs[3:7]) else [None] * 4)]
    return [value if need else None for value, need in zip(each, needs, strict=False)]


def _arguments(x: Tensor, constants: Constants, rule: Rule, compiling: bool) -> list[Any]:
    """As the operators take them where `compiling`, else as the autograd function does."""
    step, scale = constants.step, constants.scale
    scalars = constants.tail, constants.leak, constants.alpha, constants.gain
    channel = _channel_dim(x, constants)
    assert channel is not None
    if scale is not None and scale.numel() != step.numel():  # both as wide as the channels, shaped as the wider
        step, scale = step.expand(max(step, scale, key=Tensor.numel).shape), scale
        scale = scale.expand(step.shape)
    step = step.contiguous()
    scale = None if scale is None else scale.contiguous()
    if compiling:
        tensors = [v.reshape(()) if isinstance(v, Tensor) else x.new_full((), v) for v in scalars]
        return [x, step, scale, *tensors, *_numbers(rule), channel]
    return [x, step, scale, *scalars, _numbers(rule), channel]


def burst_sequence(x: Tensor, constants: Constants, rule: Rule) -> Tensor:
    """Scaled outputs of a whole sequence of currents `x` [T, B, ...] from rest; only where `supports` says None."""
    compiling = torch.compiler.is_compiling()
    run: Any = torch.ops.lbq.burst_cpu if compiling else _Burst.apply
    out: Tensor = run(*_arguments(x, constants, rule, compiling))
    return out


def burst_chunk(x: Tensor, constants: Constants, rule: Rule, state: BurstState | None) -> tuple[Tensor, BurstState]:
    """The same from `state` on (None: at rest), in which membrane and pending reset are like a timestep of x; and the state
    after it, of which gradients know nothing."""
    compiling = torch.compiler.is_compiling()
    run: Any = torch.ops.lbq.burst_chunk_cpu if compiling else _Burst.apply
    out, v, pending = run(*_arguments(x, constants, rule, compiling), *(state or AT_REST))
    return out, BurstState(v, pending if rule.delayed else None)


# The same as operators
# ---------------------------------------------------------------------------------------------------------------------

_RULE = "int n_max, int rounding, int reset, int surrogate, bool decay_reset, bool reset_grad, bool detach_state"
_ARGUMENTS = (
    f"Tensor x, Tensor step, Tensor? scale, Tensor tail, Tensor leak, Tensor alpha, Tensor gain, {_RULE}, int channel"
)
_library = torch.library.Library("lbq", "DEF")
_library.define(f"burst_cpu({_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_STATE = "Tensor? v, Tensor? pending"
_library.define(
    f"burst_chunk_cpu({_ARGUMENTS}, {_STATE}) -> (Tensor, Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.define(
    f"burst_cpu_backward(Tensor grad, {_ARGUMENTS}, {_STATE}, bool need_x, bool need_tail, bool need_scalars)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_library, "burst_cpu", "CPU")
def _forward_op(x: Tensor, step: Tensor, scale: Tensor | None, *rest: Any) -> Tensor:
    return _forward(x, step, scale, tuple(v.item() for v in rest[:4]), rest[4:11], rest[11])


@torch.library.impl(_library, "burst_chunk_cpu", "CPU")
def _chunk_op(x: Tensor, step: Tensor, scale: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _chunk(x, step, scale, tuple(v.item() for v in rest[:4]), rest[4:11], rest[11], rest[12:])


@torch.library.impl(_library, "burst_cpu_backward", "CPU")
def _backward_op(grad: Tensor, x: Tensor, step: Tensor, scale: Tensor | None, *rest: Any) -> Any:
    scalars, before, need = tuple(v.item() for v in rest[:4]), rest[12:14], rest[14:]
    return _backward(grad, x, step, scale, scalars, rest[4:11], rest[11], need, before)


@torch.library.register_fake("lbq::burst_cpu", lib=_library)  # type: ignore[untyped-decorator]
def _forward_fake(x: Tensor, *rest: Any) -> Tensor:
    return _like(x, _find_layout(x.shape, x.stride(), rest[-1]).order)


@torch.library.register_fake("lbq::burst_chunk_cpu", lib=_library)  # type: ignore[untyped-decorator]
def _chunk_fake(x: Tensor, _step: Tensor, _scale: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    order = _find_layout(x.shape, x.stride(), rest[11]).order
    return _like(x, order), *_states_like(x, order, rest[4:11])


@torch.library.register_fake("lbq::burst_cpu_backward", lib=_library)  # type: ignore[untyped-decorator]
def _backward_fake(_grad: Tensor, x: Tensor, step: Tensor, scale: Tensor | None, *rest: Any) -> Any:
    by_x = _like(x, _find_layout(x.shape, x.stride(), rest[11]).order) if rest[14] else x.new_empty(0)
    return by_x, torch.empty_like(step), torch.empty_like(step if scale is None else scale), x.new_empty(4)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7], *inputs[15:])
    ctx.rest = inputs[7:15]
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
    needs, saved = ctx.needs_input_grad, ctx.saved_tensors
    wanted = needs[0], needs[3], any(needs[4:7])
    found = torch.ops.lbq.burst_cpu_backward(grad, *saved[:7], *ctx.rest, *(saved[7:] or AT_REST), *wanted)
    return *_handed_out(found, needs), *[None] * (len(needs) - 7)


for _name in ("lbq::burst_cpu", "lbq::burst_chunk_cpu"):
    torch.library.register_autograd(_name, _gradients, setup_context=_keep, lib=_library)
