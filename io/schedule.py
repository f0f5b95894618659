"""The one queue that all reads go through: priorities, depth, fairness between drives, retries, accounting.

A `Read` asks for bytes of a file; the scheduler makes whole and right what readers may deliver short, late,
interrupted or wrong, or says with a StorageError that it cannot. Priorities are strict: demanded experts,
then the trunk in order of use, then guesses, then preload. Each drive has its own depth and bytes in flight,
so that a slow drive does not hold up a fast one. `submit`, `cancel` and `promote` may be called from any
thread; everything else happens on the loop's thread.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from sluice.io.errors import StorageError
from sluice.io.reader import OpenFile, Reader, Transfer
from sluice.io.store import ALIGN, align_down, align_up

log = logging.getLogger(__name__)

TRANSIENT = frozenset({errno.EAGAIN, errno.EINTR})
REFUSED_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
MAX_TRANSIENT = 200
"""Busy answers in a row that one read bears, with waits growing to 50 ms: some 8 s in all."""
MAX_FRUITLESS = 16
"""Transfers in a row that bring no page further before a read counts as failed."""


class Priority(enum.IntEnum):
    """Who goes first."""

    DEMAND = 0
    TRUNK = 1
    PREDICTED = 2
    PRELOAD = 3


class State(enum.Enum):
    """Where a read stands. A cancelled read that had started ends as DONE: the kernel owned its buffer till then."""

    QUEUED = "queued"
    FLYING = "flying"
    DONE = "done"
    CANCELLED = "cancelled"


class Read:
    """Bytes [offset, offset + nbytes) of a file, into `buffer` from its byte offset % ALIGN on.

    buffer: page-aligned memory of exactly align_up(offset % ALIGN + nbytes) bytes; the surroundings of the bytes
    asked for are overwritten. on_done(read, error) is called once on the loop's thread, unless `cancel` said True.
    layer and expert are for messages.
    """

    __slots__ = (
        "attempts",
        "buffer",
        "checksum",
        "done_bytes",
        "expert",
        "file",
        "fruitless",
        "layer",
        "nbytes",
        "offset",
        "on_done",
        "priority",
        "since",
        "state",
        "transient",
    )

    def __init__(
        self,
        file: OpenFile,
        offset: int,
        nbytes: int,
        buffer: memoryview,
        priority: Priority,
        on_done: Callable[[Read, StorageError | None], None],
        *,
        checksum: int | None = None,
        layer: int | None = None,
        expert: int | None = None,
    ) -> None:
        lead = offset - align_down(offset)
        if len(buffer) != align_up(lead + nbytes):
            raise ValueError(f"buffer of {len(buffer)} bytes for {nbytes} at {offset}, not {align_up(lead + nbytes)}")
        self.file, self.offset, self.nbytes, self.buffer = file, offset, nbytes, buffer
        self.priority, self.on_done, self.checksum = priority, on_done, checksum
        self.layer, self.expert = layer, expert
        self.state = State.QUEUED
        self.done_bytes = self.attempts = self.transient = self.fruitless = 0
        self.since = 0.0

    @property
    def data(self) -> memoryview:
        """The bytes that were asked for."""
        lead = self.offset % ALIGN
        return self.buffer[lead : lead + self.nbytes]

    def error(self, message: str) -> StorageError:
        """A StorageError that names this read's place."""
        return StorageError(
            message,
            drive=self.file.drive_name,
            file=str(self.file.path),
            offset=self.offset,
            layer=self.layer,
            expert=self.expert,
        )


