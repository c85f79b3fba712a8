"""Figures of several seeds, and of steps per channel: means, whiskers, and which seed it is."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from lbq.report.layer_figures import analysis_figures, layer_figures
from lbq.report.training_figures import training_figures
from lbq.results.result import Gathered, Result
from tests.support.report_runs import of_cifar


def other_seed(result: Result, seed: int, factor: float) -> Result:
    """The same configuration with another seed: steps times `factor`, every layer with the levels of the next one."""
    steps = {layer: factor * step for layer, step in result.record["steps"].items()}
    made = {**result.record, "seed": seed, "steps": steps, "weights_sha256": str(seed) * 64}
    (found,) = result.analyses
    levels = [layer.levels for layer in (*found.layers[1:], found.layers[0])]
    layers = tuple(replace(layer, levels=of) for layer, of in zip(found.layers, levels, strict=True))
    return Result(made, f"{result.source}, seed {seed}", [replace(found, layers=layers)])


def by_kind(results: list[Result]) -> dict[str, str]:
    """The figures of layers, by the first word of their id."""
    return {f.id.partition("-")[0]: f.svg for f in layer_figures(Gathered(results))}


def test_layers_of_several_seeds_are_means_with_whiskers() -> None:
    one = of_cifar()
    figures = by_kind([one, other_seed(one, 1, 2.0), other_seed(one, 2, 3.0)])
    layers = len(one.steps)
    for kind, whiskers in (("steps", layers), ("entropy", 2 * (layers + 1))):
        assert ">CIFAR-10, 60 epochs, mean ± sd of 3 seeds<" in figures[kind]
        assert ">LBQ, 3 seeds<" in figures[kind]
        assert len(re.findall('<line [^>]*class="s0"', figures[kind])) >= 2 * whiskers  # each with a cap at least
    layer, step = next(iter(one.steps.items()))
    assert f"<title>LBQ, 3 seeds, {layer}: {2 * step:.4g} ± {step:.2g}</title>" in figures["steps"]
    shares = [[layer.histogram.active_ratio for layer in r.analyses[0].layers] for r in (one, other_seed(one, 1, 1))]
    first = [shares[0][0], shares[1][0], shares[1][0]]
    active = f"{np.mean(first):.3f} ± {np.std(first, ddof=1):.2g}"
    assert f"<title>LBQ, 3 seeds, {layer}: active ratio {active}, entropy" in figures["entropy"]
    assert ">LBQ, seed 0, CIFAR-10, 60 epochs<" in figures["levels"]


def test_one_seed_has_no_whiskers_and_names_none() -> None:
    one, other = of_cifar(), of_cifar(variant="v3", surrogate="box")
    alone = by_kind([one])
    assert not any("seed" in svg or re.search('<line [^>]*class="s0"', svg) for svg in alone.values())
    both = by_kind([one, other_seed(one, 1, 2.0), other])["steps"]
    assert ">LBQ, 2 seeds<" in both
    assert ">V3 (learned + box)<" in both
    assert set(re.findall('<line [^>]*class="(s.)"', both)) == {"s0"}


def test_means_are_of_the_seeds_that_were_analysed() -> None:
    """What the records of all seeds hold is of all; entropies are of the analysed one, which is named."""
    one = of_cifar()
    bare = [replace(other_seed(one, seed, 2.0), analyses=[]) for seed in (1, 2)]
    figures = by_kind([*bare, one])
    assert ">LBQ, 3 seeds<" in figures["steps"]
    assert ">LBQ, seed 0<" in figures["entropy"]
    assert "±" not in figures["entropy"]


def per_channel(result: Result) -> Result:
    """The same with steps per channel, from half to twice their mean."""
    neuron = {**result.record["config"].get("neuron", {}), "per_channel": True}
    made = {**result.record, "config": {**result.record["config"], "neuron": neuron}}
    (found,) = result.analyses
    layers = tuple(replace(a, step_range=(0.5 * a.step, 2 * a.step)) for a in found.layers if a.step is not None)
    return Result(made, f"{result.source}, per channel", [replace(found, layers=layers)])


def test_steps_per_channel_have_whiskers_over_channels() -> None:
    one = per_channel(of_cifar())
    said = ("steps averaged over channels,", "whiskers from least to largest")
    alone, among = analysis_figures(one.analyses[0]), by_kind([one, of_cifar(variant="v3", surrogate="box")])
    for svg in (alone["steps"].svg, among["steps"]):
        assert all(part in svg for part in said)
        assert len(re.findall('<line [^>]*class="s0"', svg)) == 3 * len(one.steps)
        assert re.search(r": 0\.\d+, 0\.\d+ to 0\.\d+</title>", svg)
    assert set(re.findall('<line [^>]*class="(s.)"', among["steps"])) == {"s0"}
    assert ">mean γ 0." in alone["membranes"].svg
    assert "channels" not in alone["active"].svg


def test_whiskers_are_over_seeds_where_these_and_channels_differ() -> None:
    one = per_channel(of_cifar())
    steps = by_kind([one, other_seed(one, 1, 2.0), per_channel(of_cifar(variant="v3", surrogate="box"))])["steps"]
    assert "mean ± sd of 2 seeds" in steps
    assert "steps averaged over channels<" in steps
    assert "least to largest" not in steps
    assert set(re.findall('<line [^>]*class="(s.)"', steps)) == {"s0"}
    bare = replace(one, analyses=[])
    assert "steps averaged over channels<" in by_kind([bare])["steps"]


def curves(svg: str) -> list[tuple[str, str]]:
    """Colour and dash of every curve, without the legend's."""
    drawn = svg.partition(">epoch<")[2]
    found = re.findall(
        r'<path d="[^"]*" class="line (s\d)"(?: stroke-dasharray="([^"]*)")?/>(?!<[^>]*></\w+><text)', drawn
    )
    return list(dict.fromkeys(found))


