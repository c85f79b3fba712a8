"""What the command line shows while it works, on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lbq.cli import heartbeat
from lbq.cli.render import duration, make_console
from lbq.training.watcher import Watcher

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, TaskID

    from lbq.training.plan import Plan
    from lbq.training.position import EpochRecord


# titles of the roles of `lbq.training.optim.parameter_groups`
ROLE_TITLES = {
    "weights": "weights",
    "norms": "BatchNorm and biases",
    "steps": "steps",
    "neurons": "steps, tails and all else of neurons",
}


class _Shown:
    """Within this context, bars on stderr, where that is a terminal. columns: of each bar, from `rich.progress`."""

    def __init__(self, *columns: ProgressColumn, transient: bool = False) -> None:
        from rich.progress import Progress

        self.console = make_console(stderr=True)
        hidden = not self.console.is_terminal
        self.bars = Progress(*columns, console=self.console, transient=transient, disable=hidden)

    def __enter__(self) -> Self:
        self.bars.start()
        if heartbeat.current is not None:
            heartbeat.current.doing = self.doing
        return self

    def doing(self) -> str:
        """What is under way, as a line says it where there are no bars."""
        tasks = [task for task in self.bars.tasks if not task.finished]
        if not tasks:
            return ""
        of = "" if tasks[-1].total is None else f" of {tasks[-1].total:,.0f}"
        return f"{tasks[-1].description}: {tasks[-1].completed:,.0f}{of}"

    def __exit__(self, *_: object) -> None:
        self.bars.stop()
        if heartbeat.current is not None:
            heartbeat.current.doing = str


class DemoProgress(_Shown, Watcher):
    """A bar for each method on a terminal, a plain line now and then elsewhere."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

        title, note = TextColumn("{task.description:<18}"), TextColumn("{task.fields[note]}")
        super().__init__(title, BarColumn(), MofNCompleteColumn(), note, TimeElapsedColumn())

    def begin(self, method: str, title: str, epochs: int) -> None:
        self.method, self.task = method, self.bars.add_task(title, total=epochs, note="")

    def epoch(self, record: EpochRecord) -> None:
        note = f"loss {record.loss:.3f}  train {record.train_accuracy:5.1f} %"
        self.bars.update(self.task, advance=1, note=note)
        if not self.console.is_terminal and (record.epoch % 5 == 0 or record.epoch == 1):
            self.console.print(f"{self.method:<12} epoch {record.epoch:>3}  {note}  {record.seconds:.1f} s")

    def done(self, accuracy: float, seconds: float) -> None:
        self.bars.update(self.task, note=f"test {accuracy:5.2f} %")
        if not self.console.is_terminal:
            self.console.print(f"{self.method:<12} test {accuracy:.2f} %  {seconds:.1f} s")

    def stage(self, text: str) -> None:
        self.console.print(text)


