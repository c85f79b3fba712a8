"""Honest costs by hand, the law of break-even, and technology tables from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lbq.counting.costs import PLANES, UNARY, costs, most_set_bits
from lbq.counting.operations import Account, Count, LayerActivity
from lbq.counting.technology import CONSTANTS, DEFAULT, PAPER, load
from lbq.errors import ConfigError


def account(density: float = 0.5, **changes: object) -> Account:
    """One hidden synapse of 1000 MACs per timestep, 10 neurons, T = 2, levels to 5."""
    bits = 2000 * density
    made = Account(
        mode="exact",
        images=1,
        fp_macs=100.0,
        ann_macs=1100.0,
        synapses={"conv": Count(3 * bits, bits, shifts=bits / 2, events=bits / 2, macs=2000, signed_digits=bits)},
        shortcuts={"id": Count(unary=6, bit_sparse=4, events=3, signed_digits=4)},
        layers={"sn": LayerActivity(0.2, 0.5, 0.3)},
        formations={"sn": 20.0 * density},
        pool_adds=7.0,
        unit_events=False,
        timesteps=2,
        neurons=10,
        n_max=5,
        outputs=20,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_by_hand() -> None:
    found = costs(account())
    ours = found.methods[0]
    assert ours.name == PLANES
    # 4.6 * 100 + 0.9 * 1000 + 0.1 * 10, in pJ
    assert ours.paper_uj == pytest.approx(1361e-6)
    # int8 MACs 23; 1000 accumulations, 10 formations, 4 shortcut and 7 pooled additions, 2*10*(3+3) instructions
    integer = 0.23 * 100 + 0.1 * (1000 + 10 + 4 + 7 + 120)
    assert ours.integer_uj == pytest.approx(integer * 1e-6)
    # weights 1 byte each at 1.25; membranes 20 * 8 bytes and levels 2 * 20 * 3 bits at 2.5
    memory = integer + 1.25 * (100 + 1000) + 2.5 * (160 + 2 * 20 * 3 / 8)
    assert ours.memory_uj == pytest.approx(memory * 1e-6)
    by = {m.name: m for m in found.methods}
    assert by["ANN, fp32"].integer_uj == pytest.approx(4.6 * 1100e-6)
    assert by["ANN, fp32"].memory_uj == pytest.approx((4.6 * 1100 + 1.25 * 4400 + 2.5 * 80) * 1e-6)
    assert by["ANN, int8"].memory_uj == pytest.approx((0.23 * 1100 + 1.25 * 1100 + 2.5 * 20) * 1e-6)
    levels = by["quantised ANN, as many levels"]  # three bits each
    assert levels.memory_uj == pytest.approx((0.23 * 1100 + 1.25 * 1100 + 2.5 * 20 * 3 / 8) * 1e-6)
    slots = by[UNARY]  # five binary slots for each timestep
    integer = 0.23 * 100 + 0.1 * (3000 + 6 + 7 + 5 * 20 * 4)
    assert slots.integer_uj == pytest.approx(integer * 1e-6)
    assert slots.memory_uj == pytest.approx((integer + 1.25 * 3100 + 2.5 * 5 * 20 * (8 + 2 / 8)) * 1e-6)
    assert found.density == 0.5
    assert {b.rival for b in found.break_even} == {"ANN, fp32", "ANN, int8", "quantised ANN, as many levels"}
    assert [line.count for line in found.shifts] == [0, 0, 500, 40]
    assert found.reading.microjoules == pytest.approx(500 * 4.6e-6)


def test_levels_and_frames_are_as_the_account_says() -> None:
    costs_ = costs(account(level_bits=4, horner=33.0, frames=2))
    assert costs_.shifts[3].count == 33
    assert "state updates, 7 instructions each" in {line.what for line in costs_.methods[0].lines}
    assert all("over the sum of the 2 frames" in method.note for method in costs_.methods if "ANN" in method.name)
    assert not any("sum" in method.note for method in costs(account()).methods)


@pytest.mark.parametrize("made", [account(0.0), account(synapses={}, formations={})])
def test_a_silent_network_is_cheaper_at_any_density(made: Account) -> None:
    found = costs(made)
    assert found.density == 0
    assert {b.text for b in found.break_even if b.rival == "ANN, fp32"} == {"planes always cheaper"}
    assert {b["density"] for b in found.to_dict()["break_even"]} == {None}  # JSON has no infinity


@pytest.mark.parametrize("regime", ["integer", "memory"])
def test_at_break_even_both_cost_the_same(regime: str) -> None:
    """The law itself: put the density where the table says, and the costs meet."""
    (meets,) = [b for b in costs(account()).break_even if (b.rival, b.regime) == ("ANN, int8", regime)]
    assert meets.density is not None
    again = costs(account(meets.density))
    ours, rival = again.methods[0], next(m for m in again.methods if m.name == "ANN, int8")
    assert getattr(ours, f"{regime}_uj") == pytest.approx(getattr(rival, f"{regime}_uj"))


def test_no_break_even_where_the_neurons_alone_cost_more() -> None:
    meets = [b for b in costs(account(neurons=10**6)).break_even if b.rival == "ANN, int8"]
    assert {(b.density, b.text) for b in meets} == {(None, "planes never cheaper")}


def test_no_break_even_where_both_cost_the_same_without_a_spike() -> None:
    """100 MACs in the first layer of either, and nothing but them: every spike makes it dearer."""
    made = account(ann_macs=100.0, neurons=0, shortcuts={}, pool_adds=0.0)
    found = {(b.rival, b.regime): b for b in costs(made).break_even}
    assert costs(made).density > 0
    for regime in ("integer", "memory"):
        assert found["ANN, int8", regime].text == "planes never cheaper"
        assert found["ANN, fp32", regime].density is not None  # whose MACs are dearer themselves


def test_a_density_beyond_two_set_bits_is_out_of_reach() -> None:
    """Of levels 0..5, the fullest are 3 and 5."""
    (meets, *_) = costs(account()).break_even
    assert meets.most == 2
    for density, text in ((1.5, "1.500"), (2.0, "2.000"), (2.1, "planes always cheaper")):
        assert replace(meets, density=density).text == text
    assert all(most_set_bits(n) == max(level.bit_count() for level in range(n + 1)) for n in range(1, 300))


def test_binary_networks_need_no_planes() -> None:
    found = costs(account(unit_events=True, n_max=1))
    assert [m.name for m in found.methods][:2] == [PLANES, "ANN, fp32"]
    counts = {line.what: line.count for line in found.methods[0].lines}
    assert counts["synaptic accumulations"] == 500
    assert counts["formation of planes"] == found.reading.count == 0
    assert counts["identity shortcuts, additions"] == 3
    assert [line.count for line in found.shifts] == [0, 0, 0, 0]
    assert found.to_dict()["modelled"] is True


def test_technology_from_a_file(tmp_path: Path) -> None:
    toml = tmp_path / "t.toml"
    toml.write_text('name = "7 nm"\nsource = "a datasheet"\nint8_mac = 0.07\n')
    found = load(toml)
    assert (found.name, found.int8_mac, found.fp32_mac) == ("7 nm", 0.07, 4.6)
    assert {n: o for n, _, o in found.table()}["int8_mac"] == "a datasheet"
    assert found.credit() == f"int8_mac: 7 nm (a datasheet); the rest: {DEFAULT.name} ({DEFAULT.source})"
    assert found.credit("int8_mac") == "7 nm (a datasheet)"
    assert found.credit(*PAPER) == DEFAULT.credit() == f"{DEFAULT.name} ({DEFAULT.source})"
    assert found.as_published
    assert found.to_dict()["credit"] == found.credit()
    (tmp_path / "t.json").write_text(json.dumps({"name": "x", "source": "y", "weight_reuse": 8}))
    cheap = costs(account(), load(tmp_path / "t.json"))
    assert cheap.methods[0].memory_uj < costs(account()).methods[0].memory_uj
    assert {name for name, _, _ in DEFAULT.table()} == set(CONSTANTS)
    assert DEFAULT.paper.accumulate == 0.9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold name"),
        ("int8_mac = 1.0", "must have name"),
        ("int8mac = 1.0", "did you mean 'int8_mac'"),
        ('name = "a"\nsource = "b"\nint8_mac = -1', "picojoules, above 0"),
        ('name = "a"\nsource = "b"\nint32_add = 0', "picojoules, above 0"),
        ('name = "a"\nsource = "b"\nshift = -1', "not negative"),
        ('name = "a"\nsource = "b"\nint8_mac = true', "number of picojoules"),
        ('name = "a"\nsource = "b"\nint8_mac = nan', "number of picojoules"),
        ('name = "a"\nsource = "b"\nweight_reuse = 0', "weight_reuse must be a number above 0, the accumulations"),
        ("not toml", "cannot be read"),
    ],
)
def test_bad_technology(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)
    with pytest.raises(ConfigError, match="cannot read .*none.toml"):
        load(tmp_path / "none.toml")
