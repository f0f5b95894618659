"""The trunk: what is pinned, what streams, in which order, and that the bytes are always right."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers.fake_reader import FakeReader, always, by_seed, times
from helpers.io_stores import Toy, bf16
from hypothesis import given
from hypothesis import strategies as st

from sluice.io.errors import StorageError, StoreError
from sluice.io.experts import plan_cache
from sluice.io.service import IoService, IoSettings
from sluice.io.store import ALIGN, Extent, Piece, Store, align_up
from sluice.io.trunk import MatrixUse, TrunkPlan, choose_pinned, cut_rows, memory_bytes, plan_trunk, regions

UNIT = 8192


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


@pytest.fixture(scope="module")
def store(toy, tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp("toy")
    store = Store.open(toy.write(folder / "a", folder / "b"), [folder / "b"])
    store.declare_experts(toy.naming)
    return store


def plan(toy: Toy, store: Store, budget: int = 0, **options) -> TrunkPlan:
    options = {"vectors": toy.vectors, "row_tables": toy.row_tables, "unit_bytes": UNIT, **options}
    return plan_trunk(options.pop("order", toy.order), store, budget, **options)


def open_io(store: Store, trunk_plan: TrunkPlan, faults=(), seed=None, delay=0.0, **settings) -> IoService:
    made: list[FakeReader] = []

    def make_reader(loop, capacity):
        made.append(FakeReader(loop, capacity, seed=seed, delay=delay))
        made[0].faults = list(faults)
        return made[0]

    service = IoService.open(store, trunk_plan, plan_cache(store, 0), IoSettings(**settings), make_reader=make_reader)
    service.fake = made[0]
    return service


def walk(service: IoService, toy: Toy, skip=()) -> None:
    """One pass; every byte is compared."""
    trunk = service.trunk
    trunk.begin_pass(skip)
    for use in service.trunk.plan.order:
        if use.name in skip:
            continue
        expected = toy.tensors[use.name]
        if use.whole:
            with trunk.whole(use.name) as array:
                assert np.array_equal(array, expected)
            continue
        row = 0
        for block in trunk.blocks(use.name):
            assert block.row0 == row
            assert np.array_equal(block.array, expected[row : row + len(block.array)])
            row += len(block.array)
            if row < len(expected):
                assert row % use.row_multiple == 0
        assert row == len(expected)


def walk_twice(service: IoService, toy: Toy) -> None:
    walk(service, toy)
    walk(service, toy)


# --- plans ---


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(0, 4000), st.data())
def test_what_is_pinned_never_passes_the_budget_and_wastes_less_than_the_smallest_left(sizes, budget, data):
    forced = [data.draw(st.booleans()) for _ in sizes] if data.draw(st.booleans()) else [False] * len(sizes)
    pinned = choose_pinned(sizes, forced, budget)
    must = sum(s for s, f in zip(sizes, forced, strict=True) if f)
    spent = sum(s for s, p in zip(sizes, pinned, strict=True) if p)
    assert spent <= max(budget, must)
    left = [s for s, p in zip(sizes, pinned, strict=True) if not p]
    assert not left or max(budget - spent, 0) < min(left)
    assert all(p for p, f in zip(pinned, forced, strict=True) if f)


def test_what_is_pinned_is_spread_evenly_over_the_depth():
    pinned = choose_pinned([10] * 1000, [False] * 1000, 3000)
    for begin in range(0, 1000, 100):
        assert 29 <= sum(pinned[begin : begin + 100]) <= 31


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 4000), st.integers(1, 16), st.integers(0, 9000))
def test_cut_rows_cover_the_piece_in_order(rows, row_bytes, unit, multiple, offset):
    pieces = cut_rows(Piece(7, rows, Extent(0, offset, rows * row_bytes)), unit, multiple)
    row, at = 7, offset
    for piece in pieces:
        assert (piece.row0, piece.extent.offset) == (row, at)
        assert piece.extent.nbytes == piece.rows * row_bytes
        row, at = row + piece.rows, at + piece.extent.nbytes
        assert piece.extent.nbytes <= max(unit + row_bytes * multiple, row_bytes * multiple)
    assert row == 7 + rows
    assert all(piece.rows % multiple == 0 for piece in pieces[:-1])


def test_plans_add_up(toy, store):
    total = plan(toy, store, 2**60)
    assert total.ring_bytes == total.streamed_bytes_per_pass == 0
    nothing = plan(toy, store, 0)
    matrices = sum(toy.tensors[u.name].nbytes for u in toy.order)
    assert nothing.pinned_bytes == 0
    assert nothing.streamed_bytes_per_pass == matrices
    assert nothing.trunk_bytes == matrices + toy.tensors["model.embed.weight"].nbytes
    assert nothing.vectors_bytes == 4 * sum(toy.tensors[v].size for v in toy.vectors)
    for share in (0.1, 0.5, 0.9):
        budget = int(matrices * share)
        some = plan(toy, store, budget)
        assert some.pinned_bytes <= budget
        pinned = sum(u.extent.nbytes for u in some.units if u.pinned)
        assert pinned + some.streamed_bytes_per_pass == matrices
        assert some.slot_bytes == max(memory_bytes(u.extent) for u in some.units if not u.pinned)


def test_forced_pins_are_pinned_without_a_budget(toy, store):
    order = [MatrixUse(u.name, u.whole, u.row_multiple, pin=u.name == "head.weight") for u in toy.order]
    forced = plan(toy, store, 0, order=order, pinned_tables=toy.row_tables)
    head, embedding = toy.tensors["head.weight"].nbytes, toy.tensors["model.embed.weight"].nbytes
    assert head + embedding <= forced.pinned_bytes <= head + embedding + 8 * ALIGN
    with pytest.raises(ValueError, match="head"):
        plan(toy, store, 0, pinned_tables=["head.weight"])


def test_regions_read_every_byte_of_what_is_pinned_once(toy, store):
    for budget in (0, 50_000, 150_000, 2**40):
        units = plan(toy, store, budget).units
        for region in regions(units):
            at = region.extent.offset
            for extent, place in region.reads:
                assert extent.offset == at
                assert place % ALIGN == 0
                at += extent.nbytes
            assert at == region.extent.offset + region.extent.nbytes
        assert sum(r.extent.nbytes for r in regions(units)) == sum(u.extent.nbytes for u in units if u.pinned)


@pytest.mark.parametrize(
    ("use", "complaint"),
    [
        (MatrixUse("model.nothing"), "missing"),
        (MatrixUse("model.layers.0.norm.weight"), "shape"),
        (MatrixUse("model.layers.0.experts.0.w1.weight_packed"), "U8"),
    ],
)
def test_a_matrix_that_cannot_be_one_is_refused_by_name(toy, store, use, complaint):
    with pytest.raises(StoreError, match=complaint):
        plan(toy, store, 0, order=[use])


# --- bytes ---


@pytest.mark.parametrize("budget", [0, 60_000, 2**40])
@pytest.mark.parametrize("backend", [pytest.param("uring", marks=pytest.mark.uring), "threads"])
@pytest.mark.parametrize("depth", [1, 8])
def test_every_budget_backend_and_depth_delivers_the_same_bytes(toy, store, budget, backend, depth):
    settings = IoSettings(backend=backend, depth=depth)
    trunk_plan = plan(toy, store, budget)
    with IoService.open(store, trunk_plan, plan_cache(store, 0), settings) as service:
        assert service.stats().backend == backend
        for _ in range(3):
            walk(service, toy)
        for name in toy.vectors:
            array = toy.tensors[name]
            expected = bf16(array) if array.dtype == np.uint16 else array.astype(np.float32)
            assert np.array_equal(service.trunk.vector(name), expected)
        stats = service.stats().trunk
        assert stats.block_bytes == 3 * trunk_plan.streamed_bytes_per_pass
        pool = service.stats().pool
        assert pool.held_bytes <= pool.limit_bytes
        assert pool.held_bytes == trunk_plan.total_bytes - trunk_plan.vectors_bytes + plan_cache(store, 0).total_bytes


@pytest.mark.parametrize("seed", range(6))
def test_delays_and_recoverable_faults_change_no_byte(toy, store, seed):
    faults = [by_seed(seed, 0.2, [-errno.EAGAIN, -errno.EINTR, 4096, 100])]
    service = open_io(store, plan(toy, store, 40_000 * (seed % 3)), faults, seed, 0.002, depth=1 + seed)
    with service:
        for _ in range(2):
            walk(service, toy)


@pytest.mark.parametrize("pinned", [True, False])
def test_rows_are_widened_rows_of_the_table_in_any_order_and_number(toy, store, pinned):
    tables = toy.row_tables if pinned else []
    with open_io(store, plan(toy, store, 0, pinned_tables=tables), seed=2, delay=0.001) as service:
        embedding = bf16(toy.tensors["model.embed.weight"])
        for ids in ([], [0], [129, 0, 5, 5, 129], list(range(130)) * 2):
            ids = np.array(ids, np.int64)
            assert np.array_equal(service.trunk.rows("model.embed.weight", ids), embedding[ids])
        for bad in (-1, 130):
            with pytest.raises(IndexError):
                service.trunk.rows("model.embed.weight", np.array([bad]))


def test_rows_that_cannot_be_read_are_an_error_and_their_buffers_come_back(toy, store):
    with open_io(store, plan(toy, store, 0), stuck_seconds=0.2) as service:
        settle(service)
        slots, ids = service.trunk._row_slots, np.arange(40)
        for faults, word in (([times(40, -errno.EIO)], "EIO"), ([times(3, "stuck")], "stuck")):
            service.fake.faults = faults
            with pytest.raises(StorageError, match=word):
                service.trunk.rows("model.embed.weight", ids)
            service.fake.faults = []
            service.trunk.rows("model.embed.weight", ids)
            service.fake.release()
            settle(service)
            assert slots.free == slots.capacity


# --- order ---


def test_matrices_out_of_order_are_a_bug_that_is_told(toy, store):
    with open_io(store, plan(toy, store, 0)) as service:
        trunk = service.trunk
        with pytest.raises(RuntimeError, match="end of the pass"):
            trunk.blocks(toy.order[0].name)
        trunk.begin_pass()
        with pytest.raises(RuntimeError, match=toy.order[0].name):
            trunk.blocks(toy.order[2].name)
        walk(service, toy)
        trunk.begin_pass()
        next(trunk.blocks(toy.order[0].name))  # and the rest of its blocks left untaken
        with pytest.raises(RuntimeError, match="does not stand"), trunk.whole(toy.order[1].name):
            pass
        walk(service, toy)


def test_a_pass_may_skip_what_it_said_it_would(toy, store):
    with open_io(store, plan(toy, store, 0, ring_slots=16), seed=1) as service:
        for skip in (["head.weight"], [], ["head.weight"], ["head.weight"], [toy.order[0].name], []):
            walk(service, toy, skip)
        assert service.trunk.stats().waits < 200


def test_a_skipped_head_costs_no_reads_pass_after_pass(toy, store):
    trunk_plan = plan(toy, store, 0, ring_slots=4)
    with open_io(store, trunk_plan) as service:
        for _ in range(10):
            walk(service, toy, ["head.weight"])
        body = trunk_plan.streamed_bytes_per_pass - toy.tensors["head.weight"].nbytes
        ahead = trunk_plan.ring_slots * trunk_plan.slot_bytes
        start = sum(toy.tensors[v].nbytes for v in toy.vectors)
        assert service.stats().scheduler.read_bytes <= 10 * body + ahead + start


def test_the_ring_reads_ahead_across_the_end_of_a_pass(toy, store):
    with open_io(store, plan(toy, store, 0)) as service:
        walk(service, toy)
        settle(service)
        before = service.fake.started
        service.trunk.begin_pass()
        iterator = service.trunk.blocks(toy.order[0].name)
        next(iterator)
        assert service.fake.started == before  # it had been read before the pass began
        iterator.close()


def settle(service: IoService) -> None:
    """Wait until no read is queued or in flight."""
    while any(d.flying or d.queued for d in service.stats().scheduler.drives):
        threading.Event().wait(0.001)
    service._loop.call(lambda: None)  # whoever waited for the last one has been told by now


def test_an_aborted_pass_realigns_whatever_was_in_flight(toy, store):
    rng = np.random.default_rng(3)
    with open_io(store, plan(toy, store, 50_000), seed=4, delay=0.002, depth=2) as service:
        trunk = service.trunk
        for _ in range(15):
            trunk.begin_pass()
            for use in toy.order[: rng.integers(0, len(toy.order))]:
                if use.whole:
                    with trunk.whole(use.name):
                        pass
                else:
                    for _ in trunk.blocks(use.name):
                        if rng.random() < 0.1:
                            break
                    else:
                        continue
                    break
            if rng.random() < 0.7:
                trunk.abort_pass()
                trunk.abort_pass()
        walk(service, toy)
        settle(service)


def test_a_whole_matrix_may_be_held_while_others_stream(toy, store):
    with open_io(store, plan(toy, store, 0)) as service:
        trunk = service.trunk
        trunk.begin_pass()
        for _ in trunk.blocks(toy.order[0].name):
            pass
        with trunk.whole(toy.order[1].name) as held:
            for block in trunk.blocks(toy.order[2].name):
                assert np.array_equal(block.array, toy.tensors[toy.order[2].name][block.row0 :][: len(block.array)])
            assert np.array_equal(held, toy.tensors[toy.order[1].name])
        trunk.abort_pass()


# --- faults ---


def test_a_failed_block_is_an_error_for_that_pass_only(toy, store):
    with open_io(store, plan(toy, store, 0)) as service:
        walk(service, toy)
        settle(service)
        page = next(u for u in service.trunk.plan.units if not u.pinned).extent.offset & -ALIGN
        service.fake.faults = [always(-errno.EIO, lambda t: t.offset == page)]
        with pytest.raises(StorageError, match="EIO"):
            walk_twice(service, toy)
        service.fake.faults = []
        service.trunk.abort_pass()
        walk(service, toy)


def test_a_vanished_drive_fails_the_pass_with_its_name_and_comes_back(toy, store):
    gone = store.drives[1]
    with open_io(store, plan(toy, store, 0)) as service:
        fds = {f.fd for f in service._files if f.drive_name == gone}
        service.fake.faults = [always(-errno.ENODEV, lambda t: t.fd in fds)]
        for _ in range(2):
            with pytest.raises(StorageError, match="ENODEV") as caught:
                walk_twice(service, toy)
            assert caught.value.drive == gone
            service.trunk.abort_pass()
        settle(service)
        service.fake.faults = []
        walk_twice(service, toy)  # what had failed ahead of its time is tried anew


def test_a_stuck_read_fails_the_pass_and_keeps_its_slot(toy, store):
    service = open_io(store, plan(toy, store, 0), stuck_seconds=0.2)
    with service:
        walk(service, toy)
        settle(service)
        service.fake.faults = [times(1, "stuck")]
        with pytest.raises(StorageError, match="stuck"):
            walk_twice(service, toy)
        service.trunk.abort_pass()
        walk(service, toy)  # one slot fewer
        service.fake.release()
        walk(service, toy)
        settle(service)


# --- life ---


def test_a_resized_trunk_delivers_the_same_bytes_and_holds_what_its_plan_says(toy, store):
    with open_io(store, plan(toy, store, 0)) as service:
        service.pool.raise_limit(2**30)
        cache = plan_cache(store, 0).total_bytes
        for budget in (2**40, 30_000, 0, 90_000):
            walk(service, toy)
            service.trunk.resize(plan(toy, store, budget, pinned_tables=toy.row_tables if budget > 50_000 else []))
            walk(service, toy)
            rows = service.trunk.rows("model.embed.weight", np.array([3, 1]))
            assert np.array_equal(rows, bf16(toy.tensors["model.embed.weight"])[[3, 1]])
            held = service.stats().pool.held_bytes
            assert held == service.trunk.plan.total_bytes - service.trunk.plan.vectors_bytes + cache
        with pytest.raises(ValueError, match="order"):
            service.trunk.resize(plan(toy, store, 0, order=toy.order[1:]))


@pytest.mark.parametrize("seed", range(8))
def test_a_trunk_resized_while_it_reads_ahead_does_not_wait_for_ever(toy, store, seed):
    with open_io(store, plan(toy, store, 0), seed=seed, delay=0.003, depth=1 + seed % 3) as service:
        service.pool.raise_limit(2**30)
        for budget in (20_000, 0):
            service.trunk.begin_pass()
            for _ in service.trunk.blocks(toy.order[0].name):
                pass
            service.trunk.resize(plan(toy, store, budget))
        walk(service, toy)


def test_closing_wakes_a_waiting_consumer(toy, store):
    service = open_io(store, plan(toy, store, 0))
    walk(service, toy)
    settle(service)
    service.fake.faults = [always("stuck")]
    caught = []

    def consume() -> None:
        try:
            while True:
                walk(service, toy)
        except StorageError as error:
            caught.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    while not service.fake.stuck:
        pass
    service.close()
    thread.join(10)
    assert "closed" in str(caught[0])


def test_the_ring_needs_no_more_than_its_slots(toy, tmp_path: Path):
    store = Store.open(toy.write(tmp_path))
    store.declare_experts(toy.naming)
    small = plan(toy, store, 0, ring_slots=1)
    assert small.ring_slots == 4
    with open_io(store, small) as service:
        walk(service, toy)
    assert align_up(small.slot_bytes) == small.slot_bytes
