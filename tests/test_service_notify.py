"""The notify protocol over real datagram sockets, the watchdog's honesty, and what the log prints."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.daemon.service.log import JsonFormatter, TextFormatter, setup_logging, under_journal
from sluice.daemon.service.notify import Notifier, ProgressWatch, watchdog_seconds
from sluice.daemon.service.settings import LogSettings


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A listening notify socket and its name as NOTIFY_SOCKET would give it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@sluice-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name[1:] if name[0] == "@" else name)
        listener.settimeout(5)
        yield listener, name


def test_each_message_is_one_datagram_of_assignments(manager: tuple[socket.socket, str]) -> None:
    listener, name = manager
    with Notifier(name, monotonic_us=lambda: 123) as notifier:
        notifier.ready("serving\nall")
        notifier.status("x" * 2000)
        notifier.extend_timeout(1.5)
        notifier.reloading()
        notifier.stopping()
        notifier.watchdog()
        messages = [listener.recv(4096).decode() for _ in range(6)]
    assert messages[0] == "READY=1\nSTATUS=serving all"
    assert len(messages[1]) == len("STATUS=") + 500
    assert messages[2:] == [
        "EXTEND_TIMEOUT_USEC=1500000",
        "RELOADING=1\nMONOTONIC_USEC=123",
        "STOPPING=1",
        "WATCHDOG=1",
    ]


@pytest.mark.parametrize(
    "env", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "/nowhere/x"}]
)
def test_without_a_listening_manager_nothing_happens(env: dict[str, str]) -> None:
    notifier = Notifier.from_environment(env)
    assert not notifier.send(READY=1)
    notifier.close()
    notifier.close()
    notifier.ready()


def test_a_full_manager_does_not_block_us(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "n"))
        with Notifier(str(tmp_path / "n")) as notifier:
            sent = [notifier.send(STATUS="x") for _ in range(2000)]
    assert sent[0]
    assert not sent[-1]


@pytest.mark.parametrize(
    ("env", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "x"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_time_is_ours_only_if_the_pid_is(env: dict[str, str], seconds: float | None) -> None:
    assert watchdog_seconds(env, pid=7) == seconds


def test_signs_of_life_stop_when_work_does_not_move() -> None:
    sent: list[str] = []

    class Spy(Notifier):
        def watchdog(self) -> None:
            sent.append("ping")

    watch = ProgressWatch(Spy(None))
    assert [
        watch.tick(0, busy=False),
        watch.tick(5, busy=True),
        watch.tick(5, busy=True),
        watch.tick(6, busy=True),
    ] == [
        True,
        True,
        False,
        True,
    ]
    assert watch.tick(6, busy=False)
    assert len(sent) == 4


def record(message: str, level: int = logging.INFO, /, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("sluice.engine", level, "f.py", 1, message, None, None)
    made.created, made.msecs = 0.0, 7.0
    made.fields = fields
    return made


def test_text_records_are_one_line_with_fields_and_cannot_be_forged() -> None:
    line = TextFormatter().format(record("hello\n2026 error forged", id="a b", n=3, e="", u="x\x1b[31m"))
    assert line == ('1970-01-01T00:00:00.007Z info engine: hello\\n2026 error forged id="a b" n=3 e="" u=x\\x1b[31m')
    assert TextFormatter(journal=True).format(record("x", logging.ERROR)) == "<3>engine: x"
    assert TextFormatter(journal=True).format(record("x", logging.DEBUG)) == "<7>engine: x"


def test_json_records_are_objects_with_the_fields_beside_the_message() -> None:
    entry = json.loads(JsonFormatter().format(record("hé\n", logging.WARNING, path=Path("/x"), name="forged")))
    assert entry == {
        "time": "1970-01-01T00:00:00.007Z",
        "level": "warning",
        "name": "engine",
        "message": "hé\n",
        "path": "/x",
    }


def test_a_second_setup_replaces_level_and_format(request: pytest.FixtureRequest) -> None:
    root, ours = logging.getLogger(), logging.getLogger("sluice")
    before = (list(root.handlers), root.level, ours.level)

    def restore() -> None:
        root.handlers[:], root.level = before[0], before[1]
        ours.setLevel(before[2])

    request.addfinalizer(restore)
    stream = io.StringIO()
    setup_logging(LogSettings(level="warning"), stream, {})
    logging.getLogger("sluice.x").info("unseen")
    setup_logging(LogSettings(level="debug", format="json"), stream, {})
    logging.getLogger("sluice.x").debug("seen")
    try:
        raise ValueError("why\nnot")
    except ValueError:
        logging.getLogger("sluice.x").exception("failed")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["seen", "failed"]
    assert "ValueError: why" in lines[1]["exception"]


def test_the_journal_is_known_by_its_device_and_inode(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as stream:
        info = os.fstat(stream.fileno())
        assert under_journal({"JOURNAL_STREAM": f"{info.st_dev}:{info.st_ino}"}, stream)
        assert not under_journal({"JOURNAL_STREAM": "1:2"}, stream)
    assert not under_journal({}, io.StringIO())
