"""The state of one sequence: its size, and going back to where it stood."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.reference import k3_config, kimi_linear_config
from helpers.shared import shared_path

from sluice.daemon.model.config import parse_config, read_config
from sluice.daemon.model.state import SequenceState, Snapshot, state_bytes
from sluice.io.errors import ContextExceeded, StoreError


def test_the_state_of_the_published_model_has_the_published_size() -> None:
    """Specification section 4: KDA and windows 464,633,856 bytes, and 55,296 per token of context."""
    c = read_config(shared_path("spec/k3_config.json"))
    for context, total in ((4_096, 691_126_272), (32_768, 2_276_573_184), (1_048_576, 58_446_692_352)):
        assert state_bytes(c, context) == total


@pytest.mark.parametrize("config", [k3_config(), kimi_linear_config()], ids=["k3", "kimi-linear"])
def test_what_is_planned_is_what_is_allocated(config: dict) -> None:
    c = parse_config(config)
    state = SequenceState(c, 10)
    assert state.nbytes == state_bytes(c, 10)
    state.position = 4
    assert state.snapshot().nbytes == state.snapshot_bytes() == state_bytes(c, 4)


def filled(context: int, position: int) -> SequenceState:
    state = SequenceState(parse_config(k3_config()), context)
    rng = np.random.default_rng(position)
    for part in (state.kda, state.windows, state.latents):
        part[...] = rng.normal(size=part.shape)
    state.position = position
    return state


def test_a_snapshot_holds_everything_up_to_its_position_and_fits_any_long_enough_state() -> None:
    state = filled(12, 7)
    kept = state.snapshot()
    other = filled(9, 3)
    other.valid = False
    other.restore(kept)
    assert (other.position, other.valid) == (7, True)
    assert np.array_equal(other.kda, state.kda)
    assert np.array_equal(other.windows, state.windows)
    assert np.array_equal(other.latents[:, :7], state.latents[:, :7])
    state.kda.fill(0)
    assert kept.numbers.any()  # a copy, not a view
    with pytest.raises(ContextExceeded):
        filled(6, 0).restore(kept)


@pytest.mark.parametrize(
    "bad",
    [
        lambda k: Snapshot(k.position, k.numbers[:-1]),
        lambda k: Snapshot(k.position + 1, k.numbers),
        lambda k: Snapshot(-1, k.numbers),
        lambda k: Snapshot(k.position, k.numbers.astype(np.float64)),
    ],
)
def test_a_snapshot_of_the_wrong_size_is_refused_and_changes_nothing(bad) -> None:
    state, kept = filled(12, 7), filled(12, 5).snapshot()
    before = state.snapshot()
    with pytest.raises(StoreError):
        state.restore(bad(kept))
    assert np.array_equal(state.snapshot().numbers, before.numbers)


def test_a_reset_state_is_like_new() -> None:
    state = filled(12, 7)
    state.valid = False
    state.reset()
    assert (state.position, state.valid, state.room) == (0, True, 12)
    assert not state.kda.any()
    assert not state.windows.any()
