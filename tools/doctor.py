"""`sluice doctor`: is this machine fit for this model, is the model whole, does the service run, and what to do next.

Looks only: starts nothing, writes nothing, and reads weights only for the measurement and with --deep. Each section is
a function that returns findings; the exit code is that of the first finding that fails (DESIGN 5's codes).
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.daemon.options import Config, Json, Model, Preset, Sets, settings_from
from sluice.io.errors import BudgetError, PresetError, SluiceError, StoreError
from sluice.tools import probe, published

if TYPE_CHECKING:
    from sluice.daemon.engine.planning import ModelFiles
    from sluice.daemon.service.settings import Settings
    from sluice.kernels.topology import Topology

CONFIGURATION, PLAN, DATA = 2, 3, 4
NAMED = 8  # of a long list, this many are named
SERVICE_SETTINGS = Path("/etc/sluice/sluice.toml")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. state: "ok", "note" (worth knowing), "warn" (slower or riskier than it could be) or
    "fail"; code: what a failure makes the exit code; remedy: what to do, "" when nothing."""

    section: str
    text: str
    state: str = "ok"
    remedy: str = ""
    code: int = 0


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


# --- Machine --------------------------------------------------------------------------------------------------------


def cpu_model(cpuinfo: str) -> str:
    """The processor's name from the text of /proc/cpuinfo; "unknown processor" where it has none."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "uarch") and value.strip():
            return value.strip()
    return "unknown processor"


def cpu_flags(cpuinfo: str) -> list[str]:
    """Those features our kernels could use."""
    wanted = (
        "avx2",
        "fma",
        "avx512f",
        "avx512_vnni",
        "avx_vnni",
        "avx512_bf16",
        "amx_bf16",
        "asimd",
        "asimddp",
        "i8mm",
    )
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            present = set(value.split())
            return [flag for flag in wanted if flag in present]
    return []


def cpu_findings(settings: Settings) -> Iterator[Finding]:
    """Processor, kernels, cores, memory nodes."""
    from sluice import kernels
    from sluice.kernels.topology import read_topology

    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    flags = ", ".join(cpu_flags(cpuinfo)) or "none that matter"
    yield Finding("cpu", f"{cpu_model(cpuinfo)}, {platform.machine()}; features {flags}")
    available, chosen = kernels.available_isas(), kernels.isa()
    wanted = settings.compute.isa
    if wanted != "auto" and wanted not in available:
        text = f"compute.isa = {wanted!r}, but this machine has {', '.join(available)}"
        yield Finding("cpu", text, "fail", 'set compute.isa = "auto"', CONFIGURATION)
    elif chosen == "scalar":
        yield Finding(
            "cpu", "only the scalar kernels run here: correct, but many times slower", "warn", "use a CPU with AVX2"
        )
    else:
        yield Finding("cpu", f"kernels {chosen} of {', '.join(available)}")
    yield from topology_findings(read_topology(), settings)


def topology_findings(topology: Topology, settings: Settings) -> Iterator[Finding]:
    """Which CPUs share cores and memory, and what the compute threads make of it."""
    from sluice.daemon.engine.placement import plan_threads
    from sluice.daemon.service.units import format_cpu_list

    allowed, nodes = len(topology.cpus), topology.node_bytes or {0: 0}
    yield Finding(
        "cpu",
        f"{len(topology.cores())} physical cores with {allowed} CPUs allowed to us of {os.cpu_count()}, "
        f"{len(nodes)} memory node(s)",
    )
    for node, nbytes in sorted(nodes.items()):
        cpus = tuple(cpu.id for cpu in topology.cpus if cpu.node == node)
        text = f"node {node}: CPUs {format_cpu_list(cpus) if cpus else 'none of ours'}"
        yield Finding("cpu", text + (f", cores at {format_cpu_list(tuple(topology.cores(node)))}" if cpus else "")
                      + (f", {_gb(nbytes)}" if nbytes else ""))  # fmt: skip
    try:
        plan = plan_threads(settings.compute, topology)
    except SluiceError as error:
        yield Finding("cpu", str(error), "fail", "change it in the preset", CONFIGURATION)
        return
    where = f"on CPUs {', '.join(map(str, plan.cpus))}" if plan.cpus else "where the scheduler puts them"
    homes = f", rows of experts homed to nodes {', '.join(map(str, plan.nodes))}" if plan.homes else ""
    widths = "".join(
        f", {width} for {what}" for what, width in (("attention", plan.others), ("experts", plan.experts)) if width
    )
    yield Finding("cpu", f"{plan.threads} compute threads {where}{widths}{homes}")


def memory_findings(settings: Settings) -> Iterator[Finding]:
    """Memory, the limit that counts and who sets it, locking, swap."""
    import resource

    from sluice.daemon.service import limits

    table = limits.meminfo()
    available = limits.available_memory() or 0
    yield Finding(
        "memory", f"{_gb(table.get('MemTotal', 0))} in all, {_gb(available)} available with reclaimable cache"
    )
    limit = limits.memory_limit(settings.memory.total)
    others = "; ".join(f"{_gb(other.size)} {other.source}" for other in limit.considered[1:4])
    yield Finding("memory", f"limit {_gb(limit.size)}: {limit.source}" + (f" (then {others})" if others else ""))
    if table.get("SwapTotal", 0):
        yield Finding(
            "memory", f"{_gb(table['SwapTotal'])} of swap", "note", "the unit's MemorySwapMax=0 keeps weights out of it"
        )
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] != resource.RLIM_INFINITY:
        yield Finding(
            "memory", "memory cannot be locked by this user (RLIMIT_MEMLOCK)", "note", "the service may: LimitMEMLOCK"
        )
    if not Path("/proc/pressure/memory").exists():
        yield Finding(
            "memory", "the kernel reports no pressure (PSI)", "note", "nearness of the limit is watched instead"
        )


# --- Drives ---------------------------------------------------------------------------------------------------------


def uring_finding(settings: Settings) -> Finding:
    """Whether io_uring can be had, and whether that is what was asked for."""
    from sluice.io.reader import why_no_uring

    code = probe.uring_errno()
    if not code:
        return Finding("drives", "io_uring works")
    why = why_no_uring(code)
    if settings.io.backend == "uring":
        return Finding("drives", f"io_uring: {why}", "fail", 'set io.backend = "auto"', CONFIGURATION)
    return Finding("drives", f"io_uring: {why}", "note", "reads go through threads; the same bytes, a little more CPU")


def drive_findings(folders: Sequence[Path], rate_seconds: float) -> Iterator[Finding]:
    """Each folder's file system, direct reads, measured rates (0 seconds: not measured), room, and what it hangs on."""
    try:
        mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        mountinfo = ""
    for folder in folders:
        try:
            place = folder.resolve(strict=True)
            info = os.statvfs(place)
        except OSError as error:
            yield Finding("drives", f"{folder}: {error.strerror}", "fail", "mount it, or correct model.roots", DATA)
            continue
        mount = probe.find_mount(place, mountinfo)
        kind = mount.kind if mount else "unknown file system"
        yield Finding(
            "drives", f"{folder}: {kind} on {mount.source if mount else '?'}, {_gb(info.f_bavail * info.f_frsize)} free"
        )
        if mount is not None and mount.over_network:
            remedy = "copy the model to a local NVMe drive: sluice download FOLDER --to DRIVE"
            yield Finding("drives", f"{folder} is reached over the network ({mount.kind})", "warn", remedy)
        elif mount is not None and probe.on_usb(mount.device):
            remedy = "an internal NVMe drive is several times faster and does not fall off"
            yield Finding("drives", f"{folder} hangs on USB", "warn", remedy)
        elif mount is not None and probe.spins(mount.device):
            yield Finding("drives", f"{folder} is a rotating disk", "warn", "an NVMe drive is some twenty times faster")
        files = sorted(place.glob("*.safetensors")) + sorted(place.glob("*.bin"))
        if not files:
            continue
        direct = probe.direct_problem(files[0])
        if direct:
            yield Finding("drives", f"{folder}: O_DIRECT {direct}", "note", "reads go through the page cache")
        else:
            yield Finding("drives", f"{folder}: O_DIRECT works")
        if rate_seconds > 0:
            yield _rate_finding(folder, files, rate_seconds, not direct)


