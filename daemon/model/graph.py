"""The layer graph: tokens in, logits out (specification 3.1). Read it beside section 3.

Owns one forward pass over several sequences from embedding to head, and who is dropped from it and why; `layer`
has what happens inside a layer.
Weights come from `sluice.io` when they are there; arithmetic is `sluice.kernels`; what happens between passes
is the engine's. A pass blocks its thread until it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice import kernels
from sluice.daemon.model.attention import Rows
from sluice.daemon.model.batch import PassResult, Segment
from sluice.daemon.model.config import ModelConfig
from sluice.daemon.model.feedforward import OnRoute
from sluice.daemon.model.layer import LayerRun, mix
from sluice.daemon.model.scratch import F32, Arena, Scratch
from sluice.daemon.model.state import SequenceState
from sluice.daemon.model.weights import Linear, MoeWeights, load_weights
from sluice.io.errors import ContextExceeded, RequestError, SluiceError, StoreError
from sluice.io.experts import ExpertSource
from sluice.io.trunk import TrunkSource

OnLayer = Callable[[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Lookahead:
    """How far experts are foreseen: the best `width` of each row, for the next `layers` layers; width 0 is off.

    Only layers whose router is pinned are foreseen (`names.bind(pin_routers=True)`). Reads only: results never
    depend on it."""

    width: int = 0
    layers: int = 1


class Network:
    """One network over its weights. One pass at a time, from one thread; `lookahead` may be changed between passes."""

    def __init__(
        self,
        config: ModelConfig,
        trunk: TrunkSource,
        experts: ExpertSource,
        *,
        prefix: str,
        lookahead: Lookahead | None = None,
        on_route: OnRoute | None = None,
        int8_activations: bool = False,
    ) -> None:
        """prefix: what text tensors' names begin with (`names.bind`). Vectors are fetched now, matrices never.
        on_route(layer, ids) sees every routing decision, (T, chosen) int32, best first; it must not keep ids.
        int8_activations: experts take their inputs rounded to int8 per group of 32, another numerics."""
        self.config = config
        self.lookahead = lookahead or Lookahead()
        self.vocab_size = config.vocab_size
        self.layers = config.num_hidden_layers
        self._trunk = trunk
        self._experts = experts
        self._linear = Linear(trunk)
        self._weights = load_weights(config, trunk, prefix)
        self._layer = LayerRun(config, self._linear, trunk, experts, on_route, int8_activations=int8_activations)
        self._arena = Arena(config)

    def new_state(self, context_tokens: int) -> SequenceState:
        """A fresh state for one sequence. Raises ContextExceeded beyond the model's own limit."""
        return SequenceState(self.config, context_tokens)

    def forward(self, segments: Sequence[Segment], on_layer: OnLayer | None = None) -> PassResult:
        """Take in every segment's tokens and return the logits asked for.

        Before each layer `on_layer(layer)` names segments (by index) to drop there. A segment fails alone when its
        numbers stop being finite or one of its experts cannot be read. Dropped and failed segments' states are
        invalid afterwards, and everybody's when this raises: StorageError or StoreError for a weight that all
        need, RequestError or ContextExceeded (before anything was touched) for what was asked.
        """
        self._check(segments)
        skip = () if any(s.logits != "none" for s in segments) else (self._weights.head,)
        for segment in segments:
            segment.state.valid = False
        self._trunk.begin_pass(skip)
        try:
            run = _Pass(self, segments)
            with np.errstate(all="ignore"):  # what is not finite is looked for, and told by name
                logits = run.through(on_layer)
        except BaseException as error:
            self._trunk.abort_pass()
            if isinstance(error, ValueError):  # kernels speak of arrays; by now the request was checked
                raise StoreError(f"a weight does not fit the network: {error}") from error
            raise
        if not run.complete:
            self._trunk.abort_pass()
        for sequence in run.sequences:
            state = sequence.state
            state.position += sequence.rows.stop - sequence.rows.start
            state.valid = True
        return PassResult(logits, run.failed)

    def _check(self, segments: Sequence[Segment]) -> None:
        if not segments:
            raise RequestError("a pass without segments")
        if len({id(segment.state) for segment in segments}) != len(segments):
            raise RequestError("two segments of one pass share a state")
        for segment in segments:
            ids, state = segment.token_ids, segment.state
            if ids.ndim != 1 or not len(ids):
                raise RequestError("a segment needs at least one token id")
            if not np.issubdtype(ids.dtype, np.integer):
                raise RequestError(f"token ids are {ids.dtype}, not integers")
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise RequestError(f"a token id is outside 0..{self.vocab_size - 1}")
            if not state.valid:
                raise StoreError("a state that a failed pass left behind cannot go on; reset or restore it")
            if len(ids) > state.room:
                raise ContextExceeded(
                    f"{len(ids)} tokens at position {state.position} exceed the context of {state.context_tokens}"
                )


