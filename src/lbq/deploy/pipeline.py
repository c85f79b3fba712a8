"""A trained network as a deployed one: all rewrites in order, then golden vectors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from lbq.config import DEPLOYED_BITS, Config
from lbq.data.dataset import Inputs
from lbq.data.testset import TestSet, open_test
from lbq.deploy.like import Like, check_like
from lbq.deploy.lowering.faithful import exact_copy
from lbq.deploy.lowering.lower import lower
from lbq.deploy.lowering.shapes import InputShape
from lbq.deploy.verify import confirm
from lbq.engine import Network
from lbq.engine.engine import GOLDEN_INPUTS, noise_for
from lbq.errors import GraphError
from lbq.graph import Graph
from lbq.graph.quantise import quantise
from lbq.graph.rewrites import absorb, fold_gain, on_pixels
from lbq.runs import run_folder

LARGEST_STD = 4.0  # of pixel / scale; a larger one is a mistake
CONFIRMED_INPUTS = 2  # run once more by the trained network: not one, so that mixing them would be seen


def deploy(
    net: nn.Module,
    input_shape: InputShape,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    scale: int | None = None,
    timesteps: int | None = None,
    static: bool = True,
    bits: int = 8,
    classes: Sequence[str] = (),
    examples: NDArray[np.uint8] | None = None,
    facts: Mapping[str, Any] | None = None,
    like: Like | None = None,
    stream: bool = False,
) -> Network:
    """The integer network of a trained one, with golden vectors: `lbq.engine.save(path, deploy(net, ...))`.

    net: a network that torch.fx can trace, of neurons of `lbq.neuron` and of layers that have an integer form
        (docs/howto/deploy.md). It is read as in evaluation mode. Hooks and layers with a forward of their own are refused.
    input_shape: of one image, (C, H, W). Of one signal, (C, L), which the integer network reads as [C, 1, L]. Of features,
        (F,), read as [F, 1, 1].
    mean, std, scale: how images were normalised in training, (pixel / scale - mean) / std; scale is the brightest pixel.
        One of them alone leaves the others at 0, 1 and 255. Images need at least one. Event frames (static=False) need
        none: they are read as they are.
    timesteps: default the network's own.
    static: an image is shown at every timestep; False for event frames, which bring their time along.
    bits: of the weights, 2 to 8, or 16.
    classes: their names.
    examples: uint8 inputs for the golden vectors, `[B, C, H, W]` or `[T, B, C, H, W]`; default random ones.
    facts: where the network comes from, as JSON values. {"data": {"name": "cifar10"}} lets `lbq run` read that dataset.
    like: a few uint8 images `[B, C, H, W]` and the tensors that training made of them. They are refused if mean, std and scale
        would have made others; the error says which mean and std were used.
    stream: membranes must fit over endless frames too, for `Network.stream`; they may get a fractional bit less.
    """
    exact = exact_copy(net)
    graph = lower(exact, input_shape, timesteps, static)
    pixels = _normalisation(mean, std, scale, graph)
    if like is not None:
        check_like(like, *(pixels or _Normalisation([0.0] * input_shape[0], [1.0] * input_shape[0], 1)))
    all_facts = _checked_facts(facts, "noise" if examples is None else "given")
    if pixels is not None:
        graph = on_pixels(graph, *pixels)
    graph = absorb(fold_gain(graph))
    input_max = 255 if pixels is None else pixels.scale
    network = quantise(graph, bits, classes, input_max, all_facts, stream)
    inputs = noise_for(network) if examples is None else _checked_examples(examples, graph, input_shape)
    confirmed = (inputs[:CONFIRMED_INPUTS] if static else inputs[:, :CONFIRMED_INPUTS]).astype(np.float64)
    x = confirmed
    if pixels is not None:
        means, deviations = (np.reshape(values, (-1, 1, 1)) * pixels.scale for values in (pixels.mean, pixels.std))
        x = (x - means) / deviations
    confirm(exact, graph, x.reshape(*x.shape[:-3], *input_shape), confirmed)
    return Network(network).with_golden(inputs[:GOLDEN_INPUTS] if static else inputs[:, :GOLDEN_INPUTS])


class _Normalisation(NamedTuple):
    """(pixel / scale - mean) / std, by channel."""

    mean: list[float]
    std: list[float]
    scale: int


def _normalisation(
    mean: Sequence[float] | None, std: Sequence[float] | None, scale: int | None, graph: Graph
) -> _Normalisation | None:
    """None for event frames that go in as they are."""
    if mean is None and std is None and scale is None:
        if not graph.static:
            return None
        raise GraphError(
            "say how images were normalised, (pixel / scale - mean) / std: scale=255 where that was pixel / 255 alone, "
            "std=[1/255] for each channel where pixels went in as they are, mean=... and std=... else"
        )
    most: Any = 255 if scale is None else scale
    if isinstance(most, bool) or not isinstance(most, Integral) or not 1 <= int(most) <= 255:
        raise GraphError(f"scale must be a whole number from 1 to 255, the value of the brightest pixel, got {scale!r}")
    channels = graph.input_shape[0]
    means, deviations = _numbers("mean", mean, channels, 0.0), _numbers("std", std, channels, 1.0)
    if min(deviations) <= 0:
        raise GraphError(f"std must be positive, got {std!r}")
    if max(means) > 1:
        raise GraphError(
            f"mean is of pixel / scale, at most 1, got {mean!r} with scale={most}: where mean and std are of pixels, "
            "divide both by the brightest one (255), and give that as scale"
        )
    if max(deviations) > LARGEST_STD:
        raise GraphError(
            f"std is of pixel / scale, where it is below 1, got {std!r} with scale={most}: where it is of pixels, divide it by "
            "the brightest one (255), and give that as scale; where so small inputs are meant, scale the first layer's weights"
        )
    return _Normalisation(means, deviations, int(most))


def _numbers(name: str, values: Sequence[float] | None, channels: int, default: float) -> list[float]:
    """One finite number for each channel."""
    if values is None:
        return [default] * channels
    try:
        numbers = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        numbers = np.zeros(())
    if numbers.shape != (channels,) or not np.isfinite(numbers).all():
        raise GraphError(f"{name} must be a list of {channels} finite numbers, one for each channel, got {values!r}")
    return numbers.tolist()


def _checked_facts(facts: Mapping[str, Any] | None, golden: str) -> dict[str, Any]:
    """The facts that a network carries, with what its golden inputs are."""
    try:
        checked = {**(facts or {}), "golden": golden}
        json.dumps(checked, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GraphError(f"facts must be JSON values under names: {error}") from error
    return checked


def _checked_examples(examples: Any, graph: Graph, input_shape: InputShape) -> NDArray[np.uint8]:
    """Examples as the integer network reads them. The user may give them as the trained network reads them."""
    lead = () if graph.static else (graph.timesteps,)
    array = np.asarray(examples)
    batch = array.shape[len(lead)] if array.ndim > len(lead) else 0
    shape = (*lead, batch, *graph.input_shape)
    if array.shape == (*lead, batch, *input_shape):
        array = array.reshape(shape)
    if array.dtype != np.uint8 or not batch or array.shape != shape:
        expected = ", ".join(map(str, (*lead, "B", *graph.input_shape)))
        raise GraphError(f"examples must be uint8 [{expected}], got {array.dtype} {list(array.shape)}")
    return array


def deploy_run(
    run: Path | str,
    *,
    changes: Iterable[str] = (),
    bits: int | None = None,
    noise: bool = False,
    timesteps: int | None = None,
    stream: bool = False,
) -> Network:
    """The network of a run folder, its golden inputs the first test images of the dataset it was trained on.

    bits: of the weights; default those that it was trained with, `train.weight_bits`, or 8.
    noise: random ones instead, for files that are published where the dataset must not be; it is then not needed either.
    timesteps: default as many as it was trained over. stream: for endless frames too, see `deploy`.
    """
    trained = run_folder.load_config(run, changes)
    config = trained if timesteps is None else run_folder.over(timesteps, trained)
    net = run_folder.load(run, timesteps)
    origin = {"config_hash": run_folder.load_config(run).hash, "weights_sha256": run_folder.weights_checksum(run)}
    inputs = run_folder.read_inputs(run)  # as they were in training, whatever the data is now
    if noise and inputs is not None:
        return deploy_trained(net, config, inputs, None, bits, origin, stream)
    test = test_set(config)
    examples = None if noise else test.read(0, min(GOLDEN_INPUTS, test.size))
    return deploy_trained(net, config, inputs or test, examples, bits, origin, stream)


def graph_of_run(run: Path | str, *, changes: Iterable[str] = ()) -> Graph:
    """The network of a run folder on real numbers, steps absorbed, for inputs normalised as in training."""
    config = run_folder.load_config(run, changes)
    test = test_set(config)
    return graph_of(run_folder.load(run), test.shape, config.model.timesteps, test.static)


def graph_of(net: nn.Module, input_shape: InputShape, timesteps: int | None = None, static: bool = True) -> Graph:
    """A trained network on real numbers, steps absorbed, for inputs normalised as in training.

    It is refused where `deploy` refuses it.
    """
    exact = exact_copy(net)
    graph = absorb(fold_gain(lower(exact, input_shape, timesteps, static)))
    lead = (CONFIRMED_INPUTS,) if static else (graph.timesteps, CONFIRMED_INPUTS)
    noise = np.random.default_rng(0).standard_normal((*lead, *graph.input_shape))
    confirm(exact, graph, noise.reshape(*lead, *input_shape), noise)
    return graph


def deploy_trained(
    net: nn.Module,
    config: Config,
    reads: Inputs,
    examples: NDArray[np.uint8] | None,
    bits: int | None = None,
    origin: Mapping[str, str] | None = None,
    stream: bool = False,
) -> Network:
    """The network of a configuration, for such inputs. bits: default the configuration's. origin: what identifies its run;
    default the configuration's hash."""
    d, bits = config.data, (config.train.weight_bits or DEPLOYED_BITS) if bits is None else bits
    if reads.shape[0] != config.model.in_channels:
        raise GraphError(f"the network reads {config.model.in_channels} channels, {reads.name} has {reads.shape[0]}")
    data = {"name": d.name, "size": d.size, "frames": d.frames, "window_ms": d.window_ms}
    return deploy(
        net,
        reads.shape,
        mean=reads.mean or None,
        std=reads.std or None,
        scale=reads.scale if reads.mean else None,
        timesteps=config.model.timesteps,
        static=reads.static,
        bits=bits,
        classes=reads.classes if len(reads.classes) == config.model.num_classes else (),
        examples=examples,
        facts={"model": config.model.id, "bits": bits, "data": data, **(origin or {"config_hash": config.hash})},
        stream=stream,
    )


def test_set(config: Config) -> TestSet:
    """The test images of a configuration, as bytes."""
    d = config.data
    return open_test(d.name, d.root, config.model.timesteps, d.size, d.frames, d.window_ms)


test_set.__test__ = False  # type: ignore[attr-defined]  # not for pytest
