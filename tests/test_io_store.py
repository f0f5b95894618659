"""The strict header reader and the catalogue."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
from helpers.io_stores import Toy, safetensors_bytes, write_checkpoint
from helpers.shared import shared_path
from hypothesis import given
from hypothesis import strategies as st

from sluice.io import safetensors
from sluice.io.errors import StoreError
from sluice.io.store import ExpertNaming, Store


def header(text: str | bytes, data: int = 8) -> safetensors.Header:
    raw = text.encode() if isinstance(text, str) else text
    return safetensors.parse_header(raw, 8 + len(raw) + data, "t")


GOOD = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}}'


def test_a_right_header_is_read_whatever_the_order_of_its_keys():
    assert header(GOOD).names == ["a", "b"]
    swapped = '{"a":{"data_offsets":[0,8],"shape":[2,1],"dtype":"F32"}}'
    assert header(swapped).kinds == [("F32", (2, 1))]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (GOOD.replace('"b"', '"a"'), "twice"),
        (GOOD.replace("[4,8]", "[0,4]"), "overlap"),
        (GOOD.replace("[4,8]", "[4,7]"), "not 3"),
        (GOOD.replace("[4,8]", "[4,9]"), "data_offsets"),
        (GOOD.replace("[4,8]", "[8,4]"), "data_offsets"),
        (GOOD.replace("[4,8]", "[4,8.0]"), "whole numbers"),
        (GOOD.replace("[4,8]", "[4,true]"), "data_offsets"),
        (GOOD.replace("[4,8]", "4"), "data_offsets"),
        (GOOD.replace("[0,4]", "[-4,0]"), "data_offsets"),
        (GOOD.replace('"shape":[1]', '"shape":[true]'), "shape"),
        (GOOD.replace('"shape":[1]', '"shape":[1.0]'), "whole numbers"),
        (GOOD.replace('"shape":[1]', '"shape":[-1]'), "shape"),
        (GOOD.replace('"shape":[1]', '"shape":[[1]]'), "shape"),
        (GOOD.replace('"shape":[1]', '"shape":[4294967296,4294967296]'), "overflows"),
        (GOOD.replace('"shape":[1]', '"shape":[1,1,1,1,1,1,1,1,1]'), "shape"),
        (GOOD.replace("F32", "F33"), "dtype"),
        (GOOD.replace('"dtype":"F32",', ""), "exactly"),
        (GOOD.replace('"dtype":"F32",', '"dtype":"F32","dtype":"F32",'), "exactly"),
        (GOOD[:-1] + ',"c":7}', "exactly"),
        (GOOD.replace("[1]", "[NaN]"), "JSON"),
        (GOOD[:-2], "JSON"),
        (GOOD + "x", "JSON"),
        ('{"a":[1,2,3]}', "exactly"),
        ('{"a":[["dtype","F32"],["shape",[1]],["data_offsets",[0,4]]]}', "exactly"),
        ("[1]", "object"),
        ("[" * 100_000, "object"),
        ('{"a":' + "[" * 200_000, "JSON"),
        ('{"__metadata__":{"a":1}}', "metadata"),
        ("{}", "belong to no tensor"),
    ],
)
def test_a_wrong_header_is_refused_saying_why(text, complaint):
    with pytest.raises(StoreError, match=complaint):
        header(text)


def test_bytes_that_belong_to_no_tensor_are_refused():
    with pytest.raises(StoreError, match="data ends"):
        header(GOOD, data=9)
    with pytest.raises(StoreError, match="hole"):
        header(GOOD.replace("[4,8]", "[5,9]"), data=9)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_header_or_a_store_error(raw):
    with contextlib.suppress(StoreError):
        header(raw)


@given(st.integers(0, len(GOOD) - 1), st.sampled_from(list('{}[]",:0197aFnt.-e')))
def test_one_changed_byte_gives_a_header_or_a_store_error(position, letter):
    with contextlib.suppress(StoreError):
        header(GOOD[:position] + letter + GOOD[position + 1 :])


def test_a_header_longer_than_its_file_or_the_limit_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    for raw in (b"", b"1234567", (1 << 40).to_bytes(8, "little"), (50).to_bytes(8, "little") + b"{}"):
        path.write_bytes(raw)
        with pytest.raises(StoreError, match=r"a\.safetensors"):
            safetensors.read_header(path)


def test_the_catalogue_agrees_with_what_was_written(tmp_path):
    toy = Toy()
    store = Store.open(toy.write(tmp_path / "a", tmp_path / "b"), [tmp_path / "b"])
    assert set(store.tensors) == set(toy.tensors)
    assert len(store.tensors) == len(toy.tensors)
    for name, array in toy.tensors.items():
        record = store.tensors[name]
        with open(record.file, "rb") as file:
            file.seek(record.offset)
            assert file.read(record.nbytes) == array.tobytes()
        assert record.shape == array.shape
    assert "nothing" not in store.tensors
    assert f"model.layers.{10**12}.bias" not in store.tensors
    assert [str(tmp_path / "a"), str(tmp_path / "b")] == list(store.drives)


def test_adjacent_parts_of_an_expert_are_one_read(tmp_path):
    toy = Toy()
    store = Store.open(toy.write(tmp_path))
    store.declare_experts(toy.naming)
    for layer in range(toy.layers):
        for expert in range(toy.experts):
            record = store.expert(layer, expert)
            assert len(record.reads) == 1
            assert record.slot_bytes <= store.expert_slot_bytes
            check_expert(store, toy, layer, expert)


def check_expert(store: Store, toy: Toy, layer: int, expert: int) -> None:
    record = store.expert(layer, expert)
    slot = bytearray(record.slot_bytes)
    for read in record.reads:
        assert read.at % 4096 == read.extent.offset % 4096
        with open(store.files[read.extent.file].path, "rb") as file:
            file.seek(read.extent.offset)
            slot[read.at : read.at + read.extent.nbytes] = file.read(read.extent.nbytes)
    for part in record.parts:
        expected = toy.tensors[toy.naming.template.format(layer=layer, expert=expert, part=part.name)]
        assert slot[part.at : part.at + expected.nbytes] == expected.tobytes()
        assert part.shape == expected.shape


def test_scattered_parts_of_an_expert_are_several_reads(tmp_path):
    toy = Toy(experts=12)
    for name, tensors in toy.shards.items():
        names = sorted(tensors, key=lambda n: (n.rpartition(".")[2], n))
        toy.shards[name] = {n: tensors[n] for n in names}
    store = Store.open(toy.write(tmp_path))
    store.declare_experts(toy.naming)
    assert len(store.expert(0, 3).reads) > 1
    assert max(store.expert(0, e).slot_bytes for e in range(12)) <= store.expert_slot_bytes
    for expert in range(12):
        check_expert(store, toy, 1, expert)


def test_a_missing_expert_is_named(tmp_path):
    toy = Toy()
    name = toy.naming.template.format(layer=1, expert=4, part="w2.weight_scale")
    for tensors in toy.shards.values():
        tensors.pop(name, None)
    store = Store.open(toy.write(tmp_path))
    with pytest.raises(StoreError, match=name):
        store.declare_experts(toy.naming)


def test_an_expert_of_another_shape_is_named(tmp_path):
    toy = Toy()
    name = toy.naming.template.format(layer=1, expert=4, part="w2.weight_scale")
    for tensors in toy.shards.values():
        if name in tensors:
            tensors[name] = ("U8", np.zeros((7, 64), np.uint8))
    store = Store.open(toy.write(tmp_path))
    with pytest.raises(StoreError, match=name):
        store.declare_experts(toy.naming)


def test_every_missing_shard_is_named(tmp_path):
    toy = Toy()
    toy.write(tmp_path)
    for i in (1, 3):
        (tmp_path / f"model-0000{i}-of-00004.safetensors").unlink()
    with pytest.raises(StoreError, match=r"2 of 4 shards.*00001.*00003"):
        Store.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(StoreError, match=r"2 of 4 shards.*00001.*00003"):
        Store.open(tmp_path)


def test_an_index_that_disagrees_with_a_header_is_refused(tmp_path):
    toy = Toy()
    toy.write(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = list(index["weight_map"])
    for change, complaint in (
        ({names[0]: None}, "is not in the weight_map"),
        ({"model.new": "model-00001-of-00004.safetensors"}, r"model\.new"),
        ({names[0]: "../x.safetensors"}, "plain name"),
        ({names[0]: 5}, "broken"),
    ):
        changed = {n: f for n, f in (index["weight_map"] | change).items() if f is not None}
        path.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(StoreError, match=complaint):
            Store.open(tmp_path)
    for text in ("", "[]", '{"metadata":{}}', '{"weight_map":{}}', json.dumps(index) + "x", json.dumps(index)[:-9]):
        path.write_text(text)
        with pytest.raises(StoreError):
            Store.open(tmp_path)


def test_one_tensor_in_two_files_is_refused(tmp_path):
    one = {"model.layers.3.w": ("F32", np.zeros(3, np.float32))}
    write_checkpoint([tmp_path], {"a.safetensors": one, "b.safetensors": one}, index=False)
    with pytest.raises(StoreError, match=r"model\.layers\.3\.w"):
        Store.open(tmp_path)


def test_the_reference_implementation_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    numpy_api = pytest.importorskip("safetensors.numpy")
    arrays = {"x.1.y": np.arange(12, dtype=np.float32).reshape(3, 4), "z": np.zeros((0, 5), np.uint8)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(numpy_api.save(arrays))
    store = Store.open(path)
    assert store.tensors["x.1.y"].shape == (3, 4)
    raw = safetensors_bytes({n: ("F32" if a.dtype == np.float32 else "U8", a) for n, a in arrays.items()})
    assert np.array_equal(numpy_api.load(raw)["x.1.y"], arrays["x.1.y"])


def test_the_peer_checkpoint_opens():
    store = Store.open(shared_path("fixtures/peer/tiny_k3"))
    assert len(store.tensors) == 916
    parts = tuple(f"w{i}.weight_{kind}" for i in (1, 2, 3) for kind in ("packed", "scale"))
    template = "language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}"
    store.declare_experts(ExpertNaming(template, parts, tuple(range(1, 13)), 8))
    assert len(store.expert(12, 7).reads) == 1
