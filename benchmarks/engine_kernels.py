"""Speed of the native convolution kernels against torch's float32 convolution, in dense-equivalent GMAC/s.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/engine_kernels.py [--seconds 0.5] [--density] [--threads 2]

3x3 layers of the paper's network, uint8 levels in, int32 currents out, forming of planes and lists included; levels
1..5 as a trained network uses them (mean popcount 1.3). `x fp32` is the ratio to torch in the same run, all taking
turns, best of many. onnxruntime's int8 convolution is measured where it is installed. --density prints times against
the active ratio, 2 to 60 %, with the dense kernel beside.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lbq import native
from lbq.engine.convolution import Method, PackedConv
from lbq.engine.tape import perform

LAYERS = ((128, 32), (256, 16), (512, 8))
SHARES = (0.50, 0.13, 0.17, 0.07, 0.13)  # of levels 1..5 among those that are not zero


def best(seconds: float, runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The shortest time of each, all taking turns."""
    times = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - start)
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
    runs["times level, 8 bits"] = planned(8, "level")
    runs["dense, 8 bits"] = planned(8, "dense")
    if threads > 1:
        runs[f"bit planes, 8 bits, {threads} threads"] = planned(8, "bitplane", threads)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each kernel and layer")
    parser.add_argument("--active", type=float, default=0.18)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--density", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"native kernels: {native.report().isa}, features {', '.join(native.report().features)}; torch {torch.__version__}"
    )
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
