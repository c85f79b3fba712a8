"""The fused neuron against the reference: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the fused kernels need triton")

from lbq.kernels import memory, reference
from lbq.kernels.gpu import operators
from lbq.kernels.surrogate import SURROGATES
from lbq.neuron import ILIF, LIF, BurstNeuron, SpikingNeuron, Ternary
from tests.support.fused import DEVICE, STEP, by_reference, channels_last, randn


def both_ways(
    run: Callable[[Tensor, SpikingNeuron], Tensor], neuron: SpikingNeuron, x: Tensor, grad: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and gradients of x and of every parameter (zero where autograd gave none)."""
    neuron.zero_grad()
    x = x.detach().requires_grad_()
    out = run(x, neuron)
    out.backward(grad)
    assert x.grad is not None
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in neuron.named_parameters()}
    return out.detach(), {"x": x.grad, **grads}


def by_kernel(x: Tensor, neuron: SpikingNeuron) -> Tensor:
    assert operators.supports(x, neuron.constants(x), neuron.rule)
    return operators.burst(x, neuron.constants(x), neuron.rule)


def assert_same(neuron: SpikingNeuron, x: Tensor, kinks: bool = False) -> None:
    """Outputs equal bit for bit; gradients as the reference's in float32, and as those in float64 where no input lies so
    near a kink that float64 has it on the other side."""
    neuron.to(DEVICE)
    grad = torch.randn(x.shape, device=DEVICE)
    expected, exact = both_ways(by_reference, neuron, x, grad)
    out, grads = both_ways(by_kernel, neuron, x, grad)
    assert torch.equal(out, expected)
    precise, truth = both_ways(by_reference, copy.deepcopy(neuron).double(), x.double(), grad.double())
    if kinks or not torch.equal(precise.float(), expected):
        truth = exact
    for name, value in grads.items():
        for right in (exact[name].double(), truth[name].double()):
            size = max(1.0, float(right.abs().max())) if right.numel() else 1.0
            torch.testing.assert_close(value.double(), right, rtol=2e-4, atol=2e-5 * size, msg=name)


def at_thresholds(n_max: int, step: float) -> Tensor:
    """Exact multiples of the step, the kinks of every surrogate, and their neighbours in float32."""
    places = torch.tensor([k * 0.5 for k in range(-3, min(2 * n_max + 4, 60))] + [n_max, n_max + 0.5, n_max - 0.5])
    exact = places * torch.tensor(step)
    up, down = (torch.nextafter(exact, torch.tensor(end)) for end in (9e9, -9e9))
    return torch.cat([exact, up, down]).to(DEVICE)


@pytest.mark.parametrize(
    ("timesteps", "n_max"),
    [*((t, 5) for t in (1, 2, 3, 4, 7, 10, 16)), *((3, n) for n in (1, 2, 10, 20, 255)), (1, 1), (16, 255)],
)
def test_sequences_of_every_length_and_number_of_levels(timesteps: int, n_max: int) -> None:
    neuron = BurstNeuron(n_max, step=STEP, learn_beta=True, learn_alpha=True)
    assert_same(neuron, randn(timesteps, 3, 5, scale=max(1.0, n_max * STEP / 2)))


@pytest.mark.parametrize("n_max", [1, 2, 5, 10, 20, 255])
@pytest.mark.parametrize("step", [0.4, 0.3, 1 / 3, 0.036])
def test_levels_at_thresholds_and_beside_them(n_max: int, step: float) -> None:
    """A product with 1 / step would give another level here; one sequence of one step, and one with history."""
    x = at_thresholds(n_max, step)
    neuron = BurstNeuron(n_max, step=step, learn_step=False).to(DEVICE)
    assert_same(neuron, x[None, None], kinks=True)
    assert_same(neuron, torch.stack([x, x.roll(1), x.flip(0)])[:, None], kinks=True)


@pytest.mark.parametrize("surrogate", sorted(SURROGATES))
@pytest.mark.parametrize(
    "make",
    [
        lambda s: BurstNeuron(4, step=STEP, surrogate=s),
        lambda s: BurstNeuron(4, step=STEP, surrogate=s, reset_grad=False, learn_alpha=True),
        lambda s: LIF(threshold=0.7, surrogate=s, learn_beta=True),
        lambda s: Ternary(step=STEP, learn_step=True, surrogate=s),
        lambda s: Ternary(step=STEP, learn_step=True, surrogate=s, rule="half"),
        lambda s: ILIF(3, step=STEP, learn_step=True, surrogate=s),
        lambda s: LIF(membrane="plif", surrogate=s),
        lambda s: LIF(membrane="if", surrogate=s),
    ],
    ids=["burst", "no_reset_grad", "lif", "ternary", "ternary_half", "ilif", "plif", "if"],
)
def test_every_neuron_with_every_surrogate(make: Callable[[str], SpikingNeuron], surrogate: str) -> None:
    neuron = make(surrogate)
    x = torch.cat([randn(3, 2, 50, scale=2.0), at_thresholds(4, STEP)[:50].expand(3, 2, 50)], dim=2)
    assert_same(neuron, x, kinks=True)


