"""Routed experts: a bounded cache in front of the drives, partitioned by layer.

Owns which experts are in memory and which reads are under way for them; knows nothing of what an
expert computes. The plan (`plan_cache`) is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from sluice.io.store import NUMPY_DTYPES, Extent, Store

TRANSIENT_SLOTS = 4
"""Slots beside the cache, through which experts pass that are consumed and not kept."""


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert, wholly and correctly filled. parts: name to array [rows, cols], uint8, uint16 (bf16 bits),
    float16 or float32, possibly not aligned; valid until the iteration that gave it advances."""

    id: int
    parts: Mapping[str, NDArray[Any]]


class Acquisition(Protocol):
    """Experts asked for together; a context manager whose exit gives all of them back."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

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
    slots = min(max(0, budget_bytes) // store.expert_slot_bytes, len(naming.layers) * naming.experts)
    quotas = partition(slots, len(naming.layers), naming.experts, counts)
    return CachePlan(slots, transient_slots, store.expert_slot_bytes, quotas)


class ResidentExperts:
    """Every expert is read when first asked for, and kept."""

    def __init__(self, store: Store, read: Callable[[Extent], bytearray]) -> None:
        self._store, self._read = store, read
        self._kept: dict[tuple[int, int], Expert] = {}

    def get(self, layer: int, expert: int) -> Expert:
        """One expert, read now if it was not before."""
        kept = self._kept.get((layer, expert))
        if kept is None:
            record = self._store.expert(layer, expert)
            slot = bytearray(record.slot_bytes)
            for read in record.reads:
                slot[read.at : read.at + read.extent.nbytes] = self._read(read.extent)
            parts = {
                part.name: np.ndarray(part.shape, NUMPY_DTYPES[part.dtype], memoryview(slot), part.at)
                for part in record.parts
            }
            kept = self._kept[layer, expert] = Expert(expert, parts)
        return kept

    def acquire(self, layer: int, ids: Sequence[int]) -> Acquisition:
        """See ExpertSource."""
        return _ResidentAcquisition(self, layer, list(ids))

    def hint(self, layer: int, ids: Sequence[int]) -> None:
        """See ExpertSource."""


class _ResidentAcquisition:
    def __init__(self, source: ResidentExperts, layer: int, ids: list[int]) -> None:
        self._source, self._layer, self._ids = source, layer, ids

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def as_they_arrive(self) -> Iterator[Expert]:
        for expert in self._ids:
            yield self._source.get(self._layer, expert)
