"""Convolutions that those of convolution.py are not made for, by the native library: with groups or dilation, or with so many
weights or pixels that their numbers do not fit. Called alike, counted alike. No torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq import native
from lbq.engine.convolution import Backend, Conv, CountedStep, Counts, Method, check_names, plane_counts
from lbq.engine.tape import address
from lbq.graph.levels import row_sums

WIDEST = 16  # LBQ_WIDEST: weights that the library may read behind the last

GeneralCall = native.structure(  # struct lbq_general
    int64="batch height width inputs out_height out_width outputs kh kw stride_y stride_x pad_y pad_x "
    "dilation_y dilation_x groups",
    pointer="levels out weights counts",
    int32="planes is_signed by_planes isa",
)


class GeneralStep(CountedStep):
    """One of a GeneralConv."""

    def __init__(
        self,
        conv: GeneralConv,
        levels: NDArray[Any],
        out: NDArray[np.int32],
        largest: int,
        method: Method,
        backend: Backend,
    ) -> None:
        self.out, self.method, self.backend, self.counted = out, method, backend, np.zeros(5, np.int64)
        sizes = conv.kh, conv.kw, *conv.stride, *conv.padding, *conv.dilation, conv.groups
        call = GeneralCall(*levels.shape, *out.shape[1:], *sizes)
        call.levels, call.out, call.weights, call.counts = map(address, (levels, out, conv.rows, self.counted))
        call.planes, call.is_signed = largest.bit_length(), levels.dtype == np.int8
        call.by_planes, call.isa = method == "bitplane", native.ISAS[native.isa()]
        super().__init__("general", call, levels, out, self.counted, conv.rows)

    def counts(self) -> Counts:
        if self.method == "dense":
            return Counts()
        return plane_counts(self.counted, self.backend, (self.call.planes - 1) * self.out.size)


class GeneralConv(Conv):
    """One convolution of weights `[O, I / groups, kh, kw]`, int8 or int16, ready to run on many inputs."""

    def __init__(
        self,
        weights: NDArray[Any],
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int] = (0, 0),
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
    ) -> None:
        if weights.dtype not in (np.int8, np.int16) or weights.ndim != 4 or 0 in weights.shape:
            raise ValueError(
                f"weights must be int8 or int16 [O, I / groups, kh, kw], got {weights.dtype} {list(weights.shape)}"
            )
        if min(*stride, *dilation, groups) < 1 or min(padding) < 0 or len(weights) % groups:
            raise ValueError(
                f"stride, dilation and groups must be positive, padding not negative and outputs a multiple of groups, got "
                f"{stride}, {dilation}, {groups}, {padding} and {len(weights)}"
            )
        self.outputs, per_group, self.kh, self.kw = weights.shape
        self.inputs = per_group * groups
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.heaviest = int(row_sums(weights).max())
        rows = weights.transpose(2, 3, 1, 0)  # [kh, kw, I / groups, O]
        self.rows = np.pad(rows.reshape(-1), (0, WIDEST)).astype(np.int16)

    def pairs_refused(self, *_: Any) -> str:
        """Why method `pairs` does not run here."""
        return "a convolution of this shape"

    def keep(self, _: Method) -> None:
        """All methods read the same weights."""

    def step(
        self,
        levels: NDArray[Any],
        method: Method = "bitplane",
        backend: Backend = "horner",
        out: NDArray[np.int32] | None = None,
        largest: int | None = None,
        *_: Any,
    ) -> GeneralStep:
        check_names(method, backend)
        if method == "pairs":
            raise ValueError("method pairs does not run a convolution of this shape: use bitplane")
        return GeneralStep(self, *self._checked(levels, out, largest), method, backend)
