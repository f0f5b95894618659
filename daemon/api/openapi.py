"""The surface as an OpenAPI 3.1 document, made from the same types that requests are checked with."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from sluice.daemon.api import schemas

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


@functools.cache
def document() -> dict[str, Any]:
    """The document. The same object every time: not to be changed."""
    types = [kind for _, _, _, request, reply, _ in _OPERATIONS for kind in (request, reply) if kind is not None]
    types += [schemas.ChatChunk, schemas.ErrorEnvelope]
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
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
