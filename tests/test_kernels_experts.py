"""Experts over the threads of a pool, and int8 activations."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
from helpers.kernel_variants import ISAS, assert_same_bits, numbers, random_mxfp4, restored, unpack_mxfp4
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice import kernels

D, INNER, T = 128, 192, 6
RNG = np.random.default_rng(5)
EXPERTS = [(random_mxfp4(RNG, INNER, D), random_mxfp4(RNG, INNER, D), random_mxfp4(RNG, D, INNER)) for _ in range(7)]
X = numbers(RNG, (T, D), "normal")
ROWS = [np.sort(RNG.permutation(T)[: 1 + e % 3]).astype(np.int32) for e in range(7)]
SLOTS = np.split(np.arange(sum(map(len, ROWS)), dtype=np.int32), np.cumsum([len(r) for r in ROWS])[:-1])


def _direct(int8: bool = False) -> np.ndarray:
    slots = np.zeros((sum(map(len, ROWS)), D), np.float32)
    for w, rows, ids in zip(EXPERTS, ROWS, SLOTS, strict=True):
        kernels.experts(X, [kernels.ExpertWeights(*w)], [rows], kernels.SILU, slots, [ids], int8)
    return slots


def _together(int8: bool = False) -> np.ndarray:
    slots = np.zeros((sum(map(len, ROWS)), D), np.float32)
    weights = [kernels.ExpertWeights(*w) for w in EXPERTS]
    kernels.experts(X, weights, ROWS, kernels.SILU, slots, SLOTS, int8)
    return slots


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("int8", [False, True])
def test_experts_in_one_call_give_the_bits_of_single_calls(threads, int8):
    with restored():
        kernels.configure_threads(threads)
        assert _together(int8).tobytes() == _direct(int8).tobytes()


@pytest.mark.parametrize("counts", [[1] * 16, [0, 3, 0], [64, 1], [63, 2, 64], [200, 5, 1, 70], []])
def test_any_numbers_of_rows_a_call_are_the_rows_alone(counts):
    """One token's experts share their laid-out row; more than 64 rows go in several runs; an expert may have none."""
    rng = np.random.default_rng(len(counts))
    x = numbers(rng, (70, D), "normal")
    weights = [kernels.ExpertWeights(*EXPERTS[i % 7]) for i in range(len(counts))]
    rows = [rng.integers(0, 1 if max(counts) == 1 else 70, n).astype(np.int32) for n in counts]
    ids = np.split(rng.permutation(sum(counts)).astype(np.int32), np.cumsum(counts)[:-1]) if counts else []
    got, alone = (np.zeros((max(1, sum(counts)), D), np.float32) for _ in range(2))
    kernels.experts(x, weights, rows, kernels.SILU, got, ids)
    for w, wanted, filled in zip(weights, rows, ids, strict=True):
        for row, slot in zip(wanted, filled, strict=True):
            kernels.experts(x, [w], [np.array([row], np.int32)], kernels.SILU, alone, [np.array([slot], np.int32)])
    assert got.tobytes() == alone.tobytes()


def test_weights_outlive_the_arrays_they_were_made_of():
    w1, w3, w2 = EXPERTS[0]
    packed = w1.packed.copy()
    weights = kernels.ExpertWeights(kernels.Mxfp4(packed, w1.scales.copy()), w3, w2)
    held = sys.getrefcount(packed)
    slots = np.zeros((len(ROWS[0]), D), np.float32)
    kernels.experts(X, [weights], [ROWS[0]], kernels.SILU, slots, [np.arange(len(ROWS[0]), dtype=np.int32)])
    assert slots.tobytes() == _direct()[SLOTS[0]].tobytes()
    del weights
    assert sys.getrefcount(packed) == held - 1


def test_widths_change_no_bit():
    expected = _direct()
    with restored():
        kernels.configure_threads(3)
        for others, experts in ((1, 2), (3, 1), (0, 0)):
            kernels.set_widths(others, experts)
            assert _direct().tobytes() == expected.tobytes()
        kernels.set_widths()
    with pytest.raises(ValueError, match="experts"):
        kernels.set_widths(experts=-1)


