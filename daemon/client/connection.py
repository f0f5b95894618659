"""One daemon, reached over its Unix socket (or TCP with a token): requests, streams, and errors as ours."""

from __future__ import annotations

import json
import socket as socket_module
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sluice.daemon.client.sse import Comment, Data, SseReader
from sluice.io.errors import DaemonUnreachable, SluiceError

if TYPE_CHECKING:
    import httpx  # takes half a second: imported where a connection is made, not for every `sluice --help`

CONNECT_SECONDS = 5.0
REPLY_SECONDS = 30.0
SILENCE_SECONDS = 60.0  # the daemon says something at least every 10 s while it works

# What a refusal means for the exit code: 2 what was asked cannot be honoured, 5 nobody serves it now.
_EXIT_BY_CODE = {"storage_error": 4, "store_error": 4, "budget_exceeded": 3, "server_error": 1}
_EXIT_BY_STATUS = {429: 5, 503: 5, 500: 1}


class DaemonRefused(SluiceError):
    """The daemon answered with an error; the message is its own. `code` and `param` as it named them."""

    def __init__(self, message: str, *, status: int = 0, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param
        self.http_status = status or 500
        self.exit_code = _EXIT_BY_CODE.get(code or "", _EXIT_BY_STATUS.get(status, 2 if 400 <= status < 500 else 1))


class Connection:
    """A context manager over one httpx client; closing twice is harmless.

    socket: the daemon's Unix socket. url: an address instead (`http://host:port`), token the bearer token it asks for.
    """

    def __init__(self, socket: Path | None, *, url: str | None = None, token: str | None = None) -> None:
        import httpx

        self.address = url or str(socket)
        self._socket = None if url else str(socket)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # Reading the system's certificates takes a fifth of a second, and a socket needs none.
        transport = httpx.HTTPTransport(uds=self._socket, verify=(url or "").startswith("https:"))
        self._client = httpx.Client(
            transport=transport,
            base_url=url or "http://sluice",
            headers=headers,
            trust_env=False,  # a proxy or .netrc has no business between us and our daemon
            timeout=httpx.Timeout(REPLY_SECONDS, connect=CONNECT_SECONDS),
        )

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection; a generation under way is cancelled by the daemon."""
        self._client.close()

    def get(self, path: str) -> Any:
        """A JSON reply. Raises DaemonUnreachable or DaemonRefused."""
        import httpx

        self._knock()
        try:
            response = self._client.get(path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise _refused(response.status_code, response.content)
        try:
            return response.json()
        except ValueError:
            raise DaemonRefused(f"{self.address}: {path} answered no JSON; is this a sluice daemon?") from None

    def wait_until_ready(self, note: Callable[[str], None] = lambda text: None, pause_seconds: float = 0.5) -> None:
        """Return when the daemon no longer loads: the first connection may be what started it.

        note(text) is told once that it loads. A daemon that drains, or knows no such route, is left to refuse the
        request itself. Raises DaemonUnreachable.
        """
        import httpx

        told = False
        while True:
            self._knock()
            try:
                response = self._client.get("/health/ready")
            except httpx.HTTPError as error:
                raise self._unreachable(error) from error
            if response.status_code != 503 or not _says_loading(response.content):
                return
            if not told:
                note("the daemon is loading its model")
                told = True
            time.sleep(pause_seconds)

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Comment | dict[str, Any], None, None]:
        """POST a streaming request: comments and parsed data events until [DONE].

        Closing the iterator early leaves, and the daemon cancels the generation. Raises DaemonUnreachable (also when
        it goes away in the middle) or DaemonRefused (also for an error event).
        """
        import httpx

        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        reader = SseReader()
        self._knock()
        try:
            with self._client.stream("POST", path, json=body, timeout=timeout) as response:
                if response.status_code != 200:
                    raise _refused(response.status_code, response.read())
                for piece in response.iter_raw():
                    for event in reader.feed(piece):
                        if isinstance(event, Comment):
                            yield event
                        elif event.text == "[DONE]":
                            return
                        else:
                            yield self._parsed(event)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        raise DaemonUnreachable(f"{self.address}: the answer ended in the middle; the daemon has gone")

    def _knock(self) -> None:
        """Whether somebody listens: httpcore leaves the socket of a refused connection to the garbage collector."""
        if self._socket is None:
            return
        with socket_module.socket(socket_module.AF_UNIX) as probe:
            probe.settimeout(CONNECT_SECONDS)
            try:
                probe.connect(self._socket)
            except PermissionError:
                raise DaemonUnreachable(
                    f"{self.address}: you may not ask this daemon; its group may (usermod -aG sluice NAME)"
                ) from None
            except OSError as error:
                raise self._nobody(error.strerror or str(error)) from None

    def _nobody(self, reason: str) -> DaemonUnreachable:
        remedy = "start the daemon with `sluice serve`, or name its socket with --socket"
        return DaemonUnreachable(f"{self.address}: nobody answers ({reason}); {remedy}")

    def _parsed(self, event: Data) -> dict[str, Any]:
        try:
            value = json.loads(event.text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise DaemonRefused(f"{self.address}: an event is no JSON object; is this a sluice daemon?")
        if "error" in value:
            raise _error(0, value["error"])
        return value

    def _unreachable(self, error: httpx.HTTPError) -> DaemonUnreachable:
        import httpx

        if isinstance(error, httpx.ConnectError):
            return self._nobody(str(error))
        if isinstance(error, httpx.TimeoutException):
            what = "it does not answer in time"
        else:
            what = f"the connection broke ({error or type(error).__name__})"
        return DaemonUnreachable(f"{self.address}: {what}")


def _says_loading(body: bytes) -> bool:
    try:
        value = json.loads(body)
    except ValueError:
        return False
    return isinstance(value, dict) and value.get("status") == "loading"


def _refused(status: int, body: bytes) -> DaemonRefused:
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    error = value.get("error") if isinstance(value, dict) else None
    return _error(status, error if error is not None else f"status {status}")


def _error(status: int, error: Any) -> DaemonRefused:
    if not isinstance(error, dict):
        return DaemonRefused(str(error), status=status)
    code = error.get("code") or error.get("type")
    return DaemonRefused(str(error.get("message") or code), status=status, code=code, param=error.get("param"))
