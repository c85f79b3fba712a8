"""What the command line prints: tables on stdout. rich is imported when something is shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lbq.system.shown import shown

if TYPE_CHECKING:
    from rich.console import Console

    from lbq.counting.analysis import Analysis
    from lbq.counting.costs import Costs
    from lbq.counting.deployed import Evaluation
    from lbq.counting.exits import ExitMeasurement
    from lbq.counting.measurement import Measurement
    from lbq.counting.operations import Account
    from lbq.counting.technology import Technology
    from lbq.report.cells import Table
    from lbq.results.result import Gathered

SUMS = "What is read behind an average, over windows or time, counts the bits of its integer sums."
UNIT_EVENTS = (
    "Levels are 0, 1 or -1. Behind an average, over windows or time, every event still counts as one accumulation."
)
NOISE = " (random noise, no images)"
SILENT_SHARE = 1e-3  # of neurons that fire, below which a layer is taken to have stopped


def make_console(stderr: bool = False) -> Console:
    from rich.console import Console
    from rich.segment import Segment

    class Shown(Console):
        """Texts of files bring no escapes of their own."""

        def render(self, *arguments: Any, **options: Any) -> Iterator[Segment]:
            for segment in super().render(*arguments, **options):
                yield segment if segment.control else segment._replace(text=shown(segment.text))

    console = Shown(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 140  # a pipe has no width; do not wrap tables at 80
    return console


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], line_below: str = "") -> None:
    """Print a table. line_below: the first cell of the row that a line follows."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=shown(title),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(shown, row), end_section=bool(line_below) and row[0] == line_below)
    make_console().print(table)


def render_table(table: Table, *left_out: str) -> None:
    """Print a table of the report and its notes. left_out: columns for which a terminal has no room, nor for their notes."""
    rows = table.texts(*left_out)
    print_table(table.title, list(rows[0]), [list(row.values()) for row in rows])
    for note in table.notes_without(*left_out):
        print_line(note)


def print_line(text: str) -> None:
    """Print a line that is not wrapped, so that a path in it can be copied."""
    make_console().print(text, soft_wrap=True)


