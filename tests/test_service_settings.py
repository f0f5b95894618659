"""Settings: units, ranges, precedence, provenance; what is refused and how the refusal reads."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.daemon.service import units
from sluice.daemon.service.settings import (
    KEYS,
    SECTIONS,
    Settings,
    changes,
    load_settings,
    preset_names,
    toml_text,
)
from sluice.io.errors import PresetError


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("6.5GiB", 6979321856), ("4 GB", 4 * 10**9), ("512MiB", 2**29), ("1kib", 1024), ("1.5B", 1), ("17", 17)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "1e9", "1 PB", "1,5GB", "٣GB", "1GB1", "9" * 60])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"number|unit"):
        units.parse_size(text)


@given(st.integers(0, 2**50))
def test_a_size_shown_reads_back_exactly(size: int) -> None:
    assert units.parse_size(units.format_size(size)) == size


@given(st.sets(st.integers(0, 300), min_size=1, max_size=40))
def test_a_cpu_list_shown_reads_back_exactly(cpus: set[int]) -> None:
    assert units.parse_cpu_list(units.format_cpu_list(tuple(sorted(cpus)))) == tuple(sorted(cpus))


@pytest.mark.parametrize(("text", "seconds"), [("10s", 10), ("250ms", 0.25), ("5min", 300), ("1h", 3600), ("7", 7)])
def test_times_are_read_with_their_units(text: str, seconds: float) -> None:
    assert units.parse_seconds(text) == seconds
    assert units.parse_seconds(units.format_seconds(seconds)) == seconds


def test_defaults_alone_make_settings() -> None:
    settings = load_settings(env={})
    assert settings == Settings()
    assert set(settings.provenance.values()) == {"default"}
    assert set(settings.provenance) == set(KEYS)


def test_precedence_is_flag_environment_file_preset_default(tmp_path: Path) -> None:
    file = tmp_path / "sluice.toml"
    file.write_text("[engine]\ncontext = 100\nmax_sequences = 2\nprefill_chunk = 8\n")
    settings = load_settings(
        "laptop",
        file,
        {"SLUICE_ENGINE_CONTEXT": "200", "SLUICE_ENGINE_MAX_SEQUENCES": "3", "PATH": "/bin"},
        ["engine.context=300"],
    )
    assert (settings.engine.context, settings.engine.max_sequences, settings.engine.prefill_chunk) == (300, 3, 8)
    assert settings.memory.total == 6_500_000_000
    where = settings.provenance
    assert where["engine.context"] == "--set"
    assert where["engine.max_sequences"] == "environment SLUICE_ENGINE_MAX_SEQUENCES"
    assert where["engine.prefill_chunk"] == f"file {file}"
    assert where["memory.total"] == "preset laptop"
    assert load_settings(env={}, overrides=["log.level=debug"]).provenance["log.format"] == "default"


def test_a_preset_may_come_from_the_environment_or_the_file(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text('preset = "desktop"\n[log]\nlevel = "debug"\n')
    assert load_settings(file=file, env={}).memory.total == 26 * 10**9
    assert load_settings(env={"SLUICE_CONFIG": str(file)}).log.level == "debug"
    assert load_settings(file=file, env={"SLUICE_PRESET": "ultra"}).memory.total == 4 * 10**9
    assert load_settings("laptop", file, {"SLUICE_PRESET": "ultra"}).memory.total == 6_500_000_000


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("memory.trunk=lots", ["memory.trunk", "'lots'", "1PiB", "--set"]),
        ("memory.trnk=1GB", ["memory.trnk", "did you mean memory.trunk?"]),
        ("memry.trunk=1GB", ["memry.trunk", "did you mean memory.trunk?"]),
        ("zzz.q=1", ["zzz.q", "sections are"]),
        ("memory.total=1MiB", ["memory.total", "64MiB"]),
        ("engine.context=0", ["engine.context", "16 to 1048576"]),
        ("engine.context=1.5", ["engine.context", "whole number"]),
        ("engine.lookahead=9", ["engine.lookahead", "1 to 8"]),
        ("server.mode=0444", ["server.mode", "0600"]),
        ("server.tcp=127.0.0.1", ["server.tcp", "HOST:PORT"]),
        ("server.tcp=127.0.0.1:80", ["server.tcp", "token_file"]),
        ("server.socket=here.sock", ["server.socket", "absolute"]),
        ("server.socket=/" + "x" * 120, ["server.socket", "107"]),
        ("server.allow_users=a,a", ["server.allow_users", "twice"]),
        ("compute.cpus=3-1", ["compute.cpus", "backwards"]),
        ("model.latent_norm_eps=nan", ["model.latent_norm_eps", "1e-12"]),
        ("io.direct=maybe", ["io.direct", "auto, on or off"]),
        ("memory.pin_head=2", ["memory.pin_head", "true or false"]),
        ("nonsense", ["section.key=value"]),
    ],
)
def test_a_refusal_names_key_value_range_and_source(override: str, words: list[str]) -> None:
    with pytest.raises(PresetError) as refusal:
        load_settings(env={}, overrides=[override])
    for word in words:
        assert word in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[memory]\ntotl = 1", ["memory.totl", "memory.total"]),
        ("[memmory]\ntotal = 1", ["[memmory]", "memory"]),
        ("memory = 3", ["[memory]"]),
        ("total = 3", ["total: no such setting"]),
        ("[engine]\ncontext = true", ["engine.context", "True"]),
        ("[engine]\ncontext = 4096.0", ["engine.context"]),
        ("[memory]\ntotal = 1.5", ["memory.total"]),
        ("[server]\nmode = 432", ["server.mode", "quotes"]),
        ("[memory]\npin_head = 1", ["memory.pin_head"]),
        ("[model]\nroots = '/a'", ["model.roots", "list"]),
        ("[memory]\ntotal = '1GB'\ntrunk = '2GB'", ["memory.trunk", "memory.total"]),
        ("[memory", ["not TOML", "end of document"]),
        ("preset = 3", ["preset"]),
        ("preset = 'laptob'", ["laptob", "did you mean laptop?"]),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(PresetError) as refusal:
        load_settings(file=file, env={})
    for word in words:
        assert word in str(refusal.value)


def test_a_missing_huge_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PresetError, match="No such file"):
        load_settings(file=tmp_path / "none.toml", env={})
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * 300_000)
    with pytest.raises(PresetError, match="larger than"):
        load_settings(file=huge, env={})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(PresetError, match="UTF-8"):
        load_settings(file=binary, env={})


def test_the_environment_is_checked_but_foreign_variables_are_left_alone() -> None:
    with pytest.raises(PresetError, match=r"SLUICE_MEMORY_TRNK.*SLUICE_MEMORY_TRUNK"):
        load_settings(env={"SLUICE_MEMORY_TRNK": "1GB"})
    with pytest.raises(PresetError, match="environment SLUICE_ENGINE_CONTEXT"):
        load_settings(env={"SLUICE_ENGINE_CONTEXT": "many"})
    assert load_settings(env={"SLUICE_ISA": "scalar", "SLUICE_SHARED": "/x", "SLUICE_DEBUG_NOTES": "1"}) == Settings()


def test_words_for_nothing_mean_none() -> None:
    settings = load_settings(
        env={}, overrides=["memory.total=auto", "compute.cpus=auto", "model.path=", "server.tcp=off", "model.roots="]
    )
    assert settings == Settings()
    for text in ("/a, /b,c", '["/a", "/b,c"]'):
        roots = load_settings(env={}, overrides=[f"model.roots={text}"]).model.roots
        assert roots == ((Path("/a"), Path("/b"), Path("c")) if text[0] == "/" else (Path("/a"), Path("/b,c")))
    with pytest.raises(PresetError, match="not a list"):
        load_settings(env={}, overrides=['model.roots=["/a"'])
    settings = load_settings(env={}, overrides=["compute.cpus=0-2,5", "engine.lookahead=3", "server.mode=600"])
    assert (settings.compute.cpus, settings.engine.lookahead, settings.server.mode) == ((0, 1, 2, 5), 3, 0o600)


@pytest.mark.parametrize("preset", preset_names())
def test_effective_settings_shown_as_toml_read_back_the_same(tmp_path: Path, preset: str) -> None:
    settings = load_settings(preset, env={}, overrides=["server.allow_users=ann,bob", 'model.name=a "b" \\ c'])
    file = tmp_path / "effective.toml"
    file.write_text(toml_text(settings))
    assert load_settings(file=file, env={}) == settings
    assert f"# preset {preset}" in toml_text(settings)


def test_changes_lists_what_differs() -> None:
    old, new = load_settings(env={}), load_settings(env={}, overrides=["memory.trunk=1GiB"])
    assert changes(old, new) == {"memory.trunk": (None, 2**30)}
    assert changes(old, old) == {}


def test_every_key_can_be_set_by_environment_from_its_shown_default() -> None:
    shown = Settings().shown()
    env = {}
    for path in KEYS:
        section, name = path.split(".")
        value = shown[section][name]
        env[f"SLUICE_{section}_{name}".upper()] = (
            ",".join(value)
            if isinstance(value, list)
            else str(value).lower()
            if isinstance(value, bool)
            else str(value)
        )
    assert load_settings(env=env) == Settings()
    assert os.environ  # the real environment was not consulted for it
    assert set(SECTIONS) == set(tomllib.loads(toml_text(Settings())))
