"""Networks of a user's own: deployed as PyTorch runs them, or refused by name; arguments that a file could not hold."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel

import lbq.engine
from lbq.deploy import deploy, lower
from lbq.deploy.faithful import exact_copy
from lbq.engine import Network
from lbq.errors import GraphError
from lbq.measure import measure
from lbq.models import fold_time, over_time, unfold_time
from lbq.neuron import BurstNeuron
from lbq.neuron.record import record_levels
from tests import small_runs
from tests.small_nets import pixels, same, small

SHAPE = (1, 8, 8)
Forward = Callable[[Any, Tensor], Tensor]


def rest(m: Any, x: Tensor) -> Tensor:
    """From `[T, B, C, H, W]` before the second convolution to logits."""
    x = m.sn2(over_time(x, m.conv2, m.bn2))
    return over_time(over_time(x, m.pool).flatten(2), m.fc, spatial=1).mean(0)


def plain(m: Any, x: Tensor) -> Tensor:
    return rest(m, m.sn(over_time(x, m.conv, m.bn, timesteps=m.timesteps)))


class Own(nn.Module):
    """Two convolutions and a linear layer; `replaced` are other modules under some of their names."""

    def __init__(self, function: Forward = plain, timesteps: int = 3, **replaced: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.timesteps = function, timesteps
        self.conv, self.bn, self.sn = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), BurstNeuron(step=0.3)
        self.conv2, self.bn2, self.sn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), BurstNeuron(step=0.2)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 5)
        with torch.no_grad():
            for norm in (self.bn, self.bn2):
                norm.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr]
                norm.running_var.uniform_(0.1, 0.3)  # type: ignore[union-attr]
        for name, module in replaced.items():
            module.load_state_dict(self.get_submodule(name).state_dict())
            self.add_module(name, module)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def made(net: nn.Module, **options: Any) -> Network:
    return deploy(net, SHAPE, **{"mean": [0.5], "std": [0.25], "bits": 16, **options})


def close(net: nn.Module, network: Network, x: np.ndarray[Any, Any] | None = None) -> None:
    """Logits on integers, 16-bit weights, near PyTorch's in float64; other networks here differ by far more."""
    x = pixels(4, *SHAPE) if x is None else x
    with torch.no_grad():
        logits = net.double()((torch.from_numpy(x).double() / 255 - 0.5) / 0.25).numpy()
    found = network.run(x)
    np.testing.assert_allclose(found.logits * found.scale, logits, atol=0.02 * np.ptp(logits))


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


