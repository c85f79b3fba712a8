"""Published numbers, against what the paper's text says of them: a slip in typing would break one of these."""

from __future__ import annotations

from collections import Counter

import pytest

from lbq.results import paper
from lbq.results.paper import ACCURACIES, Published


def one(dataset: str, method: str, architecture: str = "ResNet-20") -> Published:
    (row,) = [r for r in ACCURACIES if (r.dataset, r.method, r.architecture) == (dataset, method, architecture)]
    return row


def test_every_row_is_there() -> None:
    assert Counter((r.table, r.dataset) for r in ACCURACIES) == {
        (2, "CIFAR-10"): 13,
        (2, "CIFAR-100"): 12,
        (3, "ImageNet-1K"): 16,
        (4, "CIFAR10-DVS"): 10,
        (4, "DVS128-Gesture"): 8,
    }
    assert len(paper.ABLATION) == 8
    assert all(50 < a < 100 for r in ACCURACIES for a in r.accuracy.values())
    assert {r.method for r in ACCURACIES if r.reproduced} == {"LM-HT (L = 2)"}
    assert all(r.venue or r.method == "LBQ" for r in ACCURACIES)


@pytest.mark.parametrize(("dataset", "gains"), [("CIFAR-10", (1.35, 1.05, 1.36)), ("CIFAR-100", (3.64, 2.86, 2.04))])
def test_gains_over_lm_ht(dataset: str, gains: tuple[float, ...]) -> None:
    """ "LBQ improves CIFAR-10 accuracy by 1.35, 1.05, and 1.36 percentage points at T = 1, 2, 4" and so on."""
    ours, theirs = one(dataset, "LBQ"), one(dataset, "LM-HT (L = 2)")
    assert [round(ours.accuracy[t] - theirs.accuracy[t], 2) for t in (1, 2, 4)] == list(gains)


def test_other_sentences() -> None:
    lbq34 = one("ImageNet-1K", "LBQ", "ResNet-34").accuracy
    assert round(lbq34[2] - one("ImageNet-1K", "LM-HT (L = 2)", "ResNet-34").accuracy[2], 2) == 2.77
    assert round(lbq34[2] - one("ImageNet-1K", "Adaptive Calibration", "ResNet-34").accuracy[8], 2) == 0.71
    assert one("ImageNet-1K", "LBQ", "ResNet-18").accuracy == {1: 67.50, 2: 68.23}
    dvs = one("CIFAR10-DVS", "LBQ").accuracy[10]
    assert round(dvs - one("CIFAR10-DVS", "LM-HT (L = 2)").accuracy[10], 2) == 2.30
    assert dvs == one("CIFAR10-DVS", "IMLIF", "VGG-13").accuracy[40]
    assert one("DVS128-Gesture", "LBQ", "ResNet-19").accuracy == {16: 98.28}


def test_ablation_sentences() -> None:
    by = {row.variant: row.accuracy for row in paper.ABLATION}
    costs = {method: accuracy for method, accuracy, _ in paper.cost_rows()}
    assert round(by["v3"] - by["v1"], 2) == 0.86
    assert round(by["lbq"] - by["v2"], 2) == 0.71
    assert round(by["v1"] - by["ternary_fixed"], 2) == 2.33
    assert round(by["ann"] - by["lbq"], 2) == 0.07
    assert by["lbq"] == costs["LBQ (5)"] == one("CIFAR-10", "LBQ").accuracy[2]
    assert by["ann"] == costs["ANN"]
    assert by["lif"] == costs["Binary"]
    assert set(paper.LAYER_WISE) == {"v1", "v2", "v3", "lbq"}
