"""Several processes: the same training as one, the whole test set evaluated, torchrun with and without a lost process."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from lbq import engine
from lbq.batches.sources import ImageSource
from lbq.deploy.pipeline import deploy_trained
from lbq.errors import ConfigError, LbqError, RunError, Stopped
from lbq.training import distributed, initial_weights, job
from lbq.training.distributed import SyncBatchNorm2d, World, synchronise_batchnorm
from lbq.training.divergence import Diverged
from lbq.training.trainer import Trainer
from tests.support import small_runs
from tests.support.small_runs import (
    TINY,
    Killed,
    Silent,
    after_step,
    contents,
    differences,
    raising,
    small_digits,
    timeless,
    trainer,
    use_few_digits,
)

Case = Callable[[World, Path], Any]
CPU = torch.device("cpu")
DEADLINE = 900  # seconds, which processes need on no machine however busy: those that wait for each other end then
config = partial(small_runs.config, TINY)
EXACT = ("model.dropout=0.0", "train.precision=fp64")  # dropout differs by process, and rounding by float32


# What both one process and two compute
# ---------------------------------------------------------------------------------------------------------------------


def freeze_batchnorm(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign, misc]


def five_steps(world: World, *changes: str, frozen: bool = False) -> dict[str, Any]:
    """State after 5 steps, the epoch's record, and which samples this process read at each."""
    settings = config(*EXACT, *changes)
    made = trainer(settings, world=world, between_steps=lambda t: t.position.step == 5)
    if frozen:
        freeze_batchnorm(made.net)
    samples: list[list[int]] = []
    right = made.source.train_batches

    def batches(chosen: Sequence[Tensor], epoch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for batch, read in zip(chosen, right(chosen, epoch, seed), strict=True):
            if made.net.training:  # not those that averaged weights are normalised with
                samples.append(batch.tolist())
            yield read

    made.source.train_batches = batches  # type: ignore[method-assign, assignment]
    records = [timeless(asdict(record)) for record in made.fit()]
    tensors = {k: v.detach().clone() for k, v in made.state()[0].items()}
    return {"tensors": tensors, "records": records, "samples": samples}


TRAININGS = {  # by name, the settings
    "frozen": (),
    "accumulated": ("train.accumulate=2",),
    "clipped": ("train.accumulate=3", "optim.clip=0.1", "optim.name=adamw"),
    "rounded": ("train.weight_bits=4", "train.accumulate=2"),
    "sharp": ("optim.sam=0.1",),
    "priced": ("train.level_cost=0.5", "train.level_cost_of=unary", "train.accumulate=2"),
    "synchronised": ("model.id=resnet8w4", "train.sync_batchnorm=true"),
}


def trainings(world: World, folder: Path) -> Any:
    return {name: five_steps(world, *changes, frozen=name != "synchronised") for name, changes in TRAININGS.items()}


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """What one process does."""
    return trainings(World(), folder)


def evaluation(world: World, folder: Path) -> Any:
    """Accuracy and active ratios on test sets of several sizes, one of them smaller than the processes."""
    found = {}
    for size in (599, 64, 31, 1):
        settings = config(*EXACT, "train.batch_size=50")
        made = Trainer(settings, ImageSource(settings, small_digits(60, size), CPU), CPU, world)
        active: dict[str, float] = {}
        found[size] = (made.evaluate("test", active), active)
    return found


def layer_inputs() -> list[Tensor]:
    """Two processes' parts of a batch, of different sizes; far from zero mean."""
    generator = torch.Generator().manual_seed(0)
    return [50 + torch.randn(n, 3, 4, 5, dtype=torch.float64, generator=generator) for n in (5, 3)]


def run_norm(net: nn.Module, x: Tensor) -> Tensor:
    """Two batches forward and backward; the second one's output."""
    for factor in (1.0, 3.0):
        y: Tensor = net(x * factor)
        (y * torch.linspace(-1, 1, y[0].numel(), dtype=torch.float64).view_as(y[0])).square().sum().backward()
    return y


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cumulative": {"momentum": None},
    "no-affine": {"affine": False},
    "no-statistics": {"track_running_stats": False},
}


