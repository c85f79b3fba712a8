"""Which samples of a test set a network gets right, kept as one bit each: what a comparison of two networks needs. NumPy only.

10,000 samples take 1,668 letters of a record, which outlive the weights.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.errors import LbqError
from lbq.system import schema
from lbq.system.schema import Fields, Maybe

OUTCOMES = Maybe(Fields({"samples": schema.POSITIVE, "bits": schema.TEXT}))  # as files hold them


def packed(right: NDArray[np.bool_]) -> dict[str, Any]:
    """For a file: how many samples there are, and a bit for each in their order, as base64."""
    return {"samples": len(right), "bits": base64.b64encode(np.packbits(right).tobytes()).decode("ascii")}


def unpacked(stored: Mapping[str, Any], where: str) -> NDArray[np.bool_]:
    """What `packed` made; where: the file, for errors."""
    samples = stored["samples"]
    try:
        data = base64.b64decode(stored["bits"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise LbqError(f"{where} is damaged: the bits of its samples are no base64; make it again") from error
    if len(data) != -(-samples // 8):
        raise LbqError(f"{where} is damaged: it has {8 * len(data)} bits for {samples} samples; make it again")
    return np.unpackbits(np.frombuffer(data, np.uint8), count=samples).astype(np.bool_)
