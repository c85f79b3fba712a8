"""Run an integer network densely in PyTorch: on a GPU's matrix units, or on the CPU to look at the same arithmetic.

A convolution is a matrix product of integers in float32, exact while every partial sum stays below 2^24, also in TF32, whose
11 significant bits hold 8-bit weights and levels. A network is refused where this is not proved. Library convolutions may
transform their operands (Winograd, FFT) and round, so they are not used. Everything else is int32, as in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lbq.engine.execution import OnLevels, dense_counts
from lbq.engine.method import Choice
from lbq.engine.output import Output
from lbq.errors import LbqError
from lbq.graph import INPUT, Pool, Synapse
from lbq.graph.integer import FLOAT32_BOUND, IntegerLayer, IntegerNetwork, Mixing, synapse_bound
from lbq.graph.levels import Integers

MATRIX_VALUES_PER_PIECE = 2**27  # of the matrices that are multiplied at a time


class TorchRunner:
    """The same layers as `lbq.engine.runner.Runner`, on tensors `[T * B, C, H, W]`."""

    def __init__(self, network: IntegerNetwork, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise LbqError("engine cuda needs a GPU that PyTorch can use: choose auto, dense or bitplane")
        self.network, self.device = network, torch.device(device)
        for s in (s for layer in network.layers for s in layer.convs):
            if (bound := int(synapse_bound(s, network.largest(s)).max())) >= FLOAT32_BOUND:
                raise LbqError(
                    f"engine {device}: the sums of {s.name!r} may reach {bound}, which float32 does not hold exactly: "
                    "use another engine, or export with fewer bits"
                )
            if s.weight.dtype != np.int8:
                raise LbqError(f"engine {device}: {s.name!r} has 16-bit weights: use another engine, or --bits 8")
            if (largest := network.largest(s)) > 255:
                raise LbqError(
                    f"engine {device}: {s.name!r} reads pooled sums up to {largest}, more than 8 bits: use another engine"
                )
        self.weights = {s.name: self._matrices(s).float() for layer in network.layers for s in layer.convs}
        self.constants = {layer.name: self._constants(layer) for layer in network.layers}
        widest = max(s.weight[0].size * s.groups * s.out_shape[1] * s.out_shape[2] for s in network.synapses)
        self.images_per_piece = max(MATRIX_VALUES_PER_PIECE // (widest * network.timesteps), 1)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)

    def _matrices(self, s: Synapse) -> Tensor:
        """The weights of a convolution, `[groups, outputs, inputs * kh * kw]`."""
        return self._tensor(s.weight).reshape(s.groups, s.weight.shape[0] // s.groups, -1)

    def _constants(self, layer: IntegerLayer) -> dict[str, Tensor]:
        assert layer.neuron is not None
        bias = layer.bias if layer.bias.ndim == 3 else layer.bias[:, None, None]
        constants = {
            "bias": bias,
            "thresholds": layer.neuron.thresholds.T[:, :, None, None],
            "reset": layer.neuron.reset[:, None, None],
        }
        constants |= {s.name: s.weight[:, None, None] for s in layer.identities}
        return {name: self._tensor(value) for name, value in constants.items()}

    @torch.no_grad()
    def run(
        self, x: NDArray[np.uint8], trace: bool | OnLevels = False, progress: Callable[[int], None] | None = None
    ) -> Output:
        """Inputs `[B, C, H, W]`, or `[T, B, C, H, W]` for events; trace as for the `Runner`."""
        net, axis = self.network, 0 if self.network.static else 1
        logits: list[NDArray[np.int64]] = []
        traced: dict[str, list[Integers]] = {layer.name: [] for layer in net.layers}
        on_levels: Any = (lambda name, levels: traced[name].append(levels)) if trace is True else trace or None
        with _tf32(self.device):
            for start in range(0, x.shape[axis], self.images_per_piece):
                part = np.take(x, range(start, min(start + self.images_per_piece, x.shape[axis])), axis)
                logits.append(self._some(part, on_levels))
                if progress is not None:
                    progress(part.shape[axis])
        choices = {s.name: Choice("torch", "dense", f"dense on {self.device.type}") for s in net.synapses}
        counts = {s.name: dense_counts(s, x.shape[axis] * self._passes(s)) for s in net.synapses}
        levels = {name: np.concatenate(parts, axis=1) for name, parts in traced.items()} if trace is True else None
        return Output(np.concatenate(logits), net.scale, counts, choices, levels)

    def _passes(self, synapse: Synapse) -> int:
        """How often an image meets the weights: once in the readout, which reads sums over time, and on a static image."""
        net = self.network
        once = synapse.name in (s.name for s in net.readout.synapses) or (net.static and synapse.source == INPUT)
        return 1 if once else net.timesteps

    def _some(self, x: NDArray[np.uint8], on_levels: OnLevels | None) -> NDArray[np.int64]:
        net, steps = self.network, self.network.timesteps
        levels = {INPUT: self._tensor(x.reshape(-1, *net.input_shape)).int()}
        batch = len(levels[INPUT]) // (1 if net.static else steps)
        for layer in net.layers:
            current = torch.zeros((), dtype=torch.int32, device=self.device).expand(1, *layer.shape)
            for s in layer.convs:
                part = self._convolve(s, self.weights[s.name], self._pooled(levels[s.source], s.pools)).int()
                if s.source == INPUT and net.static:
                    part = part.repeat(steps, 1, 1, 1)
                current = current + part
            current = (current << layer.fraction) + self.constants[layer.name]["bias"]
            for s in layer.identities:
                current = current + self.constants[layer.name][s.name] * self._pooled(levels[s.source], s.pools)
            levels[layer.name] = self._fire(layer, current, batch)
            if on_levels is not None:
                assert layer.neuron is not None
                split = levels[layer.name].reshape(steps, batch, *layer.shape)
                on_levels(layer.name, split.cpu().numpy().astype(layer.neuron.dtype))
        return self._readout(levels, batch)

    def _pooled(self, x: Tensor, pools: tuple[Pool, ...]) -> Tensor:
        for p in pools:
            real = x.double()  # exact for these integers, and what pooling is made for
            if p.kind == "max":
                pooled = F.max_pool2d(real, p.kernel, p.stride, p.padding)
            else:
                pooled = F.avg_pool2d(real, p.kernel, p.stride, p.padding) * (p.kernel[0] * p.kernel[1])
            x = pooled.round().int()
        return x

    def _convolve(self, s: Synapse, weights: Tensor, x: Tensor) -> Tensor:
        """Currents `[N, O, OH, OW]` of the type of the weights."""
        columns = F.unfold(x.to(weights.dtype), s.weight.shape[2:], s.dilation, s.padding, s.stride)
        columns = columns.reshape(len(x), s.groups, -1, columns.shape[-1])
        return torch.matmul(weights, columns).reshape(len(x), *s.out_shape)

    def _fire(self, layer: IntegerLayer, current: Tensor, batch: int) -> Tensor:
        n, constants = layer.neuron, self.constants[layer.name]
        assert n is not None
        emitted, v, pending = [], None, None
        currents = current.reshape(self.network.timesteps, batch, *layer.shape)
        for now in currents if n.mixing is None else _mixed(currents, n.mixing):
            u = now
            if v is not None:
                if n.leak is not None:
                    m, k = n.leak
                    v = ((v.long() * m + (1 << (k - 1))) >> k).int()
                u = u + v
            if pending is not None:
                u = u - pending
            magnitude = u.abs() if n.signed else u
            level = sum((magnitude >= t).int() for t in constants["thresholds"])
            assert isinstance(level, Tensor)
            if n.signed:
                level = level * u.sign()
            emitted.append(level)
            if n.reset_kind == "hard":
                v = u * (level == 0)
                continue
            drop = constants["reset"] * (level if n.reset_kind == "level" else level.sign())
            v, pending = (u - drop, None) if n.decay_reset else (u, drop)
        return torch.cat(emitted)

    def _readout(self, levels: dict[str, Tensor], batch: int) -> NDArray[np.int64]:
        readout, steps = self.network.readout, self.network.timesteps
        logits = np.tile(readout.bias, (batch, 1))
        for s in readout.synapses:
            read = self._pooled(levels[s.source], s.pools)
            summed = read.reshape(steps, batch, *read.shape[1:]).sum(0)
            if s.kind == "identity":
                logits += (summed[:, :, 0, 0].cpu().numpy()) * s.weight
                continue
            sums = self._convolve(s, self._matrices(s).double(), summed)  # below 2^53: exact
            logits += sums.reshape(batch, -1).cpu().numpy().astype(np.int64)
        return logits


def _mixed(currents: Tensor, mixing: Mixing) -> Iterator[Tensor]:
    """`Mixing.of`, one timestep after the other."""
    for row in mixing.weights.tolist():
        total = torch.full_like(currents[0], 1 << (mixing.bits - 1), dtype=torch.int64)
        for weight, current in zip(row, currents, strict=True):
            total += weight * current.long()
        yield (total >> mixing.bits).int()


@contextmanager
def _tf32(device: torch.device) -> Iterator[None]:
    """Let a GPU multiply in TF32, which is exact for 8-bit integers, and leave the setting as it was."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
