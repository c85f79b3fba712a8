"""A network's accuracy over a part of a dataset, or that of a run's stored weights, and what its neurons are like."""

from __future__ import annotations

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
from lbq.errors import LbqError, RunError
from lbq.neuron.base import neurons_of
from lbq.neuron.hooks import attached, evaluating, only_outputs
from lbq.runs import run_folder
from lbq.training.distributed import World

PRECISIONS = {"fp32": None, "fp64": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(settings: TrainConfig, device: torch.device) -> Any:
    dtype = PRECISIONS[settings.precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def computed_in(settings: TrainConfig) -> torch.dtype:
    """What convolutions put out."""
    return PRECISIONS[settings.precision] or (torch.float64 if settings.precision == "fp64" else torch.float32)


def emulated(settings: TrainConfig, device: torch.device) -> bool:
    """Whether a CPU lacks instructions for the precision: torch then computes convolutions some hundred times slower."""
    if device.type != "cpu" or PRECISIONS[settings.precision] is None:
        return False
    native = getattr(torch.ops.mkldnn, f"_is_mkldnn_{settings.precision}_supported", None)
    return native is not None and not native()


def exact(settings: TrainConfig) -> TrainConfig:
    """The settings, in the precision that accuracies are reported in: float32, or float64 where trained in that."""
    return settings if settings.precision == "fp64" else replace(settings, precision="fp32")


def rounds(settings: TrainConfig, device: torch.device) -> bool:
    """Whether training computes convolutions otherwise than `exact` settings without TensorFloat-32 do."""
    return PRECISIONS[settings.precision] is not None or (device.type == "cuda" and settings.precision == "fp32")


@contextmanager
def without_tf32() -> Iterator[None]:
    """Float32 convolutions and products of matrices in float32 for a while, where a GPU would round to TensorFloat-32.

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
) -> float:
    """Accuracy in percent over the whole of `part`, whatever the processes; fills `active` with active ratios."""
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    ratios = None if active is None else _ActiveRatios(net)
    with torch.no_grad(), evaluating(net), nullcontext() if ratios is None else ratios.watching():
        for x, labels in source.eval_batches(part, world.rank, world.size):
            with autocast(settings, device):
                logits = net(cast(x, settings))
            counts[0] += (logits.argmax(1) == labels).sum()  # which the GPU adds up without being waited for
            counts[1] += len(labels)
    correct, seen = world.sum(counts).tolist()
    if active is not None and ratios is not None:
        active.update(ratios.result(world))
    return float(100 * correct / seen)


def evaluate_run(
    run: Path | str,
    device: torch.device | str = "cpu",
    world: World | None = None,
    changes: Iterable[str] = (),
    precision: str | None = None,
    timesteps: int | None = None,
) -> dict[str, Any]:
    """Accuracy of a run's stored weights on its test set, beside what its result says.

    precision: default float32 (float64 where it was trained in that), as results say it. timesteps: default as many as it
    was trained over.
    """
    if precision is not None and precision not in PRECISIONS:
        raise LbqError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    folder = run_folder.check_folder(run, "config.toml", "weights.safetensors")
    trained, where = run_folder.load_config(folder, changes), torch.device(device)
    config = trained if timesteps is None else run_folder.over(timesteps, trained)
    net = run_folder.load(folder, timesteps).to(where)
    source = open_source(config, where)
    _check_classes(folder, source)
    stored: dict[str, Any] = {}
    if (folder / "result.json").exists():
        stored = run_folder.read_result(folder)
    settings = exact(config.train) if precision is None else replace(config.train, precision=precision)
    net.to(torch.float64 if settings.precision == "fp64" else torch.float32)
    with without_tf32():
        accuracy = evaluate(net, source, "test", settings, where, world or World())
    known = stored.get("data", {})  # of older runs in part
    return {
        "accuracy": accuracy,
        "images": source.test_size,
        "stored_accuracy": stored.get("accuracy"),
        "stored_precision": stored.get("tested_in") or config.train.precision,  # which older results do not say
        "other_data": any(known.get(k, v) != v for k, v in source.about.items() if k != "source"),
        "precision": settings.precision,
        "trained_in": config.train.precision,
        "timesteps": config.model.timesteps,
        "trained_over": trained.model.timesteps,
    }


def _check_classes(run: Path, source: Source) -> None:
    """Refuse data whose classes are not those that a run was trained on: labels would mean something else."""
    trained, now = run_folder.read_inputs(run), source.inputs.classes
    if trained is not None and trained.classes and now and trained.classes != now:
        raise RunError(
            f"{source.name} has other classes than {run} was trained on ({len(now)}, {', '.join(now)[:60]}; then "
            f"{len(trained.classes)}, {', '.join(trained.classes)[:60]}): give the data that it was trained on"
        )


def measure_norms(
    net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], settings: TrainConfig, device: torch.device, world: World
) -> dict[str, Tensor]:
    """BatchNorm's statistics over `batches`, in place of the network's: its buffers by name, which hold them now too.

    Everything but BatchNorm is as in evaluation. Statistics are the mean over batches, or over passes where a batch takes
    several, and over processes.
    """
    norms = {name: m for name, m in net.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats}
    with torch.no_grad(), evaluating(net), _averaging(norms.values()):
        for x, _ in batches if norms else ():
            with autocast(settings, device):
                net(cast(x, settings))
    statistics = {}
    for name, norm in norms.items():
        for part in ("running_mean", "running_var"):
            buffer = norm.get_buffer(part)
            statistics[f"{name}.{part}"] = buffer.copy_(world.sum(buffer.clone()) / world.size)
    return statistics


@contextmanager
def _averaging(norms: Iterable[_BatchNorm]) -> Iterator[None]:
    """Take statistics anew, as the mean over all passes; afterwards momenta are what they were."""
    momenta = [(norm, norm.momentum) for norm in norms]
    for norm, _ in momenta:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # a mean
    try:
        yield
    finally:
        for norm, momentum in momenta:
            norm.momentum = momentum


class _ActiveRatios:
    """Share of non-zero outputs of every neuron, over all forward passes while it is watching."""

    def __init__(self, net: nn.Module) -> None:
        self.neurons = neurons_of(net)
        device = next(net.parameters()).device
        self.sums = {name: torch.zeros(2, dtype=torch.float64, device=device) for name in self.neurons}

    def watching(self) -> AbstractContextManager[Any]:
        def watch(name: str) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
                self.sums[name] += torch.stack(
                    [(output != 0).sum(), torch.tensor(output.numel(), device=output.device)]
                )

            return only_outputs(hook)

        return attached(neuron.register_forward_hook(watch(name)) for name, neuron in self.neurons.items())

    def result(self, world: World) -> dict[str, float]:
        if not self.neurons:
            return {}
        everything = world.sum(torch.stack([self.sums[n] for n in self.neurons]))
        return {n: float(s[0] / s[1].clamp(min=1)) for n, s in zip(self.neurons, everything, strict=True)}


@torch.no_grad()
def neuron_steps(net: nn.Module) -> dict[str, float]:
    """Each neuron's step (the mean, where it has one per channel)."""
    return {name: float(neuron.step.mean()) for name, neuron in neurons_of(net).items()}


@torch.no_grad()
def neuron_tails(net: nn.Module) -> dict[str, float]:
    """Each neuron's tail coefficient, where its surrogate has one."""
    return {name: float(n.tail) for name, n in neurons_of(net).items() if n.surrogate.tail is not None}
