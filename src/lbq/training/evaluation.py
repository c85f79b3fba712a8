"""Evaluation: the accuracy of a network or of a run's stored weights, BatchNorm statistics, steps and activity of neurons."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lbq.batches.sources import Part, Source, open_source
from lbq.config import TrainConfig
from lbq.counting.outcomes import packed
from lbq.errors import LbqError, RunError
from lbq.neuron.base import neurons_of
from lbq.neuron.hooks import attached, evaluating, only_outputs
from lbq.runs import run_folder
from lbq.training.distributed import World

PRECISIONS = {"fp32": None, "fp64": None, "bf16": torch.bfloat16, "fp16": torch.float16}
X86_64 = ("x86_64", "AMD64")


def autocast(settings: TrainConfig, device: torch.device) -> Any:
    dtype = PRECISIONS[settings.precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def computed_in(settings: TrainConfig) -> torch.dtype:
    """What convolutions put out."""
    return PRECISIONS[settings.precision] or (torch.float64 if settings.precision == "fp64" else torch.float32)


def emulated(settings: TrainConfig, device: torch.device) -> bool:
    """Whether this CPU lacks instructions for the precision, which makes convolutions several times slower, or some hundred.

    oneDNN says whether it takes the precision at all; it also takes bfloat16 where AVX-512 must convert every number.
    """
    if device.type != "cpu" or PRECISIONS[settings.precision] is None:
        return False
    native = getattr(torch.ops.mkldnn, f"_is_mkldnn_{settings.precision}_supported", None)
    if native is not None and not native():
        return True
    if settings.precision != "bf16" or platform.machine() not in X86_64:
        return False
    asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    known = [ask() for ask in asked if ask is not None]
    return bool(known) and not any(known)


def exact(settings: TrainConfig) -> TrainConfig:
    """The settings with the precision of reported accuracies: float32, or float64 where trained in that."""
    return settings if settings.precision == "fp64" else replace(settings, precision="fp32")


def rounds(settings: TrainConfig, device: torch.device) -> bool:
    """Whether training rounds convolutions more coarsely than evaluation with `exact` settings."""
    return PRECISIONS[settings.precision] is not None or (device.type == "cuda" and settings.precision == "fp32")


@contextmanager
def without_tf32() -> Iterator[None]:
    """Within the context, a GPU does not round float32 convolutions and matrix products to TensorFloat-32.

    PyTorch 2.9 has a setting for each operator, which must not be mixed with the older one for all of them.
    """
    convolutions: Any = getattr(torch.backends.cudnn, "conv", None)
    name, exactly = ("allow_tf32", False) if convolutions is None else ("fp32_precision", "ieee")
    backends = (convolutions or torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [getattr(backend, name) for backend in backends]
    try:
        for backend in backends:
            setattr(backend, name, exactly)
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            setattr(backend, name, value)


def cast(x: Tensor, settings: TrainConfig) -> Tensor:
    """A batch in the dtype and memory format that the network runs in."""
    if settings.precision == "fp64":
        x = x.double()
    if settings.channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x


def evaluate(
    net: nn.Module,
    source: Source,
    part: Part,
    settings: TrainConfig,
    device: torch.device,
    world: World,
    active: dict[str, float] | None = None,
    outcomes: dict[str, Any] | None = None,
) -> float:
    """Accuracy in percent over the whole of `part`, whatever the processes.

    Fills `active` with active ratios, in the order in which neurons run, and `outcomes` with the samples that are right (see
    `lbq.counting.outcomes`).
    """
    parts: list[Tensor] = []  # of which samples are right, on the device, so that nothing waits for them
    order: dict[str, None] = {}
    counting: AbstractContextManager[dict[str, Tensor]]
    counting = nullcontext({}) if active is None else _counting_activity(net, order)
    with torch.no_grad(), evaluating(net), counting as activity:
        for x, labels in source.eval_batches(part, world.rank, world.size):
            with autocast(settings, device):
                logits = net(cast(x, settings))
            parts.append(logits.argmax(1) == labels)
    right = torch.zeros(source.test_size if part == "test" else source.holdout_size, device=device)
    if parts:
        right[world.rank :: world.size] = torch.cat(parts).to(right.dtype)
    right = world.sum(right)
    if outcomes is not None:
        outcomes.update(packed(right.bool().cpu().numpy()))
    if active is not None and activity:
        totals = world.sum(torch.stack(list(activity.values()))).tolist()
        ratios = {name: nonzero / max(all_, 1.0) for name, (nonzero, all_) in zip(activity, totals, strict=True)}
        active.update(in_order(ratios, order))
    return 100 * int(right.sum(dtype=torch.float64)) / len(right)


def evaluate_run(
    run: Path | str,
    *,
    changes: Iterable[str] = (),
    device: torch.device | str = "cpu",
    world: World | None = None,
    precision: str | None = None,
    timesteps: int | None = None,
) -> dict[str, Any]:
    """Accuracy of a run's stored weights on its test set, beside what its result says.

    precision: default float32 (float64 where it was trained in that), as in results. timesteps: default those of training.
    """
    if precision is not None and precision not in PRECISIONS:
        raise LbqError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    folder = run_folder.check_folder(run, "config.toml", "weights.safetensors")
    trained, where = run_folder.load_config(folder, changes), torch.device(device)
    config = trained if timesteps is None else run_folder.over(timesteps, trained)
    net = run_folder.load(folder, timesteps).to(where)
    source = open_source(config, where)
    _check_classes(folder, source)
    stored = run_folder.read_result(folder) if (folder / "result.json").exists() else {}
    settings = exact(config.train) if precision is None else replace(config.train, precision=precision)
    net.to(torch.float64 if settings.precision == "fp64" else torch.float32)
    with without_tf32():
        accuracy = evaluate(net, source, "test", settings, where, world or World())
    data = stored.get("data", {})  # older runs say less
    return {
        "accuracy": accuracy,
        "images": source.test_size,
        "stored_accuracy": stored.get("accuracy"),
        "stored_precision": stored.get("tested_in") or config.train.precision,  # older results do not say
        "other_data": any(data.get(k, v) != v for k, v in source.about.items() if k != "source"),
        "precision": settings.precision,
        "trained_in": config.train.precision,
        "timesteps": config.model.timesteps,
        "trained_over": trained.model.timesteps,
    }


def _check_classes(run: Path, source: Source) -> None:
    """Refuse data with other classes than a run was trained on: its labels would mean something else."""
    trained, now = run_folder.read_inputs(run), source.inputs.classes
    if trained is not None and trained.classes and now and trained.classes != now:
        raise RunError(
            f"{source.name} has other classes than {run} was trained on ({len(now)}, {', '.join(now)[:60]}; then "
            f"{len(trained.classes)}, {', '.join(trained.classes)[:60]}): give the data that it was trained on"
        )


def measure_norms(
    net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], settings: TrainConfig, device: torch.device, world: World
) -> dict[str, Tensor]:
    """Measure BatchNorm's statistics over `batches` anew. Returns the network's buffers that hold them, by name.

    Everything but BatchNorm is as in evaluation. Statistics are the mean over all passes and over processes.
    """
    norms = {name: m for name, m in net.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats}
    momenta = {name: norm.momentum for name, norm in norms.items()}
    try:
        with torch.no_grad(), evaluating(net):
            for norm in norms.values():
                norm.train()
                norm.reset_running_stats()
                norm.momentum = None  # takes the mean of all passes
            for x, _ in batches if norms else ():
                with autocast(settings, device):
                    net(cast(x, settings))
    finally:
        for name, norm in norms.items():
            norm.momentum = momenta[name]
    statistics = {}
    for name, norm in norms.items():
        for part in ("running_mean", "running_var"):
            buffer = norm.get_buffer(part)
            statistics[f"{name}.{part}"] = buffer.copy_(world.sum(buffer.clone()) / world.size)
    return statistics


@contextmanager
def _counting_activity(net: nn.Module, order: dict[str, None]) -> Iterator[dict[str, Tensor]]:
    """Within the context, count the outputs of each neuron: float64 [2], those that are not zero and all. Fills `order` with
    the names of those that ran."""
    neurons, device = neurons_of(net), next(net.parameters()).device
    counts = {name: torch.zeros(2, dtype=torch.float64, device=device) for name in neurons}

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            order[name] = None
            counts[name] += torch.stack([(output != 0).sum(), torch.tensor(output.numel(), device=output.device)])

        return only_outputs(hook)

    with attached(neuron.register_forward_hook(watch(name)) for name, neuron in neurons.items()):
        yield counts


@torch.no_grad()
def neuron_steps(net: nn.Module) -> dict[str, float]:
    """Each neuron's step; the mean, where each channel has its own."""
    return {name: float(neuron.step.mean()) for name, neuron in neurons_of(net).items()}


@torch.no_grad()
def neuron_tails(net: nn.Module) -> dict[str, float]:
    """Each neuron's tail coefficient, where its surrogate has one."""
    return {name: float(n.tail) for name, n in neurons_of(net).items() if n.surrogate.tail is not None}


def in_order(values: dict[str, float], first: Iterable[str]) -> dict[str, float]:
    """Values of neurons in the order in which these run, as `first` names them. What did not run comes last."""
    return {name: values[name] for name in (*(name for name in first if name in values), *values)}
