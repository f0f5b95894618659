"""`sluice trace`: what a routing trace says about caches.

Reads what `sluice run --trace FILE` writes, and traces of other engines; prints hit rate against cache size for five
policies, reuse distances and how well the next choice can be guessed. The arithmetic is in `routing.py`. (The module
is not called trace.py: scripts of this folder put it first on their path, and the standard library has a `trace`.)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.daemon.options import Json

if TYPE_CHECKING:
    from sluice.tools.routing import CurvePoint, Trace

POLICIES = {
    "lru": "LRU",
    "layer_lru": "LRU a layer",
    "lfu": "LFU",
    "pinned_lru": "pinned + LRU",
    "optimal": "optimal",
}


def trace(
    file: Annotated[
        Path, typer.Argument(help="Trace: .jsonl (sluice run --trace), or .bin of int32 (layer, expert) pairs.")
    ],
    experts: Annotated[int | None, typer.Option(help="Experts a layer has; default: the highest id seen + 1.")] = None,
    capacity: Annotated[
        list[int] | None, typer.Option(help="Cache sizes in experts (repeatable); default: 14 sizes.")
    ] = None,
    top_k: Annotated[int, typer.Option(help="Experts a token takes; needed for .bin only.")] = 16,
    part: Annotated[
        str, typer.Option(help="For .bin: 'last' step alone, token by token, or 'all' steps as recorded.")
    ] = "last",
    expert_bytes: Annotated[int, typer.Option(help="Bytes of one expert: adds sizes to the table.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write the hit-rate curves to this SVG file.")] = None,
    as_json: Json = False,
) -> None:
    """Hit rate against cache size, reuse distances and predictability of a routing trace."""
    import json

    from sluice.io.errors import PresetError
    from sluice.tools import routing

    if part not in ("last", "all"):
        raise PresetError(f"--part {part}: it is 'last' or 'all'")
    if top_k < 1 or (capacity and min(capacity) < 0) or expert_bytes < 0:
        raise PresetError("--top-k must be at least 1; --capacity and --expert-bytes not negative")
    found = routing.read_trace(file, top_k=top_k, part=part)
    count = found.highest_id + 1 if experts is None else experts
    if count <= found.highest_id:
        raise PresetError(f"--experts {count}: the trace names expert {found.highest_id}")
    sizes = sorted(set(capacity)) if capacity else routing.capacities(found)
    report = study(found, count, sizes)
    if plot is not None:
        try:
            plot.write_text(chart(found, report["curve"]))
        except OSError as error:
            raise PresetError(f"--plot {plot}: {error.strerror or error}") from error
    if as_json:
        report["curve"] = [_point(p) for p in report["curve"]]
        print(json.dumps(report, ensure_ascii=False))
    else:
        print(table(report, expert_bytes))


def study(found: Trace, experts: int, sizes: list[int]) -> dict[str, Any]:
    """All findings as plain values, the curve as CurvePoints."""
    from dataclasses import asdict

    from sluice.tools import routing

    keys = found.stream()
    distances = routing.reuse_distances(keys)
    return {
        "trace": found.name,
        "tokens": found.tokens,
        "passes": len(found.passes),
        "layers": found.layers,
        "experts": experts,
        "top_k": found.top_k,
        "requests": int(keys.size),
        "distinct": len(set(keys.tolist())),
        "curve": routing.hit_curve(found, experts, sizes),
        "reuse_distance": routing.distance_histogram(distances),
        "recall": asdict(routing.predictability(found, experts)),
    }


def _point(p: CurvePoint) -> dict[str, float]:
    from dataclasses import asdict

    return {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(p).items()}


def table(report: dict[str, Any], expert_bytes: int) -> str:
    """The report for people."""
    out = [
        f"{report['trace']}: {report['tokens']} tokens in {report['passes']} passes, {report['layers']} layers of "
        f"{report['experts']} experts, top {report['top_k']}; {report['requests']} requests for "
        f"{report['distinct']} experts",
        "",
        "hit rate    cache"
        + ("       size" if expert_bytes else "")
        + "   share"
        + "".join(f"{name:>14}" for name in POLICIES.values()),
    ]
    for p in report["curve"]:
        size = f"{p.capacity * expert_bytes / 1e9:8.2f} GB" if expert_bytes else ""
        rates = "".join(f"{getattr(p, key):13.1%} " for key in POLICIES)
        out.append(f"         {p.capacity:8d}{size} {p.share:7.1%} {rates}".rstrip())
    out += ["", "reuse distance (distinct experts since the last use), share of requests"]
    out += [f"  {name:>14} {share:7.1%}" for name, share in report["reuse_distance"]]
    out += ["", "recall of a layer's choice"]
    words = {
        "chance": "chance",
        "most_frequent": "the layer's most frequent experts (held out)",
        "from_layer_before": "table from the layer before (held out)",
        "token_before": "the token before, same layer",
        "any_token_before": "all tokens before, same layer (not limited to k guesses)",
    }
    for key, text in words.items():
        value = report["recall"][key]
        out.append(f"  {'-' if value is None else f'{value:.1%}':>7}  {text}")
    out += ["", "every cache starts empty; half of pinned + LRU is pinned, with hindsight; optimal is Belady's"]
    return "\n".join(out)


def chart(found: Trace, curve: list[CurvePoint]) -> str:
    """Hit rate against cache size as SVG."""
    from sluice.tools.svg import Line, line_chart

    lines = [
        Line(name, [(p.capacity, getattr(p, key)) for p in curve if p.capacity > 0]) for key, name in POLICIES.items()
    ]
    title = f"{found.name}: hit rate against cache size"
    return line_chart(title, "experts in cache", "hit rate", lines, log_x=True, y_range=(0.0, 1.0))
