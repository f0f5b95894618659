"""Memory pressure while running: when the machine or a cgroup gets tight, the expert cache gives way, and stays small.

This module decides when and by how much; who shrinks is a callback. It never grows anything back: memory that came
back once is taken again by whoever took it before, and a cache that breathes costs more than one that is small. A
reload with a new budget is how an administrator gives it back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sluice.daemon.service import limits

MIB = 2**20
log = logging.getLogger("sluice.pressure")


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of memory at one moment.

    stalled_percent: share of the last ten seconds in which some task waited for memory (PSI some avg10), the worse
    of machine and cgroup; 0.0 where the kernel does not say. groups: limited ancestor cgroups.
    """

    memory_bytes: int
    available_bytes: int | None
    stalled_percent: float = 0.0
    groups: tuple[limits.GroupUsage, ...] = ()


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When memory is called tight. Near a limit: less than `margin` of it left (at least margin_bytes). Twice that is
    what shrinking restores, so that one shrink is enough for a while.

    Stalls count only where less than `scarce` of a limit is left: they are told for the whole machine, and somebody
    else's (a neighbour at its own limit, a file read again) are not mended by a smaller cache. Seen: 23% of the time
    while 20 of 25 GB were free.
    """

    stalled_percent: float = 10.0
    scarce: float = 0.10
    margin: float = 0.015
    margin_bytes: int = 32 * MIB
    stall_step: float = 0.10  # of the cache, when there is a stall but no number says how much is missing
    pause_seconds: float = 5.0  # between two shrinks: what was freed must show in the readings first


def parse_psi(text: str) -> float:
    """avg10 of the "some" line of a pressure file, in percent; 0.0 when it is not there."""
    for line in text.splitlines():
        if line.startswith("some "):
            for field in line.split()[1:]:
                name, _, value = field.partition("=")
                if name == "avg10":
                    try:
                        return float(value)
                    except ValueError:
                        return 0.0
    return 0.0


def read_pressure(root: Path = Path("/")) -> Reading:
    """The reading of the system below `root`."""
    files = [root / "proc/pressure/memory"]
    files += [group.directory / "memory.pressure" for group in limits.cgroup_dirs(root) if group.version == 2]
    stalled = 0.0
    for file in files:
        try:
            stalled = max(stalled, parse_psi(file.read_text(encoding="ascii", errors="replace")))
        except OSError:
            continue
    memory = limits.meminfo(root).get("MemTotal", 0)
    return Reading(memory, limits.available_memory(root), stalled, tuple(limits.cgroup_usage(root)))


def bytes_to_free(reading: Reading, cache_bytes: int, thresholds: Thresholds) -> tuple[int, str]:
    """How much the cache should give up now, and why; (0, "") when memory is not tight. Pure."""
    want, why, scarce = 0, "", False

    def consider(limit: int, left: int, name: str) -> None:
        nonlocal want, why, scarce
        scarce = scarce or left < limit * thresholds.scarce
        margin = max(int(limit * thresholds.margin), thresholds.margin_bytes)
        if left < margin and 2 * margin - left > want:
            want, why = 2 * margin - left, f"{name} has {left} bytes left"

    for group in reading.groups:
        consider(group.limit_bytes, group.limit_bytes - group.used_bytes, group.name)
    if reading.available_bytes is not None and reading.memory_bytes:
        consider(reading.memory_bytes, reading.available_bytes, "the machine")
    if not want and scarce and reading.stalled_percent >= thresholds.stalled_percent:
        want = int(cache_bytes * thresholds.stall_step)
        why = f"tasks wait for memory {reading.stalled_percent:.0f}% of the time"
    return min(want, cache_bytes), why


class PressureWatch:
    """Looks at memory on each `tick` and calls `shrink` when it is tight.

    shrink(n): lower the cache's budget by n bytes for good, free them, return how many bytes that freed.
    cache_bytes(): the cache's present budget above its floor. Readers and the clock are passed in.
    """

    def __init__(
        self,
        shrink: Callable[[int], int],
        cache_bytes: Callable[[], int],
        clock: Callable[[], float],
        read: Callable[[], Reading] = read_pressure,
        thresholds: Thresholds | None = None,
    ) -> None:
        self._shrink, self._cache_bytes, self._clock, self._read = shrink, cache_bytes, clock, read
        self._thresholds = thresholds or Thresholds()
        self._not_before = float("-inf")
        self._said_empty = False
        self.shrinks = 0
        self.freed_bytes = 0

    def tick(self) -> int:
        """Bytes freed by this look: 0 when memory is not tight, or a shrink is too recent."""
        if self._clock() < self._not_before:
            return 0
        cache = self._cache_bytes()
        want, why = bytes_to_free(self._read(), cache, self._thresholds)
        if not why:
            self._said_empty = False
            return 0
        if want == 0:
            if not self._said_empty:
                log.warning(
                    "memory is tight and the expert cache has nothing left to give", extra={"fields": {"why": why}}
                )
            self._said_empty = True
            return 0
        freed = self._shrink(want)
        self._not_before = self._clock() + self._thresholds.pause_seconds
        self.shrinks += 1
        self.freed_bytes += freed
        log.warning("memory is tight: expert cache made smaller", extra={"fields": {"bytes": freed, "why": why}})
        return freed
