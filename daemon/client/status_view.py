"""A snapshot of /v1/status as tables. Takes any JSON, and shows what of it is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sluice.daemon.client.screen import elapsed, harmless, size


def print_status(snapshot: Any, out: TextIO) -> None:
    """One look, printed."""
    Console(file=out, highlight=False).print(view(snapshot, None, 0.0))


def view(snapshot: Any, before: Any, seconds: float) -> RenderableType:
    """A snapshot of /v1/status as tables. before, seconds: an earlier one and how long ago, for rates of drives.

    Takes any JSON: what is missing is left out, so that an older or newer daemon can be looked at too.
    """
    top = _map(snapshot)
    parts: list[RenderableType] = [_headline(top)]
    requests = [_map(request) for request in _list(top.get("requests"))]
    if requests:
        parts.append(_requests(requests))
    memory = _memory(_map(top.get("memory")))
    if memory is not None:
        parts.append(memory)
    parts += _io(_map(top.get("io")), _map(_map(before).get("io")), seconds)
    return Group(*parts)


def _headline(top: Mapping[str, Any]) -> Text:
    model, queue, rates = _map(top.get("model")), _map(top.get("queue")), _map(top.get("rates"))
    line = Text()
    line.append(_text(model.get("name")) or "sluice", style="bold")
    state = _text(top.get("state")) or "?"
    line.append(f"  {state}", style="green" if state == "ready" else "yellow")
    line.append(
        f"  running {_count(queue.get('running'))} of {_count(queue.get('max_sequences'))}, "
        f"waiting {_count(queue.get('waiting'))} of {_count(queue.get('max_queue'))}"
    )
    for key, word in (("prefill_tokens_per_second", "prefill"), ("decode_tokens_per_second", "decode")):
        if _number(rates.get(key)):
            line.append(f"  {word} {_number(rates[key]):.2f} tok/s")
    if _number(rates.get("pass_seconds")):
        line.append(f"  a pass takes {_number(rates['pass_seconds']):.2f} s")
    tokens = _map(top.get("tokens"))
    if tokens:
        line.append(
            f"\nsince start {_count(tokens.get('prompt'))} tokens read, {_count(tokens.get('generated'))} written"
        )
    if model.get("system_fingerprint"):
        line.append(f"  {_text(model['system_fingerprint'])}", style="dim")
    return line


def _requests(requests: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("request", "phase", "prompt", "written", "tok/s", "time", "priority")
    for request in requests:
        total, done = _number(request.get("prompt_tokens")), _number(request.get("prompt_done"))
        rate = _number(request.get("tokens_per_second"))
        table.add_row(
            _text(request.get("id")),
            _text(request.get("phase")),
            f"{_bar(done, total)} {done:.0f}/{total:.0f}",
            f"{_count(request.get('generated'))}/{_count(request.get('max_tokens'))}",
            f"{rate:.2f}" if rate else "",
            elapsed(_number(request.get("seconds"))),
            _count(request.get("priority")),
        )
    return table


def _memory(memory: Mapping[str, Any]) -> Table | None:
    plan = _map(memory.get("plan"))
    if not plan and not memory:
        return None
    table = _table("memory", "bytes", "of the limit")
    limit = _number(memory.get("limit_bytes"))
    rows = [(_text(term), _number(value), "") for term, value in plan.items()]
    planned = _number(memory.get("plan_bytes"))
    named = {"plan_bytes": "plan", "rss_bytes": "in use", "peak_rss_bytes": "most so far", "limit_bytes": "limit"}
    for key, word in named.items():
        if key in memory:
            over = key in ("rss_bytes", "peak_rss_bytes") and _number(memory[key]) > planned > 0
            rows.append((word, _number(memory[key]), "red" if over else "bold"))
    for word, value, style in rows:
        table.add_row(Text(word, style=style), Text(size(value), style=style), _bar(value, limit) if limit else "")
    return table


def _io(io: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> list[RenderableType]:
    parts: list[RenderableType] = []
    drives = [_map(drive) for drive in _list(io.get("drives"))]
    if drives:
        earlier = {_text(drive.get("name")): drive for drive in map(_map, _list(before.get("drives")))}
        table = _table(f"drive ({_text(io.get('backend')) or '?'})", "read", "now", "busy", "in flight")
        for drive in drives:
            name = _text(drive.get("name"))
            last = earlier.get(name)
            now = busy = ""
            if last is not None and seconds > 0.0:
                now = size(max(0.0, _number(drive.get("bytes")) - _number(last.get("bytes"))) / seconds) + "/s"
                spent = (_number(drive.get("busy_seconds")) - _number(last.get("busy_seconds"))) / seconds
                busy = f"{min(1.0, max(0.0, spent)):.0%}"
            table.add_row(name, size(_number(drive.get("bytes"))), now, busy, _count(drive.get("in_flight")))
        parts.append(table)
    trunk, experts, prediction = _map(io.get("trunk")), _map(io.get("experts")), _map(io.get("prediction"))
    line = Text()
    if trunk:
        line.append(
            f"trunk: {size(_number(trunk.get('pinned_bytes')))} pinned, {size(_number(trunk.get('ring_bytes')))} ring, "
            f"{size(_number(trunk.get('streamed_bytes')))} streamed\n"
        )
    asked = _number(experts.get("hits")) + _number(experts.get("misses"))
    if experts:
        share = f"{_number(experts.get('hits')) / asked:.1%}" if asked else "no"
        line.append(
            f"experts: {share} hits of {asked:.0f}, {_count(experts.get('cached'))} cached in "
            f"{size(_number(experts.get('capacity_bytes')))}, {size(_number(experts.get('bytes_read')))} read\n"
        )
    hinted = _number(prediction.get("hinted"))
    if hinted:
        line.append(
            f"prediction: {_number(prediction.get('used')) / hinted:.1%} of {hinted:.0f} hints used, "
            f"{size(_number(prediction.get('wasted_bytes')))} wasted\n"
        )
    if line:
        line.rstrip()
        parts.append(line)
    return parts


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _bar(part: float, whole: float, width: int = 12) -> str:
    filled = round(width * min(1.0, max(0.0, part / whole))) if whole > 0 else 0
    return "█" * filled + "·" * (width - filled)


# Any JSON is survived: these take what is not of its kind for absent.


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return "" if value is None else harmless(str(value)).replace("\n", " ")


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _count(value: Any) -> str:
    return f"{_number(value):.0f}"
