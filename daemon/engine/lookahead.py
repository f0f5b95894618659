"""How far experts are foreseen: the setting, and the adaptive rule behind "adaptive".

A guess costs a read that may be for nothing. That is free while the drives would idle and costs its whole
time while they are the bound, so the rule looks at both: how much of the last passes the drives were busy,
and how many guesses were used. Results never depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluice.daemon.model.graph import Lookahead

WIDEST = 8
USUAL = 6
"""On K3, the router of the next layer on this layer's state names rank 1 right 92% of the time and ranks 1 to 6
81%; reading 6 ahead paid there, 10 did not (specification 5.4)."""
MANY_ROWS = 8
"""In chunked prefill guessing did not pay: the union of many rows' guesses is most of what is read anyway."""
BUSY = 0.95
PRECISE = 0.5
LEAST_GUESSES = 16
"""Fewer than this in a pass say nothing about precision."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Totals since start. flying_seconds: with a read under way; elapsed_seconds: all; guesses begun and used."""

    flying_seconds: float
    elapsed_seconds: float
    guesses: int
    guesses_used: int


class LookaheadControl:
    """Says before each pass how wide to guess. `setting`: "off", "adaptive", or a number of layers (1..8)."""

    def __init__(self, setting: str | int, observe: Callable[[], Observed]) -> None:
        self._adaptive = setting == "adaptive"
        self._layers = setting if isinstance(setting, int) else 1
        self._width = 0 if setting == "off" else USUAL
        self._observe = observe
        self._last = observe()

    def before_pass(self, rows: int) -> Lookahead:
        """What the next pass of `rows` rows shall foresee."""
        if self._adaptive:
            now = self._observe()
            self._width = adapted(self._width, self._last, now)
            self._last = now
        return Lookahead(self._width if rows <= MANY_ROWS else 0, self._layers)


def adapted(width: int, before: Observed, now: Observed) -> int:
    """The next width after what was seen between two moments. Pure.

    Drives that hardly idle: one less, for every wasted byte delays a needed one. Guesses that are mostly
    wrong: one less. Otherwise one more, up to WIDEST. At 0 it tries again only when the drives idle.
    """
    elapsed = now.elapsed_seconds - before.elapsed_seconds
    busy = (now.flying_seconds - before.flying_seconds) / elapsed if elapsed > 0 else 0.0
    guesses = now.guesses - before.guesses
    if busy > BUSY:
        return max(0, width - 1)
    if guesses >= LEAST_GUESSES and (now.guesses_used - before.guesses_used) / guesses < PRECISE:
        return max(1, width - 1)
    return min(WIDEST, width + 1)
