"""What an installed wheel must do: with no compiler on PATH, its own library runs the published network on every
instruction path of this CPU, and every level and logit of the golden vectors comes out. Exit code 1 where not."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

import lbq.engine
from lbq import native
from lbq.engine import published


def main() -> None:
    here, library = Path(lbq.__file__).parent, native.report()
    if "site" not in here.parent.name:
        sys.exit(f"lbq comes from {here}, which is no installation")
    if compilers := [name for name in ("cc", "gcc", "clang", "cl", "zig") if shutil.which(name)]:
        sys.exit(f"{compilers[0]} is on PATH: this must run where there is no compiler")
    if library.path is None or Path(library.path).parent != here / "native":
        sys.exit(f"the library of the wheel does not run: {library.reason or library.path}")
    if not (names := published.names()):
        sys.exit("the wheel holds no network")
    for name in names:
        for isa in native.isas():
            os.environ["LBQ_NATIVE_ISA"] = isa
            net = lbq.engine.load(name)
            counts = {net.verify(engine) for engine in ("auto", "bitplane")}
            sys.stdout.write(f"{platform.system()} {platform.machine()}, {isa}: {name}, {min(counts)} golden inputs\n")
            sys.stdout.flush()
    if "torch" in sys.modules:
        sys.exit("torch was imported, which a network does not need")


if __name__ == "__main__":
    main()
