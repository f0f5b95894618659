from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from . import Mxfp4, Silu, Situ

F32: TypeAlias = NDArray[np.float32]
I32: TypeAlias = NDArray[np.int32]
Plain: TypeAlias = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]
Weights: TypeAlias = Plain | Mxfp4
Act: TypeAlias = Situ | Silu

def matmul(x: F32, w: Weights, out: F32) -> None:
    """out[t] = w x[t]. x [T, K], w [N, K], out [T, N]; every output is the 32-lane dot product."""

def matmul_int8(x: F32, w: Mxfp4, out: F32) -> None:
    """`matmul` with each 32-group of x rounded to int8 times a float step: another numerics, as exact to repeat.

    Integer sums are exact in any order and the scaling order is fixed (kernels.hpp has the definition). A group that
    is not finite gives NaN. Weights are MXFP4 only.
    """

class ExpertWeights:
    """One expert's matrices, checked once and held: w1 and w3 [I, D], w2 [D, I], all of one kind."""

    def __init__(self, w1: Weights, w3: Weights, w2: Weights) -> None: ...

def experts(
    x: F32,
    weights: list[ExpertWeights],
    rows: list[I32],
    act: Act,
    slots: F32,
    slot_ids: list[I32],
    int8: bool = False,
) -> None:
    """For every expert e: slots[slot_ids[e][i]] = w2 act(w1 x[rows[e][i]], w3 x[rows[e][i]]) for every i.

    x [T, D], rows[e] [n_e] in 0..T-1, slots [S, D], slot_ids[e] [n_e] in 0..S-1, distinct over all experts (of a
    repeated one the last written stays, and which that is is not said). Experts are of one kind and shape. int8: with
    int8 activations in front of all three matrices, as in `matmul_int8`; MXFP4 weights only. All experts of a layer in
    one call cost the pool four meetings of its threads instead of four each.
    """

def glu(gate: F32, up: F32, act: Act, out: F32) -> None:
    """act(gate, up) elementwise, all of one shape; out may be gate or up."""

def rmsnorm(x: F32, weight: F32, eps: float, out: F32) -> None:
    """x (1 / sqrt(mean(x^2) + eps)) weight for each row. x, out [R, D], weight [D]; out may be x."""

def l2norm(x: F32, eps: float, scale: float, out: F32) -> None:
    """x (1 / sqrt(sum(x^2) + eps)) scale for each row. x, out [R, D]; out may be x."""

def sigmoid_mul(x: F32, gate: F32, out: F32) -> None:
    """x sigmoid(gate) elementwise, all of one shape; out may be x or gate."""

def exp(x: F32, out: F32) -> None:
    """Elementwise e^x, within 2 ulp; out may be x."""

def sigmoid(x: F32, out: F32) -> None:
    """Elementwise 1 / (1 + e^-x), within 2 ulp; out may be x."""

def tanh(x: F32, out: F32) -> None:
    """Elementwise tanh x, within 2 ulp; out may be x."""

def softplus(x: F32, out: F32) -> None:
    """Elementwise log(1 + e^x), x itself above 20, within 2 ulp; out may be x."""

def short_conv(x: F32, weight: F32, window: F32, out: F32) -> None:
    """Causal depthwise convolution, then SiLU (model.md 3.4).

    x, out [T, C]; weight [C, W], the last tap on the current token, W >= 1; window [W-1, C] holds the inputs before
    x, oldest first, and is left holding the last W-1 inputs. Taps are added oldest first.
    """

def kda_decay(z: F32, a_log: F32, dt_bias: F32, lower_bound: float | None, alpha: F32) -> None:
    """alpha = exp(lower_bound sigmoid(e^a_log (z + dt_bias))), or exp(-e^a_log softplus(z + dt_bias)) for None.

    z, alpha [T, H, D]; a_log [H]; dt_bias [H, D]; lower_bound < 0 (model.md 3.4 and 6). alpha may be z.
    """

def kda_recurrence(q: F32, k: F32, v: F32, alpha: F32, beta: F32, state: F32, out: F32) -> None:
    """The token recurrence of KDA (model.md 3.5), tokens in order; state [H, D (key), D (value)] changes in place.

    q, k, v, alpha, out [T, H, D]; beta [T, H]. q is already normalised and scaled, k normalised, beta a sigmoid.
    Sums over the key index run ascending. The chunked form rounds differently and is not used.
    """

