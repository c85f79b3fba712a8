"""Products of neurons' outputs over the token grid: attention without softmax, and gates.

Tokens `[T, B, N, D]` stand here as `[T, B, D, H, W]` with N = H * W: channels where neurons and BatchNorm expect them, so that
both run in one pass, and linear layers of tokens are 1x1 convolutions. A head is D / heads neighbouring channels. torch.fx
takes these functions for leaves, as it does the functions of `lbq.models.time`.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from lbq.models.resnet import MakeNeuron
from lbq.models.time import traced_leaf

USUAL_TOKENS = 64  # of 32x32 pixels
SPIKFORMERS_SCALE = 1 / 8  # where a neuron stays silent and there is nothing to go by
QUANTILES = 512


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """scale / N * (Q K^T) V of each head, without softmax and without rounding in between (Spikformer's attention).

    Of scaled levels it is scale / N * gamma_q * gamma_k * gamma_v times an integer. The mean over the N tokens makes `scale`
    the same for images of every size.
    """
    if (traced := traced_leaf(attend, q, k, v, heads, scale)) is not None:
        return traced
    if v.shape != q.shape:
        raise ValueError(f"v must have the shape of q, {tuple(q.shape)}, got {tuple(v.shape)}")
    return weigh(scores(q, k, heads, 1.0), v, scale)


def scores(q: Tensor, k: Tensor, heads: int, scale: float) -> Tensor:
    """scale * Q K^T of each head, `[T, B, heads, queries, keys]`: for a neuron of its own, whose output `weigh` takes."""
    if (traced := traced_leaf(scores, q, k, heads, scale)) is not None:
        return traced
    check_tokens("q", q, heads)
    if k.shape != q.shape:
        raise ValueError(f"k must have the shape of q, {tuple(q.shape)}, got {tuple(k.shape)}")
    queries, keys = (_by_head(x, heads) for x in (q, k))
    products = queries.transpose(-2, -1) @ keys
    return products if scale == 1.0 else scale * products


def weigh(a: Tensor, v: Tensor, scale: float) -> Tensor:
    """scale / N * A V of each head: what queries read of the values, by scores `a` [T, B, heads, queries, keys]."""
    if (traced := traced_leaf(weigh, a, v, scale)) is not None:
        return traced
    check_tokens("a", a, 1)
    check_tokens("v", v, a.shape[2])
    sides = v.shape[3:]
    if a.shape[:2] != v.shape[:2] or a.shape[3:] != (sides.numel(),) * 2:
        wanted = f"[{v.shape[0]}, {v.shape[1]}, heads, {sides.numel()}, {sides.numel()}]"
        raise ValueError(f"a must be {wanted}, scores of the tokens of v, got {list(a.shape)}")
    current = _by_head(v, a.shape[2]) @ a.transpose(-2, -1)  # [T, B, heads, d, N]
    return (scale / sides.numel() * current).flatten(2, 3).unflatten(-1, sides)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """`[T, B, heads, d, N]`."""
    return x.flatten(3).unflatten(2, (heads, -1))


def head_sums(q: Tensor, heads: int, scale: float) -> Tensor:
    """scale * the sum over the channels of each head, `[T, B, heads, H, W]`."""
    if (traced := traced_leaf(head_sums, q, heads, scale)) is not None:
        return traced
    check_tokens("q", q, heads)
    return scale * q.unflatten(2, (heads, -1)).sum(3)


def gate(a: Tensor, k: Tensor) -> Tensor:
    """a * k, where `a` [T, B, heads, H, W] is one factor for all channels of a head of `k` [T, B, D, H, W]."""
    if (traced := traced_leaf(gate, a, k)) is not None:
        return traced
    check_tokens("a", a, 1)
    heads = a.shape[2]
    check_tokens("k", k, heads)
    if (a.shape[:2], a.shape[3:]) != (k.shape[:2], k.shape[3:]):
        raise ValueError(f"a must have the timesteps, batch and tokens of k, {tuple(k.shape)}, got {tuple(a.shape)}")
    return (k.unflatten(2, (heads, -1)) * a.unsqueeze(3)).flatten(2, 3)


def check_tokens(name: str, x: Tensor, heads: int) -> None:
    """Refuse tokens without time in front, and channels that do not make whole heads."""
    if x.dim() != 5:
        raise ValueError(f"{name} must be tokens [T, B, D, H, W] with time in front, got shape {tuple(x.shape)}")
    if heads < 1 or x.shape[2] % heads:
        raise ValueError(f"heads must divide the {x.shape[2]} channels of {name}, got {heads}")


def unit_scale(neuron: MakeNeuron, timesteps: int, channels: int, factors: int) -> float:
    """The power of two that brings sums of products of neurons' outputs to about 1, root mean square, before training.

    `factors` 3: `attend` of heads of so many channels. 1: `head_sums`. It is worked out from what the neuron makes of normally
    distributed currents, which BatchNorm gives it: with mean m and mean square p, products of independent outputs have mean
    m^factors and mean square p^factors. Binary spikes are far fewer than levels, so one number cannot serve all neurons.
    """
    mean, power = _moments(neuron, timesteps)
    tokens = USUAL_TOKENS if factors > 1 else 1
    return _over(math.hypot(channels * mean**factors, math.sqrt(channels * power**factors / tokens)))


def score_scales(neuron: MakeNeuron, timesteps: int, channels: int) -> tuple[float, float]:
    """The same for `scores` of heads of so many channels, and for `weigh` behind a neuron that reads them."""
    mean, power = _moments(neuron, timesteps)
    first = _over(math.hypot(channels * mean**2, math.sqrt(channels) * power))
    spread = math.sqrt(channels * max(power**2 - mean**4, 0.0))
    weight, weight_power = _moments(neuron, timesteps, first * channels * mean**2, first * spread)
    return first, _over(math.hypot(weight * mean, math.sqrt(weight_power * power / USUAL_TOKENS)))


def _moments(neuron: MakeNeuron, timesteps: int, centre: float = 0.0, spread: float = 1.0) -> tuple[float, float]:
    """The mean and mean square of what a neuron makes of normally distributed currents."""
    normal = NormalDist()
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        currents = torch.tensor([normal.inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)]) * spread + centre
        outputs = neuron(1)(currents.expand(timesteps, 1, 1, QUANTILES)).double()
    return float(outputs.mean()), float(outputs.square().mean())


def _over(size: float) -> float:
    """The power of two that brings this size to about 1."""
    return 2.0 ** -round(math.log2(size)) if 0 < size < math.inf else SPIKFORMERS_SCALE
