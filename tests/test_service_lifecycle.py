"""Reload, drain and memory pressure with a hand-turned clock: what changes, what is kept, what is said."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.daemon.service.lifecycle import Hooks, Lifecycle, State, install_signals, merge_reloadable
from sluice.daemon.service.limits import GroupUsage
from sluice.daemon.service.notify import Notifier
from sluice.daemon.service.pressure import PressureWatch, Reading, Thresholds, bytes_to_free, parse_psi, read_pressure
from sluice.daemon.service.process import memory_nodes, raise_open_files, spread_memory
from sluice.daemon.service.settings import Settings, load_settings
from sluice.io.buffers import Arena
from sluice.io.errors import BudgetError, PresetError

MIB, GIB = 2**20, 2**30


class Spy(Notifier):
    def __init__(self) -> None:
        super().__init__(None)
        self.said: list[str] = []

    def send(self, **variables: str | int) -> bool:
        self.said.append(next(iter(variables)))
        self.said += [str(value) for name, value in variables.items() if name == "STATUS"]
        return True


class House:
    """A lifecycle with everything it is lent under the test's control."""

    def __init__(self, **overrides: Callable[..., object]) -> None:
        self.now = 0.0
        self.running = 0
        self.applied: list[Settings] = []
        self.ended: list[str] = []
        self.accepting = True
        self.spy = Spy()
        self.next_settings: Settings | Exception = settings()

        def load() -> Settings:
            if isinstance(self.next_settings, Exception):
                raise self.next_settings
            return self.next_settings

        def stop_accepting() -> None:
            self.accepting = False

        def end(message: str) -> None:
            self.ended.append(message)
            self.running = 0

        apply = overrides.get("apply", self.applied.append)
        hooks = Hooks(load, apply, stop_accepting, lambda: self.running, end)  # type: ignore[arg-type]
        self.life = Lifecycle(settings(), hooks, self.spy, lambda: self.now)


def settings(*overrides: str) -> Settings:
    return load_settings(env={}, overrides=["server.drain=30s", *overrides])


def test_loading_asks_for_patience_and_ready_is_said_once() -> None:
    house = House()
    house.life.progress("loading 10%")
    house.life.loaded("serving")
    house.life.loaded("again")
    house.life.progress("layer 3")
    assert house.spy.said == ["STATUS", "loading 10%", "EXTEND_TIMEOUT_USEC", "READY", "serving", "STATUS", "layer 3"]


def test_a_reload_takes_what_it_may_and_names_what_needs_a_restart() -> None:
    house = House()
    house.life.loaded()
    house.next_settings = settings("memory.expert_cache=1GiB", "log.level=debug", "engine.context=999")
    result = house.life.reload()
    assert set(result.applied) == {"memory.expert_cache", "log.level"}
    assert result.needs_restart == ("engine.context",)
    assert house.life.settings.memory.expert_cache == GIB
    assert house.life.settings.engine.context == 4096
    assert house.applied == [house.life.settings]
    assert house.life.settings.provenance["log.level"] == "--set"
    assert house.spy.said[-3:-1] == ["RELOADING", "READY"]
    assert "restart needed for engine.context" in house.spy.said[-1]


@pytest.mark.parametrize("error", [PresetError("memory.trunk: bad"), BudgetError("short", 3)])
def test_a_bad_file_keeps_the_old_values_and_says_so(error: Exception) -> None:
    house = House()
    house.life.loaded()
    before = house.life.settings
    house.next_settings = error
    result = house.life.reload()
    assert house.life.settings is before
    assert house.applied == []
    assert str(error) in str(result)
    assert "old settings kept" in house.spy.said[-1]
    assert house.life.state is State.READY


def test_settings_that_cannot_be_put_in_force_are_not_kept() -> None:
    def apply(new: Settings) -> None:
        raise BudgetError("trunk cannot shrink below its ring", 5)

    house = House(apply=apply)
    house.life.loaded()
    house.next_settings = settings("memory.trunk=1MiB")
    assert "below its ring" in house.life.reload().refused
    assert house.life.settings.memory.trunk is None


