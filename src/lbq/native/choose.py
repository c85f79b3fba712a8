"""The kernel that runs a burst sequence, and why. `lbq doctor`, the plan of a job and run records print it. No torch.

`LBQ_KERNEL` in the environment, or `with use(...)`, names a kernel.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lbq import native
from lbq.errors import ConfigError, nearest

KERNELS = ("fused", "native", "reference")  # Triton with BatchNorm and residual add, C, and plain PyTorch
VARIABLE = "LBQ_KERNEL"
TRITON = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Choice:
    kernel: str
    reason: str


def known(name: str) -> str:
    """The name, if there is such a kernel."""
    if name not in KERNELS:
        raise ConfigError(f"{VARIABLE}: unknown kernel {name!r}{nearest(name, KERNELS)}")
    return name


_named: dict[object, str] = {}  # the kernels of all `use` blocks that are open, the latest last


@contextmanager
def use(kernel: str) -> Iterator[None]:
    """Run burst sequences by this kernel inside the block, wherever it can; `fused` on a CPU needs Triton's interpreter."""
    block = object()
    _named[block] = known(kernel)
    try:
        yield
    finally:
        del _named[block]  # it need not be the latest: generators may hold blocks open


def requested() -> str:
    """The kernel that is asked for by name, or an empty string."""
    return next(reversed(_named.values()), None) or os.environ.get(VARIABLE, "")


def unfit(device: str) -> str | None:
    """Why the kernel that is asked for by name cannot run on `device`. None: it can, or no kernel is named."""
    if requested() == "native":
        return f"the native kernel is for CPUs, not {device}" if device != "cpu" else native.report().reason
    if requested() != "fused":
        return None
    if not TRITON:
        return "the fused kernel needs the package triton: pip install triton"
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    return None if device == "cuda" or interpreted else f"the fused kernel needs a CUDA device, not {device}"


def check(device: str) -> None:
    """Refuse to begin work on `device` where the named kernel cannot run."""
    if reason := unfit(device):
        raise ConfigError(f"{VARIABLE}={requested()}: {reason}; or leave {VARIABLE} out")


def choose(device: str = "cpu") -> Choice:
    """The kernel that a neuron on `device` (cpu, cuda) runs. The reference runs the sequences that it cannot compute."""
    name, reason = requested(), unfit(device)
    if name and reason is None:
        return Choice(known(name), "asked for by name")
    usual = _usual(device)
    return usual if reason is None or reason in usual.reason else Choice(usual.kernel, f"{reason}; {usual.reason}")


def _usual(device: str) -> Choice:
    if device == "cpu":
        library = native.report()
        if library.reason is None:
            return Choice("native", f"C with {library.isa} instructions")
        return Choice("reference", f"plain PyTorch; {library.reason}")
    if device != "cuda":
        return Choice("reference", f"plain PyTorch; there is no kernel for {device}")
    if not TRITON:
        return Choice("reference", "the fused kernel needs the package triton: pip install triton")
    return Choice("fused", "Triton on a CUDA device")
