"""A real systemd in a container: a debootstrap tree, sluice's wheel in it, and a way to run commands there.

The tree of plain Debian is kept between runs below the temporary folder (SLUICE_SYSTEM_CACHE names another place); what
is installed in it is made anew whenever the sources change. Nothing outside that folder is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("SLUICE_SYSTEM_CACHE", Path(tempfile.gettempdir()) / "sluice-system-tests"))
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv,procps"
ROOMS = ("daemon", "io", "kernels_cpp", "presets", "systemd", "tools")
BOOT_SECONDS = 90


def missing() -> str:
    """Why the tests cannot run here, in words; "" when they can."""
    if os.geteuid() != 0:
        return "needs root (systemd-nspawn)"
    for program, package in (("systemd-nspawn", "systemd-container"), ("debootstrap", "debootstrap")):
        if shutil.which(program) is None:
            return f"needs {program} (Debian package {package})"
    if not suite():
        return "needs a Debian or Ubuntu host (VERSION_CODENAME of /etc/os-release)"
    system = subprocess.run(["/usr/bin/python3", "-V"], capture_output=True, text=True, check=False).stdout.split()
    spaces = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    if subprocess.run(spaces, stderr=subprocess.DEVNULL, check=False).returncode:
        return "needs the right to make mount and pid namespaces"
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    if len(system) < 2 or not system[1].startswith(ours + "."):
        return f"needs the distribution's own Python {ours}: the wheels made here must fit the tree"
    return ""


def suite() -> str:
    """The release name of the host, which the tree takes too."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/etc/os-release").read_text().splitlines():
            name, _, value = line.partition("=")
            facts[name] = value.strip('"')
    return facts.get("VERSION_CODENAME", "") if facts.get("ID") in ("debian", "ubuntu") else ""


def run(command: Sequence[str | Path], *, seconds: float = 600, **more: object) -> str:
    """The command's output; AssertionError with all of it when it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
        **more,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout[-4000:]}"
    return str(done.stdout)


def _finished(folder: Path, key: str) -> bool:
    mark = folder.with_name(folder.name + ".made-of")
    return folder.is_dir() and mark.is_file() and mark.read_text() == key


def _finish(folder: Path, key: str) -> None:
    folder.with_name(folder.name + ".made-of").write_text(key)


def base_tree() -> Path:
    """Plain Debian, made once (about a minute)."""
    tree = CACHE / f"base-{suite()}"
    if not _finished(tree, PACKAGES):
        shutil.rmtree(tree, ignore_errors=True)
        mirror = [os.environ["SLUICE_DEBIAN_MIRROR"]] if "SLUICE_DEBIAN_MIRROR" in os.environ else []
        components = ["--components=main,universe"] if "ubuntu" in Path("/etc/os-release").read_text().lower() else []
        try:
            run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", *components, suite(), tree, *mirror])
        except AssertionError as error:  # no network, no mirror: nothing of ours was tried yet
            pytest.skip(f"debootstrap made no tree: {str(error)[-300:]}")
        _finish(tree, PACKAGES)
    return tree


def sources() -> list[Path]:
    """Everything that goes into the wheel."""
    found = [REPOSITORY / "pyproject.toml", *(f for room in ROOMS for f in sorted((REPOSITORY / room).rglob("*")))]
    return [f for f in found if f.is_file() and "__pycache__" not in f.parts and f.suffix != ".so"]


def source_key() -> str:
    """A hash over all of it."""
    total = hashlib.sha256()
    for file in sources():
        total.update(str(file.relative_to(REPOSITORY)).encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


def fresh_wheel() -> Path | None:
    """The wheel `tools/up.py test` has just made, if no source is younger: it saves a minute of compiling."""
    made = max((REPOSITORY / "build/up/wheel").glob("sluice-*.whl"), key=lambda f: f.stat().st_mtime, default=None)
    young = max(file.stat().st_mtime for file in sources())
    return made if made is not None and made.stat().st_mtime > young else None


def wheels() -> Path:
    """A folder with sluice's wheel and those of everything it needs."""
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    folder = CACHE / "wheels"
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "-w", folder]
    needs = "\n".join(project["dependencies"])
    if not _finished(folder, needs):
        run([*pip, *project["dependencies"]])
        _finish(folder, needs)
    mark = CACHE / "sluice"
    if not _finished(mark, source_key()):
        for old in folder.glob("sluice-*.whl"):
            old.unlink()
        key, made = source_key(), fresh_wheel()
        if made is not None:
            shutil.copy(made, folder)
        else:
            run([*pip, "--no-deps", "-C", f"build-dir={CACHE / 'build'}", REPOSITORY])
        mark.mkdir(exist_ok=True)
        _finish(mark, key)
    return folder


