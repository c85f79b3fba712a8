"""How often each level was emitted, by timestep and position, in constant memory. NumPy only.

These tallies are all that accounting and analysis need: histograms, active ratios, accumulations of every kind (each
position weighted by its own fan-out, so borders are exact) follow from them, and one pass over the data serves all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lbq.counting.products import ProductTallies
from lbq.engine.steps import Tally
from lbq.errors import GraphError, nearest
from lbq.graph import INPUT, Graph, Layer, Pool, Shape, Synapse
from lbq.graph.integer import LARGEST_PIXEL, IntegerNetwork
from lbq.graph.levels import Integers, pool
from lbq.native import library

Counts = NDArray[np.int64]

FEW_LEVELS = 24  # up to here, one pass over the bytes for each level is faster than a general histogram
FEW_POSITIONS = 16
ROW_BYTES = 2048  # that are compared at a time
MOST_ROWS = 255  # that bytes can add up without overflow


def level_counts(levels: Integers, n_max: int) -> Counts:
    """How often each magnitude 0..n_max occurs, `[T, H * W, n_max + 1]`, in levels `[T, B, C, H, W]`."""
    steps, batch, channels, height, width = levels.shape
    rows, positions = batch * channels, height * width
    if (bytes_ := _channels_last(levels)) is not None:
        return Tally(bytes_, n_max)()
    flat = levels.reshape(steps, rows, positions)
    if flat.dtype.kind == "i":
        flat = np.abs(flat)
    if n_max > FEW_LEVELS or positions < FEW_POSITIONS:
        places = np.arange(steps)[:, None, None] * positions + np.arange(positions)
        index = flat.astype(np.int64) + places * (n_max + 1)
        counts = np.bincount(index.ravel(), minlength=steps * positions * (n_max + 1))
        return counts.reshape(steps, positions, n_max + 1)
    abreast = math.gcd(rows, max(ROW_BYTES // positions, 1))  # images and channels side by side: long rows are fast
    flat = flat.reshape(steps, rows // abreast, abreast * positions)
    wide = np.zeros((n_max + 1, steps, flat.shape[2]), np.int64)
    equal = np.empty((MOST_ROWS, flat.shape[2]), np.bool_)  # small enough to stay in cache
    for t in range(steps):
        for start in range(0, flat.shape[1], MOST_ROWS):
            part = flat[t, start : start + MOST_ROWS]
            for k in range(1, n_max + 1):
                hits = np.equal(part, k, out=equal[: len(part)])
                wide[k, t] += np.add.reduce(hits.view(np.uint8), axis=0, dtype=np.uint8)
    out = wide.reshape(n_max + 1, steps, abreast, positions).sum(2).transpose(1, 2, 0).copy()
    out[:, :, 0] = rows - out[:, :, 1:].sum(2)
    return out


def _channels_last(levels: Integers) -> Integers | None:
    """The same levels as `[T, B, H, W, C]` where the native library can count them as they lie."""
    moved = levels.transpose(0, 1, 3, 4, 2)
    return moved if levels.itemsize == 1 and moved.flags.c_contiguous and library() is not None else None


@dataclass(frozen=True)
class Read:
    """Levels of a layer as a synapse reads them: max-pooled, then summed over windows, then over time.

    absolute: sums of magnitudes instead of magnitudes of sums, for networks whose events are counted one by one.
    """

    source: str
    maxima: tuple[Pool, ...] = ()
    sums: tuple[Pool, ...] = ()
    over_time: bool = False
    absolute: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is the levels themselves."""
        return not (self.maxima or self.sums or self.over_time)

    def of(self, levels: Integers) -> Integers:
        """What is read of levels `[T, B, C, H, W]`."""
        if self.whole:
            return levels
        steps, batch = levels.shape[:2]
        flat = pool(levels.reshape(-1, *levels.shape[2:]), self.maxima)
        if self.absolute:
            flat = np.abs(flat)
        flat = pool(flat, self.sums)
        read = flat.reshape(steps, batch, *flat.shape[1:])
        return read.sum(0, keepdims=True, dtype=np.int32) if self.over_time else read

    @property
    def plain(self) -> Read:
        """Before anything is summed: what the paper's counts at the neurons' own rate see."""
        return Read(self.source, self.maxima)


