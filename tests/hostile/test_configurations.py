"""Configurations that would take a machine's time or memory are refused before they are parsed, in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lbq.errors import ConfigError
from lbq.system import toml
from tests.support.commands import Call

DEEP = "lie more than 32 deep in each other"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a" + ".a" * 50_000 + " = 1", DEEP),
        ("[a" + ".a" * 5_000 + "]", DEEP),
        ("a = " + "[" * 5_000 + "]" * 5_000, DEEP),
        ("a = " + "{b=" * 5_000 + "1" + "}" * 5_000, DEEP),
        ("a = {b" + ".b" * 50_000 + " = 1}", DEEP),
        ("a = {b = 1, 'b'" + ' . "b"' * 32 + " = 1}", DEEP),
        ("a = " + f"{{b{'.b' * 31} = " * 31 + "1" + "}" * 31, DEEP),
        (
            '\\"' * 2**18,
            "is not valid TOML: Invalid statement",
        ),  # quotes that end no string: each was looked for to the end
        ("seed = " + "1" * 5_000, "is not valid TOML: Exceeds the limit"),
        (f"seed = {2**63}", "seed must be an integer between -2^63 and 2^63, got 9223372036854775808"),
        ("[train]\nx = [1, [-99999999999999999999]]", "train.x must be an integer between -2^63 and 2^63, got -999"),
        ("seed = 1\nseed = 2", "is not valid TOML: Cannot overwrite a value"),
        ("# " + "x" * 2**20, "is too large: at most 1,024 KiB are read"),
    ],
    ids=[
        "key",
        "table",
        "lists",
        "tables",
        "inline",
        "spaced",
        "together",
        "quotes",
        "digits",
        "integer",
        "inner",
        "twice",
        "size",
    ],
)
def test_limits(text: str, message: str, tmp_path: Path, call: Call) -> None:
    path = tmp_path / "hostile.toml"
    path.write_text(text)
    assert message in call.refused("train", path)


def test_brackets_and_dots_inside_strings_and_comments_count_nothing() -> None:
    dots, brackets = "." * 100, "[{" * 100
    text = f'a = "{dots}{brackets}"\nb = """{brackets}\n"{dots}"""\n"x{dots}" = 1 # {brackets}\nc = \'{brackets}\'\n'
    tree = toml.parsed(text)
    assert list(tree) == ["a", "b", f"x{dots}", "c"]
    assert toml.parsed("a = [[1, 2], [3]]\n[b.c]\nd = 0.5\n") == {"a": [[1, 2], [3]], "b": {"c": {"d": 0.5}}}


def test_numbers_are_no_dotted_keys() -> None:
    rows = [0.5] * 100
    assert toml.parsed(f"a = [\n{', '.join(map(str, rows))},\n]\nb = {{c.d = 0.5}}\n") == {
        "a": rows,
        "b": {"c": {"d": 0.5}},
    }


def test_pipes_and_devices_are_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    for base in (pipe, Path("/dev/zero")):
        own = tmp_path / "own.toml"
        own.write_text(f'base = "{base}"\n')
        with pytest.raises(ConfigError, match="is no regular file but a pipe or a device"):
            toml.read(own)


def test_a_long_number_on_the_command_line_is_a_word() -> None:
    assert toml.overrides([f"seed={'9' * 5000}"]) == {"seed": "9" * 5000}
