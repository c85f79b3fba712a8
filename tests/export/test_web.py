"""Networks in a browser: the engine's integers in Chromium, pictures as in lbq predict, drawn digits, keys, a phone's width."""

from __future__ import annotations

import base64
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lbq import engine
from lbq.counting.inputs import open_data, read_input
from lbq.counting.operations import Counter
from lbq.engine import Network
from lbq.export import web
from lbq.neuron import LIF, Ternary
from tests.support import browser
from tests.support.browser import Page
from tests.support.commands import Call
from tests.support.paths import ROOT
from tests.support.small_nets import deployed, eventful, eventful_transformer, pixels, unit_events

DIGITS = ROOT / "models" / "digits_resnet8w16_t2_lbq.lbq"
CIFAR = ROOT / "models" / "cifar10_resnet8w16_t2_lbq.lbq"
IMAGES = 100
LEAST_READ_RIGHT = 45  # of 50 recordings


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    pytest.importorskip("ziglang", reason="no zig: pip install ziglang to test WebAssembly")
    path = tmp_path_factory.mktemp("web") / "digits.html"
    with browser.opened() as tab:
        web.export_page(DIGITS, path)
        tab.resize(1280)
        tab.open(path)
        for _ in range(200):
            if tab.run("Boolean(globalThis.lbq)"):
                break
            time.sleep(0.05)
        yield tab


def bytes_of(data: bytes) -> str:
    """JavaScript for a Uint8Array of these bytes."""
    return f"Uint8Array.from(atob('{base64.b64encode(data).decode()}'), c => c.charCodeAt(0))"


def compare(page: Page, network: str, net: Network, x: np.ndarray[Any, Any]) -> None:
    """Every logit and level of each input, and the accumulations, are the engine's."""
    out = net.run(x, "dense", trace=True)
    assert out.levels is not None
    inputs = x if net.network.static else x.swapaxes(0, 1)
    given = bytes_of(np.ascontiguousarray(inputs).tobytes())
    results = page.run(
        f"""{{ const all = {given}, size = {network}.inputBytes;
          Array.from({{length: all.length / size}}, (_, i) => ({{
            logits: {network}.run(all.slice(i * size, (i + 1) * size)),
            levels: Object.fromEntries({network}.facts.layers.map((layer, j) => [layer.name, Array.from({network}.levels(j))])),
            sum: {network}.accumulations().reduce((sum, s) => sum + s.accumulations, 0)}})) }}"""
    )
    assert [result["logits"] for result in results] == out.logits.tolist()
    for layer, levels in out.levels.items():
        mine = np.array([result["levels"][layer] for result in results])
        np.testing.assert_array_equal(mine, levels.transpose(1, 0, 3, 4, 2).reshape(len(mine), -1), layer)
    counter = Counter(net.network, "exact")
    counter.add(out.levels)
    account = counter.account()
    assert sum(result["sum"] for result in results) == round(account.executed * len(results))
    assert page.run(f"{network}.facts.pixelProducts") == account.fp_macs
    assert page.run(f"{network}.facts.annProducts") == (
        account.ann_macs if net.network.static else net.network.valid_macs
    )


def test_a_hundred_images_give_the_engines_integers(page: Page) -> None:
    net = engine.load(DIGITS)
    x = open_data(net.network, None).read(0, IMAGES)
    logits = page.run(
        f"{{ const all = {bytes_of(x.tobytes())}; "
        "Array.from({length: all.length / 64}, (_, i) => lbq.network.run(all.slice(64 * i, 64 * i + 64))) }"
    )
    assert logits == net.run(x).logits.tolist()
    compare(page, "lbq.network", net, x[:3])


