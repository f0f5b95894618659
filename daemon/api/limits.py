"""The bounds of the front door. Every one has a reason, written beside it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds, counts.

    body_bytes: a million token ids are about 7 MB of JSON; more is a mistake or an attack.
    header_bytes: request line and headers together.
    connections: beyond it a connection is told 503, beyond twice of it it is closed unread.
    header_seconds, body_seconds: how long a request may take to arrive (slow senders).
    keepalive_seconds: how long an idle connection is kept.
    write_seconds: how long a reader may leave a full write buffer (write_buffer_bytes) untouched before it
    is dropped; its generation is cancelled with it.
    heartbeat_seconds: the longest silence of a stream; Node's fetch gives up after 300 s, others after 20.
    progress_seconds: the shortest distance of two progress comments.
    grammar_bytes: schemas of tools and response_format that are to be compiled, as JSON; 50,000 enum values (1 MB)
    took 12 s.
    """

    body_bytes: int = 8 * 1024 * 1024
    header_bytes: int = 64 * 1024
    connections: int = 256
    header_seconds: float = 15.0
    body_seconds: float = 60.0
    keepalive_seconds: float = 75.0
    write_seconds: float = 30.0
    write_buffer_bytes: int = 64 * 1024
    heartbeat_seconds: float = 10.0
    progress_seconds: float = 1.0
    grammar_bytes: int = 256 * 1024

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not value > 0:
                raise ValueError(f"limits.{name} is {value!r}; it must be above 0")
