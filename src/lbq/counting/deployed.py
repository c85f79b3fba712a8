"""Run deployed networks on a test set: accuracy, throughput, what was executed, and whether two engines agree. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lbq.counting.deployed_counts import analyze as analyze
from lbq.counting.deployed_counts import measure as measure
from lbq.data.testset import IMAGES_PER_BATCH, TestSet
from lbq.engine import cuda
from lbq.engine.convolution import Backend, Counts, add_counts
from lbq.engine.engine import Engine, Network, thread_count
from lbq.engine.method import Choice
from lbq.engine.output import Output
from lbq.errors import LbqError

IMAGES_PER_TRACED_BATCH = 32  # where every level is kept
WARM_UP_IMAGES = 8  # that a network runs once before it is timed


@dataclass
class Evaluation:
    """accuracy: percent, None without labels; counts and choices: by synapse.

    seconds: in the engine alone; setup_seconds: before them, to arrange weights and choose kernels. against: another
    engine that ran the same; compared, differing: levels of all layers and timesteps, and logits.
    """

    images: int = 0
    accuracy: float | None = None
    seconds: float = 0.0
    setup_seconds: float = 0.0
    engine: str = "auto"
    backend: str = "horner"
    threads: int = 1
    counts: dict[str, Counts] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    against: str | None = None
    compared: int = 0
    differing: int = 0
    stopped: tuple[int, ...] = ()  # where images may stop early: how many did after 1, 2, ... timesteps

    def compare(self, out: Output, other: Output) -> None:
        """Count where the levels and logits of two engines differ."""
        assert out.levels is not None
        assert other.levels is not None
        levels = [(mine, other.levels[name]) for name, mine in out.levels.items()]
        for mine, theirs in (*levels, (out.logits, other.logits)):
            self.compared += mine.size
            self.differing += int((mine != theirs).sum())

    @property
    def total(self) -> Counts:
        """Of all synapses."""
        return sum(self.counts.values(), Counts())

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "images_per_second": self.images_per_second}


def evaluate(
    net: Network,
    test: TestSet,
    engine: Engine = "auto",
    threads: int | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
    against: Engine | None = None,
    backend: Backend = "horner",
    exit: bool = False,
) -> Evaluation:
    """Run the first `limit` samples of a test set. against: also run that engine and compare every level. backend: how
    bit planes are weighted. exit: stop images early, by the network's margins."""
    if exit and against is not None:
        raise LbqError("images that stop early have no levels to compare: leave out --exit or --against")
    if backend != "horner" and engine not in ("auto", "bitplane"):
        raise LbqError(f"backend {backend!r} weights bit planes, and engine {engine!r} has none: use engine 'bitplane'")
    if against == engine and backend == "horner":
        raise LbqError(f"engine {engine!r} against itself compares nothing: give another engine, such as 'dense'")
    threads = thread_count(threads)
    result, correct = Evaluation(engine=engine, threads=threads, against=against, backend=backend), 0
    trace, stopped = against is not None, np.zeros(net.network.timesteps, np.int64)
    for x, which in test.batches(IMAGES_PER_TRACED_BATCH if trace else IMAGES_PER_BATCH, limit):
        started = time.perf_counter()
        if not result.images and engine != "dense":
            images = x.shape[net.network.batch_axis]
            count = images if cuda.takes(engine, images) else WARM_UP_IMAGES  # a GPU records for each size of batch
            first = x[:count] if test.static else x[:, :count]
            net.run(first, engine, threads=threads, backend=backend, exit=exit)
            result.setup_seconds = time.perf_counter() - started
            started = time.perf_counter()
        out = net.run(x, engine, trace, threads, backend, progress, exit)
        result.seconds += time.perf_counter() - started
        if against is not None:
            result.compare(out, net.run(x, against, trace, threads))
        result.images += len(out.logits)
        if out.timesteps is not None:
            stopped += np.bincount(out.timesteps - 1, minlength=len(stopped))
        if test.labels is not None:
            correct += int((out.predictions == test.labels[which]).sum())
        result.choices = out.choices
        add_counts(result.counts, out.counts)
    if test.labels is not None:
        result.accuracy = 100 * correct / result.images
    result.stopped = tuple(stopped.tolist()) if exit else ()
    return result
