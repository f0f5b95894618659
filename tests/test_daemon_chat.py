"""Chat on the real daemon with the model that comes along: the official client, curl, every form of answer."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time

import httpx
import openai
import pytest
from helpers.daemon_process import daemon, sluice

ASK = [{"role": "user", "content": "Who are you?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with daemon("mini", tmp_path_factory.mktemp("chat"), "--set", "engine.max_sequences=4") as d:
        yield d


@pytest.fixture
def client(running):
    http = httpx.Client(transport=httpx.HTTPTransport(uds=str(running.socket), verify=False), timeout=120)
    with openai.OpenAI(api_key="none", base_url="http://sluice/v1", http_client=http, max_retries=0) as made:
        yield made


def ask(client, **more):
    return client.chat.completions.create(**({"model": "mini", "messages": ASK, "max_tokens": 120, "seed": 1} | more))


def test_an_answer_in_words_with_its_thinking_apart(client):
    reply = ask(client, temperature=0)
    message = reply.choices[0].message
    assert message.content
    assert "<|" not in message.content
    assert message.model_extra.get("reasoning_content")
    assert reply.usage.completion_tokens > 0
    assert reply.system_fingerprint.startswith("fp_")


def test_thinking_can_be_turned_off(client):
    reply = ask(client, temperature=0, extra_body={"thinking": {"type": "disabled"}})
    assert not reply.choices[0].message.model_extra.get("reasoning_content")


def test_a_stream_joins_to_the_whole_answer(client):
    whole = ask(client, temperature=0.8)
    content = reasoning = ""
    for chunk in ask(client, temperature=0.8, stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            content += chunk.choices[0].delta.content or ""
            reasoning += (chunk.choices[0].delta.model_extra or {}).get("reasoning_content") or ""
        else:
            assert chunk.usage == whole.usage
    assert content == whole.choices[0].message.content
    assert reasoning == whole.choices[0].message.model_extra.get("reasoning_content", "")


def test_a_schema_always_parses(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    reply = ask(
        client,
        max_tokens=800,
        temperature=1.0,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
        extra_body={"thinking": {"type": "disabled"}},
    )
    assert reply.choices[0].finish_reason == "stop"
    made = json.loads(reply.choices[0].message.content)
    assert made.keys() == {"name", "age"}
    assert isinstance(made["age"], int)


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_tool_is_called(client, stream):
    more = {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "max_tokens": 600,
        "temperature": 0.7,
        "extra_body": {"thinking": {"type": "disabled"}},
    }
    if not stream:
        call = ask(client, **more).choices[0].message.tool_calls[0]
        name, arguments = call.function.name, call.function.arguments
    else:
        name = arguments = ""
        for chunk in ask(client, stream=True, **more):
            for delta in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
                name += delta.function.name or "" if not name else ""
                arguments += delta.function.arguments or ""
    assert name == "get_weather"
    assert isinstance(json.loads(arguments)["city"], str)


async def test_many_asynchronous_clients_get_what_each_gets_alone(running):
    transport = httpx.AsyncHTTPTransport(uds=str(running.socket), verify=False)
    http = httpx.AsyncClient(transport=transport, timeout=120)
    async with openai.AsyncOpenAI(
        api_key="none", base_url="http://sluice/v1", http_client=http, max_retries=0
    ) as client:

        async def one(seed):
            reply = await client.chat.completions.create(
                model="mini", messages=ASK, max_tokens=30, seed=seed, temperature=1.0
            )
            return reply.choices[0].message.model_dump_json()

        together = await asyncio.gather(*(one(seed) for seed in range(6)))
        alone = [await one(seed) for seed in range(6)]
    assert together == alone


def test_curl_speaks_to_the_socket(running):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"messages": ASK, "max_tokens": 8})
    done = subprocess.run(
        [
            *("curl", "-sS", "--unix-socket", str(running.socket), "http://sluice/v1/chat/completions"),
            *("-H", "Content-Type: application/json", "-d", body),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(done.stdout)["object"] == "chat.completion"


def test_ask_prints_the_answer(running):
    done = sluice("ask", "--socket", str(running.socket), "--json", "Who are you?")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_health_answers_while_a_long_prompt_is_prefilled(running):
    """Not a benchmark: that it answers at all, many times, while the engine is busy."""
    with running.client() as http, running.client() as other:
        body = {"prompt": [5] * 3500, "max_tokens": 1, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            end = time.monotonic() + 20
            seen = 0
            while seen < 20 and time.monotonic() < end:
                assert other.get("/health/live").status_code == 200
                seen += 1
            assert seen == 20
            assert other.get("/v1/status").json()["queue"]["running"] == 1
