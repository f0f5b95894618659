"""The two kinds of attention: KDA (specification 3.4, 3.5 and 6) and gated MLA without positions (3.6).

Both take rows of several sequences at once: products with matrices run over all rows, everything that carries
state from token to token runs sequence by sequence. A row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice import kernels
from sluice.daemon.model.config import ModelConfig
from sluice.daemon.model.scratch import F32, KdaBuffers, MlaBuffers
from sluice.daemon.model.state import SequenceState
from sluice.daemon.model.weights import KdaWeights, Linear, MlaWeights
from sluice.io.trunk import TrunkSource

L2_EPS = 1e-6  # added to the sum of squares, not to the mean


@dataclass(slots=True)
class Rows:
    """One sequence's rows of the pass. segment: its index in the call. rows: where its tokens lie among all rows."""

    segment: int
    state: SequenceState
    rows: slice


def kda(
    c: ModelConfig, w: KdaWeights, linear: Linear, x: F32, sequences: Sequence[Rows], b: KdaBuffers, out: F32
) -> None:
    """A KDA layer. x: (T, hidden), normalised; out: (T, hidden). Advances every sequence's matrices and windows."""
    linear(x, w.q_proj, b.q_in)
    linear(x, w.k_proj, b.k_in)
    linear(x, w.v_proj, b.v_in)
    # β = σ(W_b x), one number per head
    linear(x, w.b_proj, b.beta_in)
    kernels.sigmoid(b.beta_in, b.beta)
    # z = W_fb (W_fa x); g = lower_bound σ(exp(A_log) (z + dt_bias)), or -exp(A_log) softplus(..); α = exp(g)
    linear(x, w.f_a_proj, b.low)
    linear(b.low, w.f_b_proj, b.z_rows)
    kernels.kda_decay(b.z, w.a_log, w.dt_bias, c.gate_lower_bound, b.alpha)
    # the output gate, used last but read here, so that the drives are never behind the arithmetic
    if w.g_b_proj is None:
        linear(x, w.g_proj, b.gate)
    else:
        linear(x, w.g_proj, b.low)
        linear(b.low, w.g_b_proj, b.gate)
    # q = silu(conv(q')), each with its own kernel and its own window of raw inputs
    for sequence in sequences:
        at = sequence.rows
        q_window, k_window, v_window = sequence.state.windows[w.slot]
        kernels.short_conv(b.q_in[at], w.q_conv, q_window, b.q_rows[at])
        kernels.short_conv(b.k_in[at], w.k_conv, k_window, b.k_rows[at])
        kernels.short_conv(b.v_in[at], w.v_conv, v_window, b.v_rows[at])
    # per head: q = l2(q) dim^(-1/2), k = l2(k)
    kernels.l2norm(b.q_vectors, L2_EPS, c.kda_head_dim**-0.5, b.q_vectors)
    kernels.l2norm(b.k_vectors, L2_EPS, 1.0, b.k_vectors)
    # S = diag(α) S;  S = S + k ⊗ β (v - Sᵀ k);  o = Sᵀ q
    for sequence in sequences:
        at, state = sequence.rows, sequence.state.kda[w.slot]
        kernels.kda_recurrence(b.q[at], b.k[at], b.v[at], b.alpha[at], b.beta[at], state, b.o[at])
    # y = W_o (rms(o_h) ⊙ σ(W_g x))
    kernels.rmsnorm(b.o_vectors, w.o_norm, c.rms_norm_eps, b.o_vectors)
    kernels.sigmoid_mul(b.o_rows, b.gate, b.o_rows)
    linear(b.o_rows, w.o_proj, out)


def mla(
    c: ModelConfig,
    w: MlaWeights,
    linear: Linear,
    trunk: TrunkSource,
    x: F32,
    sequences: Sequence[Rows],
    b: MlaBuffers,
    out: F32,
) -> None:
    """A gated MLA layer in the absorbed form, in prefill as in decode. x: (T, hidden), normalised; out: (T, hidden).
    Writes every sequence's rows of the latent cache from its position on; the position itself moves at the end of
    the pass."""
    rank, nope = c.kv_lora_rank, c.qk_nope_head_dim
    # q = W_qb rms(W_qa x), or one matrix; per head q_n | q_r
    if w.q_a_proj is None or w.q_a_norm is None:
        linear(x, w.q_proj, b.q_rows)
    else:
        linear(x, w.q_a_proj, b.low)
        kernels.rmsnorm(b.low, w.q_a_norm, c.latent_norm_eps, b.low)
        linear(b.low, w.q_proj, b.q_rows)
    # latent | k_r = W_kva x; c = rms(latent); k_r as it is: not normalised, not rotated
    linear(x, w.kv_a_proj, b.kv)
    b.latent[...] = b.kv[:, :rank]
    kernels.rmsnorm(b.latent, w.kv_a_norm, c.latent_norm_eps, b.latent)
    for sequence in sequences:
        at, state = sequence.rows, sequence.state
        cached = state.latents[w.slot, state.position : state.position + (at.stop - at.start)]
        cached[:, :rank] = b.latent[at]
        cached[:, rank:] = b.kv[at, rank:]
    with trunk.whole(w.kv_b_proj) as kv_b:
        # q̃_h = W_UK,hᵀ q_n,h; the query is q̃_h | q_r,h
        b.q_nope[...] = b.q[:, :, :nope]
        kernels.absorb_query(b.q_nope, kv_b, c.v_head_dim, b.absorbed)
        b.query[:, :, :rank] = b.absorbed
        b.query[:, :, rank:] = b.q[:, :, nope:]
        # s_j = (q̃_h · c_j + q_r,h · k_r,j) (nope + rope)^(-1/2);  ctx_h = Σ_j softmax(s)_j c_j
        for sequence in sequences:
            at, state = sequence.rows, sequence.state
            kernels.mla_attention(
                b.query[at], state.latents[w.slot], state.position, c.qk_head_dim**-0.5, b.context[at]
            )
        # o_h = W_UV,h ctx_h
        kernels.expand_values(b.context, kv_b, nope, b.o)
    # y = W_o (concat(o_h) ⊙ σ(W_g x))
    if w.g_proj is not None:
        linear(x, w.g_proj, b.gate)
        kernels.sigmoid_mul(b.o_rows, b.gate, b.o_rows)
    linear(b.o_rows, w.o_proj, out)
