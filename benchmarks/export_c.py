"""Speed of an exported network, plain C compiled here, against the engine on one thread.

    LBQ_NATIVE_ISA=portable .venv/bin/python benchmarks/export_c.py MODEL DATA [--images 8] [--repeats 5]

Without LBQ_NATIVE_ISA the engine uses all instructions of this CPU. MODEL: a model.lbq; DATA: what `lbq run` takes. Both run
the same images one at a time and take turns. Times are of the processor, the least of several for every image.
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
from numpy.typing import NDArray

from lbq import native
from lbq.counting.inputs import open_data
from lbq.engine import Network, load
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
    while (fread(x, 1, sizeof x, stdin) == sizeof x) {
        struct timespec a, b;
        int64_t logits[MODEL_CLASSES];
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
        model_run(x, logits, &memory);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
        printf("%.9f\n", (double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec));
    }
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
        engine = f"engine, {native.isa()}"
        times = {name: np.full(len(images), np.inf) for name in (engine, *FLAGS)}
        stdin = b"".join(np.ascontiguousarray(image).tobytes() for image in images)
        net.run(images[0], threads=1)
        for _ in range(options.repeats):
            times[engine] = np.minimum(times[engine], [engine_seconds(net, image) for image in images])
            for flags, program in programs.items():
                done = subprocess.run([os.path.join(folder, program)], input=stdin, stdout=subprocess.PIPE, check=True)
                times[flags] = np.minimum(times[flags], np.array(done.stdout.split(), float))
    for name, seconds in times.items():
        print(f"{name:<20}{1e3 * seconds.mean():10.3f} ms an image{seconds.mean() / times[engine].mean():8.2f}")


def engine_seconds(net: Network, image: NDArray[np.uint8]) -> float:
    started = time.process_time()
    net.run(image, threads=1)
    return time.process_time() - started


if __name__ == "__main__":
    main()
