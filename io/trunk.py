"""The trunk: every weight a token always uses. Pinned pieces, and a ring of blocks for the rest.

Owns the plan of what is pinned (pure: `plan_trunk`), the resident memory, and the order in which blocks
are handed out. Knows bytes, rows and dtypes; which matrix means what is the model's affair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sluice.io.buffers import Arena, BufferPool, SlotArena
from sluice.io.errors import StorageError, StoreError
from sluice.io.reader import OpenFile
from sluice.io.schedule import Priority, Read, Scheduler, State, Waiter, fetch, ignore_end
from sluice.io.store import ALIGN, NUMPY_DTYPES, Extent, Piece, Store, TensorRecord, align_down, align_up

RING_UNIT_BYTES = 24 * 2**20
"""Target size of a streamed block: whole records of 16-32 MiB keep a drive at its rate with one or two in flight."""
RING_SLOTS = 6
MIN_RING_SLOTS = 4
"""One held by `whole`, one being used, two in flight."""
SLOTS_PER_DRIVE = 3
"""Where pieces are dealt over drives: two in flight on each, one in use."""
ROW_BUFFERS = 16
VECTOR_BATCH_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class MatrixUse:
    """One matrix in the order of a pass. whole: needed as one array (`whole()`), so never cut. row_multiple:
    blocks hold a multiple of this many rows, but for the last. pin: resident whatever the budget (it counts first)."""

    name: str
    whole: bool = False
    row_multiple: int = 1
    pin: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [row0, row0 + len(array)) of one matrix, wholly and correctly filled.

    array: [rows, K], uint16 (bf16 bits), float16 or float32, possibly not aligned; valid until the iterator advances.
    """

    row0: int
    array: NDArray[Any]


