"""Are some networks better than others? Means over trainings with Student's and Welch's intervals, and a paired bootstrap over
test samples. NumPy only.

The intervals answer different questions. Over trainings, and of the same seed: would other seeds show the difference too? Over
samples, with these networks as they are: would other test images show it? docs/howto/compare.md says when to look at which.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.config import recipe_hash
from lbq.counting.outcomes import unpacked
from lbq.data.registry import OWN_DATA
from lbq.errors import LbqError
from lbq.results.result import Result

CONFIDENCE = 0.95
RESAMPLES = 10_000
RESAMPLED_AT_A_TIME = 200
NODES = 200  # of the integral in Student's distribution, which is then exact to 1e-11

Interval = tuple[float, float]


@dataclass(frozen=True)
class Side:
    """Some networks of one kind, one for each training.

    sources: their files. accuracies: in percent. right: samples by their order, the mean over the networks; None where one of
    them does not say it. on_integers: whether each accuracy is the deployed network's. seeds: of each, if its record says it.
    """

    sources: tuple[str, ...]
    accuracies: tuple[float, ...]
    right: NDArray[np.float64] | None
    on_integers: tuple[bool, ...] = ()
    seeds: tuple[int | None, ...] = ()

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def deviation(self) -> float | None:
        """Of the sample; None of one."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None  # exactly 0 where they are equal

    @property
    def interval(self) -> Interval | None:
        """Student's, of the mean over trainings; None of one."""
        if self.deviation is None:
            return None
        n = len(self.accuracies)
        half = student(n - 1) * self.deviation / math.sqrt(n)
        return self.mean - half, self.mean + half

    def to_dict(self) -> dict[str, Any]:
        return {
            "networks": [
                {"source": source, "accuracy": accuracy, "on_integers": on_integers}
                for source, accuracy, on_integers in zip(self.sources, self.accuracies, self.on_integers, strict=True)
            ],
            "mean": self.mean,
            "deviation": self.deviation,
            "interval": self.interval,
        }


@dataclass(frozen=True)
class Comparison:
    """difference: of the means, in points. over_trainings: Welch's interval; None where a side has one network, or where none
    of either side differ. by_seed: the differences of the same seed; None unless both sides have the same seeds, two or more,
    and these differ. over_samples: of the bootstrap; None where a network does not say which samples it gets right."""

    ours: Side
    theirs: Side
    difference: float
    over_trainings: Interval | None
    over_samples: Interval | None
    samples: int | None
    by_seed: Side | None = None

    def __str__(self) -> str:
        lines = [f"{name:8}{_described(side)}" for name, side in (("ours", self.ours), ("theirs", self.theirs))]
        if len({*self.ours.on_integers, *self.theirs.on_integers}) > 1:
            lines.append("some are on integers and some in float: --float compares all in float")
        lines.append(f"ours - theirs: {self.difference:+.3f} points")
        percent = f"{100 * CONFIDENCE:.0f} %"
        if self.over_trainings is None:
            lines.append("over trainings: not known, each side needs two or more, which differ")
        else:
            lines.append(f"over trainings, {percent}: {_shown(self.over_trainings)} (Welch)")
        if self.by_seed is not None and self.by_seed.interval is not None:
            error = (self.by_seed.deviation or 0.0) / math.sqrt(len(self.by_seed.accuracies))
            each = ", ".join(f"{difference:+.2f}" for difference in self.by_seed.accuracies)
            lines.append(
                f"of the same seed, {percent}: {_shown(self.by_seed.interval)} (Student; {each}; standard error {error:.3f})"
            )
        if self.over_samples is None:
            lines.append(
                "over test samples: not known, an older file does not say which samples are right: train, or analyse, again"
            )
        else:
            lines.append(
                f"over test samples, {percent}: {_shown(self.over_samples)} (paired bootstrap, {self.samples:,} samples)"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ours": self.ours.to_dict(),
            "theirs": self.theirs.to_dict(),
            "difference": self.difference,
            "confidence": CONFIDENCE,
            "over_trainings": self.over_trainings,
            "by_seed": self.by_seed and {"differences": self.by_seed.accuracies, "interval": self.by_seed.interval},
            "over_samples": self.over_samples,
            "samples": self.samples,
        }


