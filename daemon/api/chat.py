"""POST /v1/chat/completions: a conversation in, the next message out.

Prompts are written and replies read by `sluice.daemon.chat`; here is what an OpenAI client says around them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from sluice.daemon.api.choice import Choice
from sluice.daemon.api.exchange import Exchange
from sluice.daemon.api.house import House
from sluice.daemon.api.schemas import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Delta,
    Extension,
    FunctionCall,
    FunctionDelta,
    Message,
    TokenizeRequest,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
    read_request,
    sampling_of,
)
from sluice.daemon.api.serving import Form, check_common, check_fits, clamp_max_tokens, serve, usage_of
from sluice.daemon.api.thinking import Thinking, thinking_of
from sluice.daemon.chat import conversation, xtml
from sluice.daemon.chat.constraint import ReplyConstraint
from sluice.daemon.chat.reply import (
    Content,
    Reasoning,
    ReplyEvent,
    ReplyReader,
    ToolArguments,
    ToolCallStart,
    call_id_maker,
    collect,
)
from sluice.daemon.chat.stops import stop_strings
from sluice.daemon.chat.tokenizer import Segment, Tokenizer
from sluice.daemon.engine.requests import GenerationRequest, Token
from sluice.io.errors import RequestError

# As the vendor runs the model (specification 3.1).
_TEMPERATURE_THINKING = 1.0
_TEMPERATURE_PLAIN = 0.6

# How front ends begin the jobs they run beside the conversation (titles, tags, follow-ups). Nothing but the order
# of work depends on it: such a job waits behind people's answers unless it says otherwise.
_BACKGROUND_HEAD = "### Task:\n"
_BACKGROUND_PRIORITY = 10


async def chat_completions(house: House, exchange: Exchange) -> None:
    """Serve one request. Raises what `app.Edge` turns into a reply, as long as nothing was sent."""
    body = await exchange.read_json_bytes()
    if house.constrainer is None:
        raise RequestError(f"the model {house.model.name} has no chat format here; use /v1/completions")
    request = await house.off_loop(lambda: read_request(body, ChatRequest), len(body))
    house.model.check_name(request.model)
    check_common(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    stops = stop_strings(request.stop)
    prompt = await house.off_loop(lambda: write_prompt(request), len(body))
    tokenizer = house.model.tokenizer
    ids = await house.off_loop(lambda: tokenizer.encode_segments(prompt.segments), prompt.characters)
    check_fits(len(ids), house.engine.context, "messages")
    default_temperature = _TEMPERATURE_THINKING if prompt.thinking.on else _TEMPERATURE_PLAIN
    template = GenerationRequest(
        prompt_ids=tuple(ids),
        max_tokens=clamp_max_tokens(
            request.max_completion_tokens or request.max_tokens, len(ids), house.engine.context
        ),
        sampling=sampling_of(request, house.engine.vocab_size, default_temperature),
        stop_ids=tokenizer.stop_ids,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        priority=house.priority(exchange, request.priority, _default_priority(request.messages)),
    )
    number = request.n or 1
    parallel = request.parallel_tool_calls is not False
    constraints = await _constraints(house, prompt, parallel, number)
    call_id = await house.off_loop(lambda: call_id_maker(ids), len(ids))
    readers = [
        ReplyReader(
            tokenizer,
            start="think" if prompt.thinking.on else "response",
            tools=prompt.tools_allowed,
            # Calls of different choices must not share an id: clients key results by it.
            call_id=call_id if index == 0 else _shifted(call_id, index),
            parallel=parallel,
            stops=stops,
        )
        for index in range(number)
    ]
    choices = [
        ChatAnswer(index, tokenizer, reader, want_logprobs=bool(request.logprobs))
        for index, reader in enumerate(readers)
    ]
    form = ChatForm(
        shell=ChatChunk(
            id=exchange.id,
            object="chat.completion.chunk",
            created=int(house.wall()),
            model=house.model.name,
            system_fingerprint=house.model.fingerprint,
            choices=[],
        ),
        request=request,
        choices=choices,
        tokenizer=tokenizer,
        prompt_tokens=len(ids),
        extension=Extension(prompt.thinking.word, template.sampling.seed or 0, enforced=bool(constraints)),
    )
    await serve(house, exchange, request, template, form, constraints)


async def _constraints(house: House, prompt: Prompt, parallel: bool, number: int) -> list[ReplyConstraint]:
    """A grammar for each choice where the reply's form is demanded; none otherwise. Compiled in a thread."""
    if not prompt.forced and prompt.response_format is None:
        return []
    constrainer = house.constrainer
    assert constrainer is not None
    size = len(msgspec.json.encode([prompt.response_format, prompt.callable_tools]))
    if size > house.limits.grammar_bytes:
        param = "response_format" if prompt.response_format is not None else "tools"
        raise RequestError(
            f"{param}: {size} bytes of schema are to be enforced; the limit is {house.limits.grammar_bytes}",
            param=param,
        )

    def compile_all() -> list[ReplyConstraint]:
        made = [
            constrainer.for_reply(
                start="think" if prompt.thinking.on else "response",
                response_format=prompt.response_format,
                tools=prompt.callable_tools,
                tool_choice="required" if prompt.forced else "auto" if prompt.tools_allowed else "none",
                parallel=parallel,
            )
            for _ in range(number)
        ]
        return [constraint for constraint in made if constraint is not None]

    return await asyncio.get_running_loop().run_in_executor(house.grammar_threads, compile_all)


