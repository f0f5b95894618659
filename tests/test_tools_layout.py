"""The published layout, against the recorded facts of the real checkpoints. The mock is checked in test_tools_mini."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from helpers.shared import shared_path

from sluice.io.errors import PresetError
from sluice.tools.layout import (
    FULL_K3,
    FULL_KIMI_LINEAR,
    Shape,
    Tensor,
    config,
    every_fourth,
    header,
    in_file_order,
    shards,
)
from sluice.tools.mini import PRESETS

SHAPES = [pytest.param(shape, id=f"{family}-{name}") for family, of in PRESETS.items() for name, shape in of.items()]


def test_kimi_linear_has_its_published_tensors_and_bytes() -> None:
    files = list(shards(FULL_KIMI_LINEAR))
    assert sum(len(shard.tensors) for shard in files) == 20_493
    assert sum(shard.data_bytes for shard in files) == 98_245_528_576


def test_the_trunk_of_a_k3_layer_lies_at_the_published_offsets() -> None:
    few = replace(FULL_K3, layers=2, full_attention=(2,), experts=1, top_k=1, vision=False, dense_layers=1)
    # One expert instead of 896 changes the router's size only; its two tensors come early, so add what they lack.
    offsets = dict(zip(*offsets_of(few, 1), strict=True))
    router = (896 - 1) * 7168 * 2
    bias = (896 - 1) * 4
    assert offsets["self_attn.g_proj.weight"] + router + bias == 379_943_424
    assert offsets["self_attn.q_b_proj.weight"] + router + bias == 787_712_512
    assert offsets["block_sparse_moe.experts.0.w1.weight_packed"] + router + bias == 844_335_616
    first = dict(zip(*offsets_of(few, 0), strict=True))
    assert first["self_attn.A_log"] == 0
    assert first["input_layernorm.weight"] == 640_000
    assert first["self_attn.v_proj.weight"] == 2_165_052_416


def offsets_of(shape: Shape, layer: int) -> tuple[list[str], list[int]]:
    """Names without the layer's prefix, and where each begins after the header."""
    shard = list(shards(shape))[layer]
    names, offsets, at = [], [], 0
    for tensor in shard.tensors:
        names.append(tensor.name.split(".", 4)[4])
        offsets.append(at)
        at += tensor.nbytes
    return names, offsets


def test_experts_lie_in_the_order_of_their_decimal_strings() -> None:
    tiny = replace(PRESETS["k3"]["tiny"], experts=112)
    names = [tensor.name for tensor in list(shards(tiny))[1].tensors if tensor.dtype == "U8"]
    assert [int(name.split(".experts.")[1].split(".")[0]) for name in names[::6]] == sorted(range(112), key=str)
    parts = [name.split(".", 7)[7] for name in names[6:12]]
    assert parts == [f"{w}.weight_{kind}" for w in ("w1", "w2", "w3") for kind in ("packed", "scale")]


def test_a_header_is_compact_json_padded_to_eight_bytes() -> None:
    tensors = in_file_order([Tensor("b", "U8", (3,)), Tensor("a", "BF16", (2, 1)), Tensor("c", "F32", (1,))])
    head = header(tensors)
    assert int.from_bytes(head[:8], "little") == len(head) - 8
    assert len(head) % 8 == 0
    assert head[8:].rstrip(b" ").startswith(b'{"c":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":')
    assert [entry["data_offsets"] for entry in json.loads(head[8:]).values()] == [[0, 4], [4, 8], [8, 11]]


def test_the_full_config_equals_the_published_one_in_every_field_it_has() -> None:
    published = json.loads(shared_path("spec/k3_config.json").read_text())

    def differing(ours: dict[str, Any], theirs: dict[str, Any], at: str) -> list[str]:
        found = []
        for key, value in ours.items():
            if isinstance(value, dict):
                found += differing(value, theirs[key], f"{at}{key}.")
            elif key not in theirs or theirs[key] != value or type(theirs[key]) is not type(value):
                found.append(f"{at}{key}: {value!r}, published {theirs.get(key, 'nothing')!r}")
        return found

    assert differing(config(FULL_K3), published, "") == []


@pytest.mark.parametrize("shape", SHAPES)
def test_our_reader_accepts_the_config_of_every_preset(shape: Shape) -> None:
    from sluice.daemon.model.config import parse_config

    parsed = parse_config(config(shape))
    assert parsed.num_hidden_layers == shape.layers
    assert parsed.expert_width == shape.expert_width


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden": 0}, "hidden"),
        ({"experts": True}, "experts"),
        ({"top_k": 17}, "top_k"),
        ({"inner": 40}, "inner"),
        ({"latent": None}, "latent"),
        ({"full_attention": (4, 4)}, "full_attention"),
        ({"full_attention": (14,)}, "full_attention"),
        ({"full_attention": tuple(range(1, 14))}, "full_attention"),
        ({"dense_layers": 14}, "dense_layers"),
    ],
)
def test_an_impossible_shape_is_refused_by_the_name_of_its_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(PresetError, match=named):
        replace(PRESETS["k3"]["tiny"], **changes)


def test_the_full_attention_pattern_is_the_published_one() -> None:
    assert every_fourth(93) == FULL_K3.full_attention
    assert every_fourth(27) == FULL_KIMI_LINEAR.full_attention
