"""The figures of a report and its tour: what they draw is what the results say, and it can be read."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import re
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lbq import engine, models
from lbq.counting.analysis import Analysis, LayerAnalysis, Membrane, Trace
from lbq.deploy import deploy
from lbq.errors import LbqError
from lbq.kernels import surrogate
from lbq.report.cost_figures import cost_figures, speed_figures
from lbq.report.cost_tables import accounts, accounts_of
from lbq.report.figures import level_colour
from lbq.report.front import front_figures
from lbq.report.layer_figures import analysis_figures, layer_figures
from lbq.report.output import make, tour_of
from lbq.report.plot import Plot, label, log_ticks, ticks
from lbq.report.schematics import SURROGATES, neuron_figures, slope, surrogates
from lbq.report.svg import standalone
from lbq.report.theme import DARK, LIGHT, shade
from lbq.report.tour import LINE, Picture, level_pixel, take
from lbq.report.training_figures import training_figures
from lbq.results import paper
from lbq.results.gather import gather
from lbq.results.result import Gathered, Result
from lbq.runs.records import read
from tests.support.report_runs import BENCHMARK, of_cifar, runs_folder


@pytest.fixture(scope="module")
def gathered() -> Gathered:
    return gather([runs_folder()], read)


def traces_of(gathered: Gathered) -> tuple[Trace, ...]:
    return next(group.traces for group in gathered.groups if group.traces)


# Figures -------------------------------------------------------------------------------------------------------------


def test_every_figure_is_xml_with_a_description(gathered: Gathered) -> None:
    figures = [
        *training_figures(gathered), *layer_figures(gathered), *cost_figures(accounts(gathered.groups)), surrogates(),
        *front_figures(Gathered([of_cifar(seed=i) for i in range(3)])),
        *neuron_figures(traces_of(gathered), "LBQ"), *speed_figures([BENCHMARK]),
    ]  # fmt: skip
    ids = [f.id for f in figures]
    assert len(set(ids)) == len(ids) >= 10
    for figure in figures:
        root = ElementTree.fromstring(standalone(figure.svg).split("\n", 1)[1])
        names = {child.tag.split("}")[-1] for child in root.iter()}
        assert {"title", "desc"} <= names
        numbers = re.findall(r' [xy]\d?="([^"]+)"', figure.svg)
        assert all(math.isfinite(float(n)) for n in numbers)


def test_figures_show_the_numbers(gathered: Gathered) -> None:
    loss = next(f for f in training_figures(gathered) if f.id.startswith("training-loss"))
    assert loss.svg.count("<path") >= 4  # three finished runs and the legend
    assert "(unfinished)" in loss.svg
    levels = next(f for f in layer_figures(gathered) if f.id.startswith("levels"))
    assert levels.svg.count("<rect") == 7 * 5 + 5  # layers, levels, legend


def test_each_dataset_has_figures_of_its_own(gathered: Gathered) -> None:
    first = next(r for r in gathered.finished if r.active)
    config = {**first.record["config"], "data": {"name": "nmnist"}}
    there = {**first.record, "dataset": "nmnist", "config": config}
    other = replace(first, record=there, source=f"other/{first.source}")
    both = replace(gathered, results=[*gathered.results, other])
    for draw, id in ((training_figures, "training-loss"), (layer_figures, "steps")):
        alone, figures = {f.id: f for f in draw(gathered)}, {f.id: f for f in draw(both)}
        old, new = f"{id}-digits-2ep", f"{id}-nmnist-2ep"
        assert figures[old].svg == alone[old].svg  # the curves of another task change nothing, nor do they rename them
        assert ">N-MNIST" in figures[new].svg
        assert ">UCI digits" in alone[old].svg  # a figure in a file of its own has nothing else to say it


def test_a_datasets_name_is_no_path(tmp_path: Path) -> None:
    results = [of_cifar(), of_cifar(dataset="x/../../../escaped/evil"), of_cifar(dataset="数据")]
    make(tmp_path / "deep" / "in" / "out", Gathered(results), "svg")
    names = {path.name for path in tmp_path.rglob("*.svg")}
    assert {f"steps-{name}-60ep.svg" for name in ("cifar10", "x-escaped", "2")} <= names
    assert {path.parent for path in tmp_path.rglob("*.svg")} == {tmp_path / "deep" / "in" / "out"}


def test_runs_of_different_length_have_axes_of_their_own() -> None:
    def run(epochs: int, **changes: Any) -> Result:
        log = [{"epoch": e, "loss": 4 / e, "test_accuracy": 90 - 60 / e} for e in range(1, epochs + 1)]
        return of_cifar(epochs=epochs, log=log, **changes)

    figures = {
        f.id: f for f in training_figures(Gathered([run(60), run(60, variant="v3", surrogate="box"), run(300), run(1)]))
    }
    ids = [f"training-accuracy-cifar10-{epochs}ep" for epochs in (60, 300)]  # V3 and LBQ first; one test makes no curve
    assert [id for id in figures if "accuracy" in id] == ids
    assert "training-loss-cifar10-1ep" in figures
    short, long = figures[ids[0]], figures[ids[1]]
    assert ">CIFAR-10, 60 epochs<" in short.svg
    assert "V3" in short.svg
    assert "V3" not in long.svg
    assert "what lies below is cut off" in long.caption
    accuracies = [float(t) for t in re.findall(r'text-anchor="end" class="soft">([\d.]+)<', long.svg)]
    assert min(accuracies) > 89  # the second half is above 89.6
    curve = re.findall(r'<path d="M([^"]+)" class="line', long.svg)[0]  # the legend's comes later
    assert max(float(y) for y in re.findall(r" ([\d.]+)", curve)) <= 273  # where the axis is


def test_recipes_have_figures_of_their_own() -> None:
    decayed = {**of_cifar().record["config"], "optim": {"norm_decay": True}}
    results = [of_cifar(), of_cifar(variant="v3", surrogate="box"), of_cifar(n_max=10, weights_sha256="b" * 64)]
    results += [replace(of_cifar(), record={**of_cifar().record, "config": decayed}, source="decayed")]
    figures = {f.id: f for f in layer_figures(Gathered(results))}
    plain, other = figures["steps-cifar10-60ep"], figures["steps-cifar10-60ep-bn"]
    assert plain.svg.count('<path d="M') == 2 * 3  # three curves and their legend
    assert other.svg.count('<path d="M') == 2 * 1
    assert ">CIFAR-10, 60 epochs, BN decayed<" in other.svg
    assert ">LBQ<" in other.svg  # what all of a figure have in common stands above it
    assert ">LBQ, N=10<" in plain.svg
    in_paper = [f.caption.endswith("Figure 4 (f).") for id, f in figures.items() if id.startswith("levels-lbq")]
    assert sorted(in_paper) == [False, True, True]  # N = 10 is not in the paper's figure


def test_figure_4_is_of_two_timesteps() -> None:
    results = [of_cifar(timesteps=t, weights_sha256=str(t) * 64) for t in (1, 2, 4)]
    figures = [f for f in layer_figures(Gathered(results)) if f.id.startswith("levels")]
    (named,) = (f for f in figures if "Figure 4 (f)" in f.caption)
    assert ">LBQ, T=2, CIFAR-10, 60 epochs<" in named.svg


def inside(svg: str) -> bool:
    """Whether all text that runs to the right ends within the drawing, at 7 units a letter, 6 a small one."""
    width = float(re.findall(r'viewBox="0 0 ([\d.]+)', svg)[0])
    texts = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="start"(?: class="([^"]*)")?>([^<]+)<', svg)
    assert texts
    return all(float(x) + (6 if "small" in kind else 7) * len(unescape(text)) <= width for x, kind, text in texts)


def test_long_names_stay_inside(gathered: Gathered) -> None:
    plot = Plot("t", "d", (0, 1), (0, 1))
    plot.legend(
        [("Quantised ANN, LSQ step gradient, one tail for all layers, BN decayed, T=2, N=5, 60 ep", 0), ("LBQ", 1)]
    )
    placed = re.findall(r'<text x="[\d.]+" y="([\d.]+)" text-anchor="start">([^<]+)<', plot.svg())
    lines = ["Quantised ANN, LSQ step gradient,", "one tail for all layers, BN decayed, T=2,", "N=5, 60 ep", "LBQ"]
    assert [text for _, text in placed] == lines
    assert len({y for y, _ in placed}) == len(lines)
    assert max(float(y) for y, _ in placed) < plot.height
    assert inside(plot.svg())
    name = "V3 (learned + box-ET), neurons' lr × 0.1, a step per channel, T=2, N=5, CIFAR-10, 60 epochs, BN decayed"
    plot = Plot("t", "d", (0, 1), (0, 1), subtitle=name)
    usual = Plot("t", "d", (0, 1), (0, 1), subtitle="LBQ")
    assert (plot.top, plot.bottom, plot.height) == (usual.top + 28, usual.bottom + 28, usual.height + 28)
    plot.listing([("1", 0, name, "1.08 mJ, 95.44 %"), ("2", None, "LBQ", "1.25 mJ, 95.89 %")])
    assert inside(plot.svg())
    rows = re.findall(r'y="([\d.]+)"[^>]*>(1|2|1.08 mJ, 95.44 %|1.25 mJ, 95.89 %)<', plot.svg())
    heights = {text: float(y) for y, text in rows}
    assert heights["1"] < heights["1.08 mJ, 95.44 %"] < heights["2"] == heights["1.25 mJ, 95.89 %"]
    for figure in neuron_figures(traces_of(gathered), name):
        assert inside(figure.svg)


@pytest.mark.parametrize(("timesteps", "bars"), [(1, 4), (2, 8), (4, 8), (16, 11)])
def test_the_neuron_at_work_has_room_for_its_levels(timesteps: int, bars: int) -> None:
    before, after = (12.0,) * timesteps, (11.0,) * timesteps
    trace = Trace("sn1", 0, 1.0, 20, 0.5, 1.0, before, before, (12,) * timesteps, after)
    svg = neuron_figures([trace] * 4, "LBQ")[0].svg
    places = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*bold small[^>]*>12<', svg)]
    assert len(places) == bars
    assert min(b - a for a, b in pairwise(places)) > 16  # two digits


def test_epochs_are_whole_numbers_and_accuracies_end_at_a_hundred() -> None:
    log = [{"epoch": e, "loss": 1.0 / e, "test_accuracy": 99.0} for e in (1, 2, 3)]
    loss, accuracy = training_figures(Gathered([of_cifar(epochs=3, log=log, step="fixed")]))
    assert re.findall(r'text-anchor="middle" class="soft">([\d.]+)<', loss.svg) == ["1", "2", "3"]
    assert "cut off" not in loss.caption
    single = training_figures(Gathered([of_cifar(epochs=1, log=log[:1], step="fixed")]))[0].svg
    assert re.findall(r'text-anchor="middle" class="soft">([\d.]+)<', single) == ["1"]
    assert max(map(float, re.findall(r'text-anchor="end" class="soft">([\d.]+)<', accuracy.svg))) == 100


def test_points_of_costs_are_numbered_and_listed() -> None:
    results = [of_cifar(seed=i, test_accuracy=95 + 0.1 * i, variant=v) for i, v in enumerate(("lbq", "v1", "v3"))]
    energy, counts = cost_figures(accounts(Gathered(results).groups))
    count = len(list(paper.cost_rows()))
    for i in range(1, count + 4):
        assert len(re.findall(rf"bold[^>]*>{i}</text>", energy.svg)) == 2  # at its point and in the list
    assert "V3 (learned + box), ours" in energy.svg
    assert labels(counts.svg) == ["1", "2", "3"]  # counted anew
    places = re.findall(r'cx="([\d.]+)"[^>]*class="mark s0"><title>(?!published)', counts.svg)
    assert len(set(places)) == 3  # side by side
    assert "ours" in counts.caption
    for figure in cost_figures([]):
        assert "ours" not in figure.caption.lower() + figure.svg
        assert "Our" not in figure.caption


def labels(svg: str) -> list[str]:
    """The numbers that stand both at a point and in the list below, in its order."""
    listed = re.findall(r'text-anchor="end" class="bold small">(\d+)</text>', svg)
    assert sorted(listed) == sorted(re.findall(r'class="bold small halo">(\d+)</text>', svg))
    return listed


def test_numbers_have_no_gaps_where_a_run_has_no_place() -> None:
    """A run without an accuracy is in no figure of accuracies, one without a number in none of counts."""
    untested = of_cifar(seed=0, variant="v1", test_accuracy=None)
    many = [of_cifar(seed=i, test_accuracy=95 + 0.1 * i, n_max=3 + i % 3) for i in range(1, 9)]
    energy, _ = cost_figures(accounts(Gathered([untested, of_cifar(seed=1)]).groups))
    assert labels(energy.svg) == [str(i) for i in range(1, len(list(paper.cost_rows())) + 2)]
    _, counts = cost_figures(accounts(Gathered([untested, *many]).groups))
    assert labels(counts.svg) == ["1", "2", "3"]
    listed = [re.sub(r", ours$", "", name) for name in re.findall(r">([^<]+, ours)<", counts.svg)]
    assert listed == ["LBQ, N_max = 3", "LBQ, N_max = 4", "LBQ"]  # from left to right


def test_of_many_runs_the_costs_number_those_that_matter() -> None:
    """Nine runs of equal counts: the best of them, and the best of each N_max."""
    results = [of_cifar(seed=i, test_accuracy=95 + 0.1 * i, n_max=5 if i else 3) for i in range(9)]
    energy, counts = cost_figures(accounts(Gathered(results).groups))
    first = len(list(paper.cost_rows())) + 1
    assert labels(energy.svg) == [str(i) for i in range(1, first + 2)]
    assert labels(counts.svg) == ["1", "2"]
    assert "Small: 7 more runs of ours." in energy.caption
    assert "Left out: 7 more runs of ours" in counts.caption
    assert len(re.findall(r'class="mark s1"', energy.svg)) == 9 + 2


def test_counts_are_means_over_seeds() -> None:
    first = of_cifar()
    (analysis,) = first.analyses
    stored = json.loads(json.dumps(analysis.accounts))
    for synapse in stored["rate"]["synapses"].values():
        synapse["unary"], synapse["bit_sparse"] = 3e9 * synapse["unary"], 3e9 * synapse["bit_sparse"]
    second = replace(first, source="other", analyses=[replace(analysis, accounts=stored)])
    (group,) = Gathered([first, second]).groups
    totals = [rate.total for _, rate in accounts_of(group)]
    assert len(totals) == 2
    unary, sparse = (sum(getattr(t, name) for t in totals) / 2e6 for name in ("unary", "bit_sparse"))
    _, counts = cost_figures(accounts([group]))
    assert f">{unary:,.1f} and {sparse:,.1f} M<" in counts.svg


def test_a_scatter_uses_its_space() -> None:
    """Its points span most of both axes, wherever they lie."""
    (entropy,) = (f for f in layer_figures(Gathered([of_cifar(dataset="digits")])) if f.id.startswith("entropy"))
    centres = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', entropy.svg)[:-1]]
    across, up = zip(*centres, strict=True)
    assert max(across) - min(across) > 200
    assert max(up) - min(up) > 100


def test_membranes_of_all_runs_are_over_the_same_images() -> None:
    one, other, third = of_cifar(), of_cifar(variant="v1"), of_cifar(variant="v3", surrogate="box")
    (analysis,) = third.analyses
    layers = [
        replace(layer, membrane=Membrane(layer.membrane.counts // 5, layer.membrane.thresholds))
        for layer in analysis.layers
        if layer.membrane is not None
    ]
    third.analyses = [replace(analysis, layers=tuple(layers))]
    (figure,) = (f for f in layer_figures(Gathered([one, other, third])) if f.id.startswith("membranes"))
    assert (
        "over the same 75 test images for all runs. Left out, for they were watched on other images: V3"
        in figure.caption
    )
    assert set(re.findall('class="line (s[0-9])"', figure.svg)) == {"s0", "s1"}
    assert not [f for f in layer_figures(Gathered([replace(one, analyses=[])])) if f.id.startswith("membranes")]


def membranes(signed: bool) -> str:
    """A figure of one layer with 10,000 neuron-steps: thresholds at ±0.5, a tenth beyond the axis."""
    counts = np.zeros((1, 72), np.int64)
    counts[0, [0, 20, 32, 45]] = [1000, 2000, 5000, 2000]  # beyond, -1.5, 0, 1.6
    active = 5000 if signed else 2000
    layer = LayerAnalysis(
        "sn", (10, 10, 10), 1, 1.0, None, None, np.array([[10000 - active, active]]), Membrane(counts, (0.5,))
    )
    return analysis_figures(Analysis(40, True, None, {"dataset": "nmnist"}, (layer,)))["membranes"].svg


def test_membranes_say_what_they_show() -> None:
    assert membranes(signed=False).count('class="rule"') == 1
    signed = membranes(signed=True)
    assert signed.count('class="rule"') == 2
    assert "10.0 % beyond the axis" in signed
    assert "N-MNIST" in signed
    ticks_ = re.findall(r'<text x="([\d.]+)"[^>]*middle[^>]*>([^<]+)<', signed)
    assert {text for _, text in ticks_} >= {"0"}
    for (x, text), (other, more) in itertools.combinations(ticks_, 2):
        assert abs(float(x) - float(other)) >= 3 * (len(text) + len(more))  # none lies on another


def contrast(a: str, b: str) -> float:
    """Of two colours, as the Web Content Accessibility Guidelines define it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("n_max", [1, 2, 5, 20])
