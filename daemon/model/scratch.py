"""Activations of one pass: where the layer graph writes its intermediate results.

Owns one piece of memory that all layers share, and its size for the memory plan. Buffers of the attention and of
the feed-forward part overlay each other, since they are never alive together; what a buffer holds is stated beside
it. T is the number of rows (tokens of all sequences) in the pass; everything is C-contiguous float32 but the ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice.daemon.model.config import ModelConfig

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Shapes = dict[str, tuple[int, ...]]

VIEWS_KEPT = 32  # how many different T keep their views: a decode size or two and a few chunk tails


@dataclass(frozen=True, slots=True)
class ResidualBuffers:
    """p: the running sum. h: its mix with the bank. x: h normalised. y: what attention or feed-forward returns.
    bank: (blocks, T, hidden), snapshots in order of creation."""

    p: F32
    h: F32
    x: F32
    y: F32
    bank: F32


@dataclass(frozen=True, slots=True)
class KdaBuffers:
    """q_in, k_in, v_in: before the convolution. q, k, v, z, alpha, o: (T, heads, dim). gate: (T, heads x dim).
    beta_in, beta: (T, heads). low: (T, dim), between the two matrices of a low-rank product.
    `*_rows` are the same memory as (T, heads x dim), `*_vectors` as (T x heads, dim)."""

    q_in: F32
    k_in: F32
    v_in: F32
    q: F32
    k: F32
    v: F32
    z: F32
    alpha: F32
    o: F32
    gate: F32
    beta_in: F32
    beta: F32
    low: F32
    q_rows: F32
    k_rows: F32
    v_rows: F32
    z_rows: F32
    o_rows: F32
    q_vectors: F32
    k_vectors: F32
    o_vectors: F32


@dataclass(frozen=True, slots=True)
class MlaBuffers:
    """low: the query's latent. q: (T, heads, nope + rope), q_rows the same as (T, ..). q_nope: (T, heads, nope).
    absorbed: (T, heads, rank). query: (T, heads, rank + rope). kv: (T, rank + rope). latent: (T, rank).
    context: (T, heads, rank). o: (T, heads, v), o_rows the same as (T, ..). gate: like o_rows."""

    low: F32
    q: F32
    q_nope: F32
    absorbed: F32
    query: F32
    kv: F32
    latent: F32
    context: F32
    o: F32
    gate: F32
    q_rows: F32
    o_rows: F32


@dataclass(frozen=True, slots=True)
class FfnBuffers:
    """gate, up: (T, inner) of the dense MLP. shared_gate, shared_up: (T, inner) of the shared experts; shared:
    (T, hidden), their result. logits: (T, experts). z: (T, width), what experts read; u: (T, width), their sum.
    slots: (T x chosen, width), one expert's answer for one row each; answers: the same as (T, chosen, width)."""

    gate: F32
    up: F32
    shared_gate: F32
    shared_up: F32
    shared: F32
    logits: F32
    z: F32
    u: F32
    weights: F32
    slots: F32
    answers: F32


def _residual_shapes(c: ModelConfig, t: int) -> Shapes:
    h = c.hidden_size
    return {"p": (t, h), "h": (t, h), "x": (t, h), "y": (t, h), "bank": (c.bank_size, t, h)}


def _kda_shapes(c: ModelConfig, t: int) -> Shapes:
    heads, dim, width = c.kda_heads, c.kda_head_dim, c.kda_width
    shapes: Shapes = dict.fromkeys(("q_in", "k_in", "v_in", "gate"), (t, width))
    shapes |= dict.fromkeys(("q", "k", "v", "z", "alpha", "o"), (t, heads, dim))
    return shapes | {"beta_in": (t, heads), "beta": (t, heads), "low": (t, dim)}


def _mla_shapes(c: ModelConfig, t: int) -> Shapes:
    heads, rank = c.num_attention_heads, c.kv_lora_rank
    return {
        "low": (t, c.q_lora_rank or 0),
        "q": (t, heads, c.qk_head_dim),
        "q_nope": (t, heads, c.qk_nope_head_dim),
        "absorbed": (t, heads, rank),
        "query": (t, heads, c.cache_width),
        "kv": (t, c.cache_width),
        "latent": (t, rank),
        "context": (t, heads, rank),
        "o": (t, heads, c.v_head_dim),
        "gate": (t, heads * c.v_head_dim),
    }


