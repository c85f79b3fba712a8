"""What a report leads with: on each dataset one network, beside its ANN: accuracy, accumulations, energy. Modelled energies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lbq.counting.costs import costs
from lbq.counting.operations import Operations, energy_mj
from lbq.counting.technology import DEFAULT, Technology
from lbq.report.cells import dataset_name, decimals
from lbq.report.cost_tables import accounts_of
from lbq.report.figures import DATASET_LETTERS, Figure, padded, series_of, slug, titles
from lbq.report.svg import WIDTH, Drawing, broken
from lbq.report.theme import SERIES
from lbq.results.result import Gathered, Group

ANN_SERIES = 7  # grey, where no ANN was trained with the network
MOST_OTHERS = 4  # networks in a picture, besides the first and its ANN
NAME_LETTERS, BAR, VALUE = 17, 122.0, 294.0  # of a row: its name, where bars begin, and where they end at most
ROW, LINE, PANEL = 18.0, 13.0, 24.0  # heights


@dataclass(frozen=True)
class Row:
    """A network. series: its colour, as in other figures where these tell all rows apart.

    operations: millions of accumulations per image, of an ANN of MACs. Energies in microjoules per image. paper: in the
    paper's regime, an ANN in fp32; memory: on integers with memory, an ANN in int8. None: not known. read: how an ANN
    reads event frames, as the end of a sentence.
    """

    name: str
    series: int
    accuracy: float | None
    operations: float | None = None
    paper: float | None = None
    memory: float | None = None
    read: str = ""


@dataclass(frozen=True)
class Story:
    """lead: the network; name: in full; row: itself; ann: its ANN; others: of its task; chosen: how, of several; file: the part
    of a file's name that tells it from the stories of other datasets."""

    lead: Group
    name: str
    row: Row
    ann: Row | None
    others: tuple[Row, ...]
    chosen: str
    file: str = ""

    @property
    def dataset(self) -> str:
        return dataset_name(self.lead)

    @property
    def rows(self) -> list[Row]:
        return [self.row, *([self.ann] if self.ann else []), *self.others]


def stories(gathered: Gathered, technology: Technology = DEFAULT) -> list[Story]:
    """One for each dataset with a finished run, the one that stands for all first."""
    datasets: dict[str, list[Group]] = {}
    for group in gathered.groups:
        datasets.setdefault(group.dataset, []).append(group)
    series = series_of(gathered)
    every = [_story(groups, series, technology) for groups in datasets.values()]
    every.sort(key=lambda story: story.lead.first.prominence, reverse=True)
    files = [slug(story.lead.dataset, DATASET_LETTERS) for story in every]
    return [
        replace(story, file=f"{file}-{i}" if file in files[:i] else file)
        for i, (story, file) in enumerate(zip(every, files, strict=True))
    ]


def accuracy_of(group: Group) -> float | None:
    """The mean as trained; on integers where nothing else is left of the run."""
    known = [a for r in group.results if (a := r.integer_accuracy) is not None]
    return group.mean if group.mean is not None else fmean(known) if known else None


def _story(groups: Sequence[Group], series: dict[str, int], technology: Technology) -> Story:
    spiking = [g for g in groups if g.record.get("n_max")] or groups
    candidates = [g for g in spiking if g.record["variant"] == "lbq"] or spiking
    held_out = all(g.holdout_mean is not None for g in candidates)
    lead = max(candidates, key=lambda g: (g.holdout_mean if held_out else accuracy_of(g)) or 0.0)
    chosen = ""
    if len(candidates) > 1:
        where = f"on held-out samples ({lead.holdout_mean:.2f} %)" if held_out else "on the test set itself"
        chosen = f"It is the highest of {len(candidates)} {where}."
    anns = [g for g in groups if not g.record.get("n_max") and _task(g)[:2] == _task(lead)[:2] and g is not lead]
    ann = max(anns, key=lambda g: (_task(g) == _task(lead), accuracy_of(g) or 0.0), default=None)
    others = _others(lead, [g for g in spiking if g is not lead and _task(g) == _task(lead)])
    shown = [lead, *([ann] if ann else []), *others]
    full = titles([g.results for g in shown])
    colours = [series[g.first.source] % SERIES for g in shown]
    if len({*colours, ANN_SERIES}) <= len(colours):  # other recipes count their colours anew
        colours = list(range(len(shown)))
    (name, colour), *looks = zip(_short(full), colours, strict=True)
    row = _row(lead, name, colour, technology)
    beside = None
    if ann is not None or row.operations is not None:
        beside = _ann_row(lead, ann, *(looks.pop(0) if ann else ("ANN", ANN_SERIES)), technology)
    rows = [_row(group, *look, technology) for group, look in zip(others, looks, strict=True)]
    return Story(lead, full[0], row, beside, tuple(rows), chosen)


