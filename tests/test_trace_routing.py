"""Cache arithmetic on routing traces: small cases by hand, brute force, and the recorded traces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.shared import shared_path
from hypothesis import given
from hypothesis import strategies as st

from sluice.io.errors import StoreError
from sluice.tools import routing
from sluice.tools.routing import NEVER, Trace

streams = st.lists(st.integers(0, 5), min_size=1, max_size=40).map(lambda x: np.array(x, np.int64))


def lru_by_simulation(keys: list[int], capacity: int) -> int:
    order: list[int] = []
    hits = 0
    for key in keys:
        if key in order:
            hits += 1
            order.remove(key)
        elif capacity == 0:
            continue
        elif len(order) == capacity:
            order.pop(0)
        order.append(key)
    return hits


def lfu_by_simulation(keys: list[int], capacity: int) -> int:
    counts: dict[int, int] = {}
    last: dict[int, int] = {}
    held: set[int] = set()
    hits = 0
    for time, key in enumerate(keys):
        counts[key] = counts.get(key, 0) + 1
        if key in held:
            hits += 1
        else:
            if capacity == 0:
                continue
            if len(held) == capacity:
                held.remove(min(held, key=lambda k: (counts[k], last[k])))
            held.add(key)
        last[key] = time
    return hits


def best_possible(keys: list[int], capacity: int) -> int:
    """Every choice of victim, tried: the most hits a cache that loads what it misses can have."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for key in keys:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            if key in held:
                options = [(held, hits + 1)]
            elif len(held) < capacity:
                options = [(held | {key}, hits)]
            else:
                options = [((held - {victim}) | {key}, hits) for victim in held]
            for state, value in options:
                after[state] = max(after.get(state, -1), value)
        states = after
    return max(states.values())


def test_distances_of_a_stream_written_by_hand() -> None:
    keys = np.array([1, 2, 3, 1, 1, 2, 4, 3])
    assert routing.reuse_distances(keys).tolist() == [NEVER, NEVER, NEVER, 3, 1, 3, NEVER, 4]
    assert routing.next_uses(keys).tolist() == [3, 5, 7, 4, NEVER, NEVER, NEVER, NEVER]


def test_hits_of_a_stream_written_by_hand() -> None:
    keys = np.array([1, 2, 3, 1, 2, 3, 1, 2, 3])  # a loop one longer than the cache: LRU's worst, Belady's showpiece
    assert routing.lru_hits(routing.reuse_distances(keys), 2) == 0
    assert routing.optimal_hits(keys, 2) == 3
    assert routing.pinned_hits(keys, 2, [1]) == 2
    assert routing.lru_hits(routing.reuse_distances(keys), 3) == 6


@given(streams, st.integers(0, 7))
def test_lru_from_distances_equals_a_simulated_lru(keys: np.ndarray, capacity: int) -> None:
    assert routing.lru_hits(routing.reuse_distances(keys), capacity) == lru_by_simulation(keys.tolist(), capacity)


@given(streams, st.integers(0, 7))
def test_lfu_equals_a_simulated_lfu(keys: np.ndarray, capacity: int) -> None:
    assert routing.lfu_hits(keys, capacity) == lfu_by_simulation(keys.tolist(), capacity)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=14), st.integers(1, 4))
def test_optimal_equals_the_best_of_all_choices(keys: list[int], capacity: int) -> None:
    assert routing.optimal_hits(np.array(keys, np.int64), capacity) == best_possible(keys, capacity)


