"""What the paper's cost table leaves out: integer prices, state updates, shortcuts, memory, rivals, break-even. No torch.

From an `Account` and a `Technology`. Three regimes, each including the one before: `paper` (its arithmetic, integer
accumulations priced as float adds), `integer` (the same arithmetic at integer prices, with everything a neuron and a
shortcut do), `memory` (and the bytes moved, for a named hierarchy). All energies are modelled.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lbq.counting.operations import Account, Count, Operations, energy_mj
from lbq.counting.technology import DEFAULT, Technology

STATE_BYTES = 8  # a 32-bit membrane read and written
FLOAT_BYTES = 4
PLANES, SIGNED, UNARY = "bit planes", "signed digits", "binary at equal slots"


@dataclass(frozen=True)
class Line:
    """One kind of work in one image: how many, at which price (pJ), in which regime it is counted first."""

    what: str
    count: float
    price: float
    regime: str
    scales: bool = False  # in proportion to the density of set bits

    @property
    def microjoules(self) -> float:
        return 1e-6 * self.count * self.price


@dataclass(frozen=True)
class Method:
    """One way to compute the same classes. paper_uj: in the paper's regime, None where it has no place there."""

    name: str
    note: str
    paper_uj: float | None
    lines: tuple[Line, ...]

    @property
    def integer_uj(self) -> float:
        return sum(line.microjoules for line in self.lines if line.regime == "integer")

    @property
    def memory_uj(self) -> float:
        return sum(line.microjoules for line in self.lines)


@dataclass(frozen=True)
class BreakEven:
    """Set bits per synapse and timestep at which bit planes cost what a rival costs; None where they always cost more, infinite
    where nothing in their cost grows with it. most: set bits that a level can have."""

    rival: str
    regime: str
    density: float | None
    most: int

    @property
    def text(self) -> str:
        if self.density is None:
            return "dearer at any density"
        return "cheaper at any density" if self.density > self.most else f"{self.density:.3f}"


@dataclass(frozen=True)
class Costs:
    """methods: ours first. shifts: by backend, with Horner's on its own line. reading: µJ as tools count that take a level
    above 1 for a MAC. density: set bits per synapse and timestep."""

    technology: Technology
    methods: tuple[Method, ...]
    shifts: tuple[Line, ...]
    reading: Line
    density: float
    break_even: tuple[BreakEven, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "modelled": True,
            "technology": self.technology.to_dict(),
            "methods": [
                {**asdict(m), "integer_uj": m.integer_uj, "memory_uj": m.memory_uj} for m in self.methods
            ],
            "shifts": [{**asdict(line), "microjoules": line.microjoules} for line in self.shifts],
            "other_tools": {**asdict(self.reading), "microjoules": self.reading.microjoules},
            "density": self.density,
            "break_even": [{**asdict(b), "density": _finite(b.density), "text": b.text} for b in self.break_even],
        }  # fmt: skip


