"""Sweeps: what is planned, what is refused before anything begins, and what becomes of runs that end in every way."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from lbq.cli.render import render_sweep
from lbq.config import Config
from lbq.errors import ConfigError, RunError, Stopped
from lbq.report.formats import markdown
from lbq.report.tables import runs_table
from lbq.results.result import Gathered, Result
from lbq.runs import run_folder
from lbq.system import files
from lbq.training.sweep import Member, Outcome, Sweep, parse_vary, plan
from tests.support.commands import Call, status
from tests.support.paths import ROOT

CONFIGS = ROOT / "configs"
SMALL = ("model.id=resnet8w2", "train.epochs=1", "train.warmup_epochs=0")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "family" / "small.toml"
    file.parent.mkdir()
    file.write_text('[augment]\nshift = 1\n[model]\nid = "resnet8w2"\n[neuron]\nname = "lbq"\n')
    return file


def planned(config: Path, out: Path, *vary: str) -> list[Member]:
    return plan([str(config), *SMALL], [parse_vary(text) for text in vary], out)


# What there is to do
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("seed=0,1,2", "seed", ["0", "1", "2"]),
        ("neuron.n_max=5", "neuron.n_max", ["5"]),
        (" seed = 0 , 1 ", "seed", ["0", "1"]),
        ("neuron.thresholds=[1, 2.5],[1, 2]", "neuron.thresholds", ["[1, 2.5]", "[1, 2]"]),
        ("neuron.thresholds=[1, [2, 3]],[1]", "neuron.thresholds", ["[1, [2, 3]]", "[1]"]),
        ('data.root="a,b",c', "data.root", ['"a,b"', "c"]),
        ("data.root='a,b',c", "data.root", ["'a,b'", "c"]),
        ("neuron={name='lbq', n_max=3},{name='lif'}", "neuron", ["{name='lbq', n_max=3}", "{name='lif'}"]),
        ("seed=[1,2", "seed", ["[1", "2"]),  # refused as values, not read as others
        ('seed="1', "seed", ['"1']),
    ],
)
def test_values_of_a_key(text: str, key: str, values: list[str]) -> None:
    assert parse_vary(text) == (key, values)


@pytest.mark.parametrize("text", ["seed", "=1", "seed=", "seed= ,1", "seed=,1", "seed=1,", "seed=1,,2", "seed=1,1"])
def test_values_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--vary"):
        parse_vary(text)


def test_one_run_of_everything_comes_before_the_next_seed(config: Path, tmp_path: Path) -> None:
    other = config.with_name("other.toml")
    other.write_text('base = "small.toml"\n[neuron]\nname = "lif"\n')
    members = plan([str(config.parent), *SMALL], [("seed", ["3", "4"]), ("model.timesteps", ["1", "2"])], tmp_path)
    assert [m.folder.name for m in members] == [
        f"family-{name}-timesteps={steps}-s{seed}" for seed in (3, 4) for steps in (1, 2) for name in ("other", "small")
    ]
    assert {(m.config.seed, m.config.model.timesteps, m.config.train.epochs) for m in members} == {
        (seed, steps, 1) for seed in (3, 4) for steps in (1, 2)
    }
    assert members[0].training("cpu") == [
        "train", str(other), *SMALL, "seed=3", "model.timesteps=1", "name=Binary LIF, model.timesteps=1",
        "--out", str(members[0].folder), "--resume", "auto", "--device", "cpu",
    ]  # fmt: skip


def test_a_name_says_what_is_varied(config: Path, tmp_path: Path) -> None:
    def names(*vary: str) -> list[str]:
        return [member.name for member in planned(config, tmp_path, *vary)]

    assert names("optim.lr=0.1,0.2", "seed=0") == ["LBQ, optim.lr=0.1", "LBQ, optim.lr=0.2"]
    assert names("seed=0,1") == ["", ""]
    assert names("neuron.name=v1,relu") == ["", ""]  # their titles say it
    assert names("neuron.name=v1", "optim.lr=0.1") == ["V1 (fixed + box), optim.lr=0.1"]
    config.write_text(f'name = "Mine"\n{config.read_text()}')
    assert names("optim.lr=0.1") == ["Mine, optim.lr=0.1"]
    (member,) = planned(config, tmp_path, "optim.lr=0.1")
    assert Config.load(member.file, member.training()[2:-4]).name == "Mine, optim.lr=0.1"


def test_a_run_is_called_the_same_wherever_it_is_planned(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, given in ((tmp_path, "family"), (config.parent, config.name), (config.parent, "../family/small.toml")):
        monkeypatch.chdir(place)
        (member,) = plan([given], [], tmp_path)
        assert member.folder.name == "family-small-s0"


def test_other_data_is_another_run(config: Path, tmp_path: Path) -> None:
    one, other = planned(config, tmp_path, "data.root=a/one,two")
    assert one.config.hash == other.config.hash
    assert [m.folder.name for m in (one, other)] == ["family-small-root=a_one-s0", "family-small-root=two-s0"]


def test_keys_that_end_alike_are_told_whole(config: Path, tmp_path: Path) -> None:
    keys = [("neuron.name", ["v1"]), ("data.name", ["digits"])]
    (member,) = plan([str(config), *SMALL], keys, tmp_path)
    assert member.folder.name == "family-small-neuron.name=v1-data.name=digits-s0"


def test_what_has_no_integer_network_says_why(config: Path, tmp_path: Path) -> None:
    names = ("lbq", "lif", "relu", "lmht", "mlf")
    members = dict(zip(names, planned(config, tmp_path, f"neuron.name={','.join(names)}"), strict=True))
    assert [name for name, member in members.items() if member.lacks] == ["relu", "mlf"]
    assert "spiking" in members["relu"].lacks
    assert "several membranes" in members["mlf"].lacks
    assert list(members["mlf"].measuring()) == []
    small, large = planned(config, tmp_path, "neuron.n_max=255,300")
    assert not small.lacks
    assert "levels are 8-bit" in large.lacks


def test_every_table_of_the_paper_can_be_planned(tmp_path: Path) -> None:
    """All configurations that ship, but the bases, may be runs of one sweep."""
    folders = sorted({file.parent for file in CONFIGS.glob("*/*.toml")} - {CONFIGS / "base"})
    members = plan([*map(str, folders), "data.root=DIR"], [], tmp_path)
    assert len(members) == sum(len(list(folder.glob("*.toml"))) for folder in folders)
    for member in members:
        if not member.unmeasured and member.config.data.name != "digits":
            deploy, analyse = member.measuring()
            assert deploy == ["deploy", str(member.folder), "data.root=DIR", "-o", str(member.folder / "model.lbq")]
            assert analyse == ["analyze", str(member.folder / "model.lbq"), "--data", "DIR"]


def test_what_is_never_tested_is_not_deployed_either(config: Path, tmp_path: Path) -> None:
    """Both commands look at the test set."""
    (member,) = plan([str(config), "train.test=never"], [], tmp_path)
    assert not member.lacks
    assert member.unmeasured == "train.test=never keeps it off the test set"
    assert not list(member.measuring())


def test_where_data_lies_is_passed_on(config: Path, tmp_path: Path) -> None:
    (member,) = plan([str(config), 'data.root="2024"', "data.name=mnist"], [], tmp_path)
    deploy, analyse = member.measuring()
    assert 'data.root="2024"' in deploy  # as it was given, no number
    assert analyse[-2:] == ["--data", "2024"]
    (member,) = plan([str(config), "data.root=of/others"], [], tmp_path)
    assert not [word for command in member.measuring() for word in command if "of/others" in word]  # digits lie nowhere


@pytest.mark.parametrize(
    ("given", "vary", "message"),
    [
        ([], [], "needs configurations"),
        (["train.epochs=1"], [], "needs configurations"),
        (["nowhere.toml"], [], "nowhere.toml does not exist"),
        (["a dir=b/nowhere.toml"], [], "nowhere.toml does not exist"),
        ([os.devnull], [], "is not a file"),
        (["{empty}"], [], "holds no configurations"),
        (["{config}", f"neuron.thresholds={[1] * 200}"], [], "has no option 'thresholds'"),
        (["{config}"], [f"neuron.surrogate=box,{'x' * 300}"], "put long values in configurations of their own"),
        (["{config}", "train.epoch=1"], [], "did you mean 'epochs'"),
        (["{config}"], ["neuron.nmax=1,2"], "did you mean 'n_max'"),
        (["{config}", "seed=1"], ["seed=1,2"], "seed is both varied and changed"),
        (["{config}"], ["seed=1,2", "seed=3"], "seed is given twice"),
        (["{config}", "{copy}"], [], "are the same run"),
        (["{config}", "{twin}"], [], "both called family-small-s0: rename one"),
        (["{config}"], ["train.epochs=2,2.0"], "train.epochs must be an integer"),
    ],
)
def test_mistakes_are_found_before_anything_begins(
    given: list[str], vary: list[str], message: str, config: Path, tmp_path: Path
) -> None:
    places = {"empty": tmp_path / "empty", "config": config, "copy": tmp_path / "a" / "copy.toml"}
    places["twin"] = tmp_path / "other" / "family" / "small.toml"
    for folder in ("empty", "a", "other/family"):
        (tmp_path / folder).mkdir(parents=True)
    places["copy"].write_text(config.read_text())
    places["twin"].write_text("seed = 0\n")
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=message):
        plan([text.format(**places) for text in given], [parse_vary(text) for text in vary], out)
    assert not out.exists()


def test_a_folder_of_another_configuration_is_refused(config: Path, tmp_path: Path) -> None:
    (member,) = planned(config, tmp_path)
    member.folder.mkdir()
    run_folder.write_text(member.folder / "config.toml", member.config.to_toml())
    assert planned(config, tmp_path)[0].folder == member.folder
    with pytest.raises(RunError, match=r"another configuration \(train.epochs: 1, 2\)"):
        plan([str(config), "train.epochs=2", "train.warmup_epochs=0"], [], tmp_path)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"notes.txt": ""}, "not empty and not a run folder"),
        ({"result.json": "{}"}, "not empty and not a run folder"),
        ({"config.toml": "", "conversion.json": "{}"}, "holds a converted network"),
        ({"config.toml": "", "result.json": "{"}, "result.json cannot be read as JSON: .*; remove it, and lbq train"),
        ({"config.toml": "", "result.json": "{}"}, "metrics.jsonl is missing: restore the file or train again"),
    ],
)
def test_what_a_folder_holds_is_known_before_anything_begins(
    contents: dict[str, str], message: str, config: Path, tmp_path: Path
) -> None:
    (member,) = planned(config, tmp_path)
    member.folder.mkdir()
    for name, text in contents.items():
        (member.folder / name).write_text(text or member.config.to_toml())
    with pytest.raises(RunError, match=message):
        planned(config, tmp_path)


@pytest.mark.parametrize(
    ("out", "message"),
    [("a.file", "it is a file"), ("x" * 300, "choose a shorter one"), ("taken", "s0: it is a file, give a folder")],
)
def test_a_place_that_cannot_be_used(out: str, message: str, config: Path, tmp_path: Path, call: Call) -> None:
    """For commands that are only printed too."""
    (tmp_path / "taken").mkdir()
    for file in ("a.file", "taken/family-small-s0"):
        (tmp_path / file).touch()
    assert message in call.refused("sweep", config, *SMALL, "-o", tmp_path / out, "--print")


# What becomes of runs
# ---------------------------------------------------------------------------------------------------------------------

Script = Callable[[Sequence[str]], int]


def trains(command: Sequence[str]) -> int:
    """What `lbq train` leaves behind where all is well."""
    if command[0] == "train":
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir(parents=True)
        for name in ("config.toml", "result.json"):
            (folder / name).touch()
    return 0


def swept(members: list[Member], monkeypatch: pytest.MonkeyPatch, script: Script) -> tuple[list[str], list[str]]:
    """The states that a sweep ends with, and the commands it gave; `script` stands for the commands."""
    given: list[str] = []

    def call(_: Sweep, command: Sequence[str]) -> int:
        given.append(command[0])
        return script(command)

    monkeypatch.setattr(Sweep, "_call", call)
    return [state for _, state in Sweep(members, lambda text: None).run()], given


def test_what_fails_takes_nothing_with_it(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = planned(config, tmp_path / "out", "seed=0,1,2")

    def script(command: Sequence[str]) -> int:
        if "seed=1" in command:  # began, and diverged
            members[1].folder.mkdir(parents=True)
            (members[1].folder / "config.toml").touch()
            return 2
        if command[0] == "deploy" and "s2" in command[1]:
            return 1
        return trains(command)

    states, given = swept(members, monkeypatch, script)
    assert states == ["done", "failed", "failed"]
    assert given == ["train", "deploy", "analyze", "train", "train", "deploy"]
    assert not members[0].folder.joinpath("model.lbq").exists()


def test_what_is_done_is_not_done_again(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = planned(config, tmp_path / "out", "seed=0,1")
    assert swept(members, monkeypatch, trains)[1] == ["train", "deploy", "analyze"] * 2
    (members[0].folder / "model.lbq").touch()
    assert swept(members, monkeypatch, trains)[1] == ["analyze", "deploy", "analyze"]
    made = json.loads((CONFIGS.parent / "results" / "nmnist_small_resnet8w16_t4_lbq_20ep_s0_analysis.json").read_text())
    (members[0].folder / "model.analysis").mkdir()
    for complete, left in ((False, ["analyze"]), (True, [])):  # of a few images is not done
        analysis = members[0].folder / "model.analysis" / "analysis.json"
        analysis.write_text(json.dumps({**made, "complete": complete}))
        assert swept(members[:1], monkeypatch, trains) == (["done"], left)


def test_what_cannot_begin_ends_no_other(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = planned(config, tmp_path / "out", "seed=0,1,2")
    states, _ = swept(members, monkeypatch, lambda command: 2 if "seed=1" in command else trains(command))
    assert states == ["done", "failed", "done"]


def test_what_cannot_begin_stops_the_sweep(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="family-small-s0 could not begin"):
        swept(planned(config, tmp_path / "out", "seed=0,1"), monkeypatch, lambda command: 2)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_what_another_process_is_at_is_left_to_it(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = planned(config, tmp_path / "out", "seed=0,1")
    with run_folder.locked(members[0].folder):
        assert run_folder.held(members[0].folder)
        states, given = swept(members, monkeypatch, trains)
        assert states == ["elsewhere", "done"]
        assert given == ["train", "deploy", "analyze"]
    assert not run_folder.held(members[0].folder)
    with run_folder.locked(members[1].folder):  # trained, and being deployed
        assert swept(members[1:], monkeypatch, trains) == (["elsewhere"], [])
        (without,) = planned(config, tmp_path / "another", "neuron.name=relu")
        without.folder.mkdir(parents=True)
        (without.folder / "result.json").touch()
        with run_folder.locked(without.folder):  # nothing is left to do there
            assert swept([without], monkeypatch, trains) == (["done"], [])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_whoever_asks_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a folder is held is asked by holding it for a moment."""
    with run_folder.locked(tmp_path):
        pass
    with open(tmp_path / ".lock") as file:
        assert files.lock(file, shared=True)
        assert not run_folder.held(tmp_path)  # one that asks is not one that holds
        monkeypatch.setattr(time, "sleep", lambda seconds: file.close())
        with run_folder.locked(tmp_path):  # and is waited for
            assert run_folder.held(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_and_the_sweep(
    number: signal.Signals, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sent it: the sweep alone is told here."""
    (member,) = planned(config, tmp_path / "out")
    began = threading.Event()
    children: list[subprocess.Popen[bytes]] = []

    class Child(subprocess.Popen[bytes]):
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__(["sleep", "60"])
            children.append(self)
            began.set()

    def interrupt() -> None:
        assert began.wait(30)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(subprocess, "Popen", Child)
    before = signal.getsignal(number)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Stopped, match=f"stopped by {number.name}: the same command goes on") as stopped:
        Sweep([member], lambda text: None).run()
    thread.join()
    assert stopped.value.code == 128 + number
    assert children[0].poll() == -signal.SIGTERM
    assert signal.getsignal(number) is before


def test_a_signal_between_commands_begins_no_other(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a command was begun"))
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        Sweep(planned(config, tmp_path / "out"), lambda text: signal.raise_signal(signal.SIGTERM)).run()


# The command
# ---------------------------------------------------------------------------------------------------------------------


def test_sweep(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    """A real one: a network that is deployed and one that is not, then the same again, in which nothing is left to do."""
    out = tmp_path / "out"
    command = ["sweep", str(config), *SMALL, "--vary", "neuron.name=lbq,relu", "-o", str(out), "--device", "cpu"]
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "lbq").mkdir(parents=True)
    (elsewhere / "lbq" / "__init__.py").write_text("raise ImportError('another package of this name')")
    monkeypatch.chdir(elsewhere)
    lines = call.printed(*command, "--print").splitlines()
    assert [line.split()[1] for line in lines] == ["train", "deploy", "analyze", "train"]
    assert call.json(*command, "--print") == {"commands": [shlex.split(line) for line in lines]}
    assert not out.exists()

    code, summary, progress = call(*command, "--json")
    assert code == 0
    facts = json.loads(summary)
    assert [row["state"] for row in facts["runs"]] == ["done", "done"]
    lbq, relu = facts["runs"]
    assert lbq["integer_accuracy"] is not None
    assert relu["integer_accuracy"] is None
    for row in facts["runs"]:
        stored = json.loads((Path(row["run"]) / "result.json").read_text())
        assert row["accuracy"] == stored["accuracy"]
    assert all(line in progress for line in lines)
    assert "not deployed: it has no spiking neurons" in progress
    assert facts["report"] == str(out / "report.html")
    page = (out / "report.html").read_text()
    assert "LBQ sweep out" in page

    monkeypatch.setattr(Sweep, "_call", lambda *_: pytest.fail("nothing is left to do"))
    table = call.printed(*command)
    assert all(text in table for text in ("LBQ", "ANN", "(1 seed)", "report.html"))
    page = (out / "report.html").read_text()

    command[command.index("neuron.name=lbq,relu")] = "neuron.name=relu"
    assert "LBQ" not in call.printed(*command)
    assert (out / "report.html").read_text() == page  # of all that lies there, this sweep's or not

    # a setting that changes nothing makes the same weights
    for member in planned(config, out, "neuron.name=relu", "optim.clip=100,200"):
        shutil.copytree(relu["run"], member.folder)
        run_folder.write_text(member.folder / "config.toml", member.config.to_toml())
        result = json.loads((member.folder / "result.json").read_text())
        run_folder.write_text(member.folder / "result.json", json.dumps({**result, "config_hash": member.config.hash}))
    command = ["sweep", str(config), *SMALL, "--vary", "neuron.name=relu", "--vary", "optim.clip=100,200"]
    _, summary, progress = call(*command, "-o", str(out), "--json")
    assert [row["accuracy"] for row in json.loads(summary)["runs"]] == [relu["accuracy"]] * 2
    assert "clip=200-s0 has the very weights of" in progress
    page = (out / "report.html").read_text()
    _, summary, progress = call("report", out, "-o", out / "report.html", "--title", "LBQ sweep out", "--json")
    assert json.loads(summary)["finished"] == 2  # the LBQ and the ANN
    assert "clip=200-s0 has the very weights of" in progress
    assert (out / "report.html").read_text() == page


def test_what_was_held_out_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"dataset": "digits", "model": "resnet8w2", "variant": "lbq", "n_max": 5, "timesteps": 2, "epochs": 1}
    record |= {"config_hash": "ab"}
    for held_out, shown in ((61.5, "61.50 (1 seed)"), (None, None)):
        accuracies = {"test_accuracy": 50.0, "holdout_accuracy": held_out}
        result = Result({**record, "seed": 0, "config": {"seed": 0}, **accuracies}, "out/a-s0")
        render_sweep(Gathered([result]), Path("page"))
        table = capsys.readouterr().out
        assert ("Held out %" in table) is (shown is not None)
        assert shown is None or shown in table
        assert "Accuracy of the last epoch" in table
        assert "SHA-256" not in table  # a note on columns that only the page has
        assert "SHA-256" in markdown([runs_table(Gathered([result]))])
        member = Member(Path("a.toml"), (), Config(), Path("out/a-s0"))
        outcome = Outcome([(member, "done")], Gathered([result]), None)
        assert outcome.to_dict()["runs"][0]["holdout_accuracy"] == held_out


def test_a_sweep_that_fails_exits_with_1(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def began(_: Sweep, command: Sequence[str]) -> int:
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir(parents=True)
        (folder / "config.toml").touch()
        return 2

    monkeypatch.setattr(Sweep, "_call", began)
    out = tmp_path / "out"
    assert status("sweep", str(config), *SMALL, "-o", str(out), "--json") == 1
    captured = capsys.readouterr()
    accuracies = dict.fromkeys(("accuracy", "integer_accuracy", "holdout_accuracy"))
    assert json.loads(captured.out) == {
        "runs": [{"run": str(out / "family-small-s0"), "state": "failed", **accuracies}],
        "report": None,
    }
    assert "failed:" in captured.err


@pytest.mark.parametrize(("device", "message"), [("tpu", "must be cpu or cuda"), ("cuda", "no GPU here")])
def test_a_device_that_is_none(device: str, message: str, config: Path, tmp_path: Path, call: Call) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    out = tmp_path / "out"
    assert message in call.refused("sweep", config, *SMALL, "-o", out, "--device", device)
    assert not out.exists()
    # commands may be printed for another machine
    code = 2 if device == "tpu" else 0
    assert status("sweep", str(config), *SMALL, "-o", str(out), "--device", device, "--print") == code


def test_a_sweep_needs_no_launcher(config: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "without torchrun" in call.refused("sweep", config)
