"""What the command line prints: tables on stdout. rich is imported when something is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from lbq.cli.demo import DemoResult
    from lbq.counting.analysis import Analysis
    from lbq.counting.costs import Costs
    from lbq.counting.deployed import Evaluation
    from lbq.counting.measurement import Measurement
    from lbq.counting.operations import Account
    from lbq.counting.technology import Technology
    from lbq.results.result import Gathered

NOISE = " (random noise, no images)"


def make_console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 140  # a pipe has no width; do not wrap tables at 80
    return console


def make_table(title: str, first: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def size_of(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def thousands(value: float | None) -> str:
    return "" if value is None else f"{value / 1e3:,.1f}"


def render_demo(result: DemoResult) -> None:
    from lbq.cli.demo import INITIAL_STEP, TITLES

    console, check = make_console(), result.check
    table = make_table(
        f"UCI digits, resnet8w16, {result.methods['lbq'].parameters:,} parameters, {check.images} held-out images",
        "network", "T", "acc. %", "active %", "unary kAC", "bit kAC", "energy uJ", "ANN/it",
    )  # fmt: skip
    ann = result.methods["ann"].energy_uj
    for name, m in result.methods.items():
        table.add_row(
            TITLES[name],
            str(m.timesteps),
            f"{m.accuracy:.2f}",
            "" if m.active_ratio is None else f"{100 * m.active_ratio:.1f}",
            thousands(m.unary_acs),
            thousands(m.bit_sparse_acs),
            f"{m.energy_uj:.3f}",
            f"{ann / m.energy_uj:.2f}",
        )
    console.print(table)
    console.print("kAC: thousand accumulations per image, unary (S) and by bit planes (popcount S).")
    console.print("energy: modelled arithmetic per image (45 nm, Horowitz 2014), not measured.")
    low, high = min(result.steps.values()), max(result.steps.values())
    console.print(
        f"\nlearned steps, {low:.3f} to {high:.3f} (all began at {INITIAL_STEP}), and how often each level is used:"
    )
    for name, step in result.steps.items():
        histogram = result.histograms[name]
        shares = " ".join(f"{100 * p:3.0f}" for p in histogram.conditional)
        console.print(f"  {name:<14} γ = {step:.3f}   levels 1..5: {shares} %")
    absorbed, verdict = result.absorption, "agree with"
    if absorbed.different:
        verdict = f"agree but for {absorbed.different} in {absorbed.tied_images} images with ties with"
    console.print(
        f"\nsteps absorbed: {absorbed.levels:,} levels {verdict} training's (in float64)\n"
        f"integer network model.lbq, {size_of(check.bytes)}, run by bit planes ({check.kernel}) on {check.images} images, "
        f"{check.images_per_second:,.0f} a second:\n"
        f"  {check.levels_agree:.2f} % of levels and {check.predictions_agree:.2f} % of predictions as trained; "
        f"accuracy {check.accuracy:.2f} %\n"
        f"  {check.accumulations_executed:,} accumulations executed, {check.accumulations_counted:,} counted"
    )
    console.print(
        f"\nrun folder {result.folder}, {result.seconds:.0f} s\nreport {result.report}: open it in a browser",
        soft_wrap=True,
    )


def render_account(measured: Measurement, costs: Costs | None, technology: Technology, noise: bool = False) -> None:
    """noise: whether the inputs that it was measured on are random."""
    exact, rate = measured.exact, measured.rate
    if exact is None or rate is None or costs is None:
        _render_ann(measured, technology)
        return
    _render_counts(measured, exact, rate, noise)
    _render_energy(exact, rate, technology)
    _render_costs(costs)


def _render_ann(measured: Measurement, technology: Technology) -> None:
    frames = measured.graph.frames
    make_console().print(
        f"accuracy {measured.accuracy:.2f} % on {measured.images} images; no spikes: {measured.ann_macs:,} MACs at valid "
        f"positions ({measured.graph.macs * frames:,} with padding){f', over {frames} frames' * (frames > 1)}, "
        f"{1e3 * measured.ann_energy_mj(technology.paper):.3f} µJ per image, modelled\n"
        f"prices: {technology.credit('fp32_mac')}"
    )


def _render_counts(measured: Measurement, exact: Account, rate: Account, noise: bool) -> None:
    """What each synapse adds up."""
    from lbq.counting.analysis import GOLDEN, NO_TEST_SET
    from lbq.counting.operations import saved

    console = make_console()
    accuracy = "" if math.isnan(measured.accuracy) else f" (accuracy {measured.accuracy:.2f} %)"
    table = make_table(
        f"Accumulations per image, thousands, over {measured.images:,} {measured.inputs}{NOISE * noise}{accuracy}",
        "synapse", "unary", "bit-sparse", "saved %", "shifted", "events", "rate x MACs",
    )  # fmt: skip
    rows = {**exact.synapses, "total": exact.total, "shortcuts, not in total": exact.shortcut_total}
    for name, count in rows.items():
        by_rate = rate.total if name == "total" else rate.synapses.get(name)
        table.add_row(
            name, thousands(count.unary), thousands(exact.own(count)), f"{saved(exact.own(count), count.unary):.1f}",
            thousands(0.0 if exact.unit_events else count.shifts), thousands(count.events),
            thousands(None if by_rate is None else rate.own(by_rate)), end_section=name == "total",
        )  # fmt: skip
    console.print(table)
    if measured.inputs == GOLDEN:
        console.print(NO_TEST_SET)
    console.print(
        "unary: one accumulation for each unit of a level; bit-sparse: for each set bit; shifted: those of planes above the "
        "lowest;\nevents: for each level that is not 0; rate x MACs: bit-sparse as rate times MACs, padded taps included.\n"
        "What is read behind an average, over windows or time, counts the bits of its integer sums."
    )
    console.print(
        f"FP MACs of the first layer {exact.fp_macs:,.0f}, formations {exact.operations().formations:,.0f} per image"
    )
    if exact.stem:
        planes = sum(count.bit_sparse for count in exact.stem.values())
        console.print(f"the first layer as additions by pixel planes {planes:,.0f} per image, not in the total")
    console.print(f"additions into sums over windows and time {exact.pool_adds:,.0f} per image, not in the total")
    console.print(f"active ratio {exact.active_ratio:.3f}, mean over layers\n")


def _render_energy(exact: Account, rate: Account, technology: Technology) -> None:
    """In the paper's regime, beside that of the same network as an ANN."""
    from lbq.counting.operations import PAPER_BACKENDS
    from lbq.counting.technology import PAPER

    console, prices = make_console(), technology.paper
    ann_exact, ann_rate = (a.ann_energy_mj(prices) for a in (exact, rate))
    table = make_table(
        f"Modelled energy per image, µJ, in the paper's regime ({technology.label(*PAPER, 'shift')})",
        "backend", "shifts", "exact", "ANN / it", "rate x MACs", "ANN / it",
    )  # fmt: skip
    for backend in PAPER_BACKENDS:
        mine, rated = (a.energy_mj(backend, prices) for a in (exact, rate))
        table.add_row(
            backend, f"{exact.shifts(backend):,.0f}", f"{1e3 * mine:,.3f}", f"{ann_exact / mine:.2f}",
            f"{1e3 * rated:,.3f}", f"{ann_rate / rated:.2f}",
        )  # fmt: skip
    console.print(table)
    if exact.frames > 1:
        console.print(
            f"ANN: one pass, over the sum of the {exact.frames} frames; frame by frame it takes {exact.frames} times as much"
        )