def _task(group: Group) -> tuple[str, str, int]:
    return group.dataset, str(group.record["model"]), int(group.record["epochs"])


def _others(lead: Group, groups: Sequence[Group]) -> list[Group]:
    """All of few; of many the best of each neuron, N_max and T that is not the lead's."""
    ranked = sorted(groups, key=lambda g: accuracy_of(g) or 0.0, reverse=True)
    if len(ranked) > MOST_OTHERS:
        kinds = {
            tuple(g.record.get(key) for key in ("variant", "n_max", "timesteps")): g for g in (*ranked[::-1], lead)
        }
        ranked = [g for g in ranked if g in kinds.values()][:MOST_OTHERS]
    return ranked


def _short(full: Sequence[str]) -> list[str]:
    """Each long name up to its first comma where no other begins so; the others in full, for what follows tells them apart."""
    heads = [name.partition(", ")[0] for name in full]
    return [
        head if len(name) > NAME_LETTERS and heads.count(head) == 1 else name
        for head, name in zip(heads, full, strict=True)
    ]


def _row(group: Group, name: str, series: int, technology: Technology) -> Row:
    counted = accounts_of(group)
    if not counted:
        return Row(name, series, accuracy_of(group))
    paper = [1e3 * energy_mj(rate.operations(), technology.paper) for _, rate in counted]
    memory = [costs(exact, technology).methods[0].memory_uj for exact, _ in counted]
    executed = [rate.executed / 1e6 for _, rate in counted]
    return Row(name, series, accuracy_of(group), fmean(executed), fmean(paper), fmean(memory))


def _ann_row(lead: Group, ann: Group | None, name: str, series: int, technology: Technology) -> Row:
    """The ANN: its accuracy where one was trained; its counts and energies follow from the lead's network.

    Of event frames it makes one pass over their sum, or one over each if it was trained so.
    """
    accuracy = None if ann is None else accuracy_of(ann)
    counted = accounts_of(lead)
    if not counted:
        return Row(name, series, accuracy)
    exact, rate = counted[0]
    passes, read = 1, f", in one pass over the sum of the {exact.frames} frames" if exact.frames > 1 else ""
    if ann is not None and exact.frames > 1 and (steps := int(ann.record["timesteps"])) > 1:
        passes, read = steps, f", in a pass over each of its {steps} frames"
    int8 = next(m for m in costs(exact, technology).methods if m.name == "ANN, int8")
    paper = 1e3 * energy_mj(Operations(passes * rate.ann_macs), technology.paper)
    operations, memory = passes * rate.ann_macs / 1e6, passes * int8.memory_uj
    return Row(name, series, accuracy, operations, paper, memory, read)


def shown_number(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else decimals(value)}f}"


def picture(story: Story) -> Figure:
    """Accuracy, accumulations and energy of a story's rows, one below the other."""
    rows = story.rows
    unit, scale = ("mJ", 1e-3) if any((r.paper or 0) >= 1000 for r in rows) else ("µJ", 1.0)
    accuracies = [r.accuracy for r in rows]
    panels: list[tuple[str, list[float | None]]] = [
        ("Accumulations per image, millions; ANN: MACs", [r.operations for r in rows]),
        (f"Energy, {unit} modelled: the paper's prices, ANN in fp32", [_times(r.paper, scale) for r in rows]),
        (f"Energy, {unit} modelled: integers and memory, ANN in int8", [_times(r.memory, scale) for r in rows]),
    ]
    drawing = Drawing(WIDTH, 0, f"{rows[0].name} on {story.dataset}", _description(rows))
    record = story.lead.record
    facts = [
        str(record["model"]),
        f"T = {record['timesteps']}",
        *[f"N_max = {record['n_max']}"] * bool(record.get("n_max")),
    ]
    y = 60 + drawing.head(8, drawing.title, ", ".join(facts))
    known = [a for a in accuracies if a is not None]
    if known:
        low, high = padded(known)
        high = min(high, 100.0)
        y = _panel(drawing, y, f"Test accuracy, %, drawn from {low:.1f} to {high:.1f}", rows, accuracies, (low, high))
    for heading, values in panels:
        if any(value is not None for value in values):
            y = _panel(drawing, y, heading, rows, values)
    drawing.height = y - 12
    caption = (
        "Energies are modelled: counts times published prices. Counts are rate x MACs, as the paper counts; with memory, "
        "border-exact."
    )
    if rows[0].operations is None:
        caption = "Accumulations and energy: not counted yet."
        if not record.get("n_max"):
            caption = "Accumulations and energy: with a spiking network beside it."
    return Figure(f"story-{story.file}", "At a glance", caption, drawing.svg())


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _description(rows: Sequence[Row]) -> str:
    def text(row: Row) -> str:
        accuracy = "no accuracy" if row.accuracy is None else f"{row.accuracy:.2f} %"
        return f"{row.name}: {accuracy}" + (f", {row.operations:.4g} M" if row.operations is not None else "")

    return "; ".join(map(text, rows))


