"""NIR graphs, read back from their files and executed as NIR defines them in steps of 1, spike as the trained networks do."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lbq import models
from lbq.deploy import absorb, fold_gain, lower, on_pixels
from lbq.deploy.float_execution import execute
from lbq.errors import GraphError, LbqError
from lbq.export.nir import nir_graph, write_nir
from lbq.graph import Graph, Synapse
from lbq.kernels.reference import Rule
from lbq.models import over_time
from lbq.neuron import ILIF, LIF, BurstNeuron, LadderNeuron
from lbq.neuron.recorder import record_levels
from tests.support.small_nets import Branches, Functional, mean_logits, normalised, pixels, small, warmed

nir = pytest.importorskip("nir", reason="the package nir is not installed: pip install nir")
h5py = pytest.importorskip("h5py", reason="h5py, which nir needs, is not installed: pip install nir")


class Reader:
    """A NIR graph in steps of dt = 1: forward Euler, spikes strictly above, inputs of a node added up."""

    def __init__(self, graph: Any, reset: str) -> None:
        self.graph, self.reset = graph, reset
        self.v: dict[str, Any] = {}
        self.before: dict[str, list[str]] = {name: [] for name in graph.nodes}
        for source, target in graph.edges:
            self.before[target].append(source)

    def step(self, x: np.ndarray[Any, Any]) -> dict[str, Any]:
        """What every node gives for `x` [B, ...] at this timestep."""
        out: dict[str, Any] = {}

        def value(name: str) -> Any:
            if name not in out:
                node = self.graph.nodes[name]
                inputs = [value(source) for source in self.before[name]]
                out[name] = x if isinstance(node, nir.Input) else self.apply(name, node, sum(inputs))
            return out[name]

        for name in self.graph.nodes:
            value(name)
        return out

    def apply(self, name: str, node: Any, x: Any) -> Any:
        if isinstance(node, nir.Output):
            return x
        if isinstance(node, nir.Affine):
            return x @ node.weight.T + node.bias
        if isinstance(node, nir.Scale):
            return x * node.scale
        if isinstance(node, nir.Flatten):
            return x.reshape(len(x), -1)
        if isinstance(node, nir.SumPool2d):
            kernel, stride, padding = (tuple(map(int, p)) for p in (node.kernel_size, node.stride, node.padding))
            return F.avg_pool2d(torch.from_numpy(x), kernel, stride, padding, divisor_override=1).numpy()
        if isinstance(node, nir.Conv2d):
            stride, padding, dilation = (tuple(map(int, p)) for p in (node.stride, node.padding, node.dilation))
            weight, bias = torch.from_numpy(node.weight), torch.from_numpy(node.bias)
            return F.conv2d(torch.from_numpy(x), weight, bias, stride, padding, dilation, int(node.groups)).numpy()
        v = self.v.get(name, np.zeros_like(x))
        if isinstance(node, nir.LIF):
            v = v + ((node.v_leak - v) + node.r * x) / node.tau
        else:
            assert isinstance(node, nir.IF)
            v = v + node.r * x
        spikes = v > node.v_threshold
        after = v - node.v_threshold if self.reset == "subtract" else node.v_reset + np.zeros_like(v)
        self.v[name] = np.where(spikes, after, v)
        return spikes.astype(x.dtype)


def lowered(net: nn.Module, shape: tuple[int, int, int], **options: Any) -> Graph:
    return absorb(fold_gain(lower(net, shape, **options)))


def read(path: Path, x: np.ndarray[Any, Any], graph: Graph, reset: str = "subtract") -> tuple[dict[str, Any], Any]:
    """By layer, spikes `[T, B, ...]` of a file's network; and the mean of its output. x as `execute` takes it."""
    reader = Reader(nir.read(path), reset)
    steps = [reader.step(x if graph.static else x[t]) for t in range(graph.timesteps)]
    spikes = {layer.name: np.stack([s[layer.name.replace(".", "_")] for s in steps]) for layer in graph.layers}
    return spikes, np.mean([s["output"] for s in steps], axis=0)


