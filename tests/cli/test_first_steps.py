"""Where new users slipped: refusals name the cause and what to do, and inputs come in the forms that people have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import lbq.engine
from lbq.cli import heartbeat
from lbq.counting.classify import BATCH, classify, read_inputs
from lbq.counting.deployed import evaluate
from lbq.counting.inputs import golden_set, read_input
from lbq.engine.engine import thread_count
from lbq.errors import DataError
from lbq.graph.integer import IntegerNetwork
from lbq.native import cpus
from tests.support.commands import Call
from tests.support.small_nets import deployed, eventful, pixels, small


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of grey images, 8 x 8."""
    path = tmp_path_factory.mktemp("model") / "model.lbq"
    lbq.engine.save(path, deployed("resnet8w2", shape=(1, 8, 8)))
    return path


@pytest.fixture(scope="module")
def network(model: Path) -> IntegerNetwork:
    return lbq.engine.load(model).network


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with two images, an array and a text."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for i, name in enumerate(("a.png", "more/b.PNG")):
        Image.fromarray(pixels(8, 8, seed=i)).save(folder / name)
    np.save(folder / "c.npy", pixels(1, 8, 8, seed=2))
    (folder / "notes.txt").write_text("no image")
    return folder


# Refusals
# ---------------------------------------------------------------------------------------------------------------------


def test_an_unknown_command_lists_the_known_ones(call: Call) -> None:
    assert "'foo'. Commands: demo, train, sweep, eval, convert, data, deploy, run," in call.refused("foo")
    assert "Did you mean 'train'? Commands: demo" in call.refused("trian")


@pytest.mark.parametrize("options", [(), ("--timesteps", "2"), ("--bits", "4")])
def test_a_state_dict_is_no_deployed_network(call: Call, tmp_path: Path, options: tuple[str, ...]) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "cnn.pt")
    line = call.refused("deploy", tmp_path / "cnn.pt", "-o", tmp_path / "x.lbq", *options)
    assert "cnn.pt is neither a run folder nor a deployed network: if it holds weights of a network of yours" in line
    assert "lbq.deploy.deploy(net, ...)" in line


def test_run_points_to_predict_for_images_without_labels(call: Call, model: Path, images: Path) -> None:
    line = call.refused("run", model, images / "a.png")
    assert (
        f"a.png is an image, not a dataset's folder, nor a .npz with images and labels: `lbq predict MODEL {images}"
        in line
    )
    assert f"`lbq predict MODEL {images}` classifies them" in call.refused("run", model, images)
    assert "notes.txt is a file, not a dataset" in call.refused("run", model, images / "notes.txt")


def test_nir_says_first_that_it_needs_a_run(call: Call, model: Path, tmp_path: Path) -> None:
    line = call.refused("export", model, "--format", "nir", "-o", tmp_path / "x.nir")
    assert "NIR is written from a run folder, and" in line
    assert "give the run that it was deployed from" in line


