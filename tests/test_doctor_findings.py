"""`sluice doctor`: each fault of a checkpoint by name, drives from made-up systems, and exit codes that tell."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import typer
from helpers.shared import shared_path
from typer.testing import CliRunner

from sluice.daemon.service.settings import Settings, load_settings
from sluice.daemon.service.sockets import bind_unix
from sluice.kernels.topology import Cpu, Topology
from sluice.tools import doctor as doctor_module
from sluice.tools import probe
from sluice.tools.doctor import (
    Finding,
    checksum_findings,
    cpu_findings,
    cpu_flags,
    cpu_model,
    doctor,
    drive_findings,
    memory_findings,
    model_findings,
    next_command,
    plan_findings,
    service_findings,
    shard_findings,
    socket_findings,
    topology_findings,
    uring_finding,
)
from sluice.tools.mini import synth

app = typer.Typer()
app.command()(doctor)
synth_app = typer.Typer()
synth_app.command()(synth)


@pytest.fixture(scope="session")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor") / "tiny"
    assert CliRunner().invoke(synth_app, [str(folder), "--preset", "tiny"], catch_exceptions=False).exit_code == 0
    return folder


@pytest.fixture
def model(whole_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(whole_model, tmp_path / "model"))


@pytest.fixture(autouse=True)
def _no_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_module, "unit_states", dict)
    monkeypatch.setattr(doctor_module, "SERVICE_SETTINGS", tmp_path / "none.toml")
    for name in [n for n in os.environ if n.startswith("SLUICE_") and n != "SLUICE_SHARED"]:
        monkeypatch.delenv(name)


def settings(*overrides: str) -> Settings:
    return load_settings(env={}, overrides=list(overrides))


def shard(model: Path, number: int) -> Path:
    return sorted(model.glob("*.safetensors"))[number - 1]


def report(*arguments: str) -> tuple[int, dict[str, object]]:
    result = CliRunner().invoke(app, [*arguments, "--json", "--no-measure"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


def failures(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.state == "fail"]


def test_a_whole_model_is_found_whole_and_a_next_command_named(model: Path) -> None:
    code, found = report("--model", str(model))
    assert code == 0
    texts = [str(f["text"]) for f in found["findings"]]  # type: ignore[attr-defined]
    assert any("14 files with weights, all there and whole" in text for text in texts)
    assert any("tensors as the configuration says" in text for text in texts)
    assert str(found["next"]).startswith(f"sluice install-service --model {model}")
    text = CliRunner().invoke(app, ["--model", str(model), "--no-measure"], catch_exceptions=False).stdout
    assert "\nNext: sluice install-service" in text


def test_missing_short_and_foreign_shards_are_all_named(model: Path) -> None:
    shard(model, 2).unlink()
    whole = shard(model, 4).read_bytes()
    shard(model, 4).write_bytes(whole[:-1])
    names = [f.name for f in sorted(model.glob("*.safetensors"))]
    shutil.copy(model / names[7], model / names[6])
    found = list(shard_findings(model, []))
    assert [f.code for f in found] == [4, 4, 4]
    assert "1 of 14 shards are missing: model-00002-of-000014.safetensors" in found[0].text
    assert names[3] in found[1].text
    assert f"{names[6]} holds other tensors" in found[2].text
    code, shown = report("--model", str(model))
    assert (code, shown["exit_code"]) == (4, 4)
    assert shown["next"] == f"sluice download --to {model}"


def test_a_shard_on_another_drive_is_found_where_it_is_said_to_be(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.move(shard(model, 3), other)
    assert report("--model", str(model))[0] == 4
    assert report("--model", str(model), "--also", str(other))[0] == 0


def test_kimi_k3_shards_must_have_their_published_size(tmp_path: Path) -> None:
    name = "model-00095-of-000096.safetensors"
    index = {"metadata": {"total_size": 1_560_860_324_864}, "weight_map": {"t": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / name).write_bytes(b"short")
    assert failures(list(shard_findings(tmp_path, []))) == [f"{name} has 5 bytes, published are 92289328"]


def test_a_configuration_of_another_model_is_noticed_tensor_by_tensor(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    owner = config.get("text_config", config)
    owner["num_experts"] += 1
    (model / "config.json").write_text(json.dumps(config))
    found, files = model_findings(settings(f"model.path={model}"), False, print)
    assert files is None
    assert found[-1].code == 4
    assert "experts" in found[-1].text or "gate" in found[-1].text
    (model / "config.json").unlink()
    assert "config.json" in failures(model_findings(settings(f"model.path={model}"), False, print)[0])[0]


@pytest.mark.parametrize("where", ["manifest", "sums"])
def test_deep_reads_every_byte_and_names_a_file_with_a_flipped_bit(model: Path, where: str) -> None:
    sums = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in model.glob("*.safetensors")}
    if where == "sums":
        (model / "SHA256SUMS").write_text("".join(f"{value}  {name}\n" for name, value in sums.items()))
    else:
        (model / ".sluice-download").mkdir()
        files = {name: {"size": 1, "sha256": value} for name, value in sums.items()}
        (model / ".sluice-download" / "manifest.json").write_text(json.dumps({"files": files}))
    assert report("--model", str(model), "--deep")[0] == 0
    damaged = shard(model, 5)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    said: list[str] = []
    found = list(checksum_findings(model, [], said.append))
    assert failures(found) == [f"{damaged.name}: its SHA-256 is not the one it should have"]
    assert len(said) == 14
    assert report("--model", str(model))[0] == 0  # without --deep nothing can tell
    assert report("--model", str(model), "--deep")[0] == 4


def test_without_known_checksums_deep_says_so(model: Path) -> None:
    found = list(checksum_findings(model, [], lambda text: None))
    assert [f.state for f in found] == ["note"]
    assert "no checksum is known" in found[0].text


def test_a_plan_that_does_not_fit_exits_3_with_a_preset_that_does(model: Path) -> None:
    code, found = report("--model", str(model), "--set", "memory.total=64MiB")
    assert code == 3
    plan = [f for f in found["findings"] if f["section"] == "plan"]  # type: ignore[attr-defined]
    assert "bytes short" in plan[0]["text"]
    assert "--preset" in plan[0]["remedy"]


@pytest.mark.slow
def test_the_real_shape_is_examined_without_its_data(tmp_path: Path) -> None:
    """Kimi K3's own headers and sizes over holes: every layer and expert against the configuration."""
    shared_path("spec/k3_config.json")
    folder = tmp_path / "k3"
    CliRunner().invoke(synth_app, [str(folder), "--mock"], catch_exceptions=False)
    found, files = model_findings(settings(f"model.path={folder}"), False, print)
    assert failures(found) == []
    assert files is not None
    assert any("sizes as published for Kimi K3" in f.text for f in found)
    assert not [f for f in plan_findings(load_settings("laptop", env={}), files) if f.state == "fail"]


