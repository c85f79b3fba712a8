"""A report finds what `lbq analyze` and `lbq account` wrote: in a run folder, beside it, beside a model, beside a record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lbq.errors import LbqError
from lbq.results.gather import gather
from lbq.runs.records import read
from tests.support.commands import Call
from tests.support.report_runs import record, runs_folder

WRITTEN = Path("analysis") / "analysis.json"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder without its analysis."""
    shutil.copytree(runs_folder() / "lbq-0", tmp_path / "runs" / "mine")
    shutil.rmtree(tmp_path / "runs" / "mine" / "analysis")
    return tmp_path / "runs" / "mine"


def counted(*paths: Path) -> list[int]:
    """How many analyses each result has."""
    return [len(result.analyses) for result in gather(paths, read).results]


def test_nothing_beside_a_run(run: Path) -> None:
    assert counted(run) == [0]


@pytest.mark.parametrize("place", ["mine/mine.analysis", "elsewhere", "mine.analysis"])
def test_in_a_run_folder_or_beside_it(run: Path, place: str) -> None:
    folder = run.parent / place
    folder.mkdir()
    shutil.copy(runs_folder() / "lbq-0" / WRITTEN, folder)
    assert counted(run) == counted(run.parent) == [1]


def test_of_other_runs_nothing_is_taken(run: Path) -> None:
    value = json.loads((runs_folder() / "lbq-0" / WRITTEN).read_text())
    value["facts"]["weights_sha256"] = "f" * 64
    for i, text in enumerate((json.dumps(value), "{", "[]", '{"facts": 3}')):
        (run.parent / f"{i}").mkdir()
        (run.parent / f"{i}" / "analysis.json").write_text(text)
    assert counted(run) == [0]


def test_beside_a_model_and_a_record(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "model.lbq", tmp_path / "m.lbq")
    (tmp_path / "m.analysis").mkdir()
    written = tmp_path / "m.analysis" / "analysis.json"
    shutil.copy(runs_folder() / "lbq-0" / WRITTEN, written)
    assert counted(tmp_path / "m.lbq") == counted(run, tmp_path / "m.lbq") == [1]
    (tmp_path / "r.json").write_text(json.dumps(record()))
    assert counted(tmp_path / "r.json") == [0]
    shutil.copy(written, tmp_path / "r_analysis.json")
    assert counted(tmp_path / "r.json") == [1]
    value = json.loads(written.read_text())
    value["facts"]["weights_sha256"] = "f" * 64
    written.write_text(json.dumps(value))
    with pytest.raises(LbqError, match="is of other weights than .*m.lbq holds: run lbq analyze on it again"):
        gather([tmp_path / "m.lbq"])


def test_account_keeps_its_counts_for_reports(run: Path, call: Call) -> None:
    model = run / "model.lbq"
    call.json("account", str(model), "--limit", "20")
    assert not model.with_suffix(".analysis").exists()  # a part of the test set is no result
    call.json("account", str(model))
    (result,) = gather([run], read).results
    (analysis,) = result.analyses
    assert (analysis.deployed, analysis.images, "exact" in analysis.accounts) == (True, 599, True)
    model.with_suffix(".analysis").joinpath("account.json").unlink()
    model.with_suffix(".analysis").rmdir()
    model.with_suffix(".analysis").write_text("in the way")
    code, out, err = call("account", str(model))
    assert code == 0
    assert "modelled" in out
    assert "a report will not find these counts" in err
