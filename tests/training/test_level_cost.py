"""The price on levels in training: it counts what accounting counts, and fewer levels are emitted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lbq import models
from lbq.config import Config, recipe_hash
from lbq.counting.operations import Counter, count
from lbq.data import load_digits
from lbq.deploy import lower
from lbq.errors import ConfigError, GraphError
from lbq.measuring.measure import measure
from lbq.models import attention
from lbq.neuron import BurstNeuron
from lbq.neuron.base import neurons_of, unchanging
from lbq.neuron.hooks import evaluating
from lbq.neuron.recorder import record_levels
from lbq.training.level_cost import CountKind, LevelCost, summing_levels
from tests.support import small_runs
from tests.support.commands import Call
from tests.support.small_nets import Functional, normalised, pixels, small

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
        assert cost.accumulations(emitted, len(x)).item() / len(x) == pytest.approx(expected, rel=1e-5)
        share = expected / (2 * measured.graph.macs)
        with torch.no_grad():
            assert cost(emitted, len(x)).item() == pytest.approx(share, rel=1e-5)
    assert total.bit_sparse > 0


@pytest.mark.parametrize("id", ["spikformer1x16", "spikformer1x16-scores", "qkformer3x32"])
def test_the_cost_has_products_of_levels(id: str) -> None:
    """Against float64: rates of accounting times MACs; and the gradient of an operand is that of its levels times the other's
    mean, a constant."""
    net = small(id, {"name": "lbq", "step": 0.1})
    with record_levels(net) as levels, summing_levels(net) as emitted, torch.no_grad():
        net(normalised(pixels(3, 3, 8, 8)))
    graph = lower(net, (3, 8, 8))
    terms = [(s.macs, [s.source]) for s in graph.synapses if s.kind == "conv" and s.source != "input"]
    weighted = len(terms)
    terms += [(math.prod(gate.shape), list(gate.operands)) for gate in graph.gates]
    for s in graph.synapses:
        if s.kind == "matmul":
            *first, last = s.sources
            terms += [(s.macs // 2, first), (s.macs // 2, [last])] if len(first) > 1 else [(s.macs, [*first, last])]
    kinds: tuple[CountKind, ...] = ("unary", "bit_sparse")
    for kind in kinds:
        worth = {name: level if kind == "unary" else np.bitwise_count(level) for name, level in levels.items()}
        mean = {name: float(np.mean(each, dtype=np.float64)) for name, each in worth.items()}
        for gate in graph.gates:
            mean[gate.name] = mean[gate.factor] * mean[gate.source]
        parts = [2 * macs * math.prod(mean[name] for name in names) for macs, names in terms]
        cost = LevelCost(net, (3, 8, 8), kind)
        sums = {name: [each.detach().requires_grad_() for each in calls] for name, calls in emitted.items()}
        total = cost.accumulations(sums, 3)
        assert total.item() == pytest.approx(3 * sum(parts), rel=1e-12)
        counted = getattr(count(graph, levels, "rate").product_total, kind)
        assert counted == pytest.approx(sum(parts[weighted:]))
        assert counted > 0
        total.backward()
        for name in {name for s in graph.synapses if s.kind == "matmul" for name in s.sources}:
            others = [(m, [mean[n] for n in names if n != name]) for m, names in terms if name in names]
            size, bits = sums[name][0].tolist()
            slope = sum(m * math.prod(means) for m, means in others) * (1 if kind == "unary" else bits / size)
            gradient = sums[name][0].grad
            assert gradient is not None
            assert gradient.tolist() == pytest.approx([slope / graph[name].units, 0])


def test_a_price_lowers_the_count_of_products() -> None:
    """In a network of 64 tokens with 8 channels, where products are most of what there is to count."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.sn(models.over_time(x, m.stem, timesteps=2))
        q, k, v = (
            models.fire(y, m.get_submodule(f"to_{n}"), m.get_submodule(f"bn_{n}"), m.get_submodule(n)) for n in "qkv"
        )
        return m.fc(m.out(attention.attend(q, k, v, 1, 4.0)).mean((-2, -1))).mean(0)

    def made() -> Any:
        torch.manual_seed(0)
        convs = {f"to_{name}": nn.Conv2d(8, 8, 1, bias=False) for name in "qkv"}
        norms, neurons = {f"bn_{name}": nn.BatchNorm2d(8) for name in "qkv"}, {name: BurstNeuron() for name in "qkv"}
        others = {
            "stem": nn.Conv2d(1, 8, 3, padding=1),
            "sn": BurstNeuron(),
            "out": BurstNeuron(),
            "fc": nn.Linear(8, 10),
        }
        return Functional(forward, 2, **convs, **norms, **neurons, **others)

    data, counts = load_digits().train, {}
    x, y = torch.from_numpy(data.images[:32]).float() / 8 - 1, torch.from_numpy(data.labels[:32]).long()
    for price in (0.0, 1.0):
        net = made()
        cost, optimiser = LevelCost(net, (1, 8, 8)), torch.optim.Adam(net.parameters(), 0.03)
        for _ in range(12):
            optimiser.zero_grad()
            with summing_levels(net) as emitted:
                loss = nn.functional.cross_entropy(net(x), y)
                (loss + price * cost(emitted, len(x))).backward()
            optimiser.step()
        with record_levels(net) as levels, torch.no_grad():
            net(x)
        account = count(lower(net, (1, 8, 8)), levels)
        counts[price] = account.product_total.bit_sparse
        assert account.product_total.bit_sparse > 0.5 * account.total.bit_sparse
        assert loss.item() < 2.3
    assert 0 < counts[1.0] < 0.7 * counts[0.0]


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
    assert made.tally[3].item() == pytest.approx(cost.accumulations(emitted, len(x)).item())


