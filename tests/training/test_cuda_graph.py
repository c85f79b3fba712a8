"""Training steps as CUDA graphs, and batches prepared on a stream of their own. Needs a GPU but for the last tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lbq.batches.ahead import ahead
from lbq.batches.sources import open_source
from lbq.config import Config
from lbq.training.trainer import Trainer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def settings(**train: Any) -> Config:
    tree = {
        "model": {"id": "resnet8w16", "dropout": train.pop("dropout", 0.0)},
        "augment": {"shift": 1},
        "optim": {"lr": 0.05, "name": train.pop("optimiser", "sgd"), "clip": train.pop("clip", 0.0)}
        | train.pop("optim", {}),
        "train": {"epochs": 2, "batch_size": 128, "channels_last": True, **train},
    }
    return Config.from_dict(tree)


def trained(config: Config, graph: bool) -> tuple[dict[str, Tensor], list[float], Trainer]:
    config = replace(config, train=replace(config.train, cuda_graph=graph))
    trainer = Trainer(config, open_source(config, "cuda"), "cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        records = list(trainer.fit())
    finally:
        torch.use_deterministic_algorithms(False)
    return {k: v.clone() for k, v in trainer.net.state_dict().items()}, [r.loss for r in records], trainer


@needs_gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16"},
        {"optimiser": "adamw"},
        {"ema": 0.9, "clip": 1.0},
        {"dropout": 0.3},
        {"loss": "tet"},
        {"optim": {"sam": 0.05, "sam_epochs": 1}},
        {"level_cost": 0.5, "optim": {"sam": 0.05, "sam_epochs": 1}},
        {"level_cost": 0.5, "level_cost_above": 1e4},
        {"weight_bits": 4, "precision": "bf16", "ema": 0.9, "optim": {"sam": 0.05, "sam_epochs": 1}},
    ],
    ids=["sgd", "bf16", "adamw", "ema", "dropout", "tet", "sam", "priced", "priced above", "rounded"],
)
def test_a_captured_step_gives_the_bytes_of_the_step_itself(options: dict[str, Any]) -> None:
    plain, plain_losses, trainer = trained(settings(**options), graph=False)
    assert trainer.captured() is None
    captured, losses, trainer = trained(settings(**options), graph=True)
    recorded = trainer.captured()
    assert recorded is not None
    assert recorded.graph is not None
    assert losses == plain_losses
    assert all(torch.equal(v, captured[k]) for k, v in plain.items())


@needs_gpu
def test_a_captured_run_continues_from_its_state() -> None:
    config = settings()
    whole, _, _ = trained(config, graph=True)
    stopped = Trainer(config, open_source(config, "cuda"), "cuda", between_steps=lambda t: t.position.step == 7)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        list(stopped.fit())
        tensors, values = stopped.state()
        tensors = {k: v.clone() for k, v in tensors.items()}
        going_on = Trainer(config, open_source(config, "cuda"), "cuda")
        going_on.restore(tensors, values)
        list(going_on.fit())
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(v, whole[k]) for k, v in going_on.net.state_dict().items())


@needs_gpu
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"precision": "fp16"}, {"compile": True}])
def test_steps_that_cannot_be_captured_run_as_they_are(options: dict[str, Any]) -> None:
    config = settings(**options)
    assert Trainer(config, open_source(config, "cuda"), "cuda").captured() is None


@needs_gpu
def test_a_nan_in_a_captured_step_is_found_one_step_later() -> None:
    from lbq.training.divergence import Diverged

    config = settings()
    config = replace(config, optim=replace(config.optim, lr=1e30))
    with pytest.raises(Diverged, match="loss became"):
        list(Trainer(config, open_source(config, "cuda"), "cuda").fit())


def test_no_capture_on_a_cpu_whatever_is_asked() -> None:
    config = settings()
    assert config.train.cuda_graph
    assert Trainer(config, open_source(config)).captured() is None


@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"weight_bits": 4, "optim": {"sam": 0.05, "sam_epochs": 1}}])
def test_the_whole_step_that_a_graph_records_is_the_step_itself(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: in the branch for a captured step, called as it is."""

    def fitted() -> tuple[dict[str, Tensor], list[float]]:
        config = settings(**{"epochs": 1, **options})
        trainer = Trainer(config, open_source(config))
        records = list(trainer.fit())
        return {k: v.clone() for k, v in trainer.net.state_dict().items()}, [r.loss for r in records]

    plain, plain_losses = fitted()
    monkeypatch.setattr(Trainer, "captured", lambda self: self._whole)
    whole, losses = fitted()
    assert losses == plain_losses
    assert all(torch.equal(v, whole[k]) for k, v in plain.items())


def test_batches_come_in_order_and_end() -> None:
    made = [(torch.full((2,), float(i)), torch.tensor([i])) for i in range(5)]

    def source() -> Iterator[tuple[Tensor, Tensor]]:
        yield from made

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = [(x.to(device), labels.to(device)) for x, labels in made]
    seen = list(ahead(source(), device))
    assert [int(labels) for _, labels in seen] == list(range(5))


@needs_gpu
def test_one_trainer_after_another() -> None:
    """The first one's graph is freed by the garbage collector, which must not happen while the second records."""
    first, second = (trained(settings(), graph=True)[0] for _ in range(2))
    assert all(torch.equal(v, second[k]) for k, v in first.items())