def test_event_networks_with_pools_attention_and_gates_run_too(page: Page, tmp_path: Path) -> None:
    net = eventful_transformer()
    engine.save(tmp_path / "events.lbq", net)
    web.export_module(tmp_path / "events.lbq", tmp_path / "out")
    module = (tmp_path / "out" / "model.wasm").read_bytes()
    page.run(f"lbq.load({bytes_of(module)}).then(network => {{ lbq.events = network; }})")
    compare(page, "lbq.events", net, pixels(net.network.timesteps, 3, *net.network.input_shape) // 64)
    shown = page.run("lbq.events.facts.layers.filter(layer => layer.gate).map(layer => layer.name)")
    assert shown == list(net.network.gate_names)
    assert shown


def test_networks_with_a_neuron_on_the_scores_run_too(page: Page, tmp_path: Path) -> None:
    net = deployed("qkformer3x32-scores", shape=(3, 16, 16))
    engine.save(tmp_path / "scores.lbq", net)
    web.export_module(tmp_path / "scores.lbq", tmp_path / "out")
    module = (tmp_path / "out" / "model.wasm").read_bytes()
    page.run(f"lbq.load({bytes_of(module)}).then(network => {{ lbq.scores = network; }})")
    compare(page, "lbq.scores", net, pixels(3, 3, 16, 16))
    kinds = page.run("lbq.scores.facts.products.map(product => product.kind)")
    assert kinds == ["scores", "values", "gate", "gate"]


def test_binary_and_ternary_networks_count_unit_events(page: Page, tmp_path: Path) -> None:
    """Also behind an average, where events of both signs meet in a sum, and behind pools that overlap."""
    nets = [deployed("resnet8w2", neuron, shape=(3, 8, 8)) for neuron in ("lif", "ternary")]
    nets += [unit_events(LIF), unit_events(Ternary)]
    for net in nets:
        engine.save(tmp_path / "unit.lbq", net)
        web.export_module(tmp_path / "unit.lbq", tmp_path / "out")
        module = (tmp_path / "out" / "model.wasm").read_bytes()
        page.run(f"lbq.load({bytes_of(module)}).then(network => {{ lbq.unit = network; }})")
        compare(page, "lbq.unit", net, pixels(3, *net.network.input_shape))
        assert page.run("lbq.unit.facts.unitEvents") is True
    assert page.run("lbq.network.facts.unitEvents") is False


def test_recorded_strokes_are_read(page: Page) -> None:
    recordings = json.loads((Path(__file__).parent / "strokes.json").read_text())
    strokes = json.dumps([recording["strokes"] for recording in recordings])
    answers = page.run(f"{strokes}.map(strokes => lbq.network.best(lbq.network.run(lbq.digit(strokes))))")
    right = [answer == recording["label"] for answer, recording in zip(answers, recordings, strict=True)]
    assert len(right) == 50
    assert sum(right) >= LEAST_READ_RIGHT
    assert page.run("lbq.digit([]).every(v => v === 0) && lbq.digit([[[5, 5]]]).some(v => v > 0)") is True


def pictures(folder: Path) -> list[Path]:
    """Larger, smaller, wide, high, grey, with a palette, with transparency, turned by EXIF, and of the very size."""
    noise = np.random.default_rng(0).integers(0, 256, (97, 140, 4), np.uint8)
    noise[..., 3] |= 1  # where nothing at all shows, a decoder may forget the colour
    rgb = Image.fromarray(noise[..., :3])
    turned = rgb.getexif()
    turned[0x0112] = 6
    rgb.save(folder / "turned.png", exif=turned)
    for name, image in {
        "small": rgb.crop((0, 0, 5, 7)),
        "wide": rgb.crop((0, 0, 140, 33)),
        "high": rgb.crop((0, 0, 21, 97)),
        "same": rgb.crop((3, 4, 35, 36)),
        "grey": rgb.convert("L"),
        "palette": rgb.quantize(16),
        "transparent": Image.fromarray(noise),
    }.items():
        image.save(folder / f"{name}.png")
    return sorted(folder.iterdir())


def test_pictures_give_the_bytes_of_predict(page: Page, tmp_path: Path) -> None:
    for model in (DIGITS, CIFAR):
        network = engine.load(model).network
        facts = json.dumps(web.image_facts(network))
        for path in pictures(tmp_path):
            file = f"new File([{bytes_of(path.read_bytes())}], 'a', {{type: 'image/png'}})"
            mine = page.run(f"lbq.decoded({file}).then(p => Array.from(lbq.pixelsOf(p, {facts})))")
            np.testing.assert_array_equal(mine, read_input(path, network).reshape(-1), f"{path.name}, {model.name}")


def test_what_is_no_picture_is_refused_in_a_line(page: Page) -> None:
    page.run("lbq.take(new File(['text'], 'a.txt', {type: 'text/plain'}))")
    problem = page.run("document.getElementById('problem').textContent")
    assert problem.startswith("a.txt: this file is not a picture that the browser can read")
    page.run("document.getElementById('clear').click()")
    assert page.run("document.getElementById('problem').hidden") is True
    message = "Promise.resolve().then(() => lbq.network.run(new Uint8Array(3))).catch(e => e.message)"
    assert page.run(message) == "the network reads a Uint8Array of 64 bytes, not 3"
    message = "Promise.resolve().then(() => lbq.network.run(new Uint8Array(64).fill(17))).catch(e => e.message)"
    assert "values from 0 to 16" in page.run(message)
    for given, name in {"new Float32Array(64)": "Float32Array", "[...Array(64)]": "Array", "null": "Null"}.items():
        message = f"Promise.resolve().then(() => lbq.network.run({given})).catch(e => e.message)"
        assert page.run(message) == f"the network reads a Uint8Array of 64 bytes, not something of type {name}"
    last = len(engine.load(DIGITS).network.layers) - 1
    for index in ("99", "-1", "undefined", "0.5"):
        message = f"Promise.resolve().then(() => lbq.network.levels({index})).catch(e => e.message)"
        assert page.run(message) == f"the network has layers 0 to {last}, and none of index {index}: see facts.layers"
    empty = bytes_of(b"\0asm\1\0\0\0")
    assert "is not a network" in page.run(f"lbq.load({empty}).catch(e => e.message)")


def test_a_digit_drawn_with_keys(page: Page) -> None:
    """A seven: a bar, then down to the left."""
    before = page.run("document.getElementById('pad').toDataURL()")
    page.run("document.getElementById('theme').focus()")
    page.press("Tab")
    assert page.run("document.activeElement.id") == "pad"
    assert page.run("document.getElementById('pad').toDataURL()") != before  # the pen shows where it is
    for key, times in [("Delete", 1), ("ArrowUp", 8), ("ArrowLeft", 5), (" ", 1), ("ArrowRight", 10), (" ", 1),
                       ("ArrowDown", 16), ("ArrowLeft", 6), (" ", 1), ("Enter", 1)]:  # fmt: skip
        page.run(
            f"for (let i = 0; i < {times}; i++) document.activeElement.dispatchEvent(new KeyboardEvent('keydown', "
            f"{{key: {key!r}, bubbles: true, cancelable: true}}))"
        )
    assert page.run("document.getElementById('answer').textContent") == "7"


def test_one_point_is_seen_on_the_pad(page: Page) -> None:
    """Also on the keyboard, where a line begins with it."""
    pad = "document.getElementById('pad')"
    page.run(f"document.getElementById('clear').click(); {pad}.blur()")  # the pen itself is not drawn
    before = page.run(f"{pad}.toDataURL()")
    page.run(f"{pad}.dispatchEvent(new KeyboardEvent('keydown', {{key: ' ', cancelable: true}}))")
    assert page.run(f"{pad}.toDataURL()") != before
    assert page.run("document.getElementById('answer').textContent") != "…"


def test_a_black_picture_has_an_answer_and_nothing_has_none(page: Page, tmp_path: Path) -> None:
    answer = "document.getElementById('answer').textContent"
    page.run("document.getElementById('clear').click()")
    assert page.run(answer) == "…"
    Image.new("L", (9, 9)).save(tmp_path / "black.png")
    page.run(f"lbq.take(new File([{bytes_of((tmp_path / 'black.png').read_bytes())}], 'black.png'))")
    assert page.run(answer) == str(engine.load(DIGITS).run(np.zeros((1, 1, 8, 8), np.uint8)).predictions[0])


def test_a_digit_drawn_by_touch_and_what_is_shown(page: Page) -> None:
    page.resize(390, 844)
    page.run("document.getElementById('clear').click(); scrollTo(0, 0)")
    box = page.run(
        "(({left, top, width}) => [left, top, width])(document.getElementById('pad').getBoundingClientRect())"
    )
    for i in range(9):  # a one
        point = {"x": box[0] + box[2] / 2, "y": box[1] + box[2] * (0.15 + 0.08 * i)}
        page.call("Input.dispatchTouchEvent", type="touchMove" if i else "touchStart", touchPoints=[point])
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 200)))")
    assert page.run("document.getElementById('answer').textContent") == "1"
    assert page.run("document.scrollingElement.scrollWidth") <= 390
    assert page.run("document.getElementById('time').textContent").endswith(" ms")
    layers = engine.load(DIGITS).network.layers
    assert page.run("document.querySelectorAll('#layers canvas[aria-label]').length") == len(layers)
    picture = "document.getElementById('layer-1').toDataURL()"
    looks = [page.run(picture)]
    for value in ("1", "0", "2"):  # the second timestep, then single bits
        name = "step" if len(looks) == 1 else "view"
        page.run(f"document.querySelector('input[name={name}][value=\"{value}\"]').click()")
        looks.append(page.run(picture))
    assert len(set(looks)) == 4
    page.resize(1280)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("length", [37, 200])
