"""The settings: every key the service knows, its range, and where its value came from.

This module owns the names, kinds and ranges of all keys and the order of precedence; what a key does belongs to
the part that reads it. Everything is checked here once, so that whoever holds a `Settings` need not check again.

    flags (--set section.key=value)  >  environment (SLUICE_SECTION_KEY)  >  file  >  preset  >  defaults

Sizes are ints in bytes, times floats in seconds. None stands for the word a key's comment names ("auto", "off", "").
"""

# ruff: noqa: RUF009  (`key` wraps dataclasses.field and returns immutable defaults, which the rule cannot see)

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from sluice.daemon.service import units
from sluice.io.errors import PresetError

GIB = 2**30
MIB = 2**20
LARGEST_FILE_BYTES = 256 * 1024  # a settings file is a page of text; a larger one is the wrong file


# --- Kinds: how one value is read, checked and shown --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """How a key's value is read. `absent` is the word that means None ("auto", "off"), or None if there is no such
    word. `allowed` says in words what may be written; it goes into every refusal."""

    allowed: str
    absent: str | None = None

    def from_value(self, value: object) -> object:
        """A TOML value, checked. Raises ValueError."""
        if self.absent is not None and value == self.absent:
            return None
        return self.read(value)

    def from_text(self, text: str) -> object:
        """The same from a flag or the environment, where everything is text. Raises ValueError."""
        if self.absent is not None and text.strip() == self.absent:
            return None
        return self.read_text(text.strip())

    def show(self, value: object) -> object:
        """The TOML value that `from_value` reads back."""
        return self.absent if value is None else self.write(value)

    def read(self, value: object) -> object:
        raise NotImplementedError

    def read_text(self, text: str) -> object:
        return self.read(text)

    def write(self, value: object) -> object:
        return value


def _plain_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("not a whole number")
    return value


@dataclass(frozen=True, slots=True)
class Size(Kind):
    low: int = 0
    high: int = 2**50

    def read(self, value: object) -> int:
        size = units.parse_size(value) if isinstance(value, str) else _plain_int(value)
        if not self.low <= size <= self.high:
            raise ValueError("out of range")
        return size

    def write(self, value: object) -> object:
        assert isinstance(value, int)
        return units.format_size(value)


@dataclass(frozen=True, slots=True)
class Seconds(Kind):
    low: float = 0.0
    high: float = 86400.0

    def read(self, value: object) -> float:
        seconds = units.parse_seconds(value) if isinstance(value, str) else float(_plain_int(value))
        if not self.low <= seconds <= self.high:
            raise ValueError("out of range")
        return seconds

    def write(self, value: object) -> object:
        assert isinstance(value, float)
        return units.format_seconds(value)


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    low: int = 0
    high: int = 2**31 - 1

    def read(self, value: object) -> int:
        number = _plain_int(value)
        if not self.low <= number <= self.high:
            raise ValueError("out of range")
        return number

    def read_text(self, text: str) -> int:
        if re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII) is None:
            raise ValueError("not a whole number")
        return self.read(int(text))


@dataclass(frozen=True, slots=True)
class Number(Kind):
    low: float = 0.0
    high: float = 1.0

    def read(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("not a number")
        if not (math.isfinite(value) and self.low <= value <= self.high):
            raise ValueError("out of range")
        return float(value)

    def read_text(self, text: str) -> float:
        try:
            return self.read(float(text))
        except ValueError as error:
            raise ValueError("out of range" if "range" in str(error) else "not a number") from None


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One of some words, or (where `high` > 0) a whole number from 1 to high."""

    words: tuple[str, ...] = ()
    high: int = 0

    def read(self, value: object) -> str | int:
        if isinstance(value, str) and value in self.words:
            return value
        if self.high and isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= self.high:
            return value
        raise ValueError("not one of the choices")

    def read_text(self, text: str) -> str | int:
        return self.read(int(text) if self.high and re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) else text)


@dataclass(frozen=True, slots=True)
class Boolean(Kind):
    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError("not true or false")
        return value

    def read_text(self, text: str) -> bool:
        words = {
            "true": True,
            "false": False,
            "yes": True,
            "no": False,
            "on": True,
            "off": False,
            "1": True,
            "0": False,
        }
        if text.lower() not in words:
            raise ValueError("not true or false")
        return words[text.lower()]


