"""Sequences in chunks: outputs, states and gradients of `forward_chunk` against those of single timesteps and of the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lbq import BurstNeuron
from lbq.kernels.reference import BurstState
from lbq.native.choose import use
from lbq.neuron import ILIF, LIF, LMHT, MLF, LadderNeuron, SpikingNeuron, Ternary
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "howto" / "streams.md"
DEVICES = {"fused": "cuda" if torch.cuda.is_available() else "cpu"}  # of a kernel, if not the CPU


def per_channel() -> SpikingNeuron:
    neuron = BurstNeuron(3, channels=5)
    neuron.step = torch.linspace(0.2, 0.7, 5)
    return neuron


NEURONS: dict[str, Callable[[], SpikingNeuron]] = {
    "burst": lambda: BurstNeuron(4, step=0.37, learn_beta=True, learn_alpha=True, alpha=0.9),
    "per_channel": per_channel,
    "plif_gain": lambda: BurstNeuron(membrane="plif"),
    "lif": lambda: LIF(0.7, learn_beta=True),
    "if": lambda: LIF(0.7, membrane="if"),
    "ternary": lambda: Ternary(learn_step=True),
    "ternary_half": lambda: Ternary(learn_step=True, rule="half", beta=0.25),
    "ilif": lambda: ILIF(3, step=0.4, learn_step=True),
    "ladder": lambda: LadderNeuron([0.3, 0.7, 1.5]),
    "mlf": MLF,
}


@pytest.fixture(params=["native", "fused", "reference"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where it is not there, what runs in its place."""
    with use(request.param):
        yield request.param


