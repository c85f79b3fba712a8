"""Networks and neurons of a user's own: registered, trained by name, deployed; and what is refused."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lbq
from lbq import models, neuron
from lbq.config import Config
from lbq.errors import ConfigError
from lbq.kernels import surrogate
from lbq.models import BurstNet, over_time
from lbq.runs import records
from lbq.system import plugins
from tests.support.commands import Call, status
from tests.support.paths import ROOT

EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/howto/own-network.md").read_text(), re.S)[-1]
QUICK = ("train.epochs=1", "train.warmup_epochs=0")


class Flat(BurstNet):
    def __init__(self, make: Any, *, num_classes: int, timesteps: int, in_channels: int) -> None:
        super().__init__()
        self.timesteps = timesteps
        self.conv, self.sn = nn.Conv2d(in_channels, 4, 3, padding=1), make(4)
        self.fc = nn.Linear(4 * 64, num_classes)

    def features(self, x: Tensor) -> Tensor:
        return self.sn(over_time(x, self.conv, timesteps=self.timesteps)).flatten(2)


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugins, "IMPORTED", [])
    monkeypatch.setattr(plugins, "_CHECKSUMS", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    before, networks = set(sys.modules), dict(models.OWN)
    yield
    models.OWN.clear()
    models.OWN.update(networks)  # other tests have registered theirs
    for name in neuron.NEURONS.keys() - neuron.registry.BUILT_IN:
        del neuron.NEURONS[name]
    for name in surrogate.SURROGATES.keys() - surrogate.BUILT_IN:
        del surrogate.SURROGATES[name]
    for name in set(sys.modules) - before:
        if name.startswith(("lbq_import_", "mine")):
            del sys.modules[name]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the documentation's example in it."""
    (tmp_path / "my_net.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# In Python
# ---------------------------------------------------------------------------------------------------------------------


def test_a_registered_network_is_one_by_id() -> None:
    assert models.register("flat")(Flat) is Flat
    net = models.create(
        "flat", num_classes=7, timesteps=3, neuron={"name": "lbq", "n_max": 2}, in_channels=1, dropout=0.5
    )
    assert isinstance(net, Flat)
    assert net.sn.n_max == 2
    assert isinstance(net.dropout, nn.Dropout)
    assert net(torch.randn(2, 1, 8, 8)).shape == (2, 7)
    assert net(torch.randn(2, 1, 8, 8), per_step=True).shape == (3, 2, 7)
    with pytest.raises(ConfigError, match="did you mean 'flat'"):
        models.create("flatt")
    with pytest.raises(ConfigError, match="stem_stride applies to CIFAR-stem ResNets, not to 'flat'"):
        models.create("flat", stem_stride=2)
    models.register("flat")(lambda make, **sizes: Flat(make, **sizes | {"num_classes": 3}))  # the new one counts
    assert models.create("flat", in_channels=1)(torch.randn(2, 1, 8, 8)).shape == (2, 3)


@pytest.mark.parametrize("id", ["resnet20w128", "resnet8w3", "vgg11", "vgg16w8", "resnet19w64fc256"])
def test_a_network_of_lbq_keeps_its_id(id: str) -> None:
    with pytest.raises(ConfigError, match=f"register: '{id}' is a network of lbq: choose another id"):
        models.register(id)


@pytest.mark.parametrize("name", ["", "3nets", "my net", "a/b", "größe", 3])
def test_names_are_plain(name: Any) -> None:
    with pytest.raises(ConfigError, match="register: an id is letters"):
        models.register(name)
    with pytest.raises(ConfigError, match="register: a name is letters"):
        neuron.register(name)


def test_a_network_that_cannot_be_called_is_refused_at_once() -> None:
    def lacking(neuron: Any, num_classes: int) -> BurstNet:
        raise AssertionError

    with pytest.raises(ConfigError, match=r"'lacking' must be callable with \(neuron, num_classes=.*'timesteps'"):
        models.register("lacking")(lacking)
    with pytest.raises(ConfigError, match="unknown id 'lacking'"):
        models.create("lacking")
    models.register("other")(lambda *_, **__: nn.Linear(1, 1))  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"'other' must be an lbq\.models\.BurstNet, got Linear"):
        models.create("other")


