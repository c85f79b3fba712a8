"""What a spiking network costs: accumulations, bit-plane formations, shifts, and a modelled energy. NumPy only.

Counts come from recorded levels and a `Graph`, per synapse and in total, in two ways:

- `exact`: every synapse at its valid positions only (borders exact), the head once, on its integer sums over window and
  time;
- `rate`: mean over a layer times its MACs, the way the paper and most of the literature count (padded taps included).

Real-valued MACs, of the first layer and of the same network as an ANN, are counted in the same way, so that ratios
compare like with like.

All counts are per image and summed over timesteps. Every energy is modelled, never measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lbq.engine.levels import pool
from lbq.engine.levels import popcount as popcount
from lbq.engine.network import IntegerNetwork
from lbq.errors import GraphError
from lbq.graph import INPUT, Graph, Synapse

Mode = Literal["exact", "rate"]
Backend = Literal["preshifted", "fused", "explicit"]
BACKENDS: tuple[Backend, ...] = ("preshifted", "fused", "explicit")


@dataclass(frozen=True)
class Energies:
    """Energy of one operation in picojoules, 45 nm CMOS at 0.9 V (M. Horowitz, ISSCC 2014).

    fp_mac and accumulate are a 32-bit floating-point multiply-add and add; the paper prices an integer accumulation as
    the latter. formation and shift have no entry in that table; the paper takes the 32-bit integer add for a formation
    (times q instructions), and so do we for a shift.
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
    picojoules = (
        table.fp_mac * ops.fp_macs
        + table.accumulate * ops.accumulations
        + table.formation * q * ops.formations
        + table.shift * ops.shifts
    )
    return picojoules * 1e-9


@dataclass
class Count:
    """Counts of one synapse, or a total. Floats, because they are per image.

    unary: sum of F_j |S_j| (Eq. unary_acs); bit_sparse: sum of F_j popcount(S_j) and formations: sum of popcount(S_j)
    (Eq. bit_sparse_acs); shifts: accumulations from planes k >= 1 (Eq. explicit_shifts); events: sum of F_j [S_j != 0],
    the unit-event count of binary and ternary networks.
    """

    unary: float = 0.0
    bit_sparse: float = 0.0
    shifts: float = 0.0
    events: float = 0.0
    formations: float = 0.0
    macs: float = 0.0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Count)))

    def scaled(self, factor: float) -> Count:
        return Count(*(getattr(self, f.name) * factor for f in fields(Count)))

    @property
    def reduction(self) -> float:
        """Percent of the unary accumulations that bit-sparse execution saves."""
        return 100 * (1 - self.bit_sparse / self.unary) if self.unary else 0.0


@dataclass(frozen=True)
class LayerActivity:
    """What a layer's neurons did: share of neuron-steps with S != 0, mean |S|, mean popcount."""

    active: float
    mean_level: float
    mean_popcount: float


@dataclass(frozen=True)
class Account:
    """Counts per image.

    synapses holds the weighted connections; shortcuts the residual identities (fan-out 1) and pool_adds the additions
    of non-zero levels into sums over windows and time, both of which the paper's sum leaves out, and `total` therefore
    too. stem: the first layer on pixel planes, where pixels were given; the paper prices it as MACs, and so do we.
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

    @property
    def total(self) -> Count:
        total = sum(self.synapses.values(), Count())
        total.formations = sum(self.formations.values())
        return total

    @property
    def shortcut_total(self) -> Count:
        return sum(self.shortcuts.values(), Count())

    def shifts(self, backend: Backend) -> float:
        """Explicit shift instructions: Eq. explicit_shifts for `explicit`, none where weights are pre-shifted or the
        shift is fused into the accumulation."""
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        return self.total.shifts if backend == "explicit" and not self.unit_events else 0.0

    def operations(self, backend: Backend = "preshifted") -> Operations:
        """What the paper's energy model prices. Binary and ternary events need no formation."""
        total = self.total
        if self.unit_events:
            return Operations(self.fp_macs, total.events)
        return Operations(self.fp_macs, total.bit_sparse, total.formations, self.shifts(backend))

    def energy_mj(self, backend: Backend = "preshifted", table: Energies = HOROWITZ, q: float = 1.0) -> float:
        return energy_mj(self.operations(backend), table, q)

    @property
    def ann_energy_mj(self) -> float:
        """Modelled energy of the same network as an ANN, every connection a floating-point MAC counted in this mode."""
        return energy_mj(Operations(self.ann_macs))

    @property
    def active_ratio(self) -> float:
        """Mean over layers, as the paper reports it."""
        return float(np.mean([layer.active for layer in self.layers.values()]))


