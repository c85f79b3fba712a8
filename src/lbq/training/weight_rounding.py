"""Training with rounded weights, straight-through, in the units of deployment: see `lbq.graph.quantise`.

Weights are rounded while gradients are computed and while the network is evaluated. The optimiser moves the weights behind
them, which keep every small step. Deployment rounds absorbed weights: a weight times BatchNorm's gain, the source's step and
the constants of pools. Its unit is the largest of these that leads to a channel, over 2^(bits-1) - 1. So it is here, and the
network computes in training what its integers compute, but for rounded biases and thresholds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lbq.batches.sources import Source
from lbq.config import Config
from lbq.deploy.lowering.faithful import exact_copy
from lbq.deploy.lowering.lower import lower, norms_of
from lbq.deploy.lowering.shapes import InputShape
from lbq.deploy.lowering.trace import NORMS
from lbq.errors import ConfigError, GraphError
from lbq.graph import INPUT, Graph, Synapse
from lbq.graph.integer import LARGEST_PIXEL
from lbq.graph.quantise import STEM_BITS, UNIT_BITS_BELOW_STEP, largest_weight
from lbq.neuron import SpikingNeuron
from lbq.neuron.base import neurons_of

WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.Linear)
PART = re.compile(r"\.part\d+$")  # ends the name of a synapse that reads one of several joined tensors


@dataclass(frozen=True)
class _Read:
    """A weight, or the part of it from the input `first` on, that reads one source, with what deployment multiplies into it.

    factor: of pools and numbers. channels: so many neighbouring ones of the source are added up before.
    """

    weight: nn.Parameter
    first: int
    shape: tuple[int, ...]
    groups: int
    factor: float
    norms: tuple[Any, ...]
    source: str
    channels: int

    def taken(self) -> Tensor:
        """`[O, I / groups, kh, kw]` in float64, in which deployment computes."""
        size = math.prod(self.shape[1:])
        return self.weight.detach().flatten(1)[:, self.first : self.first + size].reshape(self.shape).double()


class WeightRounding:
    """`with rounding():` the weights are those of an integer network of so many bits.

        rounding = WeightRounding(net, (3, 32, 32), bits=4)
        with rounding():
            F.cross_entropy(net(x), y).backward()
        optimiser.step()

    As in deployment, layers that read the input have 8 bits, and BatchNorm's gain is that of its running statistics. The
    readout has 16 bits there: it stays as it is. The rounding of rounded weights is themselves.
    """

    def __init__(
        self,
        net: nn.Module,
        input_shape: InputShape,
        bits: int,
        *,
        timesteps: int | None = None,
        static: bool = True,
        std: Sequence[float] | None = None,
        scale: float = 1.0,
    ) -> None:
        """net: a network that deployment can read; input_shape, timesteps, static, std, scale: as in `lbq.deploy.deploy`."""
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
            raise ValueError(f"bits must be 2 to 8, got {bits!r}")
        self.bits, self.modules, self.neurons = bits, dict(net.named_modules()), neurons_of(net)
        self.graph = _graph_of_factors(net, input_shape, timesteps, static)
        like = next(net.parameters()).new_zeros((), dtype=torch.float64)
        self.pixel = 1 / (like.new_tensor(std or [1.0] * input_shape[0]) * scale)  # what one is worth, by channel
        norms = norms_of(net, input_shape, self.graph.timesteps, static)
        self.norms_behind = {
            name: tuple(self.modules[norm] for norm, read in norms.items() if name in read)
            for name in {synapse for read in norms.values() for synapse in read}
        }
        self.reads: dict[str, list[_Read]] = {}  # by the neuron that they lead to
        copied = {s.copy_of for s in self.graph.synapses}
        for layer in self.graph.layers:
            if layer.neuron is None:
                raise GraphError(f"layer {layer.name!r} is not a spiking neuron: set neuron.name to one that deploys")
            convs = [s for s in layer.synapses if s.kind == "conv"]
            if (twice := next((s for s in convs if s.copy_of or s.name in copied), None)) is not None:
                raise GraphError(
                    f"layer {twice.copy_of or twice.name!r} reads a sum of levels, or several layers read its current, and it "
                    "would have weights for each: put a neuron behind the sum (as networks without -sew and -membrane do)"
                )
            if convs:
                self.reads[layer.name] = self._reads_of(convs)
        self.weights: list[Tensor] = list(
            {id(read.weight): read.weight for reads in self.reads.values() for read in reads}.values()
        )
        if all(map(_reads_input, self.reads.values())):
            raise GraphError("no layer lies between neurons: the first has 8 bits in any case, the readout 16")

    def _reads_of(self, convs: list[Synapse]) -> list[_Read]:
        """What leads to one layer."""
        reads: list[_Read] = []
        for s in convs:
            name = s.name if s.name in self.modules else PART.sub("", s.name)
            weight = self.modules[name]._parameters.get("weight")
            owners = [m for m in self.modules.values() if any(p is weight for p in m._parameters.values())]
            if weight is None or len(owners) > 1:
                why = "computed from others" if weight is None else "another layer's too"
                raise GraphError(f"layer {name!r}: its weight is {why}: give it one of its own")
            before = sum(math.prod(read.shape[1:]) for read in reads if read.weight is weight)
            channels = math.prod(pool.channels for pool in s.pools)
            factor, norms = float(s.weight.flat[0]), self.norms_behind.get(s.name, ())
            reads.append(_Read(weight, before, s.weight.shape, s.groups, factor, norms, s.source, channels))
        return reads

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within the context, the weights are rounded; then they are what they were."""
        with torch.no_grad():
            before, after = [weight.clone() for weight in self.weights], self.rounded_weights()
            for weight, value in zip(self.weights, after, strict=True):
                weight.copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, before)

    @torch.no_grad()
    def rounded_weights(self) -> list[Tensor]:
        """What each of `weights` is rounded to. All is computed on the device, so that a CUDA graph can record it."""
        parts: dict[int, list[Tensor]] = {}
        for name, reads in self.reads.items():
            neuron, pixels = self.neurons[name], _reads_input(reads)
            bits = max(self.bits, STEM_BITS) if pixels else self.bits
            most, finest = largest_weight(bits), (LARGEST_PIXEL if pixels else 1) * 2 ** (bits + UNIT_BITS_BELOW_STEP)
            taken, factors = [read.taken() for read in reads], [self._factor(neuron, read) for read in reads]
            heaviest = torch.stack(
                [(w * f).abs().flatten(1).amax(1) for w, f in zip(taken, factors, strict=True)]
            ).amax(0)
            unit = torch.maximum(heaviest / most, neuron.step.double() / finest).reshape(-1, 1, 1, 1)
            for read, weight, factor in zip(reads, taken, factors, strict=True):
                whole = (weight * factor / unit).round().clamp(-most, most)
                value = torch.where(factor == 0, weight, whole * unit / factor)  # a gain of 0 hides any weight
                parts.setdefault(id(read.weight), []).append(value.flatten(1))
        return [torch.cat(parts[id(weight)], 1).reshape(weight.shape) for weight in self.weights]

    def _factor(self, neuron: SpikingNeuron, read: _Read) -> Tensor:
        """What deployment multiplies a weight by: `[O, 1 or I / groups, 1, 1]`."""
        outputs = read.weight.new_full((read.shape[0],), read.factor, dtype=torch.float64) * neuron.gain
        for norm in read.norms:
            outputs = outputs / (norm.running_var.double() + norm.eps).sqrt()
            outputs = outputs if norm.weight is None else outputs * norm.weight.double()
        inputs = self._scale(read.source).double()
        if inputs.dim():
            by_group = inputs[:: read.channels].reshape(read.groups, -1)
            inputs = _repeated(by_group, read.shape[0] // read.groups)[:, :, None, None]
        return outputs.reshape(-1, 1, 1, 1) * inputs

    def _scale(self, source: str) -> Tensor:
        """The value of a pixel, or of a level of a layer or a gate, as `lbq.graph.rewrites.scale_of` has it."""
        if source == INPUT:
            return self.pixel
        gate = next((gate for gate in self.graph.gates if gate.name == source), None)
        if gate is None:
            neuron = self.neurons[source]
            return neuron.step if neuron.scale is None else neuron.scale
        factor, scale = self._scale(gate.factor), self._scale(gate.source)
        return _repeated(factor, gate.shape[0] // len(factor)) * scale if factor.dim() else factor * scale


def _repeated(values: Tensor, times: int) -> Tensor:
    """Each so often in a row, along the first axis."""
    return values.unsqueeze(1).expand(-1, times, *values.shape[1:]).flatten(0, 1)


def _reads_input(reads: Iterable[_Read]) -> bool:
    return any(read.source == INPUT for read in reads)


@torch.no_grad()
def _graph_of_factors(net: nn.Module, shape: InputShape, timesteps: int | None, static: bool) -> Graph:
    """The network with weights of 1 and BatchNorms that change nothing: what is left in its weights are constant factors."""
    plain = exact_copy(net)
    for module in plain.modules():
        if isinstance(module, NORMS):
            module.reset_parameters()  # which resets statistics too
            module.eps = 0.0
        elif isinstance(module, WEIGHTED):
            module.weight.fill_(1.0)
    return lower(plain, shape, timesteps, static)


def rounding_of(config: Config, net: nn.Module, source: Source) -> Callable[[], AbstractContextManager[None]]:
    """The context in which weights are rounded as `train.weight_bits` says; where it says no rounding, one of nothing."""
    bits, reads = config.train.weight_bits, source.inputs
    if not bits:
        return nullcontext
    steps, scale = config.model.timesteps, reads.scale if reads.mean else 1
    try:
        return WeightRounding(
            net, reads.shape, bits, timesteps=steps, static=reads.static, std=reads.std or None, scale=scale
        )
    except GraphError as error:
        raise ConfigError(f"train.weight_bits={bits} rounds weights as deployment does: {error}") from error
