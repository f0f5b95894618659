"""The engine's thread: admits requests, runs passes, hands out tokens.

Owns the sequences and their states. Leaves the mathematics to the network, the order of work to
`scheduler`, the choice of tokens to `sampler`. Every pass carries all running sequences; requests join
and leave at its borders, and a cancelled or failed sequence leaves at the next layer, alone.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from sluice.daemon.engine.requests import GenerationRequest
from sluice.daemon.engine.scheduler import Slice, WaitingLine, plan_pass
from sluice.daemon.engine.sequence import Phase, Sequence, Sink
from sluice.daemon.engine.sessions import SnapshotCache
from sluice.daemon.model.batch import PassResult, Segment
from sluice.io.errors import ContextExceeded, QueueFull, RequestError, SluiceError

if TYPE_CHECKING:
    from sluice.daemon.model.state import SequenceState

log = logging.getLogger("sluice.engine")

PROGRESS_EVERY_SECONDS = 1.0
"""Within a pass, how often a prompt's progress is told at most: a pass over a streamed trunk takes minutes."""


class ForwardNetwork(Protocol):
    """What the engine needs of a model."""

    vocab_size: int
    layers: int

    def forward(self, segments: Seq[Segment], on_layer: Callable[[int], Seq[int]]) -> PassResult:
        """One pass over all segments. `on_layer(layer)` is called before each layer and names the segments
        (by index) to drop there; dropped and failed segments' states are invalid afterwards."""

    def new_state(self, context_tokens: int) -> SequenceState:
        """A fresh state for one sequence of at most `context_tokens` tokens."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """context: tokens of prompt and answer together. max_sequences: states held at once. max_queue: requests
    waiting. prefill_chunk: prompt tokens in one pass. prefill_share: the part of a chunk left to prompts
    while somebody decodes, in (0, 1]. session_bytes: for snapshots of conversations; 0 keeps none."""

    context: int
    max_sequences: int = 1
    max_queue: int = 64
    prefill_chunk: int = 64
    prefill_share: float = 0.5
    session_bytes: int = 0


@dataclass(slots=True)
class Rates:
    """Exponential averages of what passes cost, for estimates and Retry-After. 0.0 while unknown."""

    pass_seconds: float = 0.0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    request_seconds: float = 0.0

    @staticmethod
    def blend(old: float, new: float) -> float:
        return new if old == 0.0 else 0.8 * old + 0.2 * new


class Engine:
    """Runs generations on a thread of its own. A context manager: entering starts, leaving stops it."""

    def __init__(
        self,
        network: ForwardNetwork,
        limits: EngineLimits,
        *,
        on_logits: Callable[[int, NDArray[np.float32]], None] | None = None,
        before_pass: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """On the engine's thread, before_pass(rows) is told of every pass, and on_logits(sequence number, row) sees
        every row that chooses a token."""
        self.limits = limits
        self.vocab_size = network.vocab_size
        self._network = network
        self._on_logits = on_logits
        self._before_pass = before_pass
        self._clock = clock
        self._wake = threading.Condition()
        self._waiting = WaitingLine(limits.max_queue)
        self._running: list[Sequence] = []
        self._free_states: list[SequenceState] = []
        self._sessions = SnapshotCache(limits.session_bytes)
        self._numbers = 0
        self._stopping = False
        self._draining = False
        self._rates = Rates()
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._layers_done = 0
        self._errands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._thread = threading.Thread(target=self._run, name="sluice-engine", daemon=True)

    # --- from any thread -------------------------------------------------------------------------------------

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the thread; whatever still runs is ended with an error at the next layer. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def drain(self) -> None:
        """Refuse new requests; running and waiting ones go on."""
        with self._wake:
            self._draining = True

    @property
    def accepting(self) -> bool:
        """Whether new requests are taken."""
        return not (self._stopping or self._draining)

    @property
    def active(self) -> int:
        """Requests running or waiting."""
        with self._wake:
            return len(self._running) + len(self._waiting)

    @property
    def idle(self) -> bool:
        with self._wake:
            return not self._running and not len(self._waiting)

    @property
    def layers_done(self) -> int:
        """Layers computed since start: what a watchdog takes for progress."""
        return self._layers_done

    def limit_queue(self, max_queue: int) -> None:
        """Change how many requests may wait; those that wait already stay."""
        with self._wake:
            self.limits = dataclasses.replace(self.limits, max_queue=max_queue)
            self._waiting.limit = max_queue

    def between_passes(self, errand: Callable[[], None]) -> Future[None]:
        """Have `errand` run on the engine's thread when no pass is under way (weights may be moved then)."""
        ended: Future[None] = Future()
        with self._wake:
            if self._stopping:
                raise _ShuttingDown("the daemon is shutting down")
            self._errands.append((errand, ended))
            self._wake.notify_all()
        return ended

    def submit(self, request: GenerationRequest, sink: Sink) -> Sequence:
        """Queue a request whose events go to `sink` on the engine's thread.

        Raises RequestError (ids out of range), ContextExceeded, QueueFull, or SluiceError while draining.
        """
        self._check(request)
        with self._wake:
            if self._stopping or self._draining:
                raise _ShuttingDown("the daemon is shutting down; try again when it is back")
            slots_free = self.limits.max_sequences - len(self._running) - len(self._waiting)
            if self._waiting.full and slots_free <= 0:
                raise QueueFull(
                    f"the queue is full ({len(self._waiting)} waiting, limit {self.limits.max_queue})",
                    self._retry_after(),
                )
            self._numbers += 1
            sequence = Sequence(self._numbers, request, sink, self._clock())
            self._waiting.add(sequence)
            position = len(self._waiting) + len(self._running) - self.limits.max_sequences
            self._wake.notify_all()
        sequence.progress(0.0, position=max(0, position))
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Stop a sequence within one layer and free its slot. Idempotent, from any thread."""
        with self._wake:
            sequence.cancel()
            self._wake.notify_all()

    def status(self) -> dict[str, object]:
        """The engine's part of `EngineClient.status`."""
        now = self._clock()
        with self._wake:
            waiting, running = self._waiting.in_order(), list(self._running)
            state = "draining" if self._draining or self._stopping else "ready"
        return idle_status(self.limits) | {
            "state": state,
            "queue": _queue(self.limits, len(waiting), len(running)),
            "requests": [_describe(s, now) for s in running + waiting],
            "rates": {
                "prefill_tokens_per_second": self._rates.prefill_tokens_per_second,
                "decode_tokens_per_second": self._rates.decode_tokens_per_second,
                "pass_seconds": self._rates.pass_seconds,
            },
            "tokens": {"prompt": self._prompt_tokens, "generated": self._generated_tokens},
        }

    def _check(self, request: GenerationRequest) -> None:
        if not request.prompt_ids:
            raise RequestError("the prompt is empty", param="prompt")
        needed = len(request.prompt_ids) + request.max_tokens
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}; it must be at least 1", param="max_tokens")
        if needed > self.limits.context:
            raise ContextExceeded(
                f"{len(request.prompt_ids)} prompt tokens and {request.max_tokens} new ones exceed "
                f"the context of {self.limits.context}",
                param="prompt",
            )
        for position, token_id in enumerate(request.prompt_ids):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"token id {token_id} at position {position} is outside 0..{self.vocab_size - 1}", param="prompt"
                )

    def _retry_after(self) -> int:
        per_request = self._rates.request_seconds or 10.0
        return max(1, math.ceil(per_request * (len(self._waiting) + 1) / self.limits.max_sequences))

    # --- on the engine's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._next_work():
            self._one_pass()
        with self._wake:
            everyone = self._running + self._waiting.in_order()
        for sequence in everyone:
            self._end(sequence, _ShuttingDown("the daemon stopped before this answer was finished"))

    def _next_work(self) -> bool:
        """Wait until something runs (True) or the engine stops (False)."""
        with self._wake:
            self._drop_left()
            self._run_errands()
            while not self._admit() and not self._stopping:
                self._wake.wait()
                self._drop_left()
                self._run_errands()
            if self._stopping:
                for _, ended in self._errands:
                    ended.cancel()
                return False
            fresh = [s for s in self._running if s.state is None]
        for sequence in fresh:  # outside the lock: a state is hundreds of megabytes to clear
            if self._free_states:
                state = self._free_states.pop()
                state.reset()
            else:
                state = self._network.new_state(self.limits.context)
            cached = self._sessions.restore_longest(sequence.prompt, state) if len(self._sessions) else 0
            sequence.start(state, self._clock(), cached)
        return True

    def _run_errands(self) -> None:
        while self._errands and not self._stopping:
            errand, ended = self._errands.popleft()
            self._wake.release()  # an errand may read gigabytes; clients are not to wait for it
            try:
                errand()
            except BaseException as error:
                ended.set_exception(error)
            else:
                ended.set_result(None)
            finally:
                self._wake.acquire()

    def _drop_left(self) -> None:
        for sequence in self._waiting.remove_cancelled():
            self._end(sequence)
        for sequence in [s for s in self._running if s.cancelled]:
            self._end(sequence)

    def _admit(self) -> bool:
        """Fill the free slots from the queue; whether anybody runs."""
        while len(self._running) < self.limits.max_sequences and (sequence := self._waiting.pop()) is not None:
            self._running.append(sequence)
        return bool(self._running)

    def _one_pass(self) -> None:
        slices = plan_pass(self._running, self.limits.prefill_chunk, self.limits.prefill_share)
        segments = [self._segment(part) for part in slices]
        if self._before_pass is not None:
            self._before_pass(sum(part.tokens for part in slices))
        began = self._clock()
        try:
            result = self._network.forward(segments, self._layer_watch(slices, began))
        except SluiceError as error:
            result = PassResult([None] * len(slices), dict.fromkeys(range(len(slices)), error))
        except Exception as bug:
            log.exception("a pass ended in a bug")
            wrapped = SluiceError(f"internal error: {bug}")
            result = PassResult([None] * len(slices), dict.fromkeys(range(len(slices)), wrapped))
        self._account(slices, self._clock() - began)
        for index, part in enumerate(slices):
            self._settle(part, result.logits[index], result.failed.get(index))

    def _segment(self, part: Slice) -> Segment:
        sequence = part.sequence
        assert sequence.state is not None
        chooses = sequence.phase is Phase.DECODE or part.tokens == sequence.prompt_left
        return Segment(sequence.state, sequence.next_tokens(part.tokens), "last" if chooses else "none")

    def _layer_watch(self, slices: list[Slice], began: float) -> Callable[[int], list[int]]:
        """What is done before each layer: name those that left, and tell waiting clients how far their prompt is."""
        told_at = began

        def on_layer(layer: int) -> list[int]:
            nonlocal told_at
            self._layers_done += 1
            now = self._clock()
            if now - told_at >= PROGRESS_EVERY_SECONDS:
                told_at = now
                for part in slices:
                    if part.sequence.phase is Phase.PREFILL:
                        behind = part.tokens * layer // self._network.layers
                        part.sequence.progress(self._rates.prefill_tokens_per_second, extra_done=behind)
            if self._stopping:
                return list(range(len(slices)))
            return [i for i, part in enumerate(slices) if part.sequence.cancelled]

        return on_layer

    def _account(self, slices: list[Slice], seconds: float) -> None:
        rates = self._rates
        rates.pass_seconds = Rates.blend(rates.pass_seconds, seconds)
        prefilled = sum(p.tokens for p in slices if p.sequence.phase is Phase.PREFILL)
        decoded = sum(1 for p in slices if p.sequence.phase is Phase.DECODE)
        if seconds > 0.0 and prefilled:
            rates.prefill_tokens_per_second = Rates.blend(rates.prefill_tokens_per_second, prefilled / seconds)
        if seconds > 0.0 and decoded:
            rates.decode_tokens_per_second = Rates.blend(rates.decode_tokens_per_second, decoded / seconds)
        self._prompt_tokens += prefilled
        self._generated_tokens += decoded

    def _settle(self, part: Slice, row: NDArray[np.float32] | None, failure: SluiceError | None) -> None:
        sequence = part.sequence
        if sequence.cancelled or self._stopping:
            if sequence.cancelled:
                self._end(sequence)
            return
        if failure is not None:
            self._end(sequence, failure)
            return
        if sequence.phase is Phase.PREFILL:
            complete = sequence.prompt_advanced(part.tokens)
            sequence.progress(self._rates.prefill_tokens_per_second)
            if not complete:
                return
            self._remember(sequence)
        assert row is not None
        if self._on_logits is not None:
            self._on_logits(sequence.number, row)
        try:
            finished = sequence.take_logits(row, self._clock())
        except Exception as bug:
            log.exception("choosing a token ended in a bug")
            self._end(sequence, SluiceError(f"internal error while choosing a token: {bug}"))
            return
        if finished is not None:
            self._rates.request_seconds = Rates.blend(
                self._rates.request_seconds, finished.prefill_seconds + finished.decode_seconds
            )
            sequence.tell(finished)
            self._remember(sequence)
            self._end(sequence)

    def _remember(self, sequence: Sequence) -> None:
        """Keep a snapshot for the next turn, where sessions have a budget."""
        if self.limits.session_bytes and sequence.state is not None:
            self._sessions.keep(sequence.consumed, sequence.state)

    def _end(self, sequence: Sequence, error: SluiceError | None = None) -> None:
        """Free the slot and close the sink, with the error if there is one."""
        with self._wake:
            if sequence in self._running:
                self._running.remove(sequence)
        if sequence.state is not None:
            self._free_states.append(sequence.state)
            sequence.state = None
        sequence.phase = Phase.ENDED
        if error is not None:
            sequence.tell(error)
        sequence.tell(None)


