"""What is evaluated, when and in which precision; a finished run evaluated again."""

from __future__ import annotations

import json
import platform
import re
import shutil
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lbq.batches.sources import open_source
from lbq.config import TrainConfig
from lbq.errors import DataError, RunError
from lbq.measuring.measure import measure
from lbq.neuron import BurstNeuron
from lbq.runs import run_folder
from lbq.training import evaluation, job
from lbq.training.distributed import World
from lbq.training.evaluation import emulated
from tests.support import small_runs
from tests.support.commands import Call
from tests.support.small_runs import run, trainer, use_few_digits

config = partial(small_runs.config, small_runs.TINY)


@pytest.fixture(autouse=True)
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_digits(monkeypatch)


def test_a_run_is_evaluated_over_other_timesteps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ("train.epochs=1", "train.warmup_epochs=0", "model.timesteps=2")
    result = run(config(*short, "neuron.name=lbq"), tmp_path / "lbq")
    lengths: list[int] = []
    forward = BurstNeuron.forward

    def watched(*given: Any, **named: Any) -> torch.Tensor:
        out = forward(*given, **named)
        lengths.append(len(out))
        return out

    monkeypatch.setattr(BurstNeuron, "forward", watched)
    facts = job.evaluate_run(tmp_path / "lbq", timesteps=3)
    assert set(lengths) == {3}
    assert (facts["timesteps"], facts["trained_over"], facts["stored_accuracy"]) == (3, 2, result["accuracy"])
    assert job.evaluate_run(tmp_path / "lbq", timesteps=2)["accuracy"] == result["accuracy"]
    with pytest.raises(RunError, match="timesteps must be a whole number of at least 1 and at most 4096, got 0"):
        job.evaluate_run(tmp_path / "lbq", timesteps=0)
    run(config(*short, "neuron.name=lmht"), tmp_path / "lmht")
    with pytest.raises(RunError, match="cannot run over 3 timesteps, its lmht neurons have weights for each of 2"):
        job.evaluate_run(tmp_path / "lmht", timesteps=3)
    shutil.copy(tmp_path / "lbq" / "weights.safetensors", tmp_path / "lmht")
    (tmp_path / "lmht" / "result.json").unlink()
    with pytest.raises(RunError, match=r"weights\.safetensors does not belong to .*config\.toml"):
        job.evaluate_run(tmp_path / "lmht", timesteps=3)


def test_a_run_is_not_evaluated_on_other_classes(tmp_path: Path) -> None:
    run(config("train.epochs=1", "train.warmup_epochs=0"), tmp_path)
    result = run_folder.read_result(tmp_path)
    result["inputs"]["classes"][2:4] = ["3", "2"]
    (tmp_path / "result.json").write_text(json.dumps(result), encoding="utf-8")
    with pytest.raises(
        RunError, match=r"digits has other classes than .* was trained on \(10, 0, 1, 2, .*; then 10, 0, 1, 3"
    ):
        job.evaluate_run(tmp_path)


def test_a_result_has_neurons_in_the_order_in_which_they_run(tmp_path: Path) -> None:
    """A block of attention registers its last neuron first; figures by layer go from the input on."""
    result = run(config("model.id=spikformer1x16", "train.epochs=1", "train.warmup_epochs=0"), tmp_path)
    order = list(result["steps"])
    assert order == list(result["tails"]) == list(result["active"])
    assert [name.removeprefix("blocks.1.") for name in order if name.startswith("blocks.1.")] == [
        "q.sn", "k.sn", "v.sn", "sn_attention", "sn",
    ]  # fmt: skip


def test_which_precisions_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half ones, on a CPU, each as torch says of it; not where torch cannot say."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)
    by_precision = {p: emulated(config(f"train.precision={p}").train, cpu) for p in ("fp32", "fp64", "bf16", "fp16")}
    assert by_precision == {"fp32": False, "fp64": False, "bf16": True, "fp16": False}
    half = config("train.precision=bf16").train
    assert not emulated(half, torch.device("cuda"))
    monkeypatch.setattr(torch.ops, "mkldnn", types.SimpleNamespace())
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not emulated(half, cpu)


