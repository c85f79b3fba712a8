"""Products of levels with levels, and gates, by the native library: the same integers as attention.py, which defines them. No
torch.

A step can be performed again (see tape.py). All arrays are channels last and contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq import native
from lbq.engine.attention import dense_products, matrices
from lbq.engine.convolution import Counts
from lbq.engine.tape import Step, address
from lbq.graph import Synapse
from lbq.graph.levels import Integers
from lbq.native import structure

ProductCall = structure(  # struct lbq_product
    int64="images heads rows columns summed width",
    pointer="left right values out left_steps right_steps values_steps out_steps counts",
    int32="left_signed right_signed values_signed is_linear by_planes isa",
)
GateCall = structure(  # struct lbq_gate
    int64="images sites channels factor_sites factor_channels",
    pointer="factor levels out counts",
    int32="factor_signed levels_signed by_planes",
)


class ProductStep(Step):
    """The product of a synapse's operands `[N, H, W, C]`, 8-bit levels: `out`, int32. planes: by bit planes."""

    def __init__(self, synapse: Synapse, operands: Sequence[Integers], planes: bool) -> None:
        assert all(x.itemsize == 1 and x.flags.c_contiguous for x in operands)
        channels, height, width = synapse.out_shape
        self.synapse, self.planes, self.images = synapse, planes, len(operands[0])
        self.out = np.empty((self.images, height, width, channels), np.int32)
        right, *values = (matrices(x, synapse.heads) for x in operands[1:])
        if synapse.keys:
            left = matrices(operands[0], synapse.heads)
        else:
            left, right = operands[0].transpose(0, 3, 1, 2), right.swapaxes(2, 3)
        # [N, heads, rows, columns of the product]
        out = self.out.transpose(0, 3, 1, 2) if not synapse.values else matrices(self.out, synapse.heads)
        _, heads, rows, summed = left.shape
        self.counted = np.zeros(5, np.int64)
        call = ProductCall(self.images, heads, rows, right.shape[2], summed, values[0].shape[3] if values else 0)
        call.left, call.right, call.out, call.counts = map(address, (left, right, out, self.counted))
        steps = [np.array(x.strides, np.int64) // x.itemsize for x in (left, right, out, *values)]
        call.left_steps, call.right_steps, call.out_steps = map(address, steps[:3])
        call.left_signed, call.right_signed = (x.dtype == np.int8 for x in (left, right))
        for x in values:
            call.values, call.values_steps, call.values_signed = address(x), address(steps[3]), x.dtype == np.int8
        call.is_linear = synapse.linear and not planes
        call.by_planes, call.isa = planes, native.ISAS[native.isa()]
        super().__init__("product", call, *operands, self.out, self.counted, *steps)

    def counts(self) -> Counts:
        if not self.planes:
            return Counts(products=self.images * dense_products(self.synapse))
        ands, added, additions, formed, active = self.counted.tolist()
        return Counts(added, formed, neurons_active=active, additions=additions, ands=ands, popcounts=ands)


class GateStep(Step):
    """A gate's levels `[N, H, W, C]`: `out`, int8 where the gate is signed, else uint8."""

    def __init__(self, factor: Integers, levels: Integers, signed: bool, planes: bool) -> None:
        assert all(x.itemsize == 1 and x.flags.c_contiguous for x in (factor, levels))
        images, height, width, channels = levels.shape
        factor_sites, factor_channels = factor.shape[1] * factor.shape[2], factor.shape[3]
        assert len(factor) == images
        assert factor_sites in (1, height * width)
        assert channels % factor_channels == 0
        self.planes = planes
        self.out: NDArray[Any] = np.empty(levels.shape, np.int8 if signed else np.uint8)
        self.counted = np.zeros(3, np.int64)
        call = GateCall(images, height * width, channels, factor_sites, factor_channels)
        call.factor, call.levels, call.out, call.counts = map(address, (factor, levels, self.out, self.counted))
        call.factor_signed, call.levels_signed = (x.dtype == np.int8 for x in (factor, levels))
        call.by_planes = planes
        super().__init__("gate", call, factor, levels, self.out, self.counted)

    def counts(self) -> Counts:
        if not self.planes:
            return Counts(products=self.out.size)
        added, formed, active = self.counted.tolist()
        return Counts(added, formed, neurons_active=active, additions=added)
