"""Speed of the native convolution kernels against torch's float32 convolution, in dense-equivalent GMAC/s.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/engine_kernels.py [--seconds 0.5] [--density] [--threads 2]

3x3 layers of the paper's network, uint8 levels in, int32 currents out, forming of planes and lists included; levels
1..5 as a trained network uses them (mean popcount 1.3). `x fp32` is the ratio to torch in the same run, all taking
turns, best of many. onnxruntime's int8 convolution is measured where it is installed. --density prints times against
the active ratio, 2 to 60 %, with the dense kernel beside.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/engine_kernels.py --general

times convolutions with groups and dilation, one image, beside NumPy and PyTorch in float32.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/engine_kernels.py --pairs MODEL --data CIFAR10_FOLDER [--out FILE]

compares two timesteps at once (method `pairs`) with bit planes instead: every convolution of a deployed network, on the
levels it has there, with the same results; lists are chosen on other images. Convolutions are added up by stage, the name
before the first dot. Lists: the time of forming and gathering, which is twice a convolution's time less that of one with
twice the outputs. Then the whole network: by planes, `auto` without pairs, `auto`. Times are of the processor, on one
thread: others who use the machine count less.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lbq import engine, native
from lbq.engine import numpy_kernels
from lbq.engine.convolution import Method, PackedConv
from lbq.engine.general import GeneralConv
from lbq.engine.pairs import chosen_lists, rows_by_pair
from lbq.engine.tape import perform

GENERAL = ((128, 32, 128, 1), (256, 16, 256, 1), (512, 8, 512, 1), (256, 16, 32, 1), (128, 32, 1, 2))
LAYERS = ((128, 32), (256, 16), (512, 8))
SHARES = (0.50, 0.13, 0.17, 0.07, 0.13)  # of levels 1..5 among those that are not zero


def best(
    seconds: float, runs: dict[str, Callable[[], Any]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The shortest time of each, all taking turns."""
    times = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end:
        for name, run in runs.items():
            start = clock()
            run()
            times[name] = min(times[name], clock() - start)
    return times


def levels_of(rng: np.random.Generator, batch: int, size: int, channels: int, active: float) -> NDArray[np.uint8]:
    shape = (batch, size, size, channels)
    return np.where(rng.random(shape) < active, rng.choice(5, shape, p=SHARES) + 1, 0).astype(np.uint8)


def onnx_int8(channels: int, size: int, batch: int, levels: NDArray[np.uint8]) -> Callable[[], Any] | None:
    """onnxruntime's QLinearConv on uint8 levels and int8 weights, one thread; None where it is not installed."""
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnx") is None:
        return None
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    weights = np.random.default_rng(0).integers(-127, 128, (channels, channels, 3, 3)).astype(np.int8)
    shape = [batch, channels, size, size]
    constants = {
        "one": np.array(1, np.float32),
        "scale": np.array(channels, np.float32),
        "zero": np.array(0, np.uint8),
        "middle": np.array(128, np.uint8),
        "w": weights,
        "w_zero": np.array(0, np.int8),
    }
    names = ["x", "one", "zero", "w", "one", "w_zero", "scale", "middle"]
    graph = helper.make_graph(
        [helper.make_node("QLinearConv", names, ["y"], pads=[1, 1, 1, 1])],
        "convolution",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, shape)],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, shape)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.ascontiguousarray(levels.transpose(0, 3, 1, 2))
    return lambda: session.run(None, {"x": x})


def runs_of(channels: int, size: int, batch: int, active: float, threads: int) -> dict[str, Callable[[], Any]]:
    rng = np.random.default_rng(0)
    levels = levels_of(rng, batch, size, channels, active)
    layer = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
    x = torch.from_numpy(levels.astype(np.float32)).permute(0, 3, 1, 2)
    out = np.empty((batch, size, size, channels), np.int32)
    convs = {}
    for bits in (8, 6):
        largest = 2 ** (bits - 1) - 1
        weights = rng.integers(-largest, largest + 1, (channels, channels, 3, 3)).astype(np.int8)
        convs[bits] = PackedConv(weights, (1, 1), (1, 1))

    def fp32() -> None:
        with torch.inference_mode():
            layer(x)

    runs: dict[str, Callable[[], Any]] = {"torch fp32": fp32}
    if (int8 := onnx_int8(channels, size, batch, levels)) is not None:
        runs["onnxruntime int8"] = int8

    def planned(bits: int, method: Method, threads: int = 1) -> Callable[[], Any]:
        step = convs[bits].step(levels, method, out=out)  # as a network calls it
        return lambda: perform(step, threads)

    runs["bit planes, 8 bits"] = planned(8, "bitplane")
    runs["bit planes, 6 bits"] = planned(6, "bitplane")
    runs["dense, 8 bits"] = planned(8, "dense")
    if threads > 1:
        runs[f"bit planes, 8 bits, {threads} threads"] = planned(8, "bitplane", threads)
    return runs


