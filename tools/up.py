#!/usr/bin/env python3
"""From a fresh clone to something that runs: `python3 tools/up.py demo` and `python3 tools/up.py test`.

Needs python3 (3.11 or later, with venv), g++ and make; standard library only. Makes `.venv`, installs what
pyproject.toml names, builds the kernels, then shows the daemon at work or runs every check. The second time nothing is
installed unless pyproject.toml or the kernels' source changed. Exit codes: 0 fine, 1 a check failed, 2 something is
missing on this machine (one line says what, and how to get it), 130 interrupted.
"""

from __future__ import annotations

import sys

# A script puts its own folder first on the path, and a tool there may be called like a standard module (trace).
if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    sys.path.pop(0)

import argparse
import contextlib
import hashlib
import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
WORK = ROOT / "build" / "up"  # logs, stamps, made models; `rm -r build` starts afresh
MINIMUM = (3, 11)
# In the environment, not on the machine: so g++ and make are all the tools the system must have.
BUILD_TOOLS = ("scikit-build-core>=1.0", "pybind11>=3.0", "cmake>=3.20", "ninja>=1.11")
C_COMPILERS = ("cc", "gcc", "clang")
QUESTION = "What is the capital of France?"


class Missing(Exception):
    """Something the machine lacks; the message is the one line that says how to get it."""


class Failed(Exception):
    """A step that did not work; the message names it."""


def say(text: str) -> None:
    print(text, flush=True)


# --- what the machine must have ---------------------------------------------------------------------------------------


def newer_python() -> str | None:
    """A Python on the path that is new enough, when the one we run under is not."""
    return next((found for minor in (14, 13, 12, 11) if (found := shutil.which(f"python3.{minor}"))), None)


def check_machine() -> None:
    """Raises Missing naming the first thing that is not here, with the command that brings it."""
    version = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info < MINIMUM:
        wanted = ".".join(map(str, MINIMUM))
        raise Missing(f"python {version} is too old, {wanted} or later is needed: sudo apt-get install python3.11-venv")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise Missing(f"python's venv module is missing: sudo apt-get install python{version}-venv")
    if not any(map(shutil.which, compilers())):
        raise Missing("no C++ compiler found: sudo apt-get install g++")
    if not any(map(shutil.which, C_COMPILERS)):
        raise Missing("no C compiler found: sudo apt-get install gcc")
    if shutil.which("make") is None:
        raise Missing("make is missing: sudo apt-get install make")


def compilers() -> tuple[str, ...]:
    given = os.environ.get("CXX", "").split()
    return (given[0],) if given else ("c++", "g++", "clang++")


def python_headers() -> Path | None:
    """The folder to add to the compiler's search for Python.h; None where Python's own folder has it.

    Debian keeps the headers in a package of their own. It is fetched and unpacked below build/ when it is absent,
    which needs no root. Raises Missing where that cannot be done.
    """
    own = Path(sysconfig.get_path("include"))
    if (own / "Python.h").is_file():
        return None
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    unpacked = WORK / "headers"
    include = unpacked / "usr" / "include" / name
    if not (include / "Python.h").is_file():
        remedy = f"Python.h is missing: sudo apt-get install {name}-dev"
        if not (shutil.which("apt-get") and shutil.which("dpkg")):
            raise Missing(remedy)
        with tempfile.TemporaryDirectory() as folder:
            try:
                with Step("Python headers", WORK / "headers.log") as step:
                    step.run(["apt-get", "download", f"lib{name}-dev"], cwd=Path(folder))
                    package = next(Path(folder).glob("*.deb"))
                    step.run(["dpkg", "-x", str(package), str(unpacked)])
            except (Failed, StopIteration):
                raise Missing(remedy) from None
    return include


# --- steps with a line of progress ------------------------------------------------------------------------------------


