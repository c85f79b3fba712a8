"""What a checkpoint must hold so that a run can go on from it. Anybody may have written it, with a right checksum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lbq.errors import RunError
from lbq.runs.checkpoint import Loaded
from lbq.system import schema
from lbq.system.schema import Fields, Items, Values
from lbq.training.trainer import Trainer

REMEDY = "remove it, and --resume auto takes the one before, or start again in another folder"
VALUES = Fields(
    {
        "position": Fields(dict.fromkeys(("epoch", "batch", "step", "stream"), schema.COUNT)),
        "tally": Items(Items(schema.AMOUNT, 3), 1),
        "scaler": Values(schema.NUMBER),
        "config_hash": schema.TEXT,
        "metrics_bytes": schema.COUNT,
    },
    {  # which older checkpoints lack
        "seconds": schema.AMOUNT,
        "data": Values(schema.TEXT),
        "first_steps": Values(schema.NUMBER),
        "environment": Values(schema.TEXT),
        "earlier": schema.TEXT,
        "init_sha256": schema.TEXT,
        "without_slots": Items(schema.TEXT),
    },
)


def check(trainer: Trainer, loaded: Loaded) -> None:
    """Refuse a checkpoint, whose network is the trainer's, that no run of this configuration can have written."""
    wrong = _position(trainer, loaded.values) or _scaler(trainer, loaded.values) or _tensors(trainer, loaded)
    if wrong:
        raise RunError(f"{loaded.path} is damaged: {wrong}; {REMEDY}")


def _position(trainer: Trainer, values: Mapping[str, Any]) -> str:
    position, batches, epochs = values["position"], trainer.batches, trainer.config.train.epochs
    epoch, batch, step, stream = (position[key] for key in ("epoch", "batch", "step", "stream"))
    if set(position) != {"epoch", "batch", "step", "stream"}:
        return "its position must be an epoch, a batch, a step and a stream"
    if epoch > epochs or batch > (batches if epoch < epochs else 0):
        return f"it stands at epoch {epoch}, batch {batch}, and the run has {epochs} epochs of {batches}"
    if not step == stream == epoch * batches + batch:
        return f"it stands at step {step} of stream {stream}, which is not epoch {epoch}, batch {batch}"
    tally = values["tally"]
    if len({len(row) for row in tally}) != 1 or len(tally[0]) > len(trainer.tally):
        return "its tally must be rows of three or four numbers"
    correct, seen = (sum(row[column] for row in tally) for column in (1, 2))
    if seen != batch * trainer.config.train.batch_size or correct > seen:
        return f"its tally counts {correct:g} right of {seen:g} samples after batch {batch}"
    if set(values.get("first_steps") or trainer.sentinel.first_steps) != set(trainer.sentinel.first_steps):
        return "its first steps are of other neurons"
    return ""


def _scaler(trainer: Trainer, values: Mapping[str, Any]) -> str:
    ours, theirs = trainer.scaler.state_dict(), values["scaler"]
    if set(theirs) != set(ours):
        return f"its scaler must have {', '.join(ours) or 'no values'}"
    positive = all(value > 0 for key, value in theirs.items() if key != "_growth_tracker")
    return "" if positive and theirs.get("_growth_tracker", 0) >= 0 else "its scaler's values must be above 0"


def _tensors(trainer: Trainer, loaded: Loaded) -> str:
    """What is wrong with the tensors: each must be there, of its shape and type, and finite."""
    state = trainer.net.state_dict()
    expected = {f"model/{name}": value for name, value in state.items()}
    if trainer.average is not None:
        expected |= {f"average/{name}": value for name, value in state.items()}
    parameters = dict(trainer.net.named_parameters())
    without = set(loaded.values.get("without_slots", ()))
    if loaded.values["position"]["step"]:
        for name in (name for name, p in parameters.items() if p.requires_grad and name not in without):
            expected |= {f"optim/{name}/{slot}": _like(slot, parameters[name]) for slot in slots(trainer)}
    if other := sorted(expected.keys() ^ loaded.tensors.keys()):
        return f"tensor {other[0]!r:.200} {'is missing' if other[0] in expected else 'belongs to nothing'}"
    for name, ours in expected.items():
        theirs = loaded.tensors[name]
        if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            kinds = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (ours, theirs))
            return f"tensor {name!r} must be {', not '.join(kinds)}"
        if theirs.is_floating_point() and not theirs.isfinite().all():
            return f"tensor {name!r} has numbers that are not finite"
        if name.endswith(("/exp_avg_sq", "/step", "running_var")) and (theirs < 0).any():
            return f"tensor {name!r} has negative numbers"
    return ""


def _like(slot: str, parameter: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32) if slot == "step" else parameter


def slots(trainer: Trainer) -> Iterable[str]:
    """The tensors that the optimiser keeps for each parameter."""
    settings = trainer.config.optim
    if settings.name == "adamw":
        return ("step", "exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if settings.momentum else ()
