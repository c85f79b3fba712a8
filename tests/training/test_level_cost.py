"""The price on levels in training: it counts what accounting counts, and fewer levels are emitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lbq import models
from lbq.config import Config, recipe_hash
from lbq.counting.operations import Counter
from lbq.errors import ConfigError, GraphError
from lbq.measuring.measure import measure
from lbq.neuron.base import unchanging
from lbq.neuron.hooks import evaluating
from lbq.training.level_cost import LevelCost, summing_levels
from tests.support import small_runs
from tests.support.commands import Call

ROOT = Path(__file__).parents[2]
PRICED = ("train.level_cost=0.5", "train.ema=0")


@pytest.mark.parametrize("neuron", [{"name": "lbq", "n_max": 7, "step": 0.1}, {"name": "ternary", "step": 0.3}])
def test_the_cost_is_the_count_of_accounting(neuron: dict[str, object]) -> None:
    """Rate x MACs of the same images, unary and bit-sparse; levels that are pooled before they meet weights too."""
    made = small_runs.trainer(small_runs.config(small_runs.TINY))
    net = models.create("resnet8w4", timesteps=2, neuron=neuron, in_channels=1)
    measured = measure(net, made.source)
    assert measured.tallies is not None
    total = Counter(measured.graph, "rate", measured.tallies).account().total
    x = torch.cat([x for x, _ in made.source.eval_batches("test")])
    with evaluating(net), unchanging(net), summing_levels(net) as emitted:
        net(x)
    for kind, expected in (("unary", total.unary), ("bit_sparse", total.bit_sparse)):
        cost = LevelCost(net, (1, 8, 8), kind)  # type: ignore[arg-type]
        assert cost.accumulations(emitted).item() / len(x) == pytest.approx(expected, rel=1e-5)
        share = expected / (2 * measured.graph.macs)
        assert cost(emitted, len(x)).item() == pytest.approx(share, rel=1e-5)
    assert total.bit_sparse > 0


def test_a_price_lowers_the_count() -> None:
    counts, usual = {}, ("train.ema=0", "train.epochs=6", "model.dropout=0", "train.test=never", "optim.lr=0.02")
    for price in (0.0, 1.0):
        changes = (*usual, "optim.neuron_decay=step", f"train.level_cost={price}")
        made = small_runs.trainer(small_runs.config(*changes))
        records = list(made.fit())
        measured = measure(made.net, made.source)
        assert measured.tallies is not None
        counts[price] = Counter(measured.graph, "rate", measured.tallies).account().total.bit_sparse
        assert (records[-1].accumulations is None) == (price == 0)
    assert counts[1.0] < 0.8 * counts[0.0]


def test_the_gradient_is_that_of_the_loss_and_the_price() -> None:
    """In parts of a batch, scaled for half precision and not: the gradient of the mean loss plus the price times the cost."""
    plain = ("model.dropout=0", "train.ema=0", "train.level_cost=0.7", "train.level_cost_of=unary")
    made = small_runs.trainer(small_runs.config(small_runs.TINY, *plain, "train.accumulate=2", "train.precision=fp64"))
    made.net.eval()  # BatchNorm would have statistics of its own in each part
    ((x, labels),) = made.source.train_batches([torch.arange(12)], 0, 0)
    x, targets = x.double(), torch.eye(10, dtype=torch.float64)[labels]
    cost = LevelCost(made.net, made.source.shape, "unary")
    with summing_levels(made.net) as emitted:
        loss = made.loss(made.net(x), targets) + 0.7 * cost(emitted, len(x))
    expected = torch.autograd.grad(loss, list(made.net.parameters()))
    made.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for half in (slice(0, 6), slice(6, 12)):
        made._backward(x[half], targets[half], labels[half], last=half.stop == 12)
    for parameter, gradient in zip(made.net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad / 8, gradient)
    assert made.tally[3].item() == pytest.approx(cost.accumulations(emitted).item())


@pytest.mark.parametrize("changes", [(), ("optim.sam=0.05",), ("train.loss=tet",)], ids=["plain", "sam", "tet"])
def test_a_run_goes_on_with_its_price(changes: tuple[str, ...]) -> None:
    config = small_runs.config(small_runs.TINY, *PRICED, *changes)
    whole = list(small_runs.trainer(config).fit())
    stopped = small_runs.trainer(config, between_steps=lambda t: t.position.step == 6)
    records = list(stopped.fit())
    going_on = small_runs.trainer(config)
    going_on.restore(*stopped.state())
    records += list(going_on.fit())
    timeless = [replace(r, seconds=0.0, samples_per_second=0.0) for r in whole]
    assert [replace(r, seconds=0.0, samples_per_second=0.0) for r in records] == timeless


def test_a_checkpoint_of_before_counts_no_accumulations() -> None:
    made = small_runs.trainer(small_runs.config(small_runs.TINY))
    tensors, values = made.state()
    made.restore(tensors, {**values, "tally": [[3.0, 2.0, 1.0]]})
    assert made.tally.tolist() == [3.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("neuron", "reason"), [("relu", "needs spiking neurons"), ("mlf", "MLF keeps several membranes per neuron")]
)
def test_networks_that_cannot_be_counted_are_refused(neuron: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^train.level_cost=0.5 has nothing to count: .*{reason}"):
        small_runs.trainer(small_runs.config(small_runs.TINY, *PRICED, f"neuron.name={neuron}"))


def test_a_count_that_is_unknown_is_refused() -> None:
    net = models.create("resnet8w4")
    with pytest.raises(ValueError, match="^kind must be 'unary' or 'bit_sparse', got 'bits'"):
        LevelCost(net, (1, 8, 8), "bits")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="the network has no spiking neurons"):
        LevelCost(nn.Sequential(nn.Linear(3, 2)), (3,))
    with pytest.raises(ConfigError, match="^train.level_cost_of must be one of 'bit_sparse', 'unary'"):
        Config.from_dict({"train": {"level_cost_of": "bits"}})


def test_a_recipe_without_a_price_keeps_its_hash() -> None:
    tree = Config().to_dict()
    before = {**tree, "train": {k: v for k, v in tree["train"].items() if not k.startswith("level_cost")}}
    assert recipe_hash(before) == Config().recipe_hash
    assert Config.from_dict({"train": {"level_cost": 0.5}}).recipe_hash != Config().recipe_hash


def test_the_command_shows_the_count(call: Call, tmp_path: Path) -> None:
    changes = ("model.id=resnet8w2", "train.epochs=1", "train.warmup_epochs=0", "train.level_cost=0.5")
    code, _, err = call("train", ROOT / "configs" / "digits" / "lbq.toml", *changes, "-o", tmp_path / "run")
    assert code == 0
    assert " M accumulations" in err
