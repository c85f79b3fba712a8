"""One transformer in several styles: tokens [T, B, N, D] as users write them, and [T, B, D, H, W], which all of them become.

A stem of 2x2 patches, attention, an MLP, a head that averages tokens. Each residual merges in front of a neuron.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lbq import BurstNeuron
from lbq.models import fire, over_time
from tests.support.small_nets import Functional

SHAPE = (3, 6, 8)  # 3 x 4 tokens


def images(m: Any, x: Tensor) -> Tensor:
    """[T, B, D, H, W] and 1x1 convolutions."""
    y = fire(x, m.stem, m.bn_stem, m.sn, timesteps=m.timesteps)
    rows, columns = y.shape[-2:]

    def current(name: str, z: Tensor) -> Tensor:
        return over_time(z, *parts(m, name))

    q, k, v = (neuron(m, n)(current(n, y)).flatten(3).unflatten(2, (m.heads, -1)) for n in "qkv")
    a = m.attention((v @ (k.mT @ q) * 0.125).flatten(2, 3).unflatten(-1, (rows, columns)))
    y = m.out(current("out", a) + y)
    y = m.last(current("last", m.hidden(current("hidden", y))) + y)
    return m.fc(y.mean((-2, -1))).mean(0)


def spikformer(m: Any, x: Tensor) -> Tensor:
    """An image shown from the start, time folded by hand; Linear and BatchNorm1d on [T * B, N, D], which is transposed."""
    x = x.unsqueeze(0).repeat(m.timesteps, 1, 1, 1, 1) if x.dim() == 4 else x
    steps, batch, _, height, columns = x.shape
    y = m.bn_stem(m.stem(x.flatten(0, 1))).reshape(steps, batch, -1, height // 2, columns // 2).contiguous()
    y = m.sn(y).flatten(-2).transpose(-1, -2)
    _, _, tokens, width = y.shape

    def current(name: str, z: Tensor) -> Tensor:
        linear, norm = parts(m, name)
        z = linear(z.flatten(0, 1))
        return norm(z.transpose(-1, -2)).transpose(-1, -2).reshape(steps, batch, tokens, -1).contiguous()

    def heads(z: Tensor) -> Tensor:
        return z.reshape(steps, batch, tokens, m.heads, width // m.heads).permute(0, 1, 3, 2, 4).contiguous()

    q, k, v = (heads(neuron(m, n)(current(n, y))) for n in "qkv")
    a = (q @ k.transpose(-2, -1)) * 0.125 @ v
    a = m.attention(a.transpose(2, 3).reshape(steps, batch, tokens, width).contiguous())
    y = m.out(current("out", a) + y)
    y = m.last(current("last", m.hidden(current("hidden", y))) + y)
    return m.fc(y.mean(2)).mean(0)


def static_patches(m: Any, x: Tensor) -> Tensor:
    """Patches [B, N, D] before time begins; Linear on [T, B, N, D] itself, BatchNorm1d on [T * B * N, D]."""
    y = m.bn_stem(m.stem(x)).flatten(2).transpose(1, 2)
    y = m.sn(y.expand(m.timesteps, *y.shape))

    def current(name: str, z: Tensor) -> Tensor:
        linear, norm = parts(m, name)
        z = linear(z)
        return norm(z.flatten(0, 2)).view(z.shape)

    q, k, v = (neuron(m, n)(current(n, y)).unflatten(-1, (m.heads, -1)).transpose(2, 3) for n in "qkv")
    a = m.attention(q @ (k.mT @ v) / 8).transpose(2, 3).flatten(3)  # a neuron on [T, B, heads, N, d]
    y = m.out(current("out", a) + y)
    y = m.last(current("last", m.hidden(current("hidden", y))) + y)
    return m.fc(y.mean((0, 2)))


def signals(m: Any, x: Tensor) -> Tensor:
    """[T, B, D, N] with Conv1d and BatchNorm1d; the head pools."""
    y = fire(x, m.stem, m.bn_stem, m.sn, timesteps=m.timesteps).flatten(3)

    def made(name: str, z: Tensor, residual: Tensor | None = None) -> Tensor:
        conv, norm = parts(m, name)
        return fire(z, conv, norm, neuron(m, name), residual=residual, spatial=2)

    q, k, v = (made(n, y).unflatten(2, (m.heads, -1)) for n in "qkv")
    a = m.attention((v @ (k.transpose(-2, -1) @ q) * 0.125).flatten(2, 3))
    y = made("out", a, y)
    y = made("last", made("hidden", y), y)
    return m.fc(over_time(y, m.pool, spatial=2).flatten(2)).mean(0)


def batched_products(m: Any, x: Tensor) -> Tensor:
    """torch.bmm of [T * B * heads, N, d], functions over time, and a neuron that has a step for each channel."""
    y = m.sn(over_time(x, m.stem, m.bn_stem, lambda z: z.flatten(2).movedim(1, -1), timesteps=m.timesteps))
    steps, batch, tokens, width = y.shape

    def current(name: str, z: Tensor) -> Tensor:
        linear, norm = parts(m, name)
        return over_time(z, linear, lambda w: norm(w.mT).mT, spatial=2)

    def heads(z: Tensor) -> Tensor:
        return z.view(-1, tokens, m.heads, width // m.heads).transpose(1, 2).reshape(-1, tokens, width // m.heads)

    q, k, v = (heads(neuron(m, n)(current(n, y))) for n in "qkv")
    a = torch.bmm(torch.bmm(q, k.transpose(1, 2)) * 0.125, v)
    a = m.attention(a.view(steps, batch, m.heads, tokens, -1).permute(0, 1, 3, 2, 4).reshape(steps, batch, tokens, -1))
    y = m.out(y + current("out", a))
    h = m.hidden(current("hidden", y).movedim(-1, 2)).movedim(2, -1)
    y = m.last(y + current("last", h))
    return m.fc(y.sum(-2) / tokens).mean(0)


Style = Callable[[Any, Tensor], Tensor]
STYLES: list[Style] = [spikformer, static_patches, signals, batched_products]
KINDS: dict[Style, tuple[Any, Any]] = {images: (nn.Conv2d, nn.BatchNorm2d), signals: (nn.Conv1d, nn.BatchNorm1d)}


def parts(m: Any, name: str) -> tuple[nn.Module, nn.Module]:
    return m.get_submodule(f"to_{name}"), m.get_submodule(f"bn_{name}")


def neuron(m: Any, name: str) -> nn.Module:
    module: nn.Module = m.get_submodule(name)
    return module


def network(
    style: Style,
    timesteps: int = 2,
    width: int = 8,
    heads: int = 2,
    hidden: int = 12,
    unequal: bool = False,
    channels: int = 3,
) -> Any:
    """unequal: the hidden neurons have a step for each channel, which only some styles have in place."""
    torch.manual_seed(1)
    layer, norm = KINDS.get(style, (nn.Linear, nn.BatchNorm1d))
    sizes = {
        **dict.fromkeys("qkv", (width, width)),
        "out": (width, width),
        "hidden": (width, hidden),
        "last": (hidden, width),
    }
    layers: dict[str, nn.Module] = {"stem": nn.Conv2d(channels, width, 2, 2), "bn_stem": nn.BatchNorm2d(width)}
    for name, (inputs, outputs) in sizes.items():
        layers[f"to_{name}"] = layer(inputs, outputs, *([] if layer is nn.Linear else [1]))
        layers[f"bn_{name}"] = norm(outputs)
        layers[name] = BurstNeuron(4, step=0.3, channels=hidden if unequal and name == "hidden" else None)
    ends = {"sn": BurstNeuron(step=0.3), "attention": BurstNeuron(step=0.2), "pool": nn.AdaptiveAvgPool1d(1)}
    net = Functional(style, timesteps, **layers, **ends, fc=nn.Linear(width, 3))
    net.heads = heads  # type: ignore[assignment]
    return net


def take_weights(net: nn.Module, other: nn.Module) -> nn.Module:
    """A network with the weights of another one, in another style, in float64 and evaluation mode."""
    theirs = other.state_dict()
    net.double().load_state_dict({key: theirs[key].reshape(own.shape) for key, own in net.state_dict().items()})
    return net.eval()
