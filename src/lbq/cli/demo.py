"""The first run: train four small networks on real digits, run the burst network on integer levels, count, and report.

The four are configurations, trained and deployed as `lbq train` and `lbq deploy` do it. Nothing here prints: the command line
shows progress through `Watcher`.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from lbq import engine
from lbq.batches.sources import open_source
from lbq.config import Config
from lbq.counting.analysis import LevelHistogram
from lbq.counting.deployed_counts import analyze
from lbq.deploy import deploy_run
from lbq.deploy.deploy import test_set
from lbq.deploy.verify import AbsorptionCheck, IntegerCheck, check_absorption, check_integers
from lbq.measuring.measure import Measurement, measure
from lbq.report.output import make, write_analysis
from lbq.results.gather import ARCHIVE, gather
from lbq.runs import records, run_folder
from lbq.training import evaluation, job
from lbq.training.position import EpochRecord

INITIAL_STEP = 0.4
IMAGES_PER_MEMBRANE = 4  # membranes of every fourth test image are looked at
OURS = "lbq"

# the same network, seed, data and epochs; an ANN has no timesteps
METHODS: dict[str, tuple[dict[str, Any], int]] = {
    "ann": ({"name": "relu"}, 1),
    "lif": ({"name": "lif"}, 2),
    "burst_fixed": ({"name": "burst_fixed", "n_max": 5, "step": INITIAL_STEP}, 2),
    OURS: ({"name": "lbq", "n_max": 5, "step": INITIAL_STEP}, 2),
}
TITLES = {
    "ann": "ANN (ReLU)",
    "lif": "binary LIF",
    "burst_fixed": "burst, fixed step",
    OURS: "LBQ, learned step",
}


class Watcher(Protocol):
    """Is called as things happen."""

    def start(self, method: str, epochs: int) -> None: ...

    def epoch(self, method: str, record: EpochRecord) -> None: ...

    def done(self, method: str, accuracy: float, seconds: float) -> None: ...

    def stage(self, text: str) -> None: ...


class _Epochs(job.Watcher):
    """Hands the epochs of one method's training on."""

    def __init__(self, method: str, watcher: Watcher) -> None:
        self.method, self.watcher = method, watcher

    def epoch(self, record: EpochRecord) -> None:
        self.watcher.epoch(self.method, record)


@dataclass(frozen=True)
class MethodResult:
    """Accuracy in percent on the held-out third after the last epoch; counts per image; modelled energy in µJ."""

    method: str
    accuracy: float
    timesteps: int
    parameters: int
    active_ratio: float | None
    unary_acs: float | None
    bit_sparse_acs: float | None
    energy_uj: float


@dataclass(frozen=True)
class DemoResult:
    methods: dict[str, MethodResult]
    steps: dict[str, float]
    histograms: dict[str, LevelHistogram]
    absorption: AbsorptionCheck
    check: IntegerCheck
    seconds: float
    folder: Path
    report: Path

    def summary(self) -> dict[str, Any]:
        """What `lbq demo --json` prints."""
        return {
            "accuracy": {name: round(m.accuracy, 2) for name, m in self.methods.items()},
            "seconds": round(self.seconds, 1),
            "integer_check": self.absorption.passed and self.check.passed,
            "integer_accuracy": round(self.check.accuracy, 2),
            "run": str(self.folder),
            "report": str(self.report),
        }


def demo_config(method: str, seed: int, epochs: int) -> Config:
    neuron, timesteps = METHODS[method]
    return Config.from_dict(
        {
            "seed": seed,
            "model": {"id": "resnet8w16", "num_classes": 10, "in_channels": 1, "timesteps": timesteps},
            "neuron": neuron,
            "data": {"name": "digits"},
            "augment": {"shift": 1},
            "optim": {"lr": 0.1, "weight_decay": 5e-4},
            "train": {"epochs": epochs, "batch_size": 64, "warmup_epochs": min(2, epochs - 1), "eval_every": epochs},
        }
    )


def run_demo(folder: Path | str, watcher: Watcher, seed: int = 0, epochs: int = 20) -> DemoResult:
    """Train, check, count, and write the run folder `folder` (the LBQ network; the others under `baselines/`)."""
    started, folder = time.perf_counter(), Path(folder)
    with run_folder.new_folder(folder) as partial:
        # ours first: a run folder must be empty when its training begins
        measured = {
            method: _train(method, _place(partial, method), folder.name, demo_config(method, seed, epochs), watcher)
            for method in (OURS, *(method for method in METHODS if method != OURS))
        }
        watcher.stage("absorbing the steps, deploying on integers, running bit plane by bit plane ...")
        absorption, check = _deploy(partial)
    if not (absorption.passed and check.passed):
        raise RuntimeError(
            f"a bug in lbq: the integer network of {folder} disagrees with training: {absorption} {check}"
        )
    watcher.stage("writing the report ...")
    page = folder / "report.html"
    make(page, gather([_place(folder, method) for method in METHODS], records.read), title="LBQ on UCI digits")
    return DemoResult(
        methods={method: _summary(method, _place(folder, method), measured[method]) for method in METHODS},
        steps=evaluation.neuron_steps(run_folder.load(folder)),
        histograms=measured[OURS].histograms,
        absorption=absorption,
        check=check,
        seconds=time.perf_counter() - started,
        folder=folder,
        report=page,
    )


def _place(folder: Path, method: str) -> Path:
    """The run folder of a method."""
    return folder if method == OURS else folder / "baselines" / method


def _train(method: str, run: Path, name: str, config: Config, watcher: Watcher) -> Measurement:
    """Train a method in its run folder and analyse it there. name: what the folder of ours will be called."""
    watcher.start(method, config.train.epochs)
    started = time.perf_counter()
    job.train(config, run, _Epochs(method, watcher))
    seconds = time.perf_counter() - started
    net = run_folder.load(run)
    measured = measure(net, open_source(config), membranes=IMAGES_PER_MEMBRANE)
    facts = {"kind": "run", **records.facts_of(run), "name": name if method == OURS else method}
    write_analysis(run / records.ANALYSIS.parent, measured.analysis(facts, evaluation.neuron_tails(net)))
    watcher.done(method, measured.accuracy, seconds)
    return measured


def _deploy(run: Path) -> tuple[AbsorptionCheck, IntegerCheck]:
    """Write the integer network of a run and its analysis, and check it against the trained network."""
    net, config, artefact = run_folder.load(run), run_folder.load_config(run), run / ARCHIVE
    source, test = open_source(config), test_set(config)
    size = engine.save(artefact, deploy_run(run))
    deployed = engine.load(artefact)
    absorption, check = check_absorption(net, source), check_integers(net, source, deployed, test, size)
    write_analysis(artefact.with_suffix(".analysis"), analyze(deployed, test))
    checks = {"absorption": asdict(absorption), "integers": asdict(check)}
    run_folder.write_text(run / "checks.json", json.dumps(checks, indent=2) + "\n")
    return absorption, check


def _summary(method: str, run: Path, measured: Measurement) -> MethodResult:
    net, account = run_folder.load(run), measured.exact
    return MethodResult(
        method=method,
        accuracy=measured.accuracy,
        timesteps=net.timesteps,
        parameters=sum(p.numel() for p in net.parameters()),
        active_ratio=account.active_ratio if account else None,
        unary_acs=account.total.unary if account else None,
        bit_sparse_acs=account.executed if account else None,
        energy_uj=1e3 * (account.energy_mj() if account else measured.ann_energy_mj()),
    )