class Doubled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Standardised(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class Halved(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


class Positive(nn.AdaptiveAvgPool2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize(
    ("name", "module", "method"),
    [
        ("sn", Scaled(step=0.3), "forward"),
        ("sn2", Clipped(step=0.2), "check_input"),
        ("sn2", Leakier(step=0.2), "_constants"),
        ("bn", Doubled(4), "forward"),
        ("conv2", Standardised(4, 4, 3, padding=1), "_conv_forward"),
        ("fc", Halved(4, 5), "forward"),
        ("pool", Positive(1), "forward"),
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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_cannot_be_copied_traced_or_is_no_network() -> None:
    net = Own()
    net.kept = net.fc.weight * 2
    with pytest.raises(GraphError, match="^Own cannot be copied: Only Tensors created explicitly"):
        made(net)
    with pytest.raises(GraphError, match="^net must be a torch.nn.Module, got function"):
        exact_copy(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="^OptimizedModule cannot be traced by torch.fx: Module .OptimizedModule."):
        lower(cast(nn.Module, torch.compile(Own())), SHAPE, 3)
    with pytest.raises(GraphError, match="^Own cannot be traced by torch.fx: 'Own' object has no attribute 'conv9'"):
        made(Own(lambda m, x: m.conv9(x)))


# How time comes in ------------------------------------------------------------------------------------------------------


def folded(m: Any, x: Tensor) -> Tensor:
    """From `[T, B, C, H, W]`, the first convolution at every timestep."""
    return rest(m, m.sn(over_time(x, m.conv, m.bn)))


def current(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.bn(m.conv(x))
    return out


def by_hand(m: Any, x: Tensor) -> Tensor:
    steps, batch = x.shape[:2]
    return rest(m, m.sn(m.bn(m.conv(x.flatten(0, 1))).unflatten(0, (steps, batch))))


def by_views(m: Any, x: Tensor, whole: bool) -> Tensor:
    """As in by_hand, by view and reshape throughout; sizes given or left to PyTorch."""
    steps, batch, channels, height, width = x.shape
    x = current(m, x.reshape(steps * batch if whole else -1, channels, height, width))
    x = m.sn(x.view(steps, batch if whole else -1, 4, height, width))
    x = m.bn2(m.conv2(torch.reshape(x, (-1, 4, x.size(3), 8))))
    x = m.sn2(x.view(steps, x.shape[0] // steps, *([4, 8, 8] if whole else [-1, 8, 8])))
    x = m.pool(x.view(-1, 4, 8, 8)).view(steps, batch, 4 if whole else -1)
    return m.fc(x.view(-1, x.shape[-1])).view(steps, -1, 5).mean(0)


WAYS: dict[str, Forward] = {
    "unsqueeze_expand": lambda m, x: folded(m, x.unsqueeze(0).expand(3, -1, -1, -1, -1)),
    "unsqueeze_expand_sizes": lambda m, x: folded(m, torch.unsqueeze(x, 0).expand((3, x.shape[0], 1, x.size(2), 8))),
    "unsqueeze_expand_shape": lambda m, x: folded(m, x.unsqueeze(0).expand(3, *x.shape)),
    "expand": lambda m, x: folded(m, x.expand(m.timesteps, *x.shape)),
    "stack": lambda m, x: folded(m, torch.stack([x] * m.timesteps)),
    "stack_dim": lambda m, x: folded(m, torch.stack([x for _ in range(3)], dim=0)),
    "repeat": lambda m, x: folded(m, x[None].repeat(3, 1, 1, 1, 1)),
    "repeat_only": lambda m, x: folded(m, x.repeat(3, 1, 1, 1, 1)),
    "unsqueeze_repeat": lambda m, x: folded(m, x[None, ...].repeat((3, 1, 1, 1, 1))),
    "dimensions_asked": lambda m, x: folded(m, torch.stack([x] * 3) if x.dim() == 4 else x),
    "current_stack": lambda m, x: rest(m, m.sn(torch.stack([current(m, x)] * 3))),
    "current_expand": lambda m, x: rest(m, m.sn(current(m, x)[None].expand(3, -1, 4, -1, -1))),
    "one_folded": lambda m, x: rest(m, m.sn(over_time(x[None], m.conv, m.bn).expand(3, -1, -1, -1, -1))),
    "halves": lambda m, x: rest(m, m.sn(unfold_time(current(m, fold_time(x)), x, 3))),
    "by_hand": lambda m, x: by_hand(m, torch.stack([x] * 3)),
    "by_views": lambda m, x: by_views(m, x.expand(3, *x.shape), False),
    "by_views_with_sizes": lambda m, x: by_views(m, x.expand(3, *x.shape), True),
    "sizes_by_name": lambda m, x: folded(m, x.expand(3, x.size(dim=0), x.size(dim=1), 8, 8)),
    "image_by_views": lambda m, x: folded(m, torch.stack([x.view(x.size(0), -1).view(-1, 1, 8, 8)] * 3)),
    "one_by_views": lambda m, x: rest(m, m.sn(torch.stack([current(m, x[None].view(x.shape))] * 3))),
    "linear_without_fold": lambda m, x: m.fc(
        over_time(m.sn2(over_time(m.sn(over_time(x, m.conv, m.bn, timesteps=3)), m.conv2, m.bn2)), m.pool).flatten(2)
    ).mean(0),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_show_an_image_is_over_times(way: str) -> None:
    """The same network as with over_time(..., timesteps=3), in PyTorch and on integers, and so in counts."""
    x, net = pixels(4, *SHAPE), Own(WAYS[way])
    with torch.no_grad():
        values = torch.randn(4, *SHAPE)
        torch.testing.assert_close(net(values), Own()(values))
    expected, found = made(Own()), made(net)
    assert found.network.timesteps == 3
    assert found.network.static
    a, b = (n.run(x, "bitplane", trace=True) for n in (expected, found))
    assert same(a, b)
    assert a.counts == b.counts


def test_one_timestep_needs_a_dimension_only() -> None:
    one = made(Own(lambda m, x: folded(m, x[None]), timesteps=1))
    assert same(one.run(pixels(2, *SHAPE)), made(Own(timesteps=1)).run(pixels(2, *SHAPE)))


def test_a_static_current_is_added_at_every_timestep() -> None:
    """[B, ...] + [T, B, ...], as PyTorch broadcasts it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = over_time(m.sn(over_time(x, m.conv, m.bn, timesteps=3)), m.conv2, m.bn2)
        out = m.sn2(hidden + m.skip(x))
        return over_time(over_time(out, m.pool).flatten(2), m.fc, spatial=1).mean(0)

    net = Own(forward)
    net.skip = nn.Conv2d(1, 4, 1)
    close(net, made(net))


def before_and_behind(m: Any, x: Tensor) -> Tensor:
    """As in residual networks whose blocks begin with an activation: a current is rectified, and added further on."""
    y = over_time(x, m.conv, m.bn, timesteps=3)
    z = m.sn2(over_time(m.sn(y), m.conv2, m.bn2) + y)
    return over_time(over_time(z, m.pool).flatten(2), m.fc, spatial=1).mean(0)


def twice_into_one(m: Any, x: Tensor) -> Tensor:
    y = over_time(m.sn(over_time(x, m.conv, timesteps=3)), m.conv2)
    z = m.sn2(over_time(y, m.bn) + over_time(y, m.bn2))
    return m.fc(over_time(z, m.pool).flatten(start_dim=2)).mean(0)


@pytest.mark.parametrize("function", [before_and_behind, twice_into_one])
def test_a_current_may_be_read_twice(function: Forward, tmp_path: Path) -> None:
    """Each reader has a synapse of its own: their units differ."""
    net = Own(function)
    network = made(net)
    names = [synapse.name for layer in network.network.layers for synapse in layer.synapses]
    assert len(set(names)) == len(names) == 3
    graph = lower(net, SHAPE)
    first, second = graph.layers
    one_name = dataclasses.replace(second, synapses=tuple(dataclasses.replace(s, name="conv") for s in second.synapses))
    with pytest.raises(GraphError, match="synapse 'conv' stands in the network twice"):
        dataclasses.replace(graph, layers=(first, one_name))
    lbq.engine.save(tmp_path / "net.lbq", network)
    loaded = lbq.engine.load(tmp_path / "net.lbq")
    x = pixels(4, *SHAPE)
    assert same(network.run(x, "dense", trace=True), loaded.run(x, "bitplane", trace=True))
    close(net, loaded, x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: folded(m, torch.stack([x] * 4)), "the network runs 4 timesteps, not 3"),
        (lambda m, x: folded(m, x.expand(4, *x.shape)), "the network runs 4 timesteps, not 3"),
        (lambda m, x: folded(m, torch.stack([x] * 3, dim=1)), "only the same image, stacked in front"),
        (lambda m, x: folded(m, torch.stack([x, x.clone(), x])), "'clone' has no integer form"),
        (
            lambda m, x: rest(m, m.sn(torch.stack([y := m.conv(x), m.bn(y), y]))),
            "only the same image, stacked in front",
        ),
        (lambda m, x: folded(m, x[None].repeat(3, 2, 1, 1, 1)), "repeat is supported only to show an image"),
        (lambda m, x: folded(m, x[None].expand(3, 2, 1, 8, 8)), "expand is supported only to show an image"),
        (lambda m, x: folded(m, x[None].expand(3, -1, 4, -1, -1)), "expand is supported only to show an image"),
        (lambda m, x: folded(m, x[None].expand(3, -1)), "expand is supported only to show an image"),
        (lambda m, x: folded(m, torch.stack([torch.stack([x] * 3)] * 3)), "only an image without time in front"),
        (lambda m, x: folded(m, x.unsqueeze(1)), "'unsqueeze' has no integer form"),
        (lambda m, x: folded(m, x[0]), "'getitem' has no integer form"),
        (lambda m, x: folded(m, x.expand(3, *current(m, x).shape)), "cannot be traced by torch.fx: Proxy object cannot"),
        (lambda m, x: by_hand(m, x.expand(x.shape[4], *x.shape)), "cannot be traced by torch.fx: tuple index out of range"),
        (lambda m, x: folded(m, x.expand(current(m, x).shape[4], *x.shape)), "has no such dimension"),
        (lambda m, x: rest(m, m.sn(current(m, x))), "layer 'sn': a neuron needs time in front"),
        (lambda m, x: rest(m, m.sn(current(m, fold_time(torch.stack([x] * 3))))), "layer 'sn': a neuron needs time"),
        (lambda m, x: rest(m, m.sn(current(m, torch.stack([x] * 3)))), "layer 'conv': Conv2d knows no .*over_time"),
        (lambda m, x: rest(m, m.sn(unfold_time(current(m, x), torch.stack([x] * 3)))), "from fold_time of the same"),
        (lambda m, x: rest(m, m.sn(torch.stack([x] * 3).flatten(1))), "flatten all of channels"),
        *(
            (lambda m, x, sizes=sizes: folded(m, torch.stack([x] * 3).view(*sizes(x))), "it may join or split time and batch")
            for sizes in (
                lambda x: (x.shape[0], 3, 1, 8, 8),
                lambda x: (-1, 3, 1, 8, 8),
                lambda x: (3, -1, 1, 4, 16),
                lambda x: (3, -1, -1, 8, 8),
                lambda x: (3, 4, 1, 8, 8),
                lambda x: (3, x.shape[0] * 8, 8),
                lambda x: (0, -1),
                lambda x: (torch.float32,),
                lambda x: (x,),
            )
        ),
        (lambda m, x: folded(m, x * 3), "'mul' has no integer form"),
        (lambda m, x: rest(m, m.sn(m.bn(m.conv(x.expand(3, *x.shape).flatten(0, 1))).unflatten(0, (2, -1)))), "join or split"),
        (lambda m, x: m.fc(m.pool(current(m, x).relu()).flatten(1)).mean(0), "there is no time in front"),
        (lambda m, x: m.fc(m.sn(over_time(x, m.conv, timesteps=3)).mean(0)), "average its logits"),
        (lambda m, x: plain(m, x).mean(0, keepdim=True), "but as the mean over time, mean.0."),
        (lambda m, x: plain(m, x).mean(), "but as the mean over time, mean.0."),
        (
            lambda m, x: rest(m, m.sn(over_time(x, m.conv, timesteps=3) + current(m, fold_time(torch.stack([x] * 3))))),
            "'conv' is used twice",
        ),
    ],
)  # fmt: skip
def test_time_that_is_not_where_it_should_be_is_refused(function: Forward, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        made(Own(function))


def test_folded_and_unfolded_currents_do_not_add() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        levels = m.sn(over_time(x, m.conv, m.bn, timesteps=3))
        return rest(m, over_time(levels, m.conv2) + m.bn2(fold_time(levels)))

    with pytest.raises(GraphError, match="one of its operands has time in front, the other has it folded"):
        made(Own(forward))


def test_event_frames_have_their_time() -> None:
    net = Own(by_hand)
    network = deploy(net, SHAPE, static=False, bits=16)
    x = np.random.default_rng(0).integers(0, 4, (3, 2, *SHAPE), np.uint8)
    with torch.no_grad():
        logits = net.double()(torch.from_numpy(x).double()).numpy()
    found = network.run(x)
    np.testing.assert_allclose(found.logits * found.scale, logits, atol=0.02 * np.ptp(logits))
    with pytest.raises(GraphError, match="only an image without time in front"):
        deploy(Own(WAYS["stack"]), SHAPE, static=False)


def pooled(pool: Callable[[Tensor], Tensor]) -> Forward:
    """Two layers, then `pool` from [T * B, 4, 8, 8] to [T * B, 4], then logits."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.sn2(over_time(m.sn(over_time(x, m.conv, m.bn, timesteps=3)), m.conv2, m.bn2))
        return m.fc(pool(fold_time(x))).unflatten(0, (3, -1)).mean(0)

    return forward


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    "adaptive_named": lambda x: F.adaptive_avg_pool2d(input=x, output_size=(1, 1)).view(-1, 4),
    "mean": lambda x: x.mean((2, 3)),
    "mean_from_the_end": lambda x: torch.mean(x, dim=[-1, -2], keepdim=True).flatten(1),
    "average": lambda x: F.avg_pool2d(x, 8).flatten(1),
    "averages": lambda x: F.avg_pool2d(F.avg_pool2d(x, kernel_size=4, stride=4), 2).flatten(1),
    "dropout": lambda x: F.dropout2d(F.dropout(x, 0.5, False), training=False).mean((2, 3)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_the_layers_that_do_the_same(name: str) -> None:
    expected, found = made(Own()), made(Own(pooled(FUNCTIONS[name])))
    x = pixels(4, *SHAPE)
    a, b = (n.run(x, "bitplane", trace=True) for n in (expected, found))
    np.testing.assert_array_equal(a.predictions, b.predictions)
    assert a.levels is not None
    assert b.levels is not None
    assert all(np.array_equal(a.levels[layer], b.levels[layer]) for layer in a.levels)
    np.testing.assert_allclose(a.logits * a.scale, b.logits * b.scale, rtol=0.02)


@pytest.mark.parametrize("pool", [lambda x: F.max_pool2d(x, 2, padding=1), lambda x: torch.max_pool2d(x, 3, 2)])
def test_maximum_by_functions(pool: Callable[[Tensor], Tensor]) -> None:
    net = Own(pooled(lambda x: pool(x).mean((2, 3))))
    close(net, made(net))


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (lambda x: F.dropout(x).mean((2, 3)), "operation 'dropout' has no integer form here"),
        (lambda x: F.max_pool2d(x, 2, ceil_mode=True).mean((2, 3)), "ceil_mode and dilated pooling"),
        (lambda x: F.adaptive_avg_pool2d(x, 2).flatten(1), "adaptive pooling only to 1x1"),
        (lambda x: x.mean((1, 3)), "'mean' has no integer form here but as the mean over time"),
        (lambda x: x.mean((2, 3), dtype=torch.float64), "'mean' has no integer form here but as the mean over time"),
        (lambda x: F.lp_pool2d(x, 2, 8).flatten(1), "has no integer form here"),
    ],
)
def test_functions_without_integer_form(pool: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        made(Own(pooled(pool)))


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
        ({"std": [float("inf")]}, "^std must be a list"),
        ({"std": [0.0]}, "^std must be positive"),
        ({"timesteps": "3"}, "^timesteps must be a whole number of at least 1, got '3'"),
        ({"timesteps": 0}, "^timesteps must be"),
        ({"timesteps": 3.0}, "^timesteps must be"),
        ({"facts": {"a": float("nan")}}, "^facts must be JSON values"),
        ({"facts": {"a": np.float32(1)}}, "^facts must be JSON values"),
        ({"input_shape": 8}, "^input_shape must be .channels, height, width., got 8"),
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
        Own(), classes=list("abcde"), scale=16, examples=pixels(12, *SHAPE), facts={"by": "me", "n": [1, None]}
    )
    lbq.engine.save(tmp_path / "a.lbq", network)
    loaded = lbq.engine.load(tmp_path / "a.lbq")
    assert loaded.network.classes == tuple("abcde")
    assert (loaded.network.input_max, loaded.verify()) == (16, 8)


@pytest.mark.parametrize(("neuron", "conv"), [("input", "conv"), ("readout", "conv"), ("sn", "input"), ("sn", "a/b")])
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
    x, net = pixels(4, *SHAPE), Own()
    for options, values in (
        ({"std": [0.5]}, x / 255 / 0.5),
        ({"scale": 100}, x / 100),
        ({"mean": [0.2]}, x / 255 - 0.2),
    ):
        found = deploy(net, SHAPE, bits=16, **options).run(x)
        with torch.no_grad():
            logits = net.double()(torch.from_numpy(values)).numpy()
        np.testing.assert_allclose(found.logits * found.scale, logits, atol=0.02 * np.ptp(logits))
    assert not same(deploy(net, SHAPE).run(x), deploy(net, SHAPE, std=[0.01]).run(x))
