"""Mistakes that give fluent text instead of a crash (specification section 7): would these tests see them?

Each entry breaks the float64 reference in one way; our network must then be far from it, many times further than it
is from the intact one. Networks are 13 layers in blocks of 3, where the residual's mistakes can be seen (trap 53).
The number before a mistake is the trap's in the specification.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import reference as ref
from helpers.sources import network

from sluice.daemon.model.batch import Segment

TOKENS = [5, 17, 3, 88, 41, 41, 2, 60, 9, 100]

K3 = ref.k3_config(num_hidden_layers=13, linear_attn_config={"full_attn_layers": [4, 8, 12, 13]})
KIMI_LINEAR = ref.kimi_linear_config(linear_attn_config={"full_attn_layers": [3, 8]})


def tensors_of(config: ref.Config, experts: str) -> ref.Tensors:
    return ref.random_tensors(config, np.random.default_rng(3), experts=experts)


CASES = {"k3": (K3, tensors_of(K3, "mxfp4")), "kimi-linear": (KIMI_LINEAR, tensors_of(KIMI_LINEAR, "bf16"))}


@pytest.fixture(scope="module")
def ours() -> dict[str, np.ndarray]:
    rows = {}
    for name, (config, tensors) in CASES.items():
        net, _, _ = network(config, tensors)
        state = net.new_state(len(TOKENS))
        rows[name] = net.forward([Segment(state, np.array(TOKENS, np.int32), "all")]).logits[0]
    return rows


def distance(
    logits: np.ndarray, flavour: str, change: Callable[[ref.Config, ref.Tensors], None] = lambda c, t: None
) -> float:
    """In parts of the logit range, from the reference on a changed copy of the model."""
    config, tensors = copy.deepcopy(CASES[flavour][0]), dict(CASES[flavour][1])
    change(config, tensors)
    exact = ref.Reference(config, tensors).logits(TOKENS)
    return float(np.abs(logits - exact).max() / np.ptp(exact))


Patch = Callable[[pytest.MonkeyPatch], None]


def part(name: str, broken: Callable[..., Any]) -> Patch:
    """Replace a function of the reference; `broken` gets the right one first."""
    right = getattr(ref, name)
    return lambda patch: patch.setattr(ref, name, lambda *args: broken(right, *args))


def late_delta(right: Any, q: ref.F64, k: ref.F64, v: ref.F64, alpha: ref.F64, beta: ref.F64, state: ref.F64) -> Any:
    """u taken from the state before its decay."""
    out, state = np.zeros_like(v), state.copy()
    for t in range(len(q)):
        for h in range(q.shape[1]):
            u = state[h].T @ k[t, h]
            state[h] = alpha[t, h][:, None] * state[h] + np.outer(k[t, h], beta[t, h] * (v[t, h] - u))
            out[t, h] = state[h].T @ q[t, h]
    return out, state


def early_read(right: Any, q: ref.F64, k: ref.F64, v: ref.F64, alpha: ref.F64, beta: ref.F64, state: ref.F64) -> Any:
    """The output read before the update."""
    out = np.zeros_like(v)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            out[t, h] = (alpha[t, h][:, None] * state[h]).T @ q[t, h]
        _, state = right(q[t : t + 1], k[t : t + 1], v[t : t + 1], alpha[t : t + 1], beta[t : t + 1], state)
    return out, state


def value_decay(right: Any, q: ref.F64, k: ref.F64, v: ref.F64, alpha: ref.F64, beta: ref.F64, state: ref.F64) -> Any:
    """Decay along the value axis."""
    out, state = np.zeros_like(v), state.copy()
    for t in range(len(q)):
        for h in range(q.shape[1]):
            s = state[h] * alpha[t, h][None, :]
            s = s + np.outer(k[t, h], beta[t, h] * (v[t, h] - s.T @ k[t, h]))
            state[h], out[t, h] = s, s.T @ q[t, h]
    return out, state


def biased_weights(right: Any, c: ref.Config, logits: ref.F64, bias: ref.F64) -> Any:
    ids, weights = right(c, logits, bias)
    weights = (ref.sigmoid(logits) + bias)[ids]
    return ids, weights / weights.sum() * c["routed_scaling_factor"]


MISTAKES: dict[str, Patch] = {
    "16 high nibble first": part("mxfp4", lambda right, p, s: right((p << 4 | p >> 4).astype(np.uint8), s)),
    "18 nibble without its sign": part("mxfp4", lambda right, p, s: np.abs(right(p, s))),
    "20 softplus decay for the bounded one": part("kda_gate", lambda right, z, a, d, bound: right(z, a, d, None)),
    "21 dt_bias outside the product": part(
        "kda_gate", lambda right, z, a, d, bound: bound * ref.sigmoid(np.exp(a)[:, None] * z + d)
    ),
    "22 u before the decay": part("kda_recurrence", late_delta),
    "22 read before the update": part("kda_recurrence", early_read),
    "22 decay along the value axis": part("kda_recurrence", value_decay),
    "23 mean instead of sum in the l2 norm": part(
        "l2", lambda right, x: x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    ),
    "25 taps reversed": part("conv_silu", lambda right, y, kernel: right(y, kernel[:, ::-1])),
    "25 no activation after the convolution": part(
        "conv_silu", lambda right, y, kernel: np.stack([_conv(y, kernel, t) for t in range(len(y))])
    ),
    "38 bias left in the routed weights": part("route", biased_weights),
    "38 bias ignored in the choice": part("route", lambda right, c, logits, bias: right(c, logits, 0 * bias)),
    "44 sigmoid of the capped gate": part(
        "situ",
        lambda right, g, u, b1, b2: b1 * np.tanh(g / b1) * ref.sigmoid(b1 * np.tanh(g / b1)) * b2 * np.tanh(u / b2),
    ),
    "44 caps swapped": part("situ", lambda right, g, u, b1, b2: right(g, u, b2, b1)),
    "49 keys not normalised": part("mix", lambda right, sources, norm, proj, eps: _raw_keys(sources, norm * proj)),
    "49 values normalised": part(
        "mix", lambda right, sources, norm, proj, eps: _normal_values(right, sources, norm, proj, eps)
    ),
    "49 an extra 1/sqrt(d)": part(
        "mix", lambda right, sources, norm, proj, eps: right(sources, norm, proj / np.sqrt(len(proj)), eps)
    ),
    "50 the mix before the head forgotten": lambda patch: patch.setattr(ref, "mix", _no_last_mix(ref.mix)),
}


def _conv(y: ref.F64, kernel: ref.F64, t: int) -> ref.F64:
    taps = kernel.shape[1]
    return sum(kernel[:, taps - 1 - i] * y[t - i] for i in range(min(taps, t + 1)))


def _raw_keys(sources: list[ref.F64], folded: ref.F64) -> ref.F64:
    weights = ref.softmax(np.array([np.sum(v * folded) for v in sources]))
    return sum(c * v for c, v in zip(weights, sources, strict=True))


def _normal_values(right: Any, sources: list[ref.F64], norm: ref.F64, proj: ref.F64, eps: float) -> ref.F64:
    return right([v / np.sqrt(np.mean(v * v) + eps) for v in sources], norm, proj, eps)


def _no_last_mix(right: Any) -> Any:
    full = -(-K3["num_hidden_layers"] // K3["attn_res_block_size"]) + 1
    seen = []

    def mix(sources: list[ref.F64], norm: ref.F64, proj: ref.F64, eps: float) -> ref.F64:
        seen.append(len(sources))
        # with every block in the bank: the last layer's feed-forward site, then the output's
        return (
            sources[-1] if seen.count(full) > len(TOKENS) and len(sources) == full else right(sources, norm, proj, eps)
        )

    return mix


def test_the_intact_reference_is_near(ours: dict[str, np.ndarray]) -> None:
    for flavour in CASES:
        assert distance(ours[flavour], flavour) < 2e-5


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_arithmetic_would_be_seen(
    ours: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    MISTAKES[mistake](monkeypatch)
    assert distance(ours["k3"], "k3") > 1e-3


def swap(one: str, other: str) -> Callable[[ref.Config, ref.Tensors], None]:
    def change(config: ref.Config, tensors: ref.Tensors) -> None:
        pairs = [(name, name.replace(one, other)) for name in tensors if one in name]
        assert pairs
        for a, b in pairs:
            assert tensors[a].shape == tensors[b].shape
            tensors[a], tensors[b] = tensors[b], tensors[a]

    return change


def edit(name: str, new: Callable[[np.ndarray], np.ndarray]) -> Callable[[ref.Config, ref.Tensors], None]:
    def change(config: ref.Config, tensors: ref.Tensors) -> None:
        names = [n for n in tensors if n.endswith(name)]
        assert names
        for n in names:
            tensors[n] = np.ascontiguousarray(new(tensors[n]))

    return change


def setting(key: str, value: Any) -> Callable[[ref.Config, ref.Tensors], None]:
    def change(config: ref.Config, tensors: ref.Tensors) -> None:
        linear = ("gate_lower_bound", "use_full_rank_gate")
        at = config["linear_attn_config"] if key in linear else config
        assert at.get(key) != value
        at[key] = value

    return change


def split_kv_b(stored: np.ndarray) -> np.ndarray:
    """What a reader would see that takes all keys, then all values, instead of both per head."""
    heads, nope, v = K3["num_attention_heads"], K3["qk_nope_head_dim"], K3["v_head_dim"]
    keys, values = stored[: heads * nope].reshape(heads, nope, -1), stored[heads * nope :].reshape(heads, v, -1)
    return np.concatenate([keys, values], axis=1).reshape(stored.shape)


def rope_first(stored: np.ndarray) -> np.ndarray:
    heads = K3["num_attention_heads"]
    return np.roll(stored.reshape(heads, -1, stored.shape[1]), K3["qk_rope_head_dim"], axis=1).reshape(stored.shape)


def no_rope(stored: np.ndarray) -> np.ndarray:
    cut = stored.copy()
    cut[K3["kv_lora_rank"] :] = 0
    return cut


CHANGES: dict[str, tuple[str, Callable[[ref.Config, ref.Tensors], None]]] = {
    "7 w1 and w3 swapped": ("k3", swap(".w1.", ".w3.")),
    "7 q and k swapped": ("k3", swap("q_conv1d", "k_conv1d")),
    "7 shared gate and up swapped": ("k3", swap("shared_experts.gate_proj", "shared_experts.up_proj")),
    "7 dense gate and up swapped": ("k3", swap("mlp.gate_proj", "mlp.up_proj")),
    "8 head tied to the embedding": ("k3", swap("lm_head", "model.embed_tokens")),
    "10 a_log of the neighbouring head": ("k3", edit("A_log", lambda a: np.roll(a[:3], 1))),
    "17 scale bias off by one": ("k3", edit("w3.weight_scale", lambda s: s + 1)),
    "20 the bounded decay for softplus": ("kimi-linear", setting("gate_lower_bound", -5.0)),
    "32 shared key part dropped": ("k3", edit("kv_a_proj_with_mqa.weight", no_rope)),
    "35 kv_b split as all keys, then all values": ("k3", edit("kv_b_proj.weight", split_kv_b)),
    "37 query rows split rope first": ("k3", edit("q_b_proj.weight", rope_first)),
    "36 MLA gate missing": ("k3", setting("mla_use_output_gate", False)),
    "41 scaling factor missing": ("kimi-linear", setting("routed_scaling_factor", 1.0)),
    "41 renormalisation missing": ("kimi-linear", setting("moe_renormalize", False)),
    "42 norm on the sum omitted": ("k3", setting("latent_moe_use_norm", False)),
    "51 boundaries at other layers": ("k3", setting("attn_res_block_size", 4)),
    "46 plain residual": ("k3", setting("attn_res_block_size", None)),
}


@pytest.mark.parametrize("mistake", CHANGES)
def test_a_mistake_in_the_binding_would_be_seen(ours: dict[str, np.ndarray], mistake: str) -> None:
    flavour, change = CHANGES[mistake]
    assert distance(ours[flavour], flavour, change) > 1e-3


def test_renormalisation_is_nearly_hidden_by_the_norm_on_the_sum_and_still_seen(ours: dict[str, np.ndarray]) -> None:
    """Trap 41: a common factor on all weights almost cancels; it is tested on the router, and here by its trace."""
    assert distance(ours["k3"], "k3", setting("moe_renormalize", False)) > 1e-6 + 2 * distance(ours["k3"], "k3")
