"""XTML: a conversation to the segments of a prompt. Pure; token ids come later, one segment at a time.

Renders exactly what the checkpoint's own encoder renders, oddities included, and refuses with a path what cannot
be rendered. What a server should refuse although it could be rendered is `conversation.check`'s business.

Source of every rule: the chat specification, section 2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice.daemon.chat.tokenizer import MARKER_NAMES, Segment
from sluice.io.errors import RequestError

OPEN, CLOSE, SEP, END = (Segment(name, True) for name in MARKER_NAMES)

EFFORTS = ("low", "high", "max")
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"

_FENCE = "```json\n{}\n```"
_DECLARE = "# Tools\nHere are the available tools, described in JSONSchema.\n\n" + _FENCE
_DECLARE_MORE = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n" + _FENCE
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_FORMAT_SCHEMA = "\nThe JSON data must match the following schema:\n" + _FENCE


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """What a prompt is a function of. Values are as JSON has them; the messages are the client's own objects.

    thinking_effort: "low", "high", "max" or None (no effort message); ignored when thinking is off. tool_choice:
    only "required" and "none" render. image_prompts: media blocks handed out in order; None in a text-only engine.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    thinking: bool = True
    thinking_effort: str | None = None
    tool_choice: Any = None
    response_format: Any = None
    add_generation_prompt: bool = True
    image_prompts: Sequence[str] | None = None


def render(request: PromptRequest) -> list[Segment]:
    """The prompt's segments. Inputs are not changed. Raises RequestError with a path for what cannot be rendered."""
    return _Renderer(request).render()


def response_schema(response_format: Mapping[str, Any]) -> Any:
    """The schema inside a json_schema response format, wherever the client put it; None if there is none."""
    outer = response_format.get("json_schema")
    if isinstance(outer, Mapping):
        for key in ("schema", "json_schema"):
            if outer.get(key) is not None:
                return outer[key]
    return outer


def call_function(call: Any, path: str) -> Mapping[str, Any]:
    """The object of a tool call that has `name` and `arguments`: its `function`, or the call itself."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{path} must be an object with a function", param=path)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"{path}: the called function has no name", param=f"{path}.function.name")
    return function


def escape_attribute(value: str) -> str:
    """An attribute's value as it is written: the ampersand, then the double quote, nothing else."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def json_compact(value: Any, path: str) -> str:
    """JSON as declarations and schemas have it: keys sorted by code point at every depth, no white space."""
    return _dump(value, path, sort_keys=True, separators=(",", ":"))


