"""The command line: parse, call, render. Results go to stdout, progress and errors to stderr.

What a user got wrong ends in one line and exit code 2; a bug ends in a traceback.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lbq._version import __version__
from lbq.errors import LbqError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from lbq.demo import DemoResult
    from lbq.job import Plan
    from lbq.measure import Measurement
    from lbq.train import EpochRecord

app = typer.Typer(
    name="lbq",
    help="Train spiking networks that learn their own burst resolution; run them as integer, bit-sparse networks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `lbq` and `python -m lbq`."""
    try:
        status = app(arguments, prog_name="lbq", standalone_mode=False)
    except LbqError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _fail("this command needs PyTorch, which is not installed: pip install 'lbq[train]'")
    except Exception as error:
        # the option parser's own errors, whose classes moved between versions of typer
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        if not describe():  # no command: the help has been shown
            sys.exit(2)
        _fail(f"{describe()} (see lbq --help)")
    if status == 130:  # the option parser turns a keyboard interrupt into this
        _fail("interrupted", 130)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, code: int = 2) -> None:
    sys.stderr.write(f"lbq: {' '.join(message.split())}\n")
    sys.exit(code)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"lbq {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Run folder to write; default runs/demo-001, -002, ...")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, order and augmentation.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs for each of the four networks.")] = 20,
    as_json: Json = False,
) -> None:
    """Train a burst network and three baselines on real digits, run it on integer levels, and print what it costs."""
    from lbq.demo import run_demo
    from lbq.runs import next_free

    folder = next_free(Path("runs") / "demo") if out is None else out
    with _Progress() as progress:
        result = run_demo(folder, progress, seed, epochs)
    if as_json:
        _print_json(result.summary())
    else:
        _render_demo(result)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A TOML configuration, such as configs/digits/lbq.toml.")],
    changes: Annotated[list[str] | None, typer.Argument(help="key=value, such as train.epochs=3.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME-sSEED.")] = None,
    resume: Annotated[str, typer.Option(help="auto: continue what the folder holds; never: refuse it.")] = "never",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default a GPU where there is one.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="train.compile=true")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="train.deterministic=true")] = False,
    as_json: Json = False,
) -> None:
    """Train a configuration. Under torchrun (torchrun --nproc-per-node=N -m lbq train ...) on several processes."""
    if resume not in ("auto", "never"):
        raise LbqError(f"--resume must be auto or never, got {resume!r}")
    from lbq import distributed, job
    from lbq.config import Config

    flags = ["train.compile=true"] * compile + ["train.deterministic=true"] * deterministic
    settings = Config.load(config, [*(changes or []), *flags])
    folder = out or Path("runs") / f"{config.stem}-s{settings.seed}"
    world, where = distributed.start(device)
    try:
        with _TrainProgress() as progress:
            result = job.train(settings, folder, progress, device=where, world=world, resume=resume == "auto")
    except job.Stopped as stopped:
        _fail(str(stopped), stopped.code)
    finally:
        distributed.stop()
    if not world.main:
        return
    if as_json:
        _print_json({**result, "run": str(folder)})
    else:
        _console().print(f"test accuracy {result['accuracy']:.2f} % after epoch {result['epoch']}, run folder {folder}")


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    changes: Annotated[list[str] | None, typer.Argument(help="key=value, such as data.root=DIR.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default a GPU where there is one.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a run's stored weights on its test set: repeats the number in its result."""
    from lbq import distributed, job

    world, where = distributed.start(device)
    try:
        found = job.evaluate_run(run, where, world, changes or [])
    finally:
        distributed.stop()
    if not world.main:
        return
    if as_json:
        _print_json(found)
        return
    stored = found["stored_accuracy"]
    _console().print(
        f"test accuracy {found['accuracy']:.2f} % on {found['images']} images"
        + ("" if stored is None else f"; the run's result says {stored:.2f} %")
    )


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="cifar10 or cifar100.")],
    root: Annotated[Path, typer.Option(help="Folder to put it in.")],
    source: Annotated[Path | None, typer.Option("--from", help="An archive or folder you have already.")] = None,
    as_json: Json = False,
) -> None:
    """Fetch a dataset, or take it from files you have, and verify it."""
    from lbq.data import cifar

    if name not in cifar.SPECS:
        raise LbqError(f"data: {name!r} cannot be prepared; known: {', '.join(cifar.SPECS)}. Others: see docs/data.md")
    with _Download(f"{name}") as download:
        path = cifar.prepare_cifar(name, root, source, download.progress)
    loaded = cifar.load_cifar10(root) if name == "cifar10" else cifar.load_cifar100(root)
    facts = {"path": str(path), "train": len(loaded.train), "test": len(loaded.test), "sha256": loaded.checksum}
    if as_json:
        _print_json(facts)
    else:
        _console().print(f"{name}: {facts['train']:,} + {facts['test']:,} images in {path}, verified")


