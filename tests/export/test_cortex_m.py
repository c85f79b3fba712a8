"""Projects for microcontrollers: they build without a warning, run on emulated boards and give the engine's logits."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lbq import engine
from lbq.engine.file.reading import Golden
from lbq.errors import LbqError
from lbq.export import c99
from lbq.export.cortex_m import BOARDS, fitting_boards
from tests.support.commands import Call
from tests.support.paths import ROOT
from tests.support.small_nets import deployed

PACKAGES = {"arm-none-eabi-gcc": "gcc-arm-none-eabi libnewlib-arm-none-eabi", "qemu-system-arm": "qemu-system-arm"}


def make(folder: Path, board: str, *goals: str) -> str:
    for program, packages in PACKAGES.items():
        if shutil.which(program) is None:
            pytest.skip(f"no {program}: apt-get install {packages}")
    command = ["make", "-s", "-C", str(folder), f"BOARD={board}", "CFLAGS=-O1 -Werror", *goals]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "net.lbq"
    engine.save(path, deployed(shape=(3, 4, 4)))
    return path


@pytest.mark.parametrize(("board", "format", "cpu"), [("mps2-an386", "c", "v7E-M"), ("mps3-an547", "c-step", "v8.1-M")])
def test_a_project_runs_on_an_emulated_board(
    call: Call, model: Path, tmp_path: Path, board: str, format: str, cpu: str
) -> None:
    facts = call.json("export", model, "-o", tmp_path, "--format", format, "--target", "cortex-m", "--name", "eyes")
    assert facts["boards"] == [b.name for b in BOARDS]
    assert sorted(facts["files"]) == sorted(p.name for p in tmp_path.iterdir())
    printed = make(tmp_path, board, "check")
    assert "8 of 8 inputs give the expected logits" in printed
    counts = [int(n) for n in re.findall(r"^(\d+) emulated instructions", printed, re.M)]
    assert len(counts) == 8
    assert all(10_000 < n < 10_000_000 for n in counts)
    (stack,) = re.findall(r"(\d+) bytes of the stack", printed)
    assert 200 < int(stack) < 8192
    sizes = {row.split()[-1].split("/")[-1]: row.split() for row in make(tmp_path, board, "sizes").splitlines()[1:]}
    logits_bytes = 8 * engine.load(model).network.readout.shape[0]  # static too, as the stack is small
    assert 0 <= int(sizes["example.o"][2]) - facts["memory_bytes"] - logits_bytes < 8  # what aligns them
    assert facts["constant_bytes"] < int(sizes["eyes_data.o"][0]) < facts["constant_bytes"] + 4096
    done = subprocess.run(["arm-none-eabi-readelf", "-A", tmp_path / board / "eyes.o"], capture_output=True, text=True)
    assert cpu in done.stdout
    assert re.search(r"^\.stack +0x2", (tmp_path / board / "example.map").read_text(), re.M)


def test_a_board_of_ones_own_and_a_new_export(call: Call, model: Path, tmp_path: Path) -> None:
    """By the tutorial's two files: a Cortex-M0, which loads no word from an odd halfword, with 16 kB of memory."""
    page = (ROOT / "docs/tutorials/microcontroller.md").read_text()
    own = dict(re.findall(r"Its `([\w.]+)`:\n\n```text\n(.*?)```", page, re.DOTALL))
    assert len(own) == 2
    call("export", model, "-o", tmp_path, "--target", "cortex-m")
    for name, text in own.items():
        (tmp_path / name).write_text(text)
    call("export", model, "-o", tmp_path, "--target", "cortex-m")
    assert all((tmp_path / name).read_text() == text for name, text in own.items())
    printed = make(tmp_path, "microbit", "check")
    assert "8 of 8 inputs give the expected logits" in printed
    assert make(tmp_path, "microbit", "CFLAGS=-O1 -DLBQ_UNALIGNED=1", "check") != printed
    (tmp_path / "my_main.c").write_text('#include <stdio.h>\nint main(void) { puts("mine"); return 0; }\n')
    assert make(tmp_path, "microbit", "MAIN=my_main", "check") == "mine\n"


