"""Counter-based randomness: a number is a pure function of (seed, purpose, epoch, sample index, draw number).

There is no stream and no state. A sample's numbers do not depend on its batch, on the number of processes, on the device,
or on how many other numbers were drawn. So a run that resumes at any batch repeats nothing and skips nothing. All
arithmetic is on integers until the last step, which is exact, so a CPU and a GPU give the same bits.

The hash is the finaliser of SplitMix64 (Steele, Lea and Flood 2014; constants: Stafford's variant 13) on a counter. The
counter steps by one odd constant per sample and by another per draw. SHA-256 of the rest gives its start.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

PER_SAMPLE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
PER_DRAW = 0xD1342543DE82EF95  # a multiplier of Steele and Vigna 2021, odd
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def key(*parts: object) -> int:
    """64 bits for (seed, purpose, epoch, ...): the first eight bytes of the SHA-256 of the parts joined by slashes."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "little")


def uniform(seed: int, purpose: str, epoch: int, index: Tensor, n: int) -> Tensor:
    """`n` numbers in [0, 1) for each sample of `index` (int64 [B]): float32 [B, n] on its device, multiples of 2^-24.

    Draw `j` of a sample is the same number whatever `n` is.
    """
    draw = torch.arange(n, dtype=torch.int64, device=index.device) * _signed(PER_DRAW) + _signed(
        key(seed, purpose, epoch)
    )
    z = (index * _signed(PER_SAMPLE))[:, None] + draw
    z = (z ^ _shift(z, 30)) * _signed(MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(MIX_2)
    z = z ^ _shift(z, 31)
    return _shift(z, 40).to(torch.float32) * 2.0**-24


def integers(u: Tensor, n: int) -> Tensor:
    """`u` in [0, 1) as int64 in 0..n-1. In float64, where the product is exact: float32 could round it up."""
    return (u.to(torch.float64) * n).to(torch.int64)


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 holds them; its multiplication wraps around like the unsigned one."""
    return value - (1 << 64) if value >> 63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, whose own shift would copy the sign bit in from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
