"""What watching costs: a plain evaluation against lbq account and lbq analyze of the same run, on one device, in one process:

    python benchmarks/analyze_speed.py RUN DATA_FOLDER [--images 256] [--device cuda] [--repeats 3] [--model model.lbq]

The aim is at most 1.3 times the plain evaluation. With --model, also the deployed network on one thread. Times are the best of
several; ratios are within one run. On the CPU they are the process's own, which others disturb little: set OMP_NUM_THREADS=1.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from lbq import engine, runs, train
from lbq.data.sources import open_source
from lbq.engine.evaluate import evaluate, open_data
from lbq.engine.evaluate import measure as measure_deployed
from lbq.measure import measure


def compare(title: str, ways: dict[str, Callable[[], object]], images: int, repeats: int, wall: bool = False) -> None:
    clock = time.perf_counter if wall else time.process_time
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats + 1):  # the first warms up
        for name, way in ways.items():
            started = clock()
            way()
            best[name] = min(best[name], clock() - started)
    plain = best[next(iter(ways))]
    print(f"{title}, {images} images")
    for name, seconds in best.items():
        print(f"  {name:<18} {1e3 * seconds / images:8.2f} ms per image, {seconds / plain:.2f} times plain")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("run", type=Path)
    arguments.add_argument("data")
    arguments.add_argument("--images", type=int, default=256)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--model", type=Path)
    given = arguments.parse_args()
    config = runs.load_config(given.run, [f"data.root={given.data}", f"train.batch_size={given.batch}"])
    device = torch.device(given.device)
    net = runs.load(given.run).to(device)
    source = open_source(config, device)
    precision = train.PRECISIONS[config.train.precision]
    if device.type == "cuda":
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @torch.no_grad()
    def plain() -> None:
        seen = correct = 0
        half = precision is not None and device.type == "cuda"
        for x, labels in source.eval_batches("test"):
            with torch.autocast(device.type, dtype=precision) if half else nullcontext():
                correct += int((net(x).argmax(1) == labels).sum())
            seen += len(labels)
            if seen >= given.images:
                return

    ways: dict[str, Callable[[], object]] = {
        "plain evaluation": plain,
        "account": lambda: measure(net, source, limit=given.images, precision=precision),
        "analyze": lambda: measure(net, source, limit=given.images, precision=precision, membranes=32),
    }
    compare(f"{config.model.id} on {given.device}", ways, given.images, given.repeats, device.type != "cpu")
    if given.model is not None:
        deployed = engine.load(given.model)
        test = open_data(deployed.network, given.data)
        ways = {
            "plain evaluation": lambda: evaluate(deployed, test, limit=given.images),
            "account": lambda: measure_deployed(deployed, test, limit=given.images),
            "analyze": lambda: measure_deployed(deployed, test, limit=given.images, membranes=32),
        }
        compare(f"{given.model.name}, one thread", ways, given.images, given.repeats)


if __name__ == "__main__":
    main()
