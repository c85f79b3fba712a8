"""The command line as a user meets it: the first run, its folder, --json, and one-line errors with exit code 2."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import lbq
from lbq import cli
from lbq.batches.sources import open_source
from lbq.cli import demo
from lbq.cli.progress import CountProgress, TrainProgress
from lbq.data import digits, idx
from lbq.errors import Stopped
from lbq.measuring.measure import measure
from lbq.native import cpus
from lbq.native.choose import choose
from lbq.runs.records import record_of
from lbq.runs.run_folder import default_name, load_config
from lbq.system import signals
from lbq.training import trainer as train
from tests.support.commands import Call, status
from tests.support.idx_files import idx_files
from tests.support.paths import ROOT
from tests.support.reading import real
from tests.support.small_runs import small_digits

Demo = tuple[Path, dict[str, Any], str, demo.DemoResult]
SOME_DIGITS = small_digits(320, 150)


@pytest.fixture
def some_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the demo."""
    monkeypatch.setattr(digits, "load_digits", lambda: SOME_DIGITS)


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The folder that `lbq demo` wrote, its JSON, its progress, and the result that it came from."""
    folder, run_demo = tmp_path_factory.mktemp("demo") / "run", demo.run_demo
    results: list[demo.DemoResult] = []

    def noted(*arguments: Any) -> demo.DemoResult:
        results.append(run_demo(*arguments))
        return results[0]

    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(demo, "run_demo", noted)
        patch.setattr(digits, "load_digits", lambda: SOME_DIGITS)
        assert status("demo", "--epochs", "1", "--json", "--out", folder) == 0
    return folder, json.loads(out.getvalue()), err.getvalue(), results[0]


@pytest.mark.usefixtures("some_digits")
def test_demo_json_and_run_folder(demo_run: Demo) -> None:
    folder, summary, progress, _ = demo_run
    assert list(summary["accuracy"]) == ["ann", "lif", "burst_fixed", "lbq"]
    assert all(0 <= value <= 100 for value in summary["accuracy"].values())
    assert summary["seconds"] > 0
    assert summary["integer_check"] is True
    names = {p.name for p in folder.iterdir()}
    assert names == {
        ".lock", "analysis", "baselines", "checkpoints", "checks.json", "config.toml", "metrics.jsonl", "model.analysis",
        "model.lbq", "report.html", "result.json", "weights.safetensors",
    }  # fmt: skip
    result = json.loads((folder / "result.json").read_text())
    checks = json.loads((folder / "checks.json").read_text())
    absorption, check = checks["absorption"], checks["integers"]
    assert absorption["untied"] == 0
    assert absorption["levels"] == 150 * 2 * 4608
    assert check["bytes"] == (folder / "model.lbq").stat().st_size
    assert check["accumulations_executed"] == check["accumulations_counted"] > 0
    assert round(result["accuracy"], 2) == summary["accuracy"]["lbq"]
    assert "lbq          epoch   1" in progress  # plain lines where there is no terminal
    analysis = json.loads((folder / "analysis" / "analysis.json").read_text())
    assert analysis["facts"]["name"] == folder.name  # and not what it was called while it was written
    for baseline in ("ann", "lif", "burst_fixed"):
        stored = json.loads((folder / "baselines" / baseline / "result.json").read_text())
        net = lbq.load(folder / "baselines" / baseline)
        assert measure(net, open_source(load_config(folder))).accuracy == pytest.approx(stored["accuracy"])


def test_the_demo_ends_with_a_report(demo_run: Demo) -> None:
    folder, summary, *_ = demo_run
    assert summary["report"] == str(folder / "report.html")
    page = (folder / "report.html").read_text()
    for text in (
        "Burst, fixed step",
        "Binary LIF",
        "One image through the deployed network on integers",
        "Figure 4 (a)",
        "levels of 12 channels of layer1.0.sn1",
    ):
        assert text in page
    for name, accuracy in summary["accuracy"].items():
        assert f"{accuracy:.2f} (1 seed)" in page, name
    assert record_of(folder)["test_accuracy"] == pytest.approx(summary["accuracy"]["lbq"], abs=0.005)


def test_demo_table(call: Call, demo_run: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed of the same run where no JSON is asked for, and what is run where no folder is named."""
    asked: list[tuple[Any, ...]] = []

    def again(folder: Path, progress: Any, *options: Any) -> demo.DemoResult:
        asked.append((folder, *options))
        return demo_run[3]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "run_demo", again)
    out = call.printed("demo", "--epochs", "1", "--seed", "3")
    assert asked == [(Path("runs/demo-001"), 3, 1)]
    for text in (
        "LBQ, learned step",
        "binary LIF",
        "bit kAC",
        "Counts are border-exact: padding is left out. The report's rate x MACs include it and are higher.",
        "modelled",
        "learned steps",
        "layer3.0.sn2",
        "agree",
    ):
        assert text in out
    # the tutorial's excerpt has the shape of this output: the same lines, but for the figures in them
    excerpt = re.search(r"```text\n(.*?)```", (ROOT / "docs/tutorials/first-network.md").read_text(), re.S)
    assert excerpt
    shapes = {shape_of(line) for line in out.splitlines()}
    for line in excerpt[1].splitlines():
        assert shape_of(line) in shapes or line.strip() == "...", line


