"""The burst neuron on a CPU: a whole sequence in one pass of C forward and one backward, float32 or bfloat16.

It computes what `reference` defines: levels bit for bit, gradients up to the rounding of sums, which here run in double and
in an order that depends on the shape alone. The backward pass recomputes the membrane from x; it cannot be differentiated.

C sees a sequence as `[T, outer, channels, inner]`, each timestep a dense slab. Every dense layout of `[B, ...]`
(contiguous, channels_last) can be read that way, also where all timesteps are the same memory.
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
from lbq.kernels.arguments import AT_REST, NeuronArguments, StateArguments, neuron_arguments
from lbq.kernels.differentiable import DifferentiableKernel
from lbq.kernels.memory import is_dense, shaped_like
from lbq.kernels.reference import LARGEST_LEVEL, BurstState, Constants, Rule
from lbq.kernels.surrogate import SURROGATES

ROUNDINGS: dict[Any, int] = {"floor": 0, "strict": 1, "round": 2, "trunc": 3, "half": 4}  # enum lbq_rounding
RESETS: dict[Any, int] = {"once": 0, "level": 1, "hard": 2}  # enum lbq_reset
SCALARS = ("tail", "leak", "alpha", "gain")  # in the order of their gradients
DTYPES = (torch.float32, torch.bfloat16)  # of currents, outputs and their gradients; all else is float32


BurstCall = native.structure(  # struct lbq_burst
    int64="timesteps outer channels inner x_time",
    pointer="x step scale out grad by_step by_scale by_scalars v pending v_after pending_after "
    "by_level price_at tail_at leak_at alpha_at gain_at",
    float="tail leak alpha gain",
    int32="n_max rounding reset surrogate decay_reset reset_grad detach_state need_tail need_scalars bfloat16 threads isa",
)


# Which calls it can take


def _library_exists() -> bool:
    """A constant while torch.compile traces."""
    return native.library() is not None


# torch.compiler.assume_constant_result sets this mark, but imports the whole compiler to do so
_library_exists._dynamo_marked_constant = True  # type: ignore[attr-defined]


def supports(x: Tensor, constants: Constants, rule: Rule) -> bool:
    """Whether this kernel can run the call. It knows no ladder of thresholds, and computes in float32."""
    if x.device.type != "cpu" or x.dtype not in DTYPES or x.shape[0] == 0 or constants.thresholds is not None:
        return False
    if rule.n_max > LARGEST_LEVEL or not rule.surrogate.in_kernels:
        return False
    for name, value in zip(Constants._fields, constants, strict=True):
        if isinstance(value, Tensor):
            if value.dtype != torch.float32 or value.device.type != "cpu":
                return False
            if value.numel() != 1 and name not in ("step", "scale"):
                return False
    return _channel_dim(x, constants) is not None and _library_exists()


def _channel_dim(x: Tensor, constants: Constants) -> int | None:
    """The dimension of x along which step or scale vary; 0 where they do not, None where there are several."""
    channel = 0
    for value in (constants.step, constants.scale):
        if value is None or value.numel() == 1:
            continue
        first = x.dim() - value.dim()
        varying = [first + i for i, size in enumerate(value.shape) if size != 1]
        if len(varying) != 1 or varying[0] < 1 or x.shape[varying[0]] != value.numel():
            return None
        if channel not in (0, varying[0]):
            return None
        channel = varying[0]
    return channel


# Seen as [T, outer, channels, inner]


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


def _like(x: Tensor, order: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_permuted(x.shape, order, dtype=dtype or x.dtype, device=x.device)


def _in_order(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """x with its dimensions in that order in memory, without gaps: itself where they are."""
    out = _like(x, order)
    return x if x.stride() == out.stride() else out.copy_(x)


# Calls into C


class Burst(NamedTuple):
    """What this kernel takes: currents `x` [T, B, ...], the neuron, the state before the first timestep, and the dimension
    of x along which step and scale vary (0: none)."""

    x: Tensor
    neuron: NeuronArguments
    before: StateArguments
    channel: int


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _call(inputs: Burst, layout: _Layout) -> tuple[ctypes.CDLL, ctypes.Structure]:
    """The library, and a call of it in which outputs are still to be set."""
    library = native.library()
    if library is None:
        raise LbqError(f"lbq::burst_cpu needs the native library: {native.report().reason}")
    neuron, rule = inputs.neuron, inputs.neuron.rule
    x = inputs.x if layout.dense else inputs.x.contiguous()
    v, pending = (None if state is None else _in_order(state[None], layout.order) for state in inputs.before)
    call = BurstCall(x.shape[0], layout.outer, layout.channels, layout.inner, x.stride(0), x.data_ptr())
    call.step, call.scale, call.v, call.pending = _at(neuron.step), _at(neuron.scale), _at(v), _at(pending)
    call.tail_at, call.alpha_at = _at(neuron.tail), _at(neuron.alpha)
    call.leak_at, call.gain_at = _at(neuron.leak), _at(neuron.gain)
    call.in_memory = x, v, pending  # for as long as the call
    call.n_max, call.surrogate = rule.n_max, SURROGATES[rule.surrogate].code
    call.rounding, call.reset = ROUNDINGS[rule.rounding], RESETS[rule.reset]
    call.decay_reset, call.reset_grad, call.detach_state = rule.decay_reset, rule.reset_grad, rule.detach_state
    call.bfloat16 = x.dtype == torch.bfloat16
    call.threads, call.isa = torch.get_num_threads(), native.ISAS[native.isa()]
    return library, call


def _forward(inputs: Burst, after: StateArguments = AT_REST, sums: Tensor | None = None) -> Tensor:
    """Scaled outputs; `after` is written to, laid as a timestep of x, and `sums` as in `reference.priced_sequence`."""
    layout = _layout(inputs.x.shape, inputs.x.stride(), inputs.channel)
    out = _like(inputs.x, layout.order)
    library, call = _call(inputs, layout)
    call.out, call.by_level = _at(out), _at(sums)
    call.v_after, call.pending_after = _at(after.v), _at(after.pending)
    if library.lbq_burst_forward(ctypes.byref(call)):
        raise MemoryError("no memory left for the burst neuron")
    return out


def _states_like(inputs: Burst, order: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """An empty membrane and pending reset, the latter without elements where the rule delays none."""
    v = _like(inputs.x[:1], order, torch.float32)[0]
    return v, torch.empty_like(v) if inputs.neuron.rule.delayed else v.new_empty(0)


def _results_like(
    inputs: Burst, order: tuple[int, ...], targets: Sequence[str]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the backward pass returns, empty."""
    x, step, scale = inputs.x, inputs.neuron.step, inputs.neuron.scale
    by_x = _like(x, order) if "x" in targets else x.new_empty(0)
    by_scale = torch.empty_like(step if scale is None else scale)
    return by_x, torch.empty_like(step), by_scale, step.new_empty(len(SCALARS))


