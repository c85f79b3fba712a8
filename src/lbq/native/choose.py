"""Which kernel runs a burst sequence, and why. `lbq doctor`, the plan of a job and run records print this. No torch.

`LBQ_KERNEL` in the environment, or `with use(...)`, asks for one by name.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lbq import native
from lbq.errors import ConfigError, nearest

KERNELS = {
    "fused": "one pass each way over the whole sequence, BatchNorm and residual add included (Triton)",
    "native": "one pass each way over the whole sequence, on a CPU (C)",
    "reference": "plain PyTorch, the definition",
}
VARIABLE = "LBQ_KERNEL"
TRITON = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Choice:
    kernel: str
    reason: str


def known(name: str) -> str:
    if name not in KERNELS:
        raise ConfigError(f"{VARIABLE}: unknown kernel {name!r}{nearest(name, KERNELS)}")
    return name


_asked: dict[object, str] = {}  # by who asks, the latest last


@contextmanager
def use(kernel: str) -> Iterator[None]:
    """Run burst sequences by this kernel for a while, wherever it can; `fused` on a CPU needs Triton's interpreter."""
    mine = object()
    _asked[mine] = known(kernel)
    try:
        yield
    finally:
        del _asked[mine]  # which need not be the latest, as where generators hold them


def asked() -> str:
    """The kernel asked for by name; empty where none is."""
    return next(reversed(_asked.values()), None) or os.environ.get(VARIABLE, "")


def unfit(device: str) -> str | None:
    """Why the kernel asked for by name can run nothing on `device`; None where it can, or where none is asked for."""
    if asked() == "native":
        return f"the native kernel is for CPUs, not {device}" if device != "cpu" else native.report().reason
    if asked() != "fused":
        return None
    if not TRITON:
        return "the fused kernel needs the package triton: pip install triton"
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    return None if device == "cuda" or interpreted else f"the fused kernel needs a CUDA device, not {device}"


def check(device: str) -> None:
    """Refuse to begin work on `device` by a kernel that cannot run there."""
    if reason := unfit(device):
        raise ConfigError(f"{VARIABLE}={asked()}: {reason}; or leave {VARIABLE} out")


def choose(device: str = "cpu") -> Choice:
    """The kernel that a neuron on `device` (cpu, cuda) runs. Sequences that it cannot compute go to the reference."""
    name, reason = asked(), unfit(device)
    if name and reason is None:
        return Choice(known(name), "asked for by name")
    found = _usual(device)
    return found if reason is None or reason in found.reason else Choice(found.kernel, f"{reason}; {found.reason}")


def _usual(device: str) -> Choice:
    if device == "cpu":
        found = native.report()
        if found.reason is None:
            return Choice("native", f"C with {found.isa} instructions")
        return Choice("reference", f"plain PyTorch; {found.reason}")
    if device != "cuda":
        return Choice("reference", f"plain PyTorch; there is no kernel for {device}")
    if not TRITON:
        return Choice("reference", "the fused kernel needs the package triton: pip install triton")
    return Choice("fused", "Triton on a CUDA device")
