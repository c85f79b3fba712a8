"""Run an integer network on the CPU: layer by layer, all timesteps of a layer at once, in memory that is planned once.

Timesteps of one layer depend on each other only through its membrane. So its convolutions see `[T * B, H, W, C]` as one
batch, and the membrane lives only while its layer runs. A few images run at a time, so that a layer's currents stay in
cache. Several threads take different images, or share one image's convolutions. execution.py runs one piece.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lbq.engine.convolution import Backend, Counts, add_counts
from lbq.engine.execution import Execution, OnLevels, OnMembranes, Program, Recording
from lbq.engine.memory import Workspace
from lbq.engine.method import Choice, EngineName, fallback
from lbq.engine.output import Output
from lbq.engine.tape import recording
from lbq.graph.integer import IntegerNetwork
from lbq.graph.levels import Integers
from lbq.native import isa

IMAGES_PER_CHOICE = 64  # after so many, densities are measured again
MOST_RECORDINGS = 4  # of one workspace: engines take turns, and choices change
NEURON_STEPS_PER_PIECE = 2**18  # of the largest layer: 1 MiB of currents


class Runner(Program):
    """An integer network ready to run on this machine's CPU."""

    def __init__(self, network: IntegerNetwork, carried: dict[str, NDArray[np.int32]] | None = None) -> None:
        super().__init__(network, carried)
        widest = max(layer.units for layer in network.layers) * network.timesteps
        self.images_per_piece = max(NEURON_STEPS_PER_PIECE // widest, 1)
        products = len(network.gates) + sum(len(layer.matmuls) for layer in network.layers)
        self.to_choose = len(self.prepared) + len(self.heads) + products
        self._spaces: list[Workspace] = []
        self._choices: dict[tuple[EngineName, bool, bool], tuple[dict[str, Choice], int]] = {}
        self._lock = threading.Lock()

    def run(
        self,
        x: NDArray[np.uint8],
        engine: EngineName = "auto",
        trace: bool | OnLevels = False,
        threads: int = 1,
        backend: Backend = "horner",
        progress: Callable[[int], None] | None = None,
        watch: OnMembranes | None = None,
    ) -> Output:
        """Inputs `[B, C, H, W]`, or `[T, B, C, H, W]` for events.

        trace: True keeps every layer's levels. A function is called, by any thread, with the levels of some images.
        watch: a function that is called with every layer's membranes, on one thread.
        """
        net = self.network
        if engine != "dense" and (reason := fallback()) is not None:
            warnings.warn(f"running in NumPy, which is right but slow: {reason}", RuntimeWarning, stacklevel=3)
        batch = x.shape[net.batch_axis]
        size = max(min(self.images_per_piece, -(-batch // threads)), 1)
        pieces = [slice(i, min(i + size, batch)) for i in range(0, batch, size)]
        choices, settled = self._settle(engine, backend, batch)
        # all threads share the piece in which choices are made, and the last ones, which are too few for all threads
        first = 0 if settled else 1
        shared = len(pieces) if threads == 1 else first + (len(pieces) - first) % threads

        def run_piece(piece: slice, inside: int = 1) -> Output:
            traced: dict[str, Integers] = {}

            def keep(name: str, levels: Integers) -> None:
                traced[name] = levels.copy()  # in the order of [T, B, C, H, W]; the memory will be used again

            on_levels = (keep if trace is True else trace) or None
            with self._space(size) as space:
                execution = Execution(self, space, engine, backend, inside, choices, on_levels, watch)
                logits, counted = self._execute(execution, x[piece] if net.static else x[:, piece])
                counts = {name: count() for name, count in counted.items()}
            if progress is not None:
                progress(piece.stop - piece.start)
            return Output(logits, net.scale, counts, choices, traced)

        parts = [run_piece(piece, threads) for piece in pieces[:shared]]
        if pieces[shared:]:
            with ThreadPoolExecutor(threads) as workers:
                parts += workers.map(run_piece, pieces[shared:])
        return self._joined(parts, trace is True)

    def _settle(self, engine: EngineName, backend: Backend, images: int) -> tuple[dict[str, Choice], bool]:
        """The choices for these images, and whether all are made. Choices hold for `IMAGES_PER_CHOICE` images."""
        key = engine, fallback() is None, backend == "horner"  # two timesteps at once are never weighted otherwise
        with self._lock:
            choices, seen = self._choices.get(key, ({}, 0))
            if seen >= IMAGES_PER_CHOICE:
                choices, seen = {}, 0
            self._choices[key] = choices, seen + images
        return choices, len(choices) == self.to_choose

    def _execute(
        self, execution: Execution, x: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], dict[str, Callable[[], Counts]]]:
        """Logits and counters of some images: by the recording of an equal execution, or by one that is then recorded."""
        choices, recordings = execution.choices, execution.space.recordings
        if execution.watch is not None or not execution.by_library or len(choices) < self.to_choose:
            return execution.run(x), execution.counted  # choices are still to be made, or NumPy takes part
        kernels = ((choice.kernel, choice.method) for choice in choices.values())
        key = (execution.engine, execution.backend, x.shape, isa(), *kernels)
        recorded: Recording | None = recordings.get(key)
        if recorded is not None:
            return recorded.run(x, execution.threads, execution.on_levels), recorded.counted
        with recording() as execution.tape:
            logits = execution.run(x)
        if execution.native:
            while len(recordings) >= MOST_RECORDINGS:
                recordings.pop(next(iter(recordings)))
            recordings[key] = Recording(execution, logits)
            logits = logits.copy()
        return logits, execution.counted

    def _joined(self, parts: list[Output], trace: bool) -> Output:
        """The outputs of all pieces as one."""
        if len(parts) == 1:
            return replace(parts[0], choices=dict(parts[0].choices), levels=parts[0].levels or None)
        totals: dict[str, Counts] = {}
        for part in parts:
            add_counts(totals, part.counts)
        logits = np.concatenate([part.logits for part in parts])
        names = [layer.name for layer in self.network.layers] if trace else []
        traces = [part.levels or {} for part in parts]
        levels = {name: np.concatenate([levels[name] for levels in traces], axis=1) for name in names} or None
        return Output(logits, self.network.scale, totals, dict(parts[0].choices), levels)

    @contextmanager
    def _space(self, images: int) -> Iterator[Workspace]:
        """A workspace for so many images that no other thread uses meanwhile."""
        with self._lock:
            fitting = [space for space in self._spaces if space.images >= images]
            space = fitting[0] if fitting else Workspace(self.plan, images)
            self._spaces = [s for s in self._spaces if s is not space and s.images >= images]
        try:
            yield space
        finally:
            with self._lock:
                self._spaces.append(space)
