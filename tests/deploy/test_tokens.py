"""Networks of tokens [T, B, N, D]: however they are written, they become the graph of the same network of images."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lbq import BurstNeuron
from lbq.counting.operations import Counter, count
from lbq.counting.tally import Tallies
from lbq.deploy import absorb, deploy, graph_of, lower
from lbq.errors import GraphError
from lbq.graph import Graph
from lbq.measuring.observer import Observer
from lbq.models import over_time
from lbq.neuron import Ternary
from lbq.neuron.recorder import record_levels
from lbq.training.level_cost import LevelCost
from tests.support.small_nets import MEAN, STD, Functional, compare, normalised, pixels, same, warmed
from tests.support.token_nets import SHAPE, STYLES, batched_products, images, network, spikformer, take_weights


def equal(graph: Graph, other: Graph) -> None:
    """The same layers, synapses and numbers. Layouts are of the trained network, and no engine reads them."""
    for ours, theirs in zip(graph.all_layers, other.all_layers, strict=True):
        assert (ours.name, ours.shape) == (theirs.name, theirs.shape)
        np.testing.assert_array_equal(ours.bias, theirs.bias)
        for one, two in zip(ours.synapses, theirs.synapses, strict=True):
            for field in fields(one):
                np.testing.assert_array_equal(getattr(one, field.name), getattr(two, field.name), err_msg=field.name)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("timesteps", [1, 2])
def test_every_style_is_the_network_of_images(style: Any, timesteps: int) -> None:
    """`compare` looks at the levels of every layer and timestep in float64."""
    options: dict[str, Any] = {"timesteps": timesteps, "unequal": style is batched_products}
    of_images = warmed(network(images, **options), *SHAPE)
    net = take_weights(network(style, **options), of_images)
    graph = lower(net, SHAPE)
    equal(graph, lower(of_images, SHAPE))
    compare(net, graph, torch.randn(3, *SHAPE, dtype=torch.float64))


@given(
    style=st.sampled_from(STYLES),
    timesteps=st.integers(1, 3),
    heads=st.integers(1, 3),
    per_head=st.integers(2, 3),
    hidden=st.integers(1, 4),
    rows=st.integers(1, 3),
    columns=st.integers(2, 3),
)
@settings(max_examples=15, deadline=None)
def test_sizes_that_could_be_taken_for_one_another(
    style: Any, timesteps: int, heads: int, per_head: int, hidden: int, rows: int, columns: int
) -> None:
    """Timesteps, heads, channels, rows and columns, often equal ones."""
    shape = (2, 2 * rows, 2 * columns)
    net = network(style, timesteps, heads * per_head, heads, hidden, unequal=style is batched_products, channels=2)
    net = warmed(net, *shape)
    graph = lower(net, shape)
    assert all(layer.shape[1:] == (rows, columns) for layer in graph.layers)
    compare(net, graph, torch.randn(2, *shape, dtype=torch.float64))


def test_event_frames() -> None:
    net = warmed(network(spikformer, channels=2), 2, 6, 8, static=False)
    graph = lower(net, (2, 6, 8), timesteps=4, static=False)
    compare(net, graph, torch.randn(4, 2, 2, 6, 8, dtype=torch.float64))


def test_deployed_tokens_are_the_deployed_network_of_images() -> None:
    of_images = warmed(network(images), *SHAPE)
    net = take_weights(network(spikformer), of_images)
    ours, theirs = (deploy(n, SHAPE, mean=MEAN, std=STD) for n in (net, of_images))
    x = pixels(4, *SHAPE)
    assert same(ours.run(x, trace=True), theirs.run(x, trace=True))


def test_recorded_levels_are_counted_where_they_stand() -> None:
    """Levels [T, B, N, D] of the trained network, and those of its integers, give the same counts."""
    net = warmed(network(spikformer), *SHAPE)
    graph, x = graph_of(net, SHAPE), pixels(3, *SHAPE)
    with record_levels(net) as recorded, torch.no_grad():
        net(normalised(x))
    assert recorded["hidden"].shape == (2, 3, 12, 12)
    placed = {name: graph[name].placed(level) for name, level in recorded.items()}
    np.testing.assert_array_equal(placed["hidden"][1, 2, 5], recorded["hidden"][1, 2, :, 5].reshape(3, 4))
    assert count(graph, recorded).synapses == count(graph, placed).synapses
    observer = Observer(Tallies(graph), on_device=False)
    with observer.counting(net), torch.no_grad():
        net(normalised(x))
    observer.finish(3)
    assert Counter(graph, "exact", observer.tallies).account().synapses == count(graph, placed).synapses


def test_a_price_on_levels_is_that_of_the_network_of_images() -> None:
    ours, theirs = (LevelCost(network(style), SHAPE) for style in (spikformer, images))
    assert (ours.fan_out, ours.synapses, ours.products) == (theirs.fan_out, theirs.synapses, theirs.products)


# Other ways to write one thing
# ---------------------------------------------------------------------------------------------------------------------


def tokens(forward: Any, **layers: nn.Module) -> Any:
    """A stem of 3 x 4 tokens, and whatever `forward` makes of its levels [T, B, N, D]."""

    def whole(m: Any, x: Tensor) -> Tensor:
        y = m.sn(over_time(x, m.stem, timesteps=m.timesteps))
        out: Tensor = forward(m, y.flatten(3).transpose(-2, -1))
        return out

    torch.manual_seed(0)
    stem = {"stem": nn.Conv2d(3, 8, 2, 2), "sn": BurstNeuron(step=0.2), "fc": nn.Linear(8, 3)}
    return Functional(whole, 2, **{**stem, **layers})


def sums(m: Any, x: Tensor) -> Tensor:
    """Outputs of neurons added up, as in SEW networks; differences, and a signed neuron."""
    x = x - 0.5 * m.a(m.to_a(x))
    x = x + m.b(m.to_b(x))
    return m.fc(x.mean(-2)).mean(0)


def gates(m: Any, x: Tensor) -> Tensor:
    """Levels times levels, token by token; a mean over tokens that keeps its axis gates them all."""
    x = m.a(m.to_a(x)) * x
    x = m.c(m.to_one(x)) * x  # one channel gates all
    return m.fc((m.b(x.mean(2, keepdim=True)) * x).mean(2)).mean(0)


def scores(m: Any, x: Tensor) -> Tensor:
    """A neuron on Q K^T of two heads, and both ways to multiply its output with V."""
    q, k, v = (
        n(to(x)).unflatten(-1, (2, -1)).transpose(2, 3) for n, to in ((m.a, m.to_a), (m.b, m.to_b), (m.c, m.to_c))
    )
    a = m.scorer(q @ k.transpose(-2, -1) / 2)
    y = (a @ v / 4 if m.timesteps == 2 else (v.mT @ a.mT / 4).mT).transpose(2, 3).flatten(3)
    return m.fc(m.last(y + x).mean(2)).mean(0)


def back_to_images(m: Any, x: Tensor) -> Tensor:
    """A 3x3 convolution between linear layers, as for positions."""
    y = m.a(m.to_a(x)).transpose(-2, -1).unflatten(-1, (3, 4))
    y = over_time(y, m.conv, m.bn)
    return m.fc(m.b(y.flatten(3).mT + x).mean((0, 2)))


def channels_last(m: Any, x: Tensor) -> Tensor:
    """[T, B, H, W, D]; the last layer reads everything, channels in front."""
    y = m.a(m.to_a(x.reshape(*x.shape[:2], 3, 4, 8)))
    y = m.b(m.to_b(torch.flatten(y, 0, 3)).view(y.shape))
    return m.wide(y.permute(0, 1, 4, 2, 3).flatten(2)).mean(0)


WAYS = {
    "scores": scores,
    "sums": sums,
    "gates": gates,
    "back to images": back_to_images,
    "channels last": channels_last,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("timesteps", [2, 3])
def test_other_ways(way: str, timesteps: int) -> None:
    linear = {f"to_{name}": nn.Linear(8, 8) for name in "abc"}
    others = {"to_one": nn.Linear(8, 1), "wide": nn.Linear(96, 3), "conv": nn.Conv2d(8, 8, 3, padding=1)}
    neurons = {name: BurstNeuron(3, step=0.2) for name in ("a", "b", "c", "scorer", "last")}
    net = tokens(WAYS[way], **linear, **others, **neurons, bn=nn.BatchNorm2d(8))
    net.timesteps = timesteps
    if way == "sums":
        net.a = Ternary()
    net = warmed(net, *SHAPE)
    compare(net, lower(net, SHAPE), torch.randn(3, *SHAPE, dtype=torch.float64))


STARTS: dict[str, Any] = {
    "expand": lambda y, steps: y.expand(steps, *y.shape),
    "unsqueeze": lambda y, steps: y.unsqueeze(0).expand(steps, -1, -1, -1),
    "repeat": lambda y, steps: y[None].repeat(steps, 1, 1, 1),
    "stack": lambda y, steps: torch.stack([y] * steps),
    "behind the batch": lambda y, steps: torch.stack([y] * steps, 1).transpose(0, 1),
    "sum": lambda y, steps: y + 0 * torch.stack([y] * steps),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("timesteps", [1, 3])
def test_time_may_begin_with_tokens(start: str, timesteps: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.stem(x).flatten(2).permute(0, 2, 1)
        y = m.sn(STARTS[start](y, timesteps))
        return m.fc(m.flat(m.pool(y.flatten(0, 1).movedim((2, 1), (1, 2)))).view(timesteps, -1, 8)).mean(0)

    layers = {"stem": nn.Conv2d(3, 8, 2, 2), "sn": BurstNeuron(step=0.2), "fc": nn.Linear(8, 3)}
    torch.manual_seed(0)
    net = warmed(Functional(forward, timesteps, **layers, pool=nn.AdaptiveAvgPool1d(1), flat=nn.Flatten()), *SHAPE)
    compare(net, lower(net, SHAPE), torch.randn(3, *SHAPE, dtype=torch.float64))


def test_tokens_of_signals_and_an_ann() -> None:
    """A sequence [B, C, L] has its samples as tokens. An ANN of ReLUs is lowered for its MACs."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(m.to_a(x.transpose(1, 2)).expand(2, -1, -1, -1))
        q, k, v = (m.get_submodule(n)(m.get_submodule(f"to_{n}")(y)) for n in "qkv")
        return m.fc(m.b(m.scores(q @ k.mT / 4) @ v / 4).mean(2)).mean(0)

    layers = {f"to_{n}": nn.Linear(3 if n == "a" else 4, 4) for n in "aqkv"}
    neurons = {n: BurstNeuron(step=0.2) for n in ("a", "q", "k", "v", "scores", "b")}
    net = Functional(forward, 2, **layers, **neurons, fc=nn.Linear(4, 3))
    graph = graph_of(net, (3, 6))  # which compares levels at every layer and timestep
    assert (graph["q"].shape, graph["scores"].shape) == ((4, 1, 6), (1, 6, 6))
    ann = Functional(
        lambda m, x: m.fc(F.relu(m.to_a(x.mT)).mean(1))[None].mean(0), 1, to_a=nn.Linear(3, 4), fc=nn.Linear(4, 2)
    )
    assert lower(ann, (3, 6)).macs == 6 * 3 * 4 + 4 * 2


