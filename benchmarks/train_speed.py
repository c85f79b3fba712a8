"""Training speed of resnet20w128 on one GPU against its ANN and against other libraries, in one run:

    python benchmarks/train_speed.py [part ...] [--json FILE]

Parts: `steps` (T = 1, 2, 4 at batch 256, and batch 64), `line` (the same ANN, eager and compiled: what a timestep should
cost), `scaling` (batch and T), `neurons` (the baselines), `kernels` (the neuron's kernels against a copy), `start` (a new
process to its first step), `profile` (where the time goes), `rivals` (SpikingJelly, where installed), `transformers`
(spikformer4x384 and its ANN), `transformer_rivals` (SpikingJelly's Spikformer of the same size), `transformer_profile`.
Without a part, all of them.

A step is forward, backward and SGD in bfloat16 and channels_last, on a batch that is already on the GPU; figures are medians
over windows of steps. No accuracy is measured here.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq import models
from lbq.config import Config
from lbq.data.dataset import Inputs
from lbq.native import choose
from lbq.neuron import BurstNeuron
from lbq.runs.run_folder import environment
from lbq.training.trainer import Trainer

MODEL, BATCH = "resnet20w128", 256
TRANSFORMER, TRANSFORMER_BATCH = "spikformer4x384", 128
DEVICE = torch.device("cuda")
Step = Callable[[], None]
RESULTS: dict[str, Any] = {}


class OneBatch:
    """A source that repeats one batch of random images."""

    inputs = Inputs("random", (3, 32, 32))
    name, classes, shape, static, holdout_size, test_size = inputs.name, 10, inputs.shape, inputs.static, 0, 0
    about: ClassVar = {"dataset": "random"}

    def __init__(self, batch: int) -> None:
        self.train_size = batch
        generator = torch.Generator().manual_seed(0)
        self.batch = (
            torch.randn(batch, 3, 32, 32, generator=generator).to(DEVICE),
            torch.randint(10, (batch,), generator=generator).to(DEVICE),
        )

    def train_batches(self, batches: Any, *_: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in batches:
            yield self.batch

    def eval_batches(self, *_: Any) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.batch


def trained(neuron: str, timesteps: int, batch: int, graph: bool = True, model: str = MODEL, **train: Any) -> Step:
    """A step of this package's trainer. train: further settings of it."""
    tree = {
        "model": {"id": model, "in_channels": 3, "timesteps": timesteps},
        "neuron": {"name": neuron},
        "train": {
            "epochs": 1,
            "batch_size": batch,
            "precision": "bf16",
            "channels_last": True,
            "cuda_graph": graph,
            **train,
        },
    }
    source = OneBatch(batch)
    trainer = Trainer(Config.from_dict(tree), source, DEVICE)
    trainer.net.train()
    return lambda: trainer._step(iter([source.batch]))


def plain(net: nn.Module, batch: int, layout: torch.memory_format = torch.channels_last) -> Step:
    """A step as anyone would write it."""
    net = net.to(DEVICE, memory_format=layout).train()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    x, labels = OneBatch(batch).batch
    x = x.contiguous(memory_format=layout)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), labels)
        loss.backward()
        optimiser.step()

    return step


def ann(model: str = MODEL) -> nn.Module:
    return models.create(model, timesteps=1, neuron="relu")


def measure(step: Step, images: int, warm: int = 8, windows: int = 5, steps: int = 12) -> float:
    """Images a second: the median over windows."""
    for _ in range(warm):
        step()
    rates = []
    for _ in range(windows):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        rates.append(steps * images / (time.perf_counter() - began))
    return statistics.median(rates)


