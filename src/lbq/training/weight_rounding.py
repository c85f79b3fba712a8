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
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lbq.batches.sources import Source
from lbq.config import Config
from lbq.deploy.lowering.faithful import exact_copy, unwrapped
from lbq.deploy.lowering.lower import lower, norms_of
from lbq.deploy.lowering.shapes import InputShape
from lbq.deploy.lowering.trace import NORMS
from lbq.errors import ConfigError, GraphError
from lbq.graph import INPUT, Graph, Synapse
from lbq.graph.integer import LARGEST_PIXEL
from lbq.graph.quantise import STEM_BITS, UNIT_BITS_BELOW_STEP, largest_weight
from lbq.neuron.base import neurons_of

WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.Linear)
HIDDEN = 2.0**100  # times a weight that a gain of 0 hides: a whole number, which rounding leaves
PART = re.compile(r"\.part\d+$")  # ends the name of a synapse that reads one of several joined tensors


@dataclass(frozen=True)
class _Read:
    """A weight, or the part of it from the input `first` on, that reads one source, with what deployment multiplies into it.

    layer: the neuron that it leads to. factor: of pools and numbers. channels: so many neighbouring ones of the source are
    added up before.
    """

    layer: str
    weight: nn.Parameter
    first: int
    shape: tuple[int, ...]
    groups: int
    factor: float
    norms: tuple[Any, ...]
    source: str
    channels: int

    @property
    def outputs(self) -> int:
        return self.shape[0]

    def taken(self) -> Tensor:
        """As it lies in memory if it is the whole weight, else `[O, I / groups, kh, kw]`."""
        size, weight = math.prod(self.shape[1:]), self.weight.detach()
        if size * self.outputs == weight.numel():
            return weight
        return weight.flatten(1)[:, self.first : self.first + size].reshape(self.shape)

    def by_input(self, scale: Tensor) -> Tensor:
        """The scale of each channel of the source, as the weight reads them: `[O, I / groups, 1, 1]`."""
        by_group = scale[:: self.channels].reshape(self.groups, -1)
        return _repeated(by_group, self.outputs // self.groups)[:, :, None, None]


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
        if not 0 < scale < math.inf or not all(0 < one < math.inf for one in std or ()):
            raise ValueError(f"std and scale must be positive, got std={std!r}, scale={scale!r}")
        if std is not None and len(std) != input_shape[0]:
            raise ValueError(f"std must have one number for each of {input_shape[0]} channels, got {std!r}")
        net = unwrapped(net)
        self.bits, self.modules, self.neurons = bits, dict(net.named_modules()), neurons_of(net)
        self.graph = _graph_of_factors(net, input_shape, timesteps, static)
        like = next(net.parameters()).new_zeros((), dtype=torch.float64)
        self.pixel = 1 / (like.new_tensor(std or [1.0] * input_shape[0]) * scale)  # what one is worth, by channel
        norms = norms_of(net, input_shape, self.graph.timesteps, static)
        self.norms_behind = {
            name: tuple(self.modules[norm] for norm, read in norms.items() if name in read)
            for name in {synapse for read in norms.values() for synapse in read}
        }
        self.reads: list[_Read] = []  # those that lead to one neuron lie together
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
            self.reads += self._reads_of(layer.name, convs)
        self.weights: list[Tensor] = list({id(read.weight): read.weight for read in self.reads}.values())
        first = {read.layer for read in self.reads if read.source == INPUT}
        if all(read.layer in first for read in self.reads):
            raise GraphError("no layer lies between neurons: the first has 8 bits in any case, the readout 16")
        self._lay_out(first, like)

    def _lay_out(self, first: set[str], like: Tensor) -> None:
        """Constants of all reads as one vector, a number for each of their outputs. So a few launches on a GPU do for all.

        first: the layers that read the input.
        """
        sizes = [read.outputs for read in self.reads]
        bits = [max(self.bits, STEM_BITS) if read.layer in first else self.bits for read in self.reads]
        finest = [
            (LARGEST_PIXEL if read.layer in first else 1) * 2 ** (b + UNIT_BITS_BELOW_STEP)
            for read, b in zip(self.reads, bits, strict=True)
        ]

        def spread(numbers: Iterable[float]) -> Tensor:
            return torch.cat([like.new_full((size,), number) for size, number in zip(sizes, numbers, strict=True)])

        self.sizes, self.read_of = sizes, spread(range(len(sizes))).long()
        self.most, self.finest = spread(map(largest_weight, bits)), spread(finest)
        gains = [self.neurons[read.layer].gain for read in self.reads]
        constant = [1.0 if isinstance(gain, Tensor) else gain for gain in gains]  # learned ones are not constant
        self.constant = spread(read.factor * gain for read, gain in zip(self.reads, constant, strict=True))
        self.one = self.weights[0].new_ones(max(sizes))
        most_norms = max(len(read.norms) for read in self.reads)
        self.epsilons = [spread(_nth(read, i, "eps", 0.0) for read in self.reads) for i in range(most_norms)]

    def _reads_of(self, layer: str, convs: list[Synapse]) -> list[_Read]:
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
            reads.append(_Read(layer, weight, before, s.weight.shape, s.groups, factor, norms, s.source, channels))
        return reads

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within the context, the weights are rounded; then they are what they were."""
        with torch.no_grad():
            before = [weight.clone() for weight in self.weights]
            torch._foreach_copy_(self.weights, self.rounded_weights())
        watch = register_optimizer_step_pre_hook(self._refuse_step)
        try:
            yield
        finally:
            watch.remove()
            with torch.no_grad():
                torch._foreach_copy_(self.weights, before)

    def _refuse_step(self, optimiser: torch.optim.Optimizer, *_: Any) -> None:
        rounded = {id(weight) for weight in self.weights}
        if any(id(p) in rounded for group in optimiser.param_groups for p in group["params"]):
            raise RuntimeError("optimiser.step() inside `with rounding():` would be undone: call it behind the block")

    @torch.no_grad()
    def rounded_weights(self) -> list[Tensor]:
        """What each of `weights` is rounded to. All is computed on the device, so that a CUDA graph can record it, and in
        float64, as in deployment."""
        steps = {name: self.neurons[name].step for name in self.neurons}
        scales = {source: self._scale(source, steps) for source in {read.source for read in self.reads}}
        factor = self._factors(scales)
        inputs = [read.by_input(s.double()) if (s := scales[read.source]).dim() else None for read in self.reads]
        taken = [
            read.taken() if scale is None else read.taken().reshape(read.shape) * scale
            for read, scale in zip(self.reads, inputs, strict=True)
        ]
        heaviest = torch.cat([_heaviest(weight) for weight in taken]).double() * factor.abs()
        least = self._spread([steps[read.layer] for read in self.reads]) / self.finest
        unit = torch.maximum(self._of_layers(heaviest) / self.most, least)
        ratio = torch.where(factor == 0, HIDDEN, factor / unit)
        parts: dict[int, list[Tensor]] = {}
        for read, weight, scale, up in zip(self.reads, taken, inputs, ratio.split(self.sizes), strict=True):
            up = up.reshape(-1, *[1] * (weight.dim() - 1))
            whole = torch.mul(weight, up).round_()
            out = torch.empty_like(weight, dtype=read.weight.dtype)
            parts.setdefault(id(read.weight), []).append(torch.div(whole, up if scale is None else up * scale, out=out))
        return [_joined(parts[id(weight)], weight) for weight in self.weights]

    def _factors(self, scales: dict[str, Tensor]) -> Tensor:
        """What deployment multiplies the weights of each output by, but for scales of single channels of a source."""
        numbers = [self.one[0] if (scale := scales[read.source]).dim() else scale for read in self.reads]
        learned = [self.neurons[read.layer].gain for read in self.reads]
        numbers = [
            n.double() * gain if isinstance(gain, Tensor) else n for n, gain in zip(numbers, learned, strict=True)
        ]
        factor = self.constant * self._spread(numbers)
        for i, epsilon in enumerate(self.epsilons):
            factor = factor / (self._norms(i, "running_var") + epsilon).sqrt() * self._norms(i, "weight")
        return factor

    def _norms(self, number: int, name: str) -> Tensor:
        """A value of each read's BatchNorm of that number, as one vector; 1 where there is no BatchNorm, or no gain."""
        values = [_nth(read, number, name, self.one[: read.outputs]) for read in self.reads]
        if name == "weight":
            values = [self.one[:size] if v is None else v for v, size in zip(values, self.sizes, strict=True)]
        return torch.cat(values).double()

    def _spread(self, values: list[Tensor]) -> Tensor:
        """A value of each read, or one of each of its outputs, as one vector."""
        if not any(value.dim() for value in values):
            return torch.stack(values).double()[self.read_of]
        return torch.cat([value.expand(size) for value, size in zip(values, self.sizes, strict=True)]).double()

    def _of_layers(self, values: Tensor) -> Tensor:
        """The largest value over all reads of a layer, for each of them."""
        parts: dict[str, list[Tensor]] = {}
        for read, part in zip(self.reads, values.split(self.sizes), strict=True):
            parts.setdefault(read.layer, []).append(part)
        if len(parts) == len(self.reads):
            return values
        largest = {name: torch.stack(of).amax(0) if len(of) > 1 else of[0] for name, of in parts.items()}
        return torch.cat([largest[read.layer] for read in self.reads])

    def _scale(self, source: str, steps: dict[str, Tensor]) -> Tensor:
        """The value of a pixel, or of a level of a layer or a gate, as `lbq.graph.rewrites.scale_of` has it."""
        if source == INPUT:
            return self.pixel
        gate = next((gate for gate in self.graph.gates if gate.name == source), None)
        if gate is None:
            scale = self.neurons[source].scale
            return steps[source] if scale is None else scale
        factor, scale = self._scale(gate.factor, steps), self._scale(gate.source, steps)
        return _repeated(factor, gate.shape[0] // len(factor)) * scale if factor.dim() else factor * scale


def _repeated(values: Tensor, times: int) -> Tensor:
    """Each so often in a row, along the first axis."""
    return values.unsqueeze(1).expand(-1, times, *values.shape[1:]).flatten(0, 1)


def _heaviest(weight: Tensor) -> Tensor:
    """The largest size of a weight of each output, in one pass."""
    return torch.linalg.vector_norm(weight, math.inf, dim=tuple(range(1, weight.dim())))


def _nth(read: _Read, number: int, name: str, default: Any) -> Any:
    """A value of the read's BatchNorm of that number, or the default."""
    return getattr(read.norms[number], name) if number < len(read.norms) else default


def _joined(parts: list[Tensor], weight: Tensor) -> Tensor:
    if len(parts) == 1:
        return parts[0].reshape(weight.shape)
    return torch.cat([part.flatten(1) for part in parts], 1).reshape(weight.shape)


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
    bits = config.train.weight_bits
    if not bits:
        return nullcontext
    reads = source.inputs
    steps, scale = config.model.timesteps, reads.scale if reads.mean else 1
    try:
        return WeightRounding(
            net, reads.shape, bits, timesteps=steps, static=reads.static, std=reads.std or None, scale=scale
        )
    except GraphError as error:
        raise ConfigError(f"train.weight_bits={bits} rounds weights as deployment does: {error}") from error
