"""BurstNeuron: its levels against a scalar loop, its laws, its dtypes, its state, and what it refuses."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from lbq import BurstNeuron
from lbq.kernels.reference import BurstState, Constants, Rule, burst_levels, burst_sequence
from lbq.kernels.surrogate import SURROGATES
from lbq.native.choose import use
from lbq.neuron import LIF, LMHT, MLF, NEURONS, LadderNeuron, ReLU, SpikingNeuron, create
from lbq.neuron.base import unchanging
from lbq.neuron.checks import unit_interval
from lbq.neuron.hooks import is_watched, only_outputs
from tests.support import oracle

RELSG = SURROGATES["relsg_et"]


def constants(step: float, dtype: torch.dtype = torch.float64, beta: float = 0.5, alpha: float = 1.0) -> Constants:
    gamma, tail, leak = (torch.tensor(number, dtype=dtype) for number in (step, 0.5, beta))
    return Constants(gamma, tail, leak, alpha)


@pytest.mark.parametrize("timesteps", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("n_max", [1, 2, 5, 10, 20, 255])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_levels_equal_a_scalar_loop(timesteps: int, n_max: int, dtype: torch.dtype) -> None:
    torch.manual_seed(timesteps * 1000 + n_max)
    neuron = BurstNeuron(n_max=n_max, step=0.37, beta=0.6, alpha=0.9).to(dtype)
    step = neuron.step.item()
    x = (torch.randn(timesteps, 3, 7, dtype=dtype) * step * n_max / 1.5).contiguous()
    x[:, 0, :3] = step * torch.tensor([1.0, n_max, 0.0], dtype=dtype)  # exact multiples at the first step
    levels, _ = oracle.burst_loop(x.numpy(), step, n_max, float(neuron.beta), float(neuron.alpha))
    assert np.array_equal(neuron.levels(x).numpy(), levels)
    scaled = neuron.step.detach() * torch.from_numpy(levels).to(dtype)
    assert torch.equal(neuron(x).detach(), scaled)


@settings(max_examples=60)
@given(st.data())
def test_laws(data: st.DataObject) -> None:
    n_max = data.draw(st.sampled_from([1, 2, 5, 10, 20, 255]))
    timesteps = data.draw(st.integers(1, 5))
    step = data.draw(st.floats(0.01, 3.0))
    beta = data.draw(st.floats(0.0, 1.0))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(timesteps, 4, 6, generator=generator, dtype=torch.float64) * step * n_max
    c, rule = constants(step, beta=beta), Rule(n_max, RELSG)
    levels = burst_levels(x, c, rule)
    assert levels.min() >= 0
    assert levels.max() <= n_max
    assert torch.equal(levels, levels.round())

    first = x[:1].flatten().sort().values.reshape(1, -1)  # monotone in U at one timestep
    assert (burst_levels(first, c, rule).flatten().diff() >= 0).all()

    # scaling U and the step by c scales the output by c: exactly, for powers of two
    factor = 2.0 ** data.draw(st.integers(-6, 6))
    out, _ = burst_sequence(x, c, rule)
    scaled, _ = burst_sequence(x * factor, constants(step * factor, beta=beta), rule)
    assert torch.equal(scaled, out * factor)


def test_fixed_thresholds_count_like_the_quantiser() -> None:
    """Eq. burst_count with thresholds k * step is Eq. fixed_burst_quantizer."""
    torch.manual_seed(1)
    x = torch.randn(4, 200, dtype=torch.float64)
    ladder = LadderNeuron([0.5, 1.0, 1.5, 2.0], beta=0.25).double()
    fixed = BurstNeuron(4, 0.5, learn_step=False, beta=0.25).double()
    x[:, :4] = torch.tensor([0.5, 1.0, 1.5, 2.0])  # exactly on the thresholds too
    assert torch.equal(ladder.levels(x), fixed.levels(x))
    torch.testing.assert_close(ladder(x), fixed(x))


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (1, 1), (2, 3, 0), (2, 1, 1, 1, 1)])
def test_empty_and_single_element(shape: tuple[int, ...]) -> None:
    neuron = BurstNeuron()
    x = torch.ones(shape, requires_grad=True)
    out = neuron(x)
    assert out.shape == shape
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    assert neuron.levels(x).shape == shape


def test_levels_beyond_float32_are_refused() -> None:
    assert BurstNeuron(2**22).n_max == 2**22
    with pytest.raises(ValueError, match="n_max must be at most 4194304, got 4194305"):
        BurstNeuron(2**22 + 1)


@pytest.mark.parametrize("neuron", [BurstNeuron(), LIF(), LadderNeuron(), MLF()])
def test_nan_stays_nan_and_has_no_level(neuron: SpikingNeuron) -> None:
    x = torch.full((3, 1, 2), 0.9)
    x[1, 0, 0] = math.nan
    out = neuron(x)
    assert out[0].isfinite().all()
    assert out[1:, 0, 0].isnan().all()  # and it poisons the membrane for the rest of the sequence
    assert out[:, 0, 1].isfinite().all()
    with pytest.raises(ValueError, match="NaN"):
        neuron.levels(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_in_half_out_with_float32_arithmetic(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x = torch.randn(4, 500).to(dtype)
    for neuron in (BurstNeuron(n_max=20, step=0.1), LMHT(4), MLF()):
        out = neuron(x)
        assert out.dtype == dtype
        assert torch.equal(out, neuron(x.float()).to(dtype))
        assert torch.equal(neuron.levels(x), neuron.levels(x.float()))


@pytest.mark.parametrize("name", sorted(NEURONS))
def test_autocast_and_pickling_change_nothing(name: str) -> None:
    torch.manual_seed(4)
    x = torch.randn(2, 3, 4, 5, 5)
    neuron = create(name, timesteps=2, channels=4)
    expected = neuron(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = neuron(x)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)
    again = pickle.loads(pickle.dumps(neuron))
    assert torch.equal(again(x), expected)
    assert repr(again) == repr(neuron)


@pytest.mark.parametrize("name", sorted(NEURONS))
def test_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        neuron = create(name, timesteps=2, channels=4)
        assert repr(neuron)
        assert neuron(torch.empty(2, 3, 4, 5, 5)).shape == (2, 3, 4, 5, 5)


def test_the_constants_of_relu_outlive_to_empty() -> None:
    neuron = ReLU().to_empty(device="meta").to_empty(device="cpu")
    with torch.no_grad():
        neuron._apply(lambda t: torch.full_like(t, float("nan")))  # what may lie in memory
    assert neuron.one == 1
    assert neuron.zero == 0


@pytest.mark.parametrize("channels", [None, 3])
def test_a_learned_step_loads_as_a_fixed_one_and_back(channels: int | None) -> None:
    learned, fixed = (BurstNeuron(5, learn_step=flag, channels=channels) for flag in (True, False))
    learned.step = 0.7 if channels is None else torch.tensor([0.2, 0.7, 1.5])
    fixed.load_state_dict(learned.state_dict())
    assert torch.equal(fixed.step, learned.step)
    again = BurstNeuron(5, channels=channels)
    again.load_state_dict(fixed.state_dict())
    torch.testing.assert_close(again.step, fixed.step)
    assert set(learned.state_dict()) ^ set(fixed.state_dict()) == {"rho", "fixed_step"}  # neither was changed


@pytest.mark.parametrize("assign", [False, True])
def test_what_was_learned_past_an_end_loads_as_a_fixed_number_within(assign: bool) -> None:
    learned = BurstNeuron(5, learn_beta=True, learn_alpha=True)
    with torch.no_grad():
        learned.beta.fill_(1.2)
        learned.alpha.fill_(-0.3)
    fixed = BurstNeuron(5)
    fixed.load_state_dict(learned.state_dict(), assign=assign)
    x = torch.rand(4, 2, 3)
    assert torch.equal(fixed(x), learned(x))
    assert fixed.beta == 1
    assert fixed.alpha == 0
    assert learned.beta > 1  # the dictionary's tensors stay


@pytest.mark.parametrize("neuron", [BurstNeuron(), ReLU()], ids=["burst", "relu"])
def test_a_residual_needs_a_norm(neuron: nn.Module) -> None:
    x = torch.randn(2, 3, 4)
    for extra in ({"residual": x}, {"timesteps": 7}):
        with pytest.raises(ValueError, match="^norm must be given with residual and timesteps"):
            neuron(x, **extra)


def test_a_step_can_be_set() -> None:
    for neuron in (BurstNeuron(5), BurstNeuron(5, learn_step=False), BurstNeuron(5, channels=2)):
        neuron.step = 0.25
        torch.testing.assert_close(neuron.step.detach(), torch.full_like(neuron.step, 0.25))
        for wrong in (0, -1.0, 1e-7, 1e300, torch.ones(3), float("nan"), float("inf")):
            with pytest.raises(ValueError, match="step must be above 2e-06 and finite, one number or one per channel"):
                neuron.step = wrong
        untyped: Any = neuron
        for wrong_type in ("0.1", None, [[1.0], [2.0, 3.0]]):
            with pytest.raises((TypeError, ValueError), match="step must be above 2e-06 and finite, one number"):
                untyped.step = wrong_type
    exact = BurstNeuron(5).double()
    exact.step = 0.3
    assert exact.step.item() == pytest.approx(0.3, rel=1e-14)
    half = BurstNeuron(5).bfloat16()
    half.load_state_dict(BurstNeuron(5, learn_step=False).bfloat16().state_dict(), assign=True)
    assert {value.dtype for value in half.state_dict().values()} == {torch.bfloat16}


class Doubled(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * value

    def right_inverse(self, value: torch.Tensor) -> torch.Tensor:
        return value / 2


@pytest.mark.parametrize("channels", [None, 2])
def test_a_parametrised_step_can_be_set(channels: int | None) -> None:
    neuron = BurstNeuron(5, channels=channels)
    register_parametrization(neuron, "rho", Doubled())
    neuron.step = 0.25
    torch.testing.assert_close(neuron.step, torch.full_like(neuron.step, 0.25))
    assert neuron.learn_step
    away = neuron.to("meta")  # as on a GPU: the number comes from elsewhere
    away.step = 0.5
    assert away.rho.is_meta


@pytest.mark.parametrize("step", [i / 20 for i in range(1, 40)])
def test_a_fixed_step_is_the_step_asked_for(step: float) -> None:
    neuron = BurstNeuron(5, step, learn_step=False)
    assert neuron.step.item() == torch.tensor(step).item()
    multiples = torch.arange(1, 4) * torch.tensor(step)
    exact = multiples / torch.tensor(step) == torch.arange(1, 4)  # where the multiple itself is not rounded
    assert torch.equal(neuron.levels(multiples[None])[0][exact], torch.arange(1, 4)[exact].to(torch.uint8))
    assert BurstNeuron(5, step).step.item() == pytest.approx(step, rel=2e-7)


def test_level_dtypes() -> None:
    x = torch.randn(1, 4)
    assert BurstNeuron(255).levels(x).dtype == torch.uint8
    assert BurstNeuron(256).levels(x).dtype == torch.int32
    for neuron in (BurstNeuron(), BurstNeuron().double()):  # outputs in float64 also with float32 parameters
        assert neuron(x.double()).dtype == torch.float64


def test_step_and_tail_are_the_papers_parametrisation() -> None:
    neuron = BurstNeuron(step=0.4, tail=0.3)
    assert neuron.step.item() == pytest.approx(0.4, abs=1e-7)
    assert neuron.tail.item() == pytest.approx(0.3, abs=1e-7)
    with torch.no_grad():
        neuron.rho.fill_(-1000.0)
        neuron.eta.fill_(3.0)
    assert neuron.step.item() == pytest.approx(1e-6)  # never zero, never negative
    assert neuron.tail.item() == pytest.approx(1 / (1 + math.exp(-3)))
    assert {name for name, _ in neuron.named_parameters()} == {"rho", "eta"}
    fixed = BurstNeuron(surrogate="box_et")  # whose tails are not learned
    assert fixed.tail.item() == 0.5
    assert {name for name, _ in fixed.named_parameters()} == {"rho"}
    assert BurstNeuron(10).step.item() == pytest.approx(0.4, abs=1e-7)  # whatever n_max is


def test_per_channel_steps() -> None:
    torch.manual_seed(5)
    neuron = BurstNeuron(step=0.4, channels=3)
    with torch.no_grad():
        neuron.rho.add_(torch.tensor([-1.0, 0.0, 1.0]))
    x = torch.randn(2, 4, 3, 5, 5)
    out = neuron(x)
    for c in range(3):
        alone = BurstNeuron()
        with torch.no_grad():
            alone.rho.copy_(neuron.rho[c])
        assert torch.equal(out[:, :, c], alone(x[:, :, c]))
    out.sum().backward()
    assert neuron.rho.grad is not None
    assert neuron.rho.grad.shape == (3,)
    with pytest.raises(ValueError, match=r"channels=3.*of tokens \[T, B, N, D\], neuron\(x.movedim\(-1, 2\)\)"):
        neuron(torch.randn(2, 4, 5))
    assert torch.equal(neuron(x.movedim(2, -1).movedim(-1, 2)), out)


def test_membranes_beyond_lif() -> None:
    x = torch.full((3, 1, 1), 0.3, dtype=torch.float64)
    integrate = BurstNeuron(step=1.0, membrane="if").double()
    assert integrate.levels(torch.full((4, 1, 1), 0.3, dtype=torch.float64)).flatten().tolist() == [0, 0, 0, 1]
    plif = BurstNeuron(step=1.0, membrane="plif", beta=0.75).double()
    u, expected = 0.0, []
    for _ in range(3):
        u = 0.75 * u + 0.25 * 0.3
        expected.append(u)
    state: BurstState | None = None
    for t in range(3):
        _, state = plif.forward_step(x[t], state)
        assert state.v.item() == pytest.approx(expected[t])
    out = plif(x + 5)
    out.sum().backward()
    assert plif.decay_logit.grad is not None
    assert plif.decay_logit.grad != 0


def test_learned_beta_recovers_after_overshooting() -> None:
    neuron = BurstNeuron(learn_beta=True, learn_alpha=True, beta=1.0)
    with torch.no_grad():
        neuron.beta.fill_(1.2)
    x = torch.rand(3, 50)
    for sign, moves in ((1.0, True), (-1.0, False)):
        neuron.zero_grad()
        (sign * neuron(x).sum()).backward()
        assert neuron.beta.grad is not None
        assert bool(neuron.beta.grad != 0) == moves  # more leak lowers the sum: allowed; beyond 1 is not
    assert torch.as_tensor(neuron.leak).item() == 1.0
    with torch.no_grad():
        neuron.alpha.fill_(1.2)
    assert neuron.requires_grad_(False).spec().alpha == 1.0  # and while it is frozen
    assert neuron.spec().leak == 1.0


@pytest.mark.parametrize(("grad", "passed"), [(1.0, [0.0, 1.0, 1.0, 1.0, 1.0]), (-1.0, [-1.0, -1.0, -1.0, -1.0, 0.0])])
def test_at_the_ends_of_the_unit_interval_gradients_pass_both_ways(grad: float, passed: list[float]) -> None:
    """Beyond them, only back."""
    value = torch.tensor([-0.5, 0.0, 0.5, 1.0, 1.5], requires_grad=True)
    (found,) = torch.autograd.grad(unit_interval(value), value, torch.full((5,), grad))
    assert found.tolist() == passed


def test_repr_names_what_matters() -> None:
    assert repr(BurstNeuron()) == (
        "BurstNeuron(n_max=5, step=0.4, membrane='lif', beta=0.5, alpha=1, surrogate='relsg_et')"
    )
    assert "[0.4..0.4]" in repr(BurstNeuron(channels=2))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"n_max": 0}, "n_max"),
        ({"n_max": 2.5}, "n_max"),
        ({"n_max": True}, "n_max"),
        ({"step": 0.0}, "step"),
        ({"step": -1.0}, "step"),
        ({"step": math.nan}, "step"),
        ({"step": math.inf}, "step"),
        ({"step": 1e39}, "step"),
        ({"step": "0.4"}, "step"),
        ({"step": 1e-7}, "step"),
        ({"beta": 1.5}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"alpha": -0.1}, "alpha"),
        ({"surrogate": "boxx"}, "surrogate"),
        ({"tail": 1.0}, "tail"),
        ({"surrogate": "box", "tail": 7.0}, "tail"),
        ({"membrane": "lifx"}, "membrane"),
        ({"membrane": "plif", "beta": 1.0}, "beta"),
        ({"membrane": "if", "learn_beta": True}, "learn_beta"),
        ({"channels": 0}, "channels"),
        ({"step_gradient": "mean"}, "step_gradient"),
        ({"learn_step": "false"}, "learn_step"),
        ({"learn_tail": 1}, "learn_tail"),
        ({"learn_beta": None}, "learn_beta"),
        ({"learn_alpha": "no"}, "learn_alpha"),
        ({"reset_grad": 0}, "reset_grad"),
    ],
)
def test_bad_arguments_name_the_argument(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} "):
        BurstNeuron(**arguments)


@pytest.mark.parametrize("thresholds", [[], [1.0, 1.0], [2.0, 1.0], [-1.0, 1.0], [math.nan], 3])
def test_bad_ladders_are_refused(thresholds: Any) -> None:
    with pytest.raises(ValueError, match="^thresholds "):
        LadderNeuron(thresholds)


def test_bad_inputs_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^x must be a floating-point tensor.*int64"):
        BurstNeuron()(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="list"):
        BurstNeuron()([[1.0]])
    with pytest.raises(TypeError, match=r"dense tensor, got torch.sparse_coo: give x.to_dense\(\)"):
        BurstNeuron()(torch.ones(2, 2).to_sparse())
    with pytest.raises(ValueError, match=r"\[T, B, \.\.\.\]"):
        BurstNeuron()(torch.ones(3))
    for call in (BurstNeuron().levels, BurstNeuron().forward_step, MLF(), MLF().forward_step):
        with pytest.raises(TypeError, match="int64"):
            call(torch.ones(2, 2, dtype=torch.int64))


def test_expanded_and_channels_last_inputs_need_no_copy_beforehand() -> None:
    torch.manual_seed(6)
    current = torch.randn(4, 8, 5, 5)
    neuron = BurstNeuron()
    expanded = current.unsqueeze(0).expand(3, *current.shape)
    assert torch.equal(neuron(expanded), neuron(expanded.contiguous()))
    last = current.to(memory_format=torch.channels_last)
    for n in (neuron, LadderNeuron(), LIF(), LMHT(1)):
        assert torch.equal(n(last[None]), n(current[None]))
    numbers: Any = {"step": np.float32(0.5), "n_max": np.int64(3)}
    assert BurstNeuron(**numbers).n_max == 3  # NumPy's numbers are numbers


def test_constants_are_worked_out_once_while_nothing_changes() -> None:
    first, second = BurstNeuron(5), BurstNeuron(5, channels=3)
    net, x = torch.nn.Sequential(first, second), torch.rand(2, 4, 3, 2, 2)
    before = net(x)
    with unchanging(net):
        assert torch.equal(net(x), before)
        assert first.constants(x) is first.constants(x[:, :1])
        assert second.constants(x[..., 0]).step.shape == (3, 1)
        assert first.constants(x.double()).step.dtype == torch.float64
        assert not net(x).requires_grad
    with torch.no_grad():
        first.get_parameter("rho").add_(1)
    assert not torch.equal(net(x), before)
    assert net(x).requires_grad


@pytest.mark.parametrize("kernel", ["reference", "native"])
def test_what_has_no_part_in_the_outputs_has_a_gradient_of_zero(kernel: Any) -> None:
    """Not none, which several processes would wait for."""
    one_step, no_reset = BurstNeuron(learn_beta=True, learn_alpha=True), BurstNeuron(learn_alpha=True, reset_grad=False)
    with use(kernel):
        one_step(torch.rand(1, 2, 3)).sum().backward()
        no_reset(torch.rand(3, 2, 4)).sum().backward()
    assert one_step.beta.grad == one_step.alpha.grad == no_reset.alpha.grad == 0


def test_batched_gradients_say_which_kernel_has_them() -> None:
    x = torch.rand(3, 2, 4)
    with use("reference"):
        jacobian = torch.autograd.functional.jacobian(BurstNeuron(), x, vectorize=True)
    assert jacobian.shape == (*x.shape, *x.shape)
    with (
        use("native"),
        pytest.raises(NotImplementedError, match="batched gradients run by the reference kernel alone"),
    ):
        torch.autograd.functional.jacobian(BurstNeuron(), x, vectorize=True)


def test_hooks_that_may_look_at_the_input_keep_batchnorm_outside() -> None:
    neuron = BurstNeuron()
    assert not is_watched(neuron)
    neuron.register_forward_hook(only_outputs(lambda *_: None))
    assert not is_watched(neuron)
    for register in ("forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook"):
        handle = getattr(neuron, f"register_{register}")(lambda *_: None)
        assert is_watched(neuron), register
        handle.remove()
        assert not is_watched(neuron)


@pytest.mark.parametrize("name", sorted(NEURONS.keys() - {"relu"}))
def test_every_number_that_is_not_learned_is_declared(name: str) -> None:
    """A run that starts from another's weights keeps its own of these."""
    neuron = create(name, timesteps=2)
    assert isinstance(neuron, SpikingNeuron)
    assert neuron.fixed_numbers().keys() == dict(neuron.named_buffers()).keys()


def test_a_neuron_shows_the_decay_and_reset_that_it_uses() -> None:
    neuron = BurstNeuron(learn_beta=True, learn_alpha=True)
    with torch.no_grad():
        neuron.beta.fill_(23.0)
        neuron.alpha.fill_(-4.0)
    assert "beta=1, alpha=0," in repr(neuron)


@pytest.mark.filterwarnings("error")
def test_a_step_may_be_that_of_another_neuron() -> None:
    first = BurstNeuron(step=torch.tensor(0.3))
    torch.testing.assert_close(BurstNeuron(step=first.step).step, first.step)
    for wrong in (torch.tensor([0.3, 0.4]), torch.tensor(-1.0), torch.tensor(float("nan")), torch.tensor(True)):
        with pytest.raises(ValueError, match="step must be a positive finite number"):
            BurstNeuron(step=wrong)
