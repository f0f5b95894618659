"""`sluice presets ...` and `sluice config` as a person or a program meets them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sluice.daemon.service.settings import KEYS, load_settings, preset_names
from sluice.io.errors import PresetError
from sluice.tools.presets_cmd import config, presets_app

app = typer.Typer()
app.add_typer(presets_app, name="presets")
app.command("config")(config)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [n for n in os.environ if n.startswith("SLUICE_") and n != "SLUICE_SHARED"]:
        monkeypatch.delenv(name)


def out(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def test_list_names_every_preset_and_marks_the_one_for_this_machine() -> None:
    lines = out("presets", "list").splitlines()
    assert [line[2:].split()[0] for line in lines] == [*preset_names(), "auto"]
    assert sum(line.startswith("* ") for line in lines) == 1
    listed = json.loads(out("presets", "list", "--json"))
    assert listed["presets"][1]["total_bytes"] == 6_500_000_000
    assert listed["here"] in preset_names()


def test_show_prints_the_file_itself() -> None:
    assert tomllib.loads(out("presets", "show", "laptop"))["memory"]["total"] == "6.5GB"
    assert tomllib.loads(out("presets", "show", "auto"))["memory"]["trunk"] == "auto"
    with pytest.raises(PresetError, match="did you mean laptop"):
        out("presets", "show", "laptob")


def test_diff_shows_both_values_in_the_files_own_spelling() -> None:
    assert json.loads(out("presets", "diff", "ultra", "laptop", "--json"))["memory.total"] == {
        "ultra": "4GB",
        "laptop": "6.5GB",
    }
    assert any("4GB -> 6.5GB" in line for line in out("presets", "diff", "ultra", "laptop").splitlines())
    assert out("presets", "diff", "max", "max") == ""


def test_validate_tells_every_file_its_first_fault_and_exits_2(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('preset = "laptop"\n[memory]\nsessions = "1GB"\n')
    bad.write_text('[memory]\nsesions = "1GB"\n')
    assert out("presets", "validate", str(good), "max") == f"{good}: valid\nmax: valid\n"
    text = out("presets", "validate", str(good), str(bad), code=2)
    assert "did you mean memory.sessions?" in text
    assert json.loads(out("presets", "validate", str(good), "--json")) == {str(good): "valid"}


def test_config_says_where_every_value_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[engine]\ncontext = 100\n")
    monkeypatch.setenv("SLUICE_LOG_LEVEL", "debug")
    arguments = ["config", "--preset", "laptop", "--config", str(file), "--set", "memory.trunk=1GiB"]
    table = json.loads(out(*arguments, "--json"))
    assert set(table) == set(KEYS)
    assert table["memory.trunk"] == {"value": "1GiB", "source": "--set", "number": 2**30}
    assert table["engine.context"]["source"] == f"file {file}"
    assert table["log.level"] == {"value": "debug", "source": "environment SLUICE_LOG_LEVEL"}
    frozen = tmp_path / "frozen.toml"
    frozen.write_text(out(*arguments))
    assert load_settings(file=frozen, env={}) == load_settings(
        "laptop", file, {"SLUICE_LOG_LEVEL": "debug"}, ["memory.trunk=1GiB"]
    )


def test_config_can_show_only_what_was_changed() -> None:
    text = out("config", "--set", "engine.context=100", "--changed")
    assert "context = 100" in text
    assert "# default" not in text
    assert list(json.loads(out("config", "--set", "engine.context=100", "--changed", "--json"))) == ["engine.context"]
