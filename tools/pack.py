"""`sluice pack`: lay a checkpoint out for reading, over one drive or several, with a checksum for every record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.daemon.options import Json
from sluice.io.errors import PresetError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sluice.io.packer import Progress

FORBIDDEN_SCALE = 255
"""An MXFP4 scale byte that stands for no number."""


def pack(
    out: Annotated[list[Path], typer.Option("--out", help="Output folder, one per drive; may be given several times.")],
    model: Annotated[Path | None, typer.Option("--model", help="Checkpoint folder to pack.")] = None,
    roots: Annotated[
        list[Path] | None, typer.Option("--root", help="Further folder with shards of the checkpoint.")
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option("--rates", help="Reading rates of the outputs' drives, as 3.2,1.6 (default: measured)."),
    ] = None,
    reclaim: Annotated[
        bool, typer.Option("--reclaim", help="Free the source's shards as they are packed. They are gone afterwards.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the packed store back and check every record (alone: only that).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Lay a checkpoint out for reading: the trunk in order of use, every expert spread over all drives.

    May be stopped and started again: it goes on where it was. With --verify and no --model, only checks.
    """
    if model is None and not verify:
        raise PresetError("nothing to do: give --model DIR to pack, or --verify to check what is packed")
    report: dict[str, object] = {"out": [str(path) for path in out]}
    if model is not None:
        report |= _pack(model, out, roots or [], rates, reclaim, as_json)
    if verify:
        report |= _verify(out, as_json)
    if as_json:
        print(json.dumps(report))


def _pack(
    model: Path, out: list[Path], roots: list[Path], rates: str | None, reclaim: bool, quiet: bool
) -> dict[str, object]:
    from sluice.daemon.model import names
    from sluice.daemon.model.config import read_config
    from sluice.io.packed import MANIFEST, PackedStore
    from sluice.io.packer import LAYOUT_FILE, pack
    from sluice.io.store import open_in_place

    config = read_config(model if model.is_dir() else model.parent)
    store = open_in_place(model, roots, reclaimed=True)
    if isinstance(store, PackedStore):
        raise StoreError(f"{model} is packed already")
    binding = names.bind(config, store.tensors)
    if binding.experts is not None:
        store.declare_experts(binding.experts)
    scales = [part for part in (binding.experts.parts if binding.experts else ()) if part.endswith("weight_scale")]
    going_on = (out[0] / LAYOUT_FILE).exists() or (out[0] / MANIFEST).exists()
    shares = _shares(rates, out, going_on, quiet)
    with _Bar("packing", quiet) as bar:
        made = pack(
            store,
            out,
            order=binding.order,
            vectors=binding.vectors,
            row_tables=binding.row_tables,
            shares=shares,
            reclaim=reclaim,
            refuse_bytes=dict.fromkeys(scales, FORBIDDEN_SCALE),
            progress=bar.update,
        )
    if not quiet:
        rate = made.written_bytes / made.seconds / 1e9 if made.seconds else 0.0
        print(
            f"packed {made.written_bytes / 1e9:.1f} GB in {made.seconds:.0f} s ({rate:.2f} GB/s), "
            f"{made.resumed_bytes / 1e9:.1f} GB were there already, {made.freed_bytes / 1e9:.1f} GB freed"
        )
        print(f"now: sluice serve --model {out[0]}")
    return {
        "written_bytes": made.written_bytes,
        "resumed_bytes": made.resumed_bytes,
        "freed_bytes": made.freed_bytes,
        "seconds": made.seconds,
        "shares": shares,
    }


def _shares(rates: str | None, out: list[Path], going_on: bool, quiet: bool) -> list[float] | None:
    """How the outputs share the reading. None: equally, or as a run that is gone on with began."""
    if rates is not None:
        try:
            shares = [float(rate) for rate in rates.split(",")]
        except ValueError:
            shares = []
        if len(shares) != len(out) or any(not 0 < share < 1e6 for share in shares):
            raise PresetError(f"--rates {rates}: give one positive number for each of the {len(out)} outputs")
        return shares
    if len(out) == 1 or going_on:
        return None
    from sluice.io.rates import folder_rates

    for folder in out:
        folder.mkdir(parents=True, exist_ok=True)
    # One decimal is as much as such a measurement is worth, and makes equal drives equal.
    shares = [max(0.1, round(rate, 1)) for rate in folder_rates(out)]
    if not quiet:
        print("measured: " + ", ".join(f"{folder} {share} GB/s" for folder, share in zip(out, shares, strict=True)))
    return shares


def _verify(out: list[Path], quiet: bool) -> dict[str, object]:
    from sluice.io.packed import open_packed
    from sluice.io.packer import verify

    store = open_packed(out[0], out)
    with _Bar("checking", quiet) as bar:
        nbytes = verify(store, bar.update)
    if not quiet:
        print(f"every checksum is right: {nbytes / 1e9:.1f} GB in {len(store.files)} files")
    return {"verified_bytes": nbytes}


class _Bar:
    """A progress bar with rate and time left; silent for programs."""

    def __init__(self, what: str, quiet: bool) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as RichProgress

        self._progress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            disable=quiet,
        )
        self._task = self._progress.add_task(what, total=None)
        self._resumed = False

    @property
    def update(self) -> Callable[[Progress], None]:
        def update(progress: Progress) -> None:
            if not self._resumed:
                # What an earlier run did must not count as this run's rate.
                self._resumed = True
                self._progress.reset(
                    self._task, total=progress.total_bytes, completed=progress.done_bytes - progress.this_run_bytes
                )
            self._progress.update(self._task, completed=progress.done_bytes)

        return update

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
