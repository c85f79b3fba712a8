"""Watch a network's neurons while it runs: level tallies, membrane histograms and a few traces, on its own device.

Levels are read off the neurons' outputs, so that the fast kernels run as ever. Membranes are not seen outside of them and
are computed again, for which a second pass over few images is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq.counting.analysis import Membrane, Trace, typical_units
from lbq.counting.tally import Counts, Read, Tallies, level_counts
from lbq.graph.rules import threshold_shift
from lbq.kernels import counting
from lbq.kernels.reference import emissions
from lbq.neuron.base import SpikingNeuron, neurons_of
from lbq.neuron.hooks import attached, before_each, only_outputs, received

MOST_FROM_OUTPUT = 100  # bfloat16 has 8 bits: up to here, output / scale rounds to the level without doubt


class Observer:
    """Tallies levels in `with observer.counting(net): net(x)`, and membranes in `with observer.looking_inside(net): net(x)`.

    on_device: count there, rather than in NumPy; default for all devices but the CPU, where NumPy is faster. `finish`
    fetches the counts.
    """

    def __init__(self, tallies: Tallies, on_device: bool | None = None) -> None:
        self.tallies, self.on_device = tallies, on_device
        self.membranes: dict[str, Membrane] = {}
        self.traces: list[Trace] = []
        names = [layer.name for layer in tallies.graph.layers]
        self._operands = tallies.products.operands  # of products, which are counted in NumPy
        self._traced = names[len(names) // 2]
        self._reads = {name: [read for read in tallies.reads if read.source == name] for name in names}
        self._counts: dict[Read, Counts] = {}
        self._on_device: dict[Read, Tensor] = {}
        self._histograms: dict[str, Tensor] = {}
        self._looking = False

    @contextmanager
    def counting(self, net: nn.Module) -> Iterator[None]:
        """While this is entered, the levels of every forward pass of `net` are tallied, but for those that look inside."""

        def count(name: str, neuron: SpikingNeuron, x: Tensor, output: Tensor) -> None:
            if not self._looking:
                scale = scales[name]
                self._count(name, neuron.levels(x) if scale is None else output, scale)

        with torch.no_grad():
            scales = {name: scale_of(n) if tells_levels(n) else None for name, n in neurons_of(net).items()}
            with watching(net, count):
                yield

    @contextmanager
    def looking_inside(self, net: nn.Module) -> Iterator[None]:
        """While this is entered, the membranes of every forward pass of `net` go into histograms."""
        neurons = {name: neuron for name, neuron in neurons_of(net).items() if has_membrane(neuron)}
        self._looking = True
        try:
            with attached(before_each(neurons, self._look_inside)), torch.no_grad():
                yield
        finally:
            self._looking = False

    def _count(self, name: str, emitted: Tensor, scale: Tensor | None) -> None:
        """emitted: what neurons put out, worth `scale` a level, or levels where that is None."""
        there = emitted.device.type != "cpu" if self.on_device is None else self.on_device
        emitted = self.tallies.graph[name].placed(emitted)
        if not there or name in self._operands:
            signed = self.tallies.graph.spec(name).signed
            levels = (emitted.cpu() if scale is None else levels_of(emitted.cpu(), scale.cpu(), signed)).numpy()
            for gate, made in self.tallies.products.add(name, levels):
                self._keep(self.tallies.gate_counts(gate, made))
            reads = () if there else self._reads[name]
            self._keep({read: level_counts(read.of(levels), self.tallies.largest(read)) for read in reads})
            if not there:
                return
        for read in self._reads[name]:
            value, worth = read_of(read, emitted, emitted.new_ones((), dtype=torch.float32) if scale is None else scale)
            tally = self._on_device.get(read)
            if tally is None:
                size = (value.shape[0], math.prod(value.shape[3:]), self.tallies.largest(read) + 1)
                tally = self._on_device[read] = torch.zeros(size, dtype=torch.int64, device=value.device)
            counting.tally(value, worth, tally)

    def _keep(self, counts: Mapping[Read, Counts]) -> None:
        for read, more in counts.items():
            self._counts[read] = self._counts[read] + more if read in self._counts else more

    def _look_inside(self, name: str, neuron: SpikingNeuron, x: Tensor) -> None:
        if name not in self.membranes:
            self.membranes[name] = Membrane.empty(len(x), thresholds_of(neuron))
            size = self.membranes[name].counts.shape
            self._histograms[name] = torch.zeros(size, dtype=torch.int64, device=x.device)
        low, width = Membrane.LOW, Membrane.WIDTH
        counting.membranes(x, neuron.constants(x), neuron.rule, self._histograms[name], low, width)
        if name == self._traced and not self.traces:
            self.traces = choose_traces(name, neuron, x[:, :1])

    def finish(self, images: int) -> None:
        """Hand the counts of `images` images to the tallies, and the histograms to `membranes`."""
        for read, tally in self._on_device.items():
            counts = self._counts[read] = tally.cpu().numpy()
            channels = self.tallies.graph[read.source].shape[0] // math.prod(pool.channels for pool in read.sums)
            counts[:, :, 0] = images * channels - counts[:, :, 1:].sum(2)
        self.tallies.add_counts(self._counts, images)
        for name, histogram in self._histograms.items():
            self.membranes[name].counts[:] = histogram.cpu().numpy()


@contextmanager
def watching(net: nn.Module, call: Callable[[str, SpikingNeuron, Tensor, Tensor], None]) -> Iterator[None]:
    """While this is entered, each run of a neuron of `net` is reported to `call`: name, neuron, what it received, output.

    What it received is its current where it does not tell its levels; else it may be what enters BatchNorm.
    """

    def hook(name: str, neuron: SpikingNeuron) -> Any:
        def tell(_: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
            call(name, neuron, received(inputs, named), output)

        return only_outputs(tell) if tells_levels(neuron) else tell

    neurons = neurons_of(net)
    # a hook before the neuron keeps BatchNorm out of it
    handles = [n.register_forward_pre_hook(lambda *_: None) for n in neurons.values() if not tells_levels(n)]
    handles += [n.register_forward_hook(hook(name, n), with_kwargs=True) for name, n in neurons.items()]
    with attached(handles):
        yield


def tells_levels(neuron: SpikingNeuron) -> bool:
    """Whether output / scale is the level without doubt."""
    return type(neuron).forward is SpikingNeuron.forward and neuron.n_max <= MOST_FROM_OUTPUT


def scale_of(neuron: SpikingNeuron) -> Tensor:
    """What a level is worth in the output: a scalar, or `[C]`."""
    return (neuron.step if neuron.scale is None else neuron.scale).float()


def levels_of(output: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Integer levels (uint8, or int8 where signed) of outputs `[T, B, C, H, W]` on the CPU."""
    spread = scale.reshape(-1, 1, 1)
    levels = torch.empty(output.shape, dtype=torch.int8 if signed else torch.uint8)
    for step, into in zip(output, levels, strict=True):  # image by image, so that what lies between stays in cache
        for image, image_levels in zip(step, into, strict=True):
            image_levels.copy_((image.float() / spread).round_())
    return levels