def test_levels_stand_out_from_the_paper_in_their_order(theme: dict[str, str], n_max: int) -> None:
    contrasts = [contrast(theme[shade(k, n_max)], theme["paper"]) for k in range(1, n_max + 1)]
    assert contrasts == sorted(set(contrasts))
    assert contrasts[0] >= 3
    assert level_colour(n_max, n_max) == f"var(--{shade(n_max, n_max)})"


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_and_text_stand_out_from_the_paper(theme: dict[str, str]) -> None:
    assert all(contrast(theme[f"s{i}"], theme["paper"]) >= 3 for i in range(8))
    assert all(contrast(theme[name], theme["paper"]) >= 4.5 for name in ("ink", "soft"))


def test_surrogates_are_the_librarys() -> None:
    r = torch.linspace(-3, 9, 400, dtype=torch.float64)
    tail = torch.tensor(0.5, dtype=torch.float64)
    for name, shape in SURROGATES.items():
        expected = surrogate.get(name.lower().replace("-", "_")).slope
        assert expected is not None
        assert [slope(v, *shape) for v in r.tolist()] == pytest.approx(expected(r, 5, tail).tolist())


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.003), (-4, 9), (95.2, 97.9), (0, 123456)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    places = ticks(low, high)
    assert 2 <= len(places) <= 8
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in places)
    gaps = np.diff(places)
    assert np.allclose(gaps, gaps[0])
    assert ticks(1, 1) == [1]
    assert log_ticks(0.05, 20) == pytest.approx([0.1, 1, 10])
    assert log_ticks(1, 10) == pytest.approx([1, 2, 5, 10])
    assert label(1e6) == "1e6"
    assert label(1000) == "1,000"


