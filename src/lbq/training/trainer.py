"""The trainer: every reported number comes from here. Yields records; prints nothing.

A run's state is its tensors and three positions: the data cursor (epoch, batch), the step of the schedule, and the
position in the random stream. Order, augmentation and dropout are functions of the seed and these, so a run continued
from a checkpoint, at any batch, gives the same bytes as one that was never interrupted.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lbq.batches.ahead import ahead
from lbq.batches.mixing import Mixing
from lbq.batches.sources import Part, Source
from lbq.config import Config
from lbq.errors import ConfigError
from lbq.runs.build import build, stream_seed
from lbq.training import evaluation, optim
from lbq.training.cuda_graph import CapturedStep
from lbq.training.distributed import World, synchronise_batchnorm
from lbq.training.divergence import Sentinel
from lbq.training.fit import check_fit
from lbq.training.level_cost import priced_levels, summing_levels
from lbq.training.loss import classification_loss
from lbq.training.position import EpochRecord, Position
from lbq.training.weight_rounding import rounding_of

NORM_SAMPLES = 10_000  # training samples that give BatchNorms statistics outside of training


class Trainer:
    """Trains the configured network on `source`. Call `fit`, a generator of epoch records.

    between_steps: called with the trainer after every step; it may save, and stops training by returning True.
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        device: torch.device | str = "cpu",
        world: World | None = None,
        between_steps: Callable[[Trainer], bool] | None = None,
    ) -> None:
        self.config, self.source, self.world = config, source, world or World()
        self.device = torch.device(device)
        self.between_steps = between_steps
        self.position = Position()
        # of this epoch: loss, correct, seen, accumulations
        self.tally = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.began = time.perf_counter()  # when this epoch began, or would have begun without an interruption
        check_fit(config, source, self.world.size)
        self.net = build(config).to(self.device)
        if config.train.precision == "fp64":
            self.net.double()
        if config.train.channels_last:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.level_cost = priced_levels(config, self.net, source)
        self.rounded = rounding_of(config, self.net, source)  # the context in which weights have few bits
        if config.train.sync_batchnorm:
            synchronise_batchnorm(self.net)
        self.optimiser = optim.make_optimiser(self.net, config.optim)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.train.precision == "fp16")
        self.average = optim.Average(self.net, config.train.ema) if config.train.ema else None
        a, classes = config.augment, config.model.num_classes
        self.mixing = Mixing(a.mixup, a.cutmix, a.mix_prob, a.label_smoothing, classes, config.plain_from)
        self.sentinel = Sentinel(self.net, config, self.device)
        self._captured: CapturedStep | None = None
        self._captured_sharp = False

    # State
    # ---------------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that a run needs to go on, as tensors and JSON values. To be called in every process."""
        tensors = {f"model/{k}": v for k, v in self.net.state_dict().items()}
        tensors |= {f"optim/{k}": v for k, v in optim.optimiser_state(self.net, self.optimiser).items()}
        if self.average is not None:
            tensors |= {f"average/{k}": v for k, v in self.average.state.items()}
        values = {
            "position": asdict(self.position),
            "tally": self.world.gather(self.tally).tolist(),  # one for each process
            "seconds": time.perf_counter() - self.began,
            "scaler": self.scaler.state_dict(),
            "config_hash": self.config.hash,
            "data": self.data,
            "first_steps": self.sentinel.first_steps,
            # parameters that have had no gradient yet
            "without_slots": [n for n, p in self.net.named_parameters() if not self.optimiser.state.get(p)],
        }
        return tensors, values

    @property
    def data(self) -> dict[str, str]:
        """What identifies the training data, wherever it lies."""
        return {key: value for key, value in self.source.about.items() if key != "source"}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Go on from a checkpoint: network, optimiser, averages, position in the epochs, and what was counted so far."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        self.net.load_state_dict(part("model/"))
        optim.restore_optimiser(self.net, self.optimiser, part("optim/"))
        if self.average is not None:
            for name, value in part("average/").items():
                self.average.state[name].copy_(value)
        # older checkpoints lack first steps and seconds
        self.sentinel.first_steps = values.get("first_steps") or evaluation.neuron_steps(self.net)
        self.position = Position(**values["position"])
        self.began = time.perf_counter() - values.get("seconds", 0.0)
        tallies = torch.tensor(values["tally"], dtype=torch.float64, device=self.device)
        tallies = F.pad(tallies, (0, len(self.tally) - tallies.shape[1]))  # older checkpoints count no accumulations
        if len(tallies) == self.world.size:
            self.tally = tallies[self.world.rank].clone()
        else:  # continued with another number of processes
            self.tally = tallies.sum(0) if self.world.main else torch.zeros_like(self.tally)
        if values["scaler"]:
            self.scaler.load_state_dict(values["scaler"])

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Begin with these weights, in the averages too."""
        self.net.load_state_dict(weights, strict=False)
        self.sentinel.first_steps = evaluation.neuron_steps(self.net)
        if self.average is not None:
            self.average = optim.Average(self.net, self.average.decay)

    # Training
    # ------------------------------------------------------------------------------------------------------------

    @property
    def batches(self) -> int:
        """Steps in an epoch; a last incomplete batch is dropped."""
        return self.source.train_size // self.config.train.batch_size

    @property
    def done(self) -> bool:
        return self.position.epoch >= self.config.train.epochs

    @property
    def sharp(self) -> bool:
        """Whether this epoch uses sharpness-aware minimisation; after the last epoch, whether that one did."""
        return self.config.optim.sam > 0 and self.position.epoch >= self.config.sharp_from

    def order(self, epoch: int) -> Tensor:
        """The epoch's order of samples, `[batches, accumulate, processes, samples]`, for any number of processes the same."""
        t = self.config.train
        generator = torch.Generator().manual_seed(stream_seed(self.config.seed, "order", epoch))
        order = torch.randperm(self.source.train_size, generator=generator)[: self.batches * t.batch_size]
        return order.reshape(self.batches, t.accumulate, self.world.size, -1)

    def fit(self) -> Iterator[EpochRecord]:
        """Train from the present position to the end; yields after every epoch."""
        while not self.done and self._train_epoch():
            yield self._finish_epoch()

    def _train_epoch(self) -> bool:
        """Take the remaining steps of an epoch. Returns whether it was finished, and not stopped between steps."""
        epoch, first = self.position.epoch, self.position.batch
        if not first:
            self.began = time.perf_counter()
        numbers = self.order(epoch)[first:, :, self.world.rank].flatten(0, 1)
        self.net.train()
        parts = ahead(self.source.train_batches(list(numbers), epoch, self.config.seed), self.device)
        for _ in range(first, self.batches):
            rate = optim.learning_rate(self.position.step, self.batches, self.config)
            optim.set_learning_rate(self.optimiser, rate)
            self._step(parts)
            if self.between_steps is not None and self.between_steps(self):
                return False
        self.sentinel.check_steps(self.position)
        return True

    def _finish_epoch(self) -> EpochRecord:
        """Evaluate an epoch whose steps are done, and move on to the next one."""
        epoch = self.position.epoch + 1
        loss, correct, seen, accumulations = self.world.sum(self.tally.clone()).tolist()
        seconds = time.perf_counter() - self.began
        accuracies = self._accuracies(epoch)
        with self.averaged():
            steps, tails = evaluation.neuron_steps(self.net), evaluation.neuron_tails(self.net)
        self.position.epoch, self.position.batch = epoch, 0
        self.tally.zero_()
        return EpochRecord(
            epoch=epoch,
            step=self.position.step,
            loss=loss / seen,
            train_accuracy=100 * correct / seen,
            lr=optim.learning_rate(self.position.step - 1, self.batches, self.config),
            seconds=seconds,
            samples_per_second=self.batches * self.config.train.batch_size / seconds,
            accumulations=accumulations / seen if self.level_cost is not None else None,
            steps=steps,
            tails=tails,
            **accuracies,
        )

    def _accuracies(self, epoch: int) -> dict[str, Any]:
        """Evaluate after an epoch, counted from 1. Returns fields of its record.

        `train.test` says which epochs are tested, `train.eval_every` how often the held-out images are evaluated. The last
        epoch is evaluated in float32 as well: rounding to bfloat16 costs some hundredths of a point.
        """
        t = self.config.train
        last = epoch == t.epochs
        due = last or epoch % t.eval_every == 0
        tested = {"never": False, "last": last, "every": due}[t.test]
        is_due: dict[Part, bool] = {"test": tested, "holdout": due and self.source.holdout_size > 0}
        parts = [part for part in is_due if is_due[part]]
        fields: dict[str, Any] = {}
        if parts:
            fields["tested_in"] = evaluation.exact(t).precision if last else t.precision
        if self.average is not None and (parts or last):
            if tested:
                fields["unaveraged_accuracy"] = self.evaluate("test", exact=last)
            self._measure_norms(self.average)
        with self.averaged():
            for part in parts:
                active = fields.setdefault("active", {}) if part == parts[0] else None
                outcomes = fields.setdefault("outcomes", {}) if part == "test" and last else None
                fields[f"{part}_accuracy"] = accuracy = self.evaluate(part, active, outcomes, exact=last)
                if last:
                    rounds = evaluation.rounds(t, self.device)
                    fields[f"{part}_accuracy_as_trained"] = self.evaluate(part) if rounds else accuracy
        return fields

    def _step(self, parts: Iterator[tuple[Tensor, Tensor]]) -> None:
        t, position = self.config.train, self.position
        if (captured := self.captured()) is not None:  # a batch is one part there
            x, targets, labels = self._prepared(next(parts), 0)
            self.sentinel.look(captured(x, targets, labels), x, position)
        else:
            self.optimiser.zero_grad(set_to_none=True)
            if t.weight_bits:  # processes must round by the same BatchNorm statistics
                self.world.share(self.net.buffers())
            with self.rounded():
                for part in range(t.accumulate):
                    self._backward(*self._prepared(next(parts), part), last=part == t.accumulate - 1)
            self._check_all_take_part()
            self._update()
        position.batch += 1
        position.step += 1
        position.stream += 1

    def _prepared(self, samples: tuple[Tensor, Tensor], part: int) -> tuple[Tensor, Tensor, Tensor]:
        """A part of a batch as the network takes it: inputs, mixed targets and labels. Seeds what draws at random in it."""
        position, (x, labels) = self.position, samples
        self._seed_stream(part)
        number = position.batch * self.config.train.accumulate + part
        x, targets = self.mixing(x, labels, self.config.seed, position.epoch, number)
        return evaluation.cast(x, self.config.train), targets, labels

    def _backward(self, x: Tensor, targets: Tensor, labels: Tensor, last: bool, check: bool = True) -> Tensor:
        """Forward and backward over one part of a batch. Counts in the tally and returns the loss."""
        logits, loss, accumulations = self._gradients(x, targets, last, check)
        mean = logits.mean(0) if self.config.train.loss == "tet" else logits
        correct = (mean.argmax(1) == labels).sum()
        seen = torch.full_like(correct, len(labels))
        sums = (loss * len(labels), correct, seen, accumulations)
        self.tally += torch.stack([value.double() for value in sums])
        if self.sharp:
            statistics = [buffer.clone() for buffer in self.net.buffers()]  # BatchNorm's, at the weights themselves
            with optim.uphill(self.optimiser, self.config.optim.sam):
                self.optimiser.zero_grad(set_to_none=True)
                self._gradients(x, targets, last, check=False)
            for buffer, value in zip(self.net.buffers(), statistics, strict=True):
                buffer.copy_(value)
        return loss

    def _gradients(self, x: Tensor, targets: Tensor, last: bool, check: bool) -> tuple[Tensor, Tensor, Tensor]:
        """One forward and backward pass: logits, loss, and accumulations, which are in the gradients where they have a price.
        `last`: the processes average their gradients after it."""
        t, runner, cost = self.config.train, self.runner, self.level_cost
        waits = isinstance(runner, DistributedDataParallel) and not last
        with runner.no_sync() if waits else nullcontext():  # type: ignore[operator]
            with evaluation.autocast(t, self.device), summing_levels(self.net, bool(cost)) as emitted:
                logits = runner(x, per_step=True) if t.loss == "tet" else runner(x)
                loss = self.loss(logits, targets)
            if check:
                self.sentinel.look(loss, x, self.position)
            accumulations = torch.zeros_like(loss) if cost is None else cost.accumulations(emitted, len(targets))
            total = loss if cost is None else loss + t.level_cost * cost.of(accumulations, len(targets))
            self.scaler.scale(total / t.accumulate).backward()
        return logits.detach(), loss.detach(), accumulations.detach()

    def _check_all_take_part(self) -> None:
        """After the first backward pass, refuse parameters without a gradient: processes cannot average these."""
        if self.world.size == 1 or self.position.step:
            return
        idle = [name for name, p in self.net.named_parameters() if p.requires_grad and p.grad is None]
        if idle:
            raise ConfigError(
                f"parameter {idle[0]!r} takes no part in what the network computes, and so cannot be trained by several "
                "processes: remove it, or set requires_grad=False on it"
            )

    def _update(self) -> None:
        """Move the parameters along their gradients."""
        if self.config.optim.clip:
            self.scaler.unscale_(self.optimiser)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.config.optim.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        if self.average is not None:
            self.average.update(self.net)

    def captured(self) -> CapturedStep | None:
        """The whole step as a CUDA graph, where `train.cuda_graph` asks for it and the step allows it."""
        t = self.config.train
        fits = self.world.size == 1 and t.accumulate == 1 and t.precision != "fp16" and not t.compile
        if self._captured_sharp != self.sharp:  # another step than before
            self._captured, self._captured_sharp = None, self.sharp
        if self._captured is None and self.device.type == "cuda" and t.cuda_graph and fits:
            self._captured = CapturedStep(self._whole)
        return self._captured

    def _whole(self, x: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        with self.rounded():
            loss = self._backward(x, targets, labels, last=True, check=False)
        self._update()
        return loss

    def _seed_stream(self, part: int) -> None:
        """Dropout and the like draw from a stream that is a function of the position and the process alone."""
        seed = stream_seed(self.config.seed, "stream", self.position.stream, part, self.world.rank)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):  # which need not be the current one
                torch.cuda.manual_seed(seed)

    @functools.cached_property
    def runner(self) -> nn.Module:
        """The network as training calls it: under DistributedDataParallel and compiled, where the settings ask for it."""
        runner: nn.Module = self.net
        if self.world.size > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            runner = DistributedDataParallel(runner, device_ids=ids)
        return torch.compile(runner) if self.config.train.compile else runner  # type: ignore[return-value]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return classification_loss(logits, targets, self.config.train)

    # Evaluation
    # ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the context, the network has the averaged weights, where averaging is on."""
        if self.average is None:
            yield
            return
        trained = {k: v.clone() for k, v in self.net.state_dict().items()}
        self.net.load_state_dict(self.average.state)
        try:
            yield
        finally:
            self.net.load_state_dict(trained)

    def norm_samples(self, *, at_least: bool) -> list[Tensor]:
        """Sample numbers of the batches that give BatchNorms statistics outside of training, the same every time: those of
        this process.

        Batches are whole. at_least: as many as hold `NORM_SAMPLES`, or all there are, else as many as fit into them, or one.
        Averaged weights have always had the one, weights to start from the other: a single rule would change what trainings
        give.
        """
        size = self.config.train.batch_size
        count = -(-NORM_SAMPLES // size) if at_least else max(NORM_SAMPLES // size, 1)
        return list(self.order(0)[:count, :, self.world.rank].flatten(0, 1))

    def _measure_norms(self, average: optim.Average) -> None:
        """Give the averaged network BatchNorm statistics of its own.

        Averages of weights that still move are shorter than the weights. So outputs of layers are smaller than averaged
        statistics say, fewer neurons fire, and a deep network may fall silent.
        """
        numbers = self.norm_samples(at_least=False)
        plain_from = self.config.plain_from
        plain = self.config.augment.plain_epochs > 0 and plain_from <= self.position.epoch
        # Rounding goes by these statistics. So they are measured again on weights that the first ones have rounded.
        for _ in range(2 if self.config.train.weight_bits else 1):
            with self.averaged(), self.rounded():
                batches = self.source.train_batches(numbers, plain_from if plain else 0, self.config.seed)
                statistics = evaluation.measure_norms(self.net, batches, self.config.train, self.device, self.world)
                for name, value in statistics.items():  # the network's own buffers, which change when the context ends
                    average.state[name].copy_(value)

    def evaluate(
        self,
        part: Part,
        active: dict[str, float] | None = None,
        outcomes: dict[str, Any] | None = None,
        *,
        exact: bool = False,
    ) -> float:
        """Accuracy in percent over the whole of `part`: see `lbq.training.evaluation.evaluate`.

        exact: in float32 without TensorFloat-32 (or float64, where trained in it), not in the training's precision.
        """
        self.world.share(self.net.buffers())  # each process may have BatchNorm statistics of its own
        settings = evaluation.exact(self.config.train) if exact else self.config.train
        with self.rounded(), evaluation.without_tf32() if exact else nullcontext():
            return evaluation.evaluate(self.net, self.source, part, settings, self.device, self.world, active, outcomes)
