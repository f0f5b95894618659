"""A conversation that goes on takes up where a snapshot stands, with the same bits, within its budget."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.whole_engine import engine, start

from sluice.daemon.engine.sessions import SnapshotCache
from sluice.daemon.model.config import read_config
from sluice.daemon.model.state import SequenceState

FIRST = [5, 77, 310, 9, 42, 250, 8]


@pytest.fixture(scope="module")
def config(tiny_checkpoint):
    return read_config(tiny_checkpoint)


def test_the_next_turn_is_served_from_the_last_and_has_the_same_bits(tiny_checkpoint):
    with engine(tiny_checkpoint) as running:
        answer, _ = start(running, FIRST, 5).result()
        second = [*FIRST, *answer, 11, 12]
        _, alone = start(running, second, 4).result()
        assert alone.cached_tokens == 0
    with engine(tiny_checkpoint, "memory.sessions=8MiB") as running:
        again, _ = start(running, FIRST, 5).result()
        assert again == answer
        _, continued = start(running, second, 4).result()
        # The answer's last token was never taken in: the snapshot ends right before it.
        assert continued.cached_tokens == len(FIRST) + len(answer) - 1
        assert continued.logits_fingerprint == alone.logits_fingerprint
        # Another question after the same beginning starts from the end of the first prompt's snapshot.
        _, other = start(running, [*FIRST, 99, 98], 4).result()
        assert other.cached_tokens == len(FIRST)


def test_a_prompt_that_is_all_cached_still_computes_its_last_token(tiny_checkpoint):
    with engine(tiny_checkpoint, "memory.sessions=8MiB") as running:
        _, first = start(running, FIRST, 3).result()
        _, again = start(running, FIRST, 3).result()
        assert again.cached_tokens < len(FIRST)
        assert again.logits_fingerprint == first.logits_fingerprint


def filled(config, tokens):
    state = SequenceState(config, 64)
    state.position = len(tokens)
    state.kda.fill(float(len(tokens)))
    return state


def ids(*numbers):
    return np.array(numbers, np.int32)


def test_the_budget_is_kept_and_the_oldest_goes(config):
    one = filled(config, ids(1, 2)).snapshot_bytes() + 100
    cache = SnapshotCache(2 * one)
    for tokens in (ids(1, 2), ids(3, 4), ids(5, 6)):
        cache.keep(tokens, filled(config, tokens))
        assert cache.nbytes <= 2 * one
    state = SequenceState(config, 64)
    assert cache.restore_longest(ids(1, 2, 9), state) == 0
    assert cache.restore_longest(ids(3, 4, 9), state) == 2
    cache.keep(ids(7, 8), filled(config, ids(7, 8)))
    assert cache.restore_longest(ids(3, 4, 9), state) == 2  # used a moment ago, so it stayed
    assert cache.restore_longest(ids(5, 6, 9), state) == 0


def test_what_cannot_fit_is_not_kept(config):
    cache = SnapshotCache(10)
    cache.keep(ids(1), filled(config, ids(1)))
    assert len(cache) == 0


def test_the_longest_beginning_wins_and_restores_every_number(config):
    cache = SnapshotCache(2**24)
    for tokens in (ids(1), ids(1, 2, 3), ids(1, 2)):
        cache.keep(tokens, filled(config, tokens))
    state = SequenceState(config, 64)
    assert cache.restore_longest(ids(1, 2, 3, 4), state) == 3
    assert state.position == 3
    assert np.all(state.kda == 3.0)
    assert cache.restore_longest(ids(1, 2, 3), state) == 2
    assert cache.restore_longest(ids(2, 2, 3), state) == 0


@pytest.mark.parametrize("key", ["sessions.dir=/nowhere", "engine.trunk=int8"])
def test_an_option_that_cannot_be_honoured_is_refused(tiny_checkpoint, key):
    from sluice.io.errors import PresetError

    with pytest.raises(PresetError, match=key.split("=")[0]), engine(tiny_checkpoint, key):
        pass
