"""Builds the native library: plain C, loaded by ctypes. Everything else about the package is in pyproject.toml.

`optional`: where it cannot be compiled the installation goes on, and the library says so when asked. A wheel for others is
not made without it: release/wheels.py names a target in LBQ_WHEEL_TARGET, zig compiles for it, and a failure ends the build.
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
NATIVE = ROOT / "src" / "lbq" / "native"
SOURCES = sorted(p for p in NATIVE.iterdir() if p.suffix in (".c", ".h"))
TARGET = os.environ.get("LBQ_WHEEL_TARGET", "")  # as zig names it, such as aarch64-linux-gnu.2.17
PLATFORM = os.environ.get("LBQ_WHEEL_PLATFORM", "")  # as wheels name it, such as manylinux_2_17_aarch64


def source_hash() -> str:
    """The same as `lbq.native.source_hash`, which a build must not import: it would need the dependencies."""
    digest = hashlib.sha256()
    for path in SOURCES:
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]


class BuildShared(build_ext):
    """A shared library has no PyInit function to export. One for a wheel fits every Python."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)

    def get_ext_filename(self, fullname: str) -> str:
        if not TARGET:
            return super().get_ext_filename(fullname)
        return os.path.join(*fullname.split(".")) + (".pyd" if "windows" in TARGET else ".so")

    def build_extension(self, ext: Extension) -> None:
        if not TARGET:
            super().build_extension(ext)
            return
        path = Path(self.get_ext_fullpath(ext.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        macros = [f"-D{name}={value}" for name, value in ext.define_macros]
        zig = [sys.executable, "-m", "ziglang", "cc", "-target", TARGET, "-shared", "-s", "-fno-sanitize=undefined"]
        self.spawn([*zig, *macros, *ext.extra_compile_args, *ext.sources, "-o", str(path)])
        for left in path.parent.glob("*.lib"):  # what only a linker of Windows would read
            left.unlink()


class BuildPython(build_py):
    """Published networks are installed too, so that `lbq.engine.load(NAME)` needs no network. A clone has them already."""

    def run(self) -> None:
        super().run()
        published = sorted((ROOT / "models").glob("*.lbq"))
        if published and not self.editable_mode:
            folder = Path(self.build_lib) / "lbq" / "engine" / "published"
            folder.mkdir(parents=True, exist_ok=True)
            for path in (*published, ROOT / "models" / "README.md"):
                shutil.copy(path, folder)


class Wheel(bdist_wheel):
    """ctypes loads the library, so that one wheel of a platform fits every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", PLATFORM) if PLATFORM else super().get_tag()


FLAGS = [
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]
extra = os.environ.get("LBQ_NATIVE_CFLAGS", "").split()  # for example -fsanitize=address

setup(
    ext_modules=[
        Extension(
            "lbq.native._lbq",
            sources=[p.relative_to(ROOT).as_posix() for p in SOURCES if p.suffix == ".c"],
            depends=[p.relative_to(ROOT).as_posix() for p in SOURCES],
            define_macros=[("LBQ_SOURCE_HASH", f'"{source_hash()}"')],
            extra_compile_args=[*FLAGS, "-Wall", "-Wextra", "-Wno-psabi", "-pthread", *extra],
            extra_link_args=["-pthread", *extra],
            optional=not TARGET,
        )
    ],
    cmdclass={"build_ext": BuildShared, "build_py": BuildPython, "bdist_wheel": Wheel},
)
