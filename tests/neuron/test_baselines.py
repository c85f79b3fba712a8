"""The neurons the paper compares with, each against its own definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lbq import BurstNeuron
from lbq.errors import ConfigError
from lbq.neuron import ILIF, LIF, LMHT, MLF, NEURONS, QuantReLU, SpikingNeuron, Ternary, create, share_tail
from tests.support import oracle


def currents(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


@pytest.mark.parametrize(("beta", "alpha", "threshold"), [(0.5, 1.0, 1.0), (0.25, 0.5, 0.5), (1.0, 1.0, 1.0)])
def test_lif_is_eqs_lif_and_bispiking(beta: float, alpha: float, threshold: float) -> None:
    x = currents(7, 300)
    x[0, :3] = threshold  # exactly at the threshold: no spike
    neuron = LIF(threshold, beta, alpha).double()
    expected = oracle.lif_loop(x.numpy(), threshold, beta, alpha)
    assert torch.equal(neuron.levels(x), torch.from_numpy(expected).to(torch.uint8))
    assert torch.equal(neuron(x).detach(), torch.from_numpy(expected).double())  # spikes are worth 1 at any threshold
    assert not neuron.levels(x)[0, :3].any()


def test_lif_is_not_a_burst_neuron_with_one_level() -> None:
    """The reset is not decayed, so a few percent of the spikes at T = 2 differ."""
    x = currents(2, 100_000) + 0.5
    burst = BurstNeuron(1, 1.0).double()
    differ = (LIF().double().levels(x) != burst.levels(x)).double().mean().item()
    assert 0.01 < differ < 0.08
    assert torch.equal(LIF().double().levels(x)[0], burst.levels(x)[0])


def test_ternary_trunc() -> None:
    neuron = Ternary(0.5, beta=0.5).double()
    x = torch.tensor([[-3.0, -0.5, -0.49, 0.0, 0.49, 0.5, 3.0], [0.0] * 7], dtype=torch.float64)
    assert neuron.levels(x).dtype == torch.int8
    # second step: U = 0.5 * (U - 0.5 * sign)
    assert neuron.levels(x).tolist() == [[-1, -1, 0, 0, 0, 1, 1], [-1, 0, 0, 0, 0, 0, 1]]


def test_ternary_half_is_the_released_rule() -> None:
    neuron = create("ternary_half")
    assert isinstance(neuron, Ternary)
    x = currents(3, 200)
    u = torch.zeros(200, dtype=torch.float64)
    step = neuron.double().step.detach()
    for t in range(3):  # decay 0.25, fire at half the step, hard reset
        u = 0.25 * u + x[t]
        spike = torch.where(u.abs() < 0.5 * step, 0.0, u.sign())
        assert torch.equal(neuron.levels(x)[t].double(), spike)
        u = u * (1 - spike.abs())


@pytest.mark.parametrize("rule", ["trunc", "half"])
def test_ternary_resets_as_it_is_asked(rule: Any) -> None:
    assert Ternary(rule=rule).rule.reset == {"trunc": "once", "half": "hard"}[rule]
    x = torch.tensor([[1.7, -1.7, 0.2], [0.0, 0.0, 0.3]], dtype=torch.float64)
    once, hard = (Ternary(rule=rule, reset=reset).double().levels(x)[1].tolist() for reset in ("once", "hard"))
    assert (once, hard) == ([0, 0, 0], [0, 0, 0])
    once, hard = (
        Ternary(rule=rule, reset=reset, beta=1.0).double().levels(x)[1].tolist() for reset in ("once", "hard")
    )
    assert (once, hard) == (
        {"trunc": [0, 0, 0], "half": [1, -1, 1]}[rule],
        {"trunc": [0, 0, 0], "half": [0, 0, 1]}[rule],
    )
    with pytest.raises(ValueError, match="reset must be one of 'once', 'hard', got 'level'"):
        Ternary(reset="level")  # type: ignore[arg-type]


def test_ilif_rounds_and_subtracts_the_level() -> None:
    neuron = ILIF(4, 1.0).double()
    x, step = currents(4, 200, scale=2.0), neuron.step.detach()
    v = torch.zeros(200, dtype=torch.float64)
    for t in range(4):
        u = 0.25 * v + x[t]
        level = torch.floor(u / step + 0.5).clamp(0, 4)
        assert torch.equal(neuron.levels(x)[t].double(), level)
        v = u - step * level


def test_rounding_reaches_a_level_exactly_half_a_step_below() -> None:
    half = torch.tensor([0.5, 1.5, 2.5, 3.5])
    just_below = torch.nextafter(half, half - 1)
    neuron, ternary = ILIF(4, 1.0, beta=0.0), create("ternary_half")
    assert isinstance(ternary, Ternary)
    assert neuron.levels(half[None])[0].tolist() == [1, 2, 3, 4]
    assert neuron.levels(just_below[None])[0].tolist() == [0, 1, 2, 3]
    assert ternary.levels(torch.stack([half[:1], -half[:1]]).T).tolist() == [[1, -1]]
    assert ternary.levels(torch.stack([just_below[:1], -just_below[:1]]).T).tolist() == [[0, 0]]


@pytest.mark.parametrize("levels", [2, 4])
def test_lmht_mixes_time_and_leaks(levels: int) -> None:
    timesteps = 3
    neuron = LMHT(timesteps, levels).double()
    with torch.no_grad():
        neuron.mixing.copy_(currents(timesteps, timesteps, seed=1))
        neuron.leak_logit.fill_(0.3)
    x, step = currents(timesteps, 100, seed=2).requires_grad_(), neuron.step.detach()
    omega, leak = 2 * torch.sigmoid(neuron.mixing) / timesteps, torch.sigmoid(neuron.leak_logit) + 0.5
    v = torch.zeros(100, dtype=torch.float64)
    expected = []
    for t in range(timesteps):
        u = leak.detach() * v + (omega[t].detach()[:, None] * x.detach()).sum(0)
        level = torch.floor(u / step).clamp(0, levels)
        expected.append(level)
        v = u - step * level
    assert torch.equal(neuron.levels(x).double(), torch.stack(expected))
    neuron(x).sum().backward()
    for parameter in (neuron.mixing, neuron.leak_logit):
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="timesteps=3"):
        neuron(currents(2, 5))
    with pytest.raises(NotImplementedError, match="step-by-step"):
        neuron.forward_step(x[0])


def test_lmht_starts_as_the_mean_without_leak() -> None:
    neuron = LMHT(4).double()
    x = currents(4, 10)
    torch.testing.assert_close(neuron.mix(x).detach(), x.mean(0).expand(4, 10))
    assert neuron.leak.item() == 1.0


def test_mlf_counts_membranes() -> None:
    neuron = MLF().double()
    x = currents(5, 300, scale=2.0)
    u = torch.zeros(3, 300, dtype=torch.float64)
    theta = torch.tensor([0.6, 1.6, 2.6]).double()[:, None]
    state = None
    for t in range(5):
        u = 0.25 * u + x[t]
        fired = (u > theta).double()
        assert torch.equal(neuron.levels(x)[t].double(), fired.sum(0))
        out, state = neuron.forward_step(x[t], state)
        assert torch.equal(out, fired.sum(0))
        u = u * (1 - fired)
    x_ = x.clone().requires_grad_()
    neuron(x_).sum().backward()
    assert x_.grad is not None
    assert x_.grad.abs().sum() > 0


def test_mlf_at_its_thresholds_by_hand() -> None:
    """Membranes of thresholds 1/2 and 3/2 that leak by half: one that is just reached does not fire."""
    neuron = MLF(n_max=2, threshold=0.5, spacing=1.0, beta=0.5)
    x = torch.tensor([0.5, 0.25, 0.75, 1.0, 0.875]).reshape(5, 1)
    # both 0.5; both 0.5; both 1, the first fires; 1 and 1.5, the first fires; 0.875 and 1.625, both fire
    assert neuron(x).flatten().tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("name", sorted(NEURONS))
def test_every_name_builds_runs_and_trains(name: str) -> None:
    neuron = create(name, timesteps=2, channels=3)
    x = torch.randn(2, 4, 3, 5, 5, requires_grad=True)
    out = neuron(x)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert neuron(x.detach()[:, :0]).shape == (2, 0, 3, 5, 5)
    if isinstance(neuron, SpikingNeuron):
        levels = neuron.levels(x)
        assert not levels.is_floating_point()
        worth = neuron.step if neuron.scale is None else neuron.scale
        torch.testing.assert_close(out.detach(), (worth * levels).detach())


def test_options_by_name() -> None:
    neuron = create("lbq", channels=7, n_max=10, per_channel=True)
    assert isinstance(neuron, BurstNeuron)
    assert neuron.n_max == 10
    assert neuron.step.shape == (7,)
    assert isinstance(create("qann", n_max=3), QuantReLU)
    with pytest.raises(ConfigError, match="unknown neuron 'lbqq'; did you mean 'lbq'"):
        create("lbqq")
    with pytest.raises(ConfigError, match="unknown neuron 'ann'; an ANN's is 'relu'"):
        create("ann")
    with pytest.raises(ConfigError, match="no option 'nmax'; did you mean 'n_max'"):
        create("lbq", nmax=3)
    with pytest.raises(ConfigError, match="'lbq': n_max must be"):
        create("lbq", n_max=0)
    with pytest.raises(ConfigError, match="per_channel must be True or False"):
        create("lbq", per_channel="yes", channels=3)
    with pytest.raises(ConfigError, match="channels must be"):
        create("lbq", per_channel=True)


def test_run_folders_of_old_may_call_the_highest_level_levels() -> None:
    assert create("lmht", timesteps=2, levels=4).n_max == 4
    assert create("mlf", levels=2).n_max == 2
    with pytest.raises(ConfigError, match="neuron 'lbq' has no option 'levels'"):
        create("lbq", levels=2)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Ternary(rule="full"), "rule"),  # type: ignore[arg-type]
        (lambda: LIF(threshold=0), "threshold"),
        (lambda: LMHT(0), "timesteps"),
        (lambda: LMHT(2, n_max=0), "n_max"),
        (lambda: MLF(n_max=0), "n_max"),
        (lambda: ILIF(0), "n_max"),
        (lambda: QuantReLU(0), "n_max"),
        (lambda: QuantReLU(step_gradient="mean"), "step_gradient"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_name_the_argument(make: object, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} "):
        make()  # type: ignore[operator]


def test_one_tail_for_all() -> None:
    net = torch.nn.Sequential(BurstNeuron(), BurstNeuron(), LIF())
    share_tail(net)
    assert len(list(net.parameters())) == 3  # two steps, one tail
    net(torch.randn(2, 30)).sum().backward()
    assert net[0].eta is net[1].eta
    with pytest.raises(ConfigError, match="learns a tail"):
        share_tail(torch.nn.Sequential(LIF()))
