"""Run an integer network: layer by layer, all timesteps of a layer at once, in memory that is planned once.

Timesteps of one layer depend on each other only through its membrane, so its convolutions see `[T * B, H, W, C]` as one
batch, and the membrane lives only while its layer runs. Images are taken a few at a time, so that a layer's currents
stay in cache; several threads take different images, or share one image's convolutions. Where all that was done for some
images was done by the native library, it is recorded, and the next images run as one call (see tape.py).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine import numpy_kernels
from lbq.engine.convolution import Backend, Counts, PackedConv
from lbq.engine.memory import Plan, Workspace
from lbq.engine.method import Choice, EngineName, Prepared, fallback
from lbq.engine.neuron import NativeNeuron, NumpyNeuron, emitted
from lbq.engine.steps import Emitted, PoolStep, ReadoutStep, add_step
from lbq.engine.tape import Tape, perform, recording
from lbq.graph import INPUT, Pool, Synapse
from lbq.graph.integer import IntegerLayer, IntegerNetwork
from lbq.graph.levels import Integers, highest_level, pool
from lbq.native import isa

OnLevels = Callable[[str, Integers], None]  # layer, levels [T, B, C, H, W], which are overwritten later
OnMembranes = Callable[[str, int, NDArray[np.int32]], None]  # layer, timestep, membranes [B, H, W, C] before emission
CHOSEN_ANEW = 64  # images after which densities are looked at again
RECORDINGS = 4  # of a workspace: engines that take turns, choices that change
TOGETHER = 2**18  # neuron-steps of the largest layer that are computed together: 1 MiB of currents


@dataclass(repr=False)
class Output:
    """What a run gave.

    logits: int64 `[B, classes]`, sums over time in the network's own unit; multiply by `scale` for real numbers.
    counts: by synapse, what was executed: accumulations by planes, products where it ran densely; `total`: of all synapses.
    choices: by synapse, how and why.
    levels: by layer `[T, B, C, H, W]`, where a trace was asked for.
    """

    logits: NDArray[np.int64]
    scale: float
    counts: dict[str, Counts]
    choices: dict[str, Choice]
    levels: dict[str, Integers] | None = None

    def __repr__(self) -> str:
        levels = "no levels" if self.levels is None else f"levels of {len(self.levels)} layers"
        return (
            f"Output(logits {list(self.logits.shape)}, scale {self.scale:.4g}, {len(self.counts)} synapses, {levels})"
        )

    @property
    def predictions(self) -> NDArray[np.int64]:
        return self.logits.argmax(1)

    @property
    def total(self) -> Counts:
        return sum(self.counts.values(), Counts())


Counted = dict[str, Callable[[], Counts]]  # by synapse; valid until the same memory is used again


@dataclass
class _Part:
    """What one thread found for some images."""

    logits: NDArray[np.int64]
    counts: dict[str, Counts]
    levels: dict[str, Integers]


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
        self.heads = {s.name: _Head(s) for s in network.readout.convs}
        self.neurons = {layer.name: (NumpyNeuron(layer), NativeNeuron(layer)) for layer in network.layers}
        widest = max(layer.units for layer in network.layers) * network.timesteps
        self.together = max(TOGETHER // widest, 1)
        self._spaces: list[Workspace] = []
        self._choices: dict[tuple[EngineName, bool], tuple[dict[str, Choice], int]] = {}
        self._lock = threading.Lock()

    def run(
        self,
        x: NDArray[np.uint8],
        engine: EngineName = "auto",
        trace: bool | OnLevels = False,
        threads: int = 1,
        backend: Backend = "horner",
        progress: Callable[[int], None] | None = None,
        watch: OnMembranes | None = None,
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
        choices, settled = self._settle(engine, batch)
        # all threads share the piece in which choices are made, and what would leave some without work at the end
        first = 0 if settled else 1
        shared = len(pieces) if threads == 1 else first + (len(pieces) - first) % threads

        def piece(where: slice, inside: int = 1) -> _Part:
            with self._space(each) as space:
                part = self._piece(
                    x[where] if net.static else x[:, where], space, engine, backend, inside, choices, trace, watch
                )
            if progress is not None:
                progress(where.stop - where.start)
            return part

        parts = [piece(where, threads) for where in pieces[:shared]]
        if pieces[shared:]:
            with ThreadPoolExecutor(threads) as workers:
                parts += workers.map(piece, pieces[shared:])
        return self._joined(parts, choices, trace is True)

    def _settle(self, engine: EngineName, images: int) -> tuple[dict[str, Choice], bool]:
        """Choices for so many images, and whether they are all made: they are kept for a while."""
        key = engine, fallback() is None
        with self._lock:
            choices, seen = self._choices.get(key, ({}, 0))
            if seen >= CHOSEN_ANEW:
                choices, seen = {}, 0
            self._choices[key] = choices, seen + images
        return choices, self._all_made(choices)

    def _all_made(self, choices: dict[str, Choice]) -> bool:
        return len(choices) == len(self.prepared) + len(self.heads)

    def _piece(
        self,
        x: NDArray[np.uint8],
        space: Workspace,
        engine: EngineName,
        backend: Backend,
        threads: int,
        choices: dict[str, Choice],
        trace: bool | OnLevels,
        watch: OnMembranes | None,
    ) -> _Part:
        """Some images: as the recording of the same job, or for the first time."""
        kept: dict[str, Integers] = {}

        def keep(name: str, levels: Integers) -> None:
            kept[name] = levels.copy()  # in the order of [T, B, C, H, W]; the memory will be used again

        told = (keep if trace is True else trace) or None
        job = _Job(self, space, engine, backend, threads, choices, told, watch)
        if watch is not None or not job.by_library or not self._all_made(choices):
            logits = job.run(x)  # choices are still to be made, or NumPy is to do it
        else:
            key = (engine, backend, x.shape, isa(), *((c.kernel, c.method) for c in choices.values()))
            recorded: _Recording | None = space.recordings.get(key)
            if recorded is not None:
                return _Part(recorded.run(x, threads, told), {name: c() for name, c in recorded.counted.items()}, kept)
            with recording() as job.tape:
                logits = job.run(x)
            if job.native:
                while len(space.recordings) >= RECORDINGS:
                    space.recordings.pop(next(iter(space.recordings)))
                space.recordings[key] = _Recording(job, logits)
                logits = logits.copy()
        return _Part(logits, {name: counts() for name, counts in job.counted.items()}, kept)

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
        return Output(logits, self.network.scale, counts, dict(choices), levels)

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


class _Head:
    """A readout's weights, in NumPy's form or the native one, each made when it is needed."""

    def __init__(self, synapse: Synapse) -> None:
        self.synapse = synapse

    @cached_property
    def numpy(self) -> numpy_kernels.PackedConv:
        s = self.synapse
        return numpy_kernels.pack(s.weight, s.stride, s.padding, s.dilation, s.groups, np.int64)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """`[features, classes]`, features as in `[H, W, C]`."""
        weight = self.synapse.weight.astype(np.int64)
        return np.ascontiguousarray(weight.transpose(2, 3, 1, 0).reshape(-1, len(weight)))

    def takes(self, read: Integers) -> bool:
        """Whether the native form does: one window, as large as what is read."""
        s = self.synapse
        plain = s.groups == 1 and s.dilation == (1, 1) and s.padding == (0, 0) and fallback() is None
        return plain and read.shape[1:3] == s.weight.shape[2:] and read.dtype in (np.uint8, np.int8, np.int32)


class _Recording:
    """A job that can be done again, for as many images with the same choices, in its workspace."""

    def __init__(self, job: _Job, logits: NDArray[np.int64]) -> None:
        assert job.tape is not None
        self.tape, self.input, self.logits = job.tape, job.levels[INPUT], logits
        self.counted, self.emitted = job.counted, job.emitted

    def run(self, x: NDArray[np.uint8], threads: int, told: OnLevels | None) -> NDArray[np.int64]:
        """Logits; told is called as in the first run."""
        self.input[...] = x.reshape(-1, *x.shape[-3:]).transpose(0, 2, 3, 1)
        start = 0
        if told is not None:
            for stop, name, levels in self.emitted:
                self.tape.run(threads, start, stop)
                told(name, levels)
                start = stop
        self.tape.run(threads, start)
        return self.logits.copy()


@dataclass
class _Job:
    """Some images through all layers. native: whether NumPy had no part in it; emitted: after how many steps of the tape
    which layer's levels are there; counted: what was done, asked for at the end."""

    runner: Runner
    space: Workspace
    engine: EngineName
    backend: Backend
    threads: int
    choices: dict[str, Choice]
    told: OnLevels | None = None
    watch: OnMembranes | None = None
    tape: Tape | None = None
    native: bool = True
    levels: dict[str, Integers] = field(default_factory=dict)
    activity: dict[str, Callable[[], Emitted]] = field(default_factory=dict)
    counted: Counted = field(default_factory=dict)
    emitted: list[tuple[int, str, Integers]] = field(default_factory=list)
    pooled: dict[tuple[str, tuple[Pool, ...]], Integers] = field(default_factory=dict)

    def run(self, x: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Logits."""
        net = self.runner.network
        steps = 1 if net.static else net.timesteps
        x = x.reshape(-1, *net.input_shape)
        self.batch = len(x) // steps
        self.levels[INPUT] = x.transpose(0, 2, 3, 1).copy()
        for i, layer in enumerate(net.layers):
            self._layer(layer)
            self.pooled = {k: v for k, v in self.pooled.items() if self.runner.plan.last[k[0]] > i}
        return self._readout()

    @property
    def by_library(self) -> bool:
        return self.engine != "dense" and fallback() is None

    def _layer(self, layer: IntegerLayer) -> None:
        net = self.runner.network
        rows = net.timesteps * self.batch
        current: NDArray[np.int32] | None = None
        for synapse in layer.convs:
            read = self._read(synapse)
            out = self.space.current(layer, len(read), current)
            found = self._convolve(synapse, read, out)
            current = found if current is None else self._sum(current, found)
        shortcuts = [self._shortcut(s) for s in layer.identities]
        out_levels = self.space.levels(layer, rows)
        static = current is not None and len(current) != rows
        plain, native = self.runner.neurons[layer.name]
        watch = None if self.watch is None else partial(self.watch, layer.name)
        if self.by_library and all(levels.itemsize == 1 for levels in shortcuts):
            membranes = None if watch is None else np.empty(out_levels.shape, np.int32)
            step = native.step(current, shortcuts, out_levels, static, net.timesteps, membranes)
            perform(step, self.threads)
            self.activity[layer.name] = step.emitted
            if watch is not None and membranes is not None:
                for t, u in enumerate(np.split(membranes, net.timesteps)):
                    watch(t, u)
        else:
            found_here = plain.run(current, shortcuts, out_levels, static, net.timesteps, watch)
            self.native, self.activity[layer.name] = False, partial(_same, found_here)
        self.levels[layer.name] = out_levels
        seen = out_levels.reshape(net.timesteps, self.batch, *out_levels.shape[1:]).transpose(0, 1, 4, 2, 3)
        self.emitted.append((0 if self.tape is None else len(self.tape.steps), layer.name, seen))
        if self.told is not None:
            self.told(layer.name, seen)

    def _sum(self, one: NDArray[np.int32], other: NDArray[np.int32]) -> NDArray[np.int32]:
        """The currents of two synapses; a static image's current is the same at every timestep."""
        few, many = sorted((one, other), key=len)
        if self.by_library:
            perform(add_step(many, few), self.threads)
        else:
            many.reshape(-1, *few.shape)[...] += few
        return many

    def _read(self, synapse: Synapse) -> Integers:
        """The (pooled) levels that a synapse reads, `[T * B, H, W, C]`."""
        if not synapse.pools:
            return self.levels[synapse.source]
        key = synapse.source, synapse.pools
        if key not in self.pooled:
            self.pooled[key] = self._pool(synapse)
        return self.pooled[key]

    def _pool(self, synapse: Synapse) -> Integers:
        net = self.runner.network
        signed = net.negative(synapse)
        narrow = net.largest(synapse) <= highest_level(signed)
        found = self.levels[synapse.source]
        pools = synapse.pools
        while (
            pools and self.by_library and found.itemsize == 1 and (narrow or len(pools) == 1 or pools[0].kind == "max")
        ):
            step = PoolStep(found, pools[0], wide=not narrow and pools[0].kind == "sum")
            perform(step, self.threads)
            found, pools = step.out, pools[1:]
        if pools:
            self.native, found = False, pool(found, pools, (1, 2))
        return found.astype(np.int8 if signed else np.uint8, copy=False) if narrow else found

    def _convolve(self, synapse: Synapse, levels: Integers, out: NDArray[np.int32]) -> NDArray[np.int32]:
        prepared = self.runner.prepared[synapse.name]
        choice = self.choices.get(synapse.name)
        if choice is None:
            density = self._activity(synapse, levels)().bits / levels.size
            choice = self.choices[synapse.name] = prepared.choose(self.engine, levels, density)
        assert choice.kernel != "torch"
        conv = prepared.conv(choice.kernel)
        if isinstance(conv, PackedConv):
            step = conv.step(levels, choice.method, self.backend, out, prepared.largest)
            perform(step, self.threads)
            self.counted[synapse.name] = step.counts
            found = step.out
        else:
            found, counts = conv.run(levels, choice.method, self.backend, self.threads, out, prepared.largest)
            self.native, self.counted[synapse.name] = False, partial(_same, counts)
        if choice.method == "dense":
            self.counted[synapse.name] = partial(_same, dense_counts(synapse, len(levels)))
        return found

    def _shortcut(self, synapse: Synapse) -> Integers:
        """What an identity synapse reads; it makes one addition for each set bit, as one with fan-out 1."""
        levels = self._read(synapse)
        self.counted[synapse.name] = partial(_identity_counts, self._activity(synapse, levels))
        return levels

    def _activity(self, synapse: Synapse, levels: Integers) -> Callable[[], Emitted]:
        """Active inputs and set bits of what a synapse reads; a layer's own are known from its neurons."""
        known = None if synapse.pools else self.activity.get(synapse.source)
        return partial(emitted, levels) if known is None else known

    def _readout(self) -> NDArray[np.int64]:
        net = self.runner.network
        logits: NDArray[np.int64] = np.tile(net.readout.bias.astype(np.int64), (self.batch, 1))
        fresh: NDArray[np.int64] | None = net.readout.bias  # the first native step writes it, for every replay anew
        for synapse in net.readout.synapses:
            read = self._read(synapse)
            method = "dense" if self.engine == "dense" else "bitplane"
            reason = "asked for" if self.engine != "auto" else "always by planes"
            largest = net.largest(synapse) * net.timesteps
            head = self.runner.heads.get(synapse.name)
            if head is not None and self.by_library and self.native and head.takes(read):
                self.choices[synapse.name] = Choice("native", "bitplane", reason)
                step = ReadoutStep(read, head.rows, fresh, logits, net.timesteps, largest, self.backend)
                perform(step, self.threads)
                self.counted[synapse.name], fresh = step.counts, None
                continue
            self.native = False
            summed = read.reshape(net.timesteps, self.batch, *read.shape[1:]).sum(0, dtype=np.int64)
            if head is None:
                self.counted[synapse.name] = partial(_identity_counts, partial(emitted, summed))
                logits += summed[:, 0, 0] * synapse.weight
                continue
            self.choices[synapse.name] = Choice("numpy", method, reason)  # type: ignore[arg-type]
            found, counts = head.numpy.run(summed, method, self.backend, largest=largest)  # type: ignore[arg-type]
            self.counted[synapse.name] = partial(
                _same, dense_counts(synapse, self.batch) if method == "dense" else counts
            )
            logits += found[:, 0, 0]
        return logits


def _same(found: Any) -> Any:
    return found


def dense_counts(synapse: Synapse, passes: int) -> Counts:
    """Of a synapse whose weights were multiplied with everything it reads, so many times."""
    return Counts(products=passes * synapse.valid_macs)


def _identity_counts(activity: Callable[[], Emitted]) -> Counts:
    found = activity()
    return Counts(accumulations=found.bits, neurons_active=found.active)
