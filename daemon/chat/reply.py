"""The reply, token by token: which text is reasoning, which is content, which is a tool call, and where it ends.

Structure is decided by token id alone, so a reply that spells a marker in ordinary tokens stays text. Every rule is
independent of where tokens cut the text. The readers take any id sequence, never raise, and hold no more than what
they were fed. Source: the chat specification, section 3.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from sluice.daemon.chat.detokenizer import Detokenizer
from sluice.daemon.chat.stops import StopSearch
from sluice.daemon.chat.tokenizer import Tokenizer

MAX_HEADER_BYTES = 8192

FinishReason = Literal["stop", "length", "tool_calls"]
Channel = Literal["think", "response", "none", "tools", "call", "argument", "json"]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what was thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer. moved: this is all reasoning so far, once more, because it turned out to be the answer:
    a stream has sent it as reasoning already, a whole reply shows it as content only."""

    text: str
    moved: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The header of call `index` (from 0) is complete."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of the arguments' JSON text of call `index`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The end; exactly one, last. stop: the stop string that ended it, if one did."""

    reason: FinishReason
    stop: str | None = None


ReplyEvent = Reasoning | Content | ToolCallStart | ToolArguments | Finish


@dataclass(slots=True)
class ToolCall:
    """One call of a whole reply; `arguments` is JSON text, visibly unfinished if the limit cut it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """A whole reply, put together from a reader's events."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None


def collect(events: Iterable[ReplyEvent]) -> Reply:
    """The reply that a client which does not stream gets."""
    reply = Reply()
    reasoning: list[str] = []
    content: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text, moved):
                if moved:
                    reasoning.clear()
                content.append(text)
            case ToolCallStart(_, call_id, name):
                reply.tool_calls.append(ToolCall(call_id, name))
                arguments.append([])
            case ToolArguments(index, text):
                arguments[index].append(text)
            case Finish(reason, stop):
                reply.finish_reason, reply.stop = reason, stop
    reply.reasoning, reply.content = "".join(reasoning), "".join(content)
    for call, parts in zip(reply.tool_calls, arguments, strict=True):
        call.arguments = "".join(parts)
    return reply


def call_id_maker(prompt_ids: Sequence[int]) -> Callable[[int], str]:
    """Ids for the calls of one reply: repeatable, and unique in a conversation because its prompts only grow."""
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(prompt_ids), 4096):
        digest.update(b"".join(i.to_bytes(4, "little") for i in prompt_ids[start : start + 4096]))

    def make(number: int) -> str:
        own = digest.copy()
        own.update(number.to_bytes(4, "little"))
        return "call_" + own.hexdigest()[:16]

    return make