def read_of(read: Read, output: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`Read.of` on a device, of levels worth `scale` each in `output` [T, B, C, H, W], and what they are worth then.

    Maxima are the same of levels and of what they are worth; sums are of whole numbers in float32, so they are exact.
    """
    if read.whole:
        return output, scale
    flat = output.flatten(0, 1)
    if not flat.is_floating_point():
        flat = flat.float()
    for pool in read.maxima:
        flat = F.max_pool2d(flat, pool.kernel, pool.stride, pool.padding)
    if read.sums or read.over_time:
        flat, scale = (flat / scale.reshape(-1, 1, 1)).round_(), torch.ones_like(scale)  # float32: scale has dimensions
    if read.absolute:
        flat = flat.abs()
    for pool in read.sums:
        if pool.channels > 1:
            flat = flat.unflatten(1, (-1, pool.channels)).sum(2)
            continue
        flat = F.avg_pool2d(flat, pool.kernel, pool.stride, pool.padding, divisor_override=1)
    value = flat.unflatten(0, output.shape[:2])
    return value.sum(0, keepdim=True) if read.over_time else value, scale


def has_membrane(neuron: SpikingNeuron) -> bool:
    """Whether it is one membrane that follows `burst_step`; LM-HT mixes time first, MLF has several."""
    return type(neuron).forward is SpikingNeuron.forward


def thresholds_of(neuron: SpikingNeuron) -> tuple[float, ...]:
    """Where each level begins, in steps."""
    if neuron.thresholds is not None:
        return tuple((neuron.thresholds / neuron.thresholds[0]).tolist())
    shift = threshold_shift(neuron.rule.rounding)
    return tuple(k - shift for k in range(1, neuron.n_max + 1))


def choose_traces(name: str, neuron: SpikingNeuron, x: Tensor) -> list[Trace]:
    """A few neurons on one image, currents `x` [T, 1, ...]."""
    emitted = emissions(x, neuron.constants(x), neuron.rule)
    history = zip(
        *((e.membrane, e.level, s.v if s.pending is None else s.v - s.pending) for e, s in emitted), strict=True
    )
    before, levels, after = (torch.stack(steps).flatten(1).double().cpu().numpy() for steps in history)
    currents = x[:, 0].flatten(1).double().cpu().numpy()
    spec = neuron.spec()
    positions = int(np.prod(x.shape[3:]))
    return [
        Trace(
            layer=name,
            unit=unit,
            step=float(spec.step if spec.step.ndim == 0 else spec.step[unit // positions]),
            n_max=neuron.n_max,
            leak=spec.leak,
            alpha=spec.alpha,
            current=tuple(float(v) for v in currents[:, unit]),
            before=tuple(float(v) for v in before[:, unit]),
            levels=tuple(int(v) for v in levels[:, unit]),
            after=tuple(float(v) for v in after[:, unit]),
        )
        for unit in typical_units(levels)
    ]
