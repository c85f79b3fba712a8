"""The command line: parse, call, render. Results go to stdout, progress and errors to stderr.

What a user got wrong ends in one line and exit code 2; a bug ends in a traceback.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lbq import streams
from lbq._version import __version__
from lbq.config import CHANGEABLE
from lbq.errors import DataError, LbqError
from lbq.render import (
    NOISE,
    CountProgress,
    DemoProgress,
    DownloadProgress,
    TrainProgress,
    make_console,
    make_table,
    render_account,
    render_analysis,
    render_demo,
    render_deployed,
    render_evaluation,
    render_prediction,
    size_of,
)

if TYPE_CHECKING:
    import torch

    from lbq.data.testset import TestSet
    from lbq.engine import Network

app = typer.Typer(
    name="lbq",
    help="Train spiking networks that learn their own burst resolution; run them as integer, bit-sparse networks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Changes = Annotated[list[str] | None, typer.Argument(help=f"For a run: key=value; keys {', '.join(CHANGEABLE)}.")]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `lbq` and `python -m lbq`."""
    warnings.formatwarning = lambda message, *_: f"lbq: {message}\n"
    # before torch is loaded: its threads would spin for milliseconds where they wait for each other, which takes the cores
    # from each other where something else runs too
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    with streams.guarded():
        _run(arguments)


def _run(arguments: list[str] | None) -> None:
    try:
        status = app(arguments, prog_name="lbq", standalone_mode=False)
        sys.stdout.flush()
    except LbqError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _fail("this command needs PyTorch, which is not installed: pip install 'lbq[train]'")
    except BrokenPipeError:  # whoever read the output has had enough
        sys.exit(1)
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


