"""Run an integer network: layer by layer, all timesteps of a layer at once, in memory that is planned once.

Timesteps of one layer depend on each other only through its membrane, so its convolutions see `[T * B, H, W, C]` as one
batch, and the membrane lives only while its layer runs. Images are taken a few at a time, so that a layer's currents
stay in cache; several threads take different images, or share one image's convolutions.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine import numpy_kernels
from lbq.engine.choose import Choice, EngineName, Prepared, fallback
from lbq.engine.levels import Integers, pool
from lbq.engine.native import Backend, Counts, Emitted
from lbq.engine.network import IntegerLayer, IntegerNetwork
from lbq.engine.neuron import NativeNeuron, NumpyNeuron, emitted
from lbq.graph import INPUT, Pool, Synapse

Trace = Callable[[str, Integers], None]  # layer, levels [T, B, C, H, W], which are overwritten later
Watch = Callable[[str, int, NDArray[np.int32]], None]  # layer, timestep, membranes [B, H, W, C] before emission
TOGETHER = 2**18  # neuron-steps of the largest layer that are computed together: 1 MiB of currents


@dataclass
class Output:
    """What a run gave.

    logits: int64 `[B, classes]`, sums over time in the network's own unit; multiply by `scale` for real numbers.
    counts: by synapse, what was executed. choices: by synapse, how and why.
    levels: by layer `[T, B, C, H, W]`, where a trace was asked for.
    """

    logits: NDArray[np.int64]
    scale: float
    counts: dict[str, Counts]
    choices: dict[str, Choice]
    levels: dict[str, Integers] | None = None

    @property
    def predictions(self) -> NDArray[np.int64]:
        return self.logits.argmax(1)


@dataclass
class _Part:
    """What one thread found for some images."""

    logits: NDArray[np.int64]
    counts: dict[str, Counts]
    levels: dict[str, Integers]


class Plan:
    """Where every layer's levels live: slots that are reused once the last reader has read them.

    `levels`: slot of each layer; `slots`: bytes of each slot for one image; `currents`: int32 values for one image.
    """

    def __init__(self, network: IntegerNetwork) -> None:
        last = {layer.name: len(network.layers) for layer in network.layers}
        for i, layer in enumerate(network.all_layers):
            for s in layer.synapses:
                if s.source != INPUT:
                    last[s.source] = i
        self.levels: dict[str, int] = {}
        self.slots: list[int] = []
        free: list[int] = []
        for i, layer in enumerate(network.layers):
            size = layer.units * network.timesteps
            slot = min(free, key=lambda s: (self.slots[s] < size, abs(self.slots[s] - size)), default=None)
            if slot is None:
                slot = len(self.slots)
                self.slots.append(size)
            else:
                free.remove(slot)
                self.slots[slot] = max(self.slots[slot], size)
            self.levels[layer.name] = slot
            free += [self.levels[done.name] for done in network.layers[: i + 1] if last[done.name] == i]
        self.last = last
        widest = max(layer.units for layer in network.layers) * network.timesteps
        self.currents = widest * max(len(layer.convs) > 1 for layer in network.layers) + widest


class Workspace:
    """The memory of one plan, for up to `images` images at a time."""

    def __init__(self, plan: Plan, images: int) -> None:
        self.images = images
        self.slots = [np.empty(size * images, np.uint8) for size in plan.slots]
        self.currents = np.empty(plan.currents * images, np.int32)
        self.plan = plan

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots) + self.currents.nbytes

    def levels(self, layer: IntegerLayer, rows: int) -> Integers:
        """`[rows, H, W, C]` in the layer's slot."""
        c, h, w = layer.shape
        flat = self.slots[self.plan.levels[layer.name]][: rows * layer.units]
        assert layer.neuron is not None
        return flat.view(layer.neuron.dtype).reshape(rows, h, w, c)

    def current(self, layer: IntegerLayer, rows: int, second: bool) -> NDArray[np.int32]:
        c, h, w = layer.shape
        start = len(self.currents) // 2 if second else 0
        return self.currents[start : start + rows * layer.units].reshape(rows, h, w, c)


