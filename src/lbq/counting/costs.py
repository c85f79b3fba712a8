"""What the paper's cost table leaves out: integer prices, state updates, shortcuts, memory, rivals, break-even. No torch.

From an `Account` and a `Technology`. Three regimes, each including the one before: `paper` (its arithmetic, integer
accumulations priced as float adds), `integer` (the same arithmetic at integer prices, with everything a neuron and a
shortcut do), `memory` (and the bytes moved, for a named hierarchy). All energies are modelled.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lbq.counting.operations import Account, Operations, energy_mj
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
    synapse_steps = sum(count.macs for count in account.synapses.values())
    density = account.executed / synapse_steps if synapse_steps else 0.0
    spiking = [_spiking_method(coding, account, technology) for coding in _codings(account)]
    dense = [_dense_method(ann, account, technology) for ann in _anns(account, technology)]
    shifts = {
        "pre-shifted weights": 0,
        "fused into the accumulation": 0,
        "explicit, one for each accumulation above plane 0": account.shifts("explicit"),
        "Horner, one for each output and plane above 0": account.shifts("horner"),
    }
    macs_of_other_tools = 0.0 if account.unit_events else total.events
    return Costs(
        technology=technology,
        methods=(*spiking, *dense),
        shifts=tuple(Line(backend, count, technology.shift, "integer") for backend, count in shifts.items()),
        reading=Line("levels above 1 as MACs", macs_of_other_tools, technology.fp32_mac, "paper"),
        density=density,
        break_even=_break_even(spiking[0], dense, density, most_set_bits(account.n_max)),
    )


# Spiking networks
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Coding:
    """How levels travel, and what that adds up in one image. slots: timesteps for each of the network's; bits: of a level
    that is sent."""

    name: str
    note: str
    accumulations: float
    formations: float
    shortcuts: float
    slots: int
    bits: int


def _codings(account: Account) -> list[_Coding]:
    """Ours first; a network of single spikes has no other."""
    total, shortcuts, planes = account.total, account.shortcut_total, _planes(account)
    if account.unit_events:
        note = "one addition for each event"
        return [_Coding(PLANES, note, account.executed, 0.0, shortcuts.events, 1, planes)]
    slots, formed = account.n_max, total.formations
    spikes = f"the same levels as single spikes in {slots} slots for each timestep"
    digits = "7 = 8 - 1: fewer terms at 7, 14, 15"
    return [
        _Coding(PLANES, "as executed", account.executed, formed, shortcuts.bit_sparse, 1, planes),
        _Coding(SIGNED, digits, total.signed_digits, formed, shortcuts.signed_digits, 1, planes),
        _Coding(UNARY, spikes, total.unary, 0.0, shortcuts.unary, slots, 1),
    ]


def _spiking_method(coding: _Coding, account: Account, technology: Technology) -> Method:
    neuron_slots = account.timesteps * account.neurons * coding.slots
    instructions = 3 + coding.bits  # of a state update
    macs, added = account.fp_macs, coding.accumulations
    add, weight_byte, state_byte = technology.int32_add, technology.weight_byte, technology.state_byte
    lines = (
        Line("first layer, 8-bit MACs", macs, technology.int8_mac, "integer"),
        Line("synaptic accumulations", added, add, "integer", True),
        Line("formation of planes", coding.formations, add, "integer", True),
        Line("identity shortcuts, additions", coding.shortcuts, add, "integer"),
        Line("sums over windows and time, additions", account.pool_adds, add, "integer"),
        Line(f"state updates, {instructions} instructions each", neuron_slots * instructions, add, "integer"),
        Line("weight bytes of the first layer", macs / technology.weight_reuse, weight_byte, "memory"),
        Line("weight bytes", added / technology.weight_reuse, weight_byte, "memory", True),
        Line("membrane bytes", neuron_slots * STATE_BYTES, state_byte, "memory"),
        Line("level bytes, written and read", 2 * (neuron_slots * coding.bits / 8), state_byte, "memory"),
    )
    paper_mj = energy_mj(Operations(macs, added, coding.formations), technology.paper)
    return Method(coding.name, coding.note, 1e3 * paper_mj, lines)


def _planes(account: Account) -> int:
    """Bits of a level."""
    return account.level_bits or account.n_max.bit_length()


# Networks without spikes
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ann:
    """The same network, dense. mac_price: pJ; weight_bytes, activation_bytes: of one of them; paper_uj: as in `Method`."""

    name: str
    note: str
    mac_price: float
    weight_bytes: float
    activation_bytes: float
    paper_uj: float | None = None


def _anns(account: Account, technology: Technology) -> list[_Ann]:
    summed = f", over the sum of the {account.frames} frames" if account.frames > 1 else ""
    fp32_uj = 1e3 * energy_mj(Operations(account.ann_macs), technology.paper)
    fp32, int8, bits = technology.fp32_mac, technology.int8_mac, _planes(account)
    width = f"{bits} bit{'s' * (bits > 1)}"
    quantised = f"one pass{summed}, dense, 8-bit weights, activations of {width}; its zeros are not skipped"
    return [
        _Ann("ANN, fp32", f"the paper's reference{summed}", fp32, FLOAT_BYTES, FLOAT_BYTES, fp32_uj),
        _Ann("ANN, int8", f"8-bit weights and activations{summed}", int8, 1, 1),
        _Ann("quantised ANN, as many levels", quantised, int8, 1, bits / 8),
    ]


def _dense_method(ann: _Ann, account: Account, technology: Technology) -> Method:
    weight_bytes = account.ann_macs * ann.weight_bytes / technology.weight_reuse
    activation_bytes = 2 * (account.neurons * ann.activation_bytes)
    lines = (
        Line("MACs", account.ann_macs, ann.mac_price, "integer"),
        Line("weight bytes", weight_bytes, technology.weight_byte, "memory"),
        Line("activation bytes, written and read", activation_bytes, technology.state_byte, "memory"),
    )
    return Method(ann.name, ann.note, ann.paper_uj, lines)


# Where they meet
# ---------------------------------------------------------------------------------------------------------------------


def most_set_bits(n_max: int) -> int:
    """That a level up to n_max can have."""
    return (n_max + 1).bit_length() - 1


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _break_even(ours: Method, rivals: list[Method], density: float, most: int) -> tuple[BreakEven, ...]:
    """The density at which our cost, of which a part is in proportion to it, meets each rival's."""
    points = []
    for regime in ("integer", "memory"):
        counted = [line for line in ours.lines if regime == "memory" or line.regime == "integer"]
        variable = sum(line.microjoules for line in counted if line.scales)
        fixed = sum(line.microjoules for line in counted if not line.scales)
        for rival in rivals:
            room = (rival.memory_uj if regime == "memory" else rival.integer_uj) - fixed
            meets = None if room <= 0 else density * room / variable if variable else math.inf
            points.append(BreakEven(rival.name, regime, meets, most))
    return tuple(points)
