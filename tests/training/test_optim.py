"""Parameter groups, the schedule, averaged weights, clipping."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

from lbq import models
from lbq.config import Config, OptimConfig
from lbq.neuron import SpikingNeuron
from lbq.neuron.base import neurons_of
from lbq.neuron.hooks import evaluating
from lbq.training import optim
from lbq.training.distributed import World
from lbq.training.evaluation import measure_norms, neuron_steps
from tests.support import small_runs

config = partial(small_runs.config, small_runs.TINY)

NEURONS = [
    {"name": "lbq", "learn_beta": True, "learn_alpha": True},
    {"name": "lbq", "membrane": "plif", "per_channel": True},
    {"name": "lif"},
    {"name": "qann"},
    {"name": "relu"},
]


def names_by_role(net: nn.Module) -> dict[str, set[str]]:
    names = {id(p): name for name, p in net.named_parameters()}
    return {g["role"]: {names[id(p)] for p in g["params"]} for g in optim.parameter_groups(net, 0.1)}


@pytest.mark.parametrize("neuron", NEURONS, ids=lambda n: "-".join(n))
@pytest.mark.parametrize("id", ["resnet8w4", "resnet19w64fc256", "vgg11w4"])
def test_every_parameter_is_in_exactly_one_group(id: str, neuron: dict[str, object]) -> None:
    with torch.device("meta") if id.startswith("resnet19") else torch.device("cpu"):
        net = models.create(id, neuron=neuron)
    groups = optim.parameter_groups(net, 0.3, lr=0.2, neuron_lr=0.25)
    members = [parameter for group in groups for parameter in group["params"]]
    assert len(members) == len(set(members))
    assert set(members) == set(net.parameters())
    by_role = names_by_role(net)
    weights = {f"{n}.weight" for n, m in net.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    assert by_role["weights"] == weights
    inside = {
        f"{n}.{p}" for n, m in net.named_modules() if isinstance(m, SpikingNeuron) for p, _ in m.named_parameters()
    }
    assert inside <= by_role.get("neurons", set())
    for group in groups:
        assert group["weight_decay"] == (0.3 if group["role"] == "weights" else 0)
        assert group["factor"] == (0.25 if group["role"] == "neurons" else 1)
        assert group["lr"] == 0.2 * group["factor"]


def test_weights_of_all_kinds_of_layers_decay() -> None:
    """Of convolutions, parametrised layers, attention and recurrent layers, and of no others."""
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv1d(1, 2, 3),
        "conv3": nn.Conv3d(1, 2, 3),
        "transposed": nn.ConvTranspose2d(1, 2, 3),
        "normed": parametrizations.weight_norm(nn.Conv2d(1, 2, 3)),
        "orthogonal": parametrizations.orthogonal(nn.Linear(4, 4)),
        "attention": nn.MultiheadAttention(4, 2),
        "rnn": nn.GRU(2, 3),
        "cell": nn.LSTMCell(2, 3),
    }
    others = {"table": nn.Embedding(2, 3), "norm": nn.LayerNorm(3), "batch": nn.BatchNorm2d(2)}
    roles = names_by_role(nn.ModuleDict(layers | others))
    assert list(roles) == ["weights", "norms"]  # none without members
    assert roles["weights"] == {
        *("conv1.weight", "conv3.weight", "transposed.weight"),
        *("normed.parametrizations.weight.original0", "normed.parametrizations.weight.original1"),
        *("orthogonal.parametrizations.weight.original", "attention.in_proj_weight", "attention.out_proj.weight"),
        *("rnn.weight_ih_l0", "rnn.weight_hh_l0", "cell.weight_ih", "cell.weight_hh"),
    }


def test_a_learning_rate_for_neurons_needs_one_for_all() -> None:
    with pytest.raises(ValueError, match="neuron_lr is a factor on lr, got 0.1: give lr too"):
        optim.parameter_groups(models.create("resnet8w4"), 0.0, neuron_lr=0.1)


def test_a_shared_tail_is_one_parameter() -> None:
    net = models.create("resnet8w4", share_tail=True)
    roles = names_by_role(net)
    assert sum(name.endswith("eta") for name in roles["neurons"]) == 1
    assert sum(name.endswith("rho") for name in roles["neurons"]) == 7


def test_steps_form_a_group_of_their_own_where_they_alone_decay() -> None:
    net = models.create("resnet8w4", neuron={"name": "lbq", "learn_beta": True})
    parametrizations.weight_norm(net.get_submodule("conv1"))  # whose parameters are no step's, whatever their names
    names = {id(p): name for name, p in net.named_parameters()}

    def groups(**options: Any) -> dict[str, tuple[set[str], float]]:
        made = optim.parameter_groups(net, 0.1, **options)
        assert sum(len(g["params"]) for g in made) == len(names)
        return {g["role"]: ({names[id(p)] for p in g["params"]}, g["weight_decay"]) for g in made}

    plain, step, all_of_them = (groups(neuron_decay=d, neuron_decay_factor=2.0) for d in ("none", "step", "all"))
    assert plain == groups()
    assert list(plain) == list(all_of_them) == ["weights", "norms", "neurons"]
    assert (plain["neurons"][1], all_of_them["neurons"][1]) == (0.0, 0.2)
    assert step["steps"] == ({name for name in names.values() if name.endswith(".rho")}, 0.2)
    assert step["neurons"] == (plain["neurons"][0] - step["steps"][0], 0.0)
    assert all(made[role] == plain[role] for made in (step, all_of_them) for role in ("weights", "norms"))
    with pytest.raises(ValueError, match="neuron_decay must be one of none, step, all, got 'rho'"):
        optim.parameter_groups(net, 0.1, neuron_decay="rho")
    for decay in (-1, float("nan"), "0.1", None):
        with pytest.raises(ValueError, match="^weight_decay must be a number >= 0, got "):
            optim.parameter_groups(net, decay)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^net must be a torch.nn.Module, got list"):
        optim.parameter_groups([net], 0.1)  # type: ignore[arg-type]


def test_the_parameters_of_a_parametrised_step_decay_with_steps() -> None:
    net = models.create("resnet8w4")
    register_parametrization(net.get_submodule("sn1"), "rho", nn.Identity())
    sizes = {g["role"]: len(g["params"]) for g in optim.parameter_groups(net, 0.1, neuron_decay="step")}
    assert (sizes["steps"], sizes["neurons"]) == (7, 7)


@pytest.mark.parametrize("decay", ["none", "step", "all"])
def test_a_checkpoint_does_not_depend_on_the_groups(decay: str) -> None:
    """The optimiser's state is stored by parameter: the groups that it lay in when it was written do not matter."""
    made = small_runs.trainer(config("train.epochs=1", "train.warmup_epochs=0"))
    list(made.fit())
    tensors, values = made.state()
    other = small_runs.trainer(config("train.epochs=1", "train.warmup_epochs=0", f"optim.neuron_decay={decay}"))
    other.restore(tensors, values)
    again, _ = other.state()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in again.items())