@given(st.lists(st.tuples(st.integers(72, 328), st.integers(60, 200)), min_size=1, max_size=12, unique=True))
@hypothesis.example([(80, 81), (80, 78), (83, 72)])
def test_a_number_belongs_to_one_point(points: list[tuple[int, int]]) -> None:
    """It is nearer to its own than to any other, or a line leads to it."""
    plot = Plot("t", "d", (0, 1), (0, 1), xticks=[], yticks=[])
    plot.numbers([((float(x), float(y)), str(i)) for i, (x, y) in enumerate(points)])
    drawn = {
        int(i): (float(x), float(y) - 4)
        for x, y, i in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*bold small halo">(\d+)<', plot.svg())
    }
    lines = [tuple(map(float, ends)) for ends in re.findall(r'x1="([\d.]+)" y1="([\d.]+)"', plot.svg())]
    assert sorted(drawn) == list(range(len(points)))
    for i, place in drawn.items():
        nearest = min(points, key=lambda point: math.dist(point, place))
        joined = any(abs(math.dist(points[i], line) - 6) < 0.02 for line in lines)
        assert nearest == points[i] or joined
    for (i, a), (j, b) in itertools.combinations(drawn.items(), 2):
        if len(points) <= 6:  # as long as there is room
            assert abs(a[0] - b[0]) >= 3.5 * (len(str(i)) + len(str(j))) or abs(a[1] - b[1]) >= 11.9


