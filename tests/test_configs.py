"""The shipped configurations: they load, build, name their cell of the paper and agree with its Table 1. Mistakes of many
kinds are refused, each in one line that names the field."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from lbq.config import Config, differences
from lbq.neuron.registry import BUILT_IN, NEURONS, options_of
from lbq.results.result import title_of
from lbq.runs.build import build
from lbq.runs.records import describe
from tests.support.commands import Call
from tests.support.paths import ROOT

FOLDER = ROOT / "configs"
SHIPPED = sorted(p.relative_to(FOLDER).with_suffix("").as_posix() for p in FOLDER.rglob("*.toml"))
CELLS = [name for name in SHIPPED if name.split("/")[0] not in ("base", "quick", "digits")]

# Table 1 of the paper; what it writes as None or -- is 0, False or "" here.
ROWS = (
    "neuron.n_max", "train.epochs", "data.size", "train.batch_size", "optim.name", "optim.lr", "train.warmup_epochs",
    "optim.weight_decay", "augment.policy", "augment.cutout", "augment.mixup", "augment.cutmix",
    "augment.label_smoothing",
)  # fmt: skip
TABLE_1: dict[str, tuple[Any, ...]] = {
    "imagenet": (5, 320, 224, 64, "sgd", 0.1, 0, 0.0, "imagenet", 0, 0.8, 1.0, 0.1),
    "cifar10": (5, 300, 32, 64, "sgd", 0.025, 0, 5e-4, "cifar10", 16, 0.0, 0.0, 0.0),
    "cifar100": (5, 300, 32, 64, "sgd", 0.025, 0, 5e-4, "cifar10", 12, 0.0, 0.0, 0.0),
    "cifar10_dvs": (5, 300, 128, 64, "adamw", 1e-3, 10, 0.06, "", 0, 0.5, 0.0, 0.1),
    "dvs_gesture": (5, 300, 128, 64, "adamw", 1e-3, 10, 0.06, "", 0, 0.5, 0.0, 0.1),
}
TIMESTEPS = {"imagenet": {1, 2}, "cifar10": {1, 2, 4}, "cifar100": {1, 2, 4}, "cifar10_dvs": {10}, "dvs_gesture": {16}}
CLASSES = {
    "digits": 10, "cifar10": 10, "cifar100": 100, "imagenet": 1000, "cifar10_dvs": 10, "dvs_gesture": 11, "nmnist": 10,
    "dvs_objects": 5, "arrays": 10, "folder": 10,
}  # fmt: skip

# The accuracies of Tables 2 to 5 and 7, by the file that trains them.
PUBLISHED = {
    "cifar10/lbq_t1": "97.28", "cifar10/lbq_t2": "97.45", "cifar10/lbq_t4": "97.49",
    "cifar10/lmht_t1": "95.93", "cifar10/lmht_t2": "96.40", "cifar10/lmht_t4": "96.13",
    "cifar100/lbq_t1": "82.38", "cifar100/lbq_t2": "82.82", "cifar100/lbq_t4": "82.71",
    "cifar100/lmht_t1": "78.74", "cifar100/lmht_t2": "79.96", "cifar100/lmht_t4": "80.67",
    "imagenet/resnet18_t1": "67.50", "imagenet/resnet18_t2": "68.23",
    "imagenet/resnet34_t1": "72.45", "imagenet/resnet34_t2": "73.67",
    "cifar10_dvs/lbq_t10": "80.50", "cifar10_dvs/lmht_t10": "78.20", "dvs_gesture/lbq_t16": "98.28",
    "ablation/ann": "97.52", "ablation/binary": "91.81",
    "ablation/ternary_fixed_box": "94.11", "ablation/ternary_fixed_box_et": "94.11",
    "ablation/ternary_learned_box": "95.55", "ablation/ternary_learned_box_et": "95.55",
    "ablation/ternary_fixed_half": "94.11", "ablation/ternary_learned_half": "95.55",
    "ablation/v1_box": "96.44", "ablation/v1_box_et": "96.44", "ablation/v2": "96.74",
    "ablation/v3_box": "97.30", "ablation/v3_box_et": "97.30",
    "nmax/lbq_n2": "96.73", "nmax/lbq_n10": "97.44", "nmax/lbq_n20": "97.35",
}  # fmt: skip
OURS = {"fairness/qann_n5", "fairness/binary_t10"}  # beside the paper's tables
RELEASED = {"beta": 0.25, "reset": "hard", "surrogate": "clip"}  # the rule of the released Ternary Spike code
ABLATION = {  # neuron, options of its own beside beta = 0.5
    "ann": ("relu", {}),
    "binary": ("lif", {"threshold": 1.0, "surrogate": "arctan"}),
    "ternary_fixed_box": ("ternary", {"step": 1.0, "surrogate": "box"}),
    "ternary_fixed_box_et": ("ternary", {"step": 1.0, "surrogate": "box_et"}),
    "ternary_learned_box": ("ternary_learned", {"step": 1.0, "surrogate": "box"}),
    "ternary_learned_box_et": ("ternary_learned", {"step": 1.0, "surrogate": "box_et"}),
    "ternary_fixed_half": ("ternary_half", {"step": 1.0, **RELEASED}),
    "ternary_learned_half": ("ternary_half", {"step": 1.0, "learn_step": True, **RELEASED}),
    "v1_box": ("v1", {"n_max": 5, "step": 0.4, "surrogate": "box"}),
    "v1_box_et": ("v1", {"n_max": 5, "step": 0.4, "surrogate": "box_et"}),
    "v2": ("v2", {"n_max": 5, "step": 0.4, "surrogate": "relsg_et"}),
    "v3_box": ("v3", {"n_max": 5, "step": 0.4, "surrogate": "box"}),
    "v3_box_et": ("v3", {"n_max": 5, "step": 0.4, "surrogate": "box_et"}),
}


def load(name: str) -> Config:
    return Config.load(FOLDER / f"{name}.toml")


def lookup(config: Config, field: str) -> Any:
    value: Any = config.to_dict()
    for key in field.split("."):
        value = value[key]
    return value


@functools.cache  # several configurations have one network
def output(model: str, events: bool) -> torch.Size:
    """The shape of what a network, as JSON, makes of two samples. Any neuron keeps shapes: here the one that is fast."""
    config = Config.from_dict({"model": json.loads(model), "neuron": {"name": "relu"}})
    m = config.model
    with torch.device("meta"):
        x = torch.empty(m.timesteps, 2, 2, 32, 32) if events else torch.empty(2, m.in_channels, 32, 32)
        net = build(config).eval()
    shape: torch.Size = net(x).shape
    return shape


# What is shipped
# -----------------------------------------------------------------------------------------------------------------


@pytest.mark.no_cover  # PyTorch's meta device is Python, which coverage makes twice as slow
@pytest.mark.parametrize("name", SHIPPED)
def test_every_configuration_builds_its_network(name: str) -> None:
    config = load(name)
    m, d = config.model, config.data
    events = d.name in ("cifar10_dvs", "dvs_gesture", "nmnist", "dvs_objects") or name.endswith("_events")
    with torch.device("meta"):
        net = build(config)
    assert all(p.is_meta for p in net.parameters())
    few = {**dataclasses.asdict(m), "timesteps": min(m.timesteps, 2)}  # a third timestep is as the second
    assert output(json.dumps(few), events) == (2, CLASSES[d.name])
    linear = [module for module in net.modules() if isinstance(module, torch.nn.Linear)]
    assert linear[-1].out_features == m.num_classes == CLASSES[d.name]
    assert m.in_channels == {True: 2, False: 1 if d.name == "digits" else 3}[events]


def test_every_cell_of_the_tables_has_a_file_and_no_other() -> None:
    assert set(CELLS) == set(PUBLISHED) | OURS


@pytest.mark.parametrize("name", CELLS)
def test_a_file_says_which_cell_it_is(name: str) -> None:
    first, second = (FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines()[:2]
    config = load(name)
    if name in OURS:
        assert re.match(r"# Beside Table \d \(.+\), not in the paper: ", first)
    else:
        table = {
            "cifar10": 2,
            "cifar100": 2,
            "imagenet": 3,
            "cifar10_dvs": 4,
            "dvs_gesture": 4,
            "ablation": 5,
            "nmax": 7,
        }
        assert first.startswith(f"# Table {table[name.split('/')[0]]} (")
        assert f": the paper has {PUBLISHED[name]} %" in first
    assert f"T = {config.model.timesteps}" in first
    assert second.startswith(("# ", "base = "))  # one or two lines


def test_recipes_of_final_runs_are_those_that_were_fixed() -> None:
    """results/protocol.toml holds the hash of each as it was before its first run; a cell has two at most."""
    recipes = tomllib.loads((ROOT / "results" / "protocol.toml").read_text(encoding="utf-8"))["recipe"]
    for recipe in recipes:
        config = Config.load(ROOT / recipe["config"])
        assert config.recipe_hash == recipe["recipe_hash"]
        assert (config.data.holdout, config.train.test) == (0.0, "last")
        if "withdrawn" in recipe:
            assert "run" not in recipe
            continue
        assert {run["state"] for run in recipe["run"]} <= {
            "planned",
            "running",
            "finished",
            "dropped",
            "crashed",
            "lost",
        }
        whole = [run["seed"] for run in recipe["run"] if run["state"] not in ("crashed", "lost")]
        assert whole == [0, 1, 2]  # one that crashed is replaced by the same seed
    cells = [recipe["cell"] for recipe in recipes if "withdrawn" not in recipe]
    assert all(cells.count(cell) <= 2 for cell in cells)


@pytest.mark.parametrize("name", [n for n in SHIPPED if n.startswith(("base/", "quick/"))])
def test_bases_name_their_column_and_quick_ones_say_that_they_are_none(name: str) -> None:
    first = (FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# Table 1 (" if name.startswith("base/") else "# No cell of the paper's tables: ")


@pytest.mark.parametrize("family", TABLE_1)
def test_families_have_the_hyperparameters_of_table_1(family: str) -> None:
    assert {row: lookup(load(f"base/{family}"), row) for row in ROWS} == dict(zip(ROWS, TABLE_1[family], strict=True))
    base = load(f"base/{family}")
    assert base.neuron == {"name": "lbq", "n_max": 5, "step": 0.4, "beta": 0.5, "surrogate": "relsg_et"}
    if base.optim.name == "sgd":
        assert base.optim.momentum == 0.9
    cells = [load(name) for name in CELLS if name.startswith(f"{family}/")]
    assert {c.model.timesteps for c in cells} == TIMESTEPS[family]


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_differs_from_its_family_in_network_time_and_neuron_alone(name: str) -> None:
    config = load(name)
    family = config.data.name
    model = dataclasses.replace(load(f"base/{family}").model, id=config.model.id, timesteps=config.model.timesteps)
    assert config == dataclasses.replace(load(f"base/{family}"), name=config.name, model=model, neuron=config.neuron)
    if family != "imagenet":
        assert config.model.id == load(f"base/{family}").model.id
    if "/lmht_" in name:
        assert config.neuron == {"name": "lmht", "n_max": 2}
    elif name.split("/")[0] in TABLE_1:
        assert config.neuron == load(f"base/{family}").neuron


def test_ablation_capacity_and_fairness() -> None:
    for name, (neuron, options) in ABLATION.items():
        config = load(f"ablation/{name}")
        expected = ({} if neuron == "relu" else {"beta": 0.5}) | {"name": neuron, **options}
        assert config.neuron == expected
        assert config.model.timesteps == (1 if name == "ann" else 2)
        assert config.data.name == "cifar10"
    for n_max in (2, 10, 20):
        assert load(f"nmax/lbq_n{n_max}").neuron == load("cifar10/lbq_t2").neuron | {"n_max": n_max}
    slots = load("cifar10/lbq_t2")
    binary, quantised = load("fairness/binary_t10"), load("fairness/qann_n5")
    assert binary.model.timesteps == slots.neuron["n_max"] * slots.model.timesteps
    assert binary.neuron == load("ablation/binary").neuron
    same = {"n_max": slots.neuron["n_max"], "step": slots.neuron["step"], "step_gradient": "sum"}
    assert quantised.neuron == {"name": "qann", **same}
    assert quantised.model.timesteps == 1


def test_the_ablation_of_60_epochs_differs_in_its_neurons_alone() -> None:
    """Each can be started by one command, and decays BatchNorm and steps."""
    names = [name for name in SHIPPED if name.startswith("quick/ablation_60epochs/")]
    cells = {"lbq": "cifar10/lbq_t2", "lmht": "cifar10/lmht_t2", "lif": "ablation/binary", "v2": "ablation/v2"}
    cells |= {"v1": "ablation/v1_box", "v3": "ablation/v3_box"}
    cells |= {f"ternary_{step}": f"ablation/ternary_{step}_half" for step in ("fixed", "learned")}
    assert {name.split("/")[-1] for name in names} == cells.keys()
    first = load("quick/ablation_60epochs/lbq")
    assert (first.train.epochs, first.optim.norm_decay, first.optim.neuron_decay) == (60, True, "step")
    for name in names:
        config, cell = load(name), load(cells[name.split("/")[-1]])
        assert config == dataclasses.replace(first, name=cell.name, neuron=cell.neuron)


def test_the_recipes_with_rounded_weights_are_chosen_on_the_holdout() -> None:
    """One command trains them all, and none sees a test image."""
    names = [name for name in SHIPPED if name.startswith("quick/cifar10_holdout_8bits/")]
    first = load("quick/cifar10_holdout_8bits/t1_decay1")
    assert (first.model.timesteps, first.train.epochs, first.train.weight_bits, first.optim.sam) == (1, 60, 8, 0.05)
    assert (first.data.holdout, first.train.test, first.optim.neuron_decay) == (0.1, "never", "step")
    fifth = {"optim.neuron_decay_factor": 0.2}
    changes: dict[str, dict[str, Any]] = {
        "t1_decay1": {}, "t1_decay05": {"optim.neuron_decay_factor": 0.5}, "t1_decay02": fifth,
        "t1_n3": {**fifth, "neuron.n_max": 3}, "t1_n7": {**fifth, "neuron.n_max": 7},
        "t1_cost": {**fifth, "train.level_cost": 0.2},
        "t1_above": {"optim.neuron_decay": "none", "train.level_cost": 0.5, "train.level_cost_above": 450e6},
    }  # fmt: skip
    changes |= {f"t2_decay{f}": {**changes[f"t1_decay{f}"], "model.timesteps": 2} for f in ("1", "05", "02")}
    assert {name.split("/")[-1] for name in names} == changes.keys()
    for name in names:
        config, changed = load(name), changes[name.split("/")[-1]]
        assert {key: lookup(config, key) for key in changed} == changed
        assert len(differences(first, config)) == len(changed)


def test_every_configuration_that_is_run_has_a_short_name_that_is_true() -> None:
    for name in SHIPPED:
        config = load(name)
        if name.startswith("base/"):
            assert config.name == ""
        else:
            assert config.name.startswith(title_of(describe(config)["variant"]).removesuffix(" box)").removesuffix("+"))
            assert len(config.name) < 40


def test_no_two_configurations_are_the_same() -> None:
    by_hash: dict[str, list[str]] = {}
    for name in SHIPPED:
        if not name.startswith("base/"):  # bases are not run
            by_hash.setdefault(load(name).hash, []).append(name)
    assert [names for names in by_hash.values() if len(names) > 1] == []


# What is refused
# -----------------------------------------------------------------------------------------------------------------

BAD = {
    # misspelt keys
    "table": ('[trian]\nepochs = 1', r"unknown key 'trian'; did you mean 'train'\?"),
    "key": ("[train]\nepoch = 1", r"unknown key 'train.epoch'; did you mean 'epochs'\?"),
    "key of another table": ("[train]\nlr = 0.1", "unknown key 'train.lr'"),
    "neuron option": ('[neuron]\nname = "lbq"\nnmax = 5', r"neuron 'lbq' has no option 'nmax'; did you mean 'n_max'\?"),
    "option of another neuron": ('[neuron]\nname = "lif"\nn_max = 5', "neuron 'lif' has no option 'n_max'"),
    "option set by the model": ('[neuron]\nname = "lbq"\ntimesteps = 4', "neuron 'lbq' has no option 'timesteps'"),
    # wrong types
    "not a table": ("train = 3", "train must be a table"),
    "list of tables": ("[[train]]\nepochs = 1", "train must be a table"),
    "neuron not a table": ('neuron = "lbq"', "neuron must be a table"),
    "float for integer": ("[train]\nepochs = 1.5", "train.epochs must be an integer"),
    "boolean for integer": ("[train]\nepochs = true", "train.epochs must be an integer"),
    "integer for boolean": ("[train]\nchannels_last = 1", "train.channels_last must be true or false"),
    "string for number": ('[optim]\nlr = "0.1"', "optim.lr must be a number"),
    "number of Python": ('[optim]\nlr = ".05"', "optim.lr must be a number, got '.05': write 0.05"),
    "integer of Python": ('[train]\nepochs = "3."', "train.epochs must be an integer, got '3.': write 3"),
    "boolean of Python": ('[augment]\nflip = "True"', "augment.flip must be true or false, got 'True': write true"),
    "part for integer": ('[train]\nepochs = ".5"', "train.epochs must be an integer, got '.5'$"),
    "not finite as text": ('[optim]\nlr = "Infinity"', "optim.lr must be a number, got 'Infinity'$"),
    "no number": ('[optim]\nlr = "abc"', "optim.lr must be a number, got 'abc'$"),
    "number for string": ("[model]\nid = 20", "model.id must be a string"),
    "neuron without a name": ("[neuron]\nn_max = 5", "neuron: give a 'name'"),
    "neuron option of a wrong type": ('[neuron]\nname = "lbq"\nlearn_step = "yes"', "neuron 'lbq': learn_step"),
    # out of range
    "seed": ("seed = -1", "seed must be"),
    "seed too large": ("seed = 9223372036854775808", "seed must be"),
    "not finite": ("[optim]\nlr = inf", "optim.lr must be finite"),
    "no learning rate": ("[optim]\nlr = 0", "optim.lr must be > 0"),
    "decay": ("[optim]\nweight_decay = -1e-4", "optim.weight_decay must be >= 0"),
    "momentum": ("[optim]\nmomentum = 1.0", r"optim.momentum must be in \[0, 1\)"),
    "no epochs": ("[train]\nepochs = 0", "train.epochs must be >= 1"),
    "batch of one": ("[train]\nbatch_size = 1", "train.batch_size must be >= 2"),
    "no timesteps": ("[model]\ntimesteps = 0", "model.timesteps must be >= 1"),
    "mixing": ("[augment]\nmix_prob = 1.5", r"augment.mix_prob must be in \[0, 1\]"),
    "everything held out": ("[data]\nholdout = 1.0", r"data.holdout must be in \[0, 1\)"),
    "no levels": ('[neuron]\nname = "lbq"\nn_max = 0', "neuron 'lbq': n_max must be an integer >= 1"),
    "decay above one": ('[neuron]\nname = "lbq"\nbeta = 2.0', "neuron 'lbq': beta must be"),
    "window": ('[data]\nname = "dvs_objects"\nroot = "."\nwindow_ms = 2000000', "data.window_ms"),
    # unknown names
    "dataset": ('[data]\nname = "cifar"', "data.name must be one of"),
    "optimiser": ('[optim]\nname = "adam"', "optim.name must be one of 'sgd', 'adamw'"),
    "precision": ('[train]\nprecision = "int8"', "train.precision must be one of"),
    "network": ('[model]\nid = "resnet21w16"', "model: unknown id 'resnet21w16'"),
    "neuron": ('[neuron]\nname = "lbp"', r"unknown neuron 'lbp'; did you mean 'lbq'\?"),
    "surrogate": ('[neuron]\nname = "lbq"\nsurrogate = "relsg"', "neuron 'lbq': surrogate"),
    # what does not go together
    "warm-up": ("[train]\nepochs = 2\nwarmup_epochs = 2", "train.warmup_epochs must be less than train.epochs"),
    "plain": ("[train]\nepochs = 2\n[augment]\nplain_epochs = 3", "augment.plain_epochs must be at most train.epochs"),
    "sharp": ("[train]\nepochs = 2\n[optim]\nsam_epochs = 3", "optim.sam_epochs must be at most train.epochs"),
    "sharp parts": ("[train]\naccumulate = 2\n[optim]\nsam = 0.05", "optim.sam takes its batches whole: set train.acc"),
    "accumulate": ("[train]\nbatch_size = 64\naccumulate = 3", "train.accumulate must divide train.batch_size"),
    "crop and shift": ("[augment]\ncrop = 1\nshift = 1", "augment.crop and augment.shift"),
    "cutout of everything": ("[augment]\ncutout = 8", "augment.cutout must be less than 8, the side of an image of digits"),
    "events on images": ("[augment]\nevents = true", "augment.events is for event frames"),
    "crop of resized crops": (
        '[model]\nnum_classes = 1000\n[data]\nname = "imagenet"\nroot = "."\n[augment]\ncrop = 4',
        "augment.crop, shift and events do not apply to imagenet",
    ),
    "no root": ('[data]\nname = "cifar10"', "data.root must name the folder of cifar10"),
    "no events": ('[data]\nname = "nmnist"', "data.root must name the folder of nmnist"),
    "no such root": ('[data]\nname = "dvs_gesture"\nroot = "nowhere"', "nowhere does not exist"),
    "resolution": ("[data]\nsize = 32", "data.size must be 0 or 8 for digits"),
    "classes": ("[model]\nnum_classes = 100", "model.num_classes must be 10 for digits"),
    "channels": ("[model]\nin_channels = 3", "model.in_channels must be 1 for digits"),
    "batch above the data": ("[train]\nbatch_size = 2000", "train.batch_size must be at most the 1198 samples"),
    "batch above a limit": (
        "[data]\nlimit = 10\nholdout = 0.5",
        "train.batch_size must be at most the 5 samples that data.limit=10 and data.holdout=0.5 leave, got",
    ),
    "a limit above the data": ("[data]\nlimit = 1198", "data.limit=1198 leaves out none of 1,198 and 599 samples"),
    "batch above what is left": ("[data]\nholdout = 0.99", r"train.batch_size .* the \d+ samples that data.holdout=0.99"),
    "stem": ('[model]\nid = "vgg11w4"\nstem_stride = 2', "stem_stride applies to CIFAR-stem ResNets"),
    "tail": ('[model]\nshare_tail = true\n[neuron]\nname = "lif"', "share_tail: no neuron of this network learns a tail"),
    "start from nothing": ('[train]\ninit_from = "nowhere"', "train.init_from"),
    # the files themselves
    "not TOML": ("[train\nepochs = 1", "is not valid TOML"),
    "no base": ('base = "nowhere.toml"', "cannot read .*nowhere.toml"),
    "base of itself": ('base = "bad.toml"', "more than 8 bases in a row"),
    "base not a path": ("base = 3", "base must be the path"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line_that_names_the_field(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    text, message = BAD[case]
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text(text + "\n", encoding="utf-8")
    assert re.match(f"lbq: .*{message}", call.refused("train", "bad.toml", "--device", "cpu"))
    # A run that cannot begin leaves no folder, so that the corrected command works as typed.
    assert [p.name for p in tmp_path.iterdir()] == ["bad.toml"]


# What the documentation says
# -----------------------------------------------------------------------------------------------------------------


def test_the_documented_fields_and_defaults_are_those_of_the_code() -> None:
    documented = {
        match[1]: match[2]
        for match in re.finditer(
            r"^\| `([a-z_.]+)` \| `(.+?)` \| \S", _text("reference/configuration.md"), re.MULTILINE
        )
    }
    hints = typing.get_type_hints(Config)
    expected = {"seed": "0", "name": '""'}
    for table, kind in hints.items():
        if dataclasses.is_dataclass(kind):
            expected |= {f"{table}.{f.name}": json.dumps(f.default) for f in dataclasses.fields(kind)}
    assert documented == expected


def test_the_documented_options_of_neurons_are_those_of_the_code() -> None:
    """With their defaults; an option without one has None in the code."""
    documented: dict[str, dict[str, Any]] = {}
    table = _text("reference/configuration.md").partition("| neuron | its options |")[2].partition("\n\n")[0]
    for names, options in re.findall(r"^\| (`.*`) \| (.*) \|$", table, re.MULTILINE):
        same = re.match(r"as `(\w+)`, but ", options)
        defaults = {} if same is None else dict(documented[same[1]])
        for name, value in re.findall(r"`(\w+)(?:=(.+?))?`", options[same.end() if same else 0 :]):
            defaults[name] = json.loads(value) if value else None
        documented |= dict.fromkeys(re.findall(r"\w+", names), defaults)
    expected = {}
    for name in BUILT_IN:
        arguments = inspect.signature(NEURONS[name]).parameters.values()
        defaults = {a.name: a.default for a in arguments} | {"per_channel": False}
        expected[name] = {option: defaults[option] for option in options_of(name)}
    assert json.loads(json.dumps(expected)) == documented


def test_the_documentation_names_every_configuration() -> None:
    named = set(re.findall(r"`configs/([\w/]+)\.toml`", _text("reference/configuration.md")))
    assert named == set(SHIPPED)


def _text(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")