def test_only_a_sharpness_aware_run_is_sharp_after_its_last_epoch() -> None:
    """Or the recorded step of any other would be thrown away there."""
    for changes, sharp in (
        ([], [False] * 4),
        (["optim.sam=0.1"], [True] * 4),
        (["optim.sam=0.1", "optim.sam_epochs=1"], [False, False, True, True]),
    ):
        made = small_runs.trainer(config(*changes))
        flags = []
        for epoch in range(4):  # of three
            made.position.epoch = epoch
            flags.append(made.sharp)
        assert flags == sharp


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("norms", [False, True])
def test_what_decays_and_that_neurons_have_their_own_rate(name: str, norms: bool) -> None:
    net = models.create("resnet8w4")
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.bias.fill_(1.0)  # zeros would not move
    before = copy.deepcopy(net.state_dict())
    settings = OptimConfig(name=name, weight_decay=0.1, neuron_lr=0.5, norm_decay=norms)
    optimiser = optim.make_optimiser(net, settings)
    optim.set_learning_rate(optimiser, 0.2)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)  # whatever moves is moved by weight decay
    optimiser.step()
    moved = {k for k, v in net.named_parameters() if not torch.equal(v, before[k])}
    roles = names_by_role(net)
    assert moved == roles["weights"] | (roles["norms"] if norms else set())
    rates = {group["role"]: group["lr"] for group in optimiser.param_groups}
    assert rates == {"weights": 0.2, "norms": 0.2, "neurons": 0.1}
    shrunk = 1 - 0.2 * 0.1 * {"sgd": 1.9, "adamw": 1}[name]  # Nesterov adds the momentum of this very step
    assert torch.allclose(net.fc.weight, before["fc.weight"] * shrunk)


