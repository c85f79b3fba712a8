"""What a spiking network costs: accumulations, bit-plane formations, shifts, and a modelled energy. NumPy only.

Counts come from recorded levels and a `Graph`, per synapse and in total, in two ways:

- `exact`: every synapse at its valid positions only (borders exact), the head once, on its integer sums over window and
  time;
- `rate`: mean over a layer times its MACs, padded taps included, the way the paper and most of the literature count.

Real-valued MACs are counted in the same way, so that ratios compare like with like.
All counts are per image and summed over timesteps. Every energy is modelled, never measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lbq.counting.products import as_counts, worths
from lbq.counting.tally import Read, Tallies
from lbq.engine.convolution import BACKENDS, Backend
from lbq.errors import GraphError
from lbq.graph import INPUT, Graph, Synapse
from lbq.graph.integer import IntegerNetwork
from lbq.graph.levels import popcount as popcount

Mode = Literal["exact", "rate"]
PAPER_BACKENDS: tuple[Backend, ...] = ("preshifted", "fused", "explicit")  # the engine has Horner's scheme beside them


@dataclass(frozen=True)
class Energies:
    """Energy of one operation in picojoules, 45 nm CMOS at 0.9 V (M. Horowitz, ISSCC 2014).

    fp_mac and accumulate: a 32-bit floating-point multiply-add and add; the paper prices an integer accumulation as the
    latter. formation and shift: not in that table; priced as a 32-bit integer add, which the paper takes for formations.
    """

    fp_mac: float = 4.6
    accumulate: float = 0.9
    formation: float = 0.1
    shift: float = 0.1


HOROWITZ = Energies()


@dataclass(frozen=True)
class Operations:
    """Operation counts of one image, as the paper's energy model takes them (Eq. energy_proxy)."""

    fp_macs: float = 0.0
    accumulations: float = 0.0
    formations: float = 0.0
    shifts: float = 0.0


def energy_mj(ops: Operations, table: Energies = HOROWITZ, q: float = 1.0) -> float:
    """Modelled arithmetic energy in millijoules (Eq. energy_proxy, plus E_shift * shifts where a backend issues them).

    q: integer instructions per formation. Memory, routing and state updates are not in it.
    """
    prices: object = table
    if not isinstance(prices, Energies):
        remedy = ": give its .paper" if hasattr(prices, "paper") else ""
        raise TypeError(f"table must be lbq.counting.operations.Energies, got {type(prices).__name__}{remedy}")
    picojoules = (
        table.fp_mac * ops.fp_macs
        + table.accumulate * ops.accumulations
        + table.formation * q * ops.formations
        + table.shift * ops.shifts
    )
    return picojoules * 1e-9


def saved(few: float, many: float) -> float:
    """Percent of `many` that `few` leaves out."""
    return 100 * (1 - few / many) if many else 0.0


@dataclass
class Count:
    """Counts of one synapse, or a total. Floats, because they are per image.

    unary: sum of F_j |S_j| (Eq. unary_acs); bit_sparse: sum of F_j popcount(S_j) and formations: sum of popcount(S_j)
    (Eq. bit_sparse_acs); shifts: accumulations from planes k >= 1 (Eq. explicit_shifts); events: sum of F_j [S_j != 0],
    the unit-event count of binary and ternary networks; signed_digits: as bit_sparse, with each level in its shortest
    signed binary form (7 = 8 - 1).
    """

    unary: float = 0.0
    bit_sparse: float = 0.0
    shifts: float = 0.0
    events: float = 0.0
    formations: float = 0.0
    macs: float = 0.0
    signed_digits: float = 0.0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Count)))


@dataclass(frozen=True)
class LayerActivity:
    """What a layer's neurons did: share of neuron-steps with S != 0, mean |S|, mean popcount."""

    active: float
    mean_level: float
    mean_popcount: float