class TrainProgress(_Shown, Watcher):
    """The plan, then a bar for each epoch on a terminal or a plain line elsewhere, with the time left."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

        title, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
        super().__init__(title, BarColumn(), MofNCompleteColumn(), note, transient=True)
        self.task: TaskID | None = None
        self.epochs = self.samples = 0

    def plan(self, plan: Plan) -> None:
        self.epochs, self.samples = plan.epochs, plan.steps_per_epoch * plan.batch_size
        macs = "" if plan.macs is None else f", {plan.macs / 1e6:.1f} M MACs, {plan.neurons:,} neurons"
        memory = "" if plan.memory_gib is None else f", about {plan.memory_gib:.2f} GiB of activations (estimated)"
        source = ", ".join(f"{k} {v[:12] if k == 'sha256' else v}" for k, v in plan.data.items())
        self.console.print(f"network  {plan.model}, T = {plan.timesteps}, {plan.parameters:,} parameters{macs}")
        self.console.print(f"data     {source}; {plan.train_samples:,} training samples")
        self.console.print(
            f"training {plan.epochs} epoch{'s' * (plan.epochs > 1)} x {plan.steps_per_epoch} steps of {plan.batch_size} on "
            f"{plan.processes} x {plan.device}, {plan.kernel} kernel{memory}"
        )
        self.console.print(f"decay    {_decay_line(plan.weight_decay)}")
        if plan.weight_bits:
            self.console.print(
                f"weights  rounded to {plan.weight_bits} bits as in the deployed network, the first layer's to 8, the "
                "readout's not"
            )
        if plan.sam:
            last = f"the last {plan.sam_epochs} of " if plan.sam_epochs < plan.epochs else ""
            where = f"{last}{plan.epochs} epoch{'s' * (plan.epochs > 1)}"
            self.console.print(f"sam      radius {plan.sam:g}, in {where}: these steps take twice the time")
        if plan.level_cost:
            free = f", above {plan.level_cost_above:,.0f} of a sample" if plan.level_cost_above else ""
            of = plan.level_cost_of.replace("_", "-")
            self.console.print(f"price    {plan.level_cost:g} on {of} accumulations{free}")
        if plan.emulated:
            self.console.print(
                f"slow     this CPU has no instructions for {plan.emulated}: its convolutions are several times slower than "
                "in fp32, on some CPUs a hundred times: train.precision=fp32"
            )
        for remark in plan.remarks:
            self.console.print(f"note     {remark}")

    def resumed(self, epoch: int, batch: int, notes: tuple[str, ...]) -> None:
        for note in notes:
            self.console.print(note)
        after = f" after step {batch}" if batch else ""
        self.console.print(f"continuing at epoch {epoch + 1}{after}")

    def restarted(self, log: Path) -> None:
        self.console.print(f"no checkpoint found: training starts again at epoch 1; the log so far is kept as {log}")

    def initialised(self, source: str, copied: int, left: tuple[str, ...]) -> None:
        some = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        self.console.print(f"start    from {source}: {copied} tensors" + (f"; anew: {some}" if left else ""))

    def step(self, epoch: int, batch: int, batches: int, samples_per_second: float) -> None:
        if self.task is None:
            self.task = self.bars.add_task("", total=batches, note="")
        left = ""
        if samples_per_second:
            samples = (self.epochs - epoch) * self.samples - batch * self.samples / batches
            left = f"{samples_per_second:,.0f} samples/s, {duration(samples / samples_per_second)} left"
        self.bars.update(self.task, description=f"epoch {epoch + 1}/{self.epochs}", completed=batch, note=left)
        if left and not self.console.is_terminal and epoch == 0 and batch == min(20, batches):
            self.console.print(f"step {batch}: {left}")

    def epoch(self, record: EpochRecord) -> None:
        test = "" if record.test_accuracy is None else f"  test {record.test_accuracy:.2f} %"
        test += "" if record.unaveraged_accuracy is None else f" (unaveraged {record.unaveraged_accuracy:.2f})"
        test += "" if record.holdout_accuracy is None else f"  held out {record.holdout_accuracy:.2f} %"
        low, high = (min(record.steps.values()), max(record.steps.values())) if record.steps else (0.0, 0.0)
        steps = f"  steps {low:.3f}..{high:.3f}" if record.steps else ""
        count = "" if record.accumulations is None else f"  {record.accumulations / 1e6:,.2f} M accumulations"
        train = f"loss {record.loss:.4f}  train {record.train_accuracy:.2f} %"
        rate = f"{record.samples_per_second:,.0f} samples/s"
        self.console.print(f"epoch {record.epoch}/{self.epochs}  {train}{test}{steps}{count}  {rate}")


def _decay_line(decays: Mapping[str, float]) -> str:
    """What decays: `weight decay 0.0005: weights, BatchNorm and biases, steps (0.001)`."""
    common = decays.get("weights", 0.0)
    acts_on = [
        ROLE_TITLES.get(role, role) + ("" if decay == common else f" ({decay:g})")
        for role, decay in decays.items()
        if decay
    ]
    return f"weight decay {common:g}: {', '.join(acts_on)}" if acts_on else "no weight decay"


class CountProgress(_Shown):
    """A bar of the samples counted, or of the bytes received."""

    def __init__(self, name: str, total: int | None, of_bytes: bool = False) -> None:
        from rich import progress

        title = progress.TextColumn("{task.description}", markup=False)  # a path may hold braces and brackets
        received = progress.DownloadColumn(), progress.TransferSpeedColumn()
        counted = progress.MofNCompleteColumn(), progress.TimeRemainingColumn()
        super().__init__(title, progress.BarColumn(), *(received if of_bytes else counted), transient=not of_bytes)
        self.task = self.bars.add_task(name, total=total)

    def advance(self, samples: int) -> None:
        self.bars.advance(self.task, samples)

    def received(self, done: int, total: int | None) -> None:
        self.bars.update(self.task, completed=done, total=total)