@pytest.mark.parametrize(("instructions", "slow"), [("", True), ("avx512_bf16", False), ("amx_tile", False)])
def test_bfloat16_that_must_be_converted_is_emulated_too(
    monkeypatch: pytest.MonkeyPatch, instructions: str, slow: bool
) -> None:
    """oneDNN takes it on every CPU with AVX-512."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name == instructions)
    assert emulated(config("train.precision=bf16").train, torch.device("cpu")) is slow


def test_a_run_is_evaluated_in_the_precision_that_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(config("train.precision=bf16", "train.epochs=1", "train.warmup_epochs=0"), tmp_path)
    used: list[str] = []

    def watched(*given: Any) -> float:
        used.append(given[3].precision)
        return 0.0

    monkeypatch.setattr(evaluation, "evaluate", watched)
    for precision in (None, "bf16", "fp64"):
        facts = job.evaluate_run(tmp_path, device=torch.device("cpu"), world=World(), precision=precision)
        assert (facts["precision"], facts["trained_in"], facts["stored_precision"]) == (used[-1], "bf16", "fp32")
    assert used == ["fp32", "bf16", "fp64"]
    stored = json.loads((tmp_path / "result.json").read_text())
    for key in ("tested_in", "accuracy_as_trained", "holdout_accuracy_as_trained", "weight_decay"):
        del stored[key]  # as an older result, which was tested in the precision of training
    (tmp_path / "result.json").write_text(json.dumps(stored))
    assert job.evaluate_run(tmp_path, device=torch.device("cpu"), world=World())["stored_precision"] == "bf16"


@pytest.mark.parametrize(
    ("test", "tested"), [("last", [False, False, True]), ("never", [False] * 3), ("every", [False, True, True])]
)
def test_which_epochs_are_tested(tmp_path: Path, test: str, tested: list[bool]) -> None:
    """`every` follows eval_every, as the held-out images do whatever is tested. The same network comes out."""
    settings = config("data.holdout=0.2", "train.eval_every=2", "train.batch_size=10", f"train.test={test}")
    result = run(settings, tmp_path / test)
    lines = [json.loads(line) for line in (tmp_path / test / "metrics.jsonl").read_text().splitlines()]
    assert [line["test_accuracy"] is not None for line in lines] == tested
    assert [line["unaveraged_accuracy"] is not None for line in lines] == tested
    assert [line["holdout_accuracy"] is not None for line in lines] == [False, True, True]
    assert [bool(line["active"]) for line in lines] == [False, True, True]
    assert (result["accuracy"] is None) == (test == "never")
    assert result["holdout_accuracy"] == lines[-1]["holdout_accuracy"]
    assert run(settings, tmp_path / test) == result  # complete: nothing is trained again
    whole = run(config("data.holdout=0.2", "train.eval_every=2", "train.batch_size=10"), tmp_path / "every-too")
    assert whole["weights_sha256"] == result["weights_sha256"]
    assert whole["config_hash"] == result["config_hash"]


def test_a_run_that_was_never_tested_is_a_finished_one(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = config("data.holdout=0.2", "train.batch_size=10", "train.test=never")
    run(settings, Path("run"))
    out = call.printed("train", "run/config.toml", "--out", "run", "--resume", "auto")
    assert re.search(r"^not tested, held-out accuracy \d+\.\d\d % after epoch 3, run folder run$", out, re.MULTILINE)
    out = call.printed("record", "run", "-o", "record.json")
    assert re.search(r"lbq on digits, not tested, held-out accuracy \d+\.\d\d %", out)
    made = json.loads(Path("record.json").read_text())
    assert made["test_accuracy"] is None
    assert (made["tested_in"], made["weight_decay"]) == ("fp32", {"weights": 5e-4, "norms": 0.0, "neurons": 0.0})
    for given in ("run", "record.json"):
        assert call("report", given, "-o", "report.html")[0] == 0
        assert f"{made['holdout_accuracy']:.2f}" in Path("report.html").read_text()
    out = call.printed("eval", "run")  # asked for, it is tested
    assert re.fullmatch(r"test accuracy \d+\.\d\d % on 31 images\n", out)
    code, _, err = call("train", "run/config.toml", "train.test=last", "--out", "run", "--resume", "auto")
    assert (code, err) == (2, "lbq: run was trained to its end with train.test=never: lbq eval run tests it\n")


@pytest.mark.parametrize(("precision", "passes"), [("bf16", ["bf16", "fp32", "bf16"]), ("fp32", ["fp32", "fp32"])])
def test_the_last_epoch_is_tested_in_float32(
    monkeypatch: pytest.MonkeyPatch, precision: str, passes: list[str]
) -> None:
    """And in the precision of training beside it, where that is another; before, in that of training alone."""
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    used: list[tuple[str, str]] = []

    def watched(net: nn.Module, source: Any, part: str, train: TrainConfig, *_: Any) -> float:
        used.append((train.precision, convolutions.fp32_precision))
        return float(len(used))

    monkeypatch.setattr(evaluation, "evaluate", watched)
    before = convolutions.fp32_precision
    settings = config(f"train.precision={precision}", "train.epochs=2", "train.warmup_epochs=0", "train.ema=0.0")
    first, last = trainer(settings).fit()
    assert [precision for precision, _ in used] == passes
    assert [exactly for _, exactly in used[1:2]] == ["ieee"]
    assert used[0][1] == convolutions.fp32_precision == before
    assert (first.tested_in, first.test_accuracy, first.test_accuracy_as_trained) == (precision, 1.0, None)
    assert (last.tested_in, last.test_accuracy, last.test_accuracy_as_trained) == ("fp32", 2.0, float(len(passes)))


def test_what_is_held_out_is_counted_too(tmp_path: Path) -> None:
    """The counts of a recipe, without a look at the test set."""
    settings = config("data.holdout=0.4", "train.test=never", "train.batch_size=10")
    result = run(settings, tmp_path)
    measured = measure(run_folder.load(tmp_path), source := open_source(settings), part="holdout")
    assert (measured.images, measured.complete) == (20, True)
    assert measured.accuracy == pytest.approx(result["holdout_accuracy"])
    assert {k: h.active_ratio for k, h in measured.histograms.items()} == pytest.approx(result["active"])
    assert measure(run_folder.load(tmp_path), source).images == 31
    with pytest.raises(DataError, match="no samples are held out: data.holdout=0.1"):
        measure(run_folder.load(tmp_path), open_source(config()), part="holdout")


def test_float64_is_tested_in_float64() -> None:
    settings = config("train.precision=fp64", "train.epochs=1", "train.warmup_epochs=0")
    (record,) = trainer(settings).fit()
    assert record.tested_in == "fp64"
    assert record.test_accuracy == record.test_accuracy_as_trained
