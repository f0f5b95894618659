"""ask, chat and status against a scripted daemon: what is asked, what is shown, how each trouble ends."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_daemon import DONE, FakeDaemon, chunk, data, usage
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.daemon.cli import run_command
from sluice.daemon.client.answer import Answer, Said, Thought, Waiting, ask_daemon
from sluice.daemon.client.chat import Conversation, command, gather, repl
from sluice.daemon.client.connection import Connection
from sluice.daemon.client.interrupts import interruptible
from sluice.daemon.client.screen import Screen, elapsed, harmless, size
from sluice.daemon.client.sse import Comment, Data, SseReader
from sluice.daemon.client.status_view import print_status, view
from sluice.io.errors import DaemonUnreachable, PresetError


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "s.sock") as fake:
        yield fake


def sluice(daemon: FakeDaemon, *arguments: str) -> int:
    return run_command([*arguments, "--socket", str(daemon.socket)])


THINKING = [
    b": accepted\n\n: queued position=2\n\n",
    b": prefill done=512 total=4096 rate=35.2 eta_s=102\n\n",
    chunk(role="assistant", content=""),
    chunk(reasoning_content="Hm. "),
    chunk(content="Bl"),
    chunk(content="ue é."),
    chunk(finish="stop"),
    usage(9, 7),
    DONE,
]


# Server-sent events


@given(st.lists(st.sampled_from([": a b", "data: x", "data:y", "data: ", "", "event: z", "data: é"]), max_size=12))
def test_events_are_read_the_same_however_they_are_cut_and_whatever_ends_their_lines(lines: list[str]) -> None:
    reader = SseReader()
    whole = reader.feed("".join(line + "\n" for line in lines).encode())
    for end in ("\n", "\r\n", "\r"):
        reader = SseReader()
        pieces = [
            event for byte in "".join(line + end for line in lines).encode() for event in reader.feed(bytes([byte]))
        ]
        # A lone CR at the very end may be half of a line end, so it is only known with the next byte.
        assert pieces + reader.feed(b"") == whole or (end == "\r" and pieces == whole[: len(pieces)])


def test_an_events_data_lines_are_joined_and_comments_stand_alone() -> None:
    assert SseReader().feed(b": ping\n\ndata: a\ndata: b\n\ndata: c") == [Comment("ping"), Data("a\nb")]


# The connection


def test_nobody_there_is_exit_5_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    socket = tmp_path / "absent.sock"
    for name in (["ask", "x"], ["chat"], ["status"]):
        assert run_command([*name, "--socket", str(socket)]) == 5
        captured = capsys.readouterr()
        assert captured.out == ""
        assert re.fullmatch(r"sluice: .*absent\.sock: nobody answers .*\n", captured.err)
        assert run_command([*name, "--socket", str(socket), "--json"]) == 5
        assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 5


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (400, {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": None}, 2),
        (404, {"message": "no such model", "code": "model_not_found"}, 2),
        (401, {"message": "who are you", "type": "authentication_error"}, 2),
        (429, {"message": "queue full", "code": "rate_limit_exceeded"}, 5),
        (503, {"message": "loading", "code": "service_unavailable"}, 5),
        (503, {"message": "drive 1 lied", "code": "storage_error"}, 4),
        (503, {"message": "never fits", "code": "budget_exceeded"}, 3),
        (500, {"message": "a bug", "type": "server_error"}, 1),
        (502, "plain words", 1),
        (400, None, 2),
    ],
)
def test_a_refusal_ends_with_its_message_and_exit_code(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], status: int, error: Any, code: int
) -> None:
    daemon.refuse = (status, {"error": error})
    assert sluice(daemon, "ask", "x") == code
    line = capsys.readouterr().err
    expected = error["message"] if isinstance(error, dict) else error or f"status {status}"
    assert line == f"sluice: {expected}\n"
    daemon.refuse = (status, b"<html>no JSON")
    assert sluice(daemon, "status") in (1, 2, 5)


def test_an_error_event_and_a_broken_stream_are_not_taken_for_an_answer(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"message": "drive 1 failed", "type": "service_unavailable", "param": None, "code": "storage_error"}
    daemon.script = lambda body: [chunk(content="Bl"), data({"error": error})]
    assert sluice(daemon, "ask", "x") == 4
    captured = capsys.readouterr()
    assert captured.out == "Bl\n"
    assert captured.err == "sluice: drive 1 failed\n"
    daemon.script = lambda body: [chunk(content="Bl")]
    assert sluice(daemon, "ask", "x", "--json") == 5
    assert "ended in the middle" in capsys.readouterr().out
    for odd in (b"data: {\n\n", b"data: 7\n\n"):
        daemon.script = lambda body, odd=odd: [odd]
        assert sluice(daemon, "ask", "x") == 1


def test_leaving_early_closes_the_connection(daemon: FakeDaemon) -> None:
    gate = threading.Event()
    daemon.script = lambda body: [chunk(content="a"), gate, DONE]
    with Connection(daemon.socket) as connection:
        events = ask_daemon(connection, {"messages": []}, Answer())
        assert next(events) == Said("a")
        events.close()
        assert daemon.left.wait(10)


def test_a_token_goes_with_an_address_and_only_with_one(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    for flags, message in (
        (["--token-file", str(token)], "belongs to --url"),
        (["--url", "ftp://x"], "must begin with"),
        (["--url", "http://127.0.0.1:9", "--socket", "/x"], "either"),
        (["--url", "http://127.0.0.1:9", "--token-file", str(tmp_path / "absent")], "No such file"),
    ):
        with pytest.raises(PresetError, match=message):
            _run_raw(["status", *flags])
    connection = Connection(None, url="http://127.0.0.1:9", token="secret")
    assert connection._client.headers["authorization"] == "Bearer secret"
    with pytest.raises(DaemonUnreachable, match="nobody answers"), connection:
        connection.get("/v1/status")


def _run_raw(arguments: list[str]) -> None:
    from sluice.daemon.cli import app

    app(arguments, standalone_mode=False)


# ask


def test_the_answer_alone_goes_to_standard_output(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.script = lambda body: THINKING
    assert sluice(daemon, "ask", "Why is the sky?", "--system", "Terse.", "--max-tokens", "99", "--effort", "low") == 0
    assert capsys.readouterr().out == "Blue é.\n"
    assert daemon.requests == [
        {
            "messages": [{"role": "system", "content": "Terse."}, {"role": "user", "content": "Why is the sky?"}],
            "max_completion_tokens": 99,
            "reasoning_effort": "low",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_json_holds_the_whole_answer(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.script = lambda body: THINKING
    assert sluice(daemon, "ask", "x", "--json", "--no-thinking", "--temperature", "0", "--seed", "7") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["content"], report["reasoning_content"], report["finish_reason"]) == ("Blue é.", "Hm. ", "stop")
    assert report["usage"]["completion_tokens"] == 7
    assert report["model"] == "fake"
    assert report["system_fingerprint"] == "fp_1"
    body = daemon.requests[0]
    assert (body["thinking"], body["temperature"], body["seed"]) == (False, 0.0, 7)


def test_a_question_and_a_schema_come_from_files(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    monkeypatch.setattr("sys.stdin", io.StringIO("long\nquestion"))
    assert sluice(daemon, "ask", "-", "--schema", str(schema)) == 0
    assert daemon.requests[0]["messages"][0]["content"] == "long\nquestion"
    assert daemon.requests[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    schema.write_text("{")
    assert sluice(daemon, "ask", "x", "--schema", str(schema)) == 2
    assert sluice(daemon, "ask", "  ") == 2


def test_an_answer_is_collected_with_its_calls(daemon: FakeDaemon) -> None:
    def call(index: int, **parts: Any) -> bytes:
        return chunk(tool_calls=[{"index": index, **parts}])

    daemon.script = lambda body: [
        call(0, id="a", type="function", function={"name": "f", "arguments": ""}),
        call(0, function={"arguments": '{"x":'}),
        call(0, function={"arguments": "1}"}),
        call(1, id="b", type="function", function={"name": "g", "arguments": ""}),
        chunk(finish="tool_calls"),
        DONE,
    ]
    answer = Answer()
    with Connection(daemon.socket) as connection:
        list(ask_daemon(connection, {}, answer))
    assert [(call["id"], call["function"]) for call in answer.tool_calls] == [
        ("a", {"name": "f", "arguments": '{"x":1}'}),
        ("b", {"name": "g", "arguments": ""}),
    ]
    assert answer.message()["tool_calls"] == answer.tool_calls


def test_progress_comes_as_comments(daemon: FakeDaemon) -> None:
    daemon.script = lambda body: THINKING
    answer = Answer()
    ticks = iter(range(100))
    with Connection(daemon.socket) as connection:
        events = list(ask_daemon(connection, {}, answer, clock=lambda: float(next(ticks))))
    assert events[:3] == [
        Waiting("accepted"),
        Waiting("queued", {"position": "2"}),
        Waiting("prefill", {"done": "512", "total": "4096", "rate": "35.2", "eta_s": "102"}),
    ]
    assert events[3:] == [Thought("Hm. "), Said("Bl"), Said("ue é.")]
    assert answer.first_token_seconds == 5.0
    assert answer.tokens_per_second == pytest.approx(6 / (answer.seconds - 5.0))


# The screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_model_cannot_command_the_terminal() -> None:
    assert harmless("a\x1b[2J\x07\tb\r\nc\x9b1m\u202e\x7f") == "a\u241b[2J\u2407\tb\nc\ufffd1m\ufffd\u2421"
    out = Terminal()
    with Screen(out) as screen:
        screen.write("\x1b]52;c;AAAA\x07")
    assert "\x1b]52" not in out.getvalue()


def test_text_for_a_pipe_stays_as_it_is() -> None:
    out = io.StringIO()
    with Screen(out, note=lambda: "never shown") as screen:
        screen.write("\x1b[1m thinking", dim=True)
        screen.end_line()
    assert out.getvalue() == "\x1b[1m thinking\n"


def test_a_note_is_drawn_behind_the_cursor_and_taken_back() -> None:
    out = Terminal()
    with Screen(out, note=lambda: "3 tokens", width=lambda: 40) as screen:
        screen.write("ab")
        screen.write("c")
    note = "\x1b7 \x1b[2m3 tokens\x1b[0m\x1b8"
    assert out.getvalue() == f"ab{note}\x1b[Kc{note}\x1b[K"


@pytest.mark.parametrize("text", ["x" * 20, "x" * 40, "y\n" + "中" * 10, "\t\t1234"])
def test_a_note_that_would_reach_the_edge_is_not_drawn(text: str) -> None:
    out = Terminal()
    with Screen(out, note=lambda: "a note", width=lambda: 20) as screen:
        screen.write(text)
    assert "a note" not in out.getvalue()


def test_quantities_are_written_for_people() -> None:
    assert [elapsed(s) for s in (0.4, 59.9, 200, 7500)] == ["0 s", "59 s", "3 min 20 s", "2 h 05 min"]
    assert [size(n) for n in (0, 999, 1500, 108.8e9, 1.56e12)] == ["0 B", "999 B", "1.5 kB", "108.8 GB", "1560.0 GB"]


# chat


def lines(*given: Any) -> Any:
    """A reader of these lines; an exception among them is raised."""
    left = iter(given)

    def read(prompt: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        if isinstance(line, type):
            raise line
        return line

    return read


def test_lines_are_put_together_to_questions() -> None:
    read = lines(
        "one", "a\\", "b", '"""', "c", "", '/no command"""', '"""', "  ", "x\\", KeyboardInterrupt, "/help", "y\\"
    )
    assert list(gather(read)) == ["one", "a\nb", 'c\n\n/no command"""', "/help", "y"]


