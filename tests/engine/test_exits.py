"""Early exit: what stops where, the same for all engines; margins in files; what is executed is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq import engine
from lbq.counting.exits import augmented, calibration_images, measure_exits
from lbq.counting.operations import count
from lbq.data.testset import TestSet
from lbq.engine import Network
from lbq.engine.exits import check_falling, default_shares, leads
from lbq.engine.file import artefact
from lbq.engine.file.reading import Reader
from lbq.errors import ArtefactError, DataError, LbqError
from lbq.graph.integer import Exits
from tests.support.commands import Call
from tests.support.small_nets import deployed, eventful, pixels

Ints = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def images() -> Ints:
    return pixels(24, 3, 4, 4, seed=1)


@pytest.fixture(scope="module")
def net(images: Ints) -> Network:
    """Three timesteps: half of the images go on after the first one, a quarter after the second."""
    return deployed("resnet8w2", shape=(3, 4, 4), timesteps=3).with_exits(images, (0.5, 0.25), "these images")


def by_hand(net: Network, x: Ints) -> tuple[list[list[int]], list[int]]:
    """Logits and timesteps of each image, one by one and straight from the definition."""
    exits, whole = net.network.exits, net.network
    assert exits is not None
    logits, stops = [], []
    for image in x if whole.static else x.swapaxes(0, 1):
        for t in range(1, whole.timesteps + 1):
            bias = exits.bias[t - 1] if t < whole.timesteps else whole.readout.bias
            part = replace(whole, timesteps=t, readout=replace(whole.readout, bias=bias), exits=None)
            sums = Network(part).run(image if whole.static else image[:t, None], "dense").logits[0].tolist()
            second, first = sorted(sums)[-2:]
            if t == whole.timesteps or first - second >= exits.margins[t - 1]:
                logits.append(sums)
                stops.append(t)
                break
    return logits, stops


@pytest.mark.parametrize("way", ["dense", "bitplane", "auto"])
def test_what_stops_where_does_not_depend_on_engine_batch_or_threads(net: Network, images: Ints, way: Any) -> None:
    logits, stops = by_hand(net, images)
    assert set(stops) == {1, 2, 3}
    whole = net.run(images, way, exit=True, threads=2)
    assert whole.timesteps is not None
    assert whole.logits.tolist() == logits
    assert whole.timesteps.tolist() == stops
    single = [net.run(image, way, exit=True) for image in images[:5]]
    assert [out.logits[0].tolist() for out in single] == logits[:5]
    assert net.run(images, way).timesteps is None  # without exit, all timesteps


def test_event_frames_stop_early_too() -> None:
    x = pixels(3, 12, 2, 4, 4, seed=2)
    net = eventful().with_exits(x, (0.6, 0.3), "frames")
    logits, stops = by_hand(net, x)
    out = net.run(x, exit=True)
    assert out.timesteps is not None
    assert (out.logits.tolist(), out.timesteps.tolist()) == (logits, stops)


def test_margins_let_about_the_given_share_go_on(net: Network, images: Ints) -> None:
    exits = net.network.exits
    assert exits is not None
    out = net.run(images, exit=True)
    assert out.timesteps is not None
    assert exits.shares == ((out.timesteps > 1).mean(), (out.timesteps > 2).mean())
    assert 0.2 < exits.shares[0] <= 0.5  # equal leads stop together
    with pytest.raises(LbqError, match="source must say what the inputs are, in one line"):
        deployed("resnet8w2", shape=(3, 4, 4)).with_exits(images, (1.0,), "two\nlines")
    everything = deployed("resnet8w2", shape=(3, 4, 4)).with_exits(images, (1.0,), "all")
    nothing = deployed("resnet8w2", shape=(3, 4, 4)).with_exits(images, (0.0,), "none")
    assert set(everything.run(images, exit=True).timesteps.tolist()) == {2}  # type: ignore[union-attr]
    assert set(nothing.run(images, exit=True).timesteps.tolist()) == {1}  # type: ignore[union-attr]


def test_nothing_runs_where_all_have_stopped(images: Ints) -> None:
    net = deployed("resnet8w2", shape=(3, 4, 4), timesteps=4)
    chosen = net.with_exits(images, (0.05, 0, 0), "some")
    exits = chosen.network.exits
    assert exits is not None
    assert (exits.shares[1:], exits.margins[2]) == ((0, 0), 0)
    out = chosen.run(images, exit=True)
    assert out.timesteps is not None
    assert set(out.timesteps.tolist()) <= {1, 2}
    head = net.network.readout
    flat = replace(
        head,
        bias=np.zeros_like(head.bias),
        synapses=tuple(replace(s, weight=np.zeros_like(s.weight)) for s in head.synapses),
    )
    constant = Network(replace(net.network, readout=flat)).with_exits(images, (0.5, 0.2, 0.1), "constant logits")
    exits = constant.network.exits
    assert exits is not None
    assert (exits.margins, exits.shares) == ((0, 0, 0), (0, 0, 0))
    assert set(constant.run(images, exit=True).timesteps.tolist()) == {1}  # type: ignore[union-attr]


def test_shares_fall() -> None:
    assert default_shares(1) == []
    assert default_shares(4) == [0.05, 0.025, 0.0125]
    for falling in ([], [0.05], [0.05, 0, 0], [1, 1, 0.05], default_shares(64)):
        check_falling(falling)
    for shares in ([0.05, 0.05], [0.05, 0.1], [0.5, 0.2, 0.2], [0, 0.1]):
        with pytest.raises(LbqError, match=rf"nothing stop after timestep {len(shares)}, .*: give shares that fall"):
            check_falling(shares)


def test_ties_lead_by_nothing() -> None:
    logits = np.array([[3, 7, 7], [1, 2, 5], [-4, -4, -4]])
    assert leads(logits).tolist() == [0, 3, 0]


def test_what_is_executed_again_is_counted_again(net: Network, images: Ints) -> None:
    out = net.run(images, "bitplane", exit=True)
    assert out.timesteps is not None
    stages = [(stage, np.flatnonzero(out.timesteps >= t)) for t, stage in enumerate(net.stages(), 1)]
    expected = sum(stage.run(images[which], "bitplane").total.accumulations for stage, which in stages)
    assert out.total.accumulations == expected
    test = TestSet("some", (3, 4, 4), size=len(images), read=lambda a, b: images[a:b], labels=out.predictions)
    measured = measure_exits(net, test)
    assert measured.accuracy == 100
    assert measured.stopped == tuple((out.timesteps == t).sum() for t in (1, 2, 3))
    assert measured.timesteps == sum(t * len(which) for t, (_, which) in enumerate(stages, 1)) / len(images)
    rate = 0.0
    for stage, which in stages:
        levels = stage.run(images[which], trace=True).levels
        rate += len(which) / len(images) * count(stage.network, levels, "rate").total.bit_sparse
    assert measured.rate.bit_sparse == pytest.approx(rate)


def test_a_logit_of_few_timesteps_is_worth_more(net: Network, images: Ints) -> None:
    out = net.run(images[0], exit=True)
    assert out.timesteps is not None
    stage = net.stages()[int(out.timesteps[0]) - 1].run(images[0])
    assert out.ranked(()) == stage.ranked(())


# Files


def test_margins_are_in_the_file(net: Network, images: Ints, tmp_path: Path) -> None:
    path = tmp_path / "model.lbq"
    engine.save(path, net)
    loaded = engine.load(path)
    assert loaded.network.exits is not None
    assert net.network.exits is not None
    assert loaded.network.exits.bias.tolist() == net.network.exits.bias.tolist()
    assert replace(loaded.network.exits, bias=net.network.exits.bias) == net.network.exits
    assert loaded.run(images, exit=True).logits.tolist() == net.run(images, exit=True).logits.tolist()
    _, text = artefact.proved(net.network)
    assert text["version"] == 2
    _, plain = artefact.proved(replace(net.network, exits=None))
    assert (plain["version"], "exit" in plain) == (1, False)
    assert loaded.over(2).network.exits is None  # which were for other timesteps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margins": [5]}, "exit: margins is '[5]', which is not possible"),
        ({"margins": [5, -1]}, "exit: margins must be in 0.."),
        ({"margins": [5, 2**60]}, "exit: margins must be in 0.."),
        ({"margins": [5, 1.5]}, "exit: margins is"),
        ({"shares": [0.5, 2]}, "exit: shares must be in 0..1"),
        ({"shares": [0.5, float("nan")]}, "exit: shares must be in 0..1"),
        ({"source": "two\nlines"}, "exit: source is"),
        ({"more": 1}, "exit must have the entries margins, shares, source"),
    ],
)
def test_files_that_lie_about_exits_are_refused(net: Network, change: dict[str, Any], message: str) -> None:
    tensors, text = artefact.proved(net.network)
    forged = json.loads(json.dumps(text))
    forged["exit"] |= change
    with pytest.raises(ArtefactError) as error:
        Reader(tensors).network(forged)
    assert message in str(error.value)


def test_forged_biases_and_versions_are_refused(net: Network) -> None:
    tensors, text = artefact.proved(net.network)
    huge = {**tensors, "exit/bias": np.full_like(tensors["exit/bias"], 2**60)}
    with pytest.raises(ArtefactError, match="exit: its bias is out of range"):
        Reader(huge).network(text)
    near = {**tensors, "exit/bias": np.full_like(tensors["exit/bias"], 2**53)}
    with pytest.raises(ArtefactError, match=r"its sums may reach 2\^53"):
        Reader(near).network(text)
    with pytest.raises(ArtefactError, match="wrong or missing: 'exit'"):
        Reader(tensors).network({**text, "version": 1})
    left_out = {key: value for key, value in text.items() if key != "exit"}
    with pytest.raises(ArtefactError, match="nothing in it needs more than 1"):
        Reader(tensors).network(left_out)


# Refusals


def test_networks_without_an_earlier_timestep_are_refused(images: Ints) -> None:
    one = deployed("resnet8w2", shape=(3, 4, 4), timesteps=1)
    with pytest.raises(LbqError, match="^the network has one timestep, so nothing can stop before it"):
        one.with_exits(images, (), "none")
    mixing = deployed("resnet8w2", "lmht", (3, 4, 4))
    with pytest.raises(LbqError, match="mixes all timesteps, so that nothing can stop before the last one"):
        mixing.with_exits(images, (0.5,), "none")
    exits = Exits((3,), np.zeros((1, 5), np.int64), (0.1,), "forged")
    with pytest.raises(ArtefactError, match="mixes all timesteps, so that there is no exit before the last one"):
        artefact.proved(replace(mixing.network, exits=exits))


def test_wrong_calls_say_what_to_do(net: Network, images: Ints) -> None:
    plain = deployed("resnet8w2", shape=(3, 4, 4))
    with pytest.raises(LbqError, match="choose them with lbq exits MODEL DATA --share"):
        plain.run(images, exit=True)
    with pytest.raises(LbqError, match="run with exit=False for a trace"):
        net.run(images, trace=True, exit=True)
    with pytest.raises(
        LbqError, match=r"^give 1 share from 0 to 1, one for each timestep but the last, got \[0.1, 0.2\]"
    ):
        plain.with_exits(images, (0.1, 0.2), "x")
    with pytest.raises(
        DataError, match="such as CIFAR's, or on event frames, not on an unnamed dataset: call with_exits"
    ):
        calibration_images(plain.network, None, 5)


def test_event_networks_choose_on_their_training_frames(call: Call, tmp_path: Path) -> None:
    frames = pixels(30, 3, 2, 4, 4, seed=3)
    labels = np.arange(30) % 3
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}.npz", images=frames, labels=labels)
    model, out = tmp_path / "model.lbq", tmp_path / "early.lbq"
    net = eventful()
    engine.save(model, Network(replace(net.network, facts={"data": {"name": "arrays"}})))
    call.printed("exits", model, tmp_path, "--share", 0.5, "--share", 0.25, "--images", 20, "-o", out)
    x, source = calibration_images(engine.load(model).network, str(tmp_path), 20)
    assert source == "20 training samples of arrays, seed 0"
    made, expected = (n.network.exits for n in (engine.load(out), net.with_exits(x, (0.5, 0.25), source)))
    assert made is not None
    assert expected is not None
    assert (made.margins, made.shares, made.source) == (expected.margins, expected.shares, source)
    ran = call.json("run", out, tmp_path, "--exit")
    assert sum(ran["stopped"]) == 30
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}.npz", images=frames[:, :2], labels=labels)
    said = call.refused("exits", model, tmp_path, "-o", out)
    assert "samples of arrays are [2, 2, 4, 4], the network reads [3, 2, 4, 4]" in said


def test_crops_and_flips_keep_the_pictures() -> None:
    x = pixels(40, 3, 6, 6, seed=9)
    out = augmented(x, 2, np.random.default_rng(0))
    assert out.shape == x.shape
    assert out.dtype == np.uint8
    inner = x[:, :, 2:4, 2:4]  # in every crop, somewhere, as it is or flipped
    kept = sum(
        any(
            (o[:, a : a + 2, b : b + 2] == part).all()
            for a in range(5)
            for b in range(5)
            for part in (i, i[:, :, ::-1])
        )
        for o, i in zip(out, inner, strict=True)
    )
    assert kept == len(x)


def test_the_commands(call: Call, tmp_path: Path) -> None:
    """From a deployed network of the digits to one that stops early, its accuracy and its counts."""
    net = deployed("resnet8w2", shape=(1, 8, 8), num_classes=10)
    model, out = tmp_path / "model.lbq", tmp_path / "early.lbq"
    engine.save(model, Network(replace(net.network, input_max=16, facts={"data": {"name": "digits"}})))
    assert "is not what the network was trained on" in call.refused("exits", model, tmp_path, "-o", out)
    text = call.printed("exits", model, "--share", "0.2", "--images", "100", "-o", out)
    assert "after 1 timestep a lead of" in text
    assert "% went on, of 100 training images of digits, seed 0" in text
    ran = call.json("run", out, "--exit", "--limit", "50", "--engine", "bitplane")
    counted = call.json("account", out, "--exit", "--limit", "50")
    assert sum(ran["stopped"]) == 50
    assert counted["stopped"] == ran["stopped"]
    assert counted["accuracy"] == ran["accuracy"]
    assert "images stopped: " in call.printed("run", out, "--exit", "--limit", "50")
    shown = " ".join(call.printed("account", out, "--exit", "--limit", "50").split())
    assert "over 50 of digits" in shown
    assert "timesteps executed an image" in shown
    assert counted["inputs"] == "digits"
    engine.save(tmp_path / "noise.lbq", Network(replace(engine.load(out).network, facts={})).with_noise())
    shown = " ".join(call.printed("account", tmp_path / "noise.lbq", "--exit").split())
    assert "8 of golden inputs (random noise, no images)" in shown
    assert "golden inputs are no test set" in shown
    assert call.json("account", tmp_path / "noise.lbq", "--exit")["accuracy"] is None
    assert "prices nothing" in call.refused("account", out, "--exit", "--technology", tmp_path / "prices.toml")
    assert "--exit are for a network that is run" in call.refused("account", "--paper", "--exit")
    assert "is the network itself" in call.refused("exits", model, "-o", model)
    rising = ("--share", "0.05", "--share", "0.1")
    assert "--share: 0.1 after 0.05 lets nothing stop" in call.refused("exits", model, *rising, "-o", out)
    longer, short = tmp_path / "longer.lbq", ("--images", "40", "-o", tmp_path / "short.lbq")
    other = deployed("resnet8w2", shape=(1, 8, 8), timesteps=4, num_classes=10).network
    engine.save(longer, Network(replace(other, input_max=16, facts={"data": {"name": "digits"}})))
    assert call.json("exits", longer, "--share", 0.05, "--share", 0, "--share", 0, *short)["shares"][1:] == [0, 0]
    assert len(call.json("exits", longer, *short)["margins"]) == 3
    assert "say where to with -o" in call.refused("exits", model)
    assert "choose them with lbq exits" in call.refused("run", model, "--exit")
    assert "leave out --exit or --against" in call.refused("run", out, "--exit", "--against", "dense")
    assert "is a run folder" in call.refused("account", tmp_path, "--exit")
    one = call.printed("deploy", out, "--timesteps", "1", "-o", tmp_path / "one.lbq")
    assert "its margins to stop early were for 2 timesteps: lbq exits chooses others" in one
    assert "margins" not in call.printed("deploy", model, "--timesteps", "1", "-o", tmp_path / "two.lbq")