@dataclass(frozen=True, slots=True)
class Text(Kind):
    pattern: str = r"[^\x00-\x1f\x7f]{1,255}"

    def read(self, value: object) -> str:
        if not isinstance(value, str) or re.fullmatch(self.pattern, value) is None:
            raise ValueError("not such a text")
        return value


@dataclass(frozen=True, slots=True)
class FilePath(Kind):
    """A path; `~` is expanded. Relative ones are taken from the working directory."""

    def read(self, value: object) -> Path:
        if not isinstance(value, str) or not value or "\0" in value or len(value) > 4096:
            raise ValueError("not a path")
        return Path(value).expanduser()

    def write(self, value: object) -> object:
        return str(value)


@dataclass(frozen=True, slots=True)
class ListOf(Kind):
    """A list of one kind. In flags and the environment: as in a file, or with commas between."""

    item: Kind = Kind("")
    longest: int = 64

    def read(self, value: object) -> tuple[object, ...]:
        if not isinstance(value, list):
            raise ValueError("not a list")
        if len(value) > self.longest:
            raise ValueError(f"more than {self.longest} entries")
        items = tuple(self.item.from_value(item) for item in value)
        if len(set(items)) != len(items):
            raise ValueError("an entry appears twice")
        return items

    def read_text(self, text: str) -> tuple[object, ...]:
        if text.startswith("["):  # as it would stand in a file, for entries that hold a comma
            try:
                return self.read(tomllib.loads(f"list = {text}")["list"])
            except tomllib.TOMLDecodeError:
                raise ValueError("not a list") from None
        return self.read([part.strip() for part in text.split(",")] if text else [])

    def write(self, value: object) -> object:
        assert isinstance(value, tuple)
        return [self.item.show(item) for item in value]


@dataclass(frozen=True, slots=True)
class CpuList(Kind):
    def read(self, value: object) -> tuple[int, ...]:
        if not isinstance(value, str):
            raise ValueError("not a text like 0-3,8")
        cpus = units.parse_cpu_list(value)
        if cpus[-1] > 4095:
            raise ValueError("CPU numbers go to 4095")
        return cpus

    def write(self, value: object) -> object:
        assert isinstance(value, tuple)
        return units.format_cpu_list(value)


@dataclass(frozen=True, slots=True)
class Mode(Kind):
    def read(self, value: object) -> int:
        if not isinstance(value, str):
            raise ValueError("write it in quotes: TOML has no octal digits without them")
        mode = units.parse_mode(value)
        if mode & ~0o777 or mode & 0o600 != 0o600:
            raise ValueError("out of range")
        return mode

    def write(self, value: object) -> object:
        assert isinstance(value, int)
        return f"0{value:03o}"


@dataclass(frozen=True, slots=True)
class HostPort(Kind):
    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("not HOST:PORT")
        units.parse_host_port(value)
        return value


def key(kind: Kind, default: Any, about: str) -> Any:
    """A dataclass field that is a key: its kind, default and one line of explanation."""
    return field(default=default, metadata={"kind": kind, "about": about})


_PATH = FilePath("a path, or empty for none", absent="")
_NAME = Text("a user or group name", pattern=r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}\$?")


