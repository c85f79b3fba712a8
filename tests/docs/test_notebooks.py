"""The notebooks run from the first cell to the last, and carry no outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["from_training_to_integers", "the_neuron_seen"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_carries_no_outputs(path: Path) -> None:
    for cell in code_cells(path):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # PyTorch's own doing
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells are plain Python, which needs no kernel of its own."""
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    figures = 0
    for number, cell in enumerate(code_cells(path)):
        exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
        figures += len(plt.get_fignums())
        plt.close("all")
    assert figures >= 3
    out, err = capsys.readouterr()
    assert out
    assert not err