def test_settings_that_cannot_be_honoured_fail_as_configuration() -> None:
    found = [f for f in cpu_findings(settings("compute.isa=neon")) if f.state == "fail"]
    assert [f.code for f in found] == [2] or os.uname().machine == "aarch64"
    assert not failures(list(cpu_findings(settings())))
    assert not failures(list(memory_findings(settings())))


def test_the_topology_is_printed_with_what_the_threads_make_of_it():
    cpus = tuple(Cpu(i, i % 8, i % 8 // 4, i % 8 // 4) for i in range(16))
    text = [f.text for f in topology_findings(Topology(cpus, {0: 8 << 30, 1: 8 << 30}), settings())]
    assert "8 physical cores with 16 CPUs" in text[0]
    assert "2 memory node(s)" in text[0]
    assert text[1] == "node 0: CPUs 0-3,8-11, cores at 0-3, 8.59 GB"
    assert text[2] == "node 1: CPUs 4-7,12-15, cores at 4-7, 8.59 GB"
    assert "8 compute threads on CPUs 0, 4, 1, 5" in text[3]
    assert "homed to nodes 0, 1" in text[3]
    one = list(topology_findings(Topology(cpus[:4], {0: 8 << 30}), settings("compute.expert_threads=2")))
    assert one[-1].text == "4 compute threads where the scheduler puts them, 2 for experts"
    bad = list(topology_findings(Topology(cpus[:4], {0: 8 << 30}), settings("compute.cpus=9")))
    assert bad[-1].state == "fail"
    assert "compute.cpus" in bad[-1].text


def test_a_forbidden_ring_is_a_note_unless_it_was_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "uring_errno", lambda: 1)
    assert uring_finding(settings()).state == "note"
    assert uring_finding(settings("io.backend=uring")).code == 2
    monkeypatch.setattr(probe, "uring_errno", lambda: 0)
    assert uring_finding(settings("io.backend=uring")).state == "ok"


CPUINFO = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma avx512f\n"


def test_processors_are_named_by_their_own_words() -> None:
    assert (cpu_model(CPUINFO), cpu_flags(CPUINFO)) == ("Some CPU", ["avx2", "fma", "avx512f"])
    assert (cpu_model(""), cpu_flags("")) == ("unknown processor", [])


# --- Drives ---------------------------------------------------------------------------------------------------------

MOUNTS = (
    "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    "21 20 0:50 / /mnt/share rw - nfs4 server:/x rw\n"
    "22 20 8:17 / /mnt/a\\040b rw - xfs /dev/sdb1 rw\n"
    "23 20 0:51 / /mnt/ssh rw - fuse.sshfs me@host: rw\n"
    "garbage\n"
)


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/srv/k3", "ext4", False),
        ("/mnt/share/k3", "nfs4", True),
        ("/mnt/a b/c", "xfs", False),
        ("/mnt/ssh", "fuse.sshfs", True),
    ],
)
def test_a_path_belongs_to_the_innermost_mount(path: str, kind: str, network: bool) -> None:
    mount = probe.find_mount(Path(path), MOUNTS)
    assert mount is not None
    assert (mount.kind, mount.over_network) == (kind, network)