def costs(account: Account, technology: Technology = DEFAULT) -> Costs:
    """Of border-exact counts (`mode="exact"`)."""
    total = account.total
    planes = account.level_bits or account.n_max.bit_length()
    neuron_steps = account.timesteps * account.neurons
    hidden = sum(count.macs for count in account.synapses.values())  # synapse-steps
    own = account.executed
    density = own / hidden if hidden else 0.0

    def spiking(name: str, note: str, count: float, formations: float, slots: int = 1, bits: int = planes) -> Method:
        """slots: timesteps for each of ours; bits: of a level that is sent."""
        sent = neuron_steps * slots * bits / 8
        shortcuts = _of(account.shortcut_total, name, account.unit_events)
        lines = (
            Line("first layer, 8-bit MACs", account.fp_macs, technology.int8_mac, "integer"),
            Line("synaptic accumulations", count, technology.int32_add, "integer", True),
            Line("formation of planes", formations, technology.int32_add, "integer", True),
            Line("identity shortcuts, additions", shortcuts, technology.int32_add, "integer"),
            Line("sums over windows and time, additions", account.pool_adds, technology.int32_add, "integer"),
            Line(f"state updates, {3 + bits} instructions each", neuron_steps * slots * (3 + bits),
                 technology.int32_add, "integer"),
            Line("weight bytes of the first layer", account.fp_macs / technology.weight_reuse, technology.weight_byte,
                 "memory"),
            Line("weight bytes", count / technology.weight_reuse, technology.weight_byte, "memory", True),
            Line("membrane bytes", neuron_steps * slots * STATE_BYTES, technology.state_byte, "memory"),
            Line("level bytes, written and read", 2 * sent, technology.state_byte, "memory"),
        )  # fmt: skip
        paper = energy_mj(Operations(account.fp_macs, count, formations), technology.paper)
        return Method(name, note, 1e3 * paper, lines)

    def dense(name: str, note: str, price: float, weight: float, activation: float, paper: float | None) -> Method:
        """weight, activation: their bytes."""
        macs, sent = account.ann_macs, account.neurons * activation
        lines = (
            Line("MACs", macs, price, "integer"),
            Line("weight bytes", macs * weight / technology.weight_reuse, technology.weight_byte, "memory"),
            Line("activation bytes, written and read", 2 * sent, technology.state_byte, "memory"),
        )
        return Method(name, note, paper, lines)

    formed = 0.0 if account.unit_events else total.formations
    ours = spiking(PLANES, "one addition for each event" if account.unit_events else "as executed", own, formed)
    methods = [ours]
    if not account.unit_events:
        methods += [
            spiking(SIGNED, "7 = 8 - 1: fewer terms at 7, 14, 15", total.signed_digits, formed),
            spiking(UNARY, f"the same levels as single spikes in {account.n_max} slots for each timestep", total.unary, 0.0,
                    account.n_max, 1),
        ]  # fmt: skip
    summed = f", over the sum of the {account.frames} frames" if account.frames > 1 else ""
    fp32 = 1e3 * energy_mj(Operations(account.ann_macs), technology.paper)
    methods += [
        dense("ANN, fp32", "the paper's reference" + summed, technology.fp32_mac, FLOAT_BYTES, FLOAT_BYTES, fp32),
        dense("ANN, int8", "8-bit weights and activations" + summed, technology.int8_mac, 1, 1, None),
        dense("quantised ANN, as many levels", f"one pass{summed}, dense, 8-bit weights, activations of "
              f"{planes} bit{'s' * (planes > 1)}; its zeros are not skipped", technology.int8_mac, 1, planes / 8, None),
    ]  # fmt: skip
    return Costs(
        technology=technology,
        methods=tuple(methods),
        shifts=(
            Line("pre-shifted weights", 0, technology.shift, "integer"),
            Line("fused into the accumulation", 0, technology.shift, "integer"),
            Line("explicit, one for each accumulation above plane 0", account.shifts("explicit"), technology.shift, "integer"),
            Line("Horner, one for each output and plane above 0", account.shifts("horner"), technology.shift, "integer"),
        ),
        reading=Line("levels above 1 as MACs", 0.0 if account.unit_events else total.events, technology.fp32_mac, "paper"),
        density=density,
        break_even=_break_even(ours, methods, density, most_set_bits(account.n_max)),
    )  # fmt: skip


def most_set_bits(n_max: int) -> int:
    """That a level up to n_max can have."""
    return (n_max + 1).bit_length() - 1


def _of(count: Count, name: str, unit_events: bool) -> float:
    if unit_events:
        return count.events
    return {SIGNED: count.signed_digits, UNARY: count.unary}.get(name, count.bit_sparse)


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _break_even(ours: Method, methods: list[Method], density: float, most: int) -> tuple[BreakEven, ...]:
    """The density at which our cost, of which a part is in proportion to it, meets the rival's."""
    found = []
    for regime in ("integer", "memory"):
        counted = [line for line in ours.lines if regime == "memory" or line.regime == "integer"]
        variable = sum(line.microjoules for line in counted if line.scales)
        fixed = sum(line.microjoules for line in counted if not line.scales)
        for rival in methods:
            if rival.name in (PLANES, SIGNED, UNARY):
                continue
            room = (rival.memory_uj if regime == "memory" else rival.integer_uj) - fixed
            meets = None if room <= 0 else density * room / variable if variable else math.inf
            found.append(BreakEven(rival.name, regime, meets, most))
    return tuple(found)
