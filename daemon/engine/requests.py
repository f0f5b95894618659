"""What passes between the HTTP surface and the engine: values only, so that a fake engine can stand in.

The engine runs in threads of its own; an `EngineClient` lives on an event loop and hands events over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenConstraint(Protocol):
    """A grammar's view of one generation: which tokens may come next (structured output, forced tools)."""

    def allowed(self) -> NDArray[np.bool_] | None:
        """(vocab,) bool, True where the token may come next; None when every token may."""

    def accept(self, token_id: int) -> None:
        """Advance past a token that was chosen."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from its logit row. temperature 0 is greedy (ties: lowest id).

    top_k 0 and min_p 0.0 mean off. `seed` None draws one at submission; the effective seed is reported.
    The random number of the i-th generated token depends on (seed, i) alone, never on the batch.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    prompt_ids: at least one id, each in [0, vocab). max_tokens: >= 1, already clamped to the context.
    stop_ids end the generation (the stop token is counted and reported, flagged by `finish_reason`).
    top_logprobs: None for no log-probabilities, else 0..20 alternatives beside the chosen token.
    priority: lower goes first (0 people, 10 background); ties by arrival. constraint: see TokenConstraint.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    priority: int = 0
    constraint: TokenConstraint | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Queued or in prefill. done/total are prompt tokens; rate in tokens per second (0.0 while unknown);
    position is the place in the queue (0 once running)."""

    done: int
    total: int
    rate: float
    position: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. logprob is the natural log-probability under the model's own distribution
    (before temperature and cuts), None unless asked for; top is ((id, logprob), ...) best first.
    fingerprint: `Finished.logits_fingerprint` as it would be if this token were the last; "" where unknown."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end. finish_reason: "stop" (a stop id, which was the last Token) or "length".

    logits_fingerprint: xxh3-128 hex over the little-endian f32 logit rows that chose each token.
    Seconds are wall time: queued, prefill, decode. cached_tokens: prompt tokens served from a snapshot.
    """

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logits_fingerprint: str
    seed: int
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cached_tokens: int = 0


Event = Progress | Token | Finished


class Generation(Protocol):
    """One running request, as its owner on the event loop sees it."""

    def events(self) -> AsyncIterator[Event]:
        """Progress*, then Token*, then exactly one Finished; a SluiceError is raised in place of the rest."""

    def cancel(self) -> None:
        """Stop within one layer and free the slot. Idempotent; `events` then simply ends."""


class EngineClient(Protocol):
    """The engine as the HTTP surface sees it."""

    vocab_size: int
    context: int

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue a request. Raises QueueFull, ContextExceeded or BudgetError (state could never fit) at once."""

    def status(self) -> dict[str, object]:
        """A JSON-ready snapshot for /v1/status, all keys always present:

        state: "loading" | "ready" | "draining" | "failed"
        queue: {waiting, running, max_queue, max_sequences}
        requests: [{id, phase: "queued" | "prefill" | "decode", prompt_tokens, prompt_done, generated,
            max_tokens, priority, seconds, tokens_per_second}]
        rates: {prefill_tokens_per_second, decode_tokens_per_second, pass_seconds}
        tokens: {prompt, generated}   totals since start
        memory: {plan: {term: bytes}, plan_bytes, limit_bytes, rss_bytes, peak_rss_bytes}
        io: {backend, drives: [{name, reads, bytes, busy_seconds, in_flight}],
            trunk: {pinned_bytes, ring_bytes, streamed_bytes},
            experts: {hits, misses, bytes_read, cached, capacity_bytes},
            prediction: {hinted, used, wasted_bytes}}
        """

    @property
    def ready(self) -> bool:
        """Whether weights are loaded and requests are served."""