@app.command()
def account(
    paper: Annotated[bool, typer.Option("--paper", help="Price the counts published in the paper.")] = False,
    run: Annotated[Path | None, typer.Argument(help="Run folder, such as runs/demo-001.")] = None,
    as_json: Json = False,
) -> None:
    """Count a trained network's operations on its test images and model their energy, layer by layer."""
    if paper == (run is not None):
        raise LbqError("account: give a run folder, or --paper for the paper's own counts")
    if run is None:
        from lbq.account import cost_table
        from lbq.paper import cost_rows

        rows = cost_table(cost_rows())
        if as_json:
            _print_json(rows)
        else:
            table = _table("Accuracy and modelled arithmetic cost, from the paper's own counts", *rows[0])
            for row in rows:
                table.add_row(*row.values())
            _console().print(table)
        return
    from lbq.measure import measure_run

    measured = measure_run(run)
    if as_json:
        _print_json(measured.to_dict())
    else:
        _render_account(measured)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Print versions, devices, and which kernels will run and why."""
    from lbq.doctor import examine

    facts = examine()
    if as_json:
        _print_json(facts)
        return
    console = _console()
    console.print(f"lbq {facts['lbq']}, Python {facts['python']}, {facts['platform']}, {facts['cpus']} CPUs")
    table = _table("", "package", "version")
    for name, version in facts["packages"].items():
        table.add_row(name, version or "not installed")
    console.print(table)
    for device in facts["devices"]:
        kernel = facts["kernels"][device["name"].split(":")[0]]
        console.print(f"{device['name']}: {device['detail']}; kernel {kernel['kernel']} ({kernel['reason']})")
    for line in facts["advice"]:
        console.print(f"note: {line}")


# Rendering
# -------------------------------------------------------------------------------------------------------------


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 140  # a pipe has no width; do not wrap tables at 80
    return console


def _table(title: str, first: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


class _Progress:
    """A bar on a terminal, a plain line now and then elsewhere; both on stderr."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = _console(stderr=True)
        self.bars = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Progress:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def start(self, method: str, epochs: int) -> None:
        from lbq.demo import TITLES

        self.tasks[method] = self.bars.add_task(TITLES[method], total=epochs, note="")

    def epoch(self, method: str, record: EpochRecord) -> None:
        note = f"loss {record.loss:.3f}  train {record.train_accuracy:5.1f} %"
        self.bars.update(self.tasks[method], advance=1, note=note)
        if not self.console.is_terminal and (record.epoch % 5 == 0 or record.epoch == 1):
            self.console.print(f"{method:<12} epoch {record.epoch:>3}  {note}  {record.seconds:.1f} s")

    def done(self, method: str, accuracy: float, seconds: float) -> None:
        self.bars.update(self.tasks[method], note=f"test {accuracy:5.2f} %")
        if not self.console.is_terminal:
            self.console.print(f"{method:<12} test {accuracy:.2f} %  {seconds:.1f} s")

    def stage(self, text: str) -> None:
        self.console.print(text)