def _render_costs(costs: Costs) -> None:
    """What the paper's regime leaves out. Everything in it is modelled."""
    console, prices = make_console(), costs.technology
    table = make_table(
        f"Beyond the paper's regime, µJ per image, modelled ({prices.label()})",
        "method", "paper's regime", "integer arithmetic", "with memory", "int8 ANN / it",
    )  # fmt: skip
    int8 = next(m for m in costs.methods if m.name == "ANN, int8")
    for m in costs.methods:
        paper = "" if m.paper_uj is None else f"{m.paper_uj:,.3f}"
        table.add_row(
            m.name, paper, f"{m.integer_uj:,.3f}", f"{m.memory_uj:,.3f}", f"{int8.memory_uj / m.memory_uj:.2f}"
        )
    console.print(table)
    table = make_table("Where bit planes spend it, modelled", "what", "count", "pJ each", "µJ")
    for line in costs.methods[0].lines:
        table.add_row(line.what, f"{line.count:,.0f}", f"{line.price:g}", f"{line.microjoules:,.3f}")
    console.print(table)
    table = make_table("Shifts, modelled, not in the tables above", "backend", "count", "µJ")
    for line in costs.shifts:
        table.add_row(line.what, f"{line.count:,.0f}", f"{line.microjoules:,.3f}")
    console.print(table)
    table = make_table(
        f"Break-even, modelled: density is {costs.density:.3f} set bits per synapse and timestep",
        "rival", "regime", "equal at",
    )  # fmt: skip
    for point in costs.break_even:
        table.add_row(point.rival, point.regime, point.text)
    console.print(table)
    console.print(
        f"read as other tools do (NeuroBench, syops, SpikingJelly: a level above 1 is a MAC): {costs.reading.count:,.0f} MACs, "
        f"{costs.reading.microjoules:,.3f} µJ at fp32, modelled\n"
        f"binary at equal slots: the same levels as single spikes. Memory: {prices.weight_byte:g} pJ a weight byte, used "
        f"{prices.reuse}; {prices.state_byte:g} pJ a byte of membranes and levels.\nprices: {prices.credit()}"
    )


