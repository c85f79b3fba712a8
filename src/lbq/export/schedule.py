"""An integer network as steps over tensors in planned memory: the form in which plain code runs it. NumPy only.

Steps are layers, and pools, gates and products between them, in order. A tensor lives from the step that writes it to the
last step that reads it. Tensors that live at different times share memory. The sum at the end of a residual block takes the
place of its shortcut, and a gate that of what it gates. One call runs all timesteps, or one timestep each, and then membranes
are kept between calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from lbq.graph import INPUT, Pool, Shape, Synapse
from lbq.graph.integer import LARGEST_PIXEL, IntegerLayer, IntegerNetwork
from lbq.graph.levels import highest_level

Kind = Literal["image", "unsigned", "signed", "sums"]
StepKind = Literal["pool", "gate", "product", "layer"]
Step = tuple[StepKind, int]
Place = list["Tensor"]  # of one size, one after the other in the same memory


@dataclass
class Tensor:
    """Values over time: 8-bit levels, or int32 `sums` of pooled levels or of products.

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

    sources: the tensor that each synapse reads; of attention Q. factors: the two others of each attention, K and V, or twice
    K^T V where Q (K^T V) takes fewer products; the image, 0, for the one that a product of two has not. target: None for the
    readout. membranes: where the layer's membranes begin among those that are kept.
    """

    layer: IntegerLayer
    sources: tuple[int, ...]
    target: int | None
    membranes: int = 0
    factors: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Schedule:
    """The steps of a network and their memory.

    stepwise: whether a call runs one timestep, so that it needs room for the levels of one timestep only.
    keep: whether all levels stay until the end, for a caller that looks at them.
    gates: factor, source and target of each.
    products: keys, values and target of K^T V of each head, `[channels, channels of a head]` of every frame, whose memory does
        not grow with the tokens.
    levels: bytes of all levels.
    words: int32 values. The first are scratch: two for each channel of the widest layer, a third for its membrane where
        membranes are not kept, and one more where the layer has attention.
    membranes: int32 values that are kept, `[H, W, C]` of each layer.
    """

    network: IntegerNetwork
    stepwise: bool = False
    keep: bool = False
    tensors: list[Tensor] = field(default_factory=list)
    pools: list[PoolStep] = field(default_factory=list)
    gates: list[tuple[int, int, int]] = field(default_factory=list)
    products: list[tuple[int, int, int]] = field(default_factory=list)
    layers: list[LayerStep] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    levels: int = 0
    words: int = 0
    membranes: int = 0

    def __post_init__(self) -> None:
        net = self.network
        self._known: dict[tuple[str, tuple[Pool, ...]], int] = {}
        self._known_products: dict[tuple[str, str, int], int] = {}
        self.timesteps = 1 if self.stepwise else net.timesteps
        self._add((INPUT, ()), Tensor("image", 1 if net.static else self.timesteps, net.input_shape, LARGEST_PIXEL))
        for layer in net.layers:
            sources, factors = self._read(layer), {s.name: self._factors(s) for s in layer.matmuls}
            target = self._add((layer.name, ()), self._levels(layer.name))
            self._step("layer", len(self.layers), (*sources, *chain(*factors.values()), target))
            self.layers.append(LayerStep(layer, sources, target, self.membranes, factors))
            self.membranes += layer.units if self.stepwise else 0
            for gate in net.gates_behind(layer.name):
                target = self._add((gate.name, ()), self._levels(gate.name))
                self.gates.append((self.tensor(gate.factor), self.tensor(gate.source), target))
                self._step("gate", len(self.gates) - 1, self.gates[-1])
        sources = self._read(net.readout)
        for source in sources:
            self.tensors[source].dies = len(self.steps)
        for tensor in self.tensors if self.keep else ():
            tensor.dies = len(self.steps)
        self.readout = LayerStep(net.readout, sources, None)
        self._place()

    @property
    def multiplies(self) -> bool:
        """Whether there are attention, gates or the sums over channels that stand in front of these."""
        sums = any(step.pool.channels > 1 for step in self.pools)
        return sums or bool(self.gates) or any(step.factors for step in self.layers)

    def tensor(self, name: str, pools: tuple[Pool, ...] = ()) -> int:
        """The number of a layer's, a gate's or the input's tensor, or of what such pools make of it."""
        return self._known[name, pools]

    def _add(self, key: tuple[str, tuple[Pool, ...]], tensor: Tensor) -> int:
        tensor.born = len(self.steps)
        self.tensors.append(tensor)
        self._known[key] = len(self.tensors) - 1
        return self._known[key]

    def _levels(self, name: str) -> Tensor:
        """Of a layer or a gate."""
        kind: Kind = "signed" if self.network.is_signed(name) else "unsigned"
        return Tensor(kind, self.timesteps, self.network.shape_of(name), self.network.n_max(name))

    def _step(self, kind: StepKind, index: int, uses: Iterable[int]) -> None:
        for tensor in uses:
            self.tensors[tensor].dies = len(self.steps)
        self.steps.append((kind, index))

    def _read(self, layer: IntegerLayer) -> tuple[int, ...]:
        """The tensors that a layer's synapses read; pools that are missing are added."""
        return tuple(self._pooled(s, len(s.pools)) for s in layer.synapses)

    def _factors(self, synapse: Synapse) -> tuple[int, int]:
        """The tensors that attention reads beside Q; K^T V is added where it is missing, and several may read it."""
        keys, values = (self.tensor(name or INPUT) for name in (synapse.keys, synapse.values))
        if not synapse.linear:
            return keys, values
        key = synapse.keys, synapse.values, synapse.heads
        if key not in self._known_products:
            channels, born = synapse.in_shape[0], len(self.steps)
            largest = self.tensors[keys].largest * self.tensors[values].largest * synapse.tokens
            shape = channels // synapse.heads, channels, 1
            self.tensors.append(Tensor("sums", self.timesteps, shape, largest, born))
            self._known_products[key] = len(self.tensors) - 1
            self.products.append((keys, values, self._known_products[key]))
            self._step("product", len(self.products) - 1, self.products[-1])
        return self._known_products[key], self._known_products[key]

    def _pooled(self, synapse: Synapse, count: int) -> int:
        """The tensor of a synapse's source after the first `count` pools."""
        key = synapse.source, synapse.pools[:count]
        if key in self._known:
            return self._known[key]
        source = self._pooled(synapse, count - 1)
        tensor, p = self.tensors[source], synapse.pools[count - 1]
        largest = tensor.largest * (p.window if p.kind == "sum" else 1)
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
            elif kind == "gate":
                _, source, target = self.gates[index]
                self._take(places, source, target, step)
        shared = {id(place): place for place in places[1:]}.values()
        rows = 2 if self.stepwise else 3
        scratch = max((rows + bool(layer.matmuls)) * layer.shape[0] for layer in self.network.layers)
        self.levels = max(_offsets((place for place in shared if place[0].kind != "sums"), 0), 1)
        self.words = max(_offsets((place for place in shared if place[0].kind == "sums"), scratch), scratch)

    def _share(self, places: list[Place], step: LayerStep, when: int) -> None:
        """Let a layer write over levels that only its shortcut reads, and for the last time: each neuron reads before it
        writes."""
        assert step.target is not None
        pairs = list(zip(step.layer.synapses, step.sources, strict=True))
        others = {source for s, source in pairs if s.kind != "identity"}.union(*step.factors.values())
        for s, source in pairs:
            if s.kind == "identity" and source not in others and self._take(places, source, step.target, when):
                return

    def _take(self, places: list[Place], source: int, target: int, when: int) -> bool:
        """Let levels take the place of others that nothing reads later; whether they do."""
        place = places[source]
        if place[0].kind not in ("unsigned", "signed") or max(t.dies for t in place) != when:
            return False
        place.append(self.tensors[target])
        places[target] = place
        return True


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
