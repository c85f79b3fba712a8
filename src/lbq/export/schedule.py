"""An integer network as steps over tensors in planned memory: the form in which plain code runs it. NumPy only.

Steps are layers and the pools between them, in order. A tensor lives from the step that writes it to the last one that reads
it; those that live at different times share memory. The sum at the end of a residual block takes the place of its shortcut.
All timesteps run in one call, or each in a call of its own, between which membranes are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from lbq.graph import INPUT, Pool, Shape, Synapse
from lbq.graph.integer import LARGEST_PIXEL, IntegerLayer, IntegerNetwork
from lbq.graph.levels import highest_level

Kind = Literal["image", "unsigned", "signed", "sums"]
Step = tuple[Literal["pool", "layer"], int]


@dataclass
class Tensor:
    """Values over time: 8-bit levels, or int32 `sums` of pooled ones. frames: 1 where all timesteps of a call share them.

    born, dies: the steps that write and last read it. offset: of its first value, among the bytes or the words.
    """

    kind: Kind
    frames: int
    shape: Shape
    largest: int
    born: int = -1
    dies: int = -1
    offset: int = 0

    @property
    def size(self) -> int:
        return self.frames * math.prod(self.shape)


@dataclass(frozen=True)
class PoolStep:
    pool: Pool
    source: int
    target: int


@dataclass(frozen=True)
class LayerStep:
    """sources: the tensor that each of the layer's synapses reads. target: None for the readout. membranes: where its own
    begin among those that are kept."""

    layer: IntegerLayer
    sources: tuple[int, ...]
    target: int | None
    membranes: int = 0


@dataclass
class Schedule:
    """stepwise: whether a call runs one timestep, so that it needs room for the levels of one only.

    levels: bytes of all levels; words: int32 values, `scratch` of them first, two for each channel of the widest layer, and
    one more for its membrane where none are kept; membranes: int32 values that are, `[H, W, C]` of each layer."""

    network: IntegerNetwork
    stepwise: bool = False
    tensors: list[Tensor] = field(default_factory=list)
    pools: list[PoolStep] = field(default_factory=list)
    layers: list[LayerStep] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    levels: int = 0
    words: int = 0
    membranes: int = 0

    def __post_init__(self) -> None:
        net = self.network
        self._known: dict[tuple[str, tuple[Pool, ...]], int] = {}
        timesteps = 1 if self.stepwise else net.timesteps
        self._add((INPUT, ()), Tensor("image", 1 if net.static else timesteps, net.input_shape, LARGEST_PIXEL))
        for layer in net.layers:
            sources = self._read(layer)
            neuron = net.spec(layer.name)
            made = Tensor("signed" if neuron.signed else "unsigned", timesteps, layer.shape, neuron.n_max)
            target = self._add((layer.name, ()), made)
            self._step("layer", len(self.layers), (*sources, target))
            self.layers.append(LayerStep(layer, sources, target, self.membranes))
            self.membranes += layer.units if self.stepwise else 0
        sources = self._read(net.readout)
        for source in sources:
            self.tensors[source].dies = len(self.steps)
        self.readout = LayerStep(net.readout, sources, None)
        self._place()

    def _add(self, key: tuple[str, tuple[Pool, ...]], tensor: Tensor) -> int:
        tensor.born = len(self.steps)
        self.tensors.append(tensor)
        self._known[key] = len(self.tensors) - 1
        return self._known[key]

    def _step(self, kind: Literal["pool", "layer"], index: int, uses: Iterable[int]) -> None:
        for tensor in uses:
            self.tensors[tensor].dies = len(self.steps)
        self.steps.append((kind, index))

    def _read(self, layer: IntegerLayer) -> tuple[int, ...]:
        """The tensors that a layer's synapses read, pooled where they are not yet."""
        return tuple(self._pooled(s, len(s.pools)) for s in layer.synapses)

    def _pooled(self, synapse: Synapse, count: int) -> int:
        """What a synapse reads, after the first `count` of its pools."""
        key = synapse.source, synapse.pools[:count]
        if key in self._known:
            return self._known[key]
        source = self._pooled(synapse, count - 1)
        found, p = self.tensors[source], synapse.pools[count - 1]
        largest = found.largest * (math.prod(p.kernel) if p.kind == "sum" else 1)
        signed = self.network.negative(synapse)
        kind: Kind = "sums" if largest > highest_level(signed) else "signed" if signed else "unsigned"
        target = self._add(key, Tensor(kind, found.frames, p.output(found.shape), largest))
        self._step("pool", len(self.pools), (source, target))
        self.pools.append(PoolStep(p, source, target))
        return target

    # Memory ------------------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        places = [_Place([tensor]) for tensor in self.tensors]
        for step, (kind, index) in enumerate(self.steps):
            if kind == "layer":
                self._share(places, self.layers[index], step)
        shared = {id(place): place for place in places[1:]}.values()
        words = [place for place in shared if place.tensors[0].kind == "sums"]
        scratch = (2 if self.stepwise else 3) * max(layer.shape[0] for layer in self.network.layers)
        self.levels = max(_offsets((place for place in shared if place.tensors[0].kind != "sums"), 0), 1)
        self.words = max(_offsets(words, scratch), scratch)

    def _share(self, places: list[_Place], step: LayerStep, when: int) -> None:
        """A layer may write over levels that only a shortcut reads, and for the last time: neuron by neuron, read first."""
        assert step.target is not None
        conv = {source for s, source in zip(step.layer.synapses, step.sources, strict=True) if s.kind == "conv"}
        for s, source in zip(step.layer.synapses, step.sources, strict=True):
            place = places[source]
            levels = place.tensors[0].kind in ("unsigned", "signed")
            if levels and s.kind == "identity" and source not in conv and place.dies == when:
                place.tensors.append(self.tensors[step.target])
                places[step.target] = place
                return


@dataclass
class _Place:
    """Tensors of one size, one after the other in the same memory."""

    tensors: list[Tensor]

    @property
    def size(self) -> int:
        return max(tensor.size for tensor in self.tensors)

    @property
    def born(self) -> int:
        return min(tensor.born for tensor in self.tensors)

    @property
    def dies(self) -> int:
        return max(tensor.dies for tensor in self.tensors)


def _offsets(places: Iterable[_Place], start: int) -> int:
    """Give each place the lowest offset, from `start`, where it meets none that lives at the same time; the largest choose
    first. Returns where the last one ends."""
    placed: list[tuple[int, _Place]] = []
    for place in sorted(places, key=lambda p: (-p.size, p.born)):
        offset = start
        for other, there in sorted(placed, key=lambda pair: pair[0]):
            together = place.born <= there.dies and there.born <= place.dies
            if together and other < offset + place.size and offset < other + there.size:
                offset = other + there.size
        for tensor in place.tensors:
            tensor.offset = offset
        placed.append((offset, place))
    return max((offset + place.size for offset, place in placed), default=start)
