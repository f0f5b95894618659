"""How many bytes this process may hold: cgroups, the machine's memory, and the smallest of them.

Pure functions over a root folder ("/" in life, a made-up tree in tests). Nothing here caches: limits can change
while we run. What to do about a limit is the memory plan's business (at start) and `pressure`'s (later).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

# Kernel v1 says "no limit" with the largest page-aligned number of its counter, near 2**63; v2 says "max".
UNLIMITED_FROM = 2**60
AVAILABLE_SHARE = 0.95  # of available memory: what the kernel calls available is an estimate, and others grow too


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit and who sets it, in words an administrator can act on."""

    size: int
    source: str


@dataclass(frozen=True, slots=True)
class CgroupDir:
    """One cgroup directory that governs us. version is 1 or 2; name is its path as the system shows it."""

    directory: Path
    version: int
    name: str


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """What a limited cgroup holds now. used_bytes is without page cache that the kernel could drop at once."""

    name: str
    limit_bytes: int
    used_bytes: int


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """A cgroup control file's number; None when absent, unreadable or "max"."""
    text = _text(path)
    if text is None or not text.strip().isdigit():
        return None
    value = int(text)
    return value if value < UNLIMITED_FROM else None


def _table(path: Path) -> dict[str, int]:
    """A file of "name number" lines, such as memory.stat; empty when absent."""
    table: dict[str, int] = {}
    for line in (_text(path) or "").splitlines():
        name, _, number = line.partition(" ")
        with contextlib.suppress(ValueError):
            table[name] = int(number)
    return table


def _unescape(text: str) -> str:
    """mountinfo writes space, tab, newline and backslash in paths as octal."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def _mounts(root: Path) -> list[tuple[int, str, str]]:
    """(version, root inside the hierarchy, mount point) of every cgroup file system that can hold memory limits."""
    found: list[tuple[int, str, str]] = []
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(tail) < 3:
            continue
        if tail[0] == "cgroup2":
            found.append((2, _unescape(fields[3]), _unescape(fields[4])))
        elif tail[0] == "cgroup" and "memory" in tail[2].split(","):
            found.append((1, _unescape(fields[3]), _unescape(fields[4])))
    return found


def cgroup_dirs(root: Path = Path("/")) -> list[CgroupDir]:
    """Every cgroup directory that governs this process's memory and that can be seen, innermost first.

    Both versions are looked at: hybrid systems mount v2 beside v1 controllers. In a container the outermost visible
    directory is the container's own; what lies above is seen by `hierarchical_memory_limit` (v1) or not at all (v2).
    """
    paths: dict[int, str] = {}
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    found: list[CgroupDir] = []
    for version, inner, mount in _mounts(root):
        if version not in paths:
            continue
        path = paths[version]
        # A container without its own cgroup namespace sees the host's path, with only its subtree mounted.
        if inner != "/" and (path + "/").startswith(inner + "/"):
            path = path[len(inner) :]
        parts = [part for part in path.split("/") if part]
        base = root / mount.lstrip("/")
        if ".." in parts or not base.joinpath(*parts).is_dir():
            parts = []
        for length in range(len(parts), -1, -1):
            name = "/".join([mount.rstrip("/"), *parts[:length]])
            found.append(CgroupDir(base.joinpath(*parts[:length]), version, name))
    return found


def cgroup_limits(root: Path = Path("/")) -> list[Limit]:
    """Every memory limit of every visible ancestor cgroup: v2 memory.max and memory.high, v1 limit_in_bytes."""
    limits: list[Limit] = []
    for group in cgroup_dirs(root):
        names = ("memory.max", "memory.high") if group.version == 2 else ("memory.limit_in_bytes",)
        for name in names:
            size = _number(group.directory / name)
            if size is not None:
                limits.append(Limit(size, f"{group.name}/{name}"))
        if group.version == 1:
            above = _table(group.directory / "memory.stat").get("hierarchical_memory_limit")
            if above is not None and above < UNLIMITED_FROM and all(limit.size > above for limit in limits):
                limits.append(Limit(above, f"{group.name}/memory.stat hierarchical_memory_limit"))
    return limits


def cgroup_usage(root: Path = Path("/")) -> list[GroupUsage]:
    """For every limited ancestor cgroup: its smallest limit and what it holds that is not droppable page cache."""
    usage: list[GroupUsage] = []
    for group in cgroup_dirs(root):
        stat = _table(group.directory / "memory.stat")
        if group.version == 2:
            sizes = [_number(group.directory / name) for name in ("memory.max", "memory.high")]
            held = _number(group.directory / "memory.current")
            cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        else:
            sizes = [_number(group.directory / "memory.limit_in_bytes")]
            held = _number(group.directory / "memory.usage_in_bytes")
            cache = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
        known = [size for size in sizes if size is not None]
        if known and held is not None:
            usage.append(GroupUsage(group.name, min(known), max(0, held - cache)))
    return usage


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """/proc/meminfo in bytes; empty when it cannot be read."""
    table: dict[str, int] = {}
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            table[name] = int(fields[0]) * (1024 if fields[-1] == "kB" else 1)
    return table


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that could be had without swapping, reclaimable page cache included; None when unknown.

    MemAvailable is the kernel's own estimate of just that; some containers' meminfo lacks it, then it is added up.
    """
    table = meminfo(root)
    if "MemAvailable" in table:
        return table["MemAvailable"]
    if "MemFree" not in table:
        return None
    cache = table.get("Cached", 0) + table.get("Buffers", 0) + table.get("SReclaimable", 0) - table.get("Shmem", 0)
    return table["MemFree"] + max(0, cache)


def resident_bytes(root: Path = Path("/")) -> int:
    """What this process holds now (VmRSS); 0 when unknown."""
    for line in (_text(root / "proc/self/status") or "").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The limit that counts and all that were considered, smallest first."""

    size: int
    source: str
    considered: tuple[Limit, ...]


def memory_limit(total: int | None = None, root: Path = Path("/")) -> MemoryLimit:
    """The smallest of `total` (the preset's; None for none), every ancestor cgroup's limit and 95% of what is
    available to this process (what it already holds counts as available to it). Without any: no limit known, 0
    considered and size 2**60."""
    limits = cgroup_limits(root)
    if total is not None:
        limits.append(Limit(total, "memory.total"))
    available = available_memory(root)
    if available is not None:
        limits.append(Limit(int(AVAILABLE_SHARE * (available + resident_bytes(root))), "95% of available memory"))
    limits.sort(key=lambda limit: limit.size)
    if not limits:
        return MemoryLimit(UNLIMITED_FROM, "no limit known", ())
    return MemoryLimit(limits[0].size, limits[0].source, tuple(limits))