def peak(step: Step) -> float:
    """GiB allocated at most in a step that is warm (libraries try out algorithms in the first)."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def show(name: str, value: float, unit: str = "img/s") -> float:
    RESULTS[name] = value
    print(f"{name:58s} {value:10,.2f} {unit}" if value < 100 else f"{name:58s} {value:10,.0f} {unit}", flush=True)
    return value


def steps() -> None:
    show("LBQ T=2 peak memory", peak(trained("lbq", 2, BATCH, graph=False)), "GiB")
    for timesteps in (1, 2, 4):
        show(f"LBQ T={timesteps} batch {BATCH}", measure(trained("lbq", timesteps, BATCH), BATCH))
    for timesteps in (1, 2, 4):
        priced = measure(trained("lbq", timesteps, BATCH, level_cost=0.5), BATCH)
        show(f"LBQ T={timesteps} batch {BATCH} with a price on levels", priced)
    rounded = measure(trained("lbq", 1, BATCH, weight_bits=8), BATCH)
    show(f"LBQ T=1 batch {BATCH} with weights rounded to 8 bits", rounded)
    show(f"LBQ T=2 batch {BATCH} without CUDA graph", measure(trained("lbq", 2, BATCH, graph=False), BATCH))
    show("LBQ T=2 batch 64", measure(trained("lbq", 2, 64), 64))
    with choose.use("reference"):
        show(f"LBQ T=2 batch {BATCH} reference kernel", measure(trained("lbq", 2, BATCH, graph=False), BATCH, 3, 3, 4))


def line() -> None:
    with choose.use("reference"):  # nothing of this package's kernels in what it is compared with
        show(f"ANN eager, plain PyTorch, batch {BATCH}", measure(plain(ann(), BATCH), BATCH))
        began = time.perf_counter()
        step = plain(torch.compile(ann()), BATCH)
        step()
        torch.cuda.synchronize()
        show("compiling the ANN", time.perf_counter() - began, "s")
        rate = show(f"ANN torch.compile, batch {BATCH}", measure(step, BATCH))
        show("ANN eager, plain PyTorch, batch 64", measure(plain(ann(), 64), 64))
    for timesteps in (1, 2, 4):
        show(f"  the line for T={timesteps}: ANN torch.compile / {timesteps}", rate / timesteps)
    show(f"ANN in this trainer, batch {BATCH}", measure(trained("relu", 1, BATCH), BATCH))
    show("ANN in this trainer, batch 64", measure(trained("relu", 1, 64), 64))


def scaling() -> None:
    for batch in (64, 128, 256, 512, 1024):
        rate = show(f"LBQ T=2 batch {batch}", measure(trained("lbq", 2, batch), batch))
        show(f"  ms for each 64 images, batch {batch}", 64e3 / rate, "ms")
    for timesteps in (1, 2, 3, 4, 6, 8):
        rate = show(f"LBQ T={timesteps} batch 128", measure(trained("lbq", timesteps, 128), 128))
        show(f"  ms for each timestep, T={timesteps}", 128e3 / rate / timesteps, "ms")


def neurons() -> None:
    for neuron in ("v1", "lif", "ternary", "ilif", "lmht", "mlf"):
        show(f"{neuron} T=2 batch {BATCH}", measure(trained(neuron, 2, BATCH), BATCH))
    show(f"qann T=1 batch {BATCH}", measure(trained("qann", 1, BATCH), BATCH))


def kernels() -> None:
    """Bytes that must move (input and gradient read, output and gradient written) over the time, against a copy."""

    def seconds(run: Step) -> float:
        graph = torch.cuda.CUDAGraph()
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(20):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    for timesteps in (1, 2, 4):
        shape = (timesteps, 512 // timesteps, 128, 32, 32)
        x = torch.randn(shape, device=DEVICE).flatten(0, 1).to(torch.bfloat16)
        x = x.contiguous(memory_format=torch.channels_last).unflatten(0, shape[:2])
        grad, other = torch.randn_like(x), torch.empty_like(x)
        neuron = BurstNeuron().to(DEVICE)
        constants = neuron.constants(x)
        copy = show(
            f"copy {tuple(shape)}", 2 * x.numel() * 2 / seconds(lambda x=x, other=other: other.copy_(x)) / 1e12, "TB/s"
        )
        from lbq.kernels.arguments import AT_REST, neuron_arguments
        from lbq.kernels.gpu import launch, operators

        arguments = neuron_arguments(constants, neuron.rule)
        arguments = arguments._replace(step=arguments.step.detach(), tail=arguments.tail.detach())
        inputs, targets = operators.Burst(x, arguments, AT_REST), ("step", "tail")
        forward = seconds(lambda i=inputs: operators.BURST.forward(i))
        both = forward + seconds(lambda i=inputs, g=grad, w=targets: operators.BURST.backward(i, (g,), w))
        show(f"neuron alone T={timesteps} forward, share of copy", 2 * x.numel() * 2 / forward / 1e12 / copy, "")
        show(f"neuron alone T={timesteps} both ways, share of copy", 5 * x.numel() * 2 / both / 1e12 / copy, "")
        folded = x.flatten(0, 1)
        moments = seconds(lambda f=folded: torch.ops.lbq.moments(f))
        show(f"BatchNorm statistics T={timesteps}, share of copy", x.numel() * 2 / moments / 1e12 / copy, "")
        mean, var = torch.ops.lbq.moments(folded)
        one = torch.ones_like(mean)
        for residual, reads, back in ((None, 1, 6), (grad, 2, 7)):
            norm = launch.NormArguments(one, mean, mean, var, 1e-5, folded.numel() // 128)
            whole = operators.NormBurst(x, norm, residual, arguments, timesteps)
            name = f"BatchNorm{' + add' if reads == 2 else ''} + neuron T={timesteps}"
            forward = seconds(lambda i=whole: operators.NORM_BURST.forward(i))
            show(f"{name} forward, share of copy", (reads + 1) * x.numel() * 2 / forward / 1e12 / copy, "")
            backward = seconds(lambda i=whole, g=grad, w=targets: operators.NORM_BURST.backward(i, (g,), w))
            show(f"{name} backward, share of copy", back * x.numel() * 2 / backward / 1e12 / copy, "")


def start() -> None:
    """From the start of a process to its first step, with nothing compiled before."""
    code = (
        "import time; t = time.time()\nimport sys; sys.path[:0] = ['benchmarks', 'src']\nimport torch, train_speed as b\n"
        "step = b.trained('lbq', 2, b.BATCH)\nstep()\ntorch.cuda.synchronize()\nprint('first', time.time() - t)\n"
        "for _ in range(4): step()\ntorch.cuda.synchronize()\nprint('fifth', time.time() - t)"
    )
    for cache in ("empty", "filled"):
        if cache == "empty":
            folder = tempfile.mkdtemp()
        environ = os.environ | {"TRITON_CACHE_DIR": folder}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        for text in done.stdout.splitlines():
            name, seconds = text.split()
            show(f"start to {name} step, kernel cache {cache}", float(seconds), "s")


def profile() -> None:
    show_profile(trained("lbq", 2, BATCH, graph=False))


def transformer_profile() -> None:
    show_profile(trained("lbq", 2, TRANSFORMER_BATCH, graph=False, model=TRANSFORMER))


def show_profile(step: Step) -> None:
    for _ in range(5):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    print(f"GPU time {total / 3e3:.2f} ms a step")
    for row in rows[:28]:
        share = 100 * row.self_device_time_total / total
        print(f"{share:5.1f} %  {row.self_device_time_total / 3e3:7.3f} ms  {row.count // 3:4d} x  {row.key[:90]}")


def rivals() -> None:
    if importlib.util.find_spec("spikingjelly") is None:
        print("SpikingJelly is not installed: left out")
        return
    from spikingjelly.activation_based import neuron, surrogate

    if not hasattr(neuron, "ILIFNode"):
        print("SpikingJelly's I-LIF came with version 2: left out")
        return

    def make(**backend: str) -> nn.Module:
        counts = surrogate.MultiLevelSpikeCount(5)
        node: nn.Module = neuron.ILIFNode(surrogate_function=counts, step_mode="m", **backend)
        return node

    RESULTS["spikingjelly"] = version = metadata.version("spikingjelly")
    names = getattr(make(), "supported_backends", ())  # where there are none, the package chooses by itself
    backends: list[dict[str, str]] = [{"backend": name} for name in names] or [{}]
    for backend, (name, layout, mode) in itertools.product(backends, WAYS):
        net = models.create(MODEL, timesteps=2, neuron=partial(make, **backend))
        chosen = f"{backend['backend']} backend" if backend else "its own choice of backend"
        label = f"SpikingJelly {version} I-LIF, {chosen}, {name}, T=2 batch {BATCH}"
        show_rival(label, net, BATCH, layout, mode)


WAYS = (  # in which SpikingJelly's networks run; the last is how torch.compile is asked for
    ("NCHW", torch.contiguous_format, None),
    ("channels_last", torch.channels_last, None),
    ("NCHW, torch.compile", torch.contiguous_format, "default"),
    ("NCHW, torch.compile with CUDA graphs", torch.contiguous_format, "reduce-overhead"),
)


def show_rival(label: str, net: nn.Module, batch: int, layout: torch.memory_format, mode: str | None) -> None:
    try:
        step = plain(net if mode is None else torch.compile(net, mode=mode), batch, layout)
        show(label, measure(from_rest(net, step), batch))
    except Exception as error:  # what this machine or this version cannot do
        print(f"{label}: {type(error).__name__} {str(error)[:100]!r}", flush=True)


def from_rest(net: nn.Module, step: Step) -> Step:
    """A step of a network of SpikingJelly's, whose neurons keep their state until they are reset."""
    from spikingjelly.activation_based import functional

    def reset_and_step() -> None:
        functional.reset_net(net)
        step()

    return reset_and_step


