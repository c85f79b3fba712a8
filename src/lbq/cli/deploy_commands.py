"""Commands about networks of integers: deploy, run, exits, predict, export."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lbq.cli.options import Changes, Json, Limit, data_of_a_run, print_result
from lbq.cli.progress import CountProgress
from lbq.cli.render import print_line, render_deployed, render_evaluation, render_predictions
from lbq.config import DEPLOYED_BITS
from lbq.errors import ArtefactError, DataError, LbqError

if TYPE_CHECKING:
    from lbq.data.testset import TestSet
    from lbq.engine import Network

MOST_NAMES = 5  # of files that cannot be read, in an error
Model = Annotated[Path, typer.Argument(help="A deployed network, such as model.lbq.")]
DataOption = Annotated[str | None, typer.Option("--data", help="The same as DATA, as account and analyze take it.")]
Threads = Annotated[int | None, typer.Option(min=1, max=256, help="CPU threads; default all of them.")]


def deploy(
    run: Annotated[
        Path, typer.Argument(help="Run folder, or a deployed network for --timesteps or --noise: model.lbq.")
    ],
    changes: Changes = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")] = Path("model.lbq"),
    bits: Annotated[
        int | None, typer.Option(help="Bits of a weight: 2 to 8, or 16; default as trained, else 8.")
    ] = None,
    levels: Annotated[Path | None, typer.Option(help="Also write every golden level, for other engines.")] = None,
    noise: Annotated[
        bool,
        typer.Option("--noise", help="Golden inputs are noise, not images of the dataset, which is then not needed."),
    ] = False,
    timesteps: Annotated[int | None, typer.Option(min=1, help="Timesteps; default those of training.")] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Also prove bounds for frames without end, for lbq watch and c-step.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make an integer network of a trained one: BatchNorm folded, steps absorbed, weights in few bits, bounds proved."""
    from lbq.engine.published import is_deployed
    from lbq.system import files

    files.check_file(out)
    if levels is not None:
        files.check_file(levels)
        if levels.resolve() == out.resolve():
            raise LbqError(f"--levels {levels} is the file of the network: give another name")
    if is_deployed(run):
        before = _load_deployed(run)
        if bits is not None or stream or changes or not (timesteps or noise):
            raise LbqError(
                f"{run} is deployed already, and only --timesteps and --noise can change it: for the rest, deploy its run"
            )
        _refuse_itself(out, run)
        network, remark = _changed(before, timesteps, noise)
    else:
        from lbq.deploy import deploy_run
        from lbq.runs.run_folder import load_config

        with data_of_a_run():
            network = deploy_run(run, changes=changes or [], bits=bits, noise=noise, timesteps=timesteps, stream=stream)
        remark = None if bits is None else _other_bits(load_config(run).train.weight_bits, bits)
    facts = {**_written(network, out, levels), "remark": remark}
    print_result(as_json, facts, lambda: render_deployed(facts))


def _changed(before: Network, timesteps: int | None, noise: bool) -> tuple[Network, str | None]:
    """A deployed network over other timesteps, or with golden inputs of noise; and what to know about it."""
    after = before if timesteps is None else before.over(timesteps)
    after = after.with_noise() if noise else after
    if before.network.exits is None or after.network.exits is not None:
        return after, None
    remark = f"its margins to stop early were for {before.network.timesteps} timesteps: lbq exits chooses others"
    return after, remark


def _written(network: Network, out: Path, levels: Path | None) -> dict[str, Any]:
    """Write a network, read it back and verify it; what there is to say of it."""
    from lbq import engine
    from lbq.engine.file.levelfile import save_levels

    if levels is not None and network.golden is None:
        raise LbqError("--levels: the network has no golden inputs whose levels it could write; --noise makes some")
    new_folder = None if out.absolute().parent.is_dir() else str(out.parent)
    size = engine.save(out, network)
    net = engine.load(out)
    verified = net.verify("bitplane") if net.golden is not None else 0
    if levels is not None and net.golden is not None:  # as above
        save_levels(levels, net.run(net.golden.inputs, "dense", trace=True).levels or {})
    integers = net.network
    return {
        "path": str(out),
        "bytes": size,
        "weights": integers.parameters,
        "layers": len(integers.layers),
        "timesteps": integers.timesteps,
        "bits": integers.facts.get("bits"),
        "verified": verified,
        "levels": None if levels is None else str(levels),
        "new_folder": new_folder,
    }


def _refuse_itself(out: Path, model: Path) -> None:
    """A network that cannot be made again is not overwritten."""
    from lbq.engine.published import resolve

    if out.resolve() == resolve(model).resolve():
        raise LbqError(f"-o {out} is the network itself, which it would replace: give another name")


