"""`--preset auto`: settings from what the machine and its cgroup allow. Pure but for `this_machine`.

Trunk first, then cache: a gigabyte of pinned trunk saves a gigabyte of reading for every token, a gigabyte of expert
cache about 0.3 while it holds less than one token's set (specification, section 5.4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sluice.daemon.service import limits, units
from sluice.daemon.service.settings import Settings, load_settings, parse_toml, preset_names, preset_text

MB = 10**6
# The kernel charges page tables, socket buffers and slab to the cgroup too; they are not in our plan.
CGROUP_SHARE = 0.97
# Less than the limit's own 95%: what is available now may be a little less when the plan is checked.
AVAILABLE_SHARE = 0.90
# What a system needs beside us: a sixth of the memory, as the fixed presets leave, within these bounds.
LEAST_RESERVE, LARGEST_RESERVE = 512 * MB, 16_000 * MB
SMALLEST_TOTAL = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Machine:
    """What sizing looks at. All in bytes; cgroup is the smallest cgroup limit, None where there is none."""

    memory: int
    available: int
    cgroup: int | None = None


def this_machine(root: Path = Path("/")) -> Machine:
    """The machine below `root`."""
    groups = [limit.size for limit in limits.cgroup_limits(root)]
    memory = limits.meminfo(root).get("MemTotal", 0)
    available = limits.available_memory(root) or 0
    return Machine(memory, available + limits.resident_bytes(root), min(groups, default=None))


def auto_total(machine: Machine) -> int:
    """The budget for this machine, in bytes, rounded down to whole megabytes."""
    reserve = min(max(machine.memory // 6, LEAST_RESERVE), LARGEST_RESERVE)
    sizes = [machine.memory - reserve, int(machine.available * AVAILABLE_SHARE)]
    if machine.cgroup is not None:
        sizes.append(int(machine.cgroup * CGROUP_SHARE))
    return max(min(sizes) // MB * MB, SMALLEST_TOTAL)


def base_preset(total: int) -> str:
    """The largest fixed preset whose total fits in `total`; the smallest one where none does."""
    chosen = preset_names()[0]
    for name in preset_names():
        size = load_settings(name, env={}).memory.total
        if size is not None and size <= total:
            chosen = name
    return chosen


def auto_tables(machine: Machine) -> dict[str, object]:
    """TOML tables like a preset's: sequences, context and queue of the fixed preset below, the machine's own total,
    and trunk and cache left to the plan."""
    total = auto_total(machine)
    text, source = preset_text(base_preset(total))
    tables = parse_toml(text, source)
    memory = tables["memory"]
    assert isinstance(memory, dict)
    memory.update(total=units.format_size(total), trunk="auto", expert_cache="auto")
    return tables


def split_spare(spare: int, trunk: int, trunk_floor: int, experts: int, experts_floor: int) -> tuple[int, int]:
    """(bytes for trunk, bytes for expert cache) out of `spare`: both floors, then the trunk until all of its `trunk`
    bytes are pinned, then the cache until it holds all `experts`.

    Floors: the smallest ring, the experts that must be in flight. Where `spare` is below both floors they are returned
    as they are: the caller sees the sum exceed and knows by how much.
    """
    trunk_floor, experts_floor = min(trunk_floor, trunk), min(experts_floor, experts)
    left = max(0, spare - trunk_floor - experts_floor)
    more_trunk = min(left, trunk - trunk_floor)
    more_experts = min(left - more_trunk, experts - experts_floor)
    return trunk_floor + more_trunk, experts_floor + more_experts


def nearest_preset(fits: Callable[[Settings], bool], limit: int | None = None) -> str | None:
    """The largest fixed preset for which `fits` (a memory plan against the limit) says yes; None when none does.

    limit: bytes the machine can give; presets made for more are passed over, as long as a smaller one fits.
    """
    fitting = [name for name in preset_names() if fits(load_settings(name, env={}))]
    within = [name for name in fitting if limit is None or (load_settings(name, env={}).memory.total or 0) <= limit]
    return within[-1] if within else fitting[0] if fitting else None