def talk(daemon: FakeDaemon, conversation: Conversation, *questions: str) -> str:
    out = io.StringIO()
    with Connection(daemon.socket) as connection:
        repl(connection, conversation, iter(questions), out)
    return out.getvalue()


def test_each_question_carries_the_conversation_with_its_reasoning(daemon: FakeDaemon) -> None:
    daemon.script = lambda body: THINKING
    shown = talk(daemon, Conversation(system="Terse.", fields={"seed": 1}), "one", "two")
    assert shown.count("Blue é.") == 2
    assert daemon.requests[1]["messages"] == [
        {"role": "system", "content": "Terse."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Blue é.", "reasoning_content": "Hm. "},
        {"role": "user", "content": "two"},
    ]
    assert daemon.requests[1]["seed"] == 1


def test_commands_change_what_is_asked_next(daemon: FakeDaemon, tmp_path: Path) -> None:
    conversation = Conversation()
    talk(daemon, conversation, "/system Be kind.", "/think off", "/effort low", "/set temperature 0.5")
    assert conversation.body() == {
        "messages": [{"role": "system", "content": "Be kind."}],
        "thinking": False,
        "reasoning_effort": "low",
        "temperature": 0.5,
    }
    talk(daemon, conversation, "/set temperature", "/set max_tokens 5", "/thoughts hidden", "one", "/retry")
    assert "temperature" not in conversation.fields
    assert [r["messages"][-1]["content"] for r in daemon.requests] == ["one", "one"]
    assert len(conversation.messages) == 2
    file = tmp_path / "saved.json"
    talk(daemon, conversation, f"/save {file}", "/new", "/system")
    assert (conversation.messages, conversation.system) == ([], None)
    talk(daemon, conversation, f"/load {file}")
    assert (len(conversation.messages), conversation.system) == (2, "Be kind.")
    talk(daemon, conversation, "/undo", "/exit", "never asked")
    assert conversation.messages == []
    assert len(daemon.requests) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nonsense", "no command here"),
        ("/think maybe", "no command here"),
        ("/set nothing 1", "cannot be set"),
        ("/set seed 1.5", "no whole number"),
        ("/undo", "nothing to take back"),
        ("/retry", "no question yet"),
        ("/load /nowhere/file", "No such file"),
        ("/save /nowhere/file", "No such file"),
        ("/help", "/retry"),
        ("/status", "ready"),
    ],
)
def test_a_command_says_what_it_did(daemon: FakeDaemon, line: str, said: str) -> None:
    assert said in talk(daemon, Conversation(), line)
    assert daemon.requests == []


