"""`sluice download` against a local HTTP server that has ranges, cuts connections and lies, and against folders."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import typer
from helpers.shared import shared_path
from typer.testing import CliRunner

from sluice.io.errors import InstanceHeld, PresetError, StorageError, StoreError
from sluice.io.store import Store
from sluice.tools import published
from sluice.tools.download import (
    CONFIG,
    INDEX,
    ROOM_TO_SPARE,
    Room,
    check_index,
    check_listing,
    download,
    fetch,
    open_source,
    place,
)
from sluice.tools.transfer import WORK_FOLDER, FolderSource, HttpSource, RemoteFile, hub_source, parse_sums, part_path

MB = 10**6


def safetensors_bytes(name: str, items: int, seed: int) -> bytes:
    data = np.random.default_rng(seed).integers(0, 256, items * 4, dtype=np.uint8).tobytes()
    header = json.dumps({name: {"dtype": "F32", "shape": [items], "data_offsets": [0, items * 4]}}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Three shards of 1.2 MB and what belongs to them; not a model anybody could run, but whole as files."""
    folder = tmp_path / "origin"
    folder.mkdir()
    shards = {f"model-{i:05d}-of-00003.safetensors": f"t{i}" for i in (1, 2, 3)}
    for seed, (file, tensor) in enumerate(shards.items()):
        (folder / file).write_bytes(safetensors_bytes(tensor, 300_000, seed))
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 3_600_000}, "weight_map": {t: f for f, t in shards.items()}})
    )
    (folder / CONFIG).write_text('{"model_type": "none"}')
    (folder / "tiktoken.model").write_bytes(b"YQ== 0\n")
    (folder / "README.md").write_text("not wanted")
    (folder / "modeling.py").write_text("never fetched")
    return folder


def write_sums(folder: Path) -> None:
    lines = [
        f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}"
        for f in sorted(folder.iterdir())
        if f.name != "SHA256SUMS"
    ]
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")