class Step:
    """One named piece of work: its programs' output goes to a log, its last line to the terminal, then the time.

    A program that fails raises Failed after the end of the log was shown.
    """

    def __init__(self, title: str, log: Path) -> None:
        self.title, self.log = title, log
        self.began = 0.0

    def __enter__(self) -> Step:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self.began = time.monotonic()
        self._show("")
        if not sys.stdout.isatty():
            say(f"up: {self.title} ...")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if sys.stdout.isatty():
            print("\r\x1b[K", end="")
        if kind is None:
            say(f"up: {self.title}: {time.monotonic() - self.began:.1f} s")

    def _show(self, line: str) -> None:
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            text = f"up: {self.title} {time.monotonic() - self.began:.0f} s {' '.join(line.split())}"
            print("\r\x1b[K" + text[:width], end="", flush=True)

    def run(self, command: Sequence[str], cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
        with contextlib.ExitStack() as held:
            log = held.enter_context(open(self.log, "a", encoding="utf-8"))
            log.write("$ " + " ".join(command) + "\n")
            program = held.enter_context(
                subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=env or environment(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    text=True,
                    errors="replace",
                )
            )
            assert program.stdout is not None
            for line in program.stdout:
                log.write(line)
                log.flush()
                self._show(line)
        if program.returncode:
            if sys.stdout.isatty():
                print("\r\x1b[K", end="")
            say("".join(f"  | {line}\n" for line in self.log.read_text(errors="replace").splitlines()[-25:]).rstrip())
            raise Failed(
                f"{self.title}: {Path(command[0]).name} ended with {program.returncode}; all of it: {self.log}"
            )


def environment(**changes: str) -> dict[str, str]:
    """Ours, with the environment's programs first and without what would lead pip or Python elsewhere."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    env["PATH"] = f"{VENV / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}"
    # A user's pip settings may ask for things a venv cannot do.
    env |= {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_REQUIRE_VIRTUALENV": "0"}
    env["PYTHONUNBUFFERED"] = "1"  # progress comes when it happens, into a log too
    return env | changes


# --- the environment --------------------------------------------------------------------------------------------------


def requirements(*extras: str) -> list[str]:
    """What pyproject.toml asks for at run time, and for `extras`."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return wanted


def digest(*parts: str | Path) -> str:
    """Of texts, files, and folders with all that is below them."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            total.update(part.encode())
            continue
        for path in sorted(part.rglob("*")) if part.is_dir() else [part]:
            if path.is_file() and path.suffix not in (".so", ".pyc"):
                total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return total.hexdigest()


class Stamps:
    """What was installed for which input, kept inside the venv so that it goes with it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, str]:
        try:
            return dict(json.loads(self.path.read_text()))
        except (OSError, ValueError):
            return {}

    def has(self, name: str, value: str) -> bool:
        return self.read().get(name) == value

    def put(self, name: str, value: str) -> None:
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(self.read() | {name: value}))
        fresh.replace(self.path)


def make_venv(venv: Path) -> None:
    """A working environment in `venv`; one whose interpreter has gone is made anew."""
    python = venv / "bin" / "python"
    if python.exists():
        probe = subprocess.run([str(python), "-c", "import pip"], capture_output=True, check=False)
        if probe.returncode == 0:
            return
        shutil.rmtree(venv)
    with Step(f"virtual environment {venv.name}", WORK / "venv.log") as step:
        step.run([sys.executable, "-m", "venv", str(venv)])


def set_up(*extras: str) -> None:
    """`.venv` with the dependencies, those of `extras`, and the package, editable. Quick when nothing changed."""
    make_venv(VENV)
    stamps = Stamps(VENV / "sluice-up.json")
    env, options = build_environment()
    wanted = [*BUILD_TOOLS, *requirements(*extras)]
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install"]
    # What the tests need includes what the demo needs, so the demo is content with either.
    if not any(stamps.has(name, digest(*BUILD_TOOLS, *requirements(*names))) for name, names in installs(*extras)):
        with Step(f"{len(wanted)} dependencies", WORK / "dependencies.log") as step:
            step.run([*pip, *wanted], env=env | quick_compiler())
        stamps.put(" ".join(extras), digest(*wanted))
    sources = digest(sys.version, str(ROOT), ROOT / "pyproject.toml", ROOT / "kernels_cpp")
    if not stamps.has("package", sources):
        with Step("kernels and package", WORK / "package.log") as step:
            step.run([*pip, "--no-build-isolation", "--no-deps", *options, "-e", str(ROOT)], env=env)
        stamps.put("package", sources)


