"""The plan is kept by a process that the kernel would kill for breaking it."""

from __future__ import annotations

import json
import subprocess

import pytest
from helpers.daemon_process import COMMAND, clean_environment, sluice
from helpers.memory_cgroup import memory_cgroup

pytestmark = pytest.mark.system
MB = 10**6


@pytest.fixture(scope="module")
def holes(tmp_path_factory):
    """A checkpoint of 2.7 GB that takes 2 MB on disk: true headers over holes, which read as zeros."""
    folder = tmp_path_factory.mktemp("holes") / "model"
    shape = (
        "--hidden 2048 --layers 9 --vocab 32768 --experts 64 --inner 1024 --latent 1024 --dense-inner 8192 "
        "--kda-heads 16 --kda-dim 128 --heads 16"
    )
    done = sluice("synth", str(folder), "--mock", *shape.split())
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("cache", ["0B", "100MB"])
def test_a_model_larger_than_its_cgroup_runs_within_its_plan(holes, cache):
    total = 700 * MB
    settings = ["memory.total=700MB", f"memory.expert_cache={cache}", "engine.context=1024"]
    with memory_cgroup(total) as cgroup:
        done = subprocess.run(
            [
                *(*COMMAND, "run", "--model", str(holes), "--json", "--ids", ",".join(map(str, range(1, 80)))),
                *("--max-tokens", "4", "--ignore-stop"),
                *(word for setting in settings for word in ("--set", setting)),
            ],
            capture_output=True,
            text=True,
            timeout=280,
            env=clean_environment(),
            preexec_fn=cgroup.enter,
        )
        assert done.returncode == 0, (done.returncode, done.stdout[-500:], done.stderr[-500:])
        assert cgroup.kills == 0
    report = json.loads(done.stdout)
    assert report["memory"]["plan_bytes"] <= total
    assert report["memory"]["peak_rss_bytes"] <= report["memory"]["plan_bytes"]
    assert report["io"]["bytes"] > 3 * total


def test_the_cgroup_is_a_limit_of_the_plan(holes):
    with memory_cgroup(300 * MB) as cgroup:
        done = subprocess.run(
            [*COMMAND, "run", "--model", str(holes), "--ids", "1", "--json"],
            capture_output=True,
            text=True,
            timeout=120,
            env=clean_environment(),
            preexec_fn=cgroup.enter,
        )
    assert done.returncode == 3
    assert "memory.limit_in_bytes" in json.loads(done.stdout)["error"]["message"]
