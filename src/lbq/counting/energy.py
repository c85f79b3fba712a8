"""Energy that is measured: joules an image, from the machine's own counter. Never mixed with modelled figures. No torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from lbq.engine.meters import Meter

STEADY_SECONDS = 20.0  # of each measurement
IDLE_SECONDS = 5.0
WARM_UP_SECONDS = 2.0
REPEATS = 3


@dataclass(frozen=True)
class MeasuredEnergy:
    """Joules an image of each repeat: gross, everything that the meter counted; net, without what it counts while idle.

    The meter counts the whole processor or card, other programs on it too.
    """

    meter: str
    images: int
    seconds: float
    idle_watts: float
    gross: tuple[float, ...]
    net: tuple[float, ...]

    def __str__(self) -> str:
        def shown(values: tuple[float, ...]) -> str:
            return f"{statistics.mean(values) * 1e3:.3g} mJ ({min(values) * 1e3:.3g} to {max(values) * 1e3:.3g})"

        return (
            f"measured energy an image, {self.meter}: {shown(self.gross)} in all, {shown(self.net)} without the "
            f"{self.idle_watts:.1f} W of an idle machine; {len(self.gross)} times {self.seconds:.0f} s"
        )


def measure_energy(
    run: Callable[[], int],
    meter: Meter,
    seconds: float = STEADY_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> MeasuredEnergy:
    """run: computes some images, waits for them, and says how many; it is called again and again, `seconds` for each repeat."""
    run()  # what the first run sets up is not energy of images
    began, before = clock(), meter.joules()
    sleep(IDLE_SECONDS)
    watts = (meter.joules() - before) / (clock() - began)
    began = clock()
    while clock() - began < WARM_UP_SECONDS:
        run()
    gross, net, total = [], [], 0
    for _ in range(REPEATS):
        images, began, before = 0, clock(), meter.joules()
        while clock() - began < seconds:
            images += run()
        joules, lasted = meter.joules() - before, clock() - began
        gross.append(joules / images)
        net.append((joules - watts * lasted) / images)
        total += images
    return MeasuredEnergy(meter.name, total, seconds, watts, tuple(gross), tuple(net))