def _ffn_shapes(c: ModelConfig, t: int) -> list[Shapes]:
    """The dense MLP's and the mixture's, which overlay each other."""
    dense: Shapes = {"gate": (t, c.intermediate_size), "up": (t, c.intermediate_size)}
    inner, width, chosen = c.shared_intermediate_size, c.expert_width, c.num_experts_per_token
    mixture: Shapes = {
        "shared_gate": (t, inner),
        "shared_up": (t, inner),
        "shared": (t, c.hidden_size),
        "logits": (t, c.num_experts),
        "z": (t, width),
        "u": (t, width),
        "weights": (t, chosen),
        "slots": (t * chosen, width),
    }
    return [dense, mixture]


def _padded(shape: tuple[int, ...]) -> int:
    """float32 numbers a buffer takes: whole cache lines, so that no two threads share one at a seam."""
    return -(-math.prod(shape) // 16) * 16


def _numbers(shapes: Shapes) -> int:
    return sum(_padded(shape) for shape in shapes.values())


def _parts(c: ModelConfig, t: int) -> tuple[Shapes, list[Shapes]]:
    """What is alive all through a layer, and what may lie over each other."""
    return _residual_shapes(c, t), [_kda_shapes(c, t), _mla_shapes(c, t), *_ffn_shapes(c, t)]


def activation_bytes(config: ModelConfig, rows: int, logit_rows: int) -> int:
    """Bytes a pass of at most `rows` tokens needs beside weights and states, `logit_rows` of them with logits."""
    hidden = config.hidden_size
    ids = rows * config.num_experts_per_token
    embedded = rows * hidden
    # columns of a matrix that arrives in runs of rows, for more than one token (`weights.Linear`)
    beside = rows * max(config.intermediate_size, config.kda_width, hidden) if rows > 1 else 0
    gathered = logit_rows * hidden * (config.bank_size + 2)
    logits = logit_rows * config.vocab_size
    folded = 2 * config.num_hidden_layers * hidden if config.bank_size else 0  # norm ⊙ proj of every site
    return 4 * (_arena_numbers(config, rows) + ids + embedded + beside + gathered + logits + folded)


def _arena_numbers(config: ModelConfig, rows: int) -> int:
    common, overlaid = _parts(config, rows)
    return _numbers(common) + max(_numbers(shapes) for shapes in overlaid)


class Scratch:
    """Views for T rows. Build through `Arena.rows`."""

    def __init__(self, c: ModelConfig, t: int, memory: F32) -> None:
        common, (kda, mla, dense, mixture) = _parts(c, t)
        residual = _carve(common, memory)
        over = memory[_numbers(common) :]
        self.rows = t
        self.residual = ResidualBuffers(**residual)
        k = _carve(kda, over)
        flat = {f"{n}_rows": k[n].reshape(t, c.kda_width) for n in ("q", "k", "v", "z", "o")}
        vectors = {f"{n}_vectors": k[n].reshape(t * c.kda_heads, c.kda_head_dim) for n in ("q", "k", "o")}
        self.kda = KdaBuffers(**k, **flat, **vectors)
        m = _carve(mla, over)
        self.mla = MlaBuffers(**m, q_rows=m["q"].reshape(t, -1), o_rows=m["o"].reshape(t, -1))
        f = _carve(mixture, over)
        answers = f["slots"].reshape(t, c.num_experts_per_token, c.expert_width)
        self.ffn = FfnBuffers(**_carve(dense, over), **f, answers=answers)
        self.ids: I32 = np.empty((t, c.num_experts_per_token), np.int32)


def _carve(shapes: Shapes, memory: F32) -> dict[str, F32]:
    arrays, at = {}, 0
    for name, shape in shapes.items():
        arrays[name] = memory[at : at + math.prod(shape)].reshape(shape)
        at += _padded(shape)
    return arrays


class Arena:
    """The memory behind every Scratch; grows to the largest T met and keeps it."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._memory = np.empty(0, np.float32)
        self._views: dict[int, Scratch] = {}

    def rows(self, t: int) -> Scratch:
        """Buffers for T = t >= 1 rows. All Scratches share memory: only the latest asked for may be in use."""
        scratch = self._views.get(t)
        if scratch is None:
            needed = _arena_numbers(self._config, t)
            if needed > self._memory.size:
                self._views.clear()  # they hold the old memory, which must be gone before the new is there
                self._memory = np.empty(0, np.float32)
                self._memory = np.empty(needed, np.float32)
            if len(self._views) >= VIEWS_KEPT:
                self._views.clear()
            scratch = self._views[t] = Scratch(self._config, t, self._memory)
        return scratch
