"""The packed store: the same bytes laid out anew, resumable wherever it is killed, refused when it is not ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.io_stores import Toy, bf16
from hypothesis import given
from hypothesis import strategies as st

from sluice.io import packed, packer
from sluice.io.errors import InstanceHeld, StorageError, StoreError
from sluice.io.experts import plan_cache
from sluice.io.packed import MANIFEST, PackedStore, make_layout, split_pages
from sluice.io.packer import pack, verify
from sluice.io.service import IoService, IoSettings
from sluice.io.store import ALIGN, RECLAIMED, Store, open_in_place
from sluice.io.trunk import plan_trunk

UNIT = 8192


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy(layers=3, experts=6)


@pytest.fixture
def source(toy, tmp_path) -> Store:
    folder = tmp_path / "model"
    store = Store.open(toy.write(folder))
    (folder / "config.json").write_text("{}")
    store.declare_experts(toy.naming)
    return store


def run(source: Store, toy: Toy, outs: list[Path], **options) -> packer.PackReport:
    return pack(
        source, outs, order=toy.order, vectors=toy.vectors, row_tables=toy.row_tables, unit_bytes=UNIT, **options
    )


def contents(outs: list[Path]) -> dict[str, bytes]:
    return {
        f"{i}/{path.name}": path.read_bytes()
        for i, out in enumerate(outs)
        for path in sorted(out.iterdir())
        if path.name != MANIFEST
    }


def check_all(store: Store, toy: Toy, budget: int = 0, slots: int = 0, passes: int = 2, **settings) -> None:
    """Every byte, through the whole of io."""
    store.declare_experts(toy.naming)
    trunk_plan = plan_trunk(toy.order, store, budget, vectors=toy.vectors, row_tables=toy.row_tables, unit_bytes=UNIT)
    cache_plan = plan_cache(store, slots * store.expert_slot_bytes)
    with IoService.open(store, trunk_plan, cache_plan, IoSettings(**settings)) as io:
        for name in toy.vectors:
            array = toy.tensors[name]
            expected = bf16(array) if array.dtype == np.uint16 else array.astype(np.float32)
            assert np.array_equal(io.trunk.vector(name), expected)
        ids = np.array([5, 0, 129, 5])
        assert np.array_equal(io.trunk.rows("model.embed.weight", ids), bf16(toy.tensors["model.embed.weight"])[ids])
        for _ in range(passes):
            io.trunk.begin_pass()
            for use in toy.order:
                if use.whole:
                    with io.trunk.whole(use.name) as array:
                        assert np.array_equal(array, toy.tensors[use.name])
                else:
                    rows = [block.array.copy() for block in io.trunk.blocks(use.name)]
                    assert np.array_equal(np.concatenate(rows), toy.tensors[use.name])
            for layer in range(toy.layers):
                with io.experts.acquire(layer, [3, 0, 5, 1]) as acquisition:
                    for expert in acquisition.as_they_arrive():
                        for name, array in expert.parts.items():
                            full = toy.naming.template.format(layer=layer, expert=expert.id, part=name)
                            assert np.array_equal(array, toy.tensors[full])


@given(st.integers(0, 5000), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_pages_are_split_in_proportion_and_none_is_lost(pages, shares):
    counts = split_pages(pages, shares)
    assert sum(counts) == pages
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - pages * share / sum(shares)) <= 1


@pytest.mark.parametrize("shares", [[1.0], [1, 1], [3, 1], [1, 1, 1], [5, 2, 3]])
@pytest.mark.parametrize("backend", [pytest.param("uring", marks=pytest.mark.uring), "threads"])
def test_a_pack_over_any_drives_delivers_the_bytes_of_its_source(toy, source, tmp_path, shares, backend):
    outs = [tmp_path / f"out{i}" for i in range(len(shares))]
    report = run(source, toy, outs, shares=shares)
    store = Store.open(outs[0])
    assert isinstance(store, PackedStore)
    assert store.identity == source.identity
    assert list(store.drives) == [str(out) for out in outs]
    assert set(store.tensors) == set(toy.tensors)
    assert len(store.tensors) == len(toy.tensors)
    for name, array in toy.tensors.items():
        assert (store.tensors[name].shape, store.tensors[name].nbytes) == (array.shape, array.nbytes)
    for budget, slots, depth in ((0, 0, 1), (60_000, 7, 4), (2**40, 18, 8)):
        check_all(store, toy, budget, slots, depth=depth, backend=backend, verify="always")
    assert verify(store) <= report.written_bytes
    assert (outs[0] / "config.json").exists()
    assert not (outs[0] / packer.JOURNAL).exists()


def test_every_expert_lies_on_every_drive_in_proportion(toy, source):
    layout = make_layout(source, toy.order, toy.vectors, toy.row_tables, [1, 1])
    assert layout.experts is not None
    assert {layout.files[cut.file][1] for cut in layout.experts.cuts} == {0, 1}
    assert all(cut.nbytes % ALIGN == 0 for cut in layout.experts.cuts)
    assert all(piece.extent.offset % ALIGN == 0 for tensor in layout.tensors for piece in tensor.pieces)


def test_packing_twice_gives_the_same_bytes_and_a_third_time_does_nothing(toy, source, tmp_path):
    outs = [[tmp_path / f"{name}{i}" for i in range(2)] for name in "ab"]
    for out in outs:
        run(source, toy, out)
    assert contents(outs[0]) == contents(outs[1])
    report = run(source, toy, outs[0])
    assert report.written_bytes == 0


@pytest.mark.parametrize("stop", [0, 1, 7, 20])
def test_a_run_that_stops_anywhere_goes_on_to_the_same_bytes(toy, source, tmp_path, monkeypatch, stop):
    whole, broken = [tmp_path / "w0", tmp_path / "w1"], [tmp_path / "b0", tmp_path / "b1"]
    run(source, toy, whole, shares=[2, 1])
    monkeypatch.setattr(packer, "SYNC_BYTES", 1)
    seen = []

    def interrupt(progress) -> None:
        seen.append(progress)
        if len(seen) > stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, toy, broken, shares=[2, 1], progress=interrupt)
    with pytest.raises(StoreError):
        open_in_place(broken[0], broken)
    report = run(source, toy, broken)
    if stop:
        assert report.resumed_bytes > 0
    assert contents(whole) == contents(broken)


KILLED = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from helpers.io_stores import Toy
from sluice.io import packer
from sluice.io.store import Store
packer.SYNC_BYTES = 1
toy = Toy(layers=3, experts=6)
store = Store.open({model!r})
store.declare_experts(toy.naming)
def progress(p):
    print(p.done_bytes, flush=True)
packer.pack(store, [Path(p) for p in {outs!r}], order=toy.order, vectors=toy.vectors,
            row_tables=toy.row_tables, unit_bytes={unit}, progress=progress)
"""


