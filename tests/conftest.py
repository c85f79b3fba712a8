"""Fixtures of several files.

Without a CUDA device the Triton kernels run under Triton's interpreter, which must be asked for before its import.
"""

import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.hosting import Host

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def device_code_is_not_traced() -> Iterator[None]:
    """Coverage would double the time of code that Triton's interpreter runs; what starts it is traced."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    launched = interpreter.GridExecutor.__call__

    def launch(*arguments: Any, **options: Any) -> Any:
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return launched(*arguments, **options)
        finally:
            sys.settrace(tracer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        yield


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
