"""The expert cache: right bytes under any budget and order of arrival, one read each, and who stays."""

from __future__ import annotations

import errno
import threading

import numpy as np
import pytest
from helpers.fake_reader import FakeReader, always, by_seed, times
from helpers.io_stores import Toy
from hypothesis import given
from hypothesis import strategies as st

from sluice.io.errors import StorageError, StoreError
from sluice.io.experts import ExpertCache, partition, plan_cache, read_counts
from sluice.io.service import IoService, IoSettings
from sluice.io.store import Store
from sluice.io.trunk import plan_trunk

LAYERS, EXPERTS = 3, 12


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy(layers=LAYERS, experts=EXPERTS)


@pytest.fixture(scope="module")
def store(toy, tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp("toy")
    store = Store.open(toy.write(folder / "a", folder / "b"), [folder / "b"])
    store.declare_experts(toy.naming)
    return store


@pytest.fixture(scope="module")
def scattered(tmp_path_factory) -> tuple[Toy, Store]:
    """A store whose experts are six reads each, as in a checkpoint that was sharded anew."""
    toy = Toy(layers=LAYERS, experts=EXPERTS, seed=2)
    for name, tensors in toy.shards.items():
        order = sorted(tensors, key=lambda n: (n.rpartition(".experts.")[2].partition(".")[2], n))
        toy.shards[name] = {n: tensors[n] for n in order}
    folder = tmp_path_factory.mktemp("scattered")
    store = Store.open(toy.write(folder / "a", folder / "b"), [folder / "b"])
    store.declare_experts(toy.naming)
    assert len(store.expert(0, 5).reads) == 6
    return toy, store


def open_io(
    store: Store, slots: int, faults=(), seed=None, delay=0.0, transient=2, counts=None, **settings
) -> IoService:
    made: list[FakeReader] = []

    def make_reader(loop, capacity):
        made.append(FakeReader(loop, capacity, seed=seed, delay=delay))
        made[0].faults = list(faults)
        return made[0]

    cache_plan = plan_cache(store, slots * store.expert_slot_bytes, transient_slots=transient, counts=counts)
    service = IoService.open(
        store, plan_trunk([], store, 0), cache_plan, IoSettings(**settings), make_reader=make_reader
    )
    service.fake = made[0]
    return service


def check(toy: Toy, layer: int, expert) -> None:
    for name, array in expert.parts.items():
        expected = toy.tensors[toy.naming.template.format(layer=layer, expert=expert.id, part=name)]
        assert np.array_equal(array, expected)


def use(cache: ExpertCache, toy: Toy, layer: int, ids) -> list[int]:
    """Acquire and consume; every byte is compared. Returns the order of arrival."""
    seen = []
    with cache.acquire(layer, ids) as acquisition:
        for expert in acquisition.as_they_arrive():
            check(toy, layer, expert)
            seen.append(expert.id)
    assert sorted(seen) == sorted(ids)
    return seen


def settle(service: IoService) -> None:
    while any(d.flying or d.queued for d in service.stats().scheduler.drives):
        threading.Event().wait(0.001)
    service._loop.call(lambda: None)  # whoever waited for the last one has been told by now


def kept(cache: ExpertCache, layer: int) -> set[int]:
    return {e for (row, e), entry in cache._entries.items() if row == layer and entry.ready}


def sound(cache: ExpertCache) -> None:
    """Nobody uses anything: every slot is free or kept, and quotas hold."""
    with cache._condition:
        assert cache._slots.free + len(cache._entries) == cache._slots.capacity
        assert len({e.slot for e in cache._entries.values()}) == len(cache._entries)
        for row in range(LAYERS):
            entries = [e for (r, _), e in cache._entries.items() if r == row]
            assert cache._kept[row] == sum(e.kept for e in entries) <= cache._quotas[row]
            assert all(e.users == 0 and e.ready for e in entries)
            assert len(cache._lru[row]) + sum(e.pinned for e in entries) == sum(e.kept for e in entries)


# --- plans ---


@given(st.integers(0, 400), st.integers(1, 12), st.integers(1, 20), st.data())
def test_partitions_add_up_to_what_there_is(slots, layers, experts, data):
    counts = None
    if data.draw(st.booleans()):
        counts = np.array(
            data.draw(
                st.lists(
                    st.lists(st.integers(0, 9), min_size=experts, max_size=experts), min_size=layers, max_size=layers
                )
            )
        )
    quotas = partition(slots, layers, experts, counts)
    assert sum(quotas) == min(slots, layers * experts)
    assert all(0 <= q <= experts for q in quotas)
    if counts is None:
        assert max(quotas) - min(quotas) <= 1


def test_layers_with_more_reuse_get_larger_partitions():
    counts = np.zeros((3, 10), int)
    counts[0, :3], counts[1] = 50, 20
    quotas = partition(12, 3, 10, counts)
    assert quotas[1] > quotas[0] > quotas[2] == 2


def test_a_plan_counts_whole_slots(toy, store):
    slot = store.expert_slot_bytes
    assert plan_cache(store, 10 * slot - 1).slots == 9
    assert plan_cache(store, 0).cache_bytes == 0
    assert plan_cache(store, 2**60).slots == LAYERS * EXPERTS
    assert plan_cache(store, 2**60).transient_bytes == plan_cache(store, 0).total_bytes
    with pytest.raises(ValueError, match="transient"):
        plan_cache(store, 0, transient_slots=1)


# --- bytes ---


@pytest.mark.parametrize("slots", [0, 1, 7, 18, LAYERS * EXPERTS])
@pytest.mark.parametrize("backend", [pytest.param("uring", marks=pytest.mark.uring), "threads"])
def test_every_budget_and_backend_delivers_the_same_bytes(toy, store, slots, backend):
    plan = plan_cache(store, slots * store.expert_slot_bytes)
    rng = np.random.default_rng(slots)
    with IoService.open(store, plan_trunk([], store, 0), plan, IoSettings(backend=backend)) as service:
        for _ in range(20):
            for layer in range(LAYERS):
                use(service.experts, toy, layer, rng.permutation(EXPERTS)[: rng.integers(0, EXPERTS + 1)].tolist())
        settle(service)
        sound(service.experts)
        stats = service.stats().experts
        assert stats.hits + stats.misses + stats.shared == service.experts.counts.sum()
        assert service.stats().scheduler.read_bytes == stats.misses * store.expert_bytes
        assert service.stats().pool.held_bytes == plan.total_bytes
        if slots == LAYERS * EXPERTS:
            assert stats.misses <= LAYERS * EXPERTS


@pytest.mark.parametrize("layout", ["adjacent", "scattered"])
@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_demands_guesses_and_departures_is_sound(toy, store, scattered, seed, layout):
    if layout == "scattered":
        toy, store = scattered
    rng = np.random.default_rng(seed)
    faults = [by_seed(seed, 0.1, [-errno.EAGAIN, 4096])]
    slots, transient = int(rng.integers(0, 20)), int(rng.integers(2, 8))
    service = open_io(store, slots, faults, seed, 0.002, transient, depth=int(rng.integers(1, 5)))
    with service:
        cache = service.experts
        for _ in range(60):
            layer = int(rng.integers(LAYERS))
            ids = rng.permutation(EXPERTS)[: rng.integers(1, EXPERTS + 1)].tolist()
            if rng.random() < 0.5:
                cache.hint((layer + 1) % LAYERS, rng.permutation(EXPERTS)[:4].tolist())
            if rng.random() < 0.3:
                cache.hint(layer, ids[:3])
            if rng.random() < 0.1:
                cache.rebalance()
            stop = int(rng.integers(len(ids))) if rng.random() < 0.3 else len(ids)
            with cache.acquire(layer, ids) as acquisition:
                for i, expert in enumerate(acquisition.as_they_arrive()):
                    check(toy, layer, expert)
                    if i == stop:
                        break
        for layer in range(LAYERS):  # ends what was guessed
            use(cache, toy, layer, [0])
        settle(service)
        sound(cache)


@pytest.mark.parametrize("slots", [0, 4, 30])
def test_several_threads_share_reads_and_never_see_wrong_bytes(toy, store, slots):
    with open_io(store, slots, seed=1, delay=0.001, transient=8) as service:
        errors = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(40):
                    use(service.experts, toy, int(rng.integers(LAYERS)), rng.permutation(EXPERTS)[:3].tolist())
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        settle(service)
        sound(service.experts)


# --- who is read, who stays ---


def test_one_read_for_one_expert_however_many_ask(toy, store):
    with open_io(store, 0, [always("stuck")], transient=4) as service:
        cache = service.experts
        first = cache.acquire(1, [3])
        second = cache.acquire(1, [3])
        cache.hint(1, [3])
        while not service.fake.stuck:
            pass
        service.fake.faults = []
        service.fake.release()
        for acquisition in (first, second):
            with acquisition:
                assert [e.id for e in acquisition.as_they_arrive()] == [3]
        assert service.fake.started == 1
        stats = cache.stats()
        assert (stats.misses, stats.shared) == (1, 1)
        sound(cache)


def test_best_ranks_stay_when_a_layer_asks_for_more_than_its_share(toy, store):
    with open_io(store, 9) as service:  # three a layer
        cache = service.experts
        use(cache, toy, 0, [5, 2, 9, 1, 0, 11])
        assert kept(cache, 0) == {5, 2, 9}
        use(cache, toy, 0, [9, 7])
        assert kept(cache, 0) == {9, 7, 5}
        use(cache, toy, 0, [1, 5, 9, 7])
        assert kept(cache, 0) == {1, 5, 9}
        use(cache, toy, 1, [0, 1, 2, 3])
        assert kept(cache, 0) == {1, 5, 9}  # another layer's need does not touch it
        assert cache.stats().hits == 1 + 3
        sound(cache)


def test_what_is_in_use_is_never_evicted(toy, store):
    with open_io(store, 3, transient=4) as service:  # one a layer
        cache = service.experts
        outer = cache.acquire(0, [4])
        iterator = outer.as_they_arrive()
        held = next(iterator)
        for ids in ([1, 2, 3], [5, 6], [7]):
            use(cache, toy, 0, ids)
        check(toy, 0, held)
        iterator.close()
        outer.__exit__(None, None, None)
        outer.__exit__(None, None, None)
        sound(cache)


def test_an_iteration_that_outlives_its_acquisition_gives_back_once(toy, store):
    with open_io(store, 3, transient=4) as service:
        cache = service.experts
        with cache.acquire(0, [4, 5]) as acquisition:
            iteration = acquisition.as_they_arrive()
            next(iteration)
        iteration.close()
        settle(service)
        sound(cache)
        use(cache, toy, 0, [4, 5, 6])
        sound(cache)


def test_a_budget_of_nothing_passes_a_whole_layer_through_two_slots(toy, store):
    with open_io(store, 0, transient=2) as service:
        assert service.fake.most_flying == 0
        use(service.experts, toy, 0, list(range(EXPERTS)))
        assert service.fake.most_flying <= 2
        assert service.stats().pool.held_bytes == 2 * store.expert_slot_bytes


# --- guesses ---


def test_a_guess_that_came_true_is_not_read_again(toy, store):
    with open_io(store, 0, transient=6) as service:
        cache = service.experts
        cache.hint(1, [3, 4])
        settle(service)
        use(cache, toy, 1, [4, 3, 9])
        stats = cache.stats()
        assert (stats.guesses, stats.guesses_used, stats.hits, stats.misses) == (2, 2, 2, 1)
        assert service.stats().scheduler.bytes_by_priority[2] == 2 * store.expert_bytes
        sound(cache)


def test_a_guess_that_did_not_is_counted_as_wasted_and_gives_its_slot_back(toy, store):
    with open_io(store, 0, transient=6) as service:
        cache = service.experts
        cache.hint(1, [3, 4, 5, 6, 7, 8])
        settle(service)
        assert cache.stats().hints_dropped == 2  # the reserve is kept
        use(cache, toy, 1, [3])
        stats = cache.stats()
        assert (stats.guesses_used, stats.guesses_wasted) == (1, 3)
        assert stats.wasted_bytes == 3 * store.expert_bytes
        sound(cache)


def test_guesses_give_way_when_a_demand_needs_the_room(toy, store):
    with open_io(store, 0, transient=4, depth=1) as service:
        cache = service.experts
        cache.hint(2, [0, 1])
        settle(service)
        use(cache, toy, 0, list(range(8)))
        assert cache.stats().guesses_wasted >= 1
        use(cache, toy, 2, [5])
        sound(cache)


def test_a_late_guess_becomes_a_demand(toy, store):
    with open_io(store, 0, [times(1, "stuck")], transient=6, depth=1) as service:
        cache = service.experts
        first = cache.acquire(0, [0])
        while not service.fake.stuck:
            pass
        cache.hint(2, [5])
        second = cache.acquire(2, [7, 5])
        service.fake.release()
        with first, second:
            assert [e.id for e in first.as_they_arrive()] == [0]
            assert [e.id for e in second.as_they_arrive()] in ([5, 7], [7, 5])
        assert service.stats().scheduler.bytes_by_priority[2] == 0
        assert cache.stats().guesses_used == 1


# --- faults ---


def test_a_failed_expert_is_an_error_that_names_it_and_the_next_asks_anew(toy, store):
    with open_io(store, 6, [always(-errno.EIO)]) as service:
        cache = service.experts
        with pytest.raises(StorageError, match="EIO") as caught:
            use(cache, toy, 1, [8, 2, 4])
        assert caught.value.layer == 1
        assert caught.value.expert in (8, 2, 4)
        settle(service)
        service.fake.faults = []
        use(cache, toy, 1, [8, 2, 4])
        settle(service)
        sound(cache)


def test_one_drive_failing_leaves_experts_of_the_other_alone(toy, store):
    gone = store.drives[1]
    with open_io(store, 0, transient=4) as service:
        fds = {f.fd for f in service._files if f.drive_name == gone}
        service.fake.faults = [always(-errno.EIO, lambda t: t.fd in fds)]
        with pytest.raises(StorageError) as caught:
            use(service.experts, toy, 1, [0, 1])  # layer 1 lies in shard 2, on the second drive
        assert caught.value.drive == gone
        use(service.experts, toy, 0, [0, 1])
        use(service.experts, toy, 2, [0, 1])
        settle(service)
        sound(service.experts)


def test_a_stuck_read_fails_its_request_and_keeps_its_slot(toy, store):
    with open_io(store, 0, [times(1, "stuck")], stuck_seconds=0.2, transient=3) as service:
        cache = service.experts
        with pytest.raises(StorageError, match="stuck"):
            use(cache, toy, 0, [1])
        assert cache._slots.free == 2
        use(cache, toy, 0, [2, 3, 4])
        service.fake.release()
        settle(service)
        sound(cache)


def test_leaving_early_cancels_what_was_queued_and_waits_for_nothing(toy, store):
    with open_io(store, 0, [times(1, "stuck")], depth=1, transient=6) as service:
        cache = service.experts
        with cache.acquire(0, [0, 1, 2, 3]):
            while not service.fake.stuck:
                pass
        assert service.stats().scheduler.cancelled == 3
        assert cache._slots.free == 5
        service.fake.release()
        settle(service)
        sound(cache)


def test_an_expert_that_lost_half_its_reads_is_read_anew_for_whoever_asks_next(scattered):
    toy, store = scattered
    with open_io(store, 0, [times(1, "stuck")], depth=1, transient=3) as service:
        cache = service.experts
        with cache.acquire(0, [4]):
            while not service.fake.stuck:
                pass
        assert service.stats().scheduler.cancelled == 5
        again = cache.acquire(0, [4])
        service.fake.release()
        with again:
            for expert in again.as_they_arrive():
                check(toy, 0, expert)
        settle(service)
        sound(cache)


@pytest.mark.parametrize("slots", [0, 3])
def test_the_last_read_of_a_lost_expert_leaves_the_guess_that_followed_it_alone(scattered, slots):
    toy, store = scattered
    with open_io(store, slots, [times(1, "stuck")], depth=1, transient=6) as service:
        cache = service.experts
        with cache.acquire(0, [4]):
            while not service.fake.stuck:
                pass
        cache.hint(0, [4])  # a second entry for the expert, while the first one's read is still out
        service.fake.release()
        settle(service)
        assert cache.stats().guesses == 1
        use(cache, toy, 0, [0])  # the layer is served: its guess ends
        settle(service)
        sound(cache)
        assert cache.stats().guesses_wasted == 1
        assert cache._slots.free + sum(e.kept for e in cache._entries.values()) == cache._slots.capacity


def test_a_layer_wholly_in_memory_is_given_back_together_at_the_exit(toy, store):
    with open_io(store, LAYERS * EXPERTS) as service:
        cache = service.experts
        use(cache, toy, 1, [3, 1, 2])
        with cache.acquire(1, [1, 2, 3]) as acquisition:
            order = []
            for expert in acquisition.as_they_arrive():
                check(toy, 1, expert)
                order.append(expert.id)
                assert all(cache._entries[1, e].users == 1 for e in (1, 2, 3))
        assert sorted(order) == [1, 2, 3]
        sound(cache)
        with cache.acquire(1, [2, 3]) as acquisition:
            iteration = acquisition.as_they_arrive()
            next(iteration)
        assert list(iteration) == []  # what was given back is not lent again
        sound(cache)


def test_one_failed_part_fails_the_expert_and_frees_its_slot_at_the_last(scattered):
    toy, store = scattered
    with open_io(store, 0, seed=1, delay=0.003, transient=2) as service:
        offset = store.expert(1, 7).reads[2].extent.offset & -4096
        service.fake.faults = [always(-errno.EIO, lambda t: t.offset == offset)]
        with pytest.raises(StorageError, match="EIO"):
            use(service.experts, toy, 1, [7])
        settle(service)
        sound(service.experts)
        service.fake.faults = []
        use(service.experts, toy, 1, [7])


def test_wrong_ids_are_refused(store):
    with open_io(store, 0) as service:
        for layer, ids in ((0, [1, 1]), (0, [-1]), (0, [EXPERTS]), (99, [0])):
            with pytest.raises(ValueError, match=r"experts"):
                service.experts.acquire(layer, ids)


# --- size, pins, counts ---


def test_a_cache_resized_while_in_use_stays_sound(toy, store):
    with open_io(store, 12, transient=4) as service:
        service.pool.raise_limit(2**30)
        cache = service.experts
        rng = np.random.default_rng(0)
        for slots in (12, 3, 0, 30, 36, 6):
            iteration = None
            acquisition = cache.acquire(0, [1, 2, 3, 4, 5])
            iteration = acquisition.as_they_arrive()
            held = next(iteration)
            plan = cache.resize(slots * store.expert_slot_bytes)
            assert plan.slots == slots
            check(toy, 0, held)
            for expert in iteration:
                check(toy, 0, expert)
            acquisition.__exit__(None, None, None)
            for layer in range(LAYERS):
                use(cache, toy, layer, rng.permutation(EXPERTS)[:8].tolist())
            settle(service)
            sound(cache)
            assert service.stats().pool.held_bytes == plan.total_bytes


def test_shrinking_gives_memory_back_at_once(toy, store):
    with open_io(store, 36) as service:
        cache = service.experts
        for layer in range(LAYERS):
            use(cache, toy, layer, list(range(EXPERTS)))
        held = service.stats().pool.held_bytes
        freed = cache.shrink(10 * store.expert_slot_bytes)
        assert freed == 10 * store.expert_slot_bytes
        assert service.stats().pool.held_bytes == held - freed
        assert cache.shrink(2**40) == 26 * store.expert_slot_bytes
        assert cache.shrink(1) == 0
        use(cache, toy, 0, list(range(EXPERTS)))
        sound(cache)


def test_pins_are_loaded_last_and_never_evicted(toy, store, tmp_path):
    with open_io(store, 12) as service:  # four a layer
        cache = service.experts
        for _ in range(3):
            use(cache, toy, 1, [7, 8])
        use(cache, toy, 1, [1, 2, 3, 4])
        cache.save_counts(tmp_path / "counts.json")
    counts = read_counts(tmp_path / "counts.json", store)
    with open_io(store, 12, counts=counts) as service:
        cache = service.experts
        cache.load_counts(tmp_path / "counts.json")
        pins = cache.most_used(0.5)
        assert pins[:2] == [(1, 7), (1, 8)]
        assert cache.preload(pins, pin=True) == len(pins)
        for _ in range(3):
            use(cache, toy, 1, list(range(EXPERTS)))
        assert {7, 8} <= kept(cache, 1)
        assert cache.stats().pinned == len(pins)
        sound(cache)
        cache.unpin()
        settle(service)
        sound(cache)
        assert cache.stats().pinned == 0


def test_counts_of_another_checkpoint_or_damaged_are_refused(toy, store, tmp_path):
    path = tmp_path / "counts.json"
    for text, complaint in (
        ("{", "cannot be read"),
        ('{"identity":"x","layers":[],"counts":[]}', "checkpoint x"),
        (f'{{"identity":"{store.identity}","layers":[0,1,2],"counts":[[1]]}}', "do not fit"),
    ):
        path.write_text(text)
        with pytest.raises(StoreError, match=complaint):
            read_counts(path, store)


def test_preloading_everything_leaves_nothing_to_read(toy, store):
    with open_io(store, 36) as service:
        pairs = [(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)]
        assert service.experts.preload(pairs) == 36
        settle(service)
        for layer in range(LAYERS):
            use(service.experts, toy, layer, list(range(EXPERTS)))
        assert service.experts.stats().misses == 0
        assert service.experts.preload(pairs) == 0
