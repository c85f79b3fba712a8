"""Launches of the kernels in `tiles`: how many programs run, which variant is compiled.

Shapes alone decide block sizes and the order of partial sums: the same bytes every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lbq.graph.rules import SIGNED
from lbq.kernels.arguments import AT_REST, NeuronArguments, RuleArguments, StateArguments
from lbq.kernels.gpu.layout import WIDTH, Slab, slab_of, tile_for
from lbq.kernels.gpu.tiles import bursts
from lbq.kernels.gpu.tiles import counts as count_tiles
from lbq.kernels.gpu.tiles import moments as moment_tiles
from lbq.kernels.memory import on_device, ordered_like, sequence_like, settled

PROGRAMS = 4224  # of a kernel that passes over data: many for each processor of a large GPU, and as many on any other
SUMMING_PROGRAMS = 2112  # of a kernel that also adds everything up into one sum
CHANNEL_SUMMING_PROGRAMS = 528  # of a kernel that adds up one sum for each channel
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # a fused multiply-add would give other levels
SUMS = ("current", "hat", "step", "scale", "tail", "leak", "alpha", "gain")  # the backward kernel can add these up
TALLY_TILE = 1024  # elements of a tile whose levels are counted
FIELDS, BITS = 5, 6  # so many levels share a word of the tally, with so many bits each
LEAST_TILES = 8  # a program of the tally adds up at least so many, so that its last sums cost little beside them
FMA = isinstance(bursts.burst_forward, triton.JITFunction)  # the interpreter's fused multiply-add rounds twice


class NormArguments(NamedTuple):
    """BatchNorm as the kernels see it. elements: how many by channel its statistics are of, 0 where they are frozen."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    eps: float
    elements: int


# Constants at compile time. They are dictionaries that nobody changes, made once for each kind of neuron and layout.


@lru_cache(maxsize=1024)
def neuron_constants(rule: RuleArguments, by_channel: bool, leak: bool, gain: bool) -> dict[str, Any]:
    """Of every kernel that runs a neuron. by_channel, leak, gain: whether the neuron has them."""
    return {
        "ROUNDING": rule.rounding,
        "RESET": rule.reset,
        "DECAY": rule.decay_reset,
        "SIGNED": rule.rounding in SIGNED,
        "FMA": FMA,
        "STEPS": by_channel,
        "LEAK": leak,
        "GAIN": gain,
    }


@lru_cache(maxsize=1024)
def backward_constants(rule: RuleArguments, sums: tuple[str, ...]) -> dict[str, Any]:
    """Of the backward kernel alone. sums: those of SUMS that it adds up, in the order of its results."""
    return {
        "SURROGATE": rule.surrogate,
        "RESET_GRAD": rule.reset_grad,
        "DETACH": rule.detach_state,
        **{f"SUM_{name.upper()}": sums.index(name) if name in sums else -1 for name in SUMS},
    }


@lru_cache(maxsize=1024)
def tile_constants(layout: str, br: int, bc: int) -> dict[str, Any]:
    """Of every kernel that goes over a slab."""
    return {"LAYOUT": layout, "BR": br, "BC": bc, **OPTIONS}


# The neuron, alone or after BatchNorm