def _check_graph(graph: object) -> None:
    if not isinstance(graph, Graph | IntegerNetwork):
        integers = isinstance(getattr(graph, "network", None), IntegerNetwork)
        remedy = "its .network" if integers else "lbq.deploy.graph_of(net, input_shape)"
        raise GraphError(f"graph must be a Graph or an IntegerNetwork, got {type(graph).__name__}: give {remedy}")


def _refusal(name: str, expected: str, actual: object) -> GraphError:
    """The error for what cannot be levels of a layer, or pixels of the source `input`."""
    if name == INPUT:
        return GraphError(f"pixels of 'input' must be {expected}, got {actual}: give them as they are stored, uint8")
    return GraphError(
        f"levels of layer {name!r} must be {expected}, got {actual}: give levels, as record_levels or a run with trace=True "
        "gives them, not a neuron's outputs"
    )


def _fits(sides: tuple[int, ...], shape: Shape) -> bool:
    """Whether these sizes after time and batch are a layer's shape: as it is, flattened, or without sides of 1."""
    return sides == (math.prod(shape),) or [n for n in sides if n != 1] == [n for n in shape if n != 1]


class Tallies:
    """Counts of every tensor that some synapse of a network reads. `add` levels batch by batch."""

    def __init__(self, graph: Graph | IntegerNetwork) -> None:
        _check_graph(graph)
        self.graph, self.images = graph, 0
        self.unit_events = graph.unit_events
        self._readout = {s.name for s in graph.readout.synapses}
        self.products = ProductTallies(graph)
        reads = {Read(name) for name in (*(layer.name for layer in graph.layers), *self.products.operands)}
        for synapse in graph.synapses:
            if synapse.source != INPUT and synapse.kind != "matmul":
                reads |= {self.read(synapse), self.read(synapse).plain}
                if self.unit_events:
                    reads.add(self.read(synapse, absolute=True))
        self.reads = tuple(sorted(reads, key=repr))
        self.counts: dict[Read, Counts] = {}
        self._prepared: dict[str, tuple[Integers, list[Callable[[], Any]]]] = {}

    def read(self, synapse: Synapse, absolute: bool = False) -> Read:
        """What a synapse reads; the readout reads sums over time."""
        maxima = tuple(p for p in synapse.pools if p.kind == "max")  # they come first: an average cannot be max-pooled
        sums = synapse.pools[len(maxima) :]
        over_time = synapse.name in self._readout and self.graph.timesteps > 1
        return Read(synapse.source, maxima, sums, over_time, absolute and bool(sums or over_time))

    def largest(self, read: Read) -> int:
        """The largest magnitude that can be read."""
        level = LARGEST_PIXEL if read.source == INPUT else self.graph.n_max(read.source)
        windows = math.prod(p.window for p in read.sums)
        return level * windows * (self.graph.timesteps if read.over_time else 1)

    def add(self, levels: Mapping[str, Integers] | None) -> None:
        """Levels of every layer for one batch, `[T, B, C, H, W]` or with the last three flattened.

        Levels of the source `input` are pixels, `[1, B, C, H, W]` for a static image; they may be left out. All are checked
        before any is counted.
        """
        if levels is None:
            raise GraphError("there are no levels to count: run the network with trace=True")
        missing = [layer.name for layer in self.graph.layers if layer.name not in levels]
        if missing:
            raise GraphError(f"no levels were recorded for layer {missing[0]!r}")
        arrays = {name: np.asarray(level) for name, level in levels.items()}
        for name, level in arrays.items():
            self._check_values(self._shaped(level, name), name)
        sizes = {name: level.shape[1] for name, level in arrays.items()}
        first, images = next(iter(sizes.items()))
        other = next((name for name, size in sizes.items() if size != images), None)
        if other is not None:
            raise GraphError(
                f"layers {first!r} and {other!r} have levels of {images} and {sizes[other]} images: give those of one batch"
            )
        order = {layer.name: number for number, layer in enumerate(self.graph.layers)}
        for name in sorted(arrays, key=lambda name: order.get(name, -1)):  # as they run: products need their operands
            self.add_layer(name, arrays[name])
        self.images += images

    def add_layer(self, name: str, levels: Integers) -> None:
        """Levels of one layer, or of the source `input`, for one batch. The caller checks values and counts `images`.

        An engine reuses one array for image after image: that is prepared once.
        """
        array, ways = self._prepared.get(name, (None, []))
        if array is not levels:
            shaped = self._shaped(levels, name)
            reads = [Read(INPUT)] if name == INPUT else [read for read in self.reads if read.source == name]
            ways = [self._way(read, shaped) for read in reads]
            if _channels_last(shaped) is not None:  # an engine's
                self._prepared[name] = levels, ways
        for count in ways:
            count()
        if name in self.products.operands:
            for gate, made in self.products.add(name, self._shaped(levels, name)):
                self.add_counts(self.gate_counts(gate, made), 0)

    def gate_counts(self, gate: str, levels: Integers) -> dict[Read, Counts]:
        """Counts of all that is read of a gate."""
        reads = (read for read in self.reads if read.source == gate)
        return {read: level_counts(read.of(levels), self.largest(read)) for read in reads}

    def _way(self, read: Read, levels: Integers) -> Callable[[], Any]:
        """A function that counts what is read of the levels in this memory."""
        n_max = self.largest(read)
        bytes_ = _channels_last(levels) if read.whole else None
        if bytes_ is None:
            return lambda: self.add_counts({read: level_counts(read.of(levels), n_max)}, 0)
        way = Tally(bytes_, n_max, self.counts.get(read))
        self.counts[read] = way.counts
        return way

    def add_counts(self, counts: Mapping[Read, Counts], images: int) -> None:
        """Add counts of so many images that were made elsewhere, such as on a GPU or in a thread. Products have their own."""
        for read, more in counts.items():
            if read in self.counts:
                self.counts[read] += more
            else:
                self.counts[read] = more.copy()
        self.images += images

    def _shaped(self, level: Integers, name: str) -> Integers:
        """Levels of a layer, or of the source `input`, as `[T, B, C, H, W]`."""
        known = {INPUT, *(layer.name for layer in self.graph.layers)}
        if name not in known:
            raise GraphError(f"the network has no layer {name!r}{nearest(name, known)}")
        if level.dtype.kind not in "iub":
            raise _refusal(name, "integers", level.dtype)
        shape = self.graph.input_shape if name == INPUT else self.graph[name].shape
        steps = self.graph.frames if name == INPUT else self.graph.timesteps
        layer = None if name == INPUT else self.graph[name]
        if isinstance(layer, Layer) and layer.layout is not None and level.shape[2:] == layer.layout.sizes:
            level = layer.placed(level)
        if level.ndim < 2 or level.shape[0] != steps or not _fits(level.shape[2:], shape):
            raise _refusal(name, f"[{steps}, B, {', '.join(map(str, shape))}]", list(level.shape))
        if level.dtype.kind == "b":
            level = level.view(np.uint8)  # spikes
        return level.reshape(*level.shape[:2], *shape)

    def _check_values(self, level: Integers, name: str) -> None:
        """Refuse levels that the layer's neurons cannot emit, and pixels out of range."""
        most = self.largest(Read(name))
        least = -most if name != INPUT and self.graph.spec(name).signed else 0
        if level.size and (level.min() < least or level.max() > most):
            raise _refusal(name, f"{least} to {most}", f"{level.min()} to {level.max()}")

    def by_timestep(self, layer: str) -> Counts:
        """`[T, n_max + 1]` of a layer."""
        return self.counts[Read(layer)].sum(1)