def _panel(
    drawing: Drawing, y: float, heading: str, rows: Sequence[Row], values: Sequence[float | None],
    dots: tuple[float, float] | None = None,
) -> float:  # fmt: skip
    """A line for each row, with a bar from zero or, between the ends `dots`, a dot. Returns where the next panel begins."""
    drawing.text(8, y, heading, kind="soft small")
    y += ROW
    largest = max(value for value in values if value is not None)
    for row, value in zip(rows, values, strict=True):
        lines = broken(row.name, NAME_LETTERS - (row is rows[0]))  # bold letters are wider
        for i, line in enumerate(lines):
            drawing.text(8, y + LINE * i, line, kind="small bold" if row is rows[0] else "small")
        if value is not None:
            start, end = dots or (0.0, largest)
            length = (VALUE - BAR) * ((value - start) / (end - start) if end > start else 1.0)
            text = f"{value:.2f}" if dots else shown_number(value)
            if dots:
                drawing.segment((BAR, y - 4), (VALUE, y - 4), "grid")
                drawing.mark(BAR + length, y - 4, row.series, 4.5, f"{row.name}: {text}")
            else:
                drawing.rect(BAR, y - 10, max(length, 1.0), 11, f"s{row.series}", f"{row.name}: {text}")
            drawing.text(WIDTH - 8, y, text, "end", "bold" if row is rows[0] else "")
        else:
            drawing.text(WIDTH - 8, y, "not tested" if dots else "not counted", "end", "soft small")
        y += ROW + LINE * (len(lines) - 1)
    return y + PANEL - LINE


def sentences(story: Story) -> list[str]:
    """The story in words."""
    lead, ann, group = story.row, story.ann, story.lead
    said = []
    if lead.accuracy is not None:
        beside = "" if ann is None or ann.accuracy is None else f", the ANN of the same network {ann.accuracy:.2f} %"
        said.append(
            f"**{story.name}** reads **{lead.accuracy:.2f} %** of the test images of {story.dataset} right{beside}."
        )
    integers = [a for r in group.results if (a := r.integer_accuracy) is not None]
    if integers and group.mean is not None and len(integers) == len(group.results):
        said.append(f"On integers, deployed, it is {fmean(integers):.2f} %.")
    said += [story.chosen] * bool(story.chosen)
    if lead.operations is None:
        if group.record.get("n_max"):
            said.append(
                f"What it costs is not counted yet: `lbq analyze {_subject(group)}` counts it, and the next `lbq report` finds "
                "that file by itself."
            )
    elif ann is not None and ann.operations and ann.paper and lead.paper and ann.memory and lead.memory:
        said.append(
            f"An image takes **{shown_number(lead.operations)} million accumulations**, where the ANN takes "
            f"{shown_number(ann.operations)} million multiplications{ann.read}."
        )
        said.append("Both include padding: accumulations are counted as rate x MACs, as the paper counts them.")
        said.append(
            f"Modelled, that is {_share(lead.paper, ann.paper, 'the energy of the ANN')} at the paper's prices, float "
            f"against float, and **{_share(lead.memory, ann.memory, 'that of an int8 ANN')}** once memory is counted."
        )
    if group.record.get("n_max") and (ann is None or ann.accuracy is None):
        said.append(
            "No ANN of this network is here: train its configuration with `neuron.name=relu`, and name both runs."
        )
    return said


def _subject(group: Group) -> str:
    source = group.first.source
    return "RUN" if source.endswith(".json") or "`" in source else source


def _share(ours: float, theirs: float, whose: str) -> str:
    times = ours / theirs
    return f"{100 * times:.0f} % of {whose}" if times < 2 else f"{times:.1f} times {whose}"
