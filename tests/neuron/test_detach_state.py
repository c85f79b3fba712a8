"""`detach_state` cuts gradients at the membrane of the timestep before, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lbq import BurstNeuron
from lbq.native.choose import use
from lbq.neuron import ILIF, LIF, LMHT, MLF, LadderNeuron, SpikingNeuron, Ternary, create
from lbq.neuron.registry import options_of

NEURONS: dict[str, Callable[..., SpikingNeuron]] = {
    "burst": lambda **o: BurstNeuron(4, learn_beta=True, learn_alpha=True, alpha=0.9, **o),
    "plif": lambda **o: BurstNeuron(membrane="plif", **o),
    "lif": lambda **o: LIF(0.7, learn_beta=True, **o),
    "ternary": lambda **o: Ternary(learn_step=True, **o),
    "ternary_half": lambda **o: Ternary(learn_step=True, rule="half", **o),
    "ilif": lambda **o: ILIF(3, step=0.4, learn_step=True, **o),
    "ladder": lambda **o: LadderNeuron([0.3, 0.7, 1.5], **o),
    "mlf": lambda **o: MLF(**o),
}


def currents() -> Tensor:
    x = torch.randn(4, 3, 5, 6, 6, generator=torch.Generator().manual_seed(0)) * 1.2 + 0.3
    return x.requires_grad_()


def gradients(neuron: SpikingNeuron, out: Tensor, x: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 2, out.numel()).reshape(out.shape)
    inputs = [x, *neuron.parameters()]
    return list(torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True, materialize_grads=True))


def unrolled(neuron: SpikingNeuron, x: Tensor) -> Tensor:
    """One timestep after the other, each beginning at V[t-1].detach(). A delayed reset is no part of the membrane."""
    outputs, state = [], None
    for current in x:
        out, state = neuron.forward_step(current, state)
        state = state._replace(v=state.v.detach())
        outputs.append(out)
    return torch.stack(outputs)


@pytest.mark.parametrize("kernel", ["native", "reference"])
@pytest.mark.parametrize("kind", NEURONS)
def test_gradients_are_those_of_detached_membranes(kind: str, kernel: str) -> None:
    whole, cut = NEURONS[kind](), NEURONS[kind](detach_state=True)
    x = currents()
    with use(kernel):
        out, through_time = cut(x), whole(x)
    assert torch.equal(out, through_time)
    ours, theirs = gradients(cut, out, x), gradients(whole, unrolled(whole, x), x)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours[0], gradients(whole, through_time, x)[0])


def test_lmht_detaches_unless_it_is_asked_not_to() -> None:
    assert LMHT(4).rule.detach_state
    x, flowing = currents(), LMHT(4, detach_state=False)
    cut, whole = (gradients(n, n(x), x)[0] for n in (LMHT(4), flowing))
    assert not torch.allclose(cut, whole)


@pytest.mark.parametrize("kind", [kind for kind in NEURONS if kind != "mlf"])
def test_deployment_does_not_see_it(kind: str) -> None:
    np.testing.assert_equal(asdict(NEURONS[kind]().spec()), asdict(NEURONS[kind](detach_state=True).spec()))


def test_configurations_set_it() -> None:
    names = ("lbq", "v1", "v2", "v3", "burst_fixed", "ladder", "lif", "if", "plif", "ternary", "ternary_learned",
             "ternary_half", "ilif", "lmht", "mlf")  # fmt: skip
    for name in names:
        assert "detach_state" in options_of(name)
        neuron: Any = create(name, timesteps=2, detach_state=True)
        assert neuron.rule.detach_state
        with pytest.raises(Exception, match="detach_state must be True or False, got 1"):
            create(name, timesteps=2, detach_state=1)
