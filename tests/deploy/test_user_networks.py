"""Networks of a user's own: deployed as PyTorch runs them, or refused by name; arguments that a file could not hold."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

import lbq.engine
from lbq.deploy import absorb, deploy, fold_gain, graph_of, lower
from lbq.deploy.lowering.faithful import exact_copy
from lbq.errors import GraphError
from lbq.measuring.measure import measure
from lbq.models import create, over_time
from lbq.neuron import BurstNeuron
from lbq.neuron.recorder import record_levels
from tests.support import small_runs
from tests.support.own_nets import SHAPE, Forward, Own, close, logits_close, made, plain, rest
from tests.support.small_nets import pixels, same, small

# What a layer computes --------------------------------------------------------------------------------------------------


class Scaled(BurstNeuron):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(3 * x, *args, **kwargs)


class Clipped(BurstNeuron):
    def check_input(self, x: Tensor) -> Tensor:
        return super().check_input(x).clamp(max=0.5)


class Leakier(BurstNeuron):
    def _constants(self, x: Tensor) -> Any:
        return super()._constants(x)._replace(leak=0.1)


class Standardised(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)


@pytest.mark.parametrize(
    ("name", "module", "method"),
    [
        ("sn", Scaled(step=0.3), "forward"),
        ("sn2", Clipped(step=0.2), "check_input"),
        ("sn2", Leakier(step=0.2), "_constants"),
        ("conv2", Standardised(4, 4, 3, padding=1), "_conv_forward"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_layers_that_compute_something_else_are_refused(name: str, module: nn.Module, method: str) -> None:
    message = (
        f"^layer {name!r}: {type(module).__name__} has a {method} of its own, .* use the layer that it derives from"
    )
    with pytest.raises(GraphError, match=message):
        made(Own(plain, 3, **{name: module}))


def test_a_forward_put_on_a_layer_is_refused() -> None:
    net = Own()
    net.sn.forward = nn.Identity().forward  # type: ignore[method-assign, assignment]
    with pytest.raises(GraphError, match="^layer 'sn': BurstNeuron has a forward of its own"):
        made(net)


def test_classes_that_only_add_attributes_deploy() -> None:
    class Named(BurstNeuron):
        def __init__(self) -> None:
            super().__init__(step=0.3)
            self.label = "first"

    class Conv3x3(nn.Conv2d):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs, 3, padding=1)

    class Head(nn.Linear):
        classes = 5

    net = Own(sn=Named(), conv=Conv3x3(1, 4), fc=Head(4, 5))
    assert same(made(net).run(pixels(4, *SHAPE)), made(Own()).run(pixels(4, *SHAPE)))


def test_an_identity_with_a_forward_of_its_own_is_looked_into() -> None:
    class Inside(nn.Identity):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input: Tensor) -> Tensor:
            out: Tensor = self.inner(input)
            return out

    net = Own()
    net.conv2 = Inside(net.conv2)  # type: ignore[assignment]
    close(net, made(net))


@pytest.mark.parametrize("name", ["sn", "conv", "bn2", "fc", ""])
@pytest.mark.parametrize("kind", ["hook", "pre-hook"])
def test_hooks_are_refused(name: str, kind: str) -> None:
    net = Own()
    module = net.get_submodule(name)
    if kind == "hook":
        handle = module.register_forward_hook(lambda m, inputs, out: 2 * out)
    else:
        handle = module.register_forward_pre_hook(lambda m, inputs: (2 * inputs[0],))
    where = f"layer {name!r}" if name else r"the network \(Own\)"
    with pytest.raises(GraphError, match=rf"^{where} has a forward {kind} \(.*<lambda>\), .*: remove it first$"):
        made(net)
    handle.remove()
    close(net, made(net))


def _asks(condition: Callable[[Tensor], bool]) -> Forward:
    """A sum that the network makes of real tensors alone, or of torch.fx's alone."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.sn(over_time(x, m.conv, m.bn, timesteps=m.timesteps))
        return rest(m, y + y if condition(y) else y)

    return forward


@pytest.mark.parametrize(
    "condition",
    [lambda y: isinstance(y, Tensor), torch.is_tensor, lambda y: hasattr(y, "levels"), lambda y: type(y) is Tensor],
)
def test_a_forward_that_asks_what_a_tensor_is_is_refused(condition: Callable[[Tensor], bool]) -> None:
    with pytest.raises(GraphError, match="^layer 'sn2': Own computes something else than its trace by torch.fx says"):
        made(Own(_asks(condition)))