def _shown(interval: Interval) -> str:
    return f"{interval[0]:+.3f} to {interval[1]:+.3f}"


def _described(side: Side) -> str:
    count = len(side.accuracies)
    each = ", ".join(f"{accuracy:.2f}" for accuracy in side.accuracies)
    deployed = sum(side.on_integers)
    where = "on integers" if deployed == count else "in float" if not deployed else f"{deployed} of them on integers"
    if side.interval is None:
        return f"{side.mean:.3f} %, one training, {where}"
    low, high = side.interval
    return (
        f"{side.mean:.3f} % of {count} trainings ({each}), {where}, {100 * CONFIDENCE:.0f} %: {low:.3f} to {high:.3f}"
    )


def compare(ours: Sequence[Result], theirs: Sequence[Result], in_float: bool = False, seed: int = 0) -> Comparison:
    """Ours minus theirs. in_float: accuracies of the trained networks, also where a deployed one was measured."""
    _check_same_part((*ours, *theirs))
    datasets = {str(result.record["dataset"]) for result in (*ours, *theirs)}
    if len(datasets) > 1:
        raise LbqError(f"results of several datasets cannot be compared: {', '.join(sorted(datasets))}")
    _check_same_data((*ours, *theirs))
    first, second = (_side(some, in_float) for some in (ours, theirs))
    _check_apart(ours, theirs)
    samples = None
    over_samples = None
    if first.right is not None and second.right is not None:
        if len(first.right) != len(second.right):
            raise LbqError(f"one side was tested on {len(first.right)} samples, the other on {len(second.right)}")
        samples = len(first.right)
        over_samples = bootstrap(100 * (first.right - second.right), seed)
    difference, over_trainings = first.mean - second.mean, welch(first, second)
    return Comparison(first, second, difference, over_trainings, over_samples, samples, _by_seed(first, second))


def _by_seed(ours: Side, theirs: Side) -> Side | None:
    """Differences of trainings of the same seed, which begin with the same random numbers; None where seeds are others, or
    where all differences are equal."""
    seeds = sorted(seed for seed in ours.seeds if seed is not None)
    known = [seed for seed in theirs.seeds if seed is not None]
    alike = seeds == sorted(known) and len(set(seeds)) == len(ours.seeds) == len(theirs.seeds)
    if not alike or len(seeds) < 2:
        return None
    pairs = [(ours.accuracies[ours.seeds.index(s)], theirs.accuracies[theirs.seeds.index(s)]) for s in seeds]
    differences = Side(tuple(map(str, seeds)), tuple(round(one - other, 9) for one, other in pairs), None)
    return differences if differences.deviation else None


def _check_apart(ours: Sequence[Result], theirs: Sequence[Result]) -> None:
    """Refuse a training that is on both sides."""
    for one in ours:
        for other in theirs:
            weights = one.record.get("weights_sha256")
            if one.source == other.source or (weights and weights == other.record.get("weights_sha256")):
                raise LbqError(f"{one.source} is on both sides: compare it with another training")


def _check_same_data(results: Sequence[Result]) -> None:
    """Refuse users' own data of one name that are not the same files. What only an analysis is left of does not say it."""
    first: dict[int, Result] = {}  # of image files, older records have a shorter hash, of labels alone
    for other in (r for r in results if r.record["dataset"] in OWN_DATA and r.record.get("data_sha256")):
        known = first.setdefault(len(str(other.record["data_sha256"])), other)
        if other.record["data_sha256"] != known.record["data_sha256"]:
            raise LbqError(
                f"{known.source} and {other.source} are of different data (data_sha256): compare networks of the same"
            )


def _check_same_part(results: Sequence[Result]) -> None:
    """Refuse trainings and tests on parts of a dataset (data.limit) that are not the same for all."""
    if len({result.limit for result in results}) > 1:
        one = next(result for result in results if result.limit)
        raise LbqError(
            f"{one.source} was tested on a part of its test set (data.limit={one.limit}): compare it with trainings on the "
            "same part"
        )


