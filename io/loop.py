"""The I/O thread: an event loop of its own, on which readers live and completions arrive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import uvloop

T = TypeVar("T")


class IoLoop:
    """A running uvloop loop in a thread. `call` runs a function there and waits. Closing twice is harmless."""

    def __init__(self, name: str = "sluice-io") -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises, run on the loop's thread. Not to be called from that thread."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return future.result()

    def close(self) -> None:
        """Stop and wait for the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
