"""Constrained replies: whatever the model would like to say, JSON parses and demanded calls are made."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from helpers.vocabularies import MINI_VOCAB, mini

from sluice.daemon.chat.constraint import Constrainer, ReplyConstraint
from sluice.daemon.chat.reply import Reply, ReplyReader, call_id_maker, collect
from sluice.io.errors import RequestError

TOKENIZER = mini()
CONSTRAINER = Constrainer(TOKENIZER)
ENDERS = [TOKENIZER.encode_text(text)[0] for text in ('"', "}", "]", ",", ":", '"}', '"]')]


def babble(constraint: ReplyConstraint, seed: int, limit: int = 4000) -> list[int]:
    """What a model with random logits writes: any allowed token, with some taste for ending what is open."""
    draw, out = random.Random(seed), []
    ends = [TOKENIZER.control["<|close|>"], *sorted(TOKENIZER.stop_ids), *ENDERS]
    while len(out) < limit:
        allowed = constraint.allowed()
        assert allowed.shape == (MINI_VOCAB,)
        assert allowed.dtype == np.bool_
        choices = np.flatnonzero(allowed)
        assert len(choices), "the grammar has come to a dead end"
        ending = [token_id for token_id in ends if allowed[token_id]]
        token_id = draw.choice(ending) if ending and draw.random() < 0.4 else int(draw.choice(choices))
        constraint.accept(token_id)
        out.append(token_id)
        if token_id in TOKENIZER.stop_ids:
            return out
    raise AssertionError("no natural end")


def read(token_ids: list[int], start: Any, tools: bool = True) -> Reply:
    reader = ReplyReader(TOKENIZER, start=start, tools=tools, call_id=call_id_maker([1]))
    return collect([event for token_id in token_ids for event in reader.feed(token_id)])


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "<|close|>"]}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}


# Structured output


@pytest.mark.parametrize("start", ["think", "response"])
@pytest.mark.parametrize("wanted", [{"type": "json_object"}, "json_object"])
def test_a_json_object_always_parses(start: Any, wanted: Any) -> None:
    for seed in range(15):
        constraint = CONSTRAINER.for_reply(start=start, response_format=wanted)
        reply = read(babble(constraint, seed), start)
        assert isinstance(json.loads(reply.content), dict)
        assert reply.finish_reason == "stop"
        assert "\n" not in reply.content.replace("\\n", "")


@pytest.mark.parametrize("start", ["think", "response"])
def test_a_schema_is_kept(start: Any) -> None:
    for seed in range(15):
        constraint = CONSTRAINER.for_reply(start=start, response_format=schema_format(PERSON))
        value = json.loads(read(babble(constraint, seed), start).content)
        assert list(value) == ["name", "age", "tags", "next"]
        assert 0 <= value["age"] <= 150
        assert set(value["tags"]) <= {"a", "b", "<|close|>"}
        assert value["next"] is None or isinstance(value["next"]["x"], (int, float))


def test_thinking_is_free_text_until_its_channel_closes() -> None:
    constraint = CONSTRAINER.for_reply(start="think", response_format="json_object")
    for text in ("Let me think. {", '"é', "<|close|>think<|sep|>"):
        for token_id in TOKENIZER.encode_text(text):
            assert constraint.allowed()[token_id]
            constraint.accept(token_id)
    allowed = constraint.allowed()
    markers = TOKENIZER.markers
    assert [allowed[i] for i in (markers.open, markers.sep, *TOKENIZER.stop_ids)] == [False] * 5
    assert allowed[: TOKENIZER.n_ranks].all()
    constraint.accept(markers.close)
    for token_id in TOKENIZER.encode_text("think"):
        assert constraint.allowed()[token_id]
        constraint.accept(token_id)
    assert np.flatnonzero(constraint.allowed()).tolist() == [markers.sep]


def test_after_the_message_only_a_stop_token_may_come() -> None:
    constraint = CONSTRAINER.for_reply(start="response", response_format="json_object")
    reply = TOKENIZER.encode_text("{}")
    for name in ("<|close|>", "response", "<|sep|>", "<|close|>", "message", "<|sep|>"):
        reply += [TOKENIZER.control[name]] if name in TOKENIZER.control else TOKENIZER.encode_text(name)
    for token_id in reply:
        assert constraint.allowed()[token_id], token_id
        constraint.accept(token_id)
    assert set(np.flatnonzero(constraint.allowed()).tolist()) == TOKENIZER.stop_ids


@pytest.mark.parametrize("start", ["think", "response"])
def test_a_token_that_was_not_allowed_is_refused(start: Any) -> None:
    constraint = CONSTRAINER.for_reply(start=start, response_format="json_object")
    with pytest.raises(ValueError, match="not allowed"):
        constraint.accept(TOKENIZER.control["<|sep|>"])


def test_a_request_that_asks_for_nothing_has_no_constraint() -> None:
    for wanted in (None, "text", {"type": "text"}):
        assert CONSTRAINER.for_reply(start="think", response_format=wanted) is None
    assert CONSTRAINER.for_reply(start="think", tools=[tool("f", {})]) is None


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nope"}, "Invalid type: nope"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: \\["not"\\]'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "#/$defs/absent"}, "does not exist"),
        ({"$ref": "http://elsewhere/schema"}, "does not fetch"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "unsatisfiable"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "Unimplemented"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        CONSTRAINER.for_reply(start="think", response_format=schema_format(schema))
    assert caught.value.param == "response_format.json_schema.schema"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wanted", ["json_schema", {"type": "json_schema"}, schema_format(None) | {"json_schema": []}])
def test_a_schema_that_is_not_there_is_refused(wanted: Any) -> None:
    with pytest.raises(RequestError) as caught:
        CONSTRAINER.for_reply(start="think", response_format=wanted)
    assert caught.value.param == "response_format.json_schema.schema"


def test_a_schema_nested_too_deep_is_refused() -> None:
    deep: Any = {"type": "string"}
    for _ in range(3000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError) as caught:
        CONSTRAINER.for_reply(start="think", response_format=schema_format(deep))
    assert caught.value.param == "response_format.json_schema.schema"


def chain(length: int, step: Any) -> dict[str, Any]:
    """Definitions that refer to one another in a row."""
    definitions = {f"d{i}": step({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


@pytest.mark.parametrize("step", [lambda x: x, lambda x: {"type": "array", "items": x}, lambda x: {"anyOf": [x, {}]}])
def test_a_long_chain_of_references_is_refused_before_it_overflows_the_compilers_stack(step: Any) -> None:
    """20,000 definitions, each referring to the next, ended the process by a segmentation fault."""
    assert CONSTRAINER.why_not(chain(100, step)) == ""
    assert "the limit of 1000 levels" in CONSTRAINER.why_not(chain(20_000, step))


def test_a_reference_that_leads_back_to_itself_is_refused() -> None:
    assert "NoExtension" in CONSTRAINER.why_not({"$ref": "#"})


# Forced tools


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["c", "f", 'x "<|sep|>" é']},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "place": {"$ref": "#/$defs/place"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            'a"b&c': {"type": ["boolean", "array"], "items": {"type": "null"}},
            "fixed": {"const": 7},
            "odd": {"type": "object", "not": {"required": ["x"]}},
        },
        "required": ["city", "days", 'a"b&c'],
        "$defs": {"place": {"type": "object", "properties": {"p": {"$ref": "#/$defs/place"}}}},
    },
)


def check_weather(arguments: dict[str, Any]) -> None:
    assert {"city", "days", 'a"b&c'} <= arguments.keys() <= WEATHER["function"]["parameters"]["properties"].keys()
    assert isinstance(arguments["city"], str)
    assert 1 <= arguments["days"] <= 9
    assert isinstance(arguments['a"b&c'], (bool, list))
    assert arguments.get("unit", "c") in ("c", "f", 'x "<|sep|>" é')
    assert arguments.get("note") is None or isinstance(arguments["note"], str)
    assert isinstance(arguments.get("place", {}), dict)
    assert isinstance(arguments.get("odd", {}), dict)
    assert arguments.get("fixed", 7) == 7


@pytest.mark.parametrize("start", ["think", "response"])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_demanded_call_is_always_made_with_the_declared_arguments(start: Any, parallel: bool) -> None:
    for seed in range(15):
        constraint = CONSTRAINER.for_reply(
            start=start, tools=[WEATHER, tool("bare", None)], tool_choice="required", parallel=parallel
        )
        reply = read(babble(constraint, seed), start)
        assert reply.finish_reason == "tool_calls"
        assert reply.tool_calls
        assert parallel or len(reply.tool_calls) == 1
        for call in reply.tool_calls:
            arguments = json.loads(call.arguments)
            if call.name == "get_weather":
                check_weather(arguments)
            else:
                assert call.name == "bare"


@pytest.mark.parametrize(
    ("parameters", "keys"),
    [
        ({"type": "object", "properties": {}, "additionalProperties": False}, set()),
        ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, {"a", "b"}),
        ({"type": "object", "properties": {"a": False}}, set()),
        ({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]}, {"a"}),
        ({"type": "object", "properties": {"a": {"$ref": "#"}, "b": {}}, "required": ["b"]}, {"b"}),
        ({"properties": {"a": {"allOf": [{"type": "string"}, {"const": "x"}]}}, "required": ["a"]}, {"a"}),
    ],
)
def test_unusual_parameters_still_give_well_formed_calls(parameters: Any, keys: set[str]) -> None:
    for seed in range(5):
        constraint = CONSTRAINER.for_reply(
            start="response", tools=[tool("f", parameters)], tool_choice="required", parallel=False
        )
        (call,) = read(babble(constraint, seed), "response").tool_calls
        assert keys <= json.loads(call.arguments).keys()


def test_json_beside_optional_tools_is_json_or_calls() -> None:
    seen = set()
    for seed in range(30):
        constraint = CONSTRAINER.for_reply(
            start="response", response_format="json_object", tools=[tool("f", {})], tool_choice="auto"
        )
        reply = read(babble(constraint, seed), "response")
        seen.add(reply.finish_reason)
        if reply.finish_reason == "stop":
            json.loads(reply.content)
        else:
            assert reply.content == ""
    assert seen == {"stop", "tool_calls"}


def test_tools_that_may_not_be_called_are_not_offered() -> None:
    for seed in range(5):
        constraint = CONSTRAINER.for_reply(
            start="response", response_format="json_object", tools=[tool("f", {})], tool_choice="none"
        )
        assert read(babble(constraint, seed), "response").finish_reason == "stop"


def test_a_demand_without_tools_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        CONSTRAINER.for_reply(start="think", tool_choice="required")
    assert caught.value.param == "tool_choice"


def test_an_argument_that_can_have_no_value_is_refused() -> None:
    impossible = tool("f", {"type": "object", "properties": {"a": False}, "required": ["a"]})
    with pytest.raises(RequestError, match="no value"):
        CONSTRAINER.for_reply(start="think", tools=[impossible], tool_choice="required")


def test_a_grammar_without_an_end_is_an_error_of_the_request_not_a_loop() -> None:
    endless = tool("f", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})
    constraint = CONSTRAINER.for_reply(start="response", tools=[endless], tool_choice="required")
    with pytest.raises(RequestError, match="cannot go on"):
        babble(constraint, 1)
    with pytest.raises(RequestError, match="cannot go on"):
        constraint.allowed()


def test_any_declared_parameters_compile_or_are_refused() -> None:
    """Schemas put together at random: never a bug, and what compiles can be written to its end."""
    draw = random.Random(9)

    def schema(depth: int = 0) -> Any:
        kinds: list[Any] = [True, False, {}, {"type": "string"}, {"type": "integer"}, {"type": ["null", "number"]}]
        kinds += [{"const": 1}, {"enum": ["x", 2, None]}, {"type": "nope"}, {"type": 7}, {"enum": 3}, {"$ref": 5}]
        kinds += [{"$ref": "#"}, {"$ref": "#/$defs/d"}, {"format": "odd", "type": "string"}, []]
        if depth < 2:
            kinds += [{key: [schema(depth + 1) for _ in range(2)]} for key in ("anyOf", "oneOf", "allOf")] * 2
            kinds += [{"type": "array", "items": schema(depth + 1)}]
            kinds += [{"type": "object", "properties": {"p": schema(depth + 1)}}]
        return draw.choice(kinds)

    written = 0
    for seed in range(150):
        parameters = {"type": "object", "properties": {"a": schema(), "b": schema()}, "$defs": {"d": {"type": "null"}}}
        if draw.random() < 0.5:
            parameters["required"] = ["a"]
        try:
            constraint = CONSTRAINER.for_reply(
                start="response", tools=[tool("f", parameters)], tool_choice="required", parallel=False
            )
        except RequestError:
            continue
        (call,) = read(babble(constraint, seed), "response").tool_calls
        assert isinstance(json.loads(call.arguments), dict)
        written += 1
    assert written > 75