def test_lines_are_cut_at_the_axes() -> None:
    plot = Plot("t", "d", (0, 4), (0, 1), xticks=[], yticks=[])
    plot.line([(0, -1), (1, 0.5), (2, 3), (3, 0.5), (4, 0.5)], 0)
    paths = [[tuple(map(float, p.split())) for p in d.split("L")] for d in re.findall(r'd="M([^"]+)"', plot.svg())]
    assert [len(path) for path in paths] == [3, 3]  # in at the bottom and out at the top, in again and on
    heights = [y for path in paths for _, y in path]
    assert min(heights) == pytest.approx(plot.top)
    assert max(heights) == pytest.approx(plot.bottom)
    assert paths[0][0][0] == pytest.approx(plot.at_x(2 / 3), abs=0.01)
    assert plot.svg().count("<circle") == 3  # no mark outside
    plot.line([(-1, 1), (0, 0.9)], 0)
    assert plot.svg().count("<circle") == 4  # nor before the first epoch that is shown


def test_whiskers_are_cut_at_the_axes() -> None:
    plot = Plot("t", "d", (0, 4), (0, 1), xticks=[], yticks=[])
    for start, end in (((1, 0.2), (1, 0.4)), ((2, -1), (2, 0.4)), ((3, 0.5), (9, 0.5))):
        plot.parts = []
        plot.whisker(start, end, 9)
        drawn = re.findall(r'x1="([^"]+)" y1="([^"]+)" x2="([^"]+)" y2="([^"]+)" class="s1"', plot.svg())
        x, y, to_x, to_y = map(float, drawn[0])
        assert (x, y) == pytest.approx((plot.at_x(start[0]), min(plot.at_y(start[1]), plot.bottom)), abs=0.01)
        assert (to_x, to_y) == pytest.approx((min(plot.at_x(end[0]), plot.right), plot.at_y(end[1])), abs=0.01)
        assert len(drawn) == (3 if start[0] == 1 else 2)  # no cap where it goes on


