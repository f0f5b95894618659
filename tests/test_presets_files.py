"""The presets that come with sluice: valid, complete, explained, and true to their size."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from sluice.daemon.service.settings import KEYS, load_settings, preset_names, preset_text

GB = 10**9


def test_the_seven_presets_are_there_in_order_of_size() -> None:
    names = ["ultra", "laptop", "desktop", "workstation", "server", "max", "resident"]
    assert preset_names() == names
    totals = [load_settings(name, env={}).memory.total or 0 for name in names]
    assert totals == sorted(totals)
    assert totals[0] <= 4 * GB
    assert totals[1] <= 6.5 * GB
    assert all(
        entry.name.endswith(".toml") for entry in resources.files("sluice.presets").iterdir() if entry.name[0] != "_"
    )


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_names_every_key_and_explains_it(name: str) -> None:
    text, _ = preset_text(name)
    tables = tomllib.loads(text)
    assert {f"{section}.{key}" for section, table in tables.items() for key in table} == set(KEYS)
    assert text.startswith("# ")
    for line in text.splitlines():
        if "=" in line and not line.startswith("#") and not line.startswith("allow_groups"):
            assert " # " in line, f"{name}: no reason beside: {line}"


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_fits_its_state_for_kimi_k3(name: str) -> None:
    """State of K3 (specification section 4) for all sequences, snapshots and pinned head stay below the total."""
    settings = load_settings(name, env={})
    state = settings.engine.max_sequences * (464_633_856 + 55_296 * settings.engine.context)
    bank = settings.engine.prefill_chunk * 229_376
    head = 2_348_810_240 * (settings.memory.pin_head + settings.memory.pin_embedding)
    working = 16 * 17_551_360 + 400 * 10**6  # one layer's chosen experts, interpreter and ring
    fixed = state + bank + head + settings.memory.sessions + working
    assert settings.memory.total is not None
    assert fixed < settings.memory.total * (0.8 if name != "resident" else 1)
    if name in ("server", "max"):
        assert fixed + 108_811_877_376 < settings.memory.total
    if name == "resident":
        assert fixed + 108_811_877_376 + 1_446_456_066_048 < settings.memory.total
