"""Any integer layer in PyTorch: what the kernels of `tiles` do not take, and the same arithmetic on a machine without a GPU.

A convolution is a matrix product of integers in float32, exact while every partial sum stays below 2^24, also in TF32, whose
11 significant bits hold 8-bit weights and levels. Elsewhere it is one in float64, exact below 2^53. Library convolutions may
transform their operands (Winograd, FFT) and round, so they are not used. Everything else is int32, as in NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from lbq.graph import Pool, Synapse
from lbq.graph.integer import FLOAT32_BOUND, IntegerLayer, IntegerNetwork, Mixing, synapse_bound

TF32_INTEGER = 2**11  # up to here TF32 holds every integer
TF32_LEVEL = 255  # TF32 holds larger operands no longer exactly with all 8-bit weights' products


def on(device: torch.device, array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.array(array)).to(device)


def matrices(synapse: Synapse, device: torch.device) -> Tensor:
    """The weights of a convolution, `[groups, outputs, inputs * kh * kw]`."""
    return on(device, synapse.weight).reshape(synapse.groups, synapse.weight.shape[0] // synapse.groups, -1)


def convolve(synapse: Synapse, weights: Tensor, x: Tensor) -> Tensor:
    """Currents `[N, O, OH, OW]`, of the type of the weights."""
    taps = _taps(synapse, x.to(weights.dtype))
    columns = taps.reshape(len(x), synapse.groups, weights.shape[2], -1)
    return torch.matmul(weights, columns).reshape(len(x), *synapse.out_shape)


def _taps(synapse: Synapse, x: Tensor) -> Tensor:
    """What each tap of the kernel reads at each position, as a view `[N, C, kh, kw, OH, OW]`. Torch's unfold would launch a
    kernel for every image."""
    (down, right), (step_y, step_x) = synapse.padding, synapse.stride
    padded = F.pad(x, (right, right, down, down))
    image, channel, row, column = padded.stride()
    size = (*x.shape[:2], *synapse.weight.shape[2:], *synapse.out_shape[1:])
    dilated = row * synapse.dilation[0], column * synapse.dilation[1]
    return padded.as_strided(size, (image, channel, *dilated, row * step_y, column * step_x))


def pooled(x: Tensor, pools: Sequence[Pool]) -> Tensor:
    for p in pools:
        if p.channels > 1:
            x = x.unflatten(1, (-1, p.channels)).sum(2, dtype=torch.int32)
            continue
        real = x.double()  # exact for these integers, and what pooling is made for
        if p.kind == "max":
            result = F.max_pool2d(real, p.kernel, p.stride, p.padding)
        else:
            result = F.avg_pool2d(real, p.kernel, p.stride, p.padding) * (p.kernel[0] * p.kernel[1])
        x = result.round().int()
    return x


def attend(synapse: Synapse, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """(Q K^T) V of levels `[N, C, H, W]` in each head, int32, in the order that takes fewer products."""
    queries, keys, values = (x.unflatten(1, (synapse.heads, -1)).flatten(3).to(dtype) for x in (q, k, v))
    keys = keys.transpose(-2, -1)
    out = (values @ keys) @ queries if synapse.linear else values @ (keys @ queries)
    return out.reshape(q.shape).int()


def multiply(synapse: Synapse, operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The product of a synapse's operands `[N, C, H, W]`, as `attend` gives it."""
    if len(operands) == 3:
        q, k, v = operands
        return attend(synapse, q, k, v, dtype)
    one, other = (x.unflatten(1, (synapse.heads, -1)).flatten(3).to(dtype) for x in operands)
    out = one.mT @ other if synapse.keys else other @ one.unflatten(-1, operands[0].shape[2:])[:, :, 0].mT
    return out.reshape(-1, *synapse.out_shape).int()


def gated(factor: Tensor, levels: Tensor) -> Tensor:
    """A gate's levels `[N, C, H, W]`."""
    return (levels.unflatten(1, (factor.shape[1], -1)) * factor.unsqueeze(2)).flatten(1, 2)


