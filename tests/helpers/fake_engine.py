"""An engine that follows a script: `EngineClient` without a model, for every case the HTTP surface must survive.

A script says, for one request, what happens in order: token ids, `Progress`, a `Gate` to wait at, an exception
to raise. Nothing here sleeps; a test opens gates.
"""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import xxhash
from helpers import vocabularies

from sluice.daemon.engine.requests import Event, Finished, GenerationRequest, Progress, Token
from sluice.io.errors import QueueFull


class Gate:
    """A place to wait. `reached` tells the test that somebody stands there, `open` lets everyone on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()

    def open(self) -> None:
        self._open.set()

    async def wait(self) -> None:
        self.reached.set()
        await self._open.wait()


Step = int | Token | Progress | Gate | BaseException
Script = Callable[[GenerationRequest], Iterable[Step]]


def say(*ids: int) -> Script:
    """The same ids for every request."""
    return lambda request: list(ids)


@dataclass(eq=False)
class FakeGeneration:
    engine: FakeEngine
    request: GenerationRequest
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    produced: list[int] = field(default_factory=list)

    async def events(self) -> AsyncIterator[Event]:
        request = self.request
        for step in self.engine.script(request):
            await asyncio.sleep(0)
            if self.gone.is_set():
                return
            if isinstance(step, Gate):
                waits = [asyncio.ensure_future(step.wait()), asyncio.ensure_future(self.gone.wait())]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
            elif isinstance(step, BaseException):
                self.engine.live.discard(self)
                raise step
            elif isinstance(step, Progress):
                yield step
            else:
                token = self._token(step)
                if request.constraint is not None:
                    request.constraint.accept(token.id)
                self.produced.append(token.id)
                yield token
                if token.id in request.stop_ids or len(self.produced) == request.max_tokens:
                    yield self._finished("stop" if token.id in request.stop_ids else "length")
                    return
        if self.gone.is_set():
            return
        if request.stop_ids:  # a script that ends without a stop means one
            self.produced.append(min(request.stop_ids))
            yield self._token(min(request.stop_ids))
        yield self._finished("stop")

    def _token(self, step: int | Token) -> Token:
        if isinstance(step, Token):
            return step
        asked = self.request.top_logprobs
        if asked is None:
            return Token(step)
        alternatives = [(step, -0.5)] + [((step + i) % self.engine.vocab_size, -1.0 - i) for i in range(1, asked)]
        return Token(step, -0.5, tuple(alternatives[:asked]))

    def _finished(self, reason: str) -> Finished:
        self.engine.live.discard(self)
        digest = xxhash.xxh3_128_hexdigest(struct.pack(f"<{len(self.produced)}i", *self.produced))
        return Finished(
            finish_reason=reason,
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=len(self.produced),
            logits_fingerprint=digest,
            seed=self.request.sampling.seed or 0,
            queue_seconds=0.25,
            prefill_seconds=0.5,
            decode_seconds=0.125 * len(self.produced),
        )

    def cancel(self) -> None:
        if self in self.engine.live:
            self.engine.live.discard(self)
            self.engine.cancelled += 1
        self.gone.set()


class FakeEngine:
    """`live` holds the generations that neither ended nor were cancelled: the slots a leak would keep."""

    def __init__(
        self, script: Script, *, vocab_size: int = 4096, context: int = 512, slots: int = 1000, ready: bool = True
    ) -> None:
        self.script = script
        self.vocab_size = vocab_size
        self.context = context
        self.slots = slots
        self.ready = ready
        self.submitted: list[GenerationRequest] = []
        self.live: set[FakeGeneration] = set()
        self.cancelled = 0
        self.submit_error: BaseException | None = None

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if self.submit_error is not None:
            raise self.submit_error
        if len(self.live) >= self.slots:
            raise QueueFull(f"the queue is full ({self.slots} requests)", retry_after_seconds=7)
        assert request.prompt_ids
        assert 1 <= request.max_tokens <= self.context - len(request.prompt_ids)
        generation = FakeGeneration(self, request)
        self.submitted.append(request)
        self.live.add(generation)
        return generation

    def status(self) -> dict[str, object]:
        return {
            "state": "ready" if self.ready else "loading",
            "queue": {"waiting": 0, "running": len(self.live), "max_queue": self.slots, "max_sequences": 4},
            "requests": [],
            "rates": {"decode_tokens_per_second": 2.5},
            "tokens": {"prompt": 10, "generated": sum(len(g.produced) for g in self.live)},
            "memory": {"plan": {"trunk": 1000}, "plan_bytes": 1000, "limit_bytes": 6000, "rss_bytes": 5000},
            "io": {
                "backend": "fake",
                "trunk": {"pinned_bytes": 800, "ring_bytes": 100, "streamed_bytes": 0},
                "experts": {"hits": 3, "misses": 1, "bytes_read": 17, "cached": 2, "capacity_bytes": 34},
                "drives": [{"name": "nvme0", "bytes": 17, "reads": 1, "busy_seconds": 0.5, "in_flight": 0}],
                "prediction": {"hinted": 4, "used": 3, "wasted_bytes": 17},
            },
        }


def byte_ids(text: str) -> list[int]:
    """One token a byte: the finest cut a text can have in the small vocabulary."""
    return [_single_bytes()[byte] for byte in text.encode()]


@functools.cache
def _single_bytes() -> dict[int, int]:
    tokenizer = vocabularies.mini()
    tokens = ((tokenizer.token_bytes(rank), rank) for rank in range(tokenizer.n_ranks))
    return {token[0]: rank for token, rank in tokens if len(token) == 1}


def reply_ids(*pieces: str, encode: Callable[[str], list[int]] | None = None) -> list[int]:
    """Ids of a reply written with markers: names of control tokens are those tokens, the rest is text, cut by
    `encode` (the tokenizer's own way when it is None)."""
    tokenizer = vocabularies.mini()
    out: list[int] = []
    for piece in pieces:
        control = tokenizer.control.get(piece)
        out += [control] if control is not None else (encode or tokenizer.encode_text)(piece)
    return out


OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"


def tag(name: str) -> list[str]:
    return [OPEN, name, SEP]


def end_tag(name: str) -> list[str]:
    return [CLOSE, name, SEP]


def answer(content: str, thought: str | None = None, calls: Sequence[str] = ()) -> list[str]:
    """The pieces of a well-formed reply. thought None: thinking was off. calls: bodies of call elements, as
    `name|key=value|...` with string values."""
    pieces: list[str] = []
    if thought is not None:
        pieces += [thought, *end_tag("think"), *tag("response")]
    pieces += [content, *end_tag("response")]
    if calls:
        pieces += tag("tools")
        for number, call in enumerate(calls, start=1):
            name, *arguments = call.split("|")
            pieces += tag(f'call tool="{name}" index="{number}"')
            for argument in arguments:
                key, _, value = argument.partition("=")
                pieces += [*tag(f'argument key="{key}" type="string"'), value, *end_tag("argument")]
            pieces += end_tag("call")
        pieces += end_tag("tools")
    return [*pieces, *end_tag("message"), END]