def test_nothing_is_applied_when_nothing_changed() -> None:
    house = House()
    assert house.life.reload().refused == "the daemon is loading"
    house.life.loaded()
    assert str(house.life.reload()) == "reload: nothing changed"
    assert house.applied == []


def test_an_idle_daemon_stops_at_once_and_a_loading_one_too() -> None:
    house = House()
    house.life.loaded()
    house.life.stop()
    assert house.life.state is State.STOPPED
    assert not house.accepting
    loading = House()
    loading.life.stop()
    loading.life.loaded()
    assert loading.life.state is State.STOPPED
    assert "READY" not in loading.spy.said


def test_running_requests_finish_within_the_drain() -> None:
    house = House()
    house.life.loaded()
    house.running = 2
    house.life.stop()
    assert house.life.state is State.DRAINING
    assert "draining 2 requests" in house.spy.said
    assert house.spy.said[-1] == "EXTEND_TIMEOUT_USEC"
    house.now = 29.9
    assert house.life.tick() is State.DRAINING
    house.running = 0
    assert house.life.tick() is State.STOPPED
    assert house.ended == []
    assert house.life.reload().refused == "the daemon is stopped"


def test_at_the_deadline_the_rest_is_ended_with_a_clear_message() -> None:
    house = House()
    house.life.loaded()
    house.running = 1
    house.life.stop()
    house.now = 30.0
    assert house.life.tick() is State.STOPPED
    assert house.ended == ["the server is shutting down; the request was ended before it was finished"]


def test_a_second_signal_ends_the_drain() -> None:
    house = House()
    house.life.loaded()
    house.running = 1
    house.life.stop()
    house.life.stop()
    assert house.life.state is State.STOPPED
    assert len(house.ended) == 1


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the loop itself must turn for its signal handlers to run
        await asyncio.sleep(0)


async def test_signals_reach_the_lifecycle() -> None:
    house = House()
    house.life.loaded()
    house.next_settings = settings("log.level=error")
    loop = asyncio.get_running_loop()
    install_signals(loop, house.life)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(5):
            await until(lambda: bool(house.applied))
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await until(lambda: house.life.state is State.STOPPED)
    finally:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def test_a_reload_that_waits_does_not_hold_the_loop_and_signals_meanwhile_lead_to_one_more() -> None:
    started, may_end = threading.Event(), threading.Event()
    calls: list[Settings] = []

    def apply(new: Settings) -> None:
        calls.append(new)
        started.set()
        assert may_end.wait(5)

    house = House(apply=apply)
    house.life.loaded()
    house.next_settings = settings("log.level=error")
    house.life.begin_reload()
    await asyncio.to_thread(started.wait, 5)
    house.next_settings = settings("log.level=debug")
    house.life.begin_reload()
    house.life.begin_reload()
    await asyncio.sleep(0)  # the loop turns while the first still waits
    assert len(calls) == 1
    may_end.set()
    async with asyncio.timeout(5):
        await until(lambda: house.life.settings.log.level == "debug")
    assert [new.log.level for new in calls] == ["error", "debug"]


def test_merging_equal_settings_changes_nothing() -> None:
    old = settings()
    assert merge_reloadable(old, settings()) == (old, (), ())


# --- Pressure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        ("some avg10=12.50 avg60=1.00 avg300=0.10 total=99\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", 12.5),
        ("full avg10=50.00", 0.0),
        ("some avg10=x", 0.0),
        ("", 0.0),
    ],
)
def test_psi_is_read_from_its_some_line(text: str, percent: float) -> None:
    assert parse_psi(text) == percent


def test_nothing_is_freed_while_there_is_room() -> None:
    reading = Reading(8 * GIB, 2 * GIB, 3.0, (GroupUsage("/g", 6 * GIB, 5 * GIB),))
    assert bytes_to_free(reading, GIB, Thresholds()) == (0, "")