@pytest.mark.parametrize("homes", [[0, 1], [0, 1, 0, 1, 0], [2, 1, 0], [0, 0, 1], [*range(8)]])
@pytest.mark.parametrize("int8", [False, True])
def test_homes_change_no_bit_and_leave_no_piece_out(homes, int8):
    with restored():
        kernels.configure_threads(1)
        expected = _direct(int8)
        kernels.configure_threads(len(homes), homes=homes)
        for _ in range(20):
            assert _direct(int8).tobytes() == expected.tobytes()
            assert _together(int8).tobytes() == expected.tobytes()
        kernels.set_widths(experts=1)  # the caller alone takes every share
        try:
            assert _direct(int8).tobytes() == expected.tobytes()
        finally:
            kernels.set_widths()


@pytest.mark.parametrize(
    ("homes", "word"), [([0], "one for each"), ([0, 8], "outside 0..7"), ([0, 2], "1 has no thread")]
)
def test_homes_that_make_no_sense_are_refused(homes, word):
    with pytest.raises(ValueError, match=word):
        kernels.configure_threads(2, homes=homes)


# ---- int8 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["normal", "wide", "huge"]),
    st.integers(0, 9),
    st.integers(1, 12),
    st.integers(0, 20),
)
def test_int8_products_equal_their_definition(isa, seed, kind, t, n, groups):
    rng = np.random.default_rng(seed)
    x, w = numbers(rng, (t, groups * 32), kind), random_mxfp4(rng, n, groups * 32, 90, 130)

    def compute(m: ModuleType):
        out = np.full((t, n), np.nan, np.float32)
        m.matmul_int8(x, w, out)
        return [out]

    assert_same_bits(isa, compute)


def test_int8_activations_are_near_the_float_ones():
    rng = np.random.default_rng(3)
    x, w = numbers(rng, (5, 3584), "normal"), random_mxfp4(rng, 64, 3584)
    near, exact = np.empty((5, 64), np.float32), x.astype(np.float64) @ unpack_mxfp4(w).astype(np.float64).T
    kernels.matmul_int8(x, w, near)
    error = np.linalg.norm(near - exact) / np.linalg.norm(exact)
    assert error < 0.01  # half a step of 1/127 of a group's largest, averaged: about 0.6%


def test_int8_equals_arithmetic_written_out():
    rng = np.random.default_rng(4)
    x, w = numbers(rng, (3, 160), "normal"), random_mxfp4(rng, 9, 160)
    groups = x.reshape(3, 5, 32)
    top = np.abs(groups).max(axis=2, keepdims=True)
    rounded = np.rint(groups * (np.float32(127) / top))
    exact = (rounded * (top / np.float32(127)).astype(np.float64)).reshape(3, 160) @ unpack_mxfp4(w).T.astype(
        np.float64
    )
    out = np.empty((3, 9), np.float32)
    kernels.matmul_int8(x, w, out)
    np.testing.assert_allclose(out, exact, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_int8_does_not_hide_a_number_that_is_none(bad):
    x, out = np.ones((1, 64), np.float32), np.empty((1, INNER), np.float32)
    x[0, 40] = bad
    kernels.matmul_int8(x, kernels.Mxfp4(EXPERTS[0][0].packed[:, :32].copy(), EXPERTS[0][0].scales[:, :2].copy()), out)
    assert not np.isfinite(out).any()


def test_int8_wants_packed_weights():
    with pytest.raises(ValueError, match="MXFP4"):
        kernels.matmul_int8(X, np.ones((3, D), np.float32), np.empty((T, 3), np.float32))


def test_memory_is_read_and_threads_wake():
    array = np.arange(1 << 16, dtype=np.uint64)
    assert kernels.read_memory(array) == int(np.bitwise_xor.reduce(array))
    with restored():
        kernels.configure_threads(3)
        assert 0 < kernels.wake_seconds() < 1
