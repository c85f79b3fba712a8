"""Which kernel runs a burst sequence, and why. `lbq doctor` and run records print this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    kernel: str
    reason: str


def choose(device: str = "cpu") -> Choice:
    """The kernel that a neuron on `device` runs."""
    return Choice("reference", f"plain PyTorch; this version has no fused kernel for {device}")
