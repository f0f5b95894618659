"""The real app on real sockets, in the test's own loop or in a thread for clients that block."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop
from helpers import vocabularies
from helpers.fake_engine import FakeEngine

from sluice.daemon.api.access import Access
from sluice.daemon.api.app import create_app
from sluice.daemon.api.limits import Limits
from sluice.daemon.api.served import ServedModel
from sluice.daemon.api.server import HttpServer

FINGERPRINT = "fp_test"


def served_model() -> ServedModel:
    return ServedModel(
        name="org/k3-mini",
        tokenizer=vocabularies.mini(),
        created=1_700_000_000,
        fingerprint=FINGERPRINT,
        aliases=frozenset({"k3"}),
    )


@dataclass(eq=False)
class House:
    """A running server: the Unix socket's path and a client on it."""

    path: Path
    server: HttpServer
    engine: FakeEngine
    client: httpx.AsyncClient
    tcp_port: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def raw(self, *, tcp: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection, for what no client library would do. Closed with the house at the latest."""
        if tcp:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.tcp_port)
        else:
            reader, writer = await asyncio.open_unix_connection(str(self.path))
        self.writers.append(writer)
        return reader, writer

    async def settled(self) -> None:
        """Wait until nothing runs: no exchange, no live generation, no request task."""
        async with asyncio.timeout(10):
            while self.server.house.running or self.engine.live or self.server._state.tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


def unix_listener(path: Path) -> socket.socket:
    plug = socket.socket(socket.AF_UNIX)
    plug.bind(str(path))
    plug.listen()
    return plug


def tcp_listener() -> socket.socket:
    plug = socket.socket()
    plug.bind(("127.0.0.1", 0))
    plug.listen()
    return plug


@contextlib.asynccontextmanager
async def open_house(
    folder: Path,
    engine: FakeEngine,
    limits: Limits | None = None,
    *,
    access: Access | None = None,
    tcp: bool = False,
) -> AsyncIterator[House]:
    path = folder / "s.sock"
    plugs = [unix_listener(path)]
    if tcp:
        plugs.append(tcp_listener())
    port = plugs[1].getsockname()[1] if tcp else 0
    server = HttpServer(create_app(engine, served_model(), limits, access=access), plugs)
    await server.start()
    transport = httpx.AsyncHTTPTransport(uds=str(path), verify=False)  # no TLS here, and the CA file takes 0.1 s
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://sluice", timeout=30) as client:
            house = House(path, server, engine, client, port)
            try:
                yield house
            finally:
                for writer in house.writers:
                    writer.transport.abort()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
    finally:
        await server.stop()
        path.unlink()


@contextlib.contextmanager
def house_in_thread(folder: Path, engine_of: Callable[[], FakeEngine], limits: Limits | None = None) -> Iterator[House]:
    """The same in a thread of its own on uvloop, for clients that block; open on TCP too, without a token.
    `engine_of()` makes the engine there, since gates belong to a loop. The house's own client is not for use."""
    path = folder / "t.sock"
    plugs = [unix_listener(path), tcp_listener()]
    port = plugs[1].getsockname()[1]
    started = threading.Event()
    box: dict[str, Any] = {}

    async def main() -> None:
        stop = asyncio.Event()
        engine = engine_of()
        server = HttpServer(create_app(engine, served_model(), limits), plugs)
        box.update(loop=asyncio.get_running_loop(), stop=stop, server=server, engine=engine)
        await server.start()
        started.set()
        try:
            await stop.wait()
        finally:
            await server.stop()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    try:
        yield House(path, box["server"], box["engine"], None, port)  # type: ignore[arg-type]
    finally:
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join(10)
        path.unlink()


@dataclass(slots=True)
class Stream:
    """A stream taken apart: data events as JSON, comments, and whether [DONE] came."""

    events: list[Any]
    comments: list[str]
    done: bool


def read_stream(text: str) -> Stream:
    """Server-sent events by the standard's framing. A frame that is none of ours fails."""
    stream = Stream([], [], False)
    assert text.endswith("\n\n")
    for frame in text[:-2].split("\n\n"):
        if frame.startswith(": "):
            stream.comments.append(frame[2:])
        elif frame == "data: [DONE]":
            stream.done = True
        else:
            assert frame.startswith("data: ")
            assert "\n" not in frame
            assert not stream.done
            stream.events.append(json.loads(frame[6:]))
    return stream


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on the loop of the real daemon; transports differ from asyncio's in what they hear."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **options))

    return run


def post(path: str, body: Any, extra: str = "") -> bytes:
    """A request as bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return (head + extra + "\r\n").encode() + data


async def read_reply(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One HTTP reply from a bare connection: status, headers (lower case), body with chunks joined."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(first.split()[1]), headers, body
