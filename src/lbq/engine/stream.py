"""A deployed network on frames that never end: membranes are kept from frame to frame, logits are of the latest frames."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lbq.engine.method import EngineName
from lbq.engine.output import Output
from lbq.engine.runner import Runner
from lbq.engine.tape import aligned
from lbq.errors import LbqError
from lbq.graph import shortest, with_sides
from lbq.graph.endless import check_membranes, over_window
from lbq.graph.integer import MOST_TIMESTEPS, IntegerNetwork

STREAM_ENGINES: tuple[EngineName, ...] = ("auto", "dense", "bitplane")


class Stream:
    """Frames one by one through a network: `Network.stream` makes it. Membranes and the window are this stream's own.

    frames: how many it has seen since it began, or since the last restart. One thread at a time may use it.
    unchanged: refuses results where the network's file was written to.
    """

    def __init__(
        self,
        network: IntegerNetwork,
        unchanged: Callable[[], AbstractContextManager[None]],
        window: int | None,
        restart: int | None,
        engine: EngineName,
        threads: int,
    ) -> None:
        if engine not in STREAM_ENGINES:
            raise LbqError(f"engine must be one of {', '.join(STREAM_ENGINES)} for a stream, got {engine!r}")
        if restart is not None and (type(restart) is not int or not 1 <= restart <= MOST_TIMESTEPS):
            raise LbqError(f"restart must be a whole number of frames in 1..{MOST_TIMESTEPS}, got {restart!r}")
        check_membranes(network, restart)
        most = MOST_TIMESTEPS if restart is None else restart  # no more frames come than that
        window = min(network.timesteps, most) if window is None else window
        if type(window) is int and most < window <= MOST_TIMESTEPS:
            raise LbqError(
                f"window must be at most {restart}, the frames between two restarts, got {window}: restart later"
            )
        self._unchanged, self._engine, self._threads, self.restart = unchanged, engine, threads, restart
        self.network = over_window(network, window)
        readout = replace(self.network.readout, bias=np.zeros_like(self.network.readout.bias))  # added once, below
        one = replace(self.network, timesteps=1, readout=readout)
        self._carried = {layer.name: aligned((1, *layer.shape[1:], layer.shape[0]), np.int32) for layer in one.layers}
        self._runner = Runner(one, self._carried)
        self._latest: deque[NDArray[np.int64]] = deque()
        self.reset()

    @property
    def window(self) -> int:
        """Logits are of so many of the latest frames."""
        return self.network.timesteps

    def __repr__(self) -> str:
        again = "" if self.restart is None else f", anew after {self.restart}"
        return f"Stream({self.frames} frames so far, logits of the latest {self.window}{again}; {self.network})"

    def reset(self) -> None:
        """Begin anew: membranes at rest, no frames seen."""
        for carried in self._carried.values():
            carried[...] = 0
        self._latest.clear()
        self._sum, self.frames = self.network.readout.bias.astype(np.int64), 0

    def step(self, frame: NDArray[np.uint8], trace: bool = False) -> Output:
        """The next frame, uint8 `[C, H, W]`. Logits `[1, classes]` are of the latest `window` frames.

        After T frames, and with a window of T, they are those of `Network.run` on these frames; before that, what the frames so
        far add to the bias of all. trace: also give every layer's levels at this frame, `[1, 1, C, H, W]`.
        """
        x = self._checked(frame)
        if self.frames == self.restart:
            self.reset()
        with self._unchanged():
            out = self._runner.run(
                x[None] if self.network.static else x[None, None], self._engine, trace, self._threads
            )
        self._latest.append(out.logits[0])
        self._sum = self._sum + out.logits[0]
        if len(self._latest) > self.window:
            self._sum = self._sum - self._latest.popleft()
        self.frames += 1
        return replace(out, logits=self._sum[None], scale=self.network.scale)

    def _checked(self, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        net, x = self.network, np.asarray(frame)
        if x.dtype != np.uint8:
            raise LbqError(f"frame must be uint8, as frames are stored, got {x.dtype}")
        x = x if x.shape == net.input_shape else with_sides(x, net.input_shape, 0)
        if x.shape != net.input_shape:
            raise LbqError(f"frame must be {list(shortest(net.input_shape))}, got {list(np.shape(frame))}")
        if (most := int(x.max())) > net.input_max:
            raise LbqError(
                f"frame has values up to {most}, the network was trained on 0 to {net.input_max}: scale it to that"
            )
        return x