class _TrainProgress:
    """The plan, then a bar for each epoch on a terminal or a plain line elsewhere, with the time left; on stderr."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.console = _console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task: TaskID | None = None
        self.epochs = self.samples = 0

    def __enter__(self) -> _TrainProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def plan(self, plan: Plan) -> None:
        self.epochs, self.samples = plan.epochs, plan.steps_per_epoch * plan.batch_size
        macs = "" if plan.macs is None else f", {plan.macs / 1e6:.1f} M MACs, {plan.neurons:,} neurons"
        memory = "" if plan.memory_gib is None else f", about {plan.memory_gib:.2f} GiB of activations (estimated)"
        source = ", ".join(f"{k} {v[:12] if k == 'sha256' else v}" for k, v in plan.data.items())
        self.console.print(f"network  {plan.model}, T = {plan.timesteps}, {plan.parameters:,} parameters{macs}")
        self.console.print(f"data     {source}; {plan.train_samples:,} training samples")
        self.console.print(
            f"training {plan.epochs} epochs x {plan.steps_per_epoch} steps of {plan.batch_size} on {plan.processes} x "
            f"{plan.device}, {plan.kernel} kernel{memory}"
        )

    def resumed(self, epoch: int, batch: int, notes: tuple[str, ...]) -> None:
        for note in notes:
            self.console.print(f"passed over: {note}")
        self.console.print(f"continuing at epoch {epoch + 1}, step {batch + 1}")

    def step(self, epoch: int, batch: int, batches: int, samples_per_second: float) -> None:
        if self.task is None:
            self.task = self.bar.add_task("", total=batches, note="")
        left = ""
        if samples_per_second:
            samples = (self.epochs - epoch) * self.samples - batch * self.samples / batches
            left = f"{samples_per_second:,.0f} samples/s, {_duration(samples / samples_per_second)} left"
        self.bar.update(self.task, description=f"epoch {epoch + 1}/{self.epochs}", completed=batch, note=left)
        if not self.console.is_terminal and epoch == 0 and batch == min(20, batches):
            self.console.print(f"step {batch}: {left}")

    def epoch(self, record: EpochRecord) -> None:
        test = "" if record.test_accuracy is None else f"  test {record.test_accuracy:.2f} %"
        test += "" if record.holdout_accuracy is None else f"  held out {record.holdout_accuracy:.2f} %"
        low, high = (min(record.steps.values()), max(record.steps.values())) if record.steps else (0.0, 0.0)
        steps = f"  steps {low:.3f}..{high:.3f}" if record.steps else ""
        self.console.print(
            f"epoch {record.epoch}/{self.epochs}  loss {record.loss:.4f}  train {record.train_accuracy:.2f} %{test}{steps}  "
            f"{record.samples_per_second:,.0f} samples/s"
        )


class _Download:
    """Bytes received, as a bar on a terminal."""

    def __init__(self, name: str) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        console = _console(stderr=True)
        self.bar = Progress(
            TextColumn(name),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(name, total=None)

    def __enter__(self) -> _Download:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def progress(self, done: int, total: int | None) -> None:
        self.bar.update(self.task, completed=done, total=total)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def _thousands(value: float | None) -> str:
    return "" if value is None else f"{value / 1e3:.1f}"


def _render_demo(result: DemoResult) -> None:
    from lbq.demo import INITIAL_STEP, TITLES

    console, check = _console(), result.check
    table = _table(
        f"UCI digits, resnet8w16, {result.methods['lbq'].parameters:,} parameters, {check.images} held-out images",
        "network", "T", "acc. %", "active %", "unary kAC", "bit kAC", "energy uJ", "ANN/it",
    )  # fmt: skip
    ann = result.methods["ann"].energy_uj
    for name, m in result.methods.items():
        table.add_row(
            TITLES[name],
            str(m.timesteps),
            f"{m.accuracy:.2f}",
            "" if m.active_ratio is None else f"{100 * m.active_ratio:.1f}",
            _thousands(m.unary_acs),
            _thousands(m.bit_sparse_acs),
            f"{m.energy_uj:.3f}",
            f"{ann / m.energy_uj:.2f}",
        )
    console.print(table)
    console.print("kAC: thousand accumulations per image, unary (S) and by bit planes (popcount S).")
    console.print("energy: modelled arithmetic per image (45 nm, Horowitz 2014), not measured.")
    low, high = min(result.steps.values()), max(result.steps.values())
    console.print(
        f"\nlearned steps, {low:.3f} to {high:.3f} (all began at {INITIAL_STEP}), and how often each level is used:"
    )
    for name, step in result.steps.items():
        histogram = result.histograms[name]
        shares = " ".join(f"{100 * p:3.0f}" for p in histogram.conditional)
        console.print(f"  {name:<14} γ = {step:.3f}   levels 1..5: {shares} %")
    verdict = "agree with"
    if check.levels_different:
        verdict = f"agree but for {check.levels_different} in {check.tied_images} images with ties with"
    console.print(
        f"\ninteger network, steps absorbed, run by bit planes on {check.images} images:\n"
        f"  {check.levels_compared:,} levels {verdict} training's (in float64)\n"
        f"  predictions agree with the trained network on {check.predictions_agree:.2f} %; "
        f"accuracy {check.accuracy:.2f} %\n"
        f"  {check.accumulations_executed:,} accumulations executed, {check.accumulations_counted:,} counted"
    )
    console.print(f"\nrun folder {result.folder}, {result.seconds:.0f} s")
    if result.figure is None:
        console.print("no figure: matplotlib is not installed (pip install 'lbq[train]')")
    else:
        console.print(f"figure {result.figure}")


def _render_account(measured: Measurement) -> None:
    from lbq.account import BACKENDS

    console = _console()
    if measured.exact is None or measured.rate is None:
        console.print(
            f"accuracy {measured.accuracy:.2f} % on {measured.images} images; no spikes: {measured.graph.macs:,} MACs, "
            f"{1e3 * measured.ann_energy_mj:.3f} µJ per image, modelled"
        )
        return
    exact, rate = measured.exact, measured.rate
    table = _table(
        f"Accumulations per image, thousands, over {measured.images} images (accuracy {measured.accuracy:.2f} %)",
        "synapse", "unary", "bit-sparse", "saved %", "shifted", "events", "rate x MACs",
    )  # fmt: skip
    for name, count in [*exact.synapses.items(), ("total", exact.total)]:
        by_rate = rate.total if name == "total" else rate.synapses[name]
        table.add_row(
            name, _thousands(count.unary), _thousands(count.bit_sparse), f"{count.reduction:.1f}",
            _thousands(count.shifts), _thousands(count.events), _thousands(by_rate.bit_sparse),
            end_section=name == "total",
        )  # fmt: skip
    table.add_row(
        "shortcuts, not in total", _thousands(exact.shortcut_total.unary),
        _thousands(exact.shortcut_total.bit_sparse), f"{exact.shortcut_total.reduction:.1f}",
        _thousands(exact.shortcut_total.shifts), _thousands(exact.shortcut_total.events),
    )  # fmt: skip
    console.print(table)
    console.print("rate x MACs: bit-sparse accumulations as rate times MACs, padded taps included.")
    console.print(
        f"FP MACs of the first layer {exact.fp_macs:,.0f}, formations {exact.total.formations:,.0f} per image"
    )
    console.print(f"additions into pooled sums {exact.pool_adds:,.0f} per image, not in the total")
    console.print(f"active ratio {exact.active_ratio:.3f}, mean over layers\n")
    table = _table(
        "Modelled energy per image, µJ (45 nm, Horowitz 2014)",
        "backend", "shifts", "exact", "ANN / it", "rate x MACs", "ANN / it",
    )  # fmt: skip
    for backend in BACKENDS:
        table.add_row(
            backend,
            f"{exact.shifts(backend):,.0f}",
            f"{1e3 * exact.energy_mj(backend):.3f}",
            f"{exact.ann_energy_mj / exact.energy_mj(backend):.2f}",
            f"{1e3 * rate.energy_mj(backend):.3f}",
            f"{rate.ann_energy_mj / rate.energy_mj(backend):.2f}",
        )
    console.print(table)
