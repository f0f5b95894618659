"""Stop strings: where in a growing text the first of them ends, and how much of the text is safe to send.

Pure text in, text out. Which text is searched (content only, channel by channel) is the reader's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.io.errors import RequestError

MAX_STOPS = 16
MAX_STOP_BYTES = 1024


def stop_strings(value: object, param: str = "stop") -> tuple[str, ...]:
    """A request's `stop` field as a tuple: None, a string, or up to 16 strings of 1 to 1024 bytes each.

    Raises RequestError with the path of what is wrong.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        listed: Sequence[object] = [value]
    elif isinstance(value, (list, tuple)):
        listed = value
    else:
        raise RequestError(f"{param} must be a string or a list of strings", param=param)
    if len(listed) > MAX_STOPS:
        raise RequestError(f"{param} has {len(listed)} strings, the limit is {MAX_STOPS}", param=param)
    stops: list[str] = []
    for index, stop in enumerate(listed):
        path = param if isinstance(value, str) else f"{param}[{index}]"
        if not isinstance(stop, str) or not stop:
            raise RequestError(f"{path} must be a string that is not empty", param=path)
        try:
            size = len(stop.encode())
        except UnicodeEncodeError:
            raise RequestError(f"{path} holds a lone surrogate", param=path) from None
        if size > MAX_STOP_BYTES:
            raise RequestError(f"{path} has {size} bytes, the limit is {MAX_STOP_BYTES}", param=path)
        stops.append(stop)
    return tuple(stops)


class StopSearch:
    """Searches one channel's text as it arrives. The result does not depend on where the pieces are cut.

    One Knuth-Morris-Pratt automaton a string: its state is both the match and the length that must be held back.
    The first match by end position wins, of equal ends the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._fallbacks = [_fallback(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that may be sent now. After a match, `matched` is set and nothing more comes out."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for at, character in enumerate(text):
            longest = 0
            for which, stop in enumerate(self._stops):
                state, fallback = self._states[which], self._fallbacks[which]
                while state and stop[state] != character:
                    state = fallback[state - 1]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    longest = max(longest, state)
                    state = 0  # any match ends the search, so no overlap is wanted
                self._states[which] = state
            if longest:
                whole = self._held + text[: at + 1]
                self._held = ""
                self.matched = whole[len(whole) - longest :]
                return whole[: len(whole) - longest]
        whole = self._held + text
        keep = max(self._states)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the channel: no match can span it. Ready for the next channel."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held


def _fallback(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper suffix that is a prefix too."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table
