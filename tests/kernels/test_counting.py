"""Counts on the device: kernels against plain loops, and a network watched there against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the fused kernels need triton")

from lbq import models
from lbq.counting.analysis import Membrane
from lbq.counting.tally import Read, Tallies, level_counts
from lbq.deploy import lower
from lbq.graph import Pool
from lbq.kernels import counting
from lbq.kernels.gpu import launch
from lbq.measuring.observer import Observer, read_of
from lbq.models import over_time
from lbq.native.choose import use
from lbq.neuron import ILIF, LIF, BurstNeuron, LadderNeuron, SpikingNeuron, Ternary
from tests.support.small_nets import Functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def channels_last(x: Tensor) -> Tensor:
    return x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])


def turned(x: Tensor) -> Tensor:
    """Height and width do not lie as one."""
    return x.transpose(3, 4).contiguous().transpose(3, 4)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": channels_last,
    "turned": turned,
    "every_second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


def assert_tallied(
    levels: Tensor, n_max: int, scale: Tensor, dtype: torch.dtype, lay: Callable[[Tensor], Tensor]
) -> None:
    """Twice into the same counts, as two batches would."""
    x = lay((levels * (scale[:, None, None] if scale.dim() else scale)).to(dtype)).to(DEVICE)
    expected = level_counts(levels.numpy().astype(np.int32), n_max)
    counts = torch.zeros(expected.shape, dtype=torch.int64, device=DEVICE)
    with use("fused"):
        counting.tally(x, scale.to(DEVICE), counts)
        counting.tally(x, scale.to(DEVICE), counts)
    np.testing.assert_array_equal(counts.cpu().numpy()[:, :, 1:], 2 * expected[:, :, 1:])


def random_levels(shape: tuple[int, ...], n_max: int, signed: bool = False) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(-n_max if signed else 0, n_max + 1, shape)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, torch.float32) for layout in LAYOUTS),
        ("contiguous", torch.bfloat16),
        ("channels_last", torch.float16),
    ],
)
@pytest.mark.parametrize("per_channel", [False, True])
def test_levels_of_every_layout_and_precision(layout: str, dtype: torch.dtype, per_channel: bool) -> None:
    levels = random_levels((2, 3, 5, 4, 3), 5, signed=True)
    scale = torch.rand(5) + 0.05 if per_channel else torch.tensor(0.036)
    assert_tallied(levels, 5, scale, dtype, LAYOUTS[layout])


@pytest.mark.parametrize(("n_max", "shape"), [(1, (2, 12, 4, 3, 3)), (31, (1, 3, 9, 2, 3)), (100, (1, 2, 40, 1, 2))])
def test_any_number_of_levels(n_max: int, shape: tuple[int, ...]) -> None:
    levels = random_levels(shape, n_max)
    levels.view(-1)[:2] = n_max
    assert_tallied(levels, n_max, torch.tensor(0.37), torch.bfloat16, channels_last)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((1, 2, 130, 3, 5), "channels_last"),  # a block of channels, and two more
        ((1, 1, 3, 13, 11), "contiguous"),  # positions likewise
        ((1, 1, 1100, 1, 1), "contiguous"),
        ((2, 0, 3, 2, 2), "contiguous"),
    ],
)
def test_odd_sizes(shape: tuple[int, ...], layout: str) -> None:
    assert_tallied(random_levels(shape, 5), 5, torch.tensor(0.4), torch.float32, LAYOUTS[layout])


def test_counters_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program takes as many tiles as its counters hold, all of one level, and the next the rest."""
    monkeypatch.setattr(launch, "SUMMING_PROGRAMS", 1)
    assert_tallied(torch.full((1, 70, 1, 1, 1), 4), 5, torch.tensor(0.4), torch.float32, LAYOUTS["contiguous"])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_integers_are_levels_too(dtype: torch.dtype) -> None:
    levels = random_levels((2, 3, 4, 2, 2), 7).to(dtype)
    assert_tallied(levels, 7, torch.ones((), dtype=torch.uint8), dtype, channels_last)


# What synapses read

TWO, THREE = Pool("max", (2, 2), (2, 2)), Pool("max", (3, 3), (2, 2), (1, 1))
WINDOW, ALL = Pool("sum", (2, 2), (1, 1), (1, 1)), Pool("sum", (6, 6), (6, 6))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "read",
    [
        Read("a"),
        Read("a", maxima=(TWO,)),
        Read("a", maxima=(THREE, TWO)),
        Read("a", sums=(WINDOW,)),
        Read("a", sums=(ALL,), over_time=True),
        Read("a", over_time=True),
        Read("a", maxima=(TWO,), sums=(WINDOW,), over_time=True),
        Read("a", sums=(WINDOW,), over_time=True, absolute=True),
    ],
    ids=str,
)
def test_reads_on_a_device_are_those_of_numpy(read: Read, layout: str, signed: bool) -> None:
    levels, scale = random_levels((2, 3, 4, 6, 6), 5, signed), torch.rand(4) + 0.05
    output = LAYOUTS[layout]((levels * scale[:, None, None]).bfloat16())
    expected = read.of(levels.numpy().astype(np.int8))
    for value, worth in (read_of(read, output, scale), read_of(read, levels.to(torch.int8), torch.ones(()))):
        levels_read = (value.float() / worth.reshape(-1, 1, 1)).round()
        np.testing.assert_array_equal(levels_read.numpy(), expected)


# Membranes


