"""The adaptive width: down when reading is the bound or guesses are wrong, up when they are right and free."""

from __future__ import annotations

import pytest

from sluice.daemon.engine.lookahead import USUAL, WIDEST, LookaheadControl, Observed, adapted

START = Observed(0.0, 0.0, 0, 0)


@pytest.mark.parametrize(
    ("width", "now", "expected"),
    [
        (6, Observed(1.0, 1.0, 100, 90), 5),  # the drives never idle: a wasted byte delays a needed one
        (0, Observed(1.0, 1.0, 0, 0), 0),
        (6, Observed(0.5, 1.0, 100, 20), 5),  # mostly wrong
        (1, Observed(0.5, 1.0, 100, 20), 1),
        (6, Observed(0.5, 1.0, 100, 80), 7),
        (WIDEST, Observed(0.5, 1.0, 100, 80), WIDEST),
        (0, Observed(0.1, 1.0, 0, 0), 1),  # idle drives: worth another try
        (6, Observed(0.5, 1.0, 3, 0), 7),  # three guesses say nothing
        (6, START, 7),
    ],
)
def test_the_width_follows_what_was_seen(width, now, expected):
    assert adapted(width, START, now) == expected


def test_off_is_off_and_a_number_is_layers():
    assert LookaheadControl("off", lambda: START).before_pass(1).width == 0
    two = LookaheadControl(2, lambda: START).before_pass(1)
    assert (two.width, two.layers) == (USUAL, 2)


def test_nothing_is_foreseen_for_a_chunk_of_a_prompt():
    assert LookaheadControl("adaptive", lambda: START).before_pass(64).width == 0


def test_the_control_compares_with_the_pass_before():
    seen = iter([START, Observed(0.99, 1.0, 100, 100), Observed(1.0, 2.0, 200, 200)])
    control = LookaheadControl("adaptive", lambda: next(seen))
    assert control.before_pass(1).width == USUAL - 1
    assert control.before_pass(1).width == USUAL
