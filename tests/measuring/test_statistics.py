"""Statistics of networks that are no runs: against recorded levels and accounts, and what is known of who reads whom."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

import lbq
from lbq.counting.operations import Counter, activity_of
from lbq.counting.tally import level_counts
from lbq.deploy import lower
from lbq.errors import LbqError
from lbq.kernels.reference import BurstState
from lbq.neuron import ILIF, LIF, LMHT, MLF, BurstNeuron, LadderNeuron, SpikingNeuron, Ternary
from lbq.neuron.baselines import QuantReLU
from lbq.neuron.recorder import record_levels
from tests.support.own_nets import Own
from tests.support.paths import ROOT
from tests.support.small_nets import small


def batch(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Two(nn.Module):
    """A neuron, something between, and a linear layer, over `[T, B, 4]`."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x, neuron: nn.Module | None = None) -> None:
        super().__init__()
        self.sn, self.between, self.fc = neuron or BurstNeuron(), between, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.between(self.sn(x)))
        return out


class InParts(nn.Module):
    """The same network, a timestep at a time or, by `forward_chunk`, two."""

    def __init__(self, net: Two, method: str) -> None:
        super().__init__()
        self.sn, self.fc, self.method = net.sn, net.fc, method

    def forward(self, x: Tensor) -> None:
        state = None
        for currents in x if self.method == "forward_step" else x.split(2):
            spikes, state = getattr(self.sn, self.method)(currents, state)
            self.fc(spikes)


@pytest.mark.parametrize("net", [small("resnet8w4").float(), Own()])
def test_a_network_that_can_be_lowered_has_the_counts_of_its_account(net: nn.Module) -> None:
    shape = (1, 8, 8) if isinstance(net, Own) else (3, 8, 8)
    batches = [batch(3, *shape), batch(2, *shape, seed=1)]
    found = lbq.statistics(net, [(x, torch.zeros(len(x))) for x in batches])
    graph = lower(net, shape)
    counter = Counter(graph, "rate")
    for x in batches:
        with torch.no_grad(), record_levels(net) as levels:
            net(x)
        counter.add(levels)
    expected = counter.account()
    assert found.samples == 5
    assert [layer.name for layer in found.layers] == [layer.name for layer in graph.layers]
    for layer in found.layers:
        np.testing.assert_array_equal(layer.levels, counter.tallies.by_timestep(layer.name))
        assert layer.step == pytest.approx(float(graph.spec(layer.name).step.mean()))
        assert activity_of(layer.levels) == expected.layers[layer.name]
    assert set(found.synapses) == set(expected.synapses) - {"fc"}  # which reads pooled levels
    for name, counted in found.synapses.items():
        theirs = expected.synapses[name]
        for field in ("unary", "bit_sparse", "shifts", "events", "macs", "signed_digits"):
            assert getattr(counted, field) / 5 == pytest.approx(getattr(theirs, field))
    assert sum(found.others.values()) / 5 == pytest.approx(
        graph.stem_macs + graph.timesteps * sum(s.macs for s in graph.readout.synapses)
    )


def test_a_network_that_cannot_be_lowered() -> None:
    """The documented one, which is a small spiking transformer, and what is printed of it."""
    page = (ROOT / "docs" / "howto" / "analyse.md").read_text(encoding="utf-8")
    own: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(re.findall(r"```python\n(.*?)```", page, re.S)[0], own)
    found: lbq.Statistics = own["statistics"]
    with pytest.raises(LbqError):
        lower(own["net"], (3, 16, 16))
    assert [layer.name for layer in found.layers] == ["n0", "nq", "nk", "nv", "no"]
    assert set(found.synapses) == {"q", "k", "v"}
    assert set(found.others) == {"patches", "o", "fc"}
    assert found.samples == 24
    expected, *_ = re.findall(r"```text\n(.*?)```", page, re.S)
    number = r"\d[\d,]*\.?\d*"
    assert re.split(number, printed.getvalue()) == re.split(number, expected)  # columns too
    shown, stated = (
        [float(x.replace(",", "")) for x in re.findall(number, text)] for text in (printed.getvalue(), expected)
    )
    assert shown == pytest.approx(stated, rel=0.02, abs=0.2)  # another CPU may round a level otherwise
    assert found.analysis.summary()["active_ratio"] == pytest.approx(
        np.mean([layer.histogram.active_ratio for layer in found.layers])
    )