def render_analysis(analysis: Analysis, folder: Path, noise: bool = False) -> None:
    from lbq.counting.analysis import GOLDEN, NO_TEST_SET

    console = make_console()
    accuracy = "" if analysis.accuracy is None else f", accuracy {analysis.accuracy:.2f} %"
    whole = "all" if analysis.complete else "the first"
    if not analysis.layers:
        console.print(f"no spikes to analyse in this network{accuracy} on {whole} {analysis.images:,} images")
        return
    inputs = GOLDEN if analysis.golden else "images"
    n_max = max(layer.n_max for layer in analysis.layers)
    levels = f"P(k | k > 0) %, k = 1..{n_max}" if n_max <= 10 else "P(k = 1 | k > 0) %"
    by_channel = any(layer.step_range is not None for layer in analysis.layers)
    table = make_table(
        f"Layers over {whole} {analysis.images:,} {inputs}{NOISE * noise}{accuracy}",
        "layer", *(("mean step", "of channels") if by_channel else ("step",)), "tail", "active", "active by timestep",
        "entropy", levels,
    )  # fmt: skip
    for layer in analysis.layers:
        h = layer.histogram
        shown = h.conditional if n_max <= 10 else h.conditional[:1]
        steps = [layer.at(t).active_ratio for t in range(len(layer.levels))]
        table.add_row(
            layer.name,
            "" if layer.step is None else f"{layer.step:.4f}",
            *((_range(layer.step_range),) if by_channel else ()),
            "" if layer.tail is None else f"{layer.tail:.3f}",
            f"{h.active_ratio:.3f}",
            " ".join(f"{a:.3f}" for a in steps[:6]) + (" ..." if len(steps) > 6 else ""),
            f"{h.normalised_entropy:.3f}",
            " ".join(f"{100 * p:4.1f}" for p in shown),
        )
    console.print(table)
    if analysis.golden:
        console.print(NO_TEST_SET)
    summary = analysis.summary()
    steps_text = ""
    if analysis.steps:
        steps_text = (
            f"; {'mean ' * by_channel}steps {summary['step_min']:.3f} .. {summary['step_max']:.3f}, coefficient of variation "
            f"{summary['step_variation']:.2f}"
        )
    console.print(
        f"means over layers: active ratio {summary['active_ratio']:.3f}, normalised burst entropy "
        f"{summary['normalised_entropy']:.3f}, P(k = 1 | k > 0) {100 * summary['first_level']:.1f} %{steps_text}"
    )
    console.print(f"analysis.json, layers.csv and figures in {folder}", soft_wrap=True)


def _range(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.3f}..{ends[1]:.3f}"


def render_conversion(conversion: Mapping[str, Any]) -> None:
    table = make_table("Steps chosen, and what they miss of the ANN's activations", "layer", "step", "error %")
    for name, layer in conversion["layers"].items():
        table.add_row(name, f"{layer['step']:.4f}", f"{100 * layer['error']:.2f}")
    console = make_console()
    console.print(table)
    console.print(
        f"{conversion['run']}: test accuracy {conversion['accuracy']:.2f} % on {conversion['test_images']} images, "
        f"the ANN's is {conversion['ann_accuracy']:.2f} %",
        soft_wrap=True,
    )


