"""`lbq watch`: a network of integers looks at an event camera, live: what it sees, and whether it keeps up."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lbq.cli.options import Json, print_result
from lbq.cli.render import make_console, print_line
from lbq.errors import LbqError
from lbq.system import signals

if TYPE_CHECKING:
    from lbq.data.events.live import Frame, UdpEvents
    from lbq.graph.integer import IntegerNetwork

BAR_CHARACTERS = 24
SHOWN_CLASSES = 5
DROPPED = {  # what UdpEvents counts
    "lost": "datagrams lost",
    "strange": "strange events or datagrams",
    "late": "late events",
    "jumps": "jumps of the events' clock",
}


def watch(
    files: Annotated[list[Path], typer.Argument(metavar="[FILE] MODEL", help="A recording, and a deployed network.")],
    udp: Annotated[int | None, typer.Option(min=0, max=65535, help="Read events from this local port; 0: a free one.")] = None,
    frame_ms: Annotated[float | None, typer.Option(help="Milliseconds of a frame; of dvs_objects: as trained.")] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Decide by this many of the latest frames; default T, or --restart if less.")
    ] = None,
    restart: Annotated[int | None, typer.Option(min=1, help="Restart after this many frames; needed without a leak.")] = None,
    sensor: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT, where the recording does not say, and for --udp.")] = None,
    speed: Annotated[float, typer.Option(help="Play a recording this many times as fast.")] = 1.0,
    frames: Annotated[int | None, typer.Option(min=1, help="Stop after this many frames.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Let a network watch an event camera's recording at its own speed, or events from a local socket, and say what it sees."""
    import numpy as np

    from lbq.data.events.live import UdpEvents, time_frames
    from lbq.data.events.recording import read_recording
    from lbq.engine import load

    if len(files) != (1 if udp is not None else 2):
        raise LbqError("watch takes a recording and a network, lbq watch FILE MODEL, or lbq watch --udp PORT MODEL")
    if [file.suffix == ".lbq" for file in files] == [True, False]:
        raise LbqError(f"{files[0]} is a network, and the recording comes first: lbq watch {files[1]} {files[0]}")
    if udp is not None and sensor is None:
        raise LbqError("--udp: say how large the sensor is, such as --sensor 128x128: events do not say it")
    if udp is not None and speed != 1:
        raise LbqError("--speed is for a recording: events of --udp come when they come")
    if not 0 < speed <= 1e6:
        raise LbqError(f"--speed must be above 0 and at most 1000000, got {speed:g}")
    net = load(files[-1])
    frame_us = _frame_us(net.network, frame_ms)
    stream, (_, height, width) = net.stream(window, restart), net.network.input_shape
    events = None if udp is not None else read_recording(files[0], _sensor(sensor))
    if events is not None and sensor is not None and (events.width, events.height) != _sensor(sensor):
        raise LbqError(
            f"{files[0]} is of a sensor of {events.width} x {events.height} pixels: leave out --sensor {sensor}"
        )
    across, down = (events.width, events.height) if events is not None else _sensor(sensor) or (0, 0)
    if across < width or down < height:
        raise LbqError(f"the sensor has {across} x {down} pixels, fewer than the network's frames, {width} x {height}")
    for _ in range(2):  # kernels are chosen and prepared, so that the first frame does not wait for that
        stream.step(np.zeros(net.network.input_shape, np.uint8))
    stream.reset()
    live = None if udp is None else UdpEvents(udp, across, down)
    with ExitStack() as stack:
        if live is not None:
            stack.callback(live.close)
            source, name = live.frames(frame_us, (height, width)), f"UDP port {live.port}"
        else:
            assert events is not None
            source = _played(time_frames(events, frame_us, (height, width)), frame_us / speed)
            name = str(files[0])
        view = stack.enter_context(View(name, frame_us, speed if live is None else 1.0, quiet=as_json))
        with suppress(KeyboardInterrupt), signals.noting(_end):  # the ways in which watching ends
            for due, frame in source:
                view.note_jumps(0 if live is None else live.jumps)
                view.show(stream.step(frame).ranked(net.network.classes), time.monotonic() - due)
                if view.frames == frames:
                    break
    facts = view.facts(live)
    text = facts.pop("text")
    print_result(as_json, facts, lambda: print_line(text))


def _end(_: int, usual: object) -> None:
    """End the watching at SIGTERM as at Ctrl-C, with its summary. A signal that was ignored before stays so."""
    if usual is not signal.SIG_IGN:
        raise KeyboardInterrupt


