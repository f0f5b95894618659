"""A reader that plays a script: short reads, EAGAIN storms, EIO, wrong bytes, delays, a stuck or vanished drive.

It passes the same contract suite as the real readers, so that what is shown with it holds for them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable

from sluice.io.reader import Transfer

Fault = Callable[[Transfer, int], int | str | None]
"""(transfer, how many came before it) -> None: read rightly; an int <= 0: that result; an int > 0: at most so many
bytes; "flip": one wrong byte; "stuck": never ends until `release`."""


class FakeReader:
    """Reads with pread at once and reports in an order and after delays that the seed decides.

    faults are asked in turn, the first that is not None decides. delay: the longest delay in seconds.
    """

    name = "fake"

    def __init__(
        self, loop: asyncio.AbstractEventLoop, capacity: int = 64, *, seed: int | None = None, delay: float = 0.0
    ) -> None:
        self._loop = loop
        self._random = random.Random(seed)
        self._shuffle = seed is not None
        self._delay = delay
        self._taken: list[Transfer] = []
        self.faults: list[Fault] = []
        self.started = 0
        self.flying = 0
        self.most_flying = 0
        self.stuck: list[Transfer] = []
        self.log: list[tuple[int, int, int]] = []  # fd, offset, bytes asked for

    def start(self, transfer: Transfer) -> None:
        self._taken.append(transfer)
        self.flying += 1
        self.most_flying = max(self.most_flying, self.flying)
        self.log.append((transfer.fd, transfer.offset, len(transfer.buffer)))

    def flush(self) -> None:
        taken, self._taken = self._taken, []
        if self._shuffle:
            self._random.shuffle(taken)
        for transfer in taken:
            self._play(transfer)

    def _play(self, transfer: Transfer) -> None:
        number, self.started = self.started, self.started + 1
        verdict = next((v for v in (fault(transfer, number) for fault in self.faults) if v is not None), None)
        if verdict == "stuck":
            self.stuck.append(transfer)
            return
        if isinstance(verdict, int) and verdict <= 0:
            self._end(transfer, verdict)
            return
        room = transfer.buffer if not isinstance(verdict, int) else transfer.buffer[:verdict]
        result = self._pread(transfer.fd, room, transfer.offset)
        if verdict == "flip" and result > 0:
            room[result // 2] ^= 0x40
        self._end(transfer, result)

    @staticmethod
    def _pread(fd: int, room: memoryview, offset: int) -> int:
        # Through a copy, since a direct descriptor would refuse the odd lengths that the script asks for.
        try:
            other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        except OSError as error:
            return -(error.errno or errno.EIO)
        try:
            data = os.pread(other, len(room), offset)
        finally:
            os.close(other)
        room[: len(data)] = data
        return len(data)

    def _end(self, transfer: Transfer, result: int) -> None:
        def end() -> None:
            self.flying -= 1
            transfer.done(result)

        if self._delay:
            self._loop.call_later(self._random.random() * self._delay, end)
        else:
            self._loop.call_soon(end)

    def release(self) -> None:
        """Let the stuck reads end rightly. From any thread."""

        def go() -> None:
            stuck, self.stuck = self.stuck, []
            for transfer in stuck:
                self._end(transfer, self._pread(transfer.fd, transfer.buffer, transfer.offset))

        self._loop.call_soon_threadsafe(go)

    def close(self) -> None:
        self.stuck = []


def times(n: int, verdict: int | str) -> Fault:
    """The first n transfers get the verdict."""
    left = [n]

    def fault(transfer: Transfer, number: int) -> int | str | None:
        if left[0] <= 0:
            return None
        left[0] -= 1
        return verdict

    return fault


def always(verdict: int | str, when: Callable[[Transfer], bool] = lambda t: True) -> Fault:
    """Every transfer for which `when` holds gets the verdict."""
    return lambda transfer, number: verdict if when(transfer) else None


def by_seed(seed: int, share: float, verdicts: list[int | str]) -> Fault:
    """A share of all transfers gets one of the verdicts, both drawn from the seed."""
    rng = random.Random(seed)
    return lambda transfer, number: rng.choice(verdicts) if rng.random() < share else None
