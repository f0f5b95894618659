"""Putting a running engine together from a checked model and a plan: drives, weights, network, thread.

Owns the order in which things are opened and given back, and the counters of what was opened. What is
planned is `planning`'s; nothing here computes.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice import kernels
from sluice.daemon.engine.engine import Engine, EngineLimits
from sluice.daemon.engine.lookahead import LookaheadControl, Observed
from sluice.daemon.engine.placement import slot_placer, start_threads, stay_near, this_machine
from sluice.daemon.engine.planning import EnginePlan, ModelFiles, plan_engine, system_fingerprint
from sluice.daemon.model.graph import Network
from sluice.daemon.service.limits import resident_bytes
from sluice.daemon.service.settings import MemorySettings, Settings
from sluice.io.errors import PresetError, StorageError
from sluice.io.service import IoService, IoSettings, MakeReader


def engine_limits(settings: Settings) -> EngineLimits:
    """The engine's bounds as the settings have them."""
    engine = settings.engine
    return EngineLimits(
        context=engine.context,
        max_sequences=engine.max_sequences,
        max_queue=settings.server.max_queue,
        prefill_chunk=engine.prefill_chunk,
        session_bytes=settings.memory.sessions,
    )


def configure_compute(settings: Settings) -> None:
    """Choose instruction set and threads for this process. Raises PresetError for what the CPU lacks."""
    compute = settings.compute
    try:
        if compute.isa != "auto":
            kernels.set_isa(compute.isa)
        start_threads(this_machine(compute))
    except ValueError as error:
        raise PresetError(f"compute: {error}") from None


@dataclass(slots=True)
class RunningEngine:
    """An engine at work, with what it was made of."""

    engine: Engine
    files: ModelFiles
    plan: EnginePlan
    io: IoService
    fingerprint: str

    def memory_and_io(self) -> dict[str, object]:
        """The parts of the status that the engine's thread does not know."""
        memory = self.plan.memory
        return {
            "memory": {
                "plan": dict(memory.terms),
                "plan_bytes": memory.total,
                "limit_bytes": memory.limit.size,
                "rss_bytes": resident_bytes(),
                "peak_rss_bytes": peak_rss_bytes(),
            },
            "io": io_status(self.io),
        }

    def progress(self) -> int:
        """A number that moves while the pipeline does: layers computed and reads ended."""
        return self.engine.layers_done + self.io.stats().scheduler.reads

    def cache_bytes(self) -> int:
        """The expert cache's present budget."""
        return self.io.experts.plan.cache_bytes

    def shrink_cache(self, by_bytes: int) -> int:
        """Lower the expert cache's budget for good; returns the bytes freed."""
        return self.io.experts.shrink(by_bytes)

    def apply(self, settings: Settings) -> None:
        """Put the reloadable budgets in force, between two passes. Raises BudgetError when they do not fit, with the
        old ones kept; blocks until it is done."""
        plan = plan_engine(self.files, settings)
        plan.memory.check()
        self.engine.limit_queue(settings.server.max_queue)
        self.engine.between_passes(lambda: self.io.resize(plan.trunk, plan.cache)).result()
        self.plan = plan


def peak_rss_bytes() -> int:
    """The most this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def io_status(io: IoService) -> dict[str, object]:
    """Counters of the storage side, JSON-ready; see `EngineClient.status` for the keys every engine has."""
    stats = io.stats()
    reads, experts, trunk = stats.scheduler, stats.experts, stats.trunk
    return {
        "backend": stats.backend,
        "notes": list(stats.notes),
        "bytes": reads.read_bytes,
        "reads": reads.reads,
        "flying_seconds": reads.flying_seconds,
        "elapsed_seconds": reads.elapsed_seconds,
        "drives": [
            {
                "name": drive.drive,
                "reads": drive.reads,
                "bytes": drive.read_bytes,
                "busy_seconds": drive.busy_seconds,
                "in_flight": drive.flying,
                "queued": drive.queued,
                "retries": drive.retries,
                "failures": drive.failures,
            }
            for drive in reads.drives
        ],
        "trunk": {
            "pinned_bytes": trunk.pinned_bytes,
            "ring_bytes": trunk.ring_bytes,
            "streamed_bytes": trunk.block_bytes,
            "wait_seconds": trunk.wait_seconds,
        },
        "experts": {
            "hits": experts.hits,
            "shared": experts.shared,
            "misses": experts.misses,
            "bytes_read": (experts.misses + experts.guesses) * experts.slot_bytes,
            "cached": experts.kept,
            "slots": experts.slots,
            "capacity_bytes": experts.slots * experts.slot_bytes,
            "wait_seconds": experts.wait_seconds,
        },
        "prediction": {
            "hinted": experts.guesses,
            "used": experts.guesses_used,
            "dropped": experts.hints_dropped,
            "wasted_bytes": experts.wasted_bytes,
        },
    }


REBALANCE_PASSES = 256
"""How often the layers' shares of the cache follow what the counts say by now."""
PRELOAD_LOOK_SECONDS = 0.2


