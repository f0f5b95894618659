"""Snapshots of states, so that a conversation that goes on need not be computed again from its first token.

A recurrent state is valid at exactly one position, so a snapshot serves a prompt only if all of its tokens
begin that prompt. They are taken where the next turn will look: at the end of a prompt, and at the end of
an answer. A restored state is a copy of every number, so the logits that follow are the same to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import cachetools
import numpy as np
from numpy.typing import NDArray

from sluice.daemon.model.state import SequenceState, Snapshot

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot and the (position,) int32 tokens that led to it."""

    tokens: Ids
    snapshot: Snapshot

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.snapshot.nbytes


class SnapshotCache:
    """The most recently used snapshots within a budget of bytes. Used by the engine's thread alone."""

    def __init__(self, budget_bytes: int) -> None:
        self._kept: cachetools.LRUCache[bytes, Kept] = cachetools.LRUCache(
            maxsize=budget_bytes, getsizeof=lambda kept: kept.nbytes
        )

    def keep(self, tokens: Ids, state: SequenceState) -> None:
        """Take a snapshot of `state`, which stands right after `tokens`. Does nothing when it cannot fit."""
        needed = tokens.nbytes + state.snapshot_bytes()
        key = tokens.tobytes()
        if needed > self._kept.maxsize or key in self._kept:
            return
        while self._kept.currsize + needed > self._kept.maxsize:  # before the copy: the budget is a promise
            self._kept.popitem()
        self._kept[key] = Kept(tokens.copy(), state.snapshot())

    def restore_longest(self, prompt: Ids, state: SequenceState) -> int:
        """Put `state` where the longest kept beginning of `prompt` ends; returns its length, 0 when there is none.

        At least one token of the prompt is left, for its logits choose the first token of the answer.
        """
        best: Kept | None = None
        for kept in self._kept.values():
            length = len(kept.tokens)
            fits = length < len(prompt) and length <= state.context_tokens
            if fits and (best is None or length > len(best.tokens)) and np.array_equal(kept.tokens, prompt[:length]):
                best = kept
        if best is None:
            return 0
        self._kept[best.tokens.tobytes()]  # a use: it stays longer
        state.restore(best.snapshot)
        return len(best.tokens)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return int(self._kept.currsize)