@pytest.mark.parametrize("missing", ["timesteps", "fc", "features"])
def test_what_a_network_lacks_is_said_with_the_remedy(missing: str) -> None:
    class Lacking(Flat):
        def __init__(self, make: Any, **sizes: int) -> None:
            super().__init__(make, **sizes)
            if missing != "features":
                delattr(self, missing)

    if missing == "features":
        Lacking.features = BurstNet.features  # type: ignore[method-assign]
    models.register("lacking")(Lacking)
    with pytest.raises(ConfigError, match=rf"^model: 'lacking' has no `{missing}`: (set|write) "):
        models.create("lacking")


def test_a_network_with_a_forward_of_its_own_needs_no_fc() -> None:
    class Other(Flat):
        def __init__(self, make: Any, **sizes: int) -> None:
            super().__init__(make, **sizes)
            self.last, self.fc = self.fc, None  # type: ignore[assignment]

        def forward(self, x: Tensor, per_step: bool = False) -> Tensor:
            return over_time(self.features(x), self.last, spatial=1).mean(0)

    models.register("other")(Other)
    assert models.create("other", in_channels=1)(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_a_registered_neuron_has_its_arguments_as_options() -> None:
    @neuron.register("mine")
    class Mine(nn.Module):
        def __init__(self, height: float = 1.0, timesteps: int = 0) -> None:
            super().__init__()
            self.height, self.timesteps = height, timesteps

    net = models.create("resnet8w4", timesteps=3, neuron={"name": "mine", "height": 0.5})
    assert {(m.height, m.timesteps) for m in net.modules() if isinstance(m, Mine)} == {(0.5, 3)}
    with pytest.raises(ConfigError, match="neuron 'mine' has no option 'heigth'; did you mean 'height'"):
        models.create("resnet8w4", neuron={"name": "mine", "heigth": 0.5})
    with pytest.raises(ConfigError, match="'lif' is a neuron of lbq: choose another name"):
        neuron.register("lif")
    with pytest.raises(ConfigError, match="'mine' must be a class or a function, got int"):
        neuron.register("mine")(3)  # type: ignore[type-var]
    neuron.register("none")(lambda: None)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"neuron 'none' must be a torch\.nn\.Module, got NoneType"):
        neuron.create("none")


def test_a_registered_neuron_that_passes_options_on_takes_them() -> None:
    @neuron.register("passing")
    class Passing(neuron.BurstNeuron):
        def __init__(self, height: float = 1.0, **options: Any) -> None:
            super().__init__(**options)

    made = neuron.create("passing", channels=4, n_max=3, per_channel=True)
    assert isinstance(made, Passing)
    assert (made.n_max, made.step.numel()) == (3, 4)
    assert neuron.registry.options_of("passing") == {"height"}
    with pytest.raises(ConfigError, match="neuron 'passing': .*unexpected keyword argument 'steps'"):
        neuron.create("passing", steps=3)


# On the command line
# ---------------------------------------------------------------------------------------------------------------------


def test_the_documented_file_trains_deploys_and_runs(here: Path, call: Call) -> None:
    config = str(ROOT / "configs/digits/lbq.toml")
    own = ("model.id=mynet", "neuron.name=fine", "neuron.step=0.2")
    assert status("--import", "my_net.py", "train", config, *own, *QUICK, "--out", "mine") == 0
    result = json.loads((here / "mine/result.json").read_text())
    checksum = hashlib.sha256(EXAMPLE.encode()).hexdigest()
    assert result["environment"]["imports"] == f"my_net.py sha256 {checksum}"
    assert type(lbq.load("mine")).__name__ == "MyNet"
    assert status("--import", "my_net.py", "deploy", "mine", "-o", "mine.lbq") == 0
    assert status("--import", "my_net.py", "record", "mine", "-o", "mine.json") == 0
    record = json.loads((here / "mine.json").read_text())
    assert (record["model"], record["variant"], record["n_max"]) == ("mynet", "fine", 10)
    assert record["versions"]["imports"] == f"my_net.py sha256 {checksum}"
    for taken in (models.OWN, plugins.IMPORTED, plugins._CHECKSUMS):  # as in a process of its own
        taken.clear()
    assert call.json("run", "mine.lbq", "digits", "--limit", "8")["images"] == 8
    assert status("report", "mine.json", "--format", "md", "-o", "mine.md") == 0
    for command in (("eval", "mine"), ("report", "mine")):
        error = call.refused(*command)
        assert re.match(r"lbq: mine(/config.toml)?: model: unknown id 'mynet'", error)
        hint = "(one of your own: lbq --import FILE ..., in Python import it); it was trained with --import my_net.py\n"
        assert error.endswith(hint)


