"""Figures of training: loss, accuracy and the range of steps over epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lbq.report.figures import Figure, by_dataset, by_recipe, padded
from lbq.report.svg import Plot, Point, label, whole_ticks
from lbq.results import Gathered, Result, names

FEW = 30  # epochs up to which the whole of training is on the axis


def training_figures(found: Gathered) -> list[Figure]:
    """Of all runs that have a log, those of one recipe together; unfinished ones end early."""
    return by_dataset(found, _training)


def _training(found: Gathered, colour: dict[str, int], dataset: str) -> list[Figure]:
    recipes = by_recipe([r for r in found.results if r.record["log"]])
    figures = []
    for suffix, recipe, results in recipes:
        for figure in _of_one_recipe(results, colour, dataset, recipe):
            title = figure.title if len(recipes) == 1 else f"{figure.title}, {recipe}"
            figures.append(replace(figure, id=f"{figure.id}{suffix}", title=title))
    return figures


def _of_one_recipe(results: Sequence[Result], colour: dict[str, int], dataset: str, recipe: str) -> list[Figure]:
    titles = [
        f"{name} (unfinished)" if not r.finished else name
        for name, r in zip(names(results, recipe=False), results, strict=True)
    ]
    figures = []
    for key, title, unit in (("loss", "Training loss", "loss"), ("test_accuracy", "Test accuracy", "accuracy %")):
        curves = [
            [(float(e["epoch"]), float(e[key])) for e in r.record["log"] if e.get(key) is not None] for r in results
        ]
        if not any(curves):
            continue
        values = [y for curve in curves for _, y in curve]
        late = [y for curve in curves for y in _late(curve)]
        seen = (min(values), max(late)) if key == "loss" else (min(late), max(values))
        low, high = padded(seen)
        span = (max(low, 0.0), high if key == "loss" else min(high, 100.0))
        plot = _over_epochs(
            title,
            f"{title} over epochs; at the end: "
            + "; ".join(f"{t} {c[-1][1]:.4g}" for t, c in zip(titles, curves, strict=True) if c),
            (_first(curves, span), max(x for curve in curves for x, _ in curve)),
            span,
            unit,
            f"{dataset}, {recipe}",
        )
        shown = [(colour[r.source], t, c) for r, t, c in zip(results, titles, curves, strict=True) if c]
        for series, name, curve in shown:
            plot.line(curve, series, [f"{name}, epoch {x:.0f}: {y:.4g}" for x, y in curve])
        plot.legend([(name, series) for series, name, _ in shown])
        note = "Every epoch." if key == "loss" else "At the epochs at which it was measured; the last is the result."
        if seen != (min(values), max(values)):
            way = "above" if key == "loss" else "below"
            note += f" The axes show what the second half of training spans: what lies {way} is cut off."
        figures.append(Figure(f"training-{key}", title, note, plot.svg()))
    return [*figures, *_step_ranges(results, titles, colour, f"{dataset}, {recipe}")]


def _late(curve: Sequence[Point]) -> list[float]:
    """The values of the second half; all of a short curve."""
    last = curve[-1][0] if curve else 0.0
    return [y for x, y in curve if last <= FEW or x > last / 2]


def _first(curves: Sequence[Sequence[Point]], span: tuple[float, float]) -> float:
    """The epoch from which on something is to be seen."""
    seen = []
    for curve in filter(None, curves):
        inside = next((i for i, (_, y) in enumerate(curve) if span[0] <= y <= span[1]), 0)
        seen.append(curve[max(inside - 1, 0)][0])
    return min(seen)


def _over_epochs(
    title: str, description: str, x: tuple[float, float], y: tuple[float, float], ylabel: str, subtitle: str
) -> Plot:
    x = x if x[0] < x[1] else (x[0] - 0.5, x[0] + 0.5)
    xticks = [(t, label(t)) for t in whole_ticks(*x)]
    return Plot(title, description, x, y, "epoch", ylabel, xticks=xticks, subtitle=subtitle)


def _step_ranges(
    results: Sequence[Result], titles: Sequence[str], colour: dict[str, int], subtitle: str
) -> list[Figure]:
    logs: list[tuple[int, str, list[dict[str, Any]]]] = [
        (colour[r.source], title, [e for e in r.record["log"] if None not in (e.get("step_min"), e.get("step_max"))])
        for r, title in zip(results, titles, strict=True)
        if r.record.get("step") != "fixed"
    ]
    logs = [entry for entry in logs if entry[2]]
    if not logs:
        return []
    plot = _over_epochs(
        "Smallest and largest step",
        "The range of the learned steps over all layers, by epoch",
        (min(e["epoch"] for _, _, log in logs for e in log), max(e["epoch"] for _, _, log in logs for e in log)),
        (0, 1.06 * max(e["step_max"] for _, _, log in logs for e in log)),
        "step γ",
        subtitle,
    )
    for series, title, log in logs:
        for key, end in (("step_min", "smallest"), ("step_max", "largest")):
            points = [(float(e["epoch"]), float(e[key])) for e in log]
            plot.line(points, series, [f"{title}, {end}, epoch {x:.0f}: {y:.4g}" for x, y in points])
    plot.legend([(title, series) for series, title, _ in logs])
    return [Figure("training-steps", plot.title, "Over all layers of a network; two curves for each run.", plot.svg())]