def test_hooks_on_all_modules_that_change_something_are_refused() -> None:
    def doubled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return output * 2 if isinstance(module, nn.Linear) else None

    with (
        register_module_forward_hook(doubled),  # type: ignore[arg-type]
        pytest.raises(GraphError, match="^its logits: Own computes something else"),
    ):
        made(Own())


def test_a_network_that_does_not_run_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = over_time(x, m.conv, m.bn, timesteps=m.timesteps)
        y += y  # the timesteps of an image are one memory, which PyTorch does not add to
        return rest(m, m.sn(y))

    with pytest.raises(
        GraphError, match=r"^Own does not run on inputs \[2, 1, 8, 8\]: unsupported operation: more than one"
    ):
        made(Own(forward))


def test_neurons_may_be_called_by_the_name_of_their_input() -> None:
    net = Own(lambda m, x: rest(m, m.sn(x=over_time(x, m.conv, m.bn, timesteps=3))))
    close(net, made(net))


def test_the_graph_of_a_network_is_refused_as_its_deployment_is() -> None:
    net = Own()
    graph, made_of = graph_of(net, SHAPE), absorb(fold_gain(lower(exact_copy(net), SHAPE)))
    for a, b in zip(graph.all_layers, made_of.all_layers, strict=True):
        assert all(np.array_equal(s.weight, t.weight) for s, t in zip(a.synapses, b.synapses, strict=True))
    with pytest.raises(GraphError, match="^layer 'sn2': Own computes something else than its trace by torch.fx says"):
        graph_of(Own(_asks(torch.is_tensor)), SHAPE)
    net.conv2.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(GraphError, match="^layer 'conv2' has a forward hook"):
        graph_of(net, SHAPE)


def test_event_frames_are_confirmed_as_they_are() -> None:
    net = Own(lambda m, x: rest(m, m.sn(over_time(x, m.conv, m.bn))))
    deploy(net, SHAPE, static=False)
    graph_of(net, SHAPE, static=False)
    other = Own(lambda m, x: rest(m, m.sn(over_time(x, m.conv, m.bn) if hasattr(x, "other") else over_time(x, m.conv))))
    with pytest.raises(GraphError, match="^layer 'sn': Own computes something else"):
        deploy(other, SHAPE, static=False)


def test_lowering_and_measuring_do_not_mind_hooks_that_look_on() -> None:
    net = small("resnet8w2", shape=SHAPE).float()
    graph = lower(net, SHAPE)
    net.get_submodule("sn1").register_forward_hook(lambda m, inputs, out: None)
    with record_levels(net):
        assert [layer.shape for layer in lower(net, SHAPE).layers] == [layer.shape for layer in graph.layers]
    assert measure(net, small_runs.trainer(small_runs.config()).source, limit=4).images == 4


