"""Options that several commands share, and the settings they add up to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sluice.daemon.service.settings import Settings

Model = Annotated[
    str | None, typer.Option("--model", help="Checkpoint folder, packed store, or 'mini' for the one that comes along.")
]
Preset = Annotated[str | None, typer.Option("--preset", help="A preset's name, 'auto', or a path to a .toml file.")]
Config = Annotated[Path | None, typer.Option("--config", help="A TOML file of settings.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="section.key=value; may be given several times.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Compute threads (default: physical cores).", min=1)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
Socket = Annotated[Path | None, typer.Option("--socket", help="The Unix socket.", readable=False)]


def settings_from(
    model: str | None = None,
    preset: str | None = None,
    config: Path | None = None,
    sets: list[str] | None = None,
    threads: int | None = None,
    socket: Path | None = None,
) -> Settings:
    """Flags become overrides of their keys; `--set` wins over them. Raises PresetError."""
    from sluice.daemon.service.settings import load_settings

    flags = {
        "model.path": model,
        "compute.threads": threads,
        "server.socket": None if socket is None else socket.absolute(),
    }
    overrides = [f"{key}={value}" for key, value in flags.items() if value is not None]
    return load_settings(preset, config, overrides=[*overrides, *(sets or [])])
