"""`sluice install-service`: the unit, its socket, user and settings, written for this machine and this model.

Everything is rendered first, as text, by pure functions; then written atomically, or only printed (--dry-run).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.daemon.options import Json
from sluice.io.errors import BudgetError, PresetError, SluiceError

if TYPE_CHECKING:
    from sluice.daemon.service.settings import Settings

SETTINGS_FILE = "/etc/sluice/sluice.toml"
SOCKET_FILE = "/run/sluice/sluice.sock"
# What the kernel charges to the cgroup beside our own pages: page tables (0.2% of what is mapped), socket buffers,
# slab, and page cache of files read without O_DIRECT, which it drops itself before it kills.
CGROUP_HEADROOM_SHARE, CGROUP_HEADROOM_BYTES = 0.04, 128_000_000
STOP_MARGIN_SECONDS = 30  # after the drain: ending requests, writing what must be written
HOMES = ("/home", "/root", "/run/user")


def render(text: str, values: Mapping[str, str | Sequence[str]]) -> str:
    """A unit file with the directives in `values` replaced, each where it stands; several values repeat the line, none
    removes it. Raises KeyError when a directive is not in the text exactly once: the template has changed."""
    lines = text.splitlines()
    for directive, value in values.items():
        found = [index for index, line in enumerate(lines) if line.startswith(directive + "=")]
        if len(found) != 1:
            raise KeyError(f"{directive} appears {len(found)} times")
        chosen = [value] if isinstance(value, str) else value
        lines[found[0] : found[0] + 1] = [f"{directive}={one}" for one in chosen]
    return "\n".join(lines) + "\n"


def unit_path(path: Path | str) -> str:
    """A path as unit files want it: % doubled, spaces and quotes escaped. Raises PresetError on a line break."""
    text = str(path)
    if any(ord(char) < 32 for char in text):
        raise PresetError(f"{text!r}: a path with control characters cannot stand in a unit file")
    text = text.replace("\\", "\\\\").replace("%", "%%").replace('"', '\\"')
    return f'"{text}"' if " " in text or "'" in text else text


def memory_max(total: int) -> int:
    """MemoryMax for a budget of `total` bytes."""
    return total + int(total * CGROUP_HEADROOM_SHARE) + CGROUP_HEADROOM_BYTES


def below_home(path: Path) -> bool:
    """Whether ProtectHome=yes would hide `path`."""
    return any(path.is_relative_to(home) for home in HOMES)


@dataclass(frozen=True, slots=True)
class Installation:
    """What to install: the file's settings, where the program is, and what the model needs to be visible."""

    preset: str
    model: Path
    roots: tuple[Path, ...]
    program: Path
    settings: Settings


def settings_text(preset: str, model: Path, roots: Sequence[Path]) -> str:
    """The settings file of the service."""
    import json

    listed = ", ".join(json.dumps(str(root), ensure_ascii=False) for root in roots)
    return f"""# sluice's settings on this machine, over those of its preset (`sluice presets show {preset}`).
# `systemctl reload sluice` takes budgets, log level, allow lists, queue and drain; anything else needs a restart.
# `sluice config --config {SETTINGS_FILE}` shows what is in force and why, `sluice presets validate` checks this file.
preset = {json.dumps(preset)}

[model]
path = {json.dumps(str(model), ensure_ascii=False)}
roots = [{listed}]

[server]
socket = "{SOCKET_FILE}"
group = "sluice"
"""


def rendered(installation: Installation) -> dict[str, str]:
    """Every file to write, by its path from the root of the system."""
    settings, shipped = installation.settings, resources.files("sluice.systemd")
    visible = [installation.model, *installation.roots]
    total = settings.memory.total
    values: dict[str, str | Sequence[str]] = {
        "ExecStart": f"{unit_path(installation.program)} serve --config {SETTINGS_FILE}",
        "RequiresMountsFor": " ".join(unit_path(path) for path in [Path("/var/lib/sluice"), *visible]),
        "TimeoutStopSec": str(int(settings.server.drain) + STOP_MARGIN_SECONDS),
        "MemoryMax": str(memory_max(total)) if total is not None else [],
        "ReadOnlyPaths": [unit_path(path) for path in visible],
        # Read-only rather than hidden where model or program lie below a home folder.
        "ProtectHome": "read-only" if any(below_home(path) for path in [*visible, installation.program]) else "yes",
    }
    if settings.server.tcp is not None:
        values |= {"PrivateNetwork": "no", "IPAddressDeny": [], "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6"}
    return {
        "/etc/systemd/system/sluice.service": render((shipped / "sluice.service").read_text(encoding="utf-8"), values),
        "/etc/systemd/system/sluice.socket": (shipped / "sluice.socket").read_text(encoding="utf-8"),
        "/etc/sysusers.d/sluice.conf": (shipped / "sysusers.d" / "sluice.conf").read_text(encoding="utf-8"),
        "/etc/tmpfiles.d/sluice.conf": (shipped / "tmpfiles.d" / "sluice.conf").read_text(encoding="utf-8"),
        SETTINGS_FILE: settings_text(installation.preset, installation.model, installation.roots),
    }


def write_files(files: Mapping[str, str], root: Path) -> dict[str, str]:
    """Writes each file below `root`, whole or not at all, mode 0644; says per file "written", "unchanged", or "written,
    the old one kept as NAME.old" where an administrator may have put work into it. Raises PresetError."""
    done: dict[str, str] = {}
    for name, text in files.items():
        path = root / name.lstrip("/")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            old = path.read_text(encoding="utf-8") if path.is_file() else None
            if old == text:
                done[name] = "unchanged"
                continue
            fresh = path.with_name(f".{path.name}.new")
            fresh.write_text(text, encoding="utf-8")
            fresh.chmod(0o644)
            done[name] = "written"
            if old is not None and name == SETTINGS_FILE:
                os.replace(path, path.with_name(path.name + ".old"))
                done[name] = f"written, the old one kept as {path.name}.old"
            os.replace(fresh, path)
        except OSError as error:
            raise PresetError(f"{path}: cannot be written: {error.strerror}; run as root, or see --root") from None
    return done


