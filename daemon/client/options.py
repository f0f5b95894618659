"""Flags the client commands share, and what they add up to: a connection and a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.daemon.client.connection import Connection
from sluice.daemon.options import settings_from
from sluice.io.errors import PresetError

Url = Annotated[str | None, typer.Option("--url", help="Reach the daemon by TCP instead: http://host:port.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the bearer token for --url.")]
Thinking = Annotated[bool | None, typer.Option("--thinking/--no-thinking", help="Whether the model thinks first.")]
Effort = Annotated[str | None, typer.Option(help="How hard it thinks: low, high or max.")]
Show = Annotated[bool, typer.Option("--show-thinking/--hide-thinking", help="Thinking dim, or not at all.")]
System = Annotated[str | None, typer.Option(help="A system message.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate, thinking included.", min=1)]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", min=0.0, max=2.0)]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0)]
Seed = Annotated[int | None, typer.Option(help="Same seed, same tokens.")]


def connect(socket: Path | None, url: str | None, token_file: Path | None) -> Connection:
    """A connection to the daemon that the flags, or else the settings, name. Raises PresetError."""
    if url is None:
        if token_file is not None:
            raise PresetError("--token-file belongs to --url; the Unix socket asks for no token")
        return Connection(settings_from(socket=socket).server.socket)
    if socket is not None:
        raise PresetError("give either --socket or --url")
    if not url.startswith(("http://", "https://")):
        raise PresetError(f"--url {url!r} must begin with http:// or https://")
    token = None
    if token_file is not None:
        try:
            token = token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise PresetError(f"--token-file {token_file}: {error}") from None
        if not token.isascii() or not token.isprintable():
            raise PresetError(f"--token-file {token_file}: the token must be one line of printable ASCII")
    return Connection(None, url=url.rstrip("/"), token=token)


def request_fields(
    *,
    thinking: bool | None = None,
    effort: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """The request's fields that flags set; what nobody set stays the daemon's own default."""
    fields: dict[str, Any] = {
        "max_completion_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "reasoning_effort": effort,
        "thinking": thinking,
    }
    return {key: value for key, value in fields.items() if value is not None}
