"""Speed of an exported network in onnxruntime against the engine's bit planes, both on one thread.

    .venv/bin/python benchmarks/export_onnx.py MODEL DATA [--images 8] [--repeats 5]

MODEL: a model.lbq; DATA: what `lbq run` takes. Both run the same images one at a time and take turns; best of several.
Needs `lbq[onnx]`. It also compares the logits of all images.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime

from lbq.counting.inputs import open_data
from lbq.engine import load
from lbq.export import export


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    net = load(options.model)
    x = open_data(net.network, options.data).read(0, options.images)
    along = 0 if net.network.static else 1
    inputs = [np.take(x, [i], along) for i in range(x.shape[along])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        print(export(options.model, path, "onnx")["text"].partition(": ")[2])
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    ways = {
        "onnxruntime": lambda one: session.run(None, {name: one})[0],
        "bit planes": lambda one: net.run(one, "bitplane", threads=1).logits,
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(options.repeats + 1):  # the first warms up
        found = []
        for way, run in ways.items():
            started = time.perf_counter()
            found.append([run(one) for one in inputs])
            best[way] = min(best[way], time.perf_counter() - started)
        assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    for way, seconds in best.items():
        print(
            f"{way:<12} {1e3 * seconds / len(inputs):8.2f} ms an image, {seconds / best['bit planes']:.1f} times bit planes"
        )


if __name__ == "__main__":
    main()
