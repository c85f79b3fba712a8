"""Networks of one's own that read signals [C, L], or features [F]: deployed as images of height 1, or of one pixel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lbq.engine
from lbq.convert import convert
from lbq.counting.deployed import evaluate
from lbq.counting.inputs import open_data, read_input
from lbq.deploy import deploy, graph_of
from lbq.errors import DataError, GraphError, LbqError
from lbq.graph.integer import IntegerNetwork
from lbq.models import over_time
from lbq.neuron import BurstNeuron
from tests.support.own_nets import Forward, logits_close
from tests.support.small_nets import Functional, pixels, same

SHAPE = (2, 24)


def layers(m: Any, x: Tensor) -> Tensor:
    x = m.sn(over_time(x, m.conv, m.bn, timesteps=2, spatial=2))
    x = m.sn2(over_time(x, m.most, m.average, m.conv2, m.bn2, spatial=2))
    return m.fc(x.mean(3)).mean(0)


def functions(m: Any, x: Tensor) -> Tensor:
    """The same by functions and views."""
    y = m.bn(m.conv(F.pad(x.expand(2, *x.shape).flatten(0, 1), (2, 2))))
    y = m.sn(y.reshape(2, -1, *y.shape[1:]))
    y = F.avg_pool1d(F.max_pool1d(y.flatten(0, 1), 3, 2, padding=1), kernel_size=2)
    y = m.sn2(m.bn2(m.conv2(y)).unflatten(0, (2, -1)))
    return m.fc(F.adaptive_avg_pool1d(y.flatten(0, 1), 1).flatten(1).view(2, -1, 6)).mean(0)


def sequence(m: Any, x: Tensor) -> Tensor:
    """Of signals that bring their time."""
    return m.fc(m.sn2(over_time(m.sn(over_time(x, m.conv, spatial=2)), m.conv2, spatial=2)).sum((0, 3)))


def joined(m: Any, x: Tensor) -> Tensor:
    x = m.sn(over_time(x, m.conv, m.bn, timesteps=2, spatial=2))
    y = m.sn2(over_time(torch.cat([x, x], 2), m.twice, spatial=2))
    return m.flat(torch.cat([x, y], -2).flatten(-2)).sum(0)


class Signals(Functional):
    def __init__(self, function: Forward) -> None:
        super().__init__(function)
        torch.manual_seed(0)
        own = 0 if function is functions else 2
        self.conv, self.bn, self.sn = nn.Conv1d(2, 4, 5, padding=own), nn.BatchNorm1d(4), BurstNeuron(step=0.3)
        self.conv2, self.bn2 = nn.Conv1d(4, 6, 3, 2, padding=2, dilation=2, groups=2), nn.BatchNorm1d(6)
        self.sn2, self.fc = BurstNeuron(step=0.2), nn.Linear(6, 5)
        self.twice, self.flat = nn.Conv1d(8, 3, 3, padding="same"), nn.Linear(7 * 24, 5)
        self.most, self.average, self.image = nn.MaxPool1d(3, 2, 1), nn.AvgPool1d(2), nn.Conv2d(2, 4, 3)
        for norm in (self.bn, self.bn2):
            nn.init.uniform_(norm.running_mean, -0.2, 0.2)  # type: ignore[arg-type]
            nn.init.uniform_(norm.running_var, 0.1, 0.3)  # type: ignore[arg-type]
        self.double().eval()


@pytest.mark.parametrize("function", [layers, functions, joined])
def test_networks_of_signals_deploy(function: Forward, tmp_path: Path) -> None:
    """In float64 with the levels and logits of training, which graph_of compares; on integers near them, in all engines."""
    net, x = Signals(function), pixels(6, *SHAPE)
    assert graph_of(net, SHAPE).input_shape == (2, 1, 24)
    network = deploy(net, SHAPE, mean=[0.4, 0.5], std=[0.25, 0.3], bits=16, examples=x)
    lifted = x[:, :, None]
    output = network.run(lifted, "bitplane", trace=True)
    assert same(output, network.run(lifted, "dense", trace=True))
    assert same(output, network.run(x, "bitplane", trace=True))
    assert network.run(lifted[2]).logits.tolist() == output.logits[2:3].tolist()
    logits_close(net, network, x, (x / 255 - np.array([[0.4], [0.5]])) / np.array([[0.25], [0.3]]))
    lbq.engine.save(tmp_path / "net.lbq", network)
    assert lbq.engine.load(tmp_path / "net.lbq").verify() == 6


def test_an_ann_of_signals_converts_and_deploys() -> None:
    """One whose branches are joined."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.pool(m.conv(x).relu())
        x = m.both(torch.cat([x, m.side(x).relu()], 1)).relu()
        return m.fc(x.mean(2))

    torch.manual_seed(0)
    layers = {"conv": nn.Conv1d(2, 4, 3, padding=1), "pool": nn.MaxPool1d(2), "side": nn.Conv1d(4, 3, 1)}
    ann = Functional(forward, both=nn.Conv1d(7, 4, 3), fc=nn.Linear(4, 5), **layers)
    net = convert(ann.eval(), torch.rand(8, *SHAPE), timesteps=2)
    assert len(deploy(net, SHAPE, scale=255).network.layers) == 3