# --- The sections -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, and where its files lie."""

    path: Path | None = key(_PATH, None, "checkpoint folder (config.json, index, shards) or packed store")
    roots: tuple[Path, ...] = key(
        ListOf("a list of up to 64 paths", item=FilePath("a path")),
        (),
        "further folders to look for shards or stripes in, one a drive; `path` is always looked in first",
    )
    name: str | None = key(
        Text("1 to 255 printable characters, or empty for the folder's name", absent=""),
        None,
        "the name clients ask for in `model`",
    )
    latent_norm_eps: float | None = key(
        Number('a number from 1e-12 to 1e-3, or "auto"', absent="auto", low=1e-12, high=1e-3),
        None,
        "eps of the two latent norms of MLA, part of the numerics fingerprint; auto: the model's own rms_norm_eps",
    )


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The budget. None ("auto") in trunk and expert_cache: what is left after everything else, trunk first."""

    total: int | None = key(
        Size('64MiB to 1PiB, or "auto" for the limit of machine and cgroup', absent="auto", low=64 * MIB),
        None,
        "bytes the whole process may hold: a promise, checked against the plan before anything is loaded",
    )
    trunk: int | None = key(
        Size('0 to 1PiB, or "auto"', absent="auto"),
        None,
        "bytes for pinned trunk weights and the ring the rest streams through",
    )
    expert_cache: int | None = key(Size('0 to 1PiB, or "auto"', absent="auto"), None, "bytes for cached routed experts")
    sessions: int = key(Size("0 to 1PiB"), 0, "bytes for state snapshots of past conversations")
    pin_embedding: bool = key(
        Boolean("true or false"), False, "hold the embedding; otherwise one row is read per token"
    )
    pin_head: bool = key(Boolean("true or false"), False, "hold lm_head; otherwise it is streamed like a layer")
    preload: bool = key(Boolean("true or false"), False, "fill the expert cache before READY, all drives in parallel")
    expert_counts: Path | None = key(
        _PATH, None, "file that counts the use of experts from run to run; layers' shares of the cache follow it"
    )
    pinned_experts: float = key(
        Number("a number from 0 to 0.9", low=0.0, high=0.9),
        0.0,
        "share of the expert cache given for good to the experts that expert_counts saw most",
    )


@dataclass(frozen=True, slots=True)
class IoSettings:
    """How bytes are read."""

    backend: str = key(Choice("auto, uring or threads", words=("auto", "uring", "threads")), "auto", "who reads")
    direct: str = key(
        Choice("auto, on or off", words=("auto", "on", "off")), "auto", "O_DIRECT: auto probes each file and falls back"
    )
    depth: int = key(Integer("1 to 64", low=1, high=64), 2, "whole records in flight per drive")
    verify: str = key(
        Choice("off, first or always", words=("off", "first", "always")),
        "first",
        "checksums of a packed store: never, at a record's first read, at every read",
    )


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """Where arithmetic runs. None in threads: as many as there are physical cores allowed to us; in the widths of
    attention and experts: all threads."""

    threads: int | None = key(Integer('1 to 1024, or "auto"', absent="auto", low=1, high=1024), None, "compute threads")
    cpus: tuple[int, ...] | None = key(
        CpuList('CPU numbers such as "0-3,8", or "auto"', absent="auto"), None, "the CPUs those threads are pinned to"
    )
    attention_threads: int | None = key(
        Integer('1 to 1024, or "auto"', absent="auto", low=1, high=1024),
        None,
        "how many of them attention and all but routed experts use",
    )
    expert_threads: int | None = key(
        Integer('1 to 1024, or "auto"', absent="auto", low=1, high=1024), None, "how many of them routed experts use"
    )
    isa: str = key(
        Choice("auto, scalar, avx2, avx512 or neon", words=("auto", "scalar", "avx2", "avx512", "neon")),
        "auto",
        "instruction set of the kernels; never changes a bit of the answer",
    )
    activations: str = key(
        Choice("f32 or int8", words=("f32", "int8")), "f32", "int8 is faster and changes numerics and fingerprint"
    )
    numa: str = key(
        Choice("auto, off or interleave", words=("auto", "off", "interleave")),
        "auto",
        "memory nodes, where there is more than one: auto homes experts and interleaves the rest",
    )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sequences in time."""

    context: int = key(Integer("16 to 1048576", low=16, high=1048576), 4096, "tokens one sequence may hold")
    max_sequences: int = key(Integer("1 to 256", low=1, high=256), 1, "sequences that run at once")
    prefill_chunk: int = key(
        Integer("1 to 4096", low=1, high=4096), 64, "prompt tokens that share one pass over the weights"
    )
    lookahead: str | int = key(
        Choice("off, adaptive or 1 to 8", words=("off", "adaptive"), high=8),
        "adaptive",
        "layers whose experts are predicted and read ahead; never changes results",
    )
    trunk: str = key(
        Choice("exact or int8", words=("exact", "int8")),
        "exact",
        "exact: the weights as stored; int8 is not available yet and is refused",
    )


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Who may talk to it, and how."""

    socket: Path = key(FilePath("an absolute path"), Path("/run/sluice/sluice.sock"), "the Unix socket")
    mode: int = key(Mode('octal digits in quotes from "0600" to "0777"'), 0o660, "permission bits of a socket we make")
    group: str | None = key(
        Text("a group name, or empty for the process's own", absent="", pattern=_NAME.pattern),
        None,
        "group of a socket we make",
    )
    allow_users: tuple[str, ...] = key(
        ListOf("a list of user names", item=_NAME, longest=256),
        (),
        "users that may connect; both lists empty: whoever the mode lets in",
    )
    allow_groups: tuple[str, ...] = key(
        ListOf("a list of group names", item=_NAME, longest=256), (), "groups whose members may connect"
    )
    max_queue: int = key(Integer("0 to 10000", low=0, high=10000), 16, "requests that may wait; the next one gets 429")
    tcp: str | None = key(
        HostPort("HOST:PORT, or off", absent="off"), None, "a TCP listener beside the socket; needs token_file"
    )
    token_file: Path | None = key(_PATH, None, "file whose first line is the bearer token of the TCP listener")
    drain: float = key(
        Seconds("0s to 1h", low=0.0, high=3600.0),
        60.0,
        "how long running requests may go on after SIGTERM before they are ended",
    )


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """State snapshots on disk."""

    dir: Path | None = key(_PATH, None, "folder for snapshots; not available yet: a folder is refused")
    quota: int = key(Size("0 to 1PiB"), 8 * GIB, "bytes the folder may hold; the oldest go first")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is written to standard error."""

    level: str = key(
        Choice("debug, info, warning or error", words=("debug", "info", "warning", "error")),
        "info",
        "the least urgent kind written",
    )
    format: str = key(Choice("text or json", words=("text", "json")), "text", "one line a record in either form")


