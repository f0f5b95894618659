"""Reader on preadv in threads, where io_uring is not to be had."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading

from sluice.io.reader import Transfer

JOIN_SECONDS = 5.0


class ThreadReader:
    """One thread for each transfer that may be in flight; preadv releases the GIL."""

    name = "threads"

    def __init__(self, loop: asyncio.AbstractEventLoop, capacity: int) -> None:
        self._loop = loop
        self._work: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"sluice-read-{i}", daemon=True) for i in range(capacity)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, transfer: Transfer) -> None:
        """See Reader."""
        self._work.put(transfer)

    def flush(self) -> None:
        """See Reader: nothing waits here."""

    def _serve(self) -> None:
        while (transfer := self._work.get()) is not None:
            try:
                result = os.preadv(transfer.fd, [transfer.buffer], transfer.offset)
            except OSError as error:
                result = -(error.errno or 5)
            # A loop that is closed already has nobody left who waits for this.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(transfer.done, result)

    def close(self) -> None:
        """See Reader. A thread stuck in a read is left behind: it is a daemon and owns no memory of ours."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        self._threads = []
