"""What watching costs: a plain evaluation against lbq account and lbq analyze of the same run, on one device, in one process:

    python benchmarks/analyze_speed.py RUN DATA_FOLDER [--images 256] [--batch 16] [--repeats 3] [--model model.lbq]
    python benchmarks/analyze_speed.py RUN DATA_FOLDER --device cuda --images 10000 --batch 256

The aim is at most 1.3 times the plain evaluation. With --model, also the deployed network on one thread. Times are the best of
several; ratios are within one run. On the CPU they are the process's own, which others disturb little: set OMP_NUM_THREADS=1.
Counts become accounts and analyses in the time that is taken; starting, loading and writing files are left out.
Tensors above 32 MiB, as resnet20w128 has at batch 32, glibc maps anew each time, and one would measure that: so 16 by default.
"First batch" is the same for one batch alone: what a measurement costs whatever the number of images, but for that batch.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from lbq import engine
from lbq.batches.sources import open_source
from lbq.counting.deployed import evaluate
from lbq.counting.deployed_counts import measure as measure_deployed
from lbq.counting.inputs import open_data
from lbq.measuring.measure import measure
from lbq.runs import run_folder
from lbq.training import evaluation


def compare(
    title: str, ways: dict[str, Callable[[int], object]], images: int, repeats: int, first: int = 0, gpu: bool = False
) -> None:
    """ways: each takes the number of images. first: also time so many alone. gpu: wait for it, by the clock on the wall."""
    clock = time.perf_counter if gpu else time.process_time
    wait: Callable[[], None] = torch.cuda.synchronize if gpu else lambda: None
    best = {(name, n): float("inf") for name in ways for n in (images, first) if n}
    for _ in range(repeats + 1):  # the first warms up
        for name, n in best:
            wait()
            started = clock()
            ways[name](n)
            wait()
            best[name, n] = min(best[name, n], clock() - started)
    plain = best[next(iter(ways)), images]
    print(f"{title}, {images} images")
    for name in ways:
        seconds = best[name, images]
        alone = f"; first batch {1e3 * best[name, first]:.1f} ms" if first else ""
        print(f"  {name:<18} {1e3 * seconds / images:8.3f} ms per image, {seconds / plain:.2f} times plain{alone}")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("run", type=Path)
    arguments.add_argument("data")
    arguments.add_argument("--images", type=int, default=256)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument("--model", type=Path)
    given = arguments.parse_args()
    config = run_folder.load_config(given.run, [f"data.root={given.data}", f"train.batch_size={given.batch}"])
    device = torch.device(given.device)
    net = run_folder.load(given.run).to(device)
    source = open_source(config, device)
    precision = evaluation.PRECISIONS[config.train.precision]
    if device.type == "cuda":
        net = net.to(memory_format=torch.channels_last)

    half = precision is not None and device.type == "cuda"

    @torch.no_grad()
    def plain(images: int) -> int:
        seen, correct = 0, torch.zeros((), dtype=torch.int64, device=device)
        with torch.autocast(device.type, dtype=precision) if half else nullcontext():
            for x, labels in source.eval_batches("test"):
                labels = labels[: images - seen]
                x = x[: len(labels)] if source.static else x[:, : len(labels)]
                correct += (net(x).argmax(1) == labels).sum()
                seen += len(labels)
                if seen == images:
                    break
        return int(correct)

    ways: dict[str, Callable[[int], object]] = {
        "plain evaluation": plain,
        "account": lambda images: measure(net, source, limit=images, precision=precision).to_dict(),
        "analyze": lambda images: measure(net, source, limit=images, precision=precision, membranes=32).analysis({}),
    }
    first, gpu = min(given.batch, given.images), device.type == "cuda"
    compare(f"{config.model.id} on {given.device}", ways, given.images, given.repeats, first, gpu)
    if given.model is not None:
        deployed = engine.load(given.model)
        test = open_data(deployed.network, given.data)
        ways = {
            "plain evaluation": lambda images: evaluate(deployed, test, threads=1, limit=images),
            "account": lambda images: measure_deployed(deployed, test, 1, images).to_dict(),
            "analyze": lambda images: measure_deployed(deployed, test, 1, images, membranes=32).analysis({}),
        }
        compare(f"{given.model.name}, one thread", ways, given.images, given.repeats)


if __name__ == "__main__":
    main()
