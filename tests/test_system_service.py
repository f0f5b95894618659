"""sluice as a service under a real systemd: socket activation, who may ask, reload, crash, drain, broken settings.

One container is booted for all of these; each test leaves the service as an administrator would find it: installed,
listening, stopped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest
from helpers import nspawn
from helpers.nspawn import Machine

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(1200),  # the first test waits for the tree, the wheel and the boot
    pytest.mark.skipif(bool(nspawn.missing()), reason=nspawn.missing() or "runs"),
]

SOCKET = "/run/sluice/sluice.sock"
SETTINGS = "/etc/sluice/sluice.toml"
PROGRAM = "/opt/sluice/bin/sluice"

# What a local program does: HTTP over the Unix socket, with the standard library alone. Prints one line an event.
CLIENT = """
import http.client, json, socket, sys, time
path, body = sys.argv[1], json.loads(sys.argv[2])
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(120)
        self.sock.connect("/run/sluice/sluice.sock")
deadline = time.monotonic() + 120
while True:
    try:
        client = Unix("sluice")
        client.request("POST" if body else "GET", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = client.getresponse()
    except PermissionError:
        sys.exit("permission denied")
    except (ConnectionError, FileNotFoundError) as error:
        sys.exit(f"no connection: {error!r}")
    if answer.status != 503 or time.monotonic() > deadline or body and body.get("once"):
        break
    answer.read()
    time.sleep(0.1)
print("status", answer.status, flush=True)
if body.get("stream"):
    try:
        for line in answer:
            if line.strip():
                print(line.decode().strip(), flush=True)
    except Exception as error:
        print("broken", repr(error), flush=True)
else:
    print(answer.read().decode(), flush=True)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A booted system with sluice installed as its service, a tiny model, and two people: ann in the group, bob not."""
    root = nspawn.prepared_tree()
    for left in ("srv/model", "etc/systemd/system/sluice.service.d"):
        shutil.rmtree(root / left, ignore_errors=True)
    with nspawn.booted(root, tmp_path_factory.mktemp("console") / "console.log") as running:
        running.run(PROGRAM, "synth", "/srv/model", "--preset", "tiny", seconds=120)
        running.run(PROGRAM, "install-service", "--preset", "laptop", "--model", "/srv/model", seconds=120)
        for name in ("ann", "bob"):
            running.run("sh", "-c", f"id {name} >/dev/null 2>&1 || useradd --create-home {name}")
        running.run("usermod", "-aG", "sluice", "ann")
        running.write("/opt/client.py", CLIENT)
        yield running


@pytest.fixture
def service(machine: Machine) -> Iterator[Machine]:
    """The service stopped, its socket listening, its settings as installed; and so again afterwards."""
    installed = (machine.root / SETTINGS.lstrip("/")).read_text()
    _rest(machine)
    yield machine
    machine.write(SETTINGS, installed)
    _rest(machine)


def _rest(machine: Machine) -> None:
    machine.run("systemctl", "stop", "sluice.service", seconds=90)
    machine.run("systemctl", "reset-failed", code=None)
    machine.run("systemctl", "start", "sluice.socket")


def ask(
    machine: Machine, user: str = "ann", code: int | None = 0, path: str = "/v1/completions", **body: object
) -> str:
    request = (
        {"model": "model", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, **body} if body is not None else {}
    )
    return machine.run("python3", "/opt/client.py", path, json.dumps(request), user=user, seconds=150, code=code)


def stream(machine: Machine, tokens: int) -> subprocess.Popen[str]:
    """A client that streams, once its first token has arrived."""
    body = {"model": "model", "prompt": [1, 2, 3], "max_tokens": tokens, "stream": True, "temperature": 0}
    client = machine.spawn("python3", "/opt/client.py", "/v1/completions", json.dumps(body), user="ann")
    assert client.stdout is not None
    for line in client.stdout:
        if line.startswith("data:"):
            return client
    raise AssertionError(f"no token: exit {client.wait()}\n{machine.journal()}")


def rest_of(client: subprocess.Popen[str], seconds: float = 120) -> list[str]:
    text, _ = client.communicate(timeout=seconds)
    return [line for line in text.splitlines() if line]


def test_the_first_client_starts_the_daemon_and_gets_an_answer(service: Machine) -> None:
    assert service.show("sluice.service", "ActiveState") == {"ActiveState": "inactive"}
    assert service.run("stat", "-c", "%a %U %G", SOCKET).strip() == "660 root sluice"
    answer = ask(service).splitlines()
    assert answer[0] == "status 200"
    reply = json.loads(answer[1])
    assert reply["usage"]["completion_tokens"] == 4
    state = service.show("sluice.service", "ActiveState", "SubState", "StatusText", "User", "NRestarts")
    assert state["ActiveState"] == "active"
    assert state["SubState"] == "running"  # Type=notify: only READY=1 makes it so
    assert "serving" in state["StatusText"]
    assert state["User"] == "sluice"
    assert state["NRestarts"] == "0"


def test_a_stranger_is_refused_by_the_socket_itself(service: Machine) -> None:
    assert "permission denied" in ask(service, "bob", code=1)
    assert service.show("sluice.service", "ActiveState") == {"ActiveState": "inactive"}  # he did not even start it


def test_allow_lists_narrow_the_group_further_and_change_at_reload(service: Machine) -> None:
    assert "status 200" in ask(service)
    settings = (service.root / SETTINGS.lstrip("/")).read_text()
    service.write(SETTINGS, settings + 'allow_users = ["root"]\n')
    service.run("systemctl", "reload", "sluice.service")
    _until(lambda: "status 403" in ask(service, code=None), service)
    service.write(SETTINGS, settings)
    service.run("systemctl", "reload", "sluice.service")
    _until(lambda: "status 200" in ask(service, code=None), service)


def _until(condition: object, machine: Machine, seconds: float = 20) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, machine.journal()
        time.sleep(0.2)


def test_a_reload_changes_the_budget_and_loses_no_token(service: Machine) -> None:
    expected = ask(service, max_tokens=300).splitlines()[1]
    client = stream(service, 300)
    settings = (service.root / SETTINGS.lstrip("/")).read_text()
    service.write(SETTINGS, settings + '\n[memory]\nexpert_cache = "300KiB"\n\n[log]\nlevel = "debug"\n')
    service.run("systemctl", "reload", "sluice.service")
    _until(lambda: "changed memory.expert_cache, log.level" in service.journal(), service)
    lines = rest_of(client)
    assert lines[-1] == "data: [DONE]"
    assert not any(line.startswith("broken") for line in lines)
    # The same bytes as without the reload (but for the first token, which `stream` took): a budget changes no answer.
    text, streamed = json.loads(expected)["choices"][0]["text"], "".join(_text(line) for line in lines)
    assert text.endswith(streamed)
    assert len(streamed) > len(text) - 20
    assert service.show("sluice.service", "NRestarts", "ActiveState") == {"NRestarts": "0", "ActiveState": "active"}


def _text(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    return "".join(choice.get("text", "") for choice in json.loads(line[6:])["choices"])


def test_a_bad_file_at_reload_keeps_the_old_values_and_says_so(service: Machine) -> None:
    assert "status 200" in ask(service)
    settings = (service.root / SETTINGS.lstrip("/")).read_text()
    service.write(SETTINGS, settings + "\n[memory]\nexpert_cash = 3\n")
    service.run("systemctl", "reload", "sluice.service")
    _until(
        lambda: "did you mean memory.expert_cache?" in service.show("sluice.service", "StatusText")["StatusText"],
        service,
    )
    assert "old settings kept" in service.journal()
    assert "status 200" in ask(service)


def test_a_killed_daemon_is_started_again_and_answers(service: Machine) -> None:
    assert "status 200" in ask(service)
    pid = service.show("sluice.service", "MainPID")["MainPID"]
    service.run("kill", "-9", pid)
    service.wait_for("sluice.service", seconds=60, NRestarts="1", ActiveState="active", SubState="running")
    assert service.show("sluice.service", "MainPID")["MainPID"] != pid
    assert "status 200" in ask(service)


def test_stopping_lets_a_running_request_finish(service: Machine) -> None:
    client = stream(service, 200)
    began = time.monotonic()
    service.run("systemctl", "stop", "sluice.service", seconds=120)
    assert time.monotonic() - began < 100
    lines = rest_of(client)
    assert lines[-1] == "data: [DONE]"
    assert sum(line.startswith("data: {") for line in lines) > 10
    assert service.show("sluice.service", "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert "draining" in service.journal()


def test_a_request_longer_than_the_drain_is_ended_with_a_clear_message(service: Machine) -> None:
    settings = (service.root / SETTINGS.lstrip("/")).read_text()
    service.write(SETTINGS, settings + 'drain = "1s"\n')
    client = stream(service, 4000)
    service.run("systemctl", "stop", "sluice.service", seconds=60)
    lines = rest_of(client)
    assert any("shutting down" in line for line in lines), lines[-3:]
    assert service.show("sluice.service", "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}


def test_a_broken_preset_fails_once_and_does_not_loop(service: Machine) -> None:
    service.write(SETTINGS, 'preset = "laptob"\n')
    assert "no connection" in ask(service, code=1)
    state = service.wait_for("sluice.service", ActiveState="failed")
    time.sleep(8)  # longer than RestartSec twice over: a loop would show
    state = service.show("sluice.service", "ActiveState", "NRestarts", "ExecMainStatus", "Result")
    assert state == {"ActiveState": "failed", "NRestarts": "0", "ExecMainStatus": "2", "Result": "exit-code"}
    assert service.show("sluice.socket", "ActiveState") == {"ActiveState": "active"}
    assert "did you mean laptop?" in service.journal()


def test_a_plan_that_does_not_fit_fails_with_its_own_code(service: Machine) -> None:
    settings = (service.root / SETTINGS.lstrip("/")).read_text()
    service.write(SETTINGS, settings + '\n[memory]\ntotal = "64MiB"\n')
    service.run("systemctl", "start", "sluice.service", code=1)
    state = service.show("sluice.service", "ActiveState", "ExecMainStatus", "NRestarts")
    assert state == {"ActiveState": "failed", "ExecMainStatus": "3", "NRestarts": "0"}
    assert "bytes short" in service.journal()


def test_a_second_instance_names_the_first(service: Machine) -> None:
    assert "status 200" in ask(service)
    pid = service.show("sluice.service", "MainPID")["MainPID"]
    said = service.run(PROGRAM, "serve", "--model", "/srv/model", "--socket", "/tmp/second.sock", code=6)
    assert f"pid {pid}" in said


def test_people_use_the_command_line_and_doctor_finds_nothing_wrong(service: Machine) -> None:
    asked = [PROGRAM, "ask", "--socket", SOCKET, "--max-tokens", "4", "Hello"]
    service.run(*asked, user="ann", seconds=120)
    assert "you may not ask" in service.run(*asked, user="bob", code=5)
    found = json.loads(service.run(PROGRAM, "doctor", "--json", seconds=120))
    texts = [finding["text"] for finding in found["findings"]]
    assert any(text.startswith("sluice.service is active: serving model") for text in texts)
    assert "the daemon is ready" in texts
    assert found["exit_code"] == 0
    service.run("systemctl", "stop", "sluice.service", seconds=90)
    found = json.loads(service.run(PROGRAM, "doctor", "--json", "--no-measure", seconds=120))
    assert "sluice.service is inactive; the first request starts it" in [f["text"] for f in found["findings"]]
    assert service.show("sluice.service", "ActiveState") == {"ActiveState": "inactive"}  # looking did not wake it


def test_the_sandbox_and_the_units_are_what_the_documentation_says(service: Machine) -> None:
    verified = service.run("systemd-analyze", "verify", "--man=no", "sluice.service", "sluice.socket")
    assert [line for line in verified.splitlines() if "sluice" in line] == []
    scored = service.run("systemd-analyze", "security", "--no-pager", "sluice.service")
    level = next(line for line in scored.splitlines() if "Overall exposure level" in line)
    assert float(level.split(":")[1].split()[0]) <= 1.0, level
    documented = (nspawn.REPOSITORY / "docs" / "service.md").read_text()
    assert f"exposure {level.split(':')[1].split()[0]}" in documented
