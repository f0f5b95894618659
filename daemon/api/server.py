"""uvicorn's HTTP/1.1 protocol on sockets that are already bound, with the manners a slow server needs.

Owns connections: who is at the other end, how many there are, how long a request may take to arrive, when a
peer counts as gone, and the way down (drain, then stop). Binding, permissions and unlinking belong to the
service; routes and replies to `app`.

Gone or only done sending? On a Unix socket the kernel tells a peer that closed (POLLHUP) from one that shut its
sending side (`nc -N`, `socat`): the latter is still served. On TCP both look alike until we write, and an end
of input counts as leaving, as in most servers: at 30 s a token nobody should compute for the dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import sys
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from sluice.daemon.api.access import Peer, peer_of
from sluice.daemon.api.errors import Refusal, ServiceUnavailable, error_reply
from sluice.daemon.api.house import House
from sluice.daemon.api.limits import Limits

log = logging.getLogger(__name__)

_BACKLOG = 512
# How often peers that cannot be heard (half-closed, or reading is paused) are looked at.
_SWEEP_SECONDS = 0.25
# After `stop` has told every request to end, how long they have to say so.
_STOP_SECONDS = 3.0


class Wire(H11Protocol):
    """One connection. Also what access and the routes may know of it (`scope["state"]["connection"]`)."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        loop: asyncio.AbstractEventLoop,
        limits: Limits,
    ) -> None:
        super().__init__(config, server_state, {"connection": self}, loop)
        self.limits = limits
        self.listener = "tcp"
        self.peer: Peer | None = None
        self.over_limit = False
        self.half_closed = False
        self._descriptor = -1
        self._head_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._moved_at = loop.time()

    # ---- the life of a connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self.limits.write_buffer_bytes)
        plug = transport.get_extra_info("socket")
        self._descriptor = plug.fileno()
        if plug.family == socket.AF_UNIX:
            self.listener = "unix"
            # uvloop hands out a socket-like object; the credentials need a real one over the same file.
            with socket.socket(fileno=os.dup(self._descriptor)) as real:
                self.peer = peer_of(real)
        count = len(self.connections)
        self.over_limit = count > self.limits.connections
        if count > 2 * self.limits.connections:
            transport.abort()
            return
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.busy:
            self._unwatch_head()
        elif self._head_timer is None:
            self._watch_head()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """True keeps the connection open for the answer; None closes it, which cancels what runs on it."""
        if self.busy and not self.cycle.more_body and self.listener == "unix" and not self.hung_up():
            self.half_closed = True
            return True
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves the timer running after an error
        self._descriptor = -1

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.half_closed and not self.busy:
            self.transport.close()

    def abort(self) -> None:
        """Drop the connection with whatever is unsent."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # at once: uvicorn would take an unfinished reply for a bug
        if self.transport is not None:
            self.transport.abort()

    def stalled(self, now: float) -> bool:
        """Whether the peer has taken nothing of what is written to it for `write_seconds`. Called by the sweep; a
        reply that was handed over whole, or a closing connection, has nobody else to notice."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent:
            self._moved_at = now
        self._unsent = unsent
        return unsent > 0 and now - self._moved_at > self.limits.write_seconds

    @property
    def busy(self) -> bool:
        """Whether a request is being served."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def deaf(self) -> bool:
        """Whether the peer's leaving would go unheard: nothing is read from it at the moment."""
        return self.half_closed or (self.flow is not None and self.flow.read_paused)

    def hung_up(self) -> bool:
        """Whether the peer is gone for good."""
        if self._descriptor < 0:
            return False
        signs = select.POLLHUP | select.POLLERR
        if self.listener == "tcp":
            signs |= select.POLLRDHUP
        watch = select.poll()
        watch.register(self._descriptor, signs)
        return any(events & signs for _, events in watch.poll(0))

    # ---- slow senders and bad ones

    def _watch_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_seconds, self._head_late)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if not self.busy and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """h11 could not read what came: say so in our words, once, and close."""
        if self.transport.is_closing():
            return
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun; it can only be cut
            self.transport.abort()
            return
        cause = sys.exc_info()[1]
        status = getattr(cause, "error_status_hint", 400)
        if status not in (400, 431):
            status = 400
        reply = error_reply(Refusal(status, f"not a readable HTTP request: {cause or msg}", close=True))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(reply.body)).encode()),
            (b"connection", b"close"),
        ]
        events: list[Any] = [
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=reply.body),
            h11.EndOfMessage(),
        ]
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()


