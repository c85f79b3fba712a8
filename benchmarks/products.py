"""Products of levels with levels, (Q K^T) V, by the native library and in NumPy: milliseconds of one timestep of one image.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/products.py [--density 0.18] [--seconds 1]

Levels are random, 0 to 5, so many of them active. All ways take turns, one thread, best of many; every result is the same.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
from functools import partial

import numpy as np
from engine_kernels import best

from lbq.engine import attention
from lbq.engine.products import ProductStep
from lbq.engine.tape import perform
from lbq.graph import Synapse

SIZES = ((64, 8, 2), (384, 8, 12), (384, 14, 12), (64, 32, 2))  # channels, side of the grid of tokens, heads
LARGEST = 2**20  # a bound of the sums, below which NumPy multiplies in float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.18, help="share of active levels")
    parser.add_argument("--seconds", type=float, default=1, help="for each way")
    options = parser.parse_args()
    print(f"{'channels':>8}{'tokens':>8}{'dense':>10}{'NumPy':>10}{'planes':>10}{'NumPy':>10}")
    rng = np.random.default_rng(0)
    for channels, side, heads in SIZES:
        shape = channels, side, side
        synapse = Synapse("a", "q", "matmul", np.ones(channels), shape, shape, keys="k", values="v", heads=heads)
        active = rng.random((3, 1, side, side, channels)) < options.density
        operands = (active * rng.integers(1, 6, active.shape)).astype(np.uint8)
        steps = {planes: ProductStep(synapse, operands, planes) for planes in (False, True)}
        for planes, step in steps.items():
            perform(step, 1)
            np.testing.assert_array_equal(step.out, attention.multiply(synapse, operands, LARGEST, planes)[0])
        times = best(
            options.seconds,
            {
                "dense": partial(perform, steps[False], 1),
                "dense, NumPy": partial(attention.multiply, synapse, operands, LARGEST, False),
                "planes": partial(perform, steps[True], 1),
                "planes, NumPy": partial(attention.multiply, synapse, operands, LARGEST, True),
            },
        )
        print(f"{channels:8}{side * side:8}" + "".join(f"{1e3 * t:10.3f}" for t in times.values()))


if __name__ == "__main__":
    main()