def general_runs(channels: int, size: int, groups: int, dilation: int, active: float) -> dict[str, Callable[[], Any]]:
    """One image through a 3x3 convolution of so many groups, padded to its size."""
    rng, around = np.random.default_rng(0), (dilation, dilation)
    levels = levels_of(rng, 1, size, channels, active)
    weights = rng.integers(-127, 128, (channels, channels // groups, 3, 3)).astype(np.int8)
    conv = GeneralConv(weights, (1, 1), around, around, groups)
    reference = numpy_kernels.PackedConv(weights, (1, 1), around, around, groups)
    layer = torch.nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation, groups=groups, bias=False)
    layer = layer.to(memory_format=torch.channels_last)
    x = torch.from_numpy(levels.astype(np.float32)).permute(0, 3, 1, 2)

    def fp32() -> None:
        with torch.inference_mode():
            layer(x)

    steps = {method: conv.step(levels, method) for method in ("dense", "bitplane")}
    for step in steps.values():
        perform(step, 1)
    assert all((step.out == reference.run(levels, "dense")[0]).all() for step in steps.values())
    return {
        "torch fp32": fp32,
        "dense": lambda: perform(steps["dense"], 1),
        "dense, NumPy": lambda: reference.run(levels, "dense"),
        "bit planes": lambda: perform(steps["bitplane"], 1),
    }


def compare_general(active: float, seconds: float) -> None:
    print(f"{100 * active:.0f} % active, milliseconds of one image")
    names = None
    for channels, size, groups, dilation in GENERAL:
        times = best(seconds, general_runs(channels, size, groups, dilation, active))
        if names is None:
            names = list(times)
            print(f"{'':46}" + "".join(f"{name:>14}" for name in names))
        what = f"{channels} channels, {size}x{size}, {groups} groups, dilation {dilation}"
        print(f"{what:46}" + "".join(f"{1e3 * times[name]:14.3f}" for name in names))


def channels_last(levels: NDArray[Any]) -> NDArray[np.uint8]:
    """`[T * B, H, W, C]` of `[T, B, C, H, W]`."""
    moved = np.ascontiguousarray(levels.transpose(0, 1, 3, 4, 2))
    return moved.reshape(-1, *moved.shape[2:])


def compare_pairs(model: Path, data: Path, seconds: float, out: Path | None) -> None:
    """Print what the methods take in every stage of a network, and in all of it, on one thread."""
    from lbq.data.cifar import load_cifar10

    images = load_cifar10(data).test.images[:6]
    shown, first = images[:2], images[2:]
    net = engine.load(model)
    steps = net.network.timesteps
    levels, seen = (net.run(x, "bitplane", trace=True).levels or {} for x in (shown, first))
    stages: dict[str, Counter[str]] = {}
    for synapse in (s for layer in net.network.layers for s in layer.convs):
        if synapse.source not in levels or synapse.pools:
            continue
        x, largest, weights = channels_last(levels[synapse.source]), net.network.largest(synapse), synapse.weight
        rows = rows_by_pair(channels_last(seen[synapse.source]), steps, weights[0, 0].size)
        lists = chosen_lists(rows, largest)
        runs: dict[str, Callable[[], Any]] = {}
        counted = {}
        for outputs in ("", " twice"):
            wide = np.concatenate([weights, weights]) if outputs else weights
            conv = PackedConv(wide, synapse.stride, synapse.padding)
            for method in ("bitplane", "pairs"):
                step = conv.step(x, method, largest=largest, timesteps=steps, lists=lists)
                runs[method + outputs] = lambda step=step: perform(step, 1)
                counted[method + outputs] = step
        times = best(seconds, runs, time.thread_time)
        assert np.array_equal(counted["pairs"].out, counted["bitplane"].out)
        total = stages.setdefault(synapse.name.split(".")[0], Counter())
        total.update({"convolutions": 1, "lists": len(lists.pairs)})
        for method in ("bitplane", "pairs"):
            total[f"{method} additions"] += counted[method].counts().additions // len(shown)
            total[f"{method} ms"] += 1e3 * times[method] / len(shown)
            building = max(2 * times[method] - times[f"{method} twice"], 0.0)
            total[f"{method} lists ms"] += 1e3 * building / len(shown)
        print(f"{synapse.name:24} {len(lists.pairs):3} lists, {times['bitplane'] / times['pairs']:.2f} x planes")
    for name, t in stages.items():
        print(f"{name}: {t['convolutions']} convolutions, {t['lists']} lists")
        for method in ("bitplane", "pairs"):
            added, building, ms = (t[f"{method} {what}"] for what in ("additions", "lists ms", "ms"))
            print(
                f"    {method:8} {added / 1e6:6.0f} M additions, {building:5.2f} ms for lists, {ms:5.2f} ms in all "
                f"({t['bitplane ms'] / ms:.2f} x)"
            )
    result = {"isa": native.isa(), "stages": stages, "network": compare_networks(net, shown, seconds)}
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")


def compare_networks(net: engine.Network, images: NDArray[np.uint8], seconds: float) -> dict[str, float]:
    """How many times as fast as by planes the whole network runs: the middle of many turns, for clocks change."""
    takes_pairs = PackedConv.pairs_refused
    nets = {name: engine.Network(net.network) for name in ("bitplane", "auto without pairs", "auto")}
    chosen = {}
    for name, each in nets.items():  # the first images make the choices
        PackedConv.pairs_refused = takes_pairs if name == "auto" else lambda *_: "left out"
        chosen[name] = Counter(c.method for c in each.run(images, name.split()[0], threads=1).choices.values())
    PackedConv.pairs_refused = takes_pairs
    times: dict[str, list[float]] = {name: [] for name in nets}
    for _ in range(max(round(60 * seconds), 3)):
        for name, each in nets.items():
            start = time.process_time()
            each.run(images, name.split()[0], threads=1)
            times[name].append(1e3 * (time.process_time() - start) / len(images))
    ratios = {name: float(np.median(np.divide(times["bitplane"], ms))) for name, ms in times.items()}
    for name, ms in times.items():
        print(f"{name:20} {min(ms):6.2f} ms an image ({ratios[name]:.2f} x), {dict(chosen[name])}")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each kernel and layer")
    parser.add_argument("--active", type=float, default=0.18)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--density", action="store_true")
    parser.add_argument("--general", action="store_true", help="convolutions with groups and dilation")
    parser.add_argument("--pairs", type=Path, metavar="MODEL", help="compare two timesteps at once with planes")
    parser.add_argument("--data", type=Path, help="with --pairs: the folder of CIFAR-10")
    parser.add_argument("--out", type=Path, help="with --pairs: a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"native kernels: {native.report().isa}, features {', '.join(native.report().features)}; torch {torch.__version__}"
    )
    if options.pairs is not None:
        compare_pairs(options.pairs, options.data, options.seconds, options.out)
        return
    if options.general:
        compare_general(options.active, options.seconds)
        return
    ratios = (0.02, 0.05, 0.1, 0.18, 0.3, 0.45, 0.6) if options.density else (options.active,)
    for active in ratios:
        print(f"\n{100 * active:.0f} % active, batch {options.batch}, GMAC/s (x fp32)")
        table: dict[str, list[str]] = {}
        for channels, size in LAYERS:
            macs = options.batch * size * size * 9 * channels * channels
            times = best(options.seconds, runs_of(channels, size, options.batch, active, options.threads))
            for name, seconds in times.items():
                speed, ratio = macs / seconds / 1e9, times["torch fp32"] / seconds
                table.setdefault(name, []).append(f"{speed:7.0f} ({ratio:4.1f})")
        print(f"{'':32}" + "".join(f"{channels:>9} ch  " for channels, _ in LAYERS))
        for name, cells in table.items():
            print(f"{name:32}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
