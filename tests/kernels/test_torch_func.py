"""Neurons under torch.func, under fake tensors, traced, exported and on views that hide a sign: the same results, by the
reference kernel."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.onnx
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

from lbq import models
from lbq.kernels import surrogate as surrogates
from lbq.kernels.reference import straight_through
from lbq.neuron import BurstNeuron, create

NEURONS: list[dict[str, Any]] = [
    {"name": "lbq"},
    {"name": "lbq", "learn_beta": True, "learn_alpha": True},
    {"name": "lbq", "step_gradient": "lsq"},
    {"name": "v3"},
    {"name": "ladder"},
    {"name": "lif"},
    {"name": "plif"},
    {"name": "ternary_learned"},
    {"name": "ilif"},
    {"name": "lmht", "timesteps": 3},
    {"name": "mlf"},
    {"name": "qann"},
]


@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")  # inside vmap nothing can be made contiguous
@pytest.mark.parametrize("options", NEURONS, ids=str)
def test_gradients_of_samples_by_torch_func(options: dict[str, Any]) -> None:
    """Of currents and of the neuron's own parameters: as from one sample after the other."""
    neuron = create(**options)
    torch.manual_seed(0)
    samples, weights = torch.randn(4, 3, 1, 6), torch.randn(3, 1, 6)
    parameters: dict[str, Tensor] = dict(neuron.named_parameters())

    def weighted(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(neuron, parameters, (x,))
        return (out * weights).sum()

    by_parameters, by_x = vmap(grad(weighted, argnums=(0, 1)), in_dims=(None, 0))(parameters, samples)
    for i, sample in enumerate(samples):
        x = sample.clone().requires_grad_()
        expected = torch.autograd.grad((neuron(x) * weights).sum(), [x, *parameters.values()])
        torch.testing.assert_close(by_x[i], expected[0], rtol=1e-4, atol=1e-5)
        for name, value in zip(parameters, expected[1:], strict=True):
            torch.testing.assert_close(by_parameters[name][i], value, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # PyTorch's own doing
@pytest.mark.parametrize("options", [*NEURONS, {"name": "ternary_learned", "surrogate": "box_et"}], ids=str)
def test_forward_mode_agrees_with_reverse_mode(options: dict[str, Any]) -> None:
    neuron = create(**options).double()
    torch.manual_seed(1)
    x = torch.randn(3, 2, 2, dtype=torch.float64)
    reverse = torch.autograd.functional.jacobian(neuron, x)
    torch.testing.assert_close(jacfwd(neuron)(x), reverse)
    torch.testing.assert_close(jacrev(neuron)(x), reverse)
    with forward_ad.dual_level():
        along = forward_ad.unpack_dual(neuron(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    torch.testing.assert_close(along, reverse.sum((3, 4, 5)))
    parameters: dict[str, Tensor] = dict(neuron.named_parameters())

    def out(parameters: dict[str, Tensor]) -> Tensor:
        found: Tensor = functional_call(neuron, parameters, (x,))
        return found

    if parameters:
        torch.testing.assert_close(jacfwd(out)(parameters), jacrev(out)(parameters))


@pytest.mark.parametrize("name", surrogates.SURROGATES)
@pytest.mark.parametrize("signed", [False, True])
def test_slopes_are_the_same_at_every_kink(name: str, signed: bool) -> None:
    """Where B has no derivative, torch.func takes the one that the backward pass takes."""
    surrogate, n_max = surrogates.SURROGATES[name], 1 if signed else 3
    r = torch.arange(-8.0, 9.0, dtype=torch.float64) / 2
    level = torch.zeros_like(r)
    tail = torch.tensor(0.3, dtype=torch.float64)

    def emitted(r: Tensor, tail: Tensor) -> Tensor:
        return straight_through(r, level, tail, n_max, surrogate, signed).sum()

    r.requires_grad_(), tail.requires_grad_()
    usual = torch.autograd.grad(emitted(r, tail), (r, tail), materialize_grads=True)
    torch.testing.assert_close(grad(emitted, argnums=(0, 1))(r, tail), usual)


@pytest.mark.no_cover  # PyTorch's compiler is Python, which coverage makes twice as slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*requires_grad:UserWarning")  # PyTorch's own doing
def test_torch_func_compiled() -> None:
    neuron, signed = create("lbq"), create("ternary_learned")
    torch.manual_seed(4)
    x = torch.randn(2, 3, 4)
    parameters = {name: value.detach() for name, value in neuron.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(neuron, parameters, (x,))
        return out.square().sum()

    def tangent(x: Tensor) -> Tensor:
        found: Tensor = jvp(lambda x: signed(neuron(x) - 0.3), (x,), (torch.ones_like(x),))[1]
        return found

    functions: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (vmap(grad(loss), (None, 1)), (parameters, x)),
        (tangent, (x,)),
    ]
    for function, inputs in functions:
        torch.testing.assert_close(torch.compile(function, backend="aot_eager")(*inputs), function(*inputs))


def test_fake_tensors_have_shapes_and_no_memory() -> None:
    with FakeTensorMode():
        out = BurstNeuron()(torch.randn(2, 3, 4))
    assert out.shape == (2, 3, 4)


def test_a_lazily_negated_view_is_read_with_its_sign() -> None:
    torch.manual_seed(3)
    x = torch.randn(2, 3, 4)
    lazy = torch._neg_view(x)
    assert lazy.is_neg()
    neuron = BurstNeuron()
    assert torch.equal(neuron(lazy), neuron(-x))
    assert neuron(lazy).any()


# What is traced or exported has plain operations only


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_network_is_saved_and_loaded() -> None:
    net = models.create("resnet8w4", timesteps=2).eval()
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(net, torch.randn(3, 3, 8, 8)), file)
    file.seek(0)
    x = torch.randn(5, 3, 8, 8)
    assert torch.equal(torch.jit.load(file)(x), net(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("options", [{"name": "lbq"}, {"name": "plif"}], ids=str)
def test_a_neuron_in_onnx(options: dict[str, Any], tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    neuron, x = create(**options).eval(), torch.randn(3, 2, 50)
    torch.onnx.export(neuron, (x,), tmp_path / "neuron.onnx", dynamo=False, input_names=["x"])
    session = runtime.InferenceSession(tmp_path / "neuron.onnx", providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), neuron(x), rtol=1e-6, atol=0)