class HttpServer:
    """The app on listening sockets. `start`, then `drain` and `stop` in this order; `stop` twice is harmless.

    The sockets are bound and listening or about to; they are closed by `stop` but never unlinked.
    """

    def __init__(self, app: Starlette, sockets: Sequence[socket.socket], *, drain_seconds: float = 60.0) -> None:
        self.house: House = app.state.house
        self.drain_seconds = drain_seconds
        self._limits = self.house.limits
        self._sockets = list(sockets)
        self._state = ServerState()
        self._servers: list[asyncio.AbstractServer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._config = uvicorn.Config(
            app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            h11_max_incomplete_event_size=self._limits.header_bytes,
            timeout_keep_alive=int(self._limits.keepalive_seconds),
        )
        self._config.load()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._state.connections)

    async def start(self) -> None:
        """Accept connections from here on."""
        loop = asyncio.get_running_loop()
        self.house.connection_count = lambda: self.connections

        def wire() -> Wire:
            return Wire(self._config, self._state, loop, self._limits)

        self._date()
        for plug in self._sockets:
            plug.setblocking(False)
            if plug.family == socket.AF_UNIX:
                # Newer Pythons unlink the path when the server closes; a socket of systemd's must stay.
                keep: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
                self._servers.append(await loop.create_unix_server(wire, sock=plug, backlog=_BACKLOG, **keep))
            else:
                self._servers.append(await loop.create_server(wire, sock=plug, backlog=_BACKLOG))
        self._tasks = [loop.create_task(self._sweep()), loop.create_task(self._measure_lag())]

    async def drain(self, seconds: float | None = None) -> bool:
        """Refuse new work with 503 and wait for what runs; True when all of it ended in time."""
        self.house.draining = True
        return await _until(lambda: not self.house.running, self.drain_seconds if seconds is None else seconds)

    async def stop(self) -> None:
        """End what still runs with a clear error, close everything. Takes a few seconds at most."""
        self.house.draining = True
        for server in self._servers:
            server.close()
        self._servers.clear()
        self.house.end_running(ServiceUnavailable("the daemon is stopping; this answer was cut short", 10))
        for connection in list(self._state.connections):
            connection.shutdown()
        await _until(lambda: not (self._state.tasks or self._state.connections), _STOP_SECONDS)
        for task in (*self._state.tasks, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._state.tasks, *self._tasks, return_exceptions=True)
        self._tasks.clear()
        for connection in list(self._state.connections):
            connection.transport.abort()
        await _until(lambda: not self._state.connections, _STOP_SECONDS)
        for plug in self._sockets:
            plug.close()
        self.house.threads.shutdown(wait=False)
        self.house.grammar_threads.shutdown(wait=False)

    async def _sweep(self) -> None:
        """Look after peers that cannot be heard or do not read, and keep the Date header."""
        count = 0
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            count += 1
            if count % 4 == 0:
                self._date()
            now = asyncio.get_running_loop().time()
            for connection in list(self._state.connections):
                assert isinstance(connection, Wire)
                if connection.stalled(now) or (connection.busy and connection.deaf and connection.hung_up()):
                    connection.abort()

    def _date(self) -> None:
        self._state.default_headers = [(b"date", formatdate(self.house.wall(), usegmt=True).encode())]

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.5
            await asyncio.sleep(0.5)
            self.house.metrics.loop_lag.observe(max(0.0, loop.time() - due))


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition that uvicorn's sets give no event for; False when it does not come true in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    return condition()
