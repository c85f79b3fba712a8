"""An integer network as steps over tensors in planned memory: the form in which plain code runs it. NumPy only.

Steps are layers and the pools between them, in order. A tensor lives from the step that writes it to the last step that
reads it. Tensors that live at different times share memory. The sum at the end of a residual block takes the place of its
shortcut. One call runs all timesteps, or one timestep each, and then membranes are kept between calls.
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
Place = list["Tensor"]  # of one size, one after the other in the same memory


@dataclass
class Tensor:
    """Values over time: 8-bit levels, or int32 `sums` of pooled levels.

    frames: 1 where all timesteps of a call share the values. born, dies: the steps that write it and read it last.
    offset: of its first value, among the bytes or the words.
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
    """A layer, or the readout.

    sources: the tensor that each synapse reads. target: None for the readout. membranes: where the layer's membranes begin
    among those that are kept.
    """

    layer: IntegerLayer
    sources: tuple[int, ...]
    target: int | None
    membranes: int = 0


@dataclass
class Schedule:
    """The steps of a network and their memory.

    stepwise: whether a call runs one timestep, so that it needs room for the levels of one timestep only.
    keep: whether all levels stay until the end, for a caller that looks at them.
    levels: bytes of all levels.
    words: int32 values. The first are scratch: two for each channel of the widest layer, and a third for its membrane where
        membranes are not kept.
    membranes: int32 values that are kept, `[H, W, C]` of each layer.
    """

    network: IntegerNetwork
    stepwise: bool = False
    keep: bool = False
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
            levels = Tensor("signed" if neuron.signed else "unsigned", timesteps, layer.shape, neuron.n_max)
            target = self._add((layer.name, ()), levels)
            self._step("layer", len(self.layers), (*sources, target))
            self.layers.append(LayerStep(layer, sources, target, self.membranes))
            self.membranes += layer.units if self.stepwise else 0
        sources = self._read(net.readout)
        for source in sources:
            self.tensors[source].dies = len(self.steps)
        for tensor in self.tensors if self.keep else ():
            tensor.dies = len(self.steps)
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
        """The tensors that a layer's synapses read; pools that are missing are added."""
        return tuple(self._pooled(s, len(s.pools)) for s in layer.synapses)

    def _pooled(self, synapse: Synapse, count: int) -> int:
        """The tensor of a synapse's source after the first `count` pools."""
        key = synapse.source, synapse.pools[:count]
        if key in self._known:
            return self._known[key]
        source = self._pooled(synapse, count - 1)
        tensor, p = self.tensors[source], synapse.pools[count - 1]
        largest = tensor.largest * (math.prod(p.kernel) if p.kind == "sum" else 1)
        signed = self.network.negative(synapse)
        kind: Kind = "sums" if largest > highest_level(signed) else "signed" if signed else "unsigned"
        target = self._add(key, Tensor(kind, tensor.frames, p.output(tensor.shape), largest))
        self._step("pool", len(self.pools), (source, target))
        self.pools.append(PoolStep(p, source, target))
        return target

    # Memory ------------------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        places = [[tensor] for tensor in self.tensors]
        for step, (kind, index) in enumerate(self.steps):
            if kind == "layer":
                self._share(places, self.layers[index], step)
        shared = {id(place): place for place in places[1:]}.values()
        scratch = (2 if self.stepwise else 3) * max(layer.shape[0] for layer in self.network.layers)
        self.levels = max(_offsets((place for place in shared if place[0].kind != "sums"), 0), 1)
        self.words = max(_offsets((place for place in shared if place[0].kind == "sums"), scratch), scratch)

    def _share(self, places: list[Place], step: LayerStep, when: int) -> None:
        """Let a layer write over levels that only its shortcut reads, and for the last time: each neuron reads before it
        writes."""
        assert step.target is not None
        conv = {source for s, source in zip(step.layer.synapses, step.sources, strict=True) if s.kind == "conv"}
        for s, source in zip(step.layer.synapses, step.sources, strict=True):
            place = places[source]
            levels = place[0].kind in ("unsigned", "signed")
            if levels and s.kind == "identity" and source not in conv and max(t.dies for t in place) == when:
                place.append(self.tensors[step.target])
                places[step.target] = place
                return


def _offsets(places: Iterable[Place], start: int) -> int:
    """Give each place the lowest offset from `start` at which it meets no place that lives at the same time.

    The largest places choose first. Return the end of the last place.
    """
    chosen: list[tuple[int, int, int, int]] = []  # offset, end, birth and death
    spans = [(max(t.size for t in p), min(t.born for t in p), max(t.dies for t in p), p) for p in places]
    for size, born, dies, place in sorted(spans, key=lambda span: (-span[0], span[1])):
        offset = start
        for other, end, other_born, other_dies in sorted(chosen):
            if born <= other_dies and other_born <= dies and other < offset + size and offset < end:
                offset = end
        for tensor in place:
            tensor.offset = offset
        chosen.append((offset, offset + size, born, dies))
    return max((end for _, end, *_ in chosen), default=start)