def _rate_finding(folder: Path, files: Sequence[Path], seconds: float, direct: bool) -> Finding:
    try:
        rates = [probe.measure(files, seconds, in_flight, direct) for in_flight in (1, 4)]
    except OSError as error:
        return Finding(
            "drives", f"{folder}: reading fails: {error.strerror}", "fail", "look at dmesg for this drive", DATA
        )
    shown = [f"{rate.bytes_per_second / 1e9:.2f} GB/s with {rate.in_flight} in flight" for rate in rates if rate]
    if not shown:
        return Finding("drives", f"{folder}: nothing large enough to measure a rate with", "note")
    how = "" if direct else ", through the page cache"
    return Finding("drives", f"{folder}: reads {', '.join(shown)} (16 MiB each{how})")


# --- Checkpoint -----------------------------------------------------------------------------------------------------


def shard_findings(path: Path, roots: Sequence[Path]) -> Iterator[Finding]:
    """Missing, short and foreign shards, all of them by name: each header against its file's size and the index."""
    from sluice.io import safetensors

    folders = [path, *roots]
    index_path = next(
        (
            folder / "model.safetensors.index.json"
            for folder in folders
            if (folder / "model.safetensors.index.json").is_file()
        ),
        None,
    )
    if index_path is None:
        return
    try:
        index = safetensors.read_index(index_path)
    except StoreError as error:
        yield Finding("model", str(error), "fail", "sluice download brings it again", DATA)
        return
    is_k3 = index.total_bytes == published.K3_TOTAL_SIZE
    missing: list[str] = []
    broken: list[str] = []
    for name, (count, names) in index.shards.items():
        file = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if file is None:
            missing.append(name)
            continue
        number = published.k3_shard_number(name) if is_k3 else None
        size = file.stat().st_size
        if number is not None and size != published.k3_shard_bytes(number):
            broken.append(f"{name} has {size} bytes, published are {published.k3_shard_bytes(number)}")
            continue
        try:
            header = safetensors.read_header(file)
        except StoreError as error:
            broken.append(str(error))
            continue
        if (len(header.names), safetensors.name_sum(header.names)) != (count, names):
            broken.append(f"{name} holds other tensors than the index says: a file of another model or revision")
    if missing:
        looked = ", ".join(map(str, folders))
        text = f"{len(missing)} of {len(index.shards)} shards are missing: {_some(missing)} (looked in {looked})"
        yield Finding(
            "model", text, "fail", "sluice download goes on where it stopped; or name their drive with --also", DATA
        )
    for text in broken[:NAMED]:
        yield Finding("model", text, "fail", "delete this file and let sluice download bring it again", DATA)
    if len(broken) > NAMED:
        yield Finding("model", f"{len(broken) - NAMED} further shards are short or foreign", "fail", "", DATA)


