"""The daemon held at the laptop preset's cap by a memory cgroup, with a checkpoint of Kimi K3's own widths.

A budget is a promise: nothing is killed, and the peak stays within the plan, when the cache is full and long after.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CAP = 6_500_000_000  # the laptop preset's total
FREE_BYTES = 12_000_000_000
REQUESTS_BEYOND = 50


def _v1_parent() -> Path | None:
    """This process's own cgroup in the v1 memory hierarchy, if cgroups can be made below it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                base = Path("/sys/fs/cgroup/memory")
                own = base / path.lstrip("/")
                return own if own.is_dir() else base
    return None


def _v2_parent() -> Path | None:
    """The root of a v2 hierarchy whose children may have memory limits."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        if "memory" in (root / "cgroup.subtree_control").read_text().split():
            return root
    return None


class Cgroup:
    """A memory cgroup with a limit and no swap; processes are put in by their pid."""

    def __init__(self, limit: int) -> None:
        v1, v2 = _v1_parent(), _v2_parent()
        parent = v1 or v2
        assert parent is not None
        self.version = 1 if v1 else 2
        self.path = parent / f"sluice-test-{os.getpid()}"
        self.path.mkdir()
        names = {1: "memory.limit_in_bytes", 2: "memory.max"}
        (self.path / names[self.version]).write_text(str(limit))
        if self.version == 2:
            with contextlib.suppress(OSError):
                (self.path / "memory.swap.max").write_text("0")

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        file = self.path / ("memory.oom_control" if self.version == 1 else "memory.events")
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def peak(self) -> int | None:
        file = self.path / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")
        return int(file.read_text()) if file.exists() else None

    def remove(self) -> None:
        for _ in range(50):
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)


def _missing() -> str:
    if os.geteuid() != 0:
        return "needs root (a memory cgroup is made)"
    if _v1_parent() is None and _v2_parent() is None:
        return "needs a memory cgroup hierarchy that can be written"
    memory = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()
    }
    if memory["MemAvailable"] < 1.1 * CAP:
        return f"needs {1.1 * CAP / 1e9:.1f} GB of available memory"
    return ""


pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(1200),  # seven gigabytes are written first
    pytest.mark.skipif(bool(_missing()), reason=_missing() or "runs"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three layers of true width (dense and KDA, KDA and MoE, MLA and MoE), 48 experts each, a quarter of the
    vocabulary: about 7 GB of real data, since holes would route every token to the same experts."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    if shutil.disk_usage(folder.parent).free < FREE_BYTES:
        pytest.skip(f"needs {FREE_BYTES / 1e9:.0f} GB of free disk below {folder.parent}")
    shape = ["--layers", "3", "--experts", "48", "--full-attention", "3", "--vocab", "40960"]
    subprocess.run(
        [sys.executable, "-m", "sluice.daemon", "synth", str(folder), "--preset", "wide", *shape], check=True
    )
    yield folder
    shutil.rmtree(folder)


class Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("sluice")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(300)
        self.sock.connect(str(self._path))


def call(path: Path, route: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    with contextlib.closing(Unix(path)) as client:
        client.request(
            "POST" if body else "GET", route, json.dumps(body) if body else None, {"Content-Type": "application/json"}
        )
        answer = client.getresponse()
        return answer.status, json.loads(answer.read())


def peak_rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def test_the_laptop_cap_holds_with_a_full_cache_and_long_after(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    # A part of the trunk streams and the cache is smaller than the experts there are: everything moves.
    overrides = ["--set", "memory.trunk=4.8GB", "--set", "memory.expert_cache=1GB"]
    command = [sys.executable, "-m", "sluice.daemon", "serve", "--preset", "laptop", "--model", str(checkpoint)]
    group = Cgroup(CAP)
    log = (tmp_path / "log").open("w+")
    try:
        with subprocess.Popen(
            # A shell waits for its line until it is inside: nothing of the daemon is charged elsewhere.
            ["sh", "-c", 'read _; exec "$@"', "sh", *command, "--socket", str(path), *overrides],
            stdin=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as daemon:
            try:
                group.add(daemon.pid)
                assert daemon.stdin is not None
                daemon.stdin.write("\n")
                daemon.stdin.flush()
                _serve_until_long_after(daemon, path)
                memory = call(path, "/v1/status")[1]["memory"]
                plan, peak = memory["plan_bytes"], peak_rss(daemon.pid)
                held = f"plan {plan / 1e9:.3f} GB, peak RSS {peak / 1e9:.3f} GB"
                print(f"{held}; the cgroup held at most {(group.peak() or 0) / 1e9:.3f} of {CAP / 1e9:.3f} GB")
                assert group.kills() == 0
                assert peak <= plan <= CAP, held
                assert peak > 0.8 * plan, held  # a plan nobody comes near would promise nothing
                daemon.send_signal(signal.SIGTERM)
                assert daemon.wait(60) == 0
            finally:
                daemon.kill()
    finally:
        log.seek(0)
        print(log.read()[-3000:])
        log.close()
        group.remove()


def _serve_until_long_after(daemon: subprocess.Popen[str], path: Path) -> None:
    """Requests until the cache holds all it may, and fifty more with other tokens."""
    deadline = time.monotonic() + 120
    while True:
        assert daemon.poll() is None
        with contextlib.suppress(OSError):
            if call(path, "/health/ready")[0] == 200:
                break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    beyond = 0
    for number in range(200):
        body = {"model": "model", "prompt": [1 + number * 101 % 40_000], "max_tokens": 1, "temperature": 0}
        status, answer = call(path, "/v1/completions", body)
        assert status == 200, answer
        if beyond or _cache_is_full(call(path, "/v1/status")[1]):
            beyond += 1
        if beyond > REQUESTS_BEYOND:
            return
    raise AssertionError(f"the cache never filled: {call(path, '/v1/status')[1]}")


def _cache_is_full(status: dict[str, Any]) -> bool:
    experts = status["io"]["experts"]
    return bool(experts["cached"] >= experts["slots"])
