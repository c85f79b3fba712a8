"""Count on the device what neurons do: how often each level is emitted, and where membranes lie.

Triton counts in one pass where the fused kernel is chosen, and nothing waits for the GPU. Otherwise PyTorch counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lbq.kernels.arguments import neuron_arguments
from lbq.kernels.dispatch import kernel_on
from lbq.kernels.reference import Constants, Rule, emissions

MAX_BINS = 4095  # so many counts of a histogram fit a GPU processor's own memory


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
    for step, histogram in zip(x, counts, strict=True):
        index = (step.float() / spread).round_().abs_().long() + places
        histogram += torch.bincount(index.flatten(), minlength=histogram.numel()).reshape(histogram.shape)


def membranes(x: Tensor, constants: Constants, rule: Rule, counts: Tensor, low: float, width: float) -> None:
    """Add to `counts` [T, bins] (int64) the histogram of r = U / step before emission, of a neuron that receives `x`
    [T, B, ...]. Bins are `width` wide from `low` on; the first and the last also hold what lies beyond."""
    bins = counts.shape[1]
    if kernel_on(x.device.type) == "fused" and bins <= MAX_BINS:
        from lbq.kernels.gpu import launch, operators

        if operators.supports(x, constants, rule):
            launch.membranes(x, neuron_arguments(constants, rule), counts, low, width)
            return
    unit = constants.step if constants.thresholds is None else constants.thresholds[0]
    for histogram, (emission, _) in zip(counts, emissions(x, constants, rule), strict=True):
        index = ((emission.membrane / unit - low) / width).floor().clamp(0, bins - 1).long()
        histogram += torch.bincount(index.flatten(), minlength=bins)
