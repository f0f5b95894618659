"""Bytes of tokens to text, piece by piece, never half a character.

One decoder serves one channel of one reply; who decides where a channel ends is the reply reader.
"""

from __future__ import annotations

import codecs


class Detokenizer:
    """Incremental UTF-8. What it has returned never changes later, and the pieces join to the decode of the whole.

    It holds back at most three bytes. Whether text "ends in U+FFFD" says nothing about completeness (real tokens
    contain that character), so the decoder's own state decides. Source: specification 1.6.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The text that is now certain."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The rest, at the end of a channel or reply: U+FFFD if a character was cut. Ready for the next channel."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
