"""One contract for every reader, and the scheduler above them under scripted faults."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from helpers.fake_reader import FakeReader, always, by_seed, times
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.io import reader as reader_module
from sluice.io.buffers import Arena
from sluice.io.errors import PresetError, StorageError
from sluice.io.loop import IoLoop
from sluice.io.reader import OpenFile, Transfer, open_reader
from sluice.io.schedule import Priority, Read, Scheduler, State
from sluice.io.store import ALIGN, align_down, align_up
from sluice.io.threads import ThreadReader

SIZE = 3 * 2**20 + 1234
DATA = np.random.default_rng(5).integers(0, 256, SIZE, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "bytes"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def io() -> Iterator[IoLoop]:
    loop = IoLoop()
    yield loop
    loop.close()


def make_uring(loop, capacity):
    from sluice.io.uring import UringReader

    try:
        return UringReader(loop, capacity)
    except OSError as error:
        pytest.skip(f"io_uring is not to be had here: {reader_module.why_no_uring(error.errno)}")


MAKERS = {
    "uring": make_uring,
    "threads": ThreadReader,
    "fake": FakeReader,
    "late fake": lambda loop, capacity: FakeReader(loop, capacity, seed=3, delay=0.003),
}


@pytest.fixture(params=[pytest.param("uring", marks=pytest.mark.uring), "threads", "fake", "late fake"])
def make(request, io) -> Iterator[Callable[[int], reader_module.Reader]]:
    made = []

    def make(capacity: int = 8):
        reader = io.call(lambda: MAKERS[request.param](io.loop, capacity))
        made.append(reader)
        return reader

    yield make
    for reader in made:
        io.call(reader.close)
        io.call(reader.close)


def transfer_all(io: IoLoop, reader, jobs: list[tuple[int, int, memoryview]]) -> list[int]:
    """Results of (fd, offset, buffer) transfers that were taken in together."""
    results: list[int] = [0] * len(jobs)
    left = [len(jobs)]
    ended = threading.Event()

    def start() -> None:
        for i, (fd, offset, buffer) in enumerate(jobs):

            def done(result: int, i: int = i) -> None:
                results[i] = result
                left[0] -= 1
                if not left[0]:
                    ended.set()

            reader.start(Transfer(fd, offset, buffer, done))
        reader.flush()

    io.call(start)
    assert ended.wait(20)
    return results


@pytest.mark.parametrize("direct", [True, False])
def test_transfers_move_the_right_bytes(io, make, path, direct):
    file = OpenFile(path, 0, "d", direct)
    arena = Arena(64 * 65536, "t")
    offsets = [(i * 7 % 48) * 65536 for i in range(48)]
    jobs = [(file.fd, o, arena.view[i * 65536 : (i + 1) * 65536]) for i, o in enumerate(offsets)]
    results = transfer_all(io, make(8), jobs)
    for (_, offset, buffer), result in zip(jobs, results, strict=True):
        expected = DATA[offset : offset + 65536]
        assert result == len(expected)
        assert buffer[:result] == expected
    file.close()
    file.close()


def test_a_transfer_past_the_end_is_short_and_beyond_it_zero(io, make, path):
    file = OpenFile(path, 0, "d", True)
    arena = Arena(2 * 65536, "t")
    tail = align_down(SIZE)
    jobs = [(file.fd, tail, arena.view[:65536]), (file.fd, align_up(SIZE) + 65536, arena.view[65536:])]
    assert transfer_all(io, make(), jobs) == [SIZE - tail, 0]
    assert arena.view[: SIZE - tail] == DATA[tail:]


def test_an_error_is_a_negative_errno_and_the_reader_lives_on(io, make, path):
    reader = make()
    if reader.name == "fake":
        pytest.skip("the fake's errors come from its script")
    file = OpenFile(path, 0, "d", False)
    arena = Arena(8192, "t")
    write_only = os.open(path, os.O_WRONLY)
    jobs = [(write_only, 0, arena.view[:4096]), (file.fd, 0, arena.view[4096:])]
    assert transfer_all(io, reader, jobs) == [-errno.EBADF, 4096]
    os.close(write_only)
    file.close()


def test_more_transfers_than_the_queue_holds_all_end(io, make, path):
    file = OpenFile(path, 0, "d", True)
    arena = Arena(100 * 4096, "t")
    jobs = [(file.fd, i * 4096, arena.view[i * 4096 : (i + 1) * 4096]) for i in range(100)]
    assert transfer_all(io, make(2), jobs) == [4096] * 100
    assert arena.view == DATA[: 100 * 4096]


def test_closing_leaves_no_descriptor_and_no_thread(io, path):
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = count()
    for name in ("uring", "threads"):
        for _ in range(5):
            reader = io.call(lambda name=name: MAKERS[name](io.loop, 4))
            io.call(reader.close)
    assert count() == before


# --- choice ---


@pytest.mark.parametrize(
    ("code", "disabled", "status", "words"),
    [
        (errno.EPERM, "2", "Seccomp:\t0", "sysctl kernel.io_uring_disabled is 2"),
        (errno.EPERM, "0", "Seccomp:\t2", "seccomp"),
        (errno.ENOSYS, "", "Seccomp:\t2", "seccomp"),
        (errno.ENOSYS, "", "Seccomp:\t0", "the kernel has none"),
        (errno.ENOMEM, "0", "", "RLIMIT_MEMLOCK"),
        (errno.EINVAL, "0", "", "EINVAL"),
    ],
)
def test_the_fallback_says_which_and_why(io, monkeypatch, code, disabled, status, words):
    real = Path.read_text

    def read_text(self, *args, **kwargs):
        fakes = {"/proc/sys/kernel/io_uring_disabled": disabled, "/proc/self/status": status}
        return fakes.get(str(self)) or real(self, *args, **kwargs)

    def refuse(*args):
        raise OSError(code, "refused")

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr("liburing.io_uring_queue_init", refuse)
    reader, reason = io.call(lambda: open_reader("auto", io.loop, 2))
    assert reader.name == "threads"
    if words != "the kernel has none":
        assert words in reason
    io.call(reader.close)
    with pytest.raises(PresetError, match="uring"):
        io.call(lambda: open_reader("uring", io.loop, 2))


# --- the scheduler ---


class House:
    """A scheduler over a reader, one file, and reads that are waited for."""

    def __init__(self, io: IoLoop, reader, path: Path, depth: int = 4, files: int = 1, **options) -> None:
        self.io, self.reader = io, reader
        self.files = [OpenFile(path, i, f"drive{i}", True) for i in range(files)]
        self.scheduler = Scheduler(io.loop, reader, [f.drive_name for f in self.files], depth=depth, **options)
        self.ended: list[tuple[Read, StorageError | None]] = []
        self.changed = threading.Condition()

    def read(self, offset: int, nbytes: int, priority=Priority.DEMAND, file: int = 0, **options) -> Read:
        buffer = Arena(align_up(offset % ALIGN + nbytes), "t").view
        return Read(self.files[file], offset, nbytes, buffer, priority, self.on_done, **options)

    def on_done(self, read: Read, error: StorageError | None) -> None:
        with self.changed:
            self.ended.append((read, error))
            self.changed.notify_all()

    def wait(self, n: int) -> list[tuple[Read, StorageError | None]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.ended) >= n, 20)
            return list(self.ended)

    def run(self, *reads: Read) -> list[tuple[Read, StorageError | None]]:
        before = len(self.ended)
        self.scheduler.submit(reads)
        return self.wait(before + len(reads))[before:]

    def close(self) -> None:
        self.io.call(self.scheduler.close)
        self.io.call(self.reader.close)
        for file in self.files:
            file.close()


@pytest.fixture
def house(io, path) -> Iterator[House]:
    house = House(io, FakeReader(io.loop), path)
    yield house
    house.close()


def right(ended) -> bool:
    return all(error is None and r.data == DATA[r.offset : r.offset + r.nbytes] for r, error in ended)


def test_reads_at_any_offset_are_whole_and_right(io, make, path):
    house = House(io, make(), path, depth=3)
    places = [(0, 1), (1, 4095), (4095, 2), (4096, 4096), (777, 70001), (SIZE - 1, 1), (SIZE - 5000, 5000), (0, SIZE)]
    assert right(house.run(*(house.read(o, n) for o, n in places)))
    stats = house.scheduler.stats()
    assert stats.reads == len(places)
    assert stats.read_bytes == sum(n for _, n in places)
    assert stats.bytes_by_priority[Priority.DEMAND] == stats.read_bytes
    assert 0 < stats.flying_seconds <= stats.elapsed_seconds
    assert stats.drives[0].busy_seconds == stats.flying_seconds
    io.call(house.scheduler.close)


@settings(max_examples=60)
@given(offset=st.integers(0, SIZE - 1), nbytes=st.integers(1, 300_000), seed=st.integers(0, 10_000))
def test_any_storm_that_ends_gives_the_right_bytes(path, offset, nbytes, seed):
    nbytes = min(nbytes, SIZE - offset)
    io = IoLoop()
    reader = FakeReader(io.loop, seed=seed)
    house = House(io, reader, path, retry_wait=lambda n: 0.0)
    reader.faults = [by_seed(seed, 0.5, [-errno.EAGAIN, -errno.EINTR, 4096, 8192, 5000, 70_000])]
    ended = house.run(house.read(offset, nbytes), house.read(0, 20_000))
    house.close()
    io.close()
    assert right(ended)


def test_eio_once_is_retried_and_eio_for_ever_is_a_typed_error(house):
    house.reader.faults = [times(1, -errno.EIO)]
    assert right(house.run(house.read(5000, 9000)))
    assert house.scheduler.stats().drives[0].retries == 1
    house.reader.faults = [always(-errno.EIO)]
    [(read, error)] = house.run(house.read(5000, 9000, layer=7, expert=12))
    assert read.state is State.DONE
    assert (error.drive, error.offset, error.layer, error.expert) == ("drive0", 5000, 7, 12)
    for word in ("EIO", "drive0", "bytes", "5000", "layer 7", "expert 12"):
        assert word in str(error)
    house.reader.faults = []
    assert right(house.run(house.read(5000, 9000)))


def test_an_endless_storm_of_eagain_becomes_an_error(io, path):
    reader = FakeReader(io.loop)
    house = House(io, reader, path, retry_wait=lambda n: 0.0)
    reader.faults = [always(-errno.EAGAIN)]
    [(_, error)] = house.run(house.read(0, 100))
    assert "EAGAIN" in str(error)
    house.close()


def test_a_read_that_never_gets_a_page_further_becomes_an_error(house):
    house.reader.faults = [always(100)]
    [(_, error)] = house.run(house.read(0, 9000))
    assert "short" in str(error)


def test_a_file_that_ended_early_is_an_error(io, path, tmp_path):
    short = tmp_path / "short"
    short.write_bytes(DATA[:10_000])
    house = House(io, ThreadReader(io.loop, 4), short)
    [(_, error)] = house.run(house.read(8000, 9000))
    assert "ended" in str(error)
    house.close()


def test_wrong_bytes_are_read_again_and_twice_wrong_is_an_error(house):
    checksum = xxhash.xxh3_64_intdigest(DATA[5000:14000])
    house.reader.faults = [times(1, "flip")]
    assert right(house.run(house.read(5000, 9000, checksum=checksum)))
    house.reader.faults = [always("flip")]
    assert right(house.run(house.read(4096, 1, checksum=None))) in (True, False)  # nothing to compare with
    [(_, error)] = house.run(house.read(9000, 100, checksum=1))
    assert "checksum" in str(error)


def test_verify_first_checks_a_record_once_and_always_checks_each_time(io, path):
    checksum = xxhash.xxh3_64_intdigest(DATA[5000:14000])
    for verify, errors in (("first", 0), ("always", 1), ("off", 0)):
        reader = FakeReader(io.loop)
        house = House(io, reader, path, verify=verify)
        assert right(house.run(house.read(5000, 9000, checksum=checksum)))
        reader.faults = [always("flip")]
        [(_, error)] = house.run(house.read(5000, 9000, checksum=checksum))
        assert (error is not None) == bool(errors), verify
        house.close()


def test_a_direct_refusal_falls_back_to_the_page_cache(house, caplog):
    house.reader.faults = [times(1, -errno.EINVAL)]
    assert right(house.run(house.read(5000, 9000)))
    assert not house.files[0].direct
    assert "page cache" in caplog.text


def test_demand_goes_before_trunk_before_guesses_before_preload(io, path):
    reader = FakeReader(io.loop)
    house = House(io, reader, path, depth=1)
    reader.faults = [times(1, "stuck")]
    first = house.read(0, 10)
    house.scheduler.submit([first])
    while not reader.stuck:
        pass
    order = [Priority.PRELOAD, Priority.PREDICTED, Priority.TRUNK, Priority.DEMAND, Priority.TRUNK]
    reads = [house.read(4096 * (i + 1), 10, priority) for i, priority in enumerate(order)]
    house.scheduler.submit(reads)
    reader.release()
    ended = [r for r, _ in house.wait(6)]
    assert ended == [first, reads[3], reads[2], reads[4], reads[1], reads[0]]
    assert reader.most_flying == 1
    house.close()


def test_a_late_guess_becomes_a_demand(io, path):
    reader = FakeReader(io.loop)
    house = House(io, reader, path, depth=1)
    reader.faults = [times(1, "stuck")]
    house.scheduler.submit([house.read(0, 10)])
    while not reader.stuck:
        pass
    guess, trunk = house.read(4096, 10, Priority.PREDICTED), house.read(8192, 10, Priority.TRUNK)
    house.scheduler.submit([guess, trunk])
    house.scheduler.promote(guess, Priority.DEMAND)
    reader.release()
    ended = [r for r, _ in house.wait(3)]
    assert ended[1:] == [guess, trunk]
    house.close()


def test_a_cancelled_read_keeps_its_buffer_until_completion(io, path):
    reader = FakeReader(io.loop)
    house = House(io, reader, path, depth=1)
    reader.faults = [times(1, "stuck")]
    flying, queued = house.read(0, 10), house.read(4096, 10)
    house.scheduler.submit([flying, queued])
    while not reader.stuck:
        pass
    assert house.scheduler.cancel(queued)
    assert not house.scheduler.cancel(flying)
    assert house.ended == []
    reader.release()
    assert [r for r, _ in house.wait(1)] == [flying]
    assert right(house.run(house.read(9000, 10)))
    assert queued.state is State.CANCELLED
    assert house.scheduler.stats().cancelled == 1
    house.close()


def test_depth_and_bytes_in_flight_are_bounded_for_each_drive(io, path):
    reader = FakeReader(io.loop, seed=1, delay=0.002)
    house = House(io, reader, path, depth=3, files=2, bytes_in_flight=10_000)
    reads = [house.read(i * 4096, 4000, file=i % 2) for i in range(40)]
    assert right(house.run(*reads))
    assert reader.most_flying == 4  # two of 4096 bytes a drive
    reader.most_flying = 0
    wide = [house.read(i * 4096, 20_000) for i in range(4)]
    assert right(house.run(*wide))
    assert reader.most_flying == 1
    house.close()


def test_a_slow_drive_does_not_hold_up_another(io, path):
    reader = FakeReader(io.loop)
    house = House(io, reader, path, depth=2, files=2)
    slow = house.files[0].fd
    reader.faults = [always("stuck", lambda t: t.fd == slow)]
    reads = [house.read(i * 4096, 10, file=i % 2) for i in range(20)]
    house.scheduler.submit(reads)
    assert {r.file.drive for r, _ in house.wait(10)} == {1}
    reader.faults = []
    while len(house.ended) < 20:
        reader.release()
        house.wait(min(20, len(house.ended) + 1))
    assert right(house.ended)
    house.close()


def test_a_guess_leaves_room_for_a_demand(io, path):
    reader = FakeReader(io.loop)
    house = House(io, reader, path, depth=2)
    reader.faults = [times(9, "stuck")]
    house.scheduler.submit([house.read(i * 4096, 10, Priority.PREDICTED) for i in range(4)])
    while not reader.stuck:
        pass
    reader.faults = []
    house.scheduler.submit([house.read(0, 10)])
    assert [r.priority for r, _ in house.wait(1)] == [Priority.DEMAND]
    reader.release()
    house.wait(5)
    house.close()


def test_the_binding_loads_where_its_folder_may_not_be_written() -> None:
    """Its import helper writes a cache beside the package: a service in its sandbox died of that at its first start."""
    code = (
        "import dynamic_import.cache as cache\n"
        "def refuse(*_): raise OSError(30, 'Read-only file system')\n"
        "cache.open = cache.mkdir = refuse\n"
        "import sluice.io.uring as uring\n"
        "print(uring.liburing.io_uring().__class__.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "io_uring", done.stderr


def test_closing_ends_what_is_queued_with_an_error(io, path):
    reader = FakeReader(io.loop)
    house = House(io, reader, path, depth=1)
    reader.faults = [times(1, "stuck")]
    flying, queued = house.read(0, 10), house.read(4096, 10)
    house.scheduler.submit([flying, queued])
    while not reader.stuck:
        pass
    house.close()
    [(read, error)] = house.wait(1)
    assert read is queued
    assert "closed" in str(error)
    with pytest.raises(StorageError, match="closed"):
        house.scheduler.submit([house.read(0, 10)])


def test_a_wait_between_two_tries_that_outlives_the_reader_ends_in_an_error(io, path):
    reader = FakeReader(io.loop)
    house = House(io, reader, path, retry_wait=lambda n: 0.05)
    reader.faults = [always(-errno.EAGAIN)]
    house.scheduler.submit([house.read(0, 10)])
    while not reader.started:
        pass
    house.close()
    [(_, error)] = house.wait(1)
    assert "closed" in str(error)
