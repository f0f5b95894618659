"""The queue of a layer's experts, and int8 activations."""

from __future__ import annotations

import gc
import sys
import threading
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
    run = kernels.expert_mlp_int8 if int8 else kernels.expert_mlp
    for w, rows, ids in zip(EXPERTS, ROWS, SLOTS, strict=True):
        run(X, rows, *w, kernels.SILU, slots, ids)
    return slots


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("int8", [False, True])
def test_any_order_of_arrival_gives_the_bits_of_direct_calls(threads, int8):
    with restored():
        kernels.configure_threads(threads)
        expected = _direct(int8)
        for seed in range(5):
            slots = np.zeros_like(expected)
            with kernels.ExpertQueue(X, kernels.SILU, slots, int8) as queue:
                for e in np.random.default_rng(seed).permutation(7):
                    queue.push(ROWS[e], *EXPERTS[e], SLOTS[e])
                queue.finish()
                assert queue.completed == 7
            assert slots.tobytes() == expected.tobytes()


def test_weights_pushed_stay_alive_until_the_queue_is_done():
    slots = np.zeros_like(_direct())
    with kernels.ExpertQueue(X, kernels.SILU, slots) as queue:
        for w, rows, ids in zip(EXPERTS, ROWS, SLOTS, strict=True):
            queue.push(rows.copy(), *[kernels.Mxfp4(m.packed.copy(), m.scales.copy()) for m in w], ids.copy())
        gc.collect()
        queue.finish()
    assert slots.tobytes() == _direct().tobytes()


def test_a_closed_queue_lets_go_of_its_weights_and_takes_no_more():
    slots = np.zeros((20, D), np.float32)
    packed = EXPERTS[0][0].packed.copy()
    w1 = kernels.Mxfp4(packed, EXPERTS[0][0].scales)
    queue = kernels.ExpertQueue(X, kernels.SILU, slots)
    before = sys.getrefcount(packed)
    for _ in range(50):
        queue.push(ROWS[0], w1, *EXPERTS[0][1:], SLOTS[0])
    assert sys.getrefcount(packed) > before
    queue.close()
    queue.close()
    assert sys.getrefcount(packed) == before
    with pytest.raises(ValueError, match="closed"):
        queue.push(ROWS[0], w1, *EXPERTS[0][1:], SLOTS[0])


def test_what_cannot_be_computed_is_refused_at_the_push():
    slots = np.zeros((20, D), np.float32)
    with kernels.ExpertQueue(X, kernels.SILU, slots) as queue:
        with pytest.raises(ValueError, match="rows"):
            queue.push(ROWS[0] + T, *EXPERTS[0], SLOTS[0])
        with pytest.raises(ValueError, match="slot_ids"):
            queue.push(ROWS[0], *EXPERTS[0], SLOTS[0] + 20)
        with pytest.raises(ValueError, match="w2"):
            queue.push(ROWS[0], *EXPERTS[0][:2], EXPERTS[0][1], SLOTS[0])
        queue.finish()
        assert queue.completed == 0
    with pytest.raises(ValueError, match="slots"):
        kernels.ExpertQueue(X, kernels.SILU, slots[:, :32].copy())


def test_several_queues_and_callers_share_the_pool():
    expected = _direct()
    results = []

    def work():
        slots = np.zeros_like(expected)
        with kernels.ExpertQueue(X, kernels.SILU, slots) as queue:
            for w, rows, ids in zip(EXPERTS, ROWS, SLOTS, strict=True):
                queue.push(rows, *w, ids)
            queue.finish()
        results.append(slots)

    with restored():
        kernels.configure_threads(2)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        _direct()
        for t in threads:
            t.join()
    assert len(results) == 4
    assert all(r.tobytes() == expected.tobytes() for r in results)


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