@pytest.mark.filterwarnings("ignore::FutureWarning")  # old utilities of PyTorch say that they are old
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("apply", "remove"),
    [
        (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
        (
            lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
            lambda layer: prune.remove(layer, "weight"),
        ),
    ],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_old_reparametrisations_are_refused_with_what_ends_them(apply: Any, remove: Any) -> None:
    net = Own()
    apply(net.conv2)
    net(torch.zeros(1, *SHAPE))
    with pytest.raises(
        GraphError, match=r"^layer 'conv2' has a forward pre-hook .*ordinary .*by torch.nn.utils.*remove"
    ):
        made(net)
    remove(net.conv2)
    close(net, made(net))


@pytest.mark.parametrize("apply", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrised_weights_are_the_computed_ones(apply: Any) -> None:
    net = Own().train()
    apply(net.conv2)
    net(torch.randn(2, *SHAPE))
    with torch.no_grad():
        for parameter in net.conv2.parameters():
            parameter.mul_(1.7)
    close(net.eval(), made(net))


def test_a_network_in_training_mode_deploys_as_in_evaluation() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return plain(m, x + x if m.training else x)

    net = Own(forward)
    assert same(made(net.train()).run(pixels(2, *SHAPE)), made(net.eval()).run(pixels(2, *SHAPE)))
    assert net.train().training


# Wrappers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [torch.compile, nn.DataParallel, AveragedModel, lambda n: AveragedModel(nn.DataParallel(n))]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch.compile itself
def test_networks_are_taken_out_of_their_wrappers(wrap: Any) -> None:
    assert same(made(wrap(Own())).run(pixels(2, *SHAPE)), made(Own()).run(pixels(2, *SHAPE)))


def test_networks_are_taken_out_of_distributed_training(tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Own())
        assert same(made(wrapped).run(pixels(2, *SHAPE)), made(Own()).run(pixels(2, *SHAPE)))
    finally:
        dist.destroy_process_group()


def test_wrappers_inside_and_hooks_on_them_are_refused() -> None:
    net = Own()
    net.conv2 = nn.DataParallel(net.conv2)  # type: ignore[assignment]
    with pytest.raises(GraphError, match="^layer 'conv2' is wrapped in DataParallel: put what is inside in its place"):
        made(net)
    wrapped = nn.DataParallel(Own())
    wrapped.register_forward_hook(lambda m, inputs, out: 2 * out)
    with pytest.raises(GraphError, match=r"^the network \(DataParallel\) has a forward hook"):
        made(wrapped)


def test_networks_without_a_sequence_or_without_neurons_are_refused_with_a_remedy() -> None:
    def stepwise(m: Any, x: Tensor) -> Tensor:
        levels, _ = m.sn.forward_step(m.conv(x), None)
        return m.fc(m.pool(levels).flatten(1))

    message = "^Own cannot be traced by torch.fx: forward_step, forward_chunk and levels cannot be deployed"
    with pytest.raises(GraphError, match=message):
        made(Own(stepwise))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(GraphError, match=r"no spiking neurons: .* with lbq\.convert\.convert"):
        deploy(plain, (1, 2, 2), scale=255, timesteps=1)


def test_a_network_without_weights_is_refused() -> None:
    with torch.device("meta"):
        net = Own()
    with pytest.raises(GraphError, match="^the network is on the meta device and has no weights"):
        made(net)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_refused() -> None:
    net = Own()
    net.conv2 = torch.jit.script(net.conv2)  # type: ignore[assignment]
    with pytest.raises(
        GraphError, match="^layer 'conv2' is TorchScript, which cannot be traced: put what it was made of"
    ):
        made(net)
    with pytest.raises(GraphError, match="^the network is TorchScript"):
        made(torch.jit.script(nn.Conv2d(1, 4, 3)))


def test_what_cannot_be_copied_traced_or_is_no_network() -> None:
    net = Own()
    net.kept = net.fc.weight * 2
    close(net, made(net))  # what it keeps of a pass is no obstacle
    net.kept = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(GraphError, match="^Own cannot be copied: cannot pickle '_thread.lock' object"):
        made(net)
    with pytest.raises(GraphError, match="^net must be a torch.nn.Module, got function"):
        exact_copy(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="^OptimizedModule cannot be traced by torch.fx: Module .OptimizedModule."):
        lower(cast(nn.Module, torch.compile(Own())), SHAPE, 3)
    with pytest.raises(GraphError, match="^Own cannot be traced by torch.fx: 'Own' object has no attribute 'conv9'"):
        made(Own(lambda m, x: m.conv9(x)))


# Arguments --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": ["cat", "dog"]}, "^classes must be 5 names, one for each output, or none, got 2"),
        ({"classes": list(range(5))}, r"^classes must be names, got \[0, 1, 2\]"),
        ({"classes": "abcde"}, "^classes must be 5 names, one for each output, or none, got 1"),
        ({"scale": 255.0}, "^scale must be a whole number from 1 to 255, .*, got 255.0"),
        ({"scale": 256}, "^scale must be .*, got 256"),
        ({"scale": True}, "^scale must be .*, got True"),
        ({"examples": pixels(1, 8, 8)}, r"^examples must be uint8 \[B, 1, 8, 8\], got uint8 \[1, 8, 8\]"),
        ({"examples": np.zeros((2, 1, 8, 8))}, r"^examples must be uint8 \[B, 1, 8, 8\], got float64"),
        ({"examples": pixels(0, 1, 8, 8)}, "^examples must be"),
        ({"examples": np.uint8(3)}, "^examples must be"),
        ({"mean": 0.5}, "^mean must be a list of 1 finite numbers, one for each channel, got 0.5"),
        ({"mean": [float("nan")]}, "^mean must be .*got .nan.$"),
        ({"mean": ["a"]}, "^mean must be a list"),
        ({"mean": [0.5] * 3}, "^mean must be a list of 1 finite"),
        ({"mean": [80.0]}, r"^mean is of pixel / scale, at most 1, got \[80.0\] with scale=255: where .* divide both"),
        ({"mean": [9.0], "scale": 16}, "^mean is of pixel / scale, .* with scale=16: where"),
        ({"std": [16.0], "scale": 16}, r"^std is of pixel / scale, .*got \[16.0\] with scale=16: where"),
        ({"std": [4.5], "mean": [0.5]}, "^std is of pixel / scale, .*where so small inputs are meant, scale the first"),
        ({"std": [float("inf")]}, "^std must be a list"),
        ({"std": [0.0]}, "^std must be positive"),
        ({"timesteps": "3"}, "^timesteps must be a whole number of at least 1, got '3'"),
        ({"timesteps": True}, "^timesteps must be a whole number of at least 1, got True"),
        ({"timesteps": 0}, "^timesteps must be"),
        ({"timesteps": 2**31}, "^timesteps must be at most 4096, got 2147483648"),
        ({"facts": {"a": float("nan")}}, "^facts must be JSON values"),
        ({"facts": {"a": np.float32(1)}}, "^facts must be JSON values"),
        ({"input_shape": torch.zeros(2, 1, 1, 1)}, r"^input_shape must be .*, got an array of shape .2, 1, 1, 1.$"),
        (
            {"input_shape": 8},
            "^input_shape must be .channels, height, width., .channels, length. or .features,., got 8",
        ),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(GraphError, match=message):
            deploy(Own(), **{"input_shape": SHAPE, "mean": [0.5], **options})


def test_what_deploys_can_be_saved_and_loaded(tmp_path: Path) -> None:
    network = made(
        Own(), classes=list("abcde"), scale=16, examples=pixels(12, *SHAPE) // 16, facts={"by": "me", "n": [1, None]}
    )
    lbq.engine.save(tmp_path / "a.lbq", network)
    loaded = lbq.engine.load(tmp_path / "a.lbq")
    assert loaded.network.classes == tuple("abcde")
    assert (loaded.network.input_max, loaded.verify()) == (16, 8)


@pytest.mark.parametrize(
    ("neuron", "conv"), [("input", "conv"), ("exit", "conv"), ("readout", "conv"), ("sn", "input"), ("sn", "a/b")]
)
def test_names_that_a_file_cannot_hold_are_refused(neuron: str, conv: str) -> None:
    net = Own(lambda m, x: rest(m, m.get_submodule(neuron)(over_time(x, m.get_submodule(conv), timesteps=3))))
    net.add_module(neuron, net.sn)
    net.add_module(conv, net.conv)
    if neuron != "sn":
        del net.sn
    if conv != "conv":
        del net.conv
    with pytest.raises(GraphError, match=f"^layer {neuron if neuron != 'sn' else conv!r}: .* name"):
        made(net)


def test_too_many_timesteps_for_a_file_are_refused() -> None:
    with pytest.raises(GraphError, match="^timesteps must be at most 4096, got 5000"):
        made(Own(timesteps=5000))


def test_std_or_scale_alone_is_honoured() -> None:
    x, net = pixels(4, *SHAPE) % 101, Own()
    for options, values in (
        ({"std": [0.5]}, x / 255 / 0.5),
        ({"scale": np.int64(100)}, x / 100),
        ({"mean": [0.2]}, x / 255 - 0.2),
    ):
        logits_close(net, deploy(net, SHAPE, bits=16, **options), x, values)
    with pytest.raises(GraphError, match=r"^say how images were normalised, \(pixel / scale - mean\) / std: scale=255"):
        deploy(net, SHAPE)


def test_a_neuron_of_ones_own_is_named() -> None:
    """Where its forward holds what has no integer form, the network's own may look like all others."""

    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x[t] for t in range(x.shape[0])])

    with pytest.raises(
        GraphError, match="^getitem_1 in the forward of layer 'sn1', a Loop: operation 'getitem' has no int"
    ):
        lower(create("resnet8w2", neuron=Loop), (3, 8, 8))
