"""What a training job will do, known before it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lbq.config import Config
from lbq.data.registry import EVENTS, REGISTRY
from lbq.deploy import lower
from lbq.errors import ConfigError, GraphError, TooSmall
from lbq.graph.quantise import check_levels
from lbq.graph.rewrites import check_products
from lbq.native.choose import choose
from lbq.neuron.base import neurons_of
from lbq.training.evaluation import computed_in, emulated
from lbq.training.optim import weight_decays
from lbq.training.trainer import Trainer

# Tensors that autograd keeps per neuron and timestep: BatchNorm's input and the output, and what lies between them.
VALUES_PER_SITE = {"fused": 2, "native": 3, "reference": 5}
LEAST_FREE = 1e-3  # of the MACs: as few accumulations as no network gets along with


@dataclass(frozen=True)
class Plan:
    """Memory is an estimate for each process, in GiB."""

    model: str
    parameters: int
    macs: int | None
    neurons: int | None
    timesteps: int
    batch_size: int
    processes: int
    steps_per_epoch: int
    epochs: int
    memory_gib: float | None
    device: str
    kernel: str
    emulated: str | None  # the precision, where this CPU has no instructions for it
    data: dict[str, str]
    train_samples: int
    weight_bits: int  # in training and, by default, in the deployed network; 0: not rounded in training
    weight_decay: dict[str, float]  # of each role that has parameters: weights, norms, steps, neurons
    sam: float  # radius of sharpness-aware minimisation; 0: off
    sam_epochs: int  # how many of the last epochs have it
    level_cost: float  # price on accumulations; 0: none
    level_cost_of: str  # which accumulations
    level_cost_above: float  # so many of a sample are free
    remarks: tuple[str, ...] = ()  # settings that change nothing here, or do not fit together


def plan_of(trainer: Trainer) -> Plan:
    """What this training will do and need; where it cannot be known, such as the MACs of an odd network, it says None."""
    config, world, device = trainer.config, trainer.world, trainer.device
    t = config.train
    macs: int | None = None
    units: int | None = None
    refusal: tuple[str, ...] = ()
    try:
        steps, source = config.model.timesteps, trainer.source
        graph = lower(trainer.net, source.shape, steps, source.static, weights=False)
        macs, units = graph.macs, graph.units
        check_products(graph)
        for layer in graph.layers:
            if layer.neuron is not None:
                check_levels(layer.name, layer.neuron)
    except TooSmall as error:
        raise ConfigError(f"model.id {config.model.id}: {error}") from error
    except GraphError as error:  # a network without an integer form trains as well
        if neurons_of(trainer.net):
            refusal = (f"it trains, but cannot be deployed: {error}",)
    local = t.batch_size // (t.accumulate * world.size)
    kernel = _kernel(trainer)
    halves = {"fused": ("bf16", "fp16"), "native": ("bf16",)}.get(kernel, ())  # what else is narrow runs in float32
    size = 8 if t.precision == "fp64" else 2 if t.precision in halves else 4
    sites = None if units is None else units * config.model.timesteps * local
    gib = None if sites is None else VALUES_PER_SITE[kernel] * sites * size / 2**30
    return Plan(
        model=config.model.id,
        parameters=sum(p.numel() for p in trainer.net.parameters()),
        macs=macs,
        neurons=units,
        timesteps=config.model.timesteps,
        batch_size=t.batch_size,
        processes=world.size,
        steps_per_epoch=trainer.batches,
        epochs=t.epochs,
        memory_gib=gib,
        device=str(device),
        kernel=kernel,
        emulated=t.precision if emulated(t, device) else None,
        data=trainer.source.about,
        train_samples=trainer.source.train_size,
        weight_bits=t.weight_bits,
        weight_decay=weight_decays(trainer.optimiser),
        sam=config.optim.sam,
        sam_epochs=t.epochs - config.sharp_from,
        level_cost=t.level_cost,
        level_cost_of=t.level_cost_of,
        level_cost_above=t.level_cost_above,
        remarks=(*_without_effect(trainer), *_ill_matched(trainer), *_too_large(gib, device), *refusal),
    )


def _kernel(trainer: Trainer) -> str:
    """What runs the network's neurons: the reference where the chosen kernel can run none of them."""
    chosen, dtype = choose(trainer.device.type).kernel, computed_in(trainer.config.train)
    kernels = {n.kernel(trainer.config.model.timesteps, dtype) for n in neurons_of(trainer.net).values()}
    return chosen if not kernels or chosen in kernels else "reference"


