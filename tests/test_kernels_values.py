"""What the kernels compute, against arithmetic of higher precision, and what they refuse."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from helpers.kernel_variants import bfloat16_bits, misaligned, numbers, random_mxfp4, restored, unpack_mxfp4
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice import kernels
from sluice.kernels import ExpertWeights, Mxfp4, Situ

RNG = np.random.default_rng(20)
F32 = np.float32


def _ulps(got: np.ndarray, truth: list[mpmath.mpf]) -> float:
    """The largest error in units of the last place of the truth rounded to float32."""
    worst = 0.0
    for g, t in zip(got, truth, strict=True):
        rounded = F32(float(t))
        if not np.isfinite(rounded):
            assert g == rounded
            continue
        unit = max(float(np.spacing(abs(rounded))), 2.0**-149)
        worst = max(worst, float(abs(mpmath.mpf(float(g)) - t)) / unit)
    return worst


TRUTH = {
    "exp": mpmath.exp,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "tanh": mpmath.tanh,
    "softplus": lambda x: mpmath.log1p(mpmath.exp(x)),
}


@pytest.mark.parametrize("name", TRUTH)
def test_transcendental_functions_are_within_two_ulp(name):
    rng = np.random.default_rng(11)
    parts = [
        np.linspace(-110, 110, 1500),
        np.linspace(-4, 4, 1500),
        np.ldexp(rng.standard_normal(800), rng.integers(-149, 8, 800)),
        [0.0, -0.0, 1e-45, 88.7, 88.8, -87.4, -103.9, -104.1, 0.625, -0.625, 0.62499994, 20.0, 20.000002, 3e38, -3e38],
    ]
    x = np.concatenate([np.asarray(p, F32) for p in parts])
    got = np.empty_like(x)
    getattr(kernels, name)(x, got)
    with mpmath.workdps(60), np.errstate(over="ignore"):
        assert _ulps(got, [TRUTH[name](mpmath.mpf(float(v))) for v in x]) <= 2.0


def test_transcendental_functions_at_the_ends():
    x = np.array([np.inf, -np.inf, np.nan], F32)
    for name, ends in {"exp": (np.inf, 0), "sigmoid": (1, 0), "tanh": (1, -1), "softplus": (np.inf, 0)}.items():
        out = np.empty_like(x)
        getattr(kernels, name)(x, out)
        assert tuple(out[:2]) == ends, name
        assert np.isnan(out[2]), name


def test_the_dot_product_is_thirty_two_lanes_and_a_tree():
    """Written out here once more, so that the definition itself cannot drift with the code."""
    for k in (1, 31, 32, 100, 257):
        x, w = numbers(RNG, (1, k), "normal"), numbers(RNG, (1, k), "normal")
        lanes = np.zeros(32, F32)
        for i in range(-(-k // 32) * 32):
            a, b = (x[0, i], w[0, i]) if i < k else (F32(0), F32(0))
            with mpmath.workprec(200):  # a fused multiply-add: exact, then one rounding
                lanes[i % 32] = F32(float(mpmath.mpf(float(a)) * float(b) + float(lanes[i % 32])))
        width = 16
        while width:
            lanes[:width] = lanes[:width] + lanes[width : 2 * width]
            width //= 2
        out = np.empty((1, 1), F32)
        kernels.matmul(x, w, out)
        assert abs(float(out[0, 0]) - float(lanes[0])) <= 1e-7 * abs(float(lanes[0]))


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(0, 6), st.integers(0, 30), st.integers(0, 300))
def test_matmul_is_the_product(seed, t, n, k):
    rng = np.random.default_rng(seed)
    x, w = numbers(rng, (t, k), "normal"), numbers(rng, (n, k), "normal")
    brain = bfloat16_bits(w)
    for form, wide in (
        (w, w),
        (w.astype(np.float16), w.astype(np.float16)),
        (brain, (brain.astype(np.uint32) << 16).view(F32)),
    ):
        out = np.full((t, n), np.nan, F32)
        kernels.matmul(x, misaligned(form), out)
        exact = x.astype(np.float64) @ wide.astype(np.float64).T
        bound = np.abs(x).astype(np.float64) @ np.abs(wide).astype(np.float64).T
        assert np.all(np.abs(out - exact) <= 1e-6 * bound + 1e-30)


def test_every_scale_and_nibble_has_its_value():
    packed = np.tile(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, np.uint8), (255, 1))
    w = Mxfp4(packed, np.arange(255, dtype=np.uint8).reshape(255, 1))
    x = np.zeros((32, 32), F32)
    np.fill_diagonal(x, 1)
    out = np.empty((32, 255), F32)
    kernels.matmul(x, w, out)
    with np.errstate(all="ignore"):
        expected = unpack_mxfp4(w)
    finite = np.isfinite(expected).all(axis=1)
    assert finite.sum() >= 253  # 4 and 6 leave the range of float32 at the very top scales
    assert np.array_equal(out.T[finite], expected[finite])


def test_scale_byte_255_is_found():
    scales = np.full((10, 7), 254, np.uint8)
    assert kernels.mxfp4_scales_valid(scales)
    scales[9, 6] = 255
    assert not kernels.mxfp4_scales_valid(scales)
    assert kernels.mxfp4_scales_valid(np.empty((0, 7), np.uint8))


def test_rounding_mode_of_the_caller_does_not_leak_in():
    """Another library may leave flush-to-zero or a rounding mode behind in this thread."""
    import ctypes

    libm = ctypes.CDLL("libm.so.6")
    x, w = numbers(RNG, (3, 1000), "normal"), numbers(RNG, (50, 1000), "normal")
    right, other = np.empty((3, 50), F32), np.empty((3, 50), F32)
    kernels.matmul(x, w, right)
    assert libm.fesetround(0x800) == 0  # FE_UPWARD on x86
    try:
        kernels.matmul(x, w, other)
    finally:
        libm.fesetround(0)
    assert right.tobytes() == other.tobytes()


def test_a_row_of_scores_without_order_is_reported():
    ids, weights = np.empty((1, 2), np.int32), np.empty((1, 2), F32)
    logits = np.array([[0.0, np.nan, 1.0]], F32)
    assert kernels.route(logits, np.zeros(3, F32), 2, True, 1.0, ids, weights) is False


def test_equal_scores_go_to_the_lower_id():
    ids, weights = np.empty((1, 3), np.int32), np.empty((1, 3), F32)
    assert kernels.route(np.zeros((1, 6), F32), np.zeros(6, F32), 3, True, 1.0, ids, weights)
    assert ids.tolist() == [[0, 1, 2]]
    logits = np.array([[90.0, 95.0, 80.0, 99.0, 0.0, 90.0]], F32)  # all but one saturate at exactly 1
    assert kernels.route(logits, np.zeros(6, F32), 3, True, 1.0, ids, weights)
    assert ids.tolist() == [[0, 1, 2]]


def test_routing_agrees_with_a_sort():
    logits, bias = numbers(RNG, (50, 896), "normal") * 3, numbers(RNG, (896,), "normal") * F32(0.1)
    ids, weights = np.empty((50, 16), np.int32), np.empty((50, 16), F32)
    assert kernels.route(logits, bias, 16, True, 1.0, ids, weights)
    scores = np.empty_like(logits)
    kernels.sigmoid(logits, scores)
    order = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :16]
    assert np.array_equal(ids, order)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-6)


def test_finite_sees_one_bad_number_anywhere():
    for n in (1, 7, 8, 33, 100_001):
        x = np.ones(n, F32)
        assert kernels.finite(x)
        for bad in (np.inf, -np.inf, np.nan):
            x[-1] = bad
            assert not kernels.finite(x)
            x[-1] = 1
    assert kernels.finite(np.empty(0, F32))


def test_the_recurrence_in_pieces_is_the_recurrence():
    t, h, d = 9, 3, 40
    q, k, v = (numbers(RNG, (t, h, d), "normal") for _ in range(3))
    alpha, beta = np.exp(-np.abs(numbers(RNG, (t, h, d), "normal"))), RNG.random((t, h), F32)
    whole, pieces = np.zeros((h, d, d), F32), np.zeros((h, d, d), F32)
    a, b = np.empty_like(q), np.empty_like(q)
    kernels.kda_recurrence(q, k, v, alpha, beta, whole, a)
    for s in (slice(0, 1), slice(1, 5), slice(5, 5), slice(5, 9)):
        kernels.kda_recurrence(q[s], k[s], v[s], alpha[s], beta[s], pieces, b[s])
    assert a.tobytes() == b.tobytes()
    assert whole.tobytes() == pieces.tobytes()


def test_the_convolution_in_pieces_is_the_convolution():
    x, w = numbers(RNG, (9, 50), "normal"), numbers(RNG, (50, 4), "normal")
    window, out, again = np.zeros((3, 50), F32), np.empty_like(x), np.empty_like(x)
    kernels.short_conv(x, w, window, out)
    carried = np.zeros((3, 50), F32)
    for s in (slice(0, 1), slice(1, 3), slice(3, 3), slice(3, 9)):
        kernels.short_conv(x[s], w, carried, again[s])
    assert out.tobytes() == again.tobytes()
    assert np.array_equal(window, x[-3:])
    assert np.array_equal(carried, x[-3:])


# ---- refusals ----------------------------------------------------------------------------------------------------

X, W, OUT = np.ones((2, 64), F32), np.ones((3, 64), F32), np.empty((2, 3), F32)
MX = random_mxfp4(np.random.default_rng(0), 3, 64)
IDS = np.zeros(1, np.int32)
W1, W2 = np.ones((32, 64), F32), np.ones((64, 32), F32)
EXPERT = ExpertWeights(W1, W1, W2)
NARROW = ExpertWeights(W1[:16].copy(), W1[:16].copy(), W2[:, :16].copy())


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: kernels.matmul(X.astype(np.float64), W, OUT), "x"),
        (lambda: kernels.matmul(X[:, ::2], W[:, ::2].copy(), OUT), "x"),
        (lambda: kernels.matmul(X, W[:, :32].copy(), OUT), "x"),
        (lambda: kernels.matmul(X, W.astype(np.int16), OUT), "w"),
        (lambda: kernels.matmul(X, W.astype(">f4"), OUT), "w"),
        (lambda: kernels.matmul(X, [[1.0]], OUT), "w"),
        (lambda: kernels.matmul([[1.0]], W, OUT), "x"),
        (lambda: kernels.matmul(X, W, OUT[:1]), "out"),
        (lambda: kernels.matmul(X, W, np.empty((2, 3))), "out"),
        (lambda: kernels.matmul(X, W, X[:, :3].copy().T.copy().T), "out"),
        (lambda: kernels.matmul(X, X, X[:, :2]), "out"),
        (lambda: kernels.matmul(X, Mxfp4(MX.packed[:, :15].copy(), MX.scales), OUT), "w.packed"),
        (lambda: kernels.matmul(X, Mxfp4(MX.packed, MX.scales[:, :1].copy()), OUT), "w.scales"),
        (lambda: kernels.matmul(X, Mxfp4(MX.packed.view(np.int8), MX.scales), OUT), "w.packed"),
        (lambda: kernels.matmul(np.ones((3, 3), F32)[1:], np.ones((3, 3), F32), _read_only((2, 3))), "out"),
        (lambda: kernels.experts(X, [EXPERT], [IDS + 2], kernels.SILU, X.copy(), [IDS]), "rows"),
        (lambda: kernels.experts(X, [EXPERT], [IDS - 1], kernels.SILU, X.copy(), [IDS]), "rows"),
        (lambda: kernels.experts(X, [EXPERT], [IDS], kernels.SILU, X.copy(), [IDS + 2]), "slot_ids"),
        (
            lambda: kernels.experts(X, [EXPERT], [IDS], kernels.SILU, X.copy(), [IDS.astype(np.int64)]),
            "slot_ids",
        ),
        (lambda: kernels.experts(X, [ExpertWeights(W1, W1, W1)], [IDS], kernels.SILU, X.copy(), [IDS]), "w2"),
        (lambda: kernels.experts(X, [EXPERT], [IDS], (1.0,), X.copy(), [IDS]), "act"),
        (lambda: kernels.experts(X, [EXPERT], [IDS], Situ(0.0, 1.0), X.copy(), [IDS]), "act"),
        (lambda: kernels.experts(X, [W1], [IDS], kernels.SILU, X.copy(), [IDS]), "weights"),
        (lambda: kernels.experts(X, [EXPERT], [], kernels.SILU, X.copy(), [IDS]), "rows"),
        (lambda: kernels.experts(X, [EXPERT], [IDS], kernels.SILU, X.copy(), []), "slot_ids"),
        (lambda: kernels.experts(X, [EXPERT], [IDS], kernels.SILU, X.copy(), [IDS], True), "w1"),
        (lambda: kernels.experts(X[:, :2].copy(), [EXPERT], [IDS], kernels.SILU, X[:, :2].copy(), [IDS]), "w1"),
        (
            lambda: kernels.experts(X, [EXPERT, NARROW], [IDS, IDS], kernels.SILU, X.copy(), [IDS, IDS]),
            "weights: expert 1",
        ),
        (lambda: kernels.rmsnorm(X, X[0, :5].copy(), 1e-5, X), "weight"),
        (lambda: kernels.rmsnorm(X, X[0].copy(), float("nan"), X), "eps"),
        (lambda: kernels.short_conv(X, np.ones((64, 0), F32), np.empty((0, 64), F32), X.copy()), "weight"),
        (lambda: kernels.short_conv(X, np.ones((64, 4), F32), np.empty((4, 64), F32), X.copy()), "window"),
        (lambda: kernels.mla_attention(X[None], X, 2, 1.0, X[None].copy()), "start"),
        (lambda: kernels.mla_attention(X[None], X, -1, 1.0, X[None].copy()), "start"),
        (lambda: kernels.mla_attention(X[None], X, 2**62, 1.0, X[None].copy()), "start"),
        (lambda: kernels.attnres_mix(np.ones((2, 2, 64), F32), 3, X, X[0].copy(), 1e-5, X.copy()), "n"),
        (
            lambda: kernels.route(X, X[0].copy(), 65, True, 1.0, np.empty((2, 65), np.int32), np.empty((2, 65), F32)),
            "k",
        ),
        (lambda: kernels.absorb_query(X[None], MX, 0, X[None].copy()), "w_kvb"),
        (lambda: kernels.absorb_query(X[None], W, -(2**40), X[None].copy()), "dv"),
        (lambda: kernels.set_isa("neon"), "neon"),
        (lambda: kernels.configure_threads(0), "n"),
        (lambda: kernels.configure_threads(2, []), "cpus"),
        (lambda: kernels.configure_threads(2, [-1]), "cpus"),
    ],
)
def test_a_wrong_argument_is_named(call, names):
    with pytest.raises(ValueError, match=rf"\b{names}\b"):
        call()


def _read_only(shape):
    out = np.empty(shape, F32)
    out.flags.writeable = False
    return out


def test_more_threads_than_cores_and_cpu_lists_are_taken():
    with restored():
        for n, cpus in ((5, None), (2, kernels.physical_cores()), (1, None), (3, [0])):
            kernels.configure_threads(n, cpus)
            assert kernels.thread_count() == n
            out = np.empty((2, 500), F32)
            kernels.matmul(X, np.ones((500, 64), F32), out)
            assert np.all(out == 64)


def test_several_python_threads_take_turns():
    from concurrent.futures import ThreadPoolExecutor

    w = numbers(RNG, (600, 512), "normal")
    inputs = [numbers(RNG, (3, 512), "normal") for _ in range(8)]

    def run(x):
        out = np.empty((3, 600), F32)
        for _ in range(20):
            kernels.matmul(x, w, out)
        return out

    with restored():
        kernels.configure_threads(3)
        alone = [run(x) for x in inputs]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(run, inputs))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(alone, together, strict=True))


def test_a_forked_child_computes():
    import os

    w, x, out = numbers(RNG, (600, 512), "normal"), numbers(RNG, (1, 512), "normal"), np.empty((1, 600), F32)
    with restored():
        kernels.configure_threads(2)
        kernels.matmul(x, w, out)
        with pytest.warns(DeprecationWarning, match="fork") if _warns_on_fork() else _nothing():
            pid = os.fork()
        if pid == 0:
            again = np.empty_like(out)
            kernels.matmul(x, w, again)
            os._exit(0 if again.tobytes() == out.tobytes() else 1)
        _, status = os.waitpid(pid, 0)
    assert status == 0


def _warns_on_fork():
    import sys

    return sys.version_info >= (3, 12)


def _nothing():
    from contextlib import nullcontext

    return nullcontext()
