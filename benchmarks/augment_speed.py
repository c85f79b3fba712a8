"""Time of the CIFAR augmentation per batch of 256 x 3 x 32 x 32 uint8: python benchmarks/augment_speed.py [BATCH]

Crop, flip, AutoAugment, normalisation and Cutout, on a GPU where there is one, else on the CPU. On a GPU two times
matter: what the device is busy for, and what the host needs to launch the work (hidden while the device is behind).
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import functools
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lbq.batches.policies import POLICIES, ImageAugment, autoaugment
from lbq.batches.random import uniform

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def milliseconds(work: Callable[[int], object], device: torch.device, repeats: int = 50) -> tuple[float, float]:
    """Median time of `work(step)` until it is done, and until the host is free again."""
    done, launched = [], []
    for step in range(repeats + 10):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work(step)
        launched.append(time.perf_counter() - started)
        if device.type == "cuda":
            torch.cuda.synchronize()
        done.append(time.perf_counter() - started)
    return 1e3 * statistics.median(done[10:]), 1e3 * statistics.median(launched[10:])


def policy_alone(x: Tensor, u: Tensor, policy: str, compact: bool, _: int) -> Tensor:
    return autoaugment(x, policy, u, compact=compact)


def main(batch: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU {platform.machine()}"
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} thread(s)"
    print(f"{name}{threads}, torch {torch.__version__}, batch {batch} x 3 x 32 x 32")
    x = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8, device=device)
    index = torch.arange(batch, device=device)
    whole = ImageAugment(4, True, "cifar10", 16, MEAN, STD)
    plain = ImageAugment(4, True, None, 16, MEAN, STD)
    rows: dict[str, Callable[[int], object]] = {
        "whole pipeline": lambda step: whole(x, index, 0, step),
        "without AutoAugment": lambda step: plain(x, index, 0, step),
    }
    for policy in POLICIES:
        for compact in (False, True):
            label = f"AutoAugment {policy}, {'picked' if compact else 'uniform'}"
            rows[label] = functools.partial(policy_alone, x, uniform(0, "image", 0, index, 5), policy, compact)
    print(f"{'':34}{'done, ms':>12}{'launched, ms':>14}{'images/s':>12}")
    for label, work in rows.items():
        done, launched = milliseconds(work, device)
        print(f"{label:34}{done:12.3f}{launched:14.3f}{batch / done * 1e3:12,.0f}")
    if device.type == "cuda":  # back to back: what the pipeline costs when the host runs ahead
        torch.cuda.synchronize()
        started = time.perf_counter()
        for step in range(200):
            whole(x, index, 0, step)
        torch.cuda.synchronize()
        print(f"{'whole pipeline, back to back':34}{(time.perf_counter() - started) / 200 * 1e3:12.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batch", nargs="?", type=int, default=256)
    main(parser.parse_args().batch)
