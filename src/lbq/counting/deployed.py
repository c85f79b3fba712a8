"""Deployed networks on data: accuracy, throughput, what was executed, and what it costs. No torch."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.counting.analysis import GOLDEN, Analysis
from lbq.counting.measurement import Measurement
from lbq.counting.membranes import Membranes
from lbq.counting.tally import Tallies
from lbq.data import folder
from lbq.data.arrays import load_array
from lbq.data.dataset import unlike
from lbq.data.testset import EVAL_RATIO, FILES, TestSet, open_arrays, open_test
from lbq.engine.convolution import Backend, Counts
from lbq.engine.engine import Engine, Network
from lbq.engine.method import Choice
from lbq.engine.runner import Output
from lbq.errors import ArtefactError, DataError, LbqError
from lbq.graph import INPUT, shortest, with_sides
from lbq.graph.integer import IntegerNetwork, is_name
from lbq.graph.levels import Integers

BATCH = 256
FIRST = 8  # inputs that a network runs once before it is timed
TRACED = 32  # inputs at a time where every level is kept


@dataclass
class Evaluation:
    """accuracy in percent, None without labels; seconds spent in the engine alone, and before them on arranging weights and
    choosing kernels; counts and choices by synapse.

    against: another engine that ran the same; compared, differing: levels of all layers and timesteps, and logits.
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

    @property
    def total(self) -> Counts:
        """Of all synapses."""
        return sum(self.counts.values(), Counts())

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "images_per_second": self.images_per_second}


def open_data(network: IntegerNetwork, data: str | None) -> TestSet:
    """What a user means by DATA: the folder of the dataset that the network was trained on, or a .npz file."""
    if data is not None and data.endswith(".npz"):
        test = open_arrays(data, network.static, network.input_shape, network.timesteps)
    else:
        known = network.facts.get("data")
        settings = known if isinstance(known, dict) else {}
        name = settings.get("name", "digits" if data == "digits" else None)
        if not isinstance(name, str):
            raise DataError(
                "the network does not say which dataset it is for: give a .npz file with images and labels, or deploy it "
                'with facts={"data": {"name": "cifar10"}} or another dataset\'s name'
            )
        if data is None and name != "digits":
            raise DataError(f"give the folder of {name}, or a .npz file with images and labels")
        if name == "digits" and data not in (None, "digits"):
            raise DataError(f"{data!r} is not what the network was trained on: give digits, or a .npz file with images")
        size, frames, window = (settings.get(key, default) for key, default in _DEFAULTS.items())
        if type(size) is not int or type(window) is not int or frames not in ("count", "time") or min(size, window) < 0:
            raise ArtefactError("the network's facts about its dataset make no sense")
        test = open_test(name, data or "", network.timesteps, size, frames, window)
    if test.static != network.static or test.shape != network.input_shape:
        mine, theirs = (f"{'images' if x.static else 'event frames'} of" for x in (network, test))
        raise DataError(
            f"{test.name} has {theirs} {test.shape}, the network reads {mine} {network.input_shape}: give data like what it "
            "was trained on"
        )
    if data is not None and data.endswith(".npz"):
        _check_range(test.read(0, test.size), network, data)
    # classes without names have numbers, which names may stand for
    numbers = set(map(str, range(len(network.classes))))
    unnamed = set(network.classes) == numbers and numbers.isdisjoint(test.classes)
    if test.classes and network.classes and test.classes != network.classes and not unnamed:
        first = unlike(test.classes, network.classes)
        raise DataError(
            f"{test.name} has other classes than the network ({first}): give data like what it was trained on"
        )
    labels, outputs = test.labels, network.readout.shape[0]
    if labels is not None and len(labels) and not 0 <= labels.min() <= labels.max() < outputs:
        raise DataError(
            f"{test.name} has labels from {labels.min()} to {labels.max()}, the network knows classes 0 to "
            f"{outputs - 1}: number them as in training"
        )
    return test


def _check_range(values: NDArray[np.uint8], network: IntegerNetwork, where: Path | str) -> None:
    if values.size and (most := int(values.max())) > network.input_max:
        raise DataError(
            f"{where} has values up to {most}, the network was trained on 0 to {network.input_max}: scale them to that"
        )


