"""Routed experts: a bounded cache in front of the drives, partitioned by layer.

Owns which experts are in memory and which reads are under way for them; knows nothing of what an
expert computes. The plan (`plan_cache`) is pure.

Why partitions: layers come round in a cycle, so one LRU over all of them that is smaller than a token's
whole set has always just evicted what comes next. Each layer keeps its own most recent experts; of one
acquisition the best ranks are the most recent. What a partition has no room for passes through a few
transient slots, so that any budget works, none included. An expert in use or in flight is in no LRU, hence
never evicted; however many ask for it, it is read once.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import cachetools
import numpy as np
from numpy.typing import NDArray

from sluice.io.buffers import BufferPool, NewSlot, SlotArena
from sluice.io.errors import StorageError, StoreError
from sluice.io.reader import OpenFile
from sluice.io.schedule import Priority, Read, Scheduler, State, Waiter
from sluice.io.store import ALIGN, NUMPY_DTYPES, ExpertRecord, Store, align_down, align_up

TRANSIENT_SLOTS = 6
"""Slots beside the cache, through which experts pass that are consumed and not kept: one being computed, a few in
flight, two that guesses may not take."""
MIN_TRANSIENT_SLOTS = 2
GUESS_RESERVE = 2


@dataclass(slots=True, eq=False)
class Expert:
    """One expert, wholly and correctly filled. parts: name to array [rows, cols], uint8, uint16 (bf16 bits),
    float16 or float32, possibly not aligned; valid until the iteration that gave it advances. matrices: what its user
    made of the parts, kept with the expert while it stays in memory."""

    id: int
    parts: Mapping[str, NDArray[Any]]
    matrices: Any = None


class Acquisition(Protocol):
    """Experts asked for together; a context manager whose exit gives all of them back."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def was_resident(self) -> bool:
        """Whether all were in memory when asked for, and stay there until the exit."""

    def as_they_arrive(self) -> Iterator[Expert]:
        """Each expert once, in order of arrival. Raises StorageError when one cannot be had."""


class ExpertSource(Protocol):
    """Experts as the model asks for them, from the compute thread."""

    def acquire(self, layer: int, ids: Sequence[int]) -> Acquisition:
        """Start reading what is not in memory. ids: distinct, in router order (best first). ValueError otherwise."""

    def hint(self, layer: int, ids: Sequence[int]) -> None:
        """Guess what `layer` will need, best guess first; read when nothing better wants the drive or the room."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Memory of the expert cache. slots are whole experts; cache_bytes + transient_bytes is all of it.

    quotas: slots of each layer's partition, in the order of the naming's layers; they add up to `slots`.
    """

    slots: int
    transient_slots: int
    slot_bytes: int
    quotas: tuple[int, ...]

    @property
    def cache_bytes(self) -> int:
        """Memory of what is kept."""
        return self.slots * self.slot_bytes

    @property
    def transient_bytes(self) -> int:
        """Memory of what passes through."""
        return self.transient_slots * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        """All memory of the cache."""
        return self.cache_bytes + self.transient_bytes