@contextlib.contextmanager
def learned_experts(io: IoService, memory: MemorySettings) -> Iterator[None]:
    """Take up the counts of earlier runs, pin the most used experts where that is asked for, and save the counts at
    the end. Raises StoreError for counts of another checkpoint."""
    path = memory.expert_counts
    if path is not None and path.exists():
        io.experts.load_counts(path)
        if memory.pinned_experts:
            io.experts.preload(io.experts.most_used(memory.pinned_experts), pin=True)
    try:
        yield
    finally:
        if path is not None:
            io.experts.save_counts(path)


def preload(io: IoService, files: ModelFiles, progress: Callable[[int, int], None]) -> None:
    """Fill the expert cache, every drive at its rate; returns when it is full. progress(bytes done, bytes in all)."""
    layers, experts = files.config.moe_layers, range(files.config.num_experts)
    before = io.stats().scheduler
    begun = io.experts.preload((layer, expert) for expert in experts for layer in layers)
    now = before
    while now is before or any(drive.flying + drive.queued for drive in now.drives):
        now = io.stats().scheduler
        progress(now.read_bytes - before.read_bytes, begun * files.store.expert_bytes)
        time.sleep(PRELOAD_LOOK_SECONDS)
    failed = sum(d.failures for d in now.drives) - sum(d.failures for d in before.drives)
    if failed:
        raise StorageError(f"{failed} reads failed while experts were preloaded; `sluice doctor` looks at the drives")


def observed(io: IoService) -> Observed:
    """What the adaptive look-ahead goes by."""
    stats = io.stats()
    reads, experts = stats.scheduler, stats.experts
    return Observed(reads.flying_seconds, reads.elapsed_seconds, experts.guesses, experts.guesses_used)


@contextlib.contextmanager
def running_engine(
    files: ModelFiles,
    plan: EnginePlan,
    settings: Settings,
    *,
    on_logits: Callable[[int, NDArray[np.float32]], None] | None = None,
    on_route: Callable[[int, NDArray[np.int32]], None] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    make_reader: MakeReader | None = None,
) -> Iterator[RunningEngine]:
    """Open drives, allocate as planned, start the engine; stop and give back everything on exit.

    progress(bytes done, bytes in all) is told while weights load; make_reader replaces the reader (tests).
    On the engine's thread, on_logits(sequence number, row) sees every logit row that chose a token and
    on_route(layer, ids (T, k)) every routing decision.
    Raises BudgetError, StoreError or StorageError.
    """
    plan.memory.check()
    threads = this_machine(settings.compute)
    experts = files.store.naming
    io_settings = IoSettings(
        backend=settings.io.backend,
        direct=settings.io.direct,
        depth=settings.io.depth,
        verify=settings.io.verify,
        new_slot=slot_placer(threads, files.store.expert(experts.layers[0], 0)) if experts else None,
    )
    with (
        IoService.open(
            files.store, plan.trunk, plan.cache, io_settings, progress=progress, make_reader=make_reader
        ) as io,
        learned_experts(io, settings.memory),
    ):
        if settings.memory.preload:
            preload(io, files, progress)
        network = Network(
            files.config,
            io.trunk,
            io.experts,
            prefix=files.binding.prefix,
            on_route=on_route,
            int8_activations=settings.compute.activations == "int8",
        )
        lookahead = LookaheadControl(settings.engine.lookahead, lambda: observed(io))

        passes = itertools.count(1)

        def before_pass(rows: int) -> None:
            network.lookahead = lookahead.before_pass(rows)
            if next(passes) % REBALANCE_PASSES == 0:
                io.experts.rebalance()

        with Engine(network, engine_limits(settings), on_logits=on_logits, before_pass=before_pass) as engine:
            engine.between_passes(lambda: stay_near(threads)).result()
            yield RunningEngine(engine, files, plan, io, system_fingerprint(files, settings))
