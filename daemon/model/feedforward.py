"""The feed-forward part: the dense MLP (specification 3.7) and the mixture of experts, latent or plain (3.8).

Experts are computed in the order in which they arrive, each into its own slot; their sum is taken afterwards in
router order, so that what was cached never changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sluice import kernels
from sluice.daemon.model.config import ModelConfig
from sluice.daemon.model.scratch import F32, I32, FfnBuffers
from sluice.daemon.model.weights import GatedMlp, Linear, MoeWeights
from sluice.io.errors import SluiceError, StorageError, StoreError
from sluice.io.experts import Acquisition, Expert, ExpertSource

Activation = kernels.Situ | kernels.Silu
OnRoute = Callable[[int, I32], None]
RowsFailed = Callable[[NDArray[np.intp], SluiceError], None]
"""Told which rows of the pass are lost and why; the pass goes on for the others."""


Wanted = tuple[I32, I32]
"""Where one expert is wanted: rows of z it reads, slots it fills. Both (n,) int32."""
Taken = tuple[kernels.ExpertWeights, I32, I32]
"""An expert that has arrived, and where it is wanted."""


def activation(c: ModelConfig) -> Activation:
    return kernels.Situ(c.situ_beta, c.situ_linear_beta) if c.hidden_act == "situ" else kernels.SILU


def gated_mlp(w: GatedMlp, act: Activation, linear: Linear, x: F32, gate: F32, up: F32, out: F32) -> None:
    """y = W_down act(W_gate x, W_up x). x, out: (T, hidden); gate, up: (T, inner), scratch."""
    linear(x, w.gate_proj, gate)
    linear(x, w.up_proj, up)
    kernels.glu(gate, up, act, gate)
    linear(gate, w.down_proj, out)


class Mixture:
    """The mixtures of one network: where experts come from, and which were looked over already."""

    def __init__(
        self,
        c: ModelConfig,
        linear: Linear,
        experts: ExpertSource,
        on_route: OnRoute | None = None,
        *,
        int8_activations: bool = False,
    ) -> None:
        """on_route: told every routing decision, (layer, ids (T, chosen)); the ids are only lent. int8_activations:
        what enters an expert's matrices is rounded to int8 per group of 32, another numerics (MXFP4 experts only)."""
        self._int8 = int8_activations
        self._c = c
        self._on_route = on_route
        self._act = activation(c)
        self._linear = linear
        self._experts = experts
        self._groups = Groups(c.num_experts_per_token)
        self._looked_over: dict[int, set[int]] = {layer: set() for layer in c.moe_layers}

    def __call__(
        self, layer: int, w: MoeWeights, x: F32, b: FfnBuffers, ids: I32, out: F32, rows_failed: RowsFailed
    ) -> None:
        """A mixture layer. x: (T, hidden), normalised; out: (T, hidden). ids: (T, chosen) int32, written: the routing.

        A row whose router logits are not finite, or one of whose experts cannot be had, is handed to `rows_failed`
        and comes out as rubbish; every other row is what it would have been. Raises StorageError when a read fails
        that all rows need.
        """
        linear = self._linear
        # ℓ = W_r x; sel = top-k of σ(ℓ) + bias; w_e = σ(ℓ)_e / Σ_sel σ(ℓ) · scaling
        linear(x, w.router, b.logits)
        self._route(layer, w, b, ids, rows_failed)
        if self._on_route is not None:
            self._on_route(layer, ids)
        wanted = self._groups(ids)
        with self._experts.acquire(layer, list(wanted)) as arriving:
            # what needs no expert, while the first ones are being read
            if w.down_proj is None:
                z = x
            else:
                linear(x, w.down_proj, b.z)
                z = b.z
            if w.shared is not None:
                gated_mlp(w.shared, self._act, linear, x, b.shared_gate, b.shared_up, b.shared)
            self._compute(layer, arriving, wanted, z, b.slots, rows_failed)
        while wanted:  # an expert could not be read: whoever needs it is out, and the others go on
            with self._experts.acquire(layer, list(wanted)) as arriving:
                self._compute(layer, arriving, wanted, z, b.slots, rows_failed)
        # u = Σ_{e in sel} w_e · expert_e(z), in router order
        if w.up_proj is None:
            kernels.combine(b.answers, b.weights, out)
        else:
            kernels.combine(b.answers, b.weights, b.u)
            if w.norm is not None:
                kernels.rmsnorm(b.u, w.norm, self._c.rms_norm_eps, b.u)
            linear(b.u, w.up_proj, out)
        # y = r + h
        if w.shared is not None:
            np.add(out, b.shared, out=out)

    def _route(self, layer: int, w: MoeWeights, b: FfnBuffers, ids: I32, rows_failed: RowsFailed) -> None:
        """Fill ids and b.weights. Rows with a logit that is not finite are failed and routed as if all were 0."""
        c = self._c

        def routed() -> bool:
            return kernels.route(
                b.logits, w.bias, c.num_experts_per_token, c.renormalize, c.routed_scaling_factor, ids, b.weights
            )

        if routed():
            return
        bad = np.flatnonzero(~np.isfinite(b.logits).all(axis=1))
        rows_failed(bad, StoreError(f"numbers in layer {layer} are not finite before the router"))
        b.logits[bad] = 0
        if not routed():
            raise StoreError(f"the router's correction bias in layer {layer} is not finite; the checkpoint is damaged")

    def _compute(
        self,
        layer: int,
        arriving: Acquisition,
        wanted: dict[int, Wanted],
        z: F32,
        slots: F32,
        rows_failed: RowsFailed,
    ) -> None:
        """Take every expert as it arrives and out of `wanted`. When one cannot be read its rows are failed, and
        those that only they wanted are out of `wanted` too: what is left must be asked for again."""
        looked_over = self._looked_over[layer]
        taken: list[Taken] = []
        try:
            for expert in arriving.as_they_arrive():
                rows, filled = wanted.pop(expert.id)
                if expert.id not in looked_over:
                    damage = _damage(layer, expert)
                    if damage is not None:
                        rows_failed(rows.astype(np.intp), damage)
                        continue
                    looked_over.add(expert.id)
                if expert.matrices is None:
                    expert.matrices = _matrices(expert)
                taken.append((expert.matrices, rows, filled))
                if not arriving.was_resident:  # its memory is wanted by others: compute it before the next arrives
                    self._answer(taken, z, slots)
            self._answer(taken, z, slots)
        except StorageError as error:
            failed = wanted.pop(error.expert, None) if error.expert is not None else None
            if failed is None or error.layer not in (layer, None):
                raise
            rows_failed(failed[0].astype(np.intp), error)
            for expert_id in [e for e, (rows, _) in wanted.items() if np.isin(rows, failed[0]).all()]:
                del wanted[expert_id]

    def _answer(self, taken: list[Taken], z: F32, slots: F32) -> None:
        """Compute the experts taken so far into their slots, in one call, and forget them."""
        if taken:
            kernels.experts(
                z,
                [w for w, _, _ in taken],
                [r for _, r, _ in taken],
                self._act,
                slots,
                [s for _, _, s in taken],
                self._int8,
            )
            taken.clear()