def test_a_file_that_is_no_conversation_changes_nothing(tmp_path: Path) -> None:
    conversation = Conversation(system="s", messages=[{"role": "user", "content": "x"}])
    for text in (
        "",
        "[]",
        '{"messages": 1, "fields": {}, "system": null}',
        '{"messages": [], "fields": 1, "system": 7}',
    ):
        (tmp_path / "f").write_text(text)
        with pytest.raises(PresetError, match="no saved conversation"):
            command(f"/load {tmp_path / 'f'}", conversation, None, io.StringIO())  # type: ignore[arg-type]
    assert (conversation.system, len(conversation.messages)) == ("s", 1)


def test_a_refused_question_is_not_kept_and_the_conversation_goes_on(daemon: FakeDaemon) -> None:
    daemon.refuse = (429, {"error": {"message": "queue full", "code": "rate_limit_exceeded"}})
    conversation = Conversation()
    assert "queue full" in talk(daemon, conversation, "one")
    assert conversation.messages == []
    daemon.refuse = None
    assert "hi" in talk(daemon, conversation, "two")


def test_programs_converse_by_lines(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert sluice(daemon, "chat", "--json") == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [report["content"] for report in reports] == ["hi", "hi"]
    assert len(daemon.requests[1]["messages"]) == 3


def test_ctrl_c_stops_the_answer_and_not_the_program(daemon: FakeDaemon, tmp_path: Path) -> None:
    """On a real terminal: the answer is cut, the daemon sees the client leave, the next question is answered."""
    gate = threading.Event()
    scripts = iter([[chunk(reasoning_content="Hm."), chunk(content="Once upon"), gate, DONE], THINKING])
    daemon.script = lambda body: next(scripts)
    master, slave = pty.openpty()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-m", "sluice.daemon", "chat", "--socket", str(daemon.socket)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
        preexec_fn=_own_terminal,
    )
    os.close(slave)
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([master], [], [], 1.0)[0]:
                seen += os.read(master, 65536).decode(errors="replace")
        seen = seen.partition(text)[2]

    try:
        until("> ")
        os.write(master, b"tell me\r")
        until("Once upon")
        os.write(master, b"\x03")
        until("stopped")
        assert daemon.left.wait(10)
        until("> ")
        os.write(master, b"and now\r")
        until("ue é.")
        until("> ")
        os.write(master, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert daemon.requests[1]["messages"][:2] == [
        {"role": "user", "content": "tell me"},
        {"role": "assistant", "content": "Once upon", "reasoning_content": "Hm."},
    ]
    history = tmp_path / "sluice" / "history"
    assert "tell me" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_an_interrupt_that_misses_the_read_ends_it_all_the_same() -> None:
    """Played by another thread taking the signal: it is noted, and the main thread's read is not woken by it."""
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    asked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    handler = signal.getsignal(signal.SIGALRM)
    own = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored

    def interrupt() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            ours.recv(1)
    finally:
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, asked)
        signal.signal(signal.SIGINT, own)
        ours.close()
        theirs.close()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == handler


