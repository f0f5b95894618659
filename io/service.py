"""Everything of io behind one handle: opens readers, memory, trunk and experts, and owns the I/O thread."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from sluice.io.errors import StorageError
from sluice.io.experts import CachePlan, ExpertSource, ResidentExperts
from sluice.io.store import Extent, Store
from sluice.io.trunk import ResidentTrunk, TrunkPlan, TrunkSource


@dataclass(frozen=True, slots=True)
class IoSettings:
    """backend: auto, uring or threads. direct: auto, on or off (O_DIRECT). depth: reads in flight per drive, 1..64.
    verify: off, first or always (checksums of packed stores)."""

    backend: str = "auto"
    direct: str = "auto"
    depth: int = 4
    verify: str = "first"


class IoService:
    """The running storage side. `trunk` and `experts` are what the model is given. Closing twice is harmless."""

    def __init__(self, trunk: TrunkSource, experts: ExpertSource, descriptors: dict[int, int]) -> None:
        self.trunk, self.experts = trunk, experts
        self._descriptors = descriptors

    @staticmethod
    def open(
        store: Store, trunk_plan: TrunkPlan, cache_plan: CachePlan, settings: IoSettings | None = None
    ) -> IoService:
        """Build everything as planned. Raises StorageError (a drive cannot be read), BudgetError (no memory)."""
        descriptors: dict[int, int] = {}

        def read(extent: Extent) -> bytearray:
            file = store.files[extent.file]
            fd = descriptors.get(extent.file)
            if fd is None:
                fd = descriptors[extent.file] = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            data = bytearray(extent.nbytes)
            done = 0
            while done < extent.nbytes:
                n = os.preadv(fd, [memoryview(data)[done:]], extent.offset + done)
                if n == 0:
                    raise StorageError(
                        "file ended early", drive=file.drive, file=str(file.path), offset=extent.offset + done
                    )
                done += n
            return data

        return IoService(ResidentTrunk(store, trunk_plan, read), ResidentExperts(store, read), descriptors)

    def close(self) -> None:
        """Give back descriptors, threads and memory."""
        for fd in self._descriptors.values():
            os.close(fd)
        self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
