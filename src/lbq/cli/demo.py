"""The first run: train four small networks on real digits, run the burst network on integer levels, count, and report.

Everything in the result is computed in that run. Nothing here prints: the command line shows progress through
`Watcher`.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from lbq import engine
from lbq.batches.sources import Source, open_source
from lbq.config import Config
from lbq.counting.analysis import LevelHistogram
from lbq.counting.deployed import analyze
from lbq.deploy.deploy import deploy_trained, test_set
from lbq.deploy.verify import AbsorptionCheck, IntegerCheck, check_absorption, check_integers
from lbq.measuring.measure import Measurement, measure
from lbq.models import BurstNet
from lbq.report.output import make, write_analysis
from lbq.results.gather import gather
from lbq.runs import records, run_folder
from lbq.training import evaluation
from lbq.training import trainer as train
from lbq.training.position import EpochRecord

INITIAL_STEP = 0.4
ARTEFACT = "model.lbq"

# the same network, seed, data and epochs; an ANN has no timesteps
METHODS: dict[str, tuple[dict[str, Any], int]] = {
    "ann": ({"name": "relu"}, 1),
    "lif": ({"name": "lif"}, 2),
    "burst_fixed": ({"name": "burst_fixed", "n_max": 5, "step": INITIAL_STEP}, 2),
    "lbq": ({"name": "lbq", "n_max": 5, "step": INITIAL_STEP}, 2),
}
TITLES = {
    "ann": "ANN (ReLU)",
    "lif": "binary LIF",
    "burst_fixed": "burst, fixed step",
    "lbq": "LBQ, learned step",
}


class Watcher(Protocol):
    """Told what happens, as it happens."""

    def start(self, method: str, epochs: int) -> None: ...

    def epoch(self, method: str, record: EpochRecord) -> None: ...

    def done(self, method: str, accuracy: float, seconds: float) -> None: ...

    def stage(self, text: str) -> None: ...


@dataclass(frozen=True)
class MethodResult:
    """Accuracy in percent on the held-out third after the last epoch; counts per image; modelled energy in µJ."""

    method: str
    accuracy: float
    timesteps: int
    parameters: int
    seconds: float
    active_ratio: float | None
    unary_acs: float | None
    bit_sparse_acs: float | None
    formations: float | None
    fp_macs: float
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
    started = time.perf_counter()
    folder = Path(folder)
    results: dict[str, MethodResult] = {}
    with run_folder.new_folder(folder) as partial:
        for method in METHODS:
            config = demo_config(method, seed, epochs)
            source = open_source(config)
            net, metrics, seconds = _train(method, config, source, watcher)
            measured = measure(net, source, membranes=4)
            results[method] = _summarise(method, net, measured, seconds)
            watcher.done(method, measured.accuracy, seconds)
            where = partial if method == "lbq" else partial / "baselines" / method
            _save(
                where,
                net,
                config,
                metrics,
                results[method],
                measured,
                source,
                folder.name if where == partial else method,
            )
        # the last network is LBQ's, and the folder is its run
        watcher.stage("absorbing the steps, deploying on integers, running bit plane by bit plane ...")
        absorption = check_absorption(net, source)
        test = test_set(config)
        size = engine.save(partial / ARTEFACT, deploy_trained(net, config, test))
        check = check_integers(net, source, engine.load(partial / ARTEFACT), test, size)
        write_analysis((partial / ARTEFACT).with_suffix(".analysis"), analyze(engine.load(partial / ARTEFACT), test))
        checks = {"absorption": asdict(absorption), "integers": asdict(check)}
        run_folder.write_text(partial / "checks.json", json.dumps(checks, indent=2) + "\n")
    if not (absorption.passed and check.passed):
        raise RuntimeError(
            f"a bug in lbq: the integer network of {folder} disagrees with training: {absorption} {check}"
        )
    watcher.stage("writing the report ...")
    page = folder / "report.html"
    made = gather([*(folder / "baselines" / method for method in METHODS if method != "lbq"), folder], records.read)
    make(page, made, title="LBQ on UCI digits")
    return DemoResult(
        methods=results,
        steps=evaluation.neuron_steps(net),
        histograms=measured.histograms,
        absorption=absorption,
        check=check,
        seconds=time.perf_counter() - started,
        folder=folder,
        report=page,
    )


def _save(
    folder: Path,
    net: BurstNet,
    config: Config,
    metrics: list[dict[str, Any]],
    result: MethodResult,
    measured: Measurement,
    source: Source,
    name: str,
) -> None:
    """One method's run folder, with what a record needs, and its analysis. name: what the folder will be called."""
    details = {
        "epoch": metrics[-1]["epoch"],
        "train_loss": metrics[-1]["loss"],
        "steps": evaluation.neuron_steps(net),
        "tails": evaluation.neuron_tails(net),
        "active": {name: histogram.active_ratio for name, histogram in measured.histograms.items()},
        "levels": {name: histogram.counts.tolist() for name, histogram in measured.histograms.items()},
        "training_seconds": result.seconds,
        "processes": 1,
        "data": source.about,
    }
    run_folder.save(folder, net, config, metrics, {**asdict(result), **details})
    facts = {"kind": "run", **records.facts_of(folder), "name": name}
    analysis = measured.analysis(facts, evaluation.neuron_tails(net))
    write_analysis(folder / records.ANALYSIS.parent, analysis)


def _train(
    method: str, config: Config, source: Source, watcher: Watcher
) -> tuple[BurstNet, list[dict[str, Any]], float]:
    watcher.start(method, config.train.epochs)
    started = time.perf_counter()
    trainer = train.Trainer(config, source)
    metrics = []
    for record in trainer.fit():
        metrics.append(record.to_dict())
        watcher.epoch(method, record)
    return trainer.net.eval(), metrics, time.perf_counter() - started


def _summarise(method: str, net: BurstNet, measured: Measurement, seconds: float) -> MethodResult:
    account = measured.exact
    total = account.total if account else None
    return MethodResult(
        method=method,
        accuracy=measured.accuracy,
        timesteps=net.timesteps,
        parameters=sum(p.numel() for p in net.parameters()),
        seconds=seconds,
        active_ratio=account.active_ratio if account else None,
        unary_acs=total.unary if total else None,
        bit_sparse_acs=account.executed if account else None,
        formations=account.operations().formations if account else None,
        fp_macs=account.fp_macs if account else float(measured.ann_macs),
        energy_uj=1e3 * (account.energy_mj() if account else measured.ann_energy_mj()),
    )
