"""What a run says before it trains: kernel, decay, settings that are hardly meant."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lbq.cli.progress import TrainProgress
from lbq.kernels import dispatch
from lbq.kernels.reference import burst_sequence
from lbq.native.choose import choose
from lbq.neuron import BurstNeuron, LadderNeuron, Ternary
from lbq.training import plan
from lbq.training.plan import plan_of
from tests.support import small_runs
from tests.support.small_runs import trainer, use_few_digits

config = partial(small_runs.config, small_runs.TINY)


@pytest.fixture(autouse=True)
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_digits(monkeypatch)


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ("data.frames=time", "data.frames has no effect with data.name=digits, which holds no recordings"),
        (
            "data.window_ms=5",
            "data.window_ms has no effect with data.name=digits: it cuts the recordings of dvs_objects",
        ),
        ("train.tet_weight=0.5", "train.tet_weight has no effect with train.loss=ce"),
        ("train.tet_weight=0.5 train.loss=tet", None),
        ("augment.min_area=0.5", "augment.min_area has no effect with data.name=digits, which holds no image files"),
        ("augment.mix_prob=0.5", "augment.mix_prob has no effect without augment.mixup or augment.cutmix"),
        ("augment.mix_prob=0.5 augment.cutmix=1", None),
        ("augment.plain_epochs=1", "augment.plain_epochs has no effect without augment.policy, cutout, events, mixup"),
        ("augment.plain_epochs=1 augment.cutout=2", None),
        ("augment.plain_epochs=3 augment.cutout=2", "augment.plain_epochs are all 3 epochs: augment.policy, cutout, "),
        ("optim.sam_epochs=1", "optim.sam_epochs has no effect without optim.sam"),
        ("train.level_cost_of=unary", "train.level_cost_of has no effect without train.level_cost"),
        ("train.level_cost_above=1e5", "train.level_cost_above has no effect without train.level_cost"),
        ("train.level_cost=1 train.level_cost_above=1e5", None),
        ("train.level_cost=1 train.level_cost_above=4", "train.level_cost_above=4 is next to nothing for "),
        ("optim.sam_epochs=1 optim.sam=0.05", None),
        ("train.ema=0.999", "train.ema=0.999 averages over about 1,000 steps, and there are 12: the weights that "),
        ("train.ema=0.9", None),
        ("optim.name=adamw optim.lr=1e-3 optim.momentum=0.5", "optim.momentum has no effect with optim.name=adamw"),
        ("optim.name=adamw optim.lr=0.1", "optim.lr=0.1 is a rate for SGD: AdamW usually takes about 0.001"),
        ("optim.name=adamw optim.lr=1e-3", None),
        ("neuron.name=lbq neuron.membrane=if neuron.beta=0.9", "neuron.beta has no effect: an IF membrane does not"),
        ("neuron.name=if neuron.beta=0.9", "neuron.beta has no effect: an IF membrane does not leak"),
        ("neuron.name=lbq neuron.beta=0.9", None),
        ("neuron.name=lbq neuron.surrogate=box neuron.tail=0.3", "neuron.tail has no effect: the surrogate box has no"),
        ("neuron.name=lbq neuron.surrogate=box_et neuron.tail=0.3", None),
        (
            "neuron.name=lbq neuron.learn_step=false neuron.step_gradient=lsq",
            "neuron.step_gradient has no effect: the ",
        ),
        ("neuron.name=v2 neuron.step_gradient=lsq", "neuron.step_gradient has no effect: the step is not learned"),
        ("neuron.name=v3 neuron.step_gradient=lsq", None),
        ("neuron.name=relu", "an ANN computes the same at each of 2 timesteps: model.timesteps=1"),
        ("neuron.name=relu model.timesteps=1", None),
        ("neuron.name=mlf", "it trains, but cannot be deployed: layer 'sn1'"),
        (
            "neuron.name=lbq neuron.n_max=300",
            "it trains, but cannot be deployed: layer 'sn1': n_max is 300, but levels are 8-bit",
        ),
        (
            "model.id=spikformer1x16 neuron.name=lbq neuron.per_channel=true",
            "it trains, but cannot be deployed: layer 'blocks.1.q.sn'",
        ),
        ("model.id=spikformer1x16", None),
        (
            "model.id=spikformer1x16 neuron.name=lbq train.level_cost=0.5",
            "train.level_cost counts levels before max pools, behind which there are more: of ",
        ),
        ("train.level_cost=0.5", None),
    ],
)
def test_settings_that_are_hardly_meant_are_told_beforehand(changes: str, remark: str | None) -> None:
    remarks = plan_of(trainer(config(*changes.split()))).remarks
    assert len(remarks) == (remark is not None)
    assert remark is None or remarks[0].startswith(remark)


def test_activations_that_do_not_fit_are_told_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(config())
    assert not plan_of(made).remarks
    assert plan.memory_of(torch.device("cpu")) > 2**28
    monkeypatch.setattr(plan, "memory_of", lambda _: 1000)
    (remark,) = plan_of(made).remarks
    assert remark.startswith("activations take about 0 GiB (estimated), cpu has 0 GiB: raise train.accumulate")
    monkeypatch.setattr(plan, "memory_of", lambda _: 0)  # not known
    assert not plan_of(made).remarks


def test_the_kernel_that_is_named_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the chosen kernel cannot compute goes to the reference, and plan and result say so."""
    chosen = choose("cpu").kernel
    long = BurstNeuron().kernel(4), BurstNeuron().kernel(4, torch.float64), LadderNeuron([0.5, 2]).kernel(4)
    assert BurstNeuron(channels=3).kernel(4) == Ternary(channels=3).kernel(4) == chosen  # a step for each channel
    assert long == (chosen, "reference", "reference")
    seen: list[str] = []

    def spy(*given: Any) -> Any:
        seen.append("reference")
        return burst_sequence(*given)

    monkeypatch.setattr(dispatch, "burst_sequence", spy)
    for precision, expected in (("fp32", chosen), ("fp64", "reference")):
        seen.clear()
        plan = plan_of(made := trainer(config(f"train.precision={precision}")))
        assert plan.kernel == expected
        made.net(torch.zeros(2, 1, 8, 8, dtype=torch.float64 if precision == "fp64" else torch.float32))
        assert (set(seen) == {"reference"}) == (expected == "reference")
    assert plan_of(trainer(config("neuron.name=relu", "model.timesteps=1"))).kernel == chosen


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ([], []),
        (["optim.sam=0.05"], ["sam      radius 0.05, in 3 epochs: these steps take twice the time"]),
        (["optim.sam=0.1", "optim.sam_epochs=2"], ["sam      radius 0.1, in the last 2 of 3 epochs: these steps take"]),
        (["optim.sam=0.1", "optim.sam_epochs=3"], ["sam      radius 0.1, in 3 epochs: "]),
        (["train.level_cost=0.5"], ["price    0.5 on bit-sparse accumulations\n"]),
        (
            ["train.level_cost=1", "train.level_cost_of=unary", "train.level_cost_above=1.5e5", "optim.sam=0.05"],
            ["sam      radius 0.05, ", "price    1 on unary accumulations, above 150,000 of a sample\n"],
        ),
    ],
)
def test_the_plan_says_what_is_added_to_training(
    capsys: pytest.CaptureFixture[str], changes: list[str], lines: list[str]
) -> None:
    TrainProgress().plan(plan_of(trainer(config(*changes))))
    shown = [line for line in capsys.readouterr().err.splitlines(keepends=True) if line.startswith(("sam ", "price "))]
    assert len(shown) == len(lines)
    assert all(line.startswith(begun) for line, begun in zip(shown, lines, strict=True))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ([], "weight decay 0.0005: weights"),
        (
            ["optim.norm_decay=true", "optim.neuron_decay=step"],
            "weight decay 0.0005: weights, BatchNorm and biases, steps",
        ),
        (
            ["optim.neuron_decay=all", "optim.neuron_decay_factor=2"],
            "weight decay 0.0005: weights, steps, tails and all else of neurons (0.001)",
        ),
        (["optim.weight_decay=0", "optim.neuron_decay=step"], "no weight decay"),
    ],
)
def test_the_plan_says_what_decays(capsys: pytest.CaptureFixture[str], changes: list[str], line: str) -> None:
    plan = plan_of(trainer(config(*changes)))
    TrainProgress().plan(plan)
    assert f"decay    {line}\n" in capsys.readouterr().err
    assert plan.weight_decay["weights"] == config(*changes).optim.weight_decay
