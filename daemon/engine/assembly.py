"""Putting a running engine together: settings and a model folder in, an `Engine` out.

Owns the order of things: read the headers, plan the memory, check the plan, and only then open drives,
allocate and start threads. Nothing here computes or reads weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from sluice import kernels
from sluice.daemon.engine.engine import Engine, EngineLimits
from sluice.daemon.engine.lookahead import LookaheadControl, Observed
from sluice.daemon.model import names
from sluice.daemon.model.config import ModelConfig, read_config
from sluice.daemon.model.graph import Network
from sluice.daemon.model.scratch import activation_bytes
from sluice.daemon.model.state import state_bytes
from sluice.daemon.service.autosize import nearest_preset, split_spare
from sluice.daemon.service.limits import MemoryLimit, memory_limit, resident_bytes
from sluice.daemon.service.plan import MemoryPlan
from sluice.daemon.service.settings import MemorySettings, Settings
from sluice.io.errors import PresetError, StorageError, StoreError
from sluice.io.experts import CachePlan, plan_cache, read_counts
from sluice.io.service import IoService, IoSettings, MakeReader
from sluice.io.store import Store
from sluice.io.trunk import TrunkPlan, plan_trunk

log = logging.getLogger("sluice.engine")

INTERPRETER_BYTES = 140_000_000
"""Python, numpy, the HTTP stack and its requests in flight: 85 MB at rest, measured with a small model."""
BYTES_PER_VOCABULARY_ENTRY = 900
"""Tokenizer and grammar vocabulary: 68 + 70 MB for K3's 163,840 entries, measured."""
BYTES_PER_TENSOR = 100
"""What the catalogue keeps of a tensor, and what reading the headers needs for a moment, per tensor."""
ROUTERS_SHARE = 4
"""Routers are pinned for foresight when the trunk's budget is at least this many times their size."""
EMBEDDED_MODELS = {"mini": "data/mini"}
"""Models that come with the package, by the name `--model` takes."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A checkpoint whose headers were read and checked, and how its tensors are used."""

    path: Path
    name: str
    config: ModelConfig
    store: Store
    binding: names.Binding

    @property
    def folder(self) -> Path:
        """Where config.json and the tokenizer lie."""
        return self.path if self.path.is_dir() else self.path.parent


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Everything that is allocated, decided: the plan of memory and what its terms mean for trunk and cache."""

    memory: MemoryPlan
    trunk: TrunkPlan
    cache: CachePlan


def resolve_model(settings: Settings) -> Path:
    """The folder `model.path` means: one that comes with the package ("mini"), or a path. Raises PresetError."""
    path = settings.model.path
    if path is None:
        raise PresetError("no model: give --model DIR, set model.path, or use --model mini")
    if str(path) in EMBEDDED_MODELS and not path.exists():
        embedded = Path(str(resources.files("sluice.tools") / EMBEDDED_MODELS[str(path)]))
        if not embedded.exists():
            raise StoreError(f"the model {path} does not come with this installation; give a folder instead")
        return embedded
    return path


def check_supported(settings: Settings) -> None:
    """Every option is honoured or refused: raises PresetError for what this version does not do."""
    refused = {
        "engine.trunk": settings.engine.trunk != "exact",
        "sessions.dir": settings.sessions.dir is not None,
    }
    for key, is_set in refused.items():
        if is_set:
            raise PresetError(f"{key} = {settings.get(key)!s}: not available in this version; leave it at its default")


def read_model(settings: Settings) -> ModelFiles:
    """Read configuration, index and headers, and check each against the others. Reads no weights.

    Raises PresetError (no model given, or an option that cannot be honoured) or StoreError (anything missing,
    contradictory or damaged).
    """
    check_supported(settings)
    path = resolve_model(settings)
    folder = path if path.is_dir() else path.parent
    config = read_config(folder, latent_norm_eps=_stated_eps(settings))
    store = Store.open(path, settings.model.roots)
    binding = names.bind(config, store.tensors, pin_routers=False)
    if binding.experts is not None:
        store.declare_experts(binding.experts)
    packed = binding.experts is not None and "w1.weight_packed" in binding.experts.parts
    if settings.compute.activations == "int8" and not packed:
        raise PresetError('compute.activations = "int8" works on MXFP4 experts, which this checkpoint has not')
    return ModelFiles(path, settings.model.name or folder.resolve().name, config, store, binding)


def _stated_eps(settings: Settings) -> float | None:
    """None unless somebody set it: the checkpoint's own rms_norm_eps is the default."""
    stated = settings.provenance.get("model.latent_norm_eps", "default") != "default"
    return settings.model.latent_norm_eps if stated else None


def system_fingerprint(files: ModelFiles, settings: Settings) -> str:
    """What makes logits comparable: the checkpoint's identity and every option that changes numerics."""
    numerics = f"{files.store.identity}|eps={files.config.latent_norm_eps!r}|{settings.compute.activations}"
    return "fp_" + xxhash.xxh3_64_hexdigest(f"{numerics}|{settings.engine.trunk}".encode())