class TrunkSource(Protocol):
    """Weights as the model asks for them; every call comes from the compute thread and may block."""

    def vector(self, name: str) -> NDArray[np.float32]:
        """A small tensor, always resident, widened to float32, original shape. KeyError when not declared."""

    def blocks(self, name: str) -> Iterator[Block]:
        """The matrix in row order; RuntimeError when it is not the next one of the declared order."""

    def whole(self, name: str) -> AbstractContextManager[NDArray[Any]]:
        """The matrix as one array, held until exit; it must be declared `whole`."""

    def rows(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """[n, K] float32: single rows of a declared row table. IndexError for an id out of range."""

    def peek(self, name: str) -> NDArray[Any] | None:
        """The matrix as one array at any time, out of the order of a pass, where it is pinned whole; None otherwise."""

    def begin_pass(self, skip: Collection[str] = ()) -> None:
        """Before the first matrix of a pass. skip: matrices that this pass will not ask for (lm_head in prefill)."""

    def abort_pass(self) -> None:
        """After an error within a pass: the next pass begins at the first matrix again."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows [row0, row0 + rows) of matrix number `matrix` of the order: what is pinned, or streamed, as one piece."""

    matrix: int
    row0: int
    rows: int
    extent: Extent
    pinned: bool


@dataclass(frozen=True, slots=True)
class TrunkPlan:
    """What is pinned and what streams, computed from headers alone. All sizes in bytes of memory, slack included.

    pinned_bytes <= the budget (or the forced pins, when those alone are more). ring_bytes = ring_slots x
    slot_bytes, 0 when nothing streams. vectors_bytes: float32, always resident. rows_bytes: buffers for
    single rows. streamed_bytes_per_pass: weights read from the drives in each pass. trunk_bytes: all weights of
    matrices and row tables, as stored.
    """

    order: tuple[MatrixUse, ...]
    vectors: tuple[str, ...]
    row_tables: tuple[str, ...]
    pinned_tables: tuple[str, ...]
    units: tuple[Unit, ...]
    pinned_bytes: int
    ring_slots: int
    slot_bytes: int
    vectors_bytes: int
    row_buffer_bytes: int
    streamed_bytes_per_pass: int
    trunk_bytes: int

    @property
    def ring_bytes(self) -> int:
        """Memory of the ring."""
        return self.ring_slots * self.slot_bytes

    @property
    def rows_bytes(self) -> int:
        """Memory of the buffers for single rows."""
        return ROW_BUFFERS * self.row_buffer_bytes

    @property
    def total_bytes(self) -> int:
        """All memory of the trunk."""
        return self.pinned_bytes + self.ring_bytes + self.vectors_bytes + self.rows_bytes


def _matrix(store: Store, name: str) -> TensorRecord:
    record = store.tensors.get(name)
    if record is None:
        raise StoreError(f"{store.path}: tensor {name} is missing")
    if record.dtype not in NUMPY_DTYPES or record.dtype == "U8":
        raise StoreError(f"{store.path}: tensor {name} is {record.dtype}, a trunk tensor must be BF16, F16 or F32")
    return record


def memory_bytes(extent: Extent) -> int:
    """Memory that an extent needs as it is read: from its first page to its last."""
    return align_up(extent.offset % ALIGN + extent.nbytes)


def cut_rows(piece: Piece, unit_bytes: int, multiple: int) -> list[Piece]:
    """The piece in runs of rows of about unit_bytes, each but the last a multiple of `multiple` rows. Pure.

    A piece with a checksum stays whole: half of it could not be checked.
    """
    extent = piece.extent
    if extent.nbytes <= unit_bytes or extent.checksum is not None or not piece.rows:
        return [piece]
    row_bytes = extent.nbytes // piece.rows
    step = -(-piece.rows // -(-extent.nbytes // unit_bytes))
    step = -(-step // multiple) * multiple
    return [
        Piece(
            piece.row0 + at,
            min(step, piece.rows - at),
            Extent(extent.file, extent.offset + at * row_bytes, min(step, piece.rows - at) * row_bytes),
        )
        for at in range(0, piece.rows, step)
    ]


def choose_pinned(sizes: Sequence[int], forced: Sequence[bool], budget: int) -> list[bool]:
    """Which of the units, in the order of use, stay in memory for `budget` bytes. Pure.

    The share pinned so far follows the share passed so far, so that every streamed unit has as much pinned work
    before it to hide behind; what is left over goes to the largest that still fit. Forced ones come first and are
    pinned even when they are over the budget.
    """
    pinned = list(forced)
    free = sum(size for size, must in zip(sizes, forced, strict=True) if not must)
    left = max(0, budget - sum(size for size, must in zip(sizes, forced, strict=True) if must))
    spent = passed = 0
    for i, size in enumerate(sizes):
        if pinned[i]:
            continue
        passed += size
        if left >= free or (spent + size) * free <= left * passed:
            pinned[i] = True
            spent += size
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if not pinned[i] and spent + sizes[i] <= left:
            pinned[i] = True
            spent += sizes[i]
    return pinned


def plan_trunk(
    order: Sequence[MatrixUse],
    store: Store,
    trunk_budget: int,
    *,
    vectors: Sequence[str] = (),
    row_tables: Sequence[str] = (),
    pinned_tables: Sequence[str] = (),
    unit_bytes: int = RING_UNIT_BYTES,
    ring_slots: int | None = None,
) -> TrunkPlan:
    """Which rows stay in memory for `trunk_budget` bytes, and how large the ring is. Pure: reads headers only.

    The budget is for what is pinned; ring, vectors and row buffers come on top (see TrunkPlan). ring_slots None: six,
    or three for each drive, if the store deals its pieces over more than two. pinned_tables
    (out of row_tables) and uses with pin=True come first. Raises StoreError for a tensor that is missing, has the
    wrong number of dimensions, a dtype no kernel takes, or is cut on disk where it is needed whole.
    """
    cut: list[tuple[int, Piece]] = []
    matrix_bytes = 0
    for m, use in enumerate(order):
        record = _matrix(store, use.name)
        if len(record.shape) != 2 or not record.nbytes:
            raise StoreError(f"{store.path}: tensor {use.name} has shape {list(record.shape)}, not that of a matrix")
        matrix_bytes += record.nbytes
        pieces = store.pieces(use.name)
        if use.whole and len(pieces) > 1:
            raise StoreError(
                f"{store.path}: tensor {use.name} lies in {len(pieces)} pieces but is needed whole; repack"
            )
        for piece in pieces:
            cut += [(m, p) for p in ([piece] if use.whole else cut_rows(piece, unit_bytes, use.row_multiple))]
    if ring_slots is None:
        # More than one file within one matrix: its pieces are dealt over drives that should all be busy.
        files = {piece.extent.file for _, piece in cut}
        dealt = len({(m, piece.extent.file) for m, piece in cut}) > len(order)
        ring_slots = max(RING_SLOTS, SLOTS_PER_DRIVE * len(files)) if dealt else RING_SLOTS
    tables = {name: _matrix(store, name) for name in row_tables}
    for name in pinned_tables:
        if name not in tables:
            raise ValueError(f"pinned table {name} is not among the row tables")
    table_bytes = sum(memory_bytes(p.extent) for name in pinned_tables for p in store.pieces(name))
    pinned = choose_pinned(
        [memory_bytes(p.extent) for _, p in cut], [order[m].pin for m, _ in cut], trunk_budget - table_bytes
    )
    units = tuple(Unit(m, p.row0, p.rows, p.extent, keep) for (m, p), keep in zip(cut, pinned, strict=True))
    streamed = [unit for unit in units if not unit.pinned]
    return TrunkPlan(
        order=tuple(order),
        vectors=tuple(vectors),
        row_tables=tuple(row_tables),
        pinned_tables=tuple(pinned_tables),
        units=units,
        pinned_bytes=table_bytes + sum(memory_bytes(r.extent) for r in regions(units)),
        ring_slots=max(MIN_RING_SLOTS, min(ring_slots, len(streamed))) if streamed else 0,
        slot_bytes=max((memory_bytes(unit.extent) for unit in streamed), default=0),
        vectors_bytes=sum(4 * _elements(_matrix(store, name)) for name in vectors),
        row_buffer_bytes=max((_row_buffer(store, t) for n, t in tables.items() if n not in pinned_tables), default=0),
        streamed_bytes_per_pass=sum(unit.extent.nbytes for unit in streamed),
        trunk_bytes=matrix_bytes + sum(t.nbytes for t in tables.values()),
    )


def _elements(record: TensorRecord) -> int:
    count = 1
    for n in record.shape:
        count *= n
    return count


def _row_buffer(store: Store, record: TensorRecord) -> int:
    checked = [p.extent.nbytes for p in store.pieces(record.name) if p.extent.checksum is not None]
    return align_up(max([record.nbytes // max(record.shape[0], 1), *checked])) + ALIGN


@dataclass(frozen=True, slots=True)
class Region:
    """Adjacent pinned units of one matrix, one array in memory. reads: (extent, byte of the region's memory)."""

    matrix: int
    row0: int
    rows: int
    extent: Extent
    reads: tuple[tuple[Extent, int], ...]


def regions(units: Sequence[Unit]) -> list[Region]:
    """The pinned units, those joined that lie side by side in matrix, rows and file. Pure."""
    joined: list[list[Unit]] = []
    for unit in units:
        if not unit.pinned:
            continue
        last = joined[-1][-1] if joined else None
        if (
            last is not None
            and (last.matrix, last.row0 + last.rows, last.extent.file) == (unit.matrix, unit.row0, unit.extent.file)
            and last.extent.offset + last.extent.nbytes == unit.extent.offset
            # Units with checksums are read one by one, so they can only be joined where a page ends.
            and (unit.extent.checksum is None or unit.extent.offset % ALIGN == 0)
        ):
            joined[-1].append(unit)
        else:
            joined.append([unit])
    return [_region(run) for run in joined]


def _region(run: list[Unit]) -> Region:
    first, last = run[0], run[-1]
    begin, end = first.extent.offset, last.extent.offset + last.extent.nbytes
    base = align_down(begin)
    reads: list[tuple[Extent, int]] = []
    if any(unit.extent.checksum is not None for unit in run):
        reads = [(unit.extent, align_down(unit.extent.offset) - base) for unit in run]
    else:
        # Cut where pages end, not where units do: every byte is then read once.
        at = begin
        while at < end:
            to = min(end, align_down(at) + align_down(RING_UNIT_BYTES))
            reads.append((Extent(first.extent.file, at, to - at), align_down(at) - base))
            at = to
    rows = sum(unit.rows for unit in run)
    return Region(first.matrix, first.row0, rows, Extent(first.extent.file, begin, end - begin), tuple(reads))


def widen(array: NDArray[Any]) -> NDArray[np.float32]:
    """A float32 copy, exact: uint16 is taken for bf16 bits."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def _array(memory: memoryview, extent: Extent, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.ndarray(shape, NUMPY_DTYPES[dtype], memory, extent.offset % ALIGN)


@dataclass(frozen=True, slots=True)
class TrunkStats:
    """Since start. blocks and block_bytes came through the ring; waits and wait_seconds: the compute thread stood
    still for a block or a row."""

    pinned_bytes: int
    ring_bytes: int
    ring_slots: int
    blocks: int
    block_bytes: int
    rows: int
    waits: int
    wait_seconds: float


class _Entry:
    """One unit on its way through the ring."""

    __slots__ = ("dropped", "error", "number", "pass_number", "read", "ready", "ring", "slot", "unit")

    def __init__(self, number: int, unit: Unit, pass_number: int, ring: SlotArena, slot: int) -> None:
        self.number, self.unit, self.pass_number, self.ring, self.slot = number, unit, pass_number, ring, slot
        self.ready = self.dropped = False
        self.error: StorageError | None = None
        self.read: Read | None = None


class Trunk:
    """The TrunkSource of a plan. One thread consumes; completions arrive on the loop's thread. `load` comes first."""

    def __init__(
        self,
        store: Store,
        plan: TrunkPlan,
        files: Sequence[OpenFile],
        scheduler: Scheduler,
        pool: BufferPool,
        stuck_seconds: float = 120.0,
    ) -> None:
        self._store, self._files, self._scheduler, self._pool = store, files, scheduler, pool
        self._waiter = Waiter(stuck_seconds)
        self._condition = self._waiter.condition
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self._pinned: dict[tuple[str, int, int], tuple[Arena, NDArray[Any]]] = {}
        self._pinned_tables: dict[str, tuple[Arena, list[NDArray[Any]]]] = {}
        self._tables: dict[str, tuple[TensorRecord, tuple[Piece, ...]]] = {}
        self._row_slots: SlotArena | None = None
        self._ring: SlotArena | None = None
        self._ahead: deque[_Entry] = deque()
        self._dropped: list[_Entry] = []  # given up while the kernel still fills their slots
        self._pass = 0
        self._skip: frozenset[str] = frozenset()
        self._blocks = self._block_bytes = self._rows = 0
        self._closed = self._resizing = False
        self._adopt(plan)

    def _adopt(self, plan: TrunkPlan) -> None:
        """Take a plan's order and cuts as ours; memory is another matter."""
        self.plan = plan
        self._records = [self._store.tensors[use.name] for use in plan.order]
        self._matrix_numbers = {use.name: number for number, use in enumerate(plan.order)}
        self._streamed = [unit for unit in plan.units if not unit.pinned]
        self._cursor = len(plan.order)  # at the end of a pass: the next one may begin
        self._issue_pass, self._issue_number = self._pass + 1, 0
        numbers = iter(range(len(self._streamed)))
        parts: list[list[tuple[int, Region | int]]] = [[] for _ in plan.order]
        for region in regions(plan.units):
            parts[region.matrix].append((region.row0, region))
        for unit in plan.units:
            if not unit.pinned:
                parts[unit.matrix].append((unit.row0, next(numbers)))
        self._parts = [[part for _, part in sorted(p, key=lambda rp: rp[0])] for p in parts]

    # --- loading ---

    def load(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read vectors and what is pinned, make the ring and begin to fill it. progress(bytes done, bytes in all).

        Raises StorageError, BudgetError.
        """
        self._load_vectors()
        if self._row_slots is not None and self._row_slots.slot_bytes != self.plan.row_buffer_bytes:
            self._row_slots.close()
            self._row_slots = None
        if self.plan.row_buffer_bytes and self._row_slots is None:
            self._row_slots = SlotArena(self._pool, ROW_BUFFERS, self.plan.row_buffer_bytes, "row buffers")
        self._load_pinned(progress)
        with self._condition:
            if self.plan.ring_slots:
                self._ring = SlotArena(self._pool, self.plan.ring_slots, self.plan.slot_bytes, "trunk ring")
            self._issue()

    def _load_vectors(self) -> None:
        batch: list[tuple[str, TensorRecord, tuple[Piece, ...]]] = []
        nbytes = 0
        for name in self.plan.vectors:
            if name not in self._vectors:
                pieces = self._store.pieces(name)
                batch.append((name, self._store.tensors[name], pieces))
                nbytes += sum(memory_bytes(piece.extent) for piece in pieces)
            if nbytes >= VECTOR_BATCH_BYTES:
                self._load_vector_batch(batch, nbytes)
                batch, nbytes = [], 0
        self._load_vector_batch(batch, nbytes)

    def _load_vector_batch(self, batch: list[tuple[str, TensorRecord, tuple[Piece, ...]]], nbytes: int) -> None:
        arena = self._pool.arena(nbytes, "vectors as read")
        at = 0
        reads: list[list[Read]] = []
        for _, _, pieces in batch:
            reads.append([])
            for piece in pieces:
                room = arena.view[at : at + memory_bytes(piece.extent)]
                at += len(room)
                reads[-1].append(self._read(piece.extent, room, Priority.DEMAND))
        fetch(self._scheduler, self._waiter, [read for group in reads for read in group], lambda read: None)
        for (name, record, _), group in zip(batch, reads, strict=True):
            stored = np.frombuffer(b"".join(read.data for read in group), NUMPY_DTYPES[record.dtype])
            self._vectors[name] = widen(stored).reshape(record.shape)
        self._pool.give(arena.nbytes)

    def _load_pinned(self, progress: Callable[[int, int], None]) -> None:
        wanted: list[tuple[tuple[str, int, int], TensorRecord, Extent, tuple[tuple[Extent, int], ...]]] = []
        for region in regions(self.plan.units):
            record = self._records[region.matrix]
            wanted.append(((record.name, region.row0, region.rows), record, region.extent, region.reads))
        self._tables = {name: (self._store.tensors[name], self._store.pieces(name)) for name in self.plan.row_tables}
        keep = {key for key, *_ in wanted}
        for key in [key for key in self._pinned if key not in keep]:
            arena, _ = self._pinned.pop(key)
            self._pool.give(arena.nbytes)
        for name in [name for name in self._pinned_tables if name not in self.plan.pinned_tables]:
            arena, _ = self._pinned_tables.pop(name)
            self._pool.give(arena.nbytes)
        tables = [self._tables[name][0] for name in self.plan.pinned_tables]
        total = sum(extent.nbytes for _, _, extent, _ in wanted) + sum(table.nbytes for table in tables)
        done = 0
        batch: list[Read] = []
        batch_bytes = 0
        for table in tables:
            self._load_table(table, self._tables[table.name][1])
            done += table.nbytes
            progress(done, total)
        for key, record, extent, parts in wanted:
            done += extent.nbytes
            if key in self._pinned:
                continue
            # Not touched beforehand: the reads that follow do it, several at a time and while the drive works.
            arena = self._pool.arena(memory_bytes(extent), f"pinned {record.name}", populate=False)
            self._pinned[key] = (arena, _array(arena.view, extent, record.dtype, (key[2], *record.shape[1:])))
            for part, at in parts:
                batch.append(self._read(part, arena.view[at : at + memory_bytes(part)], Priority.TRUNK))
            batch_bytes += arena.nbytes
            if batch_bytes >= 256 * 2**20:
                fetch(self._scheduler, self._waiter, batch, lambda read: None)
                batch, batch_bytes = [], 0
                progress(done, total)
        fetch(self._scheduler, self._waiter, batch, lambda read: None)
        progress(total, total)

    def _load_table(self, record: TensorRecord, pieces: tuple[Piece, ...]) -> None:
        """One mapping for all of a table, however small its pieces are."""
        if record.name in self._pinned_tables:
            return
        nbytes = sum(memory_bytes(piece.extent) for piece in pieces)
        arena = self._pool.arena(nbytes, f"pinned {record.name}", populate=False)
        arrays, reads, at = [], [], 0
        for piece in pieces:
            room = arena.view[at : at + memory_bytes(piece.extent)]
            arrays.append(_array(room, piece.extent, record.dtype, (piece.rows, *record.shape[1:])))
            whole = Unit(0, piece.row0, piece.rows, piece.extent, True)
            for part, place in _region([whole]).reads:
                reads.append(self._read(part, room[place : place + memory_bytes(part)], Priority.TRUNK))
            at += len(room)
        fetch(self._scheduler, self._waiter, reads, lambda read: None)
        self._pinned_tables[record.name] = (arena, arrays)

    def _read(self, extent: Extent, buffer: memoryview, priority: Priority) -> Read:
        return Read(
            self._files[extent.file],
            extent.offset,
            extent.nbytes,
            buffer,
            priority,
            ignore_end,
            checksum=extent.checksum,
        )

    # --- the ring; all of these hold the condition ---

    def _issue(self) -> None:
        """Read ahead as far as there are free slots, in the order of use, across the end of the pass."""
        if self._ring is None or not self._streamed or self._closed or self._resizing:
            return
        reads: list[Read] = []
        while True:
            if self._issue_number == len(self._streamed):
                self._issue_number = 0
                self._issue_pass += 1
            unit = self._streamed[self._issue_number]
            if self._issue_pass == self._pass and self.plan.order[unit.matrix].name in self._skip:
                self._issue_number += 1
                continue
            slot = self._ring.lend_nowait()
            if slot is None:
                break
            entry = _Entry(self._issue_number, unit, self._issue_pass, self._ring, slot)
            self._issue_number += 1
            read = self._read(unit.extent, self._ring.view(slot)[: memory_bytes(unit.extent)], Priority.TRUNK)
            entry.read = read
            read.on_done = self._on_done(entry)
            self._ahead.append(entry)
            reads.append(read)
        if reads:
            self._scheduler.submit(reads)

    def _on_done(self, entry: _Entry) -> Callable[[Read, StorageError | None], None]:
        def on_done(read: Read, error: StorageError | None) -> None:
            with self._condition:
                entry.ready, entry.error = True, error
                if entry.dropped:
                    self._dropped.remove(entry)
                    self._give_back(entry)
                    self._issue()
                self._condition.notify_all()

        return on_done

    def _give_back(self, entry: _Entry) -> None:
        if entry.ring is self._ring:
            entry.ring.give_back(entry.slot)

    def _drop(self, entry: _Entry) -> None:
        """Nobody will use this entry. A slot that is being read into comes back when the kernel is done with it."""
        if entry.ready or (entry.read is not None and self._scheduler.cancel(entry.read)):
            self._give_back(entry)
        else:
            entry.dropped = True
            self._dropped.append(entry)

    def _stale(self) -> bool:
        """Whether blocks of a pass that was asked for to its end have not been taken."""
        return bool(self._ahead) and self._ahead[0].pass_number <= self._pass

    def _realign(self) -> None:
        while self._ahead:
            self._drop(self._ahead.popleft())
        self._issue_pass, self._issue_number = self._pass + 1, 0
        self._cursor = len(self.plan.order)

    # --- TrunkSource ---

    def vector(self, name: str) -> NDArray[np.float32]:
        """See TrunkSource."""
        return self._vectors[name]

    def peek(self, name: str) -> NDArray[Any] | None:
        """See TrunkSource. Raises KeyError for a matrix that is not of the order."""
        parts = self._parts[self._matrix_numbers[name]]
        only = parts[0] if len(parts) == 1 else None
        if not isinstance(only, Region):
            return None
        return self._pinned[name, only.row0, only.rows][1]

    def begin_pass(self, skip: Collection[str] = ()) -> None:
        """See TrunkSource. A pass that was not taken to its end is given up, as by `abort_pass`."""
        with self._condition:
            while self._cursor < len(self.plan.order) and self.plan.order[self._cursor].name in self._skip:
                self._cursor += 1
            # What failed while it was read ahead, perhaps long ago, deserves another try now that it is needed.
            failed = any(entry.error is not None for entry in self._ahead)
            if failed or self._cursor != len(self.plan.order) or self._stale():
                self._realign()
            self._pass += 1
            self._cursor = 0
            self._skip = frozenset(skip)
            if self._skip:
                useless = [
                    e
                    for e in self._ahead
                    if e.pass_number == self._pass and self.plan.order[e.unit.matrix].name in self._skip
                ]
                for entry in useless:
                    self._ahead.remove(entry)
                    self._drop(entry)
            self._issue()

    def abort_pass(self) -> None:
        """See TrunkSource. Idempotent."""
        with self._condition:
            if self._cursor != len(self.plan.order) or self._stale():
                self._realign()
                self._issue()

    def _take(self, name: str) -> int:
        order = self.plan.order
        while self._cursor < len(order) and order[self._cursor].name in self._skip:
            self._cursor += 1
        if self._cursor == len(order) or order[self._cursor].name != name:
            expected = order[self._cursor].name if self._cursor < len(order) else "the end of the pass"
            raise RuntimeError(f"matrix {name} was asked for where the declared order has {expected}")
        self._cursor += 1
        return self._cursor - 1

    def blocks(self, name: str) -> Iterator[Block]:
        """See TrunkSource. Raises StorageError when a block cannot be had; then call `abort_pass`."""
        return self._walk(self._take(name))

    def _walk(self, matrix: int) -> Iterator[Block]:
        for part in self._parts[matrix]:
            if isinstance(part, Region):
                yield Block(part.row0, self._pinned[self._records[matrix].name, part.row0, part.rows][1])
                continue
            entry = self._await(part)
            try:
                yield Block(entry.unit.row0, self._entry_array(entry))
            finally:
                self._release(entry)

    def _entry_array(self, entry: _Entry) -> NDArray[Any]:
        record, unit = self._records[entry.unit.matrix], entry.unit
        return _array(entry.ring.view(entry.slot), unit.extent, record.dtype, (unit.rows, record.shape[1]))

    def _await(self, number: int) -> _Entry:
        with self._condition:
            if not self._ahead:
                self._issue()
            if not self._ahead and self._dropped:
                # Slots still belong to reads of a pass that was given up; they come back with their completion.
                self._waiter.wait_until(lambda: bool(self._ahead) or self._closed, self._dropped_reads)
            if self._closed:
                raise StorageError("the trunk is closed")
            head = self._ahead[0] if self._ahead else None
            if head is None or head.number != number or head.pass_number != self._pass:
                raise RuntimeError(f"the ring does not stand where {self._streamed[number]} is used")
            self._waiter.wait_until(lambda: head.ready, lambda: [head.read] if head.read else [])
            if head.error is not None:
                raise head.error
            self._ahead.popleft()
            self._blocks += 1
            self._block_bytes += head.unit.extent.nbytes
            return head

    def _dropped_reads(self) -> list[Read]:
        return [entry.read for entry in self._dropped if entry.read is not None]

    def _release(self, entry: _Entry) -> None:
        with self._condition:
            self._give_back(entry)
            self._issue()

    @contextmanager
    def whole(self, name: str) -> Iterator[NDArray[Any]]:
        """See TrunkSource."""
        matrix = self._take(name)
        if not self.plan.order[matrix].whole:
            raise RuntimeError(f"matrix {name} was not declared whole")
        walk = self._walk(matrix)
        try:
            yield next(walk).array
        finally:
            walk.close()  # type: ignore[attr-defined]

    def rows(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See TrunkSource. Raises StorageError."""
        record, pieces = self._tables[name]
        count = record.shape[0]
        if len(ids) and (ids.min() < 0 or ids.max() >= count):
            raise IndexError(f"row of {name} out of range 0..{count - 1}")
        out = np.empty((len(ids), *record.shape[1:]), np.float32)
        self._rows += len(ids)
        starts = [piece.row0 for piece in pieces]
        homes = np.searchsorted(starts, ids, "right") - 1
        if name in self.plan.pinned_tables:
            for i, (row, home) in enumerate(zip(ids.tolist(), homes.tolist(), strict=True)):
                out[i] = widen(self._pinned_tables[name][1][home][row - pieces[home].row0])
            return out
        row_bytes = record.nbytes // count
        wanted: dict[tuple[int, int], list[int]] = {}  # (piece, row or 0 for all of it) -> places in out
        for i, (row, home) in enumerate(zip(ids.tolist(), homes.tolist(), strict=True)):
            whole = pieces[home].extent.checksum is not None
            wanted.setdefault((home, 0 if whole else row - pieces[home].row0), []).append(i)
        left = list(wanted.items())
        while left:
            left = left[self._fetch_rows(record, pieces, row_bytes, ids, left, out) :]
        return out

    def _fetch_rows(
        self,
        record: TensorRecord,
        pieces: tuple[Piece, ...],
        row_bytes: int,
        ids: NDArray[np.int64],
        wanted: list[tuple[tuple[int, int], list[int]]],
        out: NDArray[np.float32],
    ) -> int:
        """Read as many of the wanted as there are buffers; returns how many that was."""
        slots = self._row_slots
        assert slots is not None
        jobs: list[tuple[Read, int, int, list[int]]] = []  # read, first row of it, slot, places
        with self._condition:
            self._waiter.wait_until(lambda: slots.free > 0, lambda: ())
            for (home, row), places in wanted:
                slot = slots.lend_nowait()
                if slot is None:
                    break
                extent, row0 = pieces[home].extent, pieces[home].row0
                if extent.checksum is None:
                    extent, row0 = Extent(extent.file, extent.offset + row * row_bytes, row_bytes), row0 + row
                read = self._read(extent, slots.view(slot)[: memory_bytes(extent)], Priority.DEMAND)
                jobs.append((read, row0, slot, places))
        slot_of = {id(read): slot for read, _, slot, _ in jobs}
        # A buffer is free again when its rows are copied out, or, if the wait fails, when its read ends.
        failed = [False]

        def release(read: Read) -> None:
            slot = slot_of.pop(id(read), None) if failed[0] else None
            if slot is not None:
                slots.give_back(slot)

        try:
            fetch(self._scheduler, self._waiter, [read for read, *_ in jobs], release)
        except StorageError:
            with self._condition:
                failed[0] = True
                for read, *_ in jobs:
                    if read.state is State.DONE or self._scheduler.cancel(read):
                        slots.give_back(slot_of.pop(id(read)))
            raise
        for read, row0, slot, places in jobs:
            table = np.frombuffer(read.data, NUMPY_DTYPES[record.dtype]).reshape(-1, *record.shape[1:])
            for i in places:
                out[i] = widen(table[int(ids[i]) - row0])
            with self._condition:
                slots.give_back(slot)
        return len(jobs)

    # --- life ---

    def resize(self, plan: TrunkPlan) -> None:
        """Take on another plan for the same order, between two passes, from the consuming thread: what both pin stays,
        the rest is read or given back. Raises StorageError, BudgetError; the trunk must then be closed."""
        if [u.name for u in plan.order] != [u.name for u in self.plan.order]:
            raise ValueError("a new plan must keep the order")
        with self._condition:
            # Else each slot that comes back would at once be read into again, and the ring never stand still.
            self._resizing = True
            try:
                self._realign()
                ring = self._ring
                if ring is not None:
                    # Reads of dropped entries still own their slots.
                    self._waiter.wait_until(lambda: ring.free == ring.capacity, self._dropped_reads)
                    ring.close()
                self._ring = None
                self._adopt(plan)
            finally:
                self._resizing = False
        self.load()

    def stats(self) -> TrunkStats:
        """A snapshot."""
        with self._condition:
            return TrunkStats(
                self.plan.pinned_bytes,
                self.plan.ring_bytes,
                self.plan.ring_slots,
                self._blocks,
                self._block_bytes,
                self._rows,
                self._waiter.waits,
                self._waiter.wait_seconds,
            )

    def close(self) -> None:
        """Give memory back. What is in flight keeps its mapping until its end. Harmless twice."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            for entry in self._ahead:
                if entry.read is not None:
                    self._scheduler.cancel(entry.read)
                entry.ready, entry.error = True, StorageError("the trunk is closed")
            self._ahead.clear()
            self._condition.notify_all()
            for slots in (self._ring, self._row_slots):
                if slots is not None:
                    slots.close()
            self._ring = self._row_slots = None
            for held in (*self._pinned.values(), *self._pinned_tables.values()):
                self._pool.give(held[0].nbytes)
            self._pinned.clear()
            self._pinned_tables.clear()
