"""Faults of drives, through the whole engine: right bytes or a typed error for whom it concerns, and nobody else."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from helpers.fake_reader import FakeReader, always, by_seed, times
from helpers.whole_engine import engine, fingerprint, start

from sluice.io.errors import StorageError
from sluice.tools.pack import pack

PROMPT = [5, 77, 310, 9, 42]
STREAMED = ("memory.trunk=0B", "memory.expert_cache=0B", "engine.max_sequences=3")


class Made:
    """A maker of fake readers that remembers the one it made."""

    def __init__(self, *faults, seed=None, delay=0.0):
        self.faults, self.seed, self.delay = faults, seed, delay
        self.reader: FakeReader

    def __call__(self, loop, capacity):
        self.reader = FakeReader(loop, capacity, seed=self.seed, delay=self.delay)
        self.reader.faults = list(self.faults)
        return self.reader


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    with engine(tiny_checkpoint) as running:
        return fingerprint(running, PROMPT)


@pytest.mark.parametrize("seed", range(4))
def test_short_reads_and_busy_drives_cost_time_and_no_bit(tiny_checkpoint, expected, seed):
    verdicts = [1, 511, 512, 4096, 8192, -errno.EAGAIN, -errno.EINTR]
    made = Made(by_seed(seed, 0.3, verdicts), seed=seed, delay=0.001)
    with engine(tiny_checkpoint, *STREAMED, make_reader=made) as running:
        assert fingerprint(running, PROMPT) == expected


def test_an_io_error_that_passes_is_retried(tiny_checkpoint, expected):
    made = Made()
    with engine(tiny_checkpoint, *STREAMED, make_reader=made) as running:
        made.reader.faults.append(times(1, -errno.EIO))
        assert fingerprint(running, PROMPT) == expected


class Routes:
    """Collects which experts each layer was asked for since the last look."""

    def __init__(self):
        self.seen: dict[int, set[int]] = {}

    def __call__(self, layer, ids):
        self.seen.setdefault(layer, set()).update(ids.reshape(-1).tolist())

    def of(self, running, prompt, layer):
        """The experts that `prompt` needs at `layer` for its first token."""
        self.seen.clear()
        start(running, prompt, 1).result()
        return self.seen[layer]


def test_a_broken_expert_ends_only_the_requests_that_need_it(tiny_checkpoint, expected):
    made, routes = Made(), Routes()
    with engine(tiny_checkpoint, *STREAMED, make_reader=made, on_route=routes) as running:
        layer = running.files.config.moe_layers[-1]
        mine = routes.of(running, [5], layer)
        other, broken = next(
            (token, min(needed - mine))
            for token in range(30, 400)
            if (needed := routes.of(running, [token], layer)) - mine
        )
        baseline = fingerprint(running, [5], 1)
        extent = running.files.store.expert(layer, broken).reads[0].extent
        fd = running.io._files[extent.file].fd
        made.reader.faults.append(
            always(-errno.EIO, lambda t: t.fd == fd and t.offset <= extent.offset < t.offset + len(t.buffer))
        )
        together = threading.Event()
        running.engine.between_passes(lambda: together.wait(10))  # so that both are in one pass
        healthy, sick = start(running, [5], 1), start(running, [other], 1)
        together.set()
        with pytest.raises(StorageError) as caught:
            sick.result()
        assert (caught.value.layer, caught.value.expert) == (layer, broken)
        assert caught.value.file
        assert caught.value.drive
        assert healthy.result()[1].logits_fingerprint == baseline
        # The drive comes back, and so does the request.
        made.reader.faults.clear()
        start(running, [other], 1).result()
        assert fingerprint(running, PROMPT) == expected


def test_wrong_bytes_of_a_packed_store_never_become_a_token(tiny_checkpoint, expected, tmp_path):
    """Every read of expert files comes back with one bit turned: the checksum sees it, once and again, and the request
    ends with a typed error; with one wrong read only, the retry gives the right bits."""
    pack(out=[tmp_path / "a", tmp_path / "b"], model=tiny_checkpoint, rates="2,1")
    made = Made()
    with engine(tmp_path / "a", *STREAMED, "io.verify=always", make_reader=made) as running:
        assert fingerprint(running, PROMPT) == expected
        made.reader.faults.append(times(1, "flip"))
        assert fingerprint(running, PROMPT) == expected
        experts = {file.fd for file in running.io._files if "experts" in file.path.name}
        made.reader.faults = [always("flip", lambda t: t.fd in experts)]
        with pytest.raises(StorageError) as caught:
            start(running, PROMPT, 3).result()
        assert caught.value.expert is not None
        made.reader.faults.clear()
        assert fingerprint(running, PROMPT) == expected


def test_a_drive_that_vanishes_ends_the_pass_with_a_typed_error_and_may_come_back(tiny_checkpoint, expected):
    made = Made()
    with engine(tiny_checkpoint, *STREAMED, make_reader=made) as running:
        assert fingerprint(running, PROMPT) == expected
        made.reader.faults.append(always(-errno.ENODEV))
        both = [start(running, PROMPT, 3), start(running, [1, 2], 3)]
        for pending in both:
            with pytest.raises(StorageError):
                pending.result()
        made.reader.faults.clear()
        assert fingerprint(running, PROMPT) == expected


def test_a_cancelled_request_gives_everything_back(tiny_checkpoint, expected):
    made = Made(seed=3, delay=0.002)
    with engine(tiny_checkpoint, *STREAMED, make_reader=made) as running:
        for _ in range(5):
            pending = start(running, PROMPT * 20, 50)
            pending.cancel()
        assert fingerprint(running, PROMPT) == expected
        assert running.engine.idle


def test_two_hundred_lives_leave_nothing_behind(tiny_checkpoint):
    """Descriptors, threads and memory are flat over loading, generating and unloading."""
    import psutil

    process = psutil.Process()

    def lives(count):
        for cycle in range(count):
            with engine(tiny_checkpoint, *STREAMED) as running:
                if cycle % 10 == 0:
                    fingerprint(running, PROMPT[:2], 1)

    lives(20)
    fds, threads, rss = process.num_fds(), threading.active_count(), process.memory_info().rss
    lives(180)
    assert process.num_fds() <= fds + 1
    assert threading.active_count() == threads
    assert process.memory_info().rss - rss < 30 * 2**20
    assert len(os.listdir("/proc/self/task")) <= threads + 8
