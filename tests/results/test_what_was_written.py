"""A report finds what `lbq analyze` and `lbq account` wrote: in a run folder, beside it, beside a model, beside a record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lbq import engine
from lbq.errors import LbqError
from lbq.results.gather import gather
from lbq.runs.records import read
from tests.support.commands import Call
from tests.support.report_runs import record, runs_folder
from tests.support.small_nets import deployed, pixels

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
    with pytest.raises(LbqError, match="is of another network than .*m.lbq holds: run lbq analyze on it again"):
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


@pytest.fixture
def deployments(run: Path, tmp_path: Path, call: Call) -> Path:
    """A folder of one run, deployed with 8 and with 3 bits, both analysed."""
    folder = tmp_path / "deployed"
    folder.mkdir()
    for bits in ("8", "3"):
        model = str(folder / f"bits{bits}.lbq")
        call.json("deploy", str(run), "--bits", bits, "-o", model)
        call.json("analyze", model)
    return folder


def test_a_network_that_took_the_place_of_another_is_analysed_again(deployments: Path, call: Call) -> None:
    shutil.copy(deployments / "bits3.lbq", deployments / "bits8.lbq")
    assert "is of another network than" in call.refused("report", str(deployments / "bits8.lbq"), "-o", "r.html")


def test_deployments_of_one_run_are_rows_of_their_own(run: Path, deployments: Path, tmp_path: Path, call: Call) -> None:
    models = [deployments / "bits3.lbq", deployments / "bits8.lbq"]
    found = [(r.name, r.integer_bits) for r in gather(models).results]
    assert found == [("bits3.lbq", 3), ("bits8.lbq", 8)]
    assert sorted((r.name, r.integer_bits) for r in gather([deployments]).results) == sorted(found)
    (run / "model.lbq").unlink()
    (trained, other) = gather([run, *models], read).results
    assert (trained.integer_bits, other.name, other.integer_bits) == (3, f"{trained.name}, 8 bits", 8)
    call.json("account", str(models[0]))  # counts of a network that is there already
    assert [len(r.analyses) for r in gather(models).results] == [2, 1]
    out = tmp_path / "r.md"
    call.json("report", *map(str, models), "--format", "md", "-o", str(out))
    assert all(name in out.read_text() for name in ("bits3.lbq", "bits8.lbq"))


def test_networks_of_ones_own_are_told_apart(tmp_path: Path, call: Call) -> None:
    """They name no weights of a run."""
    np.savez(tmp_path / "own.npz", images=pixels(6, 3, 8, 8), labels=np.arange(6) % 5)
    for name, id in (("a", "resnet8w4"), ("b", "resnet8w2")):
        engine.save(tmp_path / f"{name}.lbq", deployed(id))
        for verb in ("account", "analyze"):
            call.json(verb, str(tmp_path / f"{name}.lbq"), "--data", str(tmp_path / "own.npz"))
    assert counted(tmp_path / "a.lbq", tmp_path / "b.lbq") == [2, 2]
    shutil.copy(tmp_path / "a.lbq", tmp_path / "b.lbq")
    with pytest.raises(LbqError, match="is of another network than"):
        gather([tmp_path / "b.lbq"])


def test_by_a_name_and_in_a_folder_for_a_hub(
    run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(run / "model.lbq", tmp_path / "known.lbq")
    monkeypatch.setenv("LBQ_MODELS", str(tmp_path))
    monkeypatch.chdir(run)
    assert gather([Path("known")]).artefacts == [tmp_path / "known.lbq"]
    for more in ([], ["--run", str(run)]):
        hub = tmp_path / f"hub{len(more)}"
        call.json("models", "export", "known", "-o", str(hub), *more)
        assert gather([hub]).artefacts == [hub / "model.lbq"]
