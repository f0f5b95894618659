"""Talking to systemd: READY, STATUS, EXTEND_TIMEOUT_USEC, RELOADING, STOPPING, WATCHDOG (protocol of sd_notify(3)).

Spoken directly over the datagram socket, because an `import systemd` proves nothing here (STYLE.md) and the protocol is
four lines. Sending never raises and never blocks: a service manager that does not listen must not stop a token.
Safe from any thread: one message is one datagram.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from types import TracebackType

LONGEST_STATUS = 500  # one line in `systemctl status`


class Notifier:
    """Sends to NOTIFY_SOCKET; silent where there is none. A context manager; closing twice is harmless."""

    def __init__(self, address: str | None, *, monotonic_us: Callable[[], int] | None = None) -> None:
        """address: a path, or an abstract name written with a leading "@", or None."""
        self._monotonic_us = monotonic_us or (lambda: time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)
        self._address = "\0" + address[1:] if address and address[0] == "@" else address
        self._socket: socket.socket | None = None
        # Only Unix addresses are answered; a vsock one (a virtual machine's own manager) is left alone.
        if self._address and self._address[0] in "/\0":
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> Notifier:
        """For NOTIFY_SOCKET of `env` (os.environ when None)."""
        return cls((os.environ if env is None else env).get("NOTIFY_SOCKET") or None)

    @property
    def active(self) -> bool:
        """Whether anybody is spoken to."""
        return self._socket is not None

    def send(self, **variables: str | int) -> bool:
        """One datagram of NAME=value lines; whether it was accepted. Line breaks in a value become spaces."""
        if self._socket is None or self._address is None:
            return False
        lines = "\n".join(f"{name}={' '.join(str(value).splitlines())}" for name, value in variables.items())
        with contextlib.suppress(OSError):
            self._socket.sendto(lines.encode(), self._address)
            return True
        return False

    def ready(self, status: str = "") -> None:
        """Start-up or reload is finished."""
        self.send(READY=1, **({"STATUS": status[:LONGEST_STATUS]} if status else {}))

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self.send(STATUS=text[:LONGEST_STATUS])

    def extend_timeout(self, seconds: float) -> None:
        """Starting or stopping goes on: the manager's timeout counts anew and may not end before `seconds` from now."""
        self.send(EXTEND_TIMEOUT_USEC=int(seconds * 1e6))

    def reloading(self) -> None:
        """A reload begins; `ready` ends it. The time stamp lets Type=notify-reload match it to its signal."""
        self.send(RELOADING=1, MONOTONIC_USEC=self._monotonic_us())

    def stopping(self, status: str = "") -> None:
        """Shutdown begins."""
        self.send(STOPPING=1, **({"STATUS": status[:LONGEST_STATUS]} if status else {}))

    def watchdog(self) -> None:
        """The service is alive."""
        self.send(WATCHDOG=1)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Notifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def watchdog_seconds(env: Mapping[str, str] | None = None, pid: int | None = None) -> float | None:
    """Within how many seconds the manager wants a sign of life; None when it does not watch us."""
    env = os.environ if env is None else env
    text = env.get("WATCHDOG_USEC", "")
    if not text.isdigit() or int(text) == 0:
        return None
    if env.get("WATCHDOG_PID", str(pid or os.getpid())) != str(pid or os.getpid()):
        return None
    return int(text) / 1e6


class ProgressWatch:
    """Decides whether a sign of life is true: while work is under way, only if it has moved since the last time.

    A hung read or a deadlock then stops the pings, and systemd restarts a daemon that merely looks alive.
    """

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._last: int | None = None

    def tick(self, progress: int, busy: bool) -> bool:
        """Call every half watchdog time. progress: any counter that moves with the pipeline (layers run, records
        read); busy: whether it ought to move. Returns whether a ping was due (and sent)."""
        alive = not busy or progress != self._last
        self._last = progress
        if alive:
            self._notifier.watchdog()
        return alive
