"""One request while it lives in the engine: how far it is, and what it still needs."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from sluice.daemon.engine import sampler
from sluice.daemon.engine.requests import Event, Finished, GenerationRequest, Progress, Token
from sluice.io.errors import SluiceError

if TYPE_CHECKING:
    from sluice.daemon.model.state import SequenceState

Sink = Callable[[Event | SluiceError | None], None]
"""Takes what happens to a sequence, on the engine's thread: events, one error in place of the rest, and
None once nothing more will come (after the end, an error or a cancellation)."""


class Phase(Enum):
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class Sequence:
    """A request, its progress through the prompt and its answer so far. Used by the engine's thread only,
    except `cancel`, which any thread may call."""

    def __init__(self, number: int, request: GenerationRequest, sink: Sink, now: float) -> None:
        self.number = number
        self.request = request
        self.seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        self.phase = Phase.QUEUED
        self.state: SequenceState | None = None
        self.prompt: NDArray[np.int32] = np.asarray(request.prompt_ids, dtype=np.int32)
        self.prompt_done = 0
        self.answer: list[int] = []
        self.cached_tokens = 0
        self.cancelled = False
        self.submitted_at = now
        self.started_at = now
        self.first_token_at = now
        self._sink = sink
        self._fingerprint = xxhash.xxh3_128()

    def cancel(self) -> None:
        """Ask for the end. The engine notices before the next layer."""
        self.cancelled = True

    def start(self, state: SequenceState, now: float, cached_tokens: int = 0) -> None:
        """Begin on a state that stands after the prompt's first `cached_tokens` tokens."""
        self.state, self.started_at, self.phase = state, now, Phase.PREFILL
        self.prompt_done = self.cached_tokens = cached_tokens

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.answer)

    @property
    def consumed(self) -> NDArray[np.int32]:
        """The tokens its state has taken in: the prompt so far, then all of the answer but its last token."""
        return np.concatenate([self.prompt[: self.prompt_done], np.asarray(self.answer[:-1], dtype=np.int32)])

    @property
    def prompt_left(self) -> int:
        return len(self.prompt) - self.prompt_done

    def next_tokens(self, at_most: int) -> NDArray[np.int32]:
        """The ids to compute next: up to `at_most` of the prompt, or the one token just generated."""
        if self.phase is Phase.PREFILL:
            return self.prompt[self.prompt_done : self.prompt_done + at_most]
        return np.asarray(self.answer[-1:], dtype=np.int32)

    def prompt_advanced(self, tokens: int) -> bool:
        """Record a computed piece of the prompt; True when its last logit row chooses the first token."""
        self.prompt_done += tokens
        if self.prompt_left == 0:
            self.phase = Phase.DECODE
        return self.prompt_left == 0

    def take_logits(self, row: NDArray[np.float32], now: float) -> Finished | None:
        """Choose the next token from its (V,) float32 row, tell the sink, and say whether that was the last."""
        request = self.request
        if self.generated == 0:
            self.first_token_at = now
        self._fingerprint.update(np.ascontiguousarray(row, dtype="<f4").tobytes())
        allowed = request.constraint.allowed() if request.constraint is not None else None
        token_id = sampler.choose(row, request.sampling, self.seed, self.generated, allowed)
        if request.constraint is not None:
            request.constraint.accept(token_id)
        self.answer.append(token_id)
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if request.top_logprobs is not None:
            logprob, top = sampler.logprobs(row, token_id, request.top_logprobs)
        self.tell(Token(token_id, logprob, top, self._fingerprint.hexdigest()))
        if token_id in request.stop_ids:
            return self._finished("stop", now)
        if self.generated >= request.max_tokens:
            return self._finished("length", now)
        return None

    def progress(self, rate: float, position: int = 0, extra_done: int = 0) -> None:
        """Tell the sink how far the prompt is; `extra_done` counts the part of a pass already behind it."""
        self.tell(Progress(min(self.prompt_done + extra_done, len(self.prompt)), len(self.prompt), rate, position))

    def tell(self, event: Event | SluiceError | None) -> None:
        if not self.cancelled or event is None:
            self._sink(event)

    def _finished(self, reason: str, now: float) -> Finished:
        return Finished(
            finish_reason=reason,
            prompt_tokens=len(self.prompt),
            completion_tokens=self.generated,
            logits_fingerprint=self._fingerprint.hexdigest(),
            seed=self.seed,
            queue_seconds=self.started_at - self.submitted_at,
            prefill_seconds=self.first_token_at - self.started_at,
            decode_seconds=now - self.first_token_at,
            cached_tokens=self.cached_tokens,
        )
