"""`fused.c` as autograd functions: the same mathematics as `network.py`'s plain forms, in fewer passes over memory.

Owns building the C file (once, into a folder the caller names) and the bindings. Where no C compiler is found the
plain forms serve; `available()` says which.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_library: ctypes.CDLL | None = None


def build(folder: Path) -> bool:
    """Compile and load; False where there is no C compiler."""
    global _library
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return False
    target = folder / "fused.so"
    flags = ["-O3", "-ffast-math", "-march=native", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(Path(__file__).with_name("fused.c")), "-o", str(target), "-lm"], check=True)
    _library = ctypes.CDLL(str(target))
    return True


def available() -> bool:
    """Whether `build` has succeeded in this process."""
    return _library is not None


def _call(name: str, *arguments: Any) -> None:
    out: list[Any] = []
    for a in arguments:
        if isinstance(a, Tensor):
            out.append(ctypes.c_void_p(a.data_ptr()))
        elif isinstance(a, float):
            out.append(ctypes.c_float(a))
        elif isinstance(a, int):
            out.append(ctypes.c_int(a))
        else:
            out.append((ctypes.c_void_p * len(a))(*(t.data_ptr() for t in a)))
    getattr(_library, name)(*out)


class KdaCore(torch.autograd.Function):
    """everything (B, T, q|k|v|gate|low|beta), taps (3HD, 4), f_b (HD, D), dt_bias, A_log, o_norm -> (B, T, HD)."""

    @staticmethod
    def forward(
        ctx: Any,
        everything: Tensor,
        taps: Tensor,
        f_b: Tensor,
        dt: Tensor,
        a_log: Tensor,
        o_norm: Tensor,
        eps: float,
        lower: float,
    ) -> Tensor:
        b, t, w = everything.shape
        hd, d = f_b.shape
        heads = hd // d
        low = everything[..., 4 * hd : 4 * hd + d].reshape(b * t, d)
        z = low @ f_b.t()
        y = everything.new_empty(b, t, hd)
        keep = everything.new_empty(b * heads * 5 * t * d)
        marks = everything.new_empty(b * heads * (t // 16) * d * d)
        _call("kda_forward", b, t, heads, w, everything, taps, z, dt, a_log, o_norm, eps, lower, y, keep, marks)
        ctx.save_for_backward(everything, taps, f_b, dt, a_log, o_norm, z, keep, marks, low)
        ctx.scalars = (eps, lower)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        everything, taps, f_b, dt, a_log, o_norm, z, keep, marks, low = ctx.saved_tensors
        b, t, w = everything.shape
        hd, d = f_b.shape
        d_ev, dz = torch.empty_like(everything), torch.empty_like(z)
        sums = [torch.zeros_like(x) for x in (taps, dt, a_log, o_norm)]
        _call(
            "kda_backward", b, t, hd // d, w, everything, taps, z, dt, a_log, o_norm, *ctx.scalars, keep, marks,
            dy, d_ev, dz, *sums,
        )  # fmt: skip
        d_ev[..., 4 * hd : 4 * hd + d] = (dz @ f_b).view(b, t, d)
        return d_ev, sums[0], dz.t() @ low, sums[1], sums[2], sums[3], None, None


class MixNorm(torch.autograd.Function):
    """rms(softmax-mix of the sources by key) * weight. key, weight (H); sources each (N, H)."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, weight: Tensor, eps: float, *sources: Tensor) -> Tensor:
        n, h = sources[0].shape
        x, shares = torch.empty_like(sources[0]), sources[0].new_empty(n, len(sources))
        _call("mix_forward", n, h, len(sources), list(sources), key, weight, eps, x, shares)
        ctx.save_for_backward(key, weight, shares, *sources)
        ctx.eps = eps
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx = grads[0].contiguous()
        key, weight, shares, *sources = ctx.saved_tensors
        n, h = dx.shape
        d_key, d_w = torch.zeros_like(key), torch.zeros_like(weight)
        dv = [torch.empty_like(s) for s in sources]
        _call("mix_backward", n, h, len(sources), sources, key, weight, ctx.eps, shares, dx, dv, d_key, d_w)
        return d_key, d_w, None, *dv


class SituHalves(torch.autograd.Function):
    """SiTU of rows that hold gate and up side by side: (N, 2I) -> (N, I)."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, b1: float, b2: float) -> Tensor:
        both = both.contiguous()
        n, i = both.shape[0], both.shape[1] // 2
        y = both.new_empty(n, i)
        _call("situ_forward", n, i, b1, b2, both, y)
        ctx.save_for_backward(both)
        ctx.betas = (b1, b2)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        (both,) = ctx.saved_tensors
        d = torch.empty_like(both)
        _call("situ_backward", dy.shape[0], dy.shape[1], *ctx.betas, both, dy, d)
        return d, None, None
