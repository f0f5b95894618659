"""Writing a packed store: every weight read once, checked, laid out anew. Resumable, and atomic at the end.

The layout is decided first and kept beside the output, so that every byte's place is fixed before the first is
written: a run that is killed anywhere and started again gives the same files. What is done is told by a journal,
one record for each piece or expert with its checksums, written only after the data is on the drive. The manifest,
without which nothing reads the store, comes last. Works through the source file by file, so that files can be freed
as it goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from sluice.io.errors import InstanceHeld, StorageError, StoreError
from sluice.io.packed import (
    MANIFEST,
    SUMS,
    Layout,
    PackedStore,
    first_page,
    from_json,
    make_layout,
    open_packed,
    to_json,
)
from sluice.io.store import ALIGN, RECLAIMED, Extent, Store, tensor_bytes
from sluice.io.trunk import RING_UNIT_BYTES, MatrixUse

LAYOUT_FILE = "sluice-pack.layout.json"
JOURNAL = "sluice-pack.journal"
SYNC_BYTES = 512 * 2**20
"""How much work a crash may cost; each sync makes the drive's queue run dry once."""
WORKERS = 3
MAX_SMALL_FILE_BYTES = 256 * 2**20

_libc = ctypes.CDLL(None, use_errno=True)
_PUNCH_HOLE, _KEEP_SIZE = 2, 1


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of the packed store that are written (those of an earlier run included), of all; bytes of this run."""

    done_bytes: int
    total_bytes: int
    this_run_bytes: int


@dataclass(frozen=True, slots=True)
class PackReport:
    """What a run did. resumed_bytes were there already; freed_bytes: of source shards."""

    written_bytes: int
    resumed_bytes: int
    freed_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Job:
    """One piece of a tensor, or one expert. number: its place in the journal; sources: what it is made of."""

    number: int
    tensor: int  # of the layout, -1 for an expert
    item: int  # number of the piece, or of the expert over all layers
    sources: tuple[Extent, ...]
    nbytes: int


class _Files:
    """Descriptors by number, opened when first used."""

    def __init__(self, paths: Sequence[Path], flags: int) -> None:
        self._paths, self._flags = paths, flags
        self._fds: dict[int, int] = {}

    def __getitem__(self, number: int) -> int:
        fd = self._fds.get(number)
        if fd is None:
            fd = self._fds[number] = os.open(self._paths[number], self._flags | os.O_CLOEXEC, 0o644)
        return fd

    def opened(self) -> list[int]:
        return list(self._fds.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def _read(fd: int, offset: int, nbytes: int, what: str) -> bytearray:
    data = bytearray(nbytes)
    done = 0
    while done < nbytes:
        n = os.preadv(fd, [memoryview(data)[done:]], offset + done)
        if n == 0:
            raise StorageError("the file ended early", file=what, offset=offset + done)
        done += n
    with contextlib.suppress(OSError):
        # Each byte is read once; keeping it in the page cache would push out everything else.
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
    return data


def _write(fd: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _jobs(source: Store, layout: Layout) -> list[_Job]:
    """Everything to be written, in the order in which it lies in the source."""
    made: list[tuple[tuple[int, int], int, int, tuple[Extent, ...], int]] = []
    for t, tensor in enumerate(layout.tensors):
        there = source.pieces(tensor.name)
        for i, piece in enumerate(tensor.pieces):
            row_bytes = piece.extent.nbytes // piece.rows if piece.rows else 0
            sources = []
            for s in there:
                begin, end = max(piece.row0, s.row0), min(piece.row0 + piece.rows, s.row0 + s.rows)
                if begin < end:
                    at = s.extent.offset + (begin - s.row0) * row_bytes
                    sources.append(Extent(s.extent.file, at, (end - begin) * row_bytes))
            first = (sources[0].file, sources[0].offset) if sources else (0, 0)
            made.append((first, t, i, tuple(sources), piece.extent.nbytes))
    if layout.experts is not None:
        experts = layout.experts
        sizes = {part.name: tensor_bytes(part.dtype, part.shape) for part in experts.parts}
        for row, layer in enumerate(experts.naming.layers):
            for expert in range(experts.naming.experts):
                record = source.expert(layer, expert)
                sources = []
                for part in record.parts:
                    read = next(r for r in record.reads if r.at <= part.at < r.at + r.extent.nbytes)
                    at = read.extent.offset + part.at - read.at
                    last = sources[-1] if sources else None
                    if last and last.file == read.extent.file and last.offset + last.nbytes == at:
                        sources[-1] = Extent(last.file, last.offset, last.nbytes + sizes[part.name])
                    else:
                        sources.append(Extent(read.extent.file, at, sizes[part.name]))
                number = row * experts.naming.experts + expert
                place = (sources[0].file, sources[0].offset)
                made.append((place, -1, number, tuple(sources), experts.slot_bytes))
    made.sort(key=lambda job: job[0])
    return [_Job(n, t, i, sources, nbytes) for n, (_, t, i, sources, nbytes) in enumerate(made)]


class _Journal:
    """Which jobs are done, with their checksums. A record torn by a crash ends what is believed."""

    def __init__(self, path: Path, pack_id: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.done: dict[int, tuple[int, ...]] = {}
        head = f"{pack_id}\n".encode()
        raw = b""
        while block := os.pread(self._fd, 2**24, len(raw)):
            raw += block
        at = 0
        if raw.startswith(head):
            at = len(head)
            while at + 5 <= len(raw):
                number, count = struct.unpack_from("<IB", raw, at)
                end = at + 5 + 8 * count + 4
                if end > len(raw) or struct.unpack_from("<I", raw, end - 4)[0] != zlib.crc32(raw[at : end - 4]):
                    break
                self.done[number] = struct.unpack_from(f"<{count}Q", raw, at + 5)
                at = end
        os.ftruncate(self._fd, at)
        if not at:
            os.pwrite(self._fd, head, 0)
            at = len(head)
        self._at = at

    def append(self, records: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Believed from now on: the data they speak of must be on the drive."""
        raw = b""
        for number, sums in records:
            body = struct.pack(f"<IB{len(sums)}Q", number, len(sums), *sums)
            raw += body + struct.pack("<I", zlib.crc32(body))
            self.done[number] = sums
        _write(self._fd, self._at, memoryview(raw))
        self._at += len(raw)
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def pack(
    source: Store,
    outs: Sequence[Path],
    *,
    order: Sequence[MatrixUse],
    vectors: Sequence[str],
    row_tables: Sequence[str],
    shares: Sequence[float] | None = None,
    unit_bytes: int = RING_UNIT_BYTES,
    reclaim: bool = False,
    refuse_bytes: Mapping[str, int] | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> PackReport:
    """Pack what is named (and all declared experts) over the folders, or go on where an earlier run ended.

    shares: see make_layout; equal ones when None; a run that goes on keeps those it began with. refuse_bytes: part
    name to a byte that must not occur in it (an MXFP4 scale of 255). reclaim: free the source's shards as they are
    done; the folder is then marked and no longer opens. Raises StoreError (outputs that belong to another
    checkpoint or layout, a forbidden byte, no room), StorageError (a drive failed), InstanceHeld (another run).
    """
    began = time.monotonic()
    for out in outs:
        out.mkdir(parents=True, exist_ok=True)
    if len({out.resolve() for out in outs}) != len(outs):
        raise StoreError(f"the same folder twice: {', '.join(map(str, outs))}")
    main = outs[0]
    lock = os.open(main / LAYOUT_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InstanceHeld(f"{main}: another run is packing into it") from error
        wanted = make_layout(source, order, vectors, row_tables, shares or [1.0] * len(outs), unit_bytes)
        if (main / MANIFEST).exists():
            made = open_packed(main, outs)
            _same_checkpoint(made.layout, source, main / MANIFEST)
            if shares is None or made.layout.pack_id == wanted.pack_id:
                with contextlib.suppress(OSError):
                    os.unlink(main / LAYOUT_FILE)
                return PackReport(0, made.layout.data_bytes, 0, time.monotonic() - began)
            raise StoreError(f"{main / MANIFEST}: packed already, in another way; remove it to pack anew")
        layout = _agreed_layout(lock, wanted, main / LAYOUT_FILE, source, len(outs))
        report = _Run(source, layout, list(outs), reclaim, refuse_bytes or {}, progress).run(began)
        os.unlink(main / LAYOUT_FILE)
        return report
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StoreError("no room left on the output; free some and start again, it goes on from here") from error
        raise StorageError(f"packing failed: {error.strerror or error}", file=str(error.filename or "")) from error
    finally:
        os.close(lock)


def _same_checkpoint(layout: Layout, source: Store, label: Path) -> None:
    if layout.identity != source.identity:
        raise StoreError(
            f"{label}: of checkpoint {layout.identity}, {source.path} is {source.identity}; choose another output"
        )


def _agreed_layout(lock: int, wanted: Layout, path: Path, source: Store, folders: int) -> Layout:
    """The layout of an earlier run, when there was one, or the wanted one, kept from now on."""
    raw = os.pread(lock, 2**28, 0)
    if raw:
        try:
            value = json.loads(raw)
        except ValueError:
            value = None  # torn while it was first written, so nothing else has been
        if value is not None:
            layout, _ = from_json(value, str(path))
            _same_checkpoint(layout, source, path)
            if layout.folders != folders:
                raise StoreError(
                    f"{path}: begun over {layout.folders} folders, {folders} are given; name the same ones"
                )
            return layout
    text = json.dumps(to_json(wanted)).encode()
    os.ftruncate(lock, 0)
    _write(lock, 0, memoryview(text))
    os.fdatasync(lock)
    return wanted


class _Run:
    def __init__(
        self,
        source: Store,
        layout: Layout,
        outs: list[Path],
        reclaim: bool,
        refuse_bytes: Mapping[str, int],
        progress: Callable[[Progress], None],
    ) -> None:
        self.source, self.layout, self.outs = source, layout, outs
        self.reclaim, self.refuse, self.progress = reclaim, refuse_bytes, progress
        self.pack_id = layout.pack_id
        self.paths = [outs[folder] / name for name, folder, _ in layout.files]

    def run(self, began: float) -> PackReport:
        layout, main = self.layout, self.outs[0]
        jobs = _jobs(self.source, layout)
        self._small_files(main)
        journal = _Journal(main / JOURNAL, self.pack_id)
        try:
            todo = [job for job in jobs if job.number not in journal.done]
            total = sum(job.nbytes for job in jobs)
            resumed = total - sum(job.nbytes for job in todo)
            if not self.reclaim:
                self._check_room(sum(job.nbytes for job in todo))
            with (
                _Files([file.path for file in self.source.files], os.O_RDONLY) as sources,
                _Files(self.paths, os.O_RDWR | os.O_CREAT) as files,
            ):
                for i, (_, _, nbytes) in enumerate(layout.files):
                    os.ftruncate(files[i], nbytes)
                    _write(files[i], 0, memoryview(first_page(layout, self.pack_id, i)))
                freed = self._work(jobs, todo, journal, sources, files, resumed, total)
            self._finish(jobs, journal)
        finally:
            journal.close()
        os.unlink(main / JOURNAL)
        if self.reclaim:
            freed += self._remove_sources(jobs)
        return PackReport(total - resumed, resumed, freed, time.monotonic() - began)

    def _small_files(self, main: Path) -> None:
        """Configuration, tokenizer, licence: whatever else lies beside the shards."""
        if not self.source.path.is_dir():
            return
        for path in sorted(self.source.path.iterdir()):
            ours = path.name.startswith("sluice-pack.") or path.name == RECLAIMED
            if ours or path.name.endswith((".safetensors", ".safetensors.index.json", ".bin")):
                continue
            if path.is_file() and path.stat().st_size <= MAX_SMALL_FILE_BYTES and not (main / path.name).exists():
                shutil.copyfile(path, main / path.name)

    def _check_room(self, nbytes: int) -> None:
        free = {}
        for out in self.outs:
            usage = os.statvfs(out)
            free[os.stat(out).st_dev] = usage.f_bavail * usage.f_frsize
        if sum(free.values()) < nbytes:
            raise StoreError(
                f"{', '.join(map(str, self.outs))}: {nbytes} bytes are needed, {sum(free.values())} are free; "
                "free some, add an output, or use --reclaim"
            )

    def _work(
        self,
        jobs: list[_Job],
        todo: list[_Job],
        journal: _Journal,
        sources: _Files,
        files: _Files,
        resumed: int,
        total: int,
    ) -> int:
        left = self._left_per_source(jobs, todo)
        # What an earlier run finished but did not come to free.
        freed = sum(self._free(file, sources) for file, n in left.items() if n == 0) if self.reclaim else 0
        done = resumed
        batch: list[tuple[_Job, tuple[int, ...]]] = []
        batch_bytes = 0

        def sync() -> int:
            nonlocal batch, batch_bytes
            for fd in files.opened():
                os.fdatasync(fd)
            journal.append([(job.number, sums) for job, sums in batch])
            freed = 0
            for job, _ in batch:
                for file in {extent.file for extent in job.sources}:
                    left[file] -= 1
                    if self.reclaim and left[file] == 0:
                        freed += self._free(file, sources)
            batch, batch_bytes = [], 0
            return freed

        with ThreadPoolExecutor(WORKERS, "sluice-pack") as workers:
            flying: deque[tuple[_Job, Future[tuple[int, ...]]]] = deque()
            try:
                for job in _and_then_none(todo):
                    if job is not None:
                        flying.append((job, workers.submit(self._do, job, sources, files)))
                    while flying and (job is None or len(flying) > WORKERS + 1):
                        ended, future = flying.popleft()
                        batch.append((ended, future.result()))
                        batch_bytes += ended.nbytes
                        done += ended.nbytes
                        self.progress(Progress(done, total, done - resumed))
                        if batch_bytes >= SYNC_BYTES:
                            freed += sync()
            finally:
                for _, future in flying:
                    future.cancel()
        return freed + sync()

    def _do(self, job: _Job, sources: _Files, files: _Files) -> tuple[int, ...]:
        data = bytearray()
        for extent in job.sources:
            data += _read(sources[extent.file], extent.offset, extent.nbytes, str(self.source.files[extent.file].path))
        if job.tensor >= 0:
            extent = self.layout.tensors[job.tensor].pieces[job.item].extent
            _write(files[extent.file], extent.offset, memoryview(data))
            return (xxhash.xxh3_64_intdigest(data),)
        experts = self.layout.experts
        assert experts is not None
        data += bytes(experts.slot_bytes - len(data))
        for part in experts.parts:
            bad = self.refuse.get(part.name)
            if bad is not None:
                values = np.frombuffer(data, np.uint8, tensor_bytes(part.dtype, part.shape), part.at)
                if (values == bad).any():
                    row, expert = divmod(job.item, experts.naming.experts)
                    name = experts.naming.template.format(
                        layer=experts.naming.layers[row], expert=expert, part=part.name
                    )
                    raise StoreError(
                        f"{self.source.path}: tensor {name} holds the byte {bad}, which stands for no number"
                    )
        sums = []
        for cut in experts.cuts:
            room = memoryview(data)[cut.at : cut.at + cut.nbytes]
            _write(files[cut.file], ALIGN + job.item * cut.nbytes, room)
            sums.append(xxhash.xxh3_64_intdigest(room))
        return tuple(sums)

    def _finish(self, jobs: list[_Job], journal: _Journal) -> None:
        layout, main = self.layout, self.outs[0]
        sums: dict[tuple[str, int], int] = {}
        experts = layout.experts
        expert_sums = np.zeros((experts.count, len(experts.cuts)) if experts else (0, 0), "<u8")
        for job in jobs:
            made = journal.done[job.number]
            if job.tensor >= 0:
                sums[layout.tensors[job.tensor].name, job.item] = made[0]
            else:
                expert_sums[job.item] = made
        value = to_json(layout, sums)
        value["places"] = [str(out.resolve()) for out in self.outs]
        if experts is not None:
            raw = expert_sums.tobytes()
            value["sums"] = xxhash.xxh3_64_hexdigest(raw)
            _replace(main / SUMS, raw)
        _replace(main / MANIFEST, json.dumps(value).encode())

    # --- giving the source up ---

    def _left_per_source(self, jobs: list[_Job], todo: list[_Job]) -> dict[int, int]:
        """Jobs still to do for each source file of which nothing but what is packed is needed."""
        used: dict[int, int] = {}
        for job in jobs:
            for extent in job.sources:
                used[extent.file] = used.get(extent.file, 0) + extent.nbytes
        left = {file: 0 for file, nbytes in used.items()}
        for job in todo:
            for file in {extent.file for extent in job.sources}:
                left[file] += 1
        if self.reclaim:
            for file, nbytes in used.items():
                if nbytes < self._data_bytes(file):
                    left[file] = -1  # also holds what is not packed (a vision tower): it stays
        return left

    def _data_bytes(self, file: int) -> int:
        with open(self.source.files[file].path, "rb") as opened:
            return self.source.files[file].nbytes - 8 - int.from_bytes(opened.read(8), "little")

    def _free(self, file: int, sources: _Files) -> int:
        """Give the data of one source file back to the drive. Its header stays, so that a later run can go on."""
        path = self.source.files[file].path
        marker = path.parent / RECLAIMED
        if not marker.exists():
            _replace(marker, f"being packed into {', '.join(str(out.resolve()) for out in self.outs)}\n".encode())
        start = self.source.files[file].nbytes - self._data_bytes(file)
        before = os.stat(path).st_blocks
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            begin, size = ctypes.c_int64(start), ctypes.c_int64(self.source.files[file].nbytes - start)
            if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, begin, size) != 0:
                code = ctypes.get_errno()
                raise StoreError(f"{path}: --reclaim is not possible on this file system ({os.strerror(code)})")
        finally:
            os.close(fd)
        return max(0, before - os.stat(path).st_blocks) * 512

    def _remove_sources(self, jobs: list[_Job]) -> int:
        freed = 0
        for file, left in self._left_per_source(jobs, []).items():
            if left == 0:
                path = self.source.files[file].path
                freed += os.stat(path).st_blocks * 512
                os.unlink(path)
        return freed


def _and_then_none(jobs: Sequence[_Job]) -> Iterator[_Job | None]:
    yield from jobs
    yield None


def _replace(path: Path, data: bytes) -> None:
    """Write a whole file or nothing."""
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        _write(fd, 0, memoryview(data))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def verify(store: PackedStore, progress: Callable[[Progress], None] = lambda progress: None) -> int:
    """Read all of a packed store and compare every checksum; the bytes read. Raises StorageError naming up to five
    records that do not match, once everything has been read."""
    extents: list[tuple[str, Extent]] = []
    for tensor in store.layout.tensors:
        extents += [(tensor.name, piece.extent) for piece in tensor.pieces]
    experts = store.layout.experts
    if experts is not None:
        store.declare_experts(experts.naming)
        for layer in experts.naming.layers:
            for expert in range(experts.naming.experts):
                extents += [(f"expert {expert} of layer {layer}", r.extent) for r in store.expert(layer, expert).reads]
    total, done = sum(extent.nbytes for _, extent in extents), 0
    bad: list[tuple[str, Extent]] = []
    with _Files([file.path for file in store.files], os.O_RDONLY) as files, ThreadPoolExecutor(WORKERS) as workers:

        def check(extent: Extent) -> bool:
            data = _read(files[extent.file], extent.offset, extent.nbytes, str(store.files[extent.file].path))
            return xxhash.xxh3_64_intdigest(data) == extent.checksum

        step = 64
        for at in range(0, len(extents), step):
            group = extents[at : at + step]
            for (name, extent), right in zip(group, workers.map(check, [e for _, e in group]), strict=True):
                if not right:
                    bad.append((name, extent))
                done += extent.nbytes
            progress(Progress(done, total, done))
    if bad:
        name, extent = bad[0]
        file = store.files[extent.file]
        more = ", ".join(name for name, _ in bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise StorageError(
            f"{len(bad)} records do not match their checksums: {more}",
            drive=file.drive,
            file=str(file.path),
            offset=extent.offset,
        )
    return total
