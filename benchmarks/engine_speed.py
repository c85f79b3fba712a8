"""A whole deployed network per image, one run on one machine, against its rivals:

    python benchmarks/engine_speed.py [--model model.lbq --data CIFAR10_FOLDER] [--out FOLDER] [--quick]

resnet20w128, T = 2, N = 5. At 18 % active (biases shifted so that every layer is) and, with --model, at a trained network's own
densities: our engines on one and two threads, the float SNN in PyTorch, and, where onnx, onnxscript and onnxruntime are there,
onnxruntime int8 of the same-architecture ANN run once (the honest rival) and of the same SNN run densely. Then time against
density, N_max and T with the dense line, as a table and a plot. Times are the best of several, all taking turns, and ratios are
within one run. Also start-up (load to first result), peak memory, and how far two processes get on two cores.
LBQ_NATIVE_AMX=off does without the matrix unit of newer x86 CPUs; RIVALS_AMX=off takes it from onnxruntime alone.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set_num_threads does not limit oneDNN's convolutions

import matrix_unit
import numpy as np
import torch

from lbq import engine, models, native
from lbq.deploy import deploy
from lbq.engine.execution import Execution
from lbq.engine.memory import Workspace
from lbq.engine.neuron import LayerNeurons
from lbq.engine.runner import Runner
from lbq.graph.integer import IntegerLayer, IntegerNetwork

ID, SHAPE = "resnet20w128", (3, 32, 32)
KINDS: tuple[Literal["bitplane", "auto"], ...] = ("bitplane", "auto")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", type=Path)
    arguments.add_argument("--data", type=Path)
    arguments.add_argument("--out", type=Path, default=Path("."))
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--torch-threads", type=int, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.torch_threads:
        torch_worker(given.torch_threads)
        return
    repeats = 3 if given.quick else 12
    print(f"lbq, torch {torch.__version__}, {native.report()}, load {os.getloadavg()[0]:.1f}")
    images = np.random.default_rng(0).integers(0, 256, (8, *SHAPE), np.uint8)
    if given.data is not None:
        from lbq.data.cifar import load_cifar10

        images = load_cifar10(given.data).test.images[:8]
    base = random_network(images)
    networks = {"18 % active": at_density(base, images, 0.18)}
    if given.model is not None:
        networks["trained"] = engine.load(given.model).network
    others = rivals(networks["18 % active"], images)
    result: dict[str, Any] = {name: compare(name, net, images, others, repeats) for name, net in networks.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = given.model or Path(folder) / "model.lbq"
        if given.model is None:
            engine.save(path, engine.Network(base))
        result["start"] = start_up(path)
        result["two processes"] = two_processes(path, repeats)
    result["machine"] = processor()
    result["features"] = native.report().features
    result["sweep_threads"] = 1
    result["sweeps"] = sweeps(base, images, repeats)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "engine_speed.json").write_text(json.dumps(result, indent=2) + "\n")
    plot(result["sweeps"], given.out / "engine_speed.png")
    print(f"wrote {given.out / 'engine_speed.json'} and engine_speed.png")


def processor() -> str:
    """The processor's name, as the system says it: /proc/cpuinfo for x86, lscpu for Arm too."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    if shutil.which("lscpu"):
        told = subprocess.run(["lscpu"], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
        lines += told.stdout.splitlines()
    named = [line.split(":", 1)[1].strip() for line in lines if line.lower().startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def best(function: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of the fastest of several calls."""
    return turns({"": function}, repeats)[""]


def turns(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of the fastest of several calls of each, all taking turns: a machine that others use is slow at times."""
    times = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            times[name] = min(times[name], 1e3 * (time.perf_counter() - started))
    return times


def random_network(images: np.ndarray[Any, Any]) -> IntegerNetwork:
    """The architecture with random weights and BatchNorm statistics of their own."""
    torch.manual_seed(0)
    net = models.create(ID)
    with torch.no_grad():
        net.train()(torch.from_numpy(images).float() / 64 - 2)
    return deploy(net.eval(), SHAPE, mean=[0.5] * 3, std=[0.25] * 3).network


def at_density(network: IntegerNetwork, images: np.ndarray[Any, Any], active: float, n_max: int = 5) -> IntegerNetwork:
    """The network with biases shifted, layer by layer, until that share of neuron-steps is active on these images."""
    layers = list(network.layers)
    for i, layer in enumerate(layers):
        assert layer.neuron is not None
        thresholds = layer.neuron.thresholds[:, :1] * np.arange(1, n_max + 1, dtype=np.int64)
        neuron = replace(layer.neuron, n_max=n_max, thresholds=np.minimum(thresholds, 2**30).astype(np.int32))
        layers[i] = replace(layer, neuron=neuron)
    shifted = replace(network, layers=tuple(layers))
    runner = Runner(shifted)
    space = Workspace(runner.plan, len(images))
    execution = Execution(runner, space, "auto", "horner", 1, {})
    execution.batch = len(images)
    execution.levels["input"] = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    done = []
    for layer in shifted.layers:
        found = _biased(execution, layer, active)
        runner.neurons[layer.name] = LayerNeurons(found)
        execution._layer(layer)
        done.append(found)
    return replace(shifted, layers=tuple(done))


def _biased(execution: Execution, layer: IntegerLayer, active: float) -> IntegerLayer:
    assert layer.neuron is not None
    step = np.minimum(layer.neuron.thresholds[:, 0].astype(np.int64), 2**26)
    low, high = -20.0, 20.0

    def moved(by: float) -> IntegerLayer:
        shift = (by * step).astype(np.int64)
        bias = layer.bias + (shift[:, None, None] if layer.bias.ndim == 3 else shift)
        return replace(layer, bias=np.clip(bias, -(2**29), 2**29).astype(np.int32))

    for _ in range(14):
        middle = (low + high) / 2
        execution.program.neurons[layer.name] = LayerNeurons(moved(middle))
        execution._layer(layer)
        share = execution.activity[layer.name]().active / execution.levels[layer.name].size
        low, high = (middle, high) if share < active else (low, middle)
    return moved((low + high) / 2)


def compare(
    name: str, network: IntegerNetwork, images: np.ndarray[Any, Any], others: dict[str, Callable[[], Any]], repeats: int
) -> dict[str, Any]:
    """Our engines on one image and on several, and their rivals on one image, all taking turns."""
    net = engine.Network(network)
    traced = net.run(images[:2], trace=True)
    assert traced.levels is not None
    share = float(np.mean([(level != 0).mean() for level in traced.levels.values()]))
    bits = float(np.mean([np.bitwise_count(np.abs(level)).mean() for level in traced.levels.values()]))
    print(f"\n{name}: mean over layers {100 * share:.1f} % active, {bits:.3f} set bits per neuron-step")
    runs = dict(others)
    for kind, threads in itertools.product(KINDS, (1, 2)):
        runs[f"{kind} {threads} one"] = lambda k=kind, t=threads: net.run(images[0], k, threads=t)
        runs[f"{kind} {threads} many"] = lambda k=kind, t=threads: net.run(images, k, threads=t)
    times = turns(runs, repeats)
    found: dict[str, Any] = {"active": share, "set_bits": bits}
    for kind in KINDS:
        one, many = ([times[f"{kind} {threads} {what}"] for threads in (1, 2)] for what in ("one", "many"))
        many = [value / len(images) for value in many]
        found[kind] = {"1": many[0], "2": many[1], "single 1": one[0], "single 2": one[1]}
        print(
            f"  {kind:<9} one image {one[0]:6.1f} ms, two threads {one[1]:6.1f} ({one[0] / one[1]:.2f} times); each of "
            f"{len(images)} {many[0]:6.1f} ms, two threads {many[1]:6.1f} ({many[0] / many[1]:.2f} times)"
        )
    for rival in dict.fromkeys(key.rsplit(" ", 1)[0] for key in others):
        found[rival] = {t: times[f"{rival} {t}"] for t in "12" if f"{rival} {t}" in times}
        print(
            f"  {rival:<40}"
            + ";".join(
                f" {t} thread(s) {value:6.1f} ms, {value / found['bitplane'][f'single {t}']:.2f} times the planes', "
                f"{value / found['auto'][f'single {t}']:.2f} times auto's"
                for t, value in found[rival].items()
            )
        )
    methods = [choice.method for choice in net.run(images[0]).choices.values()]
    found["planes"] = methods.count("bitplane")
    counted = ", ".join(f"{count} by {method}" for method, count in Counter(methods).most_common())
    print(f"  of {len(methods)} synapses auto runs {counted}")
    return found


class TorchWorker:
    """Float networks in PyTorch in a process of its own, whose number of threads is fixed when it starts; one image."""

    def __init__(self, threads: int) -> None:
        command = [sys.executable, __file__, "--torch-threads", str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, neuron: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{neuron}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()


def torch_worker(threads: int) -> None:
    """Runs a network, eager and channels last, for each line that it reads, and answers."""
    torch.set_num_threads(threads)
    x = torch.randn(1, *SHAPE).contiguous(memory_format=torch.channels_last)
    nets = {
        neuron: models.create(ID, neuron=neuron, timesteps=steps).eval().to(memory_format=torch.channels_last)
        for neuron, steps in (("lbq", 2), ("relu", 1))
    }
    with torch.no_grad():
        for line in sys.stdin:
            nets[line.strip()](x)
            print("done", flush=True)


def rivals(network: IntegerNetwork, images: np.ndarray[Any, Any]) -> dict[str, Callable[[], Any]]:
    """By name and number of threads, what runs one image."""
    found: dict[str, Callable[[], Any]] = {}
    for threads in (1, 2):
        worker = TorchWorker(threads)
        found[f"float SNN, torch fp32 {threads}"] = lambda w=worker: w.run("lbq")
        found[f"float ANN once, torch fp32 {threads}"] = lambda w=worker: w.run("relu")
    matrix_unit.keep_rivals_off()
    try:
        import onnx_rivals
    except ModuleNotFoundError as error:
        print(f"onnxruntime is left out: {error}")
        return found
    for threads in (1, 2):
        ann = onnx_rivals.ann_int8(ID, threads, images)
        x = images[:1].astype(np.float32) / 64 - 2
        found[f"int8 ANN once, onnxruntime {threads}"] = lambda ann=ann, x=x: ann.run(None, {"x": x})
        for exact, given in ((True, images[:1]), (False, images[:1].astype(np.float32))):
            snn = onnx_rivals.snn_int8(network, threads, exact, images)
            name = f"int8 SNN densely, onnxruntime{', exactly' if exact else ''}"
            found[f"{name} {threads}"] = lambda snn=snn, given=given: snn.run(None, {"x": given})
    return found


def start_up(path: Path) -> dict[str, float]:
    """From nothing to the first result in a fresh process, and the memory that took beyond Python's and NumPy's own."""
    network = engine.load(path).network
    weights = sum(s.weight.nbytes for s in network.synapses) / 2**20
    sizes = sorted(5 * layer.units * network.timesteps / 2**20 for layer in network.layers)  # levels and int32 currents
    found = {"weights_mib": weights, "limit_mib": 1.5 * (weights + sum(sizes[-2:]))}
    print(f"\nweights {weights:.1f} MiB; with two layers' levels and currents, times 1.5: {found['limit_mib']:.1f} MiB")
    for kind in ("bitplane", "auto"):
        code = (
            "import re, time; import numpy as np, lbq.engine as e\n"
            "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024\n"
            "before = peak(); t = time.perf_counter()\n"
            f"net = e.load({str(path)!r}); net.run(np.zeros(net.network.input_shape, np.uint8), {kind!r})\n"
            "print(time.perf_counter() - t, peak() - before)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, memory = map(float, done.stdout.split())
        print(f"  {kind:<9} load to first result {seconds:.2f} s, peak memory {memory:.1f} MiB")
        found |= {f"{kind}_seconds": seconds, f"{kind}_memory_mib": memory}
    return found


def two_processes(path: Path, repeats: int) -> float:
    """How much faster two processes with one thread each are than one of them alone: as far as this machine can go."""
    code = (
        "import sys, time; import numpy as np, lbq.engine as e\n"
        f"net = e.load({str(path)!r}); x = np.random.default_rng(0).integers(0, 256, (4, *net.network.input_shape), np.uint8)\n"
        "for _ in range(3): net.run(x, 'bitplane', threads=1)\n"
        "print('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    done, start = 0, time.perf_counter()\n"
        "    while time.perf_counter() - start < 0.5: net.run(x, 'bitplane', threads=1); done += len(x)\n"
        "    print(done / (time.perf_counter() - start), flush=True)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]
    for worker in workers:
        worker.stdout.readline()
    alone, together = 0.0, 0.0
    for _ in range(repeats):
        for some in (workers[:1], workers[1:], workers):
            for worker in some:
                worker.stdin.write("go\n")
                worker.stdin.flush()
            rate = sum(float(worker.stdout.readline()) for worker in some)
            alone, together = (max(alone, rate), together) if len(some) == 1 else (alone, max(together, rate))
    for worker in workers:
        worker.stdin.close()
        worker.wait()
    print(f"\ntwo processes by planes, one thread each: {together / alone:.2f} times one of them alone")
    return together / alone


def sweeps(base: IntegerNetwork, images: np.ndarray[Any, Any], repeats: int) -> dict[str, Any]:
    """Milliseconds per image, one thread: by planes and densely, against the share of active neurons, N_max and T."""
    few = images[:2]
    points: dict[str, dict[Any, IntegerNetwork]] = {
        "active": {share: at_density(base, few, share) for share in (0.02, 0.05, 0.1, 0.18, 0.3, 0.45, 0.6)},
        "N_max, 18 % active": {n: at_density(base, few, 0.18, n) for n in (1, 2, 5, 10, 20, 50)},
        "T, 18 % active": {t: at_density(replace(base, timesteps=t), few, 0.18) for t in (1, 2, 4, 8)},
    }
    runs: dict[str, Callable[[], Any]] = {}
    for title, networks in points.items():
        for value, network in networks.items():
            net, dense = engine.Network(network), engine.Network(network)
            dense.run(few, threads=1)
            assert dense._runner is not None
            for prepared in dense._runner.prepared.values():
                prepared.crossover = 0.0  # always dense
            dense._runner._choices.clear()
            runs[f"{title} {value} planes"] = lambda net=net: net.run(few[0], "bitplane", threads=1)
            runs[f"{title} {value} dense"] = lambda net=dense: net.run(few[0], threads=1)
    times = turns(runs, repeats)
    print("\nms per image, one thread: by planes, densely")
    found: dict[str, Any] = {}
    for title, networks in points.items():
        found[title] = [[v, *(times[f"{title} {v} {way}"] for way in ("planes", "dense"))] for v in networks]
        for value, planes, densely in found[title]:
            print(f"  {title:<20} {value:>5}: {planes:7.1f} {densely:7.1f}")
    return found


def plot(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(12, 3.6), layout="constrained")
    for axis, (title, rows) in zip(axes, found.items(), strict=True):
        x, planes, dense = zip(*rows, strict=True)
        axis.plot(x, planes, "o-", label="bit planes")
        axis.plot(x, dense, "s--", label="dense int8")
        axis.set_xlabel("share of active neurons" if title == "active" else title)
        axis.set_ylabel("ms per image")
        axis.set_ylim(bottom=0)
        if title.startswith("N_max"):
            axis.set_xscale("log")
    axes[0].legend()
    figure.suptitle(f"{ID}, one thread")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