def partition(slots: int, layers: int, experts: int, counts: NDArray[np.integer[Any]] | None = None) -> tuple[int, ...]:
    """How many of `slots` each layer gets, at most `experts` each; equal shares, or by use.

    counts: (layers, experts) uses so far. A slot goes where it would have been hit most: the slots' worth
    of largest counts is taken over all layers at once, each layer keeping a floor of half an equal share.
    Pure; the sum is min(slots, layers x experts).
    """
    slots = min(slots, layers * experts)
    if layers == 0:
        return ()
    quotas = np.full(layers, slots // layers, np.int64)
    quotas[: slots - int(quotas.sum())] += 1
    if counts is None or not counts.any():
        return tuple(quotas.tolist())
    floor = quotas // 2
    left = slots - int(floor.sum())
    ranked = -np.sort(-counts.astype(np.int64), axis=1)
    # The k-th slot of a layer is worth its k-th largest count; those under the floor are taken already.
    worth = [(-int(ranked[row, k]), k, row) for row in range(layers) for k in range(int(floor[row]), experts)]
    worth.sort()
    for _, _, row in worth[:left]:
        floor[row] += 1
    return tuple(floor.tolist())


def plan_cache(
    store: Store,
    budget_bytes: int,
    *,
    transient_slots: int = TRANSIENT_SLOTS,
    counts: NDArray[np.integer[Any]] | None = None,
) -> CachePlan:
    """How many experts `budget_bytes` keeps, beside `transient_slots` that always exist. Pure."""
    naming = store.naming
    if naming is None or store.expert_slot_bytes == 0:
        return CachePlan(0, 0, 0, ())
    if transient_slots < MIN_TRANSIENT_SLOTS:
        raise ValueError(f"{transient_slots} transient slots, at least {MIN_TRANSIENT_SLOTS} are needed")
    slots = min(max(0, budget_bytes) // store.expert_slot_bytes, len(naming.layers) * naming.experts)
    quotas = partition(slots, len(naming.layers), naming.experts, counts)
    return CachePlan(slots, transient_slots, store.expert_slot_bytes, quotas)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Since start, in experts but for names that say bytes. hits: in memory when asked for; shared: already being
    read for somebody else or for a guess; misses: read on demand. guesses: reads begun by `hint`; guesses_used: of
    these, asked for later; guesses_wasted: never asked for; hints_dropped: guesses for which there was no room."""

    slots: int
    slot_bytes: int
    kept: int
    hits: int
    shared: int
    misses: int
    evictions: int
    guesses: int
    guesses_used: int
    guesses_wasted: int
    wasted_bytes: int
    hints_dropped: int
    pinned: int
    waits: int
    wait_seconds: float


class _Entry:
    """One expert in a slot, or on its way there."""

    __slots__ = (
        "error",
        "expert",
        "guess",
        "kept",
        "layer",
        "left",
        "pinned",
        "reads",
        "record",
        "row",
        "slot",
        "users",
        "view",
        "waiters",
    )

    def __init__(self, row: int, record: ExpertRecord, slot: int, kept: bool) -> None:
        self.row, self.layer, self.expert = row, record.layer, record.expert
        self.record, self.slot, self.kept = record, slot, kept
        self.guess = self.pinned = False
        self.users = 0
        self.reads: list[Read] = []
        self.left = 0  # reads that have not ended
        self.error: StorageError | None = None
        self.waiters: list[ExpertAcquisition] = []
        self.view: Expert | None = None

    @property
    def ready(self) -> bool:
        return self.left == 0 and self.error is None


class ExpertAcquisition:
    """See Acquisition. Made by ExpertCache.acquire; used by one thread."""

    def __init__(self, cache: ExpertCache, layer: int, row: int, ids: list[int], quota: int) -> None:
        self._cache = cache
        self.layer, self.row, self.ids = layer, row, ids
        self.keepers = frozenset(ids[:quota])
        self.pending: deque[int] = deque()  # no room yet
        self.entries: dict[int, _Entry] = {}  # asked for and not yet consumed
        self.arrived: deque[_Entry] = deque()
        self.error: StorageError | None = None
        self._resident: tuple[_Entry, ...] = ()
        self._over = False

    def take_resident(self) -> None:
        """Where every expert is in a kept slot: take them all at once, to be given back together. Holds the lock."""
        if len(self.arrived) == len(self.ids) and all(entry.kept for entry in self.arrived):
            self._resident = tuple(self.arrived)
            self.arrived.clear()

    @property
    def was_resident(self) -> bool:
        """See Acquisition."""
        return bool(self._resident)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._over:
            self._over = True
            self._cache._leave(self)

    def as_they_arrive(self) -> Iterator[Expert]:
        """See Acquisition. An expert is given back as soon as the iteration advances, or at the exit where all were
        kept in memory when asked for: their slots are nobody's to wait for, and a layer then takes two locks."""
        for entry in self._resident:
            if self._over:
                return
            yield self._cache._view(entry)
        for _ in range(len(self.ids) - len(self._resident)):
            entry = self._cache._next(self)
            try:
                yield self._cache._view(entry)
            finally:
                self._cache._consumed(self, entry)


class ExpertCache:
    """The ExpertSource of a plan. Thread-safe; consumers block, completions arrive on the loop's thread."""

    def __init__(
        self,
        store: Store,
        plan: CachePlan,
        files: Sequence[OpenFile],
        scheduler: Scheduler,
        pool: BufferPool,
        stuck_seconds: float = 120.0,
        new_slot: NewSlot | None = None,
    ) -> None:
        self._store, self._files, self._scheduler, self._pool = store, files, scheduler, pool
        self._waiter = Waiter(stuck_seconds)
        self._condition = self._waiter.condition
        self.plan = plan
        naming = store.naming
        layers, self._experts = (naming.layers, naming.experts) if naming is not None else ((), 0)
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._layers = layers
        self._quotas = list(plan.quotas)
        self._slots = SlotArena(pool, plan.slots + plan.transient_slots, plan.slot_bytes, "expert cache", new_slot)
        self._lru = [self._partition(quota) for quota in self._quotas]
        self._kept = [0] * len(layers)  # entries of each layer that count against its quota, in use or not
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._guesses: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
        self._doomed: list[_Entry] = []  # not in the table any more, slots still being read into
        self._queue: list[ExpertAcquisition] = []  # with pending ids, oldest first
        self.counts = np.zeros((len(layers), self._experts), np.int64)
        """(layers, experts): how often each was asked for. Read it, or load it before the first acquire."""
        self._hits = self._shared = self._misses = self._evictions = self._pinned = 0
        self._guessed = self._guess_used = self._guess_wasted = self._wasted_bytes = self._hints_dropped = 0
        self._closed = False

    def _partition(self, quota: int) -> cachetools.LRUCache[int, _Entry]:
        slot_bytes = max(1, self.plan.slot_bytes)
        return cachetools.LRUCache(quota * slot_bytes, getsizeof=lambda entry: slot_bytes)

    # --- ExpertSource ---

    def acquire(self, layer: int, ids: Sequence[int]) -> ExpertAcquisition:
        """See ExpertSource."""
        row = self._check(layer, ids)
        wanted = [int(i) for i in ids]
        with self._condition:
            self._alive()
            acquisition = ExpertAcquisition(self, layer, row, wanted, self._quotas[row])
            self.counts[row, wanted] += 1
            for expert in wanted:
                entry = self._entries.get((row, expert))
                if entry is None:
                    acquisition.pending.append(expert)
                    self._misses += 1
                else:
                    self._join(acquisition, entry)
            # What will not be kept goes first, to make room for what will.
            acquisition.arrived = deque(reversed(acquisition.arrived))
            if acquisition.pending:
                self._queue.append(acquisition)
                self._serve()
            acquisition.take_resident()
        return acquisition

    def hint(self, layer: int, ids: Sequence[int]) -> None:
        """See ExpertSource. Takes free slots down to a reserve, then the least recent of the layer's own partition."""
        row = self._check(layer, ids)
        begun: list[Read] = []
        with self._condition:
            if self._closed:
                return
            wanted = [int(i) for i in ids]
            for place, expert in enumerate(wanted):
                present = self._entries.get((row, expert))
                if present is not None:
                    self._touch(row, expert)
                    continue
                room = self._guess_room(row, wanted)
                if room is None:
                    self._hints_dropped += sum((row, e) not in self._entries for e in wanted[place:])
                    break
                entry = self._begin(row, expert, *room, Priority.PREDICTED)
                entry.guess = True
                self._guesses[row, expert] = entry
                self._guessed += 1
                begun += entry.reads
            if begun:
                self._scheduler.submit(begun)

    def _check(self, layer: int, ids: Sequence[int]) -> int:
        row = self._rows.get(layer)
        if row is None:
            raise ValueError(f"layer {layer} has no experts")
        if len(set(ids)) != len(ids) or (len(ids) and not 0 <= min(ids) <= max(ids) < self._experts):
            raise ValueError(
                f"experts of layer {layer} must be distinct and in 0..{self._experts - 1}: {list(ids)[:20]}"
            )
        return row

    def _alive(self) -> None:
        if self._closed:
            raise StorageError("the expert cache is closed")

    # --- asking; all of these hold the condition ---

    def _join(self, acquisition: ExpertAcquisition, entry: _Entry) -> None:
        """One more user of an entry that exists."""
        entry.users += 1
        acquisition.entries[entry.expert] = entry
        if entry.guess:
            entry.guess = False
            self._guesses.pop((entry.row, entry.expert), None)
            self._guess_used += 1
        if entry.ready:
            self._hits += 1
            self._lru[entry.row].pop(entry.expert, None)
            acquisition.arrived.append(entry)
            return
        self._shared += 1
        entry.waiters.append(acquisition)
        for read in entry.reads:
            self._scheduler.promote(read, Priority.DEMAND)

    def _serve(self) -> None:
        """Begin reads for pending ids, oldest acquisition first, as far as there is room."""
        begun: list[Read] = []
        for acquisition in list(self._queue):
            while acquisition.pending:
                expert, row = acquisition.pending[0], acquisition.row
                entry = self._entries.get((row, expert))
                if entry is not None:
                    acquisition.pending.popleft()
                    self._join(acquisition, entry)
                    self._condition.notify_all()
                    continue
                room = self._room(row, expert in acquisition.keepers)
                if room is None:
                    break
                acquisition.pending.popleft()
                entry = self._begin(row, expert, *room, Priority.DEMAND)
                entry.users = 1
                entry.waiters.append(acquisition)
                acquisition.entries[expert] = entry
                begun += entry.reads
            if acquisition.pending:
                break
            self._queue.remove(acquisition)
        if begun:
            self._scheduler.submit(begun)

    def _room(self, row: int, keep: bool) -> tuple[int, bool] | None:
        """(slot, whether it counts against the layer's quota) for a demanded expert, or None."""
        if keep and self._kept[row] >= self._quotas[row]:
            if not self._lru[row]:
                keep = False
            else:
                return self._evict(row), True
        slot = self._slots.lend_nowait()
        if slot is None:
            slot = self._reclaim()
        return None if slot is None else (slot, keep)

    def _guess_room(self, row: int, wanted: Sequence[int]) -> tuple[int, bool] | None:
        spare = self._slots.free
        if self._kept[row] < self._quotas[row] and spare > GUESS_RESERVE:
            slot = self._slots.lend_nowait()
            return None if slot is None else (slot, True)
        lru = self._lru[row]
        if lru:
            expert, entry = lru.popitem()
            lru[expert] = entry  # most recent now, unless it goes
            if expert not in wanted:
                del lru[expert], self._entries[row, expert]
                self._kept[row] -= 1
                self._evictions += 1
                return entry.slot, True
        if spare > GUESS_RESERVE:
            slot = self._slots.lend_nowait()
            return None if slot is None else (slot, False)
        return None

    def _touch(self, row: int, expert: int) -> None:
        self._lru[row].get(expert)

    def _evict(self, row: int) -> int:
        """The least recent of a partition goes; its slot stays lent, to the caller."""
        expert, entry = self._lru[row].popitem()
        del self._entries[row, expert]
        self._kept[row] -= 1
        self._evictions += 1
        return entry.slot

    def _reclaim(self) -> int | None:
        """A slot taken from a guess, the latest first, or None. A guess in flight keeps its slot until its end."""
        for entry in list(reversed(self._guesses.values())):
            if entry.ready or self._cancel(entry):
                self._waste(entry)
                self._forget(entry)
                return entry.slot
        return None

    def _cancel(self, entry: _Entry) -> bool:
        """Take back the reads that have not started; True when none is left in flight.

        An entry that lost some of its reads and not all will never be whole: nobody may join it any more, and its
        slot comes back when the last read ends.
        """
        for read in entry.reads:
            if read.state is State.QUEUED and self._scheduler.cancel(read):
                entry.left -= 1
                entry.error = entry.error or StorageError("the read was cancelled")
        if entry.left and entry.error is not None and entry not in self._doomed:
            self._forget(entry)
            self._doomed.append(entry)
        return entry.left == 0

    def _begin(self, row: int, expert: int, slot: int, kept: bool, priority: Priority) -> _Entry:
        """A new entry with its reads made, not yet submitted."""
        record = self._store.expert(self._layers[row], expert)
        entry = _Entry(row, record, slot, kept)
        if kept:
            self._kept[row] += 1
        memory = self._slots.view(slot)
        for part in record.reads:
            extent, at = part.extent, align_down(part.at)
            entry.reads.append(
                Read(
                    self._files[extent.file],
                    extent.offset,
                    extent.nbytes,
                    memory[at : at + align_up(extent.offset % ALIGN + extent.nbytes)],
                    priority,
                    lambda read, error: self._ended(entry, error),
                    checksum=extent.checksum,
                    layer=record.layer,
                    expert=expert,
                )
            )
        entry.left = len(entry.reads)
        self._entries[row, expert] = entry
        return entry

    # --- completion, on the loop's thread ---

    def _ended(self, entry: _Entry, error: StorageError | None) -> None:
        with self._condition:
            entry.left -= 1
            entry.error = entry.error or error
            if entry.left or self._closed:
                return
            if entry in self._doomed:
                self._doomed.remove(entry)
            waiters, entry.waiters = entry.waiters, []
            if entry.error is not None:
                self._forget(entry)
                self._slots.give_back(entry.slot)
                for acquisition in waiters:
                    acquisition.entries.pop(entry.expert, None)
                    acquisition.error = acquisition.error or entry.error
            else:
                for acquisition in waiters:
                    acquisition.arrived.append(entry)
                if not entry.users and not entry.guess:
                    self._settle(entry, None)
            self._serve()
            self._condition.notify_all()

    # --- consuming ---

    def _next(self, acquisition: ExpertAcquisition) -> _Entry:
        with self._condition:
            self._waiter.wait_until(
                lambda: bool(acquisition.arrived) or acquisition.error is not None or self._closed,
                lambda: self._reads_for(acquisition),
            )
            if acquisition.error is not None:
                raise acquisition.error
            self._alive()
            return acquisition.arrived.popleft()

    def _reads_for(self, acquisition: ExpertAcquisition) -> list[Read]:
        if acquisition.pending and not any(not e.ready for e in acquisition.entries.values()):
            everyone = [*self._entries.values(), *self._doomed]
            return [read for entry in everyone for read in entry.reads if entry.left]
        return [read for entry in acquisition.entries.values() for read in entry.reads]

    def _view(self, entry: _Entry) -> Expert:
        if entry.view is None:
            memory = self._slots.view(entry.slot)
            entry.view = Expert(
                entry.expert,
                {p.name: np.ndarray(p.shape, NUMPY_DTYPES[p.dtype], memory, p.at) for p in entry.record.parts},
            )
        return entry.view

    def _consumed(self, acquisition: ExpertAcquisition, entry: _Entry) -> None:
        with self._condition:
            if self._closed:
                return
            if acquisition.entries.pop(entry.expert, None) is not entry:
                return  # the acquisition was left while its iteration stood still, and gave all back then
            entry.users -= 1
            if not entry.users:
                self._settle(entry, acquisition)
            self._serve()

    def _settle(self, entry: _Entry, acquisition: ExpertAcquisition | None) -> None:
        """Nobody uses this entry any more: keep it, most recent, or free its slot."""
        if entry.pinned:
            return
        row, quota = entry.row, self._quotas[entry.row]
        keeper = acquisition is not None and entry.expert in acquisition.keepers
        if entry.kept and self._kept[row] > quota:
            pass  # the partition has been made smaller
        elif entry.kept:
            heir = None
            if acquisition is not None and not keeper:
                # A better rank of this acquisition found no room in the partition: this one's place is its.
                heir = next(
                    (e for e in acquisition.entries.values() if not e.kept and e.expert in acquisition.keepers), None
                )
            if heir is None:
                self._lru[row][entry.expert] = entry
                return
            heir.kept, entry.kept = True, False
        elif self._kept[row] < quota:
            entry.kept = True
            self._kept[row] += 1
            self._lru[row][entry.expert] = entry
            return
        elif keeper and self._lru[row]:
            self._slots.give_back(self._evict(row))
            entry.kept = True
            self._kept[row] += 1
            self._lru[row][entry.expert] = entry
            return
        self._forget(entry)
        self._slots.give_back(entry.slot)

    def _forget(self, entry: _Entry) -> None:
        """The entry is in memory no more. Its slot is the caller's to pass on."""
        if self._entries.get((entry.row, entry.expert)) is entry:
            del self._entries[entry.row, entry.expert]
        if self._guesses.get((entry.row, entry.expert)) is entry:  # not another one that was begun since
            del self._guesses[entry.row, entry.expert]
        if entry.pinned:
            self._pinned -= 1
        if entry.kept:
            entry.kept = False
            self._kept[entry.row] -= 1

    def _waste(self, entry: _Entry) -> None:
        self._guess_wasted += 1
        if entry.ready:
            self._wasted_bytes += entry.record.nbytes

    def _leave(self, acquisition: ExpertAcquisition) -> None:
        with self._condition:
            if self._closed:
                return
            acquisition.pending.clear()
            if acquisition in self._queue:
                self._queue.remove(acquisition)
            acquisition.arrived.clear()
            entries, acquisition.entries = list(acquisition.entries.values()), {}
            for entry in reversed(entries):
                if acquisition in entry.waiters:
                    entry.waiters.remove(acquisition)
                entry.users -= 1
                if entry.users:
                    continue
                if entry.ready:
                    self._settle(entry, acquisition)
                elif self._cancel(entry):
                    self._forget(entry)
                    self._slots.give_back(entry.slot)
            self._end_guesses(acquisition.row)
            if not acquisition.was_resident:  # best rank last, so that it stays longest: as just settled, if all were
                for expert in reversed(acquisition.ids):
                    self._touch(acquisition.row, expert)
            self._serve()

    def _end_guesses(self, row: int) -> None:
        """The layer has been served: guesses for it that nobody asked for are worth little now."""
        for key in [key for key in self._guesses if key[0] == row]:
            entry = self._guesses.pop(key)
            self._waste(entry)
            entry.guess = False
            if entry.ready:
                self._settle(entry, None)
            elif self._cancel(entry):
                self._forget(entry)
                self._slots.give_back(entry.slot)

    # --- what is worth keeping ---

    def preload(self, pairs: Iterable[tuple[int, int]], *, pin: bool = False) -> int:
        """Begin to read (layer, expert) pairs while there is room in their partitions; returns how many. Below all
        other reads. pin: never evict them (until `unpin`)."""
        begun: list[Read] = []
        n = 0
        with self._condition:
            self._alive()
            for layer, expert in pairs:
                row = self._check(layer, [expert])
                entry = self._entries.get((row, expert))
                if entry is None:
                    if self._kept[row] >= self._quotas[row] or not self._slots.free:
                        continue
                    slot = self._slots.lend_nowait()
                    assert slot is not None
                    entry = self._begin(row, expert, slot, True, Priority.PRELOAD)
                    begun += entry.reads
                    n += 1
                if pin and entry.kept and not entry.pinned:
                    entry.pinned = True
                    self._pinned += 1
                    self._lru[row].pop(expert, None)
            if begun:
                self._scheduler.submit(begun)
        return n

    def unpin(self) -> None:
        """Pinned experts become ordinary ones."""
        with self._condition:
            for entry in list(self._entries.values()):
                if entry.pinned:
                    entry.pinned = False
                    self._pinned -= 1
                    if entry.ready and not entry.users:
                        self._settle(entry, None)

    def most_used(self, share: float = 1.0) -> list[tuple[int, int]]:
        """(layer, expert) of the most used experts, most used first, so many of each layer as `share` of its quota."""
        pairs = []
        for row, layer in enumerate(self._layers):
            order = np.argsort(-self.counts[row], kind="stable")[: int(self._quotas[row] * share)]
            pairs += [(int(self.counts[row, e]), layer, int(e)) for e in order if self.counts[row, e]]
        return [(layer, expert) for _, layer, expert in sorted(pairs, key=lambda p: -p[0])]

    def save_counts(self, path: Path) -> None:
        """Write `counts` atomically, with the checkpoint's identity."""
        record = {"identity": self._store.identity, "layers": list(self._layers), "counts": self.counts.tolist()}
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(json.dumps(record, separators=(",", ":")))
        os.replace(temporary, path)

    def load_counts(self, path: Path) -> None:
        """Take over saved counts. Raises StoreError when the file is damaged or of another checkpoint."""
        self.counts[:] = read_counts(path, self._store)

    # --- size ---

    def resize(self, budget_bytes: int) -> CachePlan:
        """Another budget at run time, partitioned anew by what the counts say. Shrinking gives memory back at once for
        what is not in use, later for what is. Growing may raise BudgetError; then nothing has changed."""
        plan = plan_cache(
            self._store,
            budget_bytes,
            transient_slots=max(MIN_TRANSIENT_SLOTS, self.plan.transient_slots),
            counts=self.counts,
        )
        with self._condition:
            self._alive()
            if not self._layers:
                return plan
            total = plan.slots + plan.transient_slots
            if total > self._slots.capacity:
                self._slots.grow_to(total)
            self.plan = plan
            for row, quota in enumerate(plan.quotas):
                self._quotas[row] = quota
                while self._kept[row] > quota and self._lru[row]:
                    self._slots.give_back(self._evict(row))
                lru = self._lru[row]
                self._lru[row] = self._partition(max(quota, len(lru)))
                while lru:
                    expert, entry = lru.popitem()
                    self._lru[row][expert] = entry
            self._slots.shrink_to(total)
            self._serve()
        return plan

    def shrink(self, nbytes: int) -> int:
        """Give back `nbytes` or all there is, for memory pressure. Returns by how much the plan shrank."""
        before = self.plan.cache_bytes
        after = self.resize(max(0, before - nbytes)).cache_bytes if self._layers else before
        return before - after

    def rebalance(self) -> None:
        """Partition the same memory anew by what the counts say now."""
        self.resize(self.plan.cache_bytes)

    def stats(self) -> CacheStats:
        """A snapshot."""
        with self._condition:
            return CacheStats(
                self.plan.slots,
                self.plan.slot_bytes,
                sum(self._kept),
                self._hits,
                self._shared,
                self._misses,
                self._evictions,
                self._guessed,
                self._guess_used,
                self._guess_wasted,
                self._wasted_bytes,
                self._hints_dropped,
                self._pinned,
                self._waiter.waits,
                self._waiter.wait_seconds,
            )

    def close(self) -> None:
        """Give memory back. What is in flight keeps its mapping until its end. Harmless twice."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            for entry in self._entries.values():
                for read in entry.reads:
                    self._scheduler.cancel(read)
            self._entries.clear()
            self._guesses.clear()
            for lru in self._lru:
                lru.clear()
            self._slots.close()
            self._condition.notify_all()


def read_counts(path: Path, store: Store) -> NDArray[np.int64]:
    """Saved counts, (layers, experts). Raises StoreError: damaged, or of another checkpoint."""
    naming = store.naming
    try:
        record = json.loads(path.read_text())
        counts = np.array(record["counts"], np.int64)
        identity, layers = record["identity"], record["layers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read as counts of experts ({str(error)[:100]})") from error
    if identity != store.identity:
        raise StoreError(f"{path}: counts of checkpoint {str(identity)[:40]}, this one is {store.identity}")
    if (
        naming is None
        or layers != list(naming.layers)
        or counts.shape != (len(layers), naming.experts)
        or (counts < 0).any()
    ):
        raise StoreError(f"{path}: counts of shape {counts.shape} do not fit this checkpoint's experts")
    return counts