_DEFAULTS = {"size": 0, "frames": "count", "window_ms": 1000}


def evaluate(
    net: Network,
    test: TestSet,
    engine: Engine = "auto",
    threads: int = 1,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
    against: Engine | None = None,
    backend: Backend = "horner",
) -> Evaluation:
    """Run the first `limit` samples of a test set. against: also run that engine and compare every level. backend: how
    bit planes are weighted."""
    _check_ways(engine, against, backend)
    found, correct = Evaluation(engine=engine, threads=threads, against=against, backend=backend), 0
    trace = against is not None
    for x, which in test.batches(TRACED if trace else BATCH, limit):
        started = time.perf_counter()
        if not found.images and engine != "dense":
            net.run(x[:FIRST] if test.static else x[:, :FIRST], engine, threads=threads, backend=backend)
            found.setup_seconds = time.perf_counter() - started
            started = time.perf_counter()
        out = net.run(x, engine, trace, threads, backend, progress)
        found.seconds += time.perf_counter() - started
        if against is not None:
            other = net.run(x, against, trace, threads)
            for mine, theirs in _pairs(out, other):
                found.compared += mine.size
                found.differing += int((mine != theirs).sum())
        found.images += len(out.logits)
        if test.labels is not None:
            correct += int((out.predictions == test.labels[which]).sum())
        found.choices = out.choices
        for name, counts in out.counts.items():
            found.counts[name] = found.counts.get(name, Counts()) + counts
    if not found.images:
        raise DataError(f"{test.name} has no samples to run")
    if test.labels is not None:
        found.accuracy = 100 * correct / found.images
    return found


def _check_ways(engine: Engine, against: Engine | None, backend: Backend) -> None:
    """Refuse what would compare nothing, or leave a wish unheard."""
    if backend != "horner" and engine not in ("auto", "bitplane"):
        raise LbqError(f"backend {backend!r} weights bit planes, and engine {engine!r} has none: use engine 'bitplane'")
    if against == engine and backend == "horner":
        raise LbqError(f"engine {engine!r} against itself compares nothing: give another engine, such as 'dense'")


def _pairs(one: Output, other: Output) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    assert one.levels is not None
    assert other.levels is not None
    for name, levels in one.levels.items():
        yield levels, other.levels[name]
    yield one.logits, other.logits


def inputs_of(net: Network, data: str | None) -> TestSet:
    """What a network is measured on: the data that a user names; else its test set where that comes with lbq, or the golden
    inputs that it carries."""
    known = net.network.facts.get("data")
    embedded = isinstance(known, dict) and known.get("name") == "digits"
    return golden_set(net) if data is None and not embedded else open_data(net.network, data)


def golden_set(net: Network) -> TestSet:
    """The inputs that a network carries, without labels."""
    if net.golden is None:
        raise ArtefactError("the network carries no golden inputs: give data with --data")
    inputs, static = net.golden.inputs, net.network.static
    return TestSet(
        name=GOLDEN,
        shape=net.network.input_shape,
        static=static,
        size=len(net.golden.logits),
        read=lambda start, stop: inputs[start:stop] if static else inputs[:, start:stop],
    )


