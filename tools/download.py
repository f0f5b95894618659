"""`sluice download`: a checkpoint from a hub, a mirror or a folder, whole, verified, on one drive or several.

Nothing has its final name before size and checksum are right, and config.json comes last of all: what is interrupted
looks like nothing, and the same command goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sluice.daemon.options import Json
from sluice.io.errors import InstanceHeld, PresetError, StoreError
from sluice.tools import published
from sluice.tools.transfer import (
    WORK_FOLDER,
    FolderSource,
    HttpSource,
    Moved,
    RemoteFile,
    Source,
    Transfer,
    begun_bytes,
    file_sha256,
    hub_source,
    index_shards,
    settle,
)

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
LAST = (INDEX, CONFIG)  # named after all shards are: without them a folder is no model
MANIFEST = "manifest.json"
ROOM_TO_SPARE = 256 * 2**20  # a drive filled to the last block serves nobody


@dataclass(frozen=True, slots=True)
class Room:
    """A target folder, its drive and the bytes free there."""

    folder: Path
    drive: int
    free_bytes: int


def rooms(folders: Sequence[Path]) -> list[Room]:
    """The targets, made where they are missing. Raises PresetError."""
    found: list[Room] = []
    for folder in folders:
        try:
            (folder / WORK_FOLDER).mkdir(parents=True, exist_ok=True)
            info = os.statvfs(folder)
            found.append(Room(folder, folder.stat().st_dev, info.f_bavail * info.f_frsize))
        except OSError as error:
            raise PresetError(f"--to {folder}: {error.strerror}") from None
    return found


def place(files: Iterable[RemoteFile], targets: Sequence[Room], begun: Mapping[str, Path]) -> dict[str, Path]:
    """Which folder each file goes to. Pure. Small files go to the first; shards to the drive with the most room left,
    so that drives of one size share them evenly; what was begun stays where it is.

    Raises PresetError with the bytes that are missing when they cannot all fit.
    """
    free = {room.drive: room.free_bytes - ROOM_TO_SPARE for room in targets}
    drive_of = {room.folder: room.drive for room in targets}
    chosen: dict[str, Path] = {}
    waiting: list[RemoteFile] = []
    for file in files:
        if file.name in begun:
            chosen[file.name] = begun[file.name]
        elif not file.name.endswith(".safetensors"):
            chosen[file.name] = targets[0].folder
        else:
            waiting.append(file)
            continue
        free[drive_of[chosen[file.name]]] -= file.size
    for file in waiting:
        best = max(targets, key=lambda room: free[room.drive])
        # Two folders of one drive take turns, or the first would take all.
        same = [room for room in targets if room.drive == best.drive]
        best = same[len(chosen) % len(same)]
        chosen[file.name] = best.folder
        free[best.drive] -= file.size
    short = -sum(left for left in free.values() if left < 0)
    if short > 0:
        names = ", ".join(str(room.folder) for room in targets)
        raise PresetError(
            f"--to {names}: {short} bytes short ({short / 1e9:.1f} GB, with {ROOM_TO_SPARE // 2**20} MiB kept free "
            "on each drive); free some, or give a further drive with another --to"
        )
    return chosen


def check_listing(files: Sequence[RemoteFile], label: str) -> None:
    """Refuses a listing that is no checkpoint, before the first byte. Raises StoreError."""
    names = [file.name for file in files]
    if len(set(names)) != len(names):
        raise StoreError(f"{label}: lists a file twice")
    if CONFIG not in names:
        raise StoreError(f"{label}: no {CONFIG} there, so no checkpoint this can use")
    if not any(name.endswith(".safetensors") for name in names):
        raise StoreError(f"{label}: no .safetensors files there")


def check_index(files: Sequence[RemoteFile], text: str, label: str) -> list[RemoteFile]:
    """The files an index needs (its shards, and everything that is no shard). Raises StoreError naming what is missing,
    and for Kimi K3 also what does not have its published size or checksum."""
    shards = index_shards(text)
    by_name = {file.name: file for file in files}
    missing = [name for name in shards if name not in by_name]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise StoreError(f"{label}: the index needs {', '.join(missing[:8])}{more}, which are not listed there")
    try:
        total = json.loads(text)["metadata"]["total_size"]
    except (ValueError, KeyError, TypeError):
        total = None
    if total == published.K3_TOTAL_SIZE:
        for name in shards:
            number = published.k3_shard_number(name)
            if number is None:
                continue
            size, sha256 = published.k3_shard_bytes(number), published.k3_shard_sha256(number)
            if by_name[name].size != size:
                raise StoreError(f"{label}: {name} has {by_name[name].size} bytes, published are {size}")
            if sha256 and by_name[name].checksum.startswith("sha256:") and by_name[name].checksum[7:] != sha256:
                raise StoreError(f"{label}: {name} is listed with another SHA-256 than the published one")
    return [file for file in files if not file.name.endswith(".safetensors") or file.name in shards]


class Progress:
    """Bytes so far, said now and then on standard error. Threads add to it."""

    def __init__(self, total: int, done: int, quiet: bool) -> None:
        self._total, self._done, self._quiet = total, done, quiet
        self._lock = threading.Lock()
        self._began = self._said = time.monotonic()
        self._first = done
        self._terminal = sys.stderr.isatty()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if not self._quiet and now - self._said >= (0.5 if self._terminal else 10):
                self._said = now
                rate = (self._done - self._first) / max(now - self._began, 1e-3)
                left = f", {(self._total - self._done) / rate / 60:.0f} min left" if rate > 0 else ""
                line = f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s{left}"
                print(f"\r{line:<70}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr)

    def end(self) -> None:
        if self._terminal and not self._quiet:
            print(file=sys.stderr)


@contextlib.contextmanager
def _alone(folders: Sequence[Path]) -> Iterator[None]:
    """One download at a time into a folder. Raises InstanceHeld."""
    with contextlib.ExitStack() as held:
        for folder in folders:
            handle = held.enter_context((folder / WORK_FOLDER / "lock").open("w"))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InstanceHeld(f"--to {folder}: another download is writing there") from None
        yield


def read_manifest(folder: Path) -> dict[str, dict[str, object]]:
    """What was downloaded into a model folder and its further drives: name -> size, sha256; {} when nothing was."""
    try:
        found = json.loads((folder / WORK_FOLDER / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    files = found.get("files") if isinstance(found, dict) else None
    return {str(k): v for k, v in files.items() if isinstance(v, dict)} if isinstance(files, dict) else {}


def _write_manifest(folder: Path, label: str, files: Mapping[str, Mapping[str, object]]) -> None:
    path = folder / WORK_FOLDER / MANIFEST
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"source": label, "files": files}, indent=1, sort_keys=True), encoding="utf-8")
    os.replace(fresh, path)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a download did. unverified: files whose source named no checksum (size and structure were checked)."""

    source: str
    folders: tuple[Path, ...]
    files: int
    size: int
    moved_bytes: int
    unverified: tuple[str, ...]


