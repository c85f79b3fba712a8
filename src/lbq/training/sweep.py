"""A sweep: configurations times varied settings, each trained in a run folder of its own, deployed and analysed.

Every step is a command that a user could type, in a process of its own, so that a failure ends nothing else. Finished steps
are not repeated, and runs of other processes are left to them. So a sweep may be stopped and repeated at any moment, and
started several times at once, on a GPU each.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lbq.config import Config, differences
from lbq.counting import analysis as analyze
from lbq.errors import Busy, ConfigError, GraphError, LbqError, RunError, Stopped
from lbq.graph.quantise import check_neuron
from lbq.neuron.base import SpikingNeuron
from lbq.neuron.registry import create
from lbq.report.output import make
from lbq.results.gather import ARCHIVE, ARCHIVE_ANALYSIS, gather
from lbq.results.result import Gathered, Result, title_of
from lbq.runs import records, run_folder
from lbq.runs.build import outline
from lbq.system import files, plugins, toml
from lbq.system.signals import STOPS, noting

REPORT = "report.html"  # in the sweep's folder
LONGEST_NAME_BYTES = 255  # of a folder, on all common file systems
State = Literal["done", "failed", "elsewhere"]  # elsewhere: another process is working on it


@dataclass(frozen=True)
class Member:
    """One run of a sweep. changes: for `lbq train`. lacks: why it has no integer network, if it has none. name: of its record,
    where settings are varied; otherwise empty, and its configuration names it."""

    file: Path
    changes: tuple[str, ...]
    config: Config
    folder: Path
    lacks: str = ""
    name: str = ""

    @property
    def trained(self) -> bool:
        return (self.folder / "result.json").is_file()

    @property
    def unmeasured(self) -> str:
        """Why it is not deployed and analysed, if it is not: both read the test set."""
        return self.lacks or ("train.test=never keeps it off the test set" if self.config.train.test == "never" else "")

    def training(self, device: str | None = None) -> list[str]:
        """The command that trains it or continues its training."""
        command = ["train", str(self.file), *self.changes]
        command += [toml.assignment("name", self.name)] if self.name else []
        command += ["--out", str(self.folder), "--resume", "auto"]
        return command + ([] if device is None else ["--device", device])

    def measuring(self) -> Iterator[list[str]]:
        """The commands, not done yet, that deploy it and analyse the deployed network."""
        model, analysis = self.folder / ARCHIVE, self.folder / ARCHIVE_ANALYSIS
        if self.unmeasured or (analysis.is_file() and analyze.load(analysis).of_test_set):
            return
        root = "" if self.config.data.name == "digits" else self.config.data.root  # digits come with lbq
        if not model.is_file():
            change = [toml.assignment("data.root", root)] if root else []
            yield ["deploy", str(self.folder), *change, "-o", str(model)]
        yield ["analyze", str(model), *(["--data", root] if root else [])]


# Planning
# ------------------------------------------------------------------------------------------------------


def parse_vary(text: str) -> tuple[str, list[str]]:
    """`seed=0,1,2` as a key and its values. A list, a table or a string of TOML is one value, with all its commas."""
    key, equals, values = text.partition("=")
    pieces, parsed = values.split(","), []
    while pieces:
        joined = itertools.accumulate(pieces, lambda one, other: f"{one},{other}")
        length = next((count for count, value in enumerate(joined, 1) if toml.is_value(value)), 1)
        parsed.append(",".join(pieces[:length]).strip())
        del pieces[:length]
    if not key.strip() or not equals or not all(parsed):
        raise ConfigError(f"--vary {text!r} must have the form key=value,value, such as seed=0,1,2")
    if repeated := _repeated(parsed):
        raise ConfigError(f"--vary {text!r} has {repeated} twice: give it once")
    return key.strip(), parsed


def _repeated(texts: Sequence[str]) -> str | None:
    """The first text that stands there more than once."""
    return next((text for text, times in Counter(texts).items() if times > 1), None)


def plan(subjects: Sequence[str], vary: Sequence[tuple[str, Sequence[str]]], out: Path) -> list[Member]:
    """The runs of a sweep, checked before any of them begins: one of every configuration first, then the next value.

    subjects: configuration files, folders of them, and key=value changes for all of them. vary: keys and the values of each.
    out: the folder of the run folders.
    """
    if "RANK" in os.environ:
        raise LbqError("sweep starts processes of its own: start it without torchrun, once for each GPU")
    files.check_folder(out)
    files.check_file(out / REPORT)
    changes = [text for text in subjects if re.match(r"\s*[\w.-]+\s*=", text) and not os.path.exists(text)]
    configs = list(dict.fromkeys(file for text in subjects if text not in changes for file in _files(Path(text))))
    if not configs:
        raise ConfigError(
            "a sweep needs configurations: give files such as configs/digits/lbq.toml, or folders of them"
        )
    keys = [key for key, _ in vary]
    if repeated := _repeated(keys):
        raise ConfigError(f"--vary {repeated} is given twice: put all its values in one")
    if both := set(keys) & {text.partition("=")[0].strip() for text in changes}:
        raise ConfigError(f"{min(both)} is both varied and changed for all: give it once")
    members = [
        _member(file, changes, dict(zip(keys, values, strict=True)), out)
        for values in itertools.product(*(values for _, values in vary))
        for file in configs
    ]
    _refuse_twins(members)
    for member in members:
        _check_place(member)
    for folder in finished(out):  # a run that cannot be reported is refused now, not after the last run
        run_folder.read_result(folder)
        gather([folder], records.read)
    return members


def _files(path: Path) -> list[Path]:
    if os.path.isdir(path):  # takes names of any length
        configs = sorted(path.glob("*.toml"))
        if not configs:
            raise ConfigError(f"{path} holds no configurations (.toml): give files or folders of them")
        return configs
    if not os.path.isfile(path):
        wrong = "is not a file" if os.path.exists(path) else "does not exist"
        raise ConfigError(f"{path} {wrong}: give a configuration, a folder of them, or key=value")
    return [path]


def _member(file: Path, changes: Sequence[str], varied: dict[str, str], out: Path) -> Member:
    all_changes = (*changes, *(f"{key}={value}" for key, value in varied.items()))
    config = Config.load(file, all_changes)
    parts = [run_folder.default_name(Path(os.path.abspath(file)))]  # the same name from any working directory
    last_words = [key.rpartition(".")[2] for key in varied]
    for word, (key, value) in zip(last_words, varied.items(), strict=True):
        if key != "seed":
            parts.append(f"{word if last_words.count(word) == 1 else key}={value}")
    folder = re.sub(r"[^\w.=+-]", "_", "-".join([*parts, f"s{config.seed}"]))
    if len(os.fsencode(folder)) > LONGEST_NAME_BYTES:
        raise ConfigError(
            f"{file}: no folder can be called {folder[:40]}...: put long values in configurations of their own"
        )
    try:
        return Member(file, all_changes, config, out / folder, _lacks(config), _name(config, varied))
    except LbqError as error:
        raise ConfigError(f"{file}: {error}") from error


def _name(config: Config, varied: Mapping[str, str]) -> str:
    """The configuration's name or its variant's title, and the varied settings. Empty where these are seed and neuron alone:
    the title says the neuron, and reports say the seeds."""
    settings = [f"{key}={value}" for key, value in varied.items() if key not in ("seed", "neuron.name", "name")]
    base = config.name or title_of(records.describe(config)["variant"])
    return ", ".join([base, *settings]) if settings else ""


def _lacks(config: Config) -> str:
    """Why the network's neurons have no integer form; empty where they have one. Refuses unknown networks and neurons."""
    outline(config)
    neuron = create(**config.neuron_options, timesteps=config.model.timesteps, channels=1)
    if not isinstance(neuron, SpikingNeuron):
        return "it has no spiking neurons of lbq.neuron"
    try:
        check_neuron(str(config.neuron["name"]), replace(neuron.spec(), gain=1.0))  # weights take the gain
    except GraphError as error:
        return str(error)
    return ""