def build_environment() -> tuple[dict[str, str], list[str]]:
    """(environment, pip options) under which compilers and CMake find Python.h. Raises Missing."""
    headers = python_headers()
    if headers is None:
        return environment(), []
    # pybind11's own search insists on Python's folder; CMake's FindPython takes a hint. Debian's pyconfig.h includes
    # another below the parent folder.
    defined = {"PYBIND11_FINDPYTHON": "ON", "Python_INCLUDE_DIR": str(headers)}
    options = [f"--config-settings=cmake.define.{name}={value}" for name, value in defined.items()]
    return environment(CPATH=f"{headers}{os.pathsep}{headers.parent}"), options


def quick_compiler() -> dict[str, str]:
    """Environment that compiles dependencies without a wheel (liburing) at -O1.

    liburing insists on -O3 for 25 MB of generated glue, 190 s of compiling; at -O1 it is 85 s, and a read of 17 MB
    does not notice. The last -O on a command line wins.
    """
    usual = os.environ.get("CC") or next(filter(shutil.which, C_COMPILERS))
    script = WORK / "cc"
    if len(str(script).split()) > 1:  # CC is a command line: a path with spaces would fall apart
        return {}
    script.write_text(f'#!/bin/sh\nexec {usual} "$@" -O1 -g0\n')
    script.chmod(0o755)
    return {"CC": str(script)}


def installs(*extras: str) -> list[tuple[str, tuple[str, ...]]]:
    """(stamp name, its extras) of each installation that would do for `extras`."""
    return [("dev", ("dev",))] if extras else [("", ()), ("dev", ("dev",))]


# --- demo -------------------------------------------------------------------------------------------------------------


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float = 10.0) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


def get(path: Path, route: str) -> tuple[int, bytes]:
    """Status and body of a GET over the socket at `path`. Raises OSError or http.client.HTTPException."""
    connection = UnixConnection(path)
    try:
        connection.request("GET", route)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class DemoModel:
    """What `--model` takes, where it lies, what it is, and how to ask it."""

    def __init__(self, name: str, folder: Path, what: str, ask: Sequence[str]) -> None:
        self.name, self.folder, self.what, self.ask = name, folder, what, ask

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))


def demo_model() -> DemoModel:
    """The trained model that comes along, or else one made of random weights, once."""
    folder = ROOT / "tools" / "data" / "mini"
    if (folder / "config.json").is_file():
        return DemoModel("mini", folder, "the small trained K3 that comes with sluice", ["--max-tokens", "200"])
    folder = WORK / "demo-model"
    with Step("a checkpoint of random weights, cached", WORK / "synth.log") as step:
        step.run([str(VENV / "bin" / "sluice"), "synth", str(folder), "--preset", "demo"])
    what = "K3's tensor graph with random weights, so its words are random too"
    return DemoModel(str(folder), folder, what, ["--no-thinking", "--max-tokens", "40"])


@contextlib.contextmanager
def daemon(model: str, path: Path, log: Path, options: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """`sluice serve` on the socket `path`, ready; ended and waited for on exit. Raises Failed with its last lines."""
    with open(log, "wb") as output:
        command = [str(VENV / "bin" / "sluice"), "serve", "--model", model, "--socket", str(path), *options]
        program = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment())
    try:
        wait_until_ready(program, path, log)
        yield program
    finally:
        if program.poll() is None:
            program.send_signal(signal.SIGTERM)
        try:
            program.wait(timeout=30)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()