def _other_bits(trained: int, bits: int) -> str | None:
    """What to know where weights are deployed with other bits than they were trained with; trained is 0 where unrounded."""
    if trained and bits > trained:
        return f"trained with {trained} bits: --bits {trained} needs fewer, and loses nothing"
    if bits < (trained or DEPLOYED_BITS):
        return f"rounded to {bits} bits after training: train.weight_bits={bits} trains with these"
    return None


def _load_deployed(path: Path) -> Network:
    """The network of a file, which may be something else, such as a state_dict."""
    from lbq import engine

    try:
        return engine.load(path)
    except ArtefactError as error:
        if path.suffix == ".lbq":
            raise
        raise LbqError(
            f"{path} is neither a run folder nor a deployed network: if it holds weights of a network of yours, build that in "
            "Python, load them, and call lbq.deploy.deploy(net, ...): docs/howto/deploy.md"
        ) from error


def run(
    model: Model,
    data: Annotated[
        str | None,
        typer.Argument(help="Its dataset's folder, or a .npz with images and labels; not needed for digits."),
    ] = None,
    data_option: DataOption = None,
    engine: Annotated[str, typer.Option(help="auto, dense, bitplane or cuda; all give the same bits.")] = "auto",
    backend: Annotated[
        str, typer.Option(help="How bit planes are weighted: horner, preshifted, fused or explicit; the same bits.")
    ] = "horner",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE", help="Also run this engine and compare every level; exit code 1 if any differs."
        ),
    ] = None,
    exit: Annotated[
        bool, typer.Option("--exit", help="Stop images early, by the margins that lbq exits chose.")
    ] = False,
    energy: Annotated[
        bool, typer.Option("--energy", help="Also measure joules an image for a minute, where the machine counts them.")
    ] = False,
    threads: Threads = None,
    limit: Limit = None,
    as_json: Json = False,
) -> None:
    """Run a deployed network on a test set: accuracy, throughput, and what was executed, synapse by synapse."""
    from lbq.counting.deployed import evaluate
    from lbq.counting.inputs import open_data
    from lbq.engine import load

    net = load(model)
    test = open_data(net.network, _given_once(data, data_option))
    # unknown names are refused there
    ways: dict[str, Any] = {"engine": engine, "backend": backend, "against": against, "exit": exit}
    with CountProgress(str(model), min(limit or test.size, test.size)) as progress:
        evaluation = evaluate(net, test, threads=threads, limit=limit, progress=progress.advance, **ways)
    measured = _energy(net, test, ways, threads) if energy else None
    facts = {**evaluation.to_dict(), **({} if measured is None else {"energy": measured})}

    def show() -> None:
        render_evaluation(evaluation)
        if measured is not None:
            print_line(measured["text"])

    print_result(as_json, facts, show)
    if evaluation.differing:
        raise typer.Exit(1)


def _energy(net: Network, test: TestSet, ways: dict[str, Any], threads: int | None) -> dict[str, Any]:
    """What the machine's counter says of an image, or why there is none."""
    from lbq.counting.energy import measure_energy
    from lbq.engine import cuda
    from lbq.engine.cuda.meter import CardMeter
    from lbq.engine.meters import NoMeter, PackageMeter

    x, _ = next(iter(test.batches()))  # they run again and again
    on_card = cuda.takes(ways["engine"], test.size)
    engine: Any = "cuda" if on_card else ways["engine"]  # also for the few images that go on
    options = {"threads": threads, "backend": ways["backend"], "exit": ways["exit"]}
    try:
        meter = CardMeter() if on_card else PackageMeter()
        measured = measure_energy(lambda: len(net.run(x, engine, **options).logits), meter)
    except NoMeter as error:
        return {"text": f"measured energy: not available here ({error}); `lbq account` models it"}
    return {**asdict(measured), "text": str(measured)}


def _given_once(data: str | None, option: str | None) -> str | None:
    if data is not None and option is not None:
        raise LbqError(f"the data are given twice, {data} and --data {option}: give them once")
    return option if data is None else data