def test_learning_rates_that_are_tensors_are_changed_in_place() -> None:
    """As on a GPU, where a recorded step reads them."""
    groups = optim.parameter_groups(models.create("resnet8w4"), 0.0, lr=1.0, neuron_lr=0.5)
    rates = {group["role"]: torch.tensor(group["lr"]) for group in groups}
    optimiser = torch.optim.SGD([{**group, "lr": rates[group["role"]]} for group in groups])
    optim.set_learning_rate(optimiser, 0.25)
    assert all(group["lr"] is rates[group["role"]] for group in optimiser.param_groups)
    assert {role: rate.item() for role, rate in rates.items()} == {"weights": 0.25, "norms": 0.25, "neurons": 0.125}


def schedule(epochs: int, warmup: int, warmup_lr: float, lr: float) -> Config:
    train = {"epochs": epochs, "warmup_epochs": warmup, "warmup_lr": warmup_lr}
    return Config.from_dict({"optim": {"lr": lr}, "train": train})


@given(
    epochs=st.integers(1, 30),
    share=st.floats(0, 0.99),
    steps=st.integers(1, 50),
    lr=st.floats(1e-3, 10),
    start=st.floats(0, 1),
)
def test_schedule(epochs: int, share: float, steps: int, lr: float, start: float) -> None:
    warmup = int(share * epochs)
    config = schedule(epochs, warmup, start * lr, lr)
    total, rising = epochs * steps, warmup * steps
    rates = [optim.learning_rate(step, steps, config) for step in range(total)]
    assert all(0 < rate <= lr * (1 + 1e-12) for rate in rates)
    line = [start * lr + (lr - start * lr) * (i + 1) / rising for i in range(rising)]
    assert rates[:rising] == pytest.approx(line)
    assert rates[rising] == lr  # the cosine starts at the top
    assert all(a > b for a, b in zip(rates[rising:], rates[rising + 1 :], strict=False))
    assert optim.learning_rate(total, steps, config) == pytest.approx(0, abs=1e-12 * lr)
    middle = (total - rising) / 2
    if middle == int(middle):
        assert rates[rising + int(middle)] == pytest.approx(lr / 2)


def test_the_trainer_follows_the_schedule_by_step_alone() -> None:
    settings = config("train.warmup_lr=0.01", "optim.neuron_lr=0.5")
    seen: list[tuple[float, float]] = []

    def watch(_trainer: object) -> bool:
        rates = {g["role"]: g["lr"] for g in made.optimiser.param_groups}
        seen.append((rates["weights"], rates["neurons"]))
        return False

    made = small_runs.trainer(settings, between_steps=watch)
    records = list(made.fit())
    expected = [optim.learning_rate(step, 4, settings) for step in range(12)]
    assert [rate for rate, _ in seen] == expected
    assert [rate for _, rate in seen] == [0.5 * rate for rate in expected]
    assert [record.lr for record in records] == expected[3::4]  # the last step's of each epoch