class MeanOverTime(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).mean(0)


def transformers() -> None:
    batch, end = TRANSFORMER_BATCH, f"batch {TRANSFORMER_BATCH}"
    passes = {}  # images a second of the ANN, by how it runs
    for name, mode in (("torch.compile", "default"), ("torch.compile with CUDA graphs", "reduce-overhead")):
        with choose.use("reference"):
            compiled = plain(torch.compile(ann(TRANSFORMER), mode=mode), batch)
            passes[name] = show(f"{TRANSFORMER} ANN {name}, {end}", measure(compiled, batch))
        torch.compiler.reset()
    passes["this trainer"] = measure(trained("relu", 1, batch, model=TRANSFORMER), batch)
    show(f"{TRANSFORMER} ANN in this trainer, {end}", passes["this trainer"])
    for neuron, timesteps in (("lbq", 1), ("lbq", 2), ("lbq", 4), ("lif", 4)):
        rate = measure(trained(neuron, timesteps, batch, model=TRANSFORMER), batch)
        show(f"{TRANSFORMER} {neuron} T={timesteps} {end}", rate)
        for name, once in passes.items():
            show(f"  a timestep over a pass of the ANN, {name}", once / rate / timesteps, "times")


def transformer_rivals() -> None:
    if importlib.util.find_spec("spikingjelly") is None:
        print("SpikingJelly is not installed: left out")
        return
    from spikingjelly.activation_based.model.spikformer import spikformer_cifar10

    batch, version = TRANSFORMER_BATCH, metadata.version("spikingjelly")
    for timesteps, (name, layout, mode) in itertools.product((2, 4), WAYS):
        net = MeanOverTime(spikformer_cifar10(T=timesteps))
        label = f"SpikingJelly {version} Spikformer, {name}, T={timesteps} batch {batch}"
        show_rival(label, net, batch, layout, mode)


PARTS = {
    p.__name__: p
    for p in (
        line, steps, scaling, neurons, kernels, start, profile, rivals, transformers, transformer_rivals, transformer_profile
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    unknown = [p for p in arguments.parts if p not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    torch.backends.cudnn.benchmark = True
    RESULTS["environment"] = environment(DEVICE)
    print(RESULTS["environment"], flush=True)
    for name in arguments.parts or PARTS:
        PARTS[name]()
        torch.cuda.empty_cache()
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(RESULTS, file, indent=2)


if __name__ == "__main__":
    main()
