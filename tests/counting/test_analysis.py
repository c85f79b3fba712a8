"""Level statistics by hand; the observer against plain recomputation; analyses as files and through the command."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lbq import engine, models
from lbq.batches.sources import open_source
from lbq.cli.render import render_analysis
from lbq.counting import analysis as analyze
from lbq.counting.analysis import Analysis, LayerAnalysis, LevelHistogram, Membrane, Trace, coefficient_of_variation
from lbq.counting.deployed_counts import analyze as analyze_deployed
from lbq.counting.deployed_counts import measure as measure_deployed
from lbq.counting.inputs import open_data
from lbq.counting.membranes import Membranes
from lbq.counting.operations import Counter, Mode, count
from lbq.counting.tally import Tallies
from lbq.data.testset import TestSet, open_test
from lbq.deploy import deploy, lower
from lbq.deploy.verify import passes
from lbq.errors import LbqError
from lbq.measuring.measure import measure
from lbq.measuring.observer import Observer, choose_traces, thresholds_of
from lbq.models import over_time
from lbq.neuron import ILIF, LIF, BurstNeuron, LadderNeuron
from lbq.neuron.burst import SteppedNeuron
from lbq.neuron.recorder import record_levels
from lbq.report.layer_figures import ANALYSIS_FIGURES
from lbq.runs import run_folder
from tests.support.commands import Call
from tests.support.report_runs import runs_folder
from tests.support.small_nets import MEAN, STD, Functional, deployed, pixels, small


def test_histogram_by_hand() -> None:
    """Eight neuron-steps: four silent, three at level 1, one at level 2, none at 3."""
    a = LevelHistogram(np.array([4, 3, 1, 0]))
    assert a.active_ratio == 0.5
    assert a.mean_level == 5 / 8
    np.testing.assert_allclose(a.conditional, [0.75, 0.25, 0])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(3)
    assert a.normalised_entropy == pytest.approx(entropy)
    assert LevelHistogram(np.array([6, 2])).normalised_entropy == 0


def test_extremes() -> None:
    silent, even = LevelHistogram(np.array([5, 0, 0])), LevelHistogram(np.array([5, 2, 2, 2]))
    assert (silent.active_ratio, silent.conditional.tolist(), silent.normalised_entropy) == (0, [0, 0], 0)
    assert even.normalised_entropy == pytest.approx(1)
    assert math.copysign(1, LevelHistogram(np.array([5, 2, 0])).normalised_entropy) == 1  # never written as -0.0
    assert coefficient_of_variation(np.array([1.0, 3.0])) == pytest.approx(0.5)


def test_membrane_bins_by_hand() -> None:
    membrane = Membrane.empty(2, (1.0, 2.0))
    membrane.add(0, np.array([-99.0, -4.0, 0.0, 0.124, 0.125, 99.0]))
    membrane.add(0, np.zeros(3))
    expected, zero = np.zeros(80, int), round(-Membrane.LOW / Membrane.WIDTH)
    expected[[0, zero, zero + 1, -1]] = [2, 5, 1, 1]  # what lies beyond is in the first and last bin
    assert membrane.counts.tolist() == [expected.tolist(), [0] * 80]
    assert (membrane.edges[zero], membrane.edges[-1]) == (0, 2 + Membrane.ABOVE)
    assert Membrane.empty(1, (0.5, 1.7)).edges[-1] == 2 + Membrane.ABOVE  # bins end at a whole number


def images(count: int) -> TestSet:
    """A test set of random images without labels."""
    x = pixels(count, 3, 8, 8)
    return TestSet("x", (3, 8, 8), size=count, read=lambda start, stop: x[start:stop])


def analysis(levels: list[list[int]], step: float = 0.5) -> Analysis:
    layer = LayerAnalysis("sn", (1, 2, 2), len(levels[0]) - 1, step, None, 0.5, np.array(levels))
    return Analysis(1, True, 50.0, {"config_hash": "c"}, (layer,))


def test_means_and_timesteps_by_hand() -> None:
    made = analysis([[2, 2, 0], [3, 0, 1]])
    summary = made.summary()
    assert summary["active_ratio"] == 3 / 8
    assert summary["first_level"] == pytest.approx(2 / 3)
    assert (summary["step_min"], summary["step_max"], summary["step_variation"]) == (0.5, 0.5, 0.0)
    rows = list(csv.DictReader(io.StringIO(made.csv())))
    assert [row["timestep"] for row in rows] == ["all", "0", "1"]
    assert [float(row["active_ratio"]) for row in rows] == [3 / 8, 0.5, 0.25]
    assert [float(row["p2"]) for row in rows] == pytest.approx([1 / 3, 0, 1])
    (layer,) = made.to_dict()["layers"]
    for row, stored in zip(rows, [layer, *layer["by_timestep"]], strict=True):
        for key in ("active_ratio", "mean_level", "normalised_entropy"):
            assert float(row[key]) == pytest.approx(stored[key])


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "neuron", ["lbq", "lif", "ternary", "ilif", {"name": "lbq", "per_channel": True}, {"name": "lbq", "n_max": 120}]
)
def test_the_observer_sees_what_the_network_does(neuron: Any, on_device: bool) -> None:
    """Tallies from outputs equal those of levels that are computed again; histograms equal a loop over membranes."""
    torch.manual_seed(0)
    net = models.create("resnet8w2", neuron=neuron).train()
    with torch.no_grad():
        net(torch.randn(8, 3, 8, 8) * 2)
    net.eval()
    x = torch.randn(4, 3, 8, 8) * 2
    graph = lower(net, (3, 8, 8))
    tallies = Tallies(graph)
    observer = Observer(tallies, on_device=on_device)
    with observer.counting(net):
        net(x)
    with observer.looking_inside(net):
        net(x[::2])
    observer.finish(4)
    with torch.no_grad(), record_levels(net) as levels:
        net(x)
    modes: tuple[Mode, ...] = ("exact", "rate")
    for mode in modes:
        account = Counter(graph, mode, tallies).account()
        expected = count(graph, levels, mode)
        assert account == expected
    for name, membrane in observer.membranes.items():
        steps = graph.timesteps
        assert membrane.counts.sum(1).tolist() == [2 * graph[name].units] * steps
        # above its first threshold a membrane is active, so the histogram must agree with the levels
        spec = graph.spec(name)
        if spec.rounding == "floor":
            at = round((membrane.thresholds[0] - Membrane.LOW) / Membrane.WIDTH)
            above = membrane.counts[:, at:].sum(1)
            assert above.tolist() == [int((levels[name][t, ::2] != 0).sum()) for t in range(steps)]
    if neuron == "lbq":
        assert len(observer.traces) > 1


def test_neurons_may_be_called_by_the_name_of_their_input() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return over_time(m.neuron(x=over_time(x, m.linear, timesteps=2, spatial=1)), m.out, spatial=1).mean(0)

    layers = {"linear": nn.Linear(4, 4), "neuron": BurstNeuron(step=0.1), "out": nn.Linear(4, 2)}
    net, x = Functional(forward, **layers).eval(), torch.randn(5, 4)
    observer = Observer(Tallies(lower(net, (4,), timesteps=2)))
    with observer.looking_inside(net):
        net(x)
    observer.finish(5)
    assert observer.membranes["neuron"].counts.sum() == 2 * 5 * 4


def test_traces_follow_the_equations() -> None:
    stored = analyze.load(runs_folder() / "lbq-0" / "analysis" / "analysis.json")
    assert stored.traces
    for trace in stored.traces:
        v = 0.0
        for t, x in enumerate(trace.current):
            u = trace.leak * v + x
            assert trace.before[t] == pytest.approx(u, rel=1e-5, abs=1e-6)
            level = min(max(math.floor(trace.before[t] / trace.step), 0), trace.n_max)
            assert trace.levels[t] == level
            v = trace.before[t] - trace.alpha * trace.step * (level > 0)
            assert trace.after[t] == pytest.approx(v, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("neuron", "kind"),
    [
        ("lbq", "once"),
        ({"name": "lbq", "membrane": "if", "alpha": 0.7}, "once"),
        ("ternary", "once"),
        ("ilif", "level"),
        ("lif", "once"),
    ],
)
def test_traces_of_a_deployed_network_follow_its_definition(neuron: Any, kind: str) -> None:
    net = deployed("resnet8w4", neuron, timesteps=3)
    test = images(3)
    measured = measure_deployed(net, test, membranes=2)
    assert measured.traces
    name = net.network.layers[len(net.network.layers) // 2].name
    spec, layer = net.network.spec(name), net.network[name]
    assert spec.reset_kind == kind
    levels = net.run(test.read(0, 1), "dense", trace=True).levels
    assert levels is not None
    unit_levels = levels[name][:, 0].reshape(3, -1)
    for trace in measured.traces:
        assert trace.layer == name
        assert trace.levels == tuple(unit_levels[:, trace.unit].tolist())
        channel = trace.unit // math.prod(layer.shape[1:])
        worth = float(layer.unit[channel]) / 2.0**layer.fraction
        assert trace.step == pytest.approx(worth * spec.steps[channel])
        for t, (before, level, after) in enumerate(zip(trace.before, trace.levels, trace.after, strict=True)):
            reached = spec.thresholds[channel] <= round((abs(before) if spec.signed else before) / worth)
            assert abs(level) == reached.sum()
            drop = spec.reset[channel] * (level if kind == "level" else np.sign(level)) * worth
            assert after == pytest.approx(before - drop)
            if t + 1 < 3 and spec.decay_reset:
                assert trace.before[t + 1] == pytest.approx(trace.leak * after + trace.current[t + 1], abs=worth)
    silent = measure_deployed(net, test)
    assert not silent.traces
    assert not silent.membranes


def one_layer(neuron: nn.Module, conv: nn.Conv2d, side: int, timesteps: int = 5) -> nn.Module:
    """A static image, so that the only neurons receive the same current at every timestep."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return over_time(m.sn(over_time(x, m.conv, timesteps=timesteps)).flatten(2), m.fc, spatial=1).mean(0)

    fc = nn.Linear(conv.out_channels * (side - conv.kernel_size[0] + 1) ** 2, 3)
    return Functional(forward, timesteps, conv=conv, sn=neuron, fc=fc).eval()


