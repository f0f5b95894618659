"""Numbers with units, as people write them: sizes, times, modes, lists of CPUs. Pure functions, no settings known.

Everything here raises ValueError with a short reason; whoever calls knows which key it was about.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

# GB is 1e9 and GiB is 2**30, as everywhere in this project. A bare number is bytes.
SIZE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
TIME_UNITS = {"": Decimal(1), "ms": Decimal("0.001"), "s": Decimal(1), "min": Decimal(60), "h": Decimal(3600)}

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def _quantity(text: str) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None or len(text) > 40:
        raise ValueError("not a number with a unit")
    try:
        return Decimal(match[1]), match[2]
    except InvalidOperation as error:  # pragma: no cover - the pattern admits plain decimals only
        raise ValueError("not a number") from error


def parse_size(text: str) -> int:
    """Bytes from "6.5GiB", "4 GB", "512MiB" or a bare number of bytes; fractions of a byte are cut off."""
    number, unit = _quantity(text)
    try:
        return int(number * SIZE_UNITS[unit.upper()])
    except KeyError:
        raise ValueError(
            f"unknown unit {unit!r}: use B, KB, MB, GB, TB (powers of 1000) or KiB ... TiB (1024)"
        ) from None


def format_size(size: int) -> str:
    """The shortest exact spelling that `parse_size` reads back to the same number of bytes."""
    for unit in ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "KB"):
        scale = SIZE_UNITS[unit.upper()]
        if size >= scale and size * 100 % scale == 0:
            return f"{(Decimal(size) / scale).normalize():f}{unit}"
    return f"{size}B"


def human_size(size: int) -> str:
    """About: "6.05 GiB". For people; not exact."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size) >= SIZE_UNITS[unit.upper()]:
            return f"{size / SIZE_UNITS[unit.upper()]:.2f} {unit}"
    return f"{size} B"


def parse_seconds(text: str) -> float:
    """Seconds from "10s", "250ms", "5min", "1h" or a bare number of seconds."""
    number, unit = _quantity(text)
    try:
        return float(number * TIME_UNITS[unit.lower()])
    except KeyError:
        raise ValueError(f"unknown unit {unit!r}: use ms, s, min or h") from None


def format_seconds(seconds: float) -> str:
    """The spelling `parse_seconds` reads back: "90s", "250ms"."""
    if seconds and seconds < 1:
        return f"{seconds * 1000:g}ms"
    return f"{seconds:g}s"


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """CPU numbers from the kernel's own notation, "0-3,8,10-11"; ascending, each once."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part, re.ASCII)
        if match is None:
            raise ValueError(f"{part.strip()!r} is neither a CPU number nor a range like 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"range {part.strip()} runs backwards")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: tuple[int, ...]) -> str:
    """The kernel's notation for CPU numbers in ascending order: (0, 1, 2, 8) is "0-2,8"."""
    parts: list[str] = []
    index = 0
    while index < len(cpus):
        end = index
        while end + 1 < len(cpus) and cpus[end + 1] == cpus[end] + 1:
            end += 1
        parts.append(str(cpus[index]) if end == index else f"{cpus[index]}-{cpus[end]}")
        index = end + 1
    return ",".join(parts)


def parse_mode(text: str) -> int:
    """Permission bits from octal digits, "0660" or "660"."""
    if re.fullmatch(r"(0o?)?[0-7]{3,4}", text, re.ASCII) is None:
        raise ValueError("not three or four octal digits such as 0660")
    return int(text.removeprefix("0o"), 8)


def parse_host_port(text: str) -> tuple[str, int]:
    """("127.0.0.1", 8080) from "127.0.0.1:8080", "[::1]:8080" or "localhost:8080"."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", text, re.ASCII)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise ValueError("not HOST:PORT with a port from 1 to 65535")
    return match[1] or match[2], int(match[3])
