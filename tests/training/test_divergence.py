"""Losses that are no numbers, steps that collapse, memory that runs out: where they happened and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lbq.errors import LbqError
from lbq.neuron import BurstNeuron
from lbq.training.divergence import Diverged
from lbq.training.trainer import Trainer
from tests.support import small_runs
from tests.support.commands import Call
from tests.support.small_runs import TINY, contents, differences, last_checkpoint, run, trainer, use_few_digits

config = partial(small_runs.config, TINY)


@pytest.fixture(autouse=True)
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_digits(monkeypatch)


def test_divergence_names_layer_and_step(tmp_path: Path, call: Call) -> None:
    file, out = tmp_path / "wild.toml", tmp_path / "run"
    file.write_text(config("optim.lr=1e38", "train.warmup_epochs=0", "optim.neuron_lr=1e-40").to_toml())
    code, _, err = call("train", file, "--out", out, "--device", "cpu")
    messages = [line for line in err.splitlines() if line.startswith("lbq: ")]
    assert code == 2
    assert len(messages) == 1
    assert "loss became" in messages[0]
    assert "epoch 1, step 2, first in layer '" in messages[0]
    assert "lower optim.lr (1e+38) or optim.neuron_lr (1e-40), or" in messages[0]
    loaded = last_checkpoint(out)
    assert loaded.values["position"]["step"] == 1
    file.write_text(config("train.level_cost=1e38", "train.warmup_epochs=0").to_toml())
    code, _, err = call("train", file, "--out", tmp_path / "dear", "--device", "cpu")
    assert code == 2
    assert "or train.level_cost (1e+38), or use a longer warm-up" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("layer", "where", "message"),
    [
        ("layer1.0.conv2", "weight", "epoch 2, step 3, first in the weights of layer 'layer1.0.conv2'"),
        ("conv1", "gradient", r"conv1\.weight is no longer finite after epoch 2, step 3"),  # the loss was still finite
    ],
)
def test_a_nan_stops_and_the_last_good_checkpoint_stays(layer: str, where: str, message: str, tmp_path: Path) -> None:
    right = Trainer._step

    def spoilt(self: Trainer, parts: Any) -> None:
        weight = self.net.get_parameter(f"{layer}.weight")
        if self.position.step == 6 and where == "weight":
            weight.data.view(-1)[0] = float("nan")
        elif self.position.step == 6:
            weight.register_hook(lambda grad: grad * float("nan"))
        right(self, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", spoilt)
        with pytest.raises(Diverged, match=message) as caught:
            run(config(), tmp_path / "run")
    assert "\n" not in str(caught.value)
    loaded = last_checkpoint(tmp_path / "run")
    assert loaded.values["position"]["step"] == 6
    assert all(value.isfinite().all() for value in loaded.tensors.values())
    run(config(), tmp_path / "run")  # the cause removed, it goes on
    run(config(), tmp_path / "whole")
    assert differences(contents(tmp_path / "whole"), contents(tmp_path / "run")) == []


def test_a_nan_in_the_data_is_named() -> None:
    made = trainer(config())
    right = made.source.train_batches

    def batches(*arguments: Any) -> Iterator[Any]:
        for x, y in right(*arguments):
            x[0, 0, 0, 0] = float("nan")
            yield x, y

    made.source.train_batches = batches  # type: ignore[method-assign, assignment]
    with pytest.raises(Diverged, match="epoch 1, step 1, first in the input"):
        list(made.fit())


def test_a_step_that_collapses_stops_training(tmp_path: Path) -> None:
    """Softplus has no slope there, so the layer would stay dead for the rest of the run."""
    wild = config("neuron.name=v3", "neuron.surrogate=box_et", "optim.neuron_lr=1e5", "optim.lr=0.1")
    with pytest.raises(
        Diverged, match=r"the step of layer '.*' fell from 0\.4 to .* by epoch 1, step \d+: lower optim"
    ) as e:
        run(wild, tmp_path / "run")
    assert "\n" not in str(e.value)
    tame = config("neuron.name=v3", "neuron.surrogate=box_et")
    run(tame, tmp_path / "tame")


@pytest.mark.parametrize(("step", "stops"), [(0.0002442, True), (0.0191705, False)])
def test_what_counts_as_collapsed(step: float, stops: bool) -> None:
    """The last step of a resnet20w128 without warm-up, which guessed ever after; the smallest of one that learned."""
    made = trainer(config("neuron.name=lbq"))
    neuron = made.net.sn1
    assert isinstance(neuron, BurstNeuron)
    with torch.no_grad():
        neuron.rho.fill_(math.log(math.expm1(step)))
    with pytest.raises(Diverged, match="fell from 0.4 to 0.000245.*a longer warm-up") if stops else nullcontext():
        made.sentinel.check_steps(made.position)


def test_small_steps_may_collapse_too_and_first_ones_are_remembered() -> None:
    made = trainer(config("neuron.name=lbq", "neuron.step=0.005"))
    neuron = made.net.sn1
    assert isinstance(neuron, BurstNeuron)
    with torch.no_grad():
        neuron.rho.fill_(-50.0)
    with pytest.raises(Diverged, match="the step of layer 'sn1' fell from 0.005 to 1e-06"):
        made.sentinel.check_steps(made.position)
    began = trainer(config())
    began.start_from(
        {name: torch.full_like(v, -10.0) for name, v in began.net.state_dict().items() if name.endswith("rho")}
    )
    again = trainer(config())
    again.restore(*began.state())
    again.sentinel.check_steps(again.position)  # 4.6e-5 is what they began with
    began.start_from(
        {name: torch.full_like(v, -50.0) for name, v in began.net.state_dict().items() if name.endswith("rho")}
    )
    began.sentinel.check_steps(began.position)  # nor did steps fall that began at the smallest there is


def test_an_overflow_of_half_precision_is_found_where_it_happens() -> None:
    made = trainer(config("train.precision=fp16"))
    with torch.no_grad():
        made.net.fc.weight.fill_(1e5)  # fine in float32
    with pytest.raises(Diverged, match="first in layer 'fc'"):
        list(made.fit())


@pytest.mark.parametrize("gpu", [True, False])
def test_out_of_memory_says_what_to_do(gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a CPU in the words of this machine's allocator, with what the process took."""

    def full(self: Trainer) -> None:
        if gpu:
            raise torch.OutOfMemoryError("CUDA out of memory, and a paragraph of advice")
        torch.empty(2**55, dtype=torch.uint8)

    monkeypatch.setattr(Trainer, "fit", full)
    message = (
        r"out of memory at batch 12, T = 2 .*\(peak (?!0\.0)\d+\.\d GiB\): raise train\.accumulate \(now 1\) or lower"
    )
    with pytest.raises(LbqError, match=rf"{message} .*batch_size$"):
        run(config(), tmp_path)
