"""What a request may hold and what a reply looks like, as msgspec types; the OpenAPI page is made from them.

Fields a request may have are typed here and refused by name when wrong. For every other field there is one
rule (docs/api.md): what changes nothing is ignored; what would change the answer and is not done here is
refused with its name (`refuse_unserved`); a name nobody knows is ignored and logged once.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from sluice.daemon.api.errors import from_msgspec
from sluice.daemon.engine.requests import Sampling
from sluice.io.errors import RequestError

log = logging.getLogger(__name__)

RequestType = TypeVar("RequestType", bound=msgspec.Struct)

_MAX_TOKENS = 2**31 - 1

MaxTokens = Annotated[int, Meta(ge=1, le=_MAX_TOKENS, description="clamped to what the context leaves")]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 and -1: off")]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Stop = str | list[str]
Priority = Annotated[int, Meta(ge=0, le=100, description="lower goes first: 0 people, 10 background")]


class StreamOptions(msgspec.Struct):
    """include_usage: one more chunk with `usage` before the end."""

    include_usage: bool | None = None


class Common(msgspec.Struct, kw_only=True):
    """Fields that both kinds of completion share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    logit_bias: dict[str, Bias] | None = None
    n: Annotated[int, Meta(ge=1, le=8)] | None = None
    priority: Priority | None = None
    logits_fingerprint: bool | None = None


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions. prompt: text (encoded as it stands), or token ids; a list of one of either."""

    prompt: Annotated[str, Meta(min_length=1)] | Annotated[list[int | str | list[int]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions. The members of messages and tools are checked where prompts are written."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: bool | dict[str, Any] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: exactly one of `content` (text) and `messages` (a chat, with its tools)."""

    model: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking: bool | dict[str, Any] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


# ---- replies


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """completion_tokens: all sampled ids of all choices, control tokens and the stop included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class TextLogprobs(msgspec.Struct):
    """The older form of log-probabilities, one entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    logits_fingerprint: str | UnsetType | None = UNSET


class Completion(msgspec.Struct):
    """A whole completion, or one chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class FunctionCall(msgspec.Struct):
    """arguments: JSON text, as the model wrote it; visibly unfinished when the limit cut it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    type: str
    function: FunctionCall


class Message(msgspec.Struct):
    """content is null only beside tool calls; reasoning_content is there only when there is some."""

    role: str
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """token is the lossy text of bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Entries for the tokens of content only."""

    content: list[TokenLogprob]


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str
    logits_fingerprint: str | UnsetType | None = UNSET


class Extension(msgspec.Struct):
    """What was in force: thinking is the effort or "off"; seed the one used, drawn or given; enforced says that
    a grammar held the answer to response_format or tool_choice."""

    thinking: str
    seed: int
    enforced: bool


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    sluice: Extension


class FunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    logits_fingerprint: str | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    sluice: Extension | UnsetType = UNSET


class ModelEntry(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelEntry]


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    error: ErrorBody


class Tokens(msgspec.Struct):
    tokens: list[int]
    count: int


class Content(msgspec.Struct):
    content: str


# ---- the rule for every other field

# Values that change nothing, by field; any other value of these is refused. An empty tuple refuses all.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1, 0),
    "length_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False, True),
    "use_beam_search": (False,),
    "typical_p": (1,),
    "typ_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "prompt_logprobs": (0, False),
    "truncate_prompt_tokens": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": ("",),
    "json_schema": (),
    "chat_template": (),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "verbosity": ("medium",),
    "reasoning": (),
    "prompt_embeds": (),
    "images": ([],),
}

# Known to change nothing here: bookkeeping of hosted services, hints to caches, wishes about speed.
_HARMLESS = frozenset(
    (
        "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "prediction", "cache_prompt", "id_slot", "slot_id", "request_id",
        "return_token_ids", "return_tokens_as_token_ids", "include_reasoning", "separate_reasoning",
        "stream_reasoning", "timings_per_token", "session_id", "chat_id", "background", "num_ctx", "keep_alive",
        "cache_salt", "kv_transfer_params", "detokenize",
    )
)  # fmt: skip

_seen_unknown: set[str] = set()


