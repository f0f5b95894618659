"""A line chart as an SVG string: all the plotting the tools need, without a plotting library.

Owns axes, ticks, lines, labels. The data and their meaning are the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7a4e9f", "#b8860b", "#444444")
LEFT, RIGHT, TOP, BOTTOM = 62, 150, 34, 46


@dataclass(frozen=True, slots=True)
class Line:
    """One named curve."""

    name: str
    points: Sequence[tuple[float, float]]


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers that cover low..high, about `wanted` of them."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if raw <= power * m * (1 + 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    *,
    log_x: bool = False,
    y_range: tuple[float, float] | None = None,
    width: int = 760,
    height: int = 420,
) -> str:
    """The chart. Raises ValueError without a single point, or for x <= 0 on a logarithmic axis."""
    points = [p for line in lines for p in line.points]
    if not points:
        raise ValueError("a chart needs at least one point")
    if log_x and min(x for x, _ in points) <= 0:
        raise ValueError("a logarithmic axis needs x > 0")

    def along(x: float) -> float:
        return math.log10(x) if log_x else x

    x0, x1 = min(along(x) for x, _ in points), max(along(x) for x, _ in points)
    y0, y1 = y_range or (min(y for _, y in points), max(y for _, y in points))
    x1, y1 = max(x1, x0 + 1e-9), max(y1, y0 + 1e-9)
    inner_w, inner_h = width - LEFT - RIGHT, height - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (along(x) - x0) / (x1 - x0) * inner_w, TOP + (y1 - y) / (y1 - y0) * inner_h

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    if log_x:
        decades = [10.0**d for d in range(math.floor(x0), math.ceil(x1) + 1)]
        marks = [d * m for d in decades for m in (1, 2, 5) if x0 - 1e-9 <= math.log10(d * m) <= x1 + 1e-9]
    else:
        marks = ticks(x0, x1)
    for x in marks:
        px, _ = at(x, y0)
        out.append(f'<line x1="{px:.1f}" y1="{TOP}" x2="{px:.1f}" y2="{TOP + inner_h}" stroke="#eee"/>')
        out.append(f'<text x="{px:.1f}" y="{TOP + inner_h + 16}" text-anchor="middle">{x:g}</text>')
    for y in ticks(y0, y1):
        _, py = at(points[0][0], y)
        out.append(f'<line x1="{LEFT}" y1="{py:.1f}" x2="{LEFT + inner_w}" y2="{py:.1f}" stroke="#eee"/>')
        out.append(f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{y:g}</text>')
    out.append(f'<rect x="{LEFT}" y="{TOP}" width="{inner_w}" height="{inner_h}" fill="none" stroke="#888"/>')
    out.append(f'<text x="{LEFT + inner_w / 2}" y="{height - 10}" text-anchor="middle">{escape(x_label)}</text>')
    middle = TOP + inner_h / 2
    out.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(y_label)}</text>'
    )
    for i, line in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(x, min(max(y, y0), y1)) for x, y in line.points))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        key = TOP + 12 + 18 * i
        start = width - RIGHT + 10
        out.append(f'<line x1="{start}" y1="{key}" x2="{start + 20}" y2="{key}" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{width - RIGHT + 36}" y="{key + 4}">{escape(line.name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
