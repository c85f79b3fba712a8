"""Watch a network's neurons while it runs: level tallies, membrane histograms and a few traces, on its own device.

Levels are read off the neurons' outputs, so that the fast kernels run as ever. Membranes are not seen outside of them and
are computed again, for which a second pass over few images is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lbq.analyze import Membrane, Trace
from lbq.kernels.reference import BurstState, Constants, burst_step, compute_dtype
from lbq.neuron.base import SpikingNeuron
from lbq.tally import Counts, Integers, Read, Tallies, level_counts

MOST_FROM_OUTPUT = 100  # bfloat16 has 8 bits: up to here, output / scale rounds to the level without doubt


class Observer:
    """`with observer.counting(net): net(x)` tallies the levels of a batch, `with observer.looking_inside(net): net(x)` its
    membranes; `finish()` hands over what was kept on the device.

    on_device: count there with torch, rather than in NumPy; default for all devices but the CPU, where NumPy is faster.
    """

    def __init__(self, tallies: Tallies, on_device: bool | None = None) -> None:
        self.tallies, self.on_device = tallies, on_device
        self.membranes: dict[str, Membrane] = {}
        self.traces: list[Trace] = []
        names = [layer.name for layer in tallies.graph.layers]
        self._traced = names[len(names) // 2]
        self._reads = {name: [read for read in tallies.reads if read.source == name] for name in names}
        self._counts: dict[Read, Counts] = {}
        self._on_device: dict[Read, Tensor] = {}

    @contextmanager
    def counting(self, net: nn.Module) -> Iterator[None]:
        """While this is entered, the levels of every forward pass of `net` are tallied."""

        def hook(name: str) -> Any:
            def observe(neuron: SpikingNeuron, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                self._count(name, levels_of(neuron, inputs[0], output), neuron.n_max)

            return observe

        neurons = _neurons(net)
        # a hook before the neuron keeps BatchNorm out of it, so that what it receives is its current
        handles = [n.register_forward_pre_hook(lambda *_: None) for n in neurons.values() if not tells_levels(n)]
        handles += [neuron.register_forward_hook(hook(name)) for name, neuron in neurons.items()]
        with _held(handles), torch.no_grad():
            yield

    @contextmanager
    def looking_inside(self, net: nn.Module) -> Iterator[None]:
        """While this is entered, the membranes of every forward pass of `net` go into histograms."""

        def hook(name: str) -> Any:
            return lambda neuron, inputs: self._look_inside(name, neuron, inputs[0])

        handles = [
            neuron.register_forward_pre_hook(hook(name))
            for name, neuron in _neurons(net).items()
            if has_membrane(neuron)
        ]
        with _held(handles), torch.no_grad():
            yield

    def _count(self, name: str, levels: Tensor, n_max: int) -> None:
        levels = levels.reshape(*levels.shape[:2], *self.tallies.graph[name].shape)
        there = levels.device.type != "cpu" if self.on_device is None else self.on_device
        host: Integers | None = None if there else levels.numpy()
        for read in self._reads[name]:
            if there and read == Read(name):
                found = device_counts(levels, n_max)
                self._on_device[read] = self._on_device[read] + found if read in self._on_device else found
                continue
            if host is None:
                host = levels.cpu().numpy()
            counts = level_counts(read.of(host), self.tallies.largest(read))
            self._counts[read] = self._counts[read] + counts if read in self._counts else counts

    def _look_inside(self, name: str, neuron: SpikingNeuron, x: Tensor) -> None:
        constants = neuron.constants(x)
        thresholds = neuron.thresholds
        if name not in self.membranes:
            marks = thresholds_of(neuron)
            self.membranes[name] = Membrane.empty(len(x), marks)
        history = list(unrolled(x, constants, neuron))
        membrane = self.membranes[name]
        for t, (before, _, _) in enumerate(history):
            r = before / (constants.step if thresholds is None else thresholds[0])
            bins = membrane.counts.shape[1]
            index = ((r - Membrane.LOW) / Membrane.WIDTH).floor().clamp(0, bins - 1).long()
            membrane.counts[t] += torch.bincount(index.flatten(), minlength=bins).cpu().numpy()
        if name == self._traced and not self.traces:
            self.traces = choose_traces(name, neuron, x, history)

    def finish(self, images: int) -> None:
        """Hand the counts of `images` images to the tallies."""
        counts = {**self._counts, **{read: c.cpu().numpy() for read, c in self._on_device.items()}}
        self.tallies.add_counts(counts, images)


def _neurons(net: nn.Module) -> dict[str, SpikingNeuron]:
    return {name: module for name, module in net.named_modules() if isinstance(module, SpikingNeuron)}


@contextmanager
def _held(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tells_levels(neuron: SpikingNeuron) -> bool:
    """Whether output / scale is the level without doubt."""
    return type(neuron).forward is SpikingNeuron.forward and neuron.n_max <= MOST_FROM_OUTPUT


def levels_of(neuron: SpikingNeuron, x: Tensor, output: Tensor) -> Tensor:
    """Integer levels, off the output where it tells them, else computed again from the current `x`."""
    if not tells_levels(neuron):
        return neuron.levels(x)
    scale = (neuron.step if neuron.scale is None else neuron.scale).float()
    if scale.dim():
        scale = scale.reshape(-1, *[1] * (output.dim() - 3))
    dtype = torch.int8 if neuron.signed else torch.uint8
    if output.device.type != "cpu":
        return (output.float() / scale).round_().to(dtype)
    levels = torch.empty(output.shape, dtype=dtype)
    for step, into in zip(output, levels, strict=True):  # image by image, so that what lies between stays in cache
        for image, found in zip(step, into, strict=True):
            found.copy_((image.float() / scale).round_())
    return levels


def has_membrane(neuron: SpikingNeuron) -> bool:
    """Whether it is one membrane that follows `burst_step`; LM-HT mixes time first, MLF has several."""
    return type(neuron).forward is SpikingNeuron.forward


def thresholds_of(neuron: SpikingNeuron) -> tuple[float, ...]:
    """Where each level begins, in steps."""
    if neuron.thresholds is not None:
        return tuple((neuron.thresholds / neuron.thresholds[0]).tolist())
    shift = 0.5 if neuron.rule.rounding in ("round", "half") else 0.0
    return tuple(k - shift for k in range(1, neuron.n_max + 1))


def device_counts(levels: Tensor, n_max: int) -> Tensor:
    """`level_counts` on a device: `[T, H * W, n_max + 1]`."""
    magnitude = levels.abs() if levels.dtype == torch.int8 else levels
    found = [(magnitude == k).sum((1, 2)).flatten(1) for k in range(1, n_max + 1)]
    silent = levels.shape[1] * levels.shape[2] - sum(found)
    return torch.stack([silent, *found], dim=2)  # type: ignore[list-item]


def unrolled(x: Tensor, constants: Constants, neuron: SpikingNeuron) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """At every timestep: the membrane before emission, the level, the membrane after the reset."""
    state: BurstState | None = None
    for current in x.to(compute_dtype(x)).unbind(0):
        before = constants.gain * current
        if state is not None:
            before = before + constants.leak * state.v
            if state.pending is not None:
                before = before - state.pending
        emission, state = burst_step(current, state, constants, neuron.rule)
        yield before, emission.level, state.v if state.pending is None else state.v - state.pending


def choose_traces(
    name: str, neuron: SpikingNeuron, x: Tensor, history: list[tuple[Tensor, Tensor, Tensor]]
) -> list[Trace]:
    """Four neurons on the first image, from a typical active one to the busiest: by quantiles of their summed levels."""
    before, levels, after = (
        torch.stack([step[i][0].flatten() for step in history]).double().cpu().numpy() for i in range(3)
    )
    currents = x[:, 0].flatten(1).double().cpu().numpy()
    total = np.abs(levels).sum(0)
    active = np.flatnonzero(total)
    if not len(active):
        return []
    order = active[np.argsort(total[active], kind="stable")]
    chosen = dict.fromkeys(int(order[round(q * (len(order) - 1))]) for q in (0.3, 0.8, 0.97, 1.0))
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
        for unit in chosen
    ]
