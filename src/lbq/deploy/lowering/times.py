"""Where time stands in a tensor, and what folding, unfolding and transposing make of that."""

from __future__ import annotations

from typing import Any, Literal

import torch

# [B, ...] of a static input; [1, B, ...], [T, B, ...] and [T * B, ...]; the same with time behind the batch: [B, 1, ...],
# [B, T, ...] and [B * T, ...]
Time = Literal["none", "one", "all", "folded", "one behind", "behind", "folded behind"]

BATCH_SIZE = 2**61 - 1  # stands for the batch's size: a prime, so that products of sizes stay distinct

FOLDED: dict[Time, Time] = {"one": "none", "all": "folded", "one behind": "none", "behind": "folded behind"}
UNFOLDED: dict[Time, Time] = {"folded": "all", "folded behind": "behind"}
SWAPPED: dict[Time, Time] = {"one": "one behind", "all": "behind", "one behind": "one", "behind": "all"}
SHOWN: dict[Time, Time] = {"none": "all", "one": "all", "one behind": "behind"}  # at every timestep
ONE_STEP: dict[Time, Time] = {"all": "one", "behind": "one behind"}  # the same where there is one timestep
AXIS: dict[Time, int] = {"all": 0, "behind": 1}  # of time

TRANSPOSES = (torch.transpose, torch.permute, torch.swapaxes, torch.swapdims, torch.movedim, "transpose", "permute",
              "swapaxes", "swapdims", "movedim")  # fmt: skip


def front(time: Time, steps: int) -> tuple[int, ...]:
    """The sizes in front of channels."""
    if time == "none":
        return (BATCH_SIZE,)
    if time in UNFOLDED:
        return (steps * BATCH_SIZE,)
    count = 1 if time in ("one", "one behind") else steps
    return (count, BATCH_SIZE) if time in ("one", "all") else (BATCH_SIZE, count)


def added(at: Any, by_index: bool) -> Time | None:
    """Where time is that x[at], or x.unsqueeze(at), puts before a static tensor; None where that does something else."""
    if not by_index:
        return "one" if at == 0 else "one behind" if at == 1 else None
    index = at if isinstance(at, tuple) else (at,)
    index = index[:-1] if index[-1:] == (...,) else index
    return "one" if index == (None,) else "one behind" if index == (slice(None), None) else None


def together(a: Time, b: Time) -> Time | None:
    """Of the sum of two tensors, as PyTorch broadcasts them; None where it would not pair time with time."""
    if a == b:
        return a
    for kinds in (("all", "one", "none"), ("behind", "one behind")):
        if a in kinds and b in kinds:
            return kinds[min(kinds.index(a), kinds.index(b))]
    return None
