"""The engine as an event loop sees it: events cross from the engine's thread into one queue a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from sluice.daemon.engine.engine import Engine, EngineLimits, idle_status
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
    """`EngineClient` over an engine that may not be there yet: while loading, requests are refused and the
    status says so; `attach` makes it ready. vocab_size and context are known from the headers."""

    def __init__(self, vocab_size: int, limits: EngineLimits) -> None:
        self.vocab_size = vocab_size
        self.context = limits.context
        self._limits = limits
        self._engine: Engine | None = None
        self._more_status: Callable[[], dict[str, object]] = _nothing_yet

    def attach(self, engine: Engine, more_status: Callable[[], dict[str, object]]) -> None:
        """Serve requests from here on. more_status adds what the engine does not know: memory and io."""
        self._engine, self._more_status = engine, more_status

    def submit(self, request: GenerationRequest) -> Generation:
        if self._engine is None:
            raise StillLoading("the model is still loading")
        return LoopGeneration(self._engine, request)

    def status(self) -> dict[str, object]:
        snapshot = idle_status(self._limits) if self._engine is None else self._engine.status()
        return snapshot | self._more_status()

    @property
    def ready(self) -> bool:
        return self._engine is not None and self._engine.accepting


class StillLoading(SluiceError):
    """Nothing is wrong; it takes time."""

    http_status = 503


def _nothing_yet() -> dict[str, object]:
    return {"memory": {}, "io": {}}