def exits(
    model: Model,
    data: Annotated[
        str | None,
        typer.Argument(help="Its dataset's folder: margins are chosen on its training part; not needed for digits."),
    ] = None,
    data_option: DataOption = None,
    share: Annotated[
        list[float] | None,
        typer.Option(
            help="Share of images that go on after a timestep; once for each but the last. Default 0.05, 0.025, ..."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Required: the file to write.")] = None,
    images: Annotated[int, typer.Option(min=1, help="How many training samples to choose on.")] = 5000,
    seed: Annotated[int, typer.Option(min=0, help="Of their order, crops and flips.")] = 0,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Choose margins by which images stop early: those whose largest logit leads by so much after few timesteps."""
    from lbq.counting.exits import calibration_images
    from lbq.engine import load, save
    from lbq.engine.exits import check_falling, default_shares
    from lbq.system import files

    if out is None:
        raise LbqError("exits: say where to with -o")
    files.check_file(out)
    _refuse_itself(out, model)
    check_falling(share or [])
    net = load(model)
    shares = share or default_shares(net.network.timesteps)
    x, source = calibration_images(net.network, _given_once(data, data_option), images, seed)
    chosen = net.with_exits(x, shares, source, threads)
    size = save(out, chosen)
    made = chosen.network.exits
    assert made is not None
    facts = {
        "path": str(out),
        "bytes": size,
        "margins": list(made.margins),
        "shares": list(made.shares),
        "source": source,
    }
    after = "; ".join(
        f"after {t} timestep{'s' * (t > 1)} a lead of {margin:,} ends it, {100 * went:.2f} % went on"
        for t, (margin, went) in enumerate(zip(made.margins, made.shares, strict=True), 1)
    )
    print_result(as_json, facts, lambda: print_line(f"{out}: {after}, of {source}"))


def predict(
    model: Model,
    images: Annotated[list[Path], typer.Argument(help="Image files, folders of them, uint8 .npy or .npz arrays.")],
    top: Annotated[int, typer.Option(min=1, help="How many classes to print.")] = 5,
    as_json: Json = False,
) -> None:
    """Classify images with a deployed network: turned upright, their shorter side scaled, their middle cut out."""
    from lbq.counting.classify import classify
    from lbq.engine import load

    unread: dict[str, str] = {}
    rankings = classify(load(model), images, top, unread)
    if rankings:
        named = len(images) > 1 or str(images[0]) not in rankings
        answer = rankings if named else rankings[str(images[0])]
        print_result(as_json, answer, lambda: render_predictions(rankings, named))
    if unread:
        names, (reason, *_) = list(unread), unread.values()
        others = ", ".join(names[1:MOST_NAMES]) + ", ..." * (len(names) > MOST_NAMES)
        raise DataError(reason + (f" ({len(names) - 1} more could not be read: {others})" if names[1:] else ""))


def export(
    subject: Annotated[Path, typer.Argument(help="A deployed network, model.lbq; for nir a run folder.")],
    changes: Changes = None,
    out: Annotated[str | None, typer.Option("-o", "--out", help="Required: a folder for c, c-step, wasm, else a file.")] = None,
    format: Annotated[str, typer.Option(help="c, onnx; c-step, onnx-step: one timestep with its state; web, wasm; nir.")] = "c",
    name: Annotated[str, typer.Option(help="For c, c-step, wasm: what names of functions and files begin with.")] = "model",
    target: Annotated[str | None, typer.Option(help="For c, c-step: cortex-m, a whole project for a microcontroller.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="For c-step: logits of this many latest frames; default T.")] = None,
    reset: Annotated[str | None, typer.Option(help="For nir: what the reader does after a spike, subtract or v_reset.")] = None,
    accept_ties: Annotated[bool, typer.Option("--accept-ties", help="For nir: neurons may fire at U = threshold.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write a network in another form, for other programs: deployed ones give the same integers, bit for bit."""
    from lbq import export as exports
    from lbq.export.cortex_m import check_target

    if not out:
        raise LbqError("export: say where to with -o")
    if exports.check_format(format) != "nir":
        if changes:
            raise LbqError("key=value is for a run folder, which --format nir takes")
        if reset is not None or accept_ties:
            raise LbqError(f"--reset and --accept-ties are for --format nir, not {format}")
        facts = exports.export(subject, out, format, name, target, window)
    else:
        check_target(target, format)
        if subject.is_file():
            raise LbqError(
                f"NIR is written from a run folder, and {subject} is a file: give the run that it was deployed from"
            )
        if window is not None:
            raise LbqError("--window is for --format c-step, not nir")
        facts = _export_nir(subject, changes, out, reset, accept_ties)
    text = facts.pop("text")
    print_result(as_json, facts, lambda: print_line(text))


def _export_nir(run: Path, changes: list[str] | None, out: str, reset: str | None, accept_ties: bool) -> dict[str, Any]:
    from lbq.deploy.pipeline import graph_of_run
    from lbq.export.nir import write_nir

    if reset is None:
        raise LbqError(
            "NIR leaves open what follows a spike: say what your reader does with --reset subtract or v_reset"
        )
    with data_of_a_run():
        graph = graph_of_run(run, changes=changes or [])
    size = write_nir(graph, out, reset, accept_ties)  # type: ignore[arg-type]  # which checks it
    return {
        "path": str(out),
        "bytes": size,
        "text": f"{out}: {size / 1e6:.2f} MB; docs/howto/export-nir.md says how it must be read",
    }
