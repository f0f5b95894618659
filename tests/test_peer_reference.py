"""The float64 reference itself, against what another project's reference implementation computed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers import peer
from helpers import reference as ref
from helpers.shared import shared_path


def close(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got.reshape(expected.shape), expected, **peer.tolerance())


def weights(tensors: ref.Tensors) -> ref.Weights:
    return lambda name: ref.widen(tensors[name])


def tiny_config() -> ref.Config:
    return peer.published_config(json.loads(shared_path("fixtures/peer/ops/MANIFEST.json").read_text())["config"])


def test_rmsnorm_short_convolution_situ_and_attention_residual_match_their_fixtures() -> None:
    f = peer.operation("rmsnorm")
    close(ref.rms(f["in"], f["weight"], f["eps"]), f["out"])
    f = peer.operation("situ_glu")
    close(ref.situ(f["in"][:, :8].astype(float), f["in"][:, 8:].astype(float), f["beta"], f["linear_beta"]), f["out"])
    f = peer.operation("shortconv")
    close(ref.conv_silu(f["in"][0], f["weight"][:, 0]), f["out"])
    close(ref.conv_silu(f["in_next"][0], f["weight"][:, 0], f["state_after"][0].T), f["out_next"])
    f = peer.operation("attnres")
    rows = zip(f["block_residual"].astype(float), f["prefix_sum"].astype(float), strict=True)
    close(np.stack([ref.mix([*bank, p], f["norm_weight"], f["proj_weight"], f["eps"]) for bank, p in rows]), f["out"])


def test_kda_gate_and_recurrence_match_their_fixtures() -> None:
    f = peer.operation("kda_decay")
    g = ref.kda_gate(f["z"].reshape(4, 4, 16), f["A_log"], f["dt_bias"].reshape(4, 16), f["lower_bound"])
    close(g, f["g"])
    close(np.exp(g), f["alpha"])
    for name in ("kda_recur1", "kda_recur8"):
        f = peer.operation(name)
        out, state = ref.kda_recurrence(
            f["q"].astype(float) * f["q_scale"], f["k"], f["v"], f["alpha"], f["beta"], np.zeros((4, 16, 16))
        )
        close(out, f["out"])
        close(state, f["state_out"])


@pytest.mark.parametrize("name", ["kda_layer1", "kda_layer8"])
def test_a_whole_kda_layer_matches_its_fixture(name: str) -> None:
    f = peer.operation(name)
    out, state = ref.kda(tiny_config(), f["in"][0].astype(float), weights(peer.kda_tensors(f)))
    close(out, f["out"])
    close(state, f["state_out"])


def test_a_whole_mla_layer_matches_its_fixture() -> None:
    f = peer.operation("mla")
    out, latent, k_rope = ref.mla(tiny_config(), f["in"][0], weights(peer.operation_tensors(f, "self_attn_")), 1e-5)
    close(out, f["out"])
    close(latent, f["kv_latent"])
    close(k_rope, f["k_rope"])


def test_the_router_matches_its_fixture() -> None:
    f = peer.operation("router")
    c = tiny_config()
    for x, ids, expected in zip(f["in"], f["topk_idx"], f["topk_weight"], strict=True):
        chosen, routed = ref.route(c, f["gate_weight"].astype(float) @ x, f["bias"])
        assert chosen == ids.astype(int).tolist()
        close(routed, expected)


def test_a_latent_moe_matches_its_fixture_to_the_scale_of_its_output() -> None:
    f = peer.operation("moe")
    out = ref.moe(tiny_config(), f["in"][0].astype(float), weights(peer.operation_tensors(f, "mlp_")))
    peer.close_to_scale(out, f["out"])


@pytest.mark.parametrize("name", ["layer_kda", "layer_mla"])
def test_a_whole_decoder_layer_matches_its_fixture(name: str) -> None:
    f = peer.operation(name)
    c, w = tiny_config(), weights(peer.operation_tensors(f))
    bank = list(f["block_residual_in"].transpose(1, 0, 2).astype(float))
    p = f["in"][0].astype(float)

    def mixed(site: str) -> np.ndarray:
        norm, proj = w(f"{site}_norm.weight"), w(f"{site}_proj.weight")[0]
        return np.stack([ref.mix([*(v[t] for v in bank), p[t]], norm, proj, f["rms_eps"]) for t in range(4)])

    x = ref.rms(mixed("self_attention_res"), w("input_layernorm.weight"), f["rms_eps"])
    a = ref.mla(c, x, w, f["rms_eps"])[0] if f["is_mla"] else ref.kda(c, x, w)[0]
    if f["layer_idx"] % f["attn_res_block_size"] == 0:
        bank.append(p)
        p = a
    else:
        p = p + a
    p = p + ref.moe(c, ref.rms(mixed("mlp_res"), w("post_attention_layernorm.weight"), f["rms_eps"]), w)
    close(p, f["out"])
    close(np.stack(bank, axis=1), f["block_residual_out"])


def test_mxfp4_bytes_of_the_released_checkpoint_decode_exactly() -> None:
    f = json.loads(shared_path("fixtures/peer/mxfp4.json").read_text())
    packed, scales, expected = (np.array(f[k]["data"]).reshape(f[k]["shape"]) for k in ("packed", "scales", "expected"))
    assert np.array_equal(ref.mxfp4(packed.astype(np.uint8), scales.astype(np.uint8)), expected)


def test_the_oracle_s_predictions_and_logits_are_reproduced() -> None:
    record, config, tensors = peer.oracle()
    logits = ref.Reference(config, tensors).logits(record["full_ids"])
    assert logits.argmax(axis=1).tolist() == record["tf_pred"]
    np.testing.assert_allclose(logits[:, :8], record["logits_head"], atol=2e-5)


def test_the_tiny_checkpoint_s_logits_are_reproduced() -> None:
    record, config, tensors = peer.tiny_k3()
    logits = ref.Reference(config, tensors).logits(record["prompt_ids"])[-1]
    assert logits.argmax() == record["argmax"] == 92
    assert np.abs(logits - record["logits"]).max() < 2e-5 * np.ptp(record["logits"])