def _refuse_twins(members: Sequence[Member]) -> None:
    """One run under two names would count twice, and two runs of one name would share a folder."""
    first: dict[object, Member] = {}
    for member in members:
        run = member.config.hash, member.config.data.root  # other data: another run
        for key, problem in (
            (run, "are the same run: give one of them"),
            (member.folder, f"are both called {member.folder.name}: rename one, or sweep it to another --out"),
        ):
            if (other := first.setdefault(key, member)) is not member:
                both = " and ".join(" ".join([str(m.file), *m.changes]) for m in (other, member))
                raise ConfigError(f"{both} {problem}")


def _check_place(member: Member) -> None:
    """Refuse a folder that holds something else."""
    files.check_folder(member.folder, RunError)
    run_folder.refuse_foreign(member.folder)
    if not (member.folder / "config.toml").is_file():
        return
    stored = run_folder.load_config(member.folder)
    if stored.hash != member.config.hash:
        changes = "; ".join(differences(stored, member.config))
        raise RunError(f"{member.folder} holds another configuration ({changes}): choose another --out")


def finished(out: Path) -> list[Path]:
    """The run folders in a sweep's folder that are finished, of earlier sweeps too."""
    return sorted(path.parent for path in out.glob("*/result.json") if (path.parent / "config.toml").is_file())


def commands(members: Sequence[Member], device: str | None = None, deploy: bool = True) -> Iterator[list[str]]:
    """The commands that are left to do, as arguments of `lbq`."""
    for member in members:
        if not member.trained:
            yield [*plugins.options(), *member.training(device)]
        for command in member.measuring() if deploy else ():
            yield [*plugins.options(), *command]


# Running
# ------------------------------------------------------------------------------------------------------


