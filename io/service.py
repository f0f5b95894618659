"""Everything of io behind one handle: opens files, reader, memory, trunk and experts, and owns the I/O thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from sluice.io.buffers import BufferPool, NewSlot, PoolStats
from sluice.io.errors import PresetError, StorageError
from sluice.io.experts import CachePlan, CacheStats, ExpertCache
from sluice.io.loop import IoLoop
from sluice.io.reader import UNSUPPORTED, OpenFile, Reader, Transfer, open_reader
from sluice.io.schedule import Scheduler, SchedulerStats
from sluice.io.store import ALIGN, Store
from sluice.io.trunk import VECTOR_BATCH_BYTES, Trunk, TrunkPlan, TrunkStats, memory_bytes

log = logging.getLogger(__name__)

PROBE_SECONDS = 30.0

MakeReader = Callable[[asyncio.AbstractEventLoop, int], Reader]


@dataclass(frozen=True, slots=True)
class IoSettings:
    """backend: auto, uring or threads. direct: auto, on or off (O_DIRECT). depth: reads in flight per drive, 1..64.
    verify: off, first or always (checksums of packed stores). stuck_seconds: a read in flight for longer fails.
    new_slot: told the memory of every slot of the expert cache before it has pages; who wants them on a certain node
    touches them there."""

    backend: str = "auto"
    direct: str = "auto"
    depth: int = 4
    verify: str = "first"
    stuck_seconds: float = 120.0
    new_slot: NewSlot | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("backend", self.backend, ("auto", "uring", "threads")),
            ("direct", self.direct, ("auto", "on", "off")),
            ("verify", self.verify, ("off", "first", "always")),
        ):
            if value not in allowed:
                raise PresetError(f"io.{name} = {value!r}, must be one of {', '.join(allowed)}")
        if not 1 <= self.depth <= 64:
            raise PresetError(f"io.depth = {self.depth}, must be 1..64")


@dataclass(frozen=True, slots=True)
class IoStats:
    """All of io since start. direct_files of files bypass the page cache; notes say what is not as asked for."""

    backend: str
    files: int
    direct_files: int
    notes: tuple[str, ...]
    scheduler: SchedulerStats
    trunk: TrunkStats
    experts: CacheStats
    pool: PoolStats


class IoService:
    """The running storage side. `trunk` and `experts` are what the model is given. A context manager; closing twice
    is harmless. Made by `open`."""

    def __init__(self, store: Store, settings: IoSettings) -> None:
        self.store, self.settings = store, settings
        self.notes: list[str] = []
        self._loop = IoLoop()
        self._files: list[OpenFile] = []
        self._reader: Reader | None = None
        self._scheduler: Scheduler | None = None
        self._closed = False
        self.trunk: Trunk
        self.experts: ExpertCache
        self.pool: BufferPool

    @staticmethod
    def open(
        store: Store,
        trunk_plan: TrunkPlan,
        cache_plan: CachePlan,
        settings: IoSettings | None = None,
        *,
        progress: Callable[[int, int], None] = lambda done, total: None,
        make_reader: MakeReader | None = None,
    ) -> IoService:
        """Build everything as planned and read what is pinned; progress(bytes done, bytes in all) meanwhile.

        Blocks (seconds per pinned GB): not for an event loop. make_reader replaces the reader that settings.backend
        names (tests). Raises PresetError (a backend that was demanded cannot be had), StorageError (a file cannot be
        read), BudgetError (no memory). Nothing is left behind then.
        """
        service = IoService(store, settings or IoSettings())
        try:
            service._start(trunk_plan, cache_plan, progress, make_reader)
        except BaseException:
            service.close()
            raise
        return service

    def _start(
        self,
        trunk_plan: TrunkPlan,
        cache_plan: CachePlan,
        progress: Callable[[int, int], None],
        make_reader: MakeReader | None,
    ) -> None:
        settings, store = self.settings, self.store
        drives = {name: i for i, name in enumerate(store.drives)}
        direct = settings.direct != "off"
        for file in store.files:
            self._files.append(OpenFile(file.path, drives[file.drive], file.drive, direct))
        capacity = settings.depth * max(1, len(drives))
        if make_reader is not None:
            maker = make_reader
            self._reader = self._loop.call(lambda: maker(self._loop.loop, capacity))
        else:
            self._reader, reason = self._loop.call(lambda: open_reader(settings.backend, self._loop.loop, capacity))
            self._note(reason)
            self._probe(capacity)
        if settings.direct == "on":
            refused = next((f for f in self._files if not f.direct), None)
            if refused is not None:
                raise PresetError(f'io.direct = "on", but {refused.path} cannot be read directly; use "auto"')
        reader = self._reader
        self._scheduler = Scheduler(self._loop.loop, reader, store.drives, depth=settings.depth, verify=settings.verify)
        self.pool = BufferPool(0)
        self._limit_pool(trunk_plan, cache_plan)
        self.trunk = Trunk(store, trunk_plan, self._files, self._scheduler, self.pool, settings.stuck_seconds)
        self.experts = ExpertCache(
            store, cache_plan, self._files, self._scheduler, self.pool, settings.stuck_seconds, settings.new_slot
        )
        self.trunk.load(progress)

    def _note(self, text: str) -> None:
        if text:
            log.warning(text)
            self.notes.append(text)

    # --- probing ---

    def _transfer(self, file: OpenFile, room: memoryview) -> int:
        """One real transfer of the file's first page, by the reader in use."""
        ended = threading.Event()
        results: list[int] = []

        def done(result: int) -> None:
            results.append(result)
            ended.set()

        reader = self._reader
        assert reader is not None

        def start() -> None:
            reader.start(Transfer(file.fd, 0, room, done))
            reader.flush()

        self._loop.call(start)
        if not ended.wait(PROBE_SECONDS):
            raise StorageError(f"no answer in {PROBE_SECONDS:.0f} s", drive=file.drive_name, file=str(file.path))
        return results[0]

    def _probe(self, capacity: int) -> None:
        """Read a page of every file as it will be read; step down, by file or for all, where that is refused."""
        pool = BufferPool(ALIGN)
        arena = pool.arena(ALIGN, "probe")
        buffered: list[OpenFile] = [f for f in self._files if not f.direct and self.settings.direct != "off"]
        for file in self._files:
            result = self._transfer(file, arena.view)
            if -result in UNSUPPORTED and file.direct:
                file.make_buffered()
                buffered.append(file)
                result = self._transfer(file, arena.view)
            reader = self._reader
            if -result in UNSUPPORTED and reader is not None and reader.name == "uring":
                if self.settings.backend == "uring":
                    raise PresetError(f'io.backend = "uring", but a read of {file.path} by it is refused; use "auto"')
                self._note(f"io_uring is refused on {file.path} (errno {-result}), reading with threads")
                self._loop.call(reader.close)
                self._reader, _ = self._loop.call(lambda: open_reader("threads", self._loop.loop, capacity))
                result = self._transfer(file, arena.view)
            if result < 0:
                # The scheduler reads with a retry; a drive that fails its very first page may be better then.
                log.warning("%s: the first page cannot be read (errno %d)", file.path, -result)
        if buffered:
            more = f" and {len(buffered) - 1} more" if len(buffered) > 1 else ""
            self._note(f"{buffered[0].path}{more} cannot be read directly, reading through the page cache")

    # --- life ---

    def resize(self, trunk_plan: TrunkPlan, cache_plan: CachePlan) -> None:
        """Take on other budgets, from the consuming thread between two passes: first what shrinks, then what grows,
        so that the memory held never passes the larger of the two plans. Raises StorageError or BudgetError."""
        needed = trunk_plan.total_bytes - trunk_plan.vectors_bytes + cache_plan.total_bytes
        held = self.pool.stats().limit_bytes
        self.pool.raise_limit(max(needed, held))
        if cache_plan.cache_bytes < self.experts.plan.cache_bytes:
            self.experts.resize(cache_plan.cache_bytes)
        if trunk_plan != self.trunk.plan:
            self.trunk.resize(trunk_plan)
        if cache_plan.cache_bytes > self.experts.plan.cache_bytes:
            self.experts.resize(cache_plan.cache_bytes)
        self.pool.raise_limit(needed)

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that all reads are driven from; it runs in a thread of its own."""
        return self._loop.loop

    def stats(self) -> IoStats:
        """A snapshot of everything. From any thread."""
        assert self._scheduler is not None
        assert self._reader is not None
        return IoStats(
            self._reader.name,
            len(self._files),
            sum(file.direct for file in self._files),
            tuple(self.notes),
            self._scheduler.stats(),
            self.trunk.stats(),
            self.experts.stats(),
            self.pool.stats(),
        )

    def _limit_pool(self, trunk_plan: TrunkPlan, cache_plan: CachePlan) -> None:
        """The pool's promise is the plan. Vectors pass through a buffer before the ring exists; that is less than
        what comes later in all but tests."""
        largest = max((memory_bytes(p.extent) for n in trunk_plan.vectors for p in self.store.pieces(n)), default=0)
        planned = trunk_plan.total_bytes - trunk_plan.vectors_bytes + cache_plan.total_bytes
        self.pool.raise_limit(max(planned, VECTOR_BATCH_BYTES + largest))

    def close(self) -> None:
        """Stop reading and give back descriptors, threads and memory. Not from the I/O thread; harmless twice."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "experts"):
            self.experts.close()
        if hasattr(self, "trunk"):
            self.trunk.close()
        if self._scheduler is not None:
            self._loop.call(self._scheduler.close)
        if self._reader is not None:
            self._loop.call(self._reader.close)
        self._loop.close()
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
