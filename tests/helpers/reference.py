"""The whole model in plain numpy float64, written from the model specification alone: no kernels, no cleverness.

Owns: expected values for any configuration a test invents (K3, Kimi-Linear and every mixture of their parts), and
random checkpoints for such configurations. It shares no code with `sluice.daemon.model`: it reads the published
configuration's keys itself, walks one token after another, expands keys and values of the latent attention in
full, and runs the KDA recurrence as the specification writes it. Section numbers are those of the specification.

Arrays are as stored: uint16 holds bfloat16 bits, float32 and float16 are themselves, uint8 is MXFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Config = dict[str, Any]
Tensors = dict[str, NDArray[Any]]
Weights = Callable[[str], F64]  # a tensor's name relative to its layer -> float64 values

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # bit 3 is the sign


# ------------------------------------------------------------------------------------------------ stored formats


def to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """float -> bfloat16 bits, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(stored: NDArray[Any]) -> F64:
    """A stored tensor as float64, exactly (uint16 is read as bfloat16 bits)."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def mxfp4(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> F64:
    """[N, K/2] nibbles and [N, K/32] exponents -> [N, K] (2.5): the low nibble is the even column."""
    rows, half = packed.shape
    values = np.empty((rows, 2 * half))
    values[:, 0::2] = E2M1[packed & 15]
    values[:, 1::2] = E2M1[packed >> 4]
    return values * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=1)


# ------------------------------------------------------------------------------------------------ section 3, parts


def sigmoid(x: Any) -> Any:
    return 0.5 * (1.0 + np.tanh(0.5 * np.asarray(x)))


def rms(x: F64, w: F64, eps: float) -> F64:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w


def l2(x: F64) -> F64:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def silu(x: F64) -> F64:
    return x * sigmoid(x)


def situ(g: F64, u: F64, b1: float, b2: float) -> F64:
    return b1 * np.tanh(g / b1) * sigmoid(g) * b2 * np.tanh(u / b2)


def softplus(z: F64) -> F64:
    return np.where(z > 20, z, np.log1p(np.exp(np.minimum(z, 20))))


def softmax(s: F64) -> F64:
    e = np.exp(s - np.max(s))
    return e / np.sum(e)


def activation(c: Config, g: F64, u: F64) -> F64:
    if c["hidden_act"] == "situ":
        return situ(g, u, c["activation_situ_beta"], c["activation_situ_linear_beta"])
    return silu(g) * u


def mix(sources: list[F64], norm: F64, proj: F64, eps: float) -> F64:
    """3.1: a softmax over sources whose keys are normalised and whose values are raw."""
    scores = [np.sum(v / np.sqrt(np.mean(v * v) + eps) * (norm * proj)) for v in sources]
    return sum(c * v for c, v in zip(softmax(np.array(scores)), sources, strict=True))


def conv_silu(y: F64, kernel: F64, window: F64 | None = None) -> F64:
    """3.4: causal depthwise convolution and SiLU. y [T, C]; kernel [C, taps], last tap on the current token;
    window [taps - 1, C], the raw inputs before the first (zeros when None)."""
    taps = kernel.shape[1]
    before = np.zeros((taps - 1, y.shape[1])) if window is None else window
    padded = np.concatenate([before, y])
    return silu(np.stack([sum(kernel[:, i] * padded[t + i] for i in range(taps)) for t in range(len(y))]))


def kda_gate(z: F64, a_log: F64, dt_bias: F64, lower_bound: float | None) -> F64:
    """3.4 and section 6: log decay g. z, dt_bias [.., heads, dim]; a_log [heads]."""
    rate = np.exp(a_log)[:, None]
    if lower_bound is None:
        return -rate * softplus(z + dt_bias)
    return lower_bound * sigmoid(rate * (z + dt_bias))


def kda_recurrence(q: F64, k: F64, v: F64, alpha: F64, beta: F64, state: F64) -> tuple[F64, F64]:
    """3.5, one token after another. q (scaled), k, v, alpha [T, heads, dim]; beta [T, heads];
    state [heads, key, value]. Returns outputs [T, heads, dim] and the last state."""
    out = np.zeros_like(v)
    state = state.copy()
    for t in range(len(q)):
        for h in range(q.shape[1]):
            s = alpha[t, h][:, None] * state[h]
            u = s.T @ k[t, h]
            s = s + np.outer(k[t, h], beta[t, h] * (v[t, h] - u))
            out[t, h] = s.T @ q[t, h]
            state[h] = s
    return out, state


def kda(c: Config, x: F64, w: Weights) -> tuple[F64, F64]:
    """3.4, 3.5: a whole KDA layer on x [T, hidden] from the first token on. Returns y and the last state."""
    la = c["linear_attn_config"]
    heads, dim = la["num_heads"], la["head_dim"]
    shape = (len(x), heads, dim)

    def branch(n: str) -> F64:
        y = x @ w(f"self_attn.{n}_proj.weight").T
        return conv_silu(y, w(f"self_attn.{n}_conv1d.weight")[:, 0, :]).reshape(shape)

    q, k, v = l2(branch("q")) * dim**-0.5, l2(branch("k")), branch("v")
    beta = sigmoid(x @ w("self_attn.b_proj.weight").T)
    z = (x @ w("self_attn.f_a_proj.weight").T) @ w("self_attn.f_b_proj.weight").T
    a_log = w("self_attn.A_log").reshape(-1)[:heads]
    g = kda_gate(z.reshape(shape), a_log, w("self_attn.dt_bias").reshape(heads, dim), la.get("gate_lower_bound"))
    o, state = kda_recurrence(q, k, v, np.exp(g), beta, np.zeros((heads, dim, dim)))
    if la.get("use_full_rank_gate", False):
        gate = x @ w("self_attn.g_proj.weight").T
    else:
        gate = (x @ w("self_attn.g_a_proj.weight").T) @ w("self_attn.g_b_proj.weight").T
    o = rms(o, w("self_attn.o_norm.weight"), c["rms_norm_eps"]) * sigmoid(gate.reshape(shape))
    return o.reshape(len(x), -1) @ w("self_attn.o_proj.weight").T, state


def mla(c: Config, x: F64, w: Weights, latent_eps: float) -> tuple[F64, F64, F64]:
    """3.6 in its expanded form. Returns y, the normalised latents and the shared key part of every token."""
    heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    rank, dv = c["kv_lora_rank"], c["v_head_dim"]
    if c["q_lora_rank"] is None:
        q = x @ w("self_attn.q_proj.weight").T
    else:
        low = rms(x @ w("self_attn.q_a_proj.weight").T, w("self_attn.q_a_layernorm.weight"), latent_eps)
        q = low @ w("self_attn.q_b_proj.weight").T
    q = q.reshape(len(x), heads, nope + rope)
    kv = x @ w("self_attn.kv_a_proj_with_mqa.weight").T
    latent = rms(kv[:, :rank], w("self_attn.kv_a_layernorm.weight"), latent_eps)
    k_rope = kv[:, rank:]
    expanded = (latent @ w("self_attn.kv_b_proj.weight").T).reshape(len(x), heads, nope + dv)
    out = np.zeros((len(x), heads, dv))
    for t in range(len(x)):
        for h in range(heads):
            keys = np.concatenate([expanded[: t + 1, h, :nope], k_rope[: t + 1]], axis=1)
            weights = softmax(keys @ q[t, h] * (nope + rope) ** -0.5)
            out[t, h] = weights @ expanded[: t + 1, h, nope:]
    o = out.reshape(len(x), -1)
    if c.get("mla_use_output_gate", False):
        o = o * sigmoid(x @ w("self_attn.g_proj.weight").T)
    return o @ w("self_attn.o_proj.weight").T, latent, k_rope


def gated_mlp(c: Config, x: F64, gate: F64, up: F64, down: F64) -> F64:
    return activation(c, x @ gate.T, x @ up.T) @ down.T


def route(c: Config, logits: F64, bias: F64) -> tuple[list[int], F64]:
    """3.8 for one token: chosen ids in descending biased score (ties by lower id) and their weights."""
    score = sigmoid(logits)
    ids = sorted(range(len(logits)), key=lambda e: (-(score[e] + bias[e]), e))[: c["num_experts_per_token"]]
    weights = score[ids]
    if c["moe_renormalize"]:
        weights = weights / (np.sum(weights) + 1e-20)
    return ids, weights * c["routed_scaling_factor"]


def moe(c: Config, x: F64, w: Weights) -> F64:
    """3.8: routed experts (on a latent where the configuration has one) and the shared expert."""
    latent = c.get("routed_expert_hidden_size") is not None
    moe_ = "block_sparse_moe."
    z = x @ w(moe_ + "routed_expert_down_proj.weight").T if latent else x
    logits = x @ w(moe_ + "gate.weight").T
    u = np.zeros_like(z)
    for t in range(len(x)):
        ids, weights = route(c, logits[t], w(moe_ + "gate.e_score_correction_bias"))
        for e, weight in zip(ids, weights, strict=True):
            w1, w3, w2 = (w(f"{moe_}experts.{e}.{n}.weight") for n in ("w1", "w3", "w2"))
            u[t] += weight * gated_mlp(c, z[t], w1, w3, w2)
    if latent:
        if c["latent_moe_use_norm"]:
            u = rms(u, w(moe_ + "routed_expert_norm.weight"), c["rms_norm_eps"])
        u = u @ w(moe_ + "routed_expert_up_proj.weight").T
    if c["num_shared_experts"] == 0:
        return u
    shared = (w(f"{moe_}shared_experts.{n}_proj.weight") for n in ("gate", "up", "down"))
    return u + gated_mlp(c, x, *shared)


# ------------------------------------------------------------------------------------------------ the whole model


class Reference:
    """A model of the published form. `config` is the object that holds the text model's keys."""

    def __init__(self, config: Config, tensors: Mapping[str, NDArray[Any]], latent_norm_eps: float | None = None):
        self.config = config
        self.tensors = tensors
        self.prefix = "language_model." if "language_model.model.embed_tokens.weight" in tensors else ""
        self.latent_eps = config["rms_norm_eps"] if latent_norm_eps is None else latent_norm_eps
        self._widened: dict[str, F64] = {}

    def tensor(self, name: str) -> F64:
        """Values of a tensor by its full name; an expert's matrix may be stored as MXFP4."""
        if name not in self._widened:
            if name in self.tensors:
                self._widened[name] = widen(self.tensors[name])
            else:
                self._widened[name] = mxfp4(self.tensors[name + "_packed"], self.tensors[name + "_scale"])
        return self._widened[name]

    def is_mla(self, layer: int) -> bool:
        return layer + 1 in self.config["linear_attn_config"]["full_attn_layers"]

    def attention(self, layer: int, x: F64, w: Weights) -> F64:
        return mla(self.config, x, w, self.latent_eps)[0] if self.is_mla(layer) else kda(self.config, x, w)[0]

    def ffn(self, layer: int, x: F64, w: Weights) -> F64:
        if layer >= self.config["first_k_dense_replace"]:
            return moe(self.config, x, w)
        return gated_mlp(self.config, x, *(w(f"mlp.{n}_proj.weight") for n in ("gate", "up", "down")))

    def logits(self, ids: list[int]) -> F64:
        """[T, vocabulary] float64: every position of one sequence."""
        c, eps = self.config, self.config["rms_norm_eps"]
        block = c.get("attn_res_block_size")
        p: F64 | None = self.tensor(self.prefix + "model.embed_tokens.weight")[ids]
        bank: list[F64] = []

        def mixed(w: Weights, site: str) -> F64:
            if not bank:
                return p
            norm, proj = w(f"{site}_norm.weight"), w(f"{site}_proj.weight").reshape(-1)
            sources = [*bank, p]
            return np.stack([mix([v[t] for v in sources], norm, proj, eps) for t in range(len(ids))])

        for layer in range(c["num_hidden_layers"]):

            def w(name: str, at: str = f"{self.prefix}model.layers.{layer}.") -> F64:
                return self.tensor(at + name)

            if block is None:
                p = p + self.attention(layer, rms(p, w("input_layernorm.weight"), eps), w)
                p = p + self.ffn(layer, rms(p, w("post_attention_layernorm.weight"), eps), w)
                continue
            h = mixed(w, "self_attention_res")
            if layer % block == 0:
                bank.append(p)
                p = None
            a = self.attention(layer, rms(h, w("input_layernorm.weight"), eps), w)
            p = a if p is None else p + a
            h = mixed(w, "mlp_res")
            p = p + self.ffn(layer, rms(h, w("post_attention_layernorm.weight"), eps), w)

        h = p if block is None else mixed(lambda name: self.tensor(f"{self.prefix}model.{name}"), "output_attn_res")
        head = "model.embed_tokens.weight" if c.get("tie_word_embeddings") else "lm_head.weight"
        return rms(h, self.tensor(self.prefix + "model.norm.weight"), eps) @ self.tensor(self.prefix + head).T


