"""Figures of training: loss and accuracy over epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lbq.report.figures import Figure, by_task, padded, seeds, series_of, titles
from lbq.report.plot import Plot, label, ticks
from lbq.report.svg import Point
from lbq.report.theme import DASHES
from lbq.results.result import Gathered, Result, by_key, names

CURVES = (  # key in the log, title, unit
    ("loss", "Training loss", "loss"),
    ("holdout_accuracy", "Held-out accuracy", "accuracy %"),
    ("test_accuracy", "Test accuracy", "accuracy %"),
)
SHORT_TRAINING_EPOCHS = 30  # of which the axis shows all


@dataclass(frozen=True)
class Run:
    """A run in a figure. label: its legend, which seeds may share; dash: of its seed, where seeds share a colour."""

    result: Result
    series: int
    name: str
    label: str
    dash: str | None = None


def training_figures(gathered: Gathered) -> list[Figure]:
    """The logs of runs of one dataset and recipe in one figure. Unfinished ones end early."""
    colour = series_of(gathered)
    logged = [r for r in gathered.results if r.record["log"]]
    return by_task(logged, lambda heading, file, results: _figures_of_task(_runs(results, colour), heading, file))


def _runs(results: Sequence[Result], colour: dict[str, int]) -> list[Run]:
    """Colour and mark tell configurations, dashes their seeds; colour tells the seeds of a single configuration."""
    groups = by_key(results)
    named = list(zip(titles(groups), groups, strict=True))
    if len(groups) == len(results):
        return [Run(r, colour[r.source], name := _legend_text(title, [r]), name) for title, (r,) in named]
    if len(groups) == 1:
        alone = zip(names(results), results, strict=True)
        return [Run(r, i, name := _legend_text(title, [r]), name) for i, (title, r) in enumerate(alone)]
    seed_order = sorted({r.record["seed"] for r in results})
    runs = []
    for title, group in named:
        for r in group:
            name = _legend_text(f"{title}, {seeds([r])}" if len(group) > 1 else title, [r])
            dash = DASHES[seed_order.index(r.record["seed"]) % len(DASHES)]
            runs.append(Run(r, colour[r.source], name, _legend_text(title, group), dash))
    return runs


def _legend_text(title: str, group: Sequence[Result]) -> str:
    """The title with the number of seeds, and whether they are finished."""
    return title + (f", {seeds(group)}" if len(group) > 1 else "") + ("" if group[0].finished else " (unfinished)")


def _draw(plot: Plot, curves: Sequence[tuple[Run, Sequence[Point]]]) -> str:
    """Draw the curve of each run, and the legend. Returns the caption's sentence on seeds."""
    for run, curve in curves:
        plot.line(curve, run.series, [f"{run.name}, epoch {x:.0f}: {y:.4g}" for x, y in curve], dash=run.dash)
    ordered = sorted((run for run, _ in curves), key=lambda run: int(run.result.record["seed"]))
    dashes = {seeds([run.result]): run.dash for run in ordered if run.dash is not None}
    plot.legend(list(dict.fromkeys((run.label, run.series) for run, _ in curves)), list(dashes.items()))
    return " Seeds differ in their dashes." if dashes else ""


def _figures_of_task(runs: Sequence[Run], where: str, file: str) -> list[Figure]:
    figures = []
    for key, title, unit in CURVES:
        points = [
            (run, [(float(e["epoch"]), float(e[key])) for e in run.result.record["log"] if e.get(key) is not None])
            for run in runs
        ]
        shown = [(run, curve) for run, curve in points if curve]
        curves = [curve for _, curve in shown]
        if not curves or (key != "loss" and all(len(curve) == 1 for curve in curves)):
            continue  # a single test is in the tables
        values = [y for curve in curves for _, y in curve]
        late = [y for curve in curves for y in _late(curve)]
        seen = (min(values), max(late)) if key == "loss" else (min(late), max(values))
        low, high = padded(seen)
        span = (max(low, 0.0), high if key == "loss" else min(high, 100.0))
        first, last = _first(curves, span), max(x for curve in curves for x, _ in curve)
        epochs = (first, last) if first < last else (first - 0.5, first + 0.5)
        plot = Plot(
            title,
            f"{title} over epochs; at the end: " + "; ".join(f"{run.name} {c[-1][1]:.4g}" for run, c in shown),
            epochs,
            span,
            "epoch",
            unit,
            xticks=[(t, label(t)) for t in ticks(*epochs) if t == round(t)],
            subtitle=where,
        )
        dashes = _draw(plot, shown)
        note = "Every epoch." if key == "loss" else "At the epochs at which it was measured; the last is the result."
        if seen != (min(values), max(values)):
            way = "above" if key == "loss" else "below"
            note += f" The axes show what the second half of training spans: what lies {way} is cut off."
        figures.append(Figure(f"training-{key.removeprefix('test_')}-{file}", title, note + dashes, plot.svg()))
    return figures


def _late(curve: Sequence[Point]) -> list[float]:
    """The values of the second half; all of a short curve."""
    last = curve[-1][0]
    return [y for x, y in curve if last <= SHORT_TRAINING_EPOCHS or x > last / 2]


def _first(curves: Sequence[Sequence[Point]], span: tuple[float, float]) -> float:
    """The epoch from which on there is something to see."""
    seen = []
    for curve in curves:
        inside = next((i for i, (_, y) in enumerate(curve) if span[0] <= y <= span[1]), 0)
        seen.append(curve[max(inside - 1, 0)][0])
    return min(seen)
