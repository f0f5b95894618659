"""Threads, CPUs and homes on machines the development machines are not; and that homes change no bit."""

from __future__ import annotations

import dataclasses
import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.daemon.engine import placement
from sluice.daemon.engine.placement import ThreadPlan, plan_threads, row_shares, slot_placer, stay_near
from sluice.daemon.service.settings import ComputeSettings
from sluice.io.errors import PresetError
from sluice.io.store import ExpertPart, ExpertRecord
from sluice.kernels.topology import Cpu, Topology

PLAIN = Topology(tuple(Cpu(i, i, 0, 0) for i in range(4)), {0: 1 << 34})
SIBLINGS = Topology(tuple(Cpu(i, i % 4, 0, 0) for i in range(8)), {0: 1 << 34})
TWO_NODES = Topology(tuple(Cpu(i, i % 8, i % 8 // 4, i % 8 // 4) for i in range(16)), {0: 1 << 34, 1: 1 << 34})


def test_where_every_cpu_is_a_core_the_scheduler_decides():
    assert plan_threads(ComputeSettings(), PLAIN) == ThreadPlan(4, None, (), (), 0, 0)


def test_threads_default_to_cores_and_are_kept_off_siblings():
    plan = plan_threads(ComputeSettings(), SIBLINGS)
    assert (plan.threads, plan.cpus, plan.homes) == (4, (0, 1, 2, 3), ())


def test_a_list_of_cpus_is_honoured():
    plan = plan_threads(ComputeSettings(cpus=(1, 5, 6)), SIBLINGS)
    assert (plan.threads, plan.cpus) == (2, (1, 6))  # 1 and 5 share a core
    assert plan_threads(ComputeSettings(cpus=(2,), threads=3), PLAIN).cpus == (2, 2, 2)
    with pytest.raises(PresetError, match=r"\[9\].*CPUs"):
        plan_threads(ComputeSettings(cpus=(1, 9)), PLAIN)


def test_two_nodes_take_turns_and_are_homes():
    plan = plan_threads(ComputeSettings(), TWO_NODES)
    assert plan.cpus == (0, 4, 1, 5, 2, 6, 3, 7)
    assert (plan.homes, plan.nodes) == ((0, 1) * 4, (0, 1))
    assert plan.near == [0, 1, 2, 3]


@pytest.mark.parametrize("numa", ["off", "interleave"])
def test_homes_are_for_numa_auto_alone(numa):
    plan = plan_threads(ComputeSettings(numa=numa), TWO_NODES)
    assert (plan.homes, plan.nodes, plan.threads) == ((), (), 8)


def test_threads_of_one_node_alone_have_no_homes():
    assert plan_threads(ComputeSettings(cpus=(4, 5)), TWO_NODES).homes == ()


def test_homes_count_from_zero_whatever_the_nodes_are_called():
    far = Topology(tuple(Cpu(i, i, 0, (3, 9)[i % 2]) for i in range(4)), {3: 1, 9: 1})
    plan = plan_threads(ComputeSettings(), far)
    assert (plan.homes, plan.nodes) == ((0, 1, 0, 1), (3, 9))


def test_widths_are_at_most_the_threads():
    plan = plan_threads(ComputeSettings(threads=3, attention_threads=2, expert_threads=3), PLAIN)
    assert (plan.others, plan.experts) == (2, 3)
    for key in ("attention_threads", "expert_threads"):
        with pytest.raises(PresetError, match=f"compute.{key} = 5.*4 compute threads"):
            plan_threads(dataclasses.replace(ComputeSettings(), **{key: 5}), PLAIN)


RECORD = ExpertRecord(
    0,
    0,
    (
        ExpertPart("w1.weight_packed", "U8", (6, 4096), 128),
        ExpertPart("w1.weight_scale", "U8", (6, 256), 128 + 6 * 4096),
        ExpertPart("w2.weight", "BF16", (9, 100), 40_000),
    ),
    (),
    65_536,
)


@given(st.integers(1, 8))
def test_every_row_belongs_to_one_share_in_order(shares):
    ranges = list(row_shares(RECORD, shares))
    for part, row_bytes in zip(RECORD.parts, (4096, 256, 200), strict=True):
        mine = ranges[:shares]
        del ranges[:shares]
        assert [share for _, _, share in mine] == list(range(shares))
        assert mine[0][0] == part.at
        assert mine[-1][1] == part.at + part.shape[0] * row_bytes
        assert all(a[1] == b[0] for a, b in pairwise(mine))
        assert all((end - begin) % row_bytes == 0 for begin, end, _ in mine)


def test_a_slot_is_touched_share_by_share(monkeypatch):
    touched = []
    monkeypatch.setattr(
        placement.kernels, "touch_memory", lambda array, node: touched.append((array.ctypes.data, array.nbytes, node))
    )
    plan = plan_threads(ComputeSettings(), TWO_NODES)
    place = slot_placer(plan, RECORD)
    slot = np.zeros(65_536, np.uint8)
    place(memoryview(slot))
    assert [(at - slot.ctypes.data, n, node) for at, n, node in touched] == [
        (128, 3 * 4096, 0),
        (128 + 3 * 4096, 3 * 4096, 1),
        (128 + 6 * 4096, 3 * 256, 0),
        (128 + 6 * 4096 + 3 * 256, 3 * 256, 1),
        (40_000, 4 * 200, 0),
        (40_000 + 4 * 200, 5 * 200, 1),
    ]
    assert slot_placer(plan_threads(ComputeSettings(), PLAIN), RECORD) is None


def test_the_engine_stays_near_its_home_and_only_where_there_are_homes(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: asked.append((pid, cpus)))
    stay_near(plan_threads(ComputeSettings(), PLAIN))
    stay_near(plan_threads(ComputeSettings(), TWO_NODES))
    assert asked == [(0, [0, 1, 2, 3])]

    def refuse(pid, cpus):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    stay_near(plan_threads(ComputeSettings(), TWO_NODES))
