"""Axes that are followed say where every number of a tensor went, through whatever flattens, splits and exchanges them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lbq.deploy.lowering import axes as following
from lbq.deploy.lowering.axes import BATCH_SIZE, Axes, Axis, plain_axes, sizes_of, words

BATCH = 5


def real(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of a tensor, where a large prime stands for the batch."""
    return tuple(size // BATCH_SIZE * BATCH if size % BATCH_SIZE == 0 else size for size in sizes)


def back(x: Tensor, axes: Axes) -> Tensor:
    """A tensor in these axes as [T, B, C, H, W], flat."""
    atoms = list(chain(*axes))
    order = sorted(range(len(atoms)), key=lambda at: "tbchdyx".index(atoms[at].role))
    return x.reshape([BATCH if atom.role == "b" else atom.size for atom in atoms]).permute(order).flatten()


@given(
    steps=st.integers(1, 3),
    shape=st.tuples(st.sampled_from([1, 4, 6]), st.integers(1, 3), st.integers(1, 3)),
    time=st.sampled_from(["all", "folded", "behind", "folded behind"]),
    flat=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_operations(steps: int, shape: Any, time: Any, flat: bool, data: st.DataObject) -> None:
    axes = plain_axes(shape, time, flat, steps, signals=False)
    x = torch.arange(steps * BATCH * shape[0] * shape[1] * shape[2]).reshape(real(sizes_of(axes)))
    start = back(x, axes)
    for _ in range(data.draw(st.integers(1, 6))):
        kind, rank = data.draw(st.sampled_from(["flatten", "permute", "movedim", "unflatten", "reshape"])), x.dim()
        dims = st.integers(-rank, rank - 1)
        if kind == "flatten":
            first, last = sorted((data.draw(dims) % rank, data.draw(dims) % rank))
            made, x = following.flattened(axes, first, last), x.flatten(first, last)
        elif kind == "permute":
            order = tuple(data.draw(st.permutations(range(rank))))
            made, x = following.permuted(axes, "permute", order), x.permute(order)
        elif kind == "movedim":
            source, to = data.draw(dims), data.draw(dims)
            made, x = following.permuted(axes, "movedim", (source, to)), x.movedim(source, to)
        else:
            made, x = split(kind, axes, x, data)
        assert made is not None
        axes = made
        assert tuple(x.shape) == real(sizes_of(axes))
        torch.testing.assert_close(back(x, axes), start)


def split(kind: str, axes: Axes, x: Tensor, data: st.DataObject) -> tuple[Axes | None, Tensor]:
    """One axis taken apart, channels perhaps into heads, by its own sizes or by those of all."""
    at = data.draw(st.integers(0, len(axes) - 1))
    atoms: list[Axis] = [(atom,) for atom in axes[at]]
    halves = [atom for atom in axes[at] if atom.role == "c" and atom.size % 2 == 0]
    sizes = chain(*((2, atom.size // 2) if atom in halves else (atom.size,) for atom in chain(*atoms)))
    parts = tuple(sizes) or (1,)
    whole = sizes_of(axes)
    if kind == "unflatten":
        return following.unflattened(axes, at, parts), x.unflatten(at, real(parts))
    every = (*whole[:at], *parts, *whole[at + 1 :])
    return following.reshaped(axes, every), x.reshape(real(every))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (following.reshaped, None),  # rows and columns in other sizes
        (lambda axes, sizes: following.reshaped(axes, (2, -1, 6, 12)), "[T, B, channels, tokens]"),
        (lambda axes, sizes: following.reshaped(axes, (2, -1, 7, 12)), None),
        (lambda axes, sizes: following.reshaped(axes, "sizes"), None),
        (
            lambda axes, sizes: following.unflattened(axes, 2, (3, 2, 1)),
            "[T, B, heads, channels of a head, 1, height, width]",
        ),
        (lambda axes, sizes: following.unflattened(axes, 2, ("a", 2)), None),
        (lambda axes, sizes: following.unflattened(axes, 2, (6, 2)), None),
        (lambda axes, sizes: following.flattened(axes, 3, 2), None),
        (lambda axes, sizes: following.permuted(axes, "permute", (0, 1, 2, 3)), None),
        (lambda axes, sizes: following.permuted(axes, "transpose", ("a", 1)), None),
        (lambda axes, sizes: following.permuted(axes, "movedim", (0,)), None),
        (lambda axes, sizes: following.permuted(axes, "movedim", ((0, 0), (1, 2))), None),
    ],
)
def test_what_has_no_such_form(made: Any, expected: str | None) -> None:
    axes = plain_axes((6, 3, 4), "all", False, 2, signals=False)
    result = made(axes, (2, BATCH_SIZE, 6, 2, 6))
    assert (None if result is None else words(result)) == expected
