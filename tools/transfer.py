"""Moving files of a checkpoint from a source to a drive so that what has its final name is whole and verified.

A source lists files (name, size, checksum where it knows one) and gives their bytes from any offset. A transfer writes
NAME.part in a work folder beside the target, hashes as it goes, survives cut connections and restarts, and renames only
when size and SHA-256 are right. Nothing here knows models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from sluice.io.errors import PresetError, StorageError, StoreError

WORK_FOLDER = ".sluice-download"
PIECE = 1 << 20
TRIES = 6  # without a single new byte in between
PATIENCE_SECONDS = 60.0  # for a connection that sends nothing
SUMS_FILE = "SHA256SUMS"
LARGEST_LISTING = 64 * 2**20
# What a checkpoint consists of. Code, pictures and other formats of the same weights are left where they are.
WANTED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.(safetensors|json|jinja|model|txt|tiktoken)", re.ASCII)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file a source offers. checksum is "sha256:..." or git's "gitsha1:..." (a blob's), or "" when unknown."""

    name: str
    size: int
    checksum: str = ""


class Interrupted(Exception):
    """The source stopped in the middle; trying again from where it stopped may help."""


class Changed(Exception):
    """The source's file is not what it was when it was listed or begun."""


class Source(Protocol):
    """Where files come from."""

    label: str

    def listing(self) -> list[RemoteFile]:
        """Every wanted file. Raises StoreError or StorageError."""

    def pieces(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """The bytes of `file` from `offset` to its end. Raises Interrupted, Changed, StoreError or StorageError."""


# --- Checksums ------------------------------------------------------------------------------------------------------


class Digest:
    """A running checksum of the kind `checksum` names; SHA-256 besides, so that every file has one in the end."""

    def __init__(self, file: RemoteFile) -> None:
        self._sha256 = hashlib.sha256()
        self._git = None
        if file.checksum.startswith("gitsha1:"):
            # Git names a small file by the SHA-1 of its length and content; it is no protection against malice.
            self._git = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)

    def update(self, piece: bytes) -> None:
        self._sha256.update(piece)
        if self._git is not None:
            self._git.update(piece)

    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def agrees(self, checksum: str) -> bool:
        """Whether the bytes so far have this checksum; an unknown one agrees."""
        kind, _, value = checksum.partition(":")
        if kind == "sha256":
            return self.sha256() == value.lower()
        return self._git is None or self._git.hexdigest() == value.lower()


def file_sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file's content, read in large pieces. Raises OSError."""
    total = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        with contextlib.suppress(OSError):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while piece := stream.read(8 * PIECE):
            total.update(piece)
            if progress is not None:
                progress(len(piece))
    return total.hexdigest()


