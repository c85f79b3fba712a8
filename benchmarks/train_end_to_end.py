"""Training end to end (data, augmentation, step) against the bare step, in one run:

    python benchmarks/train_end_to_end.py CIFAR10_FOLDER [key=value ...]

resnet20w128, T = 2, batch 256, bf16, channels_last on a GPU. The bare step repeats one batch that is already augmented and on
the device. Prints samples per second of both, their ratio, the cost of augmentation, the machine and the versions.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import time

import torch

from lbq.batches.sources import open_source
from lbq.config import Config
from lbq.runs.run_folder import environment
from lbq.system import toml
from lbq.training.trainer import Trainer

WARM, STEPS = 15, 60
SETTINGS = {
    "model": {"id": "resnet20w128", "in_channels": 3},
    "data": {"name": "cifar10"},
    "augment": {"crop": 4, "flip": True, "policy": "cifar10", "cutout": 16},
    "train": {"epochs": 1, "batch_size": 256, "precision": "bf16", "channels_last": True},
}


def main(root: str, changes: list[str]) -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    tree = toml.merge(SETTINGS, toml.overrides([f"data.root={root}", *changes]))
    config = Config.from_dict(tree)
    print(environment(device), f"batch {config.train.batch_size}", f"compile {config.train.compile}")
    started = time.perf_counter()
    source = open_source(config, device)
    print(f"data ready in {time.perf_counter() - started:.1f} s")

    times: list[float] = []

    def watch(trainer: Trainer) -> bool:
        if trainer.position.step in (WARM, WARM + STEPS):
            finish(device)
            times.append(time.perf_counter())
        return trainer.position.step == WARM + STEPS

    trainer = Trainer(config, source, device, between_steps=watch)
    for _ in trainer.fit():
        pass
    end_to_end = STEPS * config.train.batch_size / (times[1] - times[0])

    batch = next(source.train_batches([torch.arange(config.train.batch_size)], 0, 0))
    for i in range(WARM + STEPS):
        if i == WARM:
            finish(device)
            started = time.perf_counter()
        trainer._step(iter([batch]))
    finish(device)
    bare = STEPS * config.train.batch_size / (time.perf_counter() - started)

    started = time.perf_counter()
    for _ in source.train_batches([torch.arange(config.train.batch_size)] * STEPS, 0, 0):
        pass
    finish(device)
    augmentation = (time.perf_counter() - started) / STEPS
    step = config.train.batch_size / bare
    print(f"end to end {end_to_end:,.0f} samples/s, bare step {bare:,.0f} samples/s, ratio {end_to_end / bare:.3f}")
    print(f"augmentation alone {1e3 * augmentation:.2f} ms a batch, {100 * augmentation / step:.1f} % of a bare step")
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB")


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", help="folder of CIFAR-10")
    parser.add_argument("changes", nargs="*", help="key=value")
    arguments = parser.parse_args()
    main(arguments.root, arguments.changes)
