"""A neuron on the scores Q K^T: however it is written, it is one layer of queries and keys, and its levels are training's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lbq import BurstNeuron
from lbq.deploy import absorb, lower
from lbq.deploy.float_execution import execute
from lbq.errors import GraphError
from lbq.models import attention, over_time
from lbq.neuron import Ternary
from lbq.neuron.recorder import record_levels
from tests.support.small_nets import Functional, normalised, pixels, small, warmed

HEADS, SIDE = 2, 4


def heads_of(*tensors: Tensor) -> list[Tensor]:
    return [x.flatten(3).unflatten(2, (HEADS, -1)) for x in tensors]  # [T, B, heads, d, N]


def rows(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = heads_of(q, k, v)
    return (m.scores(q.mT @ k / 2) @ v.mT / 16).mT.flatten(2, 3).unflatten(-1, (SIDE, SIDE))


def values_first(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = heads_of(q, k, v)
    return (v / 16 @ m.scores(q.transpose(3, 4).matmul(k) * 0.5).transpose(-2, -1)).reshape(2, -1, 8, SIDE, SIDE)


def channels_as_heads(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eight heads of one channel, and what does nothing in evaluation on their scores."""
    q, k, v = (x.flatten(3).unflatten(2, (8, -1)) for x in (q, k, v))
    return (m.scores(m.drop(q.mT @ k / 2)) @ v.mT / 16).mT.flatten(2, 3).unflatten(-1, (SIDE, SIDE))


