"""A memory cgroup (version 1) of our own: a hard limit that kills, and the kernel's own count of the peak."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup/memory")


class MemoryCgroup:
    """`enter` is for a child between fork and exec."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def enter(self) -> None:
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def failures(self) -> int:
        """How often the limit was hit and something had to be given back (page cache, or a life)."""
        return int((self.path / "memory.failcnt").read_text())

    @property
    def kills(self) -> int:
        """Processes killed for going over the limit."""
        lines = (self.path / "memory.oom_control").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A cgroup with a hard limit; skips, saying so, where none can be made."""
    path = ROOT / f"sluice-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.rmdir()
        pytest.skip(f"no memory cgroup (version 1) can be made here: {error}")
    try:
        yield MemoryCgroup(path)
    finally:
        for _ in range(100):  # the kernel lets go of a dead process's charge a moment after its end
            with contextlib.suppress(OSError):
                path.rmdir()
                break
            time.sleep(0.05)
