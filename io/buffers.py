"""Memory for weights: one pool, bounded in bytes, of private huge-page mappings that are touched at start.

Nothing else of io allocates memory that holds weights, so the pool's limit is the plan's promise. Private and
not Python's default shared mappings: shared ones get no huge pages and each submit into them costs about 1 ms.
Touched at start: a first touch on a virtual machine ran at 0.5-1 GB/s and would slow the first tokens.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sluice.io.errors import BudgetError
from sluice.io.store import ALIGN, align_up

MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python names it only from 3.13 on
POPULATE_STEP = 64 * 2**20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int
_libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """0 or an errno. Through ctypes because mmap.madvise keeps the GIL for the seconds that touching takes."""
    return 0 if _libc.madvise(address, nbytes, advice) == 0 else ctypes.get_errno()


class Arena:
    """One mapping. `view` is all of it, aligned to a page; it lives as long as anything refers to it."""

    def __init__(self, nbytes: int, label: str) -> None:
        self.nbytes, self.label = nbytes, label
        try:
            self._map = mmap.mmap(-1, max(nbytes, ALIGN), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise BudgetError(f"the kernel refuses {nbytes} bytes for {label}: {error.strerror}", nbytes) from error
        self.view = memoryview(self._map)[:nbytes]
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        _madvise(self._address, max(nbytes, ALIGN), mmap.MADV_HUGEPAGE)  # advice: refused without harm

    def populate(self, begin: int = 0, nbytes: int | None = None) -> None:
        """Give every page of [begin, begin + nbytes) its memory now. Raises BudgetError when there is none."""
        end = begin + (self.nbytes - begin if nbytes is None else nbytes)
        for at in range(begin, end, POPULATE_STEP):
            n = min(POPULATE_STEP, end - at)
            code = _madvise(self._address + at, n, MADV_POPULATE_WRITE)
            if code in (errno.EINVAL, errno.ENOSYS):
                np.frombuffer(self.view[at : at + n], np.uint8)[::ALIGN] = 0
            elif code:
                raise BudgetError(
                    f"no memory for {self.label}: {self.nbytes} bytes planned, {at} had", self.nbytes - at
                )

    def discard(self, begin: int, nbytes: int) -> None:
        """Give the pages of [begin, begin + nbytes) back to the kernel; they read as zeros afterwards."""
        if nbytes and _madvise(self._address + begin, nbytes, mmap.MADV_DONTNEED) == errno.EINVAL:
            # Locked memory (mlockall, where a service may) is not given back until it is unlocked.
            _libc.munlock(self._address + begin, nbytes)
            _madvise(self._address + begin, nbytes, mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Bytes the pool may hold, and holds."""

    limit_bytes: int
    held_bytes: int


class BufferPool:
    """The only giver of weight memory, bounded by `limit_bytes`. Safe to use from several threads."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._held = limit_bytes, 0
        self._lock = threading.Lock()

    def take(self, nbytes: int, label: str) -> None:
        """Count `nbytes` as held. Raises BudgetError when that would pass the limit."""
        with self._lock:
            if self._held + nbytes > self._limit:
                short = self._held + nbytes - self._limit
                raise BudgetError(
                    f"{label} needs {nbytes} bytes, {self._limit - self._held} are left: {short} short", short
                )
            self._held += nbytes

    def give(self, nbytes: int) -> None:
        """Count `nbytes` as given back."""
        with self._lock:
            self._held -= nbytes

    def raise_limit(self, limit_bytes: int) -> None:
        """A new limit, for a reload that has planned anew."""
        with self._lock:
            self._limit = limit_bytes

    def arena(
        self, nbytes: int, label: str, populate: bool = True, first: Callable[[memoryview], None] = lambda memory: None
    ) -> Arena:
        """A mapping of `nbytes`, touched; `first` may touch it before. Raises BudgetError past the limit or when the
        kernel has none."""
        self.take(nbytes, label)
        try:
            arena = Arena(nbytes, label)
            first(arena.view)
            if populate:
                arena.populate()
        except BaseException:
            self.give(nbytes)
            raise
        return arena

    def stats(self) -> PoolStats:
        """How full."""
        with self._lock:
            return PoolStats(self._limit, self._held)


NewSlot = Callable[[memoryview], None]
"""Told a slot's memory before its pages exist: on which node they come to lie is decided by who touches them first."""


class SlotArena:
    """Equal slots out of the pool, lent by number. Grows by further mappings, shrinks page by page.

    Not locked: the owner (ring or cache) calls it under its own lock. `capacity` is how many slots exist;
    after `shrink_to` slots above the target are given back as soon as they are not lent.
    """

    def __init__(
        self, pool: BufferPool, slots: int, slot_bytes: int, label: str, new_slot: NewSlot | None = None
    ) -> None:
        self._new_slot = new_slot
        self.slot_bytes = align_up(slot_bytes)
        self._pool, self._label = pool, label
        self._views: list[memoryview] = []
        self._homes: list[tuple[Arena, int]] = []
        self._free: list[int] = []
        self._parked: list[int] = []  # slots without memory
        self._target = 0
        self.grow_to(slots)

    @property
    def capacity(self) -> int:
        """Slots that have memory."""
        return len(self._views) - len(self._parked)

    @property
    def free(self) -> int:
        """Slots that can be lent now."""
        return len(self._free)

    def grow_to(self, slots: int) -> None:
        """At least `slots` of them. Raises BudgetError, and then nothing has changed."""
        self._target = max(self._target, slots)
        while self._parked and self.capacity < slots:
            self._pool.take(self.slot_bytes, self._label)
            slot = self._parked.pop()
            arena, at = self._homes[slot]
            self._touch(self._views[slot])
            arena.populate(at, self.slot_bytes)
            self._free.append(slot)
        more = slots - self.capacity
        if more > 0:
            arena = self._pool.arena(more * self.slot_bytes, self._label, first=self._touch)
            for i in range(more):
                at = i * self.slot_bytes
                self._free.append(len(self._views))
                self._views.append(arena.view[at : at + self.slot_bytes])
                self._homes.append((arena, at))

    def _touch(self, memory: memoryview) -> None:
        """Tell of the slots in `memory`, whose pages are about to be made."""
        if self._new_slot is not None:
            for at in range(0, len(memory), self.slot_bytes):
                self._new_slot(memory[at : at + self.slot_bytes])

    def shrink_to(self, slots: int) -> None:
        """At most `slots` of them, now for those that are free, later for those that are lent."""
        self._target = slots
        while self._free and self.capacity > slots:
            self._park(self._free.pop())

    def _park(self, slot: int) -> None:
        arena, at = self._homes[slot]
        arena.discard(at, self.slot_bytes)
        self._pool.give(self.slot_bytes)
        self._parked.append(slot)

    def lend_nowait(self) -> int | None:
        """A slot's number, or None when all are lent."""
        return self._free.pop() if self._free else None

    def view(self, slot: int) -> memoryview:
        """The slot's memory, page aligned."""
        return self._views[slot]

    def give_back(self, slot: int) -> None:
        """End of a loan; nobody reads or writes the slot any more."""
        if self.capacity > self._target:
            self._park(slot)
        else:
            self._free.append(slot)

    def close(self) -> None:
        """Give all memory back to the pool; mappings end when the last array on them is gone."""
        self._pool.give(self.capacity * self.slot_bytes)
        self._views, self._homes, self._free, self._parked = [], [], [], []
