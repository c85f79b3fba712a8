"""Count on the device what neurons do: how often each level is emitted, and where membranes lie.

In one pass by Triton where the fused kernel is chosen, else in plain PyTorch. Nothing here waits for a GPU in the first case.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lbq.kernels.dispatch import kernel_on
from lbq.kernels.reference import BurstState, Constants, Rule, burst_step, compute_dtype, integrated

MOST_BINS = 4095  # of a histogram in a processor's own memory


def tally(x: Tensor, scale: Tensor, counts: Tensor) -> None:
    """Add to `counts` [T, H * W, n_max + 1] (int64) how often each magnitude 1..n_max of `x / scale` occurs in `x`
    [T, B, C, H, W], by timestep and position. scale: a scalar, or `[C]`. Column 0 is not defined: it is what remains.

    x / scale must be whole numbers but for a rounding error well below 1/2.
    """
    if kernel_on(x.device.type) == "fused":
        from lbq.kernels.gpu import launch

        launch.tally(x, scale, counts)
        return
    places = torch.arange(counts.shape[1], device=x.device).reshape(x.shape[3:]) * counts.shape[2]
    spread = scale.float().reshape(-1, 1, 1)
    for step, found in zip(x, counts, strict=True):
        index = (step.float() / spread).round_().abs_().long() + places
        found += torch.bincount(index.flatten(), minlength=found.numel()).reshape(found.shape)


def membranes(x: Tensor, constants: Constants, rule: Rule, counts: Tensor, low: float, width: float) -> None:
    """Add to `counts` [T, bins] (int64) the histogram of r = U / step before emission, of a neuron that receives `x`
    [T, B, ...]. Bins are `width` wide from `low` on; the first and the last also hold what lies beyond."""
    bins = counts.shape[1]
    if kernel_on(x.device.type) == "fused":
        from lbq.kernels.gpu import launch, operators

        computed = operators.supports(x.dtype, len(x), rule, constants.thresholds is not None) is None
        if computed and bins <= MOST_BINS:
            launch.membranes(x, operators.neuron_of(constants, rule), counts, low, width)
            return
    unit = constants.step if constants.thresholds is None else constants.thresholds[0]
    for found, (before, _, _) in zip(counts, unrolled(x, constants, rule), strict=True):
        index = ((before / unit - low) / width).floor().clamp(0, bins - 1).long()
        found += torch.bincount(index.flatten(), minlength=bins)


def unrolled(x: Tensor, constants: Constants, rule: Rule) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """At every timestep of `x` [T, B, ...]: the membrane before emission, the level, the membrane after the reset."""
    state: BurstState | None = None
    for current in x.to(compute_dtype(x)).unbind(0):
        before = integrated(current, state, constants, rule)
        emission, state = burst_step(current, state, constants, rule)
        yield before, emission.level, state.v if state.pending is None else state.v - state.pending
