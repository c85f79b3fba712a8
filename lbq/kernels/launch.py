"""Launches of the kernels in `tiles`: how tensors lie in memory, how many programs run, which variant is compiled.

Shapes alone decide block sizes and the order of partial sums: the same bytes every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lbq.kernels import tiles
from lbq.kernels.reference import SIGNED, Rule

PROGRAMS = 4224  # of a kernel that passes over data: many on each of a large GPU's processors, and the same everywhere
ADDING_ROWS, ADDING = 2112, 528  # of one that also adds up: all into one sum, or each its own by channel
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # a fused multiply-add would give other levels
SUMS = ("current", "hat", "step", "scale", "tail", "leak", "alpha", "gain")
WIDTH = 128  # columns of a tile, and length of the rows that a slab is cut into where channels do not matter
TALLIED = 1024  # elements of a tile whose levels are counted,
FIELDS, BITS = 5, 6  # how many levels share a word with how many bits each,
FEWEST = 8  # and how many tiles a program adds up at least, so that its last sums cost little beside them
FMA = isinstance(tiles.burst_forward, triton.JITFunction)  # the interpreter's fused multiply-add rounds twice


# Layouts
# --------------------------------------------------------------------------------------------------------------------


class Slab(NamedTuple):
    """How kernels go over one dense timestep (see `tiles.slab`): in tiles of br rows and bc columns."""

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


def forward(
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


def backward(
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
    many = neuron.step.numel() > 1
    slab = slab_of(x.shape[1:], x.stride()[1:], many, 2048)
    programs, columns, tiles_each = slab.share(PROGRAMS)
    bins = counts.shape[1]
    absent = neuron.step
    with on_device(x):
        tiles.membranes[(programs, columns)](
            x,
            counts,
            neuron.step,
            absent if neuron.leak is None else neuron.leak,
            neuron.alpha,
            absent if neuron.gain is None else neuron.gain,
            neuron.n_max,
            low,
            1 / width,
            bins,
            *slab[:4],
            x.stride(0),
            programs,
            tiles_each,
            T=x.shape[0],
            STEPS=many,
            LEAK=neuron.leak is not None,
            GAIN=neuron.gain is not None,
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
