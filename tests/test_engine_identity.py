"""One fingerprint, whatever memory, cache, backend, depth, drives, layout, prediction, threads, chunks or timing.

The matrix is sampled so that every pair of values meets (checked below): the whole of it is thousands of
cells of which each costs a load.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.daemon_process import run_json
from helpers.fake_reader import FakeReader
from helpers.whole_engine import engine, fingerprint, start

from sluice import kernels
from sluice.daemon.engine import assembly, placement
from sluice.daemon.engine.placement import ThreadPlan, start_threads

PROMPT = [5, 77, 310, 9, 42, 250, 8, 111, 3, 64, 12]
AXES: dict[str, tuple] = {
    "trunk": ("0B", "700kB", "1GB"),
    "cache": ("0B", "one", "600kB", "1GB"),
    "backend": ("uring", "threads", "delays 1", "delays 2"),
    "depth": (1, 8),
    "layout": ("in place", "over 2 drives", "over 3 drives", "packed 1", "packed 2", "packed 3"),
    "lookahead": ("off", "1", "3", "adaptive"),
    "chunk": (1, 7, 64),
    "batch": ("alone", "beside another"),
}
ONE_EXPERT = "16kB"


def pairs(cell: dict) -> set:
    return set(itertools.combinations(cell.items(), 2))


def sampled_matrix() -> list[dict]:
    """Cells such that every pair of values of two axes stands in one of them: the greedy choice among random ones."""
    rng = random.Random(1)
    missing = set()
    for a, b in itertools.combinations(AXES, 2):
        missing |= {((a, x), (b, y)) for x in AXES[a] for y in AXES[b]}
    cells = []
    while missing:
        candidates = [{axis: rng.choice(values) for axis, values in AXES.items()} for _ in range(30)]
        best = max(candidates, key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(best)
        cells.append(best)
    return cells


@pytest.fixture(scope="module")
def layouts(tiny_checkpoint, tmp_path_factory) -> dict[str, tuple[Path, list[Path]]]:
    """The same checkpoint in every layout: (path, further roots). Drives are folders here."""
    from sluice.tools.pack import pack

    base = tmp_path_factory.mktemp("layouts")
    made: dict[str, tuple[Path, list[Path]]] = {"in place": (tiny_checkpoint, [])}
    for drives in (2, 3):
        folders = [base / f"spread{drives}" / str(i) for i in range(drives)]
        for folder in folders:
            folder.mkdir(parents=True)
        for i, file in enumerate(sorted(tiny_checkpoint.iterdir())):
            home = folders[i % drives] if file.suffix == ".safetensors" else folders[0]
            shutil.copy(file, home / file.name)
        made[f"over {drives} drives"] = (folders[0], folders[1:])
    for drives in (1, 2, 3):
        folders = [base / f"packed{drives}" / str(i) for i in range(drives)]
        pack(out=folders, model=tiny_checkpoint, rates=",".join(["3.0", "1.5", "0.7"][:drives]))
        made[f"packed {drives}"] = (folders[0], folders[1:])
    return made


@pytest.fixture(scope="module")
def expected(tiny_checkpoint) -> str:
    with engine(tiny_checkpoint) as running:
        return fingerprint(running, PROMPT)


def test_the_matrix_holds_every_pair():
    cells = sampled_matrix()
    assert len(cells) >= max(len(a) * len(b) for a, b in itertools.combinations(AXES.values(), 2))


@pytest.mark.parametrize(
    "cell", sampled_matrix(), ids=lambda cell: "-".join(str(v).replace(" ", "") for v in cell.values())
)
def test_one_fingerprint(cell, layouts, expected):
    path, roots = layouts[cell["layout"]]
    backend, make_reader = cell["backend"], None
    if backend.startswith("delays"):
        seed = int(backend.split()[1])
        backend = "threads"

        def make_reader(loop, capacity):
            return FakeReader(loop, capacity, seed=seed, delay=0.003)

    if backend == "uring" and not uring_allowed():
        pytest.skip("io_uring is not allowed here")
    overrides = [
        f"memory.trunk={cell['trunk']}",
        f"memory.expert_cache={ONE_EXPERT if cell['cache'] == 'one' else cell['cache']}",
        f"io.backend={backend}",
        f"io.depth={cell['depth']}",
        f"engine.lookahead={cell['lookahead']}",
        f"engine.prefill_chunk={cell['chunk']}",
        "engine.max_sequences=2",
    ]
    with engine(path, *overrides, roots=roots, make_reader=make_reader) as running:
        other = start(running, [7, 8, 9, 200, 3], 9) if cell["batch"] != "alone" else None
        assert fingerprint(running, PROMPT) == expected
        if other is not None:
            other.result()
        # Once more, with caches as the first run left them.
        assert fingerprint(running, PROMPT) == expected


def uring_allowed() -> bool:
    import liburing

    ring = liburing.io_uring()
    try:
        liburing.io_uring_queue_init(2, ring, 0)
    except OSError:
        return False
    liburing.io_uring_queue_exit(ring)
    return True


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_a_bit(threads, tiny_checkpoint, expected):
    kernels.configure_threads(threads, None)
    try:
        with engine(tiny_checkpoint) as running:
            assert fingerprint(running, PROMPT) == expected
    finally:
        kernels.configure_threads(len(kernels.physical_cores()), None)


def test_widths_and_cpus_do_not_change_a_bit(tiny_checkpoint, expected):
    ids = ",".join(map(str, PROMPT))
    sets = ["compute.threads=3", "compute.attention_threads=2", "compute.expert_threads=1", "compute.cpus=0"]
    flags = [word for setting in sets for word in ("--set", setting)]
    report = run_json(tiny_checkpoint, "--ids", ids, "--max-tokens", "6", "--ignore-stop", *flags)
    assert report["logits_fingerprint"] == expected


def test_homes_on_several_nodes_do_not_change_a_bit(tiny_checkpoint, expected, monkeypatch):
    """A machine of three nodes, faked: slots are touched share by share, the caller stays near its own."""
    placed: list[int] = []
    near: list[str] = []
    plan = ThreadPlan(5, None, (0, 1, 2, 0, 1), (0, 1, 2), 0, 0)
    monkeypatch.setattr(assembly, "this_machine", lambda compute: plan)
    monkeypatch.setattr(placement.kernels, "touch_memory", lambda memory, node: placed.append(node))
    monkeypatch.setattr(assembly, "stay_near", lambda plan: near.append(threading.current_thread().name))
    start_threads(plan)
    try:
        with engine(tiny_checkpoint) as running:
            assert fingerprint(running, PROMPT) == expected
    finally:
        kernels.configure_threads(len(kernels.physical_cores()), None)
    assert set(placed) == {0, 1, 2}
    assert near == ["sluice-engine"]


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "neon"])
def test_instruction_sets_do_not_change_a_bit(isa, tiny_checkpoint, expected):
    if isa not in kernels.available_isas():
        pytest.skip(f"this CPU has no {isa}")
    report = run_json(
        tiny_checkpoint,
        "--ids",
        ",".join(map(str, PROMPT)),
        "--max-tokens",
        "6",
        "--ignore-stop",
        "--set",
        f"compute.isa={isa}",
    )
    assert report["logits_fingerprint"] == expected


def test_int8_activations_are_a_numerics_of_their_own_that_repeats(tiny_checkpoint, expected):
    def run(*settings):
        flags = [word for setting in ("compute.activations=int8", *settings) for word in ("--set", setting)]
        ids = ",".join(map(str, PROMPT))
        return run_json(tiny_checkpoint, "--ids", ids, "--max-tokens", "6", "--ignore-stop", *flags)

    first = run()
    assert first["logits_fingerprint"] != expected
    plain = run_json(tiny_checkpoint, "--ids", "1", "--max-tokens", "1")
    assert first["system_fingerprint"] != plain["system_fingerprint"]
    for changed in ("compute.isa=scalar", "compute.threads=5", "memory.expert_cache=0B", "engine.prefill_chunk=1"):
        assert run(changed)["logits_fingerprint"] == first["logits_fingerprint"], changed


def test_logits_on_disk_are_those_of_the_fingerprint(tiny_checkpoint, expected, tmp_path):
    import numpy as np
    import xxhash

    file = tmp_path / "rows.npy"
    report = run_json(
        tiny_checkpoint,
        "--ids",
        ",".join(map(str, PROMPT)),
        "--max-tokens",
        "6",
        "--ignore-stop",
        "--logits",
        str(file),
    )
    rows = np.load(file)
    assert rows.dtype == np.dtype("<f4")
    assert rows.shape[0] == 6
    assert xxhash.xxh3_128_hexdigest(rows.tobytes()) == expected == report["logits_fingerprint"]


def test_a_seed_draws_the_same_tokens_from_another_process(tiny_checkpoint):
    arguments = ["--prompt", "ab", "--max-tokens", "12", "--temperature", "1.2", "--seed", "7", "--ignore-stop"]
    first = run_json(tiny_checkpoint, *arguments)
    again = run_json(tiny_checkpoint, *arguments, "--set", "memory.trunk=0B", "--threads", "2")
    assert first["ids"] == again["ids"]


def test_the_process_of_the_tests_kept_its_instruction_set():
    """The environment variable reaches a fresh process: what the CI forces is what runs."""
    code = "from sluice import kernels; print(kernels.isa())"
    for isa in kernels.available_isas():
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "SLUICE_ISA": isa}
        )
        assert done.stdout.strip() == isa
