"""What the mini model is taught: prompts as the daemon renders them, facts that do not contradict each other."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from sluice.daemon.chat.xtml import PromptRequest
from sluice.daemon.chat.xtml import render as daemon_render
from sluice.tools.train import conversations as talk
from sluice.tools.train import facts


def messages(request: talk.Request, *, answered: bool) -> list[dict[str, Any]]:
    """The client's messages a training request stands for; without the last answer if not `answered`."""
    out: list[dict[str, Any]] = []
    if request.system:
        out.append({"role": "system", "content": request.system})
    for i, turn in enumerate(request.turns):
        out.append({"role": "user", "content": turn.question})
        if i + 1 == len(request.turns) and not answered:
            break
        if turn.calls:
            calls = [
                {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for n, (name, arguments, _) in enumerate(turn.calls)
            ]
            out.append(
                {"role": "assistant", "content": turn.before, "reasoning_content": turn.thought, "tool_calls": calls}
            )
            for n, (_, _, result) in enumerate(turn.calls):
                out.append({"role": "tool", "tool_call_id": f"c{n}", "content": result})
            out.append({"role": "assistant", "content": turn.answer, "reasoning_content": "The tool has answered."})
        else:
            out.append({"role": "assistant", "content": turn.answer, "reasoning_content": turn.thought})
    return out


def prompt(request: talk.Request, *, answered: bool) -> PromptRequest:
    return PromptRequest(
        messages(request, answered=answered),
        tools=request.tools or None,
        thinking=request.thinking,
        thinking_effort=request.effort,
        add_generation_prompt=not answered,
    )


@pytest.mark.parametrize("seed", range(60))
def test_a_training_conversation_is_what_the_daemon_renders(seed: int) -> None:
    request = talk.conversation(random.Random(seed))
    ours = [(s.text, s.markup) for s in talk.render(request)]
    assert ours == [tuple(s) for s in daemon_render(prompt(request, answered=True))]


@pytest.mark.parametrize("seed", range(30))
def test_a_training_prompt_is_what_the_daemon_renders(seed: int) -> None:
    request = talk.conversation(random.Random(seed))
    ours = [(s.text, s.markup) for s in talk.render_prompt(request)]
    assert ours == [tuple(s) for s in daemon_render(prompt(request, answered=False))]


def test_every_channel_and_setting_occurs() -> None:
    r = random.Random(1)
    requests = [talk.conversation(r) for _ in range(400)]
    assert {q.effort for q in requests if q.thinking} == {None, "low", "high", "max"}
    assert {q.thinking for q in requests} == {True, False}
    assert any(q.system for q in requests)
    called = {name for q in requests for t in q.turns for name, _, _ in t.calls}
    assert called == set(talk.TOOL_TABLE)
    assert {len(q.turns) for q in requests} == {1, 2, 3, 4, 5}


def test_conversations_are_a_function_of_the_seed() -> None:
    first, second = (talk.conversation(random.Random("a seed")) for _ in range(2))
    assert talk.render(first) == talk.render(second)


@pytest.mark.parametrize(
    "pairs",
    [
        facts.OPPOSITES,
        facts.COLOURS,
        facts.SOUNDS,
        facts.YOUNG,
        facts.PLURALS,
        facts.PASTS,
        facts.MEANINGS,
        facts.TRIVIA,
        facts.SELF,
        facts.GREETINGS,
        talk.ALL_CAPITALS,
    ],
)
def test_one_question_has_one_answer(pairs: list[tuple[str, str]]) -> None:
    assert len({question for question, _ in pairs}) == len(pairs)
    assert all(question and answer for question, answer in pairs)


def test_the_well_known_countries_are_known() -> None:
    assert len(talk.WELL_KNOWN) == len(facts.WELL_KNOWN)


def test_what_the_model_says_counts_most_in_the_loss() -> None:
    request = talk.Request([talk.Turn("A question", "A thought", "An answer")])
    weights = {s.text: s.weight for s in talk.render(request)}
    assert weights["A thought"] == weights["An answer"] == 1.0
    assert weights["A question"] < 1.0
    assert weights[talk.EFFORT.replace("{}", "max")] < weights["A question"]