def wait_until_ready(program: subprocess.Popen[bytes], path: Path, log: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and program.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if get(path, "/health/ready")[0] == 200:
                return
        time.sleep(0.05)
    state = "not ready in time" if program.poll() is None else f"ended with {program.returncode}"
    last = "".join(f"  | {line}\n" for line in log.read_text(errors="replace").splitlines()[-10:])
    raise Failed(f"the daemon is {state}\n{last}".rstrip())


def run_json(model: str, options: Sequence[str]) -> dict[str, Any]:
    """The report of one `sluice run` on QUESTION. Raises Failed."""
    command = [str(VENV / "bin" / "sluice"), "run", "--model", model, "--prompt", QUESTION, "--max-tokens", "24"]
    done = subprocess.run(
        [*command, "--json", *options], capture_output=True, text=True, env=environment(), check=False
    )
    if done.returncode:
        raise Failed(f"sluice run ended with {done.returncode}: {(done.stdout + done.stderr).strip()}")
    return dict(json.loads(done.stdout))


def budget(trunk_bytes: int, cache_bytes: int) -> list[str]:
    return ["--set", f"memory.trunk={trunk_bytes}B", "--set", f"memory.expert_cache={cache_bytes}B"]


def demo() -> int:
    """Sets up, then: a daemon on a socket, an answer over it, and the same answer under two budgets."""
    began = time.monotonic()
    set_up()
    model = demo_model()
    folder = Path(tempfile.mkdtemp(prefix="sluice-demo-"))
    try:
        path, log = folder / "sluice.sock", WORK / "serve.log"
        say(f"up: ready to run after {time.monotonic() - began:.1f} s. The model: {model.what}.\n")
        # Room for a tenth of the model as trunk and a third as experts: the rest is read as it is needed.
        options = budget(model.nbytes // 10, model.nbytes // 3)
        say(f"$ sluice serve --model {model.name} --socket {path} {' '.join(options)}")
        with daemon(model.name, path, log, options) as program:
            ask = ["ask", "--socket", str(path), *model.ask, QUESTION]
            say(f'$ sluice {" ".join(ask[:-1])} "{QUESTION}"')
            asked = subprocess.run([str(VENV / "bin" / "sluice"), *ask], env=environment(), check=False)
            if asked.returncode:
                raise Failed(f"sluice ask ended with {asked.returncode}; the daemon's log: {log}")
            say("")
            report_status(json.loads(get(path, "/v1/status")[1]), model.nbytes)
        if program.returncode:
            raise Failed(f"the daemon ended with {program.returncode}; its log: {log}")
        say("stopped       the daemon drained and ended with 0\n")
        compare_budgets(model.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"\nup: demo done in {time.monotonic() - began:.1f} s. Next: README.md, and .venv/bin/sluice --help")
    return 0


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


def report_status(status: dict[str, Any], model_bytes: int) -> None:
    """The daemon's own account of what it just did, beside the size of its model."""
    memory, io = status.get("memory", {}), status.get("io", {})
    experts, trunk = io.get("experts", {}), io.get("trunk", {})
    looked_up = experts.get("hits", 0) + experts.get("shared", 0) + experts.get("misses", 0)
    plan, peak = megabytes(memory.get("plan_bytes", 0)), megabytes(memory.get("peak_rss_bytes", 0))
    say(f"model         {megabytes(model_bytes)} of weights")
    say(f"memory        planned {plan}, peak {peak}, Python itself included")
    say(f"trunk         pinned {megabytes(trunk.get('pinned_bytes', 0))}, ring {megabytes(trunk.get('ring_bytes', 0))}")
    say(f"expert cache  {experts.get('hits', 0) / max(looked_up, 1):.0%} of {looked_up:,} look-ups were hits")
    say(f"read          {megabytes(io.get('bytes', 0))} in {io.get('reads', 0):,} reads by {io.get('backend', '?')}")
    say(f"fingerprint   {status.get('model', {}).get('system_fingerprint', '?')}")


def compare_budgets(model: str) -> None:
    """One prompt under two budgets: more memory makes it faster and changes no byte. Raises Failed if it does."""
    say(f'$ sluice run --prompt "{QUESTION}" --json, with little memory and with plenty')
    prints = set()
    for title, options in (("streamed", budget(0, 0)), ("resident", budget(2**32, 2**32))):
        report = run_json(model, options)
        prints.add(report["logits_fingerprint"])
        rate = report["timings"]["decode_tokens_per_second"]
        read = megabytes(report["io"].get("bytes", 0))
        say(f"{title:13} {rate:7.1f} tokens/s, {read:>11} read, logits {report['logits_fingerprint']}")
    if len(prints) > 1:
        raise Failed("the two budgets gave different logits; that must never happen")
    say("same bytes    yes: the logits are identical to the last bit")


# --- test -------------------------------------------------------------------------------------------------------------


def check_wheel() -> None:
    """Builds the wheel, installs it in an environment of its own and tries what only a missing file would break."""
    folder, venv = WORK / "wheel", WORK / "wheel-venv"
    shutil.rmtree(folder, ignore_errors=True)
    env, options = build_environment()
    make_venv(venv)
    with Step("wheel in an environment of its own", WORK / "wheel.log") as step:
        build = [str(VENV / "bin" / "python"), "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", *options]
        step.run([*build, "--wheel-dir", str(folder), str(ROOT)], env=env)
        wheel = next(folder.glob("sluice-*.whl"))
        missing = missing_from(wheel)
        if missing:
            raise Failed(f"the wheel lacks {', '.join(missing)}")
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install"]
        step.run([*pip, str(wheel)], env=env)
        step.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], env=env)
        with tempfile.TemporaryDirectory() as scratch:  # not the repository: its folders must not be importable
            away = Path(scratch)
            sluice, python = str(venv / "bin" / "sluice"), str(venv / "bin" / "python")
            step.run([python, "-c", IN_THE_WHEEL, str(venv)], cwd=away)
            step.run([sluice, "--help"], cwd=away)
            step.run([sluice, "synth", "model", "--preset", "tiny"], cwd=away)
            run = [sluice, "run", "--model", "model", "--ids", "1,2,3", "--max-tokens", "4", "--json"]
            step.run(run, cwd=away)