def absorb_query(q: F32, w_kvb: Plain, dv: int, out: F32) -> None:
    """out[t, h] = W_UK,h^T q[t, h]. q [T, H, Dn]; w_kvb [H (Dn + dv), R], per head Dn key rows, then dv; out [T, H, R].

    Sums run over the Dn index ascending (model.md 3.6).
    """

def expand_values(ctx: F32, w_kvb: Plain, dn: int, out: F32) -> None:
    """out[t, h] = W_UV,h ctx[t, h]. ctx [T, H, R]; w_kvb [H (dn + Dv), R]; out [T, H, Dv]; 32-lane dot products."""

def mla_attention(q: F32, cache: F32, start: int, scale: float, out: F32) -> None:
    """Causal attention in the latent form: query t sees cache rows 0 .. start+t, which are already written.

    q [T, H, R+P]; cache [C, R+P]; out [T, H, R], whose width says how many columns are values. Softmax: largest, exp,
    lane-scheme sum; values are added in ascending position, then divided. A row does not depend on T.
    """

def attnres_mix(bank: F32, n: int, prefix: F32, w: F32, eps: float, out: F32) -> None:
    """Attention over residual sources bank[0 .. n-1], then prefix (model.md 3.1).

    bank [B, T, D]; prefix, out [T, D]; w [D] = norm weight * projection. Scores use normalised keys, values are raw.
    """

def route(logits: F32, bias: F32, k: int, renormalize: bool, scaling: float, ids: I32, weights: F32) -> bool:
    """The k experts of each row by descending sigmoid(logit) + bias, ties to the lower id (model.md 3.8).

    logits [T, E]; bias [E]; ids int32 [T, k]; weights [T, k] from the unbiased scores, divided by their sum (taken in
    router order, + 1e-20) if renormalize, times scaling. False if any score is NaN: ids and weights are then rubbish.
    """

def combine(slots: F32, weights: F32, out: F32) -> None:
    """out[t] = sum over k ascending of weights[t, k] slots[t, k]. slots [T, K, D]; weights [T, K]; out [T, D]."""

def widen(src: Plain, out: F32) -> None:
    """The same numbers as float32, exactly. src may lie at any byte address; shapes equal."""

def finite(x: F32) -> bool:
    """Whether no element is infinite or NaN."""

def mxfp4_scales_valid(scales: NDArray[np.uint8]) -> bool:
    """Whether no scale byte is 255, the one without a value (model.md 2.5)."""

def isa() -> str:
    """The instruction set in use."""

def available_isas() -> list[str]:
    """What this machine can run, best first; scalar is always last."""

def set_isa(name: str) -> None:
    """Use another instruction set from the next call on; ValueError names what the machine has."""

def configure_threads(
    n: int, cpus: Sequence[int] | None = None, spin_us: int = 50, homes: Sequence[int] | None = None
) -> None:
    """Use n threads (1..1024), the caller of a kernel included; waits for a running kernel.

    A thread out of work spins for spin_us microseconds before it sleeps: kernels of one token follow within
    microseconds, and a sleeper costs its waker a system call.

    Worker i is pinned to cpus[i mod len]; cpus[0] is left for the caller, which is never pinned. None: no pinning.

    homes: for each thread, the caller first, which part of an expert's rows it takes first, counted from 0 up to 7
    without gaps. Rows belong to the parts in equal shares, so that who binds each share to the memory node of its
    threads keeps their reads local; a thread without work helps the others. None: one part. Changes no bit.
    """

def set_widths(others: int = 0, experts: int = 0) -> None:
    """How many of the threads routed experts (`experts`) and all other operations use; 0 is all."""

def wake_seconds() -> float:
    """Time until all threads work on one job together and have left it: small when they spin, larger from sleep."""

def read_memory(array: NDArray[Any]) -> int:
    """The exclusive or of all whole 64-byte lines, read by all threads: the memory rate to compare kernels with."""

def touch_memory(array: NDArray[Any], node: int) -> bool:
    """Gives the array's whole pages their memory now, on a NUMA node as long as that has some; contents stay.

    False, and nothing is touched, where the system knows no such node or call or no page lies wholly inside.
    """

def thread_count() -> int:
    """Threads in use, the caller included."""

def scratch_bytes() -> int:
    """Memory the pool holds for intermediate results; it grows to a working size and stays."""