def one_head(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores [T, B, queries, keys], and a neuron behind them whose output is [T, B, tokens, channels]."""
    q, k, v = (x.flatten(3) for x in (q, k, v))
    return m.scores(q.mT @ k / 2) @ v.mT / 16


def ours(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention.weigh(m.scores(attention.scores(q, k, HEADS, 0.5)), v, 1.0)


def normed(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """BatchNorm in front of the neuron, and a convolution and an identity beside the second product."""
    q, k, values = heads_of(q, k, v)
    weighed = m.scores(over_time(q.mT @ k, m.score_norm)) @ values.mT
    return weighed.mT.reshape(2, -1, 8, SIDE, SIDE) * 0.25 + over_time(v, m.beside) + v


def block(product: Any, signed: bool = False) -> Any:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.sn(over_time(x, m.stem, timesteps=2))
        q, k, v = m.q(over_time(y, m.to_q)), m.k(over_time(y, m.to_k)), m.v(over_time(y, m.to_v))
        return m.fc(m.out(product(m, q, k, v)).mean((-2, -1))).mean(0)

    torch.manual_seed(1)
    convs = {name: nn.Conv2d(8, 8, 1) for name in ("to_q", "to_k", "to_v", "beside")}
    neurons = {name: BurstNeuron(step=0.2) for name in ("sn", "q", "out")}
    others = {"k": Ternary() if signed else BurstNeuron(step=0.2), "v": BurstNeuron(3, step=0.2, channels=8)}
    scored = {"scores": BurstNeuron(7, step=0.1, channels=HEADS), "score_norm": nn.BatchNorm2d(HEADS)}
    stem = {"stem": nn.Conv2d(3, 8, 2, 2), "fc": nn.Linear(8, 3)}
    return Functional(forward, 2, **stem, **convs, **neurons, **others, **scored)


def check_levels(net: nn.Module, shape: tuple[int, int, int]) -> Any:
    """Absorbed execution against training in float64, at every layer and timestep; the graph."""
    x = pixels(4, *shape, seed=7)
    with torch.no_grad(), record_levels(net) as levels:
        logits = net(normalised(x)).numpy()
    graph = absorb(lower(net, shape))
    result = execute(graph, normalised(x).numpy())
    clear = result.ties == 0
    assert clear.any()
    for name, level in result.levels.items():
        np.testing.assert_array_equal(graph[name].placed(levels[name])[:, clear], level[:, clear], err_msg=name)
    np.testing.assert_allclose(logits[clear], result.logits[clear], rtol=1e-9, atol=1e-9)
    return graph, result.levels


@pytest.mark.parametrize("product", [rows, values_first, ours, normed])
def test_scores_are_a_layer_however_they_are_written(product: Any) -> None:
    graph, levels = check_levels(warmed(block(product, signed=product is normed), 3, 8, 8), (3, 8, 8))
    layer = graph["scores"]
    assert layer.shape == (HEADS, 16, 16)
    assert levels["scores"].any()
    (first,) = layer.synapses
    second = next(s for s in graph["out"].synapses if s.kind == "matmul")
    assert (first.name, first.sources, first.macs) == ("scores", ("q", "k"), 16 * 16 * 8)
    assert (second.name, second.sources, second.macs) == ("attention", ("scores", "v"), 16 * 16 * 8)
    assert (first.heads, second.heads, second.out_shape) == (HEADS, HEADS, (8, 4, 4))
    assert len(set(second.weight.tolist())) == 8  # steps of heads and of V's channels leave the sum over keys
    assert [s.kind for s in graph["out"].synapses].count("matmul") == 1


def test_layers_that_do_nothing_may_read_scores() -> None:
    def dropped(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = heads_of(q, k, v)
        return (m.same(m.drop(q.mT @ k / 16)) @ v.mT).mT.flatten(2, 3).unflatten(-1, (SIDE, SIDE))

    net = block(dropped)
    net.drop, net.same = nn.Dropout(0.2), nn.Identity()
    graph, _ = check_levels(warmed(net, 3, 8, 8), (3, 8, 8))
    assert [(s.kind, s.heads, s.sources) for s in graph["out"].synapses] == [("matmul", HEADS, ("q", "k", "v"))]


def test_scores_of_heads_of_one_channel() -> None:
    net = block(channels_as_heads)
    net.scores, net.drop = BurstNeuron(7, step=0.1), nn.Dropout(0.2)
    graph, levels = check_levels(warmed(net, 3, 8, 8), (3, 8, 8))
    assert levels["scores"].shape[2:] == (8, 16, 16)
    assert levels["scores"].any()
    assert [(s.kind, s.heads) for s in graph["out"].synapses] == [("matmul", 8)]


def test_scores_of_one_head_need_no_axis_for_it() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.sn(over_time(x, m.stem, timesteps=2))
        q, k, v = (m.get_submodule(n)(over_time(y, m.get_submodule(f"to_{n}"))) for n in "qkv")
        return m.fc(m.out(one_head(m, q, k, v)).mean(2)).mean(0)

    net = block(rows)
    net.function, net.scores = forward, BurstNeuron(7, step=0.1)
    graph, levels = check_levels(warmed(net, 3, 8, 8), (3, 8, 8))
    assert levels["scores"].shape[2:] == (1, 16, 16)
    assert [(s.kind, s.heads) for s in graph["out"].synapses] == [("matmul", 1)]


@pytest.mark.parametrize(
    ("id", "neuron"), [("spikformer1x16-scores", "ternary"), ("qkformer3x32-membrane-scores", "lbq")]
)
def test_networks_by_id(id: str, neuron: str) -> None:
    graph, levels = check_levels(small(id, neuron), (3, 8, 8))
    ((name, level),) = [(name, level) for name, level in levels.items() if name.endswith("sn_scores")]
    assert [s.kind for s in graph[name].synapses] == ["matmul"]
    assert level.shape[2:] == (1 if id.startswith("spik") else 8, 4, 4)


def transposed(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A neuron on K Q^T."""
    q, k, v = heads_of(q, k, v)
    return (v @ m.scores(k.mT @ q)).flatten(2, 3).unflatten(-1, (SIDE, SIDE))


def summed(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return m.scores(q.flatten(3).mT @ k.flatten(3) + v.flatten(3))


def over_keys(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = heads_of(q, k, v)
    return m.scores(k @ v.mT)


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (
            transposed,
            r"^matmul_1 in .*: .* behind a neuron on Q K\^T, A @ V or V @ A\^T of its output A \[.*queries, keys\]",
        ),
        (
            summed,
            r"^add in .*: \[T, B, height, width\] and \[T, B, channels, tokens\] do not fit: bring",
        ),
        (over_keys, r"^matmul in .*: scores, Q K\^T, are read by"),
        (lambda m, q, k, v: attention.weigh(m.scores(q), v, 1.0), "a must be scores of the 16 tokens of v, got"),
        (lambda m, q, k, v: attention.scores(q, k, 3, 1.0), "heads must divide the 8 channels, got 3"),
        (lambda m, q, k, v: attention.weigh(attention.scores(q, k, 2, 1.0), v, 1.0), "put a neuron in front of it"),
    ],
)
def test_other_orders_are_refused_with_the_remedy(product: Any, message: str) -> None:
    net = block(product)
    net.scores = BurstNeuron()
    with pytest.raises(GraphError, match=message):
        lower(net, (3, 8, 8))


def test_steps_of_channels_cannot_leave_the_sum_of_scores() -> None:
    net = block(ours)
    net.q = BurstNeuron(channels=8)
    with pytest.raises(
        GraphError, match="^layer 'q': its steps differ between channels, which the product 'scores' sums"
    ):
        absorb(lower(net, (3, 8, 8)))