def refuse_unserved(body: Mapping[str, object], known: Iterable[str]) -> None:
    """The rule above, applied to a request's members. Raises RequestError with the field as `param`."""
    for name in sorted(set(body).difference(known)):
        if name in _NEUTRAL:
            value = body[name]
            neutral = _NEUTRAL[name]
            if not any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in neutral):
                allowed = " or ".join(msgspec.json.encode(good).decode() for good in neutral)
                remedy = f"leave it out or send {allowed}" if neutral else "leave it out"
                raise RequestError(f"{name} is not supported here; {remedy}", param=name)
        elif name not in _HARMLESS and name not in _seen_unknown and len(_seen_unknown) < 256:
            _seen_unknown.add(name)
            log.info("ignoring the unknown request field %r (said once)", name[:64])


def read_request(body: bytes, kind: type[RequestType]) -> RequestType:
    """A request's body as `kind`. Raises RequestError with the path of what is wrong."""
    members = parse_json(body) if len(body) <= _PIECE_BYTES else _parse_long(body)
    # A long list that was read as whole numbers is right already; checking it once more would hold the loop.
    long = {name: value for name, value in members.items() if isinstance(value, _WholeNumbers)}
    request = convert({**members, **{name: value[:1] for name, value in long.items()}}, kind)
    for name, value in long.items():
        if name in kind.__struct_fields__:
            setattr(request, name, value)
    return request


# One call of the JSON decoder holds the interpreter to its end: a million token ids would stop the event loop for
# 100 ms and more, wherever the call is made. So long lists of numbers are read in pieces of about 2 ms each.
_PIECE_BYTES = 64 * 1024


class _WholeNumbers(list[int]):
    """A list known to hold nothing but ints."""


def _parse_long(body: bytes) -> dict[str, object]:
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        values = {name: _read_member(bytes(raw)) for name, raw in members.items()}
    except (msgspec.DecodeError, RecursionError):
        return parse_json(body)  # it says what is wrong, and where
    return {name: value for name, value in values.items() if value is not None}


def _read_member(raw: bytes) -> object:
    if len(raw) <= _PIECE_BYTES or raw[:1] != b"[":
        return msgspec.json.decode(raw)
    numbers, at = _WholeNumbers(), 1
    try:
        while True:
            cut = raw.find(b",", at + _PIECE_BYTES)
            if cut < 0:
                numbers += msgspec.json.decode(b"[" + raw[at:], type=list[int])
                return numbers
            numbers += msgspec.json.decode(b"[" + raw[at:cut] + b"]", type=list[int])
            at = cut + 1
    except msgspec.DecodeError:  # other things than whole numbers are in it
        return msgspec.json.decode(raw)


def parse_json(body: bytes) -> dict[str, object]:
    """The body's JSON object, null members dropped (null means absent).

    Raises RequestError for anything else: bad JSON, bad UTF-8, lone surrogates, NaN, too deep, not an object.
    """
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as exc:
        raise RequestError(f"the body is not valid JSON: {exc}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return {key: member for key, member in value.items() if member is not None}


def convert(body: Mapping[str, object], kind: type[RequestType]) -> RequestType:
    """A request's members as `kind`. Raises RequestError with the path of what is wrong."""
    refuse_unserved(body, kind.__struct_fields__)
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as exc:
        raise from_msgspec(exc) from None


# ---- sampling


def sampling_of(request: Common, vocab_size: int, default_temperature: float) -> Sampling:
    """How the request wants its tokens chosen. A missing seed is drawn here, so that it can be reported and
    the choices of one request derive from it. Raises RequestError for a bias outside the vocabulary."""
    bias: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= vocab_size:
            raise RequestError(
                f"logit_bias[{key[:32]}]: not a token id below {vocab_size}", param=f"logit_bias[{key[:32]}]"
            )
        bias[int(key)] = value
    return Sampling(
        temperature=default_temperature if request.temperature is None else request.temperature,
        top_p=0.95 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
        logit_bias=bias,
    )


def derived_seed(seed: int, choice: int) -> int:
    """The seed of the choice-th of `n` answers: choice 0 uses the request's own, so that n=1 is the first of
    n=4. Later ones are SplitMix64 of (seed, choice): Steele, Lea, Flood, OOPSLA 2014."""
    if choice == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + choice * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
