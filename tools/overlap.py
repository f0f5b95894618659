"""How well reading and computing overlap while a model streams: `sluice bench --streamed`.

A token's time is compared with the drive's floor, the bytes it read over the rate a bare reader reaches on
the same files in the same run, measured before and after. Everything is per decoded token, medians.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.daemon.engine.assembly import RunningEngine
    from sluice.daemon.engine.planning import EnginePlan, ModelFiles
    from sluice.io.service import IoService

MIB = 2**20
RATE_SECONDS = 2.0
LAG_TICK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Overlap:
    """One streamed decode. Seconds and bytes are per token. flying_share: of the time, with a read in flight.
    busy_share: processor time of the process over time x threads. lag_p99_seconds: how late the I/O loop's timer
    came. planned_bytes: what the plan says a token reads, without luck in the cache. resident_bytes: the most that was
    seen at a token's end (of the whole process, which may have measured other things before)."""

    tokens: int
    seconds: float
    read_bytes: float
    planned_bytes: int
    floor_seconds: float
    sequential_gb_s: float
    random_gb_s: float
    flying_share: float
    busy_share: float
    lag_p99_seconds: float
    plan_bytes: int
    resident_bytes: int

    @property
    def over_floor(self) -> float:
        return self.seconds / self.floor_seconds if self.floor_seconds else 0.0


@dataclass(frozen=True, slots=True)
class _Moment:
    at: float
    read_bytes: int
    flying_seconds: float
    processor_seconds: float
    resident_bytes: int


def measure(model: str, overrides: Sequence[str], tokens: int, threads: int | None = None) -> Overlap:
    """Decode `tokens` + 1 tokens greedily under `overrides` ("section.key=value") and compare with the drives.

    Raises SluiceError: no model, a plan that does not fit, a drive that fails.
    """
    from sluice.daemon.engine.assembly import configure_compute, running_engine
    from sluice.daemon.engine.planning import plan_engine, read_model
    from sluice.daemon.engine.requests import GenerationRequest, Sampling
    from sluice.daemon.service.settings import load_settings
    from sluice.io.errors import SluiceError

    sets = [f"model.path={model}", *([f"compute.threads={threads}"] if threads else []), *overrides]
    settings = load_settings(overrides=sets)
    files = read_model(settings)
    plan = plan_engine(files, settings)
    configure_compute(settings)
    before = drive_rates(files, settings.io.backend)
    moments: list[_Moment] = []
    with running_engine(
        files, plan, settings, on_logits=lambda _number, _row: moments.append(_moment(running))
    ) as running:
        lag = LoopLag(running.io)
        events: queue.SimpleQueue[object] = queue.SimpleQueue()
        running.engine.submit(GenerationRequest((1,), tokens + 1, Sampling(temperature=0.0)), events.put)
        while (event := events.get()) is not None:
            if isinstance(event, SluiceError):
                raise event
        lags = lag.stop()
    after = drive_rates(files, settings.io.backend)
    return summed_up(moments, lags, files, plan, before, after, settings.compute.threads or _cores())


def summed_up(
    moments: Sequence[_Moment],
    lags: Sequence[float],
    files: ModelFiles,
    plan: EnginePlan,
    before: tuple[float, float],
    after: tuple[float, float],
    threads: int,
) -> Overlap:
    """The figures from what was seen: one moment per token, loop lags, and the drives' rates around it."""
    first, last, steps = moments[0], moments[-1], max(1, len(moments) - 1)
    elapsed = last.at - first.at
    sequential = statistics.mean((before[0], after[0]))
    scattered = statistics.mean((before[1], after[1]))
    config, store = files.config, files.store
    experts = len(config.moe_layers) * config.num_experts_per_token * store.expert_bytes
    row = store.tensors[files.binding.row_tables[0]].nbytes // config.vocab_size
    read = (last.read_bytes - first.read_bytes) / steps
    of_experts = max(0.0, min(read - plan.trunk.streamed_bytes_per_pass, experts))
    return Overlap(
        tokens=steps,
        seconds=statistics.median(b.at - a.at for a, b in itertools.pairwise(moments)),
        read_bytes=read,
        planned_bytes=plan.trunk.streamed_bytes_per_pass + experts + row,
        floor_seconds=_floor(read - of_experts, sequential) + _floor(of_experts, scattered),
        sequential_gb_s=sequential,
        random_gb_s=scattered,
        flying_share=(last.flying_seconds - first.flying_seconds) / elapsed,
        busy_share=(last.processor_seconds - first.processor_seconds) / (elapsed * threads),
        lag_p99_seconds=sorted(lags)[int(len(lags) * 0.99)] if lags else 0.0,
        plan_bytes=plan.memory.total,
        resident_bytes=max(moment.resident_bytes for moment in moments),
    )


def _floor(read_bytes: float, gb_s: float) -> float:
    """Seconds a drive of this rate needs; 0.0 where the rate is unknown."""
    return read_bytes / (gb_s * 1e9) if gb_s else 0.0


def drive_rates(files: ModelFiles, backend: str) -> tuple[float, float]:
    """GB/s of a bare reader on the model's own files, all drives together: 24 MiB in order, two in flight, and
    expert-sized reads at random places, four in flight. Drives are told apart by their folder. 0.0 for a model whose
    files are too small to measure with."""
    from sluice.io.rates import RateMeter

    largest: dict[str, tuple[int, Path]] = {}
    for file in files.store.files:
        largest[file.drive] = max(largest.get(file.drive, (0, file.path)), (file.nbytes, file.path))
    paths = [path for size, path in largest.values() if size > 64 * MIB]
    if not paths:
        return 0.0, 0.0
    everyone = list(range(len(paths)))
    with RateMeter(paths, backend, max_depth=4) as meter:
        sequential = meter.measure(everyone, "sequential", 2, 24 * MIB, RATE_SECONDS).gb_s
        expert = files.store.expert_slot_bytes or MIB
        return sequential, meter.measure(everyone, "random", 4, expert, RATE_SECONDS).gb_s


class LoopLag:
    """Watches how late a timer on the I/O loop comes, from now until `stop`."""

    def __init__(self, io: IoService) -> None:
        self._lags: list[float] = []
        self._stopped = False
        self._loop = io.event_loop
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    async def _watch(self) -> None:
        while not self._stopped:
            due = self._loop.time() + LAG_TICK_SECONDS
            await asyncio.sleep(LAG_TICK_SECONDS)
            self._lags.append(max(0.0, self._loop.time() - due))

    def stop(self) -> list[float]:
        """The lags so far, in seconds."""
        self._stopped = True
        self._watching.result(timeout=5.0)
        return self._lags


def _moment(running: RunningEngine) -> _Moment:
    stats = running.io.stats().scheduler
    from sluice.daemon.service.limits import resident_bytes

    now, used = time.perf_counter(), time.process_time()
    return _Moment(now, stats.read_bytes, stats.flying_seconds, used, resident_bytes())


def _cores() -> int:
    from sluice import kernels

    return len(kernels.physical_cores())
