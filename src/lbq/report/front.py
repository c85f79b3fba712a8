"""Accuracy against accumulations, and the front: the networks that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from lbq.report.cells import dataset_name, title_at
from lbq.report.cost_tables import accounts_of
from lbq.report.figures import DATASET_LETTERS, Figure, padded, slug, unbeaten
from lbq.report.plot import Plot
from lbq.report.svg import SMALL_LETTER, Point
from lbq.results import paper
from lbq.results.result import Gathered, Group

LEAST = 3  # networks that make a front
SPAN = 2.5  # points below our best accuracy; what is worse is left out
PAPER_NETWORK = ("cifar10", "resnet20w128")
PUBLISHED = 0  # series


@dataclass(frozen=True)
class _Network:
    """millions: of bit-sparse accumulations an image, as rate x MACs. accuracy: in percent, on integers where known."""

    name: str
    epochs: int
    millions: float
    accuracy: float

    @property
    def point(self) -> Point:
        return self.millions, self.accuracy

    def __str__(self) -> str:
        return f"{self.millions:,.{0 if self.millions >= 100 else 2}f} M, {self.accuracy:.2f} %"


def front_figures(gathered: Gathered) -> list[Figure]:
    """One for each dataset and network of which enough was counted."""
    alike: dict[tuple[str, str], list[Group]] = {}
    for group in gathered.groups:
        alike.setdefault((group.dataset, str(group.record["model"])), []).append(group)
    figures: dict[str, Figure] = {}
    for setting, groups in alike.items():
        ours = [network for group in groups if (network := _network(group)) is not None]
        least = max((network.accuracy for network in ours), default=0.0) - SPAN
        if sum(network.accuracy >= least for network in ours) >= LEAST:
            figure = _figure(setting, groups, ours)
            id = f"{figure.id}-{len(figures)}" if figure.id in figures else figure.id
            figures[id] = replace(figure, id=id)
    return list(figures.values())


def _network(group: Group) -> _Network | None:
    counted, accuracy = accounts_of(group), _accuracy(group)
    if not counted or accuracy is None or not group.record.get("n_max"):
        return None
    epochs, time = int(group.record["epochs"]), f"T = {group.record['timesteps']}"
    parts = [title_at(group), *[time] * (time not in group.title), *[f"{epochs} ep"] * (epochs > 0)]
    return _Network(", ".join(parts), epochs, fmean(rate.executed for _, rate in counted) / 1e6, accuracy)


def _accuracy(group: Group) -> float | None:
    """Of the deployed networks if there is one of each seed, for these are counted; else as trained."""
    deployed = [a for r in group.results if (a := r.integer_accuracy) is not None]
    return fmean(deployed) if len(deployed) == len(group.results) else group.mean


def _figure(setting: tuple[str, str], groups: Sequence[Group], ours: Sequence[_Network]) -> Figure:
    published = _published() if setting == PAPER_NETWORK else []
    least = max(n.accuracy for n in ours) - SPAN
    shown, theirs = ([n for n in some if n.accuracy >= least] for some in (ours, published))
    lengths = sorted({n.epochs for n in shown}, reverse=True)
    series = {epochs: i for i, epochs in enumerate(lengths, PUBLISHED + 1)}
    best = unbeaten(shown, lambda n: n.millions, lambda n: n.accuracy)
    close = [n for n in shown if not any(o.accuracy > n.accuracy and o.millions <= n.millions for o in shown)]
    close.sort(key=lambda n: n.point)  # the front, and what is as accurate as one of it
    named = [*((n, PUBLISHED) for n in theirs), *((n, series[n.epochs]) for n in close)]
    small = [n for n in shown if n not in close]
    trained = [g.mean for g in groups if g.mean is not None and not g.record.get("n_max")]
    anns = [accuracy for accuracy in trained if accuracy >= least]
    millions = [n.millions for n in (*shown, *theirs)]
    # logarithmic: networks of few accumulations lie as far apart as those of many; to the right is room for the ANN's name
    log = min(millions) > 0
    plot = Plot(
        "Accuracy against accumulations",
        "; ".join(f"{n.name}: {n}" for n, _ in named),
        (min(millions) / 1.2, 1.4 * max(millions)) if log else (0, 1.06 * max(millions) or 1.0),
        padded([*(n.accuracy for n in (*shown, *theirs)), *anns]),
        f"accumulations per image, millions{', log scale' * log}",
        "accuracy %",
        xlog=log,
        subtitle=f"{dataset_name(groups[0])}, {setting[1]}",
    )
    taken = [plot.at(n.point) for n in small]
    if anns:
        y, text = plot.at_y(max(anns)), f"our ANN, {max(anns):.2f} %"
        plot.path([(plot.left, y), (plot.right, y)], "line axis", "2 3")
        plot.text(plot.right, y - 4, text, "end", "soft small")
        taken += [(plot.right - SMALL_LETTER * i, y - 8) for i in range(len(text))]  # no number lies on it
    plot.path(_stairs([plot.at(n.point) for n in best]), "line axis")
    drawn = [*((n, series[n.epochs], 2.5) for n in small), *((n, s, 3.5 if s == PUBLISHED else 4.5) for n, s in named)]
    for n, s, size in sorted(drawn, key=lambda one: one[1] == PUBLISHED):  # those on top, lest ours hide them
        plot.mark(*plot.at(n.point), s, size, f"{n.name}: {n}", hollow=s == PUBLISHED)
    numbered = [(plot.at(n.point), str(i)) for i, (n, _) in enumerate(named, 1)]
    plot.numbers(numbered, taken)
    if len(lengths) > 1:
        plot.legend([(f"ours, {epochs} epochs" if epochs else "ours", series[epochs]) for epochs in lengths])
    plot.listing([(str(i), s, n.name, str(n)) for i, (n, s) in enumerate(named, 1)], hollow=[PUBLISHED])
    caption = (
        "Bit-sparse accumulations, as rate x MACs. Accuracy is on integers where all seeds were deployed. The line joins the "
        "networks of ours that no other beats in both."
    )
    if theirs:
        caption += " Hollow: published."
    if left_out := len(ours) - len(shown):
        caption += f" Left out: {left_out} below {least:.2f} %."
    return Figure(f"front-{slug(setting[0], DATASET_LETTERS)}-{slug(setting[1], 14)}", plot.title, caption, plot.svg())


def _stairs(points: Sequence[Point]) -> list[Point]:
    """Level from each point until the next begins, then up to it."""
    corners = [(b[0], a[1]) for a, b in pairwise(points)]
    return [point for pair in zip(points, corners, strict=False) for point in pair] + [points[-1]]


def _published() -> list[_Network]:
    return [
        _Network(f"{method}, the paper", 300, millions, accuracy)
        for method, (accuracy, _, millions, _) in paper.COSTS.items()
        if method.startswith("LBQ")
    ]
