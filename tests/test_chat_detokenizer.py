"""Bytes to text in pieces: never half a character, never a changed mind."""

from __future__ import annotations

import random

import pytest
from helpers.vocabularies import golden, mini
from hypothesis import given
from hypothesis import strategies as st

from sluice.daemon.chat.detokenizer import Detokenizer


@pytest.mark.parametrize("case", golden("detok.json"), ids=lambda case: case["name"])
def test_recorded_ids_are_sent_step_by_step_as_recorded(case: dict) -> None:
    detokenizer = Detokenizer()
    steps = [detokenizer.feed(mini().token_bytes(token_id)) for token_id in case["ids"]]
    assert steps == case["steps"]
    assert detokenizer.flush() == case["flush"]
    assert "".join(steps) + case["flush"] == case["text"] == mini().decode(case["ids"])


@given(st.lists(st.binary(max_size=6), max_size=12))
def test_pieces_join_to_the_decode_of_the_whole(pieces: list[bytes]) -> None:
    detokenizer = Detokenizer()
    text = "".join(map(detokenizer.feed, pieces)) + detokenizer.flush()
    assert text == b"".join(pieces).decode(errors="replace")


def test_random_ids_join_to_the_decode_of_the_whole_and_hold_back_three_bytes_at_most() -> None:
    draw, detokenizer = random.Random(3), Detokenizer()
    for _ in range(3000):
        ids = [draw.randrange(mini().n_ranks) for _ in range(draw.randrange(1, 20))]
        sent = ""
        for count, token_id in enumerate(ids, start=1):
            sent += detokenizer.feed(mini().token_bytes(token_id))
            whole = b"".join(map(mini().token_bytes, ids[:count]))
            assert len(whole.decode(errors="replace")) - len(sent) <= 1
            assert whole.decode(errors="replace").startswith(sent)
        assert sent + detokenizer.flush() == mini().decode(ids)


def test_a_flushed_decoder_begins_anew() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.feed("é".encode()[:1]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.feed("é".encode()) == "é"
