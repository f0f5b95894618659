"""Every compiled variant of the kernels that this machine can run, for tests of equal bits.

The AVX-512 and VNNI units can be run through SIMDe where the CPU lacks it (developers; Debian package libsimde-dev):

    cmake -S kernels_cpp -B build/emulated -DSLUICE_EMULATE_AVX512=ON \\
          -DPYBIND11_FINDPYTHON=ON -DPython_EXECUTABLE=$PWD/.venv/bin/python \\
          -Dpybind11_DIR=$(.venv/bin/python -m pybind11 --cmakedir) && cmake --build build/emulated

Tests find the module in build/emulated, or in the folder named by SLUICE_EMULATED_KERNELS.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from sluice import kernels
from sluice.kernels import _native

Compute = Callable[[ModuleType], list[NDArray[np.generic]]]
ISAS = ("avx2", "avxvnni", "avx512", "avx512vnni", "emulated-avxvnni", "emulated-avx512", "emulated-avx512vnni")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _emulated() -> ModuleType | None:
    folder = Path(os.environ.get("SLUICE_EMULATED_KERNELS", Path(__file__).resolve().parents[2] / "build" / "emulated"))
    for path in sorted(folder.glob("_native*.so")):
        spec = importlib.util.spec_from_file_location("sluice_emulated._native", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return None


EMULATED = _emulated()


def variant(name: str) -> ModuleType:
    """The compiled module, set to `name`; skips the calling test, saying why, where that cannot run here."""
    if name.startswith("emulated-"):
        if EMULATED is None:
            pytest.skip("no emulated build of the AVX-512 and VNNI units (see helpers/kernel_variants.py)")
        EMULATED.set_isa(name.removeprefix("emulated-"))
        return EMULATED
    if name not in kernels.available_isas():
        pytest.skip(f"this CPU lacks {name}")
    _native.set_isa(name)
    return _native


@contextmanager
def restored() -> Iterator[None]:
    """Leaves instruction set and threads as they were found."""
    isa, threads = kernels.isa(), kernels.thread_count()
    try:
        yield
    finally:
        kernels.set_isa(isa)
        kernels.configure_threads(threads)


def assert_same_bits(
    name: str, compute: Callable[[ModuleType], list[NDArray[np.generic]]]
) -> list[NDArray[np.generic]]:
    """What `compute` gives with variant `name`, which equals the scalar definition bit for bit; NaN equals NaN."""
    with restored():
        module = variant(name)
        got = compute(module)
        _native.set_isa("scalar")
        expected = compute(_native)
    for a, b in zip(got, expected, strict=True):
        if a.dtype == np.float32:
            both_nan = np.isnan(a) & np.isnan(b)
            a, b = np.where(both_nan, np.float32(0), a), np.where(both_nan, np.float32(0), b)
        if a.tobytes() != b.tobytes():
            bad = np.flatnonzero(a.ravel().view(np.uint32) != b.ravel().view(np.uint32))
            raise AssertionError(
                f"{name} differs from scalar at {bad[:5]} of {a.shape}: {a.flat[bad[0]]} {b.flat[bad[0]]}"
            )
    return got


def numbers(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> NDArray[np.float32]:
    """Float32 test data: 'normal', 'wide' (all magnitudes, subnormals, zeros of both signs), 'huge' (may overflow)."""
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "normal":
        return x
    if kind == "huge":
        return (x * np.float32(1e37)).astype(np.float32)
    scaled = np.ldexp(x, rng.integers(-150, 20, shape)).astype(np.float32)
    scaled[rng.random(shape) < 0.1] = 0.0
    scaled[rng.random(shape) < 0.05] = -0.0
    return scaled


def bfloat16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of the floats: bfloat16 by truncation."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def unpack_mxfp4(w: kernels.Mxfp4) -> NDArray[np.float32]:
    """The matrix an Mxfp4 stands for, as float32 (model.md 2.5), with numpy alone."""
    nibbles = np.empty((w.packed.shape[0], w.packed.shape[1] * 2), np.uint8)
    nibbles[:, ::2], nibbles[:, 1::2] = w.packed & 15, w.packed >> 4
    scales = np.ldexp(np.float32(1), w.scales.astype(np.int32) - 127).astype(np.float32)
    return E2M1[nibbles] * np.repeat(scales, 32, axis=1)


def random_mxfp4(rng: np.random.Generator, rows: int, cols: int, low: int = 118, high: int = 124) -> kernels.Mxfp4:
    """Random nibbles with scale bytes in [low, high)."""
    return kernels.Mxfp4(
        rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8),
        rng.integers(low, high, (rows, cols // 32), dtype=np.uint8),
    )


def misaligned(x: NDArray[np.generic]) -> NDArray[np.generic]:
    """A copy of x that begins one byte off its natural alignment, as in a read buffer."""
    raw = np.zeros(x.nbytes + 1, np.uint8)
    raw[1:] = np.frombuffer(x.tobytes(), np.uint8)
    return raw[1:].view(x.dtype).reshape(x.shape)