class Sweep:
    """Runs the members one after another. say: called with every command before it runs, and with remarks."""

    def __init__(self, members: Sequence[Member], say: Callable[[str], None], device: str | None = None) -> None:
        self.members, self.say, self.device = members, say, device
        self.child: subprocess.Popen[bytes] | None = None
        self.signal = 0

    def run(self, deploy: bool = True) -> list[tuple[Member, State]]:
        """Train what is not trained yet and, where `deploy`, deploy and analyse it; what became of each."""
        states: list[tuple[Member, State]] = []
        with self._signals():
            for number, member in enumerate(self.members, 1):
                self.say(f"[{number}/{len(self.members)}] {member.folder.name}")
                if others := run_folder.other_files(member.folder):
                    self.say(
                        f"trained already, with other imports, {others}: give another --out to train it with this one"
                    )
                state = self._train(member)
                states.append((member, self._measure(member) if deploy and state == "done" else state))
        return states

    def _train(self, member: Member) -> State:
        if not (member.trained or run_folder.held(member.folder)):
            self._call(member.training(self.device))
        if member.trained:
            return "done"
        if run_folder.held(member.folder):
            return self._left(member)
        began = (member.folder / "config.toml").is_file()  # it does not begin where its input is wrong
        if not began and not any(other.trained for other in self.members):  # the others may be wrong too
            raise RunError(f"{member.folder.name} could not begin, as said above: the sweep stops here")
        return "failed"

    def _measure(self, member: Member) -> State:
        if member.unmeasured:
            self.say(f"not deployed: {member.unmeasured}")
        if not any(member.measuring()):
            return "done"
        try:
            with run_folder.locked(member.folder):
                # Another process may have done some of it by now: `measuring` looks again before each command.
                return "failed" if any(self._call(command) for command in member.measuring()) else "done"
        except Busy:
            return self._left(member)

    def _left(self, member: Member) -> State:
        self.say(f"{member.folder} is in another process's hands: left to it")
        return "elsewhere"

    def _call(self, command: Sequence[str]) -> int:
        """Run `lbq` with these arguments and show its progress, not its result. Returns its exit status."""
        self._obey()
        command = [*plugins.options(), *command]
        self.say(f"lbq {shlex.join(command)}")
        # This package runs, not another `lbq` in the working directory.
        path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-m", "lbq", *command],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        if self.signal:  # came while it was being started
            self.child.terminate()
        while (code := self.child.poll()) is None:
            time.sleep(0.1)  # wait() would hold back a signal that comes just before it
        self.child = None
        self.signal = self.signal or next((n for n in STOPS if code in (128 + n, -n)), 0)
        self._obey()
        if code < 0:
            self.say(f"ended by {signal.Signals(-code).name}")
        return code

    def _obey(self) -> None:
        if self.signal:
            name = signal.Signals(self.signal).name
            raise Stopped(f"stopped by {name}: the same command goes on from here", 128 + self.signal)

    def _signals(self) -> AbstractContextManager[None]:
        """Pass signals on to the running command, which saves and ends, always as SIGTERM: a terminal's interrupt reaches
        the command by itself, and a second interrupt would end it before it has saved."""

        def note(number: int, _usual: Any) -> None:
            self.signal = number
            if self.child is not None:
                self.child.terminate()

        return noting(note)


# Reporting
# ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """states: of each run. gathered: all finished runs in the sweep's folder, of earlier sweeps too. page: their report; None
    where no run is finished."""

    states: Sequence[tuple[Member, State]]
    gathered: Gathered
    page: Path | None

    @property
    def results(self) -> list[Result | None]:
        """The result of each run, or of another run with the same weights; None where there is none."""
        by_source = {result.source: result for result in self.gathered.results}
        folders = [self.gathered.twins.get(member.folder, member.folder) for member, _ in self.states]
        return [by_source.get(str(folder)) for folder in folders]

    @property
    def own(self) -> Gathered:
        """The results of this sweep alone."""
        sources = {result.source for result in self.results if result is not None}
        return Gathered([result for result in self.gathered.results if result.source in sources])

    @property
    def failed(self) -> list[Path]:
        return [member.folder for member, state in self.states if state == "failed"]

    @property
    def remarks(self) -> list[str]:
        """What the user should know or repeat."""
        elsewhere = any(state == "elsewhere" for _, state in self.states)
        others = "some runs were left to other processes: the sweep that ends last reports them all"
        return [others] * elsewhere + [f"failed: {folder}; the same command tries it again" for folder in self.failed]

    def to_dict(self) -> dict[str, Any]:
        """What `lbq sweep --json` prints."""
        rows = []
        for (member, state), result in zip(self.states, self.results, strict=True):
            keys = ("accuracy", "integer_accuracy", "holdout_accuracy")
            accuracies = {key: None if result is None else getattr(result, key) for key in keys}
            rows.append({"run": str(member.folder), "state": state, **accuracies})
        return {"runs": rows, "report": None if self.page is None else str(self.page)}


def report(out: Path, states: Sequence[tuple[Member, State]]) -> Outcome:
    """Gather all finished runs in a sweep's folder, and write their report beside them."""
    folders = finished(out)
    if not folders:
        return Outcome(states, Gathered(), None)
    gathered, page = gather(folders, records.read), out / REPORT
    make(page, gathered, title=f"LBQ sweep {out.resolve().name}")
    return Outcome(states, gathered, page)
