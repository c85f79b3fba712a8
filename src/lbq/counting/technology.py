"""What operations and bytes are taken to cost: one named table with its sources, which a file can replace. No torch.

Every energy made from it is modelled, never measured.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lbq.counting.operations import Energies
from lbq.errors import ConfigError, nearest
from lbq.system import files, toml

HOROWITZ_2014 = "M. Horowitz, Computing's energy problem (and what we can do about it), ISSCC 2014, Fig. 1.1.9"


@dataclass(frozen=True)
class Technology:
    """Picojoules per operation or byte; weight_reuse: accumulations for each weight fetched.

    origin: where each number comes from; name and source: of the numbers that differ from the default's.
    """

    name: str = "45 nm CMOS, 0.9 V"
    source: str = HOROWITZ_2014
    fp32_mac: float = 4.6
    fp32_add: float = 0.9
    int8_mac: float = 0.23
    int32_mac: float = 3.2
    int32_add: float = 0.1
    shift: float = 0.1
    weight_byte: float = 1.25
    state_byte: float = 2.5
    weight_reuse: float = 1.0
    origin: dict[str, str] = field(
        default_factory=lambda: {
            "fp32_mac": "32-bit float multiply 3.7 pJ + add 0.9 pJ",
            "fp32_add": "32-bit float add; the paper prices every accumulation so",
            "int8_mac": "8-bit integer multiply 0.2 pJ + add 0.03 pJ",
            "int32_mac": "32-bit integer multiply 3.1 pJ + add 0.1 pJ; for mixing of currents over time, as LM-HT does",
            "int32_add": "32-bit integer add; also taken for one formation and for each instruction of a state update",
            "shift": "not in the source: taken as an integer add",
            "weight_byte": "an eighth of a 64-bit read from an 8 KB SRAM, 10 pJ",
            "state_byte": "an eighth of a 64-bit access to a 32 KB SRAM, 20 pJ",
            "weight_reuse": "assumption: accumulations (or MACs) for each weight fetched; 1 is none",
        }
    )

    @property
    def paper(self) -> Energies:
        """The paper's regime: integer accumulations at the price of float adds."""
        return Energies(self.fp32_mac, self.fp32_add, self.int32_add, self.shift)

    def table(self) -> list[tuple[str, float, str]]:
        """Name, value and origin of every constant."""
        return [(name, getattr(self, name), self.origin.get(name, self.source)) for name in CONSTANTS]

    def credit(self, *constants: str) -> str:
        """Name and source of the prices of `constants` (by default all), and which come from where."""
        names, defaults = constants or CONSTANTS, DEFAULT.table()
        differing = {row[0] for row in self.table() if row not in defaults}
        own = [name for name in names if name in differing]
        mine, default = (f"{table.name} ({table.source})" for table in (self, DEFAULT))
        if not own:
            return default
        return mine if len(own) == len(names) else f"{', '.join(own)}: {mine}; the rest: {default}"

    @property
    def reuse(self) -> str:
        """How often a weight that was fetched is used, in words."""
        return "once" if self.weight_reuse == 1 else f"{self.weight_reuse:g} times"

    @property
    def as_published(self) -> bool:
        """Whether it prices the paper's operations as the paper does."""
        return all(getattr(self, name) == getattr(DEFAULT, name) for name in PAPER)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "credit": self.credit()}


CONSTANTS = tuple(f.name for f in fields(Technology) if f.name not in ("name", "source", "origin"))
PAPER = ("fp32_mac", "fp32_add", "int32_add")  # what the paper prices: MACs, accumulations, formations
ARITHMETIC = ("fp32_mac", "fp32_add", "int8_mac", "int32_add")  # every ratio is over some of these
DEFAULT = Technology()


def load(path: Path | str) -> Technology:
    """A table from a TOML or JSON file: `name`, `source` and any of the constants; the others keep the default's price.

    Name and source are required: a price without a source says nothing.
    """
    path = Path(path)
    remedy = "give a TOML or JSON file of prices (docs/howto/energy.md)"
    text = files.text_of(path, ConfigError, toml.MOST_BYTES, remedy)
    try:
        values: Any = json.loads(text) if path.suffix == ".json" else toml.parsed(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"technology {path} cannot be read: {' '.join(str(error).split())[:120]}") from error
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"technology {path} must hold name, source and constants, such as int32_add = 0.1")
    known = ("name", "source", *CONSTANTS)
    for key in values:
        if key not in known:
            raise ConfigError(f"technology {path}: unknown constant {key!r}{nearest(key, known)}")
    if not all(isinstance(values.get(key), str) for key in ("name", "source")):
        raise ConfigError(
            f"technology {path} must have name and source, texts: what it is, and where its numbers come from"
        )
    prices = {key: value for key, value in values.items() if key in CONSTANTS}
    for key, value in prices.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
        if number and (value > 0 or key not in (*ARITHMETIC, "weight_reuse")):
            continue
        expected = f"a number of picojoules, {'above 0' if key in ARITHMETIC else 'not negative'}"
        if key == "weight_reuse":
            expected = "a number above 0, the accumulations for each weight fetched"
        raise ConfigError(f"technology {path}: {key} must be {expected}, got {value!r}")
    origin = DEFAULT.origin | dict.fromkeys(prices, str(values["source"]))
    return replace(DEFAULT, **values, origin=origin)
