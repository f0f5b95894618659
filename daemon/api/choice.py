"""One of a request's `n` answers while it is written: tokens to reply events, and when it is complete.

The reader (chat or plain text) decides what tokens mean; this counts, holds log-probabilities back with the
text they belong to, and keeps the finish until the engine has said how the generation ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

from sluice.daemon.chat.detokenizer import Detokenizer
from sluice.daemon.chat.reply import Content, Finish, ReplyEvent
from sluice.daemon.chat.tokenizer import Tokenizer
from sluice.daemon.engine.requests import Event, Finished, Progress, Token


class Reader(Protocol):
    """`reply.ReplyReader` or `reply.TextReader`."""

    finished: bool
    last_was_content: bool

    def feed(self, token_id: int) -> list[ReplyEvent]: ...

    def finish(self, reason: Literal["stop", "length"]) -> list[ReplyEvent]: ...


class Choice:
    """The index-th answer. `complete` once nothing will change; `finish_reason` is set from then on.

    A choice that completes before the engine's Finished was cut: by a stop string, or because the reply was
    over in another way. Its tokens and its fingerprint cover what came up to the one that cut it, however far the
    engine had gone, so that they repeat.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, reader: Reader, *, want_logprobs: bool) -> None:
        self.index = index
        self.reader = reader
        self.tokens = 0
        self.cached_tokens = 0
        self.complete = False
        self.finish_reason: str | None = None
        self.fingerprint: str | None = None
        self._tokenizer = tokenizer
        self._finish: Finish | None = None
        self._want_logprobs = want_logprobs
        self._shadow = Detokenizer()  # counts the characters of content as the reader decodes them
        self._channel = getattr(reader, "channel", "")
        self._decoded = 0
        self._sent = 0
        self._held: deque[tuple[int, Token]] = deque()

    def feed(self, event: Event) -> tuple[list[ReplyEvent], list[tuple[int, Token]]]:
        """What may now be sent, and the content tokens (with their text offset) that go with it."""
        if self.complete or isinstance(event, Progress):
            return [], []
        if isinstance(event, Finished):
            shown = self._shown(self.reader.finish("length" if event.finish_reason == "length" else "stop"))
            self.fingerprint, self.cached_tokens = event.logits_fingerprint, event.cached_tokens
            return shown, self._end()
        self.tokens += 1
        self.fingerprint = event.fingerprint or None
        shown = self._shown(self.reader.feed(event.id))
        if self._want_logprobs:
            self._hold(event)
        if self.reader.finished and event.id not in self._tokenizer.stop_ids:
            return shown, self._end()
        return shown, self._released()

    def cut(self) -> tuple[list[ReplyEvent], list[tuple[int, Token]]]:
        """End here although the model would go on; reads as a natural stop."""
        shown = self._shown(self.reader.finish("stop"))
        return shown, self._end()

    def _shown(self, events: Sequence[ReplyEvent]) -> list[ReplyEvent]:
        shown: list[ReplyEvent] = []
        for event in events:
            if isinstance(event, Finish):
                self._finish = event
                continue
            if isinstance(event, Content) and not event.moved:
                self._sent += len(event.text)
            shown.append(event)
        return shown

    def _end(self) -> list[tuple[int, Token]]:
        assert self._finish is not None, "a reader that was finished says how"
        self.complete, self.finish_reason = True, self._finish.reason
        return self._released(everything=self._finish.stop is None)

    def _hold(self, token: Token) -> None:
        channel = getattr(self.reader, "channel", "")
        if channel != self._channel:  # the reader flushes its decoder at a change of channel, and only there
            self._decoded += len(self._shadow.flush())
            self._channel = channel
        if self.reader.last_was_content:
            self._held.append((self._decoded, token))
            self._decoded += len(self._shadow.feed(self._tokenizer.token_bytes(token.id)))

    def _released(self, everything: bool = False) -> list[tuple[int, Token]]:
        """A token goes out with its first character, and never when a stop string ate that."""
        out = []
        while self._held and (everything or self._held[0][0] < self._sent):
            out.append(self._held.popleft())
        return out