class _Renderer:
    """One rendering: the segments so far and the images not handed out yet."""

    def __init__(self, request: PromptRequest) -> None:
        self.request = request
        self.segments: list[Segment] = []
        self.images = list(request.image_prompts or ())[::-1]

    def render(self) -> list[Segment]:
        request = self.request
        if request.tools:
            self.note("tool-declare", _DECLARE.format(json_compact(request.tools, "tools")), "tools")
        if request.thinking and request.thinking_effort is not None:
            if request.thinking_effort not in EFFORTS:
                raise RequestError(
                    f"thinking_effort {request.thinking_effort!r} is not one of {', '.join(EFFORTS)}",
                    param="thinking_effort",
                )
            self.note("thinking-effort", _EFFORT.format(request.thinking_effort), "thinking_effort")
        self.conversation()
        if isinstance(request.tool_choice, str) and request.tool_choice in _TOOL_CHOICE:
            self.note("tool-choice", _TOOL_CHOICE[request.tool_choice], "tool_choice")
        self.response_format()
        if request.add_generation_prompt:
            self.open("message", ("role", "assistant"))
            self.open("think" if request.thinking else "response")
        if self.images:
            raise RequestError(f"{len(self.images)} images have no place in the messages", param="messages")
        return self.segments

    # Markup

    def open(self, tag: str, *attributes: tuple[str, str]) -> None:
        self.segments += (OPEN, Segment(tag, False))
        for key, value in attributes:
            self.segments += (Segment(" " + key, False), Segment('="', False))
            if value:
                self.segments.append(Segment(escape_attribute(value), False))
            self.segments.append(Segment('"', False))
        self.segments.append(SEP)

    def close(self, tag: str) -> None:
        self.segments += (CLOSE, Segment(tag, False), SEP)

    def end_message(self) -> None:
        self.close("message")
        self.segments.append(END)

    def text(self, text: str, path: str) -> None:
        """One body text, as it stands; with images supplied, each placeholder in it takes the next one."""
        _check_scalars(text, path)
        pieces = [text] if self.request.image_prompts is None else text.split(IMAGE_PLACEHOLDER)
        for index, piece in enumerate(pieces):
            if index:
                self.image(path)
            if piece:
                self.segments.append(Segment(piece, False))

    def image(self, path: str) -> None:
        if not self.images:
            raise RequestError(f"{path}: no image was supplied for this place; images are not served", param=path)
        self.segments.append(Segment(self.images.pop(), True))

    def note(self, kind: str, body: str, path: str) -> None:
        """A system message the renderer writes itself."""
        self.open("message", ("role", "system"), ("type", kind))
        self.text(body, path)
        self.end_message()

    # Messages

    def conversation(self) -> None:
        calls: list[_Call] = []  # of the most recent assistant message
        results = 0  # tool messages since then
        run: list[_Result] = []
        for index, message in enumerate(self.request.messages):
            path = f"messages[{index}]"
            if not isinstance(message, Mapping):
                raise RequestError(f"{path} must be an object", param=path)
            role = message.get("role")
            if role == "tool":
                run.append(_Result(message, path))
                continue
            results += self.tool_results(run, calls, results)
            run = []
            if role == "assistant":
                calls = _calls(message, path)
                results = 0
                self.assistant(message, calls, path)
            elif role == "system" and message.get("tools"):
                body = _DECLARE_MORE.format(json_compact(message["tools"], f"{path}.tools"))
                self.note("tool-declare", body, f"{path}.tools")
            elif role in ("system", "user"):
                self.open("message", ("role", role), *_name(message, path))
                self.content(message, path)
                self.end_message()
        self.tool_results(run, calls, results)

    def content(self, message: Mapping[str, Any], path: str) -> None:
        content, path = message.get("content"), f"{path}.content"
        if content is None:
            return
        if isinstance(content, str):
            self.text(content, path)
            return
        if not isinstance(content, Sequence):
            raise RequestError(f"{path} must be a string or a list of parts", param=path)
        for index, part in enumerate(content):
            at = f"{path}[{index}]"
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text":
                self.text(_string(part.get("text"), f"{at}.text"), f"{at}.text")
            elif kind in ("image", "image_url"):
                self.image(at)
            else:
                raise RequestError(f"{at} has type {kind!r}; served are text parts", param=f"{at}.type")

    def assistant(self, message: Mapping[str, Any], calls: Sequence[_Call], path: str) -> None:
        self.open("message", ("role", "assistant"), *_name(message, path))
        if self.request.thinking:
            self.open("think")
            key = "reasoning_content" if message.get("reasoning_content") else "reasoning"
            reasoning = _string(message.get(key) or "", f"{path}.{key}")
            self.text(reasoning if reasoning.strip() else "", f"{path}.{key}")
            self.close("think")
        self.open("response")
        self.content(message, path)
        self.close("response")
        if calls:
            self.open("tools")
            for number, call in enumerate(calls, start=1):
                self.open("call", ("tool", call.name), ("index", str(number)))
                self.arguments(call)
                self.close("call")
            self.close("tools")
        self.end_message()

    def arguments(self, call: _Call) -> None:
        if isinstance(call.arguments, str):
            self.open("json", ("type", "object"))
            self.text(call.arguments, call.path)
            self.close("json")
            return
        for key, value in call.arguments.items():
            _check_scalars(_string(key, call.path), call.path)
            self.open("argument", ("key", key), ("type", type_name(value)))
            self.text(value if isinstance(value, str) else _dump(value, call.path), call.path)
            self.close("argument")

    def tool_results(self, run: Sequence[_Result], calls: Sequence[_Call], before: int) -> int:
        """Write one run of consecutive tool messages, in call order if all of them are known; returns how many.

        before: tool messages already written since the last assistant message.
        """
        position: dict[Any, int] = {}
        for at, call in enumerate(calls):
            position.setdefault(call.id, at)
        found = [position.get(result.call_id, -1) for result in run]
        ordered: list[tuple[_Result, str | None]]
        if -1 in found:
            ordered = [(result, None) for result in run]
        else:
            by_call = sorted(zip(found, run, strict=True), key=lambda pair: pair[0])
            ordered = [(result, calls[at].name) for at, result in by_call]
        for index, (result, called) in enumerate(ordered, start=before + 1):
            name = called or result.message.get("tool") or result.message.get("name")
            if not name and index <= len(calls):
                name = calls[index - 1].name
            if not name:
                raise RequestError(f"{result.path} answers no call and names no tool", param=result.path)
            name = _string(name, f"{result.path}.name")
            _check_scalars(name, f"{result.path}.name")
            self.open("message", ("role", "tool"), ("tool", name), ("index", str(index)))
            self.content(result.message, result.path)
            self.end_message()
        return len(ordered)

    def response_format(self) -> None:
        wanted = self.request.response_format
        kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
        if kind not in ("json_object", "json_schema"):
            return
        body = _FORMAT.format(kind)
        if kind == "json_schema":
            schema = response_schema(wanted) if isinstance(wanted, Mapping) else None
            body += _FORMAT_SCHEMA.format(json_compact(schema, "response_format.json_schema"))
        self.note("response-format", body, "response_format")


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of an assistant message. arguments: an object, or text that is no JSON."""

    id: Any
    name: str
    arguments: Mapping[str, Any] | str
    path: str


@dataclass(frozen=True, slots=True)
class _Result:
    message: Mapping[str, Any]
    path: str
    call_id: Any = field(init=False)

    def __post_init__(self) -> None:
        call_id = self.message.get("tool_call_id") or self.message.get("id")
        # Unhashable ids cannot be looked up; they match nothing.
        object.__setattr__(self, "call_id", call_id if isinstance(call_id, (str, int)) else None)


def _calls(message: Mapping[str, Any], path: str) -> list[_Call]:
    listed, path = message.get("tool_calls"), f"{path}.tool_calls"
    if not listed:
        return []
    if isinstance(listed, (str, bytes)) or not isinstance(listed, Sequence):
        raise RequestError(f"{path} must be a list", param=path)
    calls = []
    for index, call in enumerate(listed):
        at = f"{path}[{index}]"
        function = call_function(call, at)
        _check_scalars(function["name"], f"{at}.function.name")
        at_arguments = f"{at}.function.arguments"
        arguments = _arguments(function.get("arguments"), at_arguments)
        call_id = call.get("id")
        # A call without an id must not be matched by a result without one.
        known = call_id if isinstance(call_id, (str, int)) else object()
        calls.append(_Call(known, function["name"], arguments, at_arguments))
    return calls


def _arguments(value: Any, path: str) -> Mapping[str, Any] | str:
    """The arguments of a call: an object; {} for none; a string that does not parse is kept as it stands."""
    if value is None:
        return {}
    if isinstance(value, str):
        if not value.strip():
            return {}
        text = value
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            return text
        except (RecursionError, ValueError) as error:  # nested too deep, or a number of more than 4300 digits
            raise RequestError(f"{path} cannot be read: {error}", param=path) from None
    if not isinstance(value, Mapping):
        raise RequestError(f"{path} must be a JSON object, not {type_name(value)}", param=path)
    return value


def type_name(value: Any) -> str:
    """The type an argument of this value is written with."""
    if isinstance(value, bool):  # before number: a bool is an int to Python
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _name(message: Mapping[str, Any], path: str) -> list[tuple[str, str]]:
    name = message.get("name")
    if not name:
        return []
    _check_scalars(_string(name, f"{path}.name"), f"{path}.name")
    return [("name", name)]


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{path} must be a string", param=path)
    return value


def _dump(value: Any, path: str, **how: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, **how)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} cannot be written as JSON: {error}", param=path) from None


def _check_scalars(text: str, path: str) -> None:
    """A lone surrogate cannot be encoded, and may hide inside an escaped arguments string."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{path} holds a lone surrogate", param=path) from None