class Mirror:
    """An HTTP server over a folder. `before` may change or break an answer: it gets name, range start and the count of
    requests for that name so far, and returns the bytes to send (fewer are a cut connection) or an int, a status."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranges = True
        self.before: Callable[[str, int, int, bytes], bytes | int] = lambda name, start, count, body: body
        self.requests: list[tuple[str, str, int]] = []
        self.tokens: set[str] = set()
        self.routes: dict[str, bytes] = {}
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                mirror.handle(self, body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def handle(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = request.path.split("?")[0]
        self.tokens.add(request.headers.get("Authorization", ""))
        name = path.rsplit("/", 1)[-1]
        if path in self.routes:
            content = self.routes[path]
        elif (self.folder / name).is_file():
            content = (self.folder / name).read_bytes()
        else:
            self.send(request, 404, {}, b"", 0, body)
            return
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        start = int(asked[1]) if asked and self.ranges else 0
        count = sum(1 for method, seen, _ in self.requests if seen == name and method == "GET")
        self.requests.append((request.command, name, start))
        headers, status = {}, 200
        if asked and self.ranges:
            if start >= len(content):
                self.send(request, 416, {}, b"", 0, body)
                return
            status, headers = 206, {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        rest = content[start:]
        sent = self.before(name, start, count, rest) if body else rest
        if isinstance(sent, int):
            self.send(request, sent, {}, b"", 0, body)
        else:
            self.send(request, status, headers, sent, len(rest), body)

    @staticmethod
    def send(
        request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], sent: bytes, length: int, body: bool
    ) -> None:
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            request.wfile.write(sent)
            if len(sent) != length:
                request.close_connection = True

    def gets(self, name: str) -> list[int]:
        """The offsets asked for."""
        return [start for method, seen, start in self.requests if seen == name and method == "GET"]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def mirror(checkpoint: Path) -> Iterator[Mirror]:
    running = Mirror(checkpoint)
    yield running
    running.close()


def get(mirror: Mirror, *folders: Path, jobs: int = 2) -> object:
    source = HttpSource(mirror.url)
    try:
        return fetch(source, folders, jobs, retry_pause=0)
    finally:
        source.close()


def visible(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir() if entry.name != WORK_FOLDER}


def assert_same(origin: Path, *folders: Path) -> None:
    for file in origin.iterdir():
        copies = [folder / file.name for folder in folders if (folder / file.name).exists()]
        if file.suffix in (".safetensors", ".json", ".model") and file.name != "SHA256SUMS":
            assert len(copies) == 1, file.name
            assert copies[0].read_bytes() == file.read_bytes()


SHARD = "model-00002-of-00003.safetensors"


def test_a_mirror_with_checksums_is_copied_whole_and_verified(mirror: Mirror, checkpoint: Path, tmp_path: Path) -> None:
    write_sums(checkpoint)
    fetched = get(mirror, tmp_path / "a")
    assert fetched.unverified == ()  # type: ignore[attr-defined]
    assert_same(checkpoint, tmp_path / "a")
    assert visible(tmp_path / "a") == {f.name for f in checkpoint.iterdir()} - {
        "README.md",
        "modeling.py",
        "SHA256SUMS",
    }
    assert list((tmp_path / "a" / WORK_FOLDER).glob("*.part")) == []
    before = len(mirror.requests)
    again = get(mirror, tmp_path / "a")
    assert again.moved_bytes == 0  # type: ignore[attr-defined]
    assert [r for r in mirror.requests[before:] if r[0] == "GET" and r[1] != "SHA256SUMS"] == []


def test_without_checksums_sizes_and_headers_are_checked_and_that_is_said(
    mirror: Mirror, checkpoint: Path, tmp_path: Path
) -> None:
    fetched = get(mirror, tmp_path / "a")
    assert SHARD in fetched.unverified  # type: ignore[attr-defined]
    assert_same(checkpoint, tmp_path / "a")


def test_a_cut_connection_is_taken_up_where_it_broke(mirror: Mirror, checkpoint: Path, tmp_path: Path) -> None:
    write_sums(checkpoint)
    mirror.before = lambda name, start, count, body: body[:300_000] if name == SHARD and count < 3 else body
    get(mirror, tmp_path / "a")
    assert mirror.gets(SHARD) == [0, 300_000, 600_000, 900_000]
    assert_same(checkpoint, tmp_path / "a")


def test_a_server_without_ranges_is_read_again_from_the_start(mirror: Mirror, checkpoint: Path, tmp_path: Path) -> None:
    write_sums(checkpoint)
    mirror.ranges = False
    mirror.before = lambda name, start, count, body: body[:300_000] if name == SHARD and count == 0 else body
    get(mirror, tmp_path / "a")
    assert len(mirror.gets(SHARD)) == 2
    assert_same(checkpoint, tmp_path / "a")


def test_busy_and_failing_servers_are_asked_again(mirror: Mirror, checkpoint: Path, tmp_path: Path) -> None:
    statuses = [503, 429, 500]
    mirror.before = lambda name, start, count, body: statuses[count] if name == SHARD and count < 3 else body
    get(mirror, tmp_path / "a")
    assert_same(checkpoint, tmp_path / "a")


def test_a_source_that_stays_away_is_given_up_and_nothing_looks_complete(mirror: Mirror, tmp_path: Path) -> None:
    mirror.before = lambda name, start, count, body: body[: 1000 if start == 0 else 0] if name == SHARD else body
    with pytest.raises(StorageError, match=r"gave up after 6 tries.*goes on from here") as failed:
        get(mirror, tmp_path / "a", jobs=1)
    assert failed.value.exit_code == 4
    assert failed.value.file == SHARD
    assert CONFIG not in visible(tmp_path / "a")
    assert SHARD not in visible(tmp_path / "a")
    with pytest.raises(StoreError):
        Store.open(tmp_path / "a")


def test_an_interrupted_download_goes_on_in_a_new_run(mirror: Mirror, checkpoint: Path, tmp_path: Path) -> None:
    write_sums(checkpoint)
    mirror.before = lambda name, start, count, body: (body[:500_000] if start == 0 else 404) if name == SHARD else body
    with pytest.raises(StorageError, match="HTTP 404"):
        get(mirror, tmp_path / "a", jobs=1)
    assert part_path(tmp_path / "a", SHARD).stat().st_size == 500_000
    mirror.before = lambda name, start, count, body: body
    get(mirror, tmp_path / "a")
    assert mirror.gets(SHARD)[-1] == 500_000
    assert len(mirror.gets("model-00001-of-00003.safetensors")) == 1  # what was whole was not asked for again
    assert_same(checkpoint, tmp_path / "a")


def test_what_was_begun_of_another_version_is_not_continued(mirror: Mirror, checkpoint: Path, tmp_path: Path) -> None:
    write_sums(checkpoint)
    mirror.before = lambda name, start, count, body: (body[:500_000] if start == 0 else 404) if name == SHARD else body
    with pytest.raises(StorageError):
        get(mirror, tmp_path / "a", jobs=1)
    (checkpoint / SHARD).write_bytes(safetensors_bytes("t2", 300_000, 99))
    write_sums(checkpoint)
    mirror.before = lambda name, start, count, body: body
    get(mirror, tmp_path / "a")
    assert_same(checkpoint, tmp_path / "a")


def corrupt(body: bytes) -> bytes:
    return body[:700_000] + bytes([body[700_000] ^ 1]) + body[700_001:]


def test_a_flipped_bit_is_noticed_and_the_file_read_again(mirror: Mirror, checkpoint: Path, tmp_path: Path) -> None:
    write_sums(checkpoint)
    mirror.before = lambda name, start, count, body: corrupt(body) if name == SHARD and count == 0 else body
    get(mirror, tmp_path / "a")
    assert mirror.gets(SHARD) == [0, 0]
    assert_same(checkpoint, tmp_path / "a")


def test_bytes_that_are_wrong_twice_are_refused_and_thrown_away(
    mirror: Mirror, checkpoint: Path, tmp_path: Path
) -> None:
    write_sums(checkpoint)
    mirror.before = lambda name, start, count, body: corrupt(body) if name == SHARD else body
    with pytest.raises(StoreError, match=rf"{SHARD}.*do not have sha256:.*twice"):
        get(mirror, tmp_path / "a")
    assert SHARD not in visible(tmp_path / "a")
    assert CONFIG not in visible(tmp_path / "a")
    assert not part_path(tmp_path / "a", SHARD).exists()


def test_a_file_that_changes_under_us_is_not_patched_together(mirror: Mirror, checkpoint: Path, tmp_path: Path) -> None:
    """Shorter, longer, and cut in the middle of a change: never half of one and half of the other."""
    fresh = safetensors_bytes("t2", 300_001, 5)

    def before(name: str, start: int, count: int, body: bytes) -> bytes | int:
        if name == SHARD and count == 0:
            (checkpoint / SHARD).write_bytes(fresh)
            return body[:400_000]
        return body

    mirror.before = before
    with pytest.raises(StorageError, match="brought nothing"):
        get(mirror, tmp_path / "a")
    assert SHARD not in visible(tmp_path / "a")


def test_shards_spread_over_drives_and_open_as_one_store(mirror: Mirror, checkpoint: Path, tmp_path: Path) -> None:
    write_sums(checkpoint)
    get(mirror, tmp_path / "a", tmp_path / "b")
    assert {CONFIG, INDEX, "tiktoken.model"} <= visible(tmp_path / "a")
    assert len([n for n in visible(tmp_path / "b") if n.endswith(".safetensors")]) in (1, 2)
    assert_same(checkpoint, tmp_path / "a", tmp_path / "b")
    assert len(Store.open(tmp_path / "a", [tmp_path / "b"]).tensors) == 3


def test_a_shard_that_is_not_there_is_named_before_anything_is_copied(
    checkpoint: Path, mirror: Mirror, tmp_path: Path
) -> None:
    (checkpoint / SHARD).unlink()
    with pytest.raises(StoreError, match=SHARD):
        get(mirror, tmp_path / "a")
    with pytest.raises(StoreError, match=SHARD):
        fetch(FolderSource(checkpoint), [tmp_path / "b"], 1, retry_pause=0)
    assert visible(tmp_path / "b") == set()


def test_a_folder_is_a_source_too(checkpoint: Path, tmp_path: Path) -> None:
    fetched = fetch(FolderSource(checkpoint), [tmp_path / "a"], 2, retry_pause=0)
    assert len(fetched.unverified) == 6
    assert_same(checkpoint, tmp_path / "a")
    write_sums(checkpoint)
    corrupted = bytearray((checkpoint / SHARD).read_bytes())
    corrupted[-1] ^= 1
    (checkpoint / SHARD).write_bytes(corrupted)
    with pytest.raises(StoreError, match="twice"):
        fetch(FolderSource(checkpoint), [tmp_path / "b"], 2, retry_pause=0)
    (checkpoint / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(StoreError, match="names files that are not there"):
        fetch(FolderSource(checkpoint), [tmp_path / "c"], 2)


def test_a_file_of_other_content_in_the_way_is_named_and_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    write_sums(checkpoint)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / SHARD).write_bytes(b"mine")
    with pytest.raises(StoreError, match="exists with other content"):
        fetch(FolderSource(checkpoint), [tmp_path / "a"], 1)
    assert (tmp_path / "a" / SHARD).read_bytes() == b"mine"


def test_two_downloads_into_one_folder_are_one_too_many(checkpoint: Path, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "a" / WORK_FOLDER).mkdir(parents=True)
    with (tmp_path / "a" / WORK_FOLDER / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InstanceHeld, match="another download"):
            fetch(FolderSource(checkpoint), [tmp_path / "a"], 1)


def test_room_is_counted_per_drive_before_the_first_byte() -> None:
    files = [RemoteFile(f"{i}.safetensors", 100 * MB) for i in range(6)] + [RemoteFile(CONFIG, 10)]
    a, b = Path("/a"), Path("/b")
    big, small = Room(a, 1, ROOM_TO_SPARE + 450 * MB), Room(b, 2, ROOM_TO_SPARE + 250 * MB)
    chosen = place(files, [big, small], {})
    assert chosen[CONFIG] == a
    assert sorted(map(str, (chosen[f.name] for f in files[:6]))) == ["/a"] * 4 + ["/b"] * 2
    with pytest.raises(PresetError, match=r"--to /a: 150000010 bytes short"):
        place(files, [big], {})
    one_drive = [Room(a, 1, ROOM_TO_SPARE + 700 * MB), Room(b, 1, ROOM_TO_SPARE + 700 * MB)]
    assert set(place(files, one_drive, {}).values()) == {a, b}
    assert place(files, [big, small], {"0.safetensors": b})["0.safetensors"] == b


def test_no_room_means_no_byte(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.tools.download.ROOM_TO_SPARE", 2**60)
    with pytest.raises(PresetError, match="bytes short"):
        fetch(FolderSource(checkpoint), [tmp_path / "a"], 1)
    assert visible(tmp_path / "a") == set()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.safetensors"], "no config.json"),
        ([CONFIG], "no .safetensors"),
        ([CONFIG, CONFIG, "a.safetensors"], "twice"),
    ],
)
def test_what_is_no_checkpoint_is_refused(names: list[str], words: str) -> None:
    with pytest.raises(StoreError, match=words):
        check_listing([RemoteFile(name, 1) for name in names], "there")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"t": "../../etc/x.safetensors"}}']
)
def test_an_index_that_is_none_or_leaves_the_folder_is_refused(text: str) -> None:
    with pytest.raises(StoreError):
        check_index([RemoteFile("a.safetensors", 1)], text, "there")


def test_kimi_k3_must_have_its_published_sizes_and_checksums() -> None:
    names = [f"model-{i:05d}-of-000096.safetensors" for i in range(1, 97)]
    index = json.dumps(
        {"metadata": {"total_size": published.K3_TOTAL_SIZE}, "weight_map": dict(zip(names, names, strict=True))}
    )
    files = [
        RemoteFile(n, published.k3_shard_bytes(i), f"sha256:{published.k3_shard_sha256(i) or '0' * 64}")
        for i, n in enumerate(names, 1)
    ]
    assert check_index(files, index, "there") == files
    short = [*files[:4], RemoteFile(files[4].name, files[4].size - 1, files[4].checksum), *files[5:]]
    with pytest.raises(StoreError, match=r"model-00005.*published are"):
        check_index(short, index, "there")
    foreign = [RemoteFile(files[0].name, files[0].size, f"sha256:{'1' * 64}"), *files[1:]]
    with pytest.raises(StoreError, match="another SHA-256"):
        check_index(foreign, index, "there")


def test_the_published_sizes_are_those_of_the_specification() -> None:
    rows = shared_path("spec/k3_shards.tsv").read_text().splitlines()[1:]
    for number, row in enumerate(rows, 1):
        name, size, *rest = row.split("\t")
        assert published.k3_shard_number(name) == number
        assert published.k3_shard_bytes(number) == int(size)
        assert (published.k3_shard_sha256(number) or "-") == rest[-1]
    assert len(rows) == published.K3_SHARDS
    assert published.k3_shard_number("model-00097-of-000096.safetensors") is None


def test_a_hub_repository_is_pinned_to_a_commit_and_asked_with_the_token(
    mirror: Mirror, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's own client lists and names addresses; here against a server that speaks as the hub does."""
    commit = "c5d1dd4c428bd1ce8b88c5044f3b6ccde9e3b721"
    siblings: list[dict[str, object]] = []
    for file in sorted(checkpoint.iterdir()):
        content = file.read_bytes()
        entry: dict[str, object] = {"rfilename": file.name, "size": len(content)}
        if file.suffix == ".safetensors":
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        entry["blobId"] = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        siblings.append(entry)
    info = {
        "id": "org/model",
        "modelId": "org/model",
        "sha": commit,
        "siblings": siblings,
        "private": False,
        "tags": [],
    }
    mirror.routes["/api/models/org/model/revision/v1"] = json.dumps(info).encode()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for name in ("huggingface_hub.constants.ENDPOINT", "huggingface_hub.hf_api.constants.ENDPOINT"):
        monkeypatch.setattr(name, mirror.url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", mirror.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    source, pinned = hub_source("org/model", "v1")
    assert pinned == commit
    try:
        fetched = fetch(source, [tmp_path / "a"], 2, retry_pause=0)
    finally:
        source.close()
    assert fetched.unverified == ()
    assert fetched.source == f"org/model@{commit}"
    assert_same(checkpoint, tmp_path / "a")
    assert "Bearer hf_secret" in mirror.tokens
    with pytest.raises(StoreError, match="no such repository"):
        hub_source("org/other", None)
    with pytest.raises(PresetError):
        hub_source("not a repository", None)


def test_the_command_reads_what_it_is_given(checkpoint: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(download)
    done = CliRunner().invoke(app, [str(checkpoint), "--to", str(tmp_path / "a"), "--json"], catch_exceptions=False)
    assert json.loads(done.stdout)["files"] == 6
    done = CliRunner().invoke(app, [str(checkpoint), "--to", str(tmp_path / "a")], catch_exceptions=False)
    assert f"Next: sluice doctor --model {tmp_path / 'a'}" in done.stdout
    with pytest.raises(PresetError, match="given twice"):
        CliRunner().invoke(app, [str(checkpoint), "--to", "/x", "--to", "/x"], catch_exceptions=False)
    with pytest.raises(PresetError, match="no such folder"):
        open_source("/nowhere/at/all", None)
    with pytest.raises(PresetError, match="a mirror is written"):
        HttpSource("https://")


def test_sums_are_read_in_both_spellings() -> None:
    digest = "A" * 64
    text = f"{digest}  a.json\n{digest} *./b.json\nnot a line\n{digest[:-1]}  c.json\r\n"
    assert parse_sums(text) == {"a.json": "a" * 64, "b.json": "a" * 64}
