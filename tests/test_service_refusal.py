"""A start that cannot succeed ends at once, with the exit code of its kind and what to do about it."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from helpers.shared import shared_path


def serve(model: Path, *more: str) -> tuple[int, str, float]:
    """Exit code, what it said, and the CPU seconds it took (a busy machine must not fail this)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [
        sys.executable,
        "-m",
        "sluice.daemon",
        "serve",
        "--model",
        str(model),
        "--socket",
        "/nonexistent/s",
        *more,
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.returncode, done.stderr, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_plan_that_cannot_fit_is_refused_from_the_configuration_alone(tmp_path: Path) -> None:
    """Kimi K3 at a million tokens on a laptop: its headers would take seconds to read and could not help."""
    shutil.copy(shared_path("spec/k3_config.json"), tmp_path / "config.json")
    code, said, seconds = serve(tmp_path, "--preset", "laptop", "--set", "engine.context=1048576")
    assert code == 3, said
    assert "bytes short" in said
    assert "state 58.45 GB" in said
    assert "--preset" in said or "no preset fits" in said
    assert seconds < 2
    assert said.count("\n") == 1


def test_other_refusals_have_their_own_codes(tmp_path: Path) -> None:
    assert serve(tmp_path)[0] == 4
    code, said, _ = serve(tmp_path, "--preset", "laptopp")
    assert (code, "did you mean laptop?" in said) == (2, True)
    code, said, _ = serve(tmp_path, "--set", "server.tcp=0.0.0.0:80")
    assert (code, "server.token_file" in said) == (2, True)
