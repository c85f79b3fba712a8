"""A deployed network over other timesteps than it was deployed over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lbq.engine import Network, load, save
from lbq.errors import ArtefactError, LbqError
from tests.support.commands import Call
from tests.support.oracle import integer_network
from tests.support.small_nets import deployed, eventful, pixels

NET = ("resnet8w2", {"name": "lbq"}, (3, 6, 6))


@pytest.fixture(scope="module")
def net() -> Network:
    return deployed(*NET)


def test_the_first_timestep_is_that_of_more(net: Network) -> None:
    """Levels of a timestep depend on those before alone; logits are sums over time."""
    x = pixels(5, 3, 6, 6, seed=3)
    two, one = net.run(x, trace=True), net.over(1).run(x, trace=True)
    assert net.network.timesteps == 2
    assert two.levels is not None
    assert one.levels is not None
    for name, levels in two.levels.items():
        assert np.array_equal(one.levels[name], levels[:1])
    for image, logits in zip(x, one.logits, strict=True):
        assert logits.tolist() == integer_network(net.over(1).network, image)[0]


def test_logits_keep_their_unit_and_the_bias_rounds_half_up(net: Network) -> None:
    bias = np.arange(-3, -3 + net.network.readout.shape[0])
    odd = Network(replace(net.network, readout=replace(net.network.readout, bias=bias)))
    one = odd.over(1).network
    assert one.readout.bias.tolist() == [int(np.floor(b / 2 + 0.5)) for b in bias]
    assert one.readout.bias.dtype == np.int64
    assert one.scale == 2 * net.network.scale
    assert np.array_equal(odd.over(2).network.readout.bias, bias)
    assert odd.over(1).golden is None


def test_it_is_saved_with_golden_vectors_of_its_own(net: Network, tmp_path: Path) -> None:
    save(tmp_path / "two.lbq", net)
    one = load(tmp_path / "two.lbq").over(1)
    save(tmp_path / "one.lbq", one)
    again = load(tmp_path / "one.lbq")
    assert again.verify("bitplane") == again.verify("dense") == 8
    assert again.network.timesteps == 1
    assert net.golden is not None
    assert again.golden is not None
    assert np.array_equal(again.golden.inputs, net.golden.inputs)
    assert again.golden.digests == {name: steps[:1] for name, steps in net.golden.digests.items()}


def test_what_cannot_be(net: Network) -> None:
    with pytest.raises(ArtefactError, match=r"over 4 timesteps layer .* beyond 2\^30: deploy its run over so many"):
        net.over(4)
    for wrong in (0, -1, 1.0, True, "2"):
        with pytest.raises(LbqError, match="timesteps must be a whole number above 0"):
            net.over(wrong)  # type: ignore[arg-type]
    events = eventful()
    with pytest.raises(LbqError, match="reads event frames, 3 of a sample: deploy its run over others"):
        events.over(1)


def test_from_the_command_line(net: Network, tmp_path: Path, call: Call) -> None:
    two, one = tmp_path / "two.lbq", tmp_path / "one.lbq"
    save(two, net)
    command = ("deploy", two, "-o", one)
    out = call.printed(*command, "--timesteps", "1")
    assert "T = 1" in out
    assert "8 golden inputs" in out
    assert load(one).network.timesteps == 1
    one.unlink()
    for wrong in (
        [],
        ["--timesteps", "1", "--bits", "4"],
        ["--noise", "--stream"],
        ["--timesteps", "1", "a=1"],
    ):
        error = call.refused(*command, *wrong)
        assert error.startswith(f"lbq: {two} is deployed already, and only --timesteps and --noise can change it")
    assert not one.exists()
    stored = two.read_bytes()
    error = call.refused(*command, "--timesteps", "1", "-o", two)
    assert error == f"lbq: -o {two} is the network itself, which it would replace: give another name\n"
    assert two.read_bytes() == stored


@pytest.mark.parametrize("timesteps", [(), ("--timesteps", "1")])
def test_noise_takes_the_place_of_images(timesteps: tuple[str, ...], net: Network, tmp_path: Path, call: Call) -> None:
    images = pixels(3, 3, 6, 6, seed=4)
    save(tmp_path / "images.lbq", net.with_golden(images))
    call.json("deploy", tmp_path / "images.lbq", "--noise", *timesteps, "-o", tmp_path / "public.lbq")
    public = load(tmp_path / "public.lbq")
    assert public.network.facts == {**net.network.facts, "golden": "noise"}
    assert public.golden is not None
    assert not any(np.array_equal(one, other) for one in public.golden.inputs for other in images)
    assert public.verify("dense") == public.verify("bitplane") == 8
    np.testing.assert_array_equal(public.run(images).logits, (net.over(1) if timesteps else net).run(images).logits)


def test_a_network_without_golden_vectors_stays_so(net: Network, tmp_path: Path, call: Call) -> None:
    save(tmp_path / "bare.lbq", Network(net.network))
    call.json("deploy", tmp_path / "bare.lbq", "--timesteps", "1", "-o", tmp_path / "one.lbq")
    assert load(tmp_path / "one.lbq").golden is None
