"""Choosing tokens: greedy, cuts, seeds, bias, constraints."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sluice.daemon.engine import sampler
from sluice.daemon.engine.requests import Sampling

ROW = np.array([0.5, 3.0, -1.0, 3.0, 2.0], dtype=np.float32)
rows = arrays(np.float32, st.integers(1, 60), elements=st.floats(-50, 50, width=32))


def test_greedy_takes_the_lowest_id_of_a_tie():
    assert sampler.choose(ROW, Sampling(temperature=0.0), seed=1, index=0) == 1


def test_greedy_honours_bias_and_constraint():
    assert sampler.choose(ROW, Sampling(temperature=0.0, logit_bias={4: 2.0}), 1, 0) == 4
    allowed = np.array([True, False, True, False, False])
    assert sampler.choose(ROW, Sampling(temperature=0.0), 1, 0, allowed) == 0
    with pytest.raises(ValueError, match="allows no token"):
        sampler.choose(ROW, Sampling(), 1, 0, np.zeros(5, dtype=bool))


@given(rows, st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_a_draw_depends_on_seed_and_index_alone(row, seed, index):
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=20)
    assert sampler.choose(row, sampling, seed, index) == sampler.choose(row.copy(), sampling, seed, index)


@given(rows, st.floats(0.05, 2.0), st.floats(0.01, 1.0), st.integers(0, 30), st.floats(0.0, 0.9))
def test_the_cuts_keep_the_head_and_nothing_else(row, temperature, top_p, top_k, min_p):
    ids, weights = sampler.candidates(row, Sampling(temperature, top_p, top_k, min_p))
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    assert list(ids) == order[: len(ids)]
    assert len(ids) >= 1
    if top_k:
        assert len(ids) <= top_k
    shares = np.exp((row[ids].astype(np.float64) - row.max()) / temperature)
    np.testing.assert_allclose(weights, shares, rtol=2e-5)
    assert np.all(weights >= min_p * weights[0])


def test_top_p_keeps_the_shortest_head_that_reaches_it():
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    assert len(sampler.candidates(row, Sampling(top_p=0.45))[0]) == 1
    assert len(sampler.candidates(row, Sampling(top_p=0.6))[0]) == 2
    assert len(sampler.candidates(row, Sampling(top_p=0.96))[0]) == 4


def test_draws_follow_the_distribution():
    row = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    drawn = [sampler.choose(row, Sampling(), seed=7, index=i) for i in range(20000)]
    shares = np.bincount(drawn, minlength=3) / len(drawn)
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=0.015)


def test_a_minus_infinity_is_never_drawn():
    row = np.array([-np.inf, 0.0, -np.inf, -1.0], dtype=np.float32)
    assert {sampler.choose(row, Sampling(temperature=2.0), 3, i) for i in range(200)} == {1, 3}


def test_uniform_draws_are_in_range_and_differ_by_index():
    draws = [sampler.uniform(11, i) for i in range(1000)]
    assert len(set(draws)) == 1000
    assert all(0.0 <= d < 1.0 for d in draws)


@given(rows, st.integers(0, 10))
def test_logprobs_are_the_models_own(row, top):
    chosen = len(row) // 2
    logprob, best = sampler.logprobs(row, chosen, top)
    wide = row.astype(np.float64)
    expected = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    assert logprob == pytest.approx(expected[chosen], abs=1e-9)
    assert [i for i, _ in best] == sorted(range(len(row)), key=lambda i: (-row[i], i))[:top]
