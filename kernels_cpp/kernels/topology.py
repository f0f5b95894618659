"""The machine's processors as Linux tells them: which CPUs share a core, which cores share memory.

Reads a /sys tree given by the caller, so that machines other than this one can be tried in tests; touches nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Cpu:
    """One logical CPU: the core it shares with its siblings, its package (socket), its memory node."""

    id: int
    core: int
    package: int
    node: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The CPUs this process may use, ascending by number, and the bytes of memory of each node."""

    cpus: tuple[Cpu, ...]
    node_bytes: dict[int, int]

    @property
    def nodes(self) -> list[int]:
        """Memory nodes that have a usable CPU, ascending."""
        return sorted({cpu.node for cpu in self.cpus})

    def cores(self, node: int | None = None) -> list[int]:
        """The first usable CPU of every core (of one node), ascending: two threads of a core share its arithmetic."""
        seen: set[tuple[int, int]] = set()
        chosen = []
        for cpu in self.cpus:
            if (node is None or cpu.node == node) and (cpu.package, cpu.core) not in seen:
                seen.add((cpu.package, cpu.core))
                chosen.append(cpu.id)
        return chosen

    def only(self, cpus: Sequence[int]) -> Topology:
        """The same machine for a process that may use only these CPUs."""
        return Topology(tuple(cpu for cpu in self.cpus if cpu.id in set(cpus)), self.node_bytes)

    def spread(self, threads: int) -> list[int]:
        """CPUs for so many threads: cores before siblings, nodes in turn, so that each brings its memory's rate."""
        first = [self.cores(node) for node in self.nodes]
        order = _in_turn(first)
        taken = set(order)
        order += _in_turn([[c.id for c in self.cpus if c.node == n and c.id not in taken] for n in self.nodes])
        if not order:
            return []
        return [order[i % len(order)] for i in range(threads)]


def _in_turn(lists: Sequence[Sequence[int]]) -> list[int]:
    return [group[i] for i in range(max(map(len, lists), default=0)) for group in lists if i < len(group)]


def parse_list(text: str) -> list[int]:
    """The kernel's list form, "0-3,8,10-11", as numbers in order. ValueError for anything else, or a falling range."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"not a CPU list: {text.strip()!r}")
        begin, end = int(first), int(last or first)
        if end < begin or end - begin > 1 << 16:
            raise ValueError(f"not a CPU list: {text.strip()!r}")
        numbers += range(begin, end + 1)
    return numbers


def _number(path: Path, otherwise: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return otherwise  # containers and some virtual machines tell less than the whole


def read_topology(root: Path = SYS, allowed: Sequence[int] | None = None) -> Topology:
    """What `root` (a /sys/devices/system tree) says of the allowed CPUs (default: this process's affinity).

    A CPU without a told core counts as a core of its own; without nodes all memory is node 0.
    """
    usable = sorted(os.sched_getaffinity(0) if allowed is None else set(allowed))
    node_of: dict[int, int] = {}
    node_bytes: dict[int, int] = {}
    for folder in sorted((root / "node").glob("node[0-9]*")):
        node = int(folder.name.removeprefix("node"))
        try:
            for cpu in parse_list((folder / "cpulist").read_text()):
                node_of[cpu] = node
        except (OSError, ValueError):
            continue
        node_bytes[node] = _memory_bytes(folder / "meminfo")
    cpus = []
    for cpu in usable:
        told = root / "cpu" / f"cpu{cpu}" / "topology"
        core = _number(told / "core_id", -1)
        cpus.append(
            Cpu(cpu, core if core >= 0 else -1 - cpu, _number(told / "physical_package_id", 0), node_of.get(cpu, 0))
        )
    return Topology(tuple(cpus), node_bytes)


def _memory_bytes(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            if "MemTotal:" in line:
                return int(line.split()[-2]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def physical_cores(root: Path = SYS) -> list[int]:
    """One CPU number for each physical core this process may run on, ascending."""
    return read_topology(root).cores()
