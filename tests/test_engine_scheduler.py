"""The policy of passes: shares, urgency, the bounded line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.daemon.engine.requests import GenerationRequest
from sluice.daemon.engine.scheduler import WaitingLine, plan_pass
from sluice.daemon.engine.sequence import Phase, Sequence


def sequence(number: int, prompt: int, phase: Phase, priority: int = 0) -> Sequence:
    request = GenerationRequest(tuple(range(prompt)), 8, priority=priority)
    made = Sequence(number, request, lambda event: None, now=0.0)
    made.phase = phase
    return made


def test_alone_a_prompt_fills_the_chunk():
    parts = plan_pass([sequence(1, 100, Phase.PREFILL)], 64, 0.25)
    assert [(p.sequence.number, p.tokens) for p in parts] == [(1, 64)]


def test_beside_decoding_a_prompt_gets_its_share():
    running = [sequence(1, 100, Phase.PREFILL), sequence(2, 1, Phase.DECODE), sequence(3, 1, Phase.DECODE)]
    parts = plan_pass(running, 64, 0.25)
    assert [(p.sequence.number, p.tokens) for p in parts] == [(2, 1), (3, 1), (1, 16)]


def test_prompts_go_by_priority_then_arrival():
    running = [
        sequence(1, 10, Phase.PREFILL, priority=10),
        sequence(3, 10, Phase.PREFILL),
        sequence(2, 10, Phase.PREFILL),
    ]
    parts = plan_pass(running, 25, 1.0)
    assert [(p.sequence.number, p.tokens) for p in parts] == [(2, 10), (3, 10), (1, 5)]


@given(
    prompts=st.lists(st.integers(1, 200), min_size=0, max_size=6),
    decoding=st.integers(0, 4),
    chunk=st.integers(1, 128),
    share=st.floats(0.01, 1.0),
)
def test_every_decoder_and_some_prompt_advance_within_the_bound(prompts, decoding, chunk, share):
    running = [sequence(i, n, Phase.PREFILL) for i, n in enumerate(prompts)]
    running += [sequence(100 + i, 1, Phase.DECODE) for i in range(decoding)]
    parts = plan_pass(running, chunk, share)
    assert sum(p.sequence.phase is Phase.DECODE for p in parts) == decoding
    prefill = [p.tokens for p in parts if p.sequence.phase is Phase.PREFILL]
    assert sum(prefill) <= chunk
    assert all(t >= 1 for t in prefill)
    assert bool(prefill) == bool(prompts)
    if decoding:
        assert sum(prefill) <= max(1, int(chunk * share))


def test_the_waiting_line_orders_and_forgets_those_who_left():
    line = WaitingLine(3)
    late, early, background = (
        sequence(2, 1, Phase.QUEUED),
        sequence(1, 1, Phase.QUEUED),
        sequence(0, 1, Phase.QUEUED, priority=10),
    )
    for s in (background, late, early):
        line.add(s)
    assert line.full
    late.cancel()
    assert line.remove_cancelled() == [late]
    assert [s.number for s in line.in_order()] == [1, 0]
    assert line.pop() is early
    assert line.pop() is background
    assert line.pop() is None


@pytest.mark.parametrize("numbers", [(3, 1, 2)])
def test_the_line_is_stable_for_equal_priorities(numbers):
    line = WaitingLine(10)
    for n in numbers:
        line.add(sequence(n, 1, Phase.QUEUED))
    assert [s.number for s in line.in_order()] == sorted(numbers)
