"""The program on docs/howto/serve.md, as a user starts it: 200 requests from 8 clients, and what it refuses."""

from __future__ import annotations

import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lbq import engine
from lbq.counting.inputs import read_input
from tests.support.paths import ROOT
from tests.support.small_nets import deployed, pixels

pytest.importorskip("fastapi", reason="FastAPI is not installed: pip install '.[serve]'")
uvicorn: Any = pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install '.[serve]'")
PROGRAM = (ROOT / "docs/howto/serve.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
CLIENTS, REQUESTS = 8, 200
ARRAY, PNG = "application/octet-stream", "image/png"


class Server(SimpleNamespace):
    """port: where it listens. net: what it serves."""

    def ask(self, body: bytes, kind: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/predict", body, {"content-type": kind})
        answer = connection.getresponse()
        value = json.loads(answer.read())
        connection.close()
        return answer.status, value


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("serve") / "model.lbq"
    engine.save(path, deployed())
    names: dict[str, Any] = {"__name__": "serve"}
    with pytest.MonkeyPatch.context() as patch, socket.socket() as listening:
        patch.setenv("LBQ_MODEL", str(path))
        exec(compile(PROGRAM, "serve.py", "exec"), names)
        listening.bind(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(names["app"], log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not running.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Server(port=listening.getsockname()[1], net=engine.load(path), path=path)
        running.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("threads", ["0", "x", "257", ""])
def test_threads_that_are_none_are_refused_at_once(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LBQ_THREADS", threads)
    with pytest.raises(SystemExit, match=f"serve: LBQ_THREADS must be a whole number from 1 to 256, got '{threads}'"):
        exec(compile(PROGRAM, "serve.py", "exec"), {"__name__": "serve"})


def png(image: np.ndarray[Any, Any]) -> bytes:
    from PIL import Image

    data = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(data, "png")
    return data.getvalue()


def test_every_client_gets_its_own_answer(server: Server, tmp_path: Path) -> None:
    images = pixels(REQUESTS, 3, 8, 8, seed=3)
    expected = server.net.run(images)

    def ask(i: int) -> Any:
        body, kind = (png(images[i]), PNG) if i % 2 else (images[i].tobytes(), ARRAY)
        return server.ask(body, kind)

    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(ask, range(REQUESTS)))
    assert {status for status, _ in answers} == {200}
    assert [answer["logits"] for _, answer in answers] == expected.logits.tolist()
    assert [answer["index"] for _, answer in answers] == expected.predictions.tolist()
    assert max(answer["batch"] for _, answer in answers) > 1  # they were gathered
    for kind in ("Application/Octet-Stream", "application/octet-stream;charset=x"):
        assert server.ask(images[0].tobytes(), kind)[1]["logits"] == expected.logits[0].tolist()
    (tmp_path / "large.png").write_bytes(png(pixels(1, 3, 50, 40)[0]))
    one = server.net.run(read_input(tmp_path / "large.png", server.net.network))
    assert server.ask((tmp_path / "large.png").read_bytes(), PNG)[1]["logits"] == one.logits[0].tolist()


@pytest.mark.parametrize(
    ("body", "kind", "status", "words"),
    [
        (b"\1" * 191, ARRAY, 422, "an input is uint8 [3, 8, 8], 192 bytes; 191 came"),
        (b"no image", PNG, 422, "the image"),
        (b"{}", "application/json", 415, "send image/png or application/octet-stream, not application/json"),
        (b"0" * 10_000_001, ARRAY, 413, "send a smaller image"),
    ],
)
def test_bad_requests_get_one_line(server: Server, body: bytes, kind: str, status: int, words: str) -> None:
    try:
        code, answer = server.ask(body, kind)
    except (BrokenPipeError, ConnectionResetError):  # it may be refused before all of it was sent
        assert status == 413
        return
    assert code == status
    assert words in answer["detail"]
    assert "\n" not in answer["detail"]
    assert "/tmp" not in answer["detail"]