@dataclass(frozen=True)
class Account:
    """Counts per image.

    synapses: the weighted connections, and `products` of levels with levels, which alone are in `total`, as in the paper's
    sum. shortcuts: the residual identities (fan-out 1). pool_adds: additions of non-zero levels into sums over windows and
    time. stem: the first layer on pixel planes, where pixels were given; it is priced as MACs, as in the paper. ann_macs:
    of the same network as an ANN, in one pass; of event frames, over their sum. mixing_macs: of currents that are mixed
    over time, T * T for each neuron of LM-HT.
    """

    mode: Mode
    images: int
    fp_macs: float
    ann_macs: float
    synapses: dict[str, Count]
    shortcuts: dict[str, Count]
    layers: dict[str, LayerActivity]
    formations: dict[str, float]
    pool_adds: float
    unit_events: bool
    stem: dict[str, Count] = field(default_factory=dict)
    timesteps: int = 1
    frames: int = 1  # that the first layer reads, one after the other; 1 in older files
    neurons: int = 0  # per timestep
    n_max: int = 1  # the highest level of any layer
    outputs: int = 0  # accumulators that weighted synapses fill, the first layer's left out, over all timesteps
    level_bits: int = 0  # of a level as it is sent, with its sign; 0 in older files
    horner: float = 0.0  # shifts where planes are added from the highest down, one for each output and plane above 0
    mixing_macs: float = 0.0  # absent from older files
    products: tuple[str, ...] = ()  # those of `synapses` that multiply levels with levels, in the order (Q K^T) V

    @property
    def total(self) -> Count:
        total = sum(self.synapses.values(), Count())
        total.formations = sum(self.formations.values())
        return total

    def own(self, count: Count) -> float:
        """The accumulations that this network executes: one for each unit event, or for each set bit of levels."""
        return count.events if self.unit_events else count.bit_sparse

    @property
    def executed(self) -> float:
        return self.own(self.total)

    @property
    def product_total(self) -> Count:
        """Of attention and gates, which read no weights."""
        return sum((self.synapses[name] for name in self.products), Count())

    @property
    def shortcut_total(self) -> Count:
        return sum(self.shortcuts.values(), Count())

    def shifts(self, backend: Backend) -> float:
        """Shift instructions: Eq. explicit_shifts for `explicit`, of accumulators for `horner`, else none."""
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if backend == "horner":
            return self.horner if self.level_bits else self.outputs * (self.n_max.bit_length() - 1.0)
        return self.total.shifts if backend == "explicit" and not self.unit_events else 0.0

    def operations(self, backend: Backend = "preshifted") -> Operations:
        """What the paper's energy model prices. Binary and ternary events need no formation. Mixing multiplies currents, which
        the model knows as MACs only."""
        macs = self.fp_macs + self.mixing_macs
        if self.unit_events:
            return Operations(macs, self.executed)
        return Operations(macs, self.executed, self.total.formations, self.shifts(backend))

    def energy_mj(self, backend: Backend = "preshifted", table: Energies = HOROWITZ, q: float = 1.0) -> float:
        return energy_mj(self.operations(backend), table, q)

    def ann_energy_mj(self, table: Energies = HOROWITZ) -> float:
        """Modelled energy of the same network as an ANN, every connection a floating-point MAC counted in this mode."""
        return energy_mj(Operations(self.ann_macs), table)

    @property
    def active_ratio(self) -> float:
        """Mean over layers, as the paper reports it."""
        return float(np.mean([layer.active for layer in self.layers.values()]))


