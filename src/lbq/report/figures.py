"""What the figures of a report have in common: colours of runs and levels, names, axes, one set for each task."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lbq.report.cells import DATASETS
from lbq.report.svg import shade
from lbq.results.result import Gathered, Result, by_key, names

DATASET_LETTERS = 12  # of a dataset in a file's name


@dataclass(frozen=True)
class Figure:
    """id: of the place on a page and of a file, at most 40 letters; caption: what is seen and from what; wide: over all columns
    of the page."""

    id: str
    title: str
    caption: str
    svg: str
    wide: bool = False


def level_colour(k: int, n_max: int) -> str:
    """Of level k = 1..n_max: the further from the paper, the higher."""
    return f"var(--{shade(k, n_max)})"


def series_of(found: Gathered) -> dict[str, int]:
    """By where a run came from, the colour of its configuration: the same in all figures, and in no figure that of another."""
    times = Counter[tuple[str, str]]()
    series: dict[str, int] = {}
    for results in by_key(found.results):
        figure = (str(results[0].record["dataset"]), results[0].recipe)
        series |= {result.source: times[figure] for result in results}
        times[figure] += 1
    return series


def padded(values: Sequence[float], floor: float | None = None) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return (low - room if floor is None else floor), high + room


Draw = Callable[[str, str, list[Result]], list[Figure]]  # from a heading, part of a file's name and runs


def by_task(results: Sequence[Result], draw: Draw) -> list[Figure]:
    """Figures of each dataset and recipe for themselves, drawn by `draw(heading, file, results)`: curves of different tasks
    do not belong on one axis. Titles say dataset and recipe where there are several.

    Of one dataset, the recipe that has most of the ablation's methods comes first, then the longest. `file` says dataset and
    recipe even where there is one of each, so that another of them renames no file.
    """
    tasks: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        tasks.setdefault(str(result.record["dataset"]), {}).setdefault(result.recipe, []).append(result)
    known = list(DATASETS)
    datasets = sorted(tasks, key=lambda dataset: known.index(dataset) if dataset in known else len(known))
    files = _file_names(datasets)
    figures: list[Figure] = []
    for dataset in datasets:
        name = DATASETS.get(dataset, dataset)
        where = f" on {name}" if len(datasets) > 1 else ""
        for of in sorted(tasks[dataset].values(), key=_rank):
            recipe = of[0].recipe
            title = (f", {recipe}" if len(tasks[dataset]) > 1 else "") + where
            decayed = "".join(f"-{slug(part, 8)}" for part in of[0].decayed)
            file = f"{files[dataset]}-{of[0].record['epochs']}ep{decayed}"
            figures += [replace(f, title=f"{f.title}{title}") for f in draw(f"{name}, {recipe}", file, of)]
    return figures


def _rank(of: Sequence[Result]) -> tuple[int, int]:
    methods = {r.record["variant"] for r in of if r.plain} & {"v1", "v2", "v3", "lbq"}
    return -len(methods), -int(of[0].record["epochs"])


def _file_names(datasets: Sequence[str]) -> dict[str, str]:
    """What each dataset is called in the names of files: its own name, and its number where that is no name or another's."""
    slugs = [slug(dataset, DATASET_LETTERS) for dataset in datasets]
    return {
        dataset: name if name and name not in slugs[:i] else f"{name}-{i}".strip("-")
        for i, (dataset, name) in enumerate(zip(datasets, slugs, strict=True))
    }


def titles(groups: Sequence[Sequence[Result]]) -> list[str]:
    """Names that tell configurations apart, each given by its seeds, whichever these are."""
    return names([replace(results[0], record={**results[0].record, "seed": 0}) for results in groups])


def seeds(results: Sequence[Result]) -> str:
    """Which seed, or how many."""
    return f"{len(results)} seeds" if len(results) > 1 else f"seed {results[0].record.get('seed')}"


def slug(text: str, letters: int) -> str:
    """`text` as part of a file's name, whatever it holds: its first words, in at most so many letters."""
    words = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    if len(words) <= letters:
        return words
    return words[: letters + 1].rpartition("-")[0] or words[:letters]
