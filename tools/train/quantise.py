"""Rounding to what a checkpoint stores: MXFP4 along the input axis, and bfloat16.

Owns the two roundings and the packing into bytes (specification of the model, section 2.5). Training rounds after
every optimiser step, so what is trained is what is shipped; packing the rounded values loses nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
LADDER = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1, by its three low bits


def _scales(w: Tensor) -> tuple[Tensor, Tensor]:
    """w in groups of 32 along the last axis, and each group's exponent: the power of two that brings the largest
    magnitude into (3.5, 7], of which (6, 7] saturates to 6."""
    groups = w.reshape(*w.shape[:-1], w.shape[-1] // GROUP, GROUP)
    top = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    return groups, torch.ceil(torch.log2(top / 7))


def _round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value of x in [-7, 7]; steps of 1/2 below 2, of 1 below 4, of 2 above."""
    size = x.abs()
    fine = torch.round(size * 2) / 2
    rounded = torch.where(size < 2, fine, torch.where(size < 4, torch.round(size), torch.round(size / 2) * 2))
    return torch.copysign(rounded.clamp_max(6.0), x)


def mxfp4_round(w: Tensor) -> Tensor:
    """The nearest values MXFP4 can store, in float32. The last axis is the input axis and a multiple of 32."""
    groups, exponent = _scales(w)
    scale = torch.exp2(exponent)
    return (_round_e2m1(groups / scale) * scale).reshape(w.shape)


def mxfp4_pack(w: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of a (rows, inputs) matrix: packed (rows, inputs / 2) and scales (rows, inputs / 32), both uint8."""
    groups, exponent = _scales(w)
    values = _round_e2m1(groups / torch.exp2(exponent)).reshape(w.shape)
    ladder = torch.tensor(LADDER)
    code = torch.searchsorted(ladder, values.abs().contiguous()).to(torch.uint8)
    code |= torch.signbit(values).to(torch.uint8) << 3
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed, (exponent.squeeze(-1) + 127).to(torch.uint8)


def mxfp4_unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """The float32 matrix that packed bytes stand for."""
    code = torch.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    values = torch.tensor(LADDER)[(code & 7).long()] * torch.where(code >= 8, -1.0, 1.0)
    return values * torch.exp2(scale.float() - 127).repeat_interleave(GROUP, -1)


def bf16_round(w: Tensor) -> Tensor:
    """The nearest bfloat16 values, in float32."""
    return w.to(torch.bfloat16).to(torch.float32)
