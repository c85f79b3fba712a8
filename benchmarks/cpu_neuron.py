"""What the neurons cost beside the convolutions in a training step on a CPU, with the native kernel and without.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/cpu_neuron.py [--model resnet8w16] [--batch 64] [--size 8] [-T 2]

Every layer's share is measured alone: its inputs are recorded in one step, then its forward and backward pass are
repeated, kernels alternating, and the best time counts. The last line is the whole step, measured as a whole.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq.models import create
from lbq.native.choose import choose
from lbq.neuron import SpikingNeuron


def best(repeats: int, *runs: Callable[[], Any]) -> list[float]:
    """The shortest time of each, in milliseconds, all taking turns."""
    times = [float("inf")] * len(runs)
    for _ in range(repeats):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            times[i] = min(times[i], time.perf_counter() - start)
    return [1e3 * t for t in times]


def under(native: str, run: Callable[[], Any]) -> Callable[[], Any]:
    def switched() -> None:
        os.environ["LBQ_NATIVE"] = native
        run()
        del os.environ["LBQ_NATIVE"]

    return switched


def pass_of(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward of one layer on its recorded input."""
    leaf = x.detach().requires_grad_(x.requires_grad)
    grad = torch.randn_like(layer(leaf))

    def run() -> None:
        layer(leaf).backward(grad)
        leaf.grad = None
        layer.zero_grad()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet8w16")
    parser.add_argument("--neuron", default="lbq")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--channels", type=int, default=1)
    parser.add_argument("-T", "--timesteps", type=int, default=2)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()

    torch.manual_seed(0)
    net = create(
        options.model, num_classes=10, in_channels=options.channels, timesteps=options.timesteps, neuron=options.neuron
    )
    if options.channels_last:
        net = net.to(memory_format=torch.channels_last)
    x = torch.randn(options.batch, options.channels, options.size, options.size)
    y = torch.randint(10, (options.batch,))
    optimiser = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    inputs: dict[nn.Module, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, args: inputs.__setitem__(m, args[0]))
        for module in net.modules()
        if isinstance(module, (nn.Conv2d, SpikingNeuron))
    ]
    net(x)
    for handle in handles:
        handle.remove()

    def step() -> None:
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()

    convolutions = neurons = reference = 0.0
    for layer, given in inputs.items():
        run = pass_of(layer, given)
        if isinstance(layer, nn.Conv2d):
            convolutions += best(options.repeats, run)[0]
        else:
            fast, plain = best(options.repeats, under("on", run), under("off", run))
            neurons, reference = neurons + fast, reference + plain
    whole, whole_plain = best(options.repeats, under("on", step), under("off", step))

    print(f"{options.model}, {options.size}x{options.size}, batch {options.batch}, T = {options.timesteps}, ", end="")
    print(f"{torch.get_num_threads()} thread(s), torch {torch.__version__}; native kernel: {choose('cpu').reason}")
    print(f"{'':28}{'ms':>9}{'/ convolutions':>16}")
    for name, value in (
        ("convolutions", convolutions),
        ("neurons, native", neurons),
        ("neurons, plain PyTorch", reference),
        ("whole step, native", whole),
        ("whole step, plain PyTorch", whole_plain),
    ):
        print(f"{name:28}{value:9.2f}{value / convolutions:16.2f}")


if __name__ == "__main__":
    main()
