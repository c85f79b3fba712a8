"""A spiking network as plain numbers: neuron layers, the synapses into each, and a readout. NumPy only.

Training sees modules; deployment, execution and accounting see this. A `Layer` sums the currents of its synapses and a
bias at every timestep and emits levels; a `Synapse` is a convolution (a linear layer is one whose kernel covers its
input), a residual identity or a product of two or three level tensors (attention); pooling acts on the source's levels. A
`Gate` is a tensor: levels times levels. Layers are in execution order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from lbq.errors import GraphError
from lbq.graph.layout import Layout
from lbq.graph.rules import SIGNED, Reset, Rounding

Array = NDArray[np.float64]
Shape = tuple[int, int, int]  # channels, height, width

INPUT = "input"  # the name of the source that is the image or the event frame


def shortest(shape: Shape) -> tuple[int, ...]:
    """The shape of a sample without sides of 1: (C, L) for a signal, (F,) for features."""
    return shape[0], *(side for side in shape[1:] if side != 1)


def with_sides(x: NDArray[Any], shape: Shape, lead: int) -> NDArray[Any]:
    """Samples with all axes of their shape. x has `lead` axes in front and may lack a height and width of 1."""
    ones = [axis for axis in (1, 2) if shape[axis] == 1]
    missing = lead + len(shape) - x.ndim
    return np.expand_dims(x, tuple(lead + axis for axis in ones[:missing])) if 0 < missing <= len(ones) else x


@dataclass(frozen=True)
class NeuronSpec:
    """A neuron as numbers. `lbq.kernels.reference.Rule` explains rounding, reset and decay_reset.

    step, scale: scalars (shape `()`) or one per channel `[C]`. The scale is the value of a level in training.
    mixing: `[T, T]`, where currents are mixed over time before they are integrated: x'[t] = sum_j mixing[t, j] x[j] (LM-HT).
    """

    kind: str
    n_max: int
    step: Array
    scale: Array
    leak: float
    gain: float
    alpha: float
    rounding: Rounding
    reset: Reset
    decay_reset: bool
    thresholds: Array | None = None
    mixing: Array | None = None

    @property
    def planes(self) -> int:
        """K = ceil(log2(n_max + 1)), the bit planes that the level range needs."""
        return self.n_max.bit_length()

    @property
    def signed(self) -> bool:
        return self.rounding in SIGNED


def output_size(
    size: Iterable[int],
    kernel: Iterable[int],
    stride: Iterable[int],
    padding: Iterable[int],
    dilation: Iterable[int] = (1, 1),
) -> tuple[int, int]:
    """Height and width of what a convolution or pool gives for inputs of (height, width)."""
    height, width = (
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True)
    )
    return height, width


@dataclass(frozen=True)
class Pool:
    """Pooling of integer levels: `max`, or `sum` (an average whose 1/n is folded into the synapse's weight).

    channels: so many neighbouring channels are added up to one, as in front of a token's gate.
    """

    kind: Literal["max", "sum"]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    channels: int = 1

    @property
    def window(self) -> int:
        """How many levels it makes one of."""
        return math.prod(self.kernel) * self.channels

    def output(self, shape: Shape) -> Shape:
        return shape[0] // self.channels, *output_size(shape[1:], self.kernel, self.stride, self.padding)

    def windows(self, shape: Shape, axis: Literal[0, 1]) -> NDArray[np.bool_]:
        """`[input positions, output positions]` along one axis: which window holds which position."""
        size, out = shape[1 + axis], self.output(shape)[1 + axis]
        inside = np.arange(size)[:, None] + self.padding[axis] - self.stride[axis] * np.arange(out)
        return (inside >= 0) & (inside < self.kernel[axis])

    def coverage(self, shape: Shape) -> NDArray[np.int64]:
        """`[H, W]`: how many windows hold each position of the input."""
        return np.outer(self.windows(shape, 0).sum(1), self.windows(shape, 1).sum(1))


@dataclass(frozen=True)
class Synapse:
    """A connection from the (pooled) levels of `source` to a layer. It is linear but for kind `matmul`.

    weight: `[O, I / groups, kh, kw]`, or `[C]` for the kinds `identity` and `matmul`. Weights are real, or integers in a
        deployed network.
    absorbed: whether the source's scale has been multiplied into the weight, so that it acts on integer levels.
    copy_of: the synapse whose convolution this one repeats, because several layers read its current, or because it reads
        a sum and each summand needs a synapse. An ANN computes it once.
    keys, values, heads: of kind `matmul`, weight * (Q K^T) V in each head, where `source` is Q. Rows are positions (tokens),
        columns the head's C / heads neighbouring channels. Without `values`, weight * Q K^T `[heads, queries, keys]`. Without
        `keys`, weight * S V, where `source` is levels S of such scores.
    """

    name: str
    source: str
    kind: Literal["conv", "identity", "matmul"]
    weight: NDArray[Any]
    in_shape: Shape
    out_shape: Shape
    pools: tuple[Pool, ...] = ()
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    absorbed: bool = False
    copy_of: str = ""
    keys: str = ""
    values: str = ""
    heads: int = 1

    @property
    def sources(self) -> tuple[str, ...]:
        """All tensors that it reads."""
        return tuple(name for name in (self.source, self.keys, self.values) if name)

    @property
    def summed(self) -> int:
        """How many levels, or products of levels, add up to one number that its weight meets."""
        if self.kind == "matmul":
            return (self.per_head if self.keys else 1) * (self.tokens if self.values else 1)
        return math.prod(p.window for p in self.pools if p.kind == "sum")

    @property
    def tokens(self) -> int:
        """Of a product: positions of Q, K and V."""
        _, height, width = self.in_shape if self.keys else self.out_shape
        return height * width

    @property
    def per_head(self) -> int:
        """Of a product: channels of a head."""
        return (self.in_shape if self.keys else self.out_shape)[0] // self.heads

    @property
    def linear(self) -> bool:
        """Whether Q (K^T V) takes fewer products than (Q K^T) V: where a head has fewer channels than there are tokens."""
        return len(self.sources) == 3 and self.per_head < self.tokens

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one dense pass, as they are usually counted: padded taps included. Products of levels are
        counted in the order (Q K^T) V."""
        if self.kind == "matmul":
            return (len(self.sources) - 1) * self.tokens**2 * self.heads * self.per_head
        return 0 if self.kind == "identity" else math.prod(self.weight.shape) * self.out_shape[1] * self.out_shape[2]

    def positions(self, axis: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """`[outputs, taps]` along one axis: the input position that each tap reads, and whether it is inside the input."""
        outputs, taps = np.arange(self.out_shape[1 + axis]), np.arange(self.weight.shape[2 + axis])
        read = outputs[:, None] * self.stride[axis] + taps * self.dilation[axis] - self.padding[axis]
        return read, (read >= 0) & (read < self.in_shape[1 + axis])

    def taps(self, axis: Literal[0, 1]) -> NDArray[np.int64]:
        """For each input position along one axis, how many (output position, kernel tap) pairs read it."""
        read, valid = self.positions(axis)
        return np.bincount(read[valid], minlength=self.in_shape[1 + axis])

    @property
    def valid_macs(self) -> int:
        """Multiply-accumulates at valid positions only: as many as a dense pass needs."""
        return int(self.fan_out().sum()) * self.in_shape[0] if self.kind == "conv" else self.macs

    def fan_out(self) -> NDArray[np.int64]:
        """F_j of every input position `[H, W]`: how many weights one input there meets, also at borders."""
        if self.kind != "conv":
            return np.ones(self.in_shape[1:], np.int64)
        return np.outer(self.taps(0), self.taps(1)) * (self.weight.shape[0] // self.groups)


@dataclass(frozen=True)
class Gate:
    """Levels of `source` times those of `factor`: a tensor that synapses, and later gates, read as they read a layer.

    The factor has as many positions as the source or one, which all share, and a divisor of its channels: each is the factor
    of so many neighbouring ones.
    """

    name: str
    factor: str
    source: str
    shape: Shape  # of the source, and of the gate

    @property
    def operands(self) -> tuple[str, str]:
        return self.factor, self.source


@dataclass(frozen=True)
class AnyLayer:
    """The part that layers of real numbers and of integers share. bias: `[C]`, or `[C, H, W]` where pixels come in."""

    name: str
    synapses: tuple[Synapse, ...]
    bias: NDArray[Any]
    shape: Shape

    @property
    def units(self) -> int:
        """Neurons in this layer, per timestep."""
        return math.prod(self.shape)

    def placed(self, levels: Any) -> Any:
        """Levels `[T, B, ...]` as the trained network has them, an array or a tensor, as `[T, B, C, H, W]`."""
        return levels.reshape(*levels.shape[:2], *self.shape)


@dataclass(frozen=True)
class Layer(AnyLayer):
    """At every timestep, the sum of the synapses' currents and `bias`; `neuron` is None for the readout and ReLU."""

    neuron: NeuronSpec | None = None
    layout: Layout | None = None  # of the trained network's tensor, where that is not [C, H, W]

    def placed(self, levels: Any) -> Any:
        return super().placed(levels if self.layout is None else self.layout.channels_first(levels))


L = TypeVar("L", bound=AnyLayer)


@dataclass(frozen=True)
class Layered(Generic[L]):
    """Layers in the order in which they run, and a readout. Each layer reads the input or layers before it.

    static: the input is one image, whose current is computed once and fed to every timestep. Otherwise the input is a
    sequence of event frames.
    """

    input_shape: Shape
    timesteps: int
    static: bool
    layers: tuple[L, ...]
    readout: L
    gates: tuple[Gate, ...] = field(default=(), kw_only=True)
    _by_name: dict[str, L] = field(init=False, repr=False, compare=False)
    _gates: dict[str, Gate] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {layer.name: layer for layer in self.layers})
        object.__setattr__(self, "_gates", {gate.name: gate for gate in self.gates})
        repeated = [name for name, times in Counter(s.name for s in self.synapses).items() if times > 1]
        if repeated:
            raise GraphError(f"synapse {repeated[0]!r} stands in the network twice: give each a name of its own")

    def __getitem__(self, name: str) -> L:
        return self._by_name[name]

    @property
    def all_layers(self) -> tuple[L, ...]:
        return (*self.layers, self.readout)

    @property
    def batch_axis(self) -> int:
        """Where the batch stands in inputs: images are `[B, ...]`, event frames `[T, B, ...]`."""
        return 0 if self.static else 1

    def shape_of(self, source: str) -> Shape:
        """Of the levels of a layer, a gate or the input."""
        return self.input_shape if source == INPUT else (self._gates.get(source) or self._by_name[source]).shape

    def spec(self, name: str) -> Any:
        """The neuron of a spiking layer."""
        raise NotImplementedError

    def n_max(self, source: str) -> int:
        """The largest level of a layer or a gate."""
        return self._ranges[source][0] if source in self._gates else int(self.spec(source).n_max)

    def is_signed(self, source: str) -> bool:
        return self._ranges[source][1] if source in self._gates else bool(self.spec(source).signed)

    @property
    def unit_events(self) -> bool:
        """Whether all neurons are binary or ternary: each event is then one accumulation for each weight that it meets."""
        return all(self.spec(layer.name).n_max == 1 for layer in self.layers)

    @cached_property
    def _ranges(self) -> dict[str, tuple[int, bool]]:
        """The largest level of each gate, and whether it is signed; a gate's operands come before it."""
        ranges: dict[str, tuple[int, bool]] = {}
        for gate in self.gates:
            for name in gate.operands:
                if name not in ranges:
                    ranges[name] = self.spec(name).n_max, self.spec(name).signed
            (most, signed), (other_most, other_signed) = (ranges[name] for name in gate.operands)
            ranges[gate.name] = most * other_most, signed or other_signed
        return ranges

    def gates_behind(self, layer: str) -> list[Gate]:
        """The gates whose last operand this layer is, in their order."""
        return self._gates_by_layer.get(layer, [])

    @cached_property
    def _gates_by_layer(self) -> dict[str, list[Gate]]:
        by_layer: dict[str, list[Gate]] = {}
        for gate in self.gates:
            by_layer.setdefault(self.layers[self.place(gate.name)].name, []).append(gate)
        return by_layer

    def place(self, name: str) -> int:
        """The number of a layer, or of the layer behind which a gate's operands are all there."""
        return self._places[name]

    @cached_property
    def _places(self) -> dict[str, int]:
        places = {layer.name: number for number, layer in enumerate(self.layers)}
        for gate in self.gates:
            places[gate.name] = max(places[operand] for operand in gate.operands)
        return places

    @property
    def synapses(self) -> tuple[Synapse, ...]:
        return tuple(s for layer in self.all_layers for s in layer.synapses)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one pass through the whole network as an ANN, padded taps included."""
        return sum(s.macs for s in self.synapses if not s.copy_of) + self.gate_macs

    @property
    def valid_macs(self) -> int:
        """The same count at valid positions only."""
        return sum(s.valid_macs for s in self.synapses if not s.copy_of) + self.gate_macs

    @property
    def gate_names(self) -> tuple[str, ...]:
        return tuple(gate.name for gate in self.gates)

    @property
    def gate_macs(self) -> int:
        """Multiplications of gates: one for each of their levels."""
        return sum(math.prod(gate.shape) for gate in self.gates)

    @property
    def frames(self) -> int:
        """Frames of a sample: one image, or one event frame for each timestep."""
        return 1 if self.static else self.timesteps

    @property
    def units(self) -> int:
        """Spiking neurons, per timestep."""
        return sum(layer.units for layer in self.layers)

    @property
    def mixed_layers(self) -> tuple[str, ...]:
        """The layers that mix the currents of all timesteps before their first emission."""
        neurons = ((layer.name, getattr(layer, "neuron", None)) for layer in self.layers)
        return tuple(name for name, neuron in neurons if neuron is not None and neuron.mixing is not None)


@dataclass(frozen=True)
class Graph(Layered[Layer]):
    """A whole network of real numbers. The readout's currents are averaged over time.

    offset: for each input channel, the value that stands for zero. It is subtracted before the first layer pads. None: 0.
    """

    offset: Array | None = None

    def spec(self, name: str) -> NeuronSpec:
        spec = self[name].neuron
        if spec is None:
            raise GraphError(
                f"layer {name!r} is not a spiking neuron: it has no integer levels; make one of an ANN with lbq convert"
            )
        return spec

    @property
    def stem_macs(self) -> int:
        """Multiply-accumulates of the layers that read the input: real-valued, done once for a static image."""
        return sum(s.macs for s in self.synapses if s.source == INPUT)

    @property
    def absorbed(self) -> bool:
        return all(s.absorbed for s in self.synapses if s.source != INPUT)
