"""A scripted daemon on a Unix socket: what it answers is set by the test, what it was asked is kept."""

from __future__ import annotations

import json
import select
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any


def chunk(**delta: Any) -> bytes:
    """One streamed piece of an answer."""
    finish = delta.pop("finish", None)
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return data({"id": "chatcmpl-1", "model": "fake", "system_fingerprint": "fp_1", "choices": [choice], "usage": None})


def data(value: Any) -> bytes:
    """One event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    """The last event with choices empty."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return data({"id": "chatcmpl-1", "model": "fake", "choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"


class FakeDaemon:
    """A context manager. `script(body)` gives the stream's parts for each chat request: bytes to send, or a
    threading.Event to wait for. `status` and `models` are the replies of those routes.

    requests: the bodies of chat requests; left: set once a client has gone in the middle of an answer.
    """

    def __init__(self, socket: Path, script: Callable[[dict[str, Any]], list[Any]] | None = None) -> None:
        self.socket = socket
        self.script = script or (lambda body: [chunk(content="hi"), chunk(finish="stop"), usage(3, 2), DONE])
        self.status: Any = {"state": "ready"}
        self.refuse: tuple[int, Any] | None = None
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.left = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def address_string(self) -> str:
                return "unix"

            def reply(self, status: int, value: Any) -> None:
                body = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                fake.headers.append(dict(self.headers))
                if fake.refuse is not None:
                    self.reply(*fake.refuse)
                elif self.path == "/v1/status":
                    self.reply(200, fake.status() if callable(fake.status) else fake.status)
                else:
                    self.reply(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                fake.requests.append(body)
                fake.headers.append(dict(self.headers))
                if fake.refuse is not None:
                    self.reply(*fake.refuse)
                    return
                self.close_connection = True
                self.send_response(200)
                self.send_header("content-type", "text/event-stream; charset=utf-8")
                self.send_header("connection", "close")
                self.end_headers()
                try:
                    for part in fake.script(body):
                        if isinstance(part, threading.Event):
                            self.wait(part)
                        else:
                            self.wfile.write(part)
                            self.wfile.flush()
                except OSError:
                    fake.left.set()

            def wait(self, gate: threading.Event) -> None:
                """Until the gate opens; a client that leaves meanwhile is an OSError."""
                while not gate.wait(0.01):
                    readable, _, _ = select.select([self.connection], [], [], 0)
                    if readable and not self.connection.recv(1):
                        raise OSError("the client has gone")

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self._server = Server(str(socket), Handler)

    def __enter__(self) -> FakeDaemon:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