def parse_sums(text: str) -> dict[str, str]:
    """Names and lower-case SHA-256 of a `sha256sum` listing; lines of another form are left out."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"([0-9A-Fa-f]{64}) [ *](?:\./)?(.+)", line.rstrip("\r"), re.ASCII)
        if match:
            found[match[2]] = match[1].lower()
    return found


# --- Sources --------------------------------------------------------------------------------------------------------


class FolderSource:
    """A folder on this machine: a mounted drive, a share, an older copy. SHA256SUMS in it is believed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.label = str(folder)

    def listing(self) -> list[RemoteFile]:
        try:
            sums_file = self._folder / SUMS_FILE
            sums = parse_sums(sums_file.read_text(encoding="utf-8", errors="replace")) if sums_file.is_file() else {}
            files = [
                RemoteFile(entry.name, entry.stat().st_size, f"sha256:{sums[entry.name]}" if entry.name in sums else "")
                for entry in sorted(self._folder.iterdir())
                if WANTED.fullmatch(entry.name) and entry.is_file()
            ]
        except OSError as error:
            raise StoreError(f"{self._folder}: cannot be listed: {error.strerror}") from None
        absent = sorted(name for name in sums if WANTED.fullmatch(name) and name not in {file.name for file in files})
        if absent:
            raise StoreError(f"{self._folder}: {SUMS_FILE} names files that are not there: {', '.join(absent[:8])}")
        return files

    def pieces(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        try:
            with (self._folder / file.name).open("rb") as stream:
                if os.fstat(stream.fileno()).st_size != file.size:
                    raise Changed(f"{file.name} changed its size")
                stream.seek(offset)
                while piece := stream.read(PIECE):
                    yield piece
        except OSError as error:
            raise StorageError(
                f"reading the source: {error.strerror}", drive=self.label, file=file.name, offset=offset
            ) from None


class HttpSource:
    """Files over HTTP with ranges: a plain mirror, or (with `files` and `urls` given) a hub's own addresses.

    A mirror lists by SHA256SUMS where it has that file; otherwise the index names the shards, the usual small files
    are asked for, and sizes come from HEAD. Redirects are followed; a token is never sent to another host.
    """

    SMALL = (
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "special_tokens_map.json",
        "tiktoken.model",
        "chat_template.jinja",
        "preprocessor_config.json",
    )

    def __init__(
        self,
        base: str,
        headers: Mapping[str, str] | None = None,
        files: list[RemoteFile] | None = None,
        urls: Mapping[str, str] | None = None,
        label: str = "",
    ) -> None:
        import httpx

        parts = urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise PresetError(f"{base!r}: a mirror is written http://HOST/PATH or https://HOST/PATH")
        self._base = base.rstrip("/") + "/"
        self._files, self._urls = files, urls or {}
        self.label = label or base
        # identity: a compressed transfer has no ranges that mean anything.
        asked = {"Accept-Encoding": "identity", "User-Agent": "sluice", **(headers or {})}
        limits = httpx.Limits(max_connections=64)
        self._client = httpx.Client(headers=asked, follow_redirects=True, timeout=PATIENCE_SECONDS, limits=limits)

    def close(self) -> None:
        self._client.close()

    def _url(self, name: str) -> str:
        return self._urls.get(name) or self._base + quote(name)

    def _text(self, name: str) -> str | None:
        """A small file's text; None when the mirror does not have it. Raises StorageError."""
        import httpx

        body = bytearray()
        try:
            with self._client.stream("GET", self._url(name)) as answer:
                if answer.status_code in (404, 410):
                    return None
                if answer.status_code != 200:
                    raise StorageError(f"HTTP {answer.status_code}", drive=self.label, file=name)
                for piece in answer.iter_bytes():
                    body += piece
                    if len(body) > LARGEST_LISTING:
                        raise StorageError("larger than any index", drive=self.label, file=name)
        except httpx.HTTPError as error:
            raise StorageError(f"cannot be reached: {error}", drive=self.label, file=name) from None
        return body.decode("utf-8", errors="replace")

    def _size(self, name: str) -> int | None:
        """The size of a file by HEAD; None when the mirror does not have it. Raises StorageError."""
        import httpx

        try:
            answer = self._client.head(self._url(name))
        except httpx.HTTPError as error:
            raise StorageError(f"cannot be reached: {error}", drive=self.label, file=name) from None
        if answer.status_code in (404, 410):
            return None
        length = answer.headers.get("Content-Length", "")
        if answer.status_code != 200 or not length.isdigit():
            raise StorageError(f"HTTP {answer.status_code}, size {length or 'unknown'}", drive=self.label, file=name)
        return int(length)

    def listing(self) -> list[RemoteFile]:
        if self._files is not None:
            return self._files
        sums = parse_sums(self._text(SUMS_FILE) or "")
        names = sorted(name for name in sums if WANTED.fullmatch(name))
        if not names:
            index = self._text("model.safetensors.index.json")
            names = [*self.SMALL, *(index_shards(index) if index is not None else ["model.safetensors"])]
        found: list[RemoteFile] = []
        for name in names:
            size = self._size(name)
            if size is not None:
                found.append(RemoteFile(name, size, f"sha256:{sums[name]}" if name in sums else ""))
            elif name in sums or name.endswith(".safetensors"):
                raise StoreError(f"{self.label}: {name} is listed there but cannot be had (404)")
        return found

    def pieces(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        import httpx

        headers = {"Range": f"bytes={offset}-"} if offset else {}
        try:
            with self._client.stream("GET", self._url(file.name), headers=headers) as answer:
                skip = self._begin(answer, file, offset)
                # As they arrive: pieces gathered up to a size would be lost with the connection.
                for piece in answer.iter_raw():
                    if skip >= len(piece):
                        skip -= len(piece)
                        continue
                    yield piece[skip:]
                    skip = 0
        except httpx.HTTPError as error:
            raise Interrupted(str(error) or type(error).__name__) from None

    def _begin(self, answer: Any, file: RemoteFile, offset: int) -> int:
        """How many bytes of the body come before `offset`; refuses what is not this file from there on."""
        if answer.status_code == 206:
            match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range", ""), re.ASCII)
            if match is None or int(match[1]) != offset or int(match[3]) != file.size:
                raise Changed(f"{file.name}: asked for byte {offset} on, got {answer.headers.get('Content-Range')!r}")
            return 0
        if answer.status_code == 200:
            length = answer.headers.get("Content-Length", "")
            if length.isdigit() and int(length) != file.size:
                raise Changed(f"{file.name} is {length} bytes now, was listed with {file.size}")
            return offset  # a server without ranges sends all of it again
        if answer.status_code == 416:
            raise Changed(f"{file.name} is shorter than byte {offset} now")
        if answer.status_code in (408, 425, 429) or answer.status_code >= 500:
            raise Interrupted(f"HTTP {answer.status_code}")
        hint = "; a token is needed, set HF_TOKEN" if answer.status_code in (401, 403) else ""
        raise StorageError(f"HTTP {answer.status_code}{hint}", drive=self.label, file=file.name, offset=offset)


def index_shards(text: str) -> list[str]:
    """File names in an index's weight_map. Raises StoreError when it is none, or names a path."""
    try:
        names = sorted(set(json.loads(text)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StoreError("model.safetensors.index.json is no index (no weight_map)") from None
    for name in names:
        if not isinstance(name, str) or WANTED.fullmatch(name) is None:
            raise StoreError(f"model.safetensors.index.json names a file {name!r}, which is no plain name")
    return [str(name) for name in names]


def hub_source(repository: str, revision: str | None) -> tuple[HttpSource, str]:
    """A repository of the hub at one commit, and that commit. The token comes from the environment (HF_TOKEN).

    Listing, revision, addresses and authorisation are huggingface_hub's; the bytes come through the same verified
    transfer as from a mirror. Raises StoreError or StorageError.
    """
    import httpx
    from huggingface_hub import HfApi, get_token, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    except GatedRepoError:
        raise StoreError(f"{repository}: access must be granted first, and HF_TOKEN set") from None
    except RevisionNotFoundError:
        raise StoreError(f"{repository}: no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise StoreError(f"{repository}: no such repository, or it is private and HF_TOKEN is not set") from None
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 404:
            raise StoreError(f"{repository}: no such repository or revision") from None
        raise StorageError(
            f"the hub cannot be reached: {' '.join(str(error).split())[:300]}", drive=repository
        ) from None
    except ValueError as error:
        raise PresetError(f"{repository!r}: {error}") from None
    commit = info.sha or revision or "main"
    files, urls = [], {}
    for entry in info.siblings or []:
        name = entry.rfilename
        if WANTED.fullmatch(name) is None or entry.size is None:
            continue
        if entry.lfs is not None:
            checksum = f"sha256:{entry.lfs.sha256}"
        else:
            checksum = f"gitsha1:{entry.blob_id}" if entry.blob_id else ""
        files.append(RemoteFile(name, entry.size, checksum))
        urls[name] = hf_hub_url(repository, name, revision=commit)
    if not files:
        raise StoreError(f"{repository}: no files of a checkpoint at {commit}")
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    label = f"{repository}@{commit}"
    return HttpSource(next(iter(urls.values())).rsplit("/", 1)[0], headers, files, urls, label), commit


# --- One transfer ---------------------------------------------------------------------------------------------------


def part_path(folder: Path, name: str) -> Path:
    """Where an unfinished file lies: under a name no reader of checkpoints looks at."""
    return folder / WORK_FOLDER / f"{name}.part"


def begun_bytes(folder: Path, file: RemoteFile) -> int:
    """How much of this very file an earlier run left in `folder`; leftovers of another one are not counted."""
    note = _note_path(folder, file.name)
    try:
        if json.loads(note.read_text(encoding="utf-8")) != asdict(file):
            return 0
        return min(part_path(folder, file.name).stat().st_size, file.size)
    except (OSError, ValueError):
        return 0


def _note_path(folder: Path, name: str) -> Path:
    return folder / WORK_FOLDER / f"{name}.json"


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class Moved:
    """A file that is whole now. verified: its checksum was known and agreed."""

    file: RemoteFile
    folder: Path
    sha256: str
    verified: bool


class Transfer:
    """Brings one file into one folder. `progress` gets bytes as they are written (negative when they are thrown away);
    `stop` ends it between two pieces. Sleeping is passed in."""

    def __init__(
        self,
        source: Source,
        progress: Callable[[int], None],
        stop: threading.Event,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._source, self._progress, self._stop, self._sleep = source, progress, stop, sleep

    def bring(self, file: RemoteFile, folder: Path) -> Path:
        """Leaves the verified content under `part_path`, synced; `settle` gives it its name. Returns that path.

        Raises StoreError when the content is wrong twice, StorageError when the source or the drive fails for good,
        KeyboardInterrupt when `stop` is set.
        """
        part = part_path(folder, file.name)
        wrong = 0
        while True:
            digest = self._fill(file, folder, part)
            if digest.agrees(file.checksum):
                self._note_sha(folder, file.name, digest.sha256())
                return part
            wrong += 1
            self._throw_away(part, file)
            if wrong == 2:
                raise StoreError(
                    f"{file.name}: the bytes from {self._source.label} do not have {file.checksum}, twice; "
                    f"got sha256:{digest.sha256()}"
                )

    def _throw_away(self, part: Path, file: RemoteFile) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._progress(-part.stat().st_size)
            part.unlink()
        _note_path(part.parent.parent, file.name).unlink(missing_ok=True)

    def _fill(self, file: RemoteFile, folder: Path, part: Path) -> Digest:
        """The part file complete in size, and its checksum. Tries go on as long as each brings something new."""
        idle, best = 0, 0
        while True:
            digest, have = self._resume(file, folder, part)
            best = max(best, have)
            try:
                have = self._append(file, part, digest, have)
                if have == file.size:
                    return digest
                problem = f"the source ended after {have} of {file.size} bytes"
            except Interrupted as error:
                problem = str(error)
            except Changed as error:
                self._throw_away(part, file)
                problem, best = str(error), file.size  # only a whole file is news after this
            now = part.stat().st_size if part.exists() else 0
            idle, best = (0, now) if now > best else (idle + 1, best)
            if idle == TRIES:
                raise StorageError(
                    f"gave up after {TRIES} tries in a row that brought nothing: {problem}; "
                    "the same command goes on from here",
                    drive=self._source.label,
                    file=file.name,
                    offset=now,
                )
            self._sleep(min(30.0, 0.5 * 2**idle))

    def _resume(self, file: RemoteFile, folder: Path, part: Path) -> tuple[Digest, int]:
        """The checksum of what is there already, and its length; starts afresh where it belongs to another file."""
        digest = Digest(file)
        have = begun_bytes(folder, file)
        part.parent.mkdir(parents=True, exist_ok=True)
        if not have:
            part.unlink(missing_ok=True)
            _note_path(folder, file.name).write_text(json.dumps(asdict(file)), encoding="utf-8")
            return digest, 0
        with part.open("r+b") as stream:
            stream.truncate(have)
            while piece := stream.read(8 * PIECE):
                digest.update(piece)
        return digest, have

    def _append(self, file: RemoteFile, part: Path, digest: Digest, have: int) -> int:
        if have == file.size and file.size:
            return have
        with part.open("ab") as stream:
            try:
                for piece in self._source.pieces(file, have):
                    if self._stop.is_set():
                        raise KeyboardInterrupt
                    if have + len(piece) > file.size:
                        raise Changed(f"{file.name} sends more than its {file.size} bytes")
                    stream.write(piece)
                    digest.update(piece)
                    have += len(piece)
                    self._progress(len(piece))
            except OSError as error:
                raise StorageError(
                    f"writing: {error.strerror}", drive=str(part.parent.parent), file=file.name, offset=have
                ) from None
            finally:
                with contextlib.suppress(OSError):
                    stream.flush()
            os.fsync(stream.fileno())
        return have

    def _note_sha(self, folder: Path, name: str, sha256: str) -> None:
        (folder / WORK_FOLDER / f"{name}.sha256").write_text(sha256, encoding="utf-8")


def settle(file: RemoteFile, folder: Path) -> Moved:
    """Gives a brought file its final name. Raises StorageError."""
    part = part_path(folder, file.name)
    sha_file = folder / WORK_FOLDER / f"{file.name}.sha256"
    try:
        sha256 = sha_file.read_text(encoding="utf-8")
        os.replace(part, folder / file.name)
        _sync_folder(folder)
        sha_file.unlink()
        _note_path(folder, file.name).unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"naming it: {error.strerror}", drive=str(folder), file=file.name) from None
    return Moved(file, folder, sha256, bool(file.checksum))
