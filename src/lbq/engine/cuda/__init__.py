"""Integer networks on a GPU: `runner` runs them, by Triton kernels (`fused`, `tiles`) or in PyTorch (`plain`).

The one folder of the engine that imports torch, and only once it is asked for.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from functools import lru_cache
from pathlib import Path

LEAST_IMAGES = 64  # that engine `auto` takes a GPU for: to compile the kernels takes longer than a few images on a CPU
DRIVERS = ("/proc/driver/nvidia", "/dev/kfd")  # of NVIDIA, and of AMD
# Threads take turns to prepare networks and to run them, whichever they are: a network's pieces have their memory once, a graph
# is recorded while nothing else is allocated, and PyTorch's precision is a setting of the process.
turn = threading.RLock()


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether there is a GPU that the kernels run on. PyTorch is not imported where no driver is there."""
    if any(importlib.util.find_spec(package) is None for package in ("torch", "triton")):
        return False
    if "torch" not in sys.modules and not any(Path(driver).exists() for driver in DRIVERS):
        return False
    import torch

    return torch.cuda.is_available()


def takes(engine: str, images: int) -> bool:
    """Whether a GPU runs so many images by this engine."""
    return engine == "cuda" or (engine == "auto" and images >= LEAST_IMAGES and available())
