"""What a report leads with: the network, its ANN, accuracy, accumulations and energy; and what it says where these lack."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from lbq.counting.costs import costs
from lbq.counting.operations import energy_mj
from lbq.counting.technology import DEFAULT
from lbq.report.cost_tables import accounts_of
from lbq.report.page import render
from lbq.report.story import NAME_LETTERS, picture, sentences, stories
from lbq.results.gather import gather
from lbq.results.result import Gathered, Result
from lbq.runs.records import read
from tests.support.report_runs import of_cifar, runs_folder

ANN = {"variant": "ann", "n_max": 0, "timesteps": 1, "step": "none", "surrogate": "none"}


@pytest.fixture(scope="module")
def gathered() -> Gathered:
    return gather([runs_folder()], read)


def ann(**changes: Any) -> Result:
    return replace(of_cifar(**{**ANN, "weights_sha256": "c" * 64, **changes}), analyses=[])


def test_the_picture_says_what_was_counted(gathered: Gathered) -> None:
    (story,) = stories(gathered)
    exact, rate = accounts_of(story.lead)[0]
    assert story.row.operations == pytest.approx(rate.executed / 1e6)
    assert story.row.paper == pytest.approx(1e3 * energy_mj(rate.operations(), DEFAULT.paper))
    assert story.row.memory == pytest.approx(costs(exact).methods[0].memory_uj)
    assert story.ann is not None
    assert story.ann.accuracy == next(g.mean for g in gathered.groups if g.title == "ANN")
    assert story.ann.operations == pytest.approx(rate.ann_macs / 1e6)
    svg = picture(story).svg
    assert [f">{story.row.accuracy:.2f}<" in svg, f">{story.ann.accuracy:.2f}<" in svg] == [True, True]
    assert svg.count("<rect") == 3 * 2  # accumulations and two energies, of two networks
    bars = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', svg)]
    for ours, theirs in ((bars[0], bars[1]), (bars[2], bars[3]), (bars[4], bars[5])):
        assert max(ours, theirs) == 172  # the larger takes all of its room
    assert bars[0] / bars[1] == pytest.approx(rate.executed / rate.ann_macs, abs=0.01)


def test_the_page_leads_with_it(gathered: Gathered) -> None:
    page = render(gathered)
    order = [page.index(f'id="{id}"') for id in ("result", "figure-story-digits", "runs", "training", "details")]
    assert order == sorted(order)
    assert "the ANN of the same network" in page
    assert "million accumulations</b>, where the ANN takes" in page
    assert "Both include padding: accumulations are counted as rate x MACs" in page


def test_the_headlines_counts_are_the_higher_ones(gathered: Gathered) -> None:
    """As the words beside them say, here and under the demo's table, whose counts are border-exact."""
    for group in gathered.groups:
        for exact, rate in accounts_of(group):
            assert rate.executed > exact.executed
            assert rate.ann_macs > exact.ann_macs


def test_what_lacks_is_named_with_its_remedy() -> None:
    bare = replace(of_cifar(), analyses=[], source="runs/mine")
    (story,) = stories(Gathered([bare]))
    text = " ".join(sentences(story))
    assert "`lbq analyze runs/mine` counts it, and the next `lbq report` finds that file by itself" in text
    assert "No ANN of this network is here" in text
    assert "not counted yet" in picture(story).caption
    assert story.ann is None
    (counted,) = stories(Gathered([of_cifar()]))
    assert "not tested" in picture(counted).svg  # its counts follow from the network, its accuracy does not
    assert "No ANN" in " ".join(sentences(counted))
    alone = Gathered([ann()])
    assert len(stories(alone)[0].rows) == 1
    assert "analyze" not in " ".join(sentences(stories(alone)[0]))
    assert "with a spiking network beside it" in picture(stories(alone)[0]).caption


def test_the_ann_is_of_the_same_network_and_best_of_the_same_length() -> None:
    other = ann(model="resnet8w16", test_accuracy=99.0)
    longer, same = ann(epochs=300, test_accuracy=98.0), ann(test_accuracy=96.0)
    for results, expected in (([other, longer, same], 96.0), ([other, longer], 98.0), ([other], None)):
        (story,) = stories(Gathered([*results, of_cifar()]))
        assert story.ann is not None
        assert story.ann.accuracy == expected


