"""`sluice presets` and `sluice config`: what may be set, what the presets say, and what is in force and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.daemon.options import Config, Json, Model, Preset, Sets, settings_from

if TYPE_CHECKING:
    from sluice.daemon.service.settings import Settings

presets_app = typer.Typer(no_args_is_help=True, help="The presets that come with sluice, and checking your own.")
Name = Annotated[str, typer.Argument(help="A preset's name, 'auto', or a path to a .toml file.")]


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value, ensure_ascii=False, indent=2))


def summary(text: str) -> str:
    """What a preset says about itself: its first line, a comment."""
    first = text.split("\n", 1)[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def describe(name: str) -> dict[str, object]:
    """A preset in a few words and numbers, for `list`. Raises PresetError when it is not valid."""
    from sluice.daemon.service.settings import load_settings, preset_text

    settings = load_settings(name, env={})
    return {
        "name": name,
        "total_bytes": settings.memory.total,
        "context": settings.engine.context,
        "max_sequences": settings.engine.max_sequences,
        "about": summary(preset_text(name)[0]),
    }


@presets_app.command("list")
def list_presets(as_json: Json = False) -> None:
    """The presets, smallest machine first, and which one would be chosen here."""
    from sluice.daemon.service import units
    from sluice.daemon.service.autosize import auto_total, base_preset, this_machine
    from sluice.daemon.service.settings import preset_names

    described = [describe(name) for name in preset_names()]
    total = auto_total(this_machine())
    here = base_preset(total)
    if as_json:
        _print_json({"presets": described, "here": here, "auto_total_bytes": total})
        return
    for entry in described:
        mark = "*" if entry["name"] == here else " "
        size = entry["total_bytes"]
        shown = units.format_size(size) if isinstance(size, int) else "auto"
        print(f"{mark} {entry['name']:<12} {shown:>8}  {entry['about']}")
    print(f"  {'auto':<12} {units.human_size(total):>8}  sized for this machine, from {here}")


@presets_app.command("show")
def show(name: Name) -> None:
    """A preset's own text, every key with its reason."""
    from sluice.daemon.service.settings import load_settings, preset_text, toml_text

    if name == "auto":
        print(toml_text(load_settings("auto", env={})))
    else:
        print(preset_text(name)[0], end="")


@presets_app.command("diff")
def diff(
    old: Name,
    new: Annotated[str, typer.Argument(help="The other one.")],
    as_json: Json = False,
) -> None:
    """The keys in which two presets differ."""
    from sluice.daemon.service.settings import KEYS, changes, load_settings

    found = {
        path: {old: KEYS[path].kind.show(was), new: KEYS[path].kind.show(now)}
        for path, (was, now) in changes(load_settings(old, env={}), load_settings(new, env={})).items()
    }
    if as_json:
        _print_json(found)
        return
    for path, values in found.items():
        print(f"{path:<24} {values[old]!s:>12} -> {values[new]}")


@presets_app.command("validate")
def validate(
    files: Annotated[list[str], typer.Argument(help="Paths or names; a path may be a preset or a settings file.")],
    as_json: Json = False,
) -> None:
    """Check files without starting anything: exit 0 when all are valid, 2 with the first fault of each otherwise."""
    from sluice.daemon.service.settings import load_settings, preset_names
    from sluice.io.errors import PresetError

    results: dict[str, str] = {}
    for file in files:
        try:
            # A settings file may name its preset in the top-level `preset`, a preset may not: accept both here.
            if file in (*preset_names(), "auto"):
                load_settings(file, env={})
            else:
                load_settings(file=Path(file), env={})
            results[file] = "valid"
        except PresetError as error:
            results[file] = str(error)
    faults = [text for text in results.values() if text != "valid"]
    if as_json:
        _print_json(results)
    else:
        for file, text in results.items():
            print(f"{file}: {text}")
    if faults:
        raise typer.Exit(2)


def config(
    preset: Preset = None,
    model: Model = None,
    file: Config = None,
    sets: Sets = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
    as_json: Json = False,
) -> None:
    """The effective settings and where each came from. As TOML: `sluice config > my.toml` freezes them."""
    settings = settings_from(model, preset, file, sets)
    if as_json:
        _print_json(as_table(settings, changed))
        return
    from sluice.daemon.service.settings import toml_text

    text = toml_text(settings)
    if changed:
        kept = [line for line in text.splitlines() if not line.endswith("# default")]
        text = "\n".join(kept)
    print(text)


def as_table(settings: Settings, changed: bool = False) -> dict[str, dict[str, Any]]:
    """ "section.key" -> value as it is written, bytes or seconds where it is a quantity, and where it came from."""
    from sluice.daemon.service.settings import KEYS

    table: dict[str, dict[str, Any]] = {}
    for path, entry in KEYS.items():
        source = settings.provenance.get(path, "default")
        if changed and source == "default":
            continue
        value = settings.get(path)
        row: dict[str, Any] = {"value": entry.kind.show(value), "source": source}
        if isinstance(value, int | float) and not isinstance(value, bool) and isinstance(row["value"], str):
            row["number"] = value
        table[path] = row
    return table
