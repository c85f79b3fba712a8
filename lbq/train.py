"""The training loop: SGD with warm-up and cosine decay. Yields one record per epoch; prints nothing.

Randomness is a function of (seed, purpose, epoch), so the same configuration gives the same bytes on a CPU.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from lbq import models
from lbq.config import Config
from lbq.data.augment import random_shift
from lbq.data.digits import Split
from lbq.errors import LbqError
from lbq.neuron import QuantReLU, SpikingNeuron


@dataclass(frozen=True)
class EpochRecord:
    """Loss and accuracy (percent) on the augmented training images; each neuron's step and tail after the epoch."""

    epoch: int
    loss: float
    accuracy: float
    lr: float
    seconds: float
    steps: dict[str, float]
    tails: dict[str, float]


def generator(seed: int, purpose: str, epoch: int = 0) -> torch.Generator:
    """A random stream of its own for each (seed, purpose, epoch)."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def build(config: Config) -> models.BurstNet:
    """The configured network with weights drawn from the configured seed; the caller's random state is untouched."""
    m = config.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator(config.seed, "weights"))))
        return models.create(
            m.id,
            m.num_classes,
            m.timesteps,
            config.neuron,
            in_channels=m.in_channels,
            stem_stride=m.stem_stride,
            share_tail=m.share_tail,
        )


def parameter_groups(net: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Synaptic weights decay; everything else (BatchNorm, biases, steps, tails, leaks) does not.

    Decay on rho would pull the step toward softplus(0) = 0.69.
    """
    synaptic = {id(m.weight) for m in net.modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    weights = [p for p in net.parameters() if id(p) in synaptic]
    others = [p for p in net.parameters() if id(p) not in synaptic]
    return [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def learning_rate(step: int, total: int, warmup: int, base: float) -> float:
    """Linear warm-up over `warmup` steps, then cosine to 0 at `total`."""
    if step < warmup:
        return base * (step + 1) / warmup
    return base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


def fit(net: models.BurstNet, train: Split, config: Config) -> Iterator[EpochRecord]:
    """Train `net` in place; yields after every epoch."""
    settings = config.train
    device = device_of(net)
    images, labels = torch.from_numpy(train.images).to(device), torch.from_numpy(train.labels).to(device)
    batches = max(len(train) // settings.batch_size, 1)
    total, warmup = settings.epochs * batches, settings.warmup_epochs * batches
    optimiser = torch.optim.SGD(
        parameter_groups(net, settings.weight_decay),
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.momentum > 0,
    )
    for epoch in range(settings.epochs):
        started = time.perf_counter()
        net.train()
        order = torch.randperm(len(train), generator=generator(config.seed, "order", epoch))
        noise = generator(config.seed, "augment", epoch)
        loss_sum, correct, seen, rate = 0.0, 0, 0, 0.0
        for batch in range(batches):
            rate = learning_rate(epoch * batches + batch, total, warmup, settings.lr)
            for group in optimiser.param_groups:
                group["lr"] = rate
            chosen = order.to(device)[batch * settings.batch_size : (batch + 1) * settings.batch_size]
            x, y = random_shift(images[chosen], config.data.shift, noise), labels[chosen]
            logits = net(x)
            loss = F.cross_entropy(logits, y)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            if not math.isfinite(value := loss.item()):
                raise LbqError(
                    f"loss became {value} in epoch {epoch + 1}, step {batch + 1}: lower train.lr ({settings.lr})"
                )
            loss_sum += value * len(y)
            correct += int((logits.argmax(1) == y).sum())
            seen += len(y)
        yield EpochRecord(
            epoch=epoch + 1,
            loss=loss_sum / seen,
            accuracy=100 * correct / seen,
            lr=rate,
            seconds=time.perf_counter() - started,
            steps=neuron_steps(net),
            tails=neuron_tails(net),
        )


def device_of(net: nn.Module) -> torch.device:
    return next(net.parameters()).device


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; the network's mode is restored."""
    was_training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(was_training)


@torch.no_grad()
def predict(net: nn.Module, images: NDArray[np.floating] | Tensor, batch_size: int = 256) -> Tensor:
    """Mean logits `[N, classes]` on the CPU."""
    device = device_of(net)
    with evaluating(net):
        return torch.cat([net(batch.to(device)).cpu() for batch in torch.as_tensor(images).split(batch_size)])


def accuracy(net: nn.Module, split: Split) -> float:
    """Percent of `split` classified correctly."""
    return 100 * float((predict(net, split.images).argmax(1).numpy() == split.labels).mean())


@torch.no_grad()
def neuron_steps(net: nn.Module) -> dict[str, float]:
    """Each neuron's step (the mean, where it has one per channel)."""
    return {n: float(m.step.mean()) for n, m in net.named_modules() if isinstance(m, (SpikingNeuron, QuantReLU))}


@torch.no_grad()
def neuron_tails(net: nn.Module) -> dict[str, float]:
    """Each neuron's tail coefficient, where its surrogate has one."""
    return {
        n: float(m.tail)
        for n, m in net.named_modules()
        if isinstance(m, SpikingNeuron) and m.surrogate.tail is not None
    }