def test_what_lies_above_has_its_price() -> None:
    """Nothing up to the free accumulations, the whole price from a tenth more on, and a slope that rises between."""
    net = models.create("resnet8w4", timesteps=3)
    whole, samples = LevelCost(net, (3, 8, 8), timesteps=3), 4
    cost = LevelCost(net, (3, 8, 8), above=2e5, timesteps=3)
    with pytest.raises(ValueError, match="samples must be at least 1, the size of the batch, got 0"):
        cost({}, 0)
    counts = torch.tensor([0.0, 1.0, 1.9, 2.0, 2.05, 2.1, 2.2, 2.3, 9.0], dtype=torch.float64) * 1e5 * samples
    counts.requires_grad_()
    costs = torch.stack([cost.of(count, samples) for count in counts])
    (slopes,) = torch.autograd.grad(costs.sum(), counts)
    (usual,) = torch.autograd.grad(whole.of(counts, samples).sum(), counts)
    expected = [0, 0, 0, 0, 0.25, 0.5, 1, 1, 1]
    torch.testing.assert_close(slopes / usual, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)
    assert costs[3] == 0
    torch.testing.assert_close(costs[-1], whole.of(counts[-1], samples) - whole.of(counts[5], samples))
    with pytest.raises(ValueError, match="^above must be >= 0, got -1"):
        LevelCost(net, (3, 8, 8), above=-1)


def test_a_network_keeps_to_the_accumulations_that_are_free() -> None:
    usual = ("train.ema=0", "train.epochs=20", "model.dropout=0", "train.test=never", "optim.lr=0.02")
    counts = {}
    for above in (0.01, 4e3, 8e3, 1e9):
        changes = ("train.level_cost=1", f"train.level_cost_above={above}")
        *_, last = small_runs.trainer(small_runs.config(*usual, *changes)).fit()
        assert last.accumulations is not None
        counts[above] = last.accumulations
    assert counts[0.01] < counts[4e3] < 4.4e3 < counts[8e3] < 8.8e3 < counts[1e9]


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


def wrapped(kind: str, net: nn.Module) -> Any:
    return torch.compile(net, backend="eager") if kind == "compile" else nn.DataParallel(net)


@pytest.mark.parametrize("kind", ["compile", "parallel"])
def test_networks_with_something_around_them_are_priced(kind: str) -> None:
    net = models.create("resnet8w4", timesteps=2, in_channels=1)
    outer, x = wrapped(kind, net), torch.rand(3, 1, 8, 8)
    plain, around = LevelCost(net, (1, 8, 8)), LevelCost(outer, (1, 8, 8))
    costs = []
    for called in (net, outer):
        with evaluating(net), summing_levels(called) as emitted:
            called(x)
        costs += [plain(emitted, 3), around(emitted, 3)]
    torch.testing.assert_close(costs, [costs[0]] * 4)
    with summing_levels(net) as emitted:
        pass
    with pytest.raises(ValueError, match="no neuron emitted anything"):
        plain(emitted, 3)


def test_sums_within_sums_reach_both() -> None:
    net = models.create("resnet8w4", timesteps=2, in_channels=1)
    x = torch.rand(3, 1, 8, 8)
    with summing_levels(net) as outer:
        net(x)
        with summing_levels(net) as inner:
            net(x)
        net(x)
    assert {len(calls) for calls in inner.values()} == {1}
    assert {len(calls) for calls in outer.values()} == {3}


def test_constants_stay_cached_after_an_inner_context() -> None:
    net = models.create("resnet8w4", timesteps=2, in_channels=1)
    (first, *_) = neurons_of(net).values()
    with unchanging(net):
        net(torch.rand(3, 1, 8, 8))
        (outer,) = first.caches
        assert outer
        with unchanging(net):
            assert list(map(bool, first.caches)) == [True, False]
        assert [cache is outer for cache in first.caches] == [True]
    assert not first.caches


def test_contexts_that_overlap_leave_nothing_behind() -> None:
    """As those of two threads that measure one network."""
    net, x = models.create("resnet8w4", timesteps=2, in_channels=1), torch.rand(3, 1, 8, 8)
    one, other = unchanging(net), unchanging(net)
    one.__enter__()
    net(x)
    other.__enter__()
    net(x)
    one.__exit__(None, None, None)
    net(x)
    other.__exit__(None, None, None)
    assert all(neuron.caches == () for neuron in neurons_of(net).values())
    torch.set_grad_enabled(True)  # contexts of two threads would each have had their own
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_price_without_a_gradient_is_told() -> None:
    net = models.create("resnet8w4", timesteps=2, in_channels=1)
    cost = LevelCost(net, (1, 8, 8))
    with summing_levels(net) as emitted, torch.no_grad():
        net(torch.rand(3, 1, 8, 8))
    with pytest.warns(UserWarning, match="price changes nothing: with torch.utils.checkpoint take use_reentrant=False"):
        cost(emitted, 3)