@pytest.mark.parametrize(
    ("function", "shape", "message"),
    [
        (layers, (2, 4, 6), "give spatial=3"),
        (lambda m, x: m.sn(m.conv(x)), (2, 4, 6), r"layer 'conv': Conv1d in a network of images: .* as \(C, L\)"),
        (lambda m, x: m.sn(m.conv(x.squeeze(2))), (2, 1, 6), r"signals \[B, C, 1, L\] keep all axes, and read them by Conv2d"),
        (lambda m, x: m.sn(m.image(x)), SHAPE, r"layer 'image': Conv2d in a network of signals: .* as \(C, 1, L\)"),
        (lambda m, x: m.sn(over_time(x, m.conv, timesteps=2)), SHAPE, r"give spatial=2, or input_shape as \(C, H, W\)"),
        (lambda m, x: m.sn(over_time(x, m.conv, timesteps=2, spatial=2)).mean((2, 3)), SHAPE, r"or over length, mean\(-1\)"),
    ],
)  # fmt: skip
def test_layers_for_other_inputs_are_refused(function: Forward, shape: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        deploy(Signals(function), shape, scale=255)


def features() -> nn.Module:
    """A network of 12 numbers, shown at every timestep unless they bring their time."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.fc(m.sn(over_time(x, m.hidden, m.bn, timesteps=3, spatial=1))).mean(0)

    torch.manual_seed(0)
    hidden, norm, neuron = nn.Linear(12, 16), nn.BatchNorm1d(16), BurstNeuron(step=0.2)
    return Functional(forward, 3, hidden=hidden, bn=norm, sn=neuron, fc=nn.Linear(16, 5)).double().eval()


@pytest.mark.parametrize("static", [True, False])
def test_networks_of_features_deploy(static: bool) -> None:
    net, x = features(), pixels(6, 12) if static else pixels(3, 6, 12) // 64
    network = deploy(net, (12,), scale=255 if static else None, static=static, bits=16, examples=x)
    assert network.network.input_shape == (12, 1, 1)
    assert same(network.run(x), network.run(x[..., None, None]))
    logits_close(net, network, x, x / 255 if static else x)
    with pytest.raises(GraphError, match=r"examples must be uint8 \[.*B, 12, 1, 1\], got uint8"):
        deploy(net, (12,), scale=255, static=static, examples=x.swapaxes(-1, -2))


@pytest.fixture(params=[(True, True), (True, False), (False, True), (False, False)])
def small_one(request: pytest.FixtureRequest) -> tuple[IntegerNetwork, tuple[int, ...], np.ndarray]:
    """A network of signals or of features, the shape that these have of their own, and four samples."""
    signals, static = request.param
    shape, net = (SHAPE, Signals(layers if static else sequence)) if signals else ((12,), features())
    network = deploy(net, shape, scale=255 if static else None, static=static).network
    return network, shape, pixels(4, *shape) if static else pixels(4, network.timesteps, *shape)


def test_files_may_hold_signals_and_features_in_their_own_shape(small_one: Any, tmp_path: Path) -> None:
    network, shape, x = small_one
    full = x.reshape(*x.shape[: -len(shape)], *network.input_shape)
    np.savez(tmp_path / "own.npz", images=x, labels=[0, 1, 2, 0])
    np.savez(tmp_path / "full.npz", images=full)
    own, expected = (open_data(network, str(tmp_path / f"{name}.npz")) for name in ("own", "full"))
    assert np.array_equal(own.read(1, 3), expected.read(1, 3))
    assert own.shape == network.input_shape
    assert evaluate(lbq.engine.Network(network), own).images == 4
    for given in (x[0], full[0]):
        np.save(tmp_path / "one.npy", given)
        assert np.array_equal(read_input(tmp_path / "one.npy", network), full[0])


def test_other_shapes_are_refused_with_the_one_to_give(small_one: Any, tmp_path: Path) -> None:
    network, shape, x = small_one
    own, one = (", ".join(map(str, n)) for n in (shape, x.shape[1:]))
    np.save(tmp_path / "one.npy", x[:1])
    with pytest.raises(DataError, match=rf"one.npy must be uint8 \[{one}\], not uint8 \[1, {one}\]"):
        read_input(tmp_path / "one.npy", network)
    np.savez(tmp_path / "flat.npz", images=x.ravel())
    with pytest.raises(DataError, match=rf"must hold 'images', uint8 \[N, (T, )?{own}\], not uint8 \[{x.size}\]"):
        open_data(network, str(tmp_path / "flat.npz"))
    with pytest.raises(LbqError, match=rf"images must be \[.*B, {own}\], got \[{x.size}\]"):
        lbq.engine.Network(network).run(x.ravel())


def test_random_golden_frames_hold_few_events_and_many() -> None:
    """Real frames hold few; a network that such counts alone would saturate is not tested by others."""
    golden = deploy(features(), (12,), static=False).golden
    assert golden is not None
    most = golden.inputs.max((0, 2, 3, 4))
    highest = np.array([1, 3, 7, 15, 31, 63, 127, 255])
    assert ((most > highest // 2) & (most <= highest)).all()
