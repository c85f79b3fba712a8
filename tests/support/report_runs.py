"""Finished, unfinished and deployed runs for the tests of records, results and reports: trained once in a test session."""

from __future__ import annotations

import atexit
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from lbq import engine
from lbq.config import Config
from lbq.counting.analysis import Analysis
from lbq.deploy import deploy_run
from lbq.measuring.measure import analyze_run
from lbq.report.output import write_analysis
from lbq.results.result import Result
from lbq.runs import records
from lbq.training import job
from tests.support.small_runs import Silent

SMALL: dict[str, dict[str, Any]] = {
    "model": {"id": "resnet8w2"},
    "train": {"epochs": 2, "batch_size": 256, "warmup_epochs": 0},
}
BENCHMARK = {"sweeps": {"active": [[0.05, 10.0, 30.0], [0.2, 25.0, 30.0], [0.5, 60.0, 30.0]]}}


def trained(folder: Path, **neuron: Any) -> Path:
    seed = neuron.pop("seed", 0)
    model = {**SMALL["model"], "timesteps": 1 if neuron.get("name") == "relu" else 2}
    config = Config.from_dict({**SMALL, "model": model, "seed": seed, "neuron": neuron or {"name": "lbq"}})
    job.train(config, folder, Silent())
    return folder


@cache
def runs_folder() -> Path:
    """A folder with `lbq-0` (analysed, deployed), `lbq-1` (another seed), `ann` and `half` (not finished)."""
    root = Path(mkdtemp(prefix="lbq-report-runs-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    first = trained(root / "lbq-0")
    trained(root / "lbq-1", seed=1)
    trained(root / "ann", name="relu")
    shutil.copytree(first, root / "half")
    (root / "half" / "result.json").unlink()
    metrics = root / "half" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0] + '{"epoch": 2, "lo')
    write_analysis(first / "analysis", analyze_run(first, membranes=8))
    engine.save(first / "model.lbq", deploy_run(first))
    return root


def record(**changes: Any) -> dict[str, Any]:
    """The record of `lbq-0` without its analysis and, unless it is given, without a name, changed."""
    made = json.loads(json.dumps(records.record_of(runs_folder() / "lbq-0")))
    made.pop("analysis", None)
    made.pop("name")
    return {**made, **changes}


def of_cifar(**changes: Any) -> Result:
    """A made-up CIFAR-10 run of the paper's network, with real bookkeeping around it."""
    base = {
        "dataset": "cifar10",
        "model": "resnet20w128",
        "epochs": 60,
        "test_accuracy": 95.5,
        "weights_sha256": "a" * 64,
    }
    made = record(**{**base, **changes})
    made["config"] = {**made["config"], "changed": sorted(map(str, changes.items()))}
    held = json.loads((runs_folder() / "lbq-0" / "analysis" / "analysis.json").read_text())
    return Result(made, str(changes), [Analysis.from_dict(held)])
