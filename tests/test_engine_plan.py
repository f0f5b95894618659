"""The memory plan over real headers: it adds up, uses what it is given, and what fits is held whole."""

from __future__ import annotations

import pytest
from helpers.whole_engine import settings_for

from sluice.daemon.engine.planning import plan_engine, read_model
from sluice.daemon.service.limits import MemoryLimit
from sluice.io.errors import BudgetError

GB = 10**9


@pytest.fixture(scope="module")
def files(tiny_checkpoint):
    return read_model(settings_for(tiny_checkpoint))


def limit(size):
    return MemoryLimit(size, "a test", ())


def test_a_model_that_fits_is_held_whole_and_streams_nothing(files, tiny_checkpoint):
    made = plan_engine(files, settings_for(tiny_checkpoint), limit(GB))
    assert made.trunk.streamed_bytes_per_pass == 0
    assert made.trunk.ring_bytes == 0
    assert made.cache.slots == len(files.config.moe_layers) * files.config.num_experts
    assert made.memory.short_bytes == 0


@pytest.mark.parametrize("extra", [*range(0, 2_000_000, 170_000), 3_000_000, 10_000_000])
def test_a_plan_fits_whatever_is_left_and_more_memory_never_reads_more(files, tiny_checkpoint, extra):
    settings = settings_for(tiny_checkpoint)
    least = plan_engine(files, settings, limit(1))
    size = least.memory.total + extra
    made = plan_engine(files, settings, limit(size))
    assert made.memory.total <= size
    more = plan_engine(files, settings, limit(size + 500_000))
    # What is chosen is whole units, so a little more memory may fall out a unit worse, never much.
    assert more.trunk.streamed_bytes_per_pass <= made.trunk.streamed_bytes_per_pass + made.trunk.slot_bytes


def test_what_does_not_fit_is_refused_with_the_bytes_it_is_short(files, tiny_checkpoint):
    made = plan_engine(files, settings_for(tiny_checkpoint), limit(10**6))
    with pytest.raises(BudgetError, match=f"{made.memory.total - 10**6} bytes short") as refused:
        made.memory.check()
    assert refused.value.short_bytes == made.memory.total - 10**6


def test_fixed_budgets_are_kept(files, tiny_checkpoint):
    settings = settings_for(tiny_checkpoint, "memory.trunk=300kB", "memory.expert_cache=100kB")
    made = plan_engine(files, settings, limit(GB))
    assert made.cache.cache_bytes <= 100_000
    assert made.trunk.pinned_bytes + made.trunk.ring_bytes <= 500_000
