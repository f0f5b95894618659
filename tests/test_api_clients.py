"""Clients nobody here wrote: the official openai package and curl on the Unix socket, schemathesis on the schema."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import schemathesis
from helpers import vocabularies
from helpers.fake_engine import FakeEngine, Step, answer, reply_ids
from helpers.http_house import House, house_in_thread
from hypothesis import HealthCheck, settings
from pydantic import BaseModel

from sluice.daemon.api.openapi import document
from sluice.daemon.engine.requests import GenerationRequest
from sluice.io.errors import QueueFull

MINI = vocabularies.mini()
# The HTTP library that this openai is built on: httpx, or its successor.
http: Any = sys.modules[openai.DefaultHttpxClient.__mro__[1].__module__.split(".")[0]]
USER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Parrot(BaseModel):
    """What the structured output test asks for."""

    name: str
    age: int


def script(request: GenerationRequest) -> list[Step]:
    """Answers by what the prompt holds: tools offered, JSON wanted, thinking off, or plain."""
    prompt = MINI.decode(request.prompt_ids)
    if "<|open|>" not in prompt:
        return list(MINI.encode_text(" a story 🦜"))
    thinks = prompt.endswith("think<|sep|>")
    if "response_format" in prompt:
        pieces = answer('{"name":"Polly","age":7}', "as JSON" if thinks else None)
    elif "# Tools" in prompt and "tool_choice=none" not in prompt:
        pieces = answer("", "look it up" if thinks else None, ["weather|city=Paris"])
    else:
        pieces = answer("It rains 🦜.", "looking out" if thinks else None)
    return list(reply_ids(*pieces))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("clients")
    with house_in_thread(folder, lambda: FakeEngine(script, context=4096)) as running:
        yield running


@pytest.fixture
def client(house: House) -> Iterator[openai.OpenAI]:
    transport = http.HTTPTransport(uds=str(house.path), verify=False)
    with (
        http.Client(transport=transport) as plain,
        openai.OpenAI(base_url="http://sluice/v1", api_key="any", http_client=plain, max_retries=0) as client,
    ):
        yield client


def test_openai_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/k3-mini"]
    assert client.models.retrieve("k3").id == "org/k3-mini"


def test_openai_chats(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="k3", messages=USER, seed=1, temperature=0.5)
    message = reply.choices[0].message
    assert message.content == "It rains 🦜."
    assert message.reasoning_content == "looking out"  # type: ignore[attr-defined]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.system_fingerprint == "fp_test"
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    assert reply.usage.completion_tokens_details.reasoning_tokens


def test_openai_streams_a_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="k3", messages=USER, stream=True, stream_options={"include_usage": True}, reasoning_effort="low"
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "It rains 🦜."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]


def test_openai_accumulates_streamed_tool_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="k3", messages=USER, tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("weather", '{"city":"Paris"}')
    assert final.choices[0].finish_reason == "tool_calls"


def test_openai_goes_through_a_tool_call_and_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="k3", messages=USER, tools=[WEATHER], tool_choice="required")
    message = first.choices[0].message
    assert message.content is None
    assert message.tool_calls
    history = [*USER, message.model_dump(exclude_none=True),
               {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}]  # fmt: skip
    second = client.chat.completions.create(model="k3", messages=history, tools=[WEATHER], tool_choice="none")
    assert second.choices[0].message.content == "It rains 🦜."
    named: Any = {"type": "function", "function": {"name": "weather"}}
    third = client.chat.completions.create(model="k3", messages=USER, tools=[WEATHER], tool_choice=named)
    assert third.choices[0].finish_reason == "tool_calls"


def test_openai_parses_structured_output(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(model="k3", messages=USER, response_format=Parrot)
    assert reply.choices[0].message.parsed == Parrot(name="Polly", age=7)


def test_openai_completes_text(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="k3", prompt="Tell", max_tokens=40, logprobs=2)
    assert reply.choices[0].text == " a story 🦜"
    assert reply.choices[0].logprobs is not None
    stream = client.completions.create(model="k3", prompt=[1, 2, 3], max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == " a story 🦜"


def test_openai_raises_its_own_errors(client: openai.OpenAI, house: House) -> None:
    with pytest.raises(openai.NotFoundError) as lost:
        client.chat.completions.create(model="gpt-5", messages=USER)
    assert lost.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="k3", messages=USER, temperature=3)
    assert bad.value.param == "temperature"
    house.engine.submit_error = QueueFull("full", 3)
    try:
        with pytest.raises(openai.RateLimitError) as full:
            client.chat.completions.create(model="k3", messages=USER)
    finally:
        house.engine.submit_error = None
    assert full.value.response.headers["retry-after"] == "3"


def test_openai_raises_an_error_that_comes_within_a_stream(tmp_path: Path) -> None:
    def broken(request: GenerationRequest) -> list[Step]:
        return [*reply_ids("thinking"), QueueFull("the drive is gone", 1)]

    with house_in_thread(tmp_path, lambda: FakeEngine(broken)) as house:
        plain = http.Client(transport=http.HTTPTransport(uds=str(house.path), verify=False))
        with openai.OpenAI(base_url="http://sluice/v1", api_key="any", http_client=plain, max_retries=0) as client:
            stream = client.chat.completions.create(model="k3", messages=USER, stream=True)
            with pytest.raises(openai.APIError, match="the drive is gone"):
                list(stream)


async def test_openai_async(house: House) -> None:
    plain = http.AsyncClient(transport=http.AsyncHTTPTransport(uds=str(house.path), verify=False))
    async with openai.AsyncOpenAI(base_url="http://sluice/v1", api_key="any", http_client=plain) as client:
        reply = await client.chat.completions.create(model="k3", messages=USER)
        assert reply.choices[0].message.content == "It rains 🦜."
        stream = await client.chat.completions.create(model="k3", messages=USER, stream=True, n=2)
        texts = {0: "", 1: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == {0: "It rains 🦜.", 1: "It rains 🦜."}
        parsed = await client.chat.completions.parse(model="k3", messages=USER, response_format=Parrot)
        assert parsed.choices[0].message.parsed == Parrot(name="Polly", age=7)


def curl(house: House, *arguments: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "--silent", "--show-error", "--max-time", "20", "--unix-socket", str(house.path), *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=30).stdout.decode()


def test_curl_gets_a_whole_answer_and_a_stream(house: House) -> None:
    json_header = ("-H", "Content-Type: application/json")
    body = {"messages": USER, "stream": False}
    whole = json.loads(curl(house, "http://x/v1/chat/completions", *json_header, "-d", json.dumps(body)))
    assert whole["choices"][0]["message"]["content"] == "It rains 🦜."
    body["stream"] = True
    stream = curl(house, "-N", "http://x/v1/chat/completions", *json_header, "-d", json.dumps(body))
    assert stream.startswith(": accepted\n\n")
    assert stream.endswith("data: [DONE]\n\n")


def test_curl_is_told_what_is_wrong(house: House, tmp_path: Path) -> None:
    plain = curl(house, "http://x/v1/completions", "-d", '{"prompt": "a"}')  # curl's own type: a web form
    assert json.loads(plain)["error"]["code"] == "unsupported_media_type"
    large = tmp_path / "large.json"
    large.write_text('{"prompt": "' + "a" * 9_000_000 + '"}')
    for expect in ("Expect: 100-continue", "Expect:"):
        told = curl(
            house, "http://x/v1/completions", "-H", "Content-Type: application/json", "-H", expect, "-d", f"@{large}"
        )
        assert json.loads(told)["error"]["code"] == "request_too_large"
    assert curl(house, "-I", "http://x/health/live").startswith("HTTP/1.1 200")


# ---- whatever the schema allows, and what it does not


schema = schemathesis.openapi.from_dict(document())


@schema.parametrize()
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_no_request_whatever_makes_a_500(case: schemathesis.Case, house: House) -> None:
    response = case.call(base_url=f"http://127.0.0.1:{house.tcp_port}", timeout=20)
    assert response.status_code < 500, (case.body, response.text)
    if response.status_code >= 400 and case.method != "HEAD":
        error = response.json()["error"]
        assert error["message"]
    elif response.headers["content-type"][0].startswith("application/json"):
        case.validate_response(response, checks=[schemathesis.checks.response_schema_conformance])


def test_the_schema_is_served(house: House) -> None:
    served = requests.get(f"http://127.0.0.1:{house.tcp_port}/openapi.json", timeout=10).json()
    assert served == json.loads(json.dumps(document()))