def _damage(layer: int, expert: Expert) -> StoreError | None:
    """What makes an expert unusable, looked for when it is first seen: an MXFP4 scale of 255 has no value (2.5)."""
    for name, array in expert.parts.items():
        if name.endswith("weight_scale") and not kernels.mxfp4_scales_valid(array):
            where = f"expert {expert.id} of layer {layer}, {name}"
            return StoreError(f"{where}: an MXFP4 scale of 255, which is not a number; the checkpoint is damaged")
    return None


class Groups:
    """Who wants which expert, from a routing."""

    def __init__(self, chosen: int) -> None:
        self._chosen = chosen
        row_0 = np.zeros(1, np.int32)
        # one token: every expert is wanted by row 0, and decoding should not build these arrays again and again
        self._single = [(row_0, np.array([slot], np.int32)) for slot in range(chosen)]

    def __call__(self, ids: I32) -> dict[int, Wanted]:
        """ids: (T, chosen) int32. Keys in router order over rows: the first row's best first, each expert once."""
        if len(ids) == 1:
            return dict(zip(ids[0].tolist(), self._single, strict=True))
        flat = ids.reshape(-1)
        order = np.argsort(flat, kind="stable").astype(np.int32)
        groups = np.split(order, np.flatnonzero(np.diff(flat[order])) + 1)
        groups.sort(key=lambda slots: slots[0])
        return {int(flat[slots[0]]): (slots // self._chosen, slots) for slots in groups}


def _matrices(expert: Expert) -> kernels.ExpertWeights:
    """The three matrices as kernels take them: MXFP4 iff the parts are packed."""
    parts = expert.parts
    if "w1.weight" in parts:
        return kernels.ExpertWeights(parts["w1.weight"], parts["w3.weight"], parts["w2.weight"])
    w1, w3, w2 = (
        kernels.Mxfp4(parts[f"{name}.weight_packed"], parts[f"{name}.weight_scale"]) for name in ("w1", "w3", "w2")
    )
    return kernels.ExpertWeights(w1, w3, w2)
