"""Another project's fixtures (their README lies beside them), under this project's names.

Owns: reading their files, the translation of their reference model's tensor names into published ones, and of
their flat configuration keys into the published nesting.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from helpers.reference import Config, Tensors
from helpers.shared import shared_path
from numpy.typing import NDArray

LAYER_NAMES = {
    r"mlp\.gate\.weight": "block_sparse_moe.gate.weight",
    r"mlp\.e_score_correction_bias": "block_sparse_moe.gate.e_score_correction_bias",
    r"mlp\.down\.weight": "block_sparse_moe.routed_expert_down_proj.weight",
    r"mlp\.norm\.weight": "block_sparse_moe.routed_expert_norm.weight",
    r"mlp\.up\.weight": "block_sparse_moe.routed_expert_up_proj.weight",
    r"mlp\.shared\.w1\.weight": "block_sparse_moe.shared_experts.gate_proj.weight",
    r"mlp\.shared\.w3\.weight": "block_sparse_moe.shared_experts.up_proj.weight",
    r"mlp\.shared\.w2\.weight": "block_sparse_moe.shared_experts.down_proj.weight",
    r"mlp\.experts\.(\d+)\.(w[123])\.weight": r"block_sparse_moe.experts.\1.\2.weight",
}


def layer_name(name: str) -> str:
    """The published name, within its layer, of the reference model's tensor `name`."""
    for pattern, published in LAYER_NAMES.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, published, name)
    return name


def published_name(name: str) -> str:
    """The published name (without the `language_model.` prefix) of any tensor of the reference model."""
    if match := re.fullmatch(r"layers\.(\d+)\.(.*)", name):
        return f"model.layers.{match[1]}.{layer_name(match[2])}"
    return name if name.startswith("lm_head") else "model." + name


def published_config(flat: Config) -> Config:
    """The flat fixture form as the published keys, with what the flat form implies spelled out."""
    config = dict(flat)
    config["linear_attn_config"] = {
        "full_attn_layers": config.pop("full_attn_layers"),
        "num_heads": config.pop("kda_num_heads"),
        "head_dim": config.pop("kda_head_dim"),
        "short_conv_kernel_size": config.pop("short_conv_kernel_size"),
        "gate_lower_bound": config.pop("gate_lower_bound"),
        "use_full_rank_gate": True,
    }
    config |= {"hidden_act": "situ", "mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
    config["max_position_embeddings"] = 4096
    config["activation_situ_beta"] = config.pop("situ_beta")
    config["activation_situ_linear_beta"] = config.pop("situ_linear_beta")
    return config


def operation(name: str) -> dict[str, Any]:
    """An `ops/` fixture: scalars plain, tensors as float32 arrays in their stated shapes."""
    fields = json.loads(shared_path(f"fixtures/peer/ops/{name}.json").read_text())
    return {key: _array(value) if isinstance(value, dict) else value for key, value in fields.items()}


def _array(value: dict[str, Any]) -> NDArray[np.float32]:
    return np.array(value["data"], dtype=np.float32).reshape(value["shape"])


def operation_tensors(fields: dict[str, Any], within: str = "") -> Tensors:
    """The weights of a layer fixture under published names within the layer: `mlp_experts_0_w1_weight` becomes
    `block_sparse_moe.experts.0.w1.weight`. `within` is put before a fixture's own names ("mlp_", "self_attn_")."""
    tensors: Tensors = {}
    for key, value in fields.items():
        if not isinstance(value, np.ndarray):
            continue
        name = within + key
        name = re.sub(r"^self_attn_(?!res)", "self_attn.", re.sub(r"^mlp_(?!res)", "mlp.", name))
        name = re.sub(r"_weight$", ".weight", name)
        name = re.sub(r"^mlp\.experts_(\d+)_", r"mlp.experts.\1.", name).replace("mlp.shared_", "mlp.shared.")
        tensors[layer_name(name)] = value
    return tensors


def tolerance() -> dict[str, float]:
    """rtol and atol of the `ops/` fixtures, for numpy.testing."""
    stated = json.loads(shared_path("fixtures/peer/ops/MANIFEST.json").read_text())["tolerance"]
    return {"atol": stated["fp32_abs"], "rtol": stated["fp32_rel"]}


def close_to_scale(got: NDArray[Any], expected: NDArray[Any]) -> None:
    """The tolerance with its relative part taken of the largest expected value instead of each one.

    For the `moe` fixture alone, where single values cancel to 0.02 among others of 116: there float64 itself is 1.5e-5
    off, outside 1e-5 + 1e-4 of that value. Of our 384 values two are outside the element-wise tolerance, by 2.1 times.
    """
    stated = tolerance()
    error = np.abs(got.reshape(expected.shape) - expected).max()
    assert error <= stated["atol"] + stated["rtol"] * np.abs(expected).max(), error


def safetensors_as_stored(relative: str) -> Tensors:
    """Every tensor of a file as stored, bfloat16 as its bits in uint16."""
    path = shared_path(relative)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    form = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "U8": np.uint8}
    out: Tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        data = np.frombuffer(raw[8 + length + begin : 8 + length + end], form[entry["dtype"]])
        out[name] = data.reshape(entry["shape"])
    return out


def oracle() -> tuple[dict[str, Any], Config, Tensors]:
    """The float32 whole-model oracle: its record, published configuration and tensors under published names."""
    record = json.loads(shared_path("fixtures/peer/oracle/ref_k3.json").read_text())
    stored = safetensors_as_stored("fixtures/peer/oracle/tiny_k3_f32.safetensors")
    return record, published_config(record["config"]), {published_name(n): a for n, a in stored.items()}


def tiny_k3() -> tuple[dict[str, Any], Config, Tensors]:
    """The tiny checkpoint in the released layout: its record, published configuration and stored tensors.
    The record gains "logits", [vocabulary] float32."""
    record = json.loads(shared_path("fixtures/peer/tiny_k3/ref_logits.json").read_text())
    record["logits"] = np.array(record["logits_bits"], np.uint32).view(np.float32)
    config = published_config(json.loads(shared_path("fixtures/peer/tiny_k3/config.json").read_text()))
    return record, config, safetensors_as_stored("fixtures/peer/tiny_k3/model.safetensors")


def kda_tensors(fields: dict[str, Any]) -> Tensors:
    """The weights of a `kda_layer` fixture, whose names are shorter than everyone else's."""
    short = {"f_a": "f_a_proj", "f_b": "f_b_proj", "q_conv": "q_conv1d", "k_conv": "k_conv1d", "v_conv": "v_conv1d"}
    bare = ("A_log", "dt_bias")
    return {
        f"self_attn.{short.get(key, key)}" + ("" if key in bare else ".weight"): value
        for key, value in fields.items()
        if isinstance(value, np.ndarray) and key not in ("in", "out", "state_out")
    }
