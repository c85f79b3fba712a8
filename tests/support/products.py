"""Products and gates of the native library, beside NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np

from lbq import native
from lbq.engine.convolution import Counts
from lbq.engine.products import GateStep, ProductStep
from lbq.engine.tape import perform
from lbq.native import ISAS


def check_native(step: ProductStep | GateStep, expected: np.ndarray[Any, Any], counts: Counts) -> None:
    """By every instruction path, on one thread and several, and again in the same memory."""
    for isa in native.isas():
        for threads in (1, 3):
            step.out.fill(77)
            if isinstance(step, ProductStep):
                step.call.isa = ISAS[isa]
            perform(step, threads)
            np.testing.assert_array_equal(step.out, expected, err_msg=isa)
            assert step.out.dtype == expected.dtype
            assert step.counts() == counts
