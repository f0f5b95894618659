"""Names, order of use and shapes of tensors, against a real index's facts and against the published census."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
from helpers import reference as ref
from helpers.shared import shared_path
from helpers.sources import Facts, facts

from sluice.daemon.model import names
from sluice.daemon.model.config import parse_config, read_config
from sluice.io.errors import StoreError


def small(prefix: str = "", experts: str = "mxfp4", **changes: Any) -> tuple[names.ModelConfig, dict[str, Facts]]:
    config = ref.k3_config(**changes)
    return parse_config(config), facts(
        ref.random_tensors(config, np.random.default_rng(0), prefix=prefix, experts=experts)
    )


def refusal(config: names.ModelConfig, index: dict[str, Facts]) -> str:
    with pytest.raises(StoreError) as caught:
        names.check_tensors(config, index)
    assert "\n" not in str(caught.value)
    return str(caught.value)


LAYER = "model.layers.1."
FIRST_EXPERT = LAYER + "block_sparse_moe.experts.0."
EXPERT = LAYER + "block_sparse_moe.experts.3."


def test_the_published_model_has_the_published_tensors_and_bytes() -> None:
    """Specification 2.1: 2,455 trunk tensors of 93 layers in 108,811,877,376 bytes, 494,592 of experts."""
    c = read_config(shared_path("spec/k3_config.json"))
    plain, f32 = 0, ("conv1d", "A_log", "dt_bias", "o_norm", "e_score_correction_bias")
    count = 0
    for layer in range(c.num_hidden_layers):
        for vector in names.layer_vectors(c, layer):
            size = 128 if vector.at_least else int(np.prod(vector.shape))  # A_log is padded to 128
            plain += size * (4 if any(word in vector.name for word in f32) else 2)
            count += 1
        for matrix in names.layer_matrices(c, layer):
            plain += 2 * matrix.rows * matrix.cols
            count += 1
    assert (count, plain) == (2455, 108_811_877_376)
    parts = names.expert_parts(c, packed=True)
    assert sum(rows * cols for rows, cols in parts.values()) == 17_547_264
    assert len(parts) * c.num_experts * len(c.moe_layers) == 494_592
    assert list(parts)[:2] == ["w1.weight_packed", "w1.weight_scale"]
    assert parts["w2.weight_packed"] == (3584, 1536)


def test_kimi_linear_has_its_published_tensors_and_bytes() -> None:
    """Specification section 6: 20,493 tensors, 98,245,528,576 bytes; F32 are A_log and dt_bias alone."""
    linear = {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "num_heads": 32, "head_dim": 128}
    dims = {"hidden_size": 2304, "num_hidden_layers": 27, "vocab_size": 163840, "kv_lora_rank": 512}
    dims |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 9216}
    dims |= {"num_attention_heads": 32, "num_key_value_heads": 32, "moe_intermediate_size": 1024}
    dims |= {"num_experts": 256, "num_experts_per_token": 8}
    c = parse_config(ref.kimi_linear_config(**dims, linear_attn_config=linear))
    total, count = 2 * 2 * c.vocab_size * c.hidden_size, 2  # embedding and head
    for vector in names.top_vectors(c):
        total, count = total + 2 * int(np.prod(vector.shape)), count + 1
    for layer in range(c.num_hidden_layers):
        for vector in names.layer_vectors(c, layer):
            wide = vector.name.endswith(("A_log", "dt_bias"))
            total, count = total + (4 if wide else 2) * int(np.prod(vector.shape)), count + 1
        for matrix in names.layer_matrices(c, layer):
            total, count = total + 2 * matrix.rows * matrix.cols, count + 1
    parts = names.expert_parts(c, packed=False)
    experts = len(c.moe_layers) * c.num_experts
    count += experts * len(parts)
    total += experts * sum(2 * rows * cols for rows, cols in parts.values())
    assert (count, total) == (20_493, 98_245_528_576)


def test_an_index_that_fits_is_bound_whole() -> None:
    for prefix in ("", names.PREFIX):
        c, index = small(prefix)
        binding = names.bind(c, index, pin_routers=True)
        assert binding.prefix == prefix
        used = [use.name for use in binding.order]
        experts = [name for name in index if ".experts." in name]
        bound = Counter([*used, *binding.vectors, *binding.row_tables, *experts])
        assert bound == Counter(list(index))  # every tensor once, none twice
        assert used[-1] == prefix + "lm_head.weight"
        assert [use.name for use in binding.order if use.whole] == [n for n in used if n.endswith("kv_b_proj.weight")]
        assert [use.name for use in binding.order if use.pin] == [n for n in used if n.endswith("moe.gate.weight")]
        naming = binding.experts
        assert naming is not None
        called = {
            naming.template.format(layer=layer, expert=e, part=part)
            for layer in naming.layers
            for e in range(naming.experts)
            for part in naming.parts
        }
        assert called == set(experts)


def test_plain_experts_are_known_by_the_index_and_not_by_the_configuration() -> None:
    c, index = small(experts="bf16")
    naming = names.expert_naming(c, "", index)
    assert naming is not None
    assert naming.parts == ("w1.weight", "w2.weight", "w3.weight")
    names.check_tensors(c, index)


def test_a_tied_head_is_the_embedding() -> None:
    c, index = small(tie_word_embeddings=True)
    binding = names.bind(c, index)
    assert binding.order[-1].name == "model.embed_tokens.weight"


def test_a_network_without_mixtures_has_no_experts_to_name() -> None:
    c, index = small(first_k_dense_replace=8)
    assert names.bind(c, index).experts is None


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "lm_head.weight",
        LAYER + "self_attn.A_log",
        LAYER + "self_attn.q_conv1d.weight",
        LAYER + "mlp_res_proj.weight",
        LAYER + "block_sparse_moe.gate.e_score_correction_bias",
        EXPERT + "w2.weight_scale",
    ],
)
def test_a_missing_tensor_is_named(name: str) -> None:
    c, index = small()
    del index[name]
    assert f"missing: {name}" in refusal(c, index)


@pytest.mark.parametrize(
    "name", [LAYER + "self_attn.o_proj.weight", LAYER + "input_layernorm.weight", FIRST_EXPERT + "w1.weight_packed"]
)
def test_a_misshapen_tensor_is_named_with_both_shapes(name: str) -> None:
    c, index = small()
    right = index[name]
    index[name] = Facts(right.dtype, (right.shape[0] + 1, *right.shape[1:]))
    message = refusal(c, index)
    assert name in message
    assert f"expected {list(right.shape)}" in message


@pytest.mark.parametrize(
    ("name", "dtype"), [(LAYER + "input_layernorm.weight", "U8"), (FIRST_EXPERT + "w1.weight_scale", "F32")]
)
def test_a_dtype_that_cannot_be_is_named(name: str, dtype: str) -> None:
    c, index = small()
    index[name] = Facts(dtype, index[name].shape)
    assert f"{name} is {dtype}" in refusal(c, index)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
def test_a_plain_tensor_may_be_stored_in_any_float_format(dtype: str) -> None:
    c, index = small(experts="bf16")
    names.check_tensors(c, {name: Facts(dtype, fact.shape) for name, fact in index.items()})


@pytest.mark.parametrize("shape", [(3,), (16,), (1, 1, 3, 1), (128,)])
def test_a_log_may_have_any_shape_of_enough_elements(shape: tuple[int, ...]) -> None:
    c, index = small()
    index[LAYER + "self_attn.A_log"] = Facts("F32", shape)
    names.check_tensors(c, index)
    index[LAYER + "self_attn.A_log"] = Facts("F32", (2,))
    assert "A_log has 2 elements" in refusal(c, index)


def test_an_unknown_tensor_inside_a_layer_is_refused_and_elsewhere_only_told(caplog: pytest.LogCaptureFixture) -> None:
    c, index = small()
    index["vision_tower.patch_embed.proj.weight"] = Facts("BF16", (4, 4))
    with caplog.at_level(logging.WARNING, "sluice.model"):
        names.check_tensors(c, index)
    assert "vision_tower" in caplog.text
    index[LAYER + "self_attn.q_proj.bias"] = Facts("BF16", (48,))
    assert f"unknown: {LAYER}self_attn.q_proj.bias" in refusal(c, index)
    del index[LAYER + "self_attn.q_proj.bias"]
    for name in ("experts.12.w1.weight_packed", "experts.03.w1.weight_packed", "experts.3.w4.weight"):
        strange = f"{LAYER}block_sparse_moe.{name}"
        assert f"unknown: {strange}" in refusal(c, index | {strange: Facts("U8", (32, 16))})


def test_a_layer_map_that_the_index_contradicts_is_refused() -> None:
    """1-based lists read as 0-based would look for MLA tensors one layer late."""
    _, index = small()
    shifted = parse_config(ref.k3_config(linear_attn_config={"full_attn_layers": [5, 8]}))
    assert "missing: model.layers.3.self_attn.q_conv1d.weight" in refusal(shifted, index)


def test_a_matrix_stored_twice_or_only_as_mxfp4_where_it_must_be_plain_is_refused() -> None:
    c, index = small()
    index[EXPERT + "w1.weight"] = Facts("BF16", (32, 32))
    assert "routed experts are stored both as MXFP4 and plain" in refusal(c, index)
    c, index = small()
    index[LAYER + "self_attn.q_proj.weight_packed"] = Facts("U8", (48, 32))
    assert "q_proj is stored as MXFP4" in refusal(c, index)


def test_experts_of_two_kinds_are_refused() -> None:
    c, index = small()
    for matrix in names.EXPERT_MATRICES:
        for part in names.MXFP4_PARTS:
            del index[f"{EXPERT}{matrix}.{part}"]
        index[f"{EXPERT}{matrix}.weight"] = Facts("BF16", (32, 32))
    assert "routed experts are stored both as MXFP4 and plain" in refusal(c, index)


def test_mxfp4_experts_of_a_width_that_is_no_multiple_of_a_group_are_refused_whatever_the_configuration_says() -> None:
    _, index = small()
    narrow = parse_config(ref.k3_config(moe_intermediate_size=48))
    assert "moe_intermediate_size is 48" in refusal(narrow, index)


@pytest.mark.parametrize("present", [[], ["", names.PREFIX]])
def test_an_index_needs_exactly_one_embedding(present: list[str]) -> None:
    with pytest.raises(StoreError, match="token embedding"):
        names.detect_prefix({prefix + names.EMBEDDING: None for prefix in present})


def test_more_experts_than_the_index_has_tensors_are_refused_before_anything_is_laid_out() -> None:
    _, index = small()
    many = parse_config(ref.k3_config(num_experts=2**31 - 1))
    assert "num_experts is 2147483647" in refusal(many, index)


def test_many_problems_are_told_in_one_line_of_bounded_length() -> None:
    c, index = small()
    message = refusal(c, {name: fact for name, fact in index.items() if ".experts." not in name})
    assert "more" in message
    assert len(message) < 1000
