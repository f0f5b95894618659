"""Reading config.json: three forms, other tools' names, and everything that must be refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.reference import Config, k3_config, kimi_linear_config
from helpers.shared import shared_path

from sluice.daemon.model.config import parse_config, read_config
from sluice.io.errors import StoreError


def nested(config: Config, **root: Any) -> Config:
    return {"model_type": "kimi_k3", "text_config": config, **root}


def refusal(config: Any) -> str:
    with pytest.raises(StoreError) as caught:
        parse_config(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def changed(key: str, value: Any) -> Config:
    """A nested K3 with one key, dotted, set to `value` (... removes it)."""
    config = nested(k3_config())
    at, *path = config["text_config"], *key.split(".")
    for part in path[:-1]:
        at = at[part]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return config


def test_the_published_k3_configuration_is_read_whole() -> None:
    c = read_config(shared_path("spec/k3_config.json"))
    assert (c.hidden_size, c.num_hidden_layers, c.vocab_size) == (7168, 93, 163840)
    assert c.mla_layers == (*range(3, 92, 4), 92)  # 1-based 4, 8, ..., 92, 93: the last two layers are both MLA
    assert len(c.kda_layers) == 69
    assert (c.kda_width, c.cache_width, c.qk_head_dim, c.shared_intermediate_size) == (12288, 576, 192, 6144)
    assert (c.expert_width, c.num_experts, c.num_experts_per_token) == (3584, 896, 16)
    assert (c.bank_size, c.gate_lower_bound, c.full_rank_gate, c.mla_output_gate) == (8, -5.0, True, True)
    assert (c.situ_beta, c.situ_linear_beta) == (4.0, 25.0)
    assert (c.eos_token_ids, c.bos_token_id, c.max_positions) == ((163586,), 163584, 1048576)
    assert c.mxfp4_declared
    assert c.latent_norm_eps == c.rms_norm_eps == 1e-5


def test_the_flat_form_means_the_same_as_the_nested_one() -> None:
    flat = json.loads((shared_path("fixtures/peer/tiny_k3") / "config.json").read_text())
    c = read_config(shared_path("fixtures/peer/tiny_k3"))
    assert c.mla_layers == (3, 7, 11, 12)
    assert (c.kda_heads, c.kda_head_dim, c.conv_kernel_size, c.gate_lower_bound) == (4, 16, 4, -5.0)
    assert (c.hidden_act, c.situ_beta, c.situ_linear_beta, c.full_rank_gate) == ("situ", 4.0, 25.0, True)
    assert c.max_positions is None
    assert set(flat) & {"full_attn_layers", "kda_num_heads"}


def test_kimi_linear_switches_features_off_by_leaving_them_out() -> None:
    c = parse_config(kimi_linear_config() | {"head_dim": 72, "rope_theta": 10000.0})
    assert c.gate_lower_bound is c.attn_res_block_size is c.q_lora_rank is c.routed_expert_hidden_size is None
    assert not c.full_rank_gate
    assert not c.mla_output_gate
    assert not c.latent_moe_use_norm
    assert c.expert_width == c.hidden_size
    assert c.bank_size == 0
    assert c.max_positions == 4096


def test_k3_must_spell_out_what_kimi_linear_may_leave_out() -> None:
    keys = ("linear_attn_config.gate_lower_bound", "linear_attn_config.use_full_rank_gate")
    keys += ("attn_res_block_size", "routed_expert_hidden_size", "mla_use_output_gate", "latent_moe_use_norm")
    for key in keys:
        assert refusal(changed(key, ...)).endswith(f"missing: {key}")


def test_the_truth_of_a_boolean_counts_and_not_its_presence() -> None:
    assert not parse_config(changed("linear_attn_config.use_full_rank_gate", False)).full_rank_gate
    assert not parse_config(changed("mla_use_output_gate", False)).mla_output_gate


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_routed_experts", "num_experts"),
        ("n_shared_experts", "num_shared_experts"),
        ("norm_topk_prob", "moe_renormalize"),
        ("n_group", "num_expert_group"),
        ("model_max_length", "max_position_embeddings"),
        ("situ_beta", "activation_situ_beta"),
        ("situ_linear_beta", "activation_situ_linear_beta"),
    ],
)
def test_an_alias_reads_like_the_published_name_and_may_not_contradict_it(alias: str, name: str) -> None:
    config = k3_config()
    expected = parse_config(nested(config))
    renamed = copy.deepcopy(config)
    renamed[alias] = renamed.pop(name)
    assert parse_config(nested(renamed)) == expected
    assert alias in refusal(nested(config | {alias: 0 if isinstance(config[name], bool) else config[name] + 1}))


def test_every_missing_key_is_named_at_once() -> None:
    gone = ("hidden_size", "kv_lora_rank", "q_lora_rank", "moe_renormalize", "num_experts_per_token")
    config = {k: v for k, v in k3_config().items() if k not in gone} | {"v_head_dim": None}
    message = refusal(nested(config))
    assert all(name in message for name in (*gone, "v_head_dim"))


def test_a_k3_file_whose_text_config_was_lost_runs_as_no_other_model() -> None:
    """Fields sit under text_config; a reader that looked at the root and defaulted would run 93 KDA layers."""
    message = refusal({"model_type": "kimi_k3", "text_config": {}, **k3_config()})
    assert "linear_attn_config.full_attn_layers" in message


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", True, "hidden_size is true or false"),
        ("hidden_size", 64.0, "hidden_size is a fraction"),
        ("hidden_size", "64", "hidden_size is text"),
        ("hidden_size", 0, "hidden_size is 0"),
        ("hidden_size", -64, "hidden_size is -64"),
        ("num_hidden_layers", 2**31 - 1, "num_hidden_layers is 2147483647"),
        ("hidden_size", 2**31, "hidden_size is 2147483648"),
        ("rms_norm_eps", 0, "rms_norm_eps is 0"),
        ("rms_norm_eps", True, "rms_norm_eps is true or false"),
        ("rms_norm_eps", 10**400, "rms_norm_eps is not finite"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is not finite"),
        ("routed_scaling_factor", float("inf"), "routed_scaling_factor is not finite"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("hidden_act", ["situ"], "hidden_act is ['situ']"),
        ("activation_situ_beta", -4.0, "activation_situ_beta is -4.0"),
        ("activation_situ_linear_beta", ..., "activation_situ_linear_beta"),
        ("linear_attn_config.gate_lower_bound", 0.0, "gate_lower_bound is 0.0"),
        ("linear_attn_config", [], "linear_attn_config is a list"),
        ("linear_attn_config.full_attn_layers", [4, 8, 999], "999"),
        ("linear_attn_config.full_attn_layers", [0, 4], "names layer 0"),
        ("linear_attn_config.full_attn_layers", [4, 4], "full_attn_layers is not strictly increasing"),
        ("linear_attn_config.full_attn_layers", [8, 4], "full_attn_layers is not strictly increasing"),
        ("linear_attn_config.full_attn_layers", [4, True], "full_attn_layers is not a list of integers"),
        ("linear_attn_config.full_attn_layers", [], "full_attn_layers names 0 of 8"),
        ("linear_attn_config.full_attn_layers", list(range(1, 9)), "full_attn_layers names 8 of 8"),
        ("linear_attn_config.kda_layers", [1, 2, 3], "kda_layers is not the complement"),
        ("linear_attn_config.short_conv_kernel_size", 0, "short_conv_kernel_size is 0"),
        ("num_experts_per_token", 0, "num_experts_per_token is 0"),
        ("num_experts_per_token", 13, "num_experts_per_token is 13"),
        ("first_k_dense_replace", -1, "first_k_dense_replace is -1"),
        ("first_k_dense_replace", 9, "first_k_dense_replace is 9"),
        ("attn_res_block_size", 0, "attn_res_block_size is 0"),
        ("mla_use_nope", False, "mla_use_nope is False"),
        ("mla_use_nope", ..., "mla_use_nope"),
        ("moe_router_activation_func", "softmax", "moe_router_activation_func is 'softmax'"),
        ("num_expert_group", 2, "num_expert_group is 2"),
        ("topk_group", 2, "topk_group is 2"),
        ("moe_layer_freq", 2, "moe_layer_freq is 2"),
        ("num_key_value_heads", 1, "num_key_value_heads is 1"),
        ("num_nextn_predict_layers", 1, "num_nextn_predict_layers is 1"),
        ("moe_renormalize", 1, "moe_renormalize is an integer"),
        ("eos_token_id", -1, "eos_token_id is -1"),
    ],
)
def test_a_value_the_network_cannot_have_is_refused_by_name(key: str, value: Any, said: str) -> None:
    assert said in refusal(changed(key, value))


QUANTISED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}


def quantised(key: str, value: Any) -> Config:
    block = copy.deepcopy(QUANTISED)
    at: Any = block
    *path, last = key.split(".")
    for part in path:
        at = at[part]
    at[last] = value
    return block


def test_the_quantisation_block_may_stand_at_the_root_or_inside_but_not_twice_unlike() -> None:
    inside = parse_config(nested(k3_config(quantization_config=QUANTISED)))
    assert inside.mxfp4_declared
    assert parse_config(nested(k3_config(), quantization_config=QUANTISED)) == inside
    other = quantised("format", "pack-quantized")
    message = refusal(nested(k3_config(quantization_config=QUANTISED), quantization_config=other))
    assert "quantization_config stands at the root" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "gptq"),
        ("format", "nvfp4-pack-quantized"),
        ("config_groups.group_0.weights.num_bits", 8),
        ("config_groups.group_0.weights.type", "int"),
        ("config_groups.group_0.weights.group_size", 16),
        ("config_groups.group_0.weights.symmetric", False),
        ("config_groups.group_0.weights.symmetric", 1),
        ("config_groups.group_0.weights.zp_dtype", "torch.int8"),
        ("config_groups.group_0.input_activations", {"num_bits": 8}),
        ("config_groups", {}),
    ],
)
def test_another_quantisation_is_refused(key: str, value: Any) -> None:
    assert key in refusal(nested(k3_config(quantization_config=quantised(key, value))))


@pytest.mark.parametrize("key", ["moe_intermediate_size", "routed_expert_hidden_size"])
def test_mxfp4_experts_need_whole_groups(key: str) -> None:
    config = changed(key, 48)
    assert parse_config(config)
    config["text_config"]["quantization_config"] = QUANTISED
    assert f"{key} is 48" in refusal(config)


def test_dims_whose_product_overflows_are_refused() -> None:
    config = k3_config(hidden_size=2**31 - 1, num_experts=2**31 - 1, moe_intermediate_size=2**31 - 1)
    assert "overflows" in refusal(nested(config))


@pytest.mark.parametrize(
    ("fixture", "said"),
    [
        ("no_layermap", "missing: full_attn_layers"),
        ("bad_layer_index", "full_attn_layers names layer 999"),
        ("bad_topk", "num_experts_per_token is 128"),
    ],
)
def test_the_peer_s_broken_configurations_are_refused_by_name(fixture: str, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        read_config(shared_path(f"fixtures/peer/cfg/{fixture}.json"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "a list, not an object"),
        ('{"hidden_size": NaN}', "NaN"),
        ('{"hidden_size": 1, "hidden_size": 2}', "appears twice"),
        ("[" * 100_000, "not valid JSON"),
        ('{"text_config": 3}', "text_config is an integer"),
        ("\xff", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(StoreError, match=said):
        read_config(tmp_path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"config\.json"):
        read_config(tmp_path)


def test_the_latent_norm_eps_is_a_setting() -> None:
    c = parse_config(nested(k3_config()), latent_norm_eps=1e-6)
    assert (c.rms_norm_eps, c.latent_norm_eps) == (1e-5, 1e-6)
    with pytest.raises(StoreError, match="latent_norm_eps"):
        parse_config(nested(k3_config()), latent_norm_eps=0.0)