def test_near_a_cgroup_limit_twice_the_margin_is_restored() -> None:
    limit = 4096 * MIB
    reading = Reading(8 * GIB, 4 * GIB, 0.0, (GroupUsage("/g", limit, limit - 10 * MIB),))
    want, why = bytes_to_free(reading, GIB, Thresholds())
    assert want == 2 * int(limit * 0.015) - 10 * MIB
    assert "/g" in why


def test_over_the_limit_and_a_small_cache_gives_what_it_has() -> None:
    reading = Reading(8 * GIB, 4 * GIB, 0.0, (GroupUsage("/g", GIB, 2 * GIB),))
    assert bytes_to_free(reading, 5 * MIB, Thresholds())[0] == 5 * MIB


def test_a_full_machine_or_stalled_tasks_shrink_the_cache() -> None:
    assert bytes_to_free(Reading(8 * GIB, 10 * MIB), GIB, Thresholds())[1].startswith("the machine")
    want, why = bytes_to_free(Reading(8 * GIB, GIB // 2, 40.0), GIB, Thresholds())
    assert (want, why) == (int(GIB * 0.1), "tasks wait for memory 40% of the time")
    # Stalls while half of the memory is free are somebody else's.
    assert bytes_to_free(Reading(8 * GIB, 4 * GIB, 40.0), GIB, Thresholds()) == (0, "")
    assert bytes_to_free(Reading(0, None, 0.0), GIB, Thresholds()) == (0, "")


def test_the_watch_shrinks_once_pauses_and_never_grows_back() -> None:
    now, cache = 0.0, 100 * MIB
    reading = Reading(8 * GIB, 100 * MIB)
    shrunk: list[int] = []

    def shrink(count: int) -> int:
        nonlocal cache
        cache -= count
        shrunk.append(count)
        return count

    watch = PressureWatch(shrink, lambda: cache, lambda: now, lambda: reading)
    assert watch.tick() == 100 * MIB
    assert watch.tick() == 0
    now = 6.0
    assert watch.tick() == 0  # nothing left: said once, not shrunk
    assert watch.tick() == 0
    reading = Reading(8 * GIB, 6 * GIB)
    now = 100.0
    assert watch.tick() == 0
    assert (shrunk, cache, watch.shrinks, watch.freed_bytes) == ([100 * MIB], 0, 1, 100 * MIB)


def test_pressure_is_read_from_machine_and_cgroup(tmp_path: Path) -> None:
    files = {
        "proc/pressure/memory": "some avg10=1.00 avg60=0 avg300=0 total=0",
        "proc/self/cgroup": "0::/a",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "sys/fs/cgroup/a/memory.pressure": "some avg10=7.25 avg60=0 avg300=0 total=0",
        "sys/fs/cgroup/a/memory.max": "1000",
        "sys/fs/cgroup/a/memory.current": "800",
        "sys/fs/cgroup/a/memory.stat": "inactive_file 100",
        "proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    reading = read_pressure(tmp_path)
    assert reading == Reading(102400, 51200, 7.25, (GroupUsage("/sys/fs/cgroup/a", 1000, 700),))


# --- The process --------------------------------------------------------------------------------------------------


def test_the_kernel_is_asked_softly(tmp_path: Path) -> None:
    assert memory_nodes(tmp_path) == (0,)
    assert spread_memory("auto", tmp_path) == "1 memory node, pages where first touched"
    assert raise_open_files(256) >= 256
    # In a child: locked memory would stay with the whole test run.
    code = "from sluice.daemon.service.process import lock_memory; print(lock_memory())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith(("locked", "not locked"))


def test_locked_memory_is_given_back_all_the_same() -> None:
    """Under the unit everything is locked (LimitMEMLOCK=infinity), and the kernel refuses to drop locked pages: a cache
    that shrank freed nothing."""
    size = 64 * 4096
    arena = Arena(size, "test")
    arena.view[:] = b"x" * size
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena.view))
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) != 0:
        pytest.skip(f"memory cannot be locked here: {os.strerror(ctypes.get_errno())}")
    arena.discard(0, size)
    assert bytes(arena.view) == bytes(size)
