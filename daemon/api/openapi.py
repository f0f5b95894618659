"""The surface as an OpenAPI 3.1 document, made from the same types that requests are checked with."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from sluice.daemon.api import schemas
from sluice.daemon.api.thinking import EFFORT_WORDS

_JSON = "application/json"

# path, method, summary, request type, reply type (None: an object or text of its own), streams
_OPERATIONS: tuple[tuple[str, str, str, type | None, type | None, bool], ...] = (
    ("/v1/chat/completions", "post", "Answer a conversation", schemas.ChatRequest, schemas.ChatCompletion, True),
    ("/v1/completions", "post", "Continue a text", schemas.CompletionRequest, schemas.Completion, True),
    ("/tokenize", "post", "Text or a chat to token ids", schemas.TokenizeRequest, schemas.Tokens, False),
    ("/detokenize", "post", "Token ids to text", schemas.DetokenizeRequest, schemas.Content, False),
    ("/v1/models", "get", "The served model", None, schemas.ModelList, False),
    ("/v1/models/{id}", "get", "One model", None, schemas.ModelEntry, False),
    ("/v1/status", "get", "Queue, requests, rates, memory, io", None, None, False),
    ("/health/live", "get", "The process answers", None, None, False),
    ("/health/ready", "get", "Requests are served", None, None, False),
)

_REFUSALS = {
    "post": ("400", "401", "403", "404", "408", "411", "413", "415", "429", "499", "500", "503"),
    "get": ("401", "403", "404", "503"),
}


# What the types leave open because the chat room checks it, described for readers and generators of clients.
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CALL = {
    "type": "object",
    "required": ["id", "function"],
    "properties": {
        "id": {"type": "string", "minLength": 1},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string", "minLength": 1}, "arguments": {"type": "string"}},
        },
    },
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": _TEXT_PART}]}
_MESSAGE = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"enum": ["user", "system", "developer"]},
                "content": _CONTENT,
                "name": {"type": "string"},
            },
        },
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"const": "assistant"},
                "content": _CONTENT,
                "name": {"type": "string"},
                "reasoning_content": {"type": ["string", "null"]},
                "tool_calls": {"type": ["array", "null"], "items": _CALL},
            },
        },
        {
            "type": "object",
            "required": ["role", "content", "tool_call_id", "name"],
            "properties": {
                "role": {"const": "tool"},
                "content": _CONTENT,
                "tool_call_id": {"type": "string", "minLength": 1},
                "name": {"type": "string", "minLength": 1},
            },
        },
    ]
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_.-]{0,255}$"},
                "description": {"type": "string"},
                "parameters": {"type": ["object", "null"]},
            },
        },
    },
}
_FORMAT = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {
            "type": "object",
            "required": ["name", "schema"],
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "schema": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
# The named form needs a name among the request's tools, which a schema cannot say; it is told in words.
_CHOICE = {
    "enum": ["auto", "none", None],
    "description": 'also, with tools: "required", or {"type": "function", "function": {"name": one of them}}',
}
_EFFORT = {"enum": [*EFFORT_WORDS, None]}


def _describe_chats(components: dict[str, Any]) -> None:
    for kind in ("ChatRequest", "TokenizeRequest"):
        fields = components[kind]["properties"]
        messages: dict[str, Any] = {"type": "array", "items": _MESSAGE, "minItems": 1}
        fields["messages"] = messages if kind == "ChatRequest" else {"anyOf": [messages, {"type": "null"}]}
        fields["tools"] = {"anyOf": [{"type": "array", "items": _TOOL}, {"type": "null"}]}
        fields["response_format"] = {"anyOf": [_FORMAT, {"type": "null"}]}
        fields["tool_choice"] = _CHOICE
        fields["reasoning_effort"] = _EFFORT


@functools.cache
def document() -> dict[str, Any]:
    """The document. The same object every time: not to be changed."""
    types = [kind for _, _, _, request, reply, _ in _OPERATIONS for kind in (request, reply) if kind is not None]
    types += [schemas.ChatChunk, schemas.ErrorEnvelope]
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    _describe_chats(components)
    reference = dict(zip(types, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for path, method, summary, request, reply, streams in _OPERATIONS:
        content: dict[str, Any] = {_JSON: {"schema": {"type": "object"} if reply is None else reference[reply]}}
        if streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        responses: dict[str, Any] = {"200": {"description": "As asked", "content": content}}
        for status in _REFUSALS[method]:
            error = {_JSON: {"schema": reference[schemas.ErrorEnvelope]}}
            responses[status] = {"description": "Refused", "content": error}
        if path == "/health/ready":
            responses["503"] = {
                "description": "Not yet, or no longer",
                "content": {_JSON: {"schema": {"type": "object"}}},
            }
        operation: dict[str, Any] = {"summary": summary, "responses": responses}
        if request is not None:
            operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": reference[request]}}}
            operation["parameters"] = [
                {
                    "name": "X-Sluice-Priority",
                    "in": "header",
                    "description": "0 (people) to 100, or interactive, background",
                    "schema": {"type": "string", "pattern": "^([0-9]|[1-9][0-9]|100|interactive|background)$"},
                }
            ]
        if "{id}" in path:
            operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "sluice", "version": "1", "description": "See docs/api.md"},
        "paths": paths,
        "components": {"schemas": components},
    }