def layers(world: World, folder: Path) -> Any:
    """Outputs, gradients and statistics of a BatchNorm after two batches, this process's part of each."""
    found = {}
    for name, options in LAYERS.items():
        net = nn.Sequential(nn.BatchNorm2d(3, **options)).double()
        synchronise_batchnorm(net)
        assert isinstance(net[0], SyncBatchNorm2d)
        x = layer_inputs()[world.rank] if world.size > 1 else torch.cat(layer_inputs())
        y = run_norm(net, x.requires_grad_())
        gradients = {k: p.grad.clone() for k, p in net.named_parameters() if p.grad is not None}
        for gradient in gradients.values():
            world.sum(gradient)  # as DistributedDataParallel does
        found[name] = (y.detach(), x.grad, gradients, {k: v.clone() for k, v in net.state_dict().items()})
    return found


# What two processes do by themselves
# ---------------------------------------------------------------------------------------------------------------------


def jobs(world: World, folder: Path) -> Any:
    """A run that was never interrupted, one stopped by a signal to process 1, one lost, each of these continued."""
    settings = config("train.checkpoint_steps=2")
    watcher = Silent()

    def run(name: str) -> Any:
        return job.train(settings, folder / name, watcher, device=CPU, world=world, resume=True)

    def terminate() -> None:
        if world.rank == 1:
            signal.raise_signal(signal.SIGTERM)

    found: dict[str, Any] = {"result": run("whole"), "plans": len(watcher.plans), "again": run("whole")}

    if world.main:  # done, and its checkpoints were removed to save room
        shutil.copytree(folder / "whole", folder / "bare", ignore=shutil.ignore_patterns(job.CHECKPOINTS))
    world.barrier()
    weights = (folder / "bare" / "weights.safetensors").stat().st_mtime_ns
    found["bare"] = run("bare")
    found["untouched"] = (folder / "bare" / "weights.safetensors").stat().st_mtime_ns == weights

    with after_step(7, terminate), pytest.raises(Stopped) as stopped:
        run("stopped")
    found["code"] = stopped.value.code
    found["resumptions"] = len(watcher.resumptions)
    run("stopped")
    with after_step(7, raising(Killed)), pytest.raises(Killed):
        run("lost")
    run("lost")
    found["resumptions"] = watcher.resumptions[found["resumptions"] :]
    with after_step(12, terminate), pytest.raises(Stopped) as stopped:  # at the very end
        run("late")
    found["late"] = stopped.value.code
    run("late")
    return found


