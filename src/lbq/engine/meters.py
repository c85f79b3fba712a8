"""Counters of energy that a machine keeps by itself. They count everything that its processor or card does. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from lbq.errors import LbqError

POWERCAP = Path("/sys/class/powercap")


class NoMeter(LbqError):
    """This machine does not say what it uses, or not to this user."""


class Meter(ABC):
    """A counter of joules. name: what it counts."""

    name: str

    @abstractmethod
    def joules(self) -> float:
        """Since the meter was made. It must be read often enough: counters begin again at 0 after some minutes."""


class PackageMeter(Meter):
    """Intel's and AMD's processors (RAPL), as Linux shows them: all packages together, without memory."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        names = {path: _text(path / "name") for path in sorted(folder.glob("*-rapl:*")) if path.name.count(":") == 1}
        self.files = [path / "energy_uj" for path, name in names.items() if name.startswith("package")]
        if not self.files:
            raise NoMeter(f"{folder} has no counter of a processor's energy")
        self.last = [_number(file) for file in self.files]
        ends = (file.with_name("max_energy_range_uj") for file in self.files)
        self.ends = [_number(end) if end.is_file() else 0 for end in ends]
        self.total = 0
        self.name = f"processor package{'s' * (len(self.files) > 1)} (RAPL)"

    def joules(self) -> float:
        for i, file in enumerate(self.files):
            now = _number(file)
            self.total += now - self.last[i] + (self.ends[i] if now < self.last[i] else 0)
            self.last[i] = now
        return self.total / 1e6


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except PermissionError as error:
        raise NoMeter(f"{path} can be read by root only") from error
    except (OSError, ValueError) as error:
        raise NoMeter(f"{path} cannot be read: {error}") from error


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