@pytest.mark.parametrize("on_device", [False, True])
def test_levels_that_half_precision_cannot_tell_apart_are_counted_all_the_same(on_device: bool) -> None:
    """bfloat16 has 8 bits: of levels beyond 128, times a step, not all come back when divided by it."""
    step = 0.0107
    conv = nn.Conv2d(1, 1, 1, bias=False)
    nn.init.ones_(conv.weight)
    net = one_layer(BurstNeuron(n_max=255, step=step), conv, 16, timesteps=1)
    x = ((torch.arange(256) + 0.5) * step).bfloat16().float().reshape(1, 1, 16, 16)
    r = x.double().numpy().ravel() / step
    levels = np.floor(r).astype(int)
    assert np.abs(r - np.rint(r)).min() > 0.01  # none is on the brink
    back = (torch.from_numpy(levels) * step).bfloat16().double() / step
    assert (np.rint(back.numpy()) != levels).sum() == 30
    tallies = Tallies(lower(net, (1, 16, 16)))
    observer = Observer(tallies, on_device=on_device)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), observer.counting(net):
        net(x)
    observer.finish(1)
    assert tallies.by_timestep("sn")[0].tolist() == np.bincount(levels, minlength=256).tolist()


def test_traced_units_go_from_a_typical_one_to_the_busiest() -> None:
    """100 active ones among silent ones, of which number k has levels that add up to k, positive and negative."""
    total = np.random.default_rng(0).permutation(np.concatenate([np.zeros(50, np.int64), np.arange(1, 101)]))
    levels = np.stack([total // 2, total // 2 - total])
    units = analyze.typical_units(levels)
    assert total[units].tolist() == [31, 80, 97, 100]  # above 30, 79 and 96 of the 99 others, and above all
    assert analyze.typical_units(levels[:, total == 100]) == [0]  # none twice
    assert analyze.typical_units(levels[:, total == 0]) == []


def test_a_trace_with_a_late_reset_by_hand() -> None:
    """Eq. lif, beta 1/2 and a threshold of 1: what a spike takes off is shown at once, though it is not decayed."""
    x = torch.tensor([1.5, 0.25, 1.0, 0.75, 0.5]).reshape(5, 1, 1, 1, 1)
    (trace,) = choose_traces("sn", LIF(), x)
    assert trace.before == (1.5, 0.0, 1.0, 1.25, 0.125)  # 1.5; 0.75 + 0.25 - 1; 0 + 1; 0.5 + 0.75; 0.625 + 0.5 - 1
    assert trace.levels == (1, 0, 0, 1, 0)  # 1 itself is not above the threshold
    assert trace.after == (0.5, 0.0, 1.0, 0.25, 0.125)
    assert trace.current == tuple(x.flatten().tolist())


@pytest.mark.parametrize("neuron", [LIF(threshold=0.3), BurstNeuron(step=0.2), ILIF(step=0.2)])
def test_traces_of_a_deployed_network_give_a_static_image_one_current(neuron: nn.Module) -> None:
    torch.manual_seed(0)
    net = deploy(one_layer(neuron, nn.Conv2d(3, 4, 3), 8), (3, 8, 8), mean=MEAN, std=STD)
    traces = measure_deployed(net, images(1), membranes=1).traces
    assert sum(sum(trace.levels[:-1]) for trace in traces) > 3  # spikes after which something is received
    for trace in traces:
        assert trace.current == pytest.approx(5 * [trace.current[0]], rel=1e-9)


@pytest.mark.parametrize(
    "neuron",
    ["lbq", {"name": "lbq", "per_channel": True}, "lif", "ternary_learned", "ilif", {"name": "qann", "n_max": 3}],
)
def test_deployed_networks_have_the_trained_steps(neuron: Any) -> None:
    trained = small("resnet8w4", neuron)
    with torch.no_grad():
        for name, module in trained.named_modules():
            if isinstance(module, SteppedNeuron) and module.step.dim() == 0:
                norm = trained.get_submodule(name.replace("sn", "bn"))
                assert isinstance(norm, nn.BatchNorm2d)
                norm.weight[1] = 0  # a channel that does not hear its inputs
            if isinstance(module, SteppedNeuron) and module.learn_step:
                module.rho += torch.rand_like(module.rho)
    net = deploy(trained, (3, 8, 8), mean=MEAN, std=STD)
    graph = lower(trained, (3, 8, 8))
    for layer in measure_deployed(net, images(3), membranes=2).analysis({}).layers:
        expected = graph.spec(layer.name).step
        assert layer.step == pytest.approx(float(expected.mean()), rel=2e-3)
        assert (layer.step_range is None) == (expected.size == 1)


def test_a_channel_that_never_fires_has_no_step() -> None:
    neuron = deployed("resnet8w2").network.layers[0].neuron
    assert neuron is not None
    thresholds = np.array([[100, 200, 300, 400, 500], [2**30] * 5, [100, 2**29, 2**30, 2**30, 2**30]], np.int32)
    spec = replace(neuron, thresholds=thresholds)
    assert spec.steps.tolist() == [100, math.inf, 100]
    # a neuron that rounds, too weak for its highest level
    half = np.array([[50, 150, 2**30], [70, 2**30, 2**30]], np.int32)
    assert replace(spec, n_max=3, thresholds=half).steps.tolist() == [100, 140]
    close = np.array([[5000, 5000], [5000, 5001], [5000, 5010]], np.int32)  # of a ladder: no unit, no unit, a small one
    assert replace(spec, n_max=2, thresholds=close).steps.tolist() == [5000, 5000, 10]


def test_a_layer_that_never_fires_has_no_step() -> None:
    net = deployed("resnet8w2")
    layer, *others = net.network.layers
    assert layer.neuron is not None
    silent = replace(layer, neuron=replace(layer.neuron, thresholds=np.full_like(layer.neuron.thresholds, 2**30)))
    net = engine.Network(replace(net.network, layers=(silent, *others)))
    made = measure_deployed(net, images(3), membranes=2).analysis({})
    assert made.layers[0].step is None
    assert made.summary()["step_min"] > 0
    assert Analysis.from_dict(json.loads(json.dumps(made.to_dict()))).layers[0].step is None


def test_a_histogram_has_room_for_no_more_than_it_needs() -> None:
    network = deployed("resnet8w2").network
    layer, *others = network.layers
    assert layer.neuron is not None
    far = np.tile(np.array([64, 2**30], np.int32), (layer.shape[0], 1))
    odd = replace(layer, neuron=replace(layer.neuron, n_max=2, thresholds=far))
    membranes = Membranes(replace(network, layers=(odd, *others)))
    membranes.add(layer.name, 0, np.zeros((1, *layer.shape[1:], layer.shape[0]), np.int32))
    assert membranes.layers[layer.name].thresholds == (1, 4096)


def test_thresholds_of_other_neurons() -> None:
    assert thresholds_of(BurstNeuron(n_max=2)) == (1, 2)
    assert thresholds_of(ILIF(n_max=2)) == (0.5, 1.5)
    assert thresholds_of(LadderNeuron([0.5, 1.5])) == pytest.approx((1, 3))


def test_a_run_is_measured_as_it_is_evaluated() -> None:
    run = runs_folder() / "lbq-0"
    net, source = run_folder.load(run), open_source(run_folder.load_config(run))
    measured = measure(net, source, limit=100)
    assert measured.images == 100
    assert not measured.complete
    levels = [one.levels for one in passes(net, source)]
    everything = measure(net, source)
    assert everything.complete
    assert measure(net, source, limit=source.test_size).complete
    for name, histogram in everything.histograms.items():
        expected = np.bincount(np.concatenate([level[name].ravel() for level in levels]), minlength=6)
        np.testing.assert_array_equal(histogram.counts, expected)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_leaves_some_images(limit: int) -> None:
    run = runs_folder() / "lbq-0"
    message = f"limit must be at least 1 sample, got {limit}"
    with pytest.raises(LbqError, match=message):
        measure(run_folder.load(run), open_source(run_folder.load_config(run)), limit=limit)
    with pytest.raises(LbqError, match=message):
        measure_deployed(engine.load(run / "model.lbq"), open_test("digits"), limit=limit)


@pytest.mark.parametrize("every", [1, 3, 7, 50])
def test_membranes_of_every_nth_image_whatever_the_batches(every: int) -> None:
    run = runs_folder() / "lbq-0"
    net, source = run_folder.load(run), open_source(run_folder.load_config(run, ["train.batch_size=10"]))
    measured = measure(net, source, membranes=every, limit=45)
    observer = Observer(Tallies(lower(net, source.shape)))
    images = torch.cat([x for x, _ in source.eval_batches("test")])[:45:every]
    with observer.looking_inside(net):
        net(images)
    observer.finish(0)
    assert measured.membranes.keys() == observer.membranes.keys()
    for name, membrane in observer.membranes.items():
        assert membrane.counts[0].sum() == len(images) * math.prod(measured.graph[name].shape)
        assert np.abs(measured.membranes[name].counts - membrane.counts).sum() <= 2e-3 * membrane.counts.sum()
    assert [trace.unit for trace in measured.traces] == [trace.unit for trace in observer.traces]


def test_the_table_has_the_range_of_steps_per_channel(capsys: pytest.CaptureFixture[str]) -> None:
    one = LayerAnalysis("sn1", (2, 2, 2), 2, 0.4, None, 0.5, np.array([[5, 2, 1]]))
    several = replace(one, name="sn2", step=0.3965, step_range=(0.391, 0.402))
    render_analysis(Analysis(4, True, None, {}, (one, several)), Path("out"))
    text = capsys.readouterr().out
    assert "step  step_min  step_max    tail" in text
    assert "0.3965    0.3910    0.4020  0.5000" in text
    assert "mean steps 0.397 .. 0.400" in " ".join(text.split())
    render_analysis(Analysis(4, True, None, {}, (one,)), Path("out"))
    text = capsys.readouterr().out
    assert "step_min" not in text
    assert "mean step" not in text


def test_analyze_a_run(call: Call, tmp_path: Path) -> None:
    run, out = runs_folder() / "lbq-0", tmp_path / "a"
    text = call.printed("analyze", str(run), "-o", str(out), "--limit", "40", "--membranes", "4")
    assert "Layers over the first 40 images" in text
    assert "means over layers: active ratio" in text
    svgs = [path.stem for path in out.glob("*.svg") if ElementTree.parse(path)]
    assert sorted(svgs) == sorted(ANALYSIS_FIGURES)
    assert {path.name for path in out.iterdir()} == {"analysis.json", "layers.csv", *(f"{svg}.svg" for svg in svgs)}
    stored = analyze.load(out / "analysis.json")
    assert json.loads(json.dumps(stored.to_dict())) == json.loads((out / "analysis.json").read_text())
    assert stored.layers[0].membrane is not None
    assert stored.layers[0].membrane.counts.sum() == 10 * 2 * math.prod(stored.layers[0].shape)
    value = call.json("analyze", str(run), "-o", str(out), "--limit", "9", "--membranes", "0")
    assert (value["images"], value["complete"], value["layers"][0]["membrane"]) == (9, False, None)


def test_analyze_a_deployed_network(call: Call, tmp_path: Path) -> None:
    model = runs_folder() / "lbq-0" / "model.lbq"
    call.printed("analyze", str(model), "-o", str(tmp_path), "--data", "digits", "--membranes", "8")
    stored = analyze.load(tmp_path / "analysis.json")
    trained = analyze.load(runs_folder() / "lbq-0" / "analysis" / "analysis.json")
    assert stored.images == trained.images
    assert stored.accuracy == pytest.approx(trained.accuracy, abs=3)
    for mine, theirs in zip(stored.layers, trained.layers, strict=True):
        assert mine.name == theirs.name
        assert mine.step == pytest.approx(theirs.step, rel=0.01)
        assert mine.histogram.active_ratio == pytest.approx(theirs.histogram.active_ratio, abs=0.03)
        assert mine.membrane is not None
        assert mine.membrane.thresholds == pytest.approx((1, 2, 3, 4, 5), abs=0.02)
        assert mine.membrane.counts.sum() == 75 * 2 * math.prod(mine.shape)


def test_the_watched_membranes_give_the_levels() -> None:
    net = engine.load(runs_folder() / "lbq-0" / "model.lbq")
    assert net.golden is not None
    seen: dict[str, list[np.ndarray]] = {}
    net.watch(net.golden.inputs[:2], lambda name, t, u: seen.setdefault(name, []).append(u.copy()))
    levels = net.run(net.golden.inputs[:2], "dense", trace=True).levels
    assert levels is not None
    for name, membranes in seen.items():
        thresholds = net.network.spec(name).thresholds
        pieces = len(membranes) // 2  # of the two images: both at once, or one after the other
        u = np.stack(membranes).reshape(pieces, 2, -1, *membranes[0].shape[1:]).swapaxes(0, 1)
        u = u.reshape(2, 2, *membranes[0].shape[1:])
        expected = (u[..., None] >= thresholds).sum(-1).transpose(0, 1, 4, 2, 3)
        np.testing.assert_array_equal(levels[name], expected)


def test_threads_count_the_same() -> None:
    net = engine.load(runs_folder() / "lbq-0" / "model.lbq")
    test = open_data(net.network, "digits")
    one, two = (measure_deployed(net, test, threads, limit=60, membranes=7) for threads in (1, 2))
    assert one.tallies is not None
    assert two.tallies is not None
    assert one.tallies.images == two.tallies.images == 60
    assert one.to_dict() == two.to_dict()
    for read, counts in one.tallies.counts.items():
        np.testing.assert_array_equal(counts, two.tallies.counts[read])
    for name, membrane in one.membranes.items():
        assert membrane.counts.sum() == 9 * 2 * math.prod(net.network[name].shape)  # images 0, 7, ... 56
        np.testing.assert_array_equal(membrane.counts, two.membranes[name].counts)


def test_event_networks_are_analysed_alike() -> None:
    """Trained and deployed, on the same frames: the counts of both forms agree but for rounding."""
    torch.manual_seed(0)
    net = models.create("resnet8w2", in_channels=2, timesteps=3).eval()
    deployed = deploy(net, (2, 8, 8), timesteps=3, static=False)
    frames = np.random.default_rng(0).integers(0, 4, (5, 3, 2, 8, 8)).astype(np.uint8)
    test = TestSet("frames", (2, 8, 8), False, size=5, read=lambda start, stop: frames[start:stop].swapaxes(0, 1))
    made = analyze_deployed(deployed, test, membranes=2)
    assert made.accuracy is None
    assert made.complete
    graph = lower(net, (2, 8, 8), 3, static=False)
    observer = Observer(Tallies(graph))
    currents = torch.from_numpy(frames.swapaxes(0, 1).astype(np.float32))
    with observer.counting(net):
        net(currents)
    with observer.looking_inside(net):
        net(currents[:, ::2])
    observer.finish(5)
    for layer in made.layers:
        assert layer.levels.shape == (3, 6)
        mine = layer.levels[:, 0] / layer.levels.sum(1)
        counts = observer.tallies.by_timestep(layer.name)
        np.testing.assert_allclose(mine, counts[:, 0] / counts.sum(1), atol=0.05)
        assert layer.membrane is not None
        assert layer.membrane.counts.sum(1).tolist() == [3 * math.prod(layer.shape)] * 3
        assert observer.membranes[layer.name].counts.shape == layer.membrane.counts.shape


def test_an_ann_has_nothing_to_analyse(call: Call, tmp_path: Path) -> None:
    assert "no spikes to analyse" in call.printed("analyze", str(runs_folder() / "ann"), "-o", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["analysis.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist: give a run folder"),
        (["/nowhere/model.lbq"], "/nowhere/model.lbq does not exist: give a run folder, or a model.lbq"),
        (["RUN", "--data", "digits"], "--data is for a deployed network"),
        (["MODEL", "data.root=x"], "are for a run folder"),
        (["MODEL", "--device", "cpu"], "are for a run folder"),
        (["RUN", "--membranes", "-1"], "--membranes"),
        (["RUN", "-o", "/dev/null/x"], "cannot write"),
    ],
)
def test_bad_input(call: Call, arguments: list[str], message: str) -> None:
    run = runs_folder() / "lbq-0"
    known = {"RUN": str(run), "MODEL": str(run / "model.lbq")}
    extra = ["--limit", "2"] if arguments[0] == "RUN" else []
    assert message in call.refused("analyze", *(known.get(a, a) for a in arguments), *extra)


def test_an_analysis_comes_back_as_it_was_written() -> None:
    trace = Trace("sn", 3, 0.5, 2, 0.5, 1.0, (0.1, 0.9), (0.1, 0.95), (0, 1), (0.1, 0.45))
    made = analysis([[2, 2, 0], [3, 0, 1]])
    layer = replace(made.layers[0], membrane=Membrane.empty(2, (1.0, 2.0)), step_range=(0.25, 0.75))
    written = json.loads(json.dumps(replace(made, layers=(layer,), traces=(trace,)).to_dict()))
    read = Analysis.from_dict(written)
    assert json.loads(json.dumps(read.to_dict())) == written
    assert read.layers[0].step_range == (0.25, 0.75)
    assert read.traces == (trace,)
    assert {(row["step_min"], row["step_max"]) for row in read.table()} == {(0.25, 0.75)}


def test_a_network_without_steps_has_no_range_of_them() -> None:
    layer = replace(analysis([[1, 1]]).layers[0], step=None)
    summary = replace(analysis([[1, 1]]), layers=(layer,)).summary()
    assert [summary[key] for key in ("step_min", "step_max", "step_variation")] == [None] * 3


def test_layers_of_unlike_levels_share_a_table() -> None:
    few, many = analysis([[1, 1]]).layers[0], analysis([[1, 1, 0, 2]]).layers[0]
    rows = list(csv.DictReader(io.StringIO(replace(analysis([[1, 1]]), layers=(few, many)).csv())))
    assert [row["p3"] for row in rows] == ["", "", str(2 / 3), str(2 / 3)]


def test_damaged_analyses(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    texts = {"{": "cannot be read as JSON", "[]": "must hold a JSON object", "[" * 10**5: "cannot be read as JSON"}
    for text, message in texts.items():
        path.write_text(text)
        with pytest.raises(LbqError, match=f"{message}.*make it again with lbq analyze"):
            analyze.load(path)