def shape_of(line: str) -> str:
    return re.sub(r"[\d,. ]+", " ", line).strip()


@pytest.mark.usefixtures("some_digits")
def test_account_of_a_run(call: Call, demo_run: Demo) -> None:
    folder, summary, *_ = demo_run
    on = ["--device", "cpu"]  # as the demo: a GPU rounds otherwise
    facts = call.json("account", str(folder), *on)
    assert round(facts["accuracy"], 2) == summary["accuracy"]["lbq"]
    exact = demo_run[3].measured["lbq"].exact
    assert exact is not None
    assert facts["exact"]["total"]["bit_sparse"] == pytest.approx(exact.executed)
    out = call.printed("account", str(folder))
    for text in (
        "layer2.0.downsample.0",
        "total",
        "shortcuts",
        "preshifted",
        "explicit",
        "rate x MACs",
        "Energy: over 150 images; modelled µJ per image",
        "binary at equal slots",
        "signed digits",
        "state updates",
        "Horner",
        "Break-even, with memory",
        "NeuroBench",
        "Horowitz",
    ):
        assert text in out
    assert facts["costs"]["modelled"] is True
    prices = folder.parent / "prices.toml"
    prices.write_text('name = "mine"\nsource = "me"\nfp32_add = 1.8\n')
    out = call.printed("account", str(folder), "--technology", str(prices), "--limit", "20", "--json")
    assert json.loads(out)["costs"]["technology"]["name"] == "mine"
    assert json.loads(out)["images"] == 20
    again = json.loads(out)["exact"]
    by_hand = 4.6 * again["fp_macs"] + 1.8 * again["total"]["bit_sparse"] + 0.1 * again["total"]["formations"]
    assert again["energy_mj"]["fused"] == pytest.approx(1e-9 * by_hand)
    out = call.printed("account", str(folder), "--technology", str(prices), "--limit", "20")
    assert "prices: fp32_add: mine (me); the rest: 45 nm CMOS, 0.9 V (M. Horowitz" in out
    out = call.printed("account", str(folder / "baselines" / "ann"))
    assert "no spikes" in out
    prices.write_text('name = "mine"\nsource = "me"\nfp32_mac = 9.2\n')
    dear = call.printed("account", str(folder / "baselines" / "ann"), "--technology", str(prices))
    assert "prices: mine (me)" in dear
    usual, doubled = (float(re.findall(r"([\d.]+) µJ", text)[0]) for text in (out, dear))
    assert doubled == pytest.approx(2 * usual, abs=0.002)


def test_account_of_the_paper(call: Call, tmp_path: Path) -> None:
    assert "13.72" in call.printed("account", "--paper")
    value = call.json("account", "--paper")
    assert value["modelled_cost"][4]["ANN / it, modelled"] == "13.72"
    assert value["accumulations"][3] == {
        "Method": "LBQ (5)", "Dataset": "CIFAR-10", "Network": "ResNet-20", "Epochs": "300", "Unary (M)": "1,589.90",
        "Bit-sparse (M)": "945.69", "Saved %": "40.52", "Origin": "published",
    }  # fmt: skip
    assert "45 nm CMOS" in value["prices"]
    prices = tmp_path / "prices.toml"
    prices.write_text('name = "mine"\nsource = "me"\nfp32_add = 1.8\n')
    out = call.printed("account", "--paper", "--technology", str(prices))
    assert "at the prices below: not the energies that it published" in out
    assert "Prices: fp32_add: mine (me); the rest: 45 nm CMOS, 0.9 V (M. Horowitz" in out
    assert "not runs/mine and --paper" in call.refused("account", "runs/mine", "--paper")
    assert "cannot read none.toml" in call.refused("account", "--paper", "--technology", "none.toml")