def test_a_board_that_is_not_known_says_what_to_write(call: Call, model: Path, tmp_path: Path) -> None:
    call("export", model, "-o", tmp_path, "--target", "cortex-m")
    for flags, message in (
        ([], "set CPU_ours in local.mk and write ours.ld"),
        (["CPU_ours=-mcpu=cortex-m3"], "ours.ld is not there"),
    ):
        command = ["make", "-s", "-C", str(tmp_path), "BOARD=ours", *flags, "ours/example.elf", "-n"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert message in done.stderr


def test_other_flags_build_all_objects_again(call: Call, model: Path, tmp_path: Path) -> None:
    call("export", model, "-o", tmp_path, "--target", "cortex-m")
    folder = tmp_path / "mps2-an386"

    def made(*flags: str) -> list[str]:
        """The objects that are compiled."""
        before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.o")}
        make(tmp_path, folder.name, *flags, "sizes")
        return sorted(p.name for p in folder.glob("*.o") if p.stat().st_mtime_ns != before.get(p.name))

    objects = ["board.o", "example.o", "model.o", "model_data.o"]
    assert [made(), made(), made("CFLAGS=-O0"), made("CFLAGS=-O0")] == [objects, [], objects, []]
    make(tmp_path, folder.name, "clean")
    assert not folder.exists()


def test_the_timer_counts_emulated_instructions(call: Call, model: Path, tmp_path: Path) -> None:
    call("export", model, "-o", tmp_path, "--target", "cortex-m")
    (tmp_path / "example.c").write_text(
        '#include <stdio.h>\n#include "board.h"\nint main(void)\n{\n    uint32_t n = 1000000;\n    board_start();\n'
        '    __asm volatile("1: subs %0, #1\\n bne 1b" : "+r"(n) : : "cc");\n'
        '    printf("%u\\n", (unsigned)board_instructions());\n    return 0;\n}\n'
    )
    (counted,) = make(tmp_path, "mps2-an386", "check").split()
    assert abs(int(counted) - 2_000_000) < 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "cortexm"], "--target 'cortexm' is not known; did you mean 'cortex-m'?"),
        (["--target", "cortex-m", "--format", "onnx"], "--target cortex-m is for --format c and c-step, not onnx"),
        (["--target", "cortex-m", "--format", "nir"], "--target cortex-m is for --format c and c-step, not nir"),
        (["--target", "cortex-m", "--name", "board"], "--name board is the name of a file beside it"),
        (["--name", "eyes_net"], "--name eyes_net: a network called eyes has files of this name: give another one"),
    ],
)
def test_what_has_no_project_is_one_line(
    call: Call, model: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert call.refused("export", model, "-o", tmp_path / "c", *arguments).startswith(f"lbq: {message}")
    assert not (tmp_path / "c").exists()


def test_names_that_differ_in_case_alone_have_folders_of_their_own(call: Call, model: Path, tmp_path: Path) -> None:
    call("export", model, "-o", tmp_path, "--name", "Eyes")
    error = call.refused("export", model, "-o", tmp_path, "--name", "eyes")
    assert error == f"lbq: --name eyes: {tmp_path} holds a network called Eyes: give another name or folder\n"
    assert not (tmp_path / "eyes.c").exists()
    call("export", model, "-o", tmp_path, "--name", "Eyes")


def test_golden_inputs_take_flash_too(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8,000 inputs of 48 bytes, with 5 logits of 8 bytes each, are 704 kB; 60,000 are 5.3 MB."""
    net = engine.load(model)

    def export(count: int) -> Any:
        net.golden = Golden(np.ones((count, 3, 4, 4), np.uint8), np.ones((count, 5), np.int64), {})
        monkeypatch.setattr(c99, "load", lambda path: net)
        return c99.export(model, tmp_path, target="cortex-m")

    assert export(8)["boards"] == [b.name for b in BOARDS]
    assert export(8000)["boards"] == ["mps2-an386"]
    with pytest.raises(LbqError, match="constants and golden inputs of 5,.* do not fit mps2-an386"):
        export(60_000)


def test_a_network_that_fits_one_board_or_none() -> None:
    assert fitting_boards(1 << 20, 0) == ["mps2-an386"]
    with pytest.raises(
        LbqError, match="inputs of 17,448,464 bytes .* do not fit mps2-an386, .* give a smaller network"
    ):
        fitting_boards(17_448_464, 534_528)
