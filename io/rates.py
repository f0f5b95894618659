"""How fast drives really read: timed transfers that bypass the page cache, for `diskbench` and for shares of a pack."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.io.buffers import BufferPool, SlotArena
from sluice.io.errors import StorageError
from sluice.io.loop import IoLoop
from sluice.io.reader import OpenFile, Reader, Transfer, open_reader
from sluice.io.store import ALIGN, align_down, align_up

GB = 1e9
PCIE_GB_S_PER_LANE = {"2.5": 0.25, "5.0": 0.5, "8.0": 0.985, "16.0": 1.969, "32.0": 3.938, "64.0": 7.563}
NO_DRIVE_GB_S = 16.0
"""A single drive above this (PCIe 5, four lanes) is not a drive: the answer came from somebody's cache."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One measurement. kind: random or sequential; depth: in flight per drive; direct: page cache bypassed."""

    paths: tuple[str, ...]
    kind: str
    depth: int
    transfer_bytes: int
    seconds: float
    read_bytes: int
    backend: str
    direct: bool

    @property
    def gb_s(self) -> float:
        """10^9 bytes a second."""
        return self.read_bytes / self.seconds / GB if self.seconds else 0.0


def link_gb_s(path: Path) -> float | None:
    """What the PCIe link of the drive under `path` carries, or None where the kernel does not say (virtual drives)."""
    try:
        device = os.stat(path).st_dev
        node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
        for folder in (node, *node.parents):
            speed, width = folder / "current_link_speed", folder / "current_link_width"
            if speed.exists() and width.exists():
                return PCIE_GB_S_PER_LANE[speed.read_text().split()[0]] * int(width.read_text())
    except (OSError, ValueError, KeyError, IndexError):
        pass
    return None


def believable(rate: Rate) -> str:
    """ "" for a rate that a drive can have, else why it cannot be one."""
    limits = [link_gb_s(Path(path)) or NO_DRIVE_GB_S for path in rate.paths]
    if not rate.direct:
        return "read through the page cache, which may have answered"
    if rate.gb_s > sum(limits):
        return f"more than the link carries ({sum(limits):.1f} GB/s): a cache below has answered"
    return ""


class RateMeter:
    """Files under test and the reader that reads them. A context manager; holds one pool of buffers."""

    def __init__(self, paths: Sequence[Path], backend: str = "auto", max_depth: int = 32) -> None:
        self.paths = list(paths)
        self._loop = IoLoop()
        self._files: list[OpenFile] = []
        self._reader: Reader | None = None
        try:
            for i, path in enumerate(paths):
                self._files.append(OpenFile(path, i, str(path.parent), True))
            self._reader, self.reason = self._loop.call(
                lambda: open_reader(backend, self._loop.loop, max_depth * len(paths))
            )
        except BaseException:
            self.close()
            raise

    def measure(
        self, files: Sequence[int], kind: str, depth: int, transfer_bytes: int, seconds: float, seed: int = 1
    ) -> Rate:
        """Keep `depth` transfers in flight on each of the files for about `seconds`. Raises StorageError."""
        size = align_up(transfer_bytes)
        slots = SlotArena(BufferPool(size * depth * len(files)), depth * len(files), size, "rate buffers")
        chosen = [self._files[i] for i in files]
        ends = {file.fd: align_down(os.fstat(file.fd).st_size) for file in chosen}
        for file in chosen:
            if ends[file.fd] < size:
                raise StorageError(f"{ends[file.fd]} bytes are too few for reads of {size}", file=str(file.path))
        rng = random.Random(seed)
        next_at = {file.fd: 0 for file in chosen}
        state = {"flying": 0, "bytes": 0, "error": 0}
        over = threading.Event()
        began = time.perf_counter()
        until = began + seconds
        ended = [began]
        reader = self._reader
        assert reader is not None

        def start(file: OpenFile, slot: int) -> None:
            room = ends[file.fd] - size
            if kind == "random":
                offset = align_down(rng.randrange(room + 1))
            else:
                offset = next_at[file.fd] if next_at[file.fd] <= room else 0
                next_at[file.fd] = offset + size
            state["flying"] += 1

            def done(result: int) -> None:
                state["flying"] -= 1
                state["bytes"] += max(0, result)
                now = ended[0] = time.perf_counter()
                if result <= 0:
                    state["error"] = result or -5
                if now < until and result > 0:
                    start(file, slot)
                    reader.flush()
                elif not state["flying"]:
                    over.set()

            reader.start(Transfer(file.fd, offset, slots.view(slot), done))

        def begin() -> None:
            for i, file in enumerate(chosen):
                for k in range(depth):
                    start(file, i * depth + k)
            reader.flush()

        self._loop.call(begin)
        if not over.wait(seconds + 60):
            raise StorageError("reads are stuck", file=str(chosen[0].path))
        if state["error"]:
            raise StorageError(f"read failed: {os.strerror(-state['error'])}", file=str(chosen[0].path))
        return Rate(
            tuple(str(file.path) for file in chosen),
            kind,
            depth,
            size,
            ended[0] - began,
            state["bytes"],
            reader.name,
            all(file.direct for file in chosen),
        )

    def close(self) -> None:
        """Give everything back. Harmless twice."""
        if self._reader is not None:
            self._loop.call(self._reader.close)
            self._reader = None
        self._loop.close()
        for file in self._files:
            file.close()
        self._files = []

    def __enter__(self) -> RateMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def scratch_file(folder: Path, nbytes: int, seed: int = 7) -> Path:
    """A file of random bytes to be read, written past the page cache's memory (synced and dropped). The caller
    removes it. Random, since drives and file systems may answer zeros without reading."""
    path = folder / f".sluice-diskbench-{os.getpid()}"
    rng = random.Random(seed)
    block = rng.randbytes(4 * 2**20)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        while done < align_up(nbytes):
            # Each block differs from the last, so that nothing below can fold them into one.
            mark = done.to_bytes(8, "little")
            done += os.write(fd, mark + block[8 : min(len(block), align_up(nbytes) - done)])
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return path


def folder_rates(folders: Sequence[Path], nbytes: int = 512 * 2**20, seconds: float = 1.0) -> list[float]:
    """GB/s of each folder's drive for reads of 8 MiB, four in flight, on a scratch file. For shares of a pack."""
    rates = []
    for folder in folders:
        path = scratch_file(folder, nbytes)
        try:
            with RateMeter([path], max_depth=4) as meter:
                rates.append(meter.measure([0], "random", 4, min(8 * 2**20, align_down(nbytes) or ALIGN), seconds).gb_s)
        finally:
            os.unlink(path)
    return rates
