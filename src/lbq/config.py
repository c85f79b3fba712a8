"""One typed configuration tree, strict: an unknown key is an error that names the nearest known one. No torch.

Configurations are TOML (`lbq.system.toml`). What a run used is saved beside its weights, resolved, so that it can be repeated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lbq.errors import ConfigError, nearest
from lbq.system import files, toml

DATASETS = (
    "digits", "cifar10", "cifar100", "mnist", "fashion_mnist", "imagenet", "folder", "cifar10_dvs", "dvs_gesture", "nmnist",
    "dvs_objects", "arrays",
)  # fmt: skip


def _checked(default: Any, expected: str, ok: Callable[[Any], bool]) -> Any:
    """A field with a default and a condition on its value; `expected` completes "must be ..."."""
    return field(default=default, metadata={"expected": expected, "ok": ok})


MOST_TIMESTEPS = 4096  # that a deployed network may have
DEPLOYED_BITS = 8  # of weights, where training did not round them


def _at_least(default: Any, low: float, most: float = math.inf) -> Any:
    limit = "" if most == math.inf else f" and at most {most}"
    return _checked(default, f">= {low:g}{limit}", lambda v: low <= v <= most)


def _positive(default: float) -> Any:
    return _checked(default, "> 0 and at most 3.4e38", lambda v: 0 < v <= 3.4e38)  # what float32 holds


def _share(default: float) -> Any:
    return _checked(default, "in [0, 1)", lambda v: 0 <= v < 1)


def _one_of(default: str, *known: str) -> Any:
    return _checked(default, f"one of {', '.join(map(repr, known))}", lambda v: v in known)


class Section:
    """A table of settings, whose values are checked however it is made."""

    def __post_init__(self) -> None:
        _check(self, type(self).__name__.removesuffix("Config").lower() + ".")


@dataclass(frozen=True)
class ModelConfig(Section):
    """The network, and over how many timesteps it runs."""

    id: str = "resnet8w16"
    num_classes: int = _at_least(10, 2, 2**20)
    in_channels: int = _at_least(1, 1, 2**16)
    timesteps: int = _at_least(2, 1, MOST_TIMESTEPS)
    stem_stride: int = _at_least(1, 1)
    dropout: float = _share(0.0)  # before the classifier
    share_tail: bool = False


@dataclass(frozen=True)
class DataConfig(Section):
    """What it is trained and tested on."""

    name: str = _one_of("digits", *DATASETS)
    root: str = ""  # where the dataset lies; not needed for digits
    size: int = _at_least(0, 0)  # resolution of images and event frames; 0: as they are
    frames: str = _one_of("count", "count", "time")  # event frames of equal count or of equal time
    window_ms: int = _at_least(1000, 1)  # length of the windows that continuous recordings are cut into
    limit: int = _at_least(0, 0)  # use so many samples of the training part and of the test part; 0: all
    title: str = _checked("", "one line of text", str.isprintable)  # of your own data, in tables
    holdout: float = _share(0.0)  # share of the training set kept apart, to select on
    workers: int = _at_least(4, 0)  # processes that decode image files


@dataclass(frozen=True)
class AugmentConfig(Section):
    """How training samples are changed, anew in every epoch."""

    shift: int = _at_least(0, 0)  # random shift in pixels, borders repeated
    crop: int = _at_least(0, 0)  # random crop after zero padding by this many pixels
    min_area: float = _checked(0.08, "in (0, 1]", lambda v: 0 < v <= 1)  # smallest random crop of an image file
    flip: bool = False  # images, and event frames of `arrays`
    policy: str = _one_of("", "", "cifar10", "imagenet")  # AutoAugment
    cutout: int = _at_least(0, 0)  # side of the erased square, in pixels
    events: bool = False  # flip, then one of shear, translate, rotate, cutout, over event frames
    mixup: float = _at_least(0.0, 0)  # Beta(a, a); 0: off
    cutmix: float = _at_least(0.0, 0)
    mix_prob: float = _checked(1.0, "in [0, 1]", lambda v: 0 <= v <= 1)
    label_smoothing: float = _share(0.0)
    plain_epochs: int = _at_least(0, 0)  # the last ones, without policy, cutout, events, mixup and cutmix


@dataclass(frozen=True)
class OptimConfig(Section):
    """Weight decay acts on synaptic weights, with `norm_decay` on BatchNorm and biases too. `neuron_decay` says what of the
    neurons decays: nothing, what their steps are computed from, or all that they learn (tails, leaks, resets too)."""

    name: str = _one_of("sgd", "sgd", "adamw")
    lr: float = _positive(0.1)
    neuron_lr: float = _positive(1.0)  # factor on the learning rate of steps, tails, leaks and resets
    momentum: float = _share(0.9)
    weight_decay: float = _at_least(5e-4, 0)
    norm_decay: bool = False
    neuron_decay: str = _one_of("none", "none", "step", "all")
    neuron_decay_factor: float = _at_least(1.0, 0)  # on weight_decay, for what neuron_decay names
    clip: float = _at_least(0.0, 0)  # largest gradient norm; 0: off
    sam: float = _at_least(0.0, 0)  # radius of sharpness-aware minimisation; 0: off
    sam_epochs: int = _at_least(0, 0)  # how many of the last epochs have it; 0: all


@dataclass(frozen=True)
class TrainConfig(Section):
    """How long, in what precision and for what loss it is trained, and when it is tested and saved."""

    epochs: int = _at_least(20, 1)
    batch_size: int = _checked(64, ">= 2 (BatchNorm needs two samples)", lambda v: v >= 2)  # over all processes
    accumulate: int = _at_least(1, 1)  # parts that a batch is processed in
    warmup_epochs: int = _at_least(0, 0)
    warmup_lr: float = _at_least(0.0, 0)  # learning rate that the warm-up starts from
    precision: str = _one_of("fp32", "fp32", "bf16", "fp16", "fp64")
    channels_last: bool = False
    compile: bool = False
    cuda_graph: bool = True  # launch a training step as one CUDA graph, where it can be; changes no result
    deterministic: bool = False
    sync_batchnorm: bool = False
    loss: str = _one_of("ce", "ce", "tet")
    tet_weight: float = _share(0.05)
    level_cost: float = _at_least(0.0, 0)  # price on accumulations, times these as a share of MACs; 0: off
    level_cost_of: str = _one_of("bit_sparse", "bit_sparse", "unary")  # which accumulations it counts
    level_cost_above: float = _at_least(0.0, 0)  # so many accumulations of a sample are free
    weight_bits: int = _checked(0, "0 (not rounded) or 2 to 8", lambda v: v == 0 or 2 <= v <= 8)
    ema: float = _share(0.0)  # decay of averaged weights; 0: off
    init_from: str = ""  # a run, a model.lbq or its name, or a weights.safetensors to start from
    new_head: bool = False  # leave the classifier of `init_from` out
    eval_every: int = _at_least(1, 1)  # epochs; the last one is always evaluated
    test: str = _one_of("last", "last", "never", "every")  # which evaluated epochs are tested on the test set
    checkpoint_steps: int = _at_least(0, 0)  # save every so many steps too; 0: by time and at ends of epochs
    checkpoint_minutes: float = _positive(5.0)
    tensorboard: bool = False


BOOKKEEPING = {  # settings that change no result
    "data": ("root", "workers", "title"),
    "train": ("cuda_graph", "test", "checkpoint_steps", "checkpoint_minutes", "tensorboard"),
}
# Neurons whose initial step is `INITIAL_STEP` whatever their n_max is. It was 2 / n_max before, which is the same at 5: a
# configuration of that time that lbq wrote and that states no step has `FORMER_STEP`.
ONE_STEP_NEURONS = ("lbq", "burst_fixed", "v1", "v2", "v3", "qann")
INITIAL_STEP = 0.4
FORMER_STEP = "2 / n_max"

# settings that came later, and their defaults
LATER: dict[str, dict[str, Any]] = {
    "augment": {"plain_epochs": 0, "min_area": 0.08},
    "data": {"limit": 0},
    "neuron": {"step": FORMER_STEP},
    "optim": {"norm_decay": False, "neuron_decay": "none", "neuron_decay_factor": 1, "sam": 0, "sam_epochs": 0},
    "train": {
        "level_cost": 0,
        "level_cost_of": "bit_sparse",
        "level_cost_above": 0,
        "new_head": False,
        "weight_bits": 0,
    },
}

# Settings that may change for a run that is trained already.
CHANGEABLE = ("data.root", "data.workers", "train.batch_size")


@dataclass(frozen=True)
class Config:
    """All settings of one training; docs/reference/configuration.md lists every field.

    `neuron` holds the name of a neuron and that neuron's own options; they are checked when the network is built. It states
    the initial step of a burst neuron with another n_max than 5, also where the caller does not.
    """

    seed: int = _checked(0, "a non-negative integer below 2^63", lambda v: 0 <= v < 2**63)
    name: str = _checked("", "one line of text", str.isprintable)  # in tables; empty: the title of its variant
    model: ModelConfig = field(default_factory=ModelConfig)
    neuron: dict[str, Any] = field(default_factory=lambda: {"name": "lbq", "n_max": 5})
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        _check(self, "")
        if _lacks_step(self.neuron):
            object.__setattr__(self, "neuron", {**self.neuron, "step": INITIAL_STEP})
        t, o = self.train, self.optim
        if t.warmup_epochs >= t.epochs:
            raise ConfigError(
                f"train.warmup_epochs must be less than train.epochs ({t.epochs}), got {t.warmup_epochs}: for so few epochs "
                f"add train.warmup_epochs=0"
            )
        limited = {"augment.plain_epochs": self.augment.plain_epochs, "optim.sam_epochs": o.sam_epochs}
        for key, epochs in limited.items():
            if epochs > t.epochs:
                raise ConfigError(f"{key} must be at most train.epochs ({t.epochs}), got {epochs}")
        if o.sam and t.accumulate > 1:
            raise ConfigError(f"optim.sam takes its batches whole: set train.accumulate=1 (now {t.accumulate})")
        if t.warmup_lr > o.lr:
            raise ConfigError(f"train.warmup_lr must be at most optim.lr ({o.lr:g}), got {t.warmup_lr:g}")
        if t.batch_size % t.accumulate:
            raise ConfigError(f"train.accumulate must divide train.batch_size ({t.batch_size}), got {t.accumulate}")

    @property
    def neuron_options(self) -> dict[str, Any]:
        """`neuron` with its step as a number."""
        former = self.neuron.get("step") == FORMER_STEP and self.neuron.get("name") in ONE_STEP_NEURONS
        return {**self.neuron, "step": 2 / self.neuron["n_max"]} if former else dict(self.neuron)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Config:
        config: Config = _build(cls, tree, "")
        return config

    @classmethod
    def load(cls, path: Path | str, changes: Iterable[str] = ()) -> Config:
        """The configuration of a TOML file, or of a record, with `key=value` changes laid over it."""
        path = files.path_of(path, "path", "give a TOML file, or a record")
        if isinstance(changes, str | Mapping):
            raise ValueError('changes must be a list of "key=value", such as ["train.epochs=3"]')
        tree = _with_former_step(_recorded(path) if path.suffix == ".json" else toml.read(path))
        over = toml.overrides(changes)
        neuron = over.get("neuron")
        if isinstance(neuron, Mapping) and "name" in neuron:  # the file's name is of another neuron
            tree = {**tree, "name": ""}
        try:
            return cls.from_dict(toml.merge(tree, over))
        except ConfigError as error:
            where = path if _problem(tree) == str(error) else "command line"
            raise ConfigError(f"{where}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        return toml.write(self.to_dict())

    @property
    def plain_from(self) -> int:
        """The first epoch, counted from 0, that only crops and flips samples; `train.epochs` where there is none."""
        return self.train.epochs - self.augment.plain_epochs

    @property
    def sharp_from(self) -> int:
        """The first epoch, counted from 0, with sharpness-aware minimisation; `train.epochs` where there is none."""
        o, epochs = self.optim, self.train.epochs
        return epochs - (o.sam_epochs or epochs) if o.sam else epochs

    @property
    def hash(self) -> str:
        """SHA-256 of all settings that change a result, independent of formatting and key order.

        The name, the data's folder, and how a run is launched, watched and saved are no part of it. A setting that came later
        is none either while it has its default, so that records keep their hash.
        """
        return _digest(_settings(self.to_dict()))

    @property
    def recipe_hash(self) -> str:
        """The same without the seed: equal for runs that are samples of one thing."""
        return recipe_hash(self.to_dict())


def recipe_hash(tree: Mapping[str, Any]) -> str:
    """`Config.recipe_hash` of a configuration in a record, which an older or a newer version may have written."""
    return _digest(recipe(tree))


def recipe(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of such a configuration that make a result, without the seed."""
    settings = _settings(tree)
    settings.pop("seed", None)
    settings["train"] = {k: v for k, v in settings.get("train", {}).items() if k != "eval_every"}  # changes no result
    return settings