def _without_effect(trainer: Trainer) -> Iterator[str]:
    """Settings that were changed and change nothing, each with why."""
    config, usual = trainer.config, Config()
    t, a, o, n = config.train, config.augment, config.optim, config.neuron
    neurons = list(neurons_of(trainer.net).values())
    if config.data.frames != usual.data.frames and config.data.name not in EVENTS:
        yield f"data.frames has no effect with data.name={config.data.name}, which holds no recordings"
    if config.data.window_ms != usual.data.window_ms and config.data.name != "dvs_objects":
        yield f"data.window_ms has no effect with data.name={config.data.name}: it cuts the recordings of dvs_objects"
    if t.loss != "tet" and t.tet_weight != usual.train.tet_weight:
        yield f"train.tet_weight has no effect with train.loss={t.loss}"
    if t.new_head and not t.init_from:
        yield "train.new_head has no effect without train.init_from"
    if a.min_area != usual.augment.min_area and REGISTRY[config.data.name].kind != "files":
        yield f"augment.min_area has no effect with data.name={config.data.name}, which holds no image files"
    if not (a.mixup or a.cutmix) and a.mix_prob != usual.augment.mix_prob:
        yield "augment.mix_prob has no effect without augment.mixup or augment.cutmix"
    ended = a.policy or a.cutout or a.events or a.mixup or a.cutmix  # by plain epochs
    if a.plain_epochs and not ended:
        yield "augment.plain_epochs has no effect without augment.policy, cutout, events, mixup or cutmix"
    if a.plain_epochs == t.epochs and ended:
        yield (
            f"augment.plain_epochs are all {t.epochs} epochs: augment.policy, cutout, mixup and cutmix have no effect, and "
            "events flips at most"
        )
    if o.name == "adamw" and o.momentum != usual.optim.momentum:
        yield "optim.momentum has no effect with optim.name=adamw"
    if o.neuron_decay == "none" and o.neuron_decay_factor != usual.optim.neuron_decay_factor:
        yield "optim.neuron_decay_factor has no effect with optim.neuron_decay=none"
    if o.sam_epochs and not o.sam:
        yield "optim.sam_epochs has no effect without optim.sam"
    if not t.level_cost and t.level_cost_of != usual.train.level_cost_of:
        yield "train.level_cost_of has no effect without train.level_cost"
    if t.level_cost_above and not t.level_cost:
        yield "train.level_cost_above has no effect without train.level_cost"
    if "beta" in n and neurons and all(neuron.membrane == "if" for neuron in neurons):
        yield "neuron.beta has no effect: an IF membrane does not leak"
    if neurons and all(neuron.surrogate.tail is None for neuron in neurons):
        for key in ("tail", "learn_tail"):
            if key in n:
                yield f"neuron.{key} has no effect: the surrogate {neurons[0].surrogate.name} has no tails"
    if n.get("step_gradient") == "lsq" and not any(neuron.step.requires_grad for neuron in neurons):
        yield "neuron.step_gradient has no effect: the step is not learned"
    if not neurons and n.get("name") != "relu":
        yield "the network has no neurons of lbq.neuron: levels are not counted, and it cannot be deployed"
    elif not neurons and config.model.timesteps > 1 and trainer.source.static:
        yield f"an ANN computes the same at each of {config.model.timesteps} timesteps: model.timesteps=1"


def _too_large(gib: float | None, device: torch.device) -> Iterator[str]:
    """Whether activations of so many GiB will hardly fit into the memory of the device."""
    there = memory_of(device) / 2**30
    if gib is not None and 0 < there < gib:
        yield (
            f"activations take about {gib:,.0f} GiB (estimated), {device} has {there:,.0f} GiB: raise train.accumulate, or "
            "lower train.batch_size"
        )


def memory_of(device: torch.device) -> int:
    """All bytes of the device's memory; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows, and systems without these names
        return 0


def _ill_matched(trainer: Trainer) -> Iterator[str]:
    """Settings that are rarely meant together."""
    o, t = trainer.config.optim, trainer.config.train
    steps = t.epochs * trainer.batches
    if t.ema and steps * (1 - t.ema) < 1:
        yield (
            f"train.ema={t.ema:g} averages over about {1 / (1 - t.ema):,.0f} steps, and there are {steps:,}: the weights that "
            "training began with will weigh most"
        )
    cost = trainer.level_cost
    if cost is not None and cost.pooled:
        yield (
            f"train.level_cost counts levels before max pools, behind which there are more: of {', '.join(cost.pooled[:3])}"
            f"{' and others' * (len(cost.pooled) > 3)} it counts too few accumulations, lbq account says how many there are"
        )
    if cost is not None and 0 < cost.free < LEAST_FREE:
        yield (
            f"train.level_cost_above={t.level_cost_above:g} is next to nothing for {cost.synapses:,} MACs: give the "
            "accumulations of a sample over all timesteps"
        )
    if o.name == "adamw" and o.lr > 0.01:
        yield f"optim.lr={o.lr:g} is a rate for SGD: AdamW usually takes about 0.001"