def _own_terminal() -> None:
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as a terminal's own shell starts programs, whoever started the tests
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


# status

SNAPSHOT = {
    "state": "ready",
    "model": {"name": "k3", "system_fingerprint": "fp_9"},
    "queue": {"waiting": 1, "running": 2, "max_queue": 16, "max_sequences": 4},
    "requests": [
        {"id": "chatcmpl-1", "phase": "prefill", "prompt_tokens": 400, "prompt_done": 100, "generated": 0,
         "max_tokens": 64, "priority": 0, "seconds": 75.0, "tokens_per_second": 0.0},
        {"id": "chatcmpl-2\x1b[2J", "phase": "decode", "prompt_tokens": 4, "prompt_done": 4, "generated": 3,
         "max_tokens": 64, "priority": 10, "seconds": 7.0, "tokens_per_second": 0.31},
    ],
    "rates": {"prefill_tokens_per_second": 35.2, "decode_tokens_per_second": 0.31, "pass_seconds": 3.2},
    "tokens": {"prompt": 1000, "generated": 50},
    "memory": {"plan": {"pinned trunk": 2e9, "ring": 1e9}, "plan_bytes": 7e9, "limit_bytes": 8e9,
               "rss_bytes": 6.5e9, "peak_rss_bytes": 6.9e9},
    "io": {"backend": "uring",
           "drives": [{"name": "nvme0", "reads": 9, "bytes": 5e9, "busy_seconds": 4.0, "in_flight": 3}],
           "trunk": {"pinned_bytes": 2e9, "ring_bytes": 1e9, "streamed_bytes": 4e9},
           "experts": {"hits": 30, "misses": 70, "bytes_read": 1e9, "cached": 12, "capacity_bytes": 2e9},
           "prediction": {"hinted": 10, "used": 6, "wasted_bytes": 7e7}},
}  # fmt: skip


