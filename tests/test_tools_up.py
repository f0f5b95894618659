"""tools/up.py and tools/typecheck: what is missing is said in one line, and nothing is done twice."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from sluice.tools import up

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [ROOT / "tools" / "up.py", ROOT / "tools" / "typecheck"]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for stamps, logs and the environment, so that nothing touches the real ones."""
    monkeypatch.setattr(up, "WORK", tmp_path / "work")
    monkeypatch.setattr(up, "VENV", tmp_path / "venv")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    return tmp_path


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


# --- the scripts themselves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_need_the_standard_library_alone(script: Path) -> None:
    names = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names <= sys.stdlib_module_names


def test_an_old_python_can_still_read_the_script_that_says_it_is_too_old() -> None:
    ast.parse(SCRIPTS[0].read_text(), feature_version=(3, 8))


def test_ci_runs_the_same_command_as_people() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "python3 tools/up.py test" in script.read_text()


# --- what the machine lacks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("absent", "remedy"),
    [
        (("c++", "g++", "clang++"), "apt-get install g++"),
        (("cc", "gcc", "clang"), "apt-get install gcc"),
        (("make",), "apt-get install make"),
    ],
)
def test_a_missing_tool_is_one_line_with_its_remedy_and_exit_2(
    absent: tuple[str, ...], remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None if name in absent else f"/usr/bin/{name}")
    assert up.main(["demo"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert remedy in lines[0]


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_python_without_venv_is_told_which_package_has_it(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up.importlib.util, "find_spec", lambda name: None if name == module else object())
    assert up.main(["test"]) == 2
    assert f"python3.{sys.version_info[1]}-venv" in capsys.readouterr().err


def test_a_python_that_is_too_old_hands_over_to_a_newer_one_or_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up, "MINIMUM", (9, 0))
    monkeypatch.setattr(up, "newer_python", lambda: None)
    assert up.main(["demo"]) == 2
    assert "too old" in capsys.readouterr().err
    started: list[list[str]] = []
    monkeypatch.setattr(up, "newer_python", lambda: "/usr/bin/python3.13")
    monkeypatch.setattr(up.os, "execv", lambda path, arguments: started.append(arguments))
    up.main(["demo"])
    assert started[0][0] == "/usr/bin/python3.13"
    assert started[0][-1] == "demo"


def test_headers_that_cannot_be_fetched_are_named_with_their_package(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up.sysconfig, "get_path", lambda name: str(work / "nowhere"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(up.Missing, match=r"python3\.\d+-dev"):
        up.python_headers()


# --- steps and stamps -------------------------------------------------------------------------------------------------


def test_a_step_that_fails_shows_the_end_of_its_log(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, "-c", "print('so it goes'); raise SystemExit(3)"]
    with pytest.raises(up.Failed, match="ended with 3"), up.Step("trial", up.WORK / "trial.log") as step:
        step.run(program)
    assert "  | so it goes" in capsys.readouterr().out
    assert "so it goes" in (up.WORK / "trial.log").read_text()


def test_programs_run_in_the_environment_and_not_in_the_callers(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    env = up.environment(CPATH="x")
    assert "PYTHONPATH" not in env
    assert env["CPATH"] == "x"
    assert env["PATH"].startswith(str(up.VENV / "bin"))


def test_what_is_installed_is_not_installed_again_until_its_input_changes(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(up.Step, "run", lambda self, command, **_: commands.append(list(command)))
    monkeypatch.setattr(up, "make_venv", lambda venv: None)
    up.set_up("dev")
    assert len(commands) == 2
    assert any(part.startswith("pytest") for part in commands[0])
    assert commands[1][-2:] == ["-e", str(ROOT)]
    up.set_up("dev")
    up.set_up()  # what the tests need includes what the demo needs
    assert len(commands) == 2
    monkeypatch.setattr(up, "requirements", lambda *extras: ["something-new"])
    up.set_up("dev")
    assert len(commands) == 3
    assert "something-new" in commands[2]


def test_a_step_that_failed_is_tried_again(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: up.Step, command: list[str], **_: object) -> None:
        raise up.Failed("no network")

    monkeypatch.setattr(up, "make_venv", lambda venv: None)
    monkeypatch.setattr(up.Step, "run", fail)
    with pytest.raises(up.Failed):
        up.set_up()
    assert up.Stamps(up.VENV / "sluice-up.json").read() == {}


def test_damaged_stamps_count_as_none(work: Path) -> None:
    stamps = up.Stamps(work / "stamps.json")
    stamps.path.write_text("{broken")
    assert not stamps.has("package", "x")
    stamps.put("package", "x")
    stamps.put("dev", "y")
    assert json.loads(stamps.path.read_text()) == {"package": "x", "dev": "y"}


def test_a_digest_covers_every_source_and_no_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "ROOT", tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cpp").write_text("1")
    first = up.digest("x", tmp_path / "src")
    (tmp_path / "src" / "_native.so").write_text("built")
    assert up.digest("x", tmp_path / "src") == first
    (tmp_path / "src" / "b.cpp").write_text("2")
    assert up.digest("x", tmp_path / "src") != first


# --- demo -------------------------------------------------------------------------------------------------------------

SERVER = """#!{python}
import signal, socket, sys
path = sys.argv[sys.argv.index("--socket") + 1]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
answers = [b"HTTP/1.1 503 No\\r\\nContent-Length: 0\\r\\n\\r\\n", b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n"]
while True:
    connection, _ = listener.accept()
    connection.recv(4096)
    connection.sendall(answers.pop(0) if len(answers) > 1 else answers[0])
    connection.close()
"""


def test_the_daemon_is_waited_for_and_ended_cleanly(work: Path) -> None:
    executable(up.VENV / "bin" / "sluice", SERVER.format(python=sys.executable))
    with up.daemon("model", work / "s.sock", work / "serve.log", []) as program:
        assert up.get(work / "s.sock", "/health/ready")[0] == 200
    assert program.returncode == 0


def test_a_daemon_that_refuses_to_start_is_reported_with_its_last_words(work: Path) -> None:
    executable(up.VENV / "bin" / "sluice", "#!/bin/sh\necho sluice: short by 12 bytes >&2\nexit 3\n")
    with (
        pytest.raises(up.Failed, match=r"(?s)ended with 3.*short by 12 bytes"),
        up.daemon("model", work / "s.sock", work / "serve.log", []),
    ):
        pytest.fail("it never was ready")


def test_the_account_of_a_run_survives_a_status_with_parts_missing(capsys: pytest.CaptureFixture[str]) -> None:
    up.report_status({"io": {"experts": {"hits": 3, "misses": 1}}, "model": {"system_fingerprint": "fp_1"}}, 2_000_000)
    said = capsys.readouterr().out
    assert "75% of 4 look-ups" in said
    assert "fp_1" in said


def test_different_logits_under_two_budgets_fail_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = iter("ab")

    def report(model: str, options: list[str]) -> dict[str, object]:
        return {"logits_fingerprint": next(reports), "timings": {"decode_tokens_per_second": 1.0}, "io": {}}

    monkeypatch.setattr(up, "run_json", report)
    with pytest.raises(up.Failed, match="different logits"):
        up.compare_budgets("model")


# --- wheel and types --------------------------------------------------------------------------------------------------


def test_a_file_that_the_wheel_lacks_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "sluice-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sluice/tools/mini.py", "")
    missing = up.missing_from(wheel)
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no list of files to compare with")
    assert "tools/data/mini_tiktoken.model" in missing
    assert "kernels_cpp/kernels/__init__.py" in missing
    assert "tools/mini.py" not in missing


@pytest.fixture(scope="module")
def typecheck() -> ModuleType:
    loader = SourceFileLoader("typecheck", str(SCRIPTS[1]))
    spec = spec_from_loader("typecheck", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_types_are_checked_through_links_that_name_every_room(tmp_path: Path, typecheck: ModuleType) -> None:
    for _ in range(2):
        package = typecheck.lay_package(tmp_path)
    assert {path.name for path in package.iterdir()} == {*typecheck.ROOMS, "__init__.pyi", "py.typed"}
    assert (package / "kernels").resolve() == tmp_path / "kernels_cpp" / "kernels"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("build/typing/sluice/io/store.py:3: error: x", "io/store.py:3: error: x"),
        ("build/typing/sluice/kernels/__init__.py:1: note", "kernels_cpp/kernels/__init__.py:1: note"),
        ("Success: no issues", "Success: no issues"),
    ],
)
def test_messages_come_back_with_the_repositorys_paths(line: str, shown: str, typecheck: ModuleType) -> None:
    assert typecheck.repository_path(line) == shown