# ---- the prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as the model reads it. tools_allowed: whether a call in the reply is one; forced: whether
    there must be one; callable_tools: those that may be called."""

    segments: list[Segment]
    thinking: Thinking
    callable_tools: list[dict[str, Any]]
    tools_allowed: bool
    forced: bool
    response_format: Mapping[str, Any] | None

    @property
    def characters(self) -> int:
        return sum(len(segment.text) for segment in self.segments)


def write_prompt(request: ChatRequest | TokenizeRequest) -> Prompt:
    """The prompt of a chat. Raises RequestError with the path of what cannot be honoured."""
    thinking = thinking_of(
        request.thinking, request.enable_thinking, request.chat_template_kwargs, request.reasoning_effort
    )
    messages, declared = conversation.check(request.messages, request.tools)
    tools = request.tools or None
    choice, declared, tools = _tool_choice(request.tool_choice, declared, tools)
    response_format = check_response_format(request.response_format)
    segments = xtml.render(
        xtml.PromptRequest(
            messages=messages,
            tools=tools,
            thinking=thinking.on,
            thinking_effort=thinking.effort,
            tool_choice=choice,
            response_format=response_format,
        )
    )
    return Prompt(
        segments=segments,
        thinking=thinking,
        callable_tools=declared,
        tools_allowed=bool(declared) and choice != "none",
        forced=choice == "required",
        response_format=response_format,
    )


def _tool_choice(
    wanted: str | Mapping[str, Any] | None, declared: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[str | None, list[dict[str, Any]], list[dict[str, Any]] | None]:
    """What the prompt says about calling, which tools may be called, and which the request declares.

    A named tool is the only one declared and must be called: the model knows no stronger word.
    """
    if wanted is None or wanted == "auto":
        return None, declared, tools
    if wanted == "none":
        return "none", declared, tools
    if isinstance(wanted, Mapping):
        function = wanted.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if wanted.get("type") != "function" or not isinstance(name, str):
            raise RequestError(
                'tool_choice must be auto, none, required or {"type": "function", "function": {"name": ...}}',
                param="tool_choice",
            )
        chosen = [tool for tool in declared if tool["function"]["name"] == name]
        if not chosen:
            raise RequestError(f"tool_choice names {name[:256]!r}, which is not among tools", param="tool_choice")
        return "required", chosen, [tool for tool in tools or [] if tool in chosen] or None
    if wanted != "required":
        raise RequestError("tool_choice must be auto, none, required or a named function", param="tool_choice")
    if not declared:
        raise RequestError("tool_choice is required, but there are no tools", param="tool_choice")
    return "required", declared, tools


def check_response_format(wanted: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A request's response_format, None where it is plain text. Raises RequestError with a path."""
    if wanted is None:
        return None
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return wanted
    if kind != "json_schema":
        raise RequestError(
            "response_format.type must be text, json_object or json_schema", param="response_format.type"
        )
    outer = wanted.get("json_schema")
    path = "response_format.json_schema"
    if not isinstance(outer, Mapping):
        raise RequestError(f"{path} must be an object", param=path)
    if not isinstance(outer.get("name"), str) or not outer["name"]:
        raise RequestError(f"{path}.name must be a string that is not empty", param=f"{path}.name")
    if outer.get("strict") is not None and not isinstance(outer["strict"], bool):
        raise RequestError(f"{path}.strict must be true or false", param=f"{path}.strict")
    if not isinstance(outer.get("schema"), Mapping):
        raise RequestError(f"{path}.schema must be an object", param=f"{path}.schema")
    return wanted


def _default_priority(messages: Sequence[Mapping[str, Any]]) -> int:
    content = messages[-1].get("content")
    background = len(messages) == 1 and isinstance(content, str) and content.startswith(_BACKGROUND_HEAD)
    return _BACKGROUND_PRIORITY if background else 0


def _shifted(call_id: Any, choice: int) -> Any:
    """Ids of a later choice's calls: numbers no first choice reaches."""
    return lambda number: call_id((choice << 24) + number)


# ---- the reply


class ChatAnswer(Choice):
    """A chat choice; its reader is a ReplyReader. `called`: a call has begun."""

    reader: ReplyReader
    called = False

    @property
    def call_closed(self) -> bool:
        """Whether a call has begun and none is open."""
        return self.called and self.reader.channel not in ("call", "argument", "json")


