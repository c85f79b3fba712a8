"""What `lbq doctor` reports: versions, devices, and which kernel will run and why. Works without torch."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict
from typing import Any

from lbq import native
from lbq._version import __version__

PACKAGES = ("numpy", "safetensors", "typer", "rich", "torch", "triton")


def examine() -> dict[str, Any]:
    """Facts about this installation and machine, ready for JSON."""
    return {
        "lbq": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpus": native.cpus(),
        "packages": {name: _version(name) for name in PACKAGES},
        "engine": _engine_facts(),
        **_torch_facts(),
    }


def _engine_facts() -> dict[str, str]:
    """Which kernels run deployed networks."""
    library = native.report()
    if library.reason is not None:
        return {"kernel": "NumPy", "reason": library.reason}
    extensions = [name for name in library.features if name not in native.ISAS]
    other_isas = [name for name in library.features if name in native.ISAS and name != library.isa]
    reason = f"{library.isa}" + (f" with {', '.join(extensions)}" if extensions else "")
    return {"kernel": "native", "reason": reason + (f"; also {', '.join(other_isas)}" if other_isas else "")}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
    except ModuleNotFoundError:
        return {"devices": [], "kernels": {}, "advice": ["training needs PyTorch: pip install torch"]}
    from lbq.native.choose import choose

    threads = torch.get_num_threads()
    devices = [{"name": "cpu", "detail": f"{threads} thread{'s' * (threads > 1)}"}]
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        detail = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        devices.append({"name": f"cuda:{i}", "detail": detail})
    kinds = sorted({d["name"].split(":")[0] for d in devices})
    return {"devices": devices, "kernels": {kind: asdict(choose(kind)) for kind in kinds}, "advice": []}
