"""lbq deploy, run, predict and account as a user meets them; all but deploy where torch is not installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import venv
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq import engine
from lbq.batches.sources import open_source
from lbq.config import Config
from lbq.counting.analysis import load
from lbq.counting.deployed import evaluate
from lbq.counting.deployed_counts import analyze, measure
from lbq.counting.inputs import golden_set, open_data, read_input
from lbq.data import load_digits
from lbq.data.testset import open_arrays, open_test
from lbq.deploy import deploy
from lbq.engine.engine import thread_count
from lbq.engine.file.levelfile import load_levels
from lbq.errors import ArtefactError, ConfigError, DataError, LbqError
from lbq.training import trainer as train
from tests.support import small_runs
from tests.support.commands import Call, status
from tests.support.paths import ROOT
from tests.support.small_nets import deployed, pixels, small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a network that has learnt something."""
    config = Config.from_dict({"model": {"id": "resnet8w4"}, "train": {"epochs": 4, "batch_size": 64, "eval_every": 4}})
    trainer = train.Trainer(config, open_source(config))
    for _ in trainer.fit():
        pass
    folder = tmp_path_factory.mktemp("run") / "run"
    small_runs.save_run(folder, trainer.net, config)
    return folder


@pytest.fixture(scope="module")
def model(run: Path) -> Path:
    path = run.parent / "model.lbq"
    assert status("deploy", run, "-o", path) == 0
    return path


def test_no_more_threads_than_the_engines_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(384)), raising=False)
    assert thread_count() == 256
    assert thread_count(3) == 3


