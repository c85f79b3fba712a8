"""A price on levels: what a network's bursts cost at inference, as a term of the training loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lbq.batches.sources import Source
from lbq.config import Config
from lbq.deploy import lower
from lbq.deploy.lowering.shapes import InputShape
from lbq.errors import ConfigError, GraphError
from lbq.neuron.base import neurons_of
from lbq.neuron.base import summing_levels as summing_levels

CountKind = Literal["unary", "bit_sparse"]


class LevelCost:
    """The accumulations of a sample, as a share of the MACs of all timesteps, differentiable:

        cost = sum over layers of F_l c(S) / (samples * timesteps * MACs)

    F_l is how many weights one neuron of layer l meets on average, so that the sum is the paper's count, rate x MACs. Shortcuts
    without weights are not in it. c(S) is |S| for `unary`. For `bit_sparse` it is the set bits of |S|, which have no slope: the
    gradient is that of |S| times the layer's mean number of set bits for each unit of |S|, a constant.

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
        timesteps: int | None = None,
        static: bool = True,
    ) -> None:
        """net: a network that deployment can read; input_shape, timesteps, static: as in `lbq.deploy.deploy`."""
        if kind not in ("unary", "bit_sparse"):
            raise ValueError(f"kind must be 'unary' or 'bit_sparse', got {kind!r}")
        graph = lower(net, input_shape, timesteps, static, weights=False)
        neurons = neurons_of(net)
        if not neurons or any(layer.name not in neurons for layer in graph.layers):
            raise GraphError("a price on levels needs spiking neurons in place of all activations")
        self.kind, self.synapses = kind, graph.timesteps * graph.macs
        self.fan_out = {
            layer.name: sum(s.macs for s in graph.synapses if s.source == layer.name and s.kind == "conv") / layer.units
            for layer in graph.layers
        }
        self._on_device: dict[Any, Tensor] = {}

    def accumulations(self, emitted: Mapping[str, Sequence[Tensor]]) -> Tensor:
        """Of all samples together. emitted: what `summing_levels` gave."""
        calls = [(name, sums) for name, calls in emitted.items() if name in self.fan_out for sums in calls]
        sizes, bits = torch.stack([sums for _, sums in calls]).unbind(1)
        price = self._fan_outs(tuple(name for name, _ in calls), sizes)
        if self.kind == "bit_sparse":
            price = price * (bits / sizes.clamp(min=1)).detach()
        return (price * sizes).sum()

    def _fan_outs(self, names: tuple[str, ...], like: Tensor) -> Tensor:
        """Kept on the device, for a CUDA graph cannot copy them there."""
        key = names, like.dtype, like.device
        if key not in self._on_device:
            self._on_device[key] = like.new_tensor([self.fan_out[name] for name in names])
        return self._on_device[key]

    def share(self, accumulations: Tensor, samples: int) -> Tensor:
        """Of the MACs of that many samples over all timesteps."""
        return accumulations / (samples * self.synapses)

    def __call__(self, emitted: Mapping[str, Sequence[Tensor]], samples: int) -> Tensor:
        return self.share(self.accumulations(emitted), samples)


def priced_levels(config: Config, net: nn.Module, source: Source) -> LevelCost | None:
    """What `train.level_cost` multiplies; None where levels have no price."""
    t = config.train
    if not t.level_cost:
        return None
    steps, kind = config.model.timesteps, t.level_cost_of
    try:
        return LevelCost(net, source.shape, kind, timesteps=steps, static=source.static)  # type: ignore[arg-type]
    except GraphError as error:
        raise ConfigError(f"train.level_cost={t.level_cost:g} has nothing to count: {error}") from error
