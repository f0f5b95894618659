"""One digest of everything io delivers, whatever the budgets, drives, readers, layouts and delays; and no leaks."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash
from helpers.fake_reader import FakeReader, by_seed
from helpers.io_stores import Toy

from sluice.io.errors import StorageError
from sluice.io.experts import plan_cache
from sluice.io.packer import pack
from sluice.io.service import IoService, IoSettings
from sluice.io.store import Store
from sluice.io.trunk import plan_trunk

UNIT = 8192


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy(layers=4, experts=8)


@pytest.fixture(scope="module")
def folders(toy, tmp_path_factory) -> dict[str, Path]:
    """The same weights in every layout: in place on 1, 2 and 3 drives, packed on 1, 2 and 3 of unequal rates."""
    base = tmp_path_factory.mktemp("layouts")
    made = {}
    for drives in (1, 2, 3):
        places = [base / f"place{drives}-{i}" for i in range(drives)]
        made[f"in place {drives}"] = toy.write(*places)
        source = Store.open(places[0], places)
        source.declare_experts(toy.naming)
        outs = [base / f"packed{drives}-{i}" for i in range(drives)]
        shares = [1.0, 2.5, 0.7][:drives]
        options = {"order": toy.order, "vectors": toy.vectors, "row_tables": toy.row_tables, "unit_bytes": UNIT}
        pack(source, outs, shares=shares, **options)
        made[f"packed {drives}"] = outs[0]
    return made


def open_store(folders: dict[str, Path], layout: str, toy: Toy) -> Store:
    first = folders[layout]
    store = Store.open(first, sorted(first.parent.glob(first.name[:-1] + "*")))
    store.declare_experts(toy.naming)
    assert len(store.drives) == int(layout[-1])
    return store


def deliver(io: IoService, toy: Toy, tokens: int = 3, guesses: bool = False, seed: int = 0) -> str:
    """Walk like a model over `tokens` passes; the digest of every array, in the order of use (experts by number)."""
    digest = xxhash.xxh3_128()
    rng = np.random.default_rng(seed)
    for name in toy.vectors:
        digest.update(io.trunk.vector(name).tobytes())
    for token in range(tokens):
        choice = [rng.permutation(toy.experts)[:4].tolist() for _ in range(toy.layers)]
        digest.update(io.trunk.rows("model.embed.weight", rng.integers(0, toy.vocabulary, 3)).tobytes())
        skip = ["head.weight"] if token == 0 else []
        io.trunk.begin_pass(skip)
        layer = -1
        for use in toy.order:
            if use.name in skip:
                continue
            if use.whole:
                with io.trunk.whole(use.name) as array:
                    digest.update(array.tobytes())
            else:
                for block in io.trunk.blocks(use.name):
                    digest.update(block.array.tobytes())
            if use.name.endswith("kv_b.weight"):
                layer += 1
                if guesses and layer + 1 < toy.layers:
                    wrong = rng.permutation(toy.experts)[:2].tolist() if token % 2 else []
                    guess = list(dict.fromkeys([*choice[layer + 1][:2], *wrong]))
                    io.experts.hint(layer + 1, guess)
                with io.experts.acquire(layer, choice[layer]) as acquisition:
                    arrived = {}
                    for expert in acquisition.as_they_arrive():
                        arrived[expert.id] = b"".join(np.ascontiguousarray(a).tobytes() for a in expert.parts.values())
                for expert_id in choice[layer]:
                    digest.update(arrived[expert_id])
        rng = np.random.default_rng((seed, token))  # wrong guesses must not change what is chosen next
    return digest.hexdigest()


def plans(store: Store, toy: Toy, trunk: str, cache: str):
    matrices = sum(toy.tensors[use.name].nbytes for use in toy.order)
    budget = {"0": 0, "half": matrices // 2, "all": 2**40}[trunk]
    slots = {"0": 0, "one": 1, "half": toy.layers * toy.experts // 2, "all": toy.layers * toy.experts}[cache]
    options = {"vectors": toy.vectors, "row_tables": toy.row_tables, "unit_bytes": UNIT}
    pinned = toy.row_tables if trunk == "all" else ()
    return (
        plan_trunk(toy.order, store, budget, pinned_tables=pinned, **options),
        plan_cache(store, slots * store.expert_slot_bytes),
    )


@pytest.fixture(scope="module")
def expected(toy, folders) -> str:
    store = open_store(folders, "in place 1", toy)
    with IoService.open(store, *plans(store, toy, "all", "all"), IoSettings(backend="threads")) as io:
        return deliver(io, toy)


@pytest.mark.parametrize("layout", [f"{kind} {drives}" for kind in ("in place", "packed") for drives in (1, 2, 3)])
@pytest.mark.parametrize("trunk", ["0", "half", "all"])
@pytest.mark.parametrize("cache", ["0", "one", "half", "all"])
def test_one_digest_over_budgets_layouts_drives_depths_readers_and_guesses(
    toy, folders, expected, layout, trunk, cache
):
    store = open_store(folders, layout, toy)
    made = plans(store, toy, trunk, cache)
    # The remaining dimensions walk along, so that each value of each meets every layout.
    step = ["0", "half", "all"].index(trunk) + ["0", "one", "half", "all"].index(cache)
    for k in range(2):
        settings = IoSettings(
            backend=["uring", "threads"][(step + k) % 2],
            depth=[1, 8][(step // 2 + k) % 2],
            direct=["auto", "off"][(step // 3 + k) % 2],
            verify=["first", "always", "off"][step % 3],
        )
        try:
            with IoService.open(store, *made, settings) as io:
                assert deliver(io, toy, guesses=bool((step + k) % 3)) == expected
                pool = io.stats().pool
                assert pool.held_bytes <= pool.limit_bytes
        except Exception as error:
            if settings.backend == "uring" and "io_uring" in str(error):
                pytest.skip(str(error))
            raise


@pytest.mark.parametrize("layout", ["in place 2", "packed 3"])
@pytest.mark.parametrize("seed", range(5))
def test_one_digest_under_random_delays_and_recoverable_faults(toy, folders, expected, layout, seed):
    store = open_store(folders, layout, toy)

    def make_reader(loop, capacity):
        reader = FakeReader(loop, capacity, seed=seed, delay=0.002)
        reader.faults = [by_seed(seed, 0.1, [-errno.EAGAIN, 4096, 1])]
        return reader

    made = plans(store, toy, ["0", "half"][seed % 2], ["0", "one", "half"][seed % 3])
    with IoService.open(store, *made, IoSettings(depth=1 + seed), make_reader=make_reader) as io:
        assert deliver(io, toy, guesses=seed % 2 == 0) == expected


def test_200_openings_leave_nothing_behind(toy, folders):
    store = open_store(folders, "in place 2", toy)
    made = plans(store, toy, "half", "half")

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    def footprint() -> tuple[int, int, int]:
        with open("/proc/self/maps") as file:
            return len(os.listdir("/proc/self/fd")), threading.active_count(), sum(1 for _ in file)

    settled = (0, 0, 0)
    before = 0
    for i in range(200):
        with IoService.open(store, *made, IoSettings(backend=["auto", "threads"][i % 2])) as io:
            io.trunk.begin_pass()
            next(io.trunk.blocks(toy.order[0].name))
            io.experts.hint(1, [1, 2])
            io.experts.acquire(0, [3, 1])  # left without a word
        if i == 40:
            settled, before = footprint(), resident()
    assert footprint()[:2] == settled[:2]
    assert footprint()[2] <= settled[2] + 20
    assert resident() - before < 8 * 2**20


def test_a_failed_opening_leaves_nothing_behind(toy, folders):
    store = open_store(folders, "in place 1", toy)
    made = plans(store, toy, "all", "half")

    def make_reader(loop, capacity):
        reader = FakeReader(loop, capacity)
        reader.faults = [lambda transfer, number: -errno.EIO if number > 20 else None]
        return reader

    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    for _ in range(5):
        with pytest.raises(StorageError, match="EIO"):
            IoService.open(store, *made, make_reader=make_reader)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