def burst_launch(
    x: Tensor,
    out: Tensor,
    timesteps: int,
    neuron: NeuronArguments,
    norm: NormArguments | None,
    residual: Tensor | None,
    before: StateArguments,
    slab: Slab,
    programs: int,
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """What the forward and the backward kernel share: grid, arguments in the order of their parameters, and constants.

    The step stands in for a tensor that is absent, which they do not read. programs: about how many are to run.
    """
    step = neuron.step
    weight_bias_mean_var, eps = ((step,) * 4, 0.0) if norm is None else (norm[:4], norm.eps)
    if residual is not None:
        residual = ordered_like(residual, x)
    v, pending = (None if value is None else ordered_like(value[None], x) for value in before)
    rows_of_programs, columns, tiles_each = slab.share(programs)
    arguments = (
        x,
        x if residual is None else residual,
        out,
        *weight_bias_mean_var,
        step,
        step if neuron.scale is None else neuron.scale,
        step if neuron.leak is None else neuron.leak,
        neuron.alpha,
        step if neuron.gain is None else neuron.gain,
        step if v is None else v,
        step if pending is None else pending,
        neuron.rule.n_max,
        eps,
        *slab[:4],
        x.stride(0) if x.shape[0] > 1 else 0,
        0 if residual is None else residual.stride(0),
        out.stride(0) if out.shape[0] > 1 else 0,
        rows_of_programs,
        tiles_each,
    )
    constants = {
        "T": timesteps,
        "NORM": norm is not None,
        "RESIDUAL": residual is not None,
        "BEFORE": v is not None,
        "PENDING": pending is not None,
        "SCALE": neuron.scale is not None,
        **neuron_constants(neuron.rule, neuron.by_channel, neuron.leak is not None, neuron.gain is not None),
        **tile_constants(slab.layout, slab.br, slab.bc),
    }
    return (rows_of_programs, columns), arguments, constants


def forward(
    x: Tensor,
    timesteps: int,
    neuron: NeuronArguments,
    norm: NormArguments | None = None,
    residual: Tensor | None = None,
    before: StateArguments = AT_REST,
    after: StateArguments = AT_REST,
    sums: Tensor | None = None,
) -> Tensor:
    """x `[T, B, ...]`, or `[1, B, ...]` to be shown at every timestep. after: written to, laid as a timestep of x. sums:
    written to, as in `reference.priced_sequence`."""
    x = settled(x)
    out = sequence_like(x, timesteps)
    if out.numel() == 0:
        if sums is not None:
            sums.zero_()
        return out
    slab = slab_of(x.shape[1:], x.stride()[1:], norm is not None or neuron.by_channel, tile_for(timesteps))
    grid, arguments, constants = burst_launch(x, out, timesteps, neuron, norm, residual, before, slab, PROGRAMS)
    emitted = neuron.step if sums is None else sums.new_empty(2, grid[0] * grid[1])
    with on_device(x):
        bursts.burst_forward[grid](
            *arguments,
            neuron.step if after.v is None else after.v,
            neuron.step if after.pending is None else after.pending,
            emitted,
            AFTER=after.v is not None,
            BITS=0 if sums is None else neuron.rule.n_max.bit_length(),
            **constants,
        )
        if sums is not None:
            torch.sum(emitted, 1, out=sums)
    return out


def states_like(x: Tensor, rule: RuleArguments) -> tuple[Tensor, Tensor]:
    """An empty membrane and pending reset, the latter without elements where the rule delays none."""
    v = sequence_like(x, 1, torch.float32)[0]
    return v, torch.empty_like(v) if rule.delayed else v.new_empty(0)


def backward(
    grad: Tensor,
    x: Tensor,
    neuron: NeuronArguments,
    sums: tuple[str, ...],
    norm: NormArguments | None = None,
    residual: Tensor | None = None,
    shown: bool = False,
    before: StateArguments = AT_REST,
    price: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of what the neuron receives, and `sums` of SUMS, `[sums, channels]`, or `[sums, 1]` where nothing depends
    on the channel. shown: x `[1, B, ...]` was shown at every timestep. price: its first number is the gradient of every |S|."""
    timesteps = grad.shape[0]
    x = settled(x)
    grad = ordered_like(grad, x)
    by_channel = norm is not None or neuron.by_channel
    slab = slab_of(x.shape[1:], x.stride()[1:], by_channel, tile_for(timesteps))
    out = sequence_like(x, 1 if shown else timesteps)
    width = slab.channels if by_channel else 1
    if grad.numel() == 0:
        return out, x.new_zeros((len(sums), width), dtype=torch.float32)
    programs = CHANNEL_SUMMING_PROGRAMS if by_channel else SUMMING_PROGRAMS
    grid, arguments, constants = burst_launch(x, out, timesteps, neuron, norm, residual, before, slab, programs)
    partial = x.new_empty((len(sums), grid[0], width), dtype=torch.float32)
    with on_device(x):
        bursts.burst_backward[grid](
            *arguments,
            grad,
            partial,
            neuron.tail,
            neuron.step if price is None else price.contiguous(),
            grad.stride(0),
            SHOWN=shown,
            WHOLE=not by_channel,
            PRICED=price is not None,
            **constants,
            **backward_constants(neuron.rule, sums),
        )
    return out, partial.sum(1)


def norm_backward(grad: Tensor, x: Tensor, norm: NormArguments, totals: Tensor) -> Tensor:
    """From the gradient of BatchNorm's output `[T, B, C, ...]` to that of its input."""
    x = settled(x)
    grad = ordered_like(grad, x)
    out = sequence_like(x)
    if out.numel() == 0:
        return out
    slab = slab_of(x.shape[1:], x.stride()[1:], True, 2048)
    programs, columns, tiles_each = slab.share(PROGRAMS // x.shape[0])
    with on_device(x):
        bursts.norm_backward[(programs, columns, x.shape[0])](
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
            **tile_constants(slab.layout, slab.br, slab.bc),
        )
    return out


# Counting


@lru_cache(maxsize=256)  # a network needs the same few, batch after batch
def tally_launch(
    shape: Sequence[int], stride: Sequence[int], n_max: int, programs: int
) -> tuple[tuple[int, int, int], tuple[int, ...], int, int]:
    """For levels [T, B, C, positions]: the grid, the kernel's numbers, and its tile of positions and channels."""
    steps, batch, channels, positions = shape
    last = stride[2] <= stride[3]
    near, far = (triton.next_power_of_2(size) for size in ((channels, positions) if last else (positions, channels)))
    high = min(far, TALLY_TILE // min(near, WIDTH))
    wide = min(near, TALLY_TILE // high)
    bc, bp = (wide, high) if last else (high, wide)
    blocks, groups = -(-positions // bp), -(-n_max // FIELDS)
    total = batch * -(-channels // bc)
    each = -(-total // max(1, programs // (blocks * groups * steps)))
    each = min(max(each, LEAST_TILES), 2**BITS - 1, total)
    numbers = (batch, channels, positions, n_max, *stride, groups, each)
    return (blocks * groups, steps, -(-total // each)), numbers, bp, bc


def tally(x: Tensor, scale: Tensor, counts: Tensor) -> None:
    """Add to `counts` [T, H * W, n_max + 1] (int64) how often each magnitude 1..n_max of `x / scale` occurs in `x`
    [T, B, C, H, W]; scale is a scalar or `[C]`. The column of zeros is left alone: it is what remains."""
    x = x.flatten(3)  # a view, where height and width lie as one
    if x.numel() == 0:
        return
    grid, numbers, bp, bc = tally_launch(x.shape, x.stride(), counts.shape[2] - 1, SUMMING_PROGRAMS)
    with on_device(x):
        count_tiles.tally[grid](
            x, scale, counts, *numbers, SCALES=scale.dim() > 0, FIELDS=FIELDS, BITS=BITS, BP=bp, BC=bc, **OPTIONS
        )


def membranes(x: Tensor, neuron: NeuronArguments, counts: Tensor, low: float, width: float) -> None:
    """Add to `counts` [T, bins] (int64) the histogram, in bins of `width` from `low` on, of the membrane over the step before
    emission, of a neuron that receives `x` [T, B, ...]; what lies beyond goes into the first and the last bin."""
    x = settled(x)
    if x.numel() == 0:
        return
    slab = slab_of(x.shape[1:], x.stride()[1:], neuron.by_channel, 2048)
    programs, columns, tiles_each = slab.share(PROGRAMS)
    bins = counts.shape[1]
    has_leak, has_gain = neuron.leak is not None, neuron.gain is not None
    with on_device(x):
        count_tiles.membranes[(programs, columns)](
            x,
            counts,
            neuron.step,
            neuron.leak if has_leak else neuron.step,
            neuron.alpha,
            neuron.gain if has_gain else neuron.step,
            neuron.rule.n_max,
            low,
            1 / width,
            bins,
            *slab[:4],
            x.stride(0),
            programs,
            tiles_each,
            T=x.shape[0],
            BINS=triton.next_power_of_2(bins + 1),
            **neuron_constants(neuron.rule, neuron.by_channel, has_leak, has_gain),
            **tile_constants(slab.layout, slab.br, slab.bc),
        )


# BatchNorm's statistics


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance by channel of `x` [N, C, ...], float32."""
    x = settled(x, outer=0)
    slab = slab_of(x.shape, x.stride(), True, 4096)
    programs, columns, tiles_each = slab.share(CHANNEL_SUMMING_PROGRAMS)
    partial = x.new_empty((2, programs, slab.channels), dtype=torch.float32)
    mean, var = (x.new_empty(slab.channels, dtype=torch.float32) for _ in range(2))
    with on_device(x):
        moment_tiles.moments_partial[(programs, columns)](
            x, partial, *slab[:4], programs, tiles_each, **tile_constants(slab.layout, slab.br, slab.bc)
        )
        moment_tiles.moments_total[(-(-slab.channels // 8),)](
            partial, mean, var, slab.rows, slab.channels, programs, tiles_each, slab.br, BP=128, BC=8, **OPTIONS
        )
    return mean, var


def track_moments(
    running_mean: Tensor, running_var: Tensor, batches: Tensor, mean: Tensor, var: Tensor, momentum: float, count: int
) -> None:
    """Move BatchNorm's running statistics towards those of a batch of `count` elements by channel."""
    channels = len(mean)
    with on_device(mean):
        moment_tiles.track[(-(-channels // 128),)](
            mean, var, running_mean, running_var, batches, momentum, count / (count - 1), channels, BC=128, **OPTIONS
        )
