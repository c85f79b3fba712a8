"""Some images through all layers of an integer network, and recordings that repeat this for other images.

Where the native library alone did the work for some images, the calls are recorded, and the next images run as one call
(see tape.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.engine import attention, numpy_kernels
from lbq.engine.convolution import Backend, Counts, Method
from lbq.engine.memory import Plan, Workspace
from lbq.engine.method import Choice, EngineName, Prepared, fallback
from lbq.engine.neuron import Emitted, LayerNeurons, emitted
from lbq.engine.products import GateStep, ProductStep
from lbq.engine.steps import PoolStep, ReadoutStep, add_step
from lbq.engine.tape import Tape, perform
from lbq.graph import INPUT, Gate, Pool, Synapse
from lbq.graph.integer import IntegerLayer, IntegerNetwork
from lbq.graph.levels import Integers, highest_level, pool

OnLevels = Callable[[str, Integers], None]  # layer, levels [T, B, C, H, W], which are overwritten later
OnMembranes = Callable[[str, int, NDArray[np.int32]], None]  # layer, timestep, membranes [B, H, W, C] before emission


class Head:
    """A readout's weights in NumPy's form and in the native one. Each form is made when it is first needed."""

    def __init__(self, synapse: Synapse) -> None:
        self.synapse = synapse

    @cached_property
    def numpy(self) -> numpy_kernels.PackedConv:
        s = self.synapse
        return numpy_kernels.PackedConv(s.weight, s.stride, s.padding, s.dilation, s.groups, np.int64)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """`[features, classes]`, features as in `[H, W, C]`."""
        weight = self.synapse.weight.astype(np.int64)
        return np.ascontiguousarray(weight.transpose(2, 3, 1, 0).reshape(-1, len(weight)))

    def native_takes(self, levels: Integers) -> bool:
        """Whether the native form can read these levels: it has one window, as large as they are."""
        s = self.synapse
        plain = s.groups == 1 and s.dilation == (1, 1) and s.padding == (0, 0) and fallback() is None
        return plain and levels.shape[1:3] == s.weight.shape[2:] and levels.dtype in (np.uint8, np.int8, np.int32)


class Program:
    """A network and what all its executions share: the plan of their memory, its synapses and neurons ready to run.

    carried: for each layer of a network of one timestep, what of its membranes `[1, H, W, C]` the next run of one input begins
        with. None: every run begins from rest.
    """

    def __init__(self, network: IntegerNetwork, carried: dict[str, NDArray[np.int32]] | None = None) -> None:
        self.network, self.carried, self.plan = network, carried, Plan(network)
        self.prepared = {
            s.name: Prepared(s, network.largest(s), network.negative(s), self._timesteps(s))
            for layer in network.layers
            for s in layer.convs
        }
        self.heads = {s.name: Head(s) for s in network.readout.convs}
        self.neurons = {layer.name: LayerNeurons(layer) for layer in network.layers}

    def _timesteps(self, synapse: Synapse) -> int:
        """How many timesteps a synapse reads: a static image's current is computed once."""
        return 1 if synapse.source == INPUT and self.network.static else self.network.timesteps


class Recording:
    """An execution that can be repeated in its workspace, for as many images with the same choices."""

    def __init__(self, execution: Execution, logits: NDArray[np.int64]) -> None:
        assert execution.tape is not None
        self.tape, self.input, self.logits = execution.tape, execution.levels[INPUT], logits
        self.counted, self.emitted = execution.counted, execution.emitted

    def run(self, x: NDArray[np.uint8], threads: int, on_levels: OnLevels | None) -> NDArray[np.int64]:
        """The logits; `on_levels` is called as in the first run."""
        self.input[...] = x.reshape(-1, *x.shape[-3:]).transpose(0, 2, 3, 1)
        start = 0
        if on_levels is not None:
            for stop, name, levels in self.emitted:
                self.tape.run(threads, start, stop)
                on_levels(name, levels)
                start = stop
        self.tape.run(threads, start)
        return self.logits.copy()


