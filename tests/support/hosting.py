"""A server in this process, for downloads that go wrong."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np


class Host(ThreadingHTTPServer):
    """Serves `body` at `url`; `plan` says how each request in turn is answered ("plain" when it runs out)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = np.random.default_rng(5).integers(0, 256, 700_000, np.uint8).tobytes()
        self.plan: list[str] = []
        self.ranges: list[str | None] = []
        self.paths: list[str] = []
        self.release = threading.Event()  # ends a request that stalls
        self.url = f"http://127.0.0.1:{self.server_address[1]}/file"

    @property
    def md5(self) -> str:
        return hashlib.md5(self.body).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Host

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        requested = self.headers["Range"]
        self.server.ranges.append(requested)
        self.server.paths.append(self.path)
        how, _, option = (self.server.plan.pop(0) if self.server.plan else "plain").partition(":")
        body, start = self.server.body, 0
        if how == "status":
            self.send_error(int(option))
            return
        if requested and how not in ("ignore", "empty", "page"):
            start = int(requested.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                self.send_error(416)
                return
        if how == "page":
            body = b"  <!DOCTYPE html><html>log in first</html>"
        if how == "empty":
            body = b""
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", "text/html" if option == "typed" else "application/octet-stream")
        if start:
            start = 0 if how == "shifted" else start
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if how != "unsized":
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        part = body[start:]
        if how in ("cut", "ignore") and option:
            part = part[: int(option)]
        if how == "stall":
            self.wfile.write(part[: int(option)])
            self.server.release.wait(60)
            return
        with contextlib.suppress(OSError):
            self.wfile.write(part)
        self.close_connection = True
