"""Speed of an exported network, plain C compiled here, against the engine's bit planes on one thread.

    .venv/bin/python benchmarks/export_c.py MODEL DATA [--images 8] [--repeats 5]

MODEL: a model.lbq; DATA: what `lbq run` takes. Both run the same images one at a time and take turns; best of several.
Needs cc on a POSIX system; flags as in the printed table.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from lbq.counting.inputs import open_data
from lbq.engine import load
from lbq.export import export

FLAGS = ("-O2", "-O3", "-O3 -march=native")
MAIN = r"""
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <time.h>
#include "model.h"
static model_memory memory;
static uint8_t x[MODEL_INPUT_BYTES];
int main(void)
{
    double seconds = 0;
    while (fread(x, 1, sizeof x, stdin) == sizeof x) {
        struct timespec a, b;
        int64_t logits[MODEL_CLASSES];
        clock_gettime(CLOCK_MONOTONIC, &a);
        model_run(x, logits, &memory);
        clock_gettime(CLOCK_MONOTONIC, &b);
        seconds += (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec);
    }
    printf("%.9f\n", seconds);
    return 0;
}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    net = load(options.model)
    x = open_data(net.network, options.data).read(0, options.images)
    inputs = x if net.network.static else x.swapaxes(0, 1)
    images = [inputs[i] for i in range(len(inputs))]
    with tempfile.TemporaryDirectory() as folder:
        facts = export(options.model, folder)
        print(facts["text"].partition(";")[2].partition("; `")[0].strip())
        Path(folder, "main.c").write_text(MAIN)
        started = time.perf_counter()
        subprocess.run(["cc", "-std=c99", "-O2", "-c", "model_data.c"], cwd=folder, check=True)
        print(f"cc takes {time.perf_counter() - started:.1f} s for the constants")
        programs = {flags: f"./run{i}" for i, flags in enumerate(FLAGS)}
        for flags, program in programs.items():
            command = ["cc", "-std=c99", *flags.split(), "main.c", "model.c", "model_data.o", "-o", program]
            subprocess.run(command, cwd=folder, check=True)
        times = dict.fromkeys(("bit planes", *FLAGS), float("inf"))
        stdin = b"".join(np.ascontiguousarray(image).tobytes() for image in images)
        net.run(images[0], "bitplane")
        for _ in range(options.repeats):
            started = time.perf_counter()
            for image in images:
                net.run(image, "bitplane")
            times["bit planes"] = min(times["bit planes"], time.perf_counter() - started)
            for flags, program in programs.items():
                found = subprocess.run([os.path.join(folder, program)], input=stdin, stdout=subprocess.PIPE, check=True)
                times[flags] = min(times[flags], float(found.stdout))
    for name, seconds in times.items():
        print(f"{name:<20}{1e3 * seconds / len(images):10.3f} ms an image{seconds / times['bit planes']:8.1f}")


if __name__ == "__main__":
    main()
