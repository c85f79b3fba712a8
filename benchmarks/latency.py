"""Milliseconds of one image after another, as a camera sends them: mean, median and 99th percentile over many test images.

    python benchmarks/latency.py FILE ... --data CIFAR10_FOLDER [--images 1000] [--threads 1] [--out FOLDER]

Each FILE is a deployed resnet20w128. One with margins (`lbq exits`) also runs with early exit, which takes longer for some
images than for others. Where onnx, onnxscript and onnxruntime are installed, the rival is onnxruntime's int8 ANN of the same
architecture. They take turns, so ratios are within one run; a turn is 25 images and one more that is not counted, while
threads of the contender before may still spin. LBQ_NATIVE_AMX=off does without the matrix unit of newer x86 CPUs;
RIVALS_AMX=off takes it from the rival alone. Other programs show in the 99th percentile: let none run beside it.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matrix_unit
import numpy as np
from engine_speed import ID, processor
from numpy.typing import NDArray

from lbq import engine, native
from lbq.data.cifar import load_cifar10
from lbq.system.files import sha256_of

RIVAL = "int8 ANN, onnxruntime"
WARM_UP = 70  # images: choices of kernels are made anew after 64
TURN = 25
Run = Callable[[NDArray[np.uint8]], Any]


def one_by_one(runs: dict[str, Run], images: NDArray[np.uint8]) -> dict[str, NDArray[np.float64]]:
    """Milliseconds of each run for each image."""
    for run in runs.values():
        for image in images[:WARM_UP]:
            run(image)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for first in range(0, len(images), TURN):
        for name, run in runs.items():
            run(images[first - 1])
            for image in images[first : first + TURN]:
                started = time.perf_counter()
                run(image)
                times[name].append(1e3 * (time.perf_counter() - started))
    return {name: np.array(each) for name, each in times.items()}


def contenders(path: Path, threads: int) -> dict[str, Run]:
    """A file's network by `auto`, and with early exit where it has margins."""
    net = engine.load(path)
    runs: dict[str, Run] = {f"{path.stem}, T = {net.network.timesteps}": lambda image: net.run(image, threads=threads)}
    if net.network.exits is not None:
        runs[f"{path.stem}, early exit"] = lambda image: net.run(image, threads=threads, exit=True)
    return runs


def rival(images: NDArray[np.uint8], threads: int) -> dict[str, Run]:
    matrix_unit.keep_rivals_off()
    try:
        import onnx_rivals
    except ModuleNotFoundError as error:
        print(f"onnxruntime is left out: {error}")
        return {}
    ann = onnx_rivals.ann_int8(ID, threads, images[:8])
    return {RIVAL: lambda image: ann.run(None, {"x": image[None].astype(np.float32) / 64 - 2})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    images = load_cifar10(options.data).test.images[: options.images]
    runs = rival(images, options.threads)
    for path in options.models:
        runs |= contenders(path, options.threads)
    times = one_by_one(runs, images)
    print(f"{processor()}, {native.isa()}, {options.threads} thread(s), {len(images)} test images one by one, ms")
    rows = {}
    for name, each in times.items():
        row = {"mean": each.mean(), "p50": np.percentile(each, 50), "p99": np.percentile(each, 99)}
        over = f"  {each.mean() / times[RIVAL].mean():.2f} of the rival's mean" if RIVAL in times else ""
        print(f"{name:50}" + "".join(f"{key:>6} {value:6.2f}" for key, value in row.items()) + over)
        rows[name] = {key: round(float(value), 3) for key, value in row.items()}
    if options.out is not None:
        facts = {"machine": processor(), "features": native.report().features, "threads": options.threads}
        files = {path.name: sha256_of(path) for path in options.models}
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**facts, "images": len(images), "files": files, "ms": rows}, indent=2)
        (options.out / f"latency_{options.threads}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
