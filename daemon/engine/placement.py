"""Which CPU computes what, and which memory node holds what it reads.

Owns the choice of threads, CPUs and homes from the settings and the machine's topology, and laying the expert cache's
slots over the nodes. On one node there is nothing to lay. Nothing here changes a bit of any result: homes only say
which rows a thread takes first.

On several nodes every matrix of an expert is shared out by rows: node k of n holds the k-th n-th of them and its
threads take these rows first. So all nodes work on every expert, whichever the router picks, and read their own memory.
What streams (the trunk) is interleaved page by page instead (`service.process.spread_memory`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sluice import kernels
from sluice.daemon.service.settings import ComputeSettings
from sluice.io.errors import PresetError
from sluice.io.safetensors import ITEM_BYTES
from sluice.io.store import ExpertRecord
from sluice.kernels.topology import Topology, read_topology

MAX_HOMES = 8
"""As many shares as the kernels know."""


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """The compute threads, the engine's own first. cpus: where each is to run, None: the scheduler decides. homes: the
    share of rows each takes first, counted from 0, with `nodes[share]` the memory node of the share; empty on one
    node. others, experts: how many of the threads attention and all else, and routed experts use; 0 is all."""

    threads: int
    cpus: tuple[int, ...] | None
    homes: tuple[int, ...]
    nodes: tuple[int, ...]
    others: int
    experts: int

    @property
    def near(self) -> list[int]:
        """The CPUs that share the engine's own home."""
        return sorted({c for c, home in zip(self.cpus or (), self.homes, strict=False) if home == self.homes[0]})


def plan_threads(compute: ComputeSettings, topology: Topology) -> ThreadPlan:
    """Threads for a machine. Pure. Raises PresetError for CPUs that are not there and widths beyond the threads."""
    if compute.cpus is not None:
        missing = sorted(set(compute.cpus) - {cpu.id for cpu in topology.cpus})
        if missing:
            raise PresetError(f"compute.cpus: {missing} are not among the CPUs this process may use")
        topology = topology.only(compute.cpus)
    threads = compute.threads or max(1, len(topology.cores()))
    for name, width in (("attention_threads", compute.attention_threads), ("expert_threads", compute.expert_threads)):
        if width is not None and width > threads:
            raise PresetError(f"compute.{name} = {width}, but there are {threads} compute threads")
    cpus = tuple(topology.spread(threads)) or None
    nodes = {cpu.id: cpu.node for cpu in topology.cpus}
    used = sorted({nodes[cpu] for cpu in cpus or ()})
    homes: tuple[int, ...] = ()
    if compute.numa == "auto" and cpus is not None and 1 < len(used) <= MAX_HOMES:
        homes = tuple(used.index(nodes[cpu]) for cpu in cpus)
    if compute.cpus is None and not homes and len(topology.cores()) == len(topology.cpus):
        cpus = None  # every CPU is a core, all memory is alike: pinning could only hinder the scheduler
    return ThreadPlan(
        threads, cpus, homes, tuple(used) if homes else (), compute.attention_threads or 0, compute.expert_threads or 0
    )


def start_threads(plan: ThreadPlan) -> None:
    """Put the plan in force in the kernels' pool."""
    kernels.configure_threads(plan.threads, plan.cpus, homes=plan.homes or None)
    kernels.set_widths(plan.others, plan.experts)


def this_machine(compute: ComputeSettings) -> ThreadPlan:
    """The plan for the machine and the affinity of this process."""
    return plan_threads(compute, read_topology())


def row_shares(record: ExpertRecord, shares: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, share) in bytes of a slot: the rows of every matrix, dealt to `shares` in equal parts in order, as
    the kernels deal the pieces of a product."""
    for part in record.parts:
        rows = part.shape[0]
        row_bytes = math.prod(part.shape[1:]) * ITEM_BYTES[part.dtype]
        for share in range(shares):
            begin, end = rows * share // shares, rows * (share + 1) // shares
            yield part.at + begin * row_bytes, part.at + end * row_bytes, share


def slot_placer(plan: ThreadPlan, record: ExpertRecord) -> Callable[[memoryview], None] | None:
    """What gives a new slot its memory on the nodes of the plan, or None on one node. Where the system refuses, its
    memory lies wherever it is touched next: slower, nothing else."""
    if not plan.homes:
        return None
    shares = list(row_shares(record, len(plan.nodes)))

    def place(slot: memoryview) -> None:
        memory = np.frombuffer(slot, np.uint8)
        for begin, end, share in shares:
            kernels.touch_memory(memory[begin:end], plan.nodes[share])

    return place


def stay_near(plan: ThreadPlan) -> None:
    """Keep the calling thread, which takes part in every product as thread 0, on the CPUs of its home."""
    if plan.homes:
        with contextlib.suppress(OSError):  # a container may refuse; the rows are then read from afar
            os.sched_setaffinity(0, plan.near)
