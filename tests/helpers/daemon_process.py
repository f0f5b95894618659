"""The real daemon as a process: started on a checkpoint and a socket of its own, and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

COMMAND = (sys.executable, "-m", "sluice.daemon")


class DaemonProcess:
    """A running `sluice serve`. `socket` is its path, `log` what it wrote to standard error so far."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path, log_path: Path) -> None:
        self.process, self.socket, self._log_path = process, socket, log_path

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def client(self, timeout: float = 60.0) -> httpx.Client:
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://sluice", timeout=timeout
        )

    def status(self) -> dict:
        with self.client() as client:
            return client.get("/v1/status").json()

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Signal and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(timeout=60)


@contextlib.contextmanager
def daemon(model: Path, folder: Path, *arguments: str, wait: bool = True) -> Iterator[DaemonProcess]:
    """`sluice serve --model MODEL` on a socket in `folder`; ready when entered (unless wait=False)."""
    socket, log = folder / "s.sock", folder / "log"
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--model", str(model), "--socket", str(socket), *arguments],
            stderr=stderr,
            stdout=stderr,
            env=clean_environment(),
        )
    running = DaemonProcess(process, socket, log)
    try:
        if wait:
            wait_until_ready(running)
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=30)


def wait_until_ready(running: DaemonProcess, seconds: float = 60.0) -> None:
    """Returns once /health/ready says 200; raises AssertionError with the log when the process ends or never does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert running.process.poll() is None, f"the daemon ended with {running.process.returncode}: {running.log}"
        if listens(running.socket):
            with running.client(5.0) as client:
                if client.get("/health/ready").status_code == 200:
                    return
        time.sleep(0.02)
    raise AssertionError(f"not ready after {seconds} s: {running.log}")


def listens(path: Path) -> bool:
    """Whether a connect succeeds (asked with a bare socket: the HTTP client leaks its own when refused)."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def clean_environment() -> dict[str, str]:
    """Ours without SLUICE_* settings of whoever runs the tests, but for the instruction set under test."""
    kept = {"SLUICE_ISA", "SLUICE_SHARED"}
    return {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_") or k in kept}


def sluice(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """One command line, run to its end."""
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, env=clean_environment()
    )


def run_json(model: Path, *arguments: str, **options: float) -> dict:
    """`sluice run --json`, parsed; asserts that it succeeded."""
    done = sluice("run", "--model", str(model), "--json", *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def stream_lines(response: httpx.Response) -> Iterator[str]:
    """Non-empty lines of an event stream, comments included."""
    return (line for line in response.iter_lines() if line)