def test_a_file_that_was_edited_since_is_told(here: Path, call: Call) -> None:
    """What lbq makes of a run then is perhaps not what was trained, and trainings before and after are not of one kind."""
    sweep = (
        "sweep",
        str(ROOT / "configs/digits/lbq.toml"),
        "model.id=mynet",
        "neuron.name=fine",
        *QUICK,
        "--train-only",
    )
    assert status("--import", "my_net.py", *sweep, "--vary", "seed=0", "-o", "out") == 0
    first = next((here / "out").glob("*/result.json")).parent
    assert status("--import", "my_net.py", "record", first, "-o", "0.json") == 0
    (here / "my_net.py").write_text(EXAMPLE.replace("n_max=10", "n_max=3"))
    for taken in (plugins.IMPORTED, plugins._CHECKSUMS):  # as in a process of its own
        taken.clear()
    other = pytest.warns(UserWarning, match="was trained with other imports, my_net.py, so this may not be its network")
    with other:
        code, out, err = call("--import", "my_net.py", *sweep, "--vary", "seed=0,1", "-o", "out")
    assert code == 0
    assert "trained already, with other imports, my_net.py: give another --out" in out + err
    assert "(n = 2)" not in out  # no mean over the two
    second = next(p.parent for p in (here / "out").glob("*/result.json") if p.parent != first)
    assert status("--import", "my_net.py", "record", second, "-o", "1.json") == 0
    for command in (("eval", first), ("deploy", first, "-o", "mine.lbq"), ("record", first, "-o", "again.json")):
        with other:
            assert status("--import", "my_net.py", *command) == 0
    assert "0.json and 1.json were trained with different files of your own (my_net.py sha256 " in call.refused(
        "compare", "0.json", "1.json", "--against", "1.json"
    )


def test_a_neuron_that_is_none_of_lbq_is_no_ann(here: Path, call: Call) -> None:
    (here / "mine.py").write_text(
        "from torch import nn\nfrom lbq.neuron import register\n"
        "@register('soft')\nclass Soft(nn.Module):\n    def forward(self, x):\n        return x.cumsum(0).tanh()\n"
    )
    train = ("train", str(ROOT / "configs/digits/lbq.toml"), "neuron.name=soft", *QUICK, "--out", "soft")
    code, _, err = call("--import", "mine.py", *train)
    assert code == 0
    assert "the network has no neurons of lbq.neuron: levels are not counted, and it cannot be deployed" in err
    assert "an ANN" not in err


def test_the_documented_surrogate_trains(here: Path, call: Call) -> None:
    wide = ("train", str(ROOT / "configs/digits/lbq.toml"), "neuron.surrogate=wide", *QUICK, "train.batch_size=512")
    error = call.refused(*wide, "--out", "wide")
    assert "surrogate must be a known name, got 'wide'; known: arctan, box" in error
    assert error.endswith("(one of your own: lbq --import FILE ..., in Python import it)\n")
    assert status("--import", "my_net.py", *wide, "--out", "wide") == 0
    assert records.record_of("wide")["surrogate"] == "wide"


def test_nothing_in_a_configuration_is_imported(here: Path) -> None:
    (here / "my_net.py").write_text("raise AssertionError\n")
    for name in ("my_net", "my_net.py", "my_net:MyNet", "my_net.MyNet"):
        with pytest.raises(ConfigError, match="unknown id"):
            lbq.runs.build.build(Config.from_dict({"model": {"id": name}}))


def test_a_module_by_name_and_what_lies_beside_a_file(here: Path) -> None:
    folder = here / "elsewhere"
    folder.mkdir()
    (folder / "mine_too.py").write_text("NAME = 'beside'\n")
    (folder / "net.py").write_text(
        "import mine_too\nfrom lbq.neuron import register, LIF\nregister(mine_too.NAME)(LIF)\n"
    )
    (here / "mine_module.py").write_text("from lbq.neuron import register, LIF\nregister('named')(LIF)\n")
    for name in ("elsewhere/net.py", "mine_module", "mine_module"):
        plugins.bring_in(name)
    assert {"beside", "named"} < neuron.NEURONS.keys()
    assert plugins.options() == ["--import", "elsewhere/net.py", "--import", "mine_module"]
    assert re.fullmatch(r"net\.py sha256 [0-9a-f]{64}; mine_module\.py sha256 [0-9a-f]{64}", plugins.checksums())