def test_seeds_have_their_configurations_colour_and_a_dash_of_their_own() -> None:
    log = [{"epoch": e, "loss": 1.0 / e, "test_accuracy": 90.0 + e} for e in (1, 2, 3)]
    one, other = of_cifar(log=log), of_cifar(variant="v3", surrogate="box", log=log)
    results = [other_seed(r, seed, 1.0) if seed else r for seed in (0, 1, 2) for r in (one, other)]
    single = of_cifar(variant="v1", surrogate="box", log=log)
    loss, accuracy = training_figures(Gathered([*results, single]))
    for figure in (loss, accuracy):
        expected = {(colour, dash) for colour in ("s0", "s1") for dash in ("", "6 3", "2 3")} | {("s2", "")}
        assert set(curves(figure.svg)) == expected
        legend = re.findall(r'text-anchor="start">([^<]+)</text>', figure.svg)
        names = ["LBQ, 3 seeds", "V3 (learned + box), 3 seeds", "V1 (fixed + box)"]
        assert legend == [*names, "seed 0", "seed 1", "seed 2"]
        assert figure.caption.endswith(" Seeds differ in their dashes.")
    bare = other_seed(one, 5, 1.0)
    bare.record["log"] = [{"epoch": 1, "loss": 1.0}]
    assert ">seed 5<" not in training_figures(Gathered([other, bare, *results[2:]]))[1].svg  # it was not tested
    assert "<title>LBQ, seed 2, epoch 3: 0.3333</title>" in loss.svg
    assert "V3 (learned + box), seed 1 0.3333" in loss.svg  # for those who cannot see it


def test_seeds_of_one_configuration_have_colours_of_their_own() -> None:
    one = of_cifar(log=[{"epoch": e, "loss": 1.0 / e} for e in (1, 2, 3)], step="fixed")
    (loss,) = training_figures(Gathered([one, other_seed(one, 1, 1.0)]))
    assert set(curves(loss.svg)) == {("s0", ""), ("s1", "6 3")}
    assert re.findall(r'text-anchor="start">([^<]+)</text>', loss.svg) == ["LBQ, seed 0", "LBQ, seed 1"]
    assert "dash" not in loss.caption


def test_unfinished_seeds_are_apart() -> None:
    one = of_cifar(log=[{"epoch": e, "loss": 1.0 / e} for e in (1, 2, 3)], step="fixed")
    half = other_seed(one, 2, 1.0)
    half.record["unfinished"] = True
    (loss,) = training_figures(Gathered([half, one, other_seed(one, 1, 1.0)]))
    legend = re.findall(r'text-anchor="start">([^<]+)</text>', loss.svg)
    assert legend == ["LBQ (unfinished)", "LBQ, 2 seeds", "seed 0", "seed 1", "seed 2"]
    assert set(curves(loss.svg)) == {("s0", "2 3"), ("s1", ""), ("s1", "6 3")}


def test_another_seed_renames_no_file() -> None:
    one, other = of_cifar(), of_cifar(variant="v3", surrogate="box")
    before = {figure.id for figure in layer_figures(Gathered([one, other]))}
    assert {figure.id for figure in layer_figures(Gathered([one, other_seed(other, 1, 2.0)]))} == before
