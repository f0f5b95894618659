"""Memory limits from made-up /proc and /sys/fs/cgroup trees, and the automatic preset built on them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.daemon.service import limits
from sluice.daemon.service.autosize import Machine, auto_tables, auto_total, nearest_preset, split_spare, this_machine
from sluice.daemon.service.settings import check_tables, load_settings

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 23 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
GIB = 2**30


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def test_every_ancestor_of_a_v2_cgroup_counts_and_so_does_memory_high(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/sluice.service",
            "proc/self/mountinfo": V2,
            f"{base}/system.slice/sluice.service/memory.max": "max",
            f"{base}/system.slice/sluice.service/memory.high": 7 * GIB,
            f"{base}/system.slice/memory.max": 6 * GIB,
            f"{base}/system.slice/memory.high": "max",
            f"{base}/cgroup.controllers": "memory",
        },
    )
    found = limits.cgroup_limits(root)
    assert [(limit.size, limit.source) for limit in found] == [
        (7 * GIB, "/sys/fs/cgroup/system.slice/sluice.service/memory.high"),
        (6 * GIB, "/sys/fs/cgroup/system.slice/memory.max"),
    ]


def test_a_v1_hierarchy_beside_v2_counts_with_limits_above_the_visible_ones(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/a/b\n1:cpu:/\n0::/",
            "proc/self/mountinfo": V1,
            f"{base}/memory.limit_in_bytes": 9223372036854771712,
            f"{base}/a/memory.limit_in_bytes": 5 * GIB,
            f"{base}/a/b/memory.limit_in_bytes": 9223372036854771712,
            f"{base}/a/b/memory.stat": f"cache 1\nhierarchical_memory_limit {4 * GIB}",
        },
    )
    assert [limit.size for limit in limits.cgroup_limits(root)] == [4 * GIB, 5 * GIB]


@pytest.mark.parametrize("path", ["/docker/abc", "/../../elsewhere", "/gone"])
def test_in_a_container_the_mounted_subtree_is_ours(tmp_path: Path, path: str) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}",
            "proc/self/mountinfo": "30 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
            "sys/fs/cgroup/memory.max": 3 * GIB,
        },
    )
    assert [limit.size for limit in limits.cgroup_limits(root)] == [3 * GIB]


def test_nothing_readable_means_no_limit_known(tmp_path: Path) -> None:
    assert limits.cgroup_limits(tmp_path) == []
    assert limits.available_memory(tmp_path) is None
    assert limits.memory_limit(None, tmp_path).considered == ()
    assert limits.memory_limit(GIB, tmp_path).size == GIB
    garbled = tree(
        tmp_path, {"proc/self/cgroup": "x", "proc/self/mountinfo": "1 2\n - cgroup2", "proc/meminfo": "MemFree: x"}
    )
    assert limits.cgroup_limits(garbled) == []


def test_the_smallest_of_preset_cgroup_and_available_wins_and_says_who(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2,
            "sys/fs/cgroup/memory.max": 8 * GIB,
            "proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {10 * 2**20} kB",
        },
    )
    assert limits.memory_limit(6 * GIB, root).source == "memory.total"
    limit = limits.memory_limit(None, root)
    assert (limit.size, limit.source) == (8 * GIB, "/sys/fs/cgroup/memory.max")
    assert [c.size for c in limit.considered] == [8 * GIB, int(0.95 * 10 * GIB)]
    tree(root, {"proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable: {4 * 2**20} kB"})
    assert limits.memory_limit(None, root).source == "95% of available memory"
    # What this process already holds is available to it: a reload sees the same limit as the start did.
    tree(root, {"proc/self/status": f"VmRSS: {2 * 2**20} kB"})
    assert limits.memory_limit(None, root).size == int(0.95 * 6 * GIB)


def test_reclaimable_cache_counts_as_available_where_the_kernel_does_not_add_it_up(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {"proc/meminfo": "MemFree: 100 kB\nCached: 1000 kB\nBuffers: 10 kB\nSReclaimable: 5 kB\nShmem: 500 kB"},
    )
    assert limits.available_memory(root) == (100 + 1000 + 10 + 5 - 500) * 1024


def test_usage_of_a_cgroup_leaves_out_page_cache_that_can_go(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/x\n0::/",
            "proc/self/mountinfo": V1,
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": 1000,
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes": 900,
            "sys/fs/cgroup/memory/x/memory.stat": "total_inactive_file 300\ntotal_active_file 100",
        },
    )
    assert limits.cgroup_usage(root) == [limits.GroupUsage("/sys/fs/cgroup/memory/x", 1000, 500)]


def test_the_real_machine_can_be_read() -> None:
    assert limits.memory_limit().size > 0
    assert this_machine().memory > 0


@given(*[st.integers(0, 2**45)] * 5)
def test_spare_bytes_go_to_the_trunk_first_then_to_the_cache(
    spare: int, trunk: int, tf: int, experts: int, ef: int
) -> None:
    got_trunk, got_experts = split_spare(spare, trunk, tf, experts, ef)
    assert min(tf, trunk) <= got_trunk <= trunk
    assert min(ef, experts) <= got_experts <= experts
    assert got_trunk + got_experts <= max(spare, min(tf, trunk) + min(ef, experts))
    if got_experts > min(ef, experts):
        assert got_trunk == trunk
    if got_trunk + got_experts < spare:
        assert (got_trunk, got_experts) == (trunk, experts)


@given(st.integers(2**28, 2**43), st.integers(2**27, 2**43), st.none() | st.integers(2**27, 2**43))
def test_an_automatic_budget_stays_within_everything(memory: int, available: int, cgroup: int | None) -> None:
    available = min(available, memory)
    machine = Machine(memory, available, cgroup)
    total = auto_total(machine)
    assert total == 64 * 2**20 or total <= min(available, cgroup or available)
    values = check_tables(auto_tables(machine), "auto")
    assert values["memory.total"] == total


@pytest.mark.parametrize(
    ("gib", "context", "sequences"), [(3, 4096, 1), (8, 4096, 1), (32, 16384, 2), (256, 32768, 8), (2048, 131072, 16)]
)
def test_auto_takes_sequences_and_context_of_the_preset_below(gib: int, context: int, sequences: int) -> None:
    values = check_tables(auto_tables(Machine(gib * GIB, int(gib * GIB * 0.97))), "auto")
    assert (values["engine.context"], values["engine.max_sequences"]) == (context, sequences)
    assert values["memory.trunk"] is None


def test_the_nearest_preset_is_the_largest_that_fits() -> None:
    assert nearest_preset(lambda s: (s.memory.total or 0) <= 30 * 10**9) == "desktop"
    assert nearest_preset(lambda s: False) is None
    assert load_settings("auto", env={}).provenance["memory.total"] == "preset auto"
