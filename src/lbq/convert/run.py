"""Convert the run folder of a trained ANN to one of a burst network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lbq.batches.sources import open_source
from lbq.config import CHANGEABLE, Config
from lbq.convert.calibration import calibrate, stepped_neurons
from lbq.errors import ConfigError, RunError
from lbq.models import BurstNet
from lbq.runs import run_folder
from lbq.runs.build import build
from lbq.system import files, toml
from lbq.training.distributed import World
from lbq.training.evaluation import evaluate, exact, without_tf32

CALIBRATION_IMAGES = 256
TIMESTEPS = "model.timesteps"


def convert_run(
    run: Path | str,
    out: Path | str,
    *,
    changes: Iterable[str] = (),
    device: torch.device | str = "cpu",
    images: int = CALIBRATION_IMAGES,
    stage: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write a run folder with the burst network of an ANN. Returns how good both are.

    changes: `neuron.name=...` and that neuron's options (default lbq), `model.timesteps=...` (default 2), where data lies.
    images: the number of training images that choose the steps, not augmented, drawn by the run's seed.
    stage: called with what comes next, because all of it takes a minute.
    """
    folder = run_folder.check_folder(run, "config.toml", "weights.safetensors")
    old = run_folder.load_config(folder)
    if old.neuron.get("name") != "relu":
        raise RunError(f"{folder} is no ANN, its neurons are {old.neuron.get('name')}: give a run of neuron.name=relu")
    new = _changed(old, changes)
    net = build(new)
    stepped_neurons(net)
    device = torch.device(device)
    source = open_source(new, device)
    if not source.static:
        raise RunError(f"{folder} reads event frames, which have their time: only ANNs of images can be converted")
    if not 2 <= images <= source.train_size:
        raise RunError(f"images must be from 2 to the {source.train_size} that there are to train with, got {images}")
    with files.new_folder(out, RunError) as new_folder:
        stage(f"choosing steps from {images} training images")
        ann, net = _ann(folder, old).to(device), net.to(device)
        if new.train.precision == "fp64":
            net.double()
        net.load_state_dict({**net.state_dict(), **ann.state_dict()})
        drawn = torch.randperm(source.train_size, generator=torch.Generator().manual_seed(new.seed))[:images]
        x = source.train_samples(drawn)[0].to(next(net.parameters()).dtype)
        fits = calibrate(net, ann, x)
        stage("testing both")
        with without_tf32():
            accuracies = [evaluate(n, source, "test", exact(new.train), device, World()) for n in (ann, net)]
        facts = {
            "from": str(folder),
            "from_sha256": run_folder.weights_checksum(folder),
            "images": images,
            "ann_accuracy": accuracies[0],
            "accuracy": accuracies[1],
            "test_images": source.test_size,
            "inputs": asdict(run_folder.read_inputs(folder) or source.inputs),  # as the ANN read them in training
            "layers": {name: asdict(fit) for name, fit in fits.items()},
        }
        run_folder.write_text(new_folder / "config.toml", new.to_toml())
        run_folder.write_weights(new_folder, net.state_dict())
        run_folder.write_text(new_folder / run_folder.CONVERSION, json.dumps(facts, indent=2) + "\n")
    return {**facts, "run": str(out)}


def _ann(folder: Path, config: Config) -> BurstNet:
    """The ANN with one timestep. It has no memory, so it does the same at every timestep."""
    trained = run_folder.load(folder)
    ann = build(replace(config, model=replace(config.model, timesteps=1))).to(next(trained.parameters()).dtype)
    ann.load_state_dict(trained.state_dict())
    return ann.eval()


def _changed(config: Config, changes: Iterable[str]) -> Config:
    """The ANN's configuration with other neurons and timesteps."""
    changes = tuple(changes)
    try:
        overrides = toml.overrides(changes)
        for key in (change.partition("=")[0].strip() for change in changes):
            if not key.startswith("neuron.") and key not in (TIMESTEPS, *CHANGEABLE):
                known = ", ".join((TIMESTEPS, *CHANGEABLE))
                raise ConfigError(f"{key} cannot be changed, the ANN is trained already: give only neuron.*, {known}")
            if key == "neuron.step":
                raise ConfigError("neuron.step is what a conversion chooses, from data: leave it out")
        tree = config.to_dict()
        tree["name"] = ""  # it is no longer the ANN that its configuration names
        tree["neuron"] = {"name": "lbq"}
        tree["model"]["timesteps"] = 2
        return Config.from_dict(toml.merge(tree, overrides))
    except ConfigError as error:
        raise RunError(f"command line: {error}") from error
