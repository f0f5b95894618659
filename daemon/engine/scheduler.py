"""Who runs in the next pass. Pure decisions over the sequences at hand; nothing here waits or computes.

A pass costs its bytes of trunk however many rows it has, so every decoding sequence takes part in every
pass and a piece of a prompt rides along. While somebody decodes, the prompt's piece is cut to a share of
the chunk, so that a long prompt slows running answers by a bounded amount and never starves them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from sluice.daemon.engine.sequence import Phase, Sequence


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part in a pass: its next `tokens` tokens (>= 1)."""

    sequence: Sequence
    tokens: int


def plan_pass(running: Iterable[Sequence], prefill_chunk: int, prefill_share: float) -> list[Slice]:
    """The rows of the next pass, decoding sequences first, then prompts by priority and arrival.

    prefill_chunk: prompt tokens a pass may hold (>= 1). prefill_share: the part of it that is left to
    prompts while somebody decodes, in (0, 1]; at least one token, so that a prompt always advances.
    """
    running = list(running)
    slices = [Slice(s, 1) for s in running if s.phase is Phase.DECODE]
    room = max(1, int(prefill_chunk * prefill_share)) if slices else prefill_chunk
    prompts = sorted((s for s in running if s.phase is Phase.PREFILL), key=urgency)
    for sequence in prompts:
        if room == 0:
            break
        tokens = min(room, sequence.prompt_left)
        slices.append(Slice(sequence, tokens))
        room -= tokens
    return slices


def urgency(sequence: Sequence) -> tuple[int, int]:
    """Sort key: lower priority number first, then arrival."""
    return (sequence.request.priority, sequence.number)


@dataclass(slots=True)
class WaitingLine:
    """The bounded queue before the first pass, ordered by urgency. `limit` bounds what waits, not what runs."""

    limit: int
    _heap: list[tuple[tuple[int, int], Sequence]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def full(self) -> bool:
        return len(self._heap) >= self.limit

    def add(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (urgency(sequence), sequence))

    def pop(self) -> Sequence | None:
        return heapq.heappop(self._heap)[1] if self._heap else None

    def remove_cancelled(self) -> list[Sequence]:
        """Take out, and return, those whose clients have left."""
        gone = [s for _, s in self._heap if s.cancelled]
        if gone:
            self._heap = [entry for entry in self._heap if not entry[1].cancelled]
            heapq.heapify(self._heap)
        return gone

    def in_order(self) -> list[Sequence]:
        return [s for _, s in sorted(self._heap, key=lambda entry: entry[0])]