def printed(renderable: Any) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=120).print(renderable)
    return out.getvalue()


def test_status_shows_queue_progress_drives_caches_and_memory(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    daemon.status = SNAPSHOT
    assert sluice(daemon, "status") == 0
    shown = capsys.readouterr().out
    for part in ("k3  ready", "running 2 of 4, waiting 1 of 16", "███·········  100/400", "1 min 15 s", "0.31",
                 "pinned trunk", "6.5 GB", "nvme0", "5.0 GB", "30.0% hits of 100", "60.0% of 10 hints"):  # fmt: skip
        assert re.search(re.escape(part).replace(r"\ \ ", r"\s+"), shown), (part, shown)
    assert "\x1b" not in shown
    assert sluice(daemon, "status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == SNAPSHOT


def test_a_drives_rate_comes_from_two_looks() -> None:
    later = json.loads(json.dumps(SNAPSHOT))
    later["io"]["drives"][0] |= {"bytes": 9e9, "busy_seconds": 5.5}
    shown = printed(view(later, SNAPSHOT, 2.0))
    assert "2.0 GB/s" in shown
    assert "75%" in shown


@settings(max_examples=40)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from([*SNAPSHOT, *SNAPSHOT["io"], *SNAPSHOT["memory"], *SNAPSHOT["requests"][0]]), inner
            ),
        ),
    )
)
def test_any_json_can_be_looked_at(snapshot: Any) -> None:
    printed(view(snapshot, snapshot, 1.0))
    print_status(snapshot, io.StringIO())


def test_a_live_view_ends_with_the_daemon_gone_said_not_with_a_crash(daemon: FakeDaemon) -> None:
    looks = iter([SNAPSHOT, SNAPSHOT])

    def look() -> Any:
        found = next(looks, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    connection = type("Stub", (), {"get": lambda self, path: (_ for _ in ()).throw(DaemonUnreachable("gone"))})()
    from sluice.daemon.client.status import _look

    assert _look(connection, look())["state"] == "gone"
    assert _look(connection, None) == {"state": "gone"}