class ReplyReader:
    """Reads one chat reply. `feed` ids until `finished`, or call `finish` when the generation ended before.

    start: the channel the prompt left open. tools: False if none were offered or none may be called: what the model
    writes there is then read and dropped. parallel: False keeps the first call only. stops: searched in content.
    After a feed, `last_was_content` tells whether that token's text belongs to the content (what logprobs list);
    reasoning_tokens and ignored_tokens (control tokens without a meaning here) count for the usage report.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        start: Literal["think", "response"],
        tools: bool,
        call_id: Callable[[int], str],
        parallel: bool = True,
        stops: Sequence[str] = (),
    ) -> None:
        if tokenizer.markers is None:
            raise ValueError("this tokenizer has no XTML markers")
        self._tokenizer = tokenizer
        self._markers = tokenizer.markers
        self._max_calls = (None if parallel else 1) if tools else 0
        self._call_id = call_id
        self._text = Detokenizer()
        self._stops = StopSearch(stops)
        self._events: list[ReplyEvent] = []
        self.channel: Channel = start
        self.finished = False
        self.reasoning_tokens = 0
        self.ignored_tokens = 0
        self.last_was_content = False

        self._header: bytearray | None = None
        self._opening = False
        self._reasoning: list[str] = []  # until there is content: it may turn out to be the answer
        self._any_content = False
        self._stray = False  # in channel "none": whether something other than white space was seen

        self._calls = 0
        self._call: int | None = None  # index of the call in progress; None also while one is read and dropped
        self._in_call = False
        self._form: Literal["", "arguments", "json"] = ""
        self._sent = False  # whether any of the call's arguments went out
        self._argument_type = "string"
        self._argument_prefix = ""
        self._argument: list[str] | None = None  # held-back text of an argument that is not a string

    def feed(self, token_id: int) -> list[ReplyEvent]:
        """What this token adds. Ids after the end are not read."""
        if self.finished:
            return []
        markers = self._markers
        self.last_was_content = False
        if token_id in self._tokenizer.stop_ids:
            self._end("stop")
        elif token_id == markers.open or token_id == markers.close:
            self._give_header_back()
            if not self.finished:
                self._header, self._opening = bytearray(), token_id == markers.open
        elif token_id == markers.sep:
            if self._header is not None:
                self._act()
        elif not self._tokenizer.is_text(token_id):
            self.ignored_tokens += 1
        else:
            data = self._tokenizer.token_bytes(token_id)
            if self._header is not None:
                self._header += data
                if len(self._header) > MAX_HEADER_BYTES:
                    self._give_header_back()
            else:
                self.reasoning_tokens += self.channel == "think"
                self.last_was_content = self.channel in ("response", "none")
                self._write(self._text.feed(data))
        return self._take_events()

    def finish(self, reason: Literal["stop", "length"]) -> list[ReplyEvent]:
        """The generation ended without a stop token: `length` leaves a call visibly unfinished."""
        if not self.finished:
            self._end(reason)
        return self._take_events()

    def _take_events(self) -> list[ReplyEvent]:
        events, self._events = self._events, []
        return events

    # Headers

    def _give_header_back(self) -> None:
        """A header that was none: its text belongs to the channel."""
        if self._header is not None:
            data, self._header = bytes(self._header), None
            self._write(self._text.feed(data))

    def _act(self) -> None:
        assert self._header is not None
        name, attributes = _parse_header(self._header.decode("utf-8", errors="replace"))
        self._header = None
        if self._opening:
            self._act_open(name, attributes)
        else:
            self._act_close(name)

    def _act_open(self, name: str, attributes: dict[str, str]) -> None:
        match name:
            case "think" | "response" | "tools":
                self._end_call()
                self._switch(name)
            case "call":
                self._end_call()
                self._switch("call")
                self._start_call(attributes.get("tool", ""))
            case "argument" if self._in_call:
                self._end_argument()
                self._switch("argument")
                self._start_argument(attributes.get("key", ""), attributes.get("type", "string"))
            case "json" if self._in_call:
                self._end_argument()
                self._switch("json")
                # Arguments already sent cannot be taken back, so of two forms in one call the first counts.
                self._form = self._form or "json"
            case "message":
                self._end("stop")

    def _act_close(self, name: str) -> None:
        match name:
            case "think" if self.channel == "think":
                self._switch("none")
            case "response" if self.channel == "response":
                self._switch("none")
            case "response" if self.channel == "think" and not self._any_content:
                self._flush()
                if self._reasoning:
                    self._move_reasoning()
                if not self.finished:
                    self._switch("none")
            case "argument" if self.channel == "argument":
                self._end_argument()
                self._switch("call")
            case "json" if self.channel == "json":
                self._switch("call")
            case "call" if self._in_call:
                self._end_call()
                self._switch("tools")
            case "tools" if self._in_call or self.channel == "tools":
                self._end_call()
                self._switch("none")
            case "message":
                self._end_call()
                self._switch("none")

    # Channels

    def _switch(self, channel: Channel) -> None:
        """Leave the channel, its last bytes flushed, and enter another. Nothing after a stop string."""
        if self.finished:
            return
        self._flush()
        self.channel = channel
        self._stray = False

    def _flush(self) -> None:
        """The channel's text ends here: a cut character becomes U+FFFD, held-back content is sent."""
        self._write(self._text.flush())
        if not self.finished and self.channel in ("response", "none"):
            self._send_content(self._stops.flush())

    def _write(self, text: str) -> None:
        if not text or self.finished:
            return
        match self.channel:
            case "think":
                if not self._any_content:
                    self._reasoning.append(text)
                self._events.append(Reasoning(text))
            case "response":
                self._search_content(text)
            case "none":
                if not self._stray:
                    text = text.lstrip()
                self._stray = self._stray or bool(text)
                self._search_content(text)
            case "argument":
                self._write_argument(text)
            case "json" if self._form == "json":
                self._send_arguments(text)

    def _search_content(self, text: str) -> None:
        if text:
            self._any_content = True
        self._send_content(self._stops.feed(text))
        if self._stops.matched is not None:
            self._end("stop")

    def _send_content(self, text: str, moved: bool = False) -> None:
        if text:
            self._reasoning = []
            self._events.append(Content(text, moved))

    def _move_reasoning(self) -> None:
        text = "".join(self._reasoning)
        self._any_content = True
        sent = self._stops.feed(text)
        sent += self._stops.flush()
        if sent:
            self._send_content(sent, moved=True)
        elif text:
            self._events.append(Content("", moved=True))  # a stop string at its very head took everything
        self.reasoning_tokens = 0
        if self._stops.matched is not None:
            self._end("stop")

    def _end(self, reason: Literal["stop", "length"]) -> None:
        if self.finished:
            return
        stop = self._stops.matched
        self._header = None
        if stop is None:
            self._flush()
            if self.finished:  # the last bytes completed a stop string
                return
            if reason == "stop":
                self._end_call()
            elif self._in_call and not self._sent:
                self._send_arguments("{")  # "" would be taken for a call without arguments
        self.finished = True
        named: FinishReason = "tool_calls" if reason == "stop" and stop is None and self._calls else reason
        self._events.append(Finish(named, stop))

    # Calls

    def _start_call(self, name: str) -> None:
        self._in_call, self._form, self._sent = True, "", False
        if self._max_calls is not None and self._calls >= self._max_calls:
            self._call = None
            return
        self._call = self._calls
        self._calls += 1
        self._events.append(ToolCallStart(self._call, self._call_id(self._call), name))

    def _end_call(self) -> None:
        if not self._in_call or self.finished:
            return
        self._end_argument()
        if self.channel == "json":
            self._flush()
        if self._form != "json":
            self._send_arguments("}" if self._sent else "{}")
        self._in_call, self._call, self.channel = False, None, "tools"

    def _start_argument(self, key: str, type_name: str) -> None:
        if self._form == "json":
            self._argument_type = "dropped"
            return
        self._form = "arguments"
        self._argument_type = type_name
        self._argument_prefix = ("," if self._sent else "{") + _json(key) + ":"
        if type_name == "string":
            self._send_arguments(self._argument_prefix + '"')
        else:
            self._argument = []

    def _write_argument(self, text: str) -> None:
        if self._argument is not None:
            self._argument.append(text)
        elif self._argument_type == "string":
            self._send_arguments(_json(text)[1:-1])

    def _end_argument(self) -> None:
        if self.channel != "argument":
            return
        self._flush()
        if self._argument is not None:
            raw, self._argument = "".join(self._argument).strip(), None
            if self._argument_type == "null":
                raw = "null"
            self._send_arguments(self._argument_prefix + (raw if _is_json(raw) else _json(raw)))
        elif self._argument_type == "string":
            self._send_arguments('"')
        self.channel = "call"

    def _send_arguments(self, text: str) -> None:
        if text:
            self._sent = True
            if self._call is not None:
                self._events.append(ToolArguments(self._call, text))


