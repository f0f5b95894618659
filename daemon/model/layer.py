"""One layer: mix, norm, attention, mix, norm, feed-forward (specification 3.1).

Owns the order of these and the running sum; the parts themselves are in `attention` and `feedforward`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sluice import kernels
from sluice.daemon.model.attention import Rows, kda, mla
from sluice.daemon.model.config import ModelConfig
from sluice.daemon.model.feedforward import Mixture, OnRoute, RowsFailed, activation, gated_mlp
from sluice.daemon.model.scratch import F32, ResidualBuffers, Scratch
from sluice.daemon.model.weights import GatedMlp, KdaWeights, LayerWeights, Linear
from sluice.io.experts import ExpertSource
from sluice.io.trunk import TrunkSource


def mix(r: ResidualBuffers, blocks: int, folded: F32, eps: float) -> F32:
    """softmax over the bank's `blocks` snapshots and p: keys normalised, values raw. Written to r.h, which is
    returned. folded: (hidden,), norm ⊙ proj of the site."""
    kernels.attnres_mix(r.bank, blocks, r.p, folded, eps, r.h)
    return r.h


class LayerRun:
    """Runs single layers of one network over rows of several sequences."""

    def __init__(
        self,
        c: ModelConfig,
        linear: Linear,
        trunk: TrunkSource,
        experts: ExpertSource,
        on_route: OnRoute | None = None,
        *,
        int8_activations: bool = False,
    ) -> None:
        self._c = c
        self._act = activation(c)
        self._linear = linear
        self._trunk = trunk
        self._mixture = Mixture(c, linear, experts, on_route, int8_activations=int8_activations)

    def __call__(
        self, w: LayerWeights, sequences: Sequence[Rows], s: Scratch, blocks: int, rows_failed: RowsFailed
    ) -> int:
        """Advance p (and the bank) by one layer. `blocks`: snapshots in the bank before it; returns those after it.
        rows_failed: see `feedforward.Mixture`."""
        c, r = self._c, s.residual
        if w.attention_res is None or w.ffn_res is None or c.attn_res_block_size is None:
            # h += attention(rms(h));  h += ffn(rms(h))
            kernels.rmsnorm(r.p, w.input_norm, c.rms_norm_eps, r.x)
            self._attention(w, sequences, s, r.y)
            np.add(r.p, r.y, out=r.p)
            kernels.rmsnorm(r.p, w.post_attention_norm, c.rms_norm_eps, r.x)
            self._ffn(w, s, rows_failed)
            np.add(r.p, r.y, out=r.p)
            return blocks
        # h = mix(B + [p])  if B is not empty else p
        h = mix(r, blocks, w.attention_res, c.rms_norm_eps) if blocks else r.p
        kernels.rmsnorm(h, w.input_norm, c.rms_norm_eps, r.x)
        if w.index % c.attn_res_block_size == 0:
            # the vector that entered the layer goes into the bank, and the sum restarts from the attention output
            r.bank[blocks] = r.p
            blocks += 1
            self._attention(w, sequences, s, r.p)
        else:
            self._attention(w, sequences, s, r.y)
            np.add(r.p, r.y, out=r.p)
        # h = mix(B + [p]);  p = p + ffn(rms(h))
        h = mix(r, blocks, w.ffn_res, c.rms_norm_eps)
        kernels.rmsnorm(h, w.post_attention_norm, c.rms_norm_eps, r.x)
        self._ffn(w, s, rows_failed)
        np.add(r.p, r.y, out=r.p)
        return blocks

    def _attention(self, w: LayerWeights, sequences: Sequence[Rows], s: Scratch, out: F32) -> None:
        x = s.residual.x
        if isinstance(w.attention, KdaWeights):
            kda(self._c, w.attention, self._linear, x, sequences, s.kda, out)
        else:
            mla(self._c, w.attention, self._linear, self._trunk, x, sequences, s.mla, out)

    def _ffn(self, w: LayerWeights, s: Scratch, rows_failed: RowsFailed) -> None:
        x, y, b = s.residual.x, s.residual.y, s.ffn
        if isinstance(w.ffn, GatedMlp):
            gated_mlp(w.ffn, self._act, self._linear, x, b.gate, b.up, y)
        else:
            self._mixture(w.index, w.ffn, x, b, s.ids, y, rows_failed)