def fetch(
    source: Source, folders: Sequence[Path], jobs: int, *, quiet: bool = True, retry_pause: float = 1.0
) -> Fetched:
    """Brings a whole checkpoint into `folders` (the first is the model's). See the module's head for what holds when it
    is interrupted. retry_pause scales the waits between tries (0 in tests).

    Raises StoreError (wrong or missing content), StorageError (source or drive), PresetError (no room), InstanceHeld.
    """
    listed = source.listing()
    check_listing(listed, source.label)
    targets = rooms(folders)
    stop = threading.Event()
    with _alone(folders):
        progress = Progress(sum(file.size for file in listed), 0, quiet)
        transfer = Transfer(source, progress.add, stop, lambda seconds: _nap(stop, seconds * retry_pause))
        # The index first, if there is one: it says what is needed, and whether the source has all of it.
        needed = list(listed)
        index = next((file for file in listed if file.name == INDEX), None)
        first = targets[0].folder
        if index is not None:
            text = _read_ahead(index, first, transfer)
            needed = check_index(listed, text, source.label)
        known = read_manifest(first)
        whole, begun, have = _survey(needed, folders, known)
        missing = [file for file in needed if file.name not in whole]
        left = [
            RemoteFile(file.name, file.size - begun_bytes(begun[file.name], file)) if file.name in begun else file
            for file in missing
        ]
        where = place(left, targets, begun)
        progress = Progress(sum(file.size for file in needed), have, quiet)
        transfer = Transfer(source, progress.add, stop, lambda seconds: _nap(stop, seconds * retry_pause))
        moved = _bring_all(missing, where, transfer, jobs, stop)
        progress.end()
        record = {name: entry for name, entry in known.items() if name in whole}
        record |= {m.file.name: {"size": m.file.size, "sha256": m.sha256, "verified": m.verified} for m in moved}
        _write_manifest(first, source.label, record)
        _open_as_a_model(folders)
    unverified = tuple(sorted(name for name, entry in record.items() if not entry.get("verified", True)))
    total = sum(file.size for file in needed)
    return Fetched(source.label, tuple(folders), len(needed), total, sum(m.file.size for m in moved), unverified)


def _nap(stop: threading.Event, seconds: float) -> None:
    if stop.wait(seconds):
        raise KeyboardInterrupt


