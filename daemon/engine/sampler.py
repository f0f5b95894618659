"""From one row of logits to one token. Everything here is a function of its arguments alone.

The random number of the i-th generated token comes from Philox keyed by the seed with i as its counter, so
a sequence draws the same tokens alone, in a batch, or after a restart. Exponentials come from our own
kernel and sums run in one order, so a draw does not depend on the instruction set either.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sluice import kernels
from sluice.daemon.engine.requests import Sampling

Row = NDArray[np.float32]


def choose(row: Row, sampling: Sampling, seed: int, index: int, allowed: NDArray[np.bool_] | None = None) -> int:
    """The id of the `index`-th generated token (0-based).

    row: (V,) float32 logits, finite. allowed: (V,) bool or None for all; at least one True. Greedy where
    temperature is 0: the highest logit, ties by the lower id. Otherwise, in this order: bias, allowed,
    temperature, top_k, top_p, min_p, one draw. Raises ValueError when nothing is allowed.
    """
    row = _biased(row, sampling)
    if allowed is not None:
        if not allowed.any():
            raise ValueError("the constraint allows no token at all")
        row = np.where(allowed, row, np.float32(-np.inf))
    if sampling.temperature == 0.0:
        return int(np.argmax(row))
    ids, weights = candidates(row, sampling)
    cumulative = np.cumsum(weights, dtype=np.float64)
    drawn = uniform(seed, index) * cumulative[-1]
    return int(ids[min(int(np.searchsorted(cumulative, drawn, side="right")), len(ids) - 1)])


def candidates(row: Row, sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens a draw may take and their unnormalised weights, best first (ties by lower id).

    row: (V,) float32, -inf where forbidden. Returns ids (n,) int64 and weights (n,) float64, n >= 1.
    top_k keeps the k best; top_p the shortest head whose share reaches p; min_p drops what is below
    min_p times the best.
    """
    order = np.argsort(-row, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    best_first = row[order].astype(np.float64)
    scaled = (best_first - best_first[0]) / sampling.temperature
    # Below -104 the float32 exponential is 0: such a token can never be drawn.
    scaled32 = np.ascontiguousarray(scaled[scaled > -104.0], dtype=np.float32)
    order = order[: len(scaled32)]
    exponentials = np.empty_like(scaled32)
    kernels.exp(scaled32, exponentials)
    weights = exponentials.astype(np.float64)
    if sampling.top_p < 1.0:
        cumulative = np.cumsum(weights)
        keep = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1], side="left")) + 1
        order, weights = order[:keep], weights[:keep]
    if sampling.min_p > 0.0:
        keep = max(1, int(np.count_nonzero(weights >= sampling.min_p * weights[0])))
        order, weights = order[:keep], weights[:keep]
    return order.astype(np.int64), weights


def uniform(seed: int, index: int) -> float:
    """The draw in [0, 1) that belongs to token `index` of the sequence with this seed (Philox 4x64, 53 bits)."""
    words = np.random.Philox(key=seed % 2**64, counter=index).random_raw(1)
    return float(int(words[0]) >> 11) * 2.0**-53


def logprobs(row: Row, chosen: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Natural log-probabilities under the model's own distribution: of `chosen`, and of the `top` best.

    row: (V,) float32 logits before bias, temperature and cuts. Ties in the list go by the lower id.
    """
    wide = row.astype(np.float64)
    highest = float(wide.max())
    log_total = highest + math.log(float(np.exp(wide - highest).sum()))
    if top == 0:
        return float(wide[chosen]) - log_total, ()
    threshold = np.partition(wide, len(wide) - min(top, len(wide)))[-min(top, len(wide))]
    contenders = np.flatnonzero(wide >= threshold)
    best = contenders[np.argsort(-wide[contenders], kind="stable")][:top]
    return float(wide[chosen]) - log_total, tuple((int(i), float(wide[i]) - log_total) for i in best)


def _biased(row: Row, sampling: Sampling) -> Row:
    if not sampling.logit_bias:
        return row
    biased = row.copy()
    for token_id, bias in sampling.logit_bias.items():
        biased[token_id] += np.float32(bias)
    return biased