class Counter:
    """Accumulates counts over batches in constant memory: `add` recorded levels, then read `account()`."""

    def __init__(self, graph: Graph | IntegerNetwork, mode: Mode = "exact") -> None:
        if mode not in ("exact", "rate"):
            raise ValueError(f"mode must be 'exact' or 'rate', got {mode!r}")
        self._unit_events = all(graph.spec(layer.name).n_max == 1 for layer in graph.layers)
        self.graph, self.mode, self.images = graph, mode, 0
        self._synapses = {s.name: s for s in graph.synapses}
        self._summed = {s.name for s in graph.readout.synapses} if mode == "exact" else set()
        self._counts = {name: Count() for name in self._synapses}
        self._formations: dict[str, float] = {}
        self._pool_adds = 0.0
        self._activity = {layer.name: np.zeros(4) for layer in graph.layers}

    def add(self, levels: Mapping[str, NDArray[np.integer]]) -> None:
        """Levels of every layer for one batch, `[T, B, C, H, W]` or with the last three flattened.

        Levels of the source `input` are pixels, `[1, B, C, H, W]` for a static image; they may be left out.
        """
        shaped = {INPUT: np.asarray(levels[INPUT]).astype(np.int64)} if INPUT in levels else {}
        for layer in self.graph.layers:
            if layer.name not in levels:
                raise GraphError(f"no levels were recorded for layer {layer.name!r}")
            level = np.asarray(levels[layer.name]).astype(np.int64)
            if level.shape[0] != self.graph.timesteps or math.prod(level.shape[2:]) != layer.units:
                expected = f"[{self.graph.timesteps}, B, {', '.join(map(str, layer.shape))}]"
                raise GraphError(f"levels of layer {layer.name!r} must be {expected}, got {list(level.shape)}")
            shaped[layer.name] = level.reshape(*level.shape[:2], *layer.shape)
            bits = popcount(level)
            self._activity[layer.name] += [(level != 0).sum(), np.abs(level).sum(), bits.sum(), level.size]
        formed: dict[tuple[object, ...], float] = {}
        for name, synapse in self._synapses.items():
            if synapse.source in shaped:
                self._counts[name] += self._count(synapse, shaped[synapse.source], formed)
        for key, value in formed.items():
            source = str(key[0])
            self._formations[source] = self._formations.get(source, 0.0) + value
        self.images += next(iter(shaped.values())).shape[1]

    def _count(self, synapse: Synapse, level: NDArray[np.int64], formed: dict[tuple[object, ...], float]) -> Count:
        steps, batch = level.shape[:2]
        maxima = tuple(p for p in synapse.pools if p.kind == "max")  # they come first: an average cannot be max-pooled
        sums = synapse.pools[len(maxima) :] if self.mode == "exact" else ()  # the paper counts at the neurons' own rate
        over_time = synapse.name in self._summed and steps > 1
        level = pool(level.reshape(-1, *level.shape[2:]), maxima)
        if (sums or over_time) and synapse.kind == "conv":
            self._pool_adds += float((level != 0).sum())

        def summed(values: NDArray[Any]) -> NDArray[Any]:
            values = pool(values, sums)
            return values.reshape(steps, batch, *values.shape[1:]).sum(0) if over_time else values

        magnitude = np.abs(summed(level))
        bits, events = popcount(magnitude), (magnitude != 0).astype(np.int64)
        shifted = bits - (magnitude & 1)
        if self._unit_events:  # one accumulation for each event, also of those that meet in a sum
            magnitude = events = summed(np.abs(level))
        if synapse.kind == "conv" and synapse.source != INPUT:
            # once per tensor, however many synapses read it
            formed[synapse.source, maxima, sums, over_time] = float(bits.sum())

        if self.mode == "exact" or synapse.kind == "identity":
            weight = synapse.fan_out().astype(np.float64)
        else:
            weight = np.array(synapse.macs * steps * batch / magnitude.size)

        def total(values: NDArray[Any]) -> float:
            return float((values.sum((0, 1), dtype=np.int64) * weight).sum())

        macs = synapse.valid_macs if self.mode == "exact" else synapse.macs
        times = batch if over_time else steps * batch
        return Count(total(magnitude), total(bits), total(shifted), total(events), macs=float(macs * times))

    def account(self) -> Account:
        if not self.images:
            raise GraphError("nothing was counted yet: add levels first")
        per_image = {name: count.scaled(1 / self.images) for name, count in self._counts.items()}
        graph = self.graph
        stem = [s for s in graph.synapses if s.source == INPUT]

        def macs(synapses: Iterable[Synapse]) -> int:
            return sum(s.valid_macs if self.mode == "exact" else s.macs for s in synapses)

        return Account(
            mode=self.mode,
            images=self.images,
            fp_macs=float(macs(stem) * (1 if graph.static else graph.timesteps)),
            ann_macs=float(macs(graph.synapses)),
            synapses={n: c for n, c in per_image.items() if self._kind(n) == "conv"},
            shortcuts={n: c for n, c in per_image.items() if self._kind(n) == "identity"},
            layers={
                name: LayerActivity(*(sums[:3] / sums[3]))
                for name, sums in self._activity.items()
            },
            formations={name: value / self.images for name, value in self._formations.items()},
            pool_adds=self._pool_adds / self.images,
            unit_events=self._unit_events,
            stem={n: c for n, c in per_image.items() if self._kind(n) == "stem"},
        )  # fmt: skip

    def _kind(self, name: str) -> str:
        """conv, identity, stem where it read pixels that were given, or nothing."""
        synapse = self._synapses[name]
        if synapse.source == INPUT:
            return "stem" if self._counts[name].macs else ""
        return synapse.kind


