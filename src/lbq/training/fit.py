"""Whether a configuration fits the data and the processes that it meets."""

from __future__ import annotations

from lbq.batches.sources import Source
from lbq.config import Config
from lbq.errors import ConfigError


def check_fit(config: Config, source: Source, processes: int) -> None:
    t, m = config.train, config.model
    if m.num_classes != source.classes:
        labels = f", whose labels are 0 to {source.classes - 1}" if source.name == "arrays" else ""
        raise ConfigError(f"model.num_classes must be {source.classes} for {source.name}{labels}, got {m.num_classes}")
    if m.in_channels != source.shape[0]:
        last = source.shape[-1] == m.in_channels and source.name == "arrays"
        axes = "(0, 3, 1, 2)" if source.static else "(0, 1, 4, 2, 3)"
        hint = f"; if channels are the last axis of your images, give images.transpose{axes}" if last else ""
        raise ConfigError(f"model.in_channels must be {source.shape[0]} for {source.name}, got {m.in_channels}{hint}")
    if t.batch_size % (t.accumulate * processes):
        raise ConfigError(
            f"train.batch_size must be a multiple of train.accumulate x processes ({t.accumulate} x {processes}), got "
            f"{t.batch_size}"
        )
    if t.batch_size > source.train_size:
        parts = [f"data.{key}={value:g}" for key in ("limit", "holdout") if (value := getattr(config.data, key))]
        left = f" that {' and '.join(parts)} leave{'s' * (len(parts) == 1)}" * bool(parts)
        raise ConfigError(f"train.batch_size must be at most the {source.train_size} samples{left}, got {t.batch_size}")