# ------------------------------------------------------------------------------------------------ random checkpoints


def k3_config(**changes: Any) -> Config:
    """A small K3 in the published keys (what lies under `text_config`). `changes` replace top-level keys;
    those of `linear_attn_config` are given as a dict under that name and merged."""
    config: Config = {
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "vocab_size": 101,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "linear_attn_config": {
            "full_attn_layers": [4, 8],
            "num_heads": 3,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 40,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 12,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "intermediate_size": 80,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "num_expert_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return _changed(config, changes)


def kimi_linear_config(**changes: Any) -> Config:
    """A small Kimi-Linear (section 6) in the published keys: softplus decay, low-rank gate, plain residual,
    one query matrix, no MLA gate, experts on the hidden width, SiLU."""
    config = k3_config(
        hidden_act="silu",
        q_lora_rank=None,
        num_shared_experts=1,
        routed_scaling_factor=2.446,
        model_max_length=4096,
    )
    absent = (
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "attn_res_block_size",
        "routed_expert_hidden_size",
        "latent_moe_use_norm",
        "mla_use_output_gate",
        "max_position_embeddings",
    )
    for key in absent:
        del config[key]
    for key in ("gate_lower_bound", "use_full_rank_gate"):
        del config["linear_attn_config"][key]
    return _changed(config, changes)


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    changes = dict(changes)
    linear = config["linear_attn_config"] | changes.pop("linear_attn_config", {})
    config |= changes | {"linear_attn_config": linear}
    layers, full = config["num_hidden_layers"], linear["full_attn_layers"]
    linear["kda_layers"] = [n for n in range(1, layers + 1) if n not in full]
    return {key: value for key, value in config.items() if value is not ...}


def random_config(rng: np.random.Generator, flavour: str) -> Config:
    """A small configuration with every dimension, the layer map and (half the time) single parts drawn anew."""
    layers = int(rng.integers(5, 10))
    count = int(rng.integers(1, layers - 1))
    changes: Config = {
        "hidden_size": int(rng.choice([40, 64, 72, 96])),
        "num_hidden_layers": layers,
        "vocab_size": int(rng.integers(60, 150)),
        "linear_attn_config": {
            "full_attn_layers": sorted(int(n) + 1 for n in rng.choice(layers, count, replace=False)),
            "num_heads": int(rng.integers(1, 5)),
            "head_dim": int(rng.choice([8, 16, 24])),
            "short_conv_kernel_size": int(rng.integers(1, 5)),
        },
        "kv_lora_rank": int(rng.choice([16, 33, 48])),
        "qk_nope_head_dim": int(rng.choice([8, 20, 32])),
        "qk_rope_head_dim": int(rng.choice([4, 8, 12])),
        "v_head_dim": int(rng.choice([8, 16, 20])),
        "num_experts": int(rng.integers(6, 20)),
        "num_experts_per_token": int(rng.integers(1, 6)),
        "num_shared_experts": int(rng.integers(1, 3)),
        "moe_intermediate_size": int(rng.choice([32, 64])),
        "first_k_dense_replace": int(rng.integers(0, 3)),
        "intermediate_size": int(rng.choice([72, 100])),
        "routed_scaling_factor": float(rng.choice([1.0, 2.446])),
    }
    changes["num_attention_heads"] = changes["num_key_value_heads"] = int(rng.integers(1, 5))
    if flavour == "k3":
        changes |= {
            "attn_res_block_size": int(rng.integers(1, 5)),
            "q_lora_rank": int(rng.choice([24, 40])),
            "routed_expert_hidden_size": int(rng.choice([32, 64])),
        }
        if rng.random() < 0.25:
            changes["latent_moe_use_norm"] = False
        if rng.random() < 0.25:
            changes["linear_attn_config"]["use_full_rank_gate"] = False
        return k3_config(**changes)
    if rng.random() < 0.25:
        changes["mla_use_output_gate"] = True
    return kimi_linear_config(**changes)


def random_tensors(
    config: Config, rng: np.random.Generator, *, prefix: str = "", experts: str = "bf16", small: str = "f32"
) -> Tensors:
    """A checkpoint for `config` under real names. `experts`: "mxfp4", "bf16" or "f32"; `small` is the format of
    norms and convolution kernels ("f32" or "bf16"). Scaled so that every part matters: mixing weights are far
    from uniform, the correction bias changes the choice, gates reach the caps, decays reach both ends."""
    c, la = config, config["linear_attn_config"]
    out: Tensors = {}
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    heads, dim = la["num_heads"], la["head_dim"]
    proj = heads * dim

    def stored(values: NDArray[Any], form: str) -> NDArray[Any]:
        return to_bf16(values) if form == "bf16" else values.astype(np.float32)

    def matrix(name: str, rows: int, cols: int, gain: float = 1.0, form: str = "bf16") -> None:
        out[name + ".weight"] = stored(rng.normal(0, gain * cols**-0.5, (rows, cols)), form)

    def norm(name: str, size: int) -> None:
        out[name + ".weight"] = stored(1 + 0.2 * rng.normal(size=size), small)

    def res(name: str) -> None:
        norm(name + "_norm", hidden)
        out[name + "_proj.weight"] = stored(rng.normal(0, 2 * hidden**-0.5, (1, hidden)), small)

    def expert(name: str, rows: int, cols: int) -> None:
        if experts != "mxfp4":
            matrix(name, rows, cols, form=experts)
            return
        out[name + ".weight_packed"] = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
        exponent = round(-np.log2(2.93 * cols**0.5)) + 127  # 2.93: root mean square of the sixteen E2M1 values
        out[name + ".weight_scale"] = (exponent + rng.integers(-1, 2, (rows, cols // 32))).astype(np.uint8)

    matrix(prefix + "model.embed_tokens", c["vocab_size"], hidden, gain=hidden**0.5)
    for layer in range(c["num_hidden_layers"]):
        at = f"{prefix}model.layers.{layer}."
        attn = at + "self_attn."
        norm(at + "input_layernorm", hidden)
        norm(at + "post_attention_layernorm", hidden)
        if c.get("attn_res_block_size") is not None:
            res(at + "self_attention_res")
            res(at + "mlp_res")
        if layer + 1 in la["full_attn_layers"]:
            qk, mheads = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["num_attention_heads"]
            rank, values = c["kv_lora_rank"], mheads * c["v_head_dim"]
            if c["q_lora_rank"] is None:
                matrix(attn + "q_proj", mheads * qk, hidden, gain=2)
            else:
                matrix(attn + "q_a_proj", c["q_lora_rank"], hidden)
                norm(attn + "q_a_layernorm", c["q_lora_rank"])
                matrix(attn + "q_b_proj", mheads * qk, c["q_lora_rank"], gain=2)
            matrix(attn + "kv_a_proj_with_mqa", rank + c["qk_rope_head_dim"], hidden)
            norm(attn + "kv_a_layernorm", rank)
            matrix(attn + "kv_b_proj", mheads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank)
            if c.get("mla_use_output_gate", False):
                matrix(attn + "g_proj", values, hidden)
            matrix(attn + "o_proj", hidden, values)
        else:
            for n in "qkv":
                matrix(f"{attn}{n}_proj", proj, hidden)
                out[f"{attn}{n}_conv1d.weight"] = stored(
                    rng.normal(0, 0.5, (proj, 1, la["short_conv_kernel_size"])), small
                )
            matrix(attn + "f_a_proj", dim, hidden)
            matrix(attn + "f_b_proj", proj, dim, gain=2)
            matrix(attn + "b_proj", heads, hidden, gain=2)
            if la.get("use_full_rank_gate", False):
                matrix(attn + "g_proj", proj, hidden)
            else:
                matrix(attn + "g_a_proj", dim, hidden)
                matrix(attn + "g_b_proj", proj, dim)
            norm(attn + "o_norm", dim)
            matrix(attn + "o_proj", hidden, proj)
            a_log = rng.uniform(-1, 1, heads).astype(np.float32)
            if la.get("gate_lower_bound") is None:
                out[attn + "A_log"] = a_log.reshape(1, 1, heads, 1)
            else:  # padded with zeros past the heads, as the published file is
                out[attn + "A_log"] = np.concatenate([a_log, np.zeros(max(0, dim - heads), np.float32)])
            out[attn + "dt_bias"] = rng.normal(-1, 1, proj).astype(np.float32)
        if layer < c["first_k_dense_replace"]:
            matrix(at + "mlp.gate_proj", c["intermediate_size"], hidden, gain=2)
            matrix(at + "mlp.up_proj", c["intermediate_size"], hidden)
            matrix(at + "mlp.down_proj", hidden, c["intermediate_size"])
            continue
        moe_ = at + "block_sparse_moe."
        matrix(moe_ + "gate", c["num_experts"], hidden)
        out[moe_ + "gate.e_score_correction_bias"] = stored(rng.normal(0, 0.3, c["num_experts"]), small)
        latent = c.get("routed_expert_hidden_size")
        width = hidden if latent is None else latent
        if latent is not None:
            matrix(moe_ + "routed_expert_down_proj", latent, hidden, gain=2)
            if c["latent_moe_use_norm"]:
                norm(moe_ + "routed_expert_norm", latent)
            matrix(moe_ + "routed_expert_up_proj", hidden, latent)
        if c["num_shared_experts"]:
            shared = c["num_shared_experts"] * inner
            matrix(moe_ + "shared_experts.gate_proj", shared, hidden, gain=2)
            matrix(moe_ + "shared_experts.up_proj", shared, hidden)
            matrix(moe_ + "shared_experts.down_proj", hidden, shared)
        for e in range(c["num_experts"]):
            expert(f"{moe_}experts.{e}.w1", inner, width)
            expert(f"{moe_}experts.{e}.w3", inner, width)
            expert(f"{moe_}experts.{e}.w2", width, inner)
    norm(prefix + "model.norm", hidden)
    if c.get("attn_res_block_size") is not None:
        res(prefix + "model.output_attn_res")
    if not c.get("tie_word_embeddings"):
        matrix(prefix + "lm_head", c["vocab_size"], hidden)
    return out
