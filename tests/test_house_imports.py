"""The picture of the house stays true: which room may import which, read from the source with `ast`.

daemon -> engine -> model -> io and kernels; io and kernels do not know each other; nobody imports tools but the
command line. An import inside a function or under TYPE_CHECKING points just as much as one at the top.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"sluice.daemon": "daemon", "sluice.io": "io", "sluice.kernels": "kernels_cpp/kernels", "sluice.tools": "tools"}

# Who may import whom, nearest room first: the first prefix that fits a module decides. A room may always import itself.
# `errors` is the root of the error tree at the bottom of the house.
BELOW_MODEL = ("sluice.io", "sluice.kernels")
ALLOWED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sluice.kernels", ()),
    ("sluice.io", ()),
    ("sluice.daemon.model", BELOW_MODEL),
    ("sluice.daemon.chat", ("sluice.io.errors",)),
    ("sluice.daemon.service", ("sluice.daemon.model", *BELOW_MODEL)),
    ("sluice.daemon.engine", ("sluice.daemon.model", "sluice.daemon.chat", "sluice.daemon.service", *BELOW_MODEL)),
    (
        "sluice.daemon.api",
        ("sluice.daemon.engine", "sluice.daemon.chat", "sluice.daemon.service", "sluice.daemon.model", "sluice.io"),
    ),
    ("sluice.daemon.cli", ("sluice",)),
    ("sluice.daemon", ("sluice.daemon", "sluice.io", "sluice.kernels", "sluice.presets")),
    ("sluice.tools", ("sluice",)),
)


def within(module: str, prefix: str) -> bool:
    """Whether `module` is `prefix` or lies inside it."""
    return module == prefix or module.startswith(prefix + ".")


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything `source` imports. `from a import b` counts as a.b: b may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def offences(source: str, module: str, is_package: bool = False) -> list[tuple[int, str]]:
    """(line, reason) of each import in `source` that points up the house, and of each that cannot work."""
    room, allowed = next((prefix, allowed) for prefix, allowed in ALLOWED if within(module, prefix))
    found: list[tuple[int, str]] = []
    for line, target in imports(source, module, is_package):
        if target.startswith("io.") and target.split(".")[1] in house_files("io"):
            found.append((line, f"{target}: the standard io has no such part; write sluice.{target}"))
        elif target == "sluice.io":
            found.append((line, "`from sluice import io` hides the standard io; import from sluice.io.<module>"))
        elif target in ("sluice.__version__", "sluice"):
            continue
        elif within(target, "sluice"):
            # `from sluice import kernels` names the room, `sluice.kernels.matmul` a thing in it: both are covered.
            if not any(within(target, prefix) for prefix in (room, *allowed)):
                found.append((line, f"{module} may not import {target}: {room} may use {allowed or 'itself only'}"))
        elif room == "sluice.kernels" and target.split(".")[0] not in {"numpy", "__future__", *sys.stdlib_module_names}:
            found.append((line, f"{module} may not import {target}: kernels know numpy alone"))
    return found


def house_files(room: str) -> set[str]:
    return {path.stem for path in (ROOT / room).glob("*.py")}


def modules() -> Iterator[tuple[Path, str]]:
    for package, folder in ROOMS.items():
        for path in sorted((ROOT / folder).rglob("*.py*")):
            if path.suffix in (".py", ".pyi"):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                yield path, ".".join([package, *(part for part in parts if part != "__init__")])


def test_imports_point_down_the_house_never_up() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line}: {reason}"
        for path, module in modules()
        for line, reason in offences(path.read_text(), module, path.stem == "__init__")
    ]
    assert not lines, "\n" + "\n".join(lines)


@pytest.mark.parametrize(
    ("module", "source", "line"),
    [
        ("sluice.io.store", "import os\nfrom sluice.kernels import matmul\n", 2),
        ("sluice.io.store", "def f():\n    from sluice.daemon.model import names\n", 2),
        ("sluice.daemon.model.graph", "import sluice.daemon.engine.scheduler", 1),
        ("sluice.daemon.model.graph", "from ..engine import scheduler", 1),
        ("sluice.daemon.chat.xtml", "from sluice.daemon.engine.requests import EngineClient", 1),
        ("sluice.daemon.service.settings", "from sluice.tools.mini import synth", 1),
        ("sluice.daemon.engine.run", "from sluice.tools import mini", 1),
        ("sluice.daemon.api.app", "from sluice import io", 1),
        ("sluice.io.ring", "from io.errors import StoreError", 1),
        ("sluice.kernels.extra", "import numpy\nimport torch", 2),
    ],
)
def test_an_import_that_points_up_is_named_with_its_line(module: str, source: str, line: int) -> None:
    assert [found for found, _ in offences(source, module)] == [line]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sluice.daemon.cli", "from sluice.tools.mini import synth"),
        ("sluice.daemon.model.graph", "from sluice import kernels\nfrom sluice.io.trunk import Block\nimport io"),
        ("sluice.daemon.api.app", "from sluice.daemon.engine.requests import EngineClient\nfrom ..chat import xtml"),
        ("sluice.daemon.service.notify", "from sluice import __version__\nfrom sluice.io.errors import PresetError"),
        ("sluice.tools.pack", "from sluice.daemon.service.settings import load_settings"),
    ],
)
def test_an_import_that_points_down_passes(module: str, source: str) -> None:
    assert offences(source, module) == []


def test_folders_that_share_a_standard_name_are_no_packages() -> None:
    for folder in ("io", "tests"):
        assert not list((ROOT / folder).glob("__init__.py*")), f"{folder}/__init__.py breaks mypy and pytest"
    assert not (ROOT / "tests" / "io").exists(), "tests are flat: test_io_<thing>.py"


def test_no_script_is_called_like_a_standard_module() -> None:
    named = {path.name for folder in ("tools", "tests") for path in (ROOT / folder).glob("*.py")}
    assert not {name for name in named if name.removesuffix(".py") in sys.stdlib_module_names}


def test_every_test_file_has_a_name_of_its_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    assert sorted(names) == sorted(set(names)), "prepend mode cannot hold two modules of one name"