def _check_one_kind(results: Sequence[Result]) -> None:
    """Refuse trainings of one side that differ in more than their seed."""
    known = [r for r in results if not r.alone]
    for other in known[1:]:
        if recipe_hash(other.record["config"]) != recipe_hash(known[0].record["config"]):
            raise LbqError(
                f"{known[0].source} and {other.source} differ in more than their seed: give trainings of one kind on each "
                "side, and an --against for each of the other side"
            )
        if other.own_code != known[0].own_code:
            raise LbqError(
                f"{known[0].source} and {other.source} were trained with different files of your own "
                f"({known[0].own_code or 'none'}; {other.own_code or 'none'}): give trainings of one kind on each side"
            )


def _side(results: Sequence[Result], in_float: bool) -> Side:
    if not results:
        raise LbqError("each side of a comparison needs at least one result")
    _check_one_kind(results)
    accuracies, rights, deployed = [], [], []
    for result in results:
        on_integers = not in_float and result.integer_accuracy is not None
        accuracy = result.integer_accuracy if on_integers else result.accuracy
        if accuracy is None:
            raise LbqError(f"{result.source} has no test accuracy: it was not tested, or is not finished")
        accuracies.append(accuracy)
        deployed.append(on_integers)
        rights.append(_right(result, on_integers))
    sizes = {len(right) for right in rights if right is not None}
    if len(sizes) > 1:
        raise LbqError(f"results of test sets of {' and '.join(map(str, sorted(sizes)))} samples cannot be compared")
    known = [right for right in rights if right is not None]
    mean = np.mean(known, axis=0) if len(known) == len(rights) else None
    seeds = tuple(None if (seed := result.record.get("seed")) is None else int(seed) for result in results)
    return Side(tuple(result.source for result in results), tuple(accuracies), mean, tuple(deployed), seeds)


def _right(result: Result, on_integers: bool) -> NDArray[np.bool_] | None:
    """Which samples a network gets right, where that is known."""
    if on_integers:
        whole = (a.outcomes for a in result.analyses if a.deployed and a.of_test_set and a.outcomes is not None)
        stored = next(whole, None)
    else:
        stored = result.record.get("outcomes")
    return None if stored is None else unpacked(stored, result.source)


# Statistics
# ---------------------------------------------------------------------------------------------------------------------


def welch(ours: Side, theirs: Side) -> Interval | None:
    """Of the difference of two means, whose deviations may differ (B. L. Welch, 1947)."""
    if ours.deviation is None or theirs.deviation is None:
        return None
    parts = [side.deviation**2 / len(side.accuracies) for side in (ours, theirs) if side.deviation is not None]
    variance, difference = sum(parts), ours.mean - theirs.mean
    if not variance:  # a few test samples: two accuracies are equal by chance
        return None
    squares = zip(parts, (ours, theirs), strict=True)
    freedom = variance**2 / sum(part**2 / (len(side.accuracies) - 1) for part, side in squares)
    half = student(freedom) * math.sqrt(variance)
    return difference - half, difference + half


def student(freedom: float, confidence: float = CONFIDENCE) -> float:
    """The t that so many degrees of freedom stay within by this probability, on both sides of 0."""
    points, weights = np.polynomial.legendre.leggauss(NODES)

    def within(angle: float) -> float:
        """With t = sqrt(freedom) tan(angle), Student's density becomes cos(angle)^(freedom - 1)."""
        angles = angle * (points + 1) / 2
        return float((np.cos(angles) ** (freedom - 1) * weights).sum() * angle / 2)

    # at a right angle, where the density has no slope below 2 degrees of freedom: its integral in closed form
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < confidence * whole else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def bootstrap(differences: NDArray[np.float64], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Of the mean of differences, one for each sample, by drawing as many samples again and again (B. Efron, 1979)."""
    random, n = np.random.default_rng(seed), len(differences)
    means = []
    for start in range(0, resamples, RESAMPLED_AT_A_TIME):
        drawn = random.integers(0, n, (min(RESAMPLED_AT_A_TIME, resamples - start), n))
        means.append(differences[drawn].mean(1))
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.concatenate(means), (outside, 100 - outside))
    return float(low), float(high)
