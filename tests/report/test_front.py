"""Accuracy against accumulations: the line joins what nothing beats, and every network has its place."""

from __future__ import annotations

import json
from dataclasses import replace
from html import unescape

from lbq.report.front import front_figures
from lbq.results.result import Gathered, Result
from tests.support.report_runs import of_cifar


def counted(result: Result, times: float) -> Result:
    """The same with so many times the accumulations."""
    (analysis,) = result.analyses
    accounts = json.loads(json.dumps(analysis.accounts))
    for synapse in accounts["rate"]["synapses"].values():
        synapse["bit_sparse"] *= times
    return replace(result, analyses=[replace(analysis, accounts=accounts)])


def test_the_front_joins_what_nothing_beats() -> None:
    made = [(97.4, 4.0, 300), (97.0, 1.0, 300), (97.1, 2.0, 60), (97.05, 3.0, 60), (90.0, 0.5, 60)]
    results = [
        counted(of_cifar(seed=i, name=f"net{i}", test_accuracy=a, epochs=epochs), times)
        for i, (a, times, epochs) in enumerate(made)
    ]
    results.append(of_cifar(variant="ann", n_max=0, timesteps=1, test_accuracy=97.2, seed=9))
    (figure,) = front_figures(Gathered(results))
    shown = unescape(figure.svg)
    assert figure.id == "front-cifar10-resnet20w128"
    listed = [
        name for name in ("net1, T = 2, 300 ep", "net2, T = 2, 60 ep", "net0, T = 2, 300 ep") if f">{name}<" in shown
    ]
    assert len(listed) == 3
    assert ">net3" not in shown.replace("<title>net3", "")  # no name, for net2 beats it; a tip all the same
    assert "<title>net3" in shown
    assert "net4" not in shown
    assert "Left out: 1 below 94.90 %." in figure.caption
    assert "Hollow: published." in figure.caption
    assert ">our ANN, 97.20 %<" in shown
    assert ">ours, 300 epochs<" in shown
    assert ">LBQ (5), the paper<" in shown


def test_too_few_networks_make_no_front() -> None:
    """Those that lie far below are not drawn, so they do not count."""
    for accuracies, figures in (((97.4, 97.0, 96.0), 1), ((97.4, 97.0, 80.0), 0)):
        results = [of_cifar(seed=i, name=f"net{i}", test_accuracy=a, epochs=300) for i, a in enumerate(accuracies)]
        assert len(front_figures(Gathered(results))) == figures


def test_a_network_as_accurate_as_one_of_the_front_has_a_name() -> None:
    made = [(97.4, 1.0), (97.4, 1.1), (97.3, 1.2)]
    results = [
        counted(of_cifar(seed=i, name=f"net{i}", test_accuracy=accuracy, epochs=300), times)
        for i, (accuracy, times) in enumerate(made)
    ]
    (figure,) = front_figures(Gathered(results))
    shown = unescape(figure.svg)
    assert [f">net{i}, T = 2<" in shown.replace(", 300 ep", "") for i in range(3)] == [True, True, False]
    assert max(map(shown.rfind, ("<title>net0", "<title>net1"))) < shown.find(
        ", the paper: 946 M, 97.45 %</title>"
    )  # on top
    assert "log scale" in shown


def test_a_front_far_below_the_published_one_and_one_of_silence_are_drawn() -> None:
    (low,) = front_figures(Gathered([of_cifar(seed=i, test_accuracy=40.0 + i) for i in range(3)]))
    assert "42.00 %" in low.svg
    assert ">LBQ (5), the paper<" in low.svg
    silent = [counted(of_cifar(seed=i, dataset="digits", test_accuracy=10.0), 0.0) for i in range(3)]
    (silence,) = front_figures(Gathered(silent))
    assert "0.00 M, 10.00 %" in silence.svg


def test_a_front_is_of_one_dataset_and_network_and_needs_three() -> None:
    others = [of_cifar(seed=i, model="resnet8w16", dataset="digits") for i in range(3)]
    figures = front_figures(Gathered([*others, of_cifar(), of_cifar(seed=1)]))
    assert [figure.id for figure in figures] == ["front-digits-resnet8w16"]
    assert "published" not in figures[0].caption + figures[0].svg
    long = [of_cifar(seed=i, model=f"spikformer4x384{end}") for end in ("", "-sew") for i in range(3)]
    assert [f.id for f in front_figures(Gathered(long))] == [
        "front-cifar10-spikformer4x38",
        "front-cifar10-spikformer4x38-1",
    ]
