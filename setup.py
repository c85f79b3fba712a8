"""Builds the native library: plain C, loaded by ctypes. Everything else about the package is in pyproject.toml.

`optional`: where it cannot be compiled the installation goes on, and the library says so when asked.
"""

import hashlib
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path(__file__).parent / "src" / "lbq" / "native"
SOURCES = sorted(p for p in NATIVE.iterdir() if p.suffix in (".c", ".h"))


def source_hash() -> str:
    """The same as `lbq.native.source_hash`, which a build must not import: it would need the dependencies."""
    digest = hashlib.sha256()
    for path in SOURCES:
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]


class BuildShared(build_ext):
    """A shared library has no PyInit function to export."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)


FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
extra = os.environ.get("LBQ_NATIVE_CFLAGS", "").split()  # for example -fsanitize=address

setup(
    ext_modules=[
        Extension(
            "lbq.native._lbq",
            sources=[p.relative_to(Path(__file__).parent).as_posix() for p in SOURCES if p.suffix == ".c"],
            depends=[p.relative_to(Path(__file__).parent).as_posix() for p in SOURCES],
            define_macros=[("LBQ_SOURCE_HASH", f'"{source_hash()}"')],
            extra_compile_args=[*FLAGS, "-Wall", "-Wextra", "-Wno-psabi", "-pthread", *extra],
            extra_link_args=["-pthread", *extra],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildShared},
)