@dataclass(frozen=True, slots=True)
class Settings:
    """All sections, checked. `provenance` says for every "section.key" where its value came from."""

    model: ModelSettings = field(default_factory=ModelSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    io: IoSettings = field(default_factory=IoSettings)
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    sessions: SessionSettings = field(default_factory=SessionSettings)
    log: LogSettings = field(default_factory=LogSettings)
    provenance: Mapping[str, str] = field(default_factory=dict, compare=False)

    def get(self, path: str) -> Any:
        """The value of "section.key"."""
        section, name = path.split(".")
        return getattr(getattr(self, section), name)

    def shown(self) -> dict[str, dict[str, object]]:
        """Sections and keys as TOML values, in the order of declaration; reading them back gives equal settings."""
        tables: dict[str, dict[str, object]] = {}
        for path, entry in KEYS.items():
            section, name = path.split(".")
            tables.setdefault(section, {})[name] = entry.kind.show(self.get(path))
        return tables


@dataclass(frozen=True, slots=True)
class Key:
    """One key: how it is read and what it is for."""

    path: str
    kind: Kind
    default: object
    about: str


SECTIONS: dict[str, type] = {
    "model": ModelSettings,
    "memory": MemorySettings,
    "io": IoSettings,
    "compute": ComputeSettings,
    "engine": EngineSettings,
    "server": ServerSettings,
    "sessions": SessionSettings,
    "log": LogSettings,
}
KEYS: dict[str, Key] = {
    f"{section}.{entry.name}": Key(
        f"{section}.{entry.name}", entry.metadata["kind"], entry.default, entry.metadata["about"]
    )
    for section, owner in SECTIONS.items()
    for entry in dataclasses.fields(owner)
}
_VARIABLES = {f"SLUICE_{path.replace('.', '_').upper()}": path for path in KEYS}

# What SIGHUP may change without losing a request. Anything else needs a restart, and saying so is the answer.
RELOADABLE = frozenset(
    {
        "memory.trunk",
        "memory.expert_cache",
        "log.level",
        "log.format",
        "server.allow_users",
        "server.allow_groups",
        "server.max_queue",
        "server.drain",
    }
)


# --- Reading ------------------------------------------------------------------------------------------------------


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """ "; did you mean X?" for the nearest known word, or nothing when none is near."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def unknown_key(path: str, source: str) -> PresetError:
    """The refusal of a key nobody knows, with the nearest one that exists."""
    section, _, name = path.partition(".")
    hint = nearest(path, KEYS)
    if not hint and section in SECTIONS:
        hint = f"; [{section}] has {', '.join(k.split('.')[1] for k in KEYS if k.startswith(section + '.'))}"
    elif not hint:
        hint = nearest(name, SECTIONS) or f"; sections are {', '.join(SECTIONS)}"
    return PresetError(f"{path}: no such setting ({source}){hint}")


def _refusal(entry: Key, value: object, reason: ValueError, source: str) -> PresetError:
    return PresetError(f"{entry.path}: {value!r} refused, {reason}; allowed: {entry.kind.allowed} ({source})")


def check_tables(tables: Mapping[str, object], source: str) -> dict[str, object]:
    """Checked values by "section.key" from TOML tables. Raises PresetError naming the first key at fault."""
    values: dict[str, object] = {}
    for section, table in tables.items():
        if section not in SECTIONS:
            if isinstance(table, dict):
                raise PresetError(f"[{section}]: no such section ({source}){nearest(section, SECTIONS)}")
            raise unknown_key(section, source)
        if not isinstance(table, dict):
            raise PresetError(f"{section}: a section, written [{section}], not a value ({source})")
        for name, value in table.items():
            entry = KEYS.get(f"{section}.{name}")
            if entry is None:
                raise unknown_key(f"{section}.{name}", source)
            try:
                values[entry.path] = entry.kind.from_value(value)
            except ValueError as reason:
                raise _refusal(entry, value, reason, source) from None
    return values


def check_text(path: str, text: str, source: str) -> object:
    """The checked value of one key written as text. Raises PresetError."""
    entry = KEYS.get(path)
    if entry is None:
        raise unknown_key(path, source)
    try:
        return entry.kind.from_text(text)
    except ValueError as reason:
        raise _refusal(entry, text, reason, source) from None


def parse_toml(text: str, source: str) -> dict[str, object]:
    """Tables of a TOML text. Raises PresetError with line and column."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PresetError(f"{source}: not TOML: {error}") from None


def read_file(path: Path) -> str:
    """The text of a settings file. Raises PresetError when it is missing, unreadable, too large or not UTF-8."""
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise PresetError(f"{path}: larger than {LARGEST_FILE_BYTES} bytes, so hardly a settings file")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PresetError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PresetError(f"{path}: not UTF-8 at byte {error.start}") from None


def preset_names() -> list[str]:
    """Names of the presets that come with sluice, smallest machine first."""
    order = ["ultra", "laptop", "desktop", "workstation", "server", "max", "resident"]
    found = {
        entry.name.removesuffix(".toml")
        for entry in resources.files("sluice.presets").iterdir()
        if entry.name.endswith(".toml")
    }
    return [name for name in order if name in found] + sorted(found - set(order))


def preset_text(preset: str) -> tuple[str, str]:
    """The text of a preset and what to call it; `preset` is a name or, with a slash or .toml, a path."""
    if "/" in preset or preset.endswith(".toml"):
        return read_file(Path(preset).expanduser()), f"preset {preset}"
    names = preset_names()
    if preset not in names:
        hint = nearest(preset, [*names, "auto"]) or f"; there are {', '.join(names)}, auto, or a path to a .toml file"
        raise PresetError(f"preset {preset!r}: no such preset{hint}")
    return (resources.files("sluice.presets") / f"{preset}.toml").read_text(encoding="utf-8"), f"preset {preset}"


def load_settings(
    preset: str | None = None,
    file: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> Settings:
    """Settings from all sources, by precedence.

    preset: a name, "auto", or a path; without it SLUICE_PRESET, then the file's own top-level `preset`, then none.
    file: a TOML file; without it SLUICE_CONFIG, then none. env: the environment (os.environ when None).
    overrides: "section.key=value" each, the last one of a key wins.
    Raises PresetError naming key, value, allowed range and source.
    """
    env = os.environ if env is None else env
    values: dict[str, object] = {path: entry.default for path, entry in KEYS.items()}
    provenance = dict.fromkeys(KEYS, "default")

    def take(more: Mapping[str, object], source: str) -> None:
        values.update(more)
        provenance.update(dict.fromkeys(more, source))

    file = file or env.get("SLUICE_CONFIG") or None
    file_values: dict[str, object] = {}
    file_preset: str | None = None
    if file is not None:
        tables = parse_toml(read_file(Path(file)), f"file {file}")
        named = tables.pop("preset", None)
        if named is not None and not isinstance(named, str):
            raise PresetError(f"preset: {named!r} refused, not a preset's name or path (file {file})")
        file_preset = named
        file_values = check_tables(tables, f"file {file}")

    preset = preset or env.get("SLUICE_PRESET") or file_preset
    if preset == "auto":
        from sluice.daemon.service.autosize import auto_tables, this_machine

        take(check_tables(auto_tables(this_machine()), "preset auto"), "preset auto")
    elif preset:
        text, source = preset_text(preset)
        take(check_tables(parse_toml(text, source), source), source)
    take(file_values, f"file {file}")

    for variable, text in env.items():
        path = _VARIABLES.get(variable)
        if path is not None:
            take({path: check_text(path, text, f"environment {variable}")}, f"environment {variable}")
        elif variable.startswith("SLUICE_") and variable.split("_")[1].lower() in SECTIONS and variable.count("_") > 1:
            raise PresetError(f"environment {variable}: no such setting{nearest(variable, _VARIABLES)}")

    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals:
            raise PresetError(f"--set {override}: write it as section.key=value")
        take({path.strip(): check_text(path.strip(), text, "--set")}, "--set")

    return _build(values, provenance)


def _build(values: Mapping[str, object], provenance: Mapping[str, str]) -> Settings:
    sections = {
        section: owner(
            **{path.split(".")[1]: value for path, value in values.items() if path.startswith(section + ".")}
        )
        for section, owner in SECTIONS.items()
    }
    settings = Settings(**sections, provenance=provenance)
    _check_together(settings)
    return settings


def _check_together(settings: Settings) -> None:
    """What no single key can say. Sums that do not fit are the memory plan's to refuse, with the model's sizes."""
    server = settings.server
    if server.tcp is not None and server.token_file is None:
        raise PresetError(
            f"server.tcp: {server.tcp!r} refused, a TCP listener without a token is open to every local user and page; "
            f"set server.token_file ({settings.provenance['server.tcp']})"
        )
    if not server.socket.is_absolute():
        raise PresetError(
            f"server.socket: {str(server.socket)!r} refused, not absolute ({settings.provenance['server.socket']})"
        )
    if len(os.fsencode(server.socket)) > 107:
        raise PresetError(f"server.socket: longer than the 107 bytes a Unix socket's address holds: {server.socket}")
    memory = settings.memory
    if memory.total is not None:
        for name in ("trunk", "expert_cache", "sessions"):
            part = getattr(memory, name)
            if part is not None and part > memory.total:
                raise PresetError(
                    f"memory.{name}: {units.format_size(part)} refused, more than memory.total "
                    f"{units.format_size(memory.total)} ({settings.provenance[f'memory.{name}']})"
                )


def changes(old: Settings, new: Settings) -> dict[str, tuple[object, object]]:
    """Keys whose values differ, with both values."""
    return {path: (old.get(path), new.get(path)) for path in KEYS if old.get(path) != new.get(path)}


def toml_text(settings: Settings, with_provenance: bool = True) -> str:
    """The effective settings as TOML that `load_settings` reads back, each line with where its value came from."""
    import json

    lines: list[str] = []
    for section, table in settings.shown().items():
        lines.append(f"[{section}]")
        for name, value in table.items():
            # JSON's spelling of strings, numbers, booleans and lists of strings is TOML's too.
            line = f"{name} = {json.dumps(value, ensure_ascii=False)}"
            if with_provenance:
                line = f"{line:<52} # {settings.provenance.get(f'{section}.{name}', 'default')}"
            lines.append(line)
        lines.append("")
    return "\n".join(lines)
