"""Every vector unit equals the scalar definition, bit for bit, and threads and batches change nothing."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from helpers.kernel_variants import (
    ISAS,
    assert_same_bits,
    bfloat16_bits,
    misaligned,
    numbers,
    random_mxfp4,
    restored,
    variant,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice import kernels

KINDS = st.sampled_from(["normal", "wide", "huge"])
SEEDS = st.integers(0, 2**32 - 1)
FORMS = st.sampled_from(["mx", "bf16", "f4"])
FEW = settings(max_examples=25)

pytestmark = [pytest.mark.parametrize("isa", ISAS), pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")]


@FEW
@given(SEEDS, KINDS, st.integers(0, 9), st.integers(1, 40), st.integers(0, 1100), st.sampled_from(["f4", "f2", "bf16"]))
def test_matmul_with_plain_weights(isa, seed, kind, t, n, k, dtype):
    rng = np.random.default_rng(seed)
    x, w = numbers(rng, (t, k), kind), numbers(rng, (n, k), kind)
    with np.errstate(all="ignore"):
        weights = misaligned(bfloat16_bits(w) if dtype == "bf16" else w.astype(dtype))

    def compute(m: ModuleType):
        out = np.full((t, n), np.nan, np.float32)
        m.matmul(x, weights, out)
        return [out]

    assert_same_bits(isa, compute)


@FEW
@given(SEEDS, KINDS, st.integers(0, 9), st.integers(1, 40), st.integers(0, 34), st.sampled_from([(0, 255), (118, 124)]))
def test_matmul_with_packed_weights(isa, seed, kind, t, n, groups, scales):
    rng = np.random.default_rng(seed)
    x, w = numbers(rng, (t, groups * 32), kind), random_mxfp4(rng, n, groups * 32, *scales)

    def compute(m: ModuleType):
        out = np.full((t, n), np.nan, np.float32)
        m.matmul(x, w, out)
        return [out]

    assert_same_bits(isa, compute)


@pytest.mark.parametrize("k", [7168, 7200, 3 * 7168 - 32])  # a panel of decoded weights holds 7168 columns
@pytest.mark.parametrize("t", [1, 2, 5, 9])
def test_rows_as_long_as_a_panel_and_longer(isa, t, k):
    rng = np.random.default_rng(k + t)
    x, plain = numbers(rng, (t, k + 13), "normal"), bfloat16_bits(numbers(rng, (7, k + 13), "normal"))
    packed = random_mxfp4(rng, 7, k, 118, 124)

    def compute(m: ModuleType):
        outs = [np.full((t, 7), np.nan, np.float32) for _ in range(2)]
        m.matmul(x, plain, outs[0])
        m.matmul(np.ascontiguousarray(x[:, :k]), packed, outs[1])
        return outs

    assert_same_bits(isa, compute)


def test_every_code_under_every_scale(isa):
    """256 scales x 16 codes, each weight alone in its product: no table of decoded values may hide a wrong entry."""
    packed = np.tile(np.arange(16, dtype=np.uint8) * 17, (255, 1))  # both nibbles of byte i hold code i
    w = kernels.Mxfp4(packed, np.arange(255, dtype=np.uint8)[:, None])
    x = np.eye(32, dtype=np.float32)

    def compute(m: ModuleType):
        outs = [np.full((32, 255), np.nan, np.float32), np.full((32, 255), np.nan, np.float32)]
        for t in range(32):
            m.matmul(x[t : t + 1], w, outs[0][t : t + 1])
        m.matmul(x, w, outs[1])
        return outs

    alone, together = assert_same_bits(isa, compute)
    finite = 252  # 6 x 2^125: above it some codes exceed float32, and infinity times a zero of x is not a number
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    exact = np.repeat(codes[:, None] * 2.0 ** (np.arange(finite + 1) - 127), 2, axis=0)
    np.testing.assert_array_equal(alone[:, : finite + 1], exact)
    np.testing.assert_array_equal(together, alone)


@FEW
@given(
    SEEDS, st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.sampled_from(["mx", "bf16", "f4"])
)
def test_experts(isa, seed, t, d, inner, silu, dtype):
    rng = np.random.default_rng(seed)
    d, inner = d * 32, inner * 32
    x = numbers(rng, (t, d), "normal")
    shapes = [(inner, d), (inner, d), (d, inner)]
    if dtype == "mx":
        w = [random_mxfp4(rng, *s) for s in shapes]
    else:
        w = [numbers(rng, s, "normal") for s in shapes]
        w = [bfloat16_bits(m) for m in w] if dtype == "bf16" else w
    act = kernels.SILU if silu else kernels.Situ(4.0, 25.0)
    rows = rng.integers(0, t, 5).astype(np.int32)
    ids = rng.permutation(7)[:5].astype(np.int32)

    def compute(m: ModuleType):
        slots, h, up, out = (np.zeros((n, k), np.float32) for n, k in ((7, d), (t, inner), (t, inner), (t, d)))
        m.experts(x, [m.ExpertWeights(*w)], [rows], act, slots, [ids])
        m.matmul(x, w[0], h)
        m.matmul(x, w[1], up)
        m.glu(h, up, act, h)
        m.matmul(h, w[2], out)
        return [slots, out]

    slots, out = assert_same_bits(isa, compute)
    assert slots[ids].tobytes() == out[rows].tobytes()


@FEW
@given(SEEDS, KINDS, st.integers(0, 200))
def test_elementwise_functions(isa, seed, kind, n):
    rng = np.random.default_rng(seed)
    x, y = numbers(rng, (n,), kind), numbers(rng, (n,), "normal")

    def compute(m: ModuleType):
        outs = []
        for f in (m.exp, m.sigmoid, m.tanh, m.softplus):
            outs.append(np.empty_like(x))
            f(x, outs[-1])
        for act in (kernels.SILU, kernels.Situ(4.0, 25.0)):
            outs.append(np.empty_like(x))
            m.glu(x, y, act, outs[-1])
        outs.append(np.empty_like(x))
        m.sigmoid_mul(y, x, outs[-1])
        return outs

    assert_same_bits(isa, compute)


@FEW
@given(SEEDS, KINDS, st.integers(0, 5), st.integers(1, 300))
def test_norms(isa, seed, kind, rows, dim):
    rng = np.random.default_rng(seed)
    x, w = numbers(rng, (rows, dim), kind), numbers(rng, (dim,), "normal")

    def compute(m: ModuleType):
        a, b = np.empty_like(x), np.empty_like(x)
        m.rmsnorm(x, w, 1e-5, a)
        m.l2norm(x, 1e-6, 0.25, b)
        return [a, b]

    assert_same_bits(isa, compute)


@FEW
@given(SEEDS, KINDS, st.integers(0, 6), st.integers(1, 70), st.integers(1, 6))
def test_short_conv(isa, seed, kind, t, c, taps):
    rng = np.random.default_rng(seed)
    x, w, window = (numbers(rng, s, kind) for s in ((t, c), (c, taps), (taps - 1, c)))

    def compute(m: ModuleType):
        carried, out = window.copy(), np.empty_like(x)
        m.short_conv(x, w, carried, out)
        return [out, carried]

    assert_same_bits(isa, compute)


@FEW
@given(SEEDS, st.integers(0, 5), st.integers(1, 3), st.integers(1, 140), st.booleans())
def test_kda(isa, seed, t, h, d, bounded):
    rng = np.random.default_rng(seed)
    q, k, v, z = (numbers(rng, (t, h, d), "normal") for _ in range(4))
    a_log, dt_bias, state = (
        numbers(rng, (h,), "normal"),
        numbers(rng, (h, d), "normal"),
        numbers(rng, (h, d, d), "wide"),
    )
    beta = rng.random((t, h), np.float32)

    def compute(m: ModuleType):
        alpha, s, out = np.empty_like(z), state.copy(), np.empty_like(q)
        m.kda_decay(z, a_log, dt_bias, -5.0 if bounded else None, alpha)
        m.kda_recurrence(q, k, v, alpha, beta, s, out)
        return [alpha, s, out]

    assert_same_bits(isa, compute)


@FEW
@given(SEEDS, KINDS, st.integers(0, 3), st.integers(1, 21), st.integers(1, 140), st.integers(0, 70), st.integers(0, 80))
def test_latent_attention(isa, seed, kind, t, h, r, p, start):
    rng = np.random.default_rng(seed)
    q, cache = numbers(rng, (t, h, r + p), kind), numbers(rng, (start + t + 1, r + p), "normal")

    def compute(m: ModuleType):
        out = np.empty((t, h, r), np.float32)
        m.mla_attention(q, cache, start, 0.125, out)
        return [out]

    assert_same_bits(isa, compute)


@FEW
@given(SEEDS, st.integers(0, 4), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.integers(1, 140))
def test_absorbed_projections(isa, seed, t, h, dn, dv, r):
    rng = np.random.default_rng(seed)
    q, ctx, w = (numbers(rng, s, "wide") for s in ((t, h, dn), (t, h, r), (h * (dn + dv), r)))
    with np.errstate(all="ignore"):
        forms = [w, w.astype(np.float16), bfloat16_bits(w)]

    def compute(m: ModuleType):
        outs = []
        for form in forms:
            outs += [np.empty((t, h, r), np.float32), np.empty((t, h, dv), np.float32)]
            m.absorb_query(q, form, dv, outs[-2])
            m.expand_values(ctx, form, dn, outs[-1])
        return outs

    assert_same_bits(isa, compute)


@FEW
@given(SEEDS, KINDS, st.integers(0, 4), st.integers(0, 9), st.integers(1, 300))
def test_attnres_mix(isa, seed, kind, t, n, d):
    rng = np.random.default_rng(seed)
    bank, prefix, w = (numbers(rng, s, k) for s, k in (((9, t, d), kind), ((t, d), kind), ((d,), "normal")))

    def compute(m: ModuleType):
        out = np.empty_like(prefix)
        m.attnres_mix(bank, n, prefix, w, 1e-5, out)
        return [out]

    assert_same_bits(isa, compute)


@FEW
@given(SEEDS, st.integers(0, 4), st.integers(1, 90), st.integers(1, 16), st.booleans(), st.integers(1, 140))
def test_routing_combining_widening(isa, seed, t, experts, k, renormalize, d):
    rng = np.random.default_rng(seed)
    k = min(k, experts)
    logits, bias = numbers(rng, (t, experts), "normal") * 8, numbers(rng, (experts,), "normal")
    slots = numbers(rng, (t, k, d), "wide")

    def compute(m: ModuleType):
        ids, weights, out = np.empty((t, k), np.int32), np.empty((t, k), np.float32), np.empty((t, d), np.float32)
        assert m.route(logits, bias, k, renormalize, 2.446, ids, weights)
        m.combine(slots, weights, out)
        half = misaligned(rng.integers(0, 0x7C00, (t, d)).astype(np.uint16).view(np.float16))
        brain = misaligned(bfloat16_bits(slots[:, 0]))
        wide = [np.empty((t, d), np.float32) for _ in range(2)]
        m.widen(half, wide[0])
        m.widen(brain, wide[1])
        assert np.array_equal(wide[0], half.astype(np.float32))
        return [ids, weights, out, wide[1]]

    assert_same_bits(isa, compute)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_batches_change_nothing(isa, threads):
    rng = np.random.default_rng(7)
    d, inner, t = 256, 320, 70
    w = [random_mxfp4(rng, inner, d), random_mxfp4(rng, inner, d), random_mxfp4(rng, d, inner)]
    brain = bfloat16_bits(numbers(rng, (333, d), "normal"))
    x, q = numbers(rng, (t, d), "normal"), numbers(rng, (t, 3, 96), "normal")
    cache = numbers(rng, (t + 30, 96), "normal")
    every = np.arange(t, dtype=np.int32)

    def compute(m: ModuleType):
        out, slots, ctx = np.empty((t, 333), np.float32), np.empty((t, d), np.float32), np.empty((t, 3, 64), np.float32)
        m.matmul(x, brain, out)
        m.experts(x, [m.ExpertWeights(*w)], [every], kernels.SILU, slots, [every])
        m.mla_attention(q, cache, 30, 0.1, ctx)
        return [out, slots, ctx]

    with restored():
        kernels.configure_threads(threads)
        together = assert_same_bits(isa, compute)
        module = variant(isa)
        module.configure_threads(threads)
        for a in range(0, t, 7):
            row = slice(a, a + 1 + a % 5)
            parts = [np.empty_like(o[row]) for o in together]
            n = len(parts[0])
            module.matmul(x[row], brain, parts[0])
            module.experts(x, [module.ExpertWeights(*w)], [every[row]], kernels.SILU, parts[1], [every[:n]])
            module.mla_attention(q[row], cache, 30 + a, 0.1, parts[2])
            for part, whole in zip(parts, together, strict=True):
                assert part.tobytes() == whole[row].tobytes()
