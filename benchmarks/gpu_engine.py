"""Integer inference on one GPU, in one run:

    python benchmarks/gpu_engine.py MODEL.lbq [part ...] [--data DIR] [--only TEXT] [--json FILE]

Parts: `check` (all levels of 64 random images against both engines of the CPU; with --data those of all test images
against its native one), `speed` (images a second from uint8 images in the host's memory to logits there, at several
batches), `rivals` (the float network and its ANN in bfloat16, as they are and under torch.compile, and an int8 ANN on the
same kernels), `exits` (the test images with early exit, by a margin that lets 0.2 % of training images go on; needs
--data), `energy` (joules an image by the card's counter, of all these), `layers` (time and operations a second of every
layer), `tune` (the same for other tiles). Without a part, the first two. With --only, `rivals` and `energy` leave out what
has not this text in its name.

Figures are medians over five windows of at least two seconds; compilation and the recording of CUDA graphs are left out.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from lbq import engine, models
from lbq.counting.energy import measure_energy
from lbq.counting.exits import calibration_images
from lbq.counting.inputs import open_data
from lbq.engine import Network
from lbq.engine.cuda import fused
from lbq.engine.cuda.meter import CardMeter
from lbq.engine.cuda.runner import GpuRunner
from lbq.graph.integer import IntegerNetwork
from lbq.native import choose

BATCHES = (1, 8, 64, 1024)
WINDOWS, SECONDS = 5, 2.0
SHARE_GOING_ON, CALIBRATION_IMAGES = 0.002, 5000
RESULTS: dict[str, Any] = {}
given = argparse.Namespace(only="")
Call = Callable[[], object]


def images_of(network: IntegerNetwork, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, network.input_max + 1, (count, *network.input_shape), np.uint8)


def rate(call: Call, images: int) -> float:
    """Images a second: the median over windows."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    rates = []
    for _ in range(WINDOWS):
        calls, began = 0, time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            call()
            calls += 1
        torch.cuda.synchronize()
        rates.append(calls * images / (time.perf_counter() - began))
    return statistics.median(rates)


def show(name: str, value: float, unit: str = "images/s") -> None:
    RESULTS[name] = value
    print(f"{name:62s} {value:12,.1f} {unit}", flush=True)


def check(net: Network, data: str | None) -> None:
    """Bit for bit, at every layer and timestep."""
    tested = [] if data is None else np.array_split(test_images(net, data), 20)
    runner = GpuRunner(net.network, "cuda")
    random = [images_of(net.network, 64)]
    comparisons: tuple[tuple[str, list[np.ndarray[Any, Any]], engine.Engine], ...] = (
        ("random", random, "dense"),
        ("random", random, "bitplane"),
        ("test", tested, "bitplane"),
    )
    for what, pieces, other in comparisons:
        total = differing = 0
        for x in pieces:
            ours, theirs = runner.run(x, trace=True), net.run(x, other, trace=True)
            assert np.array_equal(ours.logits, theirs.logits)
            assert ours.levels is not None
            assert theirs.levels is not None
            differing += sum(not np.array_equal(ours.levels[name], theirs.levels[name]) for name in ours.levels)
            total += sum(levels.size for levels in ours.levels.values())
            kernels = sorted({choice.kernel for choice in ours.choices.values()})
        assert not differing
        if pieces:
            images = sum(map(len, pieces))
            print(
                f"{total:,} levels of {images} {what} images, 0 differ from {other}; logits are equal; by {', '.join(kernels)}",
                flush=True,
            )


def test_images(net: Network, data: str) -> np.ndarray[Any, Any]:
    tested = open_data(net.network, data)
    return tested.read(0, tested.size)


def with_exits(net: Network, data: str | None) -> Network:
    if data is None:
        raise SystemExit("early exit: give the dataset's folder with --data")
    training, source = calibration_images(net.network, data, CALIBRATION_IMAGES)
    return net.with_exits(training, [SHARE_GOING_ON] * (net.network.timesteps - 1), source)


def show_exits(net: Network, data: str | None) -> None:
    """The whole test set, images that go on gathered into full batches."""
    early, x = with_exits(net, data), test_images(net, data or "")
    stopped = np.bincount(early.run(x, "cuda", exit=True).timesteps)[1:]
    show(f"integers, early exit, {len(x)} test images", rate(lambda: early.run(x, "cuda", exit=True), len(x)))
    print(f"stopped after timesteps 1 to {net.network.timesteps}: {stopped.tolist()}", flush=True)


def speed(net: Network, data: str | None) -> None:
    """Of test images where there are some: noise makes denser levels, and a GPU that draws more power clocks lower."""
    tested = None if data is None else test_images(net, data)
    for timesteps in sorted({1, net.network.timesteps}):
        runner = GpuRunner(net.over(timesteps).network, "cuda")
        for batch in BATCHES:
            x = images_of(net.network, batch) if tested is None else tested[:batch]
            show(f"integers, T = {timesteps}, batch {batch}", rate(lambda r=runner, x=x: r.run(x), batch))


def int8_ann(net: Network) -> IntegerNetwork:
    """An ANN of the same convolutions on the same kernels: one pass, and one comparison for an activation."""
    network = net.over(1).network
    layers = []
    for layer in network.layers:
        assert layer.neuron is not None
        one = replace(layer.neuron, n_max=1, thresholds=np.ascontiguousarray(layer.neuron.thresholds[:, :1]))
        layers.append(replace(layer, neuron=one))
    return replace(network, layers=tuple(layers))


def named(calls: Iterator[tuple[str, Call]]) -> Iterator[tuple[str, Call]]:
    return ((name, call) for name, call in calls if given.only in name)


def show_rivals(net: Network, _: str | None) -> None:
    for name, call in named(rivals(net, ("as it is", "torch.compile"))):
        show(f"{name}, batch 1024", rate(call, 1024))