def check(graph: Graph, x: np.ndarray[Any, Any], path: Path, reset: Any = "subtract", **options: Any) -> None:
    write_nir(graph, path, reset, dtype=np.float64, **options)
    expected = execute(graph, x)
    assert not expected.ties.any()
    spikes, logits = read(path, x, graph, reset)
    for name, levels in expected.levels.items():
        found = spikes[name].reshape(levels.shape)
        np.testing.assert_array_equal(found, levels, err_msg=name)
    total = sum(int(levels.sum()) for levels in expected.levels.values())
    assert 0.02 < total / sum(levels.size for levels in expected.levels.values()) < 0.98
    np.testing.assert_allclose(logits, expected.logits, rtol=1e-9, atol=1e-9)


class Own(nn.Module):
    """Average pools, a grouped convolution, padded ones down to one place, a hidden linear layer, and shortcuts."""

    def __init__(self, neuron: Any, timesteps: int = 4) -> None:
        super().__init__()
        self.timesteps = timesteps
        self.conv, self.bn, self.sn = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), neuron()
        self.avg, self.conv1 = nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.bn1, self.sn1 = nn.BatchNorm2d(4), neuron()
        self.conv2, self.bn2 = nn.Conv2d(4, 6, 3, stride=3, padding=2, dilation=2), nn.BatchNorm2d(6)
        self.sn2 = neuron()
        self.conv3, self.bn3, self.sn3 = nn.Conv2d(6, 6, 3, padding=1, groups=3), nn.BatchNorm2d(6), neuron()
        self.fc1, self.bn4, self.sn4 = nn.Linear(6, 6), nn.BatchNorm1d(6), neuron()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.sn(over_time(x, self.conv, self.bn, timesteps=self.timesteps))
        b = over_time(a, self.avg)
        c = self.sn1(over_time(b, self.conv1, self.bn1) + b)
        d = self.sn2(over_time(c, self.conv2, self.bn2))
        e = self.sn3(over_time(d, self.conv3, self.bn3) + d)
        f = self.sn4(over_time(e.flatten(2), self.fc1, self.bn4, spatial=1))
        return over_time(f, self.fc, spatial=1).mean(0)


def own(neuron: Any, timesteps: int = 4) -> Graph:
    torch.manual_seed(0)
    return lowered(warmed(Own(neuron, timesteps), 2, 6, 6), (2, 6, 6))


def images(*shape: int) -> np.ndarray[Any, Any]:
    return normalised(pixels(*shape, seed=5)).numpy()


class Hard(LIF):
    """A binary neuron that fires at the threshold and whose membrane then becomes 0."""

    def __init__(self) -> None:
        super().__init__(beta=0.75)
        self.rule = Rule(1, self.surrogate, reset="hard")


def test_integrate_and_fire_is_exact(tmp_path: Path) -> None:
    """As written for readers that subtract; also against the trained network itself, in a residual network."""
    net = small("resnet8w2", "if", timesteps=4)
    graph, x = lowered(net, (3, 8, 8)), images(4, 3, 8, 8)
    check(graph, x, tmp_path / "net.nir")
    with torch.no_grad(), record_levels(net) as recorded:
        logits = net(torch.from_numpy(x))
    spikes, found = read(tmp_path / "net.nir", x, graph)
    np.testing.assert_allclose(found, logits.numpy(), rtol=1e-9, atol=1e-9)
    for name, levels in recorded.items():
        np.testing.assert_array_equal(spikes[name], levels, err_msg=name)
    check(own(lambda: LIF(membrane="if", threshold=0.5)), images(4, 2, 6, 6), tmp_path / "own.nir")


def test_leaky_neurons_are_exact_where_the_reset_is_the_decayed_threshold(tmp_path: Path) -> None:
    check(own(lambda: LIF(beta=0.5, alpha=0.5)), images(4, 2, 6, 6), tmp_path / "net.nir")