class Counter:
    """Accumulates counts over batches in constant memory: `add` recorded levels, then read `account()`.

    tallies: may be shared between counters of both modes; levels are then added to it, once.
    """

    def __init__(self, graph: Graph | IntegerNetwork, mode: Mode = "exact", tallies: Tallies | None = None) -> None:
        if mode not in ("exact", "rate"):
            raise ValueError(f"mode must be 'exact' or 'rate', got {mode!r}")
        self.graph, self.mode = graph, mode
        self.tallies = Tallies(graph) if tallies is None else tallies

    def add(self, levels: Mapping[str, NDArray[np.integer]] | None) -> None:
        """Levels of every layer for one batch: see `Tallies.add`."""
        self.tallies.add(levels)

    def account(self) -> Account:
        tallies, graph = self.tallies, self.graph
        if not tallies.images:
            raise GraphError("nothing was counted yet: add levels first")
        stem = [s for s in graph.synapses if s.source == INPUT]
        weighted = [s for s in graph.synapses if s.source != INPUT and s.kind == "conv"]
        reads = [self._read(s) for s in weighted]
        formed: dict[str, float] = {}
        multiplied = (Read(name) for name in sorted(tallies.products.operands))
        for read in dict.fromkeys((*reads, *multiplied)):  # once per tensor, however many synapses read it
            by_level = tallies.counts[read].sum((0, 1))
            bits = float(by_level @ popcount(np.arange(len(by_level))).astype(np.int64))
            formed[read.source] = formed.get(read.source, 0.0) + bits / tallies.images
        exact = self.mode == "exact"
        # the paper's counts have no sums in front of weights, nor do events that go one by one
        summed = dict.fromkeys(tallies.read(s) for s in graph.synapses if s.source != INPUT and s.kind != "matmul")
        added = summed if exact and not tallies.unit_events else ()
        specs = [graph.spec(layer.name) for layer in graph.layers]
        filled = [math.prod(s.out_shape) * len(tallies.counts[r]) for s, r in zip(weighted, reads, strict=True)]
        above = [0 if tallies.unit_events else tallies.largest(r).bit_length() - 1 for r in reads]  # planes above 0
        return Account(
            mode=self.mode,
            images=tallies.images,
            fp_macs=float(sum(s.valid_macs if exact else s.macs for s in stem) * graph.frames),
            ann_macs=float(graph.valid_macs if exact else graph.macs),
            synapses={s.name: self._count(s) for s in weighted} | self._products(),
            shortcuts={s.name: self._count(s) for s in graph.synapses if s.kind == "identity"},
            layers={layer.name: activity_of(tallies.by_timestep(layer.name)) for layer in graph.layers},
            formations=formed,
            pool_adds=sum(self._additions(r) for r in added if r != r.plain) / tallies.images,
            unit_events=tallies.unit_events,
            stem={s.name: self._count(s) for s in stem if Read(INPUT) in tallies.counts},
            timesteps=graph.timesteps,
            frames=graph.frames,
            neurons=graph.units,
            n_max=max(spec.n_max for spec in specs),
            outputs=sum(filled),
            level_bits=max(spec.n_max.bit_length() + spec.signed for spec in specs),
            horner=sum(outputs * planes for outputs, planes in zip(filled, above, strict=True)),
            mixing_macs=float(sum(graph.timesteps**2 * graph[name].units for name in graph.mixed_layers)),
            products=tallies.products.names,
        )

    def _products(self) -> dict[str, Count]:
        """Of attention and gates, per image."""
        tallied, macs = self.tallies.products, self.tallies.products.macs()
        if self.mode == "exact":
            counts = tallied.exact(self.tallies.images)
        else:
            means = {}
            for name in tallied.operands:
                by_level = self.tallies.counts[Read(name)].sum((0, 1))
                means[name] = worths(np.arange(len(by_level))) @ by_level / by_level.sum()
            counts = tallied.rate(means)
        numbers = {name: {key: float(value) for key, value in count.items()} for name, count in counts.items()}
        return {name: Count(macs=macs[name], **numbers[name]) for name in tallied.names}

    def _additions(self, read: Read) -> float:
        """Additions of non-zero levels into windows and over time, each into every window that holds its position."""
        tallies = self.tallies
        counts = tallies.counts[read.plain].sum(0)  # [positions, n_max + 1]
        active = counts[:, 1:].sum(1)
        if not read.sums:
            return float(active.sum())
        shape = self.graph.shape_of(read.source)
        for pool in read.maxima:
            shape = pool.output(shape)
        return float(active @ read.sums[0].coverage(shape).ravel())

    def _read(self, synapse: Synapse) -> Read:
        """The paper counts at the neurons' own rate, before anything is summed."""
        read = self.tallies.read(synapse)
        return read if self.mode == "exact" else read.plain

    def _count(self, synapse: Synapse) -> Count:
        """Per image."""
        tallies = self.tallies
        read = Read(INPUT) if synapse.source == INPUT else self._read(synapse)
        counts = tallies.counts[read]  # [T, positions, n_max + 1]
        passes = len(counts)
        by_level = counts.sum(0)
        if self.mode == "exact":
            weight = synapse.fan_out().ravel().astype(np.float64)
        else:
            connections = synapse.macs if synapse.kind == "conv" else math.prod(synapse.in_shape)
            weight = np.full(len(by_level), connections / (synapse.in_shape[0] * len(by_level)))

        def total(worth: NDArray[Any], counts: NDArray[np.int64] = by_level) -> float:
            return float((counts @ worth.astype(np.float64)) @ weight) / tallies.images

        result = Count(
            macs=float((synapse.valid_macs if self.mode == "exact" else synapse.macs) * passes),
            **{name: total(worth) for name, worth in as_counts(worths(np.arange(by_level.shape[1]))).items()},
        )
        if tallies.unit_events and synapse.source != INPUT:
            # one accumulation for each event, also of those that meet in a sum
            events = tallies.counts[tallies.read(synapse, absolute=True)].sum(0) if self.mode == "exact" else by_level
            result.unary = result.events = total(np.arange(events.shape[1]), events)
        return result


def activity_of(by_timestep: NDArray[np.int64]) -> LayerActivity:
    """The activity of a layer with these counts of each magnitude, `[T, n_max + 1]`."""
    by_level = by_timestep.sum(0)
    worth = as_counts(worths(np.arange(len(by_level))))
    return LayerActivity(*(float(by_level @ worth[k] / by_level.sum()) for k in ("events", "unary", "bit_sparse")))


def count(
    graph: Graph | IntegerNetwork, levels: Mapping[str, NDArray[np.integer]] | None, mode: Mode = "exact"
) -> Account:
    """Counts of one batch of recorded levels, such as a network gives that is run with trace=True."""
    counter = Counter(graph, mode)
    counter.add(levels)
    return counter.account()
