"""Before anything is opened or allocated: which model, what it needs, and how memory is shared out.

Reads configuration, index and headers, checks each against the others, and decides every budget. Leaves
opening drives and starting threads to `assembly`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from sluice.daemon.model import names
from sluice.daemon.model.config import ModelConfig, read_config
from sluice.daemon.model.scratch import activation_bytes
from sluice.daemon.model.state import state_bytes
from sluice.daemon.service.autosize import nearest_preset, split_spare
from sluice.daemon.service.limits import MemoryLimit, memory_limit
from sluice.daemon.service.plan import MemoryPlan
from sluice.daemon.service.settings import Settings
from sluice.io.errors import PresetError, StoreError
from sluice.io.experts import CachePlan, plan_cache, read_counts
from sluice.io.store import Store
from sluice.io.trunk import TrunkPlan, plan_trunk

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