class ChatForm(Form):
    """The reply of /v1/chat/completions."""

    def __init__(
        self,
        *,
        shell: ChatChunk,
        request: ChatRequest,
        choices: Sequence[ChatAnswer],
        tokenizer: Tokenizer,
        prompt_tokens: int,
        extension: Extension,
    ) -> None:
        self.choices: Sequence[ChatAnswer] = choices
        self._shell = shell
        self._request = request
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._extension = extension
        self._events: list[list[ReplyEvent]] = [[] for _ in choices]
        self._entries: list[list[TokenLogprob]] = [[] for _ in choices]
        wants_usage = request.stream_options is not None and request.stream_options.include_usage
        self._chunk_usage: UnsetType | None = None if wants_usage else UNSET

    def enough(self, choice: Choice) -> bool:
        """One call at most was asked for and it is closed: all that could follow would be dropped, and one token
        may take half a minute."""
        return self._request.parallel_tool_calls is False and self.choices[choice.index].call_closed

    def opening(self) -> list[object]:
        return [self._chunk(ChunkChoice(choice.index, Delta(role="assistant", content=""))) for choice in self.choices]

    def chunks(
        self, choice: Choice, events: Sequence[ReplyEvent], logprobs: Sequence[tuple[int, Token]]
    ) -> list[object]:
        entries = [self._entry(token) for _, token in logprobs]
        if any(isinstance(event, ToolCallStart) for event in events):
            self.choices[choice.index].called = True
        if not self._request.stream:
            self._events[choice.index] += events
            self._entries[choice.index] += entries
            return []
        parts = [ChunkChoice(choice.index, _delta(event)) for event in events]
        if entries:
            # With the first content of this step; tokens whose text is still held back go with what there is.
            carrier = next((part for part in parts if part.delta.content is not UNSET), None)
            if carrier is None:
                carrier = ChunkChoice(choice.index, Delta(content=""))
                parts.append(carrier)
            carrier.logprobs = ChatLogprobs(entries)
        chunks = [self._chunk(part) for part in parts]
        if choice.complete:
            end = ChunkChoice(choice.index, Delta(), finish_reason=choice.finish_reason)
            end.logits_fingerprint = self._fingerprint(choice)
            chunk = self._chunk(end)
            chunk.sluice = self._extension
            chunks.append(chunk)
        return list(chunks)

    def usage_chunk(self) -> object:
        chunk = self._chunk()
        chunk.usage = self._usage()
        return chunk

    def whole(self) -> object:
        shell = self._shell
        return ChatCompletion(
            id=shell.id,
            object="chat.completion",
            created=shell.created,
            model=shell.model,
            system_fingerprint=shell.system_fingerprint,
            choices=[self._whole_choice(choice) for choice in self.choices],
            usage=self._usage(),
            sluice=self._extension,
        )

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        reply = collect(self._events[choice.index])
        message = Message("assistant", reply.content)
        if reply.reasoning:
            message.reasoning_content = reply.reasoning
        if reply.tool_calls:
            message.content = reply.content or None
            message.tool_calls = [
                ToolCall(call.id, "function", FunctionCall(call.name, call.arguments)) for call in reply.tool_calls
            ]
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=ChatLogprobs(self._entries[choice.index]) if self._request.logprobs else None,
            finish_reason=choice.finish_reason or "",
            logits_fingerprint=self._fingerprint(choice),
        )

    def _chunk(self, *choices: ChunkChoice) -> ChatChunk:
        shell = self._shell
        return ChatChunk(
            shell.id, shell.object, shell.created, shell.model, shell.system_fingerprint, list(choices),
            usage=self._chunk_usage,
        )  # fmt: skip

    def _usage(self) -> Usage:
        reasoning = sum(choice.reader.reasoning_tokens for choice in self.choices)
        return usage_of(self._prompt_tokens, self.choices, reasoning)

    def _fingerprint(self, choice: Choice) -> str | UnsetType | None:
        return choice.fingerprint if self._request.logits_fingerprint else UNSET

    def _entry(self, token: Token) -> TokenLogprob:
        top = [TopLogprob(text, value, data) for i, value in token.top for text, data in (self._spelled(i),)]
        text, data = self._spelled(token.id)
        return TokenLogprob(text, token.logprob or 0.0, data, top)

    def _spelled(self, token_id: int) -> tuple[str, list[int]]:
        data = self._tokenizer.token_bytes(token_id)
        return data.decode("utf-8", "replace"), list(data)


def _delta(event: ReplyEvent) -> Delta:
    match event:
        case Reasoning(text):
            return Delta(reasoning_content=text)
        case Content(text):
            return Delta(content=text)
        case ToolCallStart(index, call_id, name):
            return Delta(tool_calls=[ToolCallDelta(index, FunctionDelta("", name), call_id, "function")])
        case ToolArguments(index, text):
            return Delta(tool_calls=[ToolCallDelta(index, FunctionDelta(text))])
        case _:
            raise AssertionError(f"{event} is not shown")
