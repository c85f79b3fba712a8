"""Level statistics and the figure drawn from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lbq.analyze import LevelCounter, LevelHistogram, coefficient_of_variation
from lbq.report.figures import step_profile


def test_histogram() -> None:
    counter = LevelCounter({"a": 3, "b": 1})
    counter.add({"a": np.array([0, 0, 1, 2]), "b": np.array([-1, 0, 1, 0], np.int8)})
    counter.add({"a": np.array([0, 0, 1, 1]), "b": np.array([0, 0, 0, 0], np.int8)})
    a, b = counter.layers["a"], counter.layers["b"]
    assert a.counts.tolist() == [4, 3, 1, 0]
    assert a.active_ratio == 0.5
    np.testing.assert_allclose(a.conditional, [0.75, 0.25, 0])
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(3)
    assert a.normalised_entropy == pytest.approx(entropy)
    assert b.counts.tolist() == [6, 2]
    assert b.normalised_entropy == 0


def test_extremes() -> None:
    assert LevelHistogram(np.array([5, 2, 2, 2])).normalised_entropy == pytest.approx(1)
    silent = LevelHistogram(np.array([5, 0, 0]))
    assert silent.active_ratio == 0
    assert silent.conditional.tolist() == [0, 0]
    assert silent.normalised_entropy == 0


def test_variation() -> None:
    assert coefficient_of_variation(np.array([1.0, 3.0])) == pytest.approx(0.5)


def test_figure_is_a_png(tmp_path: Path) -> None:
    histograms = {name: LevelHistogram(np.array([9, 4, 2, 1])) for name in ("sn1", "sn2")}
    step_profile(tmp_path / "f.png", {"sn1": 0.3, "sn2": 0.5}, 0.4, histograms, "title")
    data = (tmp_path / "f.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 10_000
