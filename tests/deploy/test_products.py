"""Products of levels with levels are lowered however they are written, and what has no integer form is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq import BurstNeuron, models
from lbq.deploy import deploy, graph_of, lower
from lbq.errors import GraphError, TooSmall
from lbq.graph import Graph
from lbq.models import fire, over_time

HEADS = 2


class Own(nn.Module):
    """A block of one's own: Q, K and V of 4 channels on 4x4 tokens, and what `product` makes of them."""

    def __init__(self, product: Callable[..., Tensor], **neuron: Any) -> None:
        super().__init__()
        self.stem, self.sn = nn.Conv2d(3, 4, 4, 4), BurstNeuron()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.neurons = nn.ModuleList(BurstNeuron(**neuron) for _ in range(3))
        self.out, self.fc, self.product = BurstNeuron(), nn.Linear(4, 5), product
        for name, parameter in self.named_parameters():
            if name.startswith(("norms", "convs")):
                nn.init.normal_(parameter, mean=0.5 * name.endswith("bias"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.sn(over_time(x, self.stem, timesteps=2))
        parts = zip(self.convs, self.norms, self.neurons, strict=True)
        x = self.out(self.product(*(fire(x, conv, norm, neuron) for conv, norm, neuron in parts)))
        return self.fc(x.mean((-2, -1))).mean(0)


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(Q K^T) V with heads split off, [T, B, heads, d, N]."""
    q, k, v = (x.flatten(3).unflatten(2, (HEADS, -1)) for x in (q, k, v))
    out = (q.transpose(-2, -1) @ k * 0.5) @ v.transpose(-2, -1)
    return out.transpose(-2, -1).flatten(2, 3).unflatten(-1, (4, 4))


def linear_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(2, -1, HEADS, 2, 16).permute(0, 1, 2, 4, 3) for x in (q, k, v))
    return ((q @ (k.mT @ v)).mT * 0.5).reshape(2, -1, 4, 4, 4)


def values_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.view(2, -1, HEADS, 2, 16) for x in (q, k, v))
    return torch.matmul(v / 2, k.transpose(3, 4).matmul(q)).view(*q.shape[:2], 4, 4, 4)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return models.attention.attend(q, k, v, HEADS, 8.0)  # over 16 tokens


def attention_of(graph: Graph) -> tuple[Any, ...]:
    (synapse,) = (s for s in graph.synapses if s.kind == "matmul")
    return synapse.name, synapse.sources, synapse.heads, synapse.in_shape, synapse.macs


@pytest.mark.parametrize("product", [heads_first, linear_order, values_first, ours])
def test_attention_is_lowered_however_it_is_written(product: Any) -> None:
    """`graph_of` compares levels at every layer and timestep with the network's in float64."""
    torch.manual_seed(0)
    graph = graph_of(Own(product), (3, 16, 16), timesteps=2)
    sources = ("neurons.0", "neurons.1", "neurons.2")
    assert attention_of(graph) == ("attention", sources, HEADS, (4, 4, 4), 2 * 16 * 16 * 4)
    (synapse,) = (s for s in graph.synapses if s.kind == "matmul")
    np.testing.assert_allclose(synapse.weight, 0.5 * 0.4**3, rtol=1e-6)  # steps begin at 0.4
    assert [s.kind for s in graph["out"].synapses] == ["matmul"]


def named_operands(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(3).unflatten(2, (HEADS, -1)) for x in (q, k, v))
    scores = torch.matmul(input=q.mT, other=k * 0.5)
    return torch.matmul(scores, other=v.mT).mT.flatten(2, 3).unflatten(-1, (4, 4))


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What does nothing in evaluation stands between the scores and V."""
    q, k, v = (x.flatten(3).unflatten(2, (HEADS, -1)) for x in (q, k, v))
    scores = F.dropout(q.mT @ k * 0.5, 0.1, training=False)
    return (scores @ v.mT).mT.flatten(2, 3).unflatten(-1, (4, 4))


@pytest.mark.parametrize("product", [named_operands, dropped])
def test_other_ways_to_write_the_same_attention(product: Any) -> None:
    torch.manual_seed(0)
    assert attention_of(graph_of(Own(product), (3, 16, 16), timesteps=2))[2] == HEADS


@pytest.mark.parametrize(("side", "heads"), [(4, 4), (4, 1), (1, 2), (1, 1)])
@pytest.mark.parametrize("order", ["(QK)V", "Q(KV)", "V(KQ)"])
def test_heads_of_one_channel_and_images_of_one_token(side: int, heads: int, order: str) -> None:
    """Axes of size 1 have no part of their own; `graph_of` compares every level with the network's in float64."""

    def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.flatten(3).unflatten(2, (heads, -1)).mT for x in (q, k, v))  # [T, B, heads, N, d]
        ways = {"(QK)V": lambda: q @ k.mT @ v, "Q(KV)": lambda: q @ (k.mT @ v), "V(KQ)": lambda: (v.mT @ k @ q.mT).mT}
        return (ways[order]() * 0.5).transpose(2, 3).flatten(3).mT.unflatten(-1, (side, side))

    torch.manual_seed(0)
    graph = graph_of(Own(product), (3, 4 * side, 4 * side), timesteps=2)
    tokens = side * side
    assert attention_of(graph)[2:] == (heads, (4, side, side), 2 * tokens * tokens * 4)
    assert attention_of(graph)[1][2] == "neurons.2"  # V, which alone may have a step for each channel


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (v.flatten(3) @ (k.flatten(3).mT @ q.flatten(3))).unflatten(-1, (4, 4)) + v


def test_one_head_beside_an_identity() -> None:
    graph = graph_of(Own(one_head), (3, 16, 16), timesteps=2)
    assert attention_of(graph)[2] == 1
    assert [s.kind for s in graph["out"].synapses] == ["matmul", "identity"]


@pytest.mark.parametrize(
    ("product", "shape"),
    [
        (lambda q, k, v: q * k + v, (4, 4, 4)),
        (lambda q, k, v: q.sum((-2, -1), keepdim=True) + k * v, (4, 4, 4)),
        (lambda q, k, v: models.attention.gate(q, k) + v, (4, 4, 4)),
    ],
)
def test_gates(product: Any, shape: Any) -> None:
    if "sum" in product.__code__.co_names:
        with pytest.raises(GraphError, match=r"shapes \(4, 1, 1\) and \(4, 4, 4\) differ"):
            lower(Own(product), (3, 16, 16), timesteps=2)
        return
    graph = graph_of(Own(product), (3, 16, 16), timesteps=2)
    (gate,) = graph.gates
    assert (gate.name, gate.shape) == ("neurons.0*neurons.1", shape)
    assert graph.n_max(gate.name) == 25
    assert graph.macs - graph.gate_macs == sum(s.macs for s in graph.synapses)


class Squeezed(nn.Module):
    """Channel attention: one factor for all positions of a channel; token attention: one for all channels of a token."""

    def __init__(self, over: str) -> None:
        super().__init__()
        self.conv, self.sn, self.gating, self.fc = nn.Conv2d(3, 4, 3), BurstNeuron(), BurstNeuron(), nn.Linear(4, 5)
        self.over = over

    def forward(self, x: Tensor) -> Tensor:
        y = self.sn(over_time(x, self.conv, timesteps=2))
        summed = y.mean((-2, -1), keepdim=True) if self.over == "positions" else models.attention.head_sums(y, 1, 0.5)
        return self.fc((self.gating(summed) * y).mean((-2, -1))).mean(0)


@pytest.mark.parametrize(("over", "shape"), [("positions", (4, 1, 1)), ("channels", (1, 6, 6))])
def test_gates_broadcast_over_positions_and_channels(over: str, shape: Any) -> None:
    torch.manual_seed(0)
    graph = graph_of(Squeezed(over), (3, 8, 8), timesteps=2)
    assert graph["gating"].shape == shape
    assert graph.gates[0].operands == ("gating", "sn")
    (synapse,) = graph["gating"].synapses
    assert (synapse.kind, synapse.summed) == ("identity", 36 if over == "positions" else 4)


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (
            lambda q, k, v: F.softmax(q.flatten(3).mT @ k.flatten(3), -1),
            "operation 'softmax' .* in attention, leave it out",
        ),
        (
            lambda q, k, v: (q.flatten(3) @ k.flatten(3).mT).mean(0),
            "scores, Q K\\^T, are read by their product with V, or",
        ),
        (lambda q, k, v: q.flatten(3) @ k.flatten(3), "attention alone has an integer form: .*heads are neighbouring"),
        (
            lambda q, k, v: (q.flatten(3).mT @ k.flatten(3)) @ v.flatten(3).mT,
            "mean over .* of \\[T, B, tokens, channels",
        ),
        (lambda q, k, v: torch.einsum("tbcyx,tbcvw->tbyv", q, k), "operation 'einsum' .*: write it with @"),
        (lambda q, k, v: F.gelu(q), "operation 'gelu' .*: put a neuron of lbq.neuron in its place"),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), "its softmax has none; \\(Q K\\^T\\) V of neurons'"),
        (lambda q, k, v: F.layer_norm(q, (4,)), "operation 'layer_norm' .*: use BatchNorm"),
        (lambda q, k, v: (q + k) * v, "it multiplies something else than neurons' outputs: put a neuron in front"),
        (lambda q, k, v: models.attention.attend(q, k, v, 3, 1.0), "heads must divide the 4 channels, got 3"),
        (lambda q, k, v: q * F.max_pool2d(k.flatten(0, 1), 2).unflatten(0, (2, -1)), "put a neuron .* pools"),
        (lambda q, k, v: models.attention.head_sums(q, 3, 1.0), "heads must divide the 4 channels, got 3"),
    ],
)
def test_what_has_no_integer_form_is_named(product: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        lower(Own(product), (3, 16, 16), timesteps=2)


def test_steps_of_channels_cannot_leave_a_sum() -> None:
    """V's can, Q's and K's cannot."""
    with pytest.raises(
        GraphError, match=r"^layer 'neurons.0': its steps differ .* product 'attention' sums over: train"
    ):
        graph_of(Own(ours, channels=4), (3, 16, 16), timesteps=2)
    net: Any = Own(ours)
    net.neurons[2] = BurstNeuron(channels=4)
    with torch.no_grad():
        net.neurons[2].rho.add_(torch.tensor([0.1, -0.1, 0.2, 0.0]).reshape(net.neurons[2].rho.shape))
    (synapse,) = (s for s in graph_of(net, (3, 16, 16), timesteps=2).synapses if s.kind == "matmul")
    assert len(set(synapse.weight.tolist())) == 4


def test_heads_joined_without_their_channels_are_the_fault_of_the_reshape() -> None:
    """Not of the products in front of it, which have an integer form."""

    def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.flatten(3).unflatten(2, (HEADS, -1)).mT for x in (q, k, v))
        return (q @ k.mT @ v).reshape(2, -1, 16, 4).mT.unflatten(-1, (4, 4))

    match = r"^reshape in .*: bring heads beside their channels first, as in x.transpose\(-3, -2\).flatten\(-2\)"
    with pytest.raises(GraphError, match=match):
        lower(Own(product), (3, 16, 16), timesteps=2)