def test_two_files_of_one_name_both_count(here: Path) -> None:
    lines = []
    for folder in ("one", "other"):
        source = f"from lbq.neuron import register, LIF\nregister({folder!r})(LIF)\n"
        (here / folder).mkdir()
        (here / folder / "net.py").write_text(source)
        plugins.bring_in(f"{folder}/net.py")
        plugins.bring_in(f"./{folder}/net.py")  # the same again
        lines.append(f"net.py sha256 {hashlib.sha256(source.encode()).hexdigest()}")
    assert plugins.checksums() == "; ".join(lines)


def test_a_file_counts_as_changed_where_none_is_as_it_was() -> None:
    plugins._CHECKSUMS += ["a.py sha256 1", "a.py sha256 2", "b.py sha256 3"]
    assert plugins.changed("a.py sha256 1") == plugins.changed("") == ""
    assert plugins.changed("a.py sha256 1; b.py sha256 4") == "b.py"
    assert plugins.changed("its_name_then.py sha256 3") == ""
    assert plugins.changed("c.py sha256 5; c.py sha256 6") == "c.py"
    assert plugins.changed(plugins.checksums()) == ""
    plugins._CHECKSUMS += ["my; net.py sha256 7"]
    assert plugins.changed("my; net.py sha256 7") == ""
    for forged in ("forged", "a sha256 b sha256 c", "; ;", " sha256 ", "None"):  # in a result of somebody else's
        assert plugins.changed(forged) in ("", "a sha256 b")


def test_a_module_in_an_archive(here: Path) -> None:
    source = "from lbq.neuron import register, LIF\nregister('packed')(LIF)\n"
    with zipfile.ZipFile(here / "some.zip", "w") as archive:
        archive.writestr("mine_packed.py", source)
    sys.path.append(str(here / "some.zip"))
    plugins.bring_in("mine_packed")
    assert "packed" in neuron.NEURONS
    assert plugins.checksums() == f"mine_packed.py sha256 {hashlib.sha256(source.encode()).hexdigest()}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module' (broken.py, line 1)"),
        ("\nimport torch\ntorch.zeros(2) + torch.zeros(3)\n", "(broken.py, line 3)"),
        ("def (\n", "SyntaxError: invalid syntax (broken.py, line 1)"),
        ("raise ValueError('one\\ntwo')\n", "ValueError: one two (broken.py, line 1)"),
        ("raise SystemExit(0)\n", "SystemExit: 0 (broken.py, line 1)"),
        (
            "from lbq.neuron import register\nregister('lbq')\n",
            "register: 'lbq' is a neuron of lbq: choose another name",
        ),
    ],
)
def test_a_file_that_fails_is_named_in_one_line(source: str, message: str, here: Path, call: Call) -> None:
    (here / "broken.py").write_text(source)
    assert message in call.refused("--import", "broken.py", "doctor")
    assert plugins.IMPORTED == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--import", "none.py", "doctor"], "--import none.py: there is no such file"),
        (["--import", ".", "doctor"], "--import .: "),
        (
            ["--import", "./my_net", "doctor"],
            "--import ./my_net: give the name of a Python file with its .py, or of a module",
        ),
        (["--import", "elsewhere/", "doctor"], "--import elsewhere/: give the name of a Python file"),
        (["--import", "no_such_module", "doctor"], "No module named 'no_such_module'"),
        (["doctor", "--import", "my_net.py"], "--import stands before the command: lbq --import FILE COMMAND ..."),
    ],
)
def test_wrong_imports_are_refused_in_one_line(arguments: list[str], message: str, here: Path, call: Call) -> None:
    assert message in call.refused(*arguments)


def test_a_sweep_passes_them_on(here: Path, call: Call) -> None:
    config = here / "small.toml"
    config.write_text('[augment]\nshift = 1\n[model]\nid = "mynet"\n[neuron]\nname = "lbq"\n')
    own = ("--import", "my_net.py", "sweep", str(config), *QUICK, "--vary", "neuron.name=fine", "-o", "out")
    assert all(line.startswith("lbq --import my_net.py ") for line in call.printed(*own, "--print").splitlines())
    (row,) = call.json(*own, "--train-only")["runs"]
    assert row["state"] == "done"
