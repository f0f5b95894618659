"""K3's tensor graph in PyTorch, written to be trained on a CPU and to be the reference sluice is held against.

Owns the equations (specification of the model, section 3) in two forms: `Network.forward`, batched over sequences
with the chunked delta rule of section 3.5, for training; and `Network.reference`, one sequence in any float type with
the recurrence exactly as written, for the golden logits. Parameter names are the released ones without the
`language_model.` prefix, except that the experts of a layer are stacked: `experts.w13` (E, 2, I, D) holds w1 and w3,
`experts.w2` (E, D, I). Owns no data, no optimiser and no file format.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fused

CHUNK = 16  # e^(5 * 16) still fits float32: the bounded decay of section 3.4 allows no longer chunk


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one network; the field names are those of the published configuration."""

    vocab_size: int = 3072
    hidden_size: int = 128
    num_hidden_layers: int = 13
    full_attn_layers: tuple[int, ...] = (4, 8, 12, 13)  # one-based, as published
    attn_res_block_size: int = 3
    kda_heads: int = 4
    kda_head_dim: int = 32
    conv_kernel: int = 4
    gate_lower_bound: float = -5.0
    num_attention_heads: int = 4
    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    num_experts: int = 32
    num_experts_per_token: int = 4
    num_shared_experts: int = 2
    routed_expert_hidden_size: int = 64
    moe_intermediate_size: int = 96
    intermediate_size: int = 384
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5

    def is_full_attention(self, layer: int) -> bool:
        """Whether the zero-based `layer` is MLA."""
        return layer + 1 in self.full_attn_layers

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a log or a resume file."""
        return asdict(self)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, weight applied after (section 3)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def situ(gate: Tensor, up: Tensor, shape: Shape) -> Tensor:
    """The capped gated activation of section 3; the sigmoid takes the raw gate."""
    b1, b2 = shape.situ_beta, shape.situ_linear_beta
    return b1 * torch.tanh(gate / b1) * torch.sigmoid(gate) * (b2 * torch.tanh(up / b2))


class _GroupedLinear(torch.autograd.Function):
    """Rows sorted by expert times each expert's matrix: y[rows of e] = x[rows of e] @ w[e]^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bounds: list[int]) -> Tensor:
        y = x.new_empty(x.shape[0], w.shape[1])
        for e in range(w.shape[0]):
            if bounds[e] < bounds[e + 1]:
                torch.mm(x[bounds[e] : bounds[e + 1]], w[e].t(), out=y[bounds[e] : bounds[e + 1]])
        ctx.save_for_backward(x, w)
        ctx.bounds = bounds
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, w = ctx.saved_tensors
        bounds = ctx.bounds
        grad = grad.contiguous()
        dx, dw = torch.empty_like(x), torch.zeros_like(w)
        for e in range(w.shape[0]):
            rows = slice(bounds[e], bounds[e + 1])
            if bounds[e] < bounds[e + 1]:
                torch.mm(grad[rows], w[e], out=dx[rows])
                torch.mm(grad[rows].t(), x[rows], out=dw[e])
        return dx, dw, None


