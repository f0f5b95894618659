"""The weights of a network as the layer graph holds them: small tensors as arrays, matrices by name.

Owns the per-layer bundles, the folding of attention-residual vectors, and `Linear`, the product with a matrix
that arrives in runs of rows. What is resident and what is read when is `sluice.io`'s affair.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice import kernels
from sluice.daemon.model import names
from sluice.daemon.model.config import ModelConfig
from sluice.io.trunk import TrunkSource

log = logging.getLogger("sluice.model")

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """3.4, 3.5. `*_proj` are names of matrices; g_b_proj is None where the output gate is full rank.
    *_conv: (channels, taps); a_log: (heads,); dt_bias: (heads, dim); o_norm: (dim,). `slot`: which KDA layer."""

    slot: int
    q_proj: str
    k_proj: str
    v_proj: str
    b_proj: str
    f_a_proj: str
    f_b_proj: str
    g_proj: str
    g_b_proj: str | None
    o_proj: str
    q_conv: F32
    k_conv: F32
    v_conv: F32
    a_log: F32
    dt_bias: F32
    o_norm: F32


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """3.6. q_a_proj and q_a_norm are None where the query is one matrix (then `q_proj` is it, otherwise q_b_proj);
    g_proj is None without an output gate. `slot`: which MLA layer."""

    slot: int
    q_a_proj: str | None
    q_a_norm: F32 | None
    q_proj: str
    kv_a_proj: str
    kv_a_norm: F32
    kv_b_proj: str
    g_proj: str | None
    o_proj: str


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Names of gate, up and down matrices (3.7, and the shared experts of 3.8)."""

    gate_proj: str
    up_proj: str
    down_proj: str


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """3.8. down_proj and up_proj are None where experts work on the hidden width; norm is None without a norm on
    the sum; shared is None without shared experts. bias: (experts,)."""

    router: str
    bias: F32
    down_proj: str | None
    norm: F32 | None
    up_proj: str | None
    shared: GatedMlp | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. *_res: (hidden,), norm and proj of an attention-residual site folded in float32 (3.1); None for
    the plain residual."""

    index: int
    attention: KdaWeights | MlaWeights
    ffn: GatedMlp | MoeWeights
    input_norm: F32
    post_attention_norm: F32
    attention_res: F32 | None
    ffn_res: F32 | None


@dataclass(frozen=True, slots=True)
class NetworkWeights:
    """The whole network: layers, and what stands before and after them."""

    layers: tuple[LayerWeights, ...]
    embedding: str
    head: str
    final_norm: F32
    output_res: F32 | None


def load_weights(config: ModelConfig, trunk: TrunkSource, prefix: str) -> NetworkWeights:
    """Bind every name and fetch every small tensor. `prefix` as `names.check_tensors` found it."""
    residual = config.attn_res_block_size is not None
    return NetworkWeights(
        layers=tuple(layer_weights(config, trunk, prefix, layer) for layer in range(config.num_hidden_layers)),
        embedding=prefix + names.EMBEDDING,
        head=names.head_name(config, prefix),
        final_norm=trunk.vector(prefix + names.FINAL_NORM),
        output_res=_folded(trunk, prefix + names.OUTPUT_RES) if residual else None,
    )


def layer_weights(c: ModelConfig, trunk: TrunkSource, prefix: str, layer: int) -> LayerWeights:
    at = names.layer_prefix(prefix, layer)
    residual = c.attn_res_block_size is not None
    return LayerWeights(
        index=layer,
        attention=mla_weights(c, trunk, at, layer) if c.is_mla(layer) else kda_weights(c, trunk, at, layer),
        ffn=moe_weights(c, trunk, at) if c.is_moe(layer) else _gated_mlp(at + "mlp."),
        input_norm=trunk.vector(at + "input_layernorm.weight"),
        post_attention_norm=trunk.vector(at + "post_attention_layernorm.weight"),
        attention_res=_folded(trunk, at + "self_attention_res") if residual else None,
        ffn_res=_folded(trunk, at + "mlp_res") if residual else None,
    )


def _folded(trunk: TrunkSource, site: str) -> F32:
    return trunk.vector(site + "_norm.weight") * trunk.vector(site + "_proj.weight").reshape(-1)


def kda_weights(c: ModelConfig, trunk: TrunkSource, at: str, layer: int) -> KdaWeights:
    at += "self_attn."

    def conv(n: str) -> F32:
        return np.ascontiguousarray(trunk.vector(f"{at}{n}_conv1d.weight").reshape(c.kda_width, c.conv_kernel_size))

    return KdaWeights(
        slot=c.kda_layers.index(layer),
        q_proj=at + "q_proj.weight",
        k_proj=at + "k_proj.weight",
        v_proj=at + "v_proj.weight",
        b_proj=at + "b_proj.weight",
        f_a_proj=at + "f_a_proj.weight",
        f_b_proj=at + "f_b_proj.weight",
        g_proj=at + ("g_proj.weight" if c.full_rank_gate else "g_a_proj.weight"),
        g_b_proj=None if c.full_rank_gate else at + "g_b_proj.weight",
        o_proj=at + "o_proj.weight",
        q_conv=conv("q"),
        k_conv=conv("k"),
        v_conv=conv("v"),
        a_log=_a_log(c, trunk.vector(at + "A_log"), at),
        dt_bias=trunk.vector(at + "dt_bias").reshape(c.kda_heads, c.kda_head_dim),
        o_norm=trunk.vector(at + "o_norm.weight"),
    )


def _a_log(c: ModelConfig, stored: F32, at: str) -> F32:
    """One number per head; the release pads the tensor with zeros up to the head dim, others shape it freely (2.2)."""
    flat = stored.reshape(-1)
    if np.any(flat[c.kda_heads :]):
        log.warning("%sA_log holds %d values for %d heads, and the rest is not zero", at, flat.size, c.kda_heads)
    return np.ascontiguousarray(flat[: c.kda_heads])


def mla_weights(c: ModelConfig, trunk: TrunkSource, at: str, layer: int) -> MlaWeights:
    at += "self_attn."
    low_rank = c.q_lora_rank is not None
    return MlaWeights(
        slot=c.mla_layers.index(layer),
        q_a_proj=at + "q_a_proj.weight" if low_rank else None,
        q_a_norm=trunk.vector(at + "q_a_layernorm.weight") if low_rank else None,
        q_proj=at + ("q_b_proj.weight" if low_rank else "q_proj.weight"),
        kv_a_proj=at + "kv_a_proj_with_mqa.weight",
        kv_a_norm=trunk.vector(at + "kv_a_layernorm.weight"),
        kv_b_proj=at + "kv_b_proj.weight",
        g_proj=at + "g_proj.weight" if c.mla_output_gate else None,
        o_proj=at + "o_proj.weight",
    )


def _gated_mlp(at: str) -> GatedMlp:
    return GatedMlp(at + "gate_proj.weight", at + "up_proj.weight", at + "down_proj.weight")


def moe_weights(c: ModelConfig, trunk: TrunkSource, at: str) -> MoeWeights:
    router = at + names.ROUTER
    at += "block_sparse_moe."
    latent = c.routed_expert_hidden_size is not None
    return MoeWeights(
        router=router + ".weight",
        bias=trunk.vector(router + ".e_score_correction_bias"),
        down_proj=at + "routed_expert_down_proj.weight" if latent else None,
        norm=trunk.vector(at + "routed_expert_norm.weight") if c.latent_moe_use_norm else None,
        up_proj=at + "routed_expert_up_proj.weight" if latent else None,
        shared=_gated_mlp(at + "shared_experts.") if c.num_shared_experts else None,
    )


class Linear:
    """y = W x for every row of x, W [N, K] arriving in runs of rows from the trunk."""

    def __init__(self, trunk: TrunkSource) -> None:
        self._trunk = trunk
        self._part = np.empty(0, np.float32)

    def __call__(self, x: F32, name: str, out: F32) -> None:
        """x: (T, K) float32; out: (T, N) float32, overwritten. Blocks until the weights are there."""
        for block in self._trunk.blocks(name):
            run = block.array
            if len(run) == out.shape[1]:
                kernels.matmul(x, run, out)
            elif len(x) == 1:
                kernels.matmul(x, run, out[:, block.row0 : block.row0 + len(run)])
            else:  # the columns of several rows are not contiguous: compute beside, then place
                part = self._beside(len(x), len(run))
                kernels.matmul(x, run, part)
                out[:, block.row0 : block.row0 + len(run)] = part

    def _beside(self, rows: int, columns: int) -> F32:
        if self._part.size < rows * columns:
            self._part = np.empty(rows * columns, np.float32)
        return self._part[: rows * columns].reshape(rows, columns)
