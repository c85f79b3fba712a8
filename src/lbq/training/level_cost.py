"""A price on accumulations: what a network's bursts cost at inference, as a term of the training loss."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lbq.batches.sources import Source
from lbq.config import Config
from lbq.deploy import lower
from lbq.deploy.lowering.faithful import unwrapped
from lbq.deploy.lowering.shapes import InputShape
from lbq.errors import ConfigError, GraphError
from lbq.graph import INPUT, Graph
from lbq.neuron.base import neurons_of
from lbq.neuron.base import summing_levels as summing_levels

CountKind = Literal["unary", "bit_sparse"]
WRAPPED = re.compile(r"^((_orig_mod|module)\.)+")  # begins names of what torch.compile or DataParallel stands around
RAMP = 0.1  # the whole price is paid from this share above the free accumulations on


class LevelCost:
    """The accumulations of a sample, as a share of the MACs of all timesteps, differentiable:

        cost = sum over layers of F_l c(S) / (samples * timesteps * MACs)

    F_l is how many weights one neuron of layer l meets on average, so that the sum is the paper's count, rate x MACs. Shortcuts
    without weights are not in it. c(S) is |S| for `unary`. For `bit_sparse` it is the set bits of |S|, which have no slope: the
    gradient is that of |S| times the layer's mean number of set bits for each unit of |S|, a constant.

    A product of levels, in attention or a gate, adds MACs times the mean c of both operands, as if they were independent. So to
    the gradient of one operand the other's mean is what the number of weights is elsewhere: a constant fan-out.

    Where some accumulations are free, `above` which levels cost, the slope of the cost is 0 up to there, rises from 0 to 1 over
    the next tenth, and stays 1. So a network ends below that tenth, unless the price is too low.

        cost = LevelCost(net, (3, 32, 32))
        with summing_levels(net) as emitted:
            loss = F.cross_entropy(net(x), y) + 0.5 * cost(emitted, len(x))
    """

    def __init__(
        self,
        net: nn.Module,
        input_shape: InputShape,
        kind: CountKind = "bit_sparse",
        *,
        above: float = 0,
        timesteps: int | None = None,
        static: bool = True,
    ) -> None:
        """net: a network that deployment can read; input_shape, timesteps, static: as in `lbq.deploy.deploy`. above: so many
        accumulations of a sample are free."""
        if not above >= 0:
            raise ValueError(f"above must be >= 0, got {above!r}")
        if kind not in ("unary", "bit_sparse"):
            raise ValueError(f"kind must be 'unary' or 'bit_sparse', got {kind!r}")
        net = unwrapped(net)
        graph = lower(net, input_shape, timesteps, static, weights=False)
        neurons = neurons_of(net)
        if not neurons or any(layer.name not in neurons for layer in graph.layers):
            raise GraphError("a price on accumulations needs spiking neurons in place of all activations")
        self.kind, self.synapses = kind, graph.timesteps * graph.macs
        self.free = above / self.synapses
        self.timesteps, self.gates = graph.timesteps, graph.gates
        self.units = {layer.name: layer.units for layer in graph.layers}
        terms = list(_terms(graph))
        self.fan_out = {
            name: sum(macs for macs, operands in terms if operands == (name,)) / units
            for name, units in self.units.items()
        }
        self.pooled = tuple(
            dict.fromkeys(_behind_max_pools(graph))
        )  # layers whose levels are pooled before they meet weights
        self.products = [(m, operands) for m, operands in terms if len(operands) > 1 or operands[0] in graph.gate_names]
        self._on_device: dict[Any, Tensor] = {}

    def accumulations(self, emitted: Mapping[str, Sequence[Tensor]], samples: int) -> Tensor:
        """Of all samples together. emitted: what `summing_levels` gave."""
        named = ((n if n in self.fan_out else WRAPPED.sub("", n), calls) for n, calls in emitted.items())
        calls = [(name, sums) for name, calls in named if name in self.fan_out for sums in calls]
        if not calls:
            raise ValueError(
                "no neuron emitted anything: call the network inside `with summing_levels(net) as emitted`"
            )
        sizes, bits = torch.stack([sums for _, sums in calls]).unbind(1)
        if self.kind == "bit_sparse":
            sizes = (bits / sizes.clamp(min=1)).detach() * sizes
        names = tuple(name for name, _ in calls)
        total = (self._fan_outs(names, sizes) * sizes).sum()
        return total + self._of_products(names, sizes, samples) if self.products else total

    def _of_products(self, names: tuple[str, ...], sizes: Tensor, samples: int) -> Tensor:
        passes, means = samples * self.timesteps, dict[str, Tensor]()
        for name, size in zip(names, sizes, strict=True):  # a neuron may have been called for some samples at a time
            means[name] = means.get(name, 0) + size / (passes * self.units[name])
        for gate in self.gates:
            means[gate.name] = means[gate.factor] * means[gate.source]
        parts = [macs * reduce(torch.mul, [means[name] for name in operands]) for macs, operands in self.products]
        return passes * torch.stack(parts).sum()

    def _fan_outs(self, names: tuple[str, ...], like: Tensor) -> Tensor:
        """Kept on the device, for a CUDA graph cannot copy them there."""
        key = names, like.dtype, like.device
        if key not in self._on_device:
            self._on_device[key] = like.new_tensor([self.fan_out[name] for name in names])
        return self._on_device[key]

    def of(self, accumulations: Tensor, samples: int) -> Tensor:
        """The cost of what that many samples accumulate together."""
        share = accumulations / (samples * self.synapses)
        if not self.free:
            return share
        excess = (share / self.free - 1).clamp(min=0)
        ramp = excess.clamp(max=RAMP)
        return self.free * (ramp * ramp / (2 * RAMP) + (excess - ramp))

    def __call__(self, emitted: Mapping[str, Sequence[Tensor]], samples: int) -> Tensor:
        if samples < 1:
            raise ValueError(f"samples must be at least 1, the size of the batch, got {samples!r}")
        cost = self.of(self.accumulations(emitted, samples), samples)
        if torch.is_grad_enabled() and not cost.requires_grad:
            warnings.warn(
                "levels have no gradient, so their price changes nothing: with torch.utils.checkpoint take "
                "use_reentrant=False; to count alone, call accumulations",
                stacklevel=2,
            )
        return cost


def _terms(graph: Graph) -> Iterator[tuple[int, tuple[str, ...]]]:
    """What accumulates: MACs of one timestep, and the levels whose means multiply them."""
    for s in graph.synapses:
        if s.kind == "conv" and s.source != INPUT:
            yield s.macs, (s.source,)
        elif s.kind == "matmul" and s.keys and s.values:  # V's levels add scores, which are integers
            yield s.macs // 2, (s.source, s.keys)
            yield s.macs // 2, (s.values,)
        elif s.kind == "matmul":
            yield s.macs, s.sources
    for gate in graph.gates:
        yield math.prod(gate.shape), gate.operands


def _behind_max_pools(graph: Graph) -> Iterator[str]:
    for s in graph.synapses:
        if s.source != INPUT and s.kind == "conv" and any(pool.kind == "max" for pool in s.pools):
            yield s.source


def priced_levels(config: Config, net: nn.Module, source: Source) -> LevelCost | None:
    """What `train.level_cost` multiplies; None where levels have no price."""
    t = config.train
    if not t.level_cost:
        return None
    steps, kind, above = config.model.timesteps, t.level_cost_of, t.level_cost_above
    try:
        return LevelCost(net, source.shape, kind, above=above, timesteps=steps, static=source.static)  # type: ignore[arg-type]
    except GraphError as error:
        raise ConfigError(f"train.level_cost={t.level_cost:g} has nothing to count: {error}") from error
