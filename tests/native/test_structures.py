"""Structures that Python fills and C reads: their fields stand in two files, and must be the same."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest

from lbq.engine import convolution, neuron, steps, tape
from lbq.kernels import cpu
from lbq.native import C_TYPES, HERE

MIRRORS: dict[str, Any] = {
    "lbq_burst": cpu.BurstCall,
    "lbq_conv": convolution.ConvCall,
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