def size_of(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def thousands(value: float) -> str:
    """With three digits where there are few."""
    return f"{value / 1e3:,.1f}" if value >= 100 or not value else f"{value / 1e3:.3g}"


def accuracy_text(accuracy: float | None, result: Mapping[str, Any]) -> str:
    """The accuracy of a finished run in words: on the test set, or else on the held-out samples."""
    if accuracy is not None:
        return f"test accuracy {accuracy:.2f} %"
    held_out = result.get("holdout_accuracy")
    return "not tested" if held_out is None else f"not tested, held-out accuracy {held_out:.2f} %"


def render_account(measured: Measurement, costs: Costs | None, technology: Technology, noise: bool = False) -> None:
    """noise: whether the inputs that it was measured on are random."""
    exact, rate = measured.exact, measured.rate
    if exact is None or rate is None or costs is None:
        _render_ann(measured, technology)
        return
    _render_counts(measured, exact, rate, noise)
    _render_energy(exact, rate, technology)
    _render_costs(measured, costs)


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
    from lbq.counting.products import ORDER

    console = make_console()
    accuracy = "" if math.isnan(measured.accuracy) else f" (accuracy {measured.accuracy:.2f} %)"
    rows = []
    counts = {**exact.synapses, "total": exact.total, "shortcuts, not in total": exact.shortcut_total}
    for name, count in counts.items():
        by_rate = rate.total if name == "total" else rate.synapses.get(name)
        bit_sparse = exact.own(count)
        shifted = 0.0 if exact.unit_events else count.shifts
        rows.append((
            name, thousands(count.unary), thousands(bit_sparse), f"{saved(bit_sparse, count.unary):.1f}", thousands(shifted),
            thousands(count.events), "" if by_rate is None else thousands(rate.own(by_rate)),
        ))  # fmt: skip
    print_table(
        f"Accumulations per image, thousands, over {measured.images:,} {measured.inputs}{NOISE * noise}{accuracy}",
        ("synapse", "unary", "bit-sparse", "saved %", "shifted", "events", "rate x MACs"),
        rows,
        line_below="total",
    )
    if measured.inputs == GOLDEN:
        console.print(NO_TEST_SET)
    console.print(
        "unary: one accumulation for each unit of a level; bit-sparse: for each set bit; shifted: those of planes above the "
        "lowest;\nevents: for each level that is not 0; rate x MACs: bit-sparse as rate times MACs, padded taps included.\n"
        + (UNIT_EVENTS if exact.unit_events else SUMS)
    )
    console.print(
        f"FP MACs of the first layer {exact.fp_macs:,.0f}, formations {exact.operations().formations:,.0f} per image"
    )
    if exact.products:
        products = exact.own(exact.product_total)
        console.print(
            f"products of levels with levels {products:,.0f} per image, in the total: {len(exact.products)} of its rows; "
            f"attention in the order {ORDER}"
        )
    if exact.mixing_macs:
        console.print(f"MACs that mix currents over time {exact.mixing_macs:,.0f} per image, not in the total")
    if exact.stem:
        planes = sum(count.bit_sparse for count in exact.stem.values())
        console.print(f"the first layer as additions by pixel planes {planes:,.0f} per image, not in the total")
    console.print(f"additions into sums over windows and time {exact.pool_adds:,.0f} per image, not in the total")
    console.print(f"active ratio {exact.active_ratio:.3f}, mean over layers\n")


def _render_energy(exact: Account, rate: Account, technology: Technology) -> None:
    """In the paper's regime, beside that of the same network as an ANN."""
    from lbq.counting.operations import PAPER_BACKENDS

    prices = technology.paper
    rows = []
    for backend in PAPER_BACKENDS:
        row = [backend, f"{exact.shifts(backend):,.0f}"]
        for account in (exact, rate):
            millijoules = account.energy_mj(backend, prices)
            row += [f"{1e3 * millijoules:,.3f}", f"{account.ann_energy_mj(prices) / millijoules:.2f}"]
        rows.append(row)
    print_table(
        "Modelled energy per image, µJ, in the paper's regime",
        ("backend", "shifts", "exact", "ANN / it", "rate x MACs", "ANN / it"),
        rows,
    )
    if exact.frames > 1:
        make_console().print(
            f"ANN: one pass, over the sum of the {exact.frames} frames; frame by frame it takes {exact.frames} times as much"
        )


def _render_costs(measured: Measurement, costs: Costs) -> None:
    """What the paper's regime leaves out. Everything in it is modelled."""
    from lbq.report.cost_tables import energy_table

    render_table(energy_table("energy", f"over {measured.images:,} {measured.inputs}", costs), "Note")
    print_table(
        "Where bit planes spend it, modelled",
        ("what", "count", "pJ each", "µJ"),
        [(x.what, f"{x.count:,.0f}", f"{x.price:g}", f"{x.microjoules:,.3f}") for x in costs.methods[0].lines],
    )
    make_console().print(f"prices: {costs.technology.credit()}")


def render_analysis(analysis: Analysis, folder: Path, noise: bool = False) -> None:
    from lbq.counting.analysis import GOLDEN, NO_TEST_SET

    console = make_console()
    accuracy = "" if analysis.accuracy is None else f", accuracy {analysis.accuracy:.2f} %"
    whole = "all" if analysis.complete else "the first"
    if not analysis.layers:
        console.print(f"no spikes to analyse in this network{accuracy} on {whole} {analysis.images:,} images")
        return
    inputs = GOLDEN if analysis.golden else "images"
    by_channel = any(layer.step_range is not None for layer in analysis.layers)
    rows = [row for row in analysis.table() if row["timestep"] == "all"]
    widest = max(rows, key=len)
    left_out = {"timestep", "n_max", "mean_level", *(() if by_channel else ("step_min", "step_max"))}
    if "p11" in widest:  # too many for a line
        left_out |= {key for key in widest if key.startswith("p") and key != "p1"}
    columns = [key for key in widest if key not in left_out and any(row.get(key) is not None for row in rows)]
    print_table(
        f"Layers over {whole} {analysis.images:,} {inputs}{NOISE * noise}{accuracy}",
        columns,
        [[row["layer"], *("" if (x := row.get(key)) is None else f"{x:.4f}" for key in columns[1:])] for row in rows],
    )
    console.print("columns as in layers.csv; p1, p2, ...: P(k | k > 0)")
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
    print_line(f"analysis.json, layers.csv and figures in {folder}")


def render_conversion(conversion: Mapping[str, Any]) -> None:
    print_table(
        "Steps chosen, and what they miss of the ANN's activations",
        ("layer", "step", "error %"),
        [(name, f"{x['step']:.4f}", f"{100 * x['error']:.2f}") for name, x in conversion["layers"].items()],
    )
    print_line(
        f"{conversion['run']}: test accuracy {conversion['accuracy']:.2f} % on {conversion['test_images']} images, "
        f"the ANN's is {conversion['ann_accuracy']:.2f} %"
    )


def render_deployed(facts: Mapping[str, Any]) -> None:
    bits = "" if facts["bits"] is None else f" of {facts['bits']} bits"  # a user's own network may not say
    print_line(
        f"{facts['path']}: {size_of(facts['bytes'])}, {facts['weights']:,} weights{bits} in {facts['layers']} spiking "
        f"layers, T = {facts['timesteps']}"
    )
    if facts.get("remark"):
        print_line(facts["remark"])
    if facts.get("new_folder"):
        print_line(f"{facts['new_folder']} is a new folder, made for it")
    golden = f"; {facts['verified']} golden inputs run the same densely and by bit planes" if facts["verified"] else ""
    print_line(f"bounds proved for every layer{golden}")
    if facts["levels"]:
        print_line(f"levels of the golden inputs in {facts['levels']}")


def render_evaluation(evaluation: Evaluation) -> None:
    console = make_console()
    images = f"{evaluation.images} image{'s' * (evaluation.images > 1)}"
    print_table(
        f"Executed per image over {images}, thousands",
        ("synapse", "method", "accumulations", "formations", "additions", "products", "why"),
        [_executed_row(evaluation, name) for name in evaluation.counts],
    )
    if dense := sum(counts.products > 0 for counts in evaluation.counts.values()):
        products = thousands(evaluation.total.products / evaluation.images)
        console.print(
            f"{dense} of {len(evaluation.choices)} synapses ran densely, by {products} thousand products an image, which are "
            "no accumulations: --engine bitplane counts those of all synapses."
        )
    if words := evaluation.total.ands:
        console.print(
            f"products of levels with levels took {words / evaluation.images:,.0f} ANDs and "
            f"{evaluation.total.popcounts / evaluation.images:,.0f} popcounts an image, of words of 64 channels"
        )
    if evaluation.engine == "auto":
        console.print(
            "why: the mean set bits of a level, and how many make the dense kernel as fast as adding; for pairs, how much "
            "faster they are than planes."
        )
    accuracy = "" if evaluation.accuracy is None else f"accuracy {evaluation.accuracy:.2f} % on {images}; "
    threads = f"{evaluation.threads} thread{'s' if evaluation.threads > 1 else ''}"
    console.print(
        f"{accuracy}{evaluation.images_per_second:,.1f} images a second, {1e3 / evaluation.images_per_second:.2f} ms each, "
        f"engine {evaluation.engine}, {threads}, after {evaluation.setup_seconds:.2f} s of setup"
    )
    if evaluation.stopped:
        stops = ", ".join(f"{count:,} after {t}" for t, count in enumerate(evaluation.stopped, 1))
        console.print(f"images stopped: {stops} timesteps; those that went on began again")
        if evaluation.engine == "auto":
            console.print("method and why are those of the first timestep; counts are those of all")
    if evaluation.against is not None:
        console.print(
            f"{evaluation.differing:,} of {evaluation.compared:,} levels and logits differ from those of engine "
            f"{evaluation.against}"
        )


def _executed_row(evaluation: Evaluation, synapse: str) -> tuple[str, ...]:
    """What a synapse executed, and why so. Empty where its method has no such operations."""
    counts, choice = evaluation.counts[synapse], evaluation.choices.get(synapse)
    by_planes = choice is None or choice.method != "dense"
    method, reason = "shortcut", ""
    if choice is not None:
        method = ("" if choice.kernel == "native" else f"{choice.kernel} ") + choice.method
        reason = choice.reason.replace("density ", "").replace("cross-over ", "")

    def per_image(count: int, expected: bool) -> str:
        return thousands(count / evaluation.images) if count or expected else ""

    return (
        synapse,
        method,
        per_image(counts.accumulations, by_planes),
        per_image(counts.formations, by_planes and choice is not None),
        per_image(counts.additions, by_planes),
        per_image(counts.products, False),
        reason,
    )


def render_exits(measured: ExitMeasurement, inputs: str) -> None:
    """inputs: what it was measured on."""
    from lbq.counting.analysis import GOLDEN, NO_TEST_SET

    console = make_console()
    rows = [
        (f"{t}", f"{count:,}", f"{100 * count / measured.images:.2f}") for t, count in enumerate(measured.stopped, 1)
    ]
    print_table(f"Where images stop, over {measured.images:,} of {inputs}", ("after timestep", "images", "%"), rows)
    if inputs.startswith(GOLDEN):
        console.print(NO_TEST_SET)
    modes = (("border-exact", measured.exact), ("rate x MACs", measured.rate))
    rows = [(mode, f"{count.unary / 1e6:,.2f}", f"{count.bit_sparse / 1e6:,.2f}") for mode, count in modes]
    print_table("Accumulations an image, millions, with those executed again", ("counted", "unary", "bit-sparse"), rows)
    accuracy = (
        "" if math.isnan(measured.accuracy) else f"accuracy {measured.accuracy:.2f} % on {measured.images:,} images; "
    )
    console.print(f"{accuracy}{measured.timesteps:.3f} timesteps executed an image")


def render_predictions(rankings: Mapping[str, Sequence[Mapping[str, Any]]], named: bool) -> None:
    """The classes of inputs, each under its name, or of one without."""
    console = make_console()
    width = max(len(entry["class"]) for classes in rankings.values() for entry in classes)
    for image, classes in rankings.items():
        if named:
            console.print(image, soft_wrap=True)
        for entry in classes:
            console.print(f"{'  ' * named}{entry['class']:<{width}}  {100 * entry['share']:6.2f} %")


def print_silent_layers(active: Mapping[str, float] | None) -> None:
    """Name layers that have all but stopped firing, on stderr: such a block only passes on what it gets."""
    silent = [f"{name} ({100 * share:.2g} %)" for name, share in (active or {}).items() if share < SILENT_SHARE]
    if silent:
        print_note(
            f"hardly any neuron fires in {', '.join(silent)}. If that costs accuracy: a smaller first step (neuron.step), or, "
            "where they are set, less decay of steps (optim.neuron_decay_factor) or a lower train.level_cost"
        )


def render_twins(gathered: Gathered) -> None:
    """Name the runs that a report leaves out, on stderr."""
    for folder, other in gathered.twins.items():
        print_note(
            f"{folder} has the very weights of {other}, which is reported for both: what differs in them changed nothing"
        )


def print_note(text: str) -> None:
    """A line on stderr."""
    make_console(stderr=True).print(text, soft_wrap=True)


def render_sweep(gathered: Gathered, page: Path) -> None:
    """What a sweep trained: one row for all seeds of a network."""
    from lbq.report.tables import runs_table

    render_table(runs_table(gathered), "Config", "Weights", "From")
    print_line(f"all tables and figures: {page}")