@given(streams, st.integers(0, 6))
def test_no_policy_beats_optimal_and_everything_fits_at_the_end(keys: np.ndarray, capacity: int) -> None:
    best = routing.optimal_hits(keys, capacity)
    distances = routing.reuse_distances(keys)
    pins = routing.hottest(keys, capacity // 2)
    for hits in (
        routing.lru_hits(distances, capacity),
        routing.lfu_hits(keys, capacity),
        routing.pinned_hits(keys, capacity, pins),
    ):
        assert hits <= best
    assert routing.optimal_hits(keys, 6) == keys.size - len(set(keys.tolist()))


@given(streams, st.integers(0, 6))
def test_pins_are_kept_and_the_rest_is_lru(keys: np.ndarray, capacity: int) -> None:
    pins = set(routing.hottest(keys, capacity // 2))
    seen: set[int] = set()
    hits = 0
    rest = []
    for key in keys.tolist():
        if key in pins:
            hits += key in seen
            seen.add(key)
        else:
            rest.append(key)
    assert routing.pinned_hits(keys, capacity, pins) == hits + lru_by_simulation(rest, capacity - len(pins))


def test_more_pins_than_places_are_refused() -> None:
    with pytest.raises(ValueError, match="2 pins in a cache of 1"):
        routing.pinned_hits(np.array([1, 2]), 1, [1, 2])


def test_a_cache_a_layer_shares_the_capacity_out() -> None:
    one = routing.reuse_distances(np.array([0, 1, 0, 1]))
    two = routing.reuse_distances(np.array([5, 5, 5]))
    assert routing.layer_lru_hits([one, two], 2) == 0 + 2
    assert routing.layer_lru_hits([one, two], 3) == 2 + 2  # the odd place goes to the first layer


def small_trace(rows: list[list[list[int]]]) -> Trace:
    return Trace("small", tuple(np.array(r, np.int32)[:, None, :] for r in rows), ranked=True)


def test_the_stream_tells_layers_apart_and_keeps_their_order() -> None:
    trace = small_trace([[[2, 0], [1, 2]], [[0, 1], [2, 0]]])
    assert trace.stream().tolist() == [2, 0, 4, 5, 0, 1, 5, 3]
    assert (trace.tokens, trace.layers, trace.top_k) == (2, 2, 2)


def test_what_tokens_of_one_pass_share_is_asked_for_once() -> None:
    together = Trace("pass", (np.array([[[3, 1], [1, 0]], [[2, 3], [3, 2]]], np.int32),), ranked=True)
    assert together.stream().tolist() == [3, 1, 0, 6, 7]


def test_predictors_on_a_trace_that_repeats_itself() -> None:
    trace = small_trace([[[0, 1], [2, 3]]] * 8)
    recall = routing.predictability(trace, 8)
    assert recall.chance == 0.25
    assert (recall.most_frequent, recall.from_layer_before, recall.token_before, recall.any_token_before) == (
        1,
        1,
        1,
        1,
    )


def test_predictors_on_a_trace_where_only_the_layer_before_tells() -> None:
    # the first layer alternates in fours; the second follows it, so its own past misleads
    rows = [[[i % 4], [(i % 4 + 1) % 4]] for i in range(40)]
    recall = routing.predictability(small_trace(rows), 4)
    assert recall.from_layer_before == 1.0
    assert recall.token_before == 0.0
    assert recall.most_frequent == pytest.approx(0.25)


def test_one_token_predicts_nothing() -> None:
    recall = routing.predictability(small_trace([[[0, 1]]]), 4)
    assert (recall.chance, recall.token_before) == (0.5, None)


def test_the_histogram_sums_to_one() -> None:
    keys = np.array(list(itertools.islice(itertools.cycle(range(9)), 60)))
    buckets = routing.distance_histogram(routing.reuse_distances(keys))
    assert sum(share for _, share in buckets) == pytest.approx(1)
    assert buckets[-1] == ("never before", 9 / 60)
    assert dict(buckets)["<=16"] == pytest.approx(51 / 60)


def test_lines_are_read_as_the_daemon_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"tok":0,"layers":[[3,1],[0,2]]}\n\n{"tok":1,"layers":[[1,0],[2,3]]}\n')
    trace = routing.read_trace(file)
    assert trace.ranked
    assert [p.tolist() for p in trace.passes] == [[[[3, 1]], [[0, 2]]], [[[1, 0]], [[2, 3]]]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no tokens"),
        ("[]", "line 1"),
        ("{", "line 1"),
        ('{"layers": []}', "line 1"),
        ('{"layers": [[1, 2], [3]]}', "line 1"),
        ('{"layers": [[1, 1]]}', "twice"),
        ('{"layers": [[-1, 1]]}', "expert ids from -1"),
        ('{"layers": [[1.5, 2]]}', "lists of integers"),
        ('{"layers": [[true, false]]}', "lists of integers"),
        ('{"layers": [[1, 2]]}\n{"layers": [[1, 2], [3, 4]]}', "line 2"),
        ('{"layers": [[99999999999999999999, 2]]}', "line 1"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(text)
    with pytest.raises(StoreError, match=words):
        routing.read_trace(file)


def pairs(steps: list[np.ndarray]) -> bytes:
    """(layers, T, k) arrays as (layer, expert) pairs, layers counted from 1."""
    out = []
    for ids in steps:
        for layer, rows in enumerate(ids, 1):
            out += [(layer, int(e)) for e in rows.reshape(-1)]
    return np.array(out, "<i4").tobytes()


def test_pairs_fall_into_steps_and_tokens(tmp_path: Path) -> None:
    first = np.array([[[0, 1]], [[2, 3]]])
    second = np.array([[[0, 1], [4, 5]], [[2, 3], [1, 0]]])
    file = tmp_path / "t.bin"
    file.write_bytes(pairs([first, second]))
    whole = routing.read_trace(file, top_k=2, part="all")
    assert [p.tolist() for p in whole.passes] == [first.tolist(), second.tolist()]
    last = routing.read_trace(file, top_k=2)
    assert [p.tolist() for p in last.passes] == [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[1, 0]]]]


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "0 bytes"), (b"1234567", "7 bytes"), (pairs([np.array([[[0, 1, 2]]])]), "has not 2")]
)
def test_broken_pairs_are_named(tmp_path: Path, data: bytes, words: str) -> None:
    file = tmp_path / "t.bin"
    file.write_bytes(data)
    with pytest.raises(StoreError, match=words):
        routing.read_trace(file, top_k=2)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere\.jsonl"):
        routing.read_trace(tmp_path / "nowhere.jsonl")