def idle_status(limits: EngineLimits) -> dict[str, object]:
    """What the status says before there is an engine: everything at rest."""
    return {
        "state": "loading",
        "queue": _queue(limits, 0, 0),
        "requests": [],
        "rates": {"prefill_tokens_per_second": 0.0, "decode_tokens_per_second": 0.0, "pass_seconds": 0.0},
        "tokens": {"prompt": 0, "generated": 0},
    }


def _queue(limits: EngineLimits, waiting: int, running: int) -> dict[str, int]:
    return {
        "waiting": waiting,
        "running": running,
        "max_queue": limits.max_queue,
        "max_sequences": limits.max_sequences,
    }


class _ShuttingDown(SluiceError):
    http_status = 503


def _describe(sequence: Sequence, now: float) -> dict[str, object]:
    since_first = now - sequence.first_token_at
    decoding = sequence.phase is Phase.DECODE and sequence.generated > 1 and since_first > 0
    return {
        "id": sequence.number,
        "phase": sequence.phase.value,
        "prompt_tokens": len(sequence.prompt),
        "prompt_done": sequence.prompt_done,
        "generated": sequence.generated,
        "max_tokens": sequence.request.max_tokens,
        "priority": sequence.request.priority,
        "seconds": now - sequence.submitted_at,
        "tokens_per_second": (sequence.generated - 1) / since_first if decoding else 0.0,
    }
