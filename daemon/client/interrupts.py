"""Ctrl-C while the program waits for the daemon.

Python acts on a signal between two steps of its own. One that comes after the last step and before the system call of
a read begins is noted and nothing more: the read then waits for the daemon's next byte, and the user presses Ctrl-C in
vain. A tick of the clock ends such a wait within a second.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TICK_SECONDS = 1.0


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, a Ctrl-C raises KeyboardInterrupt within `TICK_SECONDS` whatever the main thread waits for. Takes the
    process's SIGALRM for that time; elsewhere than on the main thread, where Ctrl-C never arrives, it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