@pytest.mark.parametrize("lay", [lambda x: x, channels_last, lambda x: x[:1].expand(3, *x.shape[1:])])
@pytest.mark.parametrize(
    "make",
    [
        lambda: BurstNeuron(5),
        lambda: BurstNeuron(20, channels=6),
        lambda: LIF(membrane="plif"),
        lambda: Ternary(learn_step=True, rule="half"),
        lambda: ILIF(3),
        lambda: LadderNeuron(),
    ],
    ids=["burst", "per_channel", "plif", "ternary_half", "ilif", "ladder"],
)
def test_membranes_lie_where_the_reference_has_them(make: Callable[[], SpikingNeuron], lay: Any) -> None:
    torch.manual_seed(0)
    neuron = make().to(DEVICE)
    if neuron.step.dim():
        with torch.no_grad():
            neuron.get_parameter("rho").uniform_(-3, 0)
    x = 2 * torch.randn(3, 4, 6, 3, 5, device=DEVICE)
    x[0, 0, 0, 0, :2] = torch.tensor([99.0, -99.0])
    x = lay(x)
    histograms = []
    for kernel in ("reference", "fused"):
        counts = torch.zeros(3, 72, dtype=torch.int64, device=DEVICE)
        with use(kernel), torch.no_grad():
            counting.membranes(x, neuron.constants(x), neuron.rule, counts, Membrane.LOW, Membrane.WIDTH)
        histograms.append(counts)
    assert torch.equal(histograms[0], histograms[1])
    assert histograms[0].sum(1).tolist() == [x[0].numel()] * 3
    assert (histograms[0] > 0).sum() > 20
    assert histograms[0][0, 0] > 0
    assert histograms[0][0, -1] > 0


def test_membranes_of_many_bins_and_of_no_image() -> None:
    neuron, x = BurstNeuron(600, step=0.1), torch.randn(1, 2, 3)
    counts = torch.zeros(1, 4864, dtype=torch.int64)
    with use("fused"), torch.no_grad():
        counting.membranes(x, neuron.constants(x), neuron.rule, counts, Membrane.LOW, Membrane.WIDTH)
        counting.membranes(x[:, :0], neuron.constants(x), neuron.rule, counts[:, :99], Membrane.LOW, Membrane.WIDTH)
    assert counts.sum() == 6


# Networks


def pooled(m: Any, x: Tensor) -> Tensor:
    """Levels read as they are, max-pooled, averaged over windows, flattened, and by a readout."""
    x = m.sn1(over_time(x, m.conv1, timesteps=2))
    x = over_time(m.sn2(over_time(x, m.max, m.conv2)), m.mean).flatten(2)
    return over_time(m.sn3(over_time(x, m.fc, spatial=1)), m.head, spatial=1).mean(0)


class Pooled(Functional):
    def __init__(self, make: Callable[[], SpikingNeuron], channels: int) -> None:
        super().__init__(pooled)
        self.conv1, self.sn1, self.max = nn.Conv2d(channels, 4, 3, padding=1), make(), nn.MaxPool2d(3, 2, 1)
        self.conv2, self.sn2, self.mean = nn.Conv2d(4, 6, 3, padding=1), make(), nn.AvgPool2d(2)
        self.fc, self.sn3, self.head = nn.Linear(24, 7), make(), nn.Linear(7, 3)


def watched(net: nn.Module, x: Tensor, tallies: Tallies, on_device: bool) -> Observer:
    observer = Observer(tallies, on_device)
    along = 1 if x.dim() == 5 else 0
    for part in x.split(2, along):
        with observer.counting(net):
            net(part)
        with observer.looking_inside(net):
            net(part.narrow(along, 0, 1))
    observer.finish(x.shape[along])
    return observer


@pytest.mark.parametrize(
    ("kernel", "id", "neuron", "shape", "static"),
    [
        ("fused", "one-block", "lbq", (3, 4, 4), True),
        ("fused", "one-block", "lif", (2, 4, 4), False),
        ("reference", "vgg11w2", "lbq", (3, 32, 32), True),
        ("fused", Pooled, lambda: LIF(threshold=0.5), (3, 8, 8), True),
        ("fused", Pooled, Ternary, (3, 8, 8), False),
        ("reference", "resnet8w2", "ternary", (3, 8, 8), True),
        ("reference", "resnet8w2", {"name": "lbq", "per_channel": True}, (2, 8, 8), False),
        ("reference", "resnet8w2", {"name": "lbq", "n_max": 101}, (3, 8, 8), True),
        ("reference", Pooled, BurstNeuron, (3, 8, 8), True),
        ("reference", Pooled, lambda: BurstNeuron(101), (3, 8, 8), True),
    ],
)
def test_a_network_is_watched_alike_on_its_device(kernel: str, id: Any, neuron: Any, shape: Any, static: bool) -> None:
    torch.manual_seed(0)
    net = id(neuron, shape[0]) if id is Pooled else models.create(id, neuron=neuron, in_channels=shape[0])
    net, x = net.to(DEVICE), 2 * torch.randn(*(() if static else (2,)), 3, *shape, device=DEVICE)
    with torch.no_grad():
        net.train()(x)
    net.eval()
    graph = lower(net, shape, static=static, weights=False)
    with use(kernel):
        observed, expected = (watched(net, x, Tallies(graph), there) for there in (True, False))
    assert observed.tallies.counts.keys() == expected.tallies.counts.keys() == set(observed.tallies.reads)
    assert observed.tallies.images == expected.tallies.images == 3
    for read, counts in expected.tallies.counts.items():
        np.testing.assert_array_equal(observed.tallies.counts[read], counts, str(read))
    assert observed.traces == expected.traces
    for name, membrane in expected.membranes.items():
        np.testing.assert_array_equal(observed.membranes[name].counts, membrane.counts, name)
