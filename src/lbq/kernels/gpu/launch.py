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

from lbq.kernels.gpu import tiles
from lbq.kernels.gpu.layout import WIDTH, is_dense, on_device, ordered_like, sequence_like, settled, slab_of, tile_for
from lbq.kernels.reference import AT_REST, SIGNED, Ends, Rule

PROGRAMS = 4224  # of a kernel that passes over data: many on each of a large GPU's processors, and the same everywhere
ADDING_ROWS, ADDING = 2112, 528  # of one that also adds up: all into one sum, or each its own by channel
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # a fused multiply-add would give other levels
SUMS = ("current", "hat", "step", "scale", "tail", "leak", "alpha", "gain")
TALLIED = 1024  # elements of a tile whose levels are counted,
FIELDS, BITS = 5, 6  # how many levels share a word with how many bits each,
FEWEST = 8  # and how many tiles a program adds up at least, so that its last sums cost little beside them
FMA = isinstance(tiles.burst_forward, triton.JITFunction)  # the interpreter's fused multiply-add rounds twice


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

    def given(self, *names: str) -> list[Any]:
        """Constants as kernels take them; one that is absent, which they do not look at, as the step."""
        return self.or_step(*(getattr(self, name) for name in names))

    def or_step(self, *values: Any) -> list[Any]:
        return [self.step if value is None else value for value in values]

    @property
    def by_channel(self) -> bool:
        """Whether channels have steps of their own."""
        return self.step.numel() > 1

    @property
    def variant(self) -> dict[str, bool]:
        """Which of them are there."""
        return {"STEPS": self.by_channel, "LEAK": self.leak is not None, "GAIN": self.gain is not None}


def forward(
    x: Tensor,
    timesteps: int,
    neuron: Neuron,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    before: Ends = AT_REST,
    after: Ends = AT_REST,
) -> Tensor:
    """x `[T, B, ...]`, or `[1, B, ...]` to be shown at every timestep. after: written to, laid as a timestep of x."""
    x = settled(x)
    out = sequence_like(x, timesteps)
    if out.numel() == 0:
        return out
    slab = slab_of(x.shape[1:], x.stride()[1:], norm is not None or neuron.by_channel, tile_for(timesteps))
    programs, columns, tiles_each = slab.share(PROGRAMS)
    if residual is not None:
        residual = ordered_like(residual, x)
    with on_device(x):
        tiles.burst_forward[(programs, columns)](
            x,
            x if residual is None else residual,
            out,
            *((neuron.step,) * 4 if norm is None else norm[:4]),
            *neuron.given("step", "scale", "leak", "alpha", "gain"),
            *neuron.or_step(*laid_as(x, before), *after),
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
            BEFORE=before[0] is not None,
            PENDING=before[1] is not None,
            AFTER=after[0] is not None,
            SCALE=neuron.scale is not None,
            **neuron.variant,
            **forward_constants(neuron.rule),
            LAYOUT=slab.layout,
            BR=slab.br,
            BC=slab.bc,
            **OPTIONS,
        )
    return out


def laid_as(x: Tensor, ends: Ends) -> list[Tensor | None]:
    """In the memory order of a timestep of `x`."""
    return [None if value is None else ordered_like(value[None], x) for value in ends]


