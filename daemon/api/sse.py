"""Server-sent events for a slow model: headers at once, comments while nothing can be said, a clean end.

Comments are `: word key=value ...` lines. Clients skip them by the standard; `sluice ask` reads them:

    : accepted                                        the first bytes, before any work
    : queued position=2                               waiting
    : prefill done=512 total=4096 rate=35.2 eta_s=102   reading the prompt (tokens, tokens a second, seconds)
    : decode tokens=17                                writing, but nothing could be sent (held back, or slow)
"""

from __future__ import annotations

import msgspec

from sluice.daemon.api.errors import error_reply
from sluice.daemon.api.exchange import Exchange
from sluice.daemon.engine.requests import Progress

_HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)


def progress_comment(progress: Progress) -> str:
    """One line about a request that has no token yet."""
    if progress.position > 0:
        return f"queued position={progress.position}"
    line = f"prefill done={progress.done} total={progress.total} rate={progress.rate:.1f}"
    if progress.rate > 0.0:
        line += f" eta_s={max(0, progress.total - progress.done) / progress.rate:.0f}"
    return line


class EventStream:
    """The reply of one streaming request."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def start(self) -> None:
        """Headers and the first comment, so that no client waits for a byte."""
        await self._exchange.start(200, _HEADERS)
        await self.comment("accepted")

    async def _write(self, data: bytes, more: bool = True) -> None:
        await self._exchange.send({"type": "http.response.body", "body": data, "more_body": more})

    async def comment(self, text: str) -> None:
        await self._write(b": " + text.encode() + b"\n\n")

    async def data(self, value: object) -> None:
        """One event. msgspec writes no raw newline and keeps non-ASCII as it is."""
        await self._write(b"data: " + msgspec.json.encode(value) + b"\n\n")

    async def end(self) -> None:
        await self._write(b"data: [DONE]\n\n", more=False)

    async def fail(self, exc: BaseException) -> None:
        """The error as the last event: after the first byte there is no status left to set. No [DONE]: the
        answer is not whole."""
        await self._write(b"data: " + error_reply(exc).body + b"\n\n", more=False)