def size_findings(path: Path, roots: Sequence[Path], count: int) -> Iterator[Finding]:
    """Shards whose headers are right, against the sizes published for Kimi K3 where it is that."""
    from sluice.tools.published import K3_SHARDS, k3_shard_bytes, k3_shard_number

    numbers = {k3_shard_number(file.name): file for folder in [path, *roots] for file in folder.glob("*.safetensors")}
    k3 = {number: file for number, file in numbers.items() if number is not None}
    wrong = [file.name for number, file in sorted(k3.items()) if file.stat().st_size != k3_shard_bytes(number)]
    # A smaller model may have 96 shards too: only one with most of the published sizes is taken for K3.
    is_k3 = len(k3) == K3_SHARDS and len(wrong) < K3_SHARDS // 2
    if is_k3 and wrong:
        text = f"{_some(wrong)} do not have the size published for Kimi K3"
        yield Finding("model", text, "fail", "delete them and let sluice download bring them again", DATA)
    else:
        known = ", sizes as published for Kimi K3" if is_k3 else ""
        yield Finding("model", f"{count} file{'s' if count != 1 else ''} with weights, all there and whole{known}")


def checksum_findings(path: Path, roots: Sequence[Path], say: Callable[[str], None]) -> Iterator[Finding]:
    """Every weight file read whole; its SHA-256 against what the download noted, SHA256SUMS, or what was published."""
    from sluice.tools.download import read_manifest
    from sluice.tools.transfer import SUMS_FILE, file_sha256, parse_sums

    known: dict[str, str] = {}
    for folder in [path, *roots]:
        sums = folder / SUMS_FILE
        if sums.is_file():
            known |= parse_sums(sums.read_text(encoding="utf-8", errors="replace"))
    noted = {name: str(entry.get("sha256")) for name, entry in read_manifest(path).items() if entry.get("sha256")}
    proved, unproved, wrong = 0, [], []
    for folder in [path, *roots]:
        for file in sorted(folder.glob("*.safetensors")):
            say(f"reading {file}")
            try:
                found = file_sha256(file)
            except OSError as error:
                yield Finding(
                    "model", f"{file}: cannot be read: {error.strerror}", "fail", "look at dmesg for this drive", DATA
                )
                continue
            number = published.k3_shard_number(file.name)
            size_fits = number is not None and file.stat().st_size == published.k3_shard_bytes(number)
            expected = known.get(file.name) or noted.get(file.name)
            if expected is None and size_fits and number is not None:
                expected = published.k3_shard_sha256(number)
            if expected is None:
                unproved.append(file.name)
            elif expected == found:
                proved += 1
            else:
                wrong.append(file.name)
    for name in wrong:
        yield Finding(
            "model",
            f"{name}: its SHA-256 is not the one it should have",
            "fail",
            "delete it and download it again",
            DATA,
        )
    if proved:
        yield Finding("model", f"{proved} files have the SHA-256 they should have")
    if unproved:
        yield Finding("model", f"no checksum is known for {_some(unproved)}; read without error", "note")


