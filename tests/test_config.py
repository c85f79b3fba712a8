"""Configurations: strict, typed, and readable again."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbq.config import BOOKKEEPING, LATER, Config, OptimConfig, TrainConfig, differences, recipe_hash
from lbq.errors import ConfigError
from lbq.neuron.base import neurons_of
from lbq.runs.build import build
from lbq.system import toml
from tests.support.paths import ROOT

SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
TABLES = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.one_of(SCALARS, st.lists(SCALARS, max_size=3)),
    max_size=5,
)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.one_of(SCALARS, TABLES), max_size=5
    )
)
def test_toml_round_trip(tree: dict[str, Any]) -> None:
    assert tomllib.loads(toml.write(tree)) == tree


def test_defaults_round_trip_through_a_file(tmp_path: Path) -> None:
    config = Config.from_dict({"seed": 3, "neuron": {"name": "lbq", "n_max": 7}, "optim": {"lr": 1}})
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert Config.load(path) == config
    assert config.optim.lr == 1.0  # an integer is fine where a number is asked for
    assert Config.load(path).hash == config.hash != Config().hash


@pytest.mark.parametrize("name", ["lbq", "v1", "qann"])
def test_one_initial_step_for_all_n_max(name: str) -> None:
    config = Config.from_dict({"neuron": {"name": name, "n_max": 10}})
    assert config.neuron == config.neuron_options == {"name": name, "n_max": 10, "step": 0.4}
    for n_max in ({}, {"n_max": 5}):  # the step is what it always was, and so is the hash
        assert Config(neuron={"name": name, **n_max}).neuron == {"name": name, **n_max}
    assert Config(neuron={"name": "ilif", "n_max": 10}).neuron == {"name": "ilif", "n_max": 10}


@pytest.mark.parametrize("kind", ["config.toml", "record.json"])
def test_what_was_trained_with_the_former_step_keeps_it(kind: str, tmp_path: Path) -> None:
    tree: dict[str, Any] = {**Config(seed=3).to_dict(), "neuron": {"name": "lbq", "n_max": 10}}
    path = tmp_path / kind
    path.write_text(toml.write(tree) if kind.endswith("toml") else json.dumps({"name": "", "config": tree}))
    config = Config.load(path)
    assert config.recipe_hash == recipe_hash(tree) != Config.from_dict(tree).recipe_hash
    assert config.neuron == {"name": "lbq", "n_max": 10, "step": "2 / n_max"}
    assert config.neuron_options == {"name": "lbq", "n_max": 10, "step": 0.2}
    again = tmp_path / "again.toml"
    again.write_text(Config.load(path, ["optim.lr=0.3"]).to_toml())
    assert Config.load(again).neuron == config.neuron
    assert Config.load(path, ["neuron.step=0.3"]).neuron_options["step"] == 0.3
    for neuron in neurons_of(build(config)).values():
        assert neuron.step.item() == pytest.approx(0.2, abs=1e-7)


def test_the_hash_is_of_what_changes_a_result() -> None:
    others: dict[str, Any] = {"name": "cifar10", "frames": "time", "precision": "bf16", "loss": "tet", "test": "never"}
    others |= {"ema": 0.5, "holdout": 0.5, "tet_weight": 0.5, "warmup_lr": 0.05, "level_cost_of": "unary"}
    others["weight_bits"] = 4
    for part, keys in BOOKKEEPING.items():
        for key, value in Config().to_dict()[part].items():
            if key not in others:
                others[key] = not value if isinstance(value, bool) else value + ("x" if value == "" else 1)
            changed = Config.from_dict({part: {key: others[key]}})
            assert (changed.hash == Config().hash) == (key in keys), key


def test_a_name_changes_no_hash_and_the_seed_no_recipe() -> None:
    plain, named, seeded = (Config.from_dict(tree) for tree in ({}, {"name": "LBQ"}, {"seed": 1, "name": "other"}))
    assert plain.hash == named.hash != seeded.hash
    assert plain.recipe_hash == named.recipe_hash == seeded.recipe_hash != plain.hash
    assert differences(plain, named) == []
    for later in ({"optim": {"sam": 0.05}}, {"optim": {"neuron_decay": "step"}}, {"augment": {"plain_epochs": 1}}):
        assert Config.from_dict(later).recipe_hash != plain.recipe_hash
    older = {part: values for part, values in plain.to_dict().items() if part != "name"}
    for part, defaults in LATER.items():
        older[part] = {key: value for key, value in older[part].items() if key not in defaults}
    assert recipe_hash(older) == plain.recipe_hash


def test_a_name_is_of_its_file_and_its_neuron(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('name = "Mine"\n[optim]\nlr = 0.2\n')
    assert Config.load(path, ["optim.lr=0.3", "neuron.n_max=3"]).name == "Mine"
    assert Config.load(path, ["neuron.name=v1"]).name == ""
    assert Config.load(path, ["neuron.name=v1", "name=V1 of mine"]).name == "V1 of mine"
    (tmp_path / "b.toml").write_text('base = "a.toml"\n[optim]\nmomentum = 0.5\n')
    derived = Config.load(tmp_path / "b.toml")
    assert (derived.name, derived.optim.lr) == ("", 0.2)


def test_whatever_changes_the_hash_is_named() -> None:
    one, other, none = (Config.from_dict({"neuron": {"name": "lbq", **o}}) for o in ({"beta": 1}, {"beta": 1.0}, {}))
    assert one.hash != other.hash
    assert differences(one, other) == ["neuron.beta: 1, 1.0"]
    assert differences(one, none) == ["neuron.beta: 1, null"]
    assert differences(one, one) == []


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"sead": 1}, r"unknown key 'sead'; did you mean 'seed'\?"),
        ({"epochs": 1}, r"unknown key 'epochs'; did you mean 'train.epochs'\?"),
        ({"model": {"lr": 1}}, r"unknown key 'model.lr'; did you mean 'optim.lr'\?"),
        ({"n_max": 1}, r"unknown key 'n_max'; did you mean 'neuron.n_max'\?"),
        ({"name": 3}, "name must be a string, got 3"),
        ({"name": "two\nlines"}, "name must be one line of text"),
        ({"device": "cuda"}, "unknown key .device.; it is an option of the command: --device"),
        ({"zzz": 1}, r"unknown key 'zzz'; known: augment, data, model, name, neuron, optim, seed, train"),
        ({"optim": {"lr": 1e300}}, "optim.lr must be > 0 and at most 3.4e38"),
        ({"optim": {"neuron_decay": "rho"}}, "optim.neuron_decay must be one of 'none', 'step', 'all'"),
        ({"augment": {"shift": -1}}, "augment.shift"),
    ],
)
def test_mistakes_name_the_field(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_dict(tree)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Config(train=TrainConfig(epochs=0)), "train.epochs must be >= 1, got 0"),
        (lambda: TrainConfig(precision="foo"), "train.precision must be one of 'fp32', "),
        (lambda: OptimConfig(lr="fast"), "optim.lr must be a number, got 'fast'"),  # type: ignore[arg-type]
        (lambda: Config(train={"epochs": 3}), "train must be a TrainConfig, got"),  # type: ignore[arg-type]
        (lambda: Config(seed=-1), "seed must be a non-negative integer"),
        (lambda: Config(optim=OptimConfig(sam=0.05), train=TrainConfig(accumulate=2)), "sam takes its batches whole"),
        (lambda: replace(Config(), train=replace(Config().train, warmup_epochs=20)), "must be less than train.epochs"),
    ],
)
def test_settings_made_in_python_are_checked_too(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_whole_numbers_stand_for_others() -> None:
    assert Config(optim=OptimConfig(lr=1)) == Config.from_dict({"optim": {"lr": 1.0}})
    assert Config(optim=OptimConfig(lr=1)).hash == Config.from_dict({"optim": {"lr": 1.0}}).hash


def test_file_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    with pytest.raises(ConfigError, match="run: Is a directory; give .*run/config.toml"):
        Config.load(tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot read .*missing.toml"):
        Config.load(tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    for data, message in ((b"seed = ", "valid TOML"), (b"\xff\xfe", "text in UTF-8")):
        broken.write_bytes(data)
        with pytest.raises(ConfigError, match=f"broken.toml is not {message}"):
            Config.load(broken)
    with pytest.raises(ConfigError, match="has no TOML form"):
        toml.write({"a": None})
    with pytest.raises(ConfigError, match=r"'data\\udcff' cannot be written as TOML, it is not UTF-8"):
        toml.write({"a": "data\udcff"})


def test_a_mistake_is_blamed_on_the_file_or_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[train]\nepochs = 7\nwarmup_epochs = 3\n")
    for change, message in (
        ("train.epoch=3", "^command line: unknown key 'train.epoch'"),
        ("train.epochs=2", r"^command line: train.warmup_epochs must be less than train.epochs \(2\), got 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            Config.load(path, [change])
    path.write_text("sed = 1")
    for changes in ([], ["train.epochs=3"]):
        with pytest.raises(ConfigError, match="c.toml: unknown key 'sed'"):
            Config.load(path, changes)


def test_files_compose_and_overrides_come_last(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "a.toml").write_text("seed = 1\n[train]\nepochs = 7\n[neuron]\nname = 'lbq'\nn_max = 9\n")
    child = tmp_path / "child.toml"
    child.write_text("base = 'base/a.toml'\n[train]\nbatch_size = 32\n[neuron]\nname = 'lif'\n")
    config = Config.load(child, ["seed=5", "data.name=cifar10", "optim.lr=0.3", "model.share_tail=true"])
    assert (config.seed, config.train.epochs, config.train.batch_size) == (5, 7, 32)
    assert config.neuron == {"name": "lif"}  # another neuron takes none of the base's options
    assert config.data.name == "cifar10"  # a bare word is a string
    assert config.optim.lr == 0.3
    assert config.model.share_tail is True
    child.write_text("base = 'base/a.toml'\n[neuron]\nn_max = 3\n")
    assert Config.load(child).neuron == {"name": "lbq", "n_max": 3, "step": 0.4}


@pytest.mark.parametrize("changes", [["neuron.n_max=3", "neuron.name=ilif"], ["neuron.name=ilif", "neuron.n_max=3"]])
def test_all_assignments_of_a_command_line_count_in_any_order(tmp_path: Path, changes: list[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[neuron]\nname = 'lbq'\nstep = 0.5\n")
    assert Config.load(path, changes).neuron == {"name": "ilif", "n_max": 3}
    assert toml.overrides(["a={b=1}", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}


@pytest.mark.parametrize("assignment", ["train.epochs", "=3", "train..epochs=3", ".x=1"])
def test_malformed_overrides_are_refused(tmp_path: Path, assignment: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text("")
    with pytest.raises(ConfigError, match="must have the form key=value"):
        Config.load(path, [assignment])


@pytest.mark.parametrize("both", [["train=5", "train.epochs=3"], ["train.epochs=3", "train=5"], ["a.b=1", "a.b.c=2"]])
def test_a_table_that_is_a_value_too_is_refused(both: list[str]) -> None:
    with pytest.raises(ConfigError, match="(train|b) is given both as a table and as a value: leave one of them out"):
        toml.overrides(both)
    assert toml.overrides(["train=5", "train=6"]) == {"train": 6}  # the last one counts


@pytest.mark.parametrize("where", ["file", "command line"])
@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1, 2**63, 2**64])
def test_a_seed_beyond_the_generators_is_told_what_is_taken(seed: int, where: str, tmp_path: Path) -> None:
    path, line = tmp_path / "c.toml", f"seed={seed}"
    path.write_text(line if where == "file" else "")
    changes = [line] if where == "command line" else []
    if seed == 2**63 - 1:
        assert Config.load(path, changes).seed == seed
        return
    taken = "a non-negative integer below 2^63" if seed == -1 else "an integer between -2^63 and 2^63"
    with pytest.raises(ConfigError, match=re.escape(f"seed must be {taken}, got {seed}")):
        Config.load(path, changes)


def test_a_number_inside_a_table_of_a_command_line_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^neuron.n_max must be an integer between -2\^63 and 2\^63, got 99999"):
        toml.overrides(["neuron={n_max = 99999999999999999999}"])


def test_a_value_of_several_lines_is_a_word() -> None:
    assert toml.overrides(["a=1\nb=2"]) == {"a": "1\nb=2"}


def test_a_record_is_a_configuration_too() -> None:
    for path in sorted((ROOT / "results").glob("*_s0.json")):
        stored = json.loads(path.read_text())
        assert Config.load(path).hash == stored["config_hash"], path
        assert Config.load(path).name == stored["name"]
    changed = Config.load(path, ["seed=7", "data.root=elsewhere"])
    assert (changed.seed, changed.data.root) == (7, "elsewhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "must hold a JSON object"),
        ('{"accuracy": 3}', "holds no configuration: give a TOML file, or a record"),
        ('{"config": {"train": {"epoch": 3}}}', "r.json: unknown key 'train.epoch'; did you mean 'epochs'"),
    ],
)
def test_json_that_is_no_record(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Config.load(path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*r.json: No such file or directory; give a record that"):
        Config.load(path)
