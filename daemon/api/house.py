"""What all routes share: the engine, the model, the limits, and who is being served right now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from sluice.daemon.api.access import Access
from sluice.daemon.api.errors import ServiceUnavailable
from sluice.daemon.api.exchange import Exchange
from sluice.daemon.api.limits import Limits
from sluice.daemon.api.served import ServedModel
from sluice.daemon.chat.constraint import Constrainer
from sluice.daemon.engine.requests import EngineClient
from sluice.daemon.service.metrics import Metrics
from sluice.io.errors import RequestError, SluiceError

Result = TypeVar("Result")

# Text shorter than this is encoded on the loop: 32 KiB are about 5 ms, a hop to a thread and back costs more
# for short ones.
_INLINE_BYTES = 32 * 1024

_PRIORITY_WORDS = {"interactive": 0, "people": 0, "background": 10}


@dataclass(slots=True, eq=False)
class House:
    """State of one app. threads: for reading and tokenizing; grammar_threads: for compiling, which may take
    seconds and must not stand before the others' prompts. constrainer: None for a model whose
    tokenizer has no chat markers. `running` are the exchanges that hold generations; `draining` refuses new ones.
    `access` may be replaced while serving (a reload of the allow lists)."""

    engine: EngineClient
    model: ServedModel
    limits: Limits
    metrics: Metrics
    threads: ThreadPoolExecutor
    grammar_threads: ThreadPoolExecutor
    constrainer: Constrainer | None
    access: Access | None = None
    wall: Callable[[], float] = time.time
    running: set[Exchange] = field(default_factory=set)
    draining: bool = False
    connection_count: Callable[[], int] = lambda: 0

    def admit(self) -> None:
        """Raises ServiceUnavailable while loading or draining."""
        if self.draining:
            raise ServiceUnavailable("the daemon is stopping and takes no new requests", 10)
        if not self.engine.ready:
            raise ServiceUnavailable("the model is still loading", 5)

    async def off_loop(self, work: Callable[[], Result], size: int) -> Result:
        """`work()`, in a thread when `size` (characters) says that it would hold the loop for long."""
        if size < _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def priority(self, exchange: Exchange, field_value: int | None, default: int) -> int:
        """The request's priority: header X-Sluice-Priority (a number 0..100 or a word), else field, else default."""
        header = exchange.header(b"x-sluice-priority")
        if header is None:
            return default if field_value is None else field_value
        text = header.strip().lower()
        if text in _PRIORITY_WORDS:
            return _PRIORITY_WORDS[text]
        if text.isascii() and text.isdigit() and len(text) <= 3 and int(text) <= 100:
            return int(text)
        raise RequestError(
            f"X-Sluice-Priority is {header[:32]!r}; send 0 to 100, interactive or background", param="X-Sluice-Priority"
        )

    def end_running(self, error: SluiceError) -> None:
        """Ask every running request to end with `error`."""
        for exchange in list(self.running):
            exchange.end(error)
