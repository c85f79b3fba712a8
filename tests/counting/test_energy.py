"""Measured energy: what counters say is divided by images, with and without the idle machine."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest

from lbq import engine
from lbq.counting.energy import IDLE_SECONDS, REPEATS, measure_energy
from lbq.engine import meters
from lbq.engine.cuda.meter import CardMeter
from lbq.engine.meters import Meter, NoMeter, PackageMeter
from tests.support.commands import Call
from tests.support.small_nets import deployed


class Machine(Meter):
    """A clock that moves when something is done: 10 W while idle, 30 W while it computes four images in a second."""

    name = "a made-up machine"

    def __init__(self) -> None:
        self.now = self.used = 0.0

    def joules(self) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        self.now, self.used = self.now + seconds, self.used + 10 * seconds

    def run(self) -> int:
        self.now, self.used = self.now + 1, self.used + 30
        return 4


def test_gross_and_net_of_the_idle_machine() -> None:
    machine = Machine()
    measured = measure_energy(machine.run, machine, 20, lambda: machine.now, machine.sleep)
    assert measured.idle_watts == pytest.approx(10)
    assert measured.gross == pytest.approx([30 / 4] * REPEATS)
    assert measured.net == pytest.approx([20 / 4] * REPEATS)
    assert measured.images == REPEATS * 80
    assert machine.now == pytest.approx(1 + IDLE_SECONDS + 2 + REPEATS * 20)
    assert "7.5e+03 mJ (7.5e+03 to 7.5e+03) in all" in str(measured)
    assert "without the 10.0 W of an idle machine; 3 times 20 s" in str(measured)


def powercap(folder: Path, *domains: tuple[str, str, int]) -> Path:
    for name, text, value in domains:
        (folder / name).mkdir(parents=True)
        (folder / name / "name").write_text(f"{text}\n")
        (folder / name / "energy_uj").write_text(f"{value}\n")
        (folder / name / "max_energy_range_uj").write_text("1000000\n")
    return folder


def test_packages_are_added_and_counters_begin_again(tmp_path: Path) -> None:
    folder = powercap(
        tmp_path,
        ("intel-rapl:0", "package-0", 900_000),
        ("intel-rapl:1", "package-1", 10),
        ("intel-rapl:0:0", "core", 5),
        ("intel-rapl:2", "psys", 7),
    )
    meter = PackageMeter(folder)
    assert meter.joules() == 0
    (folder / "intel-rapl:0" / "energy_uj").write_text("100000")  # passed its end
    (folder / "intel-rapl:1" / "energy_uj").write_text("50010")
    assert meter.joules() == pytest.approx(0.2 + 0.05)
    assert meter.joules() == pytest.approx(0.25)
    assert meter.name == "processor packages (RAPL)"


def test_machines_that_do_not_tell_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoMeter, match="has no counter of a processor's energy"):
        PackageMeter(tmp_path)
    folder = powercap(tmp_path, ("intel-rapl:0", "package-0", 1))

    def denied(path: Path, *_: object, **__: object) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return "package-0"

    meter = PackageMeter(folder)
    (folder / "intel-rapl:0" / "energy_uj").write_text("")
    with pytest.raises(NoMeter, match="energy_uj cannot be read: invalid literal"):
        meter.joules()
    (folder / "intel-rapl:0" / "energy_uj").unlink()
    with pytest.raises(NoMeter, match="energy_uj cannot be read: .*No such file"):
        meter.joules()
    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(NoMeter, match="energy_uj can be read by root only"):
        PackageMeter(folder)


class Driver:
    """A driver's library with one card."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.millijoules = code, 5_000

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: ctypes.c_char_p, _: object) -> int:
        return 0 if name.value == b"GPU-1" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, _: object, value: object) -> int:
        value._obj.value = self.millijoules  # type: ignore[attr-defined]
        return self.code


def test_a_card_counts_from_when_the_meter_was_made() -> None:
    driver = Driver()
    meter = CardMeter(driver, "GPU-1")
    driver.millijoules = 7_500
    assert meter.joules() == 2.5
    with pytest.raises(NoMeter, match="nvmlDeviceGetTotalEnergyConsumption gave 3"):
        CardMeter(Driver(code=3), "GPU-1")
    with pytest.raises(NoMeter, match="nvmlDeviceGetHandleByUUID gave 6"):
        CardMeter(Driver(), "GPU-2")


def test_the_command_says_where_there_is_no_counter(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = deployed("resnet8w2", shape=(1, 8, 8), num_classes=10).network
    model = tmp_path / "model.lbq"
    engine.save(model, engine.Network(replace(net, input_max=16, facts={"data": {"name": "digits"}})))
    monkeypatch.setattr(meters.PackageMeter.__init__, "__defaults__", (tmp_path,))
    out = call.printed("run", model, "--limit", "20", "--energy", "--engine", "bitplane")
    assert "measured energy: not available here (" in out.replace("\n", " ")
    assert "`lbq account` models it" in out.replace("\n", " ")
