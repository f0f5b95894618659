"""Single operations and whole layers through our kernels and graph, against another project's fixtures."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from helpers import peer
from helpers import reference as ref
from helpers.shared import shared_path
from helpers.sources import FakeExperts, FakeTrunk
from numpy.typing import NDArray

from sluice import kernels
from sluice.daemon.model import weights
from sluice.daemon.model.attention import Rows, kda, mla
from sluice.daemon.model.config import ModelConfig, parse_config
from sluice.daemon.model.feedforward import Mixture
from sluice.daemon.model.graph import LayerRun
from sluice.daemon.model.scratch import Arena
from sluice.daemon.model.state import SequenceState

F32 = NDArray[np.float32]
SITU = kernels.Situ(4.0, 25.0)


def close(got: F32, expected: F32) -> None:
    np.testing.assert_allclose(got.reshape(expected.shape), expected, **peer.tolerance())


def tiny_config(**changes: Any) -> ModelConfig:
    stated = json.loads(shared_path("fixtures/peer/ops/MANIFEST.json").read_text())["config"]
    return parse_config(stated | changes)


def state_and_rows(config: ModelConfig, tokens: int) -> tuple[SequenceState, list[Rows]]:
    state = SequenceState(config, tokens)
    return state, [Rows(0, state, slice(0, tokens))]


# ------------------------------------------------------------------------------------------------ one operation


def test_rmsnorm() -> None:
    f = peer.operation("rmsnorm")
    out = np.empty_like(f["in"])
    kernels.rmsnorm(f["in"], f["weight"], f["eps"], out)
    close(out, f["out"])


def test_situ_takes_the_sigmoid_of_the_uncapped_gate_and_is_bounded() -> None:
    f = peer.operation("situ_glu")
    gate, up = (np.ascontiguousarray(half) for half in np.split(f["in"], 2, axis=1))
    out = np.empty_like(gate)
    kernels.glu(gate, up, kernels.Situ(f["beta"], f["linear_beta"]), out)
    close(out, f["out"])
    assert np.abs(out).max() <= f["max_abs"]


def test_the_short_convolution_carries_its_raw_inputs_on() -> None:
    f = peer.operation("shortconv")
    weight = np.ascontiguousarray(f["weight"][:, 0])
    window, out = np.zeros((3, 64), np.float32), np.empty((5, 64), np.float32)
    kernels.short_conv(f["in"][0], weight, window, out)
    close(out, f["out"])
    close(np.ascontiguousarray(window.T), f["state_after"][0])
    following = np.empty((1, 64), np.float32)
    kernels.short_conv(f["in_next"][0], weight, window, following)
    close(following, f["out_next"])


def test_the_decay_of_a_channel_takes_its_head_s_a_log() -> None:
    f = peer.operation("kda_decay")
    alpha = np.empty((4, 4, 16), np.float32)
    kernels.kda_decay(f["z"].reshape(4, 4, 16), f["A_log"], f["dt_bias"].reshape(4, 16), f["lower_bound"], alpha)
    close(alpha, f["alpha"])


@pytest.mark.parametrize("name", ["kda_recur1", "kda_recur8"])
def test_the_recurrence_decays_then_writes_then_reads(name: str) -> None:
    f = peer.operation(name)
    q = f["q"] * np.float32(f["q_scale"])  # exact: the scale is a power of two
    state, out = np.zeros((4, 16, 16), np.float32), np.empty_like(q)
    kernels.kda_recurrence(q, f["k"], f["v"], f["alpha"], f["beta"], state, out)
    close(out, f["out"])
    close(state, f["state_out"])


def test_the_router_s_bias_steers_the_choice_and_not_the_weights() -> None:
    f = peer.operation("router")
    logits = np.empty((6, 8), np.float32)
    kernels.matmul(f["in"], f["gate_weight"], logits)
    ids, routed = np.empty((6, 2), np.int32), np.empty((6, 2), np.float32)
    assert kernels.route(logits, f["bias"], f["top_k"], True, 1.0, ids, routed)
    assert np.array_equal(ids, f["topk_idx"])
    close(routed, f["topk_weight"])
    unbiased = np.empty_like(ids)
    assert kernels.route(logits, np.zeros(8, np.float32), f["top_k"], True, 1.0, unbiased, routed)
    changed = np.any(np.sort(ids) != np.sort(unbiased), axis=1)
    assert changed.sum() == f["rows_where_bias_changed_selection"]


def test_the_attention_residual_mixes_nine_sources() -> None:
    f = peer.operation("attnres")
    folded = f["norm_weight"] * f["proj_weight"]
    close(folded, f["fold_hint"])
    bank = np.ascontiguousarray(f["block_residual"].transpose(1, 0, 2))
    out = np.empty_like(f["prefix_sum"])
    kernels.attnres_mix(bank, f["n_sources"] - 1, f["prefix_sum"], folded, f["eps"], out)
    close(out, f["out"])


def test_mxfp4_bytes_of_the_released_checkpoint_multiply_exactly() -> None:
    """Unit vectors pick single weights out of the product; the wrong nibble order must not give the same."""
    f = json.loads(shared_path("fixtures/peer/mxfp4.json").read_text())
    packed, scales = (np.array(f[k]["data"], np.uint8).reshape(f[k]["shape"]) for k in ("packed", "scales"))
    expected = np.array(f["expected"]["data"], np.float32).reshape(f["expected"]["shape"])
    columns = expected.shape[1]
    for begin in range(0, columns, 512):
        unit = np.zeros((min(512, columns - begin), columns), np.float32)
        unit[np.arange(len(unit)), begin + np.arange(len(unit))] = 1
        out = np.empty((len(unit), len(expected)), np.float32)
        kernels.matmul(unit, kernels.Mxfp4(packed, scales), out)
        assert np.array_equal(out.T, expected[:, begin : begin + len(unit)])
    swapped = np.array(f["expected_swapped_nibbles"]["first64"], np.float32)
    assert not np.array_equal(expected[0, : len(swapped)], swapped)
    out = np.empty((64, 64), np.float32)
    kernels.matmul(np.eye(64, columns, dtype=np.float32), kernels.Mxfp4(packed << 4 | packed >> 4, scales), out)
    assert np.array_equal(out[:, 0], swapped)


# ------------------------------------------------------------------------------------------------ whole layers


def trunk_of(tensors: ref.Tensors, layer: int = 0) -> FakeTrunk:
    return FakeTrunk({f"model.layers.{layer}.{name}": array for name, array in tensors.items()}, block_rows=24)


@pytest.mark.parametrize("name", ["kda_layer1", "kda_layer8"])
def test_a_kda_layer(name: str) -> None:
    f = peer.operation(name)
    config, trunk = tiny_config(), trunk_of(peer.kda_tensors(f))
    state, rows = state_and_rows(config, f["T"])
    out = np.empty((f["T"], 128), np.float32)
    w = weights.kda_weights(config, trunk, "model.layers.0.", 0)
    kda(config, w, weights.Linear(trunk), f["in"][0], rows, Arena(config).rows(f["T"]).kda, out)
    close(out, f["out"])
    close(state.kda[0], f["state_out"])


def test_an_mla_layer_and_what_it_caches() -> None:
    f = peer.operation("mla")
    config, trunk = tiny_config(), trunk_of(peer.operation_tensors(f, "self_attn_"), 3)
    state, rows = state_and_rows(config, 6)
    out = np.empty((6, 128), np.float32)
    w = weights.mla_weights(config, trunk, "model.layers.3.", 3)
    mla(config, w, weights.Linear(trunk), trunk, f["in"][0], rows, Arena(config).rows(6).mla, out)
    close(out, f["out"])
    close(state.latents[0, :, :32], f["kv_latent"])
    close(state.latents[0, :, 32:], f["k_rope"])


def test_a_latent_mixture_with_its_shared_expert_to_the_scale_of_its_output() -> None:
    f = peer.operation("moe")
    config, tensors = tiny_config(), peer.operation_tensors(f, "mlp_")
    trunk = trunk_of(tensors, 1)
    b, out = Arena(config).rows(3), np.empty((3, 128), np.float32)
    mixture = Mixture(config, weights.Linear(trunk), FakeExperts(trunk.tensors))
    w = weights.moe_weights(config, trunk, "model.layers.1.")
    mixture(1, w, f["in"][0], b.ffn, b.ids, out, lambda rows, error: pytest.fail(str(error)))
    peer.close_to_scale(out, f["out"])


@pytest.mark.parametrize("name", ["layer_kda", "layer_mla"])
def test_a_whole_decoder_layer_and_its_bank(name: str) -> None:
    f = peer.operation(name)
    config, layer = tiny_config(), f["layer_idx"]
    trunk = trunk_of(peer.operation_tensors(f), layer)
    run = LayerRun(config, weights.Linear(trunk), trunk, FakeExperts(trunk.tensors))
    _, rows = state_and_rows(config, 4)
    scratch = Arena(config).rows(4)
    scratch.residual.p[...] = f["in"][0]
    scratch.residual.bank[:2] = f["block_residual_in"].transpose(1, 0, 2)
    w = weights.layer_weights(config, trunk, "", layer)
    blocks = run(w, rows, scratch, 2, lambda failed, error: pytest.fail(str(error)))
    close(scratch.residual.p, f["out"])
    assert blocks == f["block_residual_out"].shape[1]
    close(scratch.residual.bank[:blocks].transpose(1, 0, 2), f["block_residual_out"])
