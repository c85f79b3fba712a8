"""An integer network: artefacts hold it and engines run it. docs/explanation/integers.md defines its semantics.

At every timestep a layer computes, for each output channel c in its own unit q_c / 2^f,

    U = leak(V) + ((sum of W * S) << f) + bias + (sum of identity * S) + (sum of s * (Q K^T) V) - pending
    S = how many thresholds U reaches;  V = U - reset where S > 0

on int32, with W in int8 or int16. What is added to leak(V) - pending is the current. LM-HT mixes the currents of all timesteps
first. The readout sums levels over time first and then computes once, in int64.
NumPy only.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.errors import GraphError
from lbq.graph import INPUT, Layered, Synapse
from lbq.graph.graph import AnyLayer
from lbq.graph.levels import row_sums
from lbq.graph.rules import Reset

MEMBRANE_BOUND = 2**30  # |U| and |V| are proved to stay below it
FLOAT32_BOUND = 2**24  # integers below it add up exactly in float32
FLOAT64_BOUND = 2**53
SUM_BOUND = 2**31  # of pooled levels
LEAST_THRESHOLD = 64  # rounding would move a smaller first threshold by nearly a percent or more
LARGEST_PIXEL = 255  # inputs are uint8
MOST_STEPS_UP = 4096  # up to the last threshold, where membranes are measured in steps
MOST_LAYERS = 4096
MOST_SYNAPSES = 64  # that lead to one layer
MOST_POOLS = 8  # one after another, in front of one synapse
MOST_TIMESTEPS = 4096  # as configurations have it too, of which engines know nothing
MOST_UNITS = 2**28  # of one layer, over all timesteps
MOST_FRACTION = 20  # fractional bits of a membrane
MOST_LEAK = 16  # the k of a leak m / 2^k, and the fractional bits of a mixing
MOST_MIXED_STEPS = 64  # timesteps of a network that mixes them: a file's description has T * T numbers for each layer
LARGEST_MIXING = 2  # 2 sigmoid(M) / T is below it; a leak beside a mixing too


@dataclass(frozen=True)
class Mixing:
    """Currents mixed over time, as LM-HT does: (sum over j of weights[t, j] * current[j]) / 2^bits, rounding half up.

    weights: int32 `[T, T]`, from 0 to 2^(bits + 1). Sums are int64.
    """

    weights: NDArray[np.int32]
    bits: int

    def bounds(self, most: NDArray[np.int64]) -> NDArray[np.int64]:
        """`[T, ...]`: the most that mixed currents can be at each timestep, where no current exceeds `most`."""
        sums = self.weights.astype(np.int64).sum(1)
        return (np.multiply.outer(sums, most) + (1 << (self.bits - 1))) >> self.bits

    def of(self, currents: NDArray[np.int32]) -> NDArray[np.int32]:
        """Mixed currents of `currents` [T, ...]."""
        mixed = np.empty_like(currents)
        for t, row in enumerate(self.weights.tolist()):
            total = np.full(currents.shape[1:], 1 << (self.bits - 1), np.int64)
            for weight, current in zip(row, currents, strict=True):
                total += weight * current.astype(np.int64)
            mixed[t] = total >> self.bits
        return mixed


@dataclass(frozen=True)
class IntegerNeuron:
    """A neuron on integers.

    thresholds: int32 `[C, n_max]`, not decreasing; S counts those that U reaches (|U| where `signed`, S then having
        U's sign). One at `MEMBRANE_BOUND` is never reached.
    reset: int32 `[C]`; subtracted where S != 0 (`once`, with the sign of S), times S (`level`), or not used where the
        membrane becomes 0 (`hard`).
    leak: (m, k) multiplies the membrane by m / 2^k, rounding half up; None: no leak.
    decay_reset: False subtracts the reset at the next timestep, after the leak.
    mixing: where it mixes the currents of all timesteps first. Its leak is then below 2, else at most 1.
    """

    n_max: int
    signed: bool
    thresholds: NDArray[np.int32]
    reset: NDArray[np.int32]
    reset_kind: Reset
    leak: tuple[int, int] | None
    decay_reset: bool
    mixing: Mixing | None = None

    @property
    def planes(self) -> int:
        """K = ceil(log2(n_max + 1))."""
        return self.n_max.bit_length()

    @property
    def steps(self) -> NDArray[np.float64]:
        """The distance between thresholds, for each channel.

        It is the mean distance, or the first threshold itself where there is one only or where they are too close together
        to be a unit. It is infinite for a channel that never fires. A channel that cannot reach all thresholds takes the
        proportion between distance and first threshold from the channels that reach most.
        """
        thresholds = self.thresholds.astype(np.float64)
        reached = (self.thresholds < MEMBRANE_BOUND).sum(1)
        highest = max(int(reached.max()), 1)
        first, last = thresholds[:, 0], thresholds[:, highest - 1]
        apart = (last - first) / (highest - 1) if highest > 1 else first
        whole, complete = np.where(MOST_STEPS_UP * apart >= last, apart, first), reached == reached.max()
        steps = np.where(complete, whole, first * np.median(whole[complete] / first[complete]))
        return np.where(reached > 0, steps, np.inf)

    @property
    def dtype(self) -> type[np.uint8] | type[np.int8]:
        """The type of its levels."""
        return np.int8 if self.signed else np.uint8


@dataclass(frozen=True)
class IntegerLayer(AnyLayer):
    """One layer on integers; the readout has no neuron.

    bias: int32 `[C]`, or `[C, H, W]` where the layer reads pixels; int64 `[C]` in the readout.
    unit: q_c `[C]`, the value of one unit of a current in the trained network; only reports use it.
    """

    fraction: int
    neuron: IntegerNeuron | None
    unit: NDArray[np.float64]

    @property
    def convs(self) -> tuple[Synapse, ...]:
        return tuple(s for s in self.synapses if s.kind == "conv")

    @property
    def identities(self) -> tuple[Synapse, ...]:
        return tuple(s for s in self.synapses if s.kind == "identity")

    @property
    def matmuls(self) -> tuple[Synapse, ...]:
        return tuple(s for s in self.synapses if s.kind == "matmul")


@dataclass(frozen=True)
class Exits:
    """Where inputs may stop early. After timestep t = 1..T-1 an input is done if its largest logit leads the second by at least
    margins[t - 1]; ties lead by 0.

    bias: int64 `[T - 1, classes]`, the readout's for sums over so many timesteps.
    shares: of the inputs that the margins were chosen on, how many went on after each of these timesteps. source: what these
    inputs were.
    """

    margins: tuple[int, ...]
    bias: NDArray[np.int64]
    shares: tuple[float, ...]
    source: str


@dataclass(frozen=True)
class IntegerNetwork(Layered[IntegerLayer]):
    """A whole network on uint8 inputs: pixels `[B, C, H, W]` where `static`, else event frames `[T, B, C, H, W]`.

    scale: the logit that one unit of the readout stands for. input_max: the largest pixel value in the training data
    (255 but for a few datasets). facts: where the network came from, as JSON values. exits: None where all timesteps run.
    """

    scale: float
    classes: tuple[str, ...] = ()
    input_max: int = 255
    facts: Mapping[str, Any] = field(default_factory=dict)
    exits: Exits | None = None

    def __str__(self) -> str:
        return (
            f"{self.facts.get('model', 'own network')}: {list(self.input_shape)} -> {self.readout.shape[0]} classes, "
            f"{len(self.layers)} spiking layers, T = {self.timesteps}, {self.parameters:,} weights"
        )

    def over(self, timesteps: int) -> IntegerNetwork:
        """The same layers over other timesteps, with the readout's bias for a sum over so many, rounded half up."""
        whole = self.timesteps
        bias = [(2 * b * timesteps + whole) // (2 * whole) for b in self.readout.bias.tolist()]  # exact: no overflow
        readout = replace(self.readout, bias=np.array(bias, np.int64))
        return replace(self, timesteps=timesteps, readout=readout, scale=self.scale * whole / timesteps, exits=None)

    def first(self, timesteps: int) -> IntegerNetwork:
        """The network that ends after so many of its timesteps. Levels do not depend on what comes after them."""
        if timesteps == self.timesteps:
            return replace(self, exits=None)
        shorter = self.over(timesteps)
        if self.exits is None:
            return shorter
        return replace(shorter, readout=replace(shorter.readout, bias=self.exits.bias[timesteps - 1]))

    def spec(self, name: str) -> IntegerNeuron:
        neuron = self[name].neuron
        if neuron is None:
            raise GraphError(f"layer {name!r} has no neuron")
        return neuron

    @property
    def dataset(self) -> Mapping[str, Any]:
        """What the facts say of the dataset, such as its `name`; empty where a file holds anything else."""
        stored = self.facts.get("data")
        return stored if isinstance(stored, dict) else {}

    @property
    def parameters(self) -> int:
        """Weights of convolutions and linear layers. Constants of identities, products and neurons are not among them."""
        return sum(s.weight.size for s in self.synapses if s.kind == "conv")

    def largest(self, synapse: Synapse) -> int:
        """The largest magnitude that what a synapse's weight meets can have, at one timestep: a (pooled) level or a product."""
        return largest_read(synapse, {s: LARGEST_PIXEL if s == INPUT else self.n_max(s) for s in synapse.sources})

    def negative(self, synapse: Synapse) -> bool:
        """Whether the levels that a synapse reads carry a sign."""
        return any(source != INPUT and self.is_signed(source) for source in synapse.sources)


def is_name(text: str) -> bool:
    """Whether a text can be shown and written anywhere: no control characters, no half of a character."""
    return re.fullmatch(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,200}", text) is not None


def shown_classes(classes: Sequence[str], count: int) -> tuple[str, ...]:
    """What people read for each of `count` outputs: its class's name, or its number where classes have no names.

    Classes that share a name have their numbers too, as ImageNet's two cranes do: "crane (134)" and "crane (517)".
    """
    shared = {name for name, times in Counter(classes).items() if times > 1}
    names = (f"{name} ({i})" if name in shared else name for i, name in enumerate(classes))
    return tuple(names) if classes else tuple(map(str, range(count)))


# What is proved --------------------------------------------------------------------------------------------------------


SATURATED = 2**36  # bounds end here, so that no file can make int64 overflow
STEP_WORK = 2**12  # of one timestep of a bound, in numbers that would take as long
MOST_WORK = 2**26  # of all bounds of a file: about a second


def largest_read(synapse: Synapse, levels: Mapping[str, int]) -> int:
    """The largest magnitude that a synapse's weight meets; levels: the largest of each source.

    Of a product it is tokens * N_v * d * N_q * N_k, with d channels in a head. No partial sum is larger, nor are those of
    Q K^T and K^T V: the same sums over one of the two alone. With a neuron on the scores it is d * N_q * N_k, and then
    tokens * N_a * N_v.
    """
    return math.prod(levels[source] for source in synapse.sources) * synapse.summed


def synapse_bound(synapse: Synapse, largest: int) -> NDArray[np.int64]:
    """For each output channel, the most that sum |W| * S can be: a bound of every partial sum in any order."""
    sums = row_sums(synapse.weight).astype(np.float64)
    return np.minimum(sums * largest, SATURATED).astype(np.int64)


def inflow_bound(layer: IntegerLayer, largest: Mapping[str, int]) -> NDArray[np.int64]:
    """For each channel, the most that its current of one timestep and every partial sum of that can be."""
    inflow: NDArray[np.int64] = np.abs(layer.bias.astype(np.int64)).reshape(len(layer.bias), -1).max(1)
    for synapse in layer.synapses:
        shift = layer.fraction if synapse.kind == "conv" else 0
        inflow = inflow + (synapse_bound(synapse, largest[synapse.name]) << shift)
    return inflow


def rounded_leak(value: NDArray[np.int64], leak: tuple[int, int]) -> NDArray[np.int64]:
    """value * m / 2^k, rounding half up; int64 in and out."""
    m, k = leak
    return (value * m + (1 << (k - 1))) >> k


def membrane_bound(layer: IntegerLayer, largest: Mapping[str, int], timesteps: int) -> int:
    """The most that |U|, |V| and every partial sum of U can be at any of `timesteps`, over all channels.

    largest: for each synapse, the largest magnitude of the levels that it reads.
    """
    return max(bound for bound, _ in membrane_bounds(layer, largest, timesteps))


def membrane_bounds(layer: IntegerLayer, largest: Mapping[str, int], timesteps: int) -> Iterator[tuple[int, int]]:
    """That bound after no timestep, after one and so on, until another timestep changes nothing; and each one's work.

    Work counts numbers. A timestep costs `STEP_WORK` beside them.
    """
    neuron = layer.neuron
    if neuron is None:
        raise GraphError(f"layer {layer.name!r} has no neuron")
    inflow = inflow_bound(layer, largest)
    yield (worst := int(inflow.max(initial=0))), 0  # the currents themselves, which a mixing may make smaller
    if worst >= SATURATED:
        return
    beyond, thresholds = beyond_currents(neuron), neuron.thresholds
    steady = neuron.leak is None and neuron.mixing is None
    if steady and not beyond.any():
        yield worst * timesteps, 0
        return
    # of the channels whose resets do nothing, the one with the largest currents decides
    decides: NDArray[np.bool_] = np.asarray(beyond.any(1))
    decides[inflow.argmax()] = True
    beyond, thresholds, inflow = beyond[decides], thresholds[decides], inflow[decides]
    late = not neuron.decay_reset
    u = v = np.zeros_like(inflow)
    inflows = itertools.repeat(inflow, timesteps) if neuron.mixing is None else neuron.mixing.bounds(inflow)
    for inflow in inflows:
        before, carried = (u, v), v if neuron.leak is None else rounded_leak(v, neuron.leak)
        reached = (beyond * (thresholds <= u[:, None])).max(1) if late else 0  # by the membrane of the timestep before
        v = u = carried + inflow + reached
        if not late:
            v = np.maximum(u, (beyond * (thresholds <= u[:, None])).max(1))
        yield int(v.max(initial=0)), STEP_WORK + thresholds.size
        done = neuron.mixing is None and np.array_equal(before, (u, v))
        if done or int(v.max(initial=0)) >= SATURATED:
            return


def beyond_currents(neuron: IntegerNeuron) -> NDArray[np.int64]:
    """`[C, n_max]`: how far beyond its currents a reset takes a membrane that reached each threshold.

    A late reset, which comes a timestep after its threshold, counts whole.
    """
    if neuron.reset_kind == "hard":
        return np.zeros(neuron.thresholds.shape, np.int64)
    multiple = np.arange(1, neuron.n_max + 1) if neuron.reset_kind == "level" else np.ones(neuron.n_max, np.int64)
    drop = neuron.reset.astype(np.int64)[:, None] * multiple
    return np.maximum(drop - neuron.thresholds, 0) if neuron.decay_reset else drop


def pooled_bound(network: IntegerNetwork) -> tuple[str, int]:
    """The synapse whose pooled levels may be largest, and how large. The readout's are summed over time."""
    bounds = [(network.largest(s), s.name) for layer in network.layers for s in layer.synapses]
    bounds += [(network.largest(s) * network.timesteps, s.name) for s in network.readout.synapses]
    most, name = max(bounds)
    return name, most


def readout_bound(network: IntegerNetwork) -> int:
    """The most that any logit, summed over time, can be, as files state it: each synapse adds up to `SATURATED`."""
    bound = np.abs(network.readout.bias.astype(np.int64))
    for synapse in network.readout.synapses:
        bound = bound + synapse_bound(synapse, network.largest(synapse) * network.timesteps)
    return int(bound.max(initial=0))


def readout_fits(network: IntegerNetwork) -> bool:
    """Whether no logit, summed over time, can reach 2^53, whatever its synapses add and wherever an input stops."""
    steps, bias = np.array([[network.timesteps]]), network.readout.bias[None]
    if network.exits is not None:
        steps, bias = np.arange(1, network.timesteps + 1)[:, None], np.concatenate([network.exits.bias, bias])
    most = np.abs(bias.astype(np.float64))
    for synapse in network.readout.synapses:
        most += row_sums(synapse.weight).astype(np.float64) * (network.largest(synapse) * steps)
    return bool((most < FLOAT64_BOUND).all())
