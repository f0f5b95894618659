"""`sluice plan`: what would be held in memory, what a token would read, and what one more gigabyte would buy.

Reads headers only; allocates nothing and opens no drive for weights. Exits with 3 when the plan does not fit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.daemon.options import Config, Json, Model, Preset, Sets, settings_from

if TYPE_CHECKING:
    from sluice.daemon.engine.planning import EnginePlan, ModelFiles
    from sluice.daemon.service.settings import Settings

REUSE_OF_PREVIOUS_TOKEN = 0.295
"""Share of a layer's experts that the token before used too, measured on K3 text (specification 5.4)."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class TokenReads:
    """Bytes one decoded token reads from the drives, with nothing in the cache by luck."""

    trunk: int
    experts: int
    hit_share: float

    @property
    def total(self) -> float:
        return self.trunk + self.experts * (1.0 - self.hit_share)


def plan(
    model: Model = None,
    preset: Preset = None,
    config: Config = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Show the memory plan of a model under a preset, and what each further gigabyte would buy."""
    from sluice.daemon.engine.planning import plan_engine, read_model

    settings = settings_from(model, preset, config, sets)
    files = read_model(settings)
    made = plan_engine(files, settings)
    reads = token_reads(files, made)
    gain = next_gigabyte(files, settings, made)
    if as_json:
        print(
            json.dumps(
                made.memory.as_json()
                | {
                    "model": files.name,
                    "read_per_token_bytes": round(reads.total),
                    "trunk_read_per_token_bytes": reads.trunk,
                    "expert_bytes_per_token": reads.experts,
                    "expected_expert_hits": reads.hit_share,
                    "next_gib_saves_bytes_per_token": gain,
                }
            )
        )
    else:
        show(files, made, reads, gain)
    if made.memory.short_bytes:  # looking for a preset that fits costs seconds on a large model
        made.memory.check(remedy(files))


def token_reads(files: ModelFiles, made: EnginePlan) -> TokenReads:
    """What one decoded token reads under a plan: streamed trunk, and experts the cache is not expected to hold.

    The expectation is the measured reuse of the previous token's experts times the share of a token's set that
    the cache holds, up to that reuse; a cache of many sets does better, which the trace tools can tell.
    """
    config = files.config
    chosen = config.num_experts_per_token
    per_token = len(config.moe_layers) * chosen * files.store.expert_bytes
    slots_per_layer = made.cache.slots / max(1, len(config.moe_layers))
    if slots_per_layer >= config.num_experts:
        return TokenReads(made.trunk.streamed_bytes_per_pass, per_token, 1.0)
    return TokenReads(
        made.trunk.streamed_bytes_per_pass, per_token, REUSE_OF_PREVIOUS_TOKEN * min(1.0, slots_per_layer / chosen)
    )


def next_gigabyte(files: ModelFiles, settings: Settings, made: EnginePlan) -> int:
    """Bytes per token that one GiB more of memory would save from reading."""
    from sluice.daemon.engine.planning import plan_engine
    from sluice.daemon.service.limits import MemoryLimit

    limit = made.memory.limit
    larger = MemoryLimit(limit.size + GIB, f"{limit.source} + 1 GiB", limit.considered)
    more = plan_engine(files, settings, larger)
    return round(token_reads(files, made).total - token_reads(files, more).total)


def remedy(files: ModelFiles) -> str:
    """What to do about a plan that does not fit: the nearest preset that does, or fewer tokens of context."""
    from sluice.daemon.engine.planning import nearest_fitting_preset

    preset = nearest_fitting_preset(files)
    if preset is not None:
        return f"--preset {preset} fits"
    return "lower engine.context or engine.prefill_chunk, or give more memory"


def show(files: ModelFiles, made: EnginePlan, reads: TokenReads, gain: int) -> None:
    """The table for people."""
    from rich.console import Console
    from rich.table import Table

    memory = made.memory
    table = Table(title=f"memory plan of {files.name}", title_justify="left")
    table.add_column("term")
    table.add_column("GB", justify="right")
    for name, size in memory.terms.items():
        table.add_row(name, f"{size / 1e9:.3f}")
    table.add_section()
    table.add_row("total", f"{memory.total / 1e9:.3f}")
    table.add_row(f"limit ({memory.limit.source})", f"{memory.limit.size / 1e9:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"a decoded token reads {reads.total / 1e9:.2f} GB: {reads.trunk / 1e9:.2f} GB of trunk, "
        f"{reads.experts / 1e9:.2f} GB of experts of which {reads.hit_share:.0%} are expected in the cache"
    )
    if gain > 0:
        console.print(f"one GiB more of memory saves {gain / 1e9:.2f} GB of reading per token")
    else:
        console.print("more memory would save no reading: everything is held, or the settings fix the budgets")
