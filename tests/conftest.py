"""Fixtures of several files.

Without a CUDA device the Triton kernels run under Triton's interpreter, which must be asked for before its import.
"""

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.hosting import Host

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


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