def _sums(inputs: Burst) -> Tensor:
    return inputs.x.new_empty(2, dtype=torch.float32)


# As PyTorch's operators


def _order(inputs: Burst) -> tuple[int, ...]:
    """The dimensions of x in the order of the results' memory, also where sizes are symbols."""
    return _find_layout(inputs.x.shape, inputs.x.stride(), inputs.channel).order


class BurstKernel(DifferentiableKernel[Burst]):
    """Scaled outputs."""

    name, inputs, results, no_create_graph = "burst_cpu", Burst, 4, True

    def forward(self, inputs: Burst) -> Any:
        return _forward(inputs)

    def forward_fake(self, inputs: Burst) -> Any:
        return _like(inputs.x, _order(inputs))

    def backward(
        self, inputs: Burst, grads: Sequence[Tensor], targets: Sequence[str]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of x (empty where it is no target), of step and scale in their shapes, and of tail, leak, alpha, gain."""
        layout = _layout(inputs.x.shape, inputs.x.stride(), inputs.channel)
        grad = _in_order(grads[0], layout.order)
        by_x, by_step, by_scale, by_scalars = results = _results_like(inputs, layout.order, targets)
        library, call = _call(inputs, layout)
        call.grad, call.out = _at(grad), _at(by_x) if "x" in targets else None
        call.by_step, call.by_scale, call.by_scalars = _at(by_step), _at(by_scale), _at(by_scalars)
        call.need_tail = "tail" in targets
        call.need_scalars = "leak" in targets or "alpha" in targets or "gain" in targets
        if len(grads) > 1:
            price = grads[1].contiguous()
            call.price_at = price.data_ptr()
        if library.lbq_burst_backward(ctypes.byref(call)):
            raise MemoryError("no memory left for the burst neuron")
        return results

    def backward_fake(self, inputs: Burst, targets: Sequence[str]) -> tuple[Tensor, ...]:
        return _results_like(inputs, _order(inputs), targets)

    def gradients(self, inputs: Burst, results: Sequence[Tensor], targets: Sequence[str]) -> dict[str, Tensor]:
        """By the names of the inputs."""
        by_x, by_step, by_scale, by_scalars = results
        by_name = {"x": by_x, "step": by_step, "scale": by_scale}
        for name in targets:
            if name in SCALARS:
                by_name[name] = shaped_like(by_scalars[SCALARS.index(name)], getattr(inputs.neuron, name))
        return {name: by_name[name] for name in targets}


class ChunkKernel(BurstKernel):
    """Scaled outputs, and membrane and pending reset after them."""

    name, outputs, states = "burst_chunk_cpu", 3, 2

    def forward(self, inputs: Burst) -> tuple[Tensor, Tensor, Tensor]:
        layout = _layout(inputs.x.shape, inputs.x.stride(), inputs.channel)
        v, pending = _states_like(inputs, layout.order)
        return _forward(inputs, StateArguments(v, pending)), v, pending

    def forward_fake(self, inputs: Burst) -> tuple[Tensor, Tensor, Tensor]:
        order = _order(inputs)
        return _like(inputs.x, order), *_states_like(inputs, order)


class PricedKernel(BurstKernel):
    """Scaled outputs, and the sums of `reference.priced_sequence`."""

    name, outputs = "burst_priced_cpu", 2

    def forward(self, inputs: Burst) -> tuple[Tensor, Tensor]:
        sums = _sums(inputs)
        return _forward(inputs, sums=sums), sums

    def forward_fake(self, inputs: Burst) -> tuple[Tensor, Tensor]:
        return _like(inputs.x, _order(inputs)), _sums(inputs)


BURST, BURST_CHUNK, BURST_PRICED = BurstKernel(), ChunkKernel(), PricedKernel()


def burst(x: Tensor, constants: Constants, rule: Rule) -> Tensor:
    """Scaled outputs of a whole sequence of currents `x` [T, B, ...] from rest; only where `supports` holds."""
    out: Tensor = BURST(inputs_of(x, constants, rule))
    return out


def burst_priced(x: Tensor, constants: Constants, rule: Rule) -> tuple[Tensor, Tensor]:
    """The same, and the sums of `reference.priced_sequence`."""
    out, sums = BURST_PRICED(inputs_of(x, constants, rule))
    return out, sums


def burst_chunk(x: Tensor, constants: Constants, rule: Rule, state: BurstState | None) -> tuple[Tensor, BurstState]:
    """Scaled outputs from `state` on (None: at rest), in which membrane and pending reset are like a timestep of x; and the
    state after them, of which gradients know nothing."""
    before = AT_REST if state is None else StateArguments(state.v, state.pending)
    out, v, pending = BURST_CHUNK(inputs_of(x, constants, rule, before))
    return out, BurstState(v, pending if rule.delayed else None)


def inputs_of(x: Tensor, constants: Constants, rule: Rule, before: StateArguments = AT_REST) -> Burst:
    channel = _channel_dim(x, constants)
    assert channel is not None
    return Burst(x, neuron_arguments(constants, rule), before, channel)