@pytest.mark.parametrize("neuron", [
    lambda: BurstNeuron(n_max=1, step=0.7, beta=0.6),
    lambda: BurstNeuron(n_max=1, step=0.5, membrane="plif"),
    lambda: BurstNeuron(n_max=1, channels=None, membrane="if"),
    lambda: LadderNeuron([0.4]),
], ids=["lif", "plif", "if", "ladder"])  # fmt: skip
def test_neurons_that_fire_at_the_threshold_need_leave(neuron: Any, tmp_path: Path) -> None:
    graph = own(neuron)
    with pytest.raises(GraphError, match="layer 'sn': it fires where U equals the threshold.*accept_ties=True"):
        nir_graph(graph, "subtract")
    check(graph, images(4, 2, 6, 6), tmp_path / "net.nir", accept_ties=True)


def test_hard_resets_for_readers_that_set_v_reset(tmp_path: Path) -> None:
    """Here firing at the threshold is exact, as firing above the number before it."""
    graph = own(Hard)
    check(graph, images(4, 2, 6, 6), tmp_path / "net.nir", "v_reset")
    node = nir_graph(graph, "v_reset", dtype=np.float32).nodes["sn"]
    assert (node.v_threshold < np.float32(1)).all()
    assert (np.nextafter(node.v_threshold, np.float32(2)) == 1).all()
    with pytest.raises(GraphError, match="layer 'sn': its reset sets the membrane to 0"):
        nir_graph(graph, "subtract")
    with pytest.raises(GraphError, match="layer 'sn1?': its reset subtracts from the membrane"):
        nir_graph(own(lambda: LIF(membrane="if")), "v_reset")


def test_one_timestep_depends_on_no_reset(tmp_path: Path) -> None:
    for reset in ("subtract", "v_reset"):
        check(own(LIF, timesteps=1), images(4, 2, 6, 6), tmp_path / "net.nir", reset)
    for neuron in (lambda: BurstNeuron(n_max=1, step=0.4), lambda: ILIF(n_max=1, step=0.8)):
        check(own(neuron, timesteps=1), images(4, 2, 6, 6), tmp_path / "net.nir", "subtract")


def test_two_shortcuts_into_one_layer_add_up(tmp_path: Path) -> None:
    graph = own(lambda: LIF(membrane="if"))
    conv, shortcut = graph["sn1"].synapses
    halves = replace(shortcut, weight=shortcut.weight / 2)
    twice = changed(graph, (conv, halves, replace(halves, name="another")))
    check(twice, images(4, 2, 6, 6), tmp_path / "net.nir")
    assert (
        len(nir_graph(twice, "subtract").nodes) == len(nir_graph(graph, "subtract").nodes) + 2
    )  # a shortcut and its pool


def test_events(tmp_path: Path) -> None:
    made = warmed(models.create("resnet8w2", neuron="if", in_channels=2, num_classes=3), 2, 4, 4, static=False)
    graph = lowered(made, (2, 4, 4), timesteps=3, static=False)
    x = np.random.default_rng(0).integers(0, 4, (3, 4, 2, 4, 4)) / 1.0
    check(graph, x, tmp_path / "net.nir")


def test_the_file_is_float32_and_says_how_it_is_meant(tmp_path: Path) -> None:
    graph = own(lambda: LIF(membrane="if"))
    size = write_nir(graph, tmp_path / "net.nir", "subtract")
    assert size == (tmp_path / "net.nir").stat().st_size
    found = nir.read(tmp_path / "net.nir")
    assert {type(node).__name__ for node in found.nodes.values()} == {
        "Input", "Conv2d", "IF", "SumPool2d", "Scale", "Flatten", "Affine", "Output",
    }  # fmt: skip
    assert found.nodes["sn"].v_threshold.dtype == found.nodes["sn:conv"].weight.dtype == np.float32
    with h5py.File(tmp_path / "net.nir") as file:
        said = {name: value[()] for name, value in file["node/metadata"].items()}
    assert (said["reset"], said["dt"], said["timesteps"]) == (b"subtract", 1, 4)


