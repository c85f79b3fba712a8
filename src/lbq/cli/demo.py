"""The first run: train four small networks on real digits, run the burst network on integer levels, count, and report.

The four are configurations, trained and deployed as `lbq train` and `lbq deploy` do it. `DemoProgress` shows how it goes.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lbq import engine
from lbq.cli import render
from lbq.cli.progress import DemoProgress
from lbq.config import INITIAL_STEP, Config
from lbq.counting.deployed_counts import analyze
from lbq.counting.measurement import Measurement
from lbq.errors import RunError
from lbq.report.output import make, write_analysis
from lbq.results.gather import ARCHIVE, gather
from lbq.system import files

if TYPE_CHECKING:
    from lbq.deploy.verify import AbsorptionCheck, IntegerCheck

IMAGES_PER_MEMBRANE = 4  # membranes are read for every fourth test image
OURS = "lbq"

# Title, neuron and timesteps of each method; an ANN has no timesteps. Network, seed, data and epochs are the same.
METHODS: dict[str, tuple[str, dict[str, Any], int]] = {
    "ann": ("ANN (ReLU)", {"name": "relu"}, 1),
    "lif": ("binary LIF", {"name": "lif"}, 2),
    "burst_fixed": ("burst, fixed step", {"name": "burst_fixed", "n_max": 5, "step": INITIAL_STEP}, 2),
    OURS: ("LBQ, learned step", {"name": "lbq", "n_max": 5, "step": INITIAL_STEP}, 2),
}


@dataclass(frozen=True)
class DemoResult:
    """measured: each method on the held-out third, after its last epoch. steps: the learned ones, by layer."""

    measured: dict[str, Measurement]
    parameters: int
    steps: dict[str, float]
    absorption: AbsorptionCheck
    check: IntegerCheck
    seconds: float
    folder: Path
    report: Path

    def summary(self) -> dict[str, Any]:
        """What `lbq demo --json` prints."""
        return {
            "accuracy": {method: round(m.accuracy, 2) for method, m in self.measured.items()},
            "seconds": round(self.seconds, 1),
            "integer_check": self.absorption.passed and self.check.passed,
            "integer_accuracy": round(self.check.accuracy, 2),
            "run": str(self.folder),
            "report": str(self.report),
        }


def demo_config(method: str, seed: int, epochs: int) -> Config:
    _, neuron, timesteps = METHODS[method]
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


def run_demo(folder: Path | str, progress: DemoProgress, seed: int = 0, epochs: int = 20) -> DemoResult:
    """Train, check, count, and write the run folder `folder` (the LBQ network; the others under `baselines/`)."""
    from lbq.runs import records, run_folder
    from lbq.training.evaluation import neuron_steps

    started, folder = time.perf_counter(), Path(folder)
    with files.new_folder(folder, RunError) as partial:
        # ours first: a run folder must be empty when its training begins
        measured = {
            method: _train(method, _place(partial, method), folder.name, demo_config(method, seed, epochs), progress)
            for method in (OURS, *(method for method in METHODS if method != OURS))
        }
        progress.stage("absorbing the steps, deploying on integers, running bit plane by bit plane ...")
        absorption, check = _deploy(partial)
    if not (absorption.passed and check.passed):
        raise RuntimeError(
            f"a bug in lbq: the integer network of {folder} disagrees with training: {absorption} {check}"
        )
    progress.stage("writing the report ...")
    page = folder / "report.html"
    make(page, gather([_place(folder, method) for method in METHODS], records.read), title="LBQ on UCI digits")
    net = run_folder.load(folder)
    return DemoResult(
        measured={method: measured[method] for method in METHODS},
        parameters=sum(p.numel() for p in net.parameters()),
        steps=neuron_steps(net),
        absorption=absorption,
        check=check,
        seconds=time.perf_counter() - started,
        folder=folder,
        report=page,
    )


def _place(folder: Path, method: str) -> Path:
    """The run folder of a method."""
    return folder if method == OURS else folder / "baselines" / method


def _train(method: str, run: Path, name: str, config: Config, progress: DemoProgress) -> Measurement:
    """Train a method in its run folder and analyse it there. name: what the folder of ours will be called."""
    from lbq.batches.sources import open_source
    from lbq.measuring.measure import measure
    from lbq.runs import records, run_folder
    from lbq.training import job
    from lbq.training.evaluation import neuron_tails

    progress.begin(method, METHODS[method][0], config.train.epochs)
    started = time.perf_counter()
    job.train(config, run, progress)
    seconds = time.perf_counter() - started
    net = run_folder.load(run)
    measured = measure(net, open_source(config), membranes=IMAGES_PER_MEMBRANE)
    facts = {"kind": "run", **records.facts_of(run), "name": name if method == OURS else method}
    write_analysis(run / records.ANALYSIS.parent, measured.analysis(facts, neuron_tails(net)))
    progress.done(measured.accuracy, seconds)
    return measured


def _deploy(run: Path) -> tuple[AbsorptionCheck, IntegerCheck]:
    """Write the integer network of a run and its analysis, and check it against the trained network."""
    from lbq.batches.sources import open_source
    from lbq.deploy.pipeline import deploy_run, test_set
    from lbq.deploy.verify import check_absorption, check_integers
    from lbq.runs import run_folder

    net, config, artefact = run_folder.load(run), run_folder.load_config(run), run / ARCHIVE
    source, test = open_source(config), test_set(config)
    size = engine.save(artefact, deploy_run(run))
    deployed = engine.load(artefact)
    absorption, check = check_absorption(net, source), check_integers(net, source, deployed, test, size)
    write_analysis(artefact.with_suffix(".analysis"), analyze(deployed, test, membranes=IMAGES_PER_MEMBRANE))
    checks = {"absorption": asdict(absorption), "integers": asdict(check)}
    run_folder.write_text(run / "checks.json", json.dumps(checks, indent=2) + "\n")
    return absorption, check


def render_demo(result: DemoResult) -> None:
    console, check = render.make_console(), result.check
    ann_microjoules = 1e3 * result.measured["ann"].ann_energy_mj()
    rows = []
    for method, measured in result.measured.items():
        account = measured.exact
        microjoules = ann_microjoules if account is None else 1e3 * account.energy_mj()
        title, _, timesteps = METHODS[method]
        spikes = ["", "", ""]
        if account is not None:
            counts = account.total.unary, account.executed
            spikes = [f"{100 * account.active_ratio:.1f}", *map(render.thousands, counts)]
        energy = f"{microjoules:.3f}", f"{ann_microjoules / microjoules:.2f}"
        rows.append((title, str(timesteps), f"{measured.accuracy:.2f}", *spikes, *energy))
    render.print_table(
        f"UCI digits, resnet8w16, {result.parameters:,} parameters, {check.images} held-out images",
        ("network", "T", "acc. %", "active %", "unary kAC", "bit kAC", "energy uJ", "ANN/it"),
        rows,
    )
    console.print("kAC: thousand accumulations per image, unary (S) and by bit planes (popcount S).")
    console.print("Counts are border-exact: padding is left out. The report's rate x MACs include it and are higher.")
    console.print("energy: modelled arithmetic per image (45 nm, Horowitz 2014), not measured.")
    low, high = min(result.steps.values()), max(result.steps.values())
    console.print(
        f"\nlearned steps, {low:.3f} to {high:.3f} (all began at {INITIAL_STEP}), and how often each level is used:"
    )
    histograms = result.measured[OURS].histograms
    for name, step in result.steps.items():
        shares = " ".join(f"{100 * p:3.0f}" for p in histograms[name].conditional)
        console.print(f"  {name:<14} γ = {step:.3f}   levels 1..5: {shares} %")
    absorbed, verdict = result.absorption, "agree with"
    if absorbed.different:
        verdict = f"agree but for {absorbed.different} in {absorbed.tied_images} images with ties with"
    console.print(
        f"\nsteps absorbed: {absorbed.levels:,} levels {verdict} training's (in float64)\n"
        f"integer network model.lbq, {render.size_of(check.bytes)}, run by bit planes ({check.kernel}) on {check.images} "
        f"images, {check.images_per_second:,.0f} a second:\n"
        f"  {check.levels_agree:.2f} % of levels and {check.predictions_agree:.2f} % of predictions as trained; "
        f"accuracy {check.accuracy:.2f} %\n"
        f"  {check.accumulations_executed:,} accumulations executed, {check.accumulations_counted:,} counted"
    )
    render.print_line(
        f"\nrun folder {result.folder}, {result.seconds:.0f} s\nreport {result.report}: open it in a browser"
    )
