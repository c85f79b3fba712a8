"""Run a network over images and measure it: accuracy, counts in both modes, level histograms. Constant memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from lbq.batches.sources import Part, Source, open_source
from lbq.counting.analysis import Analysis
from lbq.counting.measurement import Measurement as Measurement
from lbq.counting.tally import Tallies
from lbq.data.testset import check_limit
from lbq.deploy.lowering.lower import lower
from lbq.errors import DataError
from lbq.measuring.observer import Observer
from lbq.neuron.base import unchanging
from lbq.neuron.hooks import evaluating
from lbq.runs import run_folder
from lbq.training import evaluation

IMAGES_PER_MEMBRANE_PASS = 16  # on a CPU; a GPU takes a whole batch, for few launches


@torch.no_grad()
def measure(
    net: nn.Module,
    source: Source,
    *,
    membranes: int = 0,
    limit: int | None = None,
    precision: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
    part: Part = "test",
) -> Measurement:
    """Accuracy on a part of `source` and, for a spiking network, its level tallies there; counts and histograms follow.

    part: "holdout" for a look at what a recipe costs that leaves the test set alone. membranes: run every n-th image once
    more and look at its membranes; 0: none. limit: of images.
    precision: to compute in on a GPU, other than the network's own.
    """
    check_limit(limit)
    if part == "holdout" and not source.holdout_size:
        raise DataError("no samples are held out: data.holdout=0.1 holds a tenth of the training set out")
    graph = lower(net, source.shape, static=source.static, weights=False)
    spiking = bool(graph.layers) and all(layer.neuron is not None for layer in graph.layers)
    tallies = Tallies(graph) if spiking else None
    observer = None if tallies is None else Observer(tallies)
    device = next(net.parameters()).device
    images, along = 0, 0 if source.static else 1
    correct = torch.zeros((), dtype=torch.int64, device=device)
    cast = torch.autocast(device.type, dtype=precision) if precision and device.type == "cuda" else nullcontext()
    sample: list[torch.Tensor] = []  # images whose membranes are still to be seen

    def look_inside(least: int) -> None:
        if observer is not None and sum(part.shape[along] for part in sample) >= least:
            with observer.looking_inside(net):
                net(torch.cat(sample, along))
            sample.clear()

    counting = observer.counting(net) if observer else nullcontext()
    with evaluating(net), unchanging(net), cast, counting:
        for x, labels in _batches(net, source, limit, part):
            correct += (net(x).argmax(1) == labels).sum()
            if observer is not None and membranes:
                chosen = slice(-images % membranes, None, membranes)
                sample.append((x[chosen] if source.static else x[:, chosen]).clone())
                look_inside(len(labels) if x.is_cuda else IMAGES_PER_MEMBRANE_PASS)
            images += len(labels)
            if progress is not None:
                progress(len(labels))
        look_inside(1)
    if observer is not None:
        observer.finish(images)
    return Measurement(
        graph,
        images,
        100 * int(correct) / images,
        tallies,
        images == (source.test_size if part == "test" else source.holdout_size),
        observer.membranes if observer else {},
        observer.traces if observer else (),
    )


def _batches(
    net: nn.Module, source: Source, limit: int | None, part: Part
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The first `limit` images of a part and their labels, as the network takes them and where it lies."""
    parameter, images = next(net.parameters()), 0
    for x, labels in source.eval_batches(part):
        if limit is not None and images + len(labels) > limit:
            labels = labels[: limit - images]
            x = x[: len(labels)] if source.static else x[:, : len(labels)]
        x = x.to(parameter)
        if x.dim() == 4 and x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        yield x, labels.to(parameter.device)
        images += len(labels)
        if images == limit:
            break


def measure_run(
    run: Path | str,
    *,
    changes: Iterable[str] = (),
    device: torch.device | str = "cpu",
    membranes: int = 0,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Measurement:
    """The network of a run folder on the test images of the dataset it was trained on, on a GPU in the run's precision."""
    return _loaded_and_measured(run, changes, device, membranes, limit, progress)[1]


def analyze_run(
    run: Path | str,
    *,
    changes: Iterable[str] = (),
    device: torch.device | str = "cpu",
    membranes: int = 32,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Analysis:
    """The analysis of a run folder."""
    from lbq.runs.records import facts_of

    net, measured = _loaded_and_measured(run, changes, device, membranes, limit, progress)
    return measured.analysis({"kind": "run", **facts_of(run)}, evaluation.neuron_tails(net))


def _loaded_and_measured(
    run: Path | str,
    changes: Iterable[str],
    device: torch.device | str,
    membranes: int,
    limit: int | None,
    progress: Callable[[int], None] | None,
) -> tuple[nn.Module, Measurement]:
    config = run_folder.load_config(run, changes)
    net = run_folder.load(run).to(device)
    if torch.device(device).type == "cuda":
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    measured = measure(
        net,
        open_source(config, device),
        membranes=membranes,
        limit=limit,
        precision=evaluation.PRECISIONS[config.train.precision],
        progress=progress,
    )
    return net, measured
