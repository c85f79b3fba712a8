"""What weights of few bits gain: a whole network by the kernels for them, and by those for 8 bits.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/few_bits.py MODEL CIFAR10_FOLDER [--bits 4] [--turns 25]

The weights of every layer that reads levels are rounded to --bits, its constants scaled alike, so that about as many neurons
are active as before; how accurate that is does not matter here. Both ways run these same weights and levels, with the same
logits, on one thread. For the second, the kernels are told that weights have 8 bits. Times are of the processor; ratios are
the middle of turns.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lbq import engine, native
from lbq.data.cifar import load_cifar10
from lbq.engine.convolution import PackedConv
from lbq.graph.integer import IntegerLayer


def rounded(layer: IntegerLayer, largest: int) -> IntegerLayer:
    """The layer with weights up to `largest`, and everything else on the same scale."""
    assert layer.neuron is not None
    ratio = largest / max(int(np.abs(s.weight).max()) for s in layer.convs)

    def scaled(values: Any) -> Any:
        return np.rint(values * ratio).astype(values.dtype)

    neuron = replace(layer.neuron, thresholds=scaled(layer.neuron.thresholds), reset=scaled(layer.neuron.reset))
    synapses = tuple(replace(s, weight=scaled(s.weight)) for s in layer.synapses)
    return replace(layer, synapses=synapses, neuron=neuron, bias=scaled(layer.bias))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--turns", type=int, default=25)
    options = parser.parse_args()
    whole, images = engine.load(options.model).network, load_cifar10(options.data).test.images[:2]
    first, *others = whole.layers
    network = replace(whole, layers=(first, *(rounded(layer, 2 ** (options.bits - 1) - 1) for layer in others)))
    given, as_given = PackedConv.__init__, {}

    def as_8_bits(self: PackedConv, *arguments: Any) -> None:
        given(self, *arguments)
        self.range = 255

    print(f"native kernels: {native.isa()}; weights of {options.bits} bits")
    for method in ("bitplane", "auto"):
        nets = {}
        for name in ("few", "eight"):
            PackedConv.__init__ = given if name == "few" else as_8_bits
            nets[name] = engine.Network(network)
            as_given[name] = nets[name].run(images, method, threads=1).logits
        assert np.array_equal(as_given["few"], as_given["eight"])
        times: dict[str, list[float]] = {name: [] for name in nets}
        for _ in range(options.turns):
            for name, net in nets.items():
                start = time.process_time()
                net.run(images, method, threads=1)
                times[name].append(1e3 * (time.process_time() - start) / len(images))
        ratio, ms = np.median(np.divide(times["eight"], times["few"])), (min(t) for t in times.values())
        print(
            f"{method:9}{ratio:6.2f} times as fast as by the kernels for 8 bits ({' and '.join(f'{t:.2f}' for t in ms)} ms)"
        )


if __name__ == "__main__":
    main()