def test_numpy_is_announced_once(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LBQ_NATIVE", "off")
    with warnings.catch_warnings(record=True) as messages:
        assert call("run", str(model), "digits", "--limit", "4")[0] == 0
    assert [str(warning.message) for warning in messages] == [
        "running in NumPy, which is right but slow: switched off by LBQ_NATIVE=off"
    ]


def test_deploy(call: Call, run: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.lbq"
    assert "is the file of the network: give another name" in call.refused(
        "deploy", str(run), "-o", str(out), "--levels", str(out)
    )
    assert not out.exists()
    engine.save(tmp_path / "bare.lbq", engine.Network(engine.load(model).network))
    bare = ("deploy", tmp_path / "bare.lbq", "--timesteps", 1, "-o", out, "--levels", tmp_path / "a.levels")
    assert "no golden inputs whose levels it could write; --noise makes some" in call.refused(*bare)
    assert not out.exists()
    text = call.printed("deploy", str(run), "-o", str(out), "--levels", str(tmp_path / "a.levels"))
    assert f"{out}: " in text
    assert "weights of 8 bits in 7 spiking layers, T = 2" in text
    assert "8 golden inputs run the same densely and by bit planes" in text
    net = engine.load(out)
    assert net.golden is not None
    np.testing.assert_array_equal(net.golden.inputs, load_digits().test.images[:8])
    levels = load_levels(tmp_path / "a.levels")
    traced = net.run(net.golden.inputs, "dense", trace=True).levels
    assert traced is not None
    for name, level in traced.items():
        np.testing.assert_array_equal(levels[name], level)
    facts = call.json("deploy", str(run), "-o", str(out), "--bits", "6")
    assert (facts["bits"], facts["bytes"], facts["verified"]) == (6, out.stat().st_size, 8)
    assert call("deploy", str(run), "-o", str(out), "--noise")[0] == 0
    noisy = engine.load(out).golden
    assert noisy is not None
    assert not any((image == noisy.inputs).all((1, 2, 3)).any() for image in load_digits().test.images)


@pytest.mark.parametrize("verb", ["eval", "account", "analyze", "deploy"])
@pytest.mark.parametrize(
    "change",
    [
        "neuron.n_max=1",
        "neuron.name=lif",
        "model.id=resnet20w128",
        "model.timesteps=8",
        "data={root='x', size=3}",
        "seed=1",
    ],
)
def test_a_trained_run_is_what_it_is(
    call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, change: str
) -> None:
    """What describes its weights cannot be changed: that would be ignored, or written into a file that is not so."""
    monkeypatch.chdir(tmp_path)
    error = call.refused(verb, str(run), "data.workers=1", change)
    reason = f"{change.partition('=')[0]} cannot be changed, {run} is trained already"
    assert error == f"lbq: {reason}: give only data.root, data.workers, train.batch_size\n"
    assert not list(tmp_path.iterdir())
    assert not (run / "analysis").exists()
    error = call.refused(verb, str(run), "somewhere")
    assert error == "lbq: 'somewhere' must have the form key=value, such as data.root=DIR\n"


def test_where_data_lies_and_how_it_is_read_may_change(call: Call, run: Path) -> None:
    changes = ("data.root=elsewhere", "data.workers=1", "train.batch_size=7")
    before, after = (call.json("eval", str(run), *given, "--device", "cpu") for given in ((), changes))
    assert before["accuracy"] == after["accuracy"]


@pytest.mark.parametrize("verb", ["eval", "account", "analyze", "deploy"])
def test_where_its_data_has_gone_a_run_asks_for_the_folder(
    call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()  # which names the configuration
    settings = (run / "config.toml").read_text()
    for name, message in (("nmnist", "does not exist"), ("cifar10", "CIFAR-10 is not in"), ("folder", "train")):
        moved = settings.replace('name = "digits"\nroot = ""', f'name = "{name}"\nroot = "gone"')
        assert moved != settings
        (tmp_path / "run" / "config.toml").write_text(moved)
        err = call.refused(verb, "run")
        assert message in err
        assert err.endswith("; where the run's data lies elsewhere now, add data.root=DIR\n")


def test_noise_needs_no_data(call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("deploy", str(run), "--noise", "-o", "here.lbq")[0] == 0
    shutil.copytree(run, "run")
    settings = Path("run/config.toml").read_text()
    moved = settings.replace('name = "digits"\nroot = ""', 'name = "cifar10"\nroot = "gone"')  # as if it were on a disk
    Path("run/config.toml").write_text(moved)
    reads = open_source(Config.from_dict({})).inputs
    Path("run/result.json").write_text(json.dumps({"inputs": asdict(reads)}))
    assert call("deploy", "run", "--noise", "-o", "gone.lbq")[0] == 0
    here, gone = (engine.load(name).network for name in ("here.lbq", "gone.lbq"))
    assert (here.classes, here.input_shape, here.input_max) == (gone.classes, gone.input_shape, gone.input_max)
    for one, other in zip(here.synapses, gone.synapses, strict=True):
        assert np.array_equal(one.weight, other.weight)
    assert np.array_equal(here.layers[0].bias, gone.layers[0].bias)  # which mean and deviation went into
    result = json.loads(Path("run/result.json").read_text())
    result["inputs"]["shape"] = [1, 8]
    Path("run/result.json").write_text(json.dumps(result))
    assert "result.json is damaged: inputs.shape must be three whole numbers above 0, not [1, 8]" in call.refused(
        "deploy", "run", "--noise", "-o", "bad.lbq"
    )
    del result["inputs"]  # as older runs have none
    Path("run/result.json").write_text(json.dumps(result))
    assert "CIFAR-10 is not in gone" in call.refused("deploy", "run", "--noise", "-o", "bad.lbq")


def test_run(call: Call, model: Path, run: Path, tmp_path: Path) -> None:
    engines = ("auto", "dense", "bitplane")
    assert call.json("run", str(model))["images"] == 599
    some = ("run", str(model), "--limit", "200")
    facts_of = {name: call.json(*some, "--engine", name, "--threads", "2") for name in engines}
    assert facts_of["auto"]["accuracy"] == facts_of["dense"]["accuracy"] == facts_of["bitplane"]["accuracy"] > 60
    assert facts_of["auto"]["images"] == 200
    assert facts_of["auto"]["setup_seconds"] > 0  # choosing kernels is not in the time of images
    assert facts_of["dense"]["setup_seconds"] == 0
    assert facts_of["bitplane"]["counts"]["layer1.0.conv1"]["accumulations"] > 0
    assert facts_of["dense"]["counts"]["layer1.0.conv1"]["accumulations"] == 0
    assert (
        facts_of["dense"]["counts"]["layer1.0.conv1"]["products"]
        > facts_of["bitplane"]["counts"]["layer1.0.conv1"]["products"]
        == 0
    )
    for name in ("fused", "explicit"):
        facts = call.json(*some, "--engine", "bitplane", "--backend", name, "--against", "dense")
        assert (facts["backend"], facts["differing"]) == (name, 0)
        counts, usual = facts["counts"]["layer1.0.conv1"], facts_of["bitplane"]["counts"]["layer1.0.conv1"]
        assert counts["accumulations"] == usual["accumulations"]
        assert (counts["shifts"] > 0, counts["horner_shifts"]) == (name == "explicit", 0)
    assert usual["horner_shifts"] > 0
    for options, reason in (
        (["--backend", "shifted"], "backend must be one of horner, preshifted, fused, explicit, got 'shifted'"),
        (
            ["--engine", "dense", "--backend", "fused"],
            "backend 'fused' weights bit planes, and engine 'dense' has none: use engine 'bitplane'",
        ),
        (
            ["--against", "auto"],
            "engine 'auto' against itself compares nothing: give another engine, such as 'dense'",
        ),
    ):
        assert call.refused("run", str(model), *options) == f"lbq: {reason}\n"
    longer = tmp_path / "longer.lbq"
    assert "T = 3" in call.printed("deploy", str(run), "-o", str(longer), "--timesteps", "3")
    assert engine.load(longer).network.timesteps == 3
    text = call.printed("run", str(model), "digits", "--engine", "bitplane", "--limit", "20")
    for expected in (
        "layer2.0.downsample.0",
        "shortcut",
        "asked for",
        "on 20 images",
        "images a second",
        "engine bitplane",
    ):
        assert expected in text
    assert "densely" not in text
    text = call.printed("run", str(model), "digits", "--engine", "dense", "--limit", "20")
    per_image = sum(count["products"] for count in facts_of["dense"]["counts"].values()) / 200 / 1e3
    assert f"10 of 10 synapses ran densely, by {per_image:,.1f} thousand products an image, which are no accu" in text
    text = call.printed("run", str(model), "--against", "dense", "--limit", "50")
    levels = 50 * 2 * sum(layer.units for layer in engine.load(model).network.layers)
    assert f"0 of {levels + 500:,} levels and logits differ from those of engine dense" in text
    own = tmp_path / "own.npz"
    np.savez(own, images=load_digits().test.images[:30])
    assert "accuracy" not in call.printed("run", str(model), str(own))
    np.savez(own, images=load_digits().test.images[:30], labels=load_digits().test.labels[:30])
    assert call.json("run", str(model), str(own))["accuracy"] > 50


def test_account_of_a_deployed_network(call: Call, model: Path) -> None:
    text = call.printed("account", str(model))
    for expected in ("over 599 images", "layer1.0.conv1", "preshifted", "pixel planes", "shortcuts"):
        assert expected in text
    assert "golden" not in text
    facts = call.json("account", str(model), "--data", "digits", "--limit", "16")
    assert facts["images"] == 16
    assert facts["accuracy"] is not None
    net = engine.load(model)
    out = net.run(load_digits().test.images[:16], "bitplane")
    for name, count in facts["exact"]["synapses"].items():
        assert count["bit_sparse"] * 16 == pytest.approx(out.counts[name].accumulations)
    assert facts["exact"]["stem"]["conv1"]["bit_sparse"] * 16 == pytest.approx(out.counts["conv1"].accumulations)


def test_facts_of_a_file_may_be_anything(tmp_path: Path) -> None:
    made, path = deployed(), tmp_path / "odd.lbq"
    odd = {"model": 5, "data": {"name": "\ud800"}, "weights_sha256": [1], "config_hash": {}, "bits": "many"}
    engine.save(path, engine.Network(replace(made.network, facts=odd), made.golden))
    facts = analyze(engine.load(path), golden_set(made)).facts
    assert [facts[key] for key in ("model", "dataset", "weights_sha256", "config_hash", "bits")] == [
        "",
        "",
        "",
        "",
        None,
    ]
    for verb in (["analyze", str(path)], ["report", str(path), "-o", str(tmp_path / "report")]):
        assert status(*verb) in (0, 2)  # and no traceback


def test_golden_inputs_are_called_so_and_replace_no_analysis(call: Call, model: Path, tmp_path: Path) -> None:
    """Where a network's data does not come with lbq, and none is named."""
    net, path = engine.load(model), tmp_path / "model.lbq"
    facts = {**net.network.facts, "data": {"name": "cifar10"}}
    engine.save(path, engine.Network(replace(net.network, facts=facts), net.golden))
    text = call.printed("account", str(path))
    for expected in ("over 8 golden inputs", "golden inputs are no test set: give one with --data"):
        assert expected in text
    assert "Layers over all 8 golden inputs" in call.printed("analyze", str(path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.golden", "model.lbq"]
    assert load(tmp_path / "model.golden" / "analysis.json").golden
    own = tmp_path / "own.lbq"  # of a network that was deployed without images
    engine.save(own, deployed("resnet8w2"))
    for verb, expected in (("account", "over 8 golden inputs"), ("analyze", "Layers over all 8 golden inputs")):
        assert "random noise" not in call(verb, str(path))[1]
        assert f"{expected} (random noise, no images)" in call(verb, str(own))[1]
    assert call.json("account", str(own))["inputs"] == "golden inputs (random noise, no images)"
    np.savez(tmp_path / "own.npz", images=pixels(3, 3, 8, 8))
    first = call("account", str(own), "--data", str(tmp_path / "own.npz"))[1].splitlines()[0]
    assert first.rstrip().endswith("over 3 images")


@pytest.mark.parametrize(
    ("subject", "folder"),
    [
        (".", "hub-0.1.analysis"),
        ("../hub-0.1", "hub-0.1.analysis"),
        ("../net.t1.lbq", "net.t1.analysis"),
        ("net.t1", "hub-0.1/net.t1.analysis"),
    ],
)
def test_an_analysis_lies_beside_what_it_is_of(
    call: Call, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subject: str, folder: str
) -> None:
    """Also for a folder that is named by a dot, and where a name has a dot in it."""
    shutil.copy(model, tmp_path / "net.t1.lbq")
    call.printed("models", "export", model, "-o", tmp_path / "hub-0.1")
    monkeypatch.setenv("LBQ_MODELS", str(tmp_path))
    monkeypatch.chdir(tmp_path / "hub-0.1")
    call.printed("account", subject, "--limit", 8)
    call.printed("analyze", subject, "--limit", 8)
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("analysis.json"))
    assert made == [f"{folder}/analysis.json"]


def test_a_look_at_a_few_samples_does_not_replace_the_analysis_of_all(call: Call, model: Path, tmp_path: Path) -> None:
    shutil.copy(model, tmp_path / "net.lbq")
    whole = tmp_path / "net.analysis" / "analysis.json"
    for _ in range(2):  # a whole one may be made again
        call.printed("analyze", tmp_path / "net.lbq", "--membranes", 0)
    before = whole.read_bytes()
    code, _, err = call("analyze", tmp_path / "net.lbq", "--limit", 8)
    assert code == 2
    assert re.fullmatch(
        r"lbq: \S+net\.analysis holds an analysis of all [\d,]+ samples, .*: give another folder with -o\n", err
    )
    assert whole.read_bytes() == before
    images = np.zeros((20, 1, 8, 8), np.uint8)
    for size, code in ((20, 2), (8, 0)):  # a part of other data, and the whole of it
        np.savez(tmp_path / "other.npz", images=images[:size])
        given = ("--data", tmp_path / "other.npz", "--limit", 10)
        assert call("analyze", tmp_path / "net.lbq", *given)[0] == code
        whole.write_bytes(before)
    call.printed("analyze", tmp_path / "net.lbq", "--limit", 8, "-o", tmp_path / "look")
    whole.write_text("{")
    call.printed("analyze", tmp_path / "net.lbq", "--limit", 8)  # a damaged one is made anew
    call.printed("analyze", tmp_path / "net.lbq", "--limit", 9)


def test_data_may_be_an_argument_or_an_option(call: Call, model: Path) -> None:
    common = ("--engine", "bitplane", "--limit", 8)
    ways = [call.json("run", model, *way, *common) for way in (("digits",), ("--data", "digits"))]
    assert ways[0]["counts"] == ways[1]["counts"]
    assert call("run", model, "digits", "--data", "digits")[2] == (
        "lbq: the data are given twice, digits and --data digits: give them once\n"
    )
    assert call("account", model, "digits")[2] == (
        "lbq: give the dataset of a deployed network as an option: --data digits\n"
    )


def test_help_says_what_a_run_takes_and_what_the_data_are(call: Call) -> None:
    for verb in ("eval", "deploy", "account", "analyze"):
        text = " ".join(call(verb, "--help")[1].replace("│", " ").split())
        assert "For a run: key=value; keys data.root, data.workers, train.batch_size." in text
        assert ("default its golden inputs, for digits their test set." in text) == (verb in ("account", "analyze"))


def test_predict(call: Call, model: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    net = engine.load(model)
    digits = load_digits().test
    chosen = next(i for i in range(50) if net.run(digits.images[i]).predictions[0] == digits.labels[i])
    pixel = np.rint(digits.images[chosen, 0] * (255 / 16)).astype(np.uint8)
    image.fromarray(pixel).save(tmp_path / "digit.png")
    classes = call.json("predict", str(model), str(tmp_path / "digit.png"))
    assert classes[0]["index"] == digits.labels[chosen]
    assert len(classes) == 5
    assert 0 < sum(entry["share"] for entry in classes) <= 1.0001
    assert [e["logit"] for e in classes] == sorted((e["logit"] for e in classes), reverse=True)
    turned = image.Exif()
    turned[0x0112] = 6  # to be shown turned right by a quarter
    image.fromarray(np.rot90(pixel)).save(tmp_path / "turned.png", exif=turned)
    assert call.json("predict", str(model), str(tmp_path / "turned.png")) == classes
    np.save(tmp_path / "digit.npy", digits.images[chosen])
    text = call.printed("predict", str(model), str(tmp_path / "digit.npy"), "--top", "1")
    assert text.startswith(str(digits.labels[chosen]))
    assert text.count("\n") == 1
    both = [str(tmp_path / name) for name in ("turned.png", "digit.npy")]
    assert call.json("predict", str(model), *both) == dict.fromkeys(both, classes)
    lines = call.printed("predict", str(model), *both, "--top", "1").splitlines()
    assert len(lines) == 4
    assert (lines[0], lines[1].split()[0]) == (both[0], str(digits.labels[chosen]))
    assert "nowhere.png is not a file" in call.refused("predict", str(model), "nowhere.png")


def test_what_can_be_read_is_classified_whatever_lies_beside_it(call: Call, model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "good.npy", load_digits().test.images[0])
    alone = call.json("predict", model, tmp_path / "good.npy")
    (tmp_path / "bad.png").write_text("cut off")
    code, out, err = call("predict", model, tmp_path, "--json")
    assert (code, json.loads(out)) == (2, {str(tmp_path / "good.npy"): alone})
    assert err.startswith(f"lbq: {tmp_path / 'bad.png'} cannot be decoded")
    assert err.endswith(": convert or remove it\n")
    (tmp_path / "none").mkdir()
    code, out, err = call("predict", model, tmp_path / "none", tmp_path / "good.npy", "--json")
    assert (code, json.loads(out)) == (2, {str(tmp_path / "good.npy"): alone})
    assert "none holds no images and no .npy files" in err
    for i in range(5):
        np.save(tmp_path / f"flat{i}.npy", np.zeros(3, np.uint8))
    code, out, err = call("predict", model, tmp_path, "--top", "1")
    assert (code, out.splitlines()[0], out.count("\n")) == (2, str(tmp_path / "good.npy"), 2)
    left = ", ".join(str(tmp_path / f"flat{i}.npy") for i in range(4))
    assert err.endswith(f" (5 more could not be read: {left}, ...)\n")
    assert err.count("\n") == 1


def test_classes_that_share_a_name_are_shown_with_their_numbers(call: Call, model: Path, tmp_path: Path) -> None:
    net, path = engine.load(model), tmp_path / "birds.lbq"
    names = ("crane", "dove", "crane", *"defghij")
    engine.save(path, engine.Network(replace(net.network, classes=names), net.golden))
    np.save(tmp_path / "digit.npy", load_digits().test.images[0])
    said = call.json("predict", path, tmp_path / "digit.npy", "--top", 10)
    assert {e["index"]: e["class"] for e in said} == dict(enumerate(("crane (0)", "dove", "crane (2)", *"defghij")))
    assert engine.load(path).network.classes == names


def test_a_level_that_differs_is_found(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = engine.Network.run

    def wrong(self: engine.Network, x: Any, name: Any = "auto", *rest: Any, **more: Any) -> Any:
        out = original(self, x, name, *rest, **more)
        if name == "dense" and out.levels is not None:
            out.levels["layer1.0.sn1"][1, 3, 0, 0, 0] ^= 1
        return out

    monkeypatch.setattr(engine.Network, "run", wrong)
    code, text, _ = call("run", str(model), "--against", "dense", "--limit", "40", "--json")
    assert code == 1
    assert json.loads(text)["differing"] == 2  # one in each of the two batches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["deploy", "nowhere"], "nowhere does not exist"),
        (["deploy", "RUN", "--bits", "9"], "bits must be 2 to 8, or 16, got 9"),
        (["deploy", "RUN", "-o", "/dev/null/model.lbq"], "cannot write /dev/null/model.lbq"),
        (["run", "nowhere.lbq"], "nowhere.lbq cannot be read: No such file"),
        (["run", "."], ". is not a file"),
        (["run", "README"], "README: it is not a deployed network, or was cut off: give a model.lbq"),
        (["run", "WEIGHTS"], "its header lacks the entries lbq and sha256: give a model.lbq"),
        (["run", "MODEL", "nowhere"], "'nowhere' is not what the network was trained on: give digits"),
        (["run", "MODEL", "digits", "--engine", "fast"], "engine must be one of auto, dense, bitplane, cuda"),
        (["run", "MODEL", "digits", "--against", "fast"], "engine must be one of auto, dense, bitplane, cuda"),
        (["run", "MODEL", "digits", "--threads", "0"], "--threads"),
        (["run", "MODEL", "nowhere.npz"], "cannot read nowhere.npz: No such file or directory; give a .npz file"),
        (["predict", "MODEL", "MODEL"], "cannot be decoded"),
        (["predict", "MODEL", "nowhere.npy"], "cannot read nowhere.npy: No such file or directory; give a .npy file"),
        (["account", "MODEL", "--data", "nowhere.npz"], "cannot read nowhere.npz: No such file"),
        (["account", "RUN", "--data", "digits"], "--data is for a deployed network"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line(
    call: Call,
    run: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README").write_text("# A title, and no network")
    known = {"RUN": str(run), "MODEL": str(model), "WEIGHTS": str(run / "weights.safetensors")}
    assert message in call.refused(*(known.get(a, a) for a in arguments))


def test_files_that_are_not_what_their_name_says(model: Path, tmp_path: Path) -> None:
    network = engine.load(model).network
    archive, array = tmp_path / "archive.npy", tmp_path / "array.npz"
    np.savez(tmp_path / "x.npz", images=pixels(400, 1, 8, 8) // 16)
    (tmp_path / "x.npz").rename(archive)
    np.save(tmp_path / "y.npy", pixels(1, 8, 8))
    (tmp_path / "y.npy").rename(array)
    huge = tmp_path / "huge.npy"
    with open(huge, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (2**46,)})
    for path in (archive, huge):
        with pytest.raises(DataError, match=f"{path.name} cannot be read as .npy"):
            read_input(path, network)
    packed = tmp_path / "packed.npz"
    np.savez_compressed(packed, images=pixels(400, 1, 8, 8) // 16)
    data = bytearray(packed.read_bytes())
    data[200:260] = bytes(60)
    packed.write_bytes(data)
    for path in (array, packed):
        with pytest.raises(DataError, match=f"{path.name} cannot be read as .npz"):
            open_arrays(path, True)


def test_data_that_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    net = engine.load(model)
    np.savez(tmp_path / "a.npz", images=pixels(2, 3, 8, 8))
    with pytest.raises(DataError, match=r"a.npz has images of \(3, 8, 8\), the network reads images of \(1, 8, 8\): "):
        open_data(net.network, str(tmp_path / "a.npz"))
    for arrays, message in (
        ({"x": pixels(1, 1, 8, 8)}, r"must hold 'images', uint8 \[N, C, H, W\]$"),
        ({"images": np.zeros((2, 8, 8))}, r"uint8 \[N, C, H, W\], not float64 \[2, 8, 8\]"),
        ({"images": pixels(2, 1, 8, 8), "labels": np.zeros(3, int)}, "'labels' must be 2 whole numbers"),
        ({"images": np.array([{}], object)}, "cannot be read as .npz"),
    ):
        np.savez(tmp_path / "b.npz", **arrays)
        with pytest.raises(DataError, match=message):
            open_arrays(tmp_path / "b.npz", True)
    np.savez(tmp_path / "a.npz", images=pixels(2, 3, 1, 8, 8))
    with pytest.raises(DataError, match=r"a.npz has 3 frames a sample, the network reads 2$"):
        open_data(replace(net.network, static=False), str(tmp_path / "a.npz"))
    for arrays, message in (
        ({"images": pixels(2, 1, 8, 8)}, "b.npz has values up to 2.., the network was trained on 0 to 16: scale them"),
        ({"images": pixels(2, 1, 8, 8) // 16, "labels": np.array([1, 10])}, "labels from 1 to 10, .* classes 0 to 9"),
        ({"images": pixels(2, 1, 8, 8) // 16, "labels": np.array([-1, 9])}, "labels from -1 to 9"),
    ):  # fmt: skip
        np.savez(tmp_path / "b.npz", **arrays)
        with pytest.raises(DataError, match=message):
            open_data(net.network, str(tmp_path / "b.npz"))
    np.save(tmp_path / "a.npy", pixels(1, 8, 8))
    with pytest.raises(LbqError, match="images have values up to 2.., the network was trained on 0 to 16: scale them"):
        net.run(pixels(2, 1, 8, 8))
    with pytest.raises(DataError, match="a.npy has values up to 2.., the network was trained on 0 to 16"):
        read_input(tmp_path / "a.npy", net.network)
    own = deployed("resnet8w2")
    with pytest.raises(DataError, match='does not say which dataset .* facts={"data": {"name": "cifar10"}}'):
        open_data(own.network, "somewhere")
    assert open_data(replace(net.network, facts={}), "digits").size == 599
    with pytest.raises(DataError, match="unknown dataset 'cifar11'; did you mean 'cifar10'"):
        open_test("cifar11")
    with pytest.raises(ConfigError, match=r"data.root must name the folder of cifar100"):
        open_test("cifar100")
    for facts, message in (
        ({"name": "cifar10"}, "give the folder of cifar10, or a .npz"),
        ({"name": "digits", "size": -3}, "make no sense"),
        ({"name": "digits", "frames": "x"}, "make no sense"),
    ):
        network = engine_with(own, facts)
        with pytest.raises((DataError, ArtefactError), match=message):
            open_data(network.network, None)
    np.savez(tmp_path / "none.npz", images=pixels(0, 3, 8, 8))
    for function in (evaluate, measure):
        with pytest.raises(DataError, match="has no samples"):
            function(own, open_data(own.network, str(tmp_path / "none.npz")))
    with pytest.raises(ArtefactError, match="carries no golden inputs"):
        golden_set(engine.Network(own.network))
    np.save(tmp_path / "flat.npy", np.zeros(3, np.uint8))
    with pytest.raises(DataError, match=r"must be uint8 \[3, 8, 8\], not uint8 \[3\]"):
        read_input(tmp_path / "flat.npy", own.network)
    with pytest.raises(DataError, match="no square image"):
        read_input("x.png", deployed("resnet8w2", shape=(2, 8, 8)).network)
    frames = deploy(small("resnet8w2", shape=(2, 8, 8)), (2, 8, 8), static=False, scale=255).network
    with pytest.raises(
        DataError, match=r"x\.png is no \.npy file of them: give uint8 \[2, 2, 8, 8\]; `lbq watch` reads recordings"
    ):
        read_input("x.png", frames)


def engine_with(net: engine.Network, facts: dict[str, Any]) -> engine.Network:
    return engine.Network(replace(net.network, facts={"data": facts}), net.golden)


# Without torch ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment that holds lbq and what it depends on, and no torch.

    Nothing is downloaded: packages of this environment are linked, one by one, and those of torch are not."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    site = next(home.glob("lib/python*/site-packages"))
    here = Path(np.__file__).parent.parent
    for entry in here.iterdir():
        name = entry.name.lower()
        if not name.startswith(
            ("torch", "functorch", "triton", "nvidia", "lbq", "__editable__", "sympy", "matplotlib")
        ):
            (site / entry.name).symlink_to(entry)
    (site / "lbq.pth").write_text(str(ROOT / "src"))
    return home / "bin" / "python"


def python(interpreter: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    command = [str(interpreter), *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, check=False)


SEVERAL = """
import contextlib, io, json, sys
from lbq import cli
done = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(arguments)
        except SystemExit as stop:
            done.append((stop.code or 0, out.getvalue(), err.getvalue()))
json.dump(done, sys.stdout)
"""


def commands(interpreter: Path, *several: list[object]) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of `lbq` with these arguments, one after the other in one process."""
    given = json.dumps([[str(argument) for argument in arguments] for arguments in several])
    done = python(interpreter, "-c", SEVERAL, stdin=given)
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


def test_deployed_networks_run_where_torch_is_not_installed(
    without_torch: Path, model: Path, run: Path, tmp_path: Path
) -> None:
    assert "No module named 'torch'" in python(without_torch, "-c", "import torch").stderr
    code = f"import lbq.engine as e; n = e.load({str(model)!r}); print(n.verify(), n.run(n.golden.inputs).logits[0].tolist())"
    golden = engine.load(model).golden
    assert golden is not None
    assert python(without_torch, "-c", code).stdout.strip() == f"8 {golden.logits[0].tolist()}"
    help_text = python(without_torch, "-m", "lbq", "--help")
    assert (help_text.returncode, help_text.stderr) == (0, "")
    np.save(tmp_path / "digit.npy", load_digits().test.images[0])
    one, record = tmp_path / "one.lbq", ROOT / "results" / "cifar10_resnet20w128_ann_60ep_s0.json"
    done = commands(
        without_torch,
        ["run", model, "digits", "--limit", 50, "--json"],
        ["run", model, "--engine", "bitplane", "--limit", 9, "--json"],
        ["account", model, "--json"],
        ["predict", model, tmp_path / "digit.npy", "--json"],
        ["deploy", model, "--timesteps", 1, "-o", one],
        ["doctor"],
        ["export", model, "-o", tmp_path / "c"],
        ["report", model, "-o", tmp_path / "report.html"],
        ["report", record, "-o", tmp_path / "other.html"],
    )
    assert [code for code, _, _ in done] == [0] * 9, done
    whole, some, counted, predicted = (json.loads(out) for _, out, _ in done[:4])
    assert min(whole["accuracy"], some["accuracy"]) > 30
    assert counted["images"] == 599
    assert len(predicted) == 5
    assert done[4][2] == ""
    assert engine.load(one).verify() == 8
    for status_code, _, err in commands(
        without_torch, ["demo"], ["account", run], ["deploy", run], ["run", model, "digits", "--engine", "cuda"]
    ):
        assert (status_code, err.count("\n")) == (2, 1)
        assert "needs PyTorch, which is not installed" in err


def test_data_of_other_classes_is_refused(model: Path, tmp_path: Path) -> None:
    network = engine.load(model).network
    images, names = np.zeros((2, 1, 8, 8), np.uint8), np.array(network.classes)
    named = np.array([f"digit {name}" for name in names])  # what the network knows by numbers alone
    for stored in (names, np.arange(3), named):  # those that are no names say nothing
        np.savez(tmp_path / "own.npz", images=images, labels=[0, 1], classes=stored)
        assert open_data(network, str(tmp_path / "own.npz")).size == 2
    np.savez(tmp_path / "own.npz", images=images, labels=[0, 1], classes=names[1:])
    with pytest.raises(DataError, match=r"own.npz has other classes than the network \(class 0 is '1', not '0'\)"):
        open_data(network, str(tmp_path / "own.npz"))
    for classes, first in (
        (("zero", *network.classes[1:]), "class 0 is '0', not 'zero'"),
        (network.classes[:9], "10, not 9"),
    ):
        with pytest.raises(DataError, match=rf"digits has other classes than the network \({first}\): give data like"):
            open_data(replace(network, classes=classes), "digits")


@pytest.mark.parametrize(
    ("neuron", "footnote"), [("lbq", "counts the bits of its integer sums"), ("lif", "every event still counts as one")]
)
def test_account_says_how_sums_are_counted(call: Call, tmp_path: Path, neuron: str, footnote: str) -> None:
    engine.save(tmp_path / "net.lbq", deployed("resnet8w2", neuron))
    shown = call.printed("account", tmp_path / "net.lbq")
    assert footnote in shown
    assert shown.count("Behind an average") + shown.count("behind an average") == 1
