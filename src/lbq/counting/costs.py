"""What the paper's cost table leaves out: integer prices, state updates, shortcuts, memory, rivals, break-even. No torch.

From an `Account` and a `Technology`. Three regimes, each including the one before: `paper` (its arithmetic, integer
accumulations priced as float adds), `integer` (the same arithmetic at integer prices, with everything a neuron and a
shortcut do), `memory` (and the bytes moved, for a named hierarchy). All energies are modelled.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
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
    """The density at which bit planes cost what a rival costs, in set bits that a weight meets at a timestep.

    None: they always cost more; infinite: nothing in their cost grows with it. most: set bits that a level can have.
    """

    rival: str
    regime: str
    density: float | None
    most: int

    @property
    def text(self) -> str:
        if self.density is None:
            return "planes never cheaper"
        return "planes always cheaper" if self.density > self.most else f"{self.density:.3f}"

    def to_dict(self) -> dict[str, Any]:
        """JSON has no infinity: it says null."""
        return {**asdict(self), "density": None if self.density == math.inf else self.density, "text": self.text}


@dataclass(frozen=True)
class Costs:
    """methods: ours first; shifts: by backend; density: set bits that a weight meets at a timestep, on average.

    reading: the count of tools that take a level above 1 for a MAC.
    """

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
            "methods": [{**asdict(m), "integer_uj": m.integer_uj, "memory_uj": m.memory_uj} for m in self.methods],
            "shifts": [{**asdict(line), "microjoules": line.microjoules} for line in self.shifts],
            "other_tools": {**asdict(self.reading), "microjoules": self.reading.microjoules},
            "density": self.density,
            "break_even": [b.to_dict() for b in self.break_even],
        }


def costs(account: Account, technology: Technology = DEFAULT) -> Costs:
    """The costs of border-exact counts (`mode="exact"`)."""
    total = account.total
    synapse_steps = sum(count.macs for count in account.synapses.values())
    density = account.executed / synapse_steps if synapse_steps else 0.0
    spiking, dense = _spiking_methods(account, technology), _dense_methods(account, technology)
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


def _spiking_methods(account: Account, technology: Technology) -> list[Method]:
    """Ours first. A network of single spikes has no other way."""
    total, shortcuts, bits = account.total, account.shortcut_total, _level_bits(account)

    def method(
        name: str, note: str, field: str, formed: float, shortcut_adds: float, slots: int = 1, bits: int = bits
    ) -> Method:
        """field: of the counts; formed: formations; slots: for each timestep; bits: of a level that is sent."""
        added = getattr(total, field)
        weighted = added - getattr(account.product_total, field)  # products of levels read no weights
        neuron_slots = account.timesteps * account.neurons * slots
        instructions = 3 + bits  # of a state update
        macs, reuse = account.fp_macs, technology.weight_reuse
        add, weight_byte, state_byte = technology.int32_add, technology.weight_byte, technology.state_byte
        mixed = account.mixing_macs
        mixing = (
            [Line("mixing of currents over time, 32-bit MACs", mixed, technology.int32_mac, "integer")] if mixed else []
        )
        lines = (
            Line("first layer, 8-bit MACs", macs, technology.int8_mac, "integer"),
            Line("synaptic accumulations", added, add, "integer", True),
            Line("formation of planes", formed, add, "integer", True),
            Line("identity shortcuts, additions", shortcut_adds, add, "integer"),
            Line("sums over windows and time, additions", account.pool_adds, add, "integer"),
            Line(f"state updates, {instructions} instructions each", neuron_slots * instructions, add, "integer"),
            *mixing,
            Line("weight bytes of the first layer", macs / reuse, weight_byte, "memory"),
            Line("weight bytes", weighted / reuse, weight_byte, "memory", True),
            Line("membrane bytes", neuron_slots * STATE_BYTES, state_byte, "memory"),
            Line("level bytes, written and read", 2 * (neuron_slots * bits / 8), state_byte, "memory"),
        )
        return Method(name, note, 1e3 * energy_mj(Operations(macs + mixed, added, formed), technology.paper), lines)

    if account.unit_events:
        return [method(PLANES, "one addition for each event", "events", 0.0, shortcuts.events)]
    slots, formed = account.n_max, total.formations
    spikes = f"the same levels as single spikes in {slots} slots for each timestep"
    digits = "7 = 8 - 1: fewer terms at 7, 14, 15"
    return [
        method(PLANES, "as executed", "bit_sparse", formed, shortcuts.bit_sparse),
        method(SIGNED, digits, "signed_digits", formed, shortcuts.signed_digits),
        method(UNARY, spikes, "unary", 0.0, shortcuts.unary, slots, 1),
    ]


def _level_bits(account: Account) -> int:
    return account.level_bits or account.n_max.bit_length()


def _dense_methods(account: Account, technology: Technology) -> list[Method]:
    """The same network without spikes."""
    macs, state_byte = account.ann_macs, technology.state_byte
    weighted = macs - account.product_total.macs / account.timesteps

    def method(name: str, note: str, mac_price: float, weight_bytes: float, activation_bytes: float) -> Method:
        """mac_price: pJ; weight_bytes, activation_bytes: of one of them."""
        lines = (
            Line("MACs", macs, mac_price, "integer"),
            Line("weight bytes", weighted * weight_bytes / technology.weight_reuse, technology.weight_byte, "memory"),
            Line("activation bytes, written and read", 2 * (account.neurons * activation_bytes), state_byte, "memory"),
        )
        return Method(name, note, None, lines)

    summed = f", over the sum of the {account.frames} frames" if account.frames > 1 else ""
    fp32, int8, bits = technology.fp32_mac, technology.int8_mac, _level_bits(account)
    width = f"{bits} bit{'s' * (bits > 1)}"
    quantised = f"one pass{summed}, dense, 8-bit weights, activations of {width}; its zeros are not skipped"
    reference = method("ANN, fp32", f"the paper's reference{summed}", fp32, FLOAT_BYTES, FLOAT_BYTES)
    return [
        replace(reference, paper_uj=1e3 * energy_mj(Operations(macs), technology.paper)),
        method("ANN, int8", f"8-bit weights and activations{summed}", int8, 1, 1),
        method("quantised ANN, as many levels", quantised, int8, 1, bits / 8),
    ]


def most_set_bits(n_max: int) -> int:
    """The most set bits that a level up to n_max can have."""
    return (n_max + 1).bit_length() - 1


def _break_even(ours: Method, rivals: list[Method], density: float, most: int) -> tuple[BreakEven, ...]:
    """The density at which our cost meets each rival's. A part of our cost is in proportion to it."""
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
