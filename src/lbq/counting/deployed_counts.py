"""Count what a deployed network does on data: its levels, operations and membranes. No torch."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.counting.analysis import GOLDEN, Analysis
from lbq.counting.measurement import Measurement
from lbq.counting.membranes import Membranes
from lbq.counting.tally import Tallies
from lbq.data.testset import TestSet
from lbq.engine.engine import Network, thread_count
from lbq.engine.file.artefact import fingerprint
from lbq.engine.output import Output
from lbq.graph import INPUT
from lbq.graph.integer import is_name
from lbq.graph.levels import Integers


def measure(
    net: Network,
    test: TestSet,
    threads: int | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
    membranes: int = 0,
) -> Measurement:
    """Counts of a deployed network on its own levels; accuracy where labels are known.

    threads: of the CPU; default all processors of this process. membranes: every n-th image of the set has its membranes
    watched; 0: none.
    """
    network = net.network
    histograms = Membranes(network)
    by_thread: dict[int, Tallies] = defaultdict(partial(Tallies, network))
    images, right = 0, np.zeros(test.size, np.bool_)

    def count(name: str, levels: Integers) -> None:
        by_thread[threading.get_ident()].add_layer(name, levels)

    def run(some: NDArray[np.uint8], watched: bool) -> Output:
        if not watched:
            return net.run(some, "auto", count, thread_count(threads), progress=progress)
        out = net.watch(some, histograms.add, count)
        if progress is not None:
            progress(len(out.logits))
        return out

    for x, which in test.batches(limit=limit):
        size = x.shape[network.batch_axis]
        watched = np.arange(images, images + size) % membranes == 0 if membranes else np.zeros(size, bool)
        for chosen in (~watched, watched):
            if chosen.any():
                out = run(np.compress(chosen, x, network.batch_axis), chosen is watched)
                if test.labels is not None:
                    right[which][chosen] = out.predictions == test.labels[which][chosen]
        count(INPUT, x[None] if network.static else x)
        images += size
    tallies = Tallies(network)
    for part in by_thread.values():
        tallies.add_counts(part.counts, 0)
        tallies.products.merge(part.products)
    tallies.images = images
    right = right[:images]
    accuracy = math.nan if test.labels is None else 100 * int(right.sum()) / images
    inputs = GOLDEN if test.name == GOLDEN else "images"
    return Measurement(
        network,
        images,
        accuracy,
        tallies,
        complete=images == test.size,
        membranes=histograms.layers,
        traces=histograms.traces(),
        inputs=inputs,
        right=None if test.labels is None else right,
    )


def analyze(
    net: Network,
    test: TestSet,
    threads: int | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
    membranes: int = 32,
    name: str = "",
) -> Analysis:
    """The analysis of a deployed network. name: of its file."""
    return measure(net, test, threads, limit, progress, membranes).analysis(facts_of(net, test, name))


def facts_of(net: Network, test: TestSet, name: str) -> dict[str, Any]:
    """What identifies a deployed network, and what it is measured on, in files made from it."""
    stored = net.network.facts
    return {
        "kind": "artefact",
        "name": name,
        "dataset": _name(net.network.dataset.get("name")),
        "model": _name(stored.get("model")),
        "variant": "deployed",
        "timesteps": net.network.timesteps,
        "bits": bits if type(bits := stored.get("bits")) is int else None,
        "config_hash": _name(stored.get("config_hash")),
        "weights_sha256": _name(stored.get("weights_sha256")),
        "network_sha256": fingerprint(net.network),
        "data": test.name,
    }


def _name(fact: Any) -> str:
    """The name that a file holds; empty where it holds anything else."""
    return fact if isinstance(fact, str) and is_name(fact) else ""
