"""Routing traces and what they say about caches: readers, policies, distances, predictability. Pure arithmetic.

A trace is a list of passes; a pass is an int32 array (layers, T, k) of expert ids: what T tokens asked for together.
Decoding has T = 1. The stream of requests is read pass by pass, layer by layer, token by token, in rank order; what
several tokens of a pass want from one layer is one request, as it is one read. Every policy starts cold, loads on
demand and never loads what was not asked for. An expert is the pair (layer, id).

Owns no printing and no choice of what to show: that is `trace_cmd.py`.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sluice.io.errors import StoreError

LARGEST_TRACE_BYTES = 2**30
NEVER = np.iinfo(np.int64).max
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """Passes in time order; every pass has the same number of layers and of experts a token."""

    name: str
    passes: tuple[NDArray[np.int32], ...]
    ranked: bool  # whether ids are in rank order; else ascending

    @property
    def layers(self) -> int:
        return int(self.passes[0].shape[0])

    @property
    def top_k(self) -> int:
        return int(self.passes[0].shape[2])

    @property
    def tokens(self) -> int:
        return sum(p.shape[1] for p in self.passes)

    @property
    def highest_id(self) -> int:
        return int(max(p.max() for p in self.passes))

    def stream(self) -> Ints:
        """Every request as one number, layer * (highest id + 1) + id, in order."""
        width = self.highest_id + 1
        out = []
        for p in self.passes:
            for layer, ids in enumerate(p.reshape(self.layers, -1)):
                first = np.sort(np.unique(ids, return_index=True)[1]) if p.shape[1] > 1 else slice(None)
                out.append(ids[first].astype(np.int64) + layer * width)
        return np.concatenate(out)


# ---- readers -----------------------------------------------------------------------------------------------------


def read_trace(path: Path, *, top_k: int = 16, part: str = "last") -> Trace:
    """A trace file: JSON lines as `sluice run --trace` writes them, or headerless (layer, expert) pairs (`.bin`).

    For pairs, `top_k` is how many experts a token takes, and `part` is "last" (the last step alone, its tokens one
    after the other) or "all" (every step as recorded, its tokens together). Raises StoreError naming file and place.
    """
    try:
        if path.stat().st_size > LARGEST_TRACE_BYTES:
            raise StoreError(f"{path}: a trace of {path.stat().st_size} bytes; at most {LARGEST_TRACE_BYTES} are read")
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
    if path.suffix == ".bin":
        return _read_pairs(path.name, data, top_k, part)
    return _read_lines(path.name, data)


def _read_lines(name: str, data: bytes) -> Trace:
    passes: list[NDArray[np.int32]] = []
    sorted_rows = True
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            layers = json.loads(line)["layers"]
            ids = np.array(layers)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(f"{where}: not an object with a rectangular list `layers`: {error}") from error
        if ids.ndim != 2 or ids.size == 0 or ids.dtype.kind != "i":
            raise StoreError(f"{where}: `layers` must be lists of integers, all of one length")
        _check_ids(ids, where)
        if passes and ids.shape != passes[0][:, 0].shape:
            expected = passes[0][:, 0].shape
            raise StoreError(
                f"{where}: {ids.shape[0]} layers of {ids.shape[1]} ids where the first line has {expected}"
            )
        sorted_rows &= bool((np.diff(ids, axis=1) > 0).all())
        passes.append(ids.astype(np.int32)[:, None, :])
    if not passes:
        raise StoreError(f"{name}: no tokens in it")
    return Trace(name, tuple(passes), ranked=not sorted_rows)


def _read_pairs(name: str, data: bytes, top_k: int, part: str) -> Trace:
    if not data or len(data) % 8:
        raise StoreError(f"{name}: {len(data)} bytes are not a whole number of (layer, expert) pairs")
    layer, expert = np.frombuffer(data, "<i4").reshape(-1, 2).T
    starts = np.flatnonzero(np.diff(layer) < 0) + 1  # a step begins where the layer number falls back
    passes: list[NDArray[np.int32]] = []
    for first, last in zip([0, *starts], [*starts, layer.size], strict=True):
        names, counts = np.unique(layer[first:last], return_counts=True)
        if (counts != counts[0]).any() or counts[0] % top_k:
            raise StoreError(f"{name}: the step at pair {first} has not {top_k} experts a token in every layer")
        ids = expert[first:last].reshape(len(names), -1, top_k)
        if passes and ids.shape[0] != passes[0].shape[0]:
            raise StoreError(
                f"{name}: the step at pair {first} has {ids.shape[0]} layers, the first {passes[0].shape[0]}"
            )
        _check_ids(ids, f"{name}, step at pair {first}")
        passes.append(ids.astype(np.int32))
    if part == "last":
        passes = [passes[-1][:, t : t + 1] for t in range(passes[-1].shape[1])]
    return Trace(name, tuple(passes), ranked=True)


def _check_ids(ids: NDArray[np.integer], where: str) -> None:
    if int(ids.min()) < 0 or int(ids.max()) > 2**20:
        raise StoreError(f"{where}: expert ids from {ids.min()} to {ids.max()}")
    ordered = np.sort(ids, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise StoreError(f"{where}: an expert twice in one token's choice")


# ---- distances ---------------------------------------------------------------------------------------------------


def reuse_distances(keys: Ints) -> Ints:
    """For each request the number of distinct keys asked for since its last one, itself included; NEVER at first.

    An LRU cache of c entries hits exactly where the distance is <= c (Mattson's stack distance). O(n log n).
    """
    n = len(keys)
    tree = [0] * (n + 1)  # a Fenwick tree over positions: 1 where a key's latest use stands
    out = np.full(n, NEVER, np.int64)
    latest: dict[int, int] = {}

    def add(i: int, value: int) -> None:
        i += 1
        while i <= n:
            tree[i] += value
            i += i & -i

    def before(i: int) -> int:
        total = 0
        while i > 0:
            total += tree[i]
            i -= i & -i
        return total

    for i, key in enumerate(keys.tolist()):
        last = latest.get(key)
        if last is not None:
            out[i] = before(i) - before(last)
            add(last, -1)
        add(i, 1)
        latest[key] = i
    return out


def next_uses(keys: Ints) -> Ints:
    """For each request the position of the same key's next one; NEVER where there is none."""
    out = np.full(len(keys), NEVER, np.int64)
    later: dict[int, int] = {}
    for i in range(len(keys) - 1, -1, -1):
        key = int(keys[i])
        out[i] = later.get(key, NEVER)
        later[key] = i
    return out


# ---- policies: number of hits at a capacity ----------------------------------------------------------------------


def lru_hits(distances: Ints, capacity: int) -> int:
    """Hits of one LRU cache, from the reuse distances of the whole stream."""
    return int((distances <= capacity).sum())


def layer_lru_hits(distances: Sequence[Ints], capacity: int) -> int:
    """Hits of one LRU cache a layer, from each layer's own distances; the first layers get what is left over."""
    share, over = divmod(capacity, len(distances))
    return sum(lru_hits(d, share + (layer < over)) for layer, d in enumerate(distances))


def lfu_hits(keys: Ints, capacity: int) -> int:
    """Hits of a cache that evicts the key asked for least often since the start (evicted ones keep their count);
    among equals the one not used for longest."""
    counts: dict[int, int] = {}
    resident: dict[int, tuple[int, int]] = {}  # key -> (count, time): its valid entry in the heap
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for time, key in enumerate(keys.tolist()):
        counts[key] = counts.get(key, 0) + 1
        if key in resident:
            hits += 1
        elif len(resident) >= capacity:
            if capacity == 0:
                continue
            while True:
                count, when, victim = heapq.heappop(heap)
                if resident.get(victim) == (count, when):
                    break
            del resident[victim]
        resident[key] = (counts[key], time)
        heapq.heappush(heap, (counts[key], time, key))
    return hits


def pinned_hits(keys: Ints, capacity: int, pinned: Iterable[int]) -> int:
    """Hits where the `pinned` keys stay once loaded and the rest of the capacity is LRU. Pins occupy their place
    from the start; more pins than capacity raise ValueError."""
    pins = set(pinned)
    if len(pins) > capacity:
        raise ValueError(f"{len(pins)} pins in a cache of {capacity}")
    is_pinned = np.isin(keys, np.fromiter(pins, np.int64, len(pins)))
    of_pins = int(is_pinned.sum()) - len(set(keys[is_pinned].tolist()))
    return of_pins + lru_hits(reuse_distances(keys[~is_pinned]), capacity - len(pins))


def hottest(keys: Ints, count: int) -> list[int]:
    """The `count` most requested keys; the lower key first among equals."""
    names, uses = np.unique(keys, return_counts=True)
    order = np.lexsort((names, -uses))
    return [int(k) for k in names[order[:count]]]


def optimal_hits(keys: Ints, capacity: int, following: Ints | None = None) -> int:
    """Hits of Belady's policy: evict the key whose next use is farthest. The most any demand-loading cache can have."""
    if capacity == 0:
        return 0
    following = next_uses(keys) if following is None else following
    resident: dict[int, int] = {}  # key -> next use
    heap: list[tuple[int, int]] = []
    hits = 0
    for key, after in zip(keys.tolist(), following.tolist(), strict=True):
        if key in resident:
            hits += 1
        elif len(resident) >= capacity:
            while True:
                negative, victim = heapq.heappop(heap)
                if resident.get(victim) == -negative:
                    break
            del resident[victim]
        resident[key] = after
        heapq.heappush(heap, (-after, key))
    return hits


# ---- the study ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Hit rates (0..1) at one capacity, in experts over all layers."""

    capacity: int
    share: float
    lru: float
    layer_lru: float
    lfu: float
    pinned_lru: float
    optimal: float


def capacities(trace: Trace, wanted: int = 14) -> list[int]:
    """Capacities worth a row: from one token's experts in one layer to everything the trace touches, geometric."""
    touched = len(np.unique(trace.stream()))
    grid = np.geomspace(trace.top_k, touched, wanted).round().astype(int)
    return sorted({*grid.tolist(), trace.top_k * trace.layers} - {c for c in grid.tolist() if c > touched})


def hit_curve(
    trace: Trace, experts: int, wanted: Sequence[int], on_point: Callable[[int], None] | None = None
) -> list[CurvePoint]:
    """Hit rates at the `wanted` capacities. `experts` is how many a layer has. Half of a cache is pinned for
    pinned + LRU, with the keys the whole trace asked for most: what pins chosen with hindsight would give."""
    keys = trace.stream()
    distances = reuse_distances(keys)
    width = trace.highest_id + 1
    by_layer = [reuse_distances(keys[keys // width == layer]) for layer in range(trace.layers)]
    following = next_uses(keys)
    out = []
    for c in wanted:
        hits = (
            lru_hits(distances, c),
            layer_lru_hits(by_layer, c),
            lfu_hits(keys, c),
            pinned_hits(keys, c, hottest(keys, c // 2)),
            optimal_hits(keys, c, following),
        )
        out.append(CurvePoint(c, c / (experts * trace.layers), *(h / len(keys) for h in hits)))
        if on_point:
            on_point(c)
    return out


def distance_histogram(distances: Ints) -> list[tuple[str, float]]:
    """Share of requests by reuse distance, in doubling buckets ("<=1", "<=2", "<=4", ..., "never before")."""
    known = distances[distances != NEVER]
    out = []
    low, high = 0, 1
    while low < (int(known.max()) if known.size else 0):
        out.append((f"<={high}", float(((known > low) & (known <= high)).sum() / distances.size)))
        low, high = high, high * 2
    out.append(("never before", float((distances == NEVER).sum() / distances.size)))
    return out


@dataclass(frozen=True, slots=True)
class Recall:
    """How much of a layer's next choice a predictor names with as many guesses as there are choices (0..1).

    None where it needs what the trace has not: two tokens, and one token a pass. Tables are learned on the first
    half of the tokens and tried on the second; the others are tried on all tokens but the first.
    """

    chance: float
    most_frequent: float | None
    from_layer_before: float | None
    token_before: float | None
    any_token_before: float | None


def predictability(trace: Trace, experts: int) -> Recall:
    """Recall of simple predictors of a layer's experts (the table from the layer before: all layers but the first)."""
    rows = np.concatenate([p.transpose(1, 0, 2) for p in trace.passes])  # (tokens, layers, k)
    tokens, layers, k = rows.shape
    half = tokens // 2
    width = trace.highest_id + 1
    chance = k / experts
    if tokens < 2 or len(trace.passes) < tokens:
        return Recall(chance, None, None, None, None)
    hot = np.zeros((tokens, layers, width), np.float32)
    np.put_along_axis(hot, rows.astype(np.int64), 1.0, axis=2)

    def recall(scores: NDArray[np.float32], truth: NDArray[np.float32]) -> float:
        best = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
        return float(np.take_along_axis(truth, best, -1).mean())

    before = float((hot[1:] * hot[:-1]).sum() / (hot[1:].sum()))
    seen = np.maximum.accumulate(hot, axis=0)
    any_before = float((hot[1:] * seen[:-1]).sum() / hot[1:].sum())
    frequent = recall(np.broadcast_to(hot[:half].mean(0), hot[half:].shape), hot[half:])
    table = None
    if layers > 1:
        found = []
        for layer in range(1, layers):
            together = hot[:half, layer - 1].T @ hot[:half, layer]  # how often a here came with b there
            likely = together / np.maximum(hot[:half, layer - 1].sum(0)[:, None], 1)
            found.append(recall(hot[half:, layer - 1] @ likely, hot[half:, layer]))
        table = float(np.mean(found))
    return Recall(chance, frequent, table, before, any_before)
