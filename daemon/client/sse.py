"""Server-sent events, read: bytes in, events out, cut anywhere. No socket here."""

from __future__ import annotations

import codecs
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Comment:
    """A line that begins with a colon; ours carry progress."""

    text: str


@dataclass(frozen=True, slots=True)
class Data:
    """The data lines of one event, joined by newlines."""

    text: str


class SseReader:
    """Line ends may be LF, CRLF or CR, as the standard allows. Fields other than data are skipped."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[Comment | Data]:
        """The events these bytes complete."""
        self._rest += self._decoder.decode(data)
        events: list[Comment | Data] = []
        while True:
            line, end, rest = _cut_line(self._rest)
            if not end:
                return events
            self._rest = rest
            if not line:
                if self._data:
                    events.append(Data("\n".join(self._data)))
                self._data = []
            elif line.startswith(":"):
                events.append(Comment(line[1:].strip()))
            elif line.startswith("data:"):
                self._data.append(line[5:].removeprefix(" "))


def _cut_line(text: str) -> tuple[str, str, str]:
    """(line, its end, the rest); the end is empty if no whole line is there."""
    at = min((i for i in (text.find("\n"), text.find("\r")) if i >= 0), default=-1)
    if at < 0 or text[at:] == "\r":  # a lone CR at the end may be half of a CRLF
        return text, "", ""
    end = "\r\n" if text.startswith("\r\n", at) else text[at]
    return text[:at], end, text[at + len(end) :]
