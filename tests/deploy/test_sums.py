"""Layers that read sums of neurons' outputs (SEW networks), and currents that several neurons read (MS networks)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbq.engine
from lbq.counting.operations import count
from lbq.deploy import deploy, graph_of, lower
from lbq.engine.file import container
from lbq.errors import ArtefactError, GraphError
from lbq.models import over_time
from lbq.models.time import fold_time, unfold_time
from lbq.neuron import BurstNeuron
from tests.support.own_nets import logits_close
from tests.support.small_nets import Functional, compare, mean_logits, pixels, same

SHAPE = (3, 8, 8)


class Blocks(Functional):
    """A stem, two convolutions and a head; `join` says what the second convolution and the head read."""

    def __init__(self, join: Callable[[Any, Tensor], Tensor], **extra: nn.Module) -> None:
        super().__init__(join)
        torch.manual_seed(0)
        self.conv0, self.bn0, self.sn0 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), BurstNeuron(step=0.3)
        self.conv1, self.bn1, self.sn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), BurstNeuron(step=0.2)
        self.conv2, self.bn2, self.sn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), BurstNeuron(step=0.25)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 5)
        for name, module in extra.items():
            self.add_module(name, module)
        with torch.no_grad():
            for norm in (self.bn0, self.bn1, self.bn2):
                norm.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr]
                norm.running_var.uniform_(0.1, 0.3)  # type: ignore[union-attr]
        self.eval()

    def stem(self, x: Tensor) -> Tensor:
        return over_time(x, self.conv0, self.bn0, timesteps=self.timesteps)

    def head(self, x: Tensor) -> Tensor:
        return mean_logits(self, x)


def sew(m: Any, x: Tensor) -> Tensor:
    """Neurons' outputs are added, and sums of them are read."""
    x = m.sn0(m.stem(x))
    x = m.sn1(over_time(x, m.conv1, m.bn1)) + x
    x = m.sn2(over_time(x, m.conv2, m.bn2)) + x  # of three
    return m.head(x)


def sew_means(m: Any, x: Tensor) -> Tensor:
    x = m.sn0(m.stem(x))
    x = m.sn1(over_time(x, m.conv1, m.bn1)) + x
    return over_time(x.mean((3, 4)), m.fc, spatial=1).mean(0)


def sew_pooled(m: Any, x: Tensor) -> Tensor:
    x = m.sn0(m.stem(x))
    x = over_time(m.sn1(over_time(x, m.conv1, m.bn1)) + x, m.average)
    return m.head(m.sn2(over_time(x, m.conv2, m.bn2)))


def membrane_shortcut(m: Any, x: Tensor) -> Tensor:
    """Currents are added, and a neuron reads the sum."""
    x = m.stem(x)
    x = over_time(m.sn0(x), m.conv1, m.bn1) + x
    x = over_time(m.sn1(x), m.conv2, m.bn2) + x
    return m.head(m.sn2(x))


NETS = {
    "sew": Blocks(sew),
    "means": Blocks(sew_means),
    "pooled": Blocks(sew_pooled, average=nn.AvgPool2d(2)),
    "membranes": Blocks(membrane_shortcut),
}


@pytest.mark.parametrize("name", NETS)
def test_they_deploy_with_the_levels_of_training(name: str, tmp_path: Path) -> None:
    net = NETS[name].double()
    compare(net, lower(net, SHAPE), torch.randn(4, *SHAPE, dtype=torch.float64))
    network = deploy(net, SHAPE, mean=[0.5] * 3, std=[0.25] * 3, bits=16)
    x = pixels(6, *SHAPE)
    found = network.run(x, "bitplane", trace=True)
    assert same(found, network.run(x, "dense", trace=True))
    logits_close(net, network, x, (x / 255 - 0.5) / 0.25)
    lbq.engine.save(tmp_path / "net.lbq", network)
    loaded = lbq.engine.load(tmp_path / "net.lbq")
    assert loaded.verify() == 8
    assert [s.copy_of for s in loaded.network.synapses] == [s.copy_of for s in network.network.synapses]