def test_long_names_of_classes_leave_room_for_the_bars(page: Page, width: int, length: int) -> None:
    page.resize(width, 844)
    show = "['0', 'levels'].forEach(view => document.querySelector(`input[name=view][value='${view}']`).click())"
    page.run(
        f"globalThis.kept = lbq.network.classes; lbq.network.classes = kept.map(() => 'w'.repeat({length})); {show}"
    )
    inside = page.run(
        "[...document.getElementById('bars').children].map(e => e.getBoundingClientRect().right)"
        ".every(right => right <= document.getElementById('bars').getBoundingClientRect().right + 0.5)"
    )
    room = page.run("getComputedStyle(document.getElementById('bars')).gridTemplateColumns.split(' ').map(parseFloat)")
    page.run(f"lbq.network.classes = kept; {show}")
    page.resize(1280)
    assert inside
    assert room[1] >= 60  # pixels


def test_it_loads_nothing_and_has_no_errors(page: Page) -> None:
    """The last of this page: whatever was done with it before."""
    assert all(address.startswith(("file:", "data:", "blob:")) for address in page.requests)
    assert page.errors == []


def test_the_command(call: Call, page: Page, tmp_path: Path) -> None:
    facts = call.json("export", DIGITS, "--format", "wasm", "-o", tmp_path, "--name", "digits")
    assert facts["files"] == ["network.js", "pictures.js", "digits.wasm"]
    module = (tmp_path / "digits.wasm").read_bytes()
    assert facts["bytes"] == len(module) < 150e3
    inline = page.run("document.getElementById('module').textContent")
    assert base64.b64decode(inline) == module  # the same network, the same bytes


def test_mistakes_end_in_one_line(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.save(tmp_path / "events.lbq", eventful())
    line = call.refused("export", tmp_path / "events.lbq", "--format", "web", "-o", tmp_path / "a.html")
    assert "a page takes square images of 1 or 3 channels: use --format wasm" in line
    for name in ("model.wasm", "network.js"):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_text("mine")
        line = call.refused("export", DIGITS, "--format", "wasm", "-o", folder)
        assert "was not written by lbq export" in line
        assert (folder / name).read_text() == "mine"
    monkeypatch.setattr(web, "compiler", lambda: ["false"])
    assert "zig could not compile the network" in call.refused(
        "export", DIGITS, "--format", "web", "-o", tmp_path / "a.html"
    )
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    line = call.refused("export", DIGITS, "--format", "web", "-o", tmp_path / "a.html")
    assert "WebAssembly needs the compiler zig, which is not installed: pip install ziglang" in line
    assert not (tmp_path / "a.html").exists()
