"""One answer while it arrives: the daemon's chunks and comments as a few plain events, and the whole at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from sluice.daemon.client.connection import Connection
from sluice.daemon.client.sse import Comment


@dataclass(frozen=True, slots=True)
class Waiting:
    """No token yet. stage: "accepted", "queued", "prefill" or "decode"; values as the daemon's comment has them."""

    stage: str
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Thought:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """More of the answer."""

    text: str


AnswerEvent = Waiting | Thought | Said


@dataclass(slots=True)
class Answer:
    """What has arrived so far. first_token_seconds and seconds are wall time since the request; usage as the daemon
    counts it, empty for an answer that was stopped."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    pieces: int = 0
    first_token_seconds: float | None = None
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens generated; until the daemon has counted, the pieces that arrived."""
        return int(self.usage.get("completion_tokens") or self.pieces)

    @property
    def tokens_per_second(self) -> float:
        """Rate after the first token; 0.0 while unknown."""
        if self.first_token_seconds is None or self.tokens < 2:
            return 0.0
        spent = self.seconds - self.first_token_seconds
        return (self.tokens - 1) / spent if spent > 0.0 else 0.0

    def message(self) -> dict[str, Any]:
        """The assistant message for the next request's history, reasoning included: the model is made to see it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def report(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            **self.identity,
            **self.message(),
            "finish_reason": self.finish_reason,
            "usage": self.usage,
            "timings": {
                "first_token_seconds": self.first_token_seconds,
                "seconds": self.seconds,
                "tokens_per_second": self.tokens_per_second,
            },
        }


def ask_daemon(
    connection: Connection,
    body: Mapping[str, Any],
    answer: Answer,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[AnswerEvent, None, None]:
    """Stream one chat completion into `answer`, yielding what to show. Closing the iterator stops the generation.

    Raises what `Connection.stream` raises; `answer` then holds what had arrived.
    """
    began = clock()
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with closing(connection.stream("/v1/chat/completions", request)) as events:
        for event in events:
            answer.seconds = clock() - began
            if isinstance(event, Comment):
                stage, *pairs = event.text.split()
                yield Waiting(stage, dict(pair.partition("=")[::2] for pair in pairs))
                continue
            for key in ("id", "model", "system_fingerprint", "sluice"):
                if event.get(key):
                    answer.identity[key] = event[key]
            if event.get("usage"):
                answer.usage = event["usage"]
            for choice in event.get("choices", ()):
                yield from _apply(choice, answer)


def _apply(choice: Mapping[str, Any], answer: Answer) -> Iterator[AnswerEvent]:
    delta = choice.get("delta") or {}
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    calls = delta.get("tool_calls") or ()
    if thought or delta.get("content") or calls:
        answer.pieces += 1
        if answer.first_token_seconds is None:
            answer.first_token_seconds = answer.seconds
    if thought:
        answer.reasoning += thought
        yield Thought(thought)
    if delta.get("content"):
        answer.content += delta["content"]
        yield Said(delta["content"])
    for call in calls:
        yield Said(_add_call(call, answer.tool_calls))


def _add_call(part: Mapping[str, Any], calls: list[dict[str, Any]]) -> str:
    """Add a tool call's fragment; the text that shows it."""
    function = part.get("function") or {}
    shown = ""
    while len(calls) <= int(part.get("index", 0)):
        shown = f"\n[calls {function.get('name', '')} "
        calls.append({"id": part.get("id"), "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[int(part.get("index", 0))]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""
    return shown + (function.get("arguments") or "")