@pytest.mark.parametrize(
    ("name", "synapses", "copies"),
    [
        ("sew", "conv0 conv1 conv2 conv2_2 fc fc_2 fc_3", {"conv2_2": "conv2", "fc_2": "fc", "fc_3": "fc"}),
        ("membranes", "conv0 conv1 conv0_2 conv2 conv1_2 conv0_3 fc",
         {"conv0_2": "conv0", "conv0_3": "conv0", "conv1_2": "conv1"}),
    ],
)  # fmt: skip
def test_what_is_run_several_times_counts_once_for_the_ann(name: str, synapses: str, copies: dict[str, str]) -> None:
    net = NETS[name].double()
    graph = lower(net, SHAPE)
    assert [s.name for s in graph.synapses if s.kind == "conv"] == synapses.split()
    assert {s.name: s.copy_of for s in graph.synapses if s.copy_of} == copies
    bare = lower(net, SHAPE, weights=False)
    assert [(s.name, s.copy_of) for s in bare.synapses] == [(s.name, s.copy_of) for s in graph.synapses]
    macs = 64 * 9 * (3 * 4 + 4 * 4 + 4 * 4) + 4 * 5  # by hand
    assert graph.macs == macs
    network = deploy(net, SHAPE, mean=[0.5] * 3, std=[0.25] * 3)
    out = network.run(pixels(2, *SHAPE), "bitplane", trace=True)
    for mode, expected in (("rate", macs), ("exact", graph.valid_macs)):
        account = count(network.network, out.levels, mode)  # type: ignore[arg-type]
        assert account.ann_macs == expected
    exact = count(network.network, out.levels)
    hidden_synapses = {s.name for s in network.network.synapses if s.source != "input"}
    added = sum(c.accumulations for name, c in out.counts.items() if name in hidden_synapses)
    hidden = sum(c.bit_sparse for c in (*exact.synapses.values(), *exact.shortcuts.values()))
    assert added == round(2 * hidden)  # each summand is really added, and counted
    with pytest.raises(GraphError, match="^there are no levels to count: run the network with trace=True"):
        count(network.network, network.run(pixels(2, *SHAPE)).levels)


def test_a_layer_may_have_the_name_of_a_copy() -> None:
    def join(m: Any, x: Tensor) -> Tensor:
        x = m.sn0(m.stem(x))
        x = m.sn1(over_time(x, m.conv1, m.bn1)) + x
        y = m.sn2(over_time(x, m.conv2, m.bn2))
        return m.head(m.sn3(over_time(y, m.conv2_2)))

    net = Blocks(join, conv2_2=nn.Conv2d(4, 4, 1), sn3=BurstNeuron())
    graph = lower(net, SHAPE)
    names = [(s.name, s.copy_of) for s in graph.synapses if s.name.startswith("conv2")]
    assert names == [("conv2", ""), ("conv2_2", "conv2"), ("conv2_2_2", "")]


def twice(m: Any, x: Tensor) -> Tensor:
    x = m.sn0(m.stem(x))
    return m.head(m.sn1(over_time(x + x, m.conv1, m.bn1)))


def summed(m: Any, x: Tensor) -> Tensor:
    x = m.sn0(m.stem(x))
    return m.head(sum([m.sn1(over_time(x, m.conv1, m.bn1)), x, x]))


def in_place(m: Any, x: Tensor) -> Tensor:
    x = m.sn0(m.stem(x))
    y = over_time(x, m.conv1, m.bn1)
    y += x
    return m.head(m.sn1(y))


def folded_in_place(m: Any, x: Tensor) -> Tensor:
    """The tensor before it is asked for its shape alone."""
    x = m.sn0(m.stem(x))
    y = over_time(x, m.conv1, m.bn1)
    folded = fold_time(y)
    folded += fold_time(x)
    folded += m.conv2(fold_time(x))
    return m.head(m.sn1(unfold_time(folded, y).view(y.shape[0], -1, 4, 8, 8)))


def copied(m: Any, x: Tensor) -> Tensor:
    """A copy is read again, and may be; where numbers lie does not matter, nor what holds them if it holds all."""
    x = m.sn0(m.stem(x.double()))
    y = over_time(x.to(torch.float64), m.conv1, m.bn1)
    kept = torch.clone(y)
    y += x.clone(memory_format=torch.preserve_format)
    y = y.contiguous(memory_format=torch.contiguous_format)
    return m.head(m.sn1(y.view(y.shape)) + m.sn2(kept.contiguous()))


def read_again(m: Any, x: Tensor) -> Tensor:
    x = m.sn0(m.stem(x))
    kept = x
    x += m.sn1(over_time(x, m.conv1, m.bn1))
    return m.head(m.sn2(over_time(kept, m.conv2, m.bn2)) + x)


def test_casts_to_float_are_the_same_numbers() -> None:
    """Though deployment runs the network in float64, where they would round."""

    def join(m: Any, x: Tensor) -> Tensor:
        x = m.sn0(m.stem(x.float()))
        y = over_time(x.to(torch.float32), m.conv1, m.bn1).to(dtype=torch.float32)
        return m.head(m.sn1(y + x).float())

    net = Blocks(join).double().eval()
    graph_of(net, SHAPE)  # which runs it beside what it read off its trace


@pytest.mark.parametrize("join", [twice, summed, in_place, folded_in_place, copied])
def test_other_ways_to_write_sums(join: Callable[[Any, Tensor], Tensor]) -> None:
    net = Blocks(join).double()
    compare(net, lower(net, SHAPE), torch.randn(4, *SHAPE, dtype=torch.float64))


