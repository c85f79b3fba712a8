"""Run the aarch64 wheel on an x86-64 machine with Debian: its golden vectors, in an aarch64 Python under qemu.

    python release/emulate.py [DIST]

It needs `qemu-user-static`, apt and a network. Python and its libraries are unpacked under build/aarch64; nothing is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from wheels import GOLDEN, ROOT, wheel_for

PLACE = ROOT / "build" / "aarch64"
PACKAGES = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libexpat1", "zlib1g", "libffi8",
    "libssl3", "libbz2-1.0", "liblzma5", "libuuid1", "libgcc-s1", "libstdc++6",
)  # fmt: skip
PLATFORMS = ("manylinux_2_17_aarch64", "manylinux2014_aarch64", "manylinux_2_27_aarch64", "manylinux_2_28_aarch64")
QEMU = "qemu-aarch64-static"


def unpack_python() -> Path:
    """An aarch64 Python of Debian, unpacked once; returns the folder that stands for its root."""
    root, state, debs = PLACE / "root", PLACE / "state", PLACE / "debs"
    if (root / "usr/bin/python3.11").exists():
        return root
    for folder in (state / "lists/partial", PLACE / "cache/archives/partial", debs):
        folder.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": PLACE / "cache",
    }
    apt = ["apt-get", "-qq", *(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *PACKAGES], cwd=debs, check=True)
    for package in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    return root


def main(dist: Path) -> None:
    wheel = wheel_for("linux-aarch64", dist)
    if missing := [tool for tool in (QEMU, "apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        sys.exit(f"{wheel.name} was not run: {missing[0]} is missing; on Debian: apt install qemu-user-static")
    root, site = unpack_python(), PLACE / "site"
    shutil.rmtree(site, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    for_it = ["--target", str(site), "--python-version", "3.11", *(f"--platform={name}" for name in PLATFORMS)]
    subprocess.run([*pip, *for_it, str(wheel)], check=True)
    python = [QEMU, "-L", str(root), str(root / "usr/bin/python3.11"), str(GOLDEN)]
    subprocess.run(python, env={"PYTHONPATH": str(site), "PATH": "/nowhere"}, check=True, executable=shutil.which(QEMU))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd[0]} ended with exit code {error.returncode}, see above")
