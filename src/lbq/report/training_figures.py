"""Figures of training: loss, accuracy and the range of steps over epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lbq.report.figures import Figure, by_task, padded, seeds, series_of, titles
from lbq.report.svg import DASHES, Plot, Point, label, ticks
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

    @property
    def log(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.result.record["log"]
        return entries


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


def _draw(plot: Plot, curves: Sequence[tuple[Run, str, Sequence[Point]]]) -> str:
    """Draw curves (run, what follows its name, points) and the legend. Returns the caption's sentence on seeds."""
    for run, suffix, curve in curves:
        tips = [f"{run.name}{suffix}, epoch {x:.0f}: {y:.4g}" for x, y in curve]
        plot.line(curve, run.series, tips, dash=run.dash)
    ordered = sorted((run for run, _, _ in curves), key=lambda run: int(run.result.record["seed"]))
    dashes = {seeds([run.result]): run.dash for run in ordered if run.dash is not None}
    plot.legend(list(dict.fromkeys((run.label, run.series) for run, _, _ in curves)), list(dashes.items()))
    return " Seeds differ in their dashes." if dashes else ""


def _figures_of_task(runs: Sequence[Run], where: str, file: str) -> list[Figure]:
    figures = []
    for key, title, unit in CURVES:
        points = [
            (run, [(float(e["epoch"]), float(e[key])) for e in run.log if e.get(key) is not None]) for run in runs
        ]
        shown = [(run, "", curve) for run, curve in points if curve]
        curves = [curve for _, _, curve in shown]
        if not curves or (key != "loss" and all(len(curve) == 1 for curve in curves)):
            continue  # a single test is in the tables
        values = [y for curve in curves for _, y in curve]
        late = [y for curve in curves for y in _late(curve)]
        seen = (min(values), max(late)) if key == "loss" else (min(late), max(values))
        low, high = padded(seen)
        span = (max(low, 0.0), high if key == "loss" else min(high, 100.0))
        plot = _over_epochs(
            title,
            f"{title} over epochs; at the end: " + "; ".join(f"{run.name} {c[-1][1]:.4g}" for run, _, c in shown),
            (_first(curves, span), max(x for curve in curves for x, _ in curve)),
            span,
            unit,
            where,
        )
        dashes = _draw(plot, shown)
        note = "Every epoch." if key == "loss" else "At the epochs at which it was measured; the last is the result."
        if seen != (min(values), max(values)):
            way = "above" if key == "loss" else "below"
            note += f" The axes show what the second half of training spans: what lies {way} is cut off."
        figures.append(Figure(f"training-{key.removeprefix('test_')}-{file}", title, note + dashes, plot.svg()))
    return [*figures, *_step_ranges(runs, where, file)]


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


def _over_epochs(
    title: str, description: str, x: tuple[float, float], y: tuple[float, float], ylabel: str, subtitle: str
) -> Plot:
    x = x if x[0] < x[1] else (x[0] - 0.5, x[0] + 0.5)
    xticks = [(t, label(t)) for t in ticks(*x) if t == round(t)]
    return Plot(title, description, x, y, "epoch", ylabel, xticks=xticks, subtitle=subtitle)


def _step_ranges(runs: Sequence[Run], subtitle: str, file: str) -> list[Figure]:
    learned = [run for run in runs if run.result.record.get("step") != "fixed"]
    logs = [(run, [e for e in run.log if None not in (e.get("step_min"), e.get("step_max"))]) for run in learned]
    logs = [(run, log) for run, log in logs if log]
    if not logs:
        return []
    entries = [e for _, log in logs for e in log]
    plot = _over_epochs(
        "Smallest and largest step",
        "The range of the learned steps over all layers, by epoch",
        (min(e["epoch"] for e in entries), max(e["epoch"] for e in entries)),
        (0, 1.06 * max(e["step_max"] for e in entries)),
        "step γ",
        subtitle,
    )
    curves = [
        (run, f", {end}", [(float(e["epoch"]), float(e[key])) for e in log])
        for run, log in logs
        for key, end in (("step_min", "smallest"), ("step_max", "largest"))
    ]
    caption = "Over all layers of a network; two curves for each run." + _draw(plot, curves)
    return [Figure(f"training-steps-{file}", plot.title, caption, plot.svg())]