def test_memory_that_two_layouts_share_may_not_be_changed() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x.mT
        y += y
        return m.fc((x + y.mT).mean(2)).mean(0)

    with pytest.raises(GraphError, match=r"^iadd in .*: \+= changes a tensor that is read again afterwards"):
        lower(tokens(forward), SHAPE)


# What is refused
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda m, x: m.mix(x.mT), r"^layer 'mix': Linear reads dimension 3 of \[T, B, channels, tokens\] as ch.* mixes"),
        (lambda m, x: m.mix(x), "^layer 'mix': expects 12 channels, gets"),
        (lambda m, x: m.small(x.unflatten(-1, (2, 4))), r"^layer 'small': .*\[T, B, tokens, heads, channels of a head\].*: j"),
        (lambda m, x: m.small(x.unflatten(-1, (2, 4)).mT.flatten(-2)), r"^layer 'small': .*: they .* a channel shuffle has no"),
        (lambda m, x: m.wide(x.flatten(2)), r"^layer 'wide': .*\[T, B, tokens \* channels\].*write x.transpose\(-2, -1\).fl"),
        (lambda m, x: m.bn1(x.flatten(0, 1)), r"^layer 'bn1': .*dimension 1 of \[T \* B, tokens, channels\].*: where channels"),
        (lambda m, x: m.bn1(x.mT), r"^layer 'bn1': BatchNorm1d cannot read \[T, B, channels, tokens\]: let it .*flatten"),
        (lambda m, x: m.conv3(x.flatten(0, 1).mT), "^layer 'conv3': Conv1d of a kernel, .*where neighbours are not those"),
        (lambda m, x: m.conv1(x.mT), r"^layer 'conv1': Conv1d cannot read \[T, B, channels, tokens\]"),
        (lambda m, x: m.halves(x.flatten(0, 1).mT), "^layer 'halves': AdaptiveAvgPool1d .* must average all tokens"),
        (lambda m, x: m.max(x.flatten(0, 1).mT), r"^layer 'max': it cannot read \[T \* B, channels, tokens\]: bring it back"),
        (lambda m, x: m.a(m.fc8(x.flatten(0, 1))), r"^layer 'a': a neuron needs time .*reads \[T \* B, tokens, .*: unflatten"),
        (lambda m, x: m.by_channel(m.fc8(x)), r"^layer 'by_channel': it has steps for channels, .*: write neuron\(x.movedim"),
        (lambda m, x: m.fc8(m.fc8_2(x)), "^layer 'fc8': Linear must read the input, a neuron's output or a sum of these"),
        (lambda m, x: m.fc8(x).mean(2), "^mean in .*: mean over tokens must read a neuron's output: put a neuron in front"),
        (lambda m, x: x.mean(-1), r"^mean in .* of \[T, B, tokens, channels\], mean\(0\) or mean\(2\)$"),
        (lambda m, x: x.sum(-1, keepdim=True), r"^sum_1 in .*; the sum over a head's channels is lbq.models.attention.head_s"),
        (lambda m, x: x + m.positions, "^layer 'positions': .*: weights belong into a layer, .*; a table of positions has no"),
        (lambda m, x: m.mha(x, x, x)[0], "^layer 'mha': MultiheadAttention has no integer form here: its softmax has none; "),
        (lambda m, x: m.norm(x), "^layer 'norm': LayerNorm has no integer form here: use BatchNorm"),
        (lambda m, x: F.layer_norm(x, (8,)), "^layer_norm in .*: use BatchNorm"),
        (lambda m, x: torch.softmax(x @ x.mT, -1) @ x, "^softmax in .*: .*in attention, leave it out"),
        (lambda m, x: m.soft(x @ x.mT) @ x, "^layer 'soft': Softmax has no integer form here: .*in attention, leave it out"),
        (lambda m, x: torch.einsum("tbnd,tbmd->tbnm", x, x), "^einsum in the .*: write it with @"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x), "^scaled_dot.*: its softmax has none; .*tutorials/att"),
        (lambda m, x: m.encoder(x.flatten(0, 1)), "^layer 'encoder': TransformerEncoderLayer .*: its softmax and LayerNorm"),
        (lambda m, x: x + m.table, "^layer 'table': a bare parameter .*: a table of positions has no .*: let a 3x3 conv"),
        (lambda m, x: x + x.mT, r"^add in .*: \[T, B, tokens, channels\] and \[T, B, channels, tokens\] do not fit: bring"),
        (lambda m, x: x * x.mT, r"^mul in .*: \[T, B, tokens, channels\] and \[T, B, channels, tokens\] do not fit: bring"),
        (lambda m, x: x.chunk(2, -1)[0], "^chunk in .*; give Q, K and V a layer and a neuron each"),
        (lambda m, x: m.pool(x.unflatten(2, (3, 4)).transpose(3, 4).flatten(0, 2)), "^layer 'pool': .* must average all tok"),
        (lambda m, x: m.bn(x.mT), r"^layer 'bn': .*dimension 1 of \[T, B, channels, tokens\] as .*: transpose and flatten"),
        (lambda m, x: m.fc8(x) @ x.mT, "^matmul in .*: it multiplies something else than neurons' outputs"),
        (lambda m, x: m.fc8(x).transpose(2, 3).unsqueeze(2) + x, r"do not fit: bring"),
        (lambda m, x: x.repeat(1, 1, 1, 2), "^repeat in .*: repeat is supported only to show an image at every timestep"),
        (lambda m, x: torch.stack([x, 2 * x]), "^stack in .*: only the same image"),
        (lambda m, x: x.movedim((0, 1), (2, 2)), "^movedim in .*: movedim may join and exchange"),
        (lambda m, x: x.transpose(dim0=2, dim1=3), "^transpose_1 in .*: transpose may join and"),
        (lambda m, x: over_time(x, lambda y: y.mT.flatten(0, 1), spatial=2), "^unfold_time.*: it must unfold what was comp"),
        (lambda m, x: x[:, :, 0], "^getitem in .*operation 'getitem' has no integer form here"),
        (lambda m, x: torch.cat([x, x], -1), r"^cat in .*: it cannot read \[T, B, tokens, channels\]: bring it back to \["),
        (lambda m, x: x.reshape(2, -1, 6, 2, 8), "^reshape in .*: reshape may join .*, and split channels into heads"),
        (lambda m, x: over_time(x, m.fc8), r"^fold_time.*: spatial=3, but the tensor is \[T, B, tokens, channels\]: give"),
        (lambda m, x: x.expand(3, *x.shape), "^expand in .*: only an image without time in front can be shown"),
        (lambda m, x: m.a(m.fc8(x)), r"^what the network returns: it cannot read \[T, B, tokens, channels\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(forward: Any, message: str) -> None:
    linear = {"mix": nn.Linear(12, 12), "small": nn.Linear(4, 4), "wide": nn.Linear(96, 3), "fc8": nn.Linear(8, 8)}
    convs = {"conv1": nn.Conv1d(8, 8, 1), "conv3": nn.Conv1d(8, 8, 3), "fc8_2": nn.Linear(8, 8)}
    norms = {
        "bn1": nn.BatchNorm1d(12),
        "bn": nn.SyncBatchNorm(8),
        "pool": nn.AdaptiveAvgPool1d(1),
        "norm": nn.LayerNorm(8),
        "soft": nn.Softmax(-1),
    }
    pools = {
        "halves": nn.AdaptiveAvgPool1d(2),
        "max": nn.MaxPool1d(2),
        "a": BurstNeuron(),
        "by_channel": BurstNeuron(channels=12),
    }
    net = tokens(
        forward, **linear, **convs, **norms, **pools, encoder=nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    )
    net.table = nn.Parameter(torch.rand(1, 1, 12, 8))
    net.positions, net.mha = nn.Parameter(torch.rand(12, 8)), nn.MultiheadAttention(8, 2)
    with pytest.raises(GraphError, match=message):
        lower(net, SHAPE)


def test_steps_for_tokens_are_not_taken_for_steps_of_channels() -> None:
    """As many tokens as channels: only where they stand tells them apart."""
    net = tokens(
        lambda m, x: m.fc(m.by(m.to_by(x)).mean(2)).mean(0), to_by=nn.Linear(8, 12), by=BurstNeuron(channels=12)
    )
    net.fc = nn.Linear(12, 3)
    with pytest.raises(GraphError, match="^layer 'by': it has steps for channels, which must stand behind the batch"):
        absorb(lower(net, SHAPE))
