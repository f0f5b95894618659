"""The trunk: every weight a token always uses. Pinned pieces, and a ring of blocks for the rest.

Owns the plan of what is pinned (pure: `plan_trunk`), the resident memory, and the order in which blocks
are handed out. Knows bytes, rows and dtypes; which matrix means what is the model's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sluice.io.errors import StoreError
from sluice.io.store import ALIGN, NUMPY_DTYPES, Extent, Store, TensorRecord, align_up

RING_UNIT_BYTES = 24 * 2**20
"""Target size of a streamed block: whole records of 16-32 MiB keep a drive at its rate with one or two in flight."""
RING_SLOTS = 6


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
    pinned: bool


@dataclass(frozen=True, slots=True)
class TrunkPlan:
    """What is pinned and what streams, computed from headers alone. All sizes in bytes of memory, slack included.

    pinned_bytes <= the budget (or the forced pins, when those alone are more). ring_bytes = ring_slots x
    slot_bytes, 0 when nothing streams. vectors_bytes: float32, always resident. rows_bytes: buffers for
    single rows. streamed_bytes_per_pass: weights read from the drives in each pass.
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
    rows_bytes: int
    streamed_bytes_per_pass: int
    trunk_bytes: int

    @property
    def ring_bytes(self) -> int:
        """Memory of the ring."""
        return self.ring_slots * self.slot_bytes

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