def test_a_new_folder_is_named(call: Call, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "one.lbq"
    text = call.printed("deploy", model, "--timesteps", "1", "-o", out)
    assert f"{out.parent} is a new folder, made for it" in text
    assert "new folder" not in call.printed("deploy", model, "--timesteps", "1", "-o", out)


def test_run_of_arrays_needs_the_test_part_alone(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "own.lbq"
    options: dict[str, Any] = {"mean": [0.5], "std": [0.25], "facts": {"data": {"name": "arrays"}}}
    lbq.engine.save(path, lbq.deploy.deploy(small("resnet8w2", shape=(1, 8, 8)), (1, 8, 8), **options))
    assert f"{tmp_path} has no test.npz: put 'images' and 'labels' there" in call.refused("run", path, tmp_path)
    np.savez(tmp_path / "test.npz", images=pixels(4, 1, 8, 8), labels=np.arange(4))
    assert call.json("run", path, tmp_path)["images"] == 4


@pytest.mark.parametrize(
    ("images", "labels", "hint"),
    [
        (pixels(4, 1, 8, 8) / 255, [0] * 4, "np.rint(images * 255).astype(np.uint8)"),
        (pixels(5, 1, 8, 8), [1, 2, 3, 4, 5], "number them as in training, labels - 1, from 0 on"),
    ],
)
def test_float_images_and_labels_from_1_have_a_hint(
    call: Call, model: Path, tmp_path: Path, images: np.ndarray, labels: list[int], hint: str
) -> None:
    np.savez(tmp_path / "x.npz", images=images, labels=labels)
    assert hint in call.refused("run", model, tmp_path / "x.npz")
    if images.dtype != np.uint8:
        digits = call.refused("run", "digits_resnet8w16_t2_lbq", tmp_path / "x.npz")
        assert "np.rint(images * 16).astype(np.uint8)" in digits


def test_a_report_takes_the_analysis_beside_a_deployed_network(call: Call, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.lbq"
    copy.write_bytes(model.read_bytes())
    np.savez(tmp_path / "x.npz", images=pixels(4, 1, 8, 8), labels=[0, 1, 2, 3])
    assert call.json("report", copy, "-o", tmp_path / "r.html")["analyses"] == 0
    call("analyze", copy, "--data", tmp_path / "x.npz")
    assert call.json("report", copy, "-o", tmp_path / "r.html")["analyses"] == 1


def test_a_report_without_a_table_is_refused(call: Call, model: Path, tmp_path: Path) -> None:
    copy, out = tmp_path / "my model.lbq", tmp_path / "out"
    copy.write_bytes(model.read_bytes())
    for form in ("md", "latex", "csv", "svg"):
        said = call.refused("report", copy, "--format", form, "-o", out)
        assert (
            f"{copy} alone is only for the tour of html; lbq analyze '{copy}' first, then report what it wrote" in said
        )
        assert not out.exists()
    np.savez(tmp_path / "x.npz", images=pixels(4, 1, 8, 8), labels=[0, 1, 2, 3])
    call("analyze", copy, "--data", tmp_path / "x.npz")
    for form in ("md", "latex", "csv", "svg"):
        assert call.json("report", copy, "--format", form, "-o", tmp_path / form)["bytes"] > 0
    speed = tmp_path / "engine_speed.json"
    speed.write_text('{"sweeps": []}')
    assert "have figures and no tables, so none for --format md" in call.refused("report", speed, "--format", "md")


# Inputs
# ---------------------------------------------------------------------------------------------------------------------


def test_predict_takes_folders_and_arrays(call: Call, model: Path, network: IntegerNetwork, images: Path) -> None:
    names = [str(images / name) for name in ("a.png", "c.npy", "more/b.PNG")]
    with pytest.warns(UserWarning, match=r"1 of 4 files are left out, .*\(.txt\)"):
        answer = call.json("predict", model, images, "--top", "2")
    assert list(answer) == names
    assert answer == call.json("predict", model, *names, "--top", "2")
    assert all(len(classes) == 2 for classes in answer.values())
    x = pixels(BATCH + 3, 1, 8, 8)
    np.save(images / "many.npy", x)
    np.savez(images / "many.npz", images=x)
    logits = lbq.engine.load(model).run(x).logits
    for file in ("many.npy", "many.npz"):
        rankings = classify(lbq.engine.load(model), [images / file])
        assert rankings == classify(lbq.engine.load(model), str(images / file))
        assert list(rankings) == [f"{images / file}[{i}]" for i in range(len(x))]
        first = [classes[0]["logit"] for classes in rankings.values()]
        np.testing.assert_array_equal(first, logits.max(1))


def test_what_predict_leaves_out_is_said(call: Call, model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", pixels(1, 8, 8))
    for name in ("notes.txt", "x.TIF", "y.tif", "Makefile", ".hidden.png"):
        (tmp_path / name).write_text("")
    with pytest.warns(
        UserWarning, match=r"4 of 5 files are left out, as neither images nor .npy \(.tif, .txt, Makefile\)$"
    ):
        assert list(classify(lbq.engine.load(model), tmp_path)) == [str(tmp_path / "x.npy")]


def test_what_predict_cannot_read_is_named(call: Call, model: Path, network: IntegerNetwork, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty holds no images and no .npy files" in call.refused("predict", model, tmp_path / "empty")
    np.save(tmp_path / "flat.npy", pixels(3, 8, 8))
    line = call.refused("predict", model, tmp_path / "flat.npy")
    assert "flat.npy must be uint8 [1, 8, 8], or several of these with an axis more in front, not uint8 [3, 8" in line
    np.save(tmp_path / "none.npy", pixels(0, 1, 8, 8))
    np.savez(tmp_path / "none.npz", images=pixels(0, 1, 8, 8))
    for name in ("none.npy", "none.npz"):
        assert f"{name} has no samples" in call.refused("predict", model, tmp_path / name)
    (tmp_path / "text.npy").write_text("no array")
    line = call.refused("predict", model, tmp_path / "text.npy")
    assert line.endswith("text.npy cannot be read as .npy: it holds no array that NumPy saved, or one of objects\n")
    np.savez(tmp_path / "f.npz", images=np.zeros((2, 1, 8, 8)))
    with pytest.raises(DataError, match=r"np.rint\(images \* 255\)"):
        list(read_inputs(tmp_path / "f.npz", network))


def test_event_frames_by_folder(tmp_path: Path) -> None:
    net = eventful()
    frames = np.random.default_rng(0).integers(0, 4, (5, 3, 2, 4, 4), np.uint8)
    np.save(tmp_path / "one.npy", frames[0])
    np.savez(tmp_path / "all.npz", images=frames)
    logits = net.run(frames.swapaxes(0, 1)).logits.max(1)
    for path, expected in ((tmp_path / "one.npy", logits[:1]), (tmp_path / "all.npz", logits)):
        assert [classes[0]["logit"] for classes in classify(net, [path]).values()] == expected.tolist()
    with pytest.warns(UserWarning, match=r"1 of 2 files are left out, .*\(.npz\)"):
        assert classify(net, [tmp_path]) == classify(net, [tmp_path / "one.npy"])


def test_the_preprocessing_of_predict_is_a_function(network: IntegerNetwork, images: Path) -> None:
    np.testing.assert_array_equal(read_input(images / "a.png", network), pixels(8, 8, seed=0)[None])


# Threads and progress
# ---------------------------------------------------------------------------------------------------------------------


def test_python_and_the_commands_use_the_same_threads(call: Call, model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", images=pixels(4, 1, 8, 8))
    net = lbq.engine.load(model)
    assert call.json("run", model, tmp_path / "x.npz")["threads"] == thread_count() == min(cpus(), 256)
    assert evaluate(net, golden_set(net)).threads == thread_count()


def test_a_line_says_that_work_goes_on_where_nothing_was_written() -> None:
    lines: list[str] = []
    beat = heartbeat.Heartbeat(lines.append, seconds=0.0)
    beat.doing = lambda: "epoch 1/2: 3 of 7"

    def write(line: str) -> None:
        lines.append(line)
        beat.ended.set()

    beat.write = write
    beat.run()
    assert lines == ["still working, 0 s so far, epoch 1/2: 3 of 7\n"]
    lines.clear()
    quiet = heartbeat.Heartbeat(lines.append, seconds=60.0)
    quiet.ended.set()
    quiet.run()
    assert lines == []


def test_a_command_without_a_terminal_beats(
    call: Call, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every half minute by default; at once here."""
    assert heartbeat.SECONDS <= 30
    np.savez(tmp_path / "x.npz", images=pixels(40, 1, 8, 8))
    beats: list[heartbeat.Heartbeat] = []

    def beat(write: Any) -> heartbeat.Heartbeat:
        beats.append(kind(write, 0.001))
        return beats[-1]

    monkeypatch.setattr(heartbeat, "Heartbeat", beat)
    _, _, err = call("run", model, tmp_path / "x.npz", "--engine", "dense", "--against", "bitplane")
    assert "still working, 0 s so far" in err
    assert len(beats) == 1
    assert beats[0].ended.is_set()
    assert heartbeat.current is None
    monkeypatch.setenv("RANK", "1")  # another process of the same job
    call("doctor")
    assert len(beats) == 1


kind = heartbeat.Heartbeat
