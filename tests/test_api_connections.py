"""Clients that leave, half-close, stop reading, come too many or may not come at all; and the way down."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers import vocabularies
from helpers.fake_engine import FakeEngine, Gate, Step, answer, reply_ids, say
from helpers.http_house import House, on_uvloop, open_house, post, read_reply, read_stream

from sluice.daemon.api.access import Access, access_from, peer_of, read_token
from sluice.daemon.api.limits import Limits
from sluice.daemon.engine.requests import GenerationRequest, Progress
from sluice.daemon.service.settings import ServerSettings
from sluice.io.errors import PresetError

MINI = vocabularies.mini()
AB = MINI.encode_text("ab")
TEXT_URL, CHAT_URL = "/v1/completions", "/v1/chat/completions"


def gated(*before: Step) -> tuple[FakeEngine, list[Gate]]:
    """An engine that does `before`, then waits at a gate of each request's own, then says "ab"."""
    gates: list[Gate] = []

    def script(request: GenerationRequest) -> Iterable[Step]:
        gates.append(Gate())
        return [*before, gates[-1], *AB]

    return FakeEngine(script), gates


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def gone(reader: asyncio.StreamReader) -> bytes:
    """What came until the server closed the connection."""
    async with asyncio.timeout(10):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


STAGES: dict[str, tuple[Step, ...]] = {
    "queued": (Progress(0, 9, 0.0, 3),),
    "prefill": (Progress(3, 9, 1.0),),
    "decode": (AB[0],),
}
WAYS: dict[str, Callable[[asyncio.StreamWriter], None]] = {
    "closes": lambda writer: writer.close(),
    "resets": lambda writer: writer.transport.abort(),
    "halves then closes": lambda writer: (writer.write_eof(), writer.close())[0],
    "pipelines then closes": lambda writer: (writer.write(post(TEXT_URL, {"prompt": "b"}) * 3), writer.close())[0],
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", STAGES)
@on_uvloop
async def test_a_client_that_leaves_is_cancelled_alone_wherever_it_is(
    tmp_path: Path, stage: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine, gates = gated(*STAGES[stage])
    caplog.set_level(logging.INFO, "sluice.request")
    async with open_house(tmp_path, engine) as house:
        other = asyncio.ensure_future(house.client.post(TEXT_URL, json={"prompt": "a"}))
        await until(lambda: len(gates) == 1 and gates[0].reached.is_set())
        for count, leave in enumerate(WAYS.values(), start=1):
            _, writer = await house.raw()
            writer.write(post(TEXT_URL, {"prompt": "a", "stream": stream}))
            await until(lambda count=count: len(gates) == count + 1 and gates[count].reached.is_set())
            leave(writer)
            await until(lambda count=count: engine.cancelled == count)
        assert len(engine.live) == 1
        gates[0].open()
        assert (await other).json()["choices"][0]["text"] == ("abab" if stage == "decode" else "ab")
        await house.settled()
    outcomes = [record.fields["outcome"] for record in caplog.records]  # type: ignore[attr-defined]
    assert sorted(outcomes) == ["left"] * len(WAYS) + ["ok"]


@on_uvloop
async def test_a_client_that_leaves_while_sending_never_reaches_the_engine(tmp_path: Path) -> None:
    engine, _ = gated()
    async with open_house(tmp_path, engine) as house:
        whole = post(TEXT_URL, {"prompt": "a"})
        for cut in (10, len(whole) - 5):
            for leave in (WAYS["closes"], WAYS["resets"], WAYS["halves then closes"]):
                _, writer = await house.raw()
                writer.write(whole[:cut])
                await writer.drain()
                leave(writer)
        await until(lambda: house.server.connections == 0)
        await house.settled()
    assert not engine.submitted


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@on_uvloop
async def test_a_half_closed_client_still_gets_its_answer(tmp_path: Path, stream: bool) -> None:
    """`nc -N` and `socat` shut their sending side as soon as the request is out."""
    engine, gates = gated()
    async with open_house(tmp_path, engine) as house:
        reader, writer = await house.raw()
        writer.write(post(TEXT_URL, {"prompt": "a", "stream": stream}))
        writer.write_eof()
        await until(lambda: bool(gates) and gates[0].reached.is_set())
        await asyncio.sleep(0.6)  # two sweeps: it must not be taken for gone
        gates[0].open()
        status, _, body = await read_reply(reader)
        assert status == 200
        assert b"ab" in body if not stream else read_stream(body.decode()).done
        assert await gone(reader) == b""  # and the connection ends with it
        writer.close()
        await house.settled()
    assert engine.cancelled == 0


@on_uvloop
async def test_over_tcp_an_end_of_input_counts_as_leaving(tmp_path: Path) -> None:
    engine, gates = gated()
    token = "t" * 20
    async with open_house(tmp_path, engine, access=Access(token=token.encode()), tcp=True) as house:
        for leave in WAYS.values():
            _, writer = await house.raw(tcp=True)
            writer.write(post(TEXT_URL, {"prompt": "a"}, f"Authorization: Bearer {token}\r\n"))
            await until(lambda: bool(gates) and gates[-1].reached.is_set())
            leave(writer)
            await house.settled()
    assert engine.cancelled == len(WAYS)


@on_uvloop
async def test_a_reader_that_stops_reading_is_dropped_and_slows_nobody(tmp_path: Path) -> None:
    def script(request: GenerationRequest) -> Iterable[Step]:
        return itertools.repeat(AB[0]) if request.max_tokens > 100 else AB

    engine = FakeEngine(script, context=10_000_000)
    limits = Limits(write_seconds=0.3, write_buffer_bytes=4096)
    async with open_house(tmp_path, engine, limits) as house:
        readers = []
        for _ in range(3):
            _, writer = await house.raw()
            writer.transport.pause_reading()
            writer.write(post(TEXT_URL, {"prompt": "a", "max_tokens": 9_000_000, "stream": True}))
            readers.append(writer)
        await until(lambda: len(engine.live) == 3)
        while engine.live:
            assert (await house.client.post(TEXT_URL, json={"prompt": "a"})).json()["choices"][0]["text"] == "ab"
        await house.settled()
        assert engine.cancelled == 3
        for writer in readers:
            writer.transport.abort()


@on_uvloop
async def test_a_whole_reply_nobody_takes_does_not_keep_its_connection(tmp_path: Path) -> None:
    limits = Limits(write_seconds=0.3, keepalive_seconds=1)
    async with open_house(tmp_path, FakeEngine(say(*AB)), limits) as house:
        _, writer = await house.raw()
        writer.transport.pause_reading()
        writer.write(post("/detokenize", {"tokens": AB * 400_000}))
        await writer.drain()
        await until(lambda: house.server.connections == 1)
        await until(lambda: house.server.connections == 0)


@on_uvloop
async def test_requests_that_take_too_long_to_arrive_are_ended(tmp_path: Path) -> None:
    limits = Limits(header_seconds=0.4, body_seconds=0.4)
    async with open_house(tmp_path, FakeEngine(say(*AB)), limits) as house:
        for sent in (b"", b"POST /v1/completions HTT", b"GET /health/live HTTP/1.1\r\nHost:"):
            reader, writer = await house.raw()
            writer.write(sent)
            assert await gone(reader) == b""
            writer.close()
        reader, writer = await house.raw()
        writer.write(post(TEXT_URL, {"prompt": "a"})[:-3])
        status, headers, body = await read_reply(reader)
        assert (status, headers["connection"]) == (408, "close")
        assert json.loads(body)["error"]["code"] == "request_timeout"
        writer.close()
        # One that drips is no better than one that stops.
        reader, writer = await house.raw()
        for _ in range(200):
            if writer.is_closing():
                break
            writer.write(b"G")
            await asyncio.sleep(0.01)
            if reader.at_eof():
                break
        assert await gone(reader) == b""


@on_uvloop
async def test_what_is_no_http_is_told_so_in_json(tmp_path: Path) -> None:
    limits = Limits(header_bytes=2048)
    async with open_house(tmp_path, FakeEngine(say(*AB)), limits) as house:
        cases = [
            (b"\x16\x03\x01 hello\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
            (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -4\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 5000 + b"\r\n\r\n", 431),
        ]
        for sent, expected in cases:
            reader, writer = await house.raw()
            writer.write(sent)
            status, headers, body = await read_reply(reader)
            assert (status, headers["content-type"]) == (expected, "application/json")
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
            assert await gone(reader) == b""
            writer.close()
        # A body whose chunks turn out to be garbage.
        reader, writer = await house.raw()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"zz\r\n")
        assert (await read_reply(reader))[0] == 400
        writer.close()
        await house.settled()


@on_uvloop
async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with open_house(tmp_path, FakeEngine(lambda r: [*AB] * r.prompt_ids[0])) as house:
        reader, writer = await house.raw()
        writer.write(b"".join(post(TEXT_URL, {"prompt": [count]}) for count in (3, 1, 2)))
        texts = [json.loads((await read_reply(reader))[2])["choices"][0]["text"] for _ in range(3)]
        assert texts == ["ababab", "ab", "abab"]
        writer.close()


@on_uvloop
async def test_connections_beyond_the_limit_are_told_then_closed(tmp_path: Path) -> None:
    async with open_house(tmp_path, FakeEngine(say(*AB)), Limits(connections=2)) as house:
        idle = [await house.raw() for _ in range(2)]
        await until(lambda: house.server.connections == 2)
        reader, third = await house.raw()
        third.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers, _ = await read_reply(reader)
        assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
        more = [await house.raw() for _ in range(4)]
        await until(lambda: house.server.connections <= 4)
        for _, writer in (*idle, *more):
            writer.close()
        await until(lambda: house.server.connections == 0)
        assert (await house.client.get("/health/live")).status_code == 200


# ---- access


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    left, right = socket.socketpair()
    with left, right:
        peer = peer_of(left)
    assert peer is not None
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
    assert {os.getgid(), *os.getgroups()} <= peer.gids


@pytest.mark.parametrize(
    ("access", "status"),
    [
        (Access(), 200),
        (Access(uids=frozenset({os.getuid()}), always=frozenset()), 200),
        (Access(gids=frozenset({os.getgid()}), always=frozenset()), 200),
        (Access(uids=frozenset({54321})), 200),  # the daemon's own user is always let in
        (Access(uids=frozenset({54321}), always=frozenset()), 403),
        (Access(gids=frozenset({54321}), always=frozenset()), 403),
    ],
)
@on_uvloop
async def test_a_unix_peer_must_be_on_the_list(tmp_path: Path, access: Access, status: int) -> None:
    engine = FakeEngine(say(*AB))
    async with open_house(tmp_path, engine, access=access) as house:
        reply = await house.client.post(TEXT_URL, json={"prompt": "a"})
        assert reply.status_code == status
        if status == 403:
            assert reply.json()["error"]["type"] == "authentication_error"
            assert reply.headers["connection"] == "close"
            assert not engine.submitted
            access.replace(Access())
            assert (await house.client.post(TEXT_URL, json={"prompt": "a"})).status_code == 200


_AS_NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
plug = socket.socket(socket.AF_UNIX)
plug.connect(sys.argv[1])
plug.sendall(b"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
print(plug.makefile().readline().split()[1])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
@on_uvloop
async def test_another_users_process_is_known_for_what_it_is() -> None:
    cases = [
        (Access(uids=frozenset({54321})), 403),
        (Access(uids=frozenset({65534})), 200),
        (Access(gids=frozenset({65534})), 200),
        (Access(gids=frozenset({0})), 403),
        (Access(), 200),
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # what pytest makes is its user's alone
        access = Access()
        async with open_house(Path(folder), FakeEngine(say(*AB)), access=access) as house:
            os.chmod(house.path, 0o666)
            for rules, expected in cases:
                access.replace(rules)
                command = (sys.executable, "-I", "-c", _AS_NOBODY, str(house.path))
                process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
                told, _ = await process.communicate()
                assert int(told) == expected


@on_uvloop
async def test_tcp_needs_the_token_and_the_unix_socket_does_not(tmp_path: Path) -> None:
    right = "correct horse battery"
    async with open_house(tmp_path, FakeEngine(say(*AB)), access=Access(token=right.encode()), tcp=True) as house:
        assert (await house.client.get("/v1/models")).status_code == 200
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{house.tcp_port}", verify=False) as client:
            for value in (
                None,
                "",
                "Bearer",
                "Bearer wrong",
                f"Basic {right}",
                f"Bearer {right}x",
                f"Bearer {right[:-1]}",
            ):
                headers = {} if value is None else {"Authorization": value}
                reply = await client.get("/v1/models", headers=headers)
                assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
                assert reply.json()["error"]["type"] == "authentication_error"
            good = await client.post(TEXT_URL, json={"prompt": "a"}, headers={"Authorization": f"bearer {right}"})
            assert good.status_code == 200


async def test_tcp_without_a_token_serves_nobody(tmp_path: Path) -> None:
    async with open_house(tmp_path, FakeEngine(say(*AB)), access=Access(), tcp=True) as house:
        for value in ("", "Bearer", "Bearer None", "Bearer 0000000000000000"):
            reader, writer = await house.raw(tcp=True)
            writer.write(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: {value}\r\n\r\n".encode())
            assert (await read_reply(reader))[0] == 401


def test_the_rules_come_from_the_settings(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\nsecond line\n")
    token.chmod(0o640)
    access = access_from(ServerSettings(allow_users=("root",), allow_groups=("root",), token_file=token, tcp="[::1]:1"))
    assert (access.uids, access.gids, access.token) == ({0}, {0}, b"0123456789abcdef")
    for settings, words in (
        (ServerSettings(allow_users=("nobody-here-x",)), "allow_users"),
        (ServerSettings(allow_groups=("nobody-here-x",)), "allow_groups"),
        (ServerSettings(tcp="127.0.0.1:80"), "token_file"),
        (ServerSettings(token_file=tmp_path / "absent"), "absent"),
    ):
        with pytest.raises(PresetError, match=words):
            access_from(settings)
    for text, mode in (("", 0o600), ("short\n", 0o600), ("x" * 5000, 0o600), ("0123456789abcdef", 0o644)):
        token.write_text(text)
        token.chmod(mode)
        with pytest.raises(PresetError):
            Access(token=read_token(token))


# ---- the way down


@on_uvloop
async def test_a_drain_lets_what_runs_finish_and_takes_no_more(tmp_path: Path) -> None:
    engine, gates = gated()
    async with open_house(tmp_path, engine) as house:
        running = asyncio.ensure_future(house.client.post(TEXT_URL, json={"prompt": "a"}))
        await until(lambda: bool(gates) and gates[0].reached.is_set())
        drain = asyncio.ensure_future(house.server.drain(10))
        await asyncio.sleep(0)
        refused = await house.client.post(TEXT_URL, json={"prompt": "a"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert (await house.client.get("/health/ready")).json() == {"status": "draining"}
        assert (await house.client.get("/health/live")).status_code == 200
        assert not drain.done()
        gates[0].open()
        assert await drain
        assert (await running).json()["choices"][0]["text"] == "ab"


@on_uvloop
async def test_a_stop_ends_what_runs_with_a_clear_error(tmp_path: Path) -> None:
    engine, gates = gated(AB[0])
    async with open_house(tmp_path, engine) as house:
        whole = asyncio.ensure_future(house.client.post(TEXT_URL, json={"prompt": "a"}))
        stream = asyncio.ensure_future(house.client.post(TEXT_URL, json={"prompt": "a", "stream": True}))
        idle, _ = await house.raw()
        await until(lambda: len(gates) == 2 and all(gate.reached.is_set() for gate in gates))
        assert not await house.server.drain(0.05)
        await house.server.stop()
        await house.server.stop()
        assert (await whole).status_code == 503
        assert "stopping" in (await whole).json()["error"]["message"]
        read = read_stream((await stream).text)
        assert read.events[-1] == (await whole).json()
        assert not read.done
        assert await gone(idle) == b""
        assert house.server.connections == 0
        assert not engine.live
        with pytest.raises(ConnectionRefusedError):
            await house.raw()
        assert house.path.exists()  # a socket of the service manager's stays


# ---- what is told


async def test_every_request_leaves_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sluice.request")
    async with open_house(tmp_path, FakeEngine(say(*AB))) as house:
        await house.client.get("/health/live")  # probes are not told of
        await house.client.post(TEXT_URL, json={"prompt": "a b c", "stream": True})
        await house.client.post(TEXT_URL, json={"prompt": ""})
    first, second = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert (first["status"], first["outcome"], first["finish"], first["stream"]) == (200, "ok", "stop", True)
    assert first["prompt_tokens"] == len(MINI.encode_text("a b c"))
    assert first["completion_tokens"] == len(AB) + 1
    assert (first["queue_seconds"], first["prefill_seconds"]) == (0.25, 0.5)
    assert first["request"].startswith("cmpl-")
    assert (second["status"], second["outcome"]) == (400, "refused")
    assert "a b c" not in caplog.text


async def test_metrics_tell_of_requests_and_of_the_engine(tmp_path: Path) -> None:
    async with open_house(tmp_path, FakeEngine(say(*AB))) as house:
        await house.client.post(TEXT_URL, json={"prompt": "a", "max_tokens": 2})
        await house.client.post(TEXT_URL, json={"prompt": ""})
        await asyncio.sleep(0.6)  # one measurement of the loop's lag
        reply = await house.client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    lines = set(reply.text.splitlines())
    for line in (
        'sluice_http_requests_total{outcome="ok",route="/v1/completions"} 1.0',
        'sluice_http_requests_total{outcome="refused",route="/v1/completions"} 1.0',
        'sluice_errors_total{kind="RequestError"} 1.0',
        'sluice_request_tokens_total{kind="completion"} 2.0',
        "sluice_time_to_first_token_seconds_count 1.0",
        "sluice_time_per_token_seconds_count 1.0",
        "sluice_queue_seconds_count 1.0",
        "sluice_loop_lag_seconds_count 1.0",
        "sluice_http_connections 1.0",
        "sluice_queue_waiting 0.0",
        'sluice_memory_plan_pool_bytes{pool="trunk"} 1000.0',
        'sluice_memory_used_pool_bytes{pool="pinned trunk"} 800.0',
        'sluice_memory_used_pool_bytes{pool="expert cache"} 34.0',
        "sluice_memory_plan_bytes 1000.0",
        "sluice_memory_rss_bytes 5000.0",
        "sluice_expert_hits_total 3.0",
        "sluice_expert_misses_total 1.0",
        "sluice_expert_bytes_read_total 17.0",
        'sluice_drive_busy_seconds_total{drive="nvme0"} 0.5',
        "sluice_prediction_precision 0.75",
        'sluice_rate{name="decode_tokens_per_second"} 2.5',
    ):
        assert line in lines, line


# ---- everything at once


@on_uvloop
async def test_a_thousand_requests_of_a_hundred_clients_that_leave_when_they_like(tmp_path: Path) -> None:
    """No wrong text, and afterwards nothing is left: no task, descriptor, connection or slot."""
    dice = random.Random(20261)

    def spoken(prompt: str) -> str:
        return f"said {prompt} 🦜 {prompt[::-1]}"

    def script(request: GenerationRequest) -> list[int]:
        said = MINI.decode(request.prompt_ids)
        if "<|open|>" in said:
            return reply_ids(*answer(spoken(said.split("#")[1]), "hm"))
        return MINI.encode_text(spoken(said))

    engine = FakeEngine(script, context=4096)
    finished = left = 0

    async def one(house: House, client: httpx.AsyncClient, number: int) -> None:
        nonlocal finished, left
        prompt = f"word{number:x}"
        chat, stream, leaves = dice.random() < 0.4, dice.random() < 0.5, dice.random() < 0.3
        body: dict[str, Any] = {"stream": stream, "max_tokens": 200, "n": dice.choice([1, 1, 1, 3])}
        body |= {"messages": [{"role": "user", "content": f"#{prompt}#"}]} if chat else {"prompt": prompt}
        url = CHAT_URL if chat else TEXT_URL
        if leaves:
            left += 1
            if stream:
                async with client.stream("POST", url, json=body) as reply:
                    pieces = reply.aiter_raw()
                    for _ in range(dice.randrange(4)):
                        await anext(pieces, None)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(dice.uniform(0.0, 0.2)):
                        await client.post(url, json=body)
            return
        reply = await client.post(url, json=body)
        assert reply.status_code == 200
        texts = dict.fromkeys(range(body["n"]), "")
        if stream:
            read = read_stream(reply.text)
            assert read.done
            for event in read.events:
                choice = event["choices"][0]
                texts[choice["index"]] += choice["delta"].get("content", "") if chat else choice["text"]
        else:
            for choice in reply.json()["choices"]:
                texts[choice["index"]] = choice["message"]["content"] if chat else choice["text"]
        assert set(texts.values()) == {spoken(prompt)}
        finished += 1

    async def client_life(house: House, number: int) -> None:
        transport = httpx.AsyncHTTPTransport(uds=str(house.path), verify=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://sluice", timeout=60) as client:
            for count in range(10):
                await one(house, client, number * 10 + count)

    async with open_house(tmp_path, engine) as house:
        await house.client.post(TEXT_URL, json={"prompt": "warm"})
        await house.client.aclose()
        await until(lambda: house.server.connections == 0)
        tasks, descriptors = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
        async with asyncio.TaskGroup() as group:
            for number in range(100):
                group.create_task(client_life(house, number))
        await house.settled()
        await until(lambda: house.server.connections == 0)
        assert not house.server.house.running
        assert len(asyncio.all_tasks()) == tasks
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert finished + left == 1000
        assert engine.cancelled > 100
        assert house.server.house.metrics.open_requests._value.get() == 0