@pytest.mark.parametrize(
    "between",
    [
        nn.Identity(),
        nn.Dropout(0.5),
        lambda x: F.dropout(x, training=False),
        lambda x: x.flatten(0, 1),
        lambda x: x.detach().view(-1, 4),
        lambda x: x.transpose(0, 1),
        lambda x: x[:, None],
        lambda x: x.float().contiguous(),
    ],
)
def test_what_is_read_as_it_is(between: Callable[[Tensor], Tensor]) -> None:
    found = lbq.statistics(Two(between), [batch(2, 5, 4)])
    assert not found.others
    assert found.synapses["fc"].macs == 2 * 5 * 4 * 3
    assert found.synapses["fc"].unary == pytest.approx(found["sn"].histogram.mean_level * 2 * 5 * 4 * 3)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x + 0,
        lambda x: x.clone(),
        lambda x: x.mul_(2),
        lambda x: torch.relu_(x),
        lambda x: x.flatten(0, 1)[1:],
        lambda x: x[:1],
        lambda x: x[:, ::2],
        lambda x: x.mean(0),
        lambda x: x[:1].expand(2, -1, -1),
        lambda x: x.as_strided((10, 4), (0, 1)),
        lambda x: x.as_strided((5, 2, 4), (4, 4, 1)),
        lambda x: x.flip(0),
        lambda x: torch.cat([x, x]),
    ],
)
def test_what_is_no_neurons_output_any_more(between: Callable[[Tensor], Tensor]) -> None:
    found = lbq.statistics(Two(between), [batch(2, 5, 4)])
    assert not found.synapses
    assert found.others["fc"] > 0
    assert "not counted, because they read something else: fc (" in str(found)


