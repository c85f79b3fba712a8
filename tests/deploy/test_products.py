"""Products of two levels are refused by name, at the layer that has them, however their operands were reshaped before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq import BurstNeuron, models
from lbq.deploy import lower
from lbq.errors import GraphError, TooSmall
from tests.support.commands import Call
from tests.support.paths import ROOT

NO_FORM = (
    r"has no integer form yet: train and test this network in float \(lbq train, lbq eval\), and deploy one in which"
)


class Tokens(nn.Module):
    """Patches as tokens [T, B, N, D], and a product of neurons' outputs."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.patches, self.n0, self.nq, self.nk = nn.Conv2d(3, 8, 4, 4), BurstNeuron(), BurstNeuron(), BurstNeuron()
        self.q, self.k, self.fc = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.n0(x.expand(2, *x.shape))
        x = self.product(self.nq(self.q(x)), self.nk(self.k(x)))
        return self.fc(x.mean(2)).mean(0)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        (lambda q, k: q @ (k.transpose(-1, -2) @ q), "matmul"),
        (lambda q, k: torch.matmul(q.transpose(-1, -2), k), "matmul"),
        (lambda q, k: q.matmul(k.mT), "matmul"),
        (lambda q, k: torch.einsum("tbnd,tbmd->tbnm", q, k), "einsum"),
        (lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).unflatten(0, q.shape[:2]), "bmm"),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k), "scaled_dot_product_attention"),
    ],
)
def test_attention_of_ones_own_is_named(product: Any, name: str) -> None:
    message = rf"^{name} in the network's forward: a product of two levels \(attention\) {NO_FORM}"
    with pytest.raises(GraphError, match=message):
        lower(Tokens(product), (3, 16, 16), timesteps=2)


def test_other_faults_keep_their_words() -> None:
    """Reshaping alone is no product, nor is a product with a parameter."""
    net = Tokens(lambda q, k: q + k)
    with pytest.raises(
        GraphError, match="^flatten in the network's forward: flatten channels, height and width together"
    ):
        lower(net, (3, 16, 16), timesteps=2)
    net.product = lambda q, k: (q + k) @ net.weight
    with pytest.raises(GraphError, match="^flatten in the network's forward"):
        lower(net, (3, 16, 16), timesteps=2)
    net.product = lambda q, k: q @ torch.zeros(3, 3) @ k  # which does not run either
    with pytest.raises(GraphError, match="^flatten in the network's forward"):
        lower(net, (3, 16, 16), timesteps=2)


def test_a_network_that_cannot_be_copied_keeps_its_first_refusal() -> None:
    class Whole(Tokens):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no copies")

    with pytest.raises(GraphError, match="^flatten in the network's forward"):
        lower(Whole(lambda q, k: q @ k.mT), (3, 16, 16), timesteps=2)


def test_a_gate_is_named() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.sn, self.fc = nn.Conv2d(3, 4, 3), BurstNeuron(), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.sn(models.over_time(x, self.conv, timesteps=2))
            return self.fc((y * y).mean((-2, -1))).mean(0)

    with pytest.raises(
        GraphError, match=rf"^mul in the network's forward: a product of two levels \(a gate\) {NO_FORM}"
    ):
        lower(Gated(), (3, 8, 8), timesteps=2)


def test_pytorchs_transformer_layer_is_named() -> None:
    class Encoded(Tokens):
        def __init__(self) -> None:
            super().__init__(lambda q, k: self.layer(q.flatten(0, 1)).unflatten(0, q.shape[:2]))
            self.layer = nn.TransformerEncoderLayer(8, 2, 8, activation=BurstNeuron(), batch_first=True)

    message = rf"^layer 'layer', a TransformerEncoderLayer: a product of two levels \(attention\) {NO_FORM}"
    with pytest.raises(GraphError, match=message):
        lower(Encoded(), (3, 16, 16), timesteps=2)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(
    ("id", "where"),
    [
        ("spikformer1x16", r"attend in the forward of layer 'blocks.1', a SelfAttention"),
        ("spikformer1x16-membrane", r"attend in the forward of layer 'blocks.1', a SelfAttention"),
        ("qkformer3x32", r"gate in the forward of layer 'stages.0.0', a TokenAttention"),
    ],
)
def test_our_transformers_are_refused_by_name(id: str, where: str, static: bool) -> None:
    with pytest.raises(GraphError, match=rf"^{where}: a product of two levels \((attention|a gate)\) {NO_FORM}"):
        lower(models.create(id), (3, 16, 16), static=static)


def test_tokens_that_do_not_fit_come_first() -> None:
    with pytest.raises(TooSmall, match="^tokens of 4x4 pixels do not fit images of 16 x 18"):
        lower(models.create("spikformer1x16"), (3, 16, 18))


def test_commands(tmp_path: Path, call: Call) -> None:
    """Training and testing run to their end; deployment and counting say in one line why not."""
    run, config = tmp_path / "run", ROOT / "configs" / "digits" / "lbq.toml"
    call.printed(
        "train",
        config,
        "model.id=spikformer1x16",
        "train.epochs=1",
        "train.warmup_epochs=0",
        "--device",
        "cpu",
        "--out",
        run,
    )
    call.printed("eval", run, "--device", "cpu")
    for command in (("deploy", run, "-o", tmp_path / "x.lbq"), ("analyze", run)):
        assert "a product of two levels (attention) has no integer form yet" in call.refused(*command)