def test_doctor(call: Call) -> None:
    assert f"kernel {choose('cpu').kernel}" in call.printed("doctor")
    facts = call.json("doctor")
    assert facts["cpus"] == cpus()  # those that this process may use
    assert facts["lbq"] == lbq.__version__
    assert facts["kernels"]["cpu"]["kernel"] == choose("cpu").kernel
    assert facts["packages"]["torch"]
    assert facts["engine"]["kernel"] in ("native", "NumPy")


def test_doctor_says_why_native_kernels_are_missing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LBQ_NATIVE", "off")
    assert "deployed networks: NumPy kernels (switched off by LBQ_NATIVE=off)" in call("doctor")[1]
    monkeypatch.setenv("LBQ_NATIVE", "0")
    assert call.refused("doctor") == "lbq: LBQ_NATIVE=0: it may be on or off\n"


def test_doctor_without_torch(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "training needs PyTorch: pip install torch" in call.printed("doctor")


@pytest.mark.parametrize("verb", ["train", "eval", "account", "analyze", "demo"])
def test_a_kernel_that_cannot_run_here_is_refused(
    call: Call,
    config_file: Path,
    demo_run: Demo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LBQ_KERNEL", "fused")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    subject = {"train": [str(config_file)], "demo": []}.get(verb, [str(demo_run[0])])
    device = [] if verb == "demo" else ["--device", "cpu"]
    err = call.refused(verb, *subject, *device)
    assert err == "lbq: LBQ_KERNEL=fused: the fused kernel needs a CUDA device, not cpu; or leave LBQ_KERNEL out\n"
    assert not list(tmp_path.iterdir())
    choice = choose("cpu")  # what a neuron on this device does beside one on a GPU
    assert choice.kernel != "fused"
    assert choice.reason.startswith("the fused kernel needs a CUDA device, not cpu; ")
    assert choose("cuda").kernel == "fused"


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]
)
def test_threads_that_wait_spin_shortly(given: dict[str, str], expected: str) -> None:
    """Unless the user wants it otherwise."""
    code = "import os, lbq.cli\ntry: lbq.cli.main(['--version'])\nfinally: print(os.environ.get('GOMP_SPINCOUNT'))"
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | given
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split()[-1] == expected


def test_version_and_help(call: Call) -> None:
    assert call("--version") == (0, f"lbq {lbq.__version__}\n", "")
    code, out, err = call()
    assert code == 2
    assert "demo" in out + err
    assert "account" in call.printed("--help")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "No such command 'dmeo'"),
        (["demo", "--epochs", "0"], "--epochs"),
        (["demo", "--epochs", "many"], "--epochs"),
        (["demo", "--seed", "-1"], "--seed"),
        (["demo", "--fast"], "No such option: --fast (see lbq demo --help)"),
        (
            ["train", "x", "--batch-size", "3"],
            "No such option: --batch-size; settings have no dashes: train.batch_size=...",
        ),
        (["train", "x", "--seed", "3"], "No such option: --seed; settings have no dashes: seed=..."),
        (["train", "x", "--fast"], "No such option: --fast (see lbq train --help)"),
        (["models", "exprot"], "Commands: export (see lbq models --help)"),
        (["train", "nothing.toml"], "No such file or directory; give a TOML file, such as configs/digits/lbq.toml"),
        (["train", "."], "cannot read .: Is a directory; give one of its files"),
        (
            ["export", "m.lbq", "-o", "x", "--format", "onnx", "--name", "n"],
            "--name is for --format c, c-step and wasm",
        ),
        (
            ["account", "m.lbq", "--technology", "no.toml"],
            "No such file or directory; give a TOML or JSON file of prices",
        ),
        (["demo", "--out", "."], ". exists already"),
        (["demo", "--out", "/dev/null/run"], "cannot write under"),
        (["account"], "give a run folder or a model.lbq, or --paper"),
        (["account", "--paper", "--limit", "3"], "--data, --limit, --device and --exit are for a network that is run"),
        (["account", "nowhere"], "nowhere does not exist: give a run folder, or a model.lbq"),
    ],
)
def test_mistakes_end_in_one_line_and_exit_code_2(call: Call, arguments: list[str], message: str) -> None:
    assert message in call.refused(*arguments)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stopped("stopped by SIGINT", 130)])