def test_more_series_than_colours_can_be_told_apart() -> None:
    plot = Plot("t", "d", (0, 1), (0, 1))
    for series in range(16):
        plot.line([(0, 0), (1, 1)], series)
    drawn = re.findall(r'class="line (s\d)"(?: stroke-dasharray="([^"]*)")?', plot.svg())
    assert len(set(drawn)) == 16
    marks = []
    for series in range(80):
        mark = Plot("t", "d", (0, 1), (0, 1))
        mark.mark(0, 0, series)
        marks.append(mark.parts[-1])
    assert len(set(marks)) == 80


def test_marks_alone_tell_series_apart_where_dashes_tell_seeds() -> None:
    """There are five shapes: of eight colours the last three have them hollow, in the legend too."""
    for series in range(8):
        plot = Plot("t", "d", (0, 1), (0, 1))
        plot.line([(0, 0), (1, 1)], series, dash="6 3")
        plot.legend([("LBQ", series)], [("seed 1", "6 3")])
        kinds = re.findall(r'class="(mark [^"]*)"', plot.svg())
        assert kinds == 3 * [f"mark s{series}{' hollow' if series >= 5 else ''}"]


def test_a_curve_and_its_name_in_the_legend_belong_together() -> None:
    """The page dims the others by this number, which also tells series of one colour apart."""
    plot = Plot("t", "d", (0, 1), (0, 1))
    for series in (0, 8):
        plot.line([(0, 0), (1, 1)], series)
    plot.legend([("LBQ", 0), ("ANN", 8)])
    groups = {"0": "", "8": ""}
    for group in ElementTree.fromstring(plot.svg()).iter("g"):
        groups[group.attrib["data-of"]] += "".join(group.itertext()) + "".join(part.tag for part in group)
    assert groups == {"0": "pathcirclecircleLBQpathcircletext", "8": "pathcirclecircleANNpathcircletext"}


