"""Which kernel runs, and why: by name, by device, and by what is installed. No kernel runs here."""

from __future__ import annotations

import pytest

from lbq import native
from lbq.errors import ConfigError
from lbq.native import choose
from lbq.native.choose import use


def test_a_kernel_is_asked_for_as_long_as_its_own_use_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LBQ_KERNEL", "fused")
    first, second, third = use("reference"), use("native"), use("reference")
    for one in (first, second, third):
        one.__enter__()
    for one, then in ((third, "native"), (first, "native"), (second, "fused")):
        one.__exit__(None, None, None)
        assert choose.requested() == then


def test_the_choice_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LBQ_KERNEL", raising=False)
    monkeypatch.setattr(choose, "TRITON", True)
    assert choose.choose("cuda").kernel == "fused"
    monkeypatch.setattr(choose, "TRITON", False)
    assert choose.choose("cuda").kernel == "reference"
    assert "triton" in choose.choose("cuda").reason
    assert choose.choose("mps").kernel == "reference"
    monkeypatch.setenv("LBQ_KERNEL", "reference")
    assert choose.choose("cuda").reason == "asked for by name"
    monkeypatch.setenv("LBQ_KERNEL", "native")
    assert choose.choose("cpu").kernel == ("native" if native.library() is not None else "reference")
    for device in ("cuda", "mps"):
        found = choose.choose(device)
        assert found.kernel == "reference"
        assert f"the native kernel is for CPUs, not {device}" in found.reason
        with pytest.raises(
            ConfigError, match=f"LBQ_KERNEL=native: the native kernel is for CPUs, not {device}; or leave"
        ):
            choose.check(device)
    monkeypatch.setattr(native, "report", lambda: native.Report(None, (), None, "none was built"))
    assert choose.choose("cpu").kernel == "reference"
    monkeypatch.setenv("LBQ_KERNEL", "fusd")
    with pytest.raises(ConfigError, match=r"LBQ_KERNEL: unknown kernel 'fusd'.*fused"):
        choose.choose("cpu")
    with pytest.raises(ConfigError, match="unknown kernel"), use("fast"):
        pass
