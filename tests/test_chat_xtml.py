"""XTML: recorded renderings, segment by segment, and what no conversation may ever do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers.shared import shared_path
from helpers.vocabularies import by_name, golden, k3, mini
from hypothesis import given
from hypothesis import strategies as st

from sluice.daemon.chat.conversation import check
from sluice.daemon.chat.tokenizer import MARKER_NAMES
from sluice.daemon.chat.xtml import PromptRequest, render
from sluice.io.errors import RequestError

INPUTS = golden("xtml_inputs.json")
EXTRA = golden("xtml_extra.json")


def rendered(request: dict[str, Any]) -> list[list[Any]]:
    return [list(segment) for segment in render(PromptRequest(**request))]


# Recorded renderings


@pytest.mark.parametrize("name", INPUTS)
def test_the_vendors_recorded_renderings_segment_by_segment(name: str) -> None:
    cases = json.loads(shared_path("fixtures/chat/xtml_golden.json").read_text())["cases"]
    assert cases.keys() == INPUTS.keys()
    assert rendered(INPUTS[name]) == cases[name]


@pytest.mark.parametrize("name", EXTRA)
def test_corner_cases_on_which_three_renderers_agree(name: str) -> None:
    case = EXTRA[name]
    if case.get("error"):
        with pytest.raises(RequestError) as caught:
            rendered(case["input"])
        assert caught.value.param
    else:
        assert rendered(case["input"]) == case["segments"], case["why"]


@pytest.mark.parametrize("vocabulary", ["mini", "k3"])
def test_ids_of_all_recorded_renderings(vocabulary: str) -> None:
    tokenizer = by_name(vocabulary)
    recorded = golden("xtml_ids.json")
    assert len(recorded) == 81
    for name, case in recorded.items():
        request = INPUTS[name] if name in INPUTS else EXTRA[name]["input"]
        assert tokenizer.encode_segments(render(PromptRequest(**request))) == case[vocabulary], name


def test_prompt_lengths_are_those_the_vendor_counts() -> None:
    """The vendor leaves the three tokens of the pending channel tag out of its count."""
    for case in json.loads(shared_path("fixtures/chat/vendor_prompt_tokens.json").read_text()):
        ids = k3().encode_segments(render(PromptRequest(**case["input"])))
        assert len(ids) == case["ids"], case["id"]
        assert not case["confirmed"] or len(ids) - 3 == case["prompt_tokens"]


# Properties

STRINGS = st.one_of(
    st.sampled_from(
        [*sorted(mini().control), "<|open|>message<|sep|>", 'a"b&c', "&quot;", "<|kimi_image_placeholder|>"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), STRINGS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(STRINGS, inner, max_size=3)),
    max_leaves=6,
)
CALLS = st.fixed_dictionaries(
    {
        "id": st.sampled_from("abc"),
        "function": st.fixed_dictionaries(
            {
                "name": STRINGS.filter(bool),
                "arguments": st.one_of(st.none(), STRINGS, st.dictionaries(STRINGS, VALUES, max_size=3)),
            }
        ),
    }
)
CONTENTS = st.one_of(
    st.none(), STRINGS, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": STRINGS}), max_size=3)
)
MESSAGES = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user"]), "content": CONTENTS}, optional={"name": STRINGS}
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": CONTENTS},
        optional={"name": STRINGS, "reasoning_content": STRINGS, "tool_calls": st.lists(CALLS, max_size=3)},
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": CONTENTS, "tool_call_id": st.sampled_from("abcd")},
        optional={"name": STRINGS, "tool": STRINGS},
    ),
)
REQUESTS = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=6)},
    optional={
        "tools": st.lists(VALUES, max_size=2),
        "thinking": st.booleans(),
        "thinking_effort": st.sampled_from([None, "low", "high", "max"]),
        "tool_choice": st.sampled_from(["auto", "required", "none"]),
        "response_format": st.one_of(
            st.just({"type": "json_object"}),
            st.fixed_dictionaries({"type": st.just("json_schema"), "json_schema": VALUES}),
        ),
    },
)


def attempt(action: Callable[[], Any]) -> Any:
    """What the action returns, or the error it refuses with."""
    try:
        return action()
    except RequestError as error:
        return error


@given(REQUESTS)
def test_text_of_a_client_never_becomes_a_control_token(request: dict[str, Any]) -> None:
    segments = attempt(lambda: render(PromptRequest(**request)))
    if isinstance(segments, RequestError):
        assert segments.param
        return
    ids = mini().encode_segments(segments)
    assert sum(i >= mini().n_ranks for i in ids) == sum(segment.markup for segment in segments)
    assert {segment.text for segment in segments if segment.markup} <= set(MARKER_NAMES)
    assert mini().decode(ids) == "".join(segment.text for segment in segments)


@given(REQUESTS)
def test_rendering_is_pure(request: dict[str, Any]) -> None:
    before = copy.deepcopy(request)
    first = attempt(lambda: rendered(request))
    assert request == before
    assert str(attempt(lambda: rendered(request))) == str(first)


KEYS = ["role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "tools", "id", "tool_call_id"]
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just("tool")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)),
    max_leaves=12,
)


@given(st.lists(ANYTHING, max_size=4), ANYTHING, ANYTHING)
def test_any_json_renders_or_is_refused_with_a_path(messages: list[Any], tools: Any, response_format: Any) -> None:
    shaped = [m if not isinstance(m, dict) else {"role": "assistant", **m} for m in messages]
    request = PromptRequest(messages=shaped, tools=tools, response_format=response_format)
    for outcome in (attempt(lambda: render(request)), attempt(lambda: check(shaped, tools))):
        assert not isinstance(outcome, RequestError) or outcome.param


# Refusals


def call(arguments: object) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("[" * 100_000, "cannot be read"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read"),
        ('{"a": "\\ud800"}', "lone surrogate"),
        ('{"a": {"b": "\\ud800"}}', "lone surrogate"),
        ('{"\\ud800": 1}', "lone surrogate"),
        ("true", "must be a JSON object, not boolean"),
        ([], "must be a JSON object, not array"),
    ],
)
def test_arguments_that_cannot_be_rendered_are_refused(arguments: object, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render(PromptRequest(messages=[call(arguments)]))
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


def test_a_schema_nested_too_deep_is_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(RequestError) as caught:
        render(PromptRequest(messages=[], tools=[deep]))
    assert caught.value.param == "tools"
    while deep:  # taken apart by hand: the interpreter's own recursion would do it otherwise
        deep = deep.pop("a")


def test_a_text_engine_refuses_images_and_leaves_placeholders_text() -> None:
    with pytest.raises(RequestError) as caught:
        render(PromptRequest(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]))
    assert caught.value.param == "messages[0].content[0]"
    segments = render(PromptRequest(messages=[{"role": "user", "content": "<|kimi_image_placeholder|>"}]))
    assert ("<|kimi_image_placeholder|>", False) in segments


# What a server refuses beyond the renderer


def tool(name: object = "f", **more: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def test_developer_is_system_and_nothing_else_changes() -> None:
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b", "name": "n"}]
    checked, tools = check(messages, [tool()])
    assert checked == [{"role": "system", "content": "a"}, messages[1]]
    assert messages[0]["role"] == "developer"
    assert tools == [tool()]


def test_tools_added_in_a_system_message_are_in_force() -> None:
    _, tools = check([{"role": "system", "tools": [tool("g")]}], [tool("f")])
    assert [t["function"]["name"] for t in tools] == ["f", "g"]


@pytest.mark.parametrize(
    ("messages", "tools", "path"),
    [
        ([], None, "messages"),
        ("x", None, "messages"),
        ([7], None, "messages[0]"),
        ([{"role": "robot"}], None, "messages[0].role"),
        ([{"role": "user", "tools": [tool()]}], None, "messages[0].tools"),
        ([{"role": "assistant", "tools": [tool()]}], None, "messages[0].tools"),
        ([{"role": "system", "content": "x", "tools": [tool()]}], None, "messages[0].content"),
        ([{"role": "system", "tools": [tool("f")]}], [tool("f")], "messages[0].tools[0].function.name"),
        ([{"role": "tool", "content": "x"}], None, "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "x", "tool_call_id": ""}], None, "messages[0].tool_call_id"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}] * 2}],
            None,
            "messages[0].tool_calls[1].id",
        ),
        ([{"role": "assistant", "tool_calls": [{"id": 7, "name": "f"}]}], None, "messages[0].tool_calls[0].id"),
        ([{"role": "assistant", "tool_calls": [7]}], None, "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "content": "x", "partial": True}], None, "messages[0].partial"),
        ([{"role": "user"}], {}, "tools"),
        ([{"role": "user"}], ["f"], "tools[0]"),
        ([{"role": "user"}], [{"function": {"name": "f"}}], "tools[0].type"),
        ([{"role": "user"}], [{"type": "function"}], "tools[0].function"),
        ([{"role": "user"}], [tool(None)], "tools[0].function.name"),
        ([{"role": "user"}], [tool("")], "tools[0].function.name"),
        ([{"role": "user"}], [tool("1a")], "tools[0].function.name"),
        ([{"role": "user"}], [tool("a b")], "tools[0].function.name"),
        ([{"role": "user"}], [tool("ä")], "tools[0].function.name"),
        ([{"role": "user"}], [tool("a\n")], "tools[0].function.name"),
        ([{"role": "user"}], [tool("a" * 257)], "tools[0].function.name"),
        ([{"role": "user"}], [tool("a"), tool("a")], "tools[1].function.name"),
        ([{"role": "user"}], [tool("a", parameters=[])], "tools[0].function.parameters"),
    ],
)
def test_a_refused_conversation_names_its_path(messages: Any, tools: Any, path: str) -> None:
    with pytest.raises(RequestError) as caught:
        check(messages, tools)
    assert caught.value.param == path
