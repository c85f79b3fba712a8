"""Configurations: strict, typed, and readable again."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbq.config import Config, to_toml
from lbq.errors import ConfigError

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
    assert tomllib.loads(to_toml(tree)) == tree


def test_defaults_round_trip_through_a_file(tmp_path: Path) -> None:
    config = Config.from_dict({"seed": 3, "neuron": {"name": "lbq", "n_max": 7}, "train": {"lr": 1}})
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert Config.load(path) == config
    assert config.train.lr == 1.0  # an integer is fine where a number is asked for
    assert Config.load(path).hash == config.hash != Config().hash


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"sead": 1}, r"unknown key 'sead'; did you mean 'seed'\?"),
        ({"train": {"epoch": 1}}, r"unknown key 'train.epoch'; did you mean 'epochs'\?"),
        ({"zzz": 1}, r"unknown key 'zzz'; known: data, model, neuron, seed, train"),
        ({"train": {"epochs": 1.5}}, "train.epochs must be an integer, got 1.5"),
        ({"train": {"epochs": True}}, "train.epochs must be an integer, got True"),
        ({"train": {"lr": "fast"}}, "train.lr must be a number"),
        ({"train": {"lr": float("nan")}}, "train.lr must be finite"),
        ({"train": {"lr": 0}}, "train.lr must be > 0"),
        ({"train": {"epochs": 0}}, "train.epochs must be >= 1"),
        ({"train": {"batch_size": 1}}, "train.batch_size must be >= 2"),
        ({"train": {"momentum": 1}}, "train.momentum"),
        ({"train": {"weight_decay": -1}}, "train.weight_decay"),
        ({"train": {"epochs": 2, "warmup_epochs": 2}}, "train.warmup_epochs"),
        ({"train": 3}, "train must be a table"),
        ({"neuron": "lbq"}, "neuron must be a table"),
        ({"model": {"id": 20}}, "model.id must be a string"),
        ({"model": {"share_tail": 1}}, "model.share_tail must be true or false"),
        ({"data": {"name": "mnist"}}, "data.name must be 'digits'"),
        ({"data": {"shift": 9}}, "data.shift"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_mistakes_name_the_field(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_dict(tree)


def test_file_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read .*missing.toml"):
        Config.load(tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = ")
    with pytest.raises(ConfigError, match="broken.toml is not valid TOML"):
        Config.load(broken)
    broken.write_text("sed = 1")
    with pytest.raises(ConfigError, match="broken.toml: unknown key 'sed'"):
        Config.load(broken)
    with pytest.raises(ConfigError, match="has no TOML form"):
        to_toml({"a": None})