def _settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that its hash is of."""
    settings = {part: values for part, values in tree.items() if part != "name"}
    for part, values in settings.items():
        if isinstance(values, Mapping):
            ignored, later = BOOKKEEPING.get(part, ()), LATER.get(part, {})
            settings[part] = {
                k: v for k, v in values.items() if k not in ignored and not (k in later and v == later[k])
            }
    return settings


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def differences(one: Config, other: Config) -> list[str]:
    """The settings that change a result and in which two configurations differ, each as `key: one's, the other's`."""

    def settings(config: Config) -> dict[str, str]:
        return {
            f"{part}.{key}" if key else part: json.dumps(value)  # as in the hash, in which 1 is not 1.0
            for part, values in config.to_dict().items()
            for key, value in (values.items() if isinstance(values, dict) else [("", values)])
            if part != "name" and key not in BOOKKEEPING.get(part, ())
        }

    ours, theirs = settings(one), settings(other)
    changed = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return [f"{key}: {ours.get(key, 'null')}, {theirs.get(key, 'null')}" for key in changed]


def _lacks_step(neuron: Any) -> bool:
    """Whether these are options of a burst neuron without a step, for which n_max once decided."""
    if not isinstance(neuron, Mapping) or neuron.get("name") not in ONE_STEP_NEURONS or "step" in neuron:
        return False
    return type(n_max := neuron.get("n_max")) is int and n_max >= 1 and 2 / n_max != INITIAL_STEP


def _with_former_step(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration as lbq writes it, with all settings, that states no step: it is of the time of `FORMER_STEP`."""
    sections = {f.name for f in dataclasses.fields(Config)} - {"name"}
    written = sections <= tree.keys() and isinstance(tree["train"], Mapping) and "checkpoint_steps" in tree["train"]
    neuron: Any = tree.get("neuron")
    return {**tree, "neuron": {**neuron, "step": FORMER_STEP}} if written and _lacks_step(neuron) else tree