class Runner:
    """An integer network ready to run on this machine's CPU."""

    def __init__(self, network: IntegerNetwork) -> None:
        self.network = network
        self.plan = Plan(network)
        self.prepared = {
            s.name: Prepared(s, network.largest(s), network.negative(s))
            for layer in network.layers
            for s in layer.convs
        }
        self.heads = {
            s.name: numpy_kernels.pack(s.weight, s.stride, s.padding, s.dilation, s.groups, np.int64)
            for s in network.readout.convs
        }
        self.neurons = {layer.name: (NumpyNeuron(layer), NativeNeuron(layer)) for layer in network.layers}
        widest = max(layer.units for layer in network.layers) * network.timesteps
        self.together = max(TOGETHER // widest, 1)
        self._spaces: list[Workspace] = []
        self._lock = threading.Lock()

    def run(
        self,
        x: NDArray[np.uint8],
        engine: EngineName = "auto",
        trace: bool | Trace = False,
        threads: int = 1,
        backend: Backend = "horner",
        progress: Callable[[int], None] | None = None,
        watch: Watch | None = None,
    ) -> Output:
        """Inputs `[B, C, H, W]`, or `[T, B, C, H, W]` for events.

        trace: True keeps every layer's levels; a function is told those of some images at a time, by any thread.
        watch: told every layer's membranes; on one thread.
        """
        net = self.network
        if engine != "dense" and (reason := fallback()) is not None:
            warnings.warn(f"running in NumPy, which is right but slow: {reason}", RuntimeWarning, stacklevel=3)
        batch = x.shape[0 if net.static else 1]
        each = max(min(self.together, -(-batch // threads)), 1)
        pieces = [slice(i, min(i + each, batch)) for i in range(0, batch, each)]
        # all threads share the first piece, in which choices are made, and what would leave some without work at the end
        shared = len(pieces) if threads == 1 else 1 + (len(pieces) - 1) % threads
        choices: dict[str, Choice] = {}

        def piece(where: slice, inside: int = 1) -> _Part:
            with self._space(each) as space:
                job = _Job(self, space, engine, backend, inside, choices, watch)
                if trace:
                    job.told = job.keep if trace is True else trace
                part = job.run(x[where] if net.static else x[:, where])
            if progress is not None:
                progress(where.stop - where.start)
            return part

        parts = [piece(where, threads) for where in pieces[:shared]]
        if pieces[shared:]:
            with ThreadPoolExecutor(threads) as workers:
                parts += workers.map(piece, pieces[shared:])
        return self._joined(parts, choices, trace is True)

    def _joined(self, parts: list[_Part], choices: dict[str, Choice], trace: bool) -> Output:
        counts: dict[str, Counts] = {}
        for part in parts:
            for name, found in part.counts.items():
                counts[name] = counts.get(name, Counts()) + found
        logits = np.concatenate([part.logits for part in parts])
        levels = None
        if trace:
            levels = {
                layer.name: np.concatenate([part.levels[layer.name] for part in parts], axis=1)
                for layer in self.network.layers
            }
        return Output(logits, self.network.scale, counts, choices, levels)

    @contextmanager
    def _space(self, images: int) -> Iterator[Workspace]:
        with self._lock:
            fitting = [space for space in self._spaces if space.images >= images]
            space = fitting[0] if fitting else Workspace(self.plan, images)
            self._spaces = [s for s in self._spaces if s is not space and s.images >= images]
        try:
            yield space
        finally:
            with self._lock:
                self._spaces.append(space)


@dataclass
class _Job:
    """Some images through all layers."""

    runner: Runner
    space: Workspace
    engine: EngineName
    backend: Backend
    threads: int
    choices: dict[str, Choice]
    watch: Watch | None = None
    told: Trace | None = None
    levels: dict[str, Integers] = field(default_factory=dict)
    activity: dict[str, Emitted] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    kept: dict[str, Integers] = field(default_factory=dict)
    pooled: dict[tuple[str, tuple[Pool, ...]], Integers] = field(default_factory=dict)

    def run(self, x: NDArray[np.uint8]) -> _Part:
        net = self.runner.network
        steps = 1 if net.static else net.timesteps
        x = x.reshape(-1, *net.input_shape)
        self.batch = len(x) // steps
        self.levels[INPUT] = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
        for i, layer in enumerate(net.layers):
            self._layer(layer)
            self.pooled = {k: v for k, v in self.pooled.items() if self.runner.plan.last[k[0]] > i}
        return _Part(self._readout(), self.counts, self.kept)

    def _layer(self, layer: IntegerLayer) -> None:
        net = self.runner.network
        rows = net.timesteps * self.batch
        current: NDArray[np.int32] | None = None
        for synapse in layer.convs:
            read = self._read(synapse)
            out = self.space.current(layer, len(read), second=current is not None)
            found = self._convolve(synapse, read, out)
            if current is None:
                current = found
            elif len(current) == len(found):
                current += found
            else:  # a static image beside levels: its current is the same at every timestep
                few, many = sorted((current, found), key=len)
                current = many.reshape(net.timesteps, *few.shape)
                current += few
                current = current.reshape(many.shape)
        shortcuts = [self._shortcut(s) for s in layer.identities]
        out_levels = self.space.levels(layer, rows)
        static = current is not None and len(current) != rows
        plain, native = self.runner.neurons[layer.name]
        narrow = all(levels.itemsize == 1 for levels in shortcuts)
        neuron = native if self.engine != "dense" and narrow and fallback() is None else plain
        self.activity[layer.name] = neuron.run(current, shortcuts, out_levels, static, net.timesteps, self.threads)
        self.levels[layer.name] = out_levels
        if self.watch is not None:
            scratch, told = np.empty_like(out_levels), partial(self.watch, layer.name)
            plain.run(current, shortcuts, scratch, static, net.timesteps, watch=told)
        if self.told is not None:
            split = out_levels.reshape(net.timesteps, self.batch, *out_levels.shape[1:])
            self.told(layer.name, split.transpose(0, 1, 4, 2, 3))

    def keep(self, name: str, levels: Integers) -> None:
        self.kept[name] = levels.copy()  # in the order of [T, B, C, H, W]; the slot will be used again

    def _read(self, synapse: Synapse) -> Integers:
        """The (pooled) levels that a synapse reads, `[T * B, H, W, C]`."""
        if not synapse.pools:
            return self.levels[synapse.source]
        key = synapse.source, synapse.pools
        if key not in self.pooled:
            signed = self.runner.network.negative(synapse)
            found = pool(self.levels[synapse.source], synapse.pools, (1, 2))
            if self.runner.network.largest(synapse) <= (127 if signed else 255):
                found = found.astype(np.int8 if signed else np.uint8, copy=False)
            self.pooled[key] = found
        return self.pooled[key]

    def _convolve(self, synapse: Synapse, levels: Integers, out: NDArray[np.int32]) -> NDArray[np.int32]:
        prepared = self.runner.prepared[synapse.name]
        choice = self.choices.get(synapse.name)
        if choice is None:
            density = self._activity(synapse, levels).bits / levels.size
            choice = self.choices[synapse.name] = prepared.choose(self.engine, levels, density)
        assert choice.kernel != "torch"
        conv = prepared.conv(choice.kernel)
        found, counts = conv.run(levels, choice.method, self.backend, self.threads, out)
        self.counts[synapse.name] = counts
        return found

    def _shortcut(self, synapse: Synapse) -> Integers:
        """What an identity synapse reads; it makes one addition for each set bit, as one with fan-out 1."""
        levels = self._read(synapse)
        self._count_identity(synapse, self._activity(synapse, levels))
        return levels

    def _count_identity(self, synapse: Synapse, activity: Emitted) -> None:
        self.counts[synapse.name] = Counts(accumulations=activity.bits, neurons_active=activity.active)

    def _activity(self, synapse: Synapse, levels: Integers) -> Emitted:
        """Active inputs and set bits of what a synapse reads; a layer's own are known from its neurons."""
        known = None if synapse.pools else self.activity.get(synapse.source)
        return emitted(levels) if known is None else known

    def _readout(self) -> NDArray[np.int64]:
        net = self.runner.network
        logits: NDArray[Any] = np.tile(net.readout.bias, (self.batch, 1))
        for synapse in net.readout.synapses:
            read = self._read(synapse)
            summed = read.reshape(net.timesteps, self.batch, *read.shape[1:]).sum(0, dtype=np.int64)
            if synapse.kind == "identity":
                self._count_identity(synapse, emitted(summed))
                logits += summed[:, 0, 0] * synapse.weight
                continue
            method = "dense" if self.engine == "dense" else "bitplane"
            reason = "asked for" if self.engine != "auto" else "the readout always runs by planes of its summed levels"
            self.choices[synapse.name] = Choice("numpy", method, reason)  # type: ignore[arg-type]
            found, self.counts[synapse.name] = self.runner.heads[synapse.name].run(
                summed,
                method,  # type: ignore[arg-type]
                self.backend,
            )
            logits += found[:, 0, 0]
        return logits
