"""A terminal that text streams into: thinking dim, and a line of progress behind the cursor that never stays.

Text of a model is shown, never obeyed: control characters are made visible, so that no answer moves the cursor,
changes a title or writes to a clipboard.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.cells import cell_len

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
TICK_SECONDS = 1.0

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    """The text with control characters and direction overrides shown as symbols; newline and tab stay."""

    def symbol(match: re.Match[str]) -> str:
        code = ord(match.group())
        return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"

    return _CONTROLS.sub(symbol, text.replace("\r\n", "\n"))


class Screen:
    """Where one answer is written. With a terminal, `note` is shown dim behind the cursor and redrawn every second
    until more text comes; without one, only the text is written, as it is."""

    def __init__(
        self,
        out: TextIO,
        *,
        note: Callable[[], str] | None = None,
        width: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._note = note if self._terminal else None
        self._width = width
        self._column = 0
        self._noted = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Screen:
        if self._note is not None:
            self._ticker = threading.Thread(target=self._tick, name="sluice-note", daemon=True)
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._ticker is not None:
            self._ticker.join()
            self._ticker = None
        with self._lock:
            self._erase()
            self._out.flush()

    def write(self, text: str, *, dim: bool = False) -> None:
        """Show more text."""
        with self._lock:
            self._erase()
            if self._terminal:
                text = harmless(text)
                self._out.write(DIM + text + PLAIN if dim else text)
            else:
                self._out.write(text)
            self._move(text)
            self._draw()
            self._out.flush()

    def end_line(self) -> None:
        """Begin a new line unless one has just begun."""
        if self._column:
            self.write("\n")

    def refresh(self) -> None:
        """Draw the note anew, if there is one."""
        with self._lock:
            self._erase()
            self._draw()
            self._out.flush()

    def _tick(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            self.refresh()

    def _move(self, text: str) -> None:
        _, newline, tail = text.rpartition("\n")
        width = max(1, self._width())
        start = 0 if newline else self._column % width
        cells = cell_len((" " * start + tail).expandtabs(8))
        # At the right edge the cursor has not wrapped yet: what is drawn there could not be taken back.
        self._column = width if cells and cells % width == 0 else cells % width

    def _draw(self) -> None:
        if self._note is None or self._stop.is_set():
            return
        note = harmless(self._note()).replace("\n", " ")
        room = self._width() - self._column - 2  # never to the edge: a wrapped note could not be taken back
        if not note or room < cell_len(note) + 1:
            return
        self._out.write(f"\x1b7 {DIM}{note}{PLAIN}\x1b8")
        self._noted = True

    def _erase(self) -> None:
        if self._noted:
            self._out.write("\x1b[K")
            self._noted = False


def elapsed(seconds: float) -> str:
    """A duration as people read it: 8 s, 3 min 20 s, 2 h 05 min."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(count: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