@given(decay=st.floats(0.01, 0.999), values=st.lists(st.floats(-100, 100), min_size=1, max_size=8))
@settings(max_examples=30)
def test_average_is_exponential(decay: float, values: list[float]) -> None:
    net = nn.BatchNorm1d(1).double()
    average = optim.Average(net, decay)
    expected = 1.0  # BatchNorm's weight starts at 1
    for count, value in enumerate(values, start=1):
        with torch.no_grad():
            net.weight.fill_(value)
            assert net.num_batches_tracked is not None
            net.num_batches_tracked.fill_(count)
        average.update(net)
        expected = decay * expected + (1 - decay) * value
    assert average.state["weight"].item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert average.state["num_batches_tracked"].item() == len(values)  # an integer is copied
    assert net.weight.item() == values[-1]  # the network itself is left alone


def test_averaged_weights_come_and_go() -> None:
    made = small_runs.trainer(config("train.epochs=2"))
    list(made.fit())
    trained = copy.deepcopy(made.net.state_dict())
    assert made.average is not None
    with suppress(ZeroDivisionError), made.averaged():
        for name, value in made.net.state_dict().items():
            assert torch.equal(value, made.average.state[name])
        raise ZeroDivisionError
    assert all(torch.equal(value, trained[name]) for name, value in made.net.state_dict().items())
    assert not torch.equal(trained["conv1.weight"], made.average.state["conv1.weight"])


def test_an_epoch_says_what_the_averaged_network_is_and_what_the_trained_one_reaches() -> None:
    made = small_runs.trainer(config("train.epochs=1", "train.warmup_epochs=0", "train.ema=0.5"))
    (record,) = made.fit()
    assert record.unaveraged_accuracy == made.evaluate("test")
    with made.averaged():
        assert record.test_accuracy == made.evaluate("test")
        assert record.steps == neuron_steps(made.net)
    assert record.steps != neuron_steps(made.net)
    (record,) = small_runs.trainer(config("train.epochs=1", "train.warmup_epochs=0", "train.ema=0.0")).fit()
    assert record.unaveraged_accuracy is None


def test_shorter_weights_are_normalised_as_the_long_ones() -> None:
    """An average of weights that move is shorter than they are; BatchNorm, measured anew, makes up for it."""
    small = ("neuron={name='relu'}", "model.timesteps=1", "train.epochs=1", "train.warmup_epochs=0", "train.ema=0.5")
    made = small_runs.trainer(config(*small))
    list(made.fit())
    assert made.average is not None
    x = torch.rand(8, 1, 8, 8)
    with made.averaged(), evaluating(made.net), torch.no_grad():
        expected = made.net(x)
    stated = {name: value.double() for name, value in made.average.state.items()}
    weights = [name for name, value in stated.items() if value.dim() == 4]
    for name in weights:
        made.average.state[name] *= 0.25
    with made.averaged(), evaluating(made.net), torch.no_grad():
        assert not torch.allclose(made.net(x), expected, atol=0.01)
    trained = copy.deepcopy(made.net.state_dict())
    made._measure_norms(made.average)
    with made.averaged(), evaluating(made.net), torch.no_grad():
        assert torch.allclose(made.net(x), expected, atol=0.01)
    for name, value in made.average.state.items():
        factor = {"running_mean": 0.25, "running_var": 0.25**2}.get(name.rpartition(".")[2], 1.0)
        factor *= 0.25 if name in weights else 1.0
        assert torch.allclose(value.double(), stated[name] * factor, rtol=1e-2, atol=1e-4), name
    assert all(torch.equal(value, trained[name]) for name, value in made.net.state_dict().items())
    assert {m.momentum for m in made.net.modules() if isinstance(m, nn.BatchNorm2d)} == {0.1}


