"""What the figures of a report have in common: colours of runs and levels, names, axes, one set for each dataset."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lbq.report.cells import DATASETS
from lbq.report.svg import shade
from lbq.results import Gathered


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


def series_of(found: Gathered) -> dict[str, int]:
    """One colour for each run, the same in all figures: by where it came from."""
    return {result.source: i for i, result in enumerate(found.results)}


def padded(values: Sequence[float], floor: float | None = None) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return (low - room if floor is None else floor), high + room


def slug(text: str) -> str:
    """`text` as part of a file's name, whatever it holds."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


def by_dataset(found: Gathered, draw: Callable[[Gathered, dict[str, int], str], list[Figure]]) -> list[Figure]:
    """Figures of each dataset's runs for themselves: curves of different tasks do not belong on one axis."""
    datasets = list(dict.fromkeys(str(r.record["dataset"]) for r in found.results))
    figures = []
    for i, dataset in enumerate(datasets):
        part = replace(found, results=[r for r in found.results if r.record["dataset"] == dataset])
        name = DATASETS.get(dataset, dataset)
        for figure in draw(part, series_of(found), name):
            id = f"{figure.id}-{slug(dataset) or i}" if i else figure.id
            figures.append(
                replace(figure, id=id, title=f"{figure.title} on {name}" if len(datasets) > 1 else figure.title)
            )
    return figures