def test_an_ann_of_event_frames_pays_for_each_frame_it_reads() -> None:
    """Trained frame by frame, it makes a pass for each; where none was trained, one pass over their sum is the fair rival."""
    run = of_cifar(timesteps=4)
    (analysis,) = run.analyses
    frames = {kind: {**analysis.accounts[kind], "frames": 4} for kind in ("exact", "rate")}
    events = replace(run, analyses=[replace(analysis, accounts={**analysis.accounts, **frames})])
    (alone,), (beside,) = (stories(Gathered([events, *more])) for more in ([], [ann(timesteps=3)]))
    assert alone.ann is not None
    assert beside.ann is not None
    once, each = alone.ann, beside.ann
    assert "multiplications, in one pass over the sum of the 4 frames." in " ".join(sentences(alone))
    assert "multiplications, in a pass over each of its 3 frames." in " ".join(sentences(beside))
    for name in ("operations", "paper", "memory"):
        assert getattr(each, name) == pytest.approx(3 * getattr(once, name))


def test_of_many_runs_each_kind_is_shown_once() -> None:
    def run(i: int, **changes: Any) -> Result:
        return of_cifar(test_accuracy=90.0 + i, name=f"run {i}", weights_sha256=str(i) * 64, **changes)

    alike = [run(i) for i in range(7)]
    (story,) = stories(Gathered([*alike, run(8, n_max=2), run(9, epochs=300, variant="v1")]))
    assert story.lead.title == "run 8"
    assert [row.name for row in story.others] == ["run 6"]  # the best with five levels; other lengths stay out
    assert story.chosen == "It is the highest of 8 on the test set itself."


def test_two_of_one_title_are_told_apart() -> None:
    (story,) = stories(Gathered([of_cifar(), of_cifar(timesteps=4, test_accuracy=99.0, weights_sha256="d" * 64)]))
    assert sentences(story)[0].startswith(f"**{story.lead.title}, T=4** reads **99.00 %**")


def test_the_picture_has_short_names_and_a_colour_for_each() -> None:
    """The words have the long name; runs of another recipe begin their colours anew in other figures."""
    lead = of_cifar(name="LBQ, sharpness-aware in the last epochs", test_accuracy=99.0)
    other = of_cifar(
        name="V1, trained on other weights",
        timesteps=1,
        weights_sha256="d" * 64,
        config={"optim": {"norm_decay": True}},
    )
    (story,) = stories(Gathered([lead, other, ann()]))
    assert [row.name for row in story.rows] == ["LBQ", "ANN", "V1"]
    assert len({row.series for row in story.rows}) == 3
    assert sentences(story)[0].startswith("**LBQ, sharpness-aware in the last epochs** reads")


@pytest.mark.parametrize(
    "names",
    [
        ("LBQ, optim.lr=0.2", "LBQ, optim.lr=0.05"),  # one fits, one does not
        ("LBQ, the long name of one", "LBQ, the long name of another"),
        ("LBQ", "LBQ, averaged over all epochs"),
    ],
)
def test_names_that_begin_alike_are_told_in_full(names: tuple[str, str]) -> None:
    runs = [of_cifar(name=name, weights_sha256=f"{i}" * 64) for i, name in enumerate(names)]
    (story,) = stories(Gathered(runs))
    assert {row.name for row in story.rows if row is not story.ann} == set(names)


def test_a_long_name_keeps_its_place() -> None:
    (story,) = stories(Gathered([of_cifar(name="an_experiment_with_a_name_of_many_letters_and_no_gap")]))
    lines = re.findall(r'class="small bold">([^<]+)<', picture(story).svg)
    assert "".join(lines[:5]) == "an_experiment_with_a_name_of_many_letters_and_no_gap"
    assert max(map(len, lines)) <= NAME_LETTERS
    titles = re.findall(r'y="\d+" text-anchor="start" class="bold">([^<]+)<', picture(story).svg)
    assert "".join(titles).endswith("CIFAR-10")
    assert len(titles) == 2


def test_an_analysis_alone_tells_its_accuracy_on_integers(gathered: Gathered) -> None:
    (analysis,) = of_cifar().analyses
    facts = {**analysis.facts, "kind": "artefact"}
    result = of_cifar(test_accuracy=None)
    result.analyses = [replace(analysis, facts=facts, accuracy=91.25)]
    assert "reads **91.25 %**" in sentences(stories(Gathered([result]))[0])[0]