def delta_rule_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule of section 3.5 in chunks of 16 positions, from a zero state.

    q, k, v, g: (S, T, D) for S independent sequence-heads, q scaled, g <= 0 the log decay; beta: (S, T). T must be a
    multiple of 16. Returns (S, T, D).
    """
    s, t, d = q.shape
    n = t // CHUNK
    q, k, v, g = (a.reshape(s * n, CHUNK, d) for a in (q, k, v, g))
    beta = beta.reshape(s * n, CHUNK, 1)
    total = g.cumsum(1)
    up, down = torch.exp(total), torch.exp(-total)
    k_plus, k_minus, q_plus = k * up, k * down, q * up
    k_minus_t = k_minus.transpose(1, 2)
    mix = torch.tril(torch.bmm(beta * k_plus, k_minus_t), -1)
    # (I + M)^-1 of a strictly lower 16 x 16 matrix is exactly (I - M)(I + M^2)(I + M^4)(I + M^8)
    eye = torch.eye(CHUNK, dtype=q.dtype)
    m2 = torch.bmm(mix, mix)
    m4 = torch.bmm(m2, m2)
    m8 = torch.bmm(m4, m4)
    inverse = torch.bmm(torch.bmm(eye - mix, eye + m2), torch.bmm(eye + m4, eye + m8))
    solved = torch.bmm(inverse, beta * torch.cat([v, k_plus], -1)).view(s, n, CHUNK, 2 * d)
    u_values, u_keys = solved[..., :d], solved[..., d:]
    inner = torch.tril(torch.bmm(q_plus, k_minus_t)).view(s, n, CHUNK, CHUNK)
    last = total[:, -1:]
    k_end = (k * torch.exp(last - total)).view(s, n, CHUNK, d).transpose(2, 3)
    fade = torch.exp(last).view(s, n, d, 1)
    q_plus = q_plus.view(s, n, CHUNK, d)
    state = q.new_zeros(s, d, d)
    updates, starts = [], []
    for c in range(n):
        starts.append(state)
        u = torch.baddbmm(u_values[:, c], u_keys[:, c], state, alpha=-1)
        updates.append(u)
        if c + 1 < n:
            state = torch.baddbmm(fade[:, c] * state, k_end[:, c], u)
    u_all, s_all = torch.stack(updates, 1), torch.stack(starts, 1)
    out = torch.matmul(q_plus, s_all) + torch.matmul(inner, u_all)
    return out.view(s, t, d)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """The recurrence of section 3.5 as written. All (T, H, D), beta (T, H); returns (T, H, D)."""
    state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
    rows = []
    for t in range(q.shape[0]):
        state = state * alpha[t].unsqueeze(-1)
        held = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t].unsqueeze(-1) * (beta[t].unsqueeze(-1) * (v[t] - held)).unsqueeze(1)
        rows.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(rows)


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution over time, then SiLU. x: (B, T, C); weight: (C, W), oldest tap first."""
    width, t = weight.shape[1], x.shape[1]
    y = x * weight[:, -1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    for tap in range(width - 1):
        y = torch.addcmul(y, padded[:, tap : tap + t], weight[:, tap])
    return F.silu(y)


def l2(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last axis (section 3.4)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def route(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Section 3.8. logits: (N, E). Returns ids (N, k) by descending biased score and their weights (N, k)."""
    scores = torch.sigmoid(logits)
    ids = torch.topk(scores.detach() + bias, k, dim=-1).indices
    chosen = scores.gather(1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20)


class Network:
    """The whole text model: named parameters, a training forward pass, a reference forward pass."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        self.shape = shape
        self.params: dict[str, Tensor] = {}
        self.bias: dict[int, Tensor] = {}  # router correction: set by balancing, never by a gradient
        self.loads: dict[int, Tensor] = {}  # how often each expert was chosen in the last forward pass
        self.closest_choice = math.inf  # least distance of a chosen score from the best other, in the last reference
        self._initialise(generator)

    def _initialise(self, generator: torch.Generator) -> None:
        s, p = self.shape, self.params
        h, d, e = s.hidden_size, s.routed_expert_hidden_size, s.num_experts

        def normal(name: str, *size: int, fan: int, gain: float = 1.0) -> None:
            p[name] = torch.randn(*size, generator=generator) * (gain / math.sqrt(fan))

        def ones(name: str, n: int) -> None:
            p[name] = torch.ones(n)

        p["model.embed_tokens.weight"] = torch.randn(s.vocab_size, h, generator=generator) * 0.7
        # a head that begins as the embedding can copy a token it has never seen copied
        p["lm_head.weight"] = p["model.embed_tokens.weight"] * (0.6 / math.sqrt(h))
        for name in ("model.norm", "model.output_attn_res_norm"):
            ones(name + ".weight", h)
        p["model.output_attn_res_proj.weight"] = torch.zeros(1, h)
        for layer in range(s.num_hidden_layers):
            at = f"model.layers.{layer}."
            for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
                ones(at + name + ".weight", h)
            for name in ("self_attention_res_proj", "mlp_res_proj"):
                p[at + name + ".weight"] = torch.zeros(1, h)
            a = at + "self_attn."
            if s.is_full_attention(layer):
                width = s.num_attention_heads * s.v_head_dim
                qk = s.qk_nope_head_dim + s.qk_rope_head_dim
                normal(a + "q_a_proj.weight", s.q_lora_rank, h, fan=h)
                normal(a + "q_b_proj.weight", s.num_attention_heads * qk, s.q_lora_rank, fan=s.q_lora_rank)
                normal(a + "kv_a_proj_with_mqa.weight", s.kv_lora_rank + s.qk_rope_head_dim, h, fan=h)
                rows = s.num_attention_heads * (s.qk_nope_head_dim + s.v_head_dim)
                normal(a + "kv_b_proj.weight", rows, s.kv_lora_rank, fan=s.kv_lora_rank)
                ones(a + "q_a_layernorm.weight", s.q_lora_rank)
                ones(a + "kv_a_layernorm.weight", s.kv_lora_rank)
            else:
                width = s.kda_heads * s.kda_head_dim
                for name in ("q_proj", "k_proj", "v_proj"):
                    normal(a + name + ".weight", width, h, fan=h)
                for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
                    taps = torch.randn(width, 1, s.conv_kernel, generator=generator) * 0.1
                    taps[:, :, -1] += 0.7
                    p[a + name + ".weight"] = taps
                normal(a + "f_a_proj.weight", s.kda_head_dim, h, fan=h, gain=0.5)
                normal(a + "f_b_proj.weight", width, s.kda_head_dim, fan=s.kda_head_dim, gain=0.5)
                normal(a + "b_proj.weight", s.kda_heads, h, fan=h)
                p[a + "A_log"] = torch.zeros(s.kda_heads)
                # decays spread from half-lives of one token to several hundred: sigmoid(-1)*5 .. sigmoid(-7)*5
                p[a + "dt_bias"] = -1 - 6 * torch.rand(width, generator=generator)
                ones(a + "o_norm.weight", s.kda_head_dim)
            normal(a + "g_proj.weight", width, h, fan=h, gain=0.5)
            normal(a + "o_proj.weight", h, width, fan=width, gain=0.5)
            if not s.is_full_attention(layer):
                self._look_back(a)
            if layer == 0:
                m = at + "mlp."
                normal(m + "gate_proj.weight", s.intermediate_size, h, fan=h)
                normal(m + "up_proj.weight", s.intermediate_size, h, fan=h)
                normal(m + "down_proj.weight", h, s.intermediate_size, fan=s.intermediate_size, gain=0.5)
                continue
            m = at + "block_sparse_moe."
            normal(m + "gate.weight", e, h, fan=h)
            normal(m + "routed_expert_down_proj.weight", d, h, fan=h)
            normal(m + "routed_expert_up_proj.weight", h, d, fan=d, gain=0.5)
            ones(m + "routed_expert_norm.weight", d)
            inner = s.moe_intermediate_size
            shared = s.num_shared_experts * inner
            normal(m + "shared_experts.gate_proj.weight", shared, h, fan=h)
            normal(m + "shared_experts.up_proj.weight", shared, h, fan=h)
            normal(m + "shared_experts.down_proj.weight", h, shared, fan=shared, gain=0.5)
            normal(m + "experts.w13", e, 2, inner, d, fan=d)
            normal(m + "experts.w2", e, d, inner, fan=inner)
            self.bias[layer] = torch.zeros(e)

    def _look_back(self, a: str) -> None:
        """Half the heads of a KDA layer begin with the question "what came after this token last time?".

        Their keys are the queries of one position earlier and they forget slowly, so that what they read is the value
        that followed, and they write it back as they read it. Every answer needs this step, and a short run does not
        find it from random weights.
        """
        p, dim = self.params, self.shape.kda_head_dim
        rows = slice(0, self.shape.kda_heads // 2 * dim)
        p[a + "k_proj.weight"][rows] = p[a + "q_proj.weight"][rows]
        for name, tap in (("k", -2), ("q", -1), ("v", -1)):
            taps = p[a + name + "_conv1d.weight"]
            taps[rows] *= 0.1
            taps[rows, :, tap] = 1.0
        p[a + "o_proj.weight"][:, rows] = p[a + "v_proj.weight"][rows].t()
        p[a + "f_b_proj.weight"][rows] *= 0.3
        p[a + "dt_bias"][rows] = -7.0  # sigmoid(-7) * 5: half-lives of about 150 tokens

    # ---- training form -------------------------------------------------------------------------------------------

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden rows before the head: ids (B, T) int64, T a multiple of 16; returns (B * T, H) float32."""
        b, t = ids.shape
        mix = _Mixer(self, fused.available())
        p = F.embedding(ids.reshape(-1), self.params["model.embed_tokens.weight"])

        def attention(layer: int, x: Tensor) -> Tensor:
            if self.shape.is_full_attention(layer):
                return self._mla(layer, x.view(b, t, -1)).reshape(b * t, -1)
            return self._kda_chunked(layer, x.view(b, t, -1)).reshape(b * t, -1)

        return self._layers(p, mix, attention, self._moe_grouped)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: (N, H) to (N, V)."""
        return hidden @ self.params["lm_head.weight"].t()

    def _layers(
        self,
        p: Tensor,
        mix: _Mixer,
        attention: Callable[[int, Tensor], Tensor],
        experts: Callable[[int, Tensor], Tensor],
    ) -> Tensor:
        """The layer graph of section 3.1 over flat rows; `attention` and `experts` are the two replaceable parts."""
        s = self.shape
        for layer in range(s.num_hidden_layers):
            at = f"model.layers.{layer}."
            x = mix(p, at + "self_attention_res", at + "input_layernorm")
            boundary = layer % s.attn_res_block_size == 0
            if boundary:
                mix.append(p)
            a = attention(layer, x)
            p = a if boundary else p + a
            x = mix(p, at + "mlp_res", at + "post_attention_layernorm")
            p = p + (self._mlp(at + "mlp.", x) if layer == 0 else experts(layer, x))
        return mix(p, "model.output_attn_res", "model.norm")

    def _situ(self, both: Tensor) -> Tensor:
        """SiTU of rows (N, 2I) that hold gate and up side by side."""
        if fused.available() and both.dtype == torch.float32:
            return fused.SituHalves.apply(both, self.shape.situ_beta, self.shape.situ_linear_beta)  # type: ignore[no-any-return]
        gate, up = both.chunk(2, -1)
        return situ(gate, up, self.shape)

    def _mlp(self, at: str, x: Tensor) -> Tensor:
        w = self.params
        both = x @ torch.cat([w[at + "gate_proj.weight"], w[at + "up_proj.weight"]]).t()
        return self._situ(both) @ w[at + "down_proj.weight"].t()

    def _kda_projections(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """All six projections side by side (B, T, 4 width + dim + heads), and the three convolutions' taps."""
        a, w = f"model.layers.{layer}.self_attn.", self.params
        names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
        taps = torch.cat([w[a + n + "_conv1d.weight"] for n in ("q", "k", "v")]).squeeze(1)
        return x @ torch.cat([w[a + n + ".weight"] for n in names]).t(), taps

    def _kda_inputs(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g (B, T, heads, dim), beta (B, T, heads) and the output gate (B, T, width)."""
        s, a, w = self.shape, f"model.layers.{layer}.self_attn.", self.params
        b, t, _ = x.shape
        heads, dim = s.kda_heads, s.kda_head_dim
        width = heads * dim
        everything, taps = self._kda_projections(layer, x)
        qkv, gate, low, beta = everything.split([3 * width, width, dim, heads], -1)
        q, k, v = short_conv(qkv, taps).view(b, t, 3, heads, dim).unbind(2)
        z = low @ w[a + "f_b_proj.weight"].t() + w[a + "dt_bias"]
        rate = torch.exp(w[a + "A_log"]).view(heads, 1)
        g = s.gate_lower_bound * torch.sigmoid(rate * z.view(b, t, heads, dim))
        return l2(q) * dim**-0.5, l2(k), v, g, torch.sigmoid(beta), gate

    def _kda_output(self, layer: int, o: Tensor, gate: Tensor) -> Tensor:
        a = f"model.layers.{layer}.self_attn."
        o = rms(o, self.params[a + "o_norm.weight"], self.shape.rms_norm_eps)
        return (o.reshape(gate.shape) * torch.sigmoid(gate)) @ self.params[a + "o_proj.weight"].t()

    def _kda_chunked(self, layer: int, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        s, a, w = self.shape, f"model.layers.{layer}.self_attn.", self.params
        heads, dim = s.kda_heads, s.kda_head_dim
        if fused.available():
            everything, taps = self._kda_projections(layer, x)
            y = fused.KdaCore.apply(
                everything, taps, w[a + "f_b_proj.weight"], w[a + "dt_bias"], w[a + "A_log"], w[a + "o_norm.weight"],
                s.rms_norm_eps, s.gate_lower_bound,
            )  # fmt: skip
            return y @ w[a + "o_proj.weight"].t()  # type: ignore[no-any-return]
        q, k, v, g, beta, gate = self._kda_inputs(layer, x)
        q, k, v, g = (y.transpose(1, 2).reshape(b * heads, t, dim) for y in (q, k, v, g))
        o = delta_rule_chunked(q, k, v, g, beta.transpose(1, 2).reshape(b * heads, t))
        return self._kda_output(layer, o.view(b, heads, t, dim).transpose(1, 2), gate)

    def _mla(self, layer: int, x: Tensor) -> Tensor:
        s, a, w = self.shape, f"model.layers.{layer}.self_attn.", self.params
        b, t, _ = x.shape
        heads, nope, rope = s.num_attention_heads, s.qk_nope_head_dim, s.qk_rope_head_dim
        names = ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")
        everything = x @ torch.cat([w[a + n + ".weight"] for n in names]).t()
        q, latent, k_rope, gate = everything.split([s.q_lora_rank, s.kv_lora_rank, rope, heads * s.v_head_dim], -1)
        q = rms(q, w[a + "q_a_layernorm.weight"], s.rms_norm_eps) @ w[a + "q_b_proj.weight"].t()
        q = q.view(b, t, heads, nope + rope).transpose(1, 2)
        c = rms(latent, w[a + "kv_a_layernorm.weight"], s.rms_norm_eps)
        kv = (c @ w[a + "kv_b_proj.weight"].t()).view(b, t, heads, nope + s.v_head_dim).transpose(1, 2)
        k = torch.cat([kv[..., :nope], k_rope.unsqueeze(1).expand(b, heads, t, rope)], -1)
        scores = (q @ k.transpose(2, 3)) * (nope + rope) ** -0.5
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(future, float("-inf")), -1)
        o = (weights @ kv[..., nope:]).transpose(1, 2).reshape(b, t, -1)
        return (o * torch.sigmoid(gate)) @ w[a + "o_proj.weight"].t()

    def _shared_and_routed(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Shared expert output, latent rows, chosen ids and weights."""
        m, w = f"model.layers.{layer}.block_sparse_moe.", self.params
        ids, weights = route(x @ w[m + "gate.weight"].t(), self.bias[layer], self.shape.num_experts_per_token)
        z = x @ w[m + "routed_expert_down_proj.weight"].t()
        return self._mlp(m + "shared_experts.", x), z, ids, weights

    def _latent_up(self, layer: int, u: Tensor) -> Tensor:
        m = f"model.layers.{layer}.block_sparse_moe."
        u = rms(u, self.params[m + "routed_expert_norm.weight"], self.shape.rms_norm_eps)
        return u @ self.params[m + "routed_expert_up_proj.weight"].t()

    def _moe_grouped(self, layer: int, x: Tensor) -> Tensor:
        s, m = self.shape, f"model.layers.{layer}.block_sparse_moe."
        shared, z, ids, weights = self._shared_and_routed(layer, x)
        k = s.num_experts_per_token
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=s.num_experts)
        self.loads[layer] = counts
        bounds = [0, *counts.cumsum(0).tolist()]
        rows = z.index_select(0, order // k)
        w13 = self.params[m + "experts.w13"].flatten(1, 2)
        inner = self._situ(_GroupedLinear.apply(rows, w13, bounds))
        y = _GroupedLinear.apply(inner, self.params[m + "experts.w2"], bounds)
        y = y * weights.reshape(-1).index_select(0, order).unsqueeze(1)
        u = torch.zeros_like(z).index_add(0, order // k, y)
        return shared + self._latent_up(layer, u)

    # ---- reference form ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reference(self, ids: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
        """Logits (T, V) of one sequence and the chosen experts of every MoE layer (T, k), computed in `dtype`.

        The recurrence is the one of section 3.5, not the chunked form, and nothing is fused. Plain on purpose.
        """
        kept, self.params = self.params, {n: w.detach().to(dtype) for n, w in self.params.items()}
        kept_bias, self.bias = self.bias, {n: w.to(dtype) for n, w in self.bias.items()}
        routes: list[Tensor] = []
        self.closest_choice = math.inf
        try:
            p = F.embedding(ids, self.params["model.embed_tokens.weight"])

            def attention(layer: int, x: Tensor) -> Tensor:
                if self.shape.is_full_attention(layer):
                    return self._mla(layer, x.unsqueeze(0))[0]
                q, k, v, g, beta, gate = (y[0] for y in self._kda_inputs(layer, x.unsqueeze(0)))
                return self._kda_output(layer, delta_rule(q, k, v, torch.exp(g), beta), gate)

            def experts(layer: int, x: Tensor) -> Tensor:
                m = f"model.layers.{layer}.block_sparse_moe.experts."
                shared, z, chosen, weights = self._shared_and_routed(layer, x)
                routes.append(chosen)
                gate = self.params[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
                best = (torch.sigmoid(x @ gate.t()) + self.bias[layer]).topk(chosen.shape[1] + 1, dim=-1).values
                self.closest_choice = min(self.closest_choice, float((best[:, -2] - best[:, -1]).min()))
                u = torch.zeros_like(z)
                for e in chosen.unique().tolist():
                    row, rank = torch.nonzero(chosen == e, as_tuple=True)
                    w1, w3 = self.params[m + "w13"][e]
                    inner = situ(z[row] @ w1.t(), z[row] @ w3.t(), self.shape)
                    u[row] += weights[row, rank].unsqueeze(1) * (inner @ self.params[m + "w2"][e].t())
                return shared + self._latent_up(layer, u)

            return self.logits(self._layers(p, _Mixer(self, False), attention, experts)), routes
        finally:
            self.params, self.bias = kept, kept_bias


class _Mixer:
    """Attention residuals (section 3.1): the bank of block entries, the softmax mix over it, and the norm after it."""

    def __init__(self, network: Network, quick: bool) -> None:
        self.network = network
        self.quick = quick
        self.bank: list[Tensor] = []

    def append(self, p: Tensor) -> None:
        self.bank.append(p)

    def __call__(self, p: Tensor, name: str, norm: str) -> Tensor:
        w, eps = self.network.params, self.network.shape.rms_norm_eps
        if not self.bank:  # only where the first layer begins
            return rms(p, w[norm + ".weight"], eps)
        key = w[name + "_norm.weight"] * w[name + "_proj.weight"][0]
        sources = [*self.bank, p]
        if self.quick:
            return fused.MixNorm.apply(key, w[norm + ".weight"], eps, *sources)  # type: ignore[no-any-return]
        scores = [(v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)) @ key for v in sources]
        shares = torch.softmax(torch.stack(scores, -1), -1)
        mixed = (torch.stack(sources, -1) * shares.unsqueeze(1)).sum(-1)
        return rms(mixed, w[norm + ".weight"], eps)
