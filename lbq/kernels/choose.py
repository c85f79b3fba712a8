"""Which kernel runs a burst sequence, and why. `lbq doctor` and run records print this."""

from __future__ import annotations

from dataclasses import dataclass

from lbq import native


@dataclass(frozen=True)
class Choice:
    kernel: str
    reason: str


def choose(device: str = "cpu") -> Choice:
    """The kernel that a neuron on `device` runs."""
    if device == "cpu":
        found = native.report()
        if found.reason is None:
            return Choice("native", f"C, {found.isa} instructions; plain PyTorch for ladders and other than float32")
        return Choice("reference", f"plain PyTorch; {found.reason}")
    return Choice("reference", f"plain PyTorch; this version has no fused kernel for {device}")
