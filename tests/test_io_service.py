"""Opening the storage side: what it steps down to, what it refuses, and what it says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.io_stores import Toy

from sluice.io.buffers import Arena, BufferPool, SlotArena
from sluice.io.errors import BudgetError, PresetError, StorageError
from sluice.io.experts import plan_cache
from sluice.io.service import IoService, IoSettings
from sluice.io.store import Store
from sluice.io.trunk import plan_trunk


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


@pytest.fixture
def store(toy, tmp_path) -> Store:
    store = Store.open(toy.write(tmp_path))
    store.declare_experts(toy.naming)
    return store


def open_io(store: Store, toy: Toy, **settings) -> IoService:
    trunk = plan_trunk(toy.order, store, 0, vectors=toy.vectors, row_tables=toy.row_tables, unit_bytes=8192)
    return IoService.open(store, trunk, plan_cache(store, 0), IoSettings(**settings))


def right(service: IoService, toy: Toy) -> bool:
    name = toy.order[0].name
    service.trunk.begin_pass()
    blocks = [block.array.copy() for block in service.trunk.blocks(name)]
    service.trunk.abort_pass()
    return np.array_equal(np.concatenate(blocks), toy.tensors[name])


def refuse_direct(monkeypatch, only: str = "") -> None:
    real = os.open

    def open_without(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT and only in str(path):
            raise OSError(errno.EINVAL, "no direct reads here")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_without)


def test_where_direct_reads_are_refused_at_open_the_page_cache_serves_and_it_is_said_once(
    toy, store, monkeypatch, caplog
):
    refuse_direct(monkeypatch, "00002")
    with open_io(store, toy) as service:
        stats = service.stats()
        assert (stats.files, stats.direct_files) == (4, 3)
        assert len(stats.notes) == 1
        assert "model-00002" in stats.notes[0]
        assert right(service, toy)
    assert sum("page cache" in record.message for record in caplog.records) == 1


def test_direct_on_is_honoured_or_refused(toy, store, monkeypatch):
    with open_io(store, toy, direct="on") as service:
        assert service.stats().direct_files == 4
    with open_io(store, toy, direct="off") as service:
        assert service.stats().direct_files == 0
        assert service.stats().notes == ()
        assert right(service, toy)
    refuse_direct(monkeypatch)
    with pytest.raises(PresetError, match=r"io\.direct"):
        open_io(store, toy, direct="on")


@pytest.mark.uring
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_where_direct_reads_are_refused_at_the_first_read_the_page_cache_serves(toy, store, monkeypatch, code):
    from sluice.io import uring

    real = uring.UringReader.start

    def start(self, transfer) -> None:
        with open(f"/proc/self/fdinfo/{transfer.fd}") as info:
            direct = int(info.read().split("flags:\t")[1].split()[0], 8) & os.O_DIRECT
        if direct:
            self._loop.call_soon(transfer.done, -code)
        else:
            real(self, transfer)

    monkeypatch.setattr(uring.UringReader, "start", start)
    with open_io(store, toy) as service:
        assert service.stats().backend == "uring"
        assert service.stats().direct_files == 0
        assert right(service, toy)


@pytest.mark.uring
def test_where_io_uring_takes_a_ring_but_no_read_threads_serve(toy, store, monkeypatch):
    from sluice.io import uring

    monkeypatch.setattr(uring.UringReader, "start", lambda self, t: self._loop.call_soon(t.done, -errno.EPERM))
    with open_io(store, toy) as service:
        assert service.stats().backend == "threads"
        assert any("io_uring is refused" in note for note in service.stats().notes)
        assert right(service, toy)
    with pytest.raises(PresetError, match="uring"):
        open_io(store, toy, backend="uring")


@pytest.mark.parametrize(
    "wrong", [{"backend": "aio"}, {"direct": "yes"}, {"verify": "twice"}, {"depth": 0}, {"depth": 65}]
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(PresetError, match=f"io\\.{next(iter(wrong))}"):
        IoSettings(**wrong)


def test_a_file_that_went_away_is_named(toy, store, tmp_path):
    (tmp_path / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(StorageError, match="model-00003"):
        open_io(store, toy)


def test_a_file_that_shrank_after_its_header_was_read_is_an_error_and_not_zeros(toy, store, tmp_path):
    path = tmp_path / "model-00001-of-00004.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StorageError, match="ended"):
        read_all_experts(toy, store)


def read_all_experts(toy: Toy, store: Store) -> None:
    with open_io(store, toy) as service:
        for layer in range(toy.layers):
            with service.experts.acquire(layer, list(range(toy.experts))) as acquisition:
                for _ in acquisition.as_they_arrive():
                    pass


def test_stats_add_up_and_closing_twice_is_harmless(toy, store):
    service = open_io(store, toy)
    assert right(service, toy)
    stats = service.stats()
    assert stats.scheduler.read_bytes == sum(drive.read_bytes for drive in stats.scheduler.drives)
    assert stats.scheduler.read_bytes == sum(stats.scheduler.bytes_by_priority)
    service.close()
    service.close()


def test_memory_beyond_the_plan_is_refused_with_the_bytes_short(toy, store):
    with open_io(store, toy) as service:
        pool = service.stats().pool
        with pytest.raises(BudgetError, match="short") as caught:
            service.pool.arena(pool.limit_bytes - pool.held_bytes + 1, "more")
        assert caught.value.short_bytes == 1


# --- buffers ---


def test_a_pool_gives_back_what_it_took_when_the_kernel_has_none(monkeypatch):
    pool = BufferPool(2**62)
    with pytest.raises(BudgetError):
        pool.arena(2**61, "too much")
    assert pool.stats().held_bytes == 0


def test_populate_by_hand_where_the_kernel_cannot(monkeypatch):
    monkeypatch.setattr("sluice.io.buffers._madvise", lambda address, nbytes, advice: errno.EINVAL)
    arena = Arena(3 * 4096, "t")
    arena.view[5000] = 7
    arena.populate(8192, 4096)
    assert arena.view[5000] == 7


def test_slots_shrink_and_grow_and_discarded_ones_read_as_zeros():
    pool = BufferPool(10 * 8192)
    slots = SlotArena(pool, 6, 8192, "t")
    lent = [slots.lend_nowait() for _ in range(6)]
    assert slots.lend_nowait() is None
    for slot in lent:
        slots.view(slot)[:] = b"\x01" * 8192
    slots.give_back(lent[0])
    slots.shrink_to(3)
    assert (slots.capacity, slots.free) == (5, 0)
    for slot in lent[1:4]:
        slots.give_back(slot)
    assert (slots.capacity, slots.free) == (3, 1)
    assert pool.stats().held_bytes == 3 * 8192
    slots.grow_to(8)
    assert (slots.capacity, slots.free) == (8, 6)
    assert pool.stats().held_bytes == 8 * 8192
    with pytest.raises(BudgetError):
        slots.grow_to(11)
    assert pool.stats().held_bytes == 8 * 8192
    views = {id(slots.view(i).obj): i for i in range(8)}
    assert views
    slots.close()
    assert pool.stats().held_bytes == 0


def test_arenas_are_private_and_page_aligned(tmp_path: Path):
    arena = Arena(4 * 2**20, "t")
    address = np.frombuffer(arena.view, np.uint8).ctypes.data
    assert address % 4096 == 0
    with open("/proc/self/maps") as maps:
        line = next(m for m in maps if int(m.split("-")[0], 16) <= address < int(m.split("-")[1].split()[0], 16))
    assert line.split()[1] == "rw-p"
