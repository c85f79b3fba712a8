"""An endless stream in C under sanitizers: very many frames, the worst that can come, compared with `Network.stream`.

    .venv/bin/python benchmarks/stream_c.py [MODEL] [--frames 1000000] [--compared 20000]

MODEL: a model.lbq of which streams are proved; default a tiny event network with random weights, which needs PyTorch. Frames
are all bright, all dark, bright where a channel's weights are positive, or negative, and noise of both; each for a thousand
frames, then in disorder. Needs cc with AddressSanitizer and UndefinedBehaviorSanitizer.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lbq.engine import Network, load
from lbq.export.c99 import Sources
from lbq.graph import INPUT
from lbq.graph.endless import endless_bound

SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
NOISE_FRAMES = 16
PHASE = 1000  # frames of one kind
MAIN = r"""
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include "model.h"
enum { KINDS = @kinds@ };
static model_state state;
static uint8_t bank[KINDS][MODEL_INPUT_BYTES];
int main(int count, char **arguments)
{
    const uint32_t frames = count > 2 ? (uint32_t)atol(arguments[1]) : 0;
    const uint32_t compared = count > 2 ? (uint32_t)atol(arguments[2]) : 0;
    uint64_t hash = 0;
    int64_t largest = 0, logits[MODEL_CLASSES];
    if (fread(bank, 1, sizeof bank, stdin) != sizeof bank) return 2;
    model_reset(&state);
    for (uint32_t i = 0; i < frames; i++) {
        const uint32_t kind = (i / 1000 % 2 == 0 ? i / 2000 : (i * 2654435761u) >> 16) % KINDS;
        if (model_step(&state, bank[kind], logits) != 0) return 3;
        for (int c = 0; c < MODEL_CLASSES; c++) hash = (hash ^ (uint64_t)logits[c]) * 1099511628211u;
        for (size_t k = 0; k < sizeof state.membranes / sizeof *state.membranes; k++)
            if (llabs(state.membranes[k]) > largest) largest = llabs(state.membranes[k]);
        if (i + 1 == compared) printf("%" PRIu64 "\n", hash);
    }
    printf("%" PRIu64 " %" PRId64 "\n", hash, largest);
    return 0;
}
"""


def worst_frames(net: Network) -> NDArray[np.uint8]:
    """Frames `[K, C, H, W]` that push the first layer's membranes as far as pixels can, and noise of both extremes."""
    shape, most = net.network.input_shape, net.network.input_max
    frames = [np.zeros(shape, np.uint8), np.full(shape, most, np.uint8)]
    for synapse in (s for layer in net.network.layers for s in layer.convs if s.source == INPUT and s.groups == 1):
        for weights in synapse.weight:
            height, width = (-(-side // kernel) for side, kernel in zip(shape[1:], weights.shape[1:], strict=True))
            tiled = np.tile(weights, (1, height, width))[:, : shape[1], : shape[2]]
            frames += [np.where(tiled > 0, most, 0).astype(np.uint8), np.where(tiled < 0, most, 0).astype(np.uint8)]
    noise = np.random.default_rng(0).integers(0, 2, (NOISE_FRAMES, *shape), np.uint8) * most
    return np.concatenate([np.stack(frames), noise])


def expected_hash(net: Network, bank: NDArray[np.uint8], frames: int) -> int:
    """Of the logits that `Network.stream` gives."""
    stream, total = net.stream(), 0
    for i in range(frames):
        kind = (i // (2 * PHASE) if i // PHASE % 2 == 0 else (i * 2654435761 % 2**32) >> 16) % len(bank)
        for logit in stream.step(bank[kind]).logits[0].tolist():
            total = (total ^ logit % 2**64) * 1099511628211 % 2**64
    return total


def run(net: Network, folder: Path, frames: int, compared: int, flags: tuple[str, ...] = SANITIZE) -> dict[str, int]:
    """Run so many frames in C; an error where a sanitizer speaks or logits differ. The largest membrane carried, its bound."""
    sources, bank = Sources(net.network, form="step"), worst_frames(net)
    assert sources.endless, "no stream is proved of this network: lbq deploy --stream"
    for name, text in {**sources.files(), "main.c": MAIN.replace("@kinds@", str(len(bank)))}.items():
        (folder / name).write_text(text)
    command = ["cc", "-std=c99", "-Wall", "-Wextra", *flags, "main.c", "model.c", "model_data.c", "-o", "stream"]
    subprocess.run(command, cwd=folder, check=True)
    done = subprocess.run([folder / "stream", str(frames), str(compared)], input=bank.tobytes(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[:2000]
    first, (_, largest) = done.stdout.split()[0], done.stdout.split()[-2:]
    assert int(first) == expected_hash(net, bank, compared), "the logits differ"
    inputs = {s.name: net.network.largest(s) for s in net.network.synapses}
    bound = max(endless_bound(layer, inputs) for layer in net.network.layers)
    assert int(largest) <= bound
    return {"largest": int(largest), "bound": bound, "kinds": len(bank)}


def tiny_network() -> Network:
    import torch

    from lbq import models
    from lbq.deploy import deploy

    torch.manual_seed(0)
    net = models.create("resnet8w2", in_channels=2, num_classes=3).eval()
    return deploy(net, (2, 4, 4), timesteps=4, static=False, stream=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--compared", type=int, default=20_000)
    options = parser.parse_args()
    net = tiny_network() if options.model is None else load(options.model)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        facts = run(net, Path(folder), options.frames, min(options.compared, options.frames))
    print(
        f"{options.frames:,} frames of {facts['kinds']} kinds in {time.perf_counter() - started:.0f} s, no sanitizer spoke; "
        f"largest membrane carried {facts['largest']:,}, proved {facts['bound']:,}, limit {2**30:,}; the logits of the first "
        f"{options.compared:,} are those of Network.stream"
    )


if __name__ == "__main__":
    main()