def rivals(net: Network, ways: tuple[str, ...]) -> Iterator[tuple[str, Call]]:
    """On 1,024 images. ways: how the float networks run."""
    ann, x = GpuRunner(int8_ann(net), "cuda"), images_of(net.network, 1024)
    yield "int8 ANN on these kernels", lambda: ann.run(x)
    id = str(net.network.facts.get("model", "resnet20w128"))
    for name, neuron, timesteps in (
        ("ANN", "relu", 1),
        ("float network, T = 2", "lbq", 2),
        ("float network, T = 1", "lbq", 1),
    ):
        module = (
            models.create(id, timesteps=timesteps, neuron=neuron).cuda().eval().to(memory_format=torch.channels_last)
        )
        if "as it is" in ways:
            yield f"{name}, bfloat16", _float(module, x)
        if "torch.compile" in ways:
            with choose.use("reference"):
                yield f"{name}, bfloat16, torch.compile", _float(torch.compile(module), x)


def energy(net: Network, data: str | None) -> None:
    for name, call in named(chain(ours(net, data), rivals(net, ("torch.compile",)))):
        measured = measure_energy(lambda call=call: (call(), 1024)[1], CardMeter())
        RESULTS[f"{name}, energy"] = asdict(measured)
        print(
            f"{name}: {measured.images / measured.seconds / len(measured.gross):,.0f} images/s; {measured}", flush=True
        )


def ours(net: Network, data: str | None) -> Iterator[tuple[str, Call]]:
    """On 1,024 test images."""
    x = images_of(net.network, 1024) if data is None else test_images(net, data)[:1024]
    for timesteps in sorted({1, net.network.timesteps}):
        runner = GpuRunner(net.over(timesteps).network, "cuda")
        yield f"integers, T = {timesteps}", lambda runner=runner: runner.run(x)
    if data is not None:
        early = with_exits(net, data)
        yield "integers, early exit", lambda: early.run(x, "cuda", exit=True)


def _float(module: nn.Module, x: np.ndarray[Any, Any]) -> Call:
    pinned = torch.from_numpy(x).pin_memory()

    @torch.no_grad()
    def call() -> object:
        pixels = pinned.cuda(non_blocking=True).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return module(pixels / 255).argmax(1).cpu()

    return call


def layers(net: Network, batch: int = 1024, tile: fused.Tile | None = None) -> dict[str, tuple[float, float]]:
    """Milliseconds and tera-operations a second of each layer that the kernels take."""
    runner = GpuRunner(net.network, "cuda")
    runner.run(images_of(net.network, batch))
    piece = runner.pieces[batch]
    piece._compute(0, None)  # fills the memory that layers read
    usual, times = fused.tile_for, {}
    if tile is not None:
        fused.tile_for = lambda _positions, channels: tile._replace(channels=min(tile.channels, channels))
    try:
        for layer in net.network.layers:
            prepared = runner.layers[layer.name]
            if not isinstance(prepared, fused.FusedLayer):
                continue
            fields = {s.name: piece.fields[s.source, s.pools] for s in layer.synapses}
            out = fused.Field.empty(layer.shape, 1, net.network.timesteps, batch, 0, runner.device)
            for _ in range(2):
                prepared.run(fields, out)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(5):
                prepared.run(fields, out)
            end.record()
            torch.cuda.synchronize()
            ms = begin.elapsed_time(end) / 5
            passes = 1 if prepared.static else net.network.timesteps
            operations = 2 * batch * passes * sum(s.macs for s in layer.convs)
            times[layer.name] = ms, operations / ms / 1e9
    finally:
        fused.tile_for = usual
    return times


def show_layers(net: Network, _: str | None) -> None:
    times = layers(net)
    for name, (ms, tops) in times.items():
        print(f"{name:20s} {ms:8.3f} ms {tops:8.0f} TOPS", flush=True)
    RESULTS["layers"] = times
    print(f"{'all':20s} {sum(ms for ms, _ in times.values()):8.3f} ms", flush=True)


def tune(net: Network, _: str | None) -> None:
    shown = ("sn1", "layer1.0.sn1", "layer1.1.sn2", "layer2.0.sn1", "layer2.1.sn1", "layer3.0.sn2", "layer3.1.sn1")
    for tile in (
        fused.Tile(128, 64, 4, 4), fused.Tile(128, 64, 4, 3), fused.Tile(128, 64, 4, 5), fused.Tile(128, 128, 8, 3),
        fused.Tile(128, 128, 8, 4), fused.Tile(128, 256, 8, 3), fused.Tile(64, 128, 4, 4), fused.Tile(64, 64, 4, 4),
    ):  # fmt: skip
        try:
            times = layers(net, tile=tile)
        except Exception as error:  # a tile that does not fit the processor
            print(f"{tuple(tile)}: {type(error).__name__} {str(error)[:80]!r}", flush=True)
            continue
        part = ", ".join(f"{name} {times[name][0]:.3f}" for name in shown if name in times)
        print(f"{tuple(tile)}: all {sum(ms for ms, _ in times.values()):.3f} ms; {part}", flush=True)


PARTS: dict[str, Callable[[Network, str | None], None]] = {
    "check": check,
    "speed": speed,
    "rivals": show_rivals,
    "exits": show_exits,
    "energy": energy,
    "layers": show_layers,
    "tune": tune,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=["check", "speed"])
    parser.add_argument("--data", metavar="DIR")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--json")
    parser.parse_args(namespace=given)
    net = engine.load(given.model)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    for part in given.parts:
        PARTS[part](net, given.data)
    if given.json:
        with open(given.json, "w") as file:
            json.dump(RESULTS, file, indent=2)


if __name__ == "__main__":
    main()