def test_norms_are_measured_as_the_mean_of_batches() -> None:
    torch.manual_seed(3)
    norm = nn.BatchNorm2d(2)
    net = nn.Sequential(norm, nn.Dropout(0.5), nn.Flatten(), nn.BatchNorm1d(8, track_running_stats=False))
    batches = [(torch.randn(6, 2, 2, 2) * (1 + i), torch.zeros(6)) for i in range(3)]
    random = torch.get_rng_state()
    measured = measure_norms(net, batches, Config().train, torch.device("cpu"), World())
    assert measured.keys() == {"0.running_mean", "0.running_var"}
    means = torch.stack([x.mean((0, 2, 3)) for x, _ in batches]).mean(0)
    variances = torch.stack([x.var((0, 2, 3)) for x, _ in batches]).mean(0)
    assert torch.allclose(measured["0.running_mean"], means, atol=1e-6)
    assert torch.allclose(measured["0.running_var"], variances, atol=1e-5)
    assert norm.running_mean is not None
    assert torch.equal(norm.running_mean, measured["0.running_mean"])
    assert (norm.momentum, net.training) == (0.1, True)
    assert torch.equal(torch.get_rng_state(), random)  # dropout drew nothing


def test_a_batch_that_fails_leaves_norms_their_momentum() -> None:
    norm = nn.BatchNorm2d(2, momentum=0.2)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.randn(6, 2, 2, 2), torch.zeros(6)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        measure_norms(nn.Sequential(norm), batches(), Config().train, torch.device("cpu"), World())
    assert (norm.momentum, norm.training) == (0.2, True)


@pytest.mark.parametrize("count", [1, 3])
def test_a_norm_of_several_passes_has_the_mean_of_all_of_them(count: int) -> None:
    class Looping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(2), nn.BatchNorm1d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.stack([self.norm(step) for step in x]).sum(0))

    torch.manual_seed(3)
    batches = [(torch.randn(4, 6, 2) + torch.arange(4).view(4, 1, 1) * (1 + i), torch.zeros(6)) for i in range(count)]
    net = Looping()
    measured = measure_norms(net, batches, Config().train, torch.device("cpu"), World())
    steps = torch.cat([x for x, _ in batches])
    assert torch.allclose(measured["norm.running_mean"], steps.mean((0, 1)), atol=1e-5)
    assert torch.allclose(measured["norm.running_var"], steps.var(1).mean(0), atol=1e-5)
    sums = [sum((step - step.mean(0)) / (step.var(0, correction=0) + 1e-5).sqrt() for step in x) for x, _ in batches]
    assert torch.allclose(measured["last.running_var"], torch.stack([s.var(0) for s in sums]).mean(0), atol=1e-4)
    assert (net.norm.momentum, net.last.momentum) == (0.1, 0.1)


@pytest.mark.parametrize("decay", ["none", "step"])
def test_uphill_weights_lie_a_radius_up_their_slope_and_come_back(decay: str) -> None:
    trainer = small_runs.trainer(config("neuron.name=lbq", f"optim.neuron_decay={decay}"))
    own = {id(p) for neuron in neurons_of(trainer.net).values() for p in neuron.parameters()}
    ((x, labels),) = trainer.source.train_batches([torch.arange(12)], 0, 0)
    trainer.loss(trainer.net(x), torch.eye(10)[labels]).backward()
    before = [p.detach().clone() for p in trainer.net.parameters()]
    with optim.uphill(trainer.optimiser, 0.05):
        way = [p.detach() - b for p, b in zip(trainer.net.parameters(), before, strict=True)]
    assert all(torch.equal(p, b) for p, b in zip(trainer.net.parameters(), before, strict=True))
    moved = [(w, p.grad) for w, p in zip(way, trainer.net.parameters(), strict=True) if id(p) not in own]
    assert not any(w.any() for w, p in zip(way, trainer.net.parameters(), strict=True) if id(p) in own)
    along, slope = (torch.cat([t.flatten() for t in side]) for side in zip(*moved, strict=True))
    assert along.norm().item() == pytest.approx(0.05, rel=1e-4)
    assert F.cosine_similarity(along, slope, dim=0).item() == pytest.approx(1.0, abs=1e-5)


