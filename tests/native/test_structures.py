"""Structures and numbers that Python fills in and C reads: they stand in two files, and must be the same."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest

from lbq.engine import convolution, general, neuron, products, steps, tape
from lbq.kernels import cpu
from lbq.kernels.surrogate import SURROGATES
from lbq.native import C_TYPES, CPU_EXTRAS, HERE, ISAS

MIRRORS: dict[str, Any] = {
    "lbq_burst": cpu.BurstCall,
    "lbq_conv": convolution.ConvCall,
    "lbq_general": general.GeneralCall,
    "lbq_product": products.ProductCall,
    "lbq_gate": products.GateCall,
    "lbq_neuron": neuron.NeuronCall,
    "lbq_add": steps.AddCall,
    "lbq_pool": steps.PoolCall,
    "lbq_readout": steps.ReadoutCall,
    "lbq_step": tape.StepCall,
    "lbq_tally": steps.TallyCall,
    "lbq_histogram": steps.HistogramCall,
}


def declared() -> dict[str, list[tuple[str, Any]]]:
    """By structure of native.h, its fields in order with their types in ctypes."""
    text = re.sub(r"/\*.*?\*/", "", (HERE / "native.h").read_text(encoding="utf-8"), flags=re.S)
    found: dict[str, list[tuple[str, Any]]] = {}
    for name, body in re.findall(r"^struct (\w+) \{(.*?)^\};", text, re.S | re.M):
        fields = found.setdefault(name, [])
        for statement in filter(None, map(str.strip, body.split(";"))):
            words = statement.removeprefix("const ").split(maxsplit=1)
            kind, declarators = words[0].removesuffix("_t"), words[1].split(",")
            for declarator in declarators:
                pointer = "*" in declarator
                fields.append((declarator.replace("const", "").strip(" *"), C_TYPES["pointer" if pointer else kind]))
    return found


@pytest.mark.parametrize("name", declared())
def test_fields_are_the_same_in_c_and_python(name: str) -> None:
    assert [tuple(field) for field in MIRRORS[name]._fields_] == declared()[name]
    assert issubclass(MIRRORS[name], ctypes.Structure)


def test_every_mirror_has_its_structure() -> None:
    assert declared().keys() == MIRRORS.keys()


# By enum: what its members' names begin with, and the same numbers in Python.
NUMBERS: dict[str, tuple[str, Any]] = {
    "lbq_isa": ("LBQ_", ISAS),
    "lbq_feature": (
        "LBQ_HAS_",
        {**{n: 1 << i for n, i in ISAS.items() if i}, **{n: 1 << i for n, i in CPU_EXTRAS.items()}},
    ),
    "lbq_reset": ("RESET_", cpu.RESETS),
    "lbq_rounding": ("ROUND_", cpu.ROUNDINGS),
    "lbq_surrogate": ("", {s.name: s.code for s in SURROGATES.values() if s.code is not None}),
    "lbq_method": ("LBQ_", convolution.METHODS),
    "lbq_backend": ("LBQ_", convolution.BACKENDS),
    "lbq_step_kind": ("LBQ_STEP_", {kind: number for number, kind in enumerate(tape.KINDS)}),
}
OF_C_ALONE = {"lbq_lists"}


def enums() -> dict[str, dict[str, int]]:
    """By enum of the headers, its members' numbers."""
    found: dict[str, dict[str, int]] = {}
    known: dict[str, int] = {}
    for header in sorted(HERE.glob("*.h")):
        text = re.sub(r"/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.S)
        for name, body in re.findall(r"enum (\w+) \{(.*?)\};", text, re.S):
            members = found.setdefault(name, {})
            for number, member in enumerate(filter(None, map(str.strip, body.split(",")))):
                key, _, value = member.partition(" = ")
                known[key] = members[key] = eval(value, {}, known) if value else number  # such as 1 << LBQ_AVX2
    return found


def test_numbers_are_the_same_in_c_and_python() -> None:
    theirs = enums()
    assert theirs.keys() == NUMBERS.keys() | OF_C_ALONE
    for name, (prefix, ours) in NUMBERS.items():
        assert {prefix + key.upper(): number for key, number in ours.items()} == theirs[name], name


def test_the_engine_and_training_number_resets_alike() -> None:
    assert neuron.RESETS == cpu.RESETS