def prepared_tree() -> Path:
    """The tree with sluice in /opt/sluice, as an administrator would install it: a venv and pip."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        base, house = base_tree(), wheels()
        tree = CACHE / "prepared"
        key = (CACHE / "sluice.made-of").read_text()
        if not _finished(tree, key):
            if not (tree / "opt/sluice/bin/pip").exists():
                shutil.rmtree(tree, ignore_errors=True)
                run(["cp", "-a", "--reflink=auto", base, tree])
                run(["chroot", tree, "python3", "-m", "venv", "/opt/sluice"])
            shutil.rmtree(tree / "wheels", ignore_errors=True)
            shutil.copytree(house, tree / "wheels")
            pip = ["chroot", tree, "/opt/sluice/bin/pip", "install", "-q", "--no-index", "--find-links", "/wheels"]
            run([*pip, "--upgrade", "sluice"])
            run([*pip, "--force-reinstall", "--no-deps", "sluice"])
            shutil.rmtree(tree / "wheels")
            _finish(tree, key)
        return tree


class Machine:
    """A booted container. `run` executes a command in it as root or as another user."""

    def __init__(self, root: Path, process: subprocess.Popen[bytes], leader: int, console: Path) -> None:
        self.root, self.process, self.leader, self.console = root, process, leader, console

    def command(self, *command: str, user: str | None = None) -> list[str]:
        """The host's command line that runs `command` inside."""
        enter = ["nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w", "--"]
        clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"]
        become = ["runuser", "-u", user, "--"] if user else []
        return [*enter, *clean, *become, *command]

    def run(self, *command: str, user: str | None = None, seconds: float = 60, code: int | None = 0) -> str:
        """Standard output and error together; the exit code must be `code` unless that is None."""
        done = subprocess.run(
            self.command(*command, user=user),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
        if code is not None:
            assert done.returncode == code, (
                f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{self.journal()}"
            )
        return done.stdout

    def spawn(self, *command: str, user: str | None = None) -> subprocess.Popen[str]:
        """A command left running, its output readable line by line."""
        return subprocess.Popen(
            self.command(*command, user=user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Properties of a unit as systemd has them."""
        listed = self.run("systemctl", "show", unit, *(f"--property={name}" for name in properties))
        return dict(line.partition("=")[::2] for line in listed.splitlines() if "=" in line)

    def wait_for(self, unit: str, seconds: float = 60, **wanted: str) -> dict[str, str]:
        """Until the unit's properties have these values; AssertionError with the journal when they never do."""
        deadline = time.monotonic() + seconds
        while True:
            state = self.show(unit, *wanted)
            if state == wanted:
                return state
            assert time.monotonic() < deadline, f"{unit} is {state}, not {wanted}\n{self.journal()}"
            time.sleep(0.2)

    def journal(self, unit: str = "sluice.service", lines: int = 60) -> str:
        """The last lines a unit logged."""
        command = self.command("journalctl", "--no-pager", "-o", "cat", "-n", str(lines), "-u", unit)
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout

    def write(self, path: str, text: str) -> None:
        """A file of the container."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def _leader(nspawn: int) -> int | None:
    """The container's first process, as the host numbers it: nspawn's child whose own pid inside is 1."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{nspawn}/task/{nspawn}/children").read_text().split():
            for line in Path(f"/proc/{child}/status").read_text().splitlines():
                if line.startswith("NSpid:") and line.split()[-1] == "1":
                    return int(child)
    return None


@contextlib.contextmanager
def booted(root: Path, console: Path) -> Iterator[Machine]:
    """Boots the tree and waits until systemd has reached its target; powers it off at the end."""
    command = ["systemd-nspawn", "-q", "-D", str(root), "--boot", "--register=no", "--keep-unit", "--console=pipe"]
    environment = dict(os.environ)
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        environment["UNIFIED_CGROUP_HIERARCHY"] = "no"  # the host's own hierarchy is the old one, or both
    with console.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    try:
        deadline = time.monotonic() + BOOT_SECONDS
        leader: int | None = None
        while True:
            leader = leader or _leader(process.pid)
            if leader is not None:
                machine = Machine(root, process, leader, console)
                state = machine.run("systemctl", "is-system-running", code=None, seconds=20).strip()
                if state in ("running", "degraded"):
                    break
            assert process.poll() is None, f"systemd-nspawn ended\n{console.read_text(errors='replace')[-3000:]}"
            assert time.monotonic() < deadline, f"no boot\n{console.read_text(errors='replace')[-3000:]}"
            time.sleep(0.2)
        yield machine
        machine.run("systemctl", "poweroff", code=None)
    finally:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