def test_a_sharpness_aware_step_by_hand() -> None:
    """The gradient of a second pass at the weights uphill moves those that were left; statistics are of the first pass."""
    plain = ("model.dropout=0", "train.ema=0", "neuron.name=lbq", "optim.momentum=0", "optim.weight_decay=0")
    made, other = (small_runs.trainer(config(*plain, *more)) for more in (["optim.sam=0.1"], []))
    ((x, labels),) = made.source.train_batches([torch.arange(12)], 0, 0)
    targets, rate = torch.eye(10)[labels], 0.05
    for trainer in (made, other):
        trainer.net.train()
        optim.set_learning_rate(trainer.optimiser, rate)
    loss = made._whole(x, targets, labels)
    first = other.loss(other.net(x), targets)
    assert loss.item() == first.item()
    first.backward()
    before = {name: p.detach().clone() for name, p in other.net.named_parameters()}
    statistics = {name: b.clone() for name, b in other.net.named_buffers()}
    with optim.uphill(other.optimiser, 0.1):
        other.net.zero_grad()
        other.loss(other.net(x), targets).backward()
    for name, p in other.net.named_parameters():
        parameter = made.net.get_parameter(name)
        assert p.grad is not None
        torch.testing.assert_close(parameter, before[name] - rate * p.grad, rtol=1e-5, atol=1e-7)
        assert not torch.equal(parameter, before[name])
    assert all(torch.equal(b, statistics[name]) for name, b in made.net.named_buffers())
    assert made.tally.tolist()[2] == 12  # counted once


def test_the_last_epochs_alone_may_be_sharpness_aware() -> None:
    def losses(*changes: str) -> list[float]:
        return [record.loss for record in small_runs.trainer(config(*changes)).fit()]

    never, always = losses(), losses("optim.sam=0.1")
    late = losses("optim.sam=0.1", "optim.sam_epochs=1")
    assert late[:2] == never[:2]
    assert always[1] != never[1]
    assert late[2] != never[2]


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_clipping_limits_the_gradient(clip: float) -> None:
    """The gradients that the optimiser saw are still there between steps."""
    norms: list[float] = []

    def watch(_trainer: object) -> bool:
        squares = [p.grad.double().square().sum() for p in made.net.parameters() if p.grad is not None]
        norms.append(math.sqrt(float(sum(squares))))
        return len(norms) == 3

    made = small_runs.trainer(config(f"optim.clip={clip}", "train.accumulate=2"), between_steps=watch)
    list(made.fit())
    if clip < 1:
        assert norms == pytest.approx([clip] * 3, rel=1e-3)
    else:
        free = list(norms)
        norms.clear()
        made = small_runs.trainer(config("train.accumulate=2"), between_steps=watch)
        list(made.fit())
        assert free == norms  # far below the limit nothing changes
        assert all(0.01 < norm < clip for norm in norms)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("layout", ["true", "false"])
def test_optimiser_state_round_trip(name: str, layout: str) -> None:
    """Every slot comes back with its bytes, type and strides."""
    settings = config(f"optim.name={name}", f"train.channels_last={layout}", "train.epochs=2")
    first = small_runs.trainer(settings)
    list(first.fit())
    stored = {k: v.clone().contiguous() for k, v in optim.optimiser_state(first.net, first.optimiser).items()}
    second = small_runs.trainer(settings)
    optim.restore_optimiser(second.net, second.optimiser, stored)
    again = optim.optimiser_state(second.net, second.optimiser)
    slots = {"sgd": 1, "adamw": 3}[name]
    assert len(again) == slots * len(list(first.net.parameters()))
    for key, value in optim.optimiser_state(first.net, first.optimiser).items():
        assert torch.equal(value, again[key])
        assert value.dtype == again[key].dtype
        moving = [i for i, size in enumerate(value.shape) if size > 1]
        assert [value.stride(i) for i in moving] == [again[key].stride(i) for i in moving]
        assert again[key].data_ptr() != stored[key].data_ptr()
    optim.restore_optimiser(second.net, second.optimiser, {})
    assert not second.optimiser.state  # nothing of before is left
