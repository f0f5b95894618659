"""install-service: what is written, what is refused, and that systemd itself finds no fault with the units."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sluice.daemon.service.settings import load_settings
from sluice.io.errors import PresetError, StoreError
from sluice.tools.install_service import (
    SETTINGS_FILE,
    Installation,
    below_home,
    blocked_for,
    install_service,
    memory_max,
    render,
    rendered,
    unit_path,
    write_files,
)

app = typer.Typer()
app.command()(install_service)


def installation(model: str = "/srv/k3", *overrides: str, program: str = "/opt/sluice/bin/sluice") -> Installation:
    settings = load_settings("laptop", env={}, overrides=list(overrides))
    return Installation("laptop", Path(model), (Path("/mnt/two"),), Path(program), settings)


def directives(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_carries_what_the_preset_and_the_model_say() -> None:
    files = rendered(installation())
    unit = directives(files["/etc/systemd/system/sluice.service"])
    assert unit["ExecStart"] == [f"/opt/sluice/bin/sluice serve --config {SETTINGS_FILE}"]
    assert unit["MemoryMax"] == [str(memory_max(6_500_000_000))]
    assert 6_500_000_000 < memory_max(6_500_000_000) < 7_000_000_000
    assert unit["MemorySwapMax"] == ["0"]
    assert unit["TimeoutStopSec"] == ["120"]
    assert unit["ReadOnlyPaths"] == ["/srv/k3", "/mnt/two"]
    assert unit["RequiresMountsFor"] == ["/var/lib/sluice /srv/k3 /mnt/two"]
    assert unit["ProtectHome"] == ["yes"]
    assert unit["PrivateNetwork"] == ["yes"]
    assert unit["RestartPreventExitStatus"] == ["2 3 4 6"]
    settings = tomllib.loads(files[SETTINGS_FILE])
    assert settings["preset"] == "laptop"
    assert settings["model"] == {"path": "/srv/k3", "roots": ["/mnt/two"]}


def test_a_model_or_program_below_home_is_readable_and_tcp_opens_the_network() -> None:
    unit = directives(rendered(installation("/home/ann/k3"))["/etc/systemd/system/sluice.service"])
    assert unit["ProtectHome"] == ["read-only"]
    unit = directives(rendered(installation(program="/root/venv/bin/sluice"))["/etc/systemd/system/sluice.service"])
    assert unit["ProtectHome"] == ["read-only"]
    overrides = ("server.tcp=127.0.0.1:8080", "server.token_file=/etc/sluice/token")
    unit = directives(rendered(installation("/srv/k3", *overrides))["/etc/systemd/system/sluice.service"])
    assert (unit["PrivateNetwork"], unit["RestrictAddressFamilies"]) == (["no"], ["AF_UNIX AF_INET AF_INET6"])
    assert below_home(Path("/home/x/y"))
    assert not below_home(Path("/homes/x"))


def test_an_automatic_total_needs_no_number_in_the_unit() -> None:
    unit = rendered(installation("/srv/k3", "memory.total=auto"))["/etc/systemd/system/sluice.service"]
    assert "MemoryMax" not in directives(unit)


@pytest.mark.parametrize(
    ("path", "text"), [("/a/b", "/a/b"), ("/a b", '"/a b"'), ("/50%", "/50%%"), ('/q"', '/q\\"'), ("/b\\", "/b\\\\")]
)
def test_paths_are_escaped_for_unit_files(path: str, text: str) -> None:
    assert unit_path(path) == text


def test_a_line_break_cannot_smuggle_a_directive() -> None:
    with pytest.raises(PresetError, match="control characters"):
        rendered(installation("/srv/k3\nExecStartPre=/bin/evil"))


def test_a_template_that_lost_a_directive_is_noticed() -> None:
    with pytest.raises(KeyError, match="ExecStart appears 0 times"):
        render("[Service]\n", {"ExecStart": "x"})


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian package systemd)")
def test_systemd_finds_no_fault_with_the_units(tmp_path: Path) -> None:
    program = Path(shutil.which("true") or "/bin/true")
    files = rendered(installation(str(tmp_path), program=str(program)))
    for name in ("sluice.service", "sluice.socket"):
        (tmp_path / name).write_text(files[f"/etc/systemd/system/{name}"])
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "sluice.service"), str(tmp_path / "sluice.socket")],
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in (checked.stdout + checked.stderr).splitlines() if "sluice" in line]
    assert (checked.returncode, ours) == (0, [])


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def test_a_dry_run_prints_everything_and_changes_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    arguments = ["--model", str(model), "--preset", "laptop", "--program", "/usr/bin/sluice", "--dry-run"]
    text = run(*arguments)
    assert "--- /etc/systemd/system/sluice.socket" in text
    assert "systemctl enable --now sluice.socket" in text
    assert "would be refused" in text  # an empty folder is no model, and a dry run says so instead of failing
    assert SETTINGS_FILE in json.loads(run(*arguments, "--json"))["files"]
    assert list(tmp_path.iterdir()) == [model]


def test_files_are_written_below_a_root_and_old_settings_kept(tmp_path: Path) -> None:
    arguments = ["--model", "/srv/k3", "--program", "/usr/bin/sluice", "--root", str(tmp_path), "--no-check"]
    run(*arguments, "--preset", "laptop")
    settings = tmp_path / SETTINGS_FILE.lstrip("/")
    assert settings.stat().st_mode & 0o777 == 0o644
    assert load_settings(file=settings, env={}).memory.total == 6_500_000_000
    assert f"{SETTINGS_FILE}: unchanged" in run(*arguments, "--preset", "laptop")
    settings.write_text("# mine\n")
    assert "kept as sluice.toml.old" in run(*arguments, "--preset", "ultra")
    assert settings.with_name("sluice.toml.old").read_text() == "# mine\n"
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert written == [
        "etc/sluice/sluice.toml",
        "etc/sluice/sluice.toml.old",
        "etc/systemd/system/sluice.service",
        "etc/systemd/system/sluice.socket",
        "etc/sysusers.d/sluice.conf",
        "etc/tmpfiles.d/sluice.conf",
    ]


def test_what_would_not_start_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        run("--model", str(tmp_path), "--program", "/usr/bin/sluice", "--root", str(tmp_path / "root"))
    with pytest.raises(PresetError, match="did you mean laptop"):
        run("--model", str(tmp_path), "--preset", "laptopp", "--dry-run", "--no-check")
    assert not (tmp_path / "root").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("a file in the way")
    with pytest.raises(PresetError, match="cannot be written"):
        write_files({"/etc/x": "y"}, tmp_path)


def test_the_step_that_bars_the_service_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "closed" / "model"
    model.mkdir(parents=True)
    owner = tmp_path.stat()
    stranger = owner.st_uid + 1
    for folder in (tmp_path, model):
        folder.chmod(0o755)
    (tmp_path / "closed").chmod(0o750)
    # pytest's own folders are private too: judge only below tmp_path.
    monkeypatch.setattr(Path, "parents", property(lambda path: [tmp_path / "closed", tmp_path]))
    assert blocked_for(model, stranger, frozenset()) == tmp_path / "closed"
    assert blocked_for(model, stranger, frozenset({owner.st_gid})) is None
    assert blocked_for(model, owner.st_uid, frozenset()) is None
    (tmp_path / "closed").chmod(0o711)
    assert blocked_for(model, stranger, frozenset()) is None
    model.chmod(0o711)
    assert blocked_for(model, stranger, frozenset()) == model
    assert blocked_for(tmp_path / "none", stranger, frozenset()) is None
