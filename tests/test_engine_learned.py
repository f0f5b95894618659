"""What the expert cache learns from run to run: counts kept in a file, shares by counts, pins; the bits stay."""

from __future__ import annotations

import json

import pytest
from helpers.whole_engine import engine, fingerprint

from sluice.io.errors import StoreError

PROMPT = [5, 77, 310, 9, 42]
SMALL = "memory.expert_cache=400kB"


def test_counts_are_saved_taken_up_and_add_up(tiny_checkpoint, tmp_path):
    file = tmp_path / "counts.json"
    with engine(tiny_checkpoint, SMALL) as running:
        expected = fingerprint(running, PROMPT)
    totals = []
    for _ in range(2):
        with engine(tiny_checkpoint, SMALL, f"memory.expert_counts={file}") as running:
            assert fingerprint(running, PROMPT) == expected
        totals.append(sum(map(sum, json.loads(file.read_text())["counts"])))
    assert totals[1] == 2 * totals[0] > 0


def test_the_most_used_are_pinned_from_the_start_and_hit(tiny_checkpoint, tmp_path):
    file = tmp_path / "counts.json"
    counted = [SMALL, f"memory.expert_counts={file}", "engine.lookahead=off"]
    with engine(tiny_checkpoint, *counted) as running:
        expected = fingerprint(running, PROMPT, 12)
    with engine(tiny_checkpoint, *counted, "memory.pinned_experts=0.6") as running:
        assert running.io.stats().experts.pinned > 0
        assert fingerprint(running, PROMPT, 12) == expected
        assert running.io.stats().experts.hits > 0


def test_counts_of_another_checkpoint_are_refused_by_name(tiny_checkpoint, tmp_path):
    file = tmp_path / "counts.json"
    file.write_text(json.dumps({"identity": "another", "layers": [1], "counts": [[1]]}))
    with pytest.raises(StoreError, match=r"counts.json"), engine(tiny_checkpoint, f"memory.expert_counts={file}"):
        pass
