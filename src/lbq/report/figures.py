"""What the figures of a report have in common: colours of runs and levels, names, axes, one set for each dataset."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lbq.report.cells import DATASETS
from lbq.report.svg import shade
from lbq.results.result import Gathered, Result, names


@dataclass(frozen=True)
class Figure:
    """caption: what is seen and from what; wide: over all columns of the page."""

    id: str
    title: str
    caption: str
    svg: str
    wide: bool = False


def level_colour(k: int, n_max: int) -> str:
    """Of level k = 1..n_max: the further from the paper, the higher."""
    return f"var(--{shade(k, n_max)})"


def configurations(results: Sequence[Result]) -> list[list[Result]]:
    """The seeds of each configuration, in the order in which these come; those that are not finished are apart."""
    found, halves = Gathered(list(results)), dict[str, list[Result]]()
    for result in found.unfinished:
        halves.setdefault(result.key, []).append(result)
    place = {result.source: i for i, result in enumerate(results)}
    return sorted([*(group.results for group in found.groups), *halves.values()], key=lambda of: place[of[0].source])


def series_of(found: Gathered) -> dict[str, int]:
    """By where a run came from, the colour of its configuration: the same in all figures, and in no figure that of another."""
    times = Counter[tuple[str, str]]()
    series: dict[str, int] = {}
    for results in configurations(found.results):
        figure = (str(results[0].record["dataset"]), results[0].recipe)
        series |= {result.source: times[figure] for result in results}
        times[figure] += 1
    return series


def padded(values: Sequence[float], floor: float | None = None) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return (low - room if floor is None else floor), high + room


def by_recipe(results: Sequence[Result], draw: Callable[[str, list[Result]], list[Figure]]) -> list[Figure]:
    """Figures of each recipe's results for themselves, drawn by `draw(recipe, results)`; their ids say the recipe, and their
    titles where there are several.

    The one that has most of the ablation's methods comes first, then the longest, then the shipped one.
    """
    recipes: dict[str, list[Result]] = {}
    for result in results:
        recipes.setdefault(result.recipe, []).append(result)

    def rank(entry: tuple[str, list[Result]]) -> tuple[int, int, str]:
        recipe, of = entry
        methods = {r.record["variant"] for r in of if r.plain} & {"v1", "v2", "v3", "lbq"}
        return -len(methods), -int(of[0].record["epochs"]), "" if recipe.endswith("decayed") else recipe

    return [
        replace(
            figure,
            id=f"{figure.id}-{slug(recipe)}",
            title=figure.title if len(recipes) == 1 else f"{figure.title}, {recipe}",
        )
        for recipe, of in sorted(recipes.items(), key=rank)
        for figure in draw(recipe, of)
    ]


def titles(groups: Sequence[Sequence[Result]]) -> list[str]:
    """Names that tell configurations of one recipe apart, each given by its seeds. Of several no single one is named."""
    single = [results[0].record.get("seed") for results in groups if len(results) == 1]
    return [
        f"{title}, {seeds(results)}" if len(results) == 1 and len(set(single)) > 1 else title
        for title, results in zip(seedless(groups), groups, strict=True)
    ]


def seedless(groups: Sequence[Sequence[Result]]) -> list[str]:
    """The same, whatever their seeds: for files, which another seed must not rename."""
    alike = [replace(results[0], record={**results[0].record, "seed": 0}) for results in groups]
    return names(alike, recipe=False)


def seeds(results: Sequence[Result]) -> str:
    """Which seed, or how many."""
    return f"{len(results)} seeds" if len(results) > 1 else f"seed {results[0].record.get('seed')}"


def slug(text: str) -> str:
    """`text` as part of a file's name, whatever it holds."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


def by_dataset(found: Gathered, draw: Callable[[Gathered, dict[str, int], str], list[Figure]]) -> list[Figure]:
    """Figures of each dataset's runs for themselves: curves of different tasks do not belong on one axis.

    Ids say dataset and recipe even where there is one of each, so that another of them renames no file.
    """
    known = list(DATASETS)
    datasets = list(dict.fromkeys(str(r.record["dataset"]) for r in found.results))
    datasets.sort(key=lambda dataset: known.index(dataset) if dataset in known else len(known))
    figures: list[Figure] = []
    slugs = [slug(dataset) for dataset in datasets]
    for i, dataset in enumerate(datasets):
        file = slugs[i] if slugs[i] and slugs[i] not in slugs[:i] else f"{slugs[i]}-{i}".strip("-")
        part = replace(found, results=[r for r in found.results if r.record["dataset"] == dataset])
        name = DATASETS.get(dataset, dataset)
        where = f" on {name}" if len(datasets) > 1 else ""
        figures += [
            replace(figure, id=f"{figure.id}-{file}", title=f"{figure.title}{where}")
            for figure in draw(part, series_of(found), name)
        ]
    return figures