def test_interrupt_leaves_nothing_behind(
    error: BaseException, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise error

    monkeypatch.setattr(train.Trainer, "fit", interrupted)
    code, _, err = call("demo", "--out", str(tmp_path / "run"))
    assert code == 130
    assert err.endswith("lbq: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_while_it_is_loaded_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    usual = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs ignore it
    code = f"{usual}; import sys; sys.path.insert(0, {str(tmp_path)!r}); from lbq.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "lbq: interrupted\n")


@pytest.mark.parametrize("becomes", ["raise RecursionError from error", "raise ImportError('torch._C') from error"])
def test_an_interrupt_that_an_import_makes_another_error_of_is_one_line_too(becomes: str, tmp_path: Path) -> None:
    module = f"import signal\ntry:\n signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt as error:\n {becomes}"
    (tmp_path / "typer.py").write_text(module)
    usual = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs ignore it
    code = f"{usual}; import sys; sys.path.insert(0, {str(tmp_path)!r}); from lbq.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "lbq: interrupted\n")


def test_training_does_not_begin_after_an_interrupt_that_was_swallowed(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_interrupted", True)
    code, out, err = call("train", ROOT / "configs/digits/lbq.toml", *SMALL, "--out", tmp_path / "run")
    assert (code, out) == (130, "")
    assert err.endswith("lbq: interrupted\n")
    assert not (tmp_path / "run").exists()


SMALL = ["model.id=resnet8w4", "train.epochs=2", "train.batch_size=128", "train.warmup_epochs=0"]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("configs") / "family" / "small.toml"
    path.parent.mkdir()
    path.write_text("[augment]\nshift = 1\n")
    return path


def test_training_ends_with_a_word_on_layers_that_do_not_fire(call: Call, config_file: Path, tmp_path: Path) -> None:
    changes = [
        "model.id=resnet8w4",
        "train.epochs=1",
        "train.warmup_epochs=0",
        "neuron.name=burst_fixed",
        "neuron.step=40",
    ]
    code, _, err = call("train", str(config_file), *changes, "-o", str(tmp_path / "run"), "--device", "cpu")
    assert code == 0, err
    said = " ".join(err.split()).partition("hardly any neuron fires in ")[2]
    assert "layer3.0.sn1 (0 %), layer3.0.sn2 (0 %)" in said  # others too, by the number of threads
    assert "optim.neuron_decay_factor" in err


def test_train_and_eval(call: Call, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", str(config_file), *SMALL, "seed=3", "--device", "cpu"]
    code, out, err = call(*command, "--deterministic")
    assert code == 0
    folder = Path("runs") / "family-small-s3"
    assert f"run folder {folder}" in out
    for text in (
        "network  resnet8w4, T = 2",
        "data     dataset digits",
        "2 epochs x 9 steps of 128",
        "epoch 2/2",
        "samples/s",
    ):
        assert text in err
    assert "hardly any neuron fires" not in err
    assert load_config(folder).train.deterministic
    facts = call.json("eval", str(folder), "--device", "cpu")
    assert facts["images"] == 599
    assert facts["accuracy"] == facts["stored_accuracy"]
    out = call.printed("eval", str(folder), "--device", "cpu", "--precision", "fp64")
    assert ", in fp64, trained in fp32; the run's result says" in " ".join(out.split())
    assert out.endswith(" % in fp32\n")
    error = call.refused("eval", str(folder), "--device", "cpu", "--precision", "fp8")
    assert error == "lbq: precision must be one of fp32, fp64, bf16, fp16, got 'fp8'\n"
    percent = f"{facts['accuracy']:.2f} %"
    out = call.printed("eval", str(folder), "--device", "cpu")
    assert out == f"test accuracy {percent} on 599 images; the run's result says {percent}\n"

    assert "continue it with --resume auto" in call.refused(*command, "--deterministic")
    assert call.json(*command, "--deterministic", "--resume", "auto")["run"] == str(folder)
    error = call.refused(*command, "--resume", "auto")
    assert "differs from the configuration given (train.deterministic: true, false)" in error


def test_an_epoch_of_one_step_has_no_rate_yet(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainProgress()
    progress.step(0, 1, 1, 0.0)
    assert capsys.readouterr().err == ""
    progress.step(0, 1, 1, 10.0)
    assert capsys.readouterr().err.startswith("step 1: 10 samples/s, ")


@pytest.mark.parametrize("name", ["runs/{x}/model.lbq", "runs/[red]x/model.lbq"])
def test_a_bar_shows_any_path_as_it_is(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with CountProgress(name, 3) as progress:
        progress.advance(3)
    assert name in capsys.readouterr().err


def test_a_run_is_called_after_the_folder_of_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert default_name(Path("../small.toml")) == f"{tmp_path.name}-small"  # "..-small" would be hidden
    assert default_name(Path("family/small.toml")) == "family-small"
    assert default_name(Path("small.toml")) == "small"


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # torch says it too, where it is so
def test_a_precision_without_instructions(
    call: Call, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 takes forever on a CPU that only emulates it: training says so. Evaluation is in fp32 whatever a CPU has."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    folder = str(tmp_path / "run")
    half = ["train.precision=bf16", "train.epochs=1", "model.id=resnet8w1"]
    _, _, err = call("train", str(config_file), *SMALL, *half, "--device", "cpu", "--out", folder)
    assert "slow     this CPU has no instructions for bf16" in err
    assert " images, in fp32, trained in bf16; the run's result says" in call.printed("eval", folder, "--device", "cpu")
    facts = call.json("eval", folder, "--device", "cpu")
    assert (facts["precision"], facts["trained_in"]) == ("fp32", "bf16")
    assert facts["accuracy"] == facts["stored_accuracy"]
    out = call.printed("eval", folder, "--device", "cpu", "--timesteps", "1", "--precision", "fp32")
    assert ", in fp32, trained in bf16, at T = 1, trained at T = 2; the run's result says" in out
    facts = call.json("eval", folder, "--device", "cpu", "--precision", "bf16")
    assert facts["accuracy"] == json.loads(Path(folder, "result.json").read_text())["accuracy_as_trained"]
    Path(folder, "result.json").unlink()
    out = call.printed("eval", folder, "--device", "cpu")
    assert out.endswith(" images, in fp32, trained in bf16\n")


def test_a_warning_is_one_line(call: Call) -> None:
    call("--version")
    assert warnings.formatwarning("it failed\nframe #0: at::linear", UserWarning, "x.py", 1) == "lbq: it failed\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "maybe"], "--resume must be auto or never"),
        (["--device", "tpu"], "--device must be cpu or cuda"),
        (["data.name=cifar10", "data.root=nowhere"], "nowhere"),
        (["model.id=vgg11"], "model.id vgg11: layer 'maxpool': (512, 1, 1) is too small"),
    ],
)
def test_mistakes_in_training_leave_nothing_behind(
    call: Call, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in call.refused("train", str(config_file), *arguments)
    assert not list(tmp_path.iterdir())


def test_data_from_real_files(call: Call, tmp_path: Path) -> None:
    source = real("cifar10")
    out = call.printed("data", "cifar10", "--root", str(tmp_path / "c"), "--from", str(source))
    assert "50,000 + 10,000 images" in out
    assert call.json("data", "cifar10", "--root", str(tmp_path / "c"))["train"] == 50_000


def test_only_the_published_files_are_called_verified(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, source = tmp_path / "root", tmp_path / "mine"
    _, paths = idx_files(source)
    made = call.json("data", "mnist", "--root", str(root), "--from", str(source))
    assert (made["train"], made["test"], made["verified"]) == (30, 7, False)
    assert "not the published .gz files" in call.printed("data", "mnist", "--root", str(root))
    sums = [(hashlib.md5(path.read_bytes()).hexdigest(), path.stat().st_size) for path in paths]
    monkeypatch.setitem(idx.FILES, "mnist", tuple(sums))
    assert call.json("data", "mnist", "--root", str(root))["verified"] is True
    assert call.printed("data", "mnist", "--root", str(root)).rstrip().endswith(", verified")


def test_damaged_files_are_not_taken_over(call: Call, tmp_path: Path) -> None:
    _, paths = idx_files(tmp_path / "mine")
    paths[3].write_bytes(paths[3].read_bytes()[:-9])
    assert "get the official file again" in call.refused(
        "data", "mnist", "--root", str(tmp_path / "root"), "--from", str(tmp_path / "mine")
    )
    assert not (tmp_path / "root").exists()


def test_data_mistakes(call: Call, tmp_path: Path) -> None:
    text, archive = tmp_path / "notes.md", tmp_path / "mine.tar"
    text.write_text("# my notes")
    with tarfile.open(archive, "w") as file:
        file.add(text)
    for arguments, message in (
        (["svhn", "--root", str(tmp_path / "x")], "'svhn' cannot be prepared; known: cifar10, cifar100"),
        (["cifar10", "--root", str(tmp_path / "x"), "--from", str(tmp_path)], "CIFAR-10 is not in"),
        *(
            (["cifar10", "--root", str(tmp_path / "x"), "--from", str(mine)], f"{mine.name} cannot be read as .tar.gz")
            for mine in (text, archive)
        ),
    ):
        err = call.refused("data", *arguments)
        assert message in err
        assert "delete" not in err  # what a user gives stays the user's
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_takes_json(call: Call, command: str) -> None:
    assert "--json" in call.printed(command, "--help")