# Every module must be importable from the wheel with the declared dependencies alone, and every preset readable. The
# trainer is a developer's script that needs PyTorch.
IN_THE_WHEEL = """
import importlib, pkgutil, sys, tomllib
from importlib import resources
import sluice
assert sluice.__file__.startswith(sys.argv[1]), sluice.__file__
for module in pkgutil.walk_packages(sluice.__path__, "sluice."):
    if not module.name.endswith(".__main__") and not module.name.startswith("sluice.tools.train"):
        importlib.import_module(module.name)
presets = [item for item in resources.files("sluice.presets").iterdir() if item.name.endswith(".toml")]
assert presets, "no presets"
for preset in presets:
    tomllib.loads(preset.read_text())
"""

ROOMS = {room: room for room in ("daemon", "io", "presets", "systemd", "tools")} | {"kernels_cpp/kernels": "kernels"}


def missing_from(wheel: Path) -> list[str]:
    """Files of the rooms that git knows and the wheel has not; empty where git cannot be asked."""
    listed = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=False)
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    missing = []
    for line in listed.stdout.splitlines():
        room = next(room for room in ROOMS if line.startswith(room + "/"))
        if (ROOT / line).exists() and f"sluice/{ROOMS[room]}{line[len(room) :]}" not in held:
            missing.append(line)
    return missing


def test(pytest_arguments: Sequence[str]) -> int:
    """Every check there is, all of them even when one fails; pytest last, so its closing line is near the end."""
    began = time.monotonic()
    set_up("dev")
    python, failed = str(VENV / "bin" / "python"), []
    checks = {
        "ruff check": [python, "-m", "ruff", "check", "."],
        "ruff format": [python, "-m", "ruff", "format", "--check", "."],
        "mypy": [python, "tools/typecheck"],
    }
    for title, command in checks.items():
        try:
            with Step(title, WORK / f"{title.replace(' ', '-')}.log") as step:
                step.run(command)
        except Failed as failure:
            say(f"up: FAILED {failure}")
            failed.append(title)
    try:
        check_wheel()
    except Failed as failure:
        say(f"up: FAILED {failure}")
        failed.append("wheel")
    tests = subprocess.run([python, "-m", "pytest", *pytest_arguments], cwd=ROOT, env=environment(), check=False)
    if tests.returncode:
        failed.append("pytest")
    took = f"{time.monotonic() - began:.0f} s"
    say(f"up: FAILED after {took}: {', '.join(failed)}" if failed else f"up: every check passed in {took}")
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    """Parses, checks the machine and does it; what is missing or failed becomes one line and an exit code."""
    parser = argparse.ArgumentParser(prog="up.py", description="From a fresh clone to something that runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="set up, start the daemon, ask it something, say what it did")
    tests = commands.add_parser("test", help="set up, then ruff, mypy, the built wheel and pytest")
    tests.add_argument("pytest", nargs=argparse.REMAINDER, help="arguments for pytest, after --")
    chosen = parser.parse_args(arguments)
    if sys.version_info < MINIMUM:
        newer = newer_python()
        if newer is not None:
            os.execv(newer, [newer, str(Path(__file__).resolve()), *arguments])
    try:
        check_machine()
        WORK.mkdir(parents=True, exist_ok=True)
        if chosen.command == "demo":
            return demo()
        return test([argument for argument in chosen.pytest if argument != "--"])
    except Missing as missing:
        print(f"up: {missing}", file=sys.stderr)
        return 2
    except Failed as failure:
        print(f"up: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nup: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
