"""The shared parts of a report's figures: colours of runs and levels, names, axes, one set for each task."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lbq.data.registry import REGISTRY
from lbq.report.cells import shown_dataset
from lbq.report.theme import shade
from lbq.results.result import Gathered, Result, by_key, names

DATASET_LETTERS = 12  # of a dataset in a file's name


@dataclass(frozen=True)
class Figure:
    """id: names its place on a page and its file, at most 40 letters."""

    id: str
    title: str
    caption: str
    svg: str


def level_colour(k: int, n_max: int) -> str:
    """The colour of level k = 1..n_max: higher levels stand out more from the page."""
    return f"var(--{shade(k, n_max)})"


def series_of(gathered: Gathered) -> dict[str, int]:
    """The series of each run's configuration, by the run's source: one and the same in all figures."""
    times = Counter[tuple[str, str]]()
    series: dict[str, int] = {}
    for results in by_key(gathered.results):
        figure = (results[0].dataset, results[0].recipe)
        series |= {result.source: times[figure] for result in results}
        times[figure] += 1
    return series


def padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


Thing = TypeVar("Thing")


def unbeaten(things: Iterable[Thing], price: Callable[[Thing], float], worth: Callable[[Thing], float]) -> list[Thing]:
    """Those of which none is worth more at as low a price, or as much at a lower one; the cheapest first."""
    best: list[Thing] = []
    for thing in sorted(things, key=lambda one: (price(one), -worth(one))):
        if not best or worth(thing) > worth(best[-1]):
            best.append(thing)
    return best


Draw = Callable[[str, str, list[Result]], list[Figure]]  # from a heading, part of a file's name and runs


def by_task(results: Sequence[Result], draw: Draw) -> list[Figure]:
    """Figures of each dataset and recipe, drawn by `draw(heading, file, results)`: tasks do not share an axis.

    `heading` and `file` say both, so that another task renames nothing.
    Of one dataset, the recipe with most of the ablation's methods comes first, then the longest.
    """

    def rank(task: Sequence[Result]) -> tuple[int, int]:
        methods = {r.record["variant"] for r in task if r.plain} & {"v1", "v2", "v3", "lbq"}
        return -len(methods), -int(task[0].record["epochs"])

    tasks: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        tasks.setdefault(result.dataset, {}).setdefault(result.recipe, []).append(result)
    known = list(REGISTRY)
    datasets = sorted(tasks, key=lambda dataset: known.index(dataset) if dataset in known else len(known))
    slugs = [slug(dataset, DATASET_LETTERS) for dataset in datasets]
    figures: list[Figure] = []
    for i, dataset in enumerate(datasets):
        name = shown_dataset(dataset)
        unique = slugs[i] and slugs[i] not in slugs[:i]
        data_file = slugs[i] if unique else f"{slugs[i]}-{i}".strip("-")
        for task in sorted(tasks[dataset].values(), key=rank):
            recipe = task[0].recipe
            decayed = "".join(f"-{slug(part, 8)}" for part in task[0].decayed)
            file = f"{data_file}-{task[0].record['epochs']}ep{decayed}"
            figures += draw(f"{name}, {recipe}", file, task)
    return figures


def titles(groups: Sequence[Sequence[Result]]) -> list[str]:
    """Names that tell configurations, each a list of seeds, apart."""
    return names([replace(results[0], record={**results[0].record, "seed": 0}) for results in groups])


def seeds(results: Sequence[Result]) -> str:
    """The seed, or how many there are."""
    return f"{len(results)} seeds" if len(results) > 1 else f"seed {results[0].record.get('seed')}"


def slug(text: str, letters: int) -> str:
    """The first words of `text` as part of a file's name, in at most so many letters."""
    words = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    if len(words) <= letters:
        return words
    return words[: letters + 1].rpartition("-")[0] or words[:letters]