def test_benchmarks_of_several_machines() -> None:
    sweep = {"sweeps": {"active": [[0.1, 1.0, 2.0], [0.5, 4.0, 2.0]]}}
    rival = {"18 % active": {"int8 ANN once, onnxruntime": {"1": 9.5, "2": 5.0}}}
    named = {**sweep, "features": ["portable", "neon"], "machine": "Neoverse-N1"}
    figures = speed_figures(
        [{**sweep, **rival, "machine": "Xeon", "features": ["avx512", "vnni", "amx"]}, named, sweep]
    )
    assert [figure.id for figure in figures] == ["speed", "speed-1", "speed-2"]
    assert ">resnet20w128 on Xeon with avx512, vnni, amx<" in figures[0].svg
    assert ">resnet20w128 on Neoverse-N1 with neon<" in figures[1].svg
    assert "does not name" in figures[2].caption
    assert ["int8 ANN" in figure.svg for figure in figures] == [True, False, False]
    assert figures[0].svg.count(": 9.5 ms</title>") == 2
    assert speed_figures([{"sweeps": {"active": []}}]) == []
    with pytest.raises(LbqError, match="sweeps.active"):
        speed_figures([{"sweeps": {"active": [[1, 2]]}}])


# The tour ------------------------------------------------------------------------------------------------------------


