"""Errors as a client sees them: one OpenAI-shaped JSON object, one status, a few headers.

Owns the mapping from our error tree to the wire. What may be wrong with which field is decided in
`schemas`, `completions` and `chat`; a bug (anything that is not a SluiceError) shows nothing of itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from sluice.io.errors import (
    BudgetError,
    ContextExceeded,
    QueueFull,
    RequestError,
    SluiceError,
    StorageError,
    StoreError,
)

_encode = msgspec.json.encode
_MAX_MESSAGE = 600

# type (the family) and code (the word a program tests) by status, where the error itself names no code.
_TYPES: dict[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("authentication_error", "invalid_api_key"),
    403: ("authentication_error", "peer_not_allowed"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    411: ("invalid_request_error", "length_required"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    431: ("invalid_request_error", "headers_too_large"),
    500: ("server_error", None),
    503: ("service_unavailable", "service_unavailable"),
}


class Refusal(RequestError):
    """A request turned away for how it came rather than for what it asks: method, length, type, access.

    `status` is the HTTP status; `close` says that the body was not read, so the connection must end.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        close: bool = False,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.http_status = status
        self.close = close
        self.headers = headers


class ServiceUnavailable(SluiceError):
    """Loading, draining or full: come back in `retry_after_seconds`."""

    http_status = 503

    def __init__(self, message: str, retry_after_seconds: int = 5, *, close: bool = False) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.close = close


class ClientLeft(Exception):
    """The client closed its side or stopped reading; nobody is left to answer. `reason` is for the log."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What goes on the wire: HTTP status, the `error` object, extra headers."""

    status: int
    error: dict[str, str | None]
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def body(self) -> bytes:
        return _encode({"error": self.error})


def error_kind(exc: BaseException) -> str:
    """A short name for metrics and the log: the class for ours, `bug` for the rest."""
    return type(exc).__name__ if isinstance(exc, SluiceError) else "bug"


def error_message(exc: BaseException) -> str:
    """What happened, in a length that suits a reply and a log line; messages may quote what a client sent."""
    text = str(exc)
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 3] + "..."


def error_reply(exc: BaseException) -> ErrorReply:
    """The reply to `exc`. A bug answers 500 without details: they belong into the log."""
    if not isinstance(exc, SluiceError):
        message = "an internal error occurred; the daemon's log has the details"
        return ErrorReply(500, {"message": message, "type": "server_error", "param": None, "code": None})
    status = exc.http_status
    kind, code = _TYPES.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    headers: list[tuple[str, str]] = []
    param = None
    match exc:
        case ContextExceeded():
            param, code = exc.param, exc.code
        case QueueFull():
            headers.append(("retry-after", str(max(1, int(exc.retry_after_seconds)))))
        case Refusal():
            param, code = exc.param, exc.code or code
            headers.extend(exc.headers)
            if exc.close:
                headers.append(("connection", "close"))
        case RequestError():
            param = exc.param
            code = exc.code or code
            if exc.code == "model_not_found":
                kind = "invalid_request_error"
        case ServiceUnavailable():
            headers.append(("retry-after", str(max(1, exc.retry_after_seconds))))
            if exc.close:
                headers.append(("connection", "close"))
        case BudgetError():
            # It will never fit: openai's clients honour this header and do not try again.
            code = "budget_exceeded"
            headers.append(("x-should-retry", "false"))
        case StorageError():
            code = "storage_error"
        case StoreError():
            code = "store_error"
        case _ if status == 503:
            headers.append(("retry-after", "10"))
        case _:
            pass
    return ErrorReply(
        status, {"message": error_message(exc), "type": kind, "param": param, "code": code}, tuple(headers)
    )


_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


_MISSING = re.compile(r"^Object missing required field `(.*)`$")


def from_msgspec(exc: msgspec.ValidationError, prefix: str = "") -> RequestError:
    """msgspec's complaint as ours: its trailing path becomes `param`, below `prefix`."""
    text = str(exc)
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    if found:
        text = text[: found.start()]
    missing = _MISSING.match(text)
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
        text = "required, and missing"
    param = f"{prefix}.{path}" if prefix and path and not path.startswith("[") else prefix + path
    return RequestError(f"{param}: {text}" if param else text, param=param or None)
