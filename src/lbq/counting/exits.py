"""Early exit on data: images that margins are chosen on, and what a network with margins executes. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from lbq.counting.inputs import frame_settings
from lbq.counting.operations import Count, Counter, Mode
from lbq.counting.tally import Tallies
from lbq.data.registry import REGISTRY
from lbq.data.testset import TestSet, load_whole
from lbq.engine import exits
from lbq.engine.engine import Network
from lbq.engine.output import Output
from lbq.errors import DataError
from lbq.graph.integer import IntegerNetwork


def calibration_images(
    network: IntegerNetwork, data: str | None, count: int, seed: int = 0
) -> tuple[NDArray[np.uint8], str]:
    """Training images of the network's dataset in random order, those of CIFAR cropped and flipped; and what they are.

    Or event frames `[T, B, C, H, W]`. A network fits its training images, and leads are larger on them than on others. Crops
    and flips come nearer.
    """
    name = str(network.dataset.get("name", ""))  # files may hold anything
    known = REGISTRY.get(name)
    if known is None or known.load is None:
        raise DataError(
            f"margins are chosen on training images in memory, such as CIFAR's, or on event frames, not on "
            f"{name or 'an unnamed dataset'}: call with_exits(images, shares, source) of the network in Python"
        )
    if data is None and name != "digits":
        raise DataError(f"give the folder of {name}, whose training part margins are chosen on")
    if name == "digits" and data not in (None, "digits"):
        raise DataError(f"{data!r} is not what the network was trained on: give digits, or nothing")
    images = np.asarray(load_whole(name, data or "", network.timesteps, *frame_settings(network)).train.images)
    shape = network.input_shape if network.static else (network.timesteps, *network.input_shape)
    if images.shape[1:] != shape:
        raise DataError(f"samples of {name} are {list(images.shape[1:])}, the network reads {list(shape)}")
    random = np.random.default_rng(seed)
    chosen = images[random.permutation(len(images))[:count]]
    if not network.static:
        return np.ascontiguousarray(chosen.swapaxes(0, 1)), f"{len(chosen)} training samples of {name}, seed {seed}"
    if not known.crop:
        return chosen, f"{len(chosen)} training images of {name}, seed {seed}"
    source = f"{len(chosen)} training images of {name}, cropped and flipped, seed {seed}"
    return augmented(chosen, known.crop, random), source


def augmented(images: NDArray[np.uint8], border: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Each shifted by up to `border` pixels, over zeros, and half of them flipped."""
    height, width = images.shape[2:]
    padded = np.pad(images, ((0, 0), (0, 0), (border, border), (border, border)))
    out = np.empty_like(images)
    for image, into in zip(padded, out, strict=True):
        y, x = random.integers(0, 2 * border + 1, 2)
        part = image[:, y : y + height, x : x + width]
        into[...] = part[:, :, ::-1] if random.random() < 0.5 else part
    return out


@dataclass(frozen=True)
class ExitMeasurement:
    """accuracy: percent, NaN without labels. stopped: how many images stopped after 1, 2, ... timesteps. timesteps: executed
    on average for an image, those that were executed again included. exact, rate: accumulations an image, likewise."""

    images: int
    accuracy: float
    stopped: tuple[int, ...]
    timesteps: float
    exact: Count
    rate: Count


def measure_exits(
    net: Network,
    test: TestSet,
    threads: int | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ExitMeasurement:
    """Counts of a network whose inputs stop early, on its own levels."""
    network = net.network
    exits.margins_of(network)
    stages = net.stages()
    tallies = [Tallies(stage.network) for stage in stages]
    stopped = np.zeros(network.timesteps, np.int64)
    images = correct = 0

    def counted(timesteps: int, x: NDArray[np.uint8]) -> Output:
        out = stages[timesteps - 1].run(x, trace=True, threads=threads)
        tallies[timesteps - 1].add(out.levels)
        return out

    for x, which in test.batches(limit=limit):
        out = exits.run(network, x, counted)
        assert out.timesteps is not None
        stopped += np.bincount(out.timesteps - 1, minlength=network.timesteps)
        images += len(out.logits)
        if test.labels is not None:
            correct += int((out.predictions == test.labels[which]).sum())
        if progress is not None:
            progress(len(out.logits))

    def total(mode: Mode) -> Count:
        counted = Count()
        for stage, tally in zip(stages, tallies, strict=True):
            if tally.images:
                share = tally.images / images
                one = Counter(stage.network, mode, tally).account().total
                counted = counted + Count(**{name: share * value for name, value in asdict(one).items()})
        return counted

    executed = sum((number + 1) * tally.images for number, tally in enumerate(tallies))
    accuracy = math.nan if test.labels is None else 100 * correct / images
    return ExitMeasurement(images, accuracy, tuple(stopped.tolist()), executed / images, total("exact"), total("rate"))