def model_findings(
    settings: Settings, deep: bool, say: Callable[[str], None]
) -> tuple[list[Finding], ModelFiles | None]:
    """The checkpoint, from its files to every tensor of every layer and expert; and the model, if it opens."""
    from sluice.daemon.engine.planning import read_model, resolve_model

    try:
        path = resolve_model(settings)
    except SluiceError as error:
        return [Finding("model", str(error), "note", "--model DIR names a checkpoint")], None
    if not path.exists():
        return [Finding("model", f"{path}: no such folder", "fail", f"sluice download --to {path}", DATA)], None
    try:
        files = read_model(settings)
    except (StoreError, PresetError) as error:
        # It stops at the first fault; whoever must mend it wants to know all of them.
        found = list(shard_findings(path, settings.model.roots)) if path.is_dir() else []
        if not any(finding.state == "fail" for finding in found):
            found.append(Finding("model", str(error), "fail", "the files do not belong together", error.exit_code))
        return found, None
    found = list(size_findings(path, settings.model.roots, len(files.store.files)))
    if any(finding.state == "fail" for finding in found):
        return found, None
    config = files.config
    text = (
        f"{files.name}: {config.num_hidden_layers} layers, {len(files.store.tensors)} tensors as the configuration says"
    )
    found.append(Finding("model", text))
    if deep:
        found += checksum_findings(path, settings.model.roots, say)
    return found, files


