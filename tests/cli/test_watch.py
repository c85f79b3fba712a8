"""`lbq watch`: what it sees, live, and whether it keeps up."""

from __future__ import annotations

import signal
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lbq import engine
from lbq.cli import watch
from lbq.data.events import live
from lbq.data.events.live import UdpEvents, time_frames
from lbq.engine import Network, Stream
from lbq.errors import LbqError
from lbq.system.signals import STOPS
from tests.support import event_writers
from tests.support.commands import Call
from tests.support.random_networks import random_network
from tests.support.small_nets import small
from tests.support.some_events import events_of, random_events

EVENTS = random_events(400, 34, step=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of frames `[2, 8, 8]` whose classes have names."""
    from lbq.deploy import deploy

    path = tmp_path_factory.mktemp("watch") / "net.lbq"
    net = deploy(small("resnet8w2", shape=(2, 8, 8)), (2, 8, 8), static=False, stream=True, classes=list("abcde"))
    engine.save(path, net)
    return path


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("watch") / "r.raw"
    path.write_bytes(event_writers.evt3(EVENTS, (34, 34)))
    return path


def test_a_recording_is_played_at_its_own_speed(call: Call, model: Path, recording: Path) -> None:
    frames = list(time_frames(events_of(EVENTS, 34, 34), 10_000, 8))
    stream, names = engine.load(model).stream(4), "abcde"
    seen = [names[stream.step(frame).predictions[0]] for frame in frames]
    begin = time.monotonic()
    facts = call.json("watch", recording, model, "--frame-ms", 10, "--window", 4, "--speed", 0.5)
    assert time.monotonic() - begin >= 2 * len(frames) * 0.01
    assert (facts["frames"], facts["frame_ms"], facts["last"]) == (len(frames), 10, seen[-1])
    assert facts["seen"] == dict(Counter(seen).most_common())
    assert set(facts) == {"source", "frames", "frame_ms", "seen", "last", "behind", "worst_delay_ms"}
    lines = call.printed("watch", recording, model, "--frame-ms", 10, "--frames", 3, "--window", 4).splitlines()
    assert lines[0] == f"watching {recording}, frames of 10 ms"
    assert lines[1].split()[:3] == ["0.010", "s", seen[0]]
    assert f"{recording}: 3 frames of 10 ms; " in lines[-1]


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_ends_it_with_a_summary(
    number: signal.Signals, call: Call, model: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = watch.View.show

    def stopped(self: watch.View, *arguments: Any) -> None:
        show(self, *arguments)
        if self.frames == 3:
            signal.raise_signal(number)

    def usual(*_: object) -> None:
        raise AssertionError("the signal had its usual effect")

    monkeypatch.setattr(watch.View, "show", stopped)
    before = signal.signal(number, usual)
    try:
        text = call.printed("watch", recording, model, "--frame-ms", 10, "--window", 4)
        assert text.splitlines()[-1].startswith(f"{recording}: 3 frames of 10 ms; ")
        assert signal.getsignal(number) is usual
        signal.signal(number, signal.SIG_IGN)  # as of SIGINT in a background job of a script
        assert call.json("watch", recording, model, "--frame-ms", 10)["frames"] > 3
    finally:
        signal.signal(number, before)


def test_it_says_when_it_falls_behind(
    call: Call, model: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Stream.step

    def slow(self: Stream, frame: Any) -> Any:
        time.sleep(0.03)
        return step(self, frame)

    monkeypatch.setattr(Stream, "step", slow)
    text = call.printed("watch", recording, model, "--frame-ms", 10, "--frames", 4)
    assert "BEHIND by" in text
    assert "fell behind in 4 frames (by up to " in text.splitlines()[-1]


def test_a_delay_that_grows_is_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    """And not at every frame."""
    with watch.View("camera", 10_000) as view:
        for late_ms in (12, 15, 20, 25, 40, 51, 3):
            view.show([{"class": "mug", "share": 1.0}], late_ms / 1000)
    said = [line.partition("%")[2].strip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert said == ["BEHIND by 12 ms", "BEHIND by 25 ms", "BEHIND by 51 ms", ""]


def test_the_end_says_what_a_port_dropped() -> None:
    port = SimpleNamespace(lost=0, strange=8137, late=10, jumps=0)
    text = watch.View("UDP port 9", 10_000, quiet=True).facts(cast("Any", port))["text"]
    assert text == "UDP port 9: no frames; 8,137 strange events or datagrams; 10 late events"


def test_on_a_terminal_bars_change(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with watch.View("camera [1]", 10_000) as view:
        view.show([{"class": "mug", "share": 0.75}, {"class": "box", "share": 0.25}], 0.02)
        view.live.refresh()
    out = capsys.readouterr().out
    assert "camera [1]" in out
    assert "BEHIND by 20 ms" in out
    assert f"{'#' * 18}{' ' * 6}  75.0 %  mug" in out


def test_events_from_a_port(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, senders = threading.Event(), []

    def send(port: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            t = 0
            while not done.wait(0.002):
                t += 1000
                sender.sendto(struct.pack("<II", t, t // 1000 % 8 | 1 << 28), ("127.0.0.1", port))

    def listen(*arguments: Any) -> UdpEvents:
        opened = UdpEvents(*arguments)
        senders.append((opened.port, threading.Thread(target=send, args=(opened.port,))))
        senders[0][1].start()
        return opened

    monkeypatch.setattr(live, "UdpEvents", listen)
    try:
        facts = call.json("watch", "--udp", 0, model, "--sensor", "8x8", "--frame-ms", 5, "--frames", 6)
    finally:
        done.set()
        for _, sender in senders:
            sender.join()
    ((port, _),) = senders
    assert (facts["source"], facts["frames"], facts["strange"], facts["jumps"]) == (f"UDP port {port}", 6, 0, 0)


def test_a_network_of_a_known_dataset_says_how_long_its_frames_are(
    call: Call, model: Path, recording: Path, tmp_path: Path
) -> None:
    net = engine.load(model)
    facts = {"data": {"name": "dvs_objects", "frames": "time", "window_ms": 20}}
    engine.save(tmp_path / "o.lbq", Network(replace(net.network, facts=facts), net.golden))
    assert call.json("watch", recording, tmp_path / "o.lbq", "--frames", 1)["frame_ms"] == 10


@pytest.mark.parametrize("window_ms", ["absent", None, "20", [20], True, 0, -5, 1e-9, 1e300, float("nan"), 10**400])
def test_a_dataset_whose_facts_are_forged_says_nothing_of_frames(model: Path, window_ms: Any) -> None:
    data = {"name": "dvs_objects", "frames": "time"} | ({} if window_ms == "absent" else {"window_ms": window_ms})
    network = replace(engine.load(model).network, facts={"data": data})
    with pytest.raises(LbqError, match="say how long a frame is with --frame-ms"):
        watch._frame_us(network, None)
    assert watch._frame_us(network, 5) == 5000


def test_frames_of_equal_counts_last_no_known_time(model: Path) -> None:
    network = replace(
        engine.load(model).network, facts={"data": {"name": "dvs_objects", "frames": "count", "window_ms": 20}}
    )
    with pytest.raises(LbqError, match="say how long a frame is with --frame-ms: the network's frames were not cut by"):
        watch._frame_us(network, None)


def test_what_cannot_be_watched_is_one_line(call: Call, model: Path, recording: Path, tmp_path: Path) -> None:
    images = tmp_path / "images.lbq"
    engine.save(images, Network(random_network(0, "once", True, False)))
    without = tmp_path / "none.raw"
    without.write_bytes(b"% evt 3.0\n% end\n")
    for arguments, message in {
        (recording,): "watch takes a recording and a network, lbq watch FILE MODEL",
        ("--udp", 0, recording, model): "watch takes a recording and a network",
        (model, recording): f"{model} is a network, and the recording comes first: lbq watch {recording} {model}",
        ("--udp", 0, model): "--udp: say how large the sensor is, such as --sensor 128x128",
        ("--udp", 0, model, "--sensor", "8x8", "--speed", 2): "--speed is for a recording",
        (recording, model): "say how long a frame is with --frame-ms",
        (recording, model, "--frame-ms", 0): "--frame-ms must be from 0.001",
        (recording, model, "--frame-ms", "nan"): "--frame-ms must be from 0.001",
        (recording, model, "--frame-ms", 10, "--speed", 0): "--speed must be above 0",
        (recording, recording, "--frame-ms", 10): f"{recording}",
        (model, model, "--frame-ms", 10): f"{model} is no recording that can be read",
        (without, model, "--frame-ms", 10): f"{without} does not say how large its sensor is",
        (without, model, "--frame-ms", 10, "--sensor", "8"): "--sensor must be WIDTHxHEIGHT in pixels",
        (
            recording,
            model,
            "--frame-ms",
            10,
            "--sensor",
            "35x34",
        ): f"{recording} is of a sensor of 34 x 34 pixels: leave out",
        (without, model, "--frame-ms", 10, "--sensor", "7x8"): "the sensor has 7 x 8 pixels, fewer than the network's",
        (recording, images): "the network reads images of 2x",
        (recording, model, "--frame-ms", 10, "--restart", 5000): "restart must be a whole number of frames",
        (recording, model, "--frame-ms", 10, "--restart", 1, "--window", 2): "window must be at most 1",
    }.items():
        assert call.refused("watch", *arguments).startswith(f"lbq: {message}"), arguments
    assert call.json("watch", without, model, "--frame-ms", 10, "--sensor", "34x34")["frames"] == 0
