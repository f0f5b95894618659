"""`sluice diskbench`: what the drives under some paths really read, as this program reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.daemon.options import Json
from sluice.io.errors import PresetError

if TYPE_CHECKING:
    from sluice.io.rates import Rate

EXPERT_BYTES = 17_551_360
"""One expert of K3 with its slack, the unit of random reads."""
TRUNK_BYTES = 24 * 2**20
DEPTHS = (1, 2, 4, 8, 16, 32)


def diskbench(
    paths: Annotated[list[Path], typer.Argument(help="Folders or files, one per drive.")],
    seconds: Annotated[float, typer.Option("--seconds", help="Length of each measurement.", min=0.05)] = 1.0,
    size: Annotated[str, typer.Option("--size", help="Scratch file in a folder without a large file.")] = "2GiB",
    backend: Annotated[str, typer.Option("--backend", help="auto, uring or threads.")] = "auto",
    expert_bytes: Annotated[
        int, typer.Option("--expert-bytes", help="Bytes of one random read.", min=4096)
    ] = EXPERT_BYTES,
    as_json: Json = False,
) -> None:
    """Random reads of expert size at depths 1 to 32 and sequential trunk reads, each drive alone and all together."""
    from sluice.daemon.service.units import parse_size
    from sluice.io.rates import RateMeter, believable, link_gb_s, scratch_file

    if backend not in ("auto", "uring", "threads"):
        raise PresetError(f"--backend {backend}: must be auto, uring or threads")
    try:
        scratch_bytes = parse_size(size)
    except ValueError as error:
        raise PresetError(f"--size {size}: {error}") from error
    least = max(expert_bytes, TRUNK_BYTES) * 2
    if scratch_bytes < least:
        raise PresetError(f"--size {size}: at least {least} bytes are needed for reads of this size")
    files: list[Path] = []
    scratch: list[Path] = []
    rates: list[Rate] = []
    try:
        for path in paths:
            if not path.exists():
                raise PresetError(f"{path}: no such file or folder")
            large = _largest(path, least)
            if large is None:
                large = scratch_file(path, scratch_bytes)
                scratch.append(large)
            files.append(large)
        with RateMeter(files, backend, DEPTHS[-1]) as meter:
            groups = [[i] for i in range(len(files))] + ([list(range(len(files)))] if len(files) > 1 else [])
            for group in groups:
                rates += [meter.measure(group, "random", depth, expert_bytes, seconds) for depth in DEPTHS]
                rates += [meter.measure(group, "sequential", depth, TRUNK_BYTES, seconds) for depth in (1, 2, 4)]
            reason = meter.reason
    finally:
        for path in scratch:
            os.unlink(path)
    doubts = [believable(rate) for rate in rates]
    if as_json:
        print(
            json.dumps(
                {
                    "paths": [str(path) for path in paths],
                    "links_gb_s": [link_gb_s(path) for path in paths],
                    "note": reason,
                    "rates": [
                        {
                            "paths": rate.paths,
                            "kind": rate.kind,
                            "depth": rate.depth,
                            "transfer_bytes": rate.transfer_bytes,
                            "gb_s": round(rate.gb_s, 3),
                            "backend": rate.backend,
                            "direct": rate.direct,
                            "doubt": doubt,
                        }
                        for rate, doubt in zip(rates, doubts, strict=True)
                    ],
                }
            )
        )
        return
    _show(paths, files, rates, doubts, reason)


def _largest(path: Path, least: int) -> Path | None:
    """The file to be read: the path itself, or the largest weight file of a folder, if it is large enough."""
    if path.is_file():
        if path.stat().st_size < least:
            raise PresetError(f"{path}: {path.stat().st_size} bytes, at least {least} are needed")
        return path
    candidates = [p for pattern in ("*.safetensors", "*.bin") for p in path.glob(pattern) if p.is_file()]
    # A sparse file answers zeros without reading anything.
    solid = [p for p in candidates if p.stat().st_size >= least and p.stat().st_blocks * 512 >= p.stat().st_size * 0.9]
    return max(solid, key=lambda p: p.stat().st_size, default=None)


def _show(paths: list[Path], files: list[Path], rates: list[Rate], doubts: list[str], reason: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if reason:
        console.print(reason)
    table = Table(title="GB/s (10^9 bytes)")
    for heading in ("drive", "read", "depth", "GB/s", ""):
        table.add_column(heading, justify="right" if heading in ("depth", "GB/s") else "left")
    name = {str(file): str(path) for path, file in zip(paths, files, strict=True)}
    for rate, doubt in zip(rates, doubts, strict=True):
        where = "all together" if len(rate.paths) > 1 else name[rate.paths[0]]
        what = f"{rate.kind} {rate.transfer_bytes / 2**20:.1f} MiB, {rate.backend}"
        table.add_row(where, what, str(rate.depth), f"{rate.gb_s:.2f}", doubt)
    console.print(table)
    best = [max(r.gb_s for r in rates if r.paths == (str(file),)) for file in files]
    if len(files) > 1:
        console.print("for sluice pack: --rates " + ",".join(f"{rate:.1f}" for rate in best))
