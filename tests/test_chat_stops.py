"""Stop strings: found wherever the text is cut, and nothing sent that might belong to one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.daemon.chat.stops import StopSearch, stop_strings
from sluice.io.errors import RequestError


def plainly(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What is sent and what matched, by trying every end."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5),
    st.lists(st.integers(0, 24)),
)
def test_any_cut_gives_what_trying_every_end_gives(text: str, stops: list[str], cuts: list[int]) -> None:
    search = StopSearch(stops)
    borders = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    sent = "".join(search.feed(text[a:b]) for a, b in itertools.pairwise(borders))
    if search.matched is None:
        sent += search.flush()
    assert (sent, search.matched) == plainly(text, stops)


@given(st.text("ab", max_size=24), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5))
def test_only_the_longest_possible_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    search = StopSearch(stops)
    sent = search.feed(text)
    if search.matched is None:
        held = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
        assert text[len(sent) :] == text[len(text) - max(held) :]


def test_nothing_comes_out_after_a_match() -> None:
    search = StopSearch(["x"])
    assert search.feed("axb") == "a"
    assert search.feed("c") == ""
    assert search.flush() == ""


def test_of_two_matches_with_one_end_the_longest_is_dropped() -> None:
    search = StopSearch(["b", "ab"])
    assert search.feed("ca") == "c"
    assert search.feed("b") == ""
    assert search.matched == "ab"


def test_without_stops_text_passes_at_once() -> None:
    assert StopSearch(()).feed("abc") == "abc"


@pytest.mark.parametrize(
    ("value", "stops"), [(None, ()), ("x", ("x",)), ([], ()), (["a", "é" * 512], ("a", "é" * 512))]
)
def test_accepted_values(value: object, stops: tuple[str, ...]) -> None:
    assert stop_strings(value) == stops


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("", "stop"),
        (7, "stop"),
        ({}, "stop"),
        (["a", ""], "stop[1]"),
        (["a", None], "stop[1]"),
        (["\ud800"], "stop[0]"),
        ("x" * 1025, "stop"),
        (["a"] * 17, "stop"),
    ],
)
def test_refused_values_name_their_path(value: object, path: str) -> None:
    with pytest.raises(RequestError) as caught:
        stop_strings(value)
    assert caught.value.param == path
