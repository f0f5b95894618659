"""What a process asks of the kernel once, before it starts threads: locked memory, memory nodes, open files.

Every step fails softly and says what it did: a machine that forbids one of them still serves.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from pathlib import Path

from sluice.daemon.service import units

MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4  # mlockall(2)
MPOL_INTERLEAVE = 3  # set_mempolicy(2)
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


def lock_memory() -> str:
    """Keeps our pages out of swap, where that is allowed. Returns what happened, for the log and the status.

    Tried once, and only without a limit on locked memory: under a limit, a later allocation beyond it would fail
    instead of being merely unlocked. ONFAULT, so that reserved but untouched arenas cost nothing.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        soft = hard
    if soft != resource.RLIM_INFINITY:
        return "not locked (RLIMIT_MEMLOCK is limited)"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) != 0:
        return f"not locked ({os.strerror(ctypes.get_errno())})"
    return "locked"


def memory_nodes(root: Path = Path("/")) -> tuple[int, ...]:
    """NUMA nodes that have memory; (0,) where the kernel does not say."""
    try:
        text = (root / "sys/devices/system/node/has_memory").read_text(encoding="ascii").strip()
        return units.parse_cpu_list(text)  # nodes are written like CPUs
    except (OSError, ValueError):
        return (0,)


def spread_memory(numa: str, root: Path = Path("/")) -> str:
    """Interleaves this thread's pages, and those of threads it starts, over all memory nodes when `numa` says so
    ("auto": where there is more than one). Returns what happened."""
    nodes = memory_nodes(root)
    if numa == "off" or (numa == "auto" and len(nodes) == 1):
        return f"{len(nodes)} memory node{'s' if len(nodes) > 1 else ''}, pages where first touched"
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"not interleaved (no system call known on {platform.machine()})"
    words = (max(nodes) // 64 + 1) if nodes else 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, MPOL_INTERLEAVE, mask, words * 64 + 1) != 0:
        return f"not interleaved ({os.strerror(ctypes.get_errno())})"
    return f"pages interleaved over {len(nodes)} memory nodes"


def raise_open_files(wanted: int = 65536) -> int:
    """Raises the soft limit of open files towards `wanted` as far as the hard one allows; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return soft
