"""Headless Chromium over the DevTools protocol, with the standard library alone: enough to open a page and look at it."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Socket:
    """A client's side of RFC 6455, for text messages."""

    def __init__(self, address: str) -> None:
        match = re.fullmatch(r"ws://([^:/]+):(\d+)(/.*)", address)
        assert match is not None
        host, port, path = match.groups()
        self.socket = socket.create_connection((host, int(port)), timeout=120)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.buffer = b""
        while b"\r\n\r\n" not in self.buffer:
            self.buffer += self.socket.recv(4096)
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        assert b" 101 " in head, head

    def send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        size = len(data)
        head = bytes([0x81, 0x80 | size]) if size < 126 else struct.pack(">BBQ", 0x81, 0xFF, size)
        if 126 <= size <= 0xFFFF:
            head = struct.pack(">BBH", 0x81, 0xFE, size)
        self.socket.sendall(head + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data)))

    def _take(self, count: int) -> bytes:
        while len(self.buffer) < count:
            more = self.socket.recv(1 << 16)
            if not more:
                raise ConnectionError("the browser has gone")
            self.buffer += more
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    def receive(self) -> str:
        message = b""
        while True:
            first, second = self._take(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack(">H", self._take(2))
            elif size == 127:
                (size,) = struct.unpack(">Q", self._take(8))
            body = self._take(size)
            if first & 0x0F in (0, 1):
                message += body
                if first & 0x80:
                    return message.decode()


class Page:
    """One tab. From the beginning, `errors` collects exceptions, console errors and refused loads."""

    def __init__(self, address: str) -> None:
        self.socket, self.number = Socket(address), 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.receive())
            if message.get("id") == self.number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, p = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(p["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and p["type"] in ("error", "warning", "assert"):
            self.errors.append(str(p["args"]))
        elif method == "Log.entryAdded" and p["entry"]["level"] in ("error", "warning"):
            self.errors.append(p["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(p["request"]["url"][:100])

    def open(self, path: Path) -> None:
        """Load a file."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        for _ in range(2400):
            if self.run("document.readyState") == "complete" and self.run("location.protocol") == "file:":
                return
            time.sleep(0.05)
        raise TimeoutError(f"{path} did not load")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until it holds: a key is handled after its event was taken."""
        deadline = time.monotonic() + 10
        while not self.run(condition):
            assert time.monotonic() < deadline, condition
            time.sleep(0.02)

    def press(self, key: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            code = {"Enter": 13, "Tab": 9, " ": 32}[key]
            given = {"text": text, "unmodifiedText": text} if text and kind == "keyDown" else {}
            name = "Space" if key == " " else key
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=name, windowsVirtualKeyCode=code, **given)

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )


@contextmanager
def opened() -> Iterator[Page]:
    """A browser with one empty page; it is ended with the block. Without a browser the test is skipped."""
    chromium = os.environ.get("LBQ_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        pytest.skip("no Chromium: install it (apt install chromium), or name it in LBQ_CHROMIUM, to test pages")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}",
            "--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage", "about:blank",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        page = None
        try:
            page = Page(_address(Path(profile) / "DevToolsActivePort"))
            yield page
        finally:
            if page is not None:
                page.socket.socket.close()
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(port_file: Path) -> str:
    for _ in range(2400):
        if port_file.exists() and (lines := port_file.read_text().splitlines()):
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json") as reply:
                pages = [entry for entry in json.loads(reply.read()) if entry["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise TimeoutError("the browser did not start")