def plan_engine(files: ModelFiles, settings: Settings, limit: MemoryLimit | None = None) -> EnginePlan:
    """Decide all memory from headers and settings. The plan may exceed its limit: `memory.check()` says so.

    Trunk and cache that are left open ("auto") get what the limit leaves after everything else: the trunk
    first, since a pinned gigabyte of it saves a gigabyte of reading per token, then the cache.
    """
    limit = limit or memory_limit(settings.memory.total)
    memory = settings.memory
    fixed = _fixed_terms(files.config, settings, len(files.store.tensors))
    everything = _plan_trunk(files, settings, 2**62)
    least = _plan_trunk(files, settings, 0)
    no_cache = plan_cache(files.store, 0)
    all_experts = plan_cache(files.store, 2**62)
    spare = limit.size - sum(fixed.values()) - no_cache.transient_bytes - everything.vectors_bytes
    trunk_bytes, cache_bytes = split_spare(
        spare,
        everything.total_bytes - everything.vectors_bytes,
        least.total_bytes - least.vectors_bytes,
        all_experts.cache_bytes,
        0,
    )
    if memory.expert_cache is not None:
        cache_bytes = memory.expert_cache
        trunk_bytes = max(least.total_bytes - least.vectors_bytes, spare - cache_bytes)
    if memory.trunk is not None:
        trunk_bytes = memory.trunk
        if memory.expert_cache is None:
            cache_bytes = max(0, spare - max(trunk_bytes, least.total_bytes - least.vectors_bytes))
    # All of it needs less than its units one by one, which is how a part of it is chosen: they share pages.
    all_fits = trunk_bytes >= everything.total_bytes - everything.vectors_bytes
    trunk = everything if all_fits else _fit_trunk(files, settings, trunk_bytes)
    cache = plan_cache(files.store, cache_bytes, counts=known_counts(files, settings))
    terms = fixed | {
        "vectors": trunk.vectors_bytes,
        "pinned trunk": trunk.pinned_bytes,
        "ring": trunk.ring_bytes + trunk.rows_bytes,
        "expert cache": cache.cache_bytes,
        "experts in flight": cache.transient_bytes,
    }
    return EnginePlan(MemoryPlan(terms, limit), trunk, cache)


def _fixed_terms(config: ModelConfig, settings: Settings, tensors: int) -> dict[str, int]:
    """What is held whatever the budget: no weights yet."""
    engine = settings.engine
    rows = engine.max_sequences + engine.prefill_chunk
    return {
        "interpreter": INTERPRETER_BYTES + BYTES_PER_VOCABULARY_ENTRY * config.vocab_size + BYTES_PER_TENSOR * tensors,
        "state": engine.max_sequences * state_bytes(config, engine.context),
        "activations": activation_bytes(config, rows, engine.max_sequences),
        "sessions": settings.memory.sessions,
    }


def check_least(settings: Settings) -> None:
    """Refuse at once what no plan could fit: K3's half a million tensors take seconds to read, its configuration none.

    Raises BudgetError with the bytes it is short at the least and a preset to try, or what `read_model` raises.
    """
    path = resolve_model(settings)
    config = read_config(path if path.is_dir() else path.parent, latent_norm_eps=_stated_eps(settings))

    def least(other: Settings) -> MemoryPlan:
        return MemoryPlan(_fixed_terms(config, other, 0), memory_limit(other.memory.total))

    if least(settings).short_bytes:
        least(settings).check(
            try_preset(nearest_preset(lambda preset: not least(preset).short_bytes, memory_limit().size))
        )


def try_preset(name: str | None) -> str:
    """The remedy of a plan that does not fit."""
    return f"--preset {name} fits as it stands" if name else "no preset fits: more memory, or a shorter engine.context"


def known_counts(files: ModelFiles, settings: Settings) -> NDArray[np.int64] | None:
    """(layers, experts) uses that earlier runs counted; None where there are none. Raises StoreError for a file that is
    not counts of this checkpoint."""
    path = settings.memory.expert_counts
    return read_counts(path, files.store) if path is not None and path.exists() else None


def nearest_fitting_preset(files: ModelFiles) -> str | None:
    """The largest fixed preset under which this model's plan fits this machine; None when none does."""

    def fits(preset: Settings) -> bool:
        return plan_engine(files, preset).memory.short_bytes == 0

    return nearest_preset(fits, memory_limit().size)


def _plan_trunk(files: ModelFiles, settings: Settings, budget: int) -> TrunkPlan:
    """The trunk's plan for `budget` bytes of pinned matrices. Routers are pinned first where they are a small part of
    it: foreseeing experts asks the next layers' routers, which a streamed matrix could not answer."""
    binding, memory = files.binding, settings.memory
    routers = {use.name for use in binding.order if use.name.endswith(names.ROUTER + ".weight")}
    router_bytes = sum(files.store.tensors[name].nbytes for name in routers)
    foresees = settings.engine.lookahead != "off" and budget >= ROUTERS_SHARE * router_bytes
    first = (routers if foresees else set()) | ({binding.order[-1].name} if memory.pin_head else set())
    order = [dataclasses.replace(use, pin=True) if use.name in first else use for use in binding.order]
    return plan_trunk(
        order,
        files.store,
        budget,
        vectors=binding.vectors,
        row_tables=binding.row_tables,
        pinned_tables=binding.row_tables if memory.pin_embedding else (),
    )


def _fit_trunk(files: ModelFiles, settings: Settings, budget: int) -> TrunkPlan:
    """A plan whose pinned part, ring and row buffers together stay within `budget` bytes, or the smallest there is.

    The ring's size follows from what streams, which follows from what is pinned: each try takes off what the last
    one was over.
    """
    pinned = budget
    for _ in range(8):
        plan = _plan_trunk(files, settings, pinned)
        over = plan.pinned_bytes + plan.ring_bytes + plan.rows_bytes - budget
        if over <= 0:
            return plan
        pinned = max(0, pinned - over)
    return _plan_trunk(files, settings, 0)


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
        kernels.configure_threads(compute.threads or len(kernels.physical_cores()), compute.cpus)
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
    io_settings = IoSettings(
        backend=settings.io.backend, direct=settings.io.direct, depth=settings.io.depth, verify=settings.io.verify
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
            yield RunningEngine(engine, files, plan, io, system_fingerprint(files, settings))