def render_deployed(facts: Mapping[str, Any]) -> None:
    console = make_console()
    bits = "" if facts["bits"] is None else f" of {facts['bits']} bits"  # of a network of one's own nobody says
    console.print(
        f"{facts['path']}: {size_of(facts['bytes'])}, {facts['weights']:,} weights{bits} in {facts['layers']} spiking "
        f"layers, T = {facts['timesteps']}",
        soft_wrap=True,
    )
    golden = f"; {facts['verified']} golden inputs run the same densely and by bit planes" if facts["verified"] else ""
    console.print(f"bounds proved for every layer{golden}")
    if facts["levels"]:
        console.print(f"levels of the golden inputs in {facts['levels']}", soft_wrap=True)


def render_evaluation(evaluation: Evaluation) -> None:
    console = make_console()
    images = f"{evaluation.images} image{'s' * (evaluation.images > 1)}"
    table = make_table(
        f"Executed per image over {images}, thousands",
        "synapse", "method", "accumulations", "formations", "products", "why",
    )  # fmt: skip
    for name, counts in evaluation.counts.items():
        choice = evaluation.choices.get(name)
        planes = choice is None or choice.method != "dense"
        table.add_row(
            name,
            ("" if choice.kernel == "native" else f"{choice.kernel} ") + choice.method if choice else "shortcut",
            thousands(counts.accumulations / evaluation.images) if planes or counts.accumulations else "",
            thousands(counts.formations / evaluation.images) if choice and (planes or counts.formations) else "",
            thousands(counts.products / evaluation.images) if counts.products else "",
            choice.reason.replace("density ", "").replace("cross-over ", "") if choice else "",
        )
    console.print(table)
    if dense := sum(counts.products > 0 for counts in evaluation.counts.values()):
        products = thousands(evaluation.total.products / evaluation.images)
        console.print(
            f"{dense} of {len(evaluation.choices)} synapses ran densely, by {products} thousand products an image, which are "
            "no accumulations: --engine bitplane counts those of all synapses."
        )
    if evaluation.engine == "auto":
        console.print("why: set bits for each level, against how many at which planes and dense take equally long.")
    accuracy = "" if evaluation.accuracy is None else f"accuracy {evaluation.accuracy:.2f} % on {images}; "
    threads = f"{evaluation.threads} thread{'s' if evaluation.threads > 1 else ''}"
    console.print(
        f"{accuracy}{evaluation.images_per_second:,.1f} images a second, {1e3 / evaluation.images_per_second:.2f} ms each, "
        f"engine {evaluation.engine}, {threads}, after {evaluation.setup_seconds:.2f} s of setup"
    )
    if evaluation.against is not None:
        console.print(
            f"{evaluation.differing:,} of {evaluation.compared:,} levels and logits differ from those of engine "
            f"{evaluation.against}"
        )


def render_predictions(rankings: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """The classes of one image, or of several, each under its name."""
    console = make_console()
    width = max(len(entry["class"]) for classes in rankings.values() for entry in classes)
    for image, classes in rankings.items():
        if len(rankings) > 1:
            console.print(image, soft_wrap=True)
        for entry in classes:
            console.print(f"{'  ' * (len(rankings) > 1)}{entry['class']:<{width}}  {100 * entry['share']:6.2f} %")


def render_twins(gathered: Gathered) -> None:
    """Which runs a report leaves out, as a remark."""
    for folder, other in gathered.twins.items():
        said = f"{folder} has the very weights of {other}, which is reported for both: what differs in them changed nothing"
        make_console(stderr=True).print(said, soft_wrap=True)


def render_sweep(gathered: Gathered, page: Path) -> None:
    """What a sweep trained, a row for all seeds of one thing."""
    from lbq.report.cells import accuracy_cell, holdout_cell, integer_cell, spread_cell
    from lbq.report.cost_tables import accounts_of
    from lbq.results.result import names

    groups = gathered.groups
    held_out = gathered.has_holdout
    table = make_table("", "network", *["held out %"] * held_out, "accuracy %", "on integers %", "accumulations, M")
    for title, group in zip(names([group.first for group in groups]), groups, strict=True):
        counts = [rate.executed / 1e6 for _, rate in accounts_of(group)]
        digits = 2 if max(counts, default=0) > 1 else 4
        cells = [*[holdout_cell(group)] * held_out, accuracy_cell(group), integer_cell(group)]
        table.add_row(title, *(cell.text for cell in cells), spread_cell(counts, digits).text)
    console = make_console()
    console.print(table)
    console.print("accumulations: of a sample, by bit planes, rate x MACs as the paper counts")
    console.print(f"all tables and figures: {page}", soft_wrap=True)