def lone_nan(world: World, folder: Path) -> Any:
    """A NaN that only process 1 reads reaches both losses through common statistics; each looks for it by itself."""
    made = trainer(config("train.sync_batchnorm=true"), world=world)
    right = made.source.train_batches

    def batches(chosen: Sequence[Tensor], epoch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in right(chosen, epoch, seed):
            if world.rank == 1:
                x[0, 0, 0, 0] = float("nan")
            yield x, y

    made.source.train_batches = batches  # type: ignore[method-assign, assignment]
    try:
        list(made.fit())
    except Diverged as error:
        return str(error)
    return "trained"


def idle_parameter(world: World, folder: Path) -> Any:
    """Refused at the first step, and not by what DistributedDataParallel says at the second."""
    made = trainer(config("train.accumulate=2", "train.ema=0.0"), world=world)
    made.net.register_parameter("idle", nn.Parameter(torch.zeros(3)))
    try:
        list(made.fit())
    except ConfigError as error:
        return str(error), made.position.step
    return "trained"


def separate_statistics(world: World, folder: Path) -> Any:
    """Without synchronisation every process has its own BatchNorm statistics; those of process 0 are the run's."""
    found = []
    for ema in ("0.0", "0.9"):
        settings = small_runs.config(f"train.ema={ema}", "train.epochs=2", "optim.lr=0.3")  # deep enough to differ
        whole = ImageSource(settings, small_digits(50, 400), CPU)
        made = Trainer(settings, whole, CPU, world)
        records = list(made.fit())
        with made.averaged():
            alone = Trainer(settings, whole, CPU)
            alone.net.load_state_dict(made.net.state_dict())
            found.append((records[-1].test_accuracy, alone.evaluate("test")))
    return found


def rounded_weights(world: World, folder: Path) -> Any:
    """The weights that three steps compute with, where every process has BatchNorm statistics of its own."""
    made = trainer(config("model.id=resnet8w2", "train.weight_bits=4"), world=world, between_steps=three_steps)
    inner, seen = made.rounded, []

    @contextmanager
    def watched() -> Iterator[None]:
        with inner():
            seen.append({name: p.detach().clone() for name, p in made.net.named_parameters()})
            yield

    made.rounded = watched
    list(made.fit())
    return seen


def three_steps(made: Trainer) -> bool:
    return made.position.step == 3


def astray(world: World, folder: Path) -> Any:
    """Each process finds a folder of its own: in that of process 0 there is a checkpoint, in the other there is none."""
    settings, mine = config(), folder / str(world.rank)

    if world.main:
        with after_step(2, raising(Killed)), pytest.raises(Killed):
            job.train(settings, mine, Silent(), device=CPU, world=World())
    world.barrier()
    try:
        job.train(settings, mine, Silent(), device=CPU, world=world, resume=True)
    except RunError as error:
        return str(error)
    return "trained"


def integers(world: World, folder: Path) -> Any:
    """The weights and statistics with which a training from a deployed network begins. Each process measures its part."""
    settings = config(*EXACT, f"train.init_from={folder / f'model{world.rank}.lbq'}", "train.sync_batchnorm=true")
    made = trainer(settings, world=world)
    folder.mkdir(parents=True, exist_ok=True)
    net = trainer(config(*EXACT, "seed=9")).net.eval()
    engine.save(settings.train.init_from, deploy_trained(net, settings, made.source.inputs, None))
    made.start_from(initial_weights.read(settings, made.net, made.source.inputs).weights)
    initial_weights.give_statistics(made)
    return {name: value.clone() for name, value in made.net.state_dict().items()}


CASES_OF_TWO_PROCESSES: list[Case] = [
    trainings,
    evaluation,
    layers,
    lone_nan,
    jobs,
    astray,
    separate_statistics,
    rounded_weights,
    idle_parameter,
    integers,
]


def process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    use_few_digits(pytest.MonkeyPatch())
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    world = World(rank, 2)
    assert world.main == (rank == 0)
    assert world.any([rank == 1, False, True], CPU) == [True, False, True]
    assert world.gather(torch.tensor([rank, 5])).tolist() == [[0, 5], [1, 5]]
    assert world.agree(0, CPU)
    assert world.agree(10**6, CPU)
    assert not world.agree(10**6 + rank, CPU)
    assert not world.agree(2 * rank - 1, CPU)  # -1 and 1
    found = {case.__name__: case(world, folder / case.__name__) for case in CASES_OF_TWO_PROCESSES}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    distributed.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def pair(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes found."""
    context = multiprocessing.get_context("forkserver")  # a fresh process that imports everything once, for both
    context.set_forkserver_preload([__name__])
    processes = [context.Process(target=process, args=(rank, folder)) for rank in range(2)]
    for one in processes:
        one.start()
    running, deadline = {one.sentinel: one for one in processes}, time.monotonic() + DEADLINE
    while running and (ended := wait(running, deadline - time.monotonic())):
        if any(running.pop(cast("int", sentinel)).exitcode for sentinel in ended):
            break  # the other one would wait for it in vain
    for one in processes:
        one.kill()
        one.join()
    assert [one.exitcode for one in processes] == [0, 0]
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


def test_two_processes_start_from_a_deployed_network_as_one(pair: list[dict[str, Any]], tmp_path: Path) -> None:
    expected = integers(World(), tmp_path)
    for rank in range(2):
        assert_close(expected, pair[rank]["integers"])


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("name", TRAININGS)
def test_two_processes_train_as_one(name: str, pair: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    expected = alone[name]
    start = dict(trainer(config(*EXACT, *TRAININGS[name])).net.state_dict())
    assert any(not torch.equal(v, expected["tensors"][f"model/{k}"]) for k, v in start.items())  # it did train
    for rank in range(2):
        together = pair[rank]["trainings"][name]
        assert_close(expected["tensors"], together["tensors"])
        (mine,), (theirs,) = expected["records"], together["records"]
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-9)
        for key in ("train_accuracy", "test_accuracy", "lr", "step"):
            assert theirs[key] == mine[key]


def test_a_parameter_that_takes_no_part_is_refused(pair: list[dict[str, Any]], tmp_path: Path) -> None:
    for rank in range(2):
        message, step = pair[rank]["idle_parameter"]
        assert message.startswith("parameter 'idle' takes no part in what the network computes")
        assert step == 0
    assert idle_parameter(World(), tmp_path) == "trained"


@pytest.mark.parametrize("name", ["frozen", "accumulated"])
def test_each_step_reads_the_same_samples(name: str, pair: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    samples = alone[name]["samples"]
    parts = [pair[rank]["trainings"][name]["samples"] for rank in range(2)]
    for whole, a, b in zip(samples, *parts, strict=True):
        assert whole == a + b  # the same order even
    first_epoch = [n for batch in samples[: 4 * len(samples) // 5] for n in batch]
    assert len(set(first_epoch)) == len(first_epoch) == 48


def test_accumulation_changes_nothing(pair: list[dict[str, Any]]) -> None:
    """Gradients are the same whether a batch is processed at once or in parts, averaged over processes once."""
    done = pair[0]["trainings"]
    assert_close(done["frozen"]["tensors"], done["accumulated"]["tensors"], 1e-9)


def test_evaluation_is_of_the_whole_test_set(pair: list[dict[str, Any]], tmp_path: Path) -> None:
    whole = evaluation(World(), tmp_path)
    assert pair[0]["evaluation"] == pair[1]["evaluation"] == whole
    assert len(whole[599][1]) == 3


def test_evaluation_uses_one_set_of_statistics(pair: list[dict[str, Any]]) -> None:
    for reported, alone in pair[0]["separate_statistics"]:
        assert reported == alone
    assert [both[0] for both in pair[1]["separate_statistics"]] == [both[0] for both in pair[0]["separate_statistics"]]


def test_processes_round_alike(pair: list[dict[str, Any]]) -> None:
    ours, theirs = (pair[rank]["rounded_weights"] for rank in range(2))
    assert len(ours) == len(theirs) >= 3
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", LAYERS)
def test_synchronised_batchnorm_is_batchnorm_of_the_whole(name: str, pair: list[dict[str, Any]]) -> None:
    net = nn.Sequential(nn.BatchNorm2d(3, **LAYERS[name])).double()
    x = torch.cat(layer_inputs()).requires_grad_()
    y = run_norm(net, x)
    assert x.grad is not None
    found = [pair[rank]["layers"][name] for rank in range(2)]
    torch.testing.assert_close(torch.cat([f[0] for f in found]), y.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([f[1] for f in found]), x.grad, rtol=1e-8, atol=1e-9)
    for _, _, gradients, state in found:
        assert gradients.keys() == dict(net.named_parameters()).keys()
        for key, parameter in net.named_parameters():
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-9, atol=1e-9)
        assert_close(dict(net.state_dict()), state, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_synchronised_batchnorm_within_one_process(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that several processes take, in a group of one that believes to be two."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        plain, ours = (nn.Sequential(nn.BatchNorm2d(3)).to(torch.promote_types(dtype, torch.float32)) for _ in range(2))
        synchronise_batchnorm(ours)
        x = torch.cat(layer_inputs()).to(dtype)
        a, b = (x.clone().requires_grad_() for _ in range(2))
        for net, start in ((plain, a), (ours, b)):
            out = net(start)
            assert out.dtype == dtype
            out.float().square().mul(torch.linspace(-1, 1, 20).view(4, 5)).sum().backward()
        tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(b.grad, a.grad, rtol=tolerance, atol=tolerance)
        assert_close(dict(plain.state_dict()), dict(ours.state_dict()), 1e-3 if dtype == torch.bfloat16 else 1e-5)
        world = World(0, 2)
        assert world.any([True, False], CPU) == [True, False]
        assert world.sum(torch.ones(2)).tolist() == [1, 1]
        world.share(ours.buffers())
        world.barrier()
        ours.eval()
        plain.eval()
        torch.testing.assert_close(ours(x), plain(x), rtol=tolerance, atol=tolerance)
    finally:
        distributed.stop()
    assert not dist.is_initialized()


def test_batchnorm_that_is_not_synchronised_is_refused() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.BatchNorm1d(12))
    with pytest.raises(ConfigError, match=r"train\.sync_batchnorm: layer '2' is a BatchNorm1d, only BatchNorm2d"):
        synchronise_batchnorm(net)
    net[2] = nn.SyncBatchNorm(12)  # PyTorch's own does it by itself
    synchronise_batchnorm(net)
    assert isinstance(net[0], SyncBatchNorm2d)


def test_a_batchnorm_of_several_names_stays_one() -> None:
    norm = nn.BatchNorm2d(3)
    net = nn.ModuleDict({"a": norm, "b": norm})
    synchronise_batchnorm(net)
    assert type(net["a"]) is SyncBatchNorm2d
    assert net["a"] is net["b"]


def test_one_process_has_plain_batchnorm() -> None:
    settings = config("train.sync_batchnorm=true")
    made = trainer(settings)
    assert sum(isinstance(m, SyncBatchNorm2d) for m in made.net.modules()) == 3
    plain = trainer(config())
    assert made.net.state_dict().keys() == plain.net.state_dict().keys()
    list(made.fit())
    list(plain.fit())
    for name, value in plain.net.state_dict().items():
        assert torch.equal(value, made.net.state_dict()[name])


def test_jobs_of_two_processes_resume_exactly(pair: list[dict[str, Any]], folder: Path) -> None:
    expected = contents(folder / "jobs" / "whole")
    assert expected["result"]["processes"] == 2
    for name in ("stopped", "lost", "late"):
        assert differences(expected, contents(folder / "jobs" / name)) == [], name
    main, other = (pair[rank]["jobs"] for rank in range(2))
    assert (main["code"], other["code"]) == (143, 143)
    assert (main["late"], other["late"]) == (143, 143)
    assert [epoch_and_batch[:2] for epoch_and_batch in main["resumptions"]] == [(1, 3), (1, 2)]
    assert main["again"] == main["result"]  # a run that is done is not trained again, by any number of processes
    assert main["bare"] == main["result"]
    assert main["untouched"]
    assert (other["result"], other["plans"], main["plans"]) == ({}, 0, 1)  # one process speaks and writes


def test_processes_that_find_different_checkpoints_stop(pair: list[dict[str, Any]], folder: Path) -> None:
    for rank in range(2):
        found, where = pair[rank]["astray"], folder / "astray" / str(rank)
        assert found == f"the processes find different checkpoints in {where}: put it on a file system they share"
    assert (folder / "astray" / "0" / job.CHECKPOINTS).exists()
    assert not (folder / "astray" / "1" / job.CHECKPOINTS).exists()


def test_a_nan_in_one_process_stops_both(pair: list[dict[str, Any]]) -> None:
    assert "epoch 1, step 1, first in the loss" in pair[0]["lone_nan"]
    assert "epoch 1, step 1, first in the input" in pair[1]["lone_nan"]


def test_the_order_is_a_permutation_and_needs_a_fitting_batch() -> None:
    source = ImageSource(config(), small_digits(), CPU)
    orders = [Trainer(config(), source, CPU, World(0, size)).order(1) for size in (1, 2, 3)]
    for order in orders[1:]:
        assert torch.equal(order.flatten(), orders[0].flatten())
    assert not torch.equal(Trainer(config(), source).order(2), orders[0])
    with pytest.raises(ConfigError, match=r"multiple of train\.accumulate x processes \(1 x 5\), got 12"):
        Trainer(config(), source, CPU, World(0, 5))


def test_restarted_processes_do_not_meet_old_ones() -> None:
    """Three attempts on one store, of processes that come in any order; each attempt has a part of its own."""
    store = HashStore()
    names = []
    for delayed in range(3):
        found: dict[int, Store] = {}

        def join(rank: int, delayed: int = delayed, found: dict[int, Store] = found) -> None:
            if rank == delayed:
                time.sleep(0.1)  # the others see what is left from before
            found[rank] = distributed.unused_part(store, rank, 3)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(found) == [0, 1, 2]
        assert not found[0].check(["address"])
        found[1].set("address", str(delayed))
        assert all(found[rank].get("address") == str(delayed).encode() for rank in range(3))
        names.append(found[0])
    assert [part.get("address") for part in names] == [b"0", b"1", b"2"]


def test_missing_processes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "TIMEOUT", timedelta(seconds=0.05))
    with pytest.raises(LbqError, match=r"processes \[1, 2\] of 3 did not appear"):
        distributed.unused_part(HashStore(), 0, 3)


def test_start_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert distributed.start("cpu") == (World(), CPU)
    with pytest.raises(LbqError, match="--device must be cpu or cuda, got 'tpu'"):
        distributed.start("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert distributed.start() == (World(), CPU)
    with pytest.raises(LbqError, match="PyTorch sees no GPU here"):
        distributed.start("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(LbqError, match="process 1 has no GPU: this machine has 1"):
        distributed.start("cuda")


# torchrun
# ---------------------------------------------------------------------------------------------------------------------

LOST_AND_LOOKED_AFTER = """
import atexit, os, signal
from contextlib import nullcontext
from pathlib import Path
import pytest
from lbq import cli
from tests.support.small_runs import after_step, use_few_digits
use_few_digits(pytest.MonkeyPatch())
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
def report():
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    os.write(2, " ".join(["at exit:", *threads, chr(10)]).encode())  # at once: another process writes there too
if not first:
    atexit.register(report)
lost = first and os.environ["RANK"] == "1"
with after_step(7, lambda: os.kill(os.getpid(), signal.SIGKILL)) if lost else nullcontext():
    cli.main()
"""


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=DEADLINE)


@pytest.mark.usefixtures("pair")
def test_torchrun_and_a_lost_process(folder: Path, tmp_path: Path) -> None:
    """Process 1 is killed after step 7; torchrun starts both again, and they continue from the checkpoint of step 6 to what
    two processes get that were never interrupted."""
    file, script, out = tmp_path / "small.toml", tmp_path / "lost.py", tmp_path / "lost"
    file.write_text(config("train.checkpoint_steps=2").to_toml())
    script.write_text(LOST_AND_LOOKED_AFTER)
    options = ["train", str(file), "--resume", "auto", "--device", "cpu", "--json", "--out", str(out)]
    done = torchrun("--max-restarts=1", str(script), *options)
    assert done.returncode == 0, done.stderr
    assert "continuing at epoch 2 after step 2" in done.stderr
    at_exit = [line for line in done.stderr.splitlines() if line.startswith("at exit:")]
    assert len(at_exit) == 2
    assert not any("gloo" in line for line in at_exit)  # its threads could abort a process that ends
    result = json.loads(done.stdout)  # one process prints
    assert result["processes"] == 2
    assert differences(contents(folder / "jobs" / "whole"), contents(out)) == []
    assert json.loads((out / "result.json").read_text())["accuracy"] == result["accuracy"]
