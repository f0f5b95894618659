"""/v1/completions and the small routes, over a Unix socket, with a scripted engine behind them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import vocabularies
from helpers.fake_engine import FakeEngine, Gate, byte_ids, say
from helpers.http_house import FINGERPRINT, open_house, read_stream

from sluice.daemon.api.limits import Limits
from sluice.daemon.api.schemas import CompletionRequest, read_request
from sluice.daemon.engine.requests import Progress
from sluice.io.errors import BudgetError, RequestError, StorageError

MINI = vocabularies.mini()
EMOJI = "🦜"
LIMITS = Limits(body_bytes=4096, heartbeat_seconds=0.05, progress_seconds=0.01)


def text_engine(text: str, **options: Any) -> FakeEngine:
    return FakeEngine(say(*MINI.encode_text(text)), **options)


async def test_a_text_prompt_is_encoded_as_text_and_answered(tmp_path: Path) -> None:
    engine = text_engine(" world, said the parrot")
    async with open_house(tmp_path, engine) as house:
        reply = await house.client.post(
            "/v1/completions", json={"model": "k3", "prompt": "Hello <|open|>", "max_tokens": 50, "seed": 7}
        )
    assert reply.status_code == 200
    body = reply.json()
    assert body["choices"] == [
        {"index": 0, "text": " world, said the parrot", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["object"] == "text_completion"
    assert body["model"] == "org/k3-mini"
    assert body["system_fingerprint"] == FINGERPRINT
    assert body["id"] == reply.headers["x-request-id"]
    request = engine.submitted[0]
    assert list(request.prompt_ids) == MINI.encode_text("Hello <|open|>")
    assert max(request.prompt_ids) < MINI.n_ranks
    assert request.sampling.seed == 7
    generated = len(MINI.encode_text(" world, said the parrot")) + 1  # the stop token is counted
    assert body["usage"] == {
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": generated,
        "total_tokens": len(request.prompt_ids) + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("prompt", [[5, 6, 4095], [[5, 6, 4095]]])
async def test_token_ids_go_to_the_engine_as_they_are(tmp_path: Path, prompt: Any) -> None:
    engine = text_engine("x")
    async with open_house(tmp_path, engine) as house:
        reply = await house.client.post("/v1/completions", json={"prompt": prompt})
    assert reply.status_code == 200
    assert engine.submitted[0].prompt_ids == (5, 6, 4095)
    assert engine.submitted[0].max_tokens == 16


@pytest.mark.parametrize("extra", [{}, {"stop": ["tru", "xyz"]}, {"max_tokens": 5}, {"n": 3}, {"logprobs": 2}])
async def test_streaming_and_not_streaming_say_the_same(tmp_path: Path, extra: dict[str, Any]) -> None:
    engine = text_engine(f"the {EMOJI} tells the truth, mostly {EMOJI}")
    body = {"prompt": "p", "max_tokens": 60, "seed": 1, "logits_fingerprint": True, **extra}
    async with open_house(tmp_path, engine) as house:
        whole = (await house.client.post("/v1/completions", json=body)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        reply = await house.client.post("/v1/completions", json={**body, **options})
        await house.settled()
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    stream = read_stream(reply.text)
    assert stream.done
    *chunks, last = stream.events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        assert own[-1]["logits_fingerprint"] == choice["logits_fingerprint"]
        if choice["logprobs"]:
            for key, joined in choice["logprobs"].items():
                assert [entry for c in own for entry in c["logprobs"][key]] == joined
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert all(chunk["system_fingerprint"] == FINGERPRINT for chunk in stream.events)


async def test_without_include_usage_no_chunk_has_empty_choices(tmp_path: Path) -> None:
    async with open_house(tmp_path, text_engine("abc")) as house:
        reply = await house.client.post("/v1/completions", json={"prompt": "p", "stream": True})
    stream = read_stream(reply.text)
    assert all(len(event["choices"]) == 1 and "usage" not in event for event in stream.events)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
async def test_a_limit_inside_an_emoji_gives_one_replacement_character(tmp_path: Path, limit: int) -> None:
    ids = byte_ids(EMOJI)
    async with open_house(tmp_path, FakeEngine(say(*ids))) as house:
        body = {"prompt": "p", "max_tokens": limit}
        whole = (await house.client.post("/v1/completions", json=body)).json()["choices"][0]
        reply = await house.client.post("/v1/completions", json={**body, "stream": True})
    pieces = [event["choices"][0]["text"] for event in read_stream(reply.text).events]
    assert whole["text"] == "".join(pieces) == (EMOJI if limit >= 4 else "\ufffd")
    assert whole["finish_reason"] == ("length" if limit <= 4 else "stop")


async def test_a_stop_string_ends_the_generation_and_is_not_shown(tmp_path: Path) -> None:
    gate = Gate()
    ids = MINI.encode_text("one, two, three")
    engine = FakeEngine(lambda request: [*ids, gate])
    async with open_house(tmp_path, engine) as house:
        reply = await house.client.post(
            "/v1/completions",
            json={"prompt": "p", "max_tokens": 60, "stop": " two", "logprobs": 1, "logits_fingerprint": True},
        )
        await house.settled()
        assert engine.cancelled == 1
    choice = reply.json()["choices"][0]
    assert choice["text"] == "one,"
    assert choice["finish_reason"] == "stop"
    assert choice["logits_fingerprint"] is None
    assert "".join(choice["logprobs"]["tokens"]) == "one,"
    used = reply.json()["usage"]["completion_tokens"]
    assert " two" in MINI.decode(ids[:used])
    assert " two" not in MINI.decode(ids[: used - 1])


async def test_logprobs_tell_the_token_and_its_rivals(tmp_path: Path) -> None:
    async with open_house(tmp_path, text_engine("ab cd")) as house:
        reply = await house.client.post("/v1/completions", json={"prompt": "p", "logprobs": 2})
    choice = reply.json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "ab cd"
    assert [choice["text"][at:][:1] for at in logprobs["text_offset"]] == [t[:1] for t in logprobs["tokens"]]
    assert all(value == -0.5 for value in logprobs["token_logprobs"])
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


async def test_choices_have_seeds_of_their_own_and_the_first_is_the_requests(tmp_path: Path) -> None:
    engine = text_engine("a")
    async with open_house(tmp_path, engine) as house:
        await house.client.post("/v1/completions", json={"prompt": "p", "n": 8, "seed": -1})
        await house.client.post("/v1/completions", json={"prompt": "p", "n": 8, "seed": -1})
    seeds = [request.sampling.seed for request in engine.submitted]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds[:8])) == 8
    assert seeds[:8] == seeds[8:]


BAD = [
    ({"prompt": [1, 4096]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [1.0]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [2**64]}, "prompt[0]"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": None}, "prompt"),
    ({}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 2**31}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 2.5}, "max_tokens"),
    ({"prompt": "a", "temperature": 2.1}, "temperature"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_k": -2}, "top_k"),
    ({"prompt": "a", "min_p": 1.1}, "min_p"),
    ({"prompt": "a", "seed": 2**63}, "seed"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "n": 9}, "n"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": ["a", ""]}, "stop[1]"),
    ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "a", "logit_bias": {"4096": 1}}, "logit_bias[4096]"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias[x]"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "a", "stream": 1}, "stream"),
    ({"prompt": "a", "echo": True}, "echo"),
    ({"prompt": "a", "suffix": "z"}, "suffix"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
    ({"prompt": "a", "priority": 101}, "priority"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[json.dumps(body)[:60] for body, _ in BAD])
async def test_bad_values_are_refused_by_name(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    engine = text_engine("x")
    async with open_house(tmp_path, engine) as house:
        reply = await house.client.post("/v1/completions", json=body)
        assert (await house.client.get("/health/live")).status_code == 200  # the connection is still good
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert not engine.submitted


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "logit_bias": None, "metadata": {"a": 1}, "presence_penalty": 0, "echo": False, "best_of": 1},
        {"never_heard_of": [1], "stop": None, "max_tokens": None, "logit_bias": {}, "top_k": -1},
    ],
)
async def test_harmless_fields_are_ignored_and_null_is_absent(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with open_house(tmp_path, text_engine("x")) as house:
        reply = await house.client.post("/v1/completions", json={"prompt": "a", **fields})
    assert reply.status_code == 200


async def test_max_tokens_is_clamped_to_the_context(tmp_path: Path) -> None:
    engine = text_engine("x", context=10)
    async with open_house(tmp_path, engine) as house:
        assert (await house.client.post("/v1/completions", json={"prompt": [1] * 9, "max_tokens": 9999})).is_success
        too_long = await house.client.post("/v1/completions", json={"prompt": [1] * 10})
    assert engine.submitted[0].max_tokens == 1
    assert too_long.status_code == 400
    error = too_long.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert "10 tokens" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"nul",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"[" * 2000,
        b'{"prompt": "a", "temperature": 1e999}',
    ],
)
async def test_what_is_not_a_json_object_is_refused(tmp_path: Path, body: bytes) -> None:
    async with open_house(tmp_path, text_engine("x"), LIMITS) as house:
        headers = {"content-type": "application/json"}
        reply = await house.client.post("/v1/completions", content=body, headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_how_a_request_comes_is_checked(tmp_path: Path) -> None:
    async with open_house(tmp_path, text_engine("x"), LIMITS) as house:
        client = house.client
        wrong_type = await client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        assert (wrong_type.status_code, wrong_type.json()["error"]["code"]) == (415, "unsupported_media_type")
        packed = await client.post("/v1/completions", json={"prompt": "a"}, headers={"content-encoding": "gzip"})
        assert packed.status_code == 415
        # Over the limit: declared, in chunks, and far over it (nothing is read then).
        for size in (4097, 200_000):
            large = await client.post("/v1/completions", json={"prompt": "a" * size})
            assert (large.status_code, large.headers["connection"]) == (413, "close")

        async def parts() -> Any:
            for _ in range(50):
                yield b" " * 1000

        chunked = await client.post("/v1/completions", content=parts(), headers={"content-type": "application/json"})
        assert chunked.status_code == 413
        method = await client.get("/v1/completions")
        assert (method.status_code, method.headers["allow"]) == (405, "POST")
        assert method.json()["error"]["code"] == "method_not_allowed"
        lost = await client.get("/v1/nothing")
        assert (lost.status_code, lost.json()["error"]["code"]) == (404, "not_found")
        named = await client.post("/v1/completions", json={"prompt": "a", "model": "g" * 3000})
        assert len(named.json()["error"]["message"]) == 600
        model = await client.post("/v1/completions", json={"prompt": "a", "model": "gpt-9"})
        assert (model.status_code, model.json()["error"]["code"]) == (404, "model_not_found")
        reader, writer = await house.raw()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 411")
        writer.close()


async def test_models_and_health(tmp_path: Path) -> None:
    engine = text_engine("x")
    entry = {"id": "org/k3-mini", "object": "model", "created": 1_700_000_000, "owned_by": "sluice"}
    async with open_house(tmp_path, engine) as house:
        client = house.client
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": [entry]}
        for name in ("org/k3-mini", "org%2Fk3-mini", "k3"):
            assert (await client.get(f"/v1/models/{name}")).json() == entry
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/health/ready")).json() == {"status": "ready"}
        status = (await client.get("/v1/status")).json()
        assert status["model"] == {"name": "org/k3-mini", "system_fingerprint": FINGERPRINT}
        engine.ready = False
        loading = await client.get("/health/ready")
        assert (loading.status_code, loading.json()) == (503, {"status": "loading"})
        assert (await client.get("/health/live")).status_code == 200
        refused = await client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0


async def test_a_full_queue_says_when_to_come_back_and_keeps_nothing(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(lambda request: [gate, 5], slots=2)
    async with open_house(tmp_path, engine) as house:
        first = asyncio.ensure_future(house.client.post("/v1/completions", json={"prompt": "a"}))
        await gate.reached.wait()
        full = await house.client.post("/v1/completions", json={"prompt": "a", "n": 2})
        assert (full.status_code, full.headers["retry-after"]) == (429, "7")
        assert full.json()["error"]["code"] == "rate_limit_exceeded"
        assert len(engine.live) == 1  # the one of the two that had been accepted is gone again
        gate.open()
        assert (await first).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StorageError("short read", drive="nvme1", file="m-3.safetensors", offset=7, layer=2), 503, "storage_error"),
        (BudgetError("the state of this request takes 9 GiB"), 503, "budget_exceeded"),
        (ZeroDivisionError("secret"), 500, None),
    ],
)
async def test_an_engine_error_is_a_status_before_the_stream_and_an_event_in_it(
    tmp_path: Path, error: Exception, status: int, code: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(lambda request: [MINI.encode_text("ab")[0], error])
    async with open_house(tmp_path, engine) as house:
        whole = await house.client.post("/v1/completions", json={"prompt": "a"})
        reply = await house.client.post("/v1/completions", json={"prompt": "a", "stream": True})
        await house.settled()
    assert (whole.status_code, whole.json()["error"]["code"]) == (status, code)
    assert "secret" not in whole.text + reply.text
    stream = read_stream(reply.text)
    assert stream.events[-1] == whole.json()
    assert not stream.done
    assert ("secret" in caplog.text) == (status == 500)


async def test_a_slow_model_is_heard_from_by_the_clock(tmp_path: Path) -> None:
    gate, second = Gate(), Gate()
    queued, prefill = Progress(0, 4000, 0.0, 2), Progress(1000, 4000, 50.0)
    ids = MINI.encode_text("ab")
    engine = FakeEngine(lambda request: [queued, prefill, gate, ids[0], second, *ids[1:]])
    async with (
        open_house(tmp_path, engine, LIMITS) as house,
        house.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as reply,
    ):
        seen = ""
        async for text in reply.aiter_text():
            seen += text
            if seen.count(": prefill done=1000 total=4000 rate=50.0 eta_s=60") >= 3:
                gate.open()
            if seen.count(": decode tokens=1") >= 3:
                second.open()
    stream = read_stream(seen)
    assert stream.comments[0] == "accepted"
    assert stream.done
    assert "".join(event["choices"][0]["text"] for event in stream.events) == "ab"


async def test_headers_come_before_the_first_token(tmp_path: Path) -> None:
    gate = Gate()
    engine = FakeEngine(lambda request: [gate])
    body = {"prompt": "a", "stream": True}
    async with (
        open_house(tmp_path, engine) as house,
        house.client.stream("POST", "/v1/completions", json=body) as reply,
    ):
        assert reply.status_code == 200
        assert await anext(reply.aiter_text()) == ": accepted\n\n"
        assert not engine.live or not next(iter(engine.live)).produced
        gate.open()


async def test_priority_comes_from_header_or_field(tmp_path: Path) -> None:
    engine = text_engine("x")
    async with open_house(tmp_path, engine) as house:
        for headers, body in (
            ({}, {}),
            ({}, {"priority": 3}),
            ({"X-Sluice-Priority": "background"}, {"priority": 3}),
            ({"X-Sluice-Priority": "42"}, {}),
        ):
            reply = await house.client.post("/v1/completions", json={"prompt": "a", **body}, headers=headers)
            assert reply.status_code == 200
        bad = await house.client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Sluice-Priority": "now"})
        assert bad.status_code == 400
    assert [request.priority for request in engine.submitted] == [0, 3, 10, 42]


@pytest.mark.parametrize("count", [10, 12_000, 40_000, 60_001])
def test_a_long_list_of_ids_is_read_in_pieces_to_the_same_values(count: int) -> None:
    ids = [(index * 7919) % 163_840 for index in range(count)]
    for separator in (",", " ,\n "):
        body = '{"seed": 3, "prompt": [' + separator.join(map(str, ids)) + "]}"
        request = read_request(body.encode(), CompletionRequest)
        assert request.prompt == ids
        assert request.seed == 3


@pytest.mark.parametrize(
    ("member", "words"),
    [
        ("true", "bool"),
        ("1.5", "float"),
        ('"a,b"', None),
        ("[1,2]", None),
        ("1e3", "float"),
        ("", "JSON"),
        ("1]", "JSON"),
    ],
)
def test_what_is_wrong_in_a_long_list_is_told_like_in_a_short_one(member: str, words: str | None) -> None:
    for where in (0, 20_000, 39_999):
        parts = ["12345"] * 40_000
        parts[where] = member
        body = ('{"prompt": [' + ",".join(parts) + "]}").encode()
        if words is None:
            assert read_request(body, CompletionRequest).prompt == json.loads(body)["prompt"]
            continue
        with pytest.raises(RequestError, match=words) as found:
            read_request(body, CompletionRequest)
        if words != "JSON":
            assert found.value.param == f"prompt[{where}]"