@dataclass
class Execution:
    """Some images through all layers.

    native: whether the library did all of it, without NumPy.
    activity: for each layer, what it emitted. counted: for each synapse, what it executed. Both are functions, and valid
        until the same memory is used again.
    emitted: the number of steps on the tape after which a layer's levels are there, the layer and the levels.
    """

    program: Program
    space: Workspace
    engine: EngineName
    backend: Backend
    threads: int
    choices: dict[str, Choice]
    on_levels: OnLevels | None = None
    watch: OnMembranes | None = None
    tape: Tape | None = None
    native: bool = True
    levels: dict[str, Integers] = field(default_factory=dict)
    activity: dict[str, Callable[[], Emitted]] = field(default_factory=dict)
    counted: dict[str, Callable[[], Counts]] = field(default_factory=dict)
    emitted: list[tuple[int, str, Integers]] = field(default_factory=list)
    pooled: dict[tuple[str, tuple[Pool, ...]], Integers] = field(default_factory=dict)

    def run(self, x: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The logits."""
        net = self.program.network
        x = x.reshape(-1, *net.input_shape)
        self.batch = len(x) // net.frames
        self.levels[INPUT] = x.transpose(0, 2, 3, 1).copy()
        for i, layer in enumerate(net.layers):
            self._layer(layer)
            for gate in net.gates_behind(layer.name):
                self._gate(gate)
            last = self.program.plan.last
            self.pooled = {k: v for k, v in self.pooled.items() if last[k[0]] > i}
        return self._readout()

    @property
    def by_library(self) -> bool:
        return self.engine != "dense" and fallback() is None

    def _layer(self, layer: IntegerLayer) -> None:
        net = self.program.network
        rows = net.timesteps * self.batch
        total: NDArray[np.int32] | None = None
        for synapse in layer.convs:
            levels = self._read(synapse)
            current = self._convolve(synapse, levels, self.space.current(layer, len(levels), total))
            total = current if total is None else self._sum(total, current)
        shortcuts = [self._shortcut(s) for s in layer.identities]
        products = [self._product(s) for s in layer.matmuls]
        out = self.space.levels(layer, rows)
        static = total is not None and len(total) != rows
        neurons = self.program.neurons[layer.name]
        if neurons.mixing is not None:  # in NumPy; a tape would not repeat it
            total = neurons.complete(total, shortcuts, products, out.shape, static, net.timesteps)
            neurons, shortcuts, products = neurons.for_complete_currents(), [], []
            static = self.native = False
        watch = None if self.watch is None else partial(self.watch, layer.name)
        carried = None if self.program.carried is None else self.program.carried[layer.name]
        if self.by_library and all(levels.itemsize == 1 for levels in shortcuts):
            membranes = None if watch is None else np.empty(out.shape, np.int32)
            step = neurons.step(total, shortcuts, out, static, net.timesteps, membranes, carried, products)
            perform(step, self.threads)
            self.activity[layer.name] = step.emitted
            if watch is not None and membranes is not None:
                for t, u in enumerate(np.split(membranes, net.timesteps)):
                    watch(t, u)
        else:
            activity = neurons.run(total, shortcuts, out, static, net.timesteps, watch, carried, products)
            self.native, self.activity[layer.name] = False, partial(_constant, activity)
        self.levels[layer.name] = out
        levels = out.reshape(net.timesteps, self.batch, *out.shape[1:]).transpose(0, 1, 4, 2, 3)
        self.emitted.append((0 if self.tape is None else len(self.tape.steps), layer.name, levels))
        if self.on_levels is not None:
            self.on_levels(layer.name, levels)

    def _product(self, synapse: Synapse) -> NDArray[np.int32]:
        """The sums of products of levels that a synapse's weight meets, `[T * B, H, W, C]`."""
        operands = [self.levels[source] for source in synapse.sources]
        planes = self._by_planes(synapse.name)
        if self.by_library:
            step = ProductStep(synapse, operands, planes)
            perform(step, self.threads)
            self.counted[synapse.name] = step.counts
            return step.out
        product, counts = attention.multiply(synapse, operands, self.program.network.largest(synapse), planes)
        self.native, self.counted[synapse.name] = False, partial(_constant, counts)
        return product

    def _gate(self, gate: Gate) -> None:
        """A gate's levels, right behind its last operand: the memory of operands may be used again later."""
        factor, levels = (self.levels[operand] for operand in gate.operands)
        signed, planes = self.program.network.is_signed(gate.name), self._by_planes(gate.name)
        if self.by_library:
            step = GateStep(factor, levels, signed, planes)
            perform(step, self.threads)
            self.levels[gate.name], self.counted[gate.name] = step.out, step.counts
            return
        self.levels[gate.name] = attention.gate_levels(factor, levels, signed)
        counts = attention.gate_counts(factor, levels, planes)
        self.native, self.counted[gate.name] = False, partial(_constant, counts)

    def _by_planes(self, name: str) -> bool:
        """Whether a product of levels with levels runs by bit planes; notes the choice."""
        planes = self.engine == "bitplane"
        reason = "asked for" if self.engine != "auto" else "levels with levels"
        self.choices[name] = Choice("native" if self.by_library else "numpy", "bitplane" if planes else "dense", reason)
        return planes

    def _sum(self, one: NDArray[np.int32], other: NDArray[np.int32]) -> NDArray[np.int32]:
        """The sum of two synapses' currents; a static image's current is the same at every timestep."""
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
        net = self.program.network
        signed = net.negative(synapse)
        narrow = net.largest(synapse) <= highest_level(signed)
        levels, pools = self.levels[synapse.source], synapse.pools
        while (
            pools and self.by_library and levels.itemsize == 1 and (narrow or len(pools) == 1 or pools[0].kind == "max")
        ):
            step = PoolStep(levels, pools[0], wide=not narrow and pools[0].kind == "sum")
            perform(step, self.threads)
            levels, pools = step.out, pools[1:]
        if pools:
            self.native, levels = False, pool(levels, pools, (1, 2))
        return levels.astype(np.int8 if signed else np.uint8, copy=False) if narrow else levels

    def _convolve(self, synapse: Synapse, levels: Integers, out: NDArray[np.int32]) -> NDArray[np.int32]:
        prepared = self.program.prepared[synapse.name]
        choice = self.choices.get(synapse.name)
        if choice is None:
            density = self._activity(synapse, levels)().bits / levels.size
            choice = self.choices[synapse.name] = prepared.choose(self.engine, levels, density, self.backend)
        if choice.kernel == "native":
            step = prepared.native.step(
                levels, choice.method, self.backend, out, prepared.largest, prepared.timesteps, prepared.lists
            )
            perform(step, self.threads)
            self.counted[synapse.name] = step.counts
        else:
            _, counts = prepared.numpy.run(levels, choice.method, self.backend, out, prepared.largest)
            self.native, self.counted[synapse.name] = False, partial(_constant, counts)
        if choice.method == "dense":
            self.counted[synapse.name] = partial(_constant, dense_counts(synapse, len(levels)))
        return out

    def _shortcut(self, synapse: Synapse) -> Integers:
        """The levels that an identity synapse reads. It makes one addition for each set bit: its fan-out is 1."""
        levels = self._read(synapse)
        self.counted[synapse.name] = partial(_identity_counts, self._activity(synapse, levels))
        return levels

    def _activity(self, synapse: Synapse, levels: Integers) -> Callable[[], Emitted]:
        """Active inputs and set bits of the levels that a synapse reads; its source's neurons may have counted them."""
        known = None if synapse.pools else self.activity.get(synapse.source)
        return partial(emitted, levels) if known is None else known

    def _readout(self) -> NDArray[np.int64]:
        net = self.program.network
        logits: NDArray[np.int64] = np.tile(net.readout.bias.astype(np.int64), (self.batch, 1))
        bias: NDArray[np.int64] | None = net.readout.bias  # the first native step writes it, in every replay too
        method: Method = "dense" if self.engine == "dense" else "bitplane"
        reason = "asked for" if self.engine != "auto" else "always by planes"
        for synapse in net.readout.synapses:
            levels = self._read(synapse)
            largest = net.largest(synapse) * net.timesteps
            head = self.program.heads.get(synapse.name)
            if head is not None and self.by_library and self.native and head.native_takes(levels):
                self.choices[synapse.name] = Choice("native", "bitplane", reason)
                step = ReadoutStep(levels, head.rows, bias, logits, net.timesteps, largest, self.backend)
                perform(step, self.threads)
                self.counted[synapse.name], bias = step.counts, None
                continue
            self.native = False
            summed = levels.reshape(net.timesteps, self.batch, *levels.shape[1:]).sum(0, dtype=np.int64)
            if head is None:
                self.counted[synapse.name] = partial(_identity_counts, partial(emitted, summed))
                logits += summed[:, 0, 0] * synapse.weight
                continue
            self.choices[synapse.name] = Choice("numpy", method, reason)
            currents, counts = head.numpy.run(summed, method, self.backend, largest=largest)
            if method == "dense":
                counts = dense_counts(synapse, self.batch)
            self.counted[synapse.name] = partial(_constant, counts)
            logits += currents[:, 0, 0]
        return logits


def _constant(value: Any) -> Any:
    return value


def dense_counts(synapse: Synapse, passes: int) -> Counts:
    """Counts of a synapse whose weights were multiplied with everything that it reads, in so many passes."""
    return Counts(products=passes * synapse.valid_macs)


def _identity_counts(activity: Callable[[], Emitted]) -> Counts:
    levels = activity()
    return Counts(accumulations=levels.bits, neurons_active=levels.active, additions=levels.bits)
