"""The Triton kernels. Names in capitals are compile-time constants. Triton reads this source, so types are given to those
alone, and branches on constants stay statements: what is not taken is not compiled."""

from lbq.kernels.gpu.tiles.bursts import burst_backward, burst_forward, norm_backward
from lbq.kernels.gpu.tiles.counts import membranes, tally
from lbq.kernels.gpu.tiles.moments import moments_partial, moments_total, track

__all__ = [
    "burst_backward",
    "burst_forward",
    "membranes",
    "moments_partial",
    "moments_total",
    "norm_backward",
    "tally",
    "track",
]
