"""Differences between networks: intervals over trainings and over test samples."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq.counting.deployed_counts import analyze
from lbq.counting.outcomes import packed, unpacked
from lbq.data.testset import open_test
from lbq.engine import load
from lbq.errors import LbqError
from lbq.results.compare import Side, bootstrap, compare, student, welch
from lbq.results.gather import gather
from lbq.runs.records import read
from tests.support.commands import Call
from tests.support.report_runs import record, runs_folder

# two-sided, 95 %: W. S. Gosset's table, as every textbook has it
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 10: 2.228, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize("freedom", STUDENT)
def test_students_t(freedom: int) -> None:
    assert student(freedom) == pytest.approx(STUDENT[freedom], abs=6e-4)


def test_students_t_between_whole_numbers_and_far_out() -> None:
    assert student(1.2) == pytest.approx(8.648826510748856, abs=1e-9)  # by the incomplete beta function
    assert student(1.9) == pytest.approx(4.527118077100288, abs=1e-9)
    assert student(1e6) == pytest.approx(1.959966, abs=1e-4)
    assert student(7, 0.99) == pytest.approx(3.499, abs=6e-4)


def side(*accuracies: float) -> Side:
    return Side(tuple(map(str, range(len(accuracies)))), accuracies, None)


def test_welchs_interval() -> None:
    """Against the formula written out for three and three."""
    ours, theirs = side(97.3, 97.5, 97.1), side(96.9, 97.0, 97.1)
    a, b = 0.2**2 / 3, 0.1**2 / 3
    half = student((a + b) ** 2 / (a**2 / 2 + b**2 / 2)) * math.sqrt(a + b)
    assert welch(ours, theirs) == pytest.approx((0.3 - half, 0.3 + half))
    low, high = ours.interval or (0, 0)
    assert (high - low) / 2 == pytest.approx(4.3027 * 0.2 / math.sqrt(3), abs=1e-4)
    assert welch(side(97.0), theirs) is None
    assert side(97.0).interval is None
    assert welch(side(97.0, 97.0), side(96.0, 96.0)) is None  # no interval of width 0
    assert welch(side(90.1, 90.1, 90.1), side(90.3, 90.3, 90.3)) is None  # though their mean is rounded


def test_the_bootstrap_has_the_width_of_the_normal_interval() -> None:
    random = np.random.default_rng(1)
    ours, theirs = random.random(10_000) < 0.97, random.random(10_000) < 0.96
    differences = 100.0 * (ours.astype(float) - theirs)
    low, high = bootstrap(differences)
    half = 1.96 * differences.std() / 100
    assert (low + high) / 2 == pytest.approx(differences.mean(), abs=0.01)
    assert (high - low) / 2 == pytest.approx(half, rel=0.05)
    assert bootstrap(differences) == (low, high)  # the same seed
    assert bootstrap(differences, seed=1) == pytest.approx((low, high), abs=0.03)
    paired = np.where(np.arange(10_000) < 9_700, 0.0, 100.0)  # the second fails where the first does, and on 3 % more
    assert bootstrap(paired)[0] > 2.5


def stored(folder: Path, name: str, accuracy: float, right: Any, **changes: Any) -> Path:
    made = record(test_accuracy=accuracy, outcomes=packed(np.array(right)), weights_sha256=name * 64, **changes)
    made["config"] = {**made["config"], "name": name}
    made.pop("analysis", None)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(made))
    return path


def test_ours_minus_theirs(tmp_path: Path) -> None:
    right = np.arange(600) % 10 > 0
    paths = [
        stored(tmp_path, "a", 90.0, right),
        stored(tmp_path, "b", 91.0, right, seed=1),
        stored(tmp_path, "c", 80.0, np.arange(600) % 5 > 0),
        stored(tmp_path, "d", 80.5, np.arange(600) % 5 > 0, seed=1),
    ]
    made = compare(gather(paths[:2]).finished, gather(paths[2:]).finished)
    assert made.difference == pytest.approx(10.25)
    assert made.samples == 600
    assert made.over_trainings is not None
    assert made.over_samples is not None
    assert made.over_samples[0] < 10.0 < made.over_samples[1]
    text = str(made)
    assert text.startswith("ours    90.500 % of 2 trainings (90.00, 91.00), in float, 95 %: ")
    assert "ours - theirs: +10.250 points\nover trainings, 95 %: +" in text
    assert text.endswith("(paired bootstrap, 600 samples)")
    assert made.by_seed is not None
    assert made.by_seed.accuracies == pytest.approx((10.0, 10.5))
    assert made.by_seed.interval == pytest.approx((10.25 - student(1) * 0.25, 10.25 + student(1) * 0.25))
    assert "\nof the same seed, 95 %: +7.073 to +13.427 (Student; +10.00, +10.50; standard error 0.250)\n" in text
    assert made.to_dict()["by_seed"]["differences"] == pytest.approx((10.0, 10.5))
    back = compare(gather(paths[:2]).finished, gather([paths[3], paths[2]]).finished)  # whatever their order
    assert back.by_seed is not None
    assert back.by_seed.accuracies == made.by_seed.accuracies
    one = compare(gather(paths[:1]).finished, gather(paths[2:3]).finished)
    assert (one.over_trainings, one.by_seed) == (None, None)
    alike = [stored(tmp_path, "f", 90.3, right), stored(tmp_path, "g", 90.1, right, seed=1)]
    lower = [stored(tmp_path, "h", 90.2, right), stored(tmp_path, "i", 90.0, right, seed=1)]
    assert compare(gather(alike).finished, gather(lower).finished).by_seed is None  # 0.1 both times, but for rounding
    others = [paths[2], stored(tmp_path, "e", 80.5, right, seed=2)]
    assert compare(gather(paths[:2]).finished, gather(others).finished).by_seed is None
    assert "over trainings: not known, each side needs two or more" in str(one)
    with pytest.raises(LbqError, match="a.json is on both sides: compare it with another training"):
        compare(gather(paths[:2]).finished, gather(paths[:1]).finished)
    copy = tmp_path / "copy.json"
    copy.write_text(paths[0].read_text())
    with pytest.raises(LbqError, match="a.json is on both sides"):
        compare(gather(paths[:1]).finished, gather([copy]).finished)


def test_what_compares_with_nothing_is_refused(tmp_path: Path) -> None:
    right = np.arange(600) % 10 > 0
    good = gather([stored(tmp_path, "a", 90.0, right)]).finished
    other = gather([stored(tmp_path, "b", 90.0, right, dataset="cifar10")]).finished
    with pytest.raises(LbqError, match="several datasets cannot be compared: cifar10, digits"):
        compare(good, other)
    with pytest.raises(LbqError, match="needs at least one result"):
        compare(good, [])
    fewer = gather([stored(tmp_path, "c", 90.0, right[:599])]).finished
    with pytest.raises(LbqError, match="one side was tested on 600 samples, the other on 599"):
        compare(good, fewer)
    with pytest.raises(LbqError, match="test sets of 599 and 600 samples cannot be compared"):
        compare([*good, *fewer], good)
    part = stored(tmp_path, "d", 90.0, right)
    made = json.loads(part.read_text())
    made["config"]["data"]["limit"] = 100
    part.write_text(json.dumps(made))
    with pytest.raises(LbqError, match=r"d.json was tested on a part of its test set \(data.limit=100\)"):
        compare(good, gather([part]).finished)
    same = stored(tmp_path, "f", 91.0, ~right)
    same.write_text(json.dumps({**json.loads(same.read_text()), "config": made["config"]}))
    assert compare(gather([part]).finished, gather([same]).finished).difference
    untested = gather([stored(tmp_path, "e", 90.0, right)]).finished
    untested[0].record["test_accuracy"] = None
    with pytest.raises(LbqError, match="e.json has no test accuracy"):
        compare(good, untested)


def test_users_data_of_one_name_must_be_the_same_files(tmp_path: Path) -> None:
    right = np.arange(600) % 10 > 0
    sides = [
        gather([stored(tmp_path, name, 90.0, right, dataset="arrays", data_sha256=data)]).finished
        for name, data in (("a", "1" * 64), ("b", "2" * 64), ("c", "1" * 64), ("old", "3" * 12), ("older", "4" * 12))
    ]
    with pytest.raises(
        LbqError, match=r"a.json and .*b.json are of different data \(data_sha256\): compare networks of the"
    ):
        compare(sides[0], sides[1])
    assert compare(sides[0], sides[2]).samples == 600
    assert compare(sides[0], sides[3]).samples == 600  # a hash of labels alone says nothing of files
    with pytest.raises(LbqError, match=r"old.json and .*older.json are of different data"):
        compare(sides[3], sides[4])


def test_a_side_holds_trainings_that_differ_in_their_seed_alone(tmp_path: Path) -> None:
    right = np.arange(600) % 10 > 0
    paths = [stored(tmp_path, name, 90.0, right, seed=seed) for seed, name in enumerate("ab")]
    made = json.loads(paths[1].read_text())
    made["config"]["optim"]["lr"] = 0.123
    paths[1].write_text(json.dumps(made))
    one, other = (gather([path]).finished for path in paths)
    with pytest.raises(
        LbqError, match=r"a.json and .*b.json differ in more than their seed: give trainings of one kind"
    ):
        compare([*one, *other], one)
    assert compare(one, other).difference == 0.0


def test_it_says_which_accuracies_are_on_integers(tmp_path: Path) -> None:
    right = np.arange(600) % 10 > 0
    paths = [stored(tmp_path, name, 90.0, right, seed=seed) for seed, name in enumerate("ab")]
    one, other = (gather([path]).finished for path in paths)
    one[0].integer = {"test_accuracy": 89.0}
    mixed, in_float = compare(one, other), compare(one, other, in_float=True)
    assert "ours    89.000 %, one training, on integers" in str(mixed)
    assert "some are on integers and some in float: --float compares all in float" in str(mixed)
    assert "ours    90.000 %, one training, in float" in str(in_float)
    assert "some are" not in str(in_float)
    assert [network["on_integers"] for network in mixed.to_dict()["ours"]["networks"]] == [True]


def test_a_training_says_which_test_samples_are_right() -> None:
    made = read(runs_folder() / "lbq-0")
    right = unpacked(made["outcomes"], "lbq-0")
    assert len(right) == 599
    assert 100 * right.mean() == pytest.approx(made["test_accuracy"])


def test_an_analysis_of_a_deployed_network_says_it_too() -> None:
    test, net = open_test("digits"), load(runs_folder() / "lbq-0" / "model.lbq")
    whole = analyze(net, test, membranes=7)
    assert whole.outcomes is not None
    right = unpacked(whole.outcomes, "analysis")
    assert test.labels is not None
    np.testing.assert_array_equal(right, net.run(test.read(0, test.size)).predictions == test.labels)
    part = analyze(net, test, limit=10)
    assert part.outcomes is not None
    assert part.outcomes["samples"] == 10
    assert type(whole).from_dict(json.loads(json.dumps(whole.to_dict()))).outcomes == whole.outcomes


def test_the_command(call: Call, tmp_path: Path) -> None:
    root = runs_folder()
    runs = [str(root / name) for name in ("lbq-0", "lbq-1")]
    out = call.json("compare", *runs, "--against", str(root / "ann"))
    assert len(out["ours"]["networks"]) == 2
    assert out["samples"] == 599
    assert out["over_trainings"] is None
    assert out["over_samples"][0] < out["difference"] < out["over_samples"][1]
    assert "paired bootstrap, 599 samples" in call.printed("compare", *runs, "--against", str(root / "ann"), "--float")
    old = record()
    old.pop("outcomes")
    (tmp_path / "old.json").write_text(json.dumps(old))
    printed = call.printed("compare", str(tmp_path / "old.json"), "--against", str(root / "ann"))
    assert "over test samples: not known, an older file does not say" in printed
    assert "--against" in call.refused("compare", runs[0])
    assert "half is not finished: leave it out" in call.refused("compare", str(root / "half"), "--against", runs[0])
    alone = tmp_path / "model.lbq"
    alone.write_bytes((root / "lbq-0" / "model.lbq").read_bytes())
    assert "has no accuracy to compare: give a run" in call.refused("compare", str(alone), "--against", runs[0])
