"""`sluice status`: what the daemon is doing, once or as a live view. Shows what is there, and asks for nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from sluice.daemon.client.options import TokenFile, Url, connect
from sluice.daemon.options import Json, Socket
from sluice.io.errors import SluiceError


def status(
    watch: Annotated[
        bool | None,
        typer.Option("--watch/--once", help="Live view until Ctrl-C, or one look (live on a terminal)."),
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.2, max=60.0)] = 1.0,
    socket: Socket = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show queue, requests, drives, caches, and memory against its plan."""
    from rich.live import Live

    from sluice.daemon.client.status_view import print_status, view

    if watch is None:
        watch = sys.stdout.isatty() and not as_json
    with connect(socket, url, token_file) as connection:
        snapshot = connection.get("/v1/status")
        if as_json:
            print(json.dumps(snapshot, ensure_ascii=False), flush=True)
            while watch:
                time.sleep(interval)
                print(json.dumps(connection.get("/v1/status"), ensure_ascii=False), flush=True)
            return
        if not watch:
            print_status(snapshot, sys.stdout)
            return
        with Live(view(snapshot, None, 0.0), screen=sys.stdout.isatty(), auto_refresh=False) as live:
            taken = time.monotonic()
            while True:
                time.sleep(interval)
                before, snapshot = snapshot, _look(connection, snapshot)
                now = time.monotonic()
                live.update(view(snapshot, before, now - taken), refresh=True)
                taken = now


def _look(connection: Any, last: Any) -> Any:
    """The next snapshot; while a daemon restarts, the last one with the trouble in place of its state."""
    try:
        return connection.get("/v1/status")
    except SluiceError as error:
        return {**last, "state": str(error)} if isinstance(last, Mapping) else {"state": str(error)}
