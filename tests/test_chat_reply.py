"""The reply reader: recorded replies cut anywhere, and what holds for any id sequence at all."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from helpers.vocabularies import golden, mini
from hypothesis import given
from hypothesis import strategies as st

from sluice.daemon.chat.reply import (
    Content,
    Finish,
    Reasoning,
    Reply,
    ReplyEvent,
    ReplyReader,
    TextReader,
    ToolArguments,
    ToolCallStart,
    call_id_maker,
    collect,
)

TOKENIZER = mini()
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(256)}
REPLIES = golden("replies.json")
O, C, S, E = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"  # noqa: E741 - the specification's letters


def byte_ids(text: str) -> list[int]:
    return [BYTE_IDS[bytes([b])] for b in text.encode()]


def ids(*pieces: str) -> list[int]:
    """Ids of a reply written with markers: control names are tokens, the rest is text."""
    out: list[int] = []
    for piece in pieces:
        out += [TOKENIZER.control[piece]] if piece in TOKENIZER.control else TOKENIZER.encode_text(piece)
    return out


def reader(**options: Any) -> ReplyReader:
    options = {"start": "think", "tools": True, "call_id": call_id_maker([1]), **options}
    return ReplyReader(TOKENIZER, **options)


def read(token_ids: list[int], end: Any = "stop", **options: Any) -> list[ReplyEvent]:
    target = reader(**options)
    events = [event for token_id in token_ids for event in target.feed(token_id)]
    return events + target.finish(end)


def summary(reply: Reply) -> dict[str, Any]:
    return {
        "reasoning": reply.reasoning,
        "content": reply.content,
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls],
        "finish_reason": reply.finish_reason,
    }


# Recorded replies


def recorded_ids(case: dict[str, Any], encode: Any) -> list[int]:
    out: list[int] = []
    for kind, text in case["pieces"]:
        if kind == "m":  # a nameless token is called by its own id, which the small vocabulary has elsewhere
            out.append(TOKENIZER.control[text.replace("163700", "3956")])
        else:
            out += encode(text)
    return out


@pytest.mark.parametrize("case", REPLIES, ids=lambda case: case["name"])
def test_recorded_replies_read_as_recorded_however_they_are_cut(case: dict[str, Any]) -> None:
    options = {"start": case["start"], "tools": case["tools"]}
    by_token = read(recorded_ids(case, TOKENIZER.encode_text), case["end"], **options)
    by_byte = read(recorded_ids(case, byte_ids), case["end"], **options)
    assert summary(collect(by_token)) == case["expect"], case["why"]
    assert summary(collect(by_byte)) == case["expect"], case["why"]


@pytest.mark.parametrize("case", REPLIES, ids=lambda case: case["name"])
def test_each_text_piece_may_be_cut_at_every_byte(case: dict[str, Any]) -> None:
    """Every cut of every piece into two, each half encoded as the longest tokens that spell it."""
    for number, (kind, text) in enumerate(case["pieces"]):
        if kind == "m":
            continue
        for at in range(1, len(text.encode())):
            token_ids: list[int] = []
            for index, piece in enumerate(case["pieces"]):
                data = piece[1].encode()
                halves = [data[:at], data[at:]] if index == number else [data]
                if piece[0] == "m":
                    token_ids.append(TOKENIZER.control[piece[1].replace("163700", "3956")])
                else:
                    token_ids += [i for half in halves for i in spell(half)]
            got = read(token_ids, case["end"], start=case["start"], tools=case["tools"])
            assert summary(collect(got)) == case["expect"]


LONGEST = max(len(TOKENIZER.token_bytes(i)) for i in range(TOKENIZER.n_ranks))
BY_BYTES = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.n_ranks)}


def spell(data: bytes) -> list[int]:
    out, at = [], 0
    while at < len(data):
        size = next(n for n in range(min(LONGEST, len(data) - at), 0, -1) if data[at : at + n] in BY_BYTES)
        out.append(BY_BYTES[data[at : at + size]])
        at += size
    return out


# Any id sequence at all

WORDS = [
    *([O], [C], [S]),
    *([O, tag, S] for tag in ("think", "response", "tools", 'call tool="f" index="1"', 'json type="object"', "note")),
    *([O, f'argument key="k" type="{t}"', S] for t in ("string", "number", "null")),
    *([C, tag, S] for tag in ("think", "response", "tools", "call", "argument", "json", "message", "note")),
    *([text] for text in ("a", " ", "é", "👩‍💻", '"', "\\", "1", "{", "<|sep|>", "\n", "key=")),
    *([name] for name in (E, "[EOS]", "<|media_pad|>", "<|reserved_token_3956|>")),
    [O, "message", S],
]


def random_reply(draw: random.Random) -> list[str]:
    return list(itertools.chain.from_iterable(draw.choices(WORDS, k=draw.randrange(25))))


def test_random_replies_read_the_same_however_they_are_cut() -> None:
    draw = random.Random(11)
    for _ in range(4000):
        pieces = random_reply(draw)
        options = {
            "start": draw.choice(["think", "response"]),
            "tools": draw.random() < 0.8,
            "parallel": draw.random() < 0.8,
            "stops": draw.choice([(), ("a",), ("aé", "a1"), ("\n ",)]),
        }
        end = draw.choice(["stop", "length"])
        by_byte = [i for p in pieces for i in ([TOKENIZER.control[p]] if p in TOKENIZER.control else byte_ids(p))]
        whole = collect(read(ids(*pieces), end, **options))
        assert whole == collect(read(by_byte, end, **options)), (pieces, options, end)
        for call in whole.tool_calls if whole.finish_reason == "tool_calls" else ():
            if "json" not in "".join(pieces):
                json.loads(call.arguments)


@given(
    st.lists(st.integers(-2, 5000), max_size=60), st.booleans(), st.sampled_from(["think", "response"]), st.booleans()
)
def test_the_reader_never_raises_and_ends_exactly_once(
    token_ids: list[int], tools: bool, start: str, stopped: bool
) -> None:
    events = read(token_ids, "stop" if stopped else "length", tools=tools, start=start)
    assert [type(event) for event in events].count(Finish) == 1
    assert isinstance(events[-1], Finish)


def test_memory_is_linear_in_the_input() -> None:
    """An endless header is given back at its limit; an endless thought is kept once, as text."""
    target = reader()
    endless = TOKENIZER.encode_text("a" * 1000)
    for token_id in ids(O) + endless * 9:
        target.feed(token_id)
    assert target._header is None
    assert sum(map(len, target._reasoning)) == 9000


def test_a_header_over_the_limit_is_text_and_one_at_the_limit_is_none() -> None:
    assert collect(read(ids(O, "x" * 8192, S))).reasoning == ""
    assert collect(read(ids(O, "x" * 8193, S, "y"))).reasoning == "x" * 8193 + "y"


def test_a_header_scan_is_linear() -> None:
    """A backtracking expression would need minutes for this."""
    for header in ("call " + "a" * 8000, "call " + '="' * 4000, "call " + 'a="" ' * 1600, "call" + " " * 8000):
        read(ids(O, header, S))


# Streaming order


def test_a_call_streams_its_header_at_once_and_its_strings_as_they_arrive() -> None:
    token_ids = ids(C, "think", S, O, "response", S, C, "response", S, O, "tools", S, O, 'call tool="f" index="1"')
    target = reader()
    for token_id in token_ids:
        assert target.feed(token_id) == []
    make = call_id_maker([1])
    assert target.feed(*ids(S)) == [ToolCallStart(0, make(0), "f")]
    for token_id in ids(O, 'argument key="s" type="string"'):
        assert target.feed(token_id) == []
    assert target.feed(*ids(S)) == [ToolArguments(0, '{"s":"')]
    assert [target.feed(i) for i in byte_ids('é"')] == [[], [ToolArguments(0, "é")], [ToolArguments(0, '\\"')]]
    for token_id in ids(C, "argument"):
        assert target.feed(token_id) == []
    assert target.feed(*ids(S)) == [ToolArguments(0, '"')]
    for token_id in ids(O, 'argument key="n" type="number"', S, "1", ".", "50", C, "argument"):
        assert target.feed(token_id) == []
    assert target.feed(*ids(S)) == [ToolArguments(0, ',"n":1.50')]
    for token_id in ids(C, "call"):
        assert target.feed(token_id) == []
    assert target.feed(*ids(S)) == [ToolArguments(0, "}")]
    assert target.feed(*ids(E)) == [Finish("tool_calls")]
    assert target.finished
    assert target.feed(0) == []
    assert target.finish("length") == []


def test_an_answer_given_as_reasoning_is_sent_once_more_as_content() -> None:
    events = read(ids("Ja", C, "response", S, E))
    assert events[-2:] == [Content("Ja", moved=True), Finish("stop")]
    assert Reasoning("J") in events or Reasoning("Ja") in events


def test_a_cut_character_is_flushed_at_the_border_of_its_channel() -> None:
    half = byte_ids("é")[:1]
    reply = collect(read([*half, *ids(C, "think", S, O, "response", S), *half], "length"))
    assert (reply.reasoning, reply.content) == ("\ufffd", "\ufffd")


def test_tokens_are_counted_by_channel() -> None:
    target = reader()
    for token_id in byte_ids("ab"):
        target.feed(token_id)
    target.feed(TOKENIZER.control["[PAD]"])
    seen = []
    for token_id in ids(C, "think", S, O, "response", S) + byte_ids("xy"):
        target.feed(token_id)
        seen.append(target.last_was_content)
    assert seen.count(True) == 2
    assert (target.reasoning_tokens, target.ignored_tokens) == (2, 1)


# Where the specification leaves a choice


def in_call(*pieces: str) -> list[int]:
    return ids(O, "tools", S, O, 'call tool="f" index="1"', S, *pieces)


@pytest.mark.parametrize(
    ("pieces", "arguments"),
    [
        ([], "{"),
        ([O, 'argument key="n" type="number"', S, "12"], "{"),
        ([O, 'argument key="n" type="number"', S, "12", C, "argument", S], '{"n":12'),
        ([O, 'json type="object"', S, '{"a'], '{"a'),
        ([C, "call", S], "{}"),
    ],
)
def test_a_call_cut_by_the_limit_stays_visibly_unfinished(pieces: list[str], arguments: str) -> None:
    reply = collect(read(in_call(*pieces), "length"))
    assert reply.tool_calls[0].arguments == arguments
    assert reply.finish_reason == "length"


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        ("number", "NaN", '"NaN"'),
        ("number", "-0", "-0"),
        ("number", "9" * 5000, "9" * 5000),
        ("number", "01", '"01"'),
        ("object", "[" * 5000, '"' + "[" * 5000 + '"'),
        ("object", "", '""'),
        ("null", "nothing", "null"),
        ("boolean", " true\n", "true"),
        ("thing", "7", "7"),
    ],
)
def test_values_that_are_json_stay_as_written_and_others_become_strings(kind: str, raw: str, value: str) -> None:
    token_ids = in_call(O, f'argument key="k" type="{kind}"', S) + byte_ids(raw) + ids(E)
    assert collect(read(token_ids)).tool_calls[0].arguments == '{"k":' + value + "}"


def test_of_two_argument_forms_in_one_call_the_first_counts() -> None:
    argument = [O, 'argument key="a" type="string"', S, "x", C, "argument", S]
    block = [O, 'json type="object"', S, "{}", C, "json", S]
    assert collect(read(in_call(*argument, *block, E))).tool_calls[0].arguments == '{"a":"x"}'
    assert collect(read(in_call(*block, *argument, E))).tool_calls[0].arguments == "{}"


def test_only_the_first_call_is_kept_when_calls_may_not_be_parallel() -> None:
    token_ids = in_call(C, "call", S, O, 'call tool="g" index="2"', S, E)
    reply = collect(read(token_ids, parallel=False))
    assert [call.name for call in reply.tool_calls] == ["f"]
    assert reply.finish_reason == "tool_calls"


def test_a_stop_string_ends_the_reply_and_never_spans_channels() -> None:
    stray = ids(C, "think", S, "a", O, "response", S)
    assert summary(collect(read([*stray, *ids("b", E)], stops=["ab"])))["content"] == "ab"
    events = read([*stray, *ids("ab", C)], stops=["ab"])
    assert events[-1] == Finish("stop", "ab")
    assert collect(events).content == "a"
    assert collect(read(ids("ab", C, "response", S, E), stops=["b"])).content == "a"


def test_a_stop_string_is_not_searched_in_reasoning_or_calls() -> None:
    token_ids = ids("xx", O, "tools", S, O, 'call tool="f"', S, O, 'argument key="k"', S, "x", E)
    reply = collect(read(token_ids, stops=["x"]))
    assert (reply.reasoning, reply.tool_calls[0].arguments) == ("xx", '{"k":"x"}')
    assert reply.finish_reason == "tool_calls"


def test_held_back_content_is_sent_at_the_end() -> None:
    for end in ("stop", "length"):
        assert collect(read(ids("ab"), end, start="response", stops=["abc"])).content == "ab"


def test_call_ids_are_repeatable_and_unique() -> None:
    made = [call_id_maker(prompt)(n) for prompt in ([1, 2], [1, 2, 3], [513]) for n in range(3)]
    assert len(set(made)) == 9
    assert made == [call_id_maker(prompt)(n) for prompt in ([1, 2], [1, 2, 3], [513]) for n in range(3)]
    assert all(len(one) == 21 and one.startswith("call_") for one in made)


# Plain completions


def test_a_completion_is_text_until_a_stop_id_and_control_tokens_are_not_shown() -> None:
    target = TextReader(TOKENIZER)
    events = [event for i in ids("é<|sep|>", S, " b", "[EOS]", "c") for event in target.feed(i)]
    reply = collect(events + target.finish("length"))
    assert (reply.content, reply.finish_reason) == ("é<|sep|> b", "stop")


@given(st.lists(st.integers(-1, 4100), max_size=30), st.sampled_from([(), ("a",), ("\ufffd",)]))
def test_a_completion_ends_exactly_once(token_ids: list[int], stops: tuple[str, ...]) -> None:
    target = TextReader(TOKENIZER, stops=stops)
    events = [event for i in token_ids for event in target.feed(i)] + target.finish("length")
    assert [type(event) for event in events].count(Finish) == 1
    assert not any(stop in collect(events).content for stop in stops)


def test_a_completion_cut_inside_a_character_is_flushed_and_searched() -> None:
    target = TextReader(TOKENIZER, stops=["x\ufffd"])
    events = [e for i in byte_ids("xé")[:2] for e in target.feed(i)] + target.finish("length")
    assert events == [Finish("stop", "x\ufffd")]
