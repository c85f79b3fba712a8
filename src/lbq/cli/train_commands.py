"""Commands that train: demo, train, sweep, eval, convert, and data and doctor, which come before."""

from __future__ import annotations

import functools
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from lbq.cli import render
from lbq.cli.options import Changes, Device, Json, data_of_a_run, fail, print_json, print_result, start
from lbq.cli.progress import CountProgress, DemoProgress, TrainProgress
from lbq.errors import LbqError, Stopped


def demo(
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Run folder to write; default runs/demo-001, -002, ...")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, order and augmentation.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs for each of the four networks.")] = 20,
    as_json: Json = False,
) -> None:
    """Train a burst network and three baselines on real digits, run it on integer levels, and print what it costs."""
    from lbq.cli.demo import render_demo, run_demo
    from lbq.native import choose as kernels
    from lbq.runs.run_folder import next_free

    kernels.check("cpu")
    folder = next_free(Path("runs") / "demo") if out is None else out
    try:
        with DemoProgress() as progress:
            result = run_demo(folder, progress, seed, epochs)
    except Stopped as stopped:
        fail("interrupted", stopped.code)  # nothing is left that could be continued
    print_result(as_json, result.summary(), lambda: render_demo(result))


def train(
    config: Annotated[Path, typer.Argument(help="A TOML configuration, such as configs/digits/lbq.toml, or a record.")],
    changes: Annotated[list[str] | None, typer.Argument(help="key=value, such as train.epochs=3.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Run folder; default runs/FOLDER-NAME-sSEED.")] = None,
    resume: Annotated[str, typer.Option(help="auto: continue what the folder holds; never: refuse it.")] = "never",
    device: Device = None,
    compile: Annotated[bool, typer.Option("--compile", help="The same as train.compile=true.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same as train.deterministic=true.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a configuration. Under torchrun (torchrun --nproc-per-node=N -m lbq train ...) on several processes."""
    if resume not in ("auto", "never"):
        raise LbqError(f"--resume must be auto or never, got {resume!r}")
    from lbq.config import Config
    from lbq.runs import run_folder
    from lbq.training import distributed, job

    flags = ["train.compile=true"] * compile + ["train.deterministic=true"] * deterministic
    settings = Config.load(config, [*(changes or []), *flags])
    folder = out or Path("runs") / f"{run_folder.default_name(config)}-s{settings.seed}"
    world, where = distributed.start(device)
    try:
        with TrainProgress() as progress:
            result = job.train(settings, folder, progress, device=where, world=world, resume=resume == "auto")
    finally:
        distributed.stop()
    if world.main:
        accuracy = render.accuracy_text(result["accuracy"], result)
        text = f"{accuracy} after epoch {result['epoch']}, run folder {folder}"
        print_result(as_json, {**result, "run": str(folder)}, lambda: render.print_line(text))
        render.print_silent_layers(result.get("active"))


def sweep(
    configs: Annotated[
        list[str], typer.Argument(help="Configurations, folders of them, and key=value for all of them.")
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,VALUE", help="key=value,value: a run of each, such as seed=0,1,2; may be repeated."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the run folders and their report.")] = Path(
        "runs/sweep"
    ),
    train_only: Annotated[
        bool, typer.Option("--train-only", help="Do not deploy and analyse what is trained.")
    ] = False,
    device: Device = None,
    show: Annotated[bool, typer.Option("--print", help="Print the commands instead of running them.")] = False,
    as_json: Json = False,
) -> None:
    """Train many configurations, deploy and analyse each, and report them: the paper's tables from one command.

    Repeated, it goes on where it was. Started several times, on a GPU each, every run is trained once.
    """
    from lbq.training import distributed
    from lbq.training import sweep as sweeps

    members = sweeps.plan(configs, [sweeps.parse_vary(text) for text in vary or []], out)
    distributed.check(device, here=not show)  # commands may be printed for another machine
    if show:
        commands = [["lbq", *command] for command in sweeps.commands(members, device, deploy=not train_only)]
        if as_json:
            print_json({"commands": commands})
        else:
            sys.stdout.writelines(f"{shlex.join(command)}\n" for command in commands)
        return
    say = functools.partial(render.make_console(stderr=True).print, soft_wrap=True)  # commands may be copied
    states = sweeps.Sweep(members, say, device).run(deploy=not train_only)
    outcome = sweeps.report(out, states)
    render.render_twins(outcome.gathered)
    if as_json:
        print_json(outcome.to_dict())
    elif outcome.page is not None:
        render.render_sweep(outcome.own, outcome.page)
    for remark in outcome.remarks:
        say(remark)
    if outcome.failed:
        raise typer.Exit(1)


def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    changes: Changes = None,
    device: Device = None,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, bf16, fp16 or fp64; default as the result was tested: fp32, or fp64 after fp64."),
    ] = None,
    timesteps: Annotated[int | None, typer.Option(min=1, help="Timesteps; default those of training.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a run's stored weights on its test set: repeats the number in its result."""
    from lbq.native import choose as kernels
    from lbq.training import distributed
    from lbq.training.evaluation import evaluate_run

    world, where = distributed.start(device)
    try:
        kernels.check(where.type)
        with data_of_a_run():
            result = evaluate_run(
                run, changes=changes or [], device=where, world=world, precision=precision, timesteps=timesteps
            )
    finally:
        distributed.stop()
    if not world.main:
        return
    if as_json:
        print_json(result)
        return
    stored, stored_in = result["stored_accuracy"], result["stored_precision"]
    trained, used = result["trained_in"], result["precision"]
    other_time = result["timesteps"] != result["trained_over"]
    render.make_console().print(
        f"test accuracy {result['accuracy']:.2f} % on {result['images']} images"
        + ("" if used == trained else f", in {used}, trained in {trained}")
        + (f", at T = {result['timesteps']}, trained at T = {result['trained_over']}" if other_time else "")
        + ("" if stored is None else f"; the run's result says {stored:.2f} %")
        + ("" if stored is None or used == stored_in else f" in {stored_in}")
        + (", of other data than this" if stored is not None and result["other_data"] else "")
    )


def convert(
    run: Annotated[Path, typer.Argument(help="Run folder of an ANN: neuron.name=relu.")],
    changes: Annotated[
        list[str] | None, typer.Argument(help="key=value: neuron.name=..., its options, model.timesteps, data.root.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Run folder to write; default RUN-converted.")] = None,
    images: Annotated[int, typer.Option(help="Training images from which steps are chosen.")] = 256,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Make a burst network of a trained ANN, without training: steps chosen from data, layer by layer."""
    from lbq.convert import convert_run

    here = run.absolute()  # "." has no name
    folder = out or here.with_name(f"{here.name}-converted")
    console = render.make_console(stderr=True)
    with data_of_a_run():
        conversion = convert_run(
            run, folder, changes=changes or [], device=start(device), images=images, stage=console.print
        )
    print_result(as_json, conversion, lambda: render.render_conversion(conversion))


def data(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100, mnist or fashion_mnist.")],
    root: Annotated[Path, typer.Option(help="Folder to put it in.")],
    source: Annotated[
        Path | None, typer.Option("--from", metavar="PATH", help="An archive or folder you have already.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fetch a dataset, or take it from files you have, and verify it."""
    from lbq.data import cifar, idx
    from lbq.data.testset import load_whole

    known = (*cifar.SPECS, *idx.FILES)
    if name not in known:
        raise LbqError(
            f"data: {name!r} cannot be prepared; known: {', '.join(known)}. Others: see docs/reference/datasets.md"
        )
    with CountProgress(name, None, of_bytes=True) as download:
        prepare = cifar.prepare_cifar if name in cifar.SPECS else idx.prepare_idx
        path = prepare(name, root, source, download.received)
    verified = name in cifar.SPECS or idx.is_official(path, name)
    loaded = load_whole(name, root)
    facts = {"path": str(path), "train": len(loaded.train), "test": len(loaded.test), "sha256": loaded.checksum}
    checked = "verified" if verified else "readable, but not the published .gz files byte for byte, so not verified"
    text = f"{name}: {facts['train']:,} + {facts['test']:,} images in {path}, {checked}"
    print_result(as_json, {**facts, "verified": verified}, lambda: render.print_line(text))


def doctor(as_json: Json = False) -> None:
    """Print versions, devices, and which kernels will run and why."""
    from lbq.cli.doctor import examine

    facts = examine()
    if as_json:
        print_json(facts)
        return
    console = render.make_console()
    console.print(f"lbq {facts['lbq']}, Python {facts['python']}, {facts['platform']}, {facts['cpus']} CPUs")
    packages = [(name, version or "not installed") for name, version in facts["packages"].items()]
    render.print_table("", ("package", "version"), packages)
    for device in facts["devices"]:
        kernel = facts["kernels"][device["name"].split(":")[0]]
        console.print(f"{device['name']}: {device['detail']}; kernel {kernel['kernel']} ({kernel['reason']})")
    engine = facts["engine"]
    console.print(f"deployed networks: {engine['kernel']} kernels ({engine['reason']})")
    for line in facts["advice"]:
        console.print(f"note: {line}")
