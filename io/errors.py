"""The one tree of errors. Everyone may import downwards, so the root lives at the bottom.

    SluiceError               exit  HTTP
    ├── PresetError             2   500   a setting, flag, preset or command line that cannot be honoured
    ├── BudgetError             3   503   the memory plan does not fit
    ├── StoreError              4   500   model data missing, damaged, contradictory or made for something else
    ├── StorageError            4   503   a drive failed or lied while being read
    ├── DaemonUnreachable       5   503   nobody answers on the socket
    ├── InstanceHeld            6   503   another process holds the model or the socket
    └── RequestError            1   400   what a client sent cannot be served
        ├── ContextExceeded     1   400   prompt longer than the context
        ├── ModelNotFound       1   404
        └── QueueFull           1   429   carries retry_after_seconds

A message names the thing, the value, the limit and the remedy, in one line.
"""

from __future__ import annotations


class SluiceError(Exception):
    """Root of every error this project raises on purpose.

    `exit_code` is what the command line ends with, `http_status` what a client sees. Anything that is
    not a SluiceError is a bug: exit 1, HTTP 500.
    """

    exit_code: int = 1
    http_status: int = 500


class PresetError(SluiceError):
    """A setting, preset, flag or command line that cannot be honoured."""

    exit_code = 2


class BudgetError(SluiceError):
    """The memory plan does not fit. `short_bytes` is by how much (0 when unknown)."""

    exit_code = 3
    http_status = 503

    def __init__(self, message: str, short_bytes: int = 0) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes


class StoreError(SluiceError):
    """Model data that is missing, damaged, contradictory or made for something else."""

    exit_code = 4


class StorageError(SluiceError):
    """A read that failed, came short or did not match its checksum, after its one retry.

    Names where: `drive` and `file` (as configured), `offset` in bytes, and `layer`/`expert` where the
    reader's caller said what it was reading for (None otherwise).
    """

    exit_code = 4
    http_status = 503

    def __init__(
        self,
        message: str,
        *,
        drive: str = "",
        file: str = "",
        offset: int = 0,
        layer: int | None = None,
        expert: int | None = None,
    ) -> None:
        where = f"{message} (drive {drive or '?'}, file {file or '?'}, offset {offset}"
        where += f", layer {layer}" if layer is not None else ""
        where += f", expert {expert}" if expert is not None else ""
        super().__init__(where + ")")
        self.drive, self.file, self.offset, self.layer, self.expert = drive, file, offset, layer, expert


class DaemonUnreachable(SluiceError):
    """Nobody answers on the socket."""

    exit_code = 5
    http_status = 503


class InstanceHeld(SluiceError):
    """Another process holds the model or the socket; the message names it."""

    exit_code = 6
    http_status = 503


class RequestError(SluiceError):
    """What a client sent cannot be served.

    `param` is the path of the offending field (`messages[3].content`) or None, `code` OpenAI's
    machine-readable word or None.
    """

    http_status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class ContextExceeded(RequestError):
    """The prompt (with at least one token of answer) does not fit the context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelNotFound(RequestError):
    """The request names a model this daemon does not serve."""

    http_status = 404

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="model_not_found")


class QueueFull(RequestError):
    """The bounded queue is full; `retry_after_seconds` comes from measured rates."""

    http_status = 429

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after_seconds = retry_after_seconds