def chunk(x: Tensor, neuron: Neuron, before: Ends) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs from membrane and pending reset `before` on, and both after them."""
    x = settled(x)
    v, pending = states_like(x, neuron.rule)
    after = v, pending if pending.numel() else None
    return forward(x, x.shape[0], neuron, before=before, after=after), v, pending


def states_like(x: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """An empty membrane and pending reset, the latter without elements where the rule delays none."""
    kind = decode(rule)
    v = sequence_like(x, 1, torch.float32)[0]
    return v, v.new_empty(0) if kind["DECAY"] or kind["RESET"] == "hard" else torch.empty_like(v)


def backward(
    grad: Tensor,
    x: Tensor,
    neuron: Neuron,
    wanted: Sequence[str],
    norm: Norm | None = None,
    residual: Tensor | None = None,
    shown: bool = False,
    before: Ends = AT_REST,
) -> tuple[Tensor, Tensor]:
    """The gradient of what the neuron receives, and the sums that `wanted` names, `[sums, channels]`, or `[sums, 1]` where
    nothing depends on the channel."""
    timesteps = grad.shape[0]
    x = settled(x)
    grad = ordered_like(grad, x)
    by_channel = norm is not None or neuron.by_channel
    slab = slab_of(x.shape[1:], x.stride()[1:], by_channel, tile_for(timesteps))
    out = sequence_like(x, 1 if shown else timesteps)
    width = slab.channels if by_channel else 1
    if grad.numel() == 0:
        return out, x.new_zeros((len(wanted), width), dtype=torch.float32)
    if residual is not None:
        residual = ordered_like(residual, x)
    programs, columns, tiles_each = slab.share(ADDING if by_channel else ADDING_ROWS)
    partial = x.new_empty((len(wanted), programs, width), dtype=torch.float32)
    with on_device(x):
        tiles.burst_backward[(programs, columns)](
            grad,
            x,
            x if residual is None else residual,
            out,
            partial,
            *((neuron.step,) * 4 if norm is None else norm[:4]),
            *neuron.given("step", "scale", "tail", "leak", "alpha", "gain"),
            *neuron.or_step(*laid_as(x, before)),
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
            BEFORE=before[0] is not None,
            PENDING=before[1] is not None,
            SHOWN=shown,
            SCALE=neuron.scale is not None,
            **neuron.variant,
            **decode(neuron.rule),
            **{f"SUM_{name.upper()}": wanted.index(name) if name in wanted else -1 for name in SUMS},
            WHOLE=not by_channel,
            LAYOUT=slab.layout,
            BR=slab.br,
            BC=slab.bc,
            **OPTIONS,
        )
    return out, partial.sum(1)


def norm_backward(grad: Tensor, x: Tensor, norm: Norm, totals: Tensor) -> Tensor:
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


# Counting
# --------------------------------------------------------------------------------------------------------------------


class Tally(NamedTuple):
    """How levels are counted: the grid, the numbers that the kernel takes, its tile of positions and channels."""

    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    bp: int
    bc: int


@lru_cache(maxsize=256)  # a network asks for the same few, batch after batch
def tally_of(shape: Sequence[int], stride: Sequence[int], n_max: int, programs: int) -> Tally:
    """For levels [T, B, C, positions]."""
    steps, batch, channels, positions = shape
    last = stride[2] <= stride[3]
    near, far = (triton.next_power_of_2(size) for size in ((channels, positions) if last else (positions, channels)))
    high = min(far, TALLIED // min(near, WIDTH))
    wide = min(near, TALLIED // high)
    bc, bp = (wide, high) if last else (high, wide)
    blocks, groups = -(-positions // bp), -(-n_max // FIELDS)
    total = batch * -(-channels // bc)
    each = -(-total // max(1, programs // (blocks * groups * steps)))
    each = min(max(each, FEWEST), 2**BITS - 1, total)
    numbers = (batch, channels, positions, n_max, *stride, groups, each)
    return Tally((blocks * groups, steps, -(-total // each)), numbers, bp, bc)


def tally(x: Tensor, scale: Tensor, counts: Tensor) -> None:
    """Add to `counts` [T, H * W, n_max + 1] (int64) how often each magnitude 1..n_max of `x / scale` occurs in `x`
    [T, B, C, H, W]; scale is a scalar or `[C]`. The column of zeros is left alone: it is what remains."""
    x = x.flatten(3)  # a view, where height and width lie as one
    if x.numel() == 0:
        return
    grid, numbers, bp, bc = tally_of(x.shape, x.stride(), counts.shape[2] - 1, ADDING_ROWS)
    with on_device(x):
        tiles.tally[grid](
            x, scale, counts, *numbers, SCALES=scale.dim() > 0, FIELDS=FIELDS, BITS=BITS, BP=bp, BC=bc, **OPTIONS
        )


def membranes(x: Tensor, neuron: Neuron, counts: Tensor, low: float, width: float) -> None:
    """Add to `counts` [T, bins] (int64) the histogram, in bins of `width` from `low` on, of the membrane over the step before
    emission, of a neuron that receives `x` [T, B, ...]; what lies beyond goes into the first and the last bin."""
    x = settled(x)
    if x.numel() == 0:
        return
    slab = slab_of(x.shape[1:], x.stride()[1:], neuron.by_channel, 2048)
    programs, columns, tiles_each = slab.share(PROGRAMS)
    bins = counts.shape[1]
    with on_device(x):
        tiles.membranes[(programs, columns)](
            x,
            counts,
            *neuron.given("step", "leak", "alpha", "gain", "n_max"),
            low,
            1 / width,
            bins,
            *slab[:4],
            x.stride(0),
            programs,
            tiles_each,
            T=x.shape[0],
            **neuron.variant,
            **forward_constants(neuron.rule),
            LAYOUT=slab.layout,
            BR=slab.br,
            BC=slab.bc,
            BINS=triton.next_power_of_2(bins + 1),
            **OPTIONS,
        )


# BatchNorm's statistics
# --------------------------------------------------------------------------------------------------------------------


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
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


def track_moments(
    running_mean: Tensor, running_var: Tensor, batches: Tensor, mean: Tensor, var: Tensor, momentum: float, count: int
) -> None:
    """Move BatchNorm's running statistics towards those of a batch of `count` elements by channel."""
    channels = len(mean)
    with on_device(mean):
        tiles.track[(-(-channels // 128),)](
            mean, var, running_mean, running_var, batches, momentum, count / (count - 1), channels, BC=128, **OPTIONS
        )
