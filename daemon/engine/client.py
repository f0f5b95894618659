"""The engine as an event loop sees it: events cross from the engine's thread into one queue a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from sluice.daemon.engine.engine import Engine
from sluice.daemon.engine.requests import Event, Generation, GenerationRequest
from sluice.daemon.engine.sequence import Sequence
from sluice.io.errors import SluiceError


class LoopGeneration:
    """One request's events on the loop that submitted it. At most max_tokens + a progress line a second are
    ever queued, so the queue needs no other bound."""

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event | SluiceError | None] = asyncio.Queue()
        self._ended = False
        self._sequence: Sequence = engine.submit(request, self._from_engine)

    def _from_engine(self, event: Event | SluiceError | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def events(self) -> AsyncIterator[Event]:
        while not self._ended:
            event = await self._queue.get()
            if event is None:
                self._ended = True
            elif isinstance(event, SluiceError):
                self._ended = True
                raise event
            else:
                yield event

    def cancel(self) -> None:
        self._engine.cancel(self._sequence)


class LoopClient:
    """`EngineClient` over a running engine. `more_status` adds the parts of the status the engine does not
    know: memory and io."""

    def __init__(self, engine: Engine, more_status: Callable[[], dict[str, object]]) -> None:
        self.vocab_size = engine.vocab_size
        self.context = engine.limits.context
        self._engine = engine
        self._more_status = more_status

    def submit(self, request: GenerationRequest) -> Generation:
        return LoopGeneration(self._engine, request)

    def status(self) -> dict[str, object]:
        return self._engine.status() | self._more_status()

    @property
    def ready(self) -> bool:
        return self._engine.status()["state"] == "ready"
