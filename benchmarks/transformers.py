"""Burst transformers on a CPU, one thread: products of levels with levels alone, then whole networks; ms of one image.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/transformers.py [--density 0.18] [--seconds 1] [--networks ID:T ...]

Products (Q K^T) V: the native library against NumPy, random levels 0 to 5, so many of them active, one timestep. Networks:
random weights, BatchNorm statistics of their own, images of 32 x 32 random pixels; by `auto`, by planes, and in PyTorch as the
float SNN and as the float ANN, once. All ways take turns, best of many; engines give the same logits.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
from engine_kernels import best

from lbq import models, native
from lbq.deploy import deploy
from lbq.engine import attention
from lbq.engine.products import ProductStep
from lbq.engine.tape import perform
from lbq.graph import Synapse

SIZES = ((64, 8, 2), (384, 8, 12), (384, 14, 12), (64, 32, 2))  # channels, side of the grid of tokens, heads
LARGEST = 2**20  # a bound of the sums, below which NumPy multiplies in float32
NETWORKS = ("spikformer2x64:1", "spikformer2x64:2", "spikformer4x384:1", "spikformer4x384:2")
SHAPE = (3, 32, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.18, help="share of active levels")
    parser.add_argument("--seconds", type=float, default=1, help="for each way")
    parser.add_argument("--networks", nargs="*", default=NETWORKS, metavar="ID:T")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {native.report()}")
    print(f"{'channels':>8}{'tokens':>8}{'dense':>10}{'NumPy':>10}{'planes':>10}{'NumPy':>10}")
    for channels, side, heads in SIZES:
        times = products(channels, side, heads, options.density, options.seconds)
        print(f"{channels:8}{side * side:8}" + "".join(f"{1e3 * t:10.3f}" for t in times.values()))
    print(f"{'network':<20}{'auto':>10}{'planes':>10}{'float SNN':>12}{'float ANN once':>16}")
    for name in options.networks:
        identity, _, timesteps = name.partition(":")
        auto, planes, snn, ann = (1e3 * t for t in networks(identity, int(timesteps or 1), options.seconds).values())
        print(f"{name:<20}{auto:10.1f}{planes:10.1f}{snn:12.1f}{ann:16.1f}")


def products(channels: int, side: int, heads: int, density: float, seconds: float) -> dict[str, float]:
    """Seconds of one product of three random operands."""
    rng = np.random.default_rng(0)
    shape = channels, side, side
    synapse = Synapse("a", "q", "matmul", np.ones(channels), shape, shape, keys="k", values="v", heads=heads)
    active = rng.random((3, 1, side, side, channels)) < density
    operands = [*(active * rng.integers(1, 6, active.shape)).astype(np.uint8)]
    steps = {planes: ProductStep(synapse, operands, planes) for planes in (False, True)}
    for planes, step in steps.items():
        perform(step, 1)
        np.testing.assert_array_equal(step.out, attention.multiply(synapse, operands, LARGEST, planes)[0])
    return best(
        seconds,
        {
            "dense": partial(perform, steps[False], 1),
            "dense, NumPy": partial(attention.multiply, synapse, operands, LARGEST, False),
            "planes": partial(perform, steps[True], 1),
            "planes, NumPy": partial(attention.multiply, synapse, operands, LARGEST, True),
        },
    )


def networks(identity: str, timesteps: int, seconds: float) -> dict[str, float]:
    """Seconds of one image of a random network, deployed and in PyTorch."""
    torch.manual_seed(0)
    pixels = np.random.default_rng(0).integers(0, 256, (64, *SHAPE), np.uint8)
    x = torch.from_numpy(pixels).float() / 64 - 2
    floats: dict[str, torch.nn.Module] = {
        "snn": models.create(identity, timesteps=timesteps),
        "ann": models.create(identity, neuron="relu", timesteps=1),
    }
    with torch.no_grad():
        for each in floats.values():
            for _ in range(4):
                each(x)
            each.eval()
    net = deploy(floats["snn"], SHAPE, mean=[0.5] * 3, std=[0.25] * 3)
    for image in pixels[:8]:  # choices of kernels are made
        auto = net.run(image).logits
        np.testing.assert_array_equal(net.run(image, "bitplane", threads=1).logits, auto)
    with torch.inference_mode():
        return best(
            seconds,
            {
                "auto": lambda: net.run(pixels[0], threads=1),
                "planes": lambda: net.run(pixels[0], "bitplane", threads=1),
                **{name: partial(each, x[:1]) for name, each in floats.items()},
            },
        )


if __name__ == "__main__":
    main()