def _read_ahead(index: RemoteFile, folder: Path, transfer: Transfer) -> str:
    final = folder / INDEX
    if final.is_file() and final.stat().st_size == index.size:
        return final.read_text(encoding="utf-8", errors="replace")
    return transfer.bring(index, folder).read_text(encoding="utf-8", errors="replace")


def _survey(
    files: Sequence[RemoteFile], folders: Sequence[Path], known: Mapping[str, Mapping[str, object]]
) -> tuple[dict[str, Path], dict[str, Path], int]:
    """Files that are whole already, files that were begun (and where), and the bytes both make. Raises StoreError for a
    file of the right name whose content is another."""
    whole: dict[str, Path] = {}
    begun: dict[str, Path] = {}
    have = 0
    for file in files:
        for folder in folders:
            final = folder / file.name
            if final.is_file():
                entry = known.get(file.name, {})
                sha256 = str(entry.get("sha256", ""))
                if not (entry.get("size") == file.size == final.stat().st_size and _same(file, sha256)):
                    sha256 = file_sha256(final) if final.stat().st_size == file.size else ""
                    if not sha256 or not _same(file, sha256):
                        raise StoreError(
                            f"{final} exists with other content ({final.stat().st_size} bytes, wanted {file.size} "
                            f"{file.checksum}); move it away and start again"
                        )
                whole[file.name] = folder
                have += file.size
                break
            if begun_bytes(folder, file):
                begun[file.name] = folder
                have += begun_bytes(folder, file)
                break
    return whole, begun, have


def _same(file: RemoteFile, sha256: str) -> bool:
    kind, _, value = file.checksum.partition(":")
    return bool(sha256) and (kind != "sha256" or value.lower() == sha256)


def _bring_all(
    files: Sequence[RemoteFile], where: Mapping[str, Path], transfer: Transfer, jobs: int, stop: threading.Event
) -> list[Moved]:
    """Every file brought; shards and small files named as they are done, the index and config.json after all others."""
    moved: list[Moved] = []

    def one(file: RemoteFile) -> None:
        transfer.bring(file, where[file.name])
        if file.name not in LAST:
            moved.append(settle(file, where[file.name]))

    with ThreadPoolExecutor(jobs, thread_name_prefix="download") as pool:
        # Small files first: what is wrong with a source shows early.
        tasks = [pool.submit(one, file) for file in sorted(files, key=lambda file: file.name.endswith(".safetensors"))]
        try:
            done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            for task in done:
                task.result()
        except BaseException:
            stop.set()
            for task in tasks:
                task.cancel()
            raise
    by_name = {file.name: file for file in files}
    return moved + [settle(by_name[name], where[name]) for name in LAST if name in by_name]


def _open_as_a_model(folders: Sequence[Path]) -> None:
    """The headers of all shards agree with the index. Raises StoreError."""
    from sluice.io.store import Store

    Store.open(folders[0], list(folders[1:]))


def open_source(source: str, revision: str | None) -> Source:
    """A source by what it is called: a URL, a folder that exists, or a repository of the hub. Raises PresetError."""
    if source.startswith(("http://", "https://")):
        return HttpSource(source)
    if source.startswith(("/", "./", "../", "~")) or Path(source).is_dir():
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise PresetError(f"{source}: no such folder")
        return FolderSource(folder)
    return hub_source(source, revision)[0]


def download(
    to: Annotated[list[Path], typer.Option("--to", help="Target folder; give it again for every further drive.")],
    source: Annotated[
        str, typer.Argument(help="A repository (ORG/NAME), the URL of a mirror, or a folder.")
    ] = published.K3_REPOSITORY,
    revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of a repository.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=32, help="Files at a time.")] = 4,
    as_json: Json = False,
) -> None:
    """Bring a checkpoint here, whole and verified; the same command goes on after an interruption."""
    folders = [Path(os.path.abspath(folder)) for folder in to]
    if len(set(folders)) != len(folders):
        raise PresetError("--to: a folder is given twice")
    opened = open_source(source, revision)
    fetched = fetch(opened, folders, jobs, quiet=as_json)
    if as_json:
        shown = {
            "source": fetched.source,
            "folders": [str(folder) for folder in fetched.folders],
            "files": fetched.files,
            "bytes": fetched.size,
            "moved_bytes": fetched.moved_bytes,
            "unverified": list(fetched.unverified),
        }
        print(json.dumps(shown, ensure_ascii=False))
        return
    print(f"{fetched.files} files, {fetched.size / 1e9:.2f} GB from {fetched.source}, whole and named")
    if fetched.unverified:
        print(f"No checksum was known for {len(fetched.unverified)} of them: sizes and headers are right, that is all")
    also = "".join(f" --also {folder}" for folder in folders[1:])
    print(f"Next: sluice doctor --model {folders[0]}{also}")