class Windows(nn.Module):
    """Attention in windows of 2 x 2 tokens, whose layout lowering cannot follow."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.patches, self.n0, self.nq, self.nk = nn.Conv2d(3, 8, 4, 4), BurstNeuron(), BurstNeuron(), BurstNeuron()
        self.q, self.k, self.fc = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        x = self.n0(over_time(x, self.patches, timesteps=2))
        x = x.reshape(2, -1, 8, 2, 2, 2, 2).permute(0, 1, 3, 5, 4, 6, 2).flatten(4, 5).flatten(2, 3)
        x = self.product(self.nq(self.q(x)), self.nk(self.k(x)))
        return self.fc(x.mean((2, 3))).mean(0)


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (lambda q, k: q @ (k.transpose(-1, -2) @ q), "^matmul in the .*: attention whose operands .*: let each be"),
        (lambda q, k: torch.einsum("tbwnd,tbwmd->tbwnm", q, k), "^einsum in the .*: write it with @"),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k), "^scaled_dot.*: its softmax has none; .*tutorials/att"),
        (lambda q, k: torch.softmax(q @ k.mT, -1) @ q, "^softmax in .*: .*in attention, leave it out"),
        (lambda q, k: q @ (k.mT @ q).flatten(2, 3), "^matmul in the .*: attention whose operands"),
        (lambda q, k: F.layer_norm(q, (8,)) + k, "^layer_norm in .*: use BatchNorm"),
        (
            lambda q, k: q + k,
            "^reshape in the network's forward: it may only join or split time and batch, or channels",
        ),
    ],
)
def test_causes_behind_a_layout_that_cannot_be_followed(product: Any, message: str) -> None:
    net = Windows(product)
    with pytest.raises(GraphError, match=message):
        lower(net, (3, 16, 16), timesteps=2)
    with pytest.raises(GraphError, match=message):  # which looks at it in float64
        deploy(net, (3, 16, 16), timesteps=2)
    net.product = lambda q, k: (q + k) @ net.weight  # a product with a parameter is none
    with pytest.raises(GraphError, match="^reshape in the network's forward"):
        lower(net, (3, 16, 16), timesteps=2)


def test_a_network_that_cannot_be_copied_keeps_its_first_refusal() -> None:
    class Whole(Windows):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no copies")

    with pytest.raises(GraphError, match="^reshape in the network's forward"):
        lower(Whole(lambda q, k: q @ k.mT), (3, 16, 16), timesteps=2)


def test_tokens_that_do_not_fit_come_first() -> None:
    with pytest.raises(TooSmall, match="^tokens of 4x4 pixels do not fit images of 16 x 18"):
        lower(models.create("spikformer1x16"), (3, 16, 18))