class TextReader:
    """Reads one plain completion: text until a stop id, a stop string or the limit. Control tokens are not shown."""

    def __init__(self, tokenizer: Tokenizer, *, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer()
        self._stops = StopSearch(stops)
        self.finished = False
        self.last_was_content = False

    def feed(self, token_id: int) -> list[ReplyEvent]:
        """What this token adds. Ids after the end are not read."""
        if self.finished:
            return []
        self.last_was_content = False
        if token_id in self._tokenizer.stop_ids:
            return self.finish("stop")
        if not self._tokenizer.is_text(token_id):
            return []
        self.last_was_content = True
        return self._search(self._text.feed(self._tokenizer.token_bytes(token_id)))

    def finish(self, reason: Literal["stop", "length"]) -> list[ReplyEvent]:
        """The generation ended without a stop id."""
        if self.finished:
            return []
        events = self._search(self._text.flush())
        if self.finished:
            return events
        self.finished = True
        rest = self._stops.flush()
        return [*events, *([Content(rest)] if rest else []), Finish(reason)]

    def _search(self, text: str) -> list[ReplyEvent]:
        sent = self._stops.feed(text)
        events: list[ReplyEvent] = [Content(sent)] if sent else []
        if self._stops.matched is not None:
            self.finished = True
            events.append(Finish("stop", self._stops.matched))
        return events


def _parse_header(header: str) -> tuple[str, dict[str, str]]:
    """Tag name and attributes of `name key="value" ...`, in one pass; what does not parse ends the attributes."""
    name, _, _ = header.partition(" ")
    attributes: dict[str, str] = {}
    at = len(name)
    while True:
        equals = header.find('="', at)
        if equals < 0:
            return name, attributes
        end = header.find('"', equals + 2)
        if end < 0:
            return name, attributes
        value = header[equals + 2 : end].replace("&quot;", '"').replace("&amp;", "&")
        attributes.setdefault(header[at:equals].strip(), value)
        at = end + 1


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    """Whether the text is one JSON value. Numbers are not converted: their size must not cost anything."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