def test_usb_and_rotation_are_read_from_the_device_tree(tmp_path: Path) -> None:
    stick = tmp_path / "sys/devices/pci0/usb2/2-1/block/sdb/sdb1"
    disk = tmp_path / "sys/devices/pci0/ata1/block/sda"
    virtual = tmp_path / "sys/devices/virtio3/block/vda"
    for device in (stick, disk, virtual):
        device.mkdir(parents=True)
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    for number, device in (("8:17", stick), ("8:0", disk), ("254:0", virtual)):
        (tmp_path / "sys/dev/block" / number).symlink_to(device)
    for device, word in ((stick.parent, "0"), (disk, "1"), (virtual, "1")):
        (device / "queue").mkdir()
        (device / "queue/rotational").write_text(word + "\n")
    assert [probe.on_usb(n, tmp_path) for n in ("8:17", "8:0", "9:9")] == [True, False, False]
    assert [probe.spins(n, tmp_path) for n in ("8:17", "8:0", "254:0", "9:9")] == [False, True, None, None]


def test_a_drive_is_measured_by_real_reads(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(os.urandom(2**20) * 33)
    direct = not probe.direct_problem(file)
    rate = probe.measure([file], 0.05, 2, direct)
    assert rate is not None
    assert rate.bytes_per_second > 1e6
    assert probe.measure([tmp_path / "none"], 0.05, 1, False) is None
    found = list(drive_findings([tmp_path], 0.02))
    assert any("GB/s with 4 in flight" in f.text for f in found)
    assert not failures(found)


def test_a_drive_that_is_not_mounted_fails(tmp_path: Path) -> None:
    assert [f.code for f in drive_findings([tmp_path / "gone"], 0)] == [4]


def test_a_file_without_direct_reads_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"y" * 10_000)
    monkeypatch.setattr(probe, "direct_problem", lambda file: "refused at open (Invalid argument)")
    assert any("O_DIRECT refused at open" in f.text and f.state == "note" for f in drive_findings([tmp_path], 0))


# --- Service and socket ---------------------------------------------------------------------------------------------


def unit(**state: str) -> dict[str, str]:
    return {"LoadState": "loaded", "NRestarts": "0", **state}


@pytest.mark.parametrize(
    ("service", "socket", "state", "code"),
    [
        (unit(ActiveState="active", StatusText="serving k3"), "active", "ok", 0),
        (unit(ActiveState="inactive"), "active", "ok", 0),
        (unit(ActiveState="inactive"), "inactive", "warn", 0),
        (unit(ActiveState="failed", Result="exit-code", ExecMainStatus="3"), "active", "fail", 3),
        (unit(ActiveState="failed", Result="signal", ExecMainStatus="9"), "active", "fail", 1),
    ],
)
def test_the_service_is_judged_by_what_systemd_says(
    service: dict[str, str], socket: str, state: str, code: int
) -> None:
    units = {"sluice.service": service, "sluice.socket": unit(ActiveState=socket)}
    found = list(service_findings(units))
    assert (found[0].state, found[0].code) == (state, code)


def test_restarts_and_absence_are_mentioned() -> None:
    units = {"sluice.service": unit(ActiveState="active", NRestarts="4")}
    assert "restarted 4 times" in list(service_findings(units))[1].text
    assert "install-service" in next(service_findings({})).remedy


def test_a_socket_is_looked_at_without_waking_a_sleeping_service(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert next(socket_findings(path, {})).state == "note"
    path.write_text("no socket")
    assert next(socket_findings(path, {})).code == 2
    path.unlink()
    with bind_unix(path, 0o640) as bound:
        sleeping = {"sluice.socket": unit(ActiveState="active"), "sluice.service": unit(ActiveState="inactive")}
        found = list(socket_findings(path, sleeping))
        assert len(found) == 1
        assert "mode 0640" in found[0].text
        bound.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            bound.socket.accept()
    import socket as module

    with module.socket(module.AF_UNIX) as dead:
        dead.bind(str(path))
    assert list(socket_findings(path, {}))[-1].text == "nobody answers on it"


def test_the_next_command_follows_the_first_failure() -> None:
    wrong = Finding("plan", "too large", "fail", "--preset ultra fits", 3)
    assert next_command([wrong], settings("model.path=/m"), {}) == "--preset ultra fits"
    assert next_command([], settings(), {}) == "sluice doctor --model DIR"
    running = {"sluice.service": unit(ActiveState="active")}
    assert next_command([], settings("model.path=/m"), running).startswith(
        "sluice ask --socket /run/sluice/sluice.sock"
    )