def test_kill_9_in_the_midst_and_the_next_run_gives_the_same_bytes(toy, source, tmp_path):
    whole, broken = [tmp_path / "w0", tmp_path / "w1"], [tmp_path / "b0", tmp_path / "b1"]
    run(source, toy, whole)
    program = KILLED.format(
        tests=str(Path(__file__).parent), model=str(source.path), outs=[str(p) for p in broken], unit=UNIT
    )
    for lines in (1, 9):
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(lines):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    journal = broken[0] / packer.JOURNAL
    if journal.exists():
        with open(journal, "ab") as file:
            file.write(b"\x01torn")
    run(source, toy, broken)
    assert contents(whole) == contents(broken)
    check_all(Store.open(broken[0]), toy)


def test_two_runs_at_once_are_refused(toy, source, tmp_path):
    def other(progress) -> None:
        with pytest.raises(InstanceHeld, match="another run"):
            run(source, toy, [tmp_path / "out"])

    run(source, toy, [tmp_path / "out"], progress=other)


def test_reclaiming_frees_shards_as_it_goes_and_survives_a_stop(toy, tmp_path, monkeypatch):
    folder, outs = tmp_path / "model", [tmp_path / "out"]
    reference = [tmp_path / "reference"]
    source = Store.open(toy.write(folder))
    source.declare_experts(toy.naming)
    run(source, toy, reference)
    monkeypatch.setattr(packer, "SYNC_BYTES", 1)
    seen = []

    def interrupt(progress) -> None:
        seen.append(progress)
        if len(seen) == 45:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, toy, outs, reclaim=True, progress=interrupt)
    assert (folder / RECLAIMED).exists()
    with pytest.raises(StoreError, match="given up"):
        Store.open(folder)
    again = open_in_place(folder, [], reclaimed=True)
    again.declare_experts(toy.naming)
    run(again, toy, outs, reclaim=True)
    assert contents(reference) == contents(outs)
    assert not list(folder.glob("*.safetensors"))
    check_all(Store.open(outs[0]), toy)


def test_a_shard_that_holds_more_than_is_packed_is_not_given_up(toy, tmp_path):
    folder = tmp_path / "model"
    source = Store.open(toy.write(folder))
    source.declare_experts(toy.naming)
    pack(source, [tmp_path / "out"], order=toy.order[:-1], vectors=toy.vectors, row_tables=toy.row_tables, reclaim=True)
    assert [path.name for path in folder.glob("*.safetensors")] == ["model-00004-of-00004.safetensors"]
    with open(folder / "model-00004-of-00004.safetensors", "rb") as file:
        assert toy.tensors["head.weight"].tobytes() in file.read()