class _Pass:
    """One pass under way: who is still in it, and the running values of their rows."""

    def __init__(self, network: Network, segments: Sequence[Segment]) -> None:
        self.net = network
        self.c = network.config
        self.w = network._weights
        self.segments = segments
        self.failed: dict[int, SluiceError] = {}
        self.complete = False  # every matrix of the trunk was taken
        self.sequences: list[Rows] = []
        row = 0
        for index, segment in enumerate(segments):
            self.sequences.append(Rows(index, segment.state, slice(row, row + len(segment.token_ids))))
            row += len(segment.token_ids)
        self.s: Scratch = network._arena.rows(row)
        self.blocks = 0  # snapshots in the bank

    def through(self, on_layer: OnLayer | None) -> list[F32 | None]:
        """The whole pass. Returns logits per segment."""
        self._embed()
        for layer in self.w.layers:
            if on_layer is not None or self.failed:
                self._drop(on_layer(layer.index) if on_layer is not None else ())
                if not self.sequences:
                    return [None] * len(self.segments)
            self.blocks = self.net._layer(layer, self.sequences, self.s, self.blocks, self._rows_failed)
            if self.net.lookahead.width:
                self._foresee(layer.index)
        self._drop(())
        return self._logits()

    def _embed(self) -> None:
        """p = E[token]"""
        ids = np.concatenate([segment.token_ids for segment in self.segments]).astype(np.int64)
        self.s.residual.p[...] = self.net._trunk.rows(self.w.embedding, ids)

    def _logits(self) -> list[F32 | None]:
        """h = mix(B + [p]);  logits = lm_head · rms(h), for the rows that are wanted"""
        wanted: list[NDArray[np.intp]] = []
        for sequence in self.sequences:
            rows = np.arange(sequence.rows.start, sequence.rows.stop)
            asked = self.segments[sequence.segment].logits
            wanted.append(rows if asked == "all" else rows[-1:] if asked == "last" else rows[:0])
        result: list[F32 | None] = [None] * len(self.segments)
        rows = np.concatenate(wanted) if wanted else np.empty(0, np.intp)
        if not len(rows):
            self.complete = all(segment.logits == "none" for segment in self.segments)
            return result
        c, r = self.c, self.s.residual
        p = np.ascontiguousarray(r.p[rows])
        x = np.empty_like(p)
        if self.w.output_res is not None:
            bank = np.ascontiguousarray(r.bank[: self.blocks, rows])
            kernels.attnres_mix(bank, self.blocks, p, self.w.output_res, c.rms_norm_eps, x)
            p, x = x, p
        kernels.rmsnorm(p, self.w.final_norm, c.rms_norm_eps, x)
        logits = np.empty((len(rows), c.vocab_size), np.float32)
        self.net._linear(x, self.w.head, logits)
        self.complete = True
        finite = kernels.finite(logits)
        at = 0
        for sequence, count in zip(list(self.sequences), map(len, wanted), strict=True):
            part = logits[at : at + count]
            at += count
            if not count:
                continue
            if not finite and not np.isfinite(part).all():
                self.failed[sequence.segment] = StoreError("logits are not finite; no token is taken from them")
                self.sequences.remove(sequence)
                continue
            result[sequence.segment] = part if self.segments[sequence.segment].logits == "all" else part[0]
        return result

    # --- leaving the pass ---------------------------------------------------------------------------------------

    def _rows_failed(self, rows: NDArray[np.intp], error: SluiceError) -> None:
        """Remember whose rows were lost; they leave at the next layer."""
        for sequence in self.sequences:
            if np.any((rows >= sequence.rows.start) & (rows < sequence.rows.stop)):
                self.failed.setdefault(sequence.segment, error)

    def _drop(self, leaving: Sequence[int]) -> None:
        """Take the failed and the leaving out of the pass and close the ranks of the others' rows."""
        if not self.failed and not leaving:
            return
        staying = [q for q in self.sequences if q.segment not in leaving and q.segment not in self.failed]
        if len(staying) == len(self.sequences):
            return
        if staying:
            rows = np.concatenate([np.arange(q.rows.start, q.rows.stop) for q in staying])
            old = self.s.residual
            p, bank = old.p[rows], old.bank[:, rows]  # copies: the new views share the old ones' memory
            self.s = self.net._arena.rows(len(rows))
            self.s.residual.p[...] = p
            self.s.residual.bank[...] = bank
        row = 0
        for sequence in staying:
            count = sequence.rows.stop - sequence.rows.start
            sequence.rows = slice(row, row + count)
            row += count
        self.sequences = staying

    # --- foreseeing experts -------------------------------------------------------------------------------------

    def _foresee(self, done: int) -> None:
        """Ask the next layers' routers, where they are resident, about this layer's state, and hint at what they
        would choose. (Published recall of the next layer's set by this guess: 59%, its first choice 92%.)

        Uses y's and h's memory, which are free between layers. Reads only: nothing here touches p or the bank.
        """
        c, r = self.c, self.s.residual
        for layer in self.w.layers[done + 1 : done + 1 + self.net.lookahead.layers]:
            router = self.net._trunk.peek(layer.ffn.router) if isinstance(layer.ffn, MoeWeights) else None
            if router is None or not isinstance(layer.ffn, MoeWeights):
                continue
            h = r.p if layer.ffn_res is None else mix(r, self.blocks, layer.ffn_res, c.rms_norm_eps)
            kernels.rmsnorm(h, layer.post_attention_norm, c.rms_norm_eps, r.y)
            logits = self.s.ffn.logits
            kernels.matmul(r.y, router, logits)
            if kernels.route(
                logits, layer.ffn.bias, c.num_experts_per_token, False, 1.0, self.s.ids, self.s.ffn.weights
            ):
                best = self.s.ids[:, : self.net.lookahead.width].T.reshape(-1)  # everybody's first choice first
                self.net._experts.hint(layer.index, list(dict.fromkeys(best.tolist())))