def count(graph: Graph | IntegerNetwork, levels: Mapping[str, NDArray[np.integer]], mode: Mode = "exact") -> Account:
    """Counts of one batch of recorded levels."""
    counter = Counter(graph, mode)
    counter.add(levels)
    return counter.account()


@dataclass(frozen=True)
class CostRow:
    """One line of the paper's cost table. Counts per image; a None is printed as N/A."""

    method: str
    accuracy: float
    operations: Operations
    spiking: bool = True
    bit_planes: bool = True


def cost_table(rows: Iterable[CostRow], table: Energies = HOROWITZ) -> list[dict[str, str]]:
    """The paper's "accuracy and modelled arithmetic cost" table, formatted to its digits; the first row is the ANN."""
    rows = list(rows)
    reference = energy_mj(rows[0].operations, table)
    out = []
    for row in rows:
        energy = energy_mj(row.operations, table)
        out.append(
            {
                "Method": row.method,
                "ACC (%)": f"{row.accuracy:.2f}",
                "FP MACs (M)": f"{row.operations.fp_macs / 1e6:.2f}",
                "Synaptic ACs (M)": f"{row.operations.accumulations / 1e6:.2f}" if row.spiking else "N/A",
                "Formation ops (M)": f"{row.operations.formations / 1e6:.3f}" if row.bit_planes else "N/A",
                "Modelled energy (mJ)": f"{energy:.2f}",
                "ANN energy / energy": f"{reference / energy:.2f}" if row.spiking else "--",
            }
        )
    return out