def _frame_us(network: IntegerNetwork, frame_ms: float | None) -> int:
    """The microseconds of a frame: as asked for, or as the network was trained where that is a fixed time."""
    if network.static or network.input_shape[0] != 2:
        shape = "x".join(map(str, network.input_shape))
        raise LbqError(
            f"the network reads {'images' if network.static else 'frames'} of {shape}, not events in two polarities: give one "
            "that was trained on event frames, docs/tutorials/watch.md"
        )
    known = network.dataset.get("name") == "dvs_objects" and network.dataset.get("frames") == "time"
    if frame_ms is None and known:
        window_ms: Any = network.dataset.get("window_ms")  # a file says so: it may be anything
        if type(window_ms) in (int, float) and 0.001 * network.timesteps <= window_ms <= 1e6 * network.timesteps:
            frame_ms = window_ms / network.timesteps
    if frame_ms is None:
        raise LbqError("say how long a frame is with --frame-ms: the network's frames were not cut by a fixed time")
    if not 0.001 <= frame_ms <= 1e6:
        raise LbqError(f"--frame-ms must be from 0.001 to 1000000, got {frame_ms:g}")
    return round(1000 * frame_ms)


def _sensor(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if match is None or not all(1 <= int(side) <= 2**14 for side in match.groups()):
        raise LbqError(f"--sensor must be WIDTHxHEIGHT in pixels, such as 640x480, got {text!r}")
    return int(match[1]), int(match[2])


def _played(frames: Iterator[Frame], frame_us: float) -> Iterator[tuple[float, Frame]]:
    """Each frame when it would be complete, and when that is."""
    begin = time.monotonic()
    for number, frame in enumerate(frames, 1):
        due = begin + number * frame_us / 1e6
        time.sleep(max(due - time.monotonic(), 0))
        yield due, frame


class View:
    """What is seen, on a terminal as bars that change, elsewhere as a line for every change, and where it is twice as late.

    speed: how many microseconds of a frame pass in one. Behind: later than a frame lasts.
    """

    def __init__(self, name: str, frame_us: int, speed: float = 1.0, quiet: bool = False) -> None:
        self.name, self.frame_us, self.speed, self.quiet = name, frame_us, speed, quiet
        self.frames = self.behind = self.jumps = 0
        self.worst = 0.0
        self.seen: Counter[str] = Counter()
        self.last, self.behind_now, self.said_s = "", False, 0.0  # said_s: the delay that was last printed
        self.console = make_console()
        self.live: Any = None

    def __enter__(self) -> View:
        if self.console.is_terminal and not self.quiet:
            from rich.live import Live

            self.live = Live(console=self.console, refresh_per_second=10, transient=True)
            self.live.start()
        elif not self.quiet:
            print_line(f"watching {self.name}, frames of {self.frame_us / 1000:g} ms")
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def note_jumps(self, jumps: int) -> None:
        """Say that time began anew, if it did since it was last said."""
        if jumps > self.jumps and not self.quiet:
            self.console.print("the events' clock jumped: time begins anew")
        self.jumps = jumps

    def show(self, ranked: list[dict[str, Any]], late_s: float) -> None:
        """late_s: how long after its frame was complete this decision was there."""
        self.frames += 1
        was_behind, behind = self.behind_now, late_s * 1e6 * self.speed > self.frame_us
        self.behind_now, self.behind, self.worst = behind, self.behind + behind, max(self.worst, late_s)
        best = str(ranked[0]["class"])
        self.seen[best] += 1
        now = f"{self.frames * self.frame_us / 1e6:9.3f} s"
        lag = f"BEHIND by {1000 * late_s:.0f} ms" if behind else ""
        if self.live is not None:
            from rich.text import Text

            bars = [("#" * round(BAR_CHARACTERS * row["share"])).ljust(BAR_CHARACTERS) for row in ranked]
            rows = [f"{bar} {100 * row['share']:5.1f} %  {row['class']}" for bar, row in zip(bars, ranked, strict=True)]
            lines = [self.name, f"{now}  {best}  {lag}".rstrip(), *rows[:SHOWN_CLASSES]]
            self.live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"))
        elif not self.quiet and (best != self.last or behind != was_behind or (behind and late_s > 2 * self.said_s)):
            self.said_s = late_s
            print_line(f"{now}  {best}  {100 * ranked[0]['share']:.1f} %  {lag}".rstrip())
        self.last = best

    def facts(self, live: UdpEvents | None) -> dict[str, Any]:
        """What was seen, as JSON values, and a line for people."""
        counted = {} if live is None else {key: getattr(live, key) for key in DROPPED}
        seen = dict(self.seen.most_common())
        shares = ", ".join(
            f"{name} {100 * count / self.frames:.0f} %" for name, count in [*seen.items()][:SHOWN_CLASSES]
        )
        kept = (
            "never fell behind"
            if not self.behind
            else f"fell behind in {self.behind} frame{'s' * (self.behind > 1)} (by up to {1000 * self.worst:.0f} ms)"
        )
        text = f"{self.name}: {self.frames} frames of {self.frame_us / 1000:g} ms; {shares}; {kept}"
        dropped = "; ".join(f"{count:,} {DROPPED[key]}" for key, count in counted.items() if count)
        text = f"{self.name}: no frames" if not self.frames else text
        return {
            "source": self.name,
            "frames": self.frames,
            "frame_ms": self.frame_us / 1000,
            "seen": seen,
            "last": self.last,
            "behind": self.behind,
            "worst_delay_ms": round(1000 * self.worst, 3),
            **counted,
            "text": text + (f"; {dropped}" if dropped else ""),
        }