def plan_findings(settings: Settings, files: ModelFiles) -> Iterator[Finding]:
    """Whether the memory plan fits, and the largest preset that does."""
    from sluice.daemon.engine.planning import plan_engine
    from sluice.daemon.service.autosize import nearest_preset
    from sluice.daemon.service.limits import memory_limit

    def fits(other: Settings) -> bool:
        try:
            return not plan_engine(files, other).memory.short_bytes
        except (BudgetError, PresetError):
            return False

    suggested = nearest_preset(fits, memory_limit().size)
    remedy = (
        f"--preset {suggested} fits"
        if suggested
        else "no preset fits this model here: more memory, or a shorter context"
    )
    try:
        made = plan_engine(files, settings).memory
        made.check()
        yield Finding("plan", f"{_gb(made.total)} of {_gb(made.limit.size)} ({made.limit.source})")
    except BudgetError as error:
        yield Finding("plan", str(error), "fail", remedy, PLAN)
        return
    if suggested is not None:
        yield Finding("plan", f"the largest preset that fits here is {suggested}; auto sizes for this machine", "note")


# --- Service --------------------------------------------------------------------------------------------------------


def unit_states() -> dict[str, dict[str, str]]:
    """What systemd says of our service and socket; {} where there is no systemd, or neither is installed."""
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        return {}
    properties = "LoadState,ActiveState,SubState,Result,ExecMainStatus,NRestarts,StatusText"
    found: dict[str, dict[str, str]] = {}
    for unit in ("sluice.service", "sluice.socket"):
        command = ["systemctl", "show", unit, f"--property={properties}"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            return {}
        state = dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)
        if state.get("LoadState") == "loaded":
            found[unit] = state
    return found


def service_findings(units: dict[str, dict[str, str]]) -> Iterator[Finding]:
    """Whether the service is installed, runs, and how it ended if it does not."""
    if not units:
        yield Finding("service", "not installed as a systemd service", "note", "sluice install-service --model DIR")
        return
    service = units.get("sluice.service", {})
    listening = units.get("sluice.socket", {}).get("ActiveState") == "active"
    state = service.get("ActiveState", "unknown")
    if state == "failed":
        code = service.get("ExecMainStatus", "?")
        text = f"sluice.service failed ({service.get('Result')}, exit code {code})"
        yield Finding(
            "service", text, "fail", "journalctl -u sluice.service -n 20 says why", int(code) if code in "23456" else 1
        )
    elif state == "active":
        restarts = int(service.get("NRestarts") or 0)
        text = f"sluice.service is active: {service.get('StatusText') or service.get('SubState')}"
        yield Finding("service", text)
        if restarts:
            yield Finding(
                "service", f"it was restarted {restarts} times", "warn", "journalctl -u sluice.service says why"
            )
    else:
        starts = "the first request starts it" if listening else "nothing would start it"
        remedy = "" if listening else "systemctl enable --now sluice.socket"
        yield Finding("service", f"sluice.service is {state}; {starts}", "ok" if listening else "warn", remedy)


def socket_findings(path: Path, units: dict[str, dict[str, str]]) -> Iterator[Finding]:
    """What lies at the socket's path, whether we may ask, and what the daemon answers. Starts nothing: a socket that
    systemd holds for a sleeping service is not connected to."""
    import grp

    try:
        info = path.lstat()
    except OSError as error:
        if error.errno == errno.ENOENT:
            yield Finding("socket", f"{path}: nobody listens", "note", "sluice serve, or systemctl start sluice.socket")
        else:
            yield Finding("socket", f"{path}: {error.strerror}", "warn")
        return
    if not stat.S_ISSOCK(info.st_mode):
        yield Finding("socket", f"{path} is not a socket", "fail", "move it away, or set server.socket", CONFIGURATION)
        return
    try:
        group = grp.getgrgid(info.st_gid).gr_name
    except KeyError:
        group = str(info.st_gid)
    yield Finding("socket", f"{path}: mode {stat.S_IMODE(info.st_mode):04o}, group {group}")
    if not os.access(path, os.R_OK | os.W_OK):
        yield Finding(
            "socket", "you may not ask this daemon", "warn", f"usermod -aG {group} {os.environ.get('USER', 'NAME')}"
        )
        return
    if (
        units.get("sluice.socket", {}).get("ActiveState") == "active"
        and units.get("sluice.service", {}).get("ActiveState") != "active"
    ):
        return
    yield _health(path)