def _recorded(path: Path) -> dict[str, Any]:
    """The configuration in a record, with the record's name where it has none."""
    record = files.json_of(path, ConfigError, "give a record that `lbq record` wrote")
    config = record.get("config")
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no configuration: give a TOML file, or a record that `lbq record` wrote")
    return {"name": record.get("name", ""), **config}


def _problem(tree: Mapping[str, Any]) -> str:
    """What is wrong with a configuration; empty where nothing is."""
    try:
        Config.from_dict(tree)
    except ConfigError as error:
        return str(error)
    return ""


TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def _build(kind: Any, tree: Any, path: str) -> Any:
    """A dataclass from a mapping of known keys; the dataclass checks the values."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path or 'the configuration'} must be a table, got {tree!r:.80}")
    hints, values = typing.get_type_hints(kind), {}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in hints:
            raise ConfigError(f"unknown key {where!r:.200}{_suggestion(str(key), hints)}")
        values[key] = _build(hints[key], value, where) if dataclasses.is_dataclass(hints[key]) else value
    return kind(**values)


def _check(section: Any, prefix: str) -> None:
    """Check types and conditions of a dataclass's fields. Whole numbers may stand for others."""
    hints = typing.get_type_hints(type(section))
    for f in dataclasses.fields(section):
        given, where = getattr(section, f.name), prefix + f.name
        value = _convert(hints[f.name], given, where)
        object.__setattr__(section, f.name, value)
        if f.metadata and not f.metadata["ok"](value):
            raise ConfigError(f"{where} must be {f.metadata['expected']}, got {given!r:.80}")


def _suggestion(key: str, known: Iterable[str]) -> str:
    """The right section of a key that exists elsewhere, otherwise the nearest of the `known` keys."""
    if key in ("device", "out", "resume"):
        return f"; it is an option of the command: --{key}"
    sections = {name: part for name, part in Config().to_dict().items() if isinstance(part, dict)}
    homes = [f"{name}.{key}" for name, part in sections.items() if key in part]
    return f"; did you mean {' or '.join(map(repr, homes))}?" if homes else nearest(key, known)


def _in_toml(kind: Any, value: Any) -> str:
    """How TOML writes a value that Python knows too, such as .5 and True."""
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return f": write {value.lower()}"
    if kind in (int, float) and isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
            if math.isfinite(number) and (kind is float or (number.is_integer() and abs(number) < 2**53)):
                return f": write {kind(number)}"
    return ""


def _convert(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, types.GenericAlias):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a table, got {value!r:.80}")
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        expected = TYPE_NAMES.get(kind) or f"a {kind.__name__}"
        raise ConfigError(f"{where} must be {expected}, got {value!r:.80}{_in_toml(kind, value)}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{where} must be finite, got {value!r}")
    return value