def blocked_for(path: Path, uid: int, groups: frozenset[int]) -> Path | None:
    """The first folder or file on the way to `path` that the user may not pass or read, judged by its mode bits; None
    when all is open (or something does not exist, which others will say)."""
    resolved = path.resolve()
    for step in [*reversed(resolved.parents), resolved]:
        try:
            info = step.stat()
        except OSError:
            return None
        shift = 6 if info.st_uid == uid else 3 if info.st_gid in groups else 0
        need = 0o5 if step == resolved and step.is_dir() else 0o1 if step != resolved else 0o4
        if uid != 0 and (info.st_mode >> shift) & need != need:
            return step
    return None


def find_program() -> Path:
    """The `sluice` to start. Raises PresetError when it is not installed as a program."""
    for found in (str(Path(sys.executable).parent / "sluice"), shutil.which("sluice"), sys.argv[0]):
        if found and Path(found).name == "sluice" and os.access(found, os.X_OK):
            return Path(os.path.abspath(found))
    raise PresetError("the program `sluice` was not found beside this Python or in PATH: install sluice with pip first")


COMMANDS = (
    ("systemd-sysusers", "/etc/sysusers.d/sluice.conf"),
    ("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/sluice.conf"),
    ("systemctl", "daemon-reload"),
    ("systemctl", "enable", "--now", "sluice.socket"),
)


def run_commands() -> None:
    """Makes user and folders, and lets systemd listen. Raises PresetError with the command that failed."""
    for command in COMMANDS:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PresetError(f"{shlex.join(command)}: {error}") from None
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise PresetError(f"{shlex.join(command)}: exit {done.returncode}: {said}")


def _check_plan(settings: Settings) -> str:
    """One line about the memory plan, or raises BudgetError/StoreError as `sluice serve` would at start."""
    from sluice.daemon.engine.planning import plan_engine, read_model

    plan = plan_engine(read_model(settings), settings).memory
    plan.check("choose a smaller --preset, or --no-check to install anyway")
    return f"plan {plan.total / 1e9:.2f} GB, limit {plan.limit.size / 1e9:.2f} GB ({plan.limit.source})"


def install_service(
    model: Annotated[Path, typer.Option("--model", help="The checkpoint folder or packed store.")],
    preset: Annotated[str, typer.Option("--preset", help="A preset's name, 'auto', or a path.")] = "auto",
    roots: Annotated[
        list[Path] | None, typer.Option("--also", help="A further folder with shards; may be given several times.")
    ] = None,
    program: Annotated[Path | None, typer.Option("--program", help="The sluice to start (default: this one).")] = None,
    root: Annotated[Path, typer.Option("--root", help="Write below this folder and start nothing.")] = Path("/"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files and commands, change nothing.")] = False,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Make user and folders, enable the socket.")] = True,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Refuse a model or plan that would not start.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Install the daemon as a systemd service that starts when the first program asks it."""
    import json
    import tempfile

    from sluice.daemon.service.settings import load_settings

    model = Path(os.path.abspath(model))
    also = tuple(Path(os.path.abspath(one)) for one in roots or [])
    if "/" in preset or preset.endswith(".toml"):
        preset = os.path.abspath(preset)
    # Judged as the service will read it: the file over the preset, nothing of this shell's environment.
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as draft:
        draft.write(settings_text(preset, model, also))
        draft.flush()
        settings = load_settings(file=Path(draft.name), env={})
    found = program.absolute() if program is not None else find_program()
    files = rendered(Installation(preset, model, also, found, settings))
    notes: list[str] = []
    if check:
        try:
            notes.append(_check_plan(settings))
        except (BudgetError, SluiceError) as error:
            if not dry_run:
                raise
            notes.append(f"would be refused: {error}")
    commands = [shlex.join(command) for command in COMMANDS] if start and root == Path("/") else []
    if dry_run:
        if as_json:
            print(json.dumps({"files": files, "commands": commands, "notes": notes}, ensure_ascii=False))
            return
        for name, text in files.items():
            print(f"--- {name}\n{text}")
        print("\n".join(["--- then", *commands, *notes]))
        return
    done = write_files(files, root)
    if commands:
        run_commands()
        notes += _access_notes([model, *also, found])
    if as_json:
        print(json.dumps({"files": done, "commands": commands, "notes": notes}, ensure_ascii=False))
        return
    for name, what in done.items():
        print(f"{name}: {what}")
    print("\n".join(notes))
    if commands:
        print(
            "The first request starts the daemon. Let a person ask: usermod -aG sluice NAME (then log in anew).\n"
            f"Try it: sluice ask --socket {SOCKET_FILE} 'Hello'     Look: systemctl status sluice, sluice doctor"
        )


def _access_notes(paths: Sequence[Path]) -> list[str]:
    """Warnings about paths that the user sluice may not read."""
    import grp
    import pwd

    try:
        user = pwd.getpwnam("sluice")
    except KeyError:
        return ["warning: the user sluice does not exist; run systemd-sysusers"]
    groups = frozenset(os.getgrouplist(user.pw_name, user.pw_gid))
    notes = []
    for path in paths:
        blocked = blocked_for(path, user.pw_uid, groups)
        if blocked is not None:
            name = grp.getgrgid(user.pw_gid).gr_name
            notes.append(
                f"warning: the user sluice cannot pass {blocked}: chmod o+rx it, or chgrp {name} and chmod g+rx"
            )
    return notes