# ---- recorded traces ---------------------------------------------------------------------------------------------


def test_the_real_k3_trace_hits_nothing_in_a_small_cache_and_more_in_larger_ones() -> None:
    trace = routing.read_trace(shared_path("fixtures/peer/expert_trace.bin"))
    assert (trace.tokens, trace.layers, trace.top_k, len(np.unique(trace.stream()))) == (12, 92, 16, 10010)
    distances = routing.reuse_distances(trace.stream())
    hits = [routing.lru_hits(distances, c) for c in (16, 92, 368, 1024, 1380)]
    assert hits == [0, 0, 0, 0, 0]  # fewer places than one token asks for: by the time a layer returns, all is gone
    larger = [routing.lru_hits(distances, c) / distances.size for c in (1472, 2300, 3700, 6100, 10010)]
    assert larger == sorted(larger)
    assert larger[0] > 0.2
    assert larger[-1] == pytest.approx(1 - 10010 / 17664)
    assert routing.predictability(trace, 896).token_before == pytest.approx(0.343, abs=5e-4)


def test_the_whole_k3_file_hits_nothing_in_a_small_cache_either() -> None:
    trace = routing.read_trace(shared_path("fixtures/peer/expert_trace.bin"), part="all")
    assert [p.shape[1] for p in trace.passes] == [5, 6, 7, 8, 9, 10, 11, 12]
    keys = trace.stream()
    first = len(np.unique(trace.passes[0] + np.arange(92)[:, None, None] * 896))
    assert first == 5682  # the published union of the five-token prompt
    distances = routing.reuse_distances(keys)
    rates = [routing.lru_hits(distances, c) / keys.size for c in (16, 368, 1472, 5000, 6000, 8000, 10010)]
    assert rates[:3] == [0, 0, 0]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(1 - 10010 / keys.size)


@pytest.mark.parametrize(("name", "overlap"), [("trace_kimi_300.jsonl", 0.336), ("trace_olmoe_299.jsonl", 0.435)])
def test_recorded_decodes_have_their_known_overlap(name: str, overlap: float) -> None:
    trace = routing.read_trace(shared_path("fixtures/traces/" + name))
    assert not trace.ranked
    recall = routing.predictability(trace, trace.highest_id + 1)
    assert recall.token_before == pytest.approx(overlap, abs=1e-3)


def test_lines_of_the_daemon_round_trip_through_json(tmp_path: Path) -> None:
    rows = [[[5, 2, 7], [1, 0, 3]], [[2, 5, 1], [4, 3, 2]]]
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"tok": i, "layers": r}) + "\n" for i, r in enumerate(rows)))
    assert [p[:, 0].tolist() for p in routing.read_trace(file).passes] == rows
