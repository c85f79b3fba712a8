"""Fixtures of several files.

Without a CUDA device the Triton kernels run under Triton's interpreter, which must be asked for before its import.
"""

import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from lbq import native
from tests.support.commands import Call
from tests.support.hosting import Host

settings.register_profile("lbq", deadline=None)  # a busy machine is no failure
settings.load_profile("lbq")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: the garbage collector need not look through them again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def device_code_runs_faster() -> Iterator[None]:
    """Triton's interpreter without what takes most of its time and changes nothing: coverage, which still traces what
    starts it, and redefining Triton's language, once in a launch for each module instead of for each function call."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    launched, redefine = interpreter.GridExecutor.__call__, getattr(interpreter, "_patch_lang", None)
    redefined: set[str] = set()  # by functions of these modules, in this launch

    def redefine_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module in redefined:
            return None  # device functions do not restore what they redefine: the launch does, which comes first
        redefined.add(module)
        return redefine(function)  # type: ignore[misc]

    def launch(*arguments: Any, **options: Any) -> Any:
        redefined.clear()
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return launched(*arguments, **options)
        finally:
            sys.settrace(tracer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        if redefine is not None:  # which is Triton's own affair
            patch.setattr(interpreter, "_patch_lang", redefine_once)
        yield


@pytest.fixture(params=native.isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction path of the native library that this CPU has, in use."""
    monkeypatch.setenv("LBQ_NATIVE_ISA", request.param)
    return str(request.param)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(capsys)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("no_proxy", "*")
    with Host() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.release.set()
        server.shutdown()
        thread.join()