class Waiter:
    """How a thread that is not the loop's waits for reads: a condition that completions notify, and a limit after
    which a read in flight counts as stuck. The lock also guards the state of whoever owns the waiter."""

    def __init__(self, stuck_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.condition = threading.Condition()
        self.stuck_seconds = stuck_seconds
        self.wait_seconds = 0.0
        self.waits = 0
        self._clock = clock

    def wait_until(self, predicate: Callable[[], bool], reads: Callable[[], Iterable[Read]]) -> None:
        """Wait, holding the condition, until the predicate is true. Raises StorageError naming a read that has been
        in flight for longer than stuck_seconds; its buffer stays lent until the kernel is done with it."""
        if predicate():
            return
        began = self._clock()
        self.waits += 1
        try:
            while not self.condition.wait_for(predicate, timeout=min(1.0, self.stuck_seconds / 4)):
                now = self._clock()
                for read in reads():
                    if read.state is State.FLYING and now - read.since > self.stuck_seconds:
                        raise read.error(f"read stuck for {now - read.since:.0f} s")
        finally:
            self.wait_seconds += self._clock() - began


def fetch(scheduler: Scheduler, waiter: Waiter, reads: Sequence[Read], release: Callable[[Read], None]) -> None:
    """Submit reads and wait for all. Their on_done is set here; `release` is called for each when the kernel is done
    with its buffer, on the loop's thread, holding the condition. Raises the first StorageError once all have ended."""
    left = [len(reads)]
    errors: list[StorageError] = []

    def on_done(read: Read, error: StorageError | None) -> None:
        with waiter.condition:
            left[0] -= 1
            if error is not None:
                errors.append(error)
            release(read)
            if not left[0]:
                waiter.condition.notify_all()

    for read in reads:
        read.on_done = on_done
    scheduler.submit(reads)
    with waiter.condition:
        waiter.wait_until(lambda: not left[0], lambda: reads)
    if errors:
        raise errors[0]


def ignore_end(read: Read, error: StorageError | None) -> None:
    """An on_done for reads that `fetch` will take over."""


@dataclass(frozen=True, slots=True)
class DriveStats:
    """One drive since start. bytes are those that were asked for, without slack for alignment; busy_seconds: with a
    read in flight. retries: transfers repeated after an error or a wrong checksum; short: transfers resumed."""

    drive: str
    read_bytes: int
    reads: int
    busy_seconds: float
    flying: int
    queued: int
    retries: int
    short: int
    failures: int


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """All drives since start. flying_seconds: time with a read in flight on any drive, of elapsed_seconds.
    bytes_by_priority: in the order of Priority."""

    drives: tuple[DriveStats, ...]
    flying_seconds: float
    elapsed_seconds: float
    bytes_by_priority: tuple[int, ...]
    cancelled: int

    @property
    def read_bytes(self) -> int:
        """Bytes of all drives."""
        return sum(d.read_bytes for d in self.drives)

    @property
    def reads(self) -> int:
        """Reads of all drives."""
        return sum(d.reads for d in self.drives)


class _Drive:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queues: tuple[deque[Read], ...] = tuple(deque() for _ in Priority)
        self.flying = self.flying_bytes = self.flying_guesses = 0
        self.read_bytes = self.reads = self.retries = self.short = self.failures = self.queued = 0
        self.busy, self.busy_since = 0.0, 0.0


class Scheduler:
    """See the module. depth: reads in flight per drive; bytes_in_flight bounds their sum per drive (one is always let
    through). verify: off, first (each record's first read) or always; only reads that carry a checksum."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reader: Reader,
        drives: Sequence[str],
        *,
        depth: int,
        bytes_in_flight: int = 256 * 2**20,
        verify: str = "first",
        clock: Callable[[], float] = time.monotonic,
        retry_wait: Callable[[int], float] = lambda n: min(0.05, 0.0005 * 2**n) if n else 0.0,
    ) -> None:
        self._loop, self._reader, self._clock, self._retry_wait = loop, reader, clock, retry_wait
        self._depth, self._bytes_in_flight, self._verify = depth, bytes_in_flight, verify
        self._drives = [_Drive(name) for name in drives]
        self._lock = threading.Lock()
        self._pump_planned = False
        self._closed = False
        self._hashers = ThreadPoolExecutor(1, "sluice-hash") if verify != "off" else None
        self._flying = 0
        self._flying_seconds, self._flying_since = 0.0, 0.0
        self._started_at = clock()
        self._by_priority = [0] * len(Priority)
        self._cancelled = 0
        self._next_drive = 0

    # --- any thread ---

    def submit(self, reads: Iterable[Read]) -> None:
        """Queue reads, in their order within a priority. Raises StorageError when closed."""
        with self._lock:
            if self._closed:
                raise StorageError("the storage side is closed")
            for read in reads:
                drive = self._drives[read.file.drive]
                drive.queues[read.priority].append(read)
                drive.queued += 1
            self._plan_pump()

    def _plan_pump(self) -> None:
        if not self._pump_planned and not self._closed:
            self._pump_planned = True
            self._loop.call_soon_threadsafe(self._pump)

    def cancel(self, read: Read) -> bool:
        """True: the read never starts and `on_done` is never called. False: it has started (or ended) and its buffer
        stays the kernel's until `on_done`."""
        with self._lock:
            if read.state is not State.QUEUED:
                return False
            read.state = State.CANCELLED
            self._drives[read.file.drive].queued -= 1
            self._cancelled += 1
            return True

    def promote(self, read: Read, priority: Priority) -> None:
        """A queued read becomes more urgent, behind those that are so already. One in flight is left alone."""
        with self._lock:
            if read.state is State.QUEUED and priority < read.priority:
                # The old place in the old queue stays behind and is skipped: its priority no longer matches.
                read.priority = priority
                self._drives[read.file.drive].queues[priority].append(read)
                self._plan_pump()

    def stats(self) -> SchedulerStats:
        """A snapshot."""
        with self._lock:
            now = self._clock()
            return SchedulerStats(
                tuple(
                    DriveStats(
                        d.name,
                        d.read_bytes,
                        d.reads,
                        d.busy + (now - d.busy_since if d.flying else 0.0),
                        d.flying,
                        d.queued,
                        d.retries,
                        d.short,
                        d.failures,
                    )
                    for d in self._drives
                ),
                self._flying_seconds + (now - self._flying_since if self._flying else 0.0),
                now - self._started_at,
                tuple(self._by_priority),
                self._cancelled,
            )

    # --- the loop's thread ---

    def _pump(self) -> None:
        started: list[Read] = []
        with self._lock:
            self._pump_planned = False
            if self._closed:
                return
            n = len(self._drives)
            for i in range(n):
                drive = self._drives[(self._next_drive + i) % n]
                while (read := self._pick(drive)) is not None:
                    now = self._clock()
                    read.state, read.since = State.FLYING, now
                    if not drive.flying:
                        drive.busy_since = now
                    if not self._flying:
                        self._flying_since = now
                    drive.queued -= 1
                    drive.flying += 1
                    drive.flying_bytes += len(read.buffer)
                    drive.flying_guesses += read.priority >= Priority.PREDICTED
                    self._flying += 1
                    started.append(read)
            self._next_drive = (self._next_drive + 1) % n if n else 0
        for read in started:
            self._start(read)
        if started:
            self._reader.flush()

    def _pick(self, drive: _Drive) -> Read | None:
        if drive.flying >= self._depth:
            return None
        for priority, waiting in enumerate(drive.queues):
            # A guess in flight cannot be taken back, so one place stays free for what is sure to be needed.
            if priority >= Priority.PREDICTED and drive.flying_guesses >= max(1, self._depth - 1):
                return None
            while waiting and (waiting[0].state is not State.QUEUED or waiting[0].priority != priority):
                waiting.popleft()
            if waiting:
                if drive.flying and drive.flying_bytes + len(waiting[0].buffer) > self._bytes_in_flight:
                    return None
                return waiting.popleft()
        return None

    def _start(self, read: Read) -> None:
        if self._closed:
            # A wait between two tries ended after the reader was closed.
            self._finish(read, read.error("the storage side is closed"))
            return
        at = read.done_bytes
        self._reader.start(
            Transfer(
                read.file.fd,
                align_down(read.offset) + at,
                read.buffer[at:] if at else read.buffer,
                lambda result: self._moved(read, result),
            )
        )

    def _again(self, read: Read, wait: float) -> None:
        if wait > 0:
            self._loop.call_later(wait, self._restart, read)
        else:
            self._restart(read)

    def _restart(self, read: Read) -> None:
        self._start(read)
        if not self._closed:
            self._reader.flush()

    def _moved(self, read: Read, result: int) -> None:
        if result < 0:
            self._failed(read, -result)
            return
        read.transient = 0
        need = read.offset % ALIGN + read.nbytes
        reached = read.done_bytes + result
        if reached >= need:
            self._whole(read)
            return
        if result == 0:
            self._retry(read, f"the file ended {need - reached} bytes early")
            return
        # Short: go on from the last whole page, which a direct descriptor demands.
        with self._lock:
            self._drives[read.file.drive].short += 1
        page = align_down(reached)
        read.fruitless = 0 if page > read.done_bytes else read.fruitless + 1
        if read.fruitless >= MAX_FRUITLESS:
            read.fruitless = 0
            self._retry(read, f"came short {MAX_FRUITLESS} times without a page more")
            return
        read.done_bytes = page
        self._again(read, 0.0)

    def _failed(self, read: Read, code: int) -> None:
        word = errno.errorcode.get(code, str(code))
        if code in TRANSIENT:
            read.transient += 1
            if read.transient <= MAX_TRANSIENT:
                self._again(read, self._retry_wait(read.transient - 1))
                return
            word += f" {MAX_TRANSIENT} times in a row"
        elif code in REFUSED_DIRECT and read.file.direct:
            log.warning("%s refuses direct reads (%s): from now on through the page cache", read.file.path, word)
            try:
                read.file.make_buffered()
            except StorageError as error:
                self._finish(read, error)
                return
            read.done_bytes = 0
            self._again(read, 0.0)
            return
        self._retry(read, f"read failed with {word}")

    def _retry(self, read: Read, message: str) -> None:
        """From the start once more; the second failure is the answer."""
        read.attempts += 1
        read.done_bytes = read.transient = 0
        if read.attempts > 1:
            self._finish(read, read.error(message))
            return
        with self._lock:
            self._drives[read.file.drive].retries += 1
        log.warning("%s, trying once more", read.error(message))
        self._again(read, 0.0)

    def _whole(self, read: Read) -> None:
        page = read.offset // ALIGN
        known = self._verify == "first" and page in read.file.verified
        if read.checksum is None or self._hashers is None or known:
            self._finish(read, None)
            return
        future = self._hashers.submit(xxhash.xxh3_64_intdigest, read.data)

        def hashed() -> None:
            if future.result() == read.checksum:
                read.file.verified.add(page)
                self._finish(read, None)
            else:
                self._retry(read, f"checksum is {future.result():016x}, the record says {read.checksum:016x}")

        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(hashed))

    def _finish(self, read: Read, error: StorageError | None) -> None:
        with self._lock:
            now = self._clock()
            drive = self._drives[read.file.drive]
            drive.flying -= 1
            drive.flying_bytes -= len(read.buffer)
            drive.flying_guesses -= read.priority >= Priority.PREDICTED
            if not drive.flying:
                drive.busy += now - drive.busy_since
            self._flying -= 1
            if not self._flying:
                self._flying_seconds += now - self._flying_since
            if error is None:
                drive.read_bytes += read.nbytes
                drive.reads += 1
                self._by_priority[read.priority] += read.nbytes
            else:
                drive.failures += 1
            read.state = State.DONE
            self._plan_pump()
        read.on_done(read, error)

    def close(self) -> None:
        """No more reads; what is queued ends with an error. On the loop's thread, before the reader is closed."""
        left: list[Read] = []
        with self._lock:
            self._closed = True
            for drive in self._drives:
                for priority, waiting in enumerate(drive.queues):
                    left += [r for r in waiting if r.state is State.QUEUED and r.priority == priority]
                    waiting.clear()
                drive.queued = 0
            for read in left:
                read.state = State.DONE
        for read in left:
            read.on_done(read, read.error("the storage side is closed"))
        if self._hashers is not None:
            self._hashers.shutdown(wait=True)