# --- refusals ---


def test_outputs_of_another_checkpoint_are_refused_by_name(toy, source, tmp_path):
    other_toy = Toy(layers=2, experts=6, seed=9)
    other = Store.open(other_toy.write(tmp_path / "other"))
    other.declare_experts(other_toy.naming)
    run(source, toy, [tmp_path / "out"])
    with pytest.raises(StoreError, match=source.identity):
        run(other, other_toy, [tmp_path / "out"])
    with pytest.raises(StoreError, match=source.identity):
        Store.open(tmp_path / "other", [tmp_path / "out"])
    assert isinstance(Store.open(source.path, [tmp_path / "out"]), PackedStore)


def test_files_of_two_packs_are_never_mixed(toy, source, tmp_path):
    a, b = [tmp_path / "a0", tmp_path / "a1"], [tmp_path / "b0", tmp_path / "b1"]
    run(source, toy, a, shares=[1, 1])
    run(source, toy, b, shares=[3, 1])
    os.replace(b[1] / "experts.1.bin", a[1] / "experts.1.bin")
    with pytest.raises(StoreError, match="another pack"):
        Store.open(a[0])
    os.unlink(b[1] / "trunk.1.bin")
    with pytest.raises(StoreError, match=r"trunk\.1\.bin"):
        Store.open(b[0])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: m.update(layout=2), "layout version 2"),
        (lambda m: m.update(format="zip"), "not the manifest"),
        (lambda m: m["files"].pop(), "damaged"),
        (lambda m: m["files"][0].__setitem__(0, "../x.bin"), "damaged"),
        (lambda m: m["tensors"]["head.weight"]["pieces"].pop(), "damaged"),
        (lambda m: m["tensors"]["head.weight"]["pieces"][0].__setitem__(3, 4097), "damaged"),
        (lambda m: m["tensors"]["head.weight"]["pieces"][0].__setitem__(3, 2**50), "damaged"),
        (lambda m: m["tensors"]["head.weight"]["pieces"][0].__setitem__(1, True), "damaged"),
        (lambda m: m["tensors"]["head.weight"]["pieces"][0].pop(), "damaged"),
        (lambda m: m["tensors"]["head.weight"].update(shape=[1, 2]), "damaged"),
        (lambda m: m["tensors"]["head.weight"].update(dtype="F99"), "damaged"),
        (lambda m: m["experts"]["cuts"][0].__setitem__(2, 8192 * 4096), "damaged"),
        (lambda m: m["experts"].update(experts=2**40), "damaged"),
        (lambda m: m["experts"].update(template="{nothing}"), "damaged"),
        (lambda m: m.update(sums="0"), "another pack"),
        (lambda m: m.update(identity="else"), "another pack"),
    ],
)
def test_a_manifest_that_is_not_right_is_refused(toy, source, tmp_path, change, complaint):
    out = tmp_path / "out"
    run(source, toy, [out])
    manifest = json.loads((out / MANIFEST).read_text())
    change(manifest)
    (out / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=complaint):
        Store.open(out)


def test_a_forbidden_byte_names_the_tensor(toy, source, tmp_path):
    with pytest.raises(StoreError, match=r"experts\.\d+\.w2\.weight_scale"):
        run(source, toy, [tmp_path / "out"], refuse_bytes={"w2.weight_scale": 3})


def test_wrong_bytes_on_the_drive_never_become_weights(toy, source, tmp_path):
    out = tmp_path / "out"
    run(source, toy, [out])
    store = Store.open(out)
    store.declare_experts(toy.naming)
    extent = store.expert(1, 3).reads[0].extent
    with open(out / "experts.0.bin", "r+b") as file:
        file.seek(extent.offset + 100)
        byte = file.read(1)
        file.seek(extent.offset + 100)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(StorageError, match="expert 3"):
        verify(store)
    with pytest.raises(StorageError, match="checksum") as caught:
        check_all(store, toy, verify="first")
    assert (caught.value.layer, caught.value.expert) == (1, 3)


def test_no_room_is_said_before_anything_is_written(toy, source, tmp_path, monkeypatch):
    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(packer.os, "statvfs", lambda path: Full)
    with pytest.raises(StoreError, match="bytes are needed, 4096 are free"):
        run(source, toy, [tmp_path / "out"])
    assert not list((tmp_path / "out").glob("*.bin"))


def test_other_experts_than_were_packed_are_refused(toy, source, tmp_path):
    run(source, toy, [tmp_path / "out"])
    store = Store.open(tmp_path / "out")
    with pytest.raises(StoreError, match="other experts"):
        store.declare_experts(packed.ExpertNaming("x.{layer}.{expert}.{part}", ("a",), (0,), 1))
