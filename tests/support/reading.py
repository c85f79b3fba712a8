"""What the tests of readers share: real data where there is some, limits, messages of one line."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from lbq.data.dataset import Inputs
from lbq.errors import DataError

QUICK = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
RNG = np.random.default_rng


def real(name: str) -> Path:
    """A folder of real data, where there is one."""
    path = Path(os.environ.get("LBQ_DATA", "")) / name
    if not os.environ.get("LBQ_DATA") or not path.is_dir():
        pytest.skip(f"set LBQ_DATA to a folder that holds {name} to test on real data")
    return path


def normalised_by(inputs: Inputs, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Images as a network sees them: `(pixels / scale - mean) / std`."""
    mean, std = (np.array(v, np.float32)[:, None, None] for v in (inputs.mean, inputs.std))
    return (images.astype(np.float32) / np.float32(inputs.scale) - mean) / std


@contextlib.contextmanager
def memory_under(limit: int) -> Iterator[None]:
    """Peak of what Python and NumPy allocate inside, in bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def refused(message: str) -> Iterator[None]:
    """Inside, a DataError is raised whose text is one line and matches."""
    with pytest.raises(DataError, match=message) as error:
        yield
    one_line(error)


def one_line(error: pytest.ExceptionInfo[DataError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text