def currents(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 1.2 + 0.2


def by_steps(neuron: SpikingNeuron, x: Tensor, state: BurstState | None = None) -> tuple[Tensor, BurstState]:
    """One timestep after the other, in plain PyTorch."""
    outputs = []
    for current in x:
        out, state = neuron.forward_step(current, state)
        outputs.append(out)
    assert state is not None
    return torch.stack(outputs), state


def assert_same_state(state: BurstState | None, expected: BurstState) -> None:
    assert isinstance(state, BurstState)
    assert not state.v.requires_grad
    assert torch.equal(state.v, expected.v)
    assert state.v.dtype == expected.v.dtype
    assert (state.pending is None) == (expected.pending is None)
    if state.pending is not None and expected.pending is not None:
        assert not state.pending.requires_grad
        assert torch.equal(state.pending, expected.pending)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("name", NEURONS)
def test_chunks_and_steps_in_any_order_are_the_whole_sequence(name: str, dtype: torch.dtype, kernel: str) -> None:
    neuron = NEURONS[name]()
    neuron = neuron.double() if dtype == torch.float64 else neuron
    x = currents(11, 2, 5, 7, dtype=torch.float64).to(dtype)
    with use("reference"):
        whole, end = by_steps(neuron, x)
        assert torch.equal(whole, neuron(x))
    outputs, state, at = [], None, 0
    for length in (1, 4, 0, 2, 1, 3):
        if length == 2:  # as two single steps
            out, state = by_steps(neuron, x[at : at + 2], state)
        else:
            out, state = neuron.forward_chunk(x[at : at + length], state)
        outputs.append(out)
        at += length
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(outputs[0].detach(), whole[:1].detach())
    assert_same_state(state, end)


@pytest.mark.parametrize(
    ("timesteps", "lay"),
    [
        (1, lambda x: x),
        (3, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
        (3, lambda x: x.repeat_interleave(2, 3)[..., ::2]),
    ],
    ids=["contiguous", "turned", "sliced"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NEURONS)
def test_gradients_within_a_chunk(name: str, dtype: torch.dtype, timesteps: int, lay: Any, kernel: str) -> None:
    """Of the currents and of every parameter, those that single timesteps have from a constant state on."""
    device = DEVICES.get(kernel, "cpu")
    neuron = NEURONS[name]().to(device, dtype)
    earlier, later, weight = (lay(currents(3, 2, 5, 7, dtype=dtype, seed=seed).to(device)) for seed in (1, 2, 3))
    weight = weight[:timesteps]
    leaves = [later.requires_grad_(), *neuron.parameters()]
    _, state = by_steps(neuron, earlier.requires_grad_())
    out, after = neuron.forward_chunk(later[:timesteps], state)
    expected, end = by_steps(neuron, later[:timesteps], state.detach())
    assert torch.equal(out, expected)
    assert_same_state(after, end)
    exact = torch.autograd.grad(expected, leaves, weight, materialize_grads=True)
    for ours, right in zip(torch.autograd.grad(out, leaves, weight, allow_unused=True), exact, strict=True):
        found_grad = torch.zeros_like(right) if ours is None else ours
        torch.testing.assert_close(found_grad, right, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 1e-12)


def test_gradients_stop_at_both_ends(kernel: str) -> None:
    neuron, earlier, later = LIF(learn_beta=True), currents(2, 3, 4).requires_grad_(), currents(2, 3, 4, seed=1)
    _, state = neuron.forward_step(earlier[0])
    assert state.pending is not None
    assert state.v.requires_grad
    out, after = neuron.forward_chunk(later, state)
    assert after is not None
    assert not any(t is not None and t.requires_grad for t in after)
    out.sum().backward()
    assert earlier.grad is None
    whole = neuron(torch.cat([earlier, later]))
    assert torch.autograd.grad(whole[2:].sum(), earlier)[0].abs().sum() > 0


def test_a_state_set_by_hand(kernel: str) -> None:
    """A membrane alone, with nothing pending; one that autograd watches."""
    x, v = currents(3, 2, 4), currents(2, 4, seed=1).requires_grad_()
    for neuron in (BurstNeuron(), LIF()):
        out, after = neuron.forward_chunk(x, BurstState(v))
        expected, end = by_steps(neuron, x, BurstState(v))
        assert torch.equal(out, expected)
        assert_same_state(after, end)


def test_a_state_has_memory_of_its_own(kernel: str) -> None:
    """Streams are often read into one buffer, and states of streams that end are set to 0."""
    for neuron in (LIF(), BurstNeuron()):
        x = currents(1, 2, 4)
        _, state = neuron.forward_chunk(x)
        _, stepped = neuron.forward_step(x[0])
        assert state is not None
        kept = state.v.clone()
        x.zero_()
        assert torch.equal(state.v, kept)
        assert torch.equal(stepped.v, kept)
        _, after = neuron.forward_chunk(x, state)
        assert after is not None
        after.v.zero_()
        assert torch.equal(state.v, kept)


def test_no_timesteps_leave_no_state() -> None:
    assert BurstNeuron().forward_chunk(currents(0, 2, 4))[1] is None


def test_what_does_not_belong_together_is_refused() -> None:
    """A state of another batch would be broadcast, and several samples share a membrane."""
    neuron, x = BurstNeuron(), currents(3, 2, 4)
    wrong: list[tuple[SpikingNeuron, Any, str]] = [
        (neuron, x[0], "^state must be what forward_chunk or forward_step returned, got Tensor$"),
        (neuron, BurstState(x[0, :1]), r"^state.v must be \(2, 4\) torch.float32 on cpu for this x, got \(1, 4\)"),
        (neuron, BurstState(x[0].double()), r"^state.v must be .*got \(2, 4\) torch.float64"),
        (neuron, LIF().forward_chunk(x)[1], "^state.pending must be None: BurstNeuron does not delay its reset$"),
        (LIF(), BurstState(x[0], x), r"^state.pending must be \(2, 4\)"),
        (MLF(), BurstState(x[0]), r"^state.v must be \(3, 2, 4\)"),
    ]
    for receiver, state, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            receiver.forward_chunk(x, state)
        with pytest.raises((TypeError, ValueError), match=message):
            receiver.forward_step(x[0], state)
    with pytest.raises(TypeError, match="int64"):
        neuron.forward_chunk(x.long())
    with pytest.raises(NotImplementedError, match="^LMHT mixes all timesteps, so it has no chunks: pass the whole"):
        LMHT(3).forward_chunk(x)


class Layers(nn.Module):
    """Two layers that carry their states along."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 3)])
        self.neurons = nn.ModuleList([BurstNeuron(), LIF(0.4)])

    def forward(self, x: Tensor, states: list[Any]) -> tuple[Tensor, list[Any]]:
        after = []
        for linear, neuron, state in zip(self.linear, self.neurons, states, strict=True):
            x, state = neuron.forward_chunk(linear(x), state)  # type: ignore[operator]
            after.append(state)
        return x, after


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own doing
def test_truncated_backpropagation_goes_through_torch_compile() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Layers()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    runs = []
    for run in (net, compiled):
        states: list[Any] = [None, None]
        seen = []
        for chunk in currents(9, 2, 4).split(3):
            net.zero_grad()
            out, states = run(chunk, states)
            out.square().sum().backward()
            assert not states[1].pending.requires_grad
            seen += [out.detach(), states[0].v, *states[1]]
            seen += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        runs.append(seen)
    for ours, right in zip(*runs, strict=True):
        torch.testing.assert_close(ours, right)


def test_under_torch_func() -> None:
    neuron, x = LIF(), currents(3, 2, 4)
    _, state = neuron.forward_chunk(x)

    def loss(x: Tensor) -> Tensor:
        return neuron.forward_chunk(x, state)[0].square().sum()

    by_vmap = torch.func.vmap(lambda x: neuron.forward_chunk(x)[1].v, 1, 0)(x[:, :, None])  # type: ignore[union-attr]
    assert torch.equal(by_vmap[:, 0], state.v)  # type: ignore[union-attr]
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.autograd.grad(loss(leaf), leaf)[0])


def test_the_example_of_the_page_on_speed_learns(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "forward_chunk" in b)
    exec(block, {})
    errors = re.fullmatch(r"mean squared error ([\d.]+), then ([\d.]+)\n", capsys.readouterr().out)
    assert errors is not None
    assert float(errors[2]) < float(errors[1]) / 3


@pytest.mark.parametrize("name", ["burst", "plif_gain"])
def test_a_state_of_inference_mode_goes_on_in_training(name: str, kernel: str) -> None:
    neuron = NEURONS[name]().to(DEVICES.get(kernel, "cpu"))
    x = currents(5, 2, 5, 7).to(neuron.step.device)
    with torch.inference_mode():
        _, state = neuron.forward_chunk(x[:2])
    _, other = neuron.forward_chunk(x[:2])
    ours, theirs = (neuron.forward_chunk(x[2:], before)[0] for before in (state, other))
    assert torch.equal(ours, theirs)
    ours.sum().backward()
    neuron.forward_step(x[2], state)[0].sum().backward()
