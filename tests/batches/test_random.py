"""Random numbers that are a function of seed, purpose, epoch and sample: the hash by hand, and the laws of chance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lbq.batches.random import MIX_1, MIX_2, PER_DRAW, PER_SAMPLE, integers, key, uniform
from tests.support import single_ops as single

quick = settings(max_examples=25, derandomize=True)


def plain_uniform(seed: int, purpose: str, epoch: int, index: int, draw: int) -> float:
    """The same number with Python's integers."""
    mask = (1 << 64) - 1
    z = (key(seed, purpose, epoch) + index * PER_SAMPLE + draw * PER_DRAW) & mask
    z = ((z ^ (z >> 30)) * MIX_1) & mask
    z = ((z ^ (z >> 27)) * MIX_2) & mask
    return ((z ^ (z >> 31)) >> 40) / (1 << 24)


@quick
@given(st.integers(0, 2**63), st.text(max_size=8), st.integers(0, 10**6), st.integers(0, 2**62))
def test_uniform_is_the_hash_it_says(seed: int, purpose: str, epoch: int, index: int) -> None:
    u = uniform(seed, purpose, epoch, torch.tensor([index, index + 1]), 3)
    assert u.dtype == torch.float32
    assert u.tolist() == [[plain_uniform(seed, purpose, epoch, i, j) for j in range(3)] for i in (index, index + 1)]
    assert uniform(seed, purpose, epoch, torch.arange(0), 3).shape == (0, 3)


def test_uniform_golden_values() -> None:
    """A change of these changes what every run with a given seed sees."""
    assert (uniform(0, "image", 0, torch.tensor([0, 1, 49999]), 2) * 2**24).tolist() == [
        [16176007, 9307778],
        [5451805, 14028316],
        [9383067, 6463008],
    ]
    assert (uniform(7, "event", 299, torch.tensor([123]), 4) * 2**24).tolist() == [
        [175064, 14745221, 4835087, 13614417]
    ]


INDEX = torch.arange(100_000)


def draws(seed: int = 0, purpose: str = "image", epoch: int = 0, shift: int = 0, draw: int = 0) -> Tensor:
    return uniform(seed, purpose, epoch, INDEX + shift, draw + 1)[:, draw]


@pytest.mark.parametrize("stride", [1, 2, 1024, 2**32])
def test_uniform_is_uniform(stride: int) -> None:
    u = uniform(11, "image", 3, INDEX * stride, 4)
    assert u.min() >= 0
    assert u.max() < 1
    for column in u.T:
        assert abs(single.chi_square(torch.histc(column, 256, 0, 1))) < 5
        ordered = column.sort().values
        distance = (ordered - (torch.arange(len(ordered)) + 0.5) / len(ordered)).abs().max().item()
        assert distance * math.sqrt(len(ordered)) < 1.95  # Kolmogorov-Smirnov, one in a thousand
    low = (u * 2**24).long() & 0xFF  # the lowest bits too
    assert abs(single.chi_square(torch.bincount(low.flatten(), minlength=256).float())) < 5


@pytest.mark.parametrize(
    "other",
    [
        {"shift": 1},
        {"shift": 50_000},
        {"epoch": 1},
        {"purpose": "event"},
        {"seed": 1},
        {"draw": 1},
        {"draw": 1, "shift": 1},
    ],
    ids=str,
)
def test_neighbouring_draws_are_independent(other: dict[str, Any]) -> None:
    a, b = draws(), draws(**other)
    assert (a == b).float().mean() < 1e-4
    assert abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a)) < 4
    pairs = torch.bincount((a * 32).long() * 32 + (b * 32).long(), minlength=1024).float()
    assert abs(single.chi_square(pairs)) < 5


@quick
@given(st.integers(2, 2**20), st.data())
def test_integers_are_the_exact_floor(n: int, data: st.DataObject) -> None:
    """At both ends, and just below and at the places where the result steps up."""
    steps = data.draw(st.lists(st.integers(1, n - 1), min_size=20, max_size=20))
    numerators = [0, 2**24 - 1, *(j * 2**24 // n for j in steps), *(-(-j * 2**24 // n) for j in steps)]
    u = torch.tensor(numerators, dtype=torch.float64).to(torch.float32) / 2**24
    assert integers(u, n).tolist() == [k * n >> 24 for k in numerators]
