"""One request and its reply: reading a bounded body, sending bounded writes, what the log line will say.

Everything a route needs from ASGI goes through an `Exchange`, so that limits hold in one place. Routes
raise our errors; `app.Edge` turns them into replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.types import Message, Receive, Scope, Send

from sluice.daemon.api.errors import ClientLeft, Refusal
from sluice.daemon.api.limits import Limits
from sluice.io.errors import SluiceError

_JSON = b"application/json"
# A refused body is read and thrown away up to here, so that a client in the middle of sending it hears why.
_DISCARD_FACTOR = 4


class Connection(Protocol):
    """What the server tells of the connection a request came on (see `server.Wire`)."""

    @property
    def listener(self) -> str:
        """ "unix" or "tcp"."""

    @property
    def over_limit(self) -> bool:
        """More connections than allowed are open."""

    @property
    def peer(self) -> Any:
        """The `access.Peer` of a Unix socket, else None."""

    def abort(self) -> None:
        """Drop the connection with whatever is still unsent."""


@dataclass(slots=True)
class Account:
    """What one request cost and how it went; grows while it runs and becomes the log line."""

    model: str = ""
    stream: bool = False
    priority: int = 0
    choices: int = 1
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: str = ""
    outcome: str = ""
    error: str = ""
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float | None = None


@dataclass(slots=True, eq=False)
class Exchange:
    """A request under way. `ended` is resolved with an error when the house wants it over (drain, stop)."""

    scope: Scope
    receive: Receive
    raw_send: Send
    limits: Limits
    id: str
    clock: Callable[[], float] = time.monotonic
    connection: Connection | None = None
    account: Account = field(default_factory=Account)
    started: float = 0.0
    status: int = 0
    finished: bool = False
    body_read: bool = False
    body_task: str = ""
    last_write: float = 0.0
    ended: asyncio.Future[SluiceError] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self.started = self.last_write = self.clock()

    # ---- asking

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    def header(self, name: bytes) -> str | None:
        """The first value of a header; None when absent."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value).decode("latin-1")
        return None

    def end(self, error: SluiceError) -> None:
        """Ask the request to end with `error`; harmless when it has ended or was asked before."""
        if not self.ended.done():
            self.ended.set_result(error)

    async def read_json_bytes(self) -> bytes:
        """The whole body, bounded in size and time.

        Raises Refusal 415 for another content type, 411 without a length, 413 beyond `body_bytes`, 408 when
        it does not arrive in `body_seconds`; ClientLeft when the client goes first.
        """
        kind = (self.header(b"content-type") or "application/json").split(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            message = f"Content-Type is {kind[:64]!r}; send application/json"
            raise await self._refused_unread(Refusal(415, message, close=True))
        if (coding := self.header(b"content-encoding") or "identity").lower() != "identity":
            message = f"Content-Encoding is {coding[:64]!r}; send the body as it is"
            raise await self._refused_unread(Refusal(415, message, close=True))
        length = self.header(b"content-length")
        if length is None and self.header(b"transfer-encoding") is None:
            self.body_read = True  # HTTP says that such a request has no body
            raise Refusal(411, "send a Content-Length, or the body in chunks")
        limit = self.limits.body_bytes
        too_large = Refusal(413, f"the body is over the limit of {limit} bytes", close=True)
        if length is not None and int(length) > limit:
            raise await self._refused_unread(too_large)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in self._body():
                    size += len(part)
                    if size > limit:
                        raise await self._refused_unread(too_large)
                    parts.append(part)
        except TimeoutError:
            seconds = self.limits.body_seconds
            raise Refusal(408, f"the body did not arrive within {seconds:g} s", close=True) from None
        return b"".join(parts)

    async def _body(self) -> Any:
        while not self.body_read:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft("left while sending its request")
            self.body_read = not message.get("more_body", False)
            yield message.get("body", b"")

    async def _refused_unread(self, refusal: Refusal) -> Refusal:
        """`refusal`, after the rest of the body was thrown away: closing on unread bytes resets the peer,
        which then never sees the reason. Bounded, and not done for a peer that waits for 100 Continue."""
        if (self.header(b"expect") or "").lower() == "100-continue":
            return refusal
        left = _DISCARD_FACTOR * self.limits.body_bytes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(5.0, self.limits.body_seconds)):
                async for part in self._body():
                    left -= len(part)
                    if left < 0:
                        break
        return refusal

    async def watch(self) -> None:
        """Wait until the client is gone or the house wants the request over; then raise that. Never returns."""
        gone = asyncio.ensure_future(self._until_gone())
        both: set[asyncio.Future[Any]] = {gone, self.ended}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self.ended.done():
                raise self.ended.result()
            gone.result()
        finally:
            gone.cancel()
        raise ClientLeft("closed the connection")

    async def _until_gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    # ---- answering

    async def send(self, message: Message) -> None:
        """Send one ASGI message; a reader that leaves a full buffer for `write_seconds` is dropped.

        Raises ClientLeft then, and when the server noticed first.
        """
        try:
            async with asyncio.timeout(self.limits.write_seconds):
                await self.raw_send(message)
        except TimeoutError:
            if self.connection is not None:
                self.connection.abort()
            raise ClientLeft(f"read nothing for {self.limits.write_seconds:g} s") from None
        except OSError as exc:
            raise ClientLeft("closed the connection") from exc
        self.last_write = self.clock()
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
        elif not message.get("more_body", False):
            self.finished = True

    async def start(self, status: int, headers: tuple[tuple[str, str], ...]) -> None:
        """Status line and headers; `x-request-id` is added."""
        wire = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        wire.append((b"x-request-id", self.id.encode("latin-1")))
        await self.send({"type": "http.response.start", "status": status, "headers": wire})

    async def reply(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: str = "application/json",
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """A whole reply at once."""
        await self.start(status, (("content-type", content_type), ("content-length", str(len(body))), *headers))
        await self.send({"type": "http.response.body", "body": body})

    async def reply_json(self, value: object, *, status: int = 200) -> None:
        await self.reply(msgspec.json.encode(value), status=status)


def account_fields(exchange: Exchange) -> Mapping[str, object]:
    """The log line's fields: always the same keys, in one order."""
    account = exchange.account
    first = account.first_token_seconds
    return {
        "request": exchange.id,
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status or 499,
        "outcome": account.outcome,
        "error": account.error,
        "seconds": round(exchange.clock() - exchange.started, 4),
        "stream": account.stream,
        "priority": account.priority,
        "choices": account.choices,
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": account.cached_tokens,
        "completion_tokens": account.completion_tokens,
        "finish": account.finish,
        "queue_seconds": round(account.queue_seconds, 4),
        "prefill_seconds": round(account.prefill_seconds, 4),
        "decode_seconds": round(account.decode_seconds, 4),
        "first_token_seconds": None if first is None else round(first, 4),
    }