def mixed(currents: Tensor, mixing: Mixing) -> Iterator[Tensor]:
    """`Mixing.of`, one timestep after the other."""
    for row in mixing.weights.tolist():
        total = torch.full_like(currents[0], 1 << (mixing.bits - 1), dtype=torch.int64)
        for weight, current in zip(row, currents, strict=True):
            total += weight * current.long()
        yield (total >> mixing.bits).int()


class PlainLayer:
    """A layer on int32 levels `[T * B, C, H, W]`."""

    def __init__(self, network: IntegerNetwork, layer: IntegerLayer, device: torch.device) -> None:
        assert layer.neuron is not None
        self.layer, self.neuron, self.timesteps = layer, layer.neuron, network.timesteps
        bias = layer.bias if layer.bias.ndim == 3 else layer.bias[:, None, None]
        self.bias, self.reset = on(device, bias), on(device, layer.neuron.reset[:, None, None])
        self.thresholds = on(device, layer.neuron.thresholds.T[:, :, None, None])
        steady = (*layer.identities, *layer.matmuls)
        self.identities = {s.name: on(device, s.weight[:, None, None]) for s in steady}
        self.product_types = {s.name: _product_type(network, s) for s in layer.matmuls}
        self.weights = {}
        for s in layer.convs:
            largest = network.largest(s)
            small = int(synapse_bound(s, largest).max()) < FLOAT32_BOUND
            single = small and s.weight.dtype == np.int8 and largest <= TF32_LEVEL
            self.weights[s.name] = matrices(s, device).to(torch.float32 if single else torch.float64)

    def run(self, read: dict[str, list[Tensor]], batch: int) -> Tensor:
        """read: the pooled levels of each synapse, `[T * B, ...]`, or `[B, ...]` of a static image; all of a product."""
        current: Tensor | int = 0
        for s in self.layer.convs:
            part = convolve(s, self.weights[s.name], *read[s.name]).int()
            current = current + (part if len(part) > batch else part.repeat(self.timesteps, 1, 1, 1))
        total = (current << self.layer.fraction) + self.bias
        for s in self.layer.identities:
            total = total + self.identities[s.name] * read[s.name][0]
        for s in self.layer.matmuls:
            total = total + self.identities[s.name] * multiply(s, read[s.name], self.product_types[s.name])
        return self._fire(total.expand(self.timesteps * batch, *self.layer.shape), batch)

    def _fire(self, current: Tensor, batch: int) -> Tensor:
        n = self.neuron
        emitted, v, pending = [], None, None
        currents = current.reshape(self.timesteps, batch, *self.layer.shape)
        for now in currents if n.mixing is None else mixed(currents, n.mixing):
            u = now
            if v is not None:
                if n.leak is not None:
                    m, k = n.leak
                    v = ((v.long() * m + (1 << (k - 1))) >> k).int()
                u = u + v
            if pending is not None:
                u = u - pending
            magnitude = u.abs() if n.signed else u
            level = torch.zeros_like(u)
            for threshold in self.thresholds:
                level += magnitude >= threshold
            if n.signed:
                level = level * u.sign()
            emitted.append(level)
            if n.reset_kind == "hard":
                v = u * (level == 0)
                continue
            drop = self.reset * (level if n.reset_kind == "level" else level.sign())
            v, pending = (u - drop, None) if n.decay_reset else (u, drop)
        return torch.cat(emitted)


def _product_type(network: IntegerNetwork, synapse: Synapse) -> torch.dtype:
    """float32 where it is exact for a product of levels, also in TF32, which must hold the scores."""
    n_max, scores = [network.n_max(source) for source in synapse.sources], 0
    if len(n_max) == 3:
        scores = n_max[1] * (n_max[2] * synapse.tokens if synapse.linear else n_max[0] * synapse.per_head)
    exact = network.largest(synapse) < FLOAT32_BOUND and scores <= TF32_INTEGER
    return torch.float32 if exact else torch.float64


@contextmanager
def tf32(device: torch.device) -> Iterator[None]:
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
