"""Arithmetic on numpy arrays: the compiled kernels, and nothing of files, models or time.

Owns: products with float32, bfloat16, float16 and packed MXFP4 weights, norms, gates, the KDA recurrence, latent
attention, AttnRes mixing, routing, the native thread pool and the choice of instruction set. Leaves to others: which
weight is which, when it arrives, what a result means.

What holds for every function here:

* Arrays are C-contiguous; float32 unless said. `out` is given by the caller, is written wholly, and must not overlap
  an input unless said. T, the number of rows, may be any number, also 0.
* Weights `[N, K]` are float32, float16, uint16 (the bits of bfloat16) - at any byte address - or `Mxfp4`. They are
  never widened as a whole.
* A wrong shape, dtype, layout or index raises ValueError naming the argument, before anything is written.
* The GIL is released; calls from several threads take turns.
* Results are the same bits for every instruction set, thread count and number of rows in a call: every output is the
  32-lane dot product of DESIGN 4, or a sum whose order its docstring gives. NaN payloads are not part of the promise.

Set SLUICE_ISA to one of `available_isas()` (scalar, avx2, avxvnni, avx512, avx512vnni) to force the instruction set;
a name this machine lacks is a ValueError.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._native import (
    ExpertWeights,
    absorb_query,
    attnres_mix,
    available_isas,
    combine,
    configure_threads,
    exp,
    expand_values,
    experts,
    finite,
    glu,
    isa,
    kda_decay,
    kda_recurrence,
    l2norm,
    matmul,
    matmul_int8,
    mla_attention,
    mxfp4_scales_valid,
    read_memory,
    rmsnorm,
    route,
    scratch_bytes,
    set_isa,
    set_widths,
    short_conv,
    sigmoid,
    sigmoid_mul,
    softplus,
    tanh,
    thread_count,
    touch_memory,
    wake_seconds,
    widen,
)
from .topology import physical_cores


class Mxfp4(NamedTuple):
    """A packed matrix [N, K]: packed uint8 [N, K/2], element 2j in the low nibble of byte j; scales uint8 [N, K/32].

    A weight is e2m1 * 2^(scale-127). Scale byte 255 has no value: refuse such data with `mxfp4_scales_valid` first.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.uint8]


class Situ(NamedTuple):
    """beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta), betas positive and finite (model.md 3)."""

    beta: float
    linear_beta: float


class Silu(NamedTuple):
    """g sigmoid(g) * u."""


SILU = Silu()


if forced := os.environ.get("SLUICE_ISA"):
    set_isa(forced)


__all__ = [
    "SILU",
    "ExpertWeights",
    "Mxfp4",
    "Silu",
    "Situ",
    "absorb_query",
    "attnres_mix",
    "available_isas",
    "combine",
    "configure_threads",
    "exp",
    "expand_values",
    "experts",
    "finite",
    "glu",
    "isa",
    "kda_decay",
    "kda_recurrence",
    "l2norm",
    "matmul",
    "matmul_int8",
    "mla_attention",
    "mxfp4_scales_valid",
    "physical_cores",
    "read_memory",
    "rmsnorm",
    "route",
    "scratch_bytes",
    "set_isa",
    "set_widths",
    "short_conv",
    "sigmoid",
    "sigmoid_mul",
    "softplus",
    "tanh",
    "thread_count",
    "touch_memory",
    "wake_seconds",
    "widen",
]