def _health(path: Path) -> Finding:
    import socket

    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(str(path))
            client.sendall(b"GET /health/ready HTTP/1.0\r\nHost: sluice\r\nConnection: close\r\n\r\n")
            words = client.recv(64).split()
    except ConnectionRefusedError:
        return Finding("socket", "nobody answers on it", "warn", "the daemon removes a dead socket when it starts")
    except OSError as error:
        return Finding("socket", f"no answer: {error}", "warn", "journalctl -u sluice.service")
    status = (
        words[1].decode(errors="replace") if len(words) > 1 and words[0].startswith(b"HTTP/") else "nothing we know"
    )
    if status == "200":
        return Finding("socket", "the daemon is ready")
    return Finding("socket", "the daemon is loading" if status == "503" else f"the daemon answers {status}", "note")


# --- The whole ------------------------------------------------------------------------------------------------------


def next_command(findings: Sequence[Finding], settings: Settings, units: dict[str, dict[str, str]]) -> str:
    """The one command that brings an administrator further."""
    failed = next((finding for finding in findings if finding.state == "fail"), None)
    model = settings.model.path or "DIR"
    if failed is not None:
        if failed.section == "model":
            return f"sluice download --to {model}"
        return failed.remedy or "see above"
    if settings.model.path is None:
        return "sluice doctor --model DIR"
    if not units:
        return f"sluice install-service --model {model}   (or: sluice serve --model {model})"
    return f"sluice ask --socket {settings.server.socket} 'Hello'"


def examine(
    settings: Settings, *, deep: bool, rate_seconds: float, say: Callable[[str], None]
) -> tuple[list[Finding], str]:
    """All findings, in the order of the report, and the next command."""
    findings = [*cpu_findings(settings), *memory_findings(settings), uring_finding(settings)]
    model, files = model_findings(settings, deep, say)
    folders = list(dict.fromkeys([path for path in (settings.model.path, *settings.model.roots) if path is not None]))
    folders = [
        folder if folder.is_dir() else folder.parent for folder in folders if folder.exists() or folder.is_absolute()
    ]
    findings += drive_findings(folders, rate_seconds)
    findings += model
    if files is not None:
        findings += plan_findings(settings, files)
    units = unit_states()
    findings += service_findings(units)
    findings += socket_findings(settings.server.socket, units)
    return findings, next_command(findings, settings, units)


def doctor(
    model: Model = None,
    also: Annotated[list[Path] | None, typer.Option("--also", help="A further folder with shards.")] = None,
    preset: Preset = None,
    config: Config = None,
    sets: Sets = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every weight file and check its SHA-256.")] = False,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Measure each drive for two seconds.")] = True,
    as_json: Json = False,
) -> None:
    """Examine machine, drives, model, service and socket; say what is wrong and what to do next."""
    import json
    import sys

    sets = [*(sets or []), *([f"model.roots={','.join(os.path.abspath(one) for one in also)}"] if also else [])]
    if config is None and model is None and preset is None and SERVICE_SETTINGS.is_file():
        config = SERVICE_SETTINGS  # asked of nothing in particular, it looks at the service
    settings = settings_from(model, preset, config, sets)

    def say(text: str) -> None:
        if not as_json and sys.stderr.isatty():
            print(text, file=sys.stderr)

    findings, following = examine(settings, deep=deep, rate_seconds=1.0 if measure else 0.0, say=say)
    code = next((finding.code for finding in findings if finding.state == "fail"), 0)
    if as_json:
        shown = [
            {"section": f.section, "state": f.state, "text": f.text} | ({"remedy": f.remedy} if f.remedy else {})
            for f in findings
        ]
        print(json.dumps({"findings": shown, "next": following, "exit_code": code}, ensure_ascii=False, indent=2))
    else:
        for finding in findings:
            mark = {"ok": "  ok  ", "note": " note ", "warn": " WARN ", "fail": " FAIL "}[finding.state]
            print(f"{finding.section:<8}{mark}{finding.text}")
            if finding.remedy:
                print(f"{'':<14}-> {finding.remedy}")
        print(f"\nNext: {following}")
    if code:
        raise typer.Exit(code)
