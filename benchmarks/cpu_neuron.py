"""What the neurons cost beside the convolutions in a training step on a CPU, with the native kernel and without.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/cpu_neuron.py [--model resnet8w16] [--batch 64] [--size 8] [-T 2] \\
        [--bf16] [--channels-last]

Every layer's share is measured alone: its inputs are recorded in one step, then its forward and backward pass are
repeated, kernels alternating, and the best time counts. The last lines are the whole step, measured as a whole, and that
of the ANN of this architecture, which has one timestep.
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


def pass_of(layer: nn.Module, x: Tensor, bf16: bool) -> Callable[[], None]:
    """Forward and backward of one layer on its recorded input."""
    leaf = x.detach().requires_grad_(x.requires_grad)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, bf16):
            out: Tensor = layer(leaf)
        return out

    grad = torch.randn_like(forward())

    def run() -> None:
        forward().backward(grad)
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
    parser.add_argument("--bf16", action="store_true", help="autocast, as train.precision=bf16")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()

    torch.manual_seed(0)
    net, ann = (
        create(options.model, num_classes=10, in_channels=options.channels, timesteps=steps, neuron=neuron)
        for neuron, steps in ((options.neuron, options.timesteps), ("relu", 1))
    )
    x = torch.randn(options.batch, options.channels, options.size, options.size)
    y = torch.randint(10, (options.batch,))
    if options.channels_last:
        net, ann = (network.to(memory_format=torch.channels_last) for network in (net, ann))
        x = x.contiguous(memory_format=torch.channels_last)
    inputs: dict[nn.Module, Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, args: inputs.__setitem__(m, args[0]))
        for module in net.modules()
        if isinstance(module, (nn.Conv2d, SpikingNeuron))
    ]
    with torch.autocast("cpu", torch.bfloat16, options.bf16):
        net(x)
    for handle in handles:
        handle.remove()

    def step_of(network: nn.Module) -> Callable[[], None]:
        optimiser = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)

        def step() -> None:
            optimiser.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, options.bf16):
                loss = F.cross_entropy(network(x), y)
            loss.backward()
            optimiser.step()

        return step

    convolutions = neurons = reference = 0.0
    for layer, given in inputs.items():
        run = pass_of(layer, given, options.bf16)
        if isinstance(layer, nn.Conv2d):
            convolutions += best(options.repeats, run)[0]
        else:
            fast, plain = best(options.repeats, under("on", run), under("off", run))
            neurons, reference = neurons + fast, reference + plain
    step = step_of(net)
    whole, whole_plain, whole_ann = best(options.repeats, under("on", step), under("off", step), step_of(ann))

    how = ("bf16" if options.bf16 else "fp32") + " channels_last" * options.channels_last
    print(
        f"{options.model}, {options.size}x{options.size}, batch {options.batch}, T = {options.timesteps}, {how}, ",
        end="",
    )
    print(f"{torch.get_num_threads()} thread(s), torch {torch.__version__}; native kernel: {choose('cpu').reason}")
    print(f"{'':28}{'ms':>9}{'/ convolutions':>16}")
    for name, value in (
        ("convolutions", convolutions),
        ("neurons, native", neurons),
        ("neurons, plain PyTorch", reference),
        ("whole step, native", whole),
        ("whole step, plain PyTorch", whole_plain),
        ("whole step, the ANN", whole_ann),
    ):
        print(f"{name:28}{value:9.2f}{value / convolutions:16.2f}")


if __name__ == "__main__":
    main()