def shown(picture: Picture, height: int, width: int) -> np.ndarray:
    """The first map of a picture, each of its pixels once."""
    pixels = decoded(picture.address)
    assert pixels.shape[:2] == (picture.height, picture.width)
    return pixels[: height * picture.scale : picture.scale, : width * picture.scale : picture.scale]


def decoded(address: str) -> np.ndarray:
    """The pixels of a PNG, as Pillow reads it, which checks the sums in it."""
    with Image.open(io.BytesIO(base64.b64decode(address.split(",", 1)[1])), formats=["PNG"]) as image:
        return np.asarray(image)


def test_the_tour_shows_the_engines_levels() -> None:
    net = engine.load(runs_folder() / "lbq-0" / "model.lbq")
    assert net.golden is not None
    image = net.golden.inputs[0]
    tour = take(net, image)
    out = net.run(image, "dense", trace=True)
    assert out.levels is not None
    np.testing.assert_array_equal(shown(tour.image[0], 8, 8), (image[0] / 16 * 255).astype(np.uint8))
    assert tour.classes[0][0] == net.network.classes[int(out.predictions[0])]
    assert sum(share for _, share in tour.classes) <= 1 + 1e-9
    for stop in tour.stops:
        levels = out.levels[stop.layer][:, 0]
        assert stop.active == pytest.approx(float((levels != 0).mean()))
        busiest = np.argsort(-levels.astype(int).sum((0, 2, 3)), kind="stable")[0]
        _, height, width = stop.shape
        for picture in (*stop.levels, *stop.planes):  # lines between channels are even
            grey = (decoded(picture.address) == [0x9A, 0xA3, 0xAD]).all(-1)
            across, along = grey.all(0).sum(), grey.all(1).sum()
            assert across % LINE == along % LINE == 0
            assert picture.width == (across // LINE + 1) * (width * picture.scale + LINE) - LINE
        pixels = shown(stop.levels[0], height, width)
        colours = {tuple(int(level_pixel(k, 5)[i : i + 2], 16) for i in (1, 3, 5)): k for k in range(1, 6)}
        first = np.array([[colours.get(tuple(int(c) for c in pixel), 0) for pixel in row] for row in pixels])
        np.testing.assert_array_equal(first, levels[0, busiest])
        planes = [shown(p, height, width)[..., 0] == 0 for p in reversed(stop.planes)]
        np.testing.assert_array_equal(
            sum(2**k * plane.astype(int) for k, plane in enumerate(planes)), levels[0, busiest]
        )


def test_a_tour_of_event_frames_and_of_colours() -> None:
    torch.manual_seed(0)
    events = deploy(models.create("resnet8w2", in_channels=2).eval(), (2, 8, 8), timesteps=2, static=False)
    assert events.golden is not None
    tour = take(events, events.golden.inputs[:, 0])
    assert [p.text for p in tour.image] == ["frame 1 of 2", "frame 2 of 2"]
    assert decoded(tour.image[0].address).max() == 255  # the brightest of both polarities together
    colours = deploy(models.create("resnet8w2").eval(), (3, 8, 8), mean=[0.5] * 3, std=[0.2] * 3)
    assert colours.golden is not None
    image = colours.golden.inputs[0]
    np.testing.assert_array_equal(shown(take(colours, image).image[0], 8, 8), image.transpose(1, 2, 0))


def test_tours_of_given_images(tmp_path: Path, gathered: Gathered) -> None:
    path = tmp_path / "i.npy"
    np.save(path, np.zeros((1, 8, 8), np.uint8))
    tour = tour_of(gathered, path)
    assert tour is not None
    assert decoded(tour.image[0].address).max() == 0
    assert tour.about == "The image is i.npy, the network model.lbq."
    golden = tour_of(gathered)
    assert golden is not None
    assert golden.about == "The image is the first golden input of model.lbq; --image shows another."
    noise = deploy(models.create("resnet8w2", in_channels=1).eval(), (1, 8, 8), scale=255)
    engine.save(tmp_path / "noise.lbq", noise)
    of_noise = tour_of(Gathered(artefacts=[tmp_path / "noise.lbq"]))
    assert of_noise is not None
    assert "the first golden input of noise.lbq, which is noise" in of_noise.about
    with pytest.raises(LbqError, match="--image needs a deployed network"):
        tour_of(Gathered(gathered.results), path)
    assert tour_of(Gathered(gathered.results)) is None