def behind_a_view(show: Callable[[Any, Tensor], Tensor], reads_view: bool) -> Callable[[Any, Tensor], Tensor]:
    """A sum in place, of a tensor or of a view of it, after which the other one of the two is read."""

    def join(m: Any, x: Tensor) -> Tensor:
        x = m.sn0(m.stem(x))
        y = over_time(x, m.conv1, m.bn1)
        view = show(m, y)
        if reads_view:
            y += x
            return m.head(m.sn1(view.view(2, -1, 4, 8, 8)))
        view += show(m, x)
        return m.head(m.sn1(y))

    return join


VIEWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "view": lambda m, x: x.view(2, -1, 4, 8, 8),
    "flatten": lambda m, x: x.flatten(2),
    "folded": lambda m, x: fold_time(x),
    "contiguous": lambda m, x: x.contiguous(),
    "float": lambda m, x: x.float(),
    "identity": lambda m, x: m.identity(x),
    "dropout": lambda m, x: m.dropout(x),
    "function": lambda m, x: nn.functional.dropout(x, 0.5, m.training),
}
AGAIN = r"\+= changes a tensor that is read again afterwards, itself or by a view: write x = x \+ y"


@pytest.mark.parametrize("reads_view", [True, False])
@pytest.mark.parametrize("show", VIEWS)
def test_a_sum_in_place_that_a_view_shows_is_refused(show: str, reads_view: bool) -> None:
    join = behind_a_view(VIEWS[show], reads_view)
    with pytest.raises(GraphError, match=AGAIN):
        lower(Blocks(join, identity=nn.Identity(), dropout=nn.Dropout()), SHAPE)


def image_shown_again(m: Any, x: Tensor) -> Tensor:
    """At every timestep."""
    y = m.conv0(x)
    shown = y.unsqueeze(0).expand(2, -1, -1, -1, -1)
    y += m.other(x)
    return m.head(m.sn0(shown))


@pytest.mark.parametrize("join", [read_again, image_shown_again])
def test_a_sum_in_place_of_what_is_read_again_is_refused(join: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(GraphError, match=AGAIN):
        lower(Blocks(join, other=nn.Conv2d(3, 4, 1)), SHAPE)


def test_a_chain_of_too_many_sums_is_refused() -> None:
    def chain(m: Any, x: Tensor) -> Tensor:
        x = m.sn0(m.stem(x))
        return m.head(m.sn1(over_time(sum([x] * 64, x), m.conv1)))

    with pytest.raises(GraphError, match="layer 'sn1' has 65 synapses, at most 64: put a neuron behind an addition"):
        deploy(Blocks(chain), SHAPE, scale=255)


def after_norm(m: Any, x: Tensor) -> Tensor:
    x = m.sn0(m.stem(x))
    return m.head(m.sn1(over_time(over_time(x, m.bn1), m.conv1)))


def of_current(layer: str) -> Callable[[Any, Tensor], Tensor]:
    def join(m: Any, x: Tensor) -> Tensor:
        return m.head(m.sn1(over_time(m.stem(x), m.get_submodule(layer))))

    return join


def maximum(m: Any, x: Tensor) -> Tensor:
    x = m.sn0(m.stem(x))
    return m.head(over_time(m.sn1(over_time(x, m.conv1, m.bn1)) + x, m.most))


@pytest.mark.parametrize(
    ("join", "message"),
    [
        (after_norm, "layer 'conv1': Conv must read the input, a neuron's output or a sum of these: put a neuron in"),
        (of_current("conv1"), "layer 'conv1': Conv must read the input, a neuron's output or a sum"),
        (of_current("most"), "layer 'most': MaxPool must read a neuron's output: put a neuron in front"),
        (of_current("layer"), "layer 'layer': LayerNorm has no integer form here"),
        (maximum, "layer 'most': MaxPool must read a neuron's output: put a neuron in front"),
    ],
)
def test_what_reads_anything_else_is_refused_by_name(join: Callable[[Any, Tensor], Tensor], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        lower(Blocks(join, most=nn.MaxPool2d(2), layer=nn.LayerNorm([4, 8, 8])), SHAPE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("conv9", "no convolution before it"),
        ("conv2_2", "no convolution before it"),
        ("conv0", "which is another convolution"),
        (3, "not possible"),
    ],
)
def test_copies_of_nothing_are_refused(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "net.lbq"
    lbq.engine.save(path, deploy(NETS["sew"], SHAPE, scale=255))
    tensors, text, _ = container.read(path)
    changed = json.loads(text)
    (copy,) = (s for layer in changed["layers"] for s in layer["synapses"] if s["name"] == "conv2_2")
    copy["copy_of"] = value
    container.write(tmp_path / "changed.lbq", tensors, json.dumps(changed))
    with pytest.raises(ArtefactError, match=message):
        lbq.engine.load(tmp_path / "changed.lbq")