def measure(
    net: Network,
    test: TestSet,
    threads: int = 1,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
    membranes: int = 0,
) -> Measurement:
    """Counts of a deployed network on its own levels; accuracy where labels are known.

    membranes: look at the membranes of every n-th image of the set; 0: of none.
    """
    network = net.network
    found = Membranes(network)
    parts: dict[int, Tallies] = {}  # of each thread its own
    images = correct = 0

    def count(name: str, levels: Integers) -> None:
        me = threading.get_ident()
        if me not in parts:
            parts[me] = Tallies(network)
        parts[me].add_layer(name, levels)

    along = 0 if network.static else 1
    for x, which in test.batches(BATCH, limit):
        size = x.shape[along]
        watched = np.arange(images, images + size) % membranes == 0 if membranes else np.zeros(size, bool)
        for inside in (False, True):
            chosen = watched if inside else ~watched
            some = np.compress(chosen, x, along)
            if not some.size:
                continue
            if inside:
                out = net.watch(some, found.add, count)
                if progress is not None:
                    progress(len(out.logits))
            else:
                out = net.run(some, "auto", count, threads, progress=progress)
            if test.labels is not None:
                correct += int((out.predictions == test.labels[which][chosen]).sum())
        count(INPUT, x[None] if network.static else x)
        images += size
    if not images:
        raise DataError(f"{test.name} has no samples to run")
    tallies = Tallies(network)
    for part in parts.values():
        tallies.add_counts(part.counts, 0)
    tallies.images = images
    accuracy = math.nan if test.labels is None else 100 * correct / images
    inputs = GOLDEN if test.name == GOLDEN else "images"
    return Measurement(network, images, accuracy, tallies, images == test.size, found.layers, found.traces(), inputs)


def analyze(
    net: Network,
    test: TestSet,
    threads: int = 1,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
    membranes: int = 32,
    name: str = "",
) -> Analysis:
    """The analysis of a deployed network. name: of its file."""
    known = net.network.facts
    data = known.get("data")
    facts = {
        "kind": "artefact",
        "name": name,
        "dataset": _name(data.get("name")) if isinstance(data, dict) else "",
        "model": _name(known.get("model")),
        "variant": "deployed",
        "timesteps": net.network.timesteps,
        "bits": bits if type(bits := known.get("bits")) is int else None,
        "config_hash": _name(known.get("config_hash")),
        "weights_sha256": _name(known.get("weights_sha256")),
        "data": test.name,
    }
    return measure(net, test, threads, limit, progress, membranes).analysis(facts)


def _name(fact: Any) -> str:
    """What a file says where a name belongs; nothing where it says anything else."""
    return fact if isinstance(fact, str) and is_name(fact) else ""


def read_input(path: Path | str, network: IntegerNetwork) -> NDArray[np.uint8]:
    """One input from a file: an image, upright, scaled and cropped to what the network reads, or a uint8 .npy array, which
    may lack height and width where they are 1."""
    path, shape = Path(path), network.input_shape
    lead = () if network.static else (network.timesteps,)
    if path.suffix == ".npy":
        given = load_array(path)
        array = with_sides(given, shape, len(lead))
        if array.dtype != np.uint8 or array.shape != (*lead, *shape):
            expected = [*lead, *shortest(shape)]
            raise DataError(f"{path} must be uint8 {expected}, not {given.dtype} {list(given.shape)}")
        _check_range(array, network, path)
        return np.asarray(array, np.uint8)
    if not network.static:
        frames = [*lead, *shortest(shape)]
        raise DataError(f"the network reads event frames, no image: give them as a uint8 .npy file of {frames}")
    if shape[0] not in (1, 3) or shape[1] != shape[2]:
        raise DataError(f"the network reads {list(shortest(shape))}, which is no square image: give a uint8 .npy file")
    if not path.is_file():
        raise DataError(f"{path} is not a file: give an image")
    side, data = shape[1], network.facts.get("data")
    files = isinstance(data, dict) and data.get("name") in FILES
    image = folder.load_eval(path, round(side * EVAL_RATIO) if files else side, side, upright=True).astype(np.float64)
    if shape[0] == 1:
        image = np.tensordot([0.299, 0.587, 0.114], image, 1)[None]
    return np.rint(image * (network.input_max / 255)).astype(np.uint8)


def ranking(net: Network, x: NDArray[np.uint8]) -> list[dict[str, Any]]:
    """Classes of one input, the likeliest first, with their share of a softmax over the real-valued logits."""
    return ranked(net.run(x), net.network.classes)


def ranked(out: Output, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The same of what a run gave for its first input."""
    logits = out.logits[0] * out.scale
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    names = classes or tuple(map(str, range(len(logits))))
    order = np.argsort(-out.logits[0], kind="stable")
    return [
        {"class": names[i], "index": int(i), "share": float(shares[i]), "logit": int(out.logits[0, i])} for i in order
    ]