# What is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("neuron", "reason"), [
    ("lbq", "layer 'sn1': its bursts have up to 5 levels, .* use model.lbq, or ONNX or C made of it"),
    ("ilif", "layer 'sn1': its bursts have up to 4 levels"),
    ("ternary", "layer 'sn1': its spikes have a sign"),
    ("lif", "layer 'sn1': its reset comes after the leak.* use the neuron 'if', alpha = beta"),
    ({"name": "lif", "membrane": "if", "alpha": 0.7}, "layer 'sn1': its reset subtracts 0.7, .* fires above, 1: use alpha = 1"),
], ids=str)  # fmt: skip
def test_lossy_neurons_are_refused_by_name(neuron: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=reason):
        write_nir(lowered(small("resnet8w2", neuron), (3, 8, 8)), tmp_path / "net.nir", "subtract")
    assert not list(tmp_path.iterdir())


def with_layers(*layers: nn.Module) -> nn.Module:
    """A network with these layers between two neurons."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return mean_logits(m, m.sn2(over_time(m.sn1(over_time(x, m.conv1, timesteps=2)), m.layers)))

    modules = {"conv1": nn.Conv2d(2, 4, 3, padding=1), "layers": nn.Sequential(*layers)}
    neurons = {"sn1": LIF(membrane="if"), "sn2": LIF(membrane="if")}
    return Functional(forward, pool=nn.AdaptiveAvgPool2d(1), fc=nn.Linear(4, 3), **modules, **neurons)


def changed(graph: Graph, synapses: tuple[Synapse, ...]) -> Graph:
    """Other synapses into the second layer."""
    first, second, *rest = graph.layers
    return replace(graph, layers=(first, replace(second, synapses=synapses), *rest))


def test_layers_without_a_counterpart_are_refused_by_name() -> None:
    def refused(net: nn.Module, reason: str, size: int = 6) -> None:
        with pytest.raises(GraphError, match=reason):
            nir_graph(lowered(net.double().eval(), (2, size, size)), "subtract")

    refused(
        with_layers(nn.MaxPool2d(2), nn.Conv2d(4, 4, 3)), "layer 'sn2': NIR has no max-pooling: use average pooling"
    )
    refused(with_layers(nn.AvgPool2d(2), nn.Conv2d(4, 4, (1, 3))), "layer 'sn2': its kernel is 1 by 3")
    refused(with_layers(nn.Conv2d(4, 4, 1, padding=1)), "layer 'sn2': it reads 'sn1', which has one place only", size=1)
    graph = own(lambda: LIF(membrane="if"))
    with pytest.raises(GraphError, match="layer 'sn1': it has a bias but no convolution"):
        nir_graph(changed(graph, graph["sn1"].synapses[1:]), "subtract")
    with pytest.raises(GraphError, match="layer 'sn1': NIR has no such activation"):
        nir_graph(lower(small("resnet8w2", "relu", timesteps=1), (3, 8, 8)), "subtract")


def test_arguments_and_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = own(lambda: LIF(membrane="if"))
    with pytest.raises(LbqError, match="reset must be one of subtract, v_reset, got 'soft'"):
        nir_graph(graph, "soft")  # type: ignore[arg-type]
    made = lower(warmed(Branches(), 3, 6, 6), (3, 6, 6))
    with pytest.raises(GraphError, match=r"pass lbq.deploy.graph_of\(net, input_shape\)"):
        nir_graph(made, "subtract")
    with pytest.raises(GraphError, match=r"pass lbq.deploy.graph_of\(net, input_shape\)"):
        nir_graph(absorb(lower(warmed(Own(lambda: BurstNeuron(1, membrane="plif")), 2, 6, 6), (2, 6, 6))), "subtract")
    with pytest.raises(GraphError, match="before on_pixels"):
        nir_graph(on_pixels(graph, [0.5] * 2, [0.25] * 2, 255), "subtract")
    with pytest.raises(LbqError, match="it is a folder"):
        write_nir(graph, tmp_path, "subtract")
    monkeypatch.setitem(sys.modules, "nir", None)
    with pytest.raises(LbqError, match=r"needs the package nir: pip install nir"):
        nir_graph(graph, "subtract")