class Apart(Two):
    """The neuron's output is gone before what the linear layer reads is made, where the allocator likes in the same memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.sn(x)
        out: Tensor = self.fc(torch.ones_like(x))
        return out


def test_memory_that_is_used_again_is_not_taken_for_an_output() -> None:
    assert not lbq.statistics(Apart(), [batch(2, 5, 4)] * 3).synapses


NEURONS: list[Callable[[], SpikingNeuron]] = [
    BurstNeuron, LIF, Ternary, ILIF, LadderNeuron, MLF, QuantReLU, lambda: LMHT(timesteps=3),
    lambda: BurstNeuron(channels=4), lambda: BurstNeuron(n_max=200, step=0.01),
]  # fmt: skip


@pytest.mark.parametrize("make", NEURONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_neuron(make: Callable[[], SpikingNeuron], dtype: torch.dtype) -> None:
    neuron = make()
    if neuron.step.dim():
        neuron.step = torch.rand(4) + 0.1  # type: ignore[misc]
    for features in ((4,), (4, 5), (4, 5, 2), (4, 2, 2, 2), *(() if neuron.step.dim() else ((),))):
        shape = (3, 2, *features)
        x = batch(*shape).to(dtype)
        found = lbq.statistics(nn.Sequential(neuron), [x])["0"]
        levels = neuron.levels(x).numpy().reshape(3, 2, -1, 1, 1)
        np.testing.assert_array_equal(found.levels, level_counts(levels, neuron.n_max).sum(1))
        assert found.shape == features
        assert (found.step_range is None) == (neuron.step.dim() == 0)


@pytest.mark.parametrize("method", ["forward_step", "forward_chunk"])
@pytest.mark.parametrize("make", NEURONS[:-2])
def test_a_timestep_or_two_at_a_time(make: Callable[[], SpikingNeuron], method: str) -> None:
    neuron = make()
    if isinstance(neuron, LMHT):
        return
    net = Two(neuron=neuron)
    whole = lbq.statistics(net, [batch(3, 5, 4)])
    steps = lbq.statistics(InParts(net, method), [batch(3, 5, 4)])
    assert steps.samples == whole.samples == 5
    np.testing.assert_array_equal(steps["sn"].levels, whole["sn"].levels)
    assert steps.synapses["fc"].bit_sparse == pytest.approx(whole.synapses["fc"].bit_sparse)
    assert not vars(neuron).keys() & {"forward_step", "forward_chunk"}


def test_a_part_without_a_state_begins_a_sequence_and_one_with_a_state_goes_on() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sn = BurstNeuron()
            self.saved = self.sn.forward_chunk(batch(2, 5, 4))[1]  # before anyone watches

        def forward(self, x: Tensor) -> None:
            self.sn.forward_chunk(x[:2], self.saved)  # begins: nobody saw what came before
            state = self.sn.forward_chunk(x[:0])[1]
            for part in x.split(2):
                state = self.sn.forward_chunk(part, state)[1]

    assert lbq.statistics(Parts(), [batch(3, 5, 4)])["sn"].levels.sum(1).tolist() == [40, 40, 20]
    twice = lbq.statistics(Parts(), [batch(3, 5, 4)] * 2)
    assert twice["sn"].levels.sum(1).tolist() == [80, 80, 40]


def test_each_state_of_a_neuron_in_two_places_goes_on_by_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sn = BurstNeuron()

        def forward(self, x: Tensor) -> None:
            states: list[BurstState | None] = [None, None]
            for current in x:
                for i, state in enumerate(states):
                    states[i] = self.sn.forward_step(current, state)[1]

    assert lbq.statistics(Twice(), [batch(4, 5, 4)])["sn"].levels.sum(1).tolist() == [40] * 4


def test_nothing_is_left_behind() -> None:
    net = small("resnet8w4").float().train()
    net.bn1.eval()  # type: ignore[union-attr]
    modes = [m.training for m in net.modules()]
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    seen: list[tuple[bool, bool]] = []

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(2):
            seen.append((torch.is_grad_enabled(), net.training))
            yield torch.randn(2, 3, 8, 8), torch.zeros(2)

    torch.manual_seed(7)
    before = torch.get_rng_state()
    lbq.statistics(net, loader())
    assert torch.equal(torch.get_rng_state(), before)
    assert seen == [(False, False)] * 2
    assert [m.training for m in net.modules()] == modes
    assert all(torch.equal(value, buffers[name]) for name, value in net.named_buffers())
    with pytest.raises(RuntimeError):
        lbq.statistics(net, [torch.randn(2, 5, 8, 8)])
    for module in net.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not vars(module).keys() & {"forward_step", "forward_chunk"}
    assert torch.is_grad_enabled()


def test_a_forward_step_that_was_put_there_stays() -> None:
    net = nn.Sequential(nn.Linear(4, 4), BurstNeuron())
    own = net[1].forward_step
    net[1].forward_step = own
    lbq.statistics(net, [torch.randn(2, 3, 4)])
    assert vars(net[1])["forward_step"] is own


def test_inference_mode_around_it() -> None:
    with torch.inference_mode():
        found = lbq.statistics(Two(), [batch(2, 5, 4)])
    assert found["sn"].levels.sum() == 40
    assert set(found.synapses) | set(found.others) == {"fc"}


def test_what_is_around_a_network_comes_off() -> None:
    net = Two()
    for wrapped in (AveragedModel(net), nn.DataParallel(net)):
        found = lbq.statistics(wrapped, [batch(2, 5, 4)])
        assert [layer.name for layer in found.layers] == ["sn"]


def test_compiled_networks_run_as_they_were_written() -> None:
    net = Two()
    inside = Two()
    inside.sn = torch.compile(inside.sn, backend="eager")  # type: ignore[assignment]
    inside(batch(2, 5, 4))
    net.compile(backend="eager")
    net(batch(2, 5, 4))
    for compiled in (net, inside, torch.compile(Two(), backend="eager")):
        found = lbq.statistics(compiled, [batch(2, 5, 4)])  # type: ignore[arg-type]
        assert found.layers[0].levels.sum() == 40
        assert set(found.synapses) == {"fc"}


def test_batches_of_other_lengths_and_neurons_that_do_not_run() -> None:
    net = Two()
    net.spare = BurstNeuron()
    found = lbq.statistics(net, [batch(2, 5, 4), batch(3, 4, 4, seed=1)])
    assert found.samples == 9
    assert found["sn"].levels.sum(1).tolist() == [36, 36, 16]
    assert found.idle == ("spare",)
    assert "did not run: spare" in str(found)
    net.between = lambda x: (net.spare(x[:, :1]), x)[1]  # type: ignore[operator]
    found = lbq.statistics(net, [batch(2, 5, 4)])
    assert found.samples is None
    assert "accumulations of all samples" in str(found)


def test_refusals() -> None:
    for one in (batch(2, 5, 4), batch(2, 5, 4).numpy()):
        with pytest.raises(LbqError, match=r"got one tensor or array: give \[inputs\]"):
            lbq.statistics(Two(), one)
    with pytest.raises(LbqError, match=r"got NoneType: give \[inputs\]"):
        lbq.statistics(Two(), None)  # type: ignore[arg-type]
    with pytest.raises(LbqError, match=r"got an array: give torch.from_numpy\(inputs\)"):
        lbq.statistics(Two(), [(batch(2, 5, 4).numpy(), None)])
    with pytest.raises(LbqError, match="^a batch must be inputs or a tuple that begins with them, got a dict"):
        lbq.statistics(Two(), [{"x": batch(2, 5, 4)}])
    for net, batches in ((nn.Linear(4, 3), [batch(2, 5, 4)]), (Two(), [])):
        with pytest.raises(LbqError, match="no neuron of lbq.neuron ran"):
            lbq.statistics(net, batches)
    with pytest.raises(LbqError, match="the batches hold no samples"):
        lbq.statistics(Two(), [batch(2, 5, 4)[:, :0]])
    with pytest.raises(LbqError, match="neuron 'sn' puts out NaN"):
        lbq.statistics(Two(), [batch(2, 5, 4) * float("nan")])


def test_many_levels_are_not_all_printed() -> None:
    text = str(lbq.statistics(Two(neuron=BurstNeuron(n_max=12)), [batch(2, 5, 4)]))
    assert "P(k = 1 | k > 0) %" in text.splitlines()[0]
    assert len(text.splitlines()[2].split()) == 6
    text = str(lbq.statistics(Two(neuron=BurstNeuron(n_max=10)), [batch(2, 5, 4)]))
    assert len(text.splitlines()[2].split()) == 5 + 10


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), batch(2, 3, 4, 5, 5)),
        (nn.ConvTranspose1d(4, 6, 3, stride=2), batch(2, 3, 4, 7)),
    ],
)
def test_transposed_convolutions_multiply_every_input_with_its_weights(layer: Any, x: Tensor) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sn, self.up = BurstNeuron(), layer

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.up(self.sn(x).flatten(0, 1))
            return out

    found = lbq.statistics(net := Net(), [x])
    with record_levels(net) as levels, torch.no_grad():
        net(x)
    each = layer.weight[0].numel()  # an input meets so many weights
    assert found.synapses["up"].macs == x.numel() * each
    assert found.synapses["up"].unary == pytest.approx(float(levels["sn"].sum()) * each)


def test_other_modules_with_weights_are_named_with_their_types() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sn, self.gru, self.attention = BurstNeuron(), nn.GRU(4, 4), nn.MultiheadAttention(4, 2)
            self.norm, self.unused = nn.LayerNorm(4), nn.Bilinear(4, 4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.gru(self.sn(x)[0])[0])
            out: Tensor = self.attention(y, y, y)[0]
            return out

    found = lbq.statistics(Net(), [batch(2, 3, 4)])
    assert found.unknown == {"gru": "GRU", "attention": "MultiheadAttention"}
    assert str(found).endswith("what they do with their weights: gru (GRU), attention (MultiheadAttention)")


def test_a_parametrised_layer_is_counted_as_it_is() -> None:
    plain, x = Two(), [batch(2, 3, 4)]
    counted = lbq.statistics(plain, x).synapses
    weight_norm(plain.fc)
    found = lbq.statistics(plain, x)
    assert found.synapses == counted
    assert found.unknown == {}