def test_gradients_where_the_rule_is_none_of_the_neurons() -> None:
    """Combinations that only `Rule` allows: hard reset with a learned alpha, delayed reset of whole levels, cut state."""
    neuron = BurstNeuron(3, step=STEP, learn_alpha=True, learn_beta=True, alpha=0.6)
    for rule in (
        reference.Rule(3, neuron.surrogate, reset="hard"),
        reference.Rule(3, neuron.surrogate, reset="level", decay_reset=False),
        reference.Rule(3, neuron.surrogate, rounding="half", reset="level", detach_state=True),
        reference.Rule(3, neuron.surrogate, rounding="strict", decay_reset=False, reset_grad=False),
    ):
        neuron.rule = rule
        assert_same(neuron, randn(4, 2, 40, scale=1.5))


@pytest.mark.parametrize(
    "shape", [(2, 3), (2, 0), (0, 3), (1, 1), (3, 1, 1), (2, 3, 5), (2, 3, 5, 7), (2, 2, 6, 3, 3), (2, 1, 129, 1, 9)]
)
def test_shapes(shape: tuple[int, ...]) -> None:
    assert_same(BurstNeuron(step=STEP), randn(*shape))


@pytest.mark.parametrize("channels", [None, 6])
@pytest.mark.parametrize(
    "lay",
    [
        lambda x: x,
        channels_last,
        lambda x: x[:, :, :, ::2],
        lambda x: x[::2],
        lambda x: x.transpose(3, 4),
        lambda x: channels_last(x)[:, 1:],
        lambda x: x[:1].expand(3, *x.shape[1:]),
        lambda x: channels_last(x)[:, :, :, :1],
    ],
    ids=["contiguous", "channels_last", "sliced", "every_second", "transposed", "narrowed", "repeated", "thin"],
)
def test_layouts(lay: Callable[[Tensor], Tensor], channels: int | None) -> None:
    x = lay(randn(4, 3, 6, 4, 5))
    neuron = BurstNeuron(step=STEP, channels=channels).to(DEVICE)
    if channels:
        with torch.no_grad():
            neuron.rho.uniform_(-2, 0)
    assert_same(neuron, x)


def test_dense_layouts_are_kept_and_none_is_copied() -> None:
    """A timestep's memory order goes through; gradients in another order are brought into it."""
    x = channels_last(randn(2, 3, 4, 5, 5))
    neuron = BurstNeuron().to(DEVICE)
    assert memory.settled(x) is x
    assert neuron(x).stride() == x.stride()
    repeated = x[:1].expand(2, *x.shape[1:])
    assert memory.settled(repeated) is repeated
    assert_same(neuron, x)  # with a contiguous gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    neuron, x = BurstNeuron(step=STEP).to(DEVICE), randn(3, 4, 33).to(dtype)
    grad = torch.randn_like(x)
    expected, exact = both_ways(by_reference, neuron, x, grad)
    out, grads = both_ways(by_kernel, neuron, x, grad)
    assert out.dtype == dtype
    if DEVICE == "cuda":
        assert torch.equal(out, expected)
    else:  # the interpreter cuts bfloat16 off where the GPU rounds
        assert torch.equal((out / STEP).round(), (expected / STEP).round())
    torch.testing.assert_close(grads["x"], exact["x"], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(grads["rho"], exact["rho"], rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("make", [BurstNeuron, LIF, Ternary, lambda: ILIF(3)])
def test_nan_and_infinity(make: Callable[[], SpikingNeuron]) -> None:
    neuron = make().to(DEVICE)
    x = randn(2, 1, 6)
    x[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])
    assert torch.equal(by_kernel(x, neuron).isnan(), by_reference(x, neuron).isnan())
    out, expected = by_kernel(x, neuron).nan_to_num(77.0), by_reference(x, neuron).nan_to_num(77.0)
    assert torch.equal(out, expected)
    _, grads = both_ways(by_kernel, BurstNeuron().to(DEVICE), x[..., :1], torch.ones_like(x[..., :1]))
    assert grads["x"].isnan().any()


def test_same_bytes_every_time() -> None:
    neuron, x = BurstNeuron().to(DEVICE), randn(2, 9, 700)
    grad = torch.randn_like(x)
    first, second = (both_ways(by_kernel, neuron, x, grad) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][n], second[1][n]) for n in first[1])


def test_a_second_derivative_is_refused() -> None:
    neuron, x = BurstNeuron().to(DEVICE), randn(2, 2, 3).requires_grad_()
    (grad,) = torch.autograd.grad(by_kernel(x, neuron).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_no_gradients_that_nobody_asked_for() -> None:
    neuron, x = BurstNeuron(learn_step=False, learn_tail=False).to(DEVICE), randn(2, 2, 5).requires_grad_()
    by_kernel(x, neuron).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not by_kernel(x, neuron).requires_grad
