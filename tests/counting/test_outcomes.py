"""Which samples are right, as a record keeps it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbq.counting.outcomes import OUTCOMES, packed, unpacked
from lbq.errors import LbqError
from lbq.system.schema import problem


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_what_is_packed_comes_back(right: list[bool]) -> None:
    stored = packed(np.array(right))
    assert problem(stored, OUTCOMES) is None
    assert unpacked(stored, "r.json").tolist() == right


def test_ten_thousand_samples_are_short() -> None:
    assert len(packed(np.ones(10_000, np.bool_))["bits"]) == 1668


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"samples": 9, "bits": "/w=="}, "r.json is damaged: it has 8 bits for 9 samples"),
        ({"samples": 8, "bits": "?w=="}, "r.json is damaged: the bits of its samples are no base64"),
        ({"samples": 8, "bits": "ü"}, "no base64"),
    ],
)
def test_damaged_ones_are_refused(stored: dict[str, object], message: str) -> None:
    with pytest.raises(LbqError, match=message):
        unpacked(stored, "r.json")
