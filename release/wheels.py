"""Wheels for others: one for each platform, with the library compiled by zig (the package `ziglang`), and checked.

    python release/wheels.py build [TARGET ...] [-o dist]    build and inspect; default the two of Linux, `all`: every one
    python release/wheels.py check DIST                      install this machine's wheel where there is no compiler, and run it

`make wheels` does both. release/emulate.py runs the wheel for the other processor of Linux.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "release" / "golden.py"
SOURCES = ("LICENSE", "MANIFEST.in", "README.md", "models", "pyproject.toml", "setup.py", "src")
GLIBC = (2, 17)


class Target(NamedTuple):
    """zig: its name of the platform. tag: that of wheels. library: its file. magic: bytes of the library, at an offset."""

    zig: str
    tag: str
    library: str
    offset: int
    magic: bytes


TARGETS = {
    "linux-x86_64": Target("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", "_lbq.so", 18, b"\x3e\x00"),
    "linux-aarch64": Target("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", "_lbq.so", 18, b"\xb7\x00"),
    "macos-arm64": Target("aarch64-macos.11.0", "macosx_11_0_arm64", "_lbq.so", 0, b"\xcf\xfa\xed\xfe\x0c\0\0\x01"),
    "macos-x86_64": Target("x86_64-macos.11.0", "macosx_11_0_x86_64", "_lbq.so", 0, b"\xcf\xfa\xed\xfe\x07\0\0\x01"),
    "windows-x86_64": Target("x86_64-windows-gnu", "win_amd64", "_lbq.pyd", 0, b"MZ"),
}
USUAL = ("linux-x86_64", "linux-aarch64")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def build(name: str, out: Path) -> Path:
    """Build the wheel of a target from a copy of the sources, so that nothing of another build gets into it."""
    target = TARGETS[name]
    variables = {**os.environ, "LBQ_WHEEL_TARGET": target.zig, "LBQ_WHEEL_PLATFORM": target.tag}
    variables.setdefault("SOURCE_DATE_EPOCH", "315532800")  # equal sources give equal wheels
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "lbq"
        shutil.copytree(ROOT, copy, ignore=not_a_source)
        code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
        command = [sys.executable, "-c", code, str(Path(place) / "dist")]
        done = subprocess.run(
            command, cwd=copy, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            sys.exit(f"{done.stdout}{name}: the wheel could not be built, see above")
        (made,) = Path(place, "dist").glob("*.whl")
        if wrong := problem(made, target):
            sys.exit(f"{name}: {made.name} {wrong}")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(made, out))


def not_a_source(folder: str, names: list[str]) -> set[str]:
    """What of a folder does not go into a wheel, for shutil.copytree."""
    if Path(folder) == ROOT:
        return {name for name in names if name not in SOURCES}
    return {name for name in names if name == "__pycache__" or name.endswith((".so", ".pyd", ".egg-info"))}


def problem(wheel: Path, target: Target) -> str | None:
    """What is wrong with a wheel, if anything: its name, its library, or what the library needs of the system."""
    if not wheel.name.endswith(f"-py3-none-{target.tag}.whl"):
        return f"is not tagged py3-none-{target.tag}"
    with zipfile.ZipFile(wheel) as archive:
        libraries = [n for n in archive.namelist() if re.search(r"\.(so|pyd|dll|dylib|lib)$", n)]
        if libraries != [f"lbq/native/{target.library}"]:
            return f"holds {libraries or 'no library'}, not lbq/native/{target.library} alone"
        data = archive.read(libraries[0])
    if not data[target.offset :].startswith(target.magic):
        return "holds a library for another processor or system"
    if source_hash().encode() not in data:
        return "holds a library that was built from other sources"
    return too_new(data) if "linux" in target.tag else None


def too_new(library: bytes) -> str | None:
    """Whether a library needs a C library later than the tag promises."""
    versions = {(int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)}
    latest = max(versions, default=(0, 0))
    return f"needs glibc {latest[0]}.{latest[1]}, its tag promises 2.17" if latest > GLIBC else None


def source_hash() -> str:
    """The hash of the C sources, as setup.py writes it into the library."""
    sys.path.insert(0, str(ROOT / "src"))
    try:
        from lbq.native import source_hash as of_sources
    finally:
        sys.path.remove(str(ROOT / "src"))
    return of_sources()


def this_machine() -> str:
    """The target of the machine that this runs on."""
    system = {"Linux": "linux", "Darwin": "macos", "Windows": "windows"}.get(platform.system(), platform.system())
    return f"{system}-{platform.machine().replace('AMD64', 'x86_64')}"


def wheel_for(name: str, folder: Path) -> Path:
    """The one wheel of a target in a folder."""
    if name not in TARGETS:
        sys.exit(f"there is no wheel for {name}: there are {', '.join(TARGETS)}")
    wheels = sorted(folder.glob(f"lbq-*-py3-none-{TARGETS[name].tag}.whl"))
    if len(wheels) != 1:
        sys.exit(f"{folder} has {len(wheels)} wheels for {name}, one is needed: python release/wheels.py build {name}")
    return wheels[0]


def check(folder: Path) -> None:
    """Install this machine's wheel into an empty environment, and run the published network where PATH has no compiler."""
    wheel = wheel_for(this_machine(), folder)
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        scripts = Path(place) / ("Scripts" if os.name == "nt" else "bin")
        python = str(scripts / ("python.exe" if os.name == "nt" else "python"))
        alone = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LBQ_", "CC"))}
        alone["PATH"] = str(scripts)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
        subprocess.run([*pip, str(wheel)], env=alone, cwd=place, check=True)
        subprocess.run([python, "-I", str(GOLDEN)], env=alone, cwd=place, check=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Build and check the wheels of lbq.")
    actions = parser.add_subparsers(dest="action", required=True)
    building = actions.add_parser("build")
    building.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)}, all; default {USUAL}")
    building.add_argument("-o", "--out", type=Path, default=ROOT / "dist")
    actions.add_parser("check").add_argument("dist", type=Path, nargs="?", default=ROOT / "dist")
    options = parser.parse_args(arguments)
    if options.action == "check":
        check(options.dist.resolve())
        return
    names = list(TARGETS) if options.targets == ["all"] else options.targets or list(USUAL)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"there is no target {unknown[0]}: there are {', '.join(TARGETS)}, and all")
    for name in names:
        path = build(name, options.out)
        say(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} ended with exit code {error.returncode}, see above")
