"""tiktoken and tokenizers, two implementations that share no code, on 100,000 generated strings and more."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.vocabularies import as_tokenizer_json, by_name

from sluice.daemon.chat.tokenizer import load_tokenizer

STRINGS = 110_000
ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz",
    "ABCXYZ abcxyz'",
    " \t\n\r\x0b\x0c\x1c\x85\u00a0\u2003\u3000",
    "0123456789½²Ⅷ٣",
    ".,;:!?-_/\\|<>[]{}()\"'`~@#$%^&*+=",
    "中文汉字々〇〡〆あアー한글",
    "éàüßñøłžıİſKǅ",
    "e\u0301a\u0308\u200d\ufe0f\u0b95\u0bcd",
    "😀👩‍💻🎉🇩🇪🏽",
    "\x00\x01\x07\x1b\x7f\u200b\ufeff\ufffd\U0010ffff\ue000",
    "абвгАБВאבגابپاไทย",
]
PIECES = [
    *("'s", "'T", "'re", "'ſ", "don't", "I'LL", "\r\n", "\n\n", "  ", "\t\t", "the ", " of", "ing", "self.", "return "),
    *("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "<|reserved_token_3900|>", "<|", "|>", "<|open"),
]


def strings(seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    for _ in range(STRINGS):
        parts: list[str] = []
        for _ in range(draw.randrange(1, 6)):
            kind = draw.random()
            if kind < 0.55:
                alphabet = draw.choice(ALPHABETS)
                parts.append("".join(draw.choices(alphabet, k=draw.randrange(1, 9))))
            elif kind < 0.8:
                parts.append(draw.choice(PIECES))
            elif kind < 0.9:
                parts.append(draw.choice(draw.choice(ALPHABETS)) * draw.randrange(2, 40))
            else:
                point = draw.randrange(0x10F800)  # any scalar value: the surrogates are stepped over
                parts.append(chr(point if point < 0xD800 else point + 0x800))
        yield "".join(parts)


@pytest.mark.parametrize("vocabulary", ["mini", "k3"])
def test_the_two_implementations_agree_on_generated_strings_in_both_modes(vocabulary: str, tmp_path: Path) -> None:
    one = by_name(vocabulary)
    (tmp_path / "tokenizer.json").write_text(json.dumps(as_tokenizer_json(one)))
    other = load_tokenizer(tmp_path, one.vocab_size)
    for index, text in enumerate(strings(seed=20261129)):
        ids = one.encode_text(text)
        assert ids == other.encode_text(text), ascii(text)
        if index % 10 == 0:
            assert one.encode_markup(text) == other.encode_markup(text), ascii(text)
            assert one.decode(ids) == text