@contextmanager
def _data_of_a_run() -> Iterator[None]:
    """A run says where its data lay when it was trained: where it cannot be read, the user may know better."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error}; where the run's data lies elsewhere now, add data.root=DIR") from error


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
    from lbq.kernels import choose as kernels
    from lbq.runs import next_free

    kernels.check("cpu")
    folder = next_free(Path("runs") / "demo") if out is None else out
    with DemoProgress() as progress:
        result = run_demo(folder, progress, seed, epochs)
    if as_json:
        _print_json(result.summary())
    else:
        render_demo(result)


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A TOML configuration, such as configs/digits/lbq.toml.")],
    changes: Annotated[list[str] | None, typer.Argument(help="key=value, such as train.epochs=3.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/FOLDER-NAME-sSEED.")] = None,
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
    name = f"{config.parent.name}-{config.stem}" if config.parent.name else config.stem
    folder = out or Path("runs") / f"{name}-s{settings.seed}"
    world, where = distributed.start(device)
    try:
        with TrainProgress() as progress:
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
        make_console().print(
            f"test accuracy {result['accuracy']:.2f} % after epoch {result['epoch']}, run folder {folder}"
        )


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    changes: Changes = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default a GPU where there is one.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a run's stored weights on its test set: repeats the number in its result."""
    from lbq import distributed, job
    from lbq.kernels import choose as kernels

    world, where = distributed.start(device)
    try:
        kernels.check(where.type)
        with _data_of_a_run():
            found = job.evaluate_run(run, where, world, changes or [])
    finally:
        distributed.stop()
    if not world.main:
        return
    if as_json:
        _print_json(found)
        return
    stored = found["stored_accuracy"]
    make_console().print(
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
    with DownloadProgress(f"{name}") as download:
        path = cifar.prepare_cifar(name, root, source, download.progress)
    loaded = cifar.load_cifar10(root) if name == "cifar10" else cifar.load_cifar100(root)
    facts = {"path": str(path), "train": len(loaded.train), "test": len(loaded.test), "sha256": loaded.checksum}
    if as_json:
        _print_json(facts)
    else:
        make_console().print(f"{name}: {facts['train']:,} + {facts['test']:,} images in {path}, verified")


Model = Annotated[Path, typer.Argument(help="A deployed network, such as model.lbq.")]
Threads = Annotated[int | None, typer.Option(min=1, max=256, help="CPU threads; default all of them.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Stop after this many samples.")]


def _threads(given: int | None) -> int:
    if given is None and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return given or os.cpu_count() or 1


@app.command()
def deploy(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    changes: Changes = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")] = Path("model.lbq"),
    bits: Annotated[int, typer.Option(help="Bits of a weight: 4 to 8, or 16.")] = 8,
    levels: Annotated[Path | None, typer.Option(help="Also write every golden level, for other engines.")] = None,
    noise: Annotated[bool, typer.Option("--noise", help="Golden inputs are noise, not images of the dataset.")] = False,
    as_json: Json = False,
) -> None:
    """Make an integer network of a trained one: BatchNorm folded, steps absorbed, weights in few bits, bounds proved."""
    from lbq import engine, files
    from lbq.deploy import deploy_run
    from lbq.engine.levelfile import save_levels

    for path in (out, *([] if levels is None else [levels])):
        files.check_file(path)
    with _data_of_a_run():
        made = deploy_run(run, bits, changes or [], noise)
    size = engine.save(out, made)
    net = engine.load(out)
    verified = net.verify("bitplane")
    if levels is not None and net.golden is not None:
        traced = net.run(net.golden.inputs, "dense", trace=True).levels
        save_levels(levels, traced or {})
    network = net.network
    facts = {
        "path": str(out),
        "bytes": size,
        "weights": network.parameters,
        "layers": len(network.layers),
        "timesteps": network.timesteps,
        "bits": bits,
        "verified": verified,
        "levels": None if levels is None else str(levels),
    }
    if as_json:
        _print_json(facts)
    else:
        render_deployed(facts)


@app.command("run")
def run_deployed(
    model: Model,
    data: Annotated[str | None, typer.Argument(help="Its dataset's folder, or .npz with images and labels.")] = None,
    engine: Annotated[str, typer.Option(help="auto, dense, bitplane or cuda; all give the same bits.")] = "auto",
    against: Annotated[str | None, typer.Option(help="Also run this engine, and compare every level.")] = None,
    threads: Threads = None,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Run a deployed network on a test set: accuracy, throughput, and what was executed, synapse by synapse."""
    from lbq.engine import load
    from lbq.engine.evaluate import evaluate, open_data

    net = load(model)
    test = open_data(net.network, data)
    with CountProgress(str(model), min(limit or test.size, test.size)) as progress:
        found = evaluate(net, test, engine, _threads(threads), limit, progress.advance, against)  # type: ignore[arg-type]
    if as_json:
        _print_json(found.to_dict())
    else:
        render_evaluation(found)
    if found.differing:
        raise typer.Exit(1)


@app.command()
def predict(
    model: Model,
    image: Annotated[Path, typer.Argument(help="An image file, or a uint8 .npy array.")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to print.")] = 5,
    as_json: Json = False,
) -> None:
    """Classify one image with a deployed network."""
    from lbq.engine import load
    from lbq.engine.evaluate import ranking, read_input

    net = load(model)
    found = ranking(net, read_input(image, net.network))[:top]
    if as_json:
        _print_json(found)
    else:
        render_prediction(found)


@app.command("export")
def export_network(
    subject: Annotated[Path, typer.Argument(help="A deployed network, model.lbq; for nir a run folder.")],
    changes: Changes = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where to write: a folder for c, else a file.")] = None,
    format: Annotated[str, typer.Option(help="c, onnx, onnx-step (one timestep with explicit state) or nir.")] = "c",
    name: Annotated[str, typer.Option(help="For c: what the names of its functions and files begin with.")] = "model",
    reset: Annotated[str | None, typer.Option(help="For nir: what the reader does after a spike, subtract or v_reset.")] = None,
    accept_ties: Annotated[bool, typer.Option("--accept-ties", help="For nir: neurons that fire at U = threshold.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write a network in another form, for other programs: deployed ones give the same integers, bit for bit."""
    from lbq.export import check_format, export

    if out is None:
        raise LbqError("export: say where to with -o")
    if check_format(format) != "nir":
        if changes:
            raise LbqError("key=value is for a run folder, which --format nir takes")
        facts = export(subject, out, format, name)
    else:
        if reset is None:
            raise LbqError(
                "NIR leaves open what follows a spike: say what your reader does with --reset subtract or v_reset"
            )
        from lbq.deploy.export import graph_of_run
        from lbq.export.nir import write_nir

        with _data_of_a_run():
            graph = graph_of_run(subject, changes or [])
        size = write_nir(graph, out, reset, accept_ties)  # type: ignore[arg-type]  # which checks it
        facts = {
            "path": str(out),
            "bytes": size,
            "text": f"{out}: {size / 1e6:.2f} MB; docs/nir.md says how it must be read",
        }
    if as_json:
        _print_json({key: value for key, value in facts.items() if key != "text"})
    else:
        make_console().print(facts["text"])


Device = Annotated[str | None, typer.Option(help="cpu or cuda; default a GPU where there is one.")]
Subject = Annotated[Path, typer.Argument(help="Run folder, or a deployed network: model.lbq.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="For model.lbq: its dataset's folder, or a .npz; default its golden inputs, for digits their test set."
    ),
]
Constants = Annotated[
    Path | None, typer.Option("--technology", help="TOML or JSON with your own prices: see docs/analysis.md.")
]


def _subject(path: Path, changes: list[str] | None, data: str | None, device: str | None) -> bool:
    """Whether it is a deployed network; options that are for the other kind are refused."""
    if not path.exists():
        raise LbqError(f"{path} does not exist: give a run folder, or a model.lbq that `lbq deploy` wrote")
    deployed = path.is_file()
    if deployed and (changes or device is not None):
        raise LbqError("key=value and --device are for a run folder; a deployed network takes --data")
    if not deployed and data is not None:
        raise LbqError("--data is for a deployed network, model.lbq; a run takes data.root=DIR")
    return deployed


def _start(device: str | None) -> torch.device:
    """The device that one process works on."""
    from lbq.distributed import start
    from lbq.kernels import choose as kernels

    where = start(device)[1]
    kernels.check(where.type)
    return where


def _is_noise(net: Network, test: TestSet) -> bool:
    """Whether a deployed network is measured on golden inputs that were drawn at random."""
    from lbq.analyze import GOLDEN

    return test.name == GOLDEN and net.network.facts.get("golden") == "noise"


def _technology(path: Path | None) -> Any:
    from lbq import technology

    return technology.DEFAULT if path is None else technology.load(path)


@app.command()
def account(
    paper: Annotated[bool, typer.Option("--paper", help="Price the counts published in the paper.")] = False,
    run: Annotated[Path | None, typer.Argument(help="Run folder, or a deployed network: model.lbq.")] = None,
    changes: Changes = None,
    data: Data = None,
    limit: Limit = None,
    device: Device = None,
    technology: Constants = None,
    as_json: Json = False,
) -> None:
    """Count a trained network's operations on its test images and model their energy, layer by layer."""
    if paper == (run is not None):
        raise LbqError("account: give a run folder or a model.lbq, or --paper for the paper's own counts")
    prices, noise = _technology(technology), False
    if run is None:
        from lbq.account import cost_table
        from lbq.paper import accumulation_table, cost_rows
        from lbq.technology import PAPER

        counts, costs_of = accumulation_table(), cost_table(cost_rows(), prices.paper)
        credit = prices.credit(*PAPER)
        if as_json:
            _print_json({"accumulations": counts, "modelled_cost": costs_of, "prices": credit})
            return
        own = "" if prices.as_published else " at other prices"
        for title, rows in (
            ("Accumulations per image, published", counts),
            (f"Accuracy and modelled arithmetic cost, from the paper's own counts{own}", costs_of),
        ):
            table = make_table(title, *rows[0])
            for row in rows:
                table.add_row(*row.values())
            make_console().print(table)
        make_console().print(f"prices: {credit}")
        return
    if _subject(run, changes, data, device):
        from lbq.engine import load
        from lbq.engine.evaluate import inputs_of, measure

        net = load(run)
        test = inputs_of(net, data)
        noise = _is_noise(net, test)
        with CountProgress(str(run), min(limit or test.size, test.size)) as progress:
            measured = measure(net, test, _threads(None), limit, progress.advance)
    else:
        from lbq.measure import measure_run

        where = _start(device)
        with _data_of_a_run(), CountProgress(str(run), limit) as progress:
            measured = measure_run(run, where, changes or [], limit=limit, progress=progress.advance)
    from lbq.costs import costs

    honest = None if measured.exact is None else costs(measured.exact, prices)
    if as_json:
        inputs = measured.inputs + NOISE * noise
        costs_of_it = None if honest is None else honest.to_dict()
        _print_json({"inputs": inputs, **measured.to_dict(prices.paper), "costs": costs_of_it})
    else:
        render_account(measured, honest, prices, noise)


@app.command()
def analyze(
    subject: Subject,
    changes: Changes = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder; default RUN/analysis, MODEL.analysis (golden inputs: MODEL.golden)."),
    ] = None,
    data: Data = None,
    limit: Limit = None,
    membranes: Annotated[
        int, typer.Option(min=0, help="Histogram the membranes of every n-th image; 0: of none.")
    ] = 32,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """How a network uses its levels over its test set: steps, activity, distributions, entropy, membranes; with counts."""
    from lbq import files

    noise = False
    if _subject(subject, changes, data, device):
        from lbq.analyze import GOLDEN
        from lbq.engine import evaluate, load

        net = load(subject)
        test = evaluate.inputs_of(net, data)
        noise = _is_noise(net, test)
        folder = out or subject.with_suffix(".golden" if test.name == GOLDEN else ".analysis")
        files.check_folder(folder)
        with CountProgress(str(subject), min(limit or test.size, test.size)) as progress:
            found = evaluate.analyze(net, test, _threads(None), limit, progress.advance, membranes, subject.name)
    else:
        from lbq.measure import analyze_run

        folder = out or subject / "analysis"
        files.check_folder(folder)
        where = _start(device)
        with _data_of_a_run(), CountProgress(str(subject), limit) as progress:
            found = analyze_run(subject, where, changes or [], membranes, limit, progress.advance)
    from lbq.report.folder import write_analysis

    written = write_analysis(folder, found)
    if as_json:
        _print_json({**found.to_dict(), "written": [str(path) for path in written]})
    else:
        render_analysis(found, folder, noise)


@app.command()
def record(
    run: Annotated[Path, typer.Argument(help="Run folder of a finished run.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File to write; default the standard output.")] = None,
    note: Annotated[str, typer.Option(help="A sentence that goes into the record.")] = "",
) -> None:
    """Everything that a reader needs to believe and repeat a run, as one JSON file that outlives its weights."""
    from lbq import files
    from lbq.records import record_of

    if out is not None:
        files.check_file(out)
    made = record_of(run, note)
    if out is None:
        _print_json(made)
        return
    files.write(out, json.dumps(made, indent=1) + "\n")
    make_console().print(f"{out}: {made['variant']} on {made['dataset']}, {made['test_accuracy']:.2f} %")


@app.command()
def report(
    results: Annotated[
        list[Path], typer.Argument(help="Records, run folders, analyses, model.lbq, engine_speed.json.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File; default report.html or report.FORMAT.")] = None,
    format: Annotated[
        str, typer.Option(help="html; md, latex: the tables; csv, svg: a folder of tables or figures.")
    ] = "html",
    image: Annotated[
        Path | None, typer.Option(help="For the tour: an image file or uint8 .npy instead of a golden input.")
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "LBQ report",
    technology: Constants = None,
) -> None:
    """The paper's tables and figures with your results in them: one page that needs no network, or tables for a paper."""
    from lbq.report.folder import SUFFIXES, make

    if format not in SUFFIXES:
        raise LbqError(f"--format must be one of {', '.join(SUFFIXES)}, got {format!r}")
    from lbq import files
    from lbq.results import gather

    target = out or Path(f"report{SUFFIXES[format]}")
    (files.check_file if SUFFIXES[format] else files.check_folder)(target)

    def read_run(folder: Path) -> dict[str, Any]:
        from lbq.records import read

        return read(folder)

    found = gather(results, read_run)
    size = make(target, found, format, _technology(technology), image, title)
    unfinished = f", {len(found.unfinished)} not finished" if found.unfinished else ""
    runs = f"{len(found.finished)} finished run{'s' * (len(found.finished) != 1)}"
    make_console().print(f"{target}: {size_of(size)}, {runs}{unfinished}")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Print versions, devices, and which kernels will run and why."""
    from lbq.doctor import examine

    facts = examine()
    if as_json:
        _print_json(facts)
        return
    console = make_console()
    console.print(f"lbq {facts['lbq']}, Python {facts['python']}, {facts['platform']}, {facts['cpus']} CPUs")
    table = make_table("", "package", "version")
    for name, version in facts["packages"].items():
        table.add_row(name, version or "not installed")
    console.print(table)
    for device in facts["devices"]:
        kernel = facts["kernels"][device["name"].split(":")[0]]
        console.print(f"{device['name']}: {device['detail']}; kernel {kernel['kernel']} ({kernel['reason']})")
    engine = facts["engine"]
    console.print(f"deployed networks: {engine['kernel']} kernels ({engine['reason']})")
    for line in facts["advice"]:
        console.print(f"note: {line}")
