"""How the mini model's weights move: Muon for matrices, Adam for the rest, and rounding after each step.

Owns the optimiser state of the parameters it is given and the master copies in full float32; what it writes back to
the network are always values the checkpoint can hold. Muon: momentum, then the nearest half-orthogonal matrix by a
Newton-Schulz iteration, after K. Jordan et al. 2024.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .quantise import bf16_round, mxfp4_round

STORED_FLOAT32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight")  # the released layout's dtypes, section 2.2
ADAM_RATES = {
    "embed_tokens": 0.006,
    "lm_head": 0.004,
    "block_sparse_moe.gate": 0.003,
    "conv1d": 0.003,
    "res_proj": 0.004,
}

DECAY = 0.1  # of Muon's matrices, times the rate: without it they grow with every step, and gates with them


def rounded(name: str, w: Tensor) -> Tensor:
    """w as the checkpoint will hold it."""
    if ".experts.w" in name:
        return mxfp4_round(w)
    return w if name.endswith(STORED_FLOAT32) else bf16_round(w)


def uses_muon(name: str, w: Tensor) -> bool:
    """Whether the parameter is a hidden matrix: not embedding, head, router, vector or convolution."""
    return w.dim() >= 2 and not any(key in name for key in ADAM_RATES)


def orthogonalise(g: Tensor, steps: int) -> Tensor:
    """Roughly U V^T of g = U S V^T, over any leading axes, with the shorter side's Gram matrix."""
    tall = g.shape[-2] > g.shape[-1]
    x = g.transpose(-1, -2) if tall else g
    x = (x / (x.flatten(-2).norm(dim=-1)[..., None, None] + 1e-7)).contiguous()
    for _ in range(steps):
        a = x @ x.transpose(-1, -2)
        b = -4.7750 * a + 2.0315 * (a @ a)
        x = 3.4445 * x + b @ x
    return x.transpose(-1, -2) if tall else x


class Optimiser:
    """State for some of the parameters; `step` reads summed gradients and writes rounded weights into `params`."""

    def __init__(self, params: dict[str, Tensor], rate: float = 0.02) -> None:
        self.params = params
        self.rate = rate
        self.master = {n: p.detach().clone() for n, p in params.items()}
        self.first = {n: torch.zeros_like(p) for n, p in params.items()}
        self.second = {n: torch.zeros_like(p) for n, p in params.items() if not uses_muon(n, p)}
        self.count = 0
        for n, p in params.items():
            p.copy_(rounded(n, p))

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], scale: float) -> None:
        """One step at `scale` (0..1) of every rate."""
        self.count += 1
        for name, g in gradients.items():
            m, w = self.first[name], self.master[name]
            if uses_muon(name, w):
                m.mul_(0.95).add_(g)
                update = orthogonalise(g + 0.95 * m, 4 if ".experts.w" in name else 5)
                gain = math.sqrt(max(1.0, w.shape[-2] / w.shape[-1]))
                w.mul_(1 - DECAY * self.rate * scale).add_(update, alpha=-self.rate * scale * gain)
            else:
                v = self.second[name]
                m.lerp_(g, 0.1)
                v.mul_(0.97).addcmul_(g, g, value=0.03)
                unbiased = (v / (1 - 0.97**self.count)).sqrt_().add_(1e-10)
                rate = next((r for key, r in ADAM_RATES.items() if key in name), 0.004)
                w.addcdiv_(m, unbiased, value=-rate * scale / (1 - 0.9**self.count))
            self.params[name].copy_(rounded(name, w))

    def state(self) -> dict[str, object]:
        """Everything a resumed run needs."""
        return {"master": self.master, "first": self.first, "second": self.second, "count": self.count}

    def restore(self, state: dict[str, dict[str, Tensor]], count: int) -> None:
        """Take the state of a stopped run, of the parameters this optimiser has."""
        for kind, own in (("master", self.master), ("first", self.first), ("second", self.second)):
            for name, tensor in own.items():
                tensor.copy_(state[kind][name])
        self.count = count
        for name, p in self.params.items():
            p.copy_(rounded(name, self.master[name]))
