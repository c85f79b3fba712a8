"""Every test here runs on the fused kernels and begins from the same seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lbq.native.choose import use


@pytest.fixture(autouse=True)
def _fused_and_seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with use("fused"):
        yield