def plan_trunk(
    order: Sequence[MatrixUse],
    store: Store,
    trunk_budget: int,
    *,
    vectors: Sequence[str] = (),
    row_tables: Sequence[str] = (),
    pinned_tables: Sequence[str] = (),
    unit_bytes: int = RING_UNIT_BYTES,
    ring_slots: int = RING_SLOTS,
) -> TrunkPlan:
    """Which rows stay in memory for `trunk_budget` bytes, and how large the ring is. Pure.

    Matrices are cut into units of about `unit_bytes`; the budget is spread over the order so that at
    every depth the same share is pinned and each streamed unit has compute to hide behind.
    pinned_tables (of row_tables) and uses with pin=True come first. Raises StoreError for a tensor that
    is missing or of a dtype no kernel takes.
    """
    records = [_matrix(store, use.name) for use in order]
    cut: list[tuple[int, int, int, int, bool]] = []  # matrix, row0, rows, bytes in memory, forced
    for m, (use, record) in enumerate(zip(order, records, strict=True)):
        if len(record.shape) != 2:
            raise StoreError(
                f"{store.path}: tensor {use.name} has shape {list(record.shape)}, a matrix has two dimensions"
            )
        rows, row_bytes = record.shape[0], record.nbytes // max(record.shape[0], 1)
        step = rows
        if not use.whole and record.nbytes > unit_bytes:
            pieces = -(-record.nbytes // unit_bytes)
            step = -(-rows // pieces)
            step = max(use.row_multiple, -(-step // use.row_multiple) * use.row_multiple)
        for row0 in range(0, rows, max(step, 1)):
            n = min(step, rows - row0)
            cut.append((m, row0, n, align_up(n * row_bytes) + ALIGN, use.pin))
    tables = [_matrix(store, name) for name in row_tables]
    used = sum(align_up(t.nbytes) + ALIGN for t in tables if t.name in pinned_tables)
    used += sum(size for *_, size, forced in cut if forced)
    free = sum(size for *_, size, forced in cut if not forced)
    budget = max(0, trunk_budget - used)
    pinned = [forced for *_, forced in cut]
    spent = passed = 0
    for i, (*_, size, forced) in enumerate(cut):
        if forced:
            continue
        passed += size
        # The share pinned so far follows the share passed so far: even over the depth, never over the budget.
        if budget >= free or (spent + size) * free <= budget * passed:
            pinned[i] = True
            spent += size
    for i in sorted(range(len(cut)), key=lambda i: -cut[i][3]):
        if not pinned[i] and spent + cut[i][3] <= budget:
            pinned[i] = True
            spent += cut[i][3]
    streamed = [cut[i] for i in range(len(cut)) if not pinned[i]]
    slot = max((size for *_, size, _ in streamed), default=0)
    row_bytes = max((t.nbytes // max(t.shape[0], 1) for t in tables), default=0)
    return TrunkPlan(
        order=tuple(order),
        vectors=tuple(vectors),
        row_tables=tuple(row_tables),
        pinned_tables=tuple(pinned_tables),
        units=tuple(Unit(m, r, n, p) for (m, r, n, _, _), p in zip(cut, pinned, strict=True)),
        pinned_bytes=used + spent,
        ring_slots=min(ring_slots, max(4, len(streamed))) if streamed else 0,
        slot_bytes=slot,
        vectors_bytes=sum(_vector_bytes(store, name) for name in vectors),
        rows_bytes=0 if not tables else 16 * (align_up(row_bytes) + ALIGN),
        streamed_bytes_per_pass=sum(n * (records[m].nbytes // records[m].shape[0]) for m, _, n, _, _ in streamed),
        trunk_bytes=sum(r.nbytes for r in records) + sum(t.nbytes for t in tables),
    )


def _vector_bytes(store: Store, name: str) -> int:
    record = _matrix(store, name)
    count = 1
    for n in record.shape:
        count *= n
    return 4 * count


def widen(array: NDArray[Any]) -> NDArray[np.float32]:
    """A float32 copy, exact: uint16 is taken for bf16 bits."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


class ResidentTrunk:
    """All of the trunk in memory, read when first asked for."""

    def __init__(self, store: Store, plan: TrunkPlan, read: Callable[[Extent], bytearray]) -> None:
        self._store, self._plan, self._read = store, plan, read
        self._arrays: dict[str, NDArray[Any]] = {}
        self._order = [use.name for use in plan.order]
        self._whole = {use.name for use in plan.order if use.whole}
        self._next = 0
        self._skip: frozenset[str] = frozenset()
        self._vectors = {name: widen(self._array(name)) for name in plan.vectors}

    def _array(self, name: str) -> NDArray[Any]:
        array = self._arrays.get(name)
        if array is None:
            record = self._store.tensors[name]
            data = b"".join(self._read(extent) for extent in self._store.extents(name))
            array = np.frombuffer(data, NUMPY_DTYPES[record.dtype]).reshape(record.shape)
            self._arrays[name] = array
        return array

    def _take(self, name: str) -> NDArray[Any]:
        while self._next < len(self._order) and self._order[self._next] in self._skip:
            self._next += 1
        expected = self._order[self._next] if self._next < len(self._order) else "the end of the pass"
        if name != expected:
            raise RuntimeError(f"matrix {name} was asked for where the declared order has {expected}")
        self._next += 1
        return self._array(name)

    def vector(self, name: str) -> NDArray[np.float32]:
        """See TrunkSource."""
        return self._vectors[name]

    def blocks(self, name: str) -> Iterator[Block]:
        """See TrunkSource."""
        yield Block(0, self._take(name))

    @contextmanager
    def whole(self, name: str) -> Iterator[NDArray[Any]]:
        """See TrunkSource."""
        if name not in self._whole:
            raise RuntimeError(f"matrix {name} was not declared whole")
        yield self._take(name)

    def rows(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See TrunkSource."""
        if name not in self._plan.row_tables:
            raise KeyError(name)
        table = self._array(name)
        if len(ids) and (ids.min() < 0 or ids.max() >= len(table)):
            raise IndexError(f"row of {name} out of range 0..{len(table) - 1}")
        return widen(table[ids])

    def begin_pass(self, skip: Collection[str] = ()) -> None:
        """See TrunkSource."""
        self._next, self._skip = 0, frozenset(skip)

    def abort_pass(self) -> None:
        """See TrunkSource."""
        self._next = 0
