"""Topologies the development machines do not have, faked as /sys trees."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice import kernels
from sluice.kernels.topology import Topology, parse_list, read_topology


def _tree(root: Path, nodes: dict[int, str], cores: dict[int, tuple[int, int]]) -> Path:
    for node, cpus in nodes.items():
        folder = root / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal:       1024 kB\nNode {node} MemFree: 5 kB\n")
    for cpu, (package, core) in cores.items():
        folder = root / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "core_id").write_text(f"{core}\n")
        (folder / "physical_package_id").write_text(f"{package}\n")
    return root


@pytest.fixture
def two_sockets(tmp_path) -> Topology:
    """Two packages of four cores with two threads each; siblings are n and n + 8, as Intel numbers them."""
    cores = {cpu: (cpu % 8 // 4, cpu % 4) for cpu in range(16)}
    return read_topology(_tree(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, cores), range(16))


def test_cores_come_once_each(two_sockets):
    assert two_sockets.cores() == list(range(8))
    assert two_sockets.cores(1) == [4, 5, 6, 7]
    assert two_sockets.nodes == [0, 1]
    assert two_sockets.node_bytes == {0: 1 << 20, 1: 1 << 20}


def test_threads_take_cores_of_both_nodes_before_siblings(two_sockets):
    assert two_sockets.spread(4) == [0, 4, 1, 5]
    assert sorted(two_sockets.spread(8)) == list(range(8))
    assert sorted(two_sockets.spread(16)) == list(range(16))
    assert two_sockets.spread(17)[16] == 0


def test_an_affinity_is_honoured(two_sockets, tmp_path):
    some = read_topology(tmp_path, [1, 9, 12, 13])
    assert some.cores() == [1, 12, 13]
    assert some.spread(4) == [1, 12, 13, 9]


def test_a_machine_that_tells_nothing_has_a_core_for_each_cpu(tmp_path):
    bare = read_topology(tmp_path, [3, 5])
    assert bare.cores() == [3, 5]
    assert bare.nodes == [0]
    assert bare.spread(2) == [3, 5]


def test_cores_of_different_packages_may_share_a_number(tmp_path):
    top = read_topology(_tree(tmp_path, {0: "0-1"}, {0: (0, 0), 1: (1, 0)}), [0, 1])
    assert top.cores() == [0, 1]


def test_a_node_without_processors_is_only_memory(tmp_path):
    top = read_topology(_tree(tmp_path, {0: "0", 1: ""}, {0: (0, 0)}), [0])
    assert top.nodes == [0]
    assert set(top.node_bytes) == {0, 1}


@given(st.sets(st.integers(0, 300), max_size=40))
def test_a_list_reads_back(numbers):
    text = ",".join(str(n) for n in sorted(numbers))
    assert parse_list(text) == sorted(numbers)


@pytest.mark.parametrize("text", ["a", "1-", "-3", "5-2", "0-99999999", "1;2"])
def test_a_broken_list_is_refused(text):
    with pytest.raises(ValueError, match="CPU list"):
        parse_list(text)


def test_touching_memory_keeps_what_it_holds_and_says_whether_it_could():
    array = np.arange(1 << 20, dtype=np.uint32)
    assert isinstance(kernels.touch_memory(array, 0), bool)
    assert kernels.touch_memory(array, 1000) is False  # no machine of ours has such a node
    assert kernels.touch_memory(array[:10], 0) is False  # not one whole page
    assert np.array_equal(array, np.arange(1 << 20, dtype=np.uint32))
    with pytest.raises(ValueError, match="node"):
        kernels.touch_memory(array, 4096)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        kernels.touch_memory(array, 0)


def test_touching_many_pieces_makes_no_mappings_and_gives_them_memory():
    """A cache is thousands of slots of a dozen pieces; the kernel allows a process 65,530 mappings."""
    pages = 4096
    room = mmap.mmap(-1, pages * 4096)
    array = np.frombuffer(room, np.uint8)

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    touched = [kernels.touch_memory(array[i * 4096 : (i + 1) * 4096], 0) for i in range(0, pages, 2)]
    assert mappings() - before < 16
    assert len(set(touched)) == 1
