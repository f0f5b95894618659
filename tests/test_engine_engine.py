"""The engine over a fake network: batches, cancellation, failures, queue, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading

import pytest
from helpers.fake_network import FakeNetwork, expected_greedy

from sluice.daemon.engine.client import LoopClient
from sluice.daemon.engine.engine import Engine, EngineLimits
from sluice.daemon.engine.requests import Finished, GenerationRequest, Progress, Sampling, Token
from sluice.io.errors import ContextExceeded, QueueFull, RequestError, SluiceError, StorageError

GREEDY = Sampling(temperature=0.0)


@contextlib.contextmanager
def engine_is_busy(engine: Engine):
    """Entered once the engine has taken the first request off the queue."""
    while engine.status()["queue"]["running"] == 0:
        threading.Event().wait(0.001)
    yield


def limits(**changes: object) -> EngineLimits:
    return EngineLimits(**({"context": 1000, "max_sequences": 3, "max_queue": 8, "prefill_chunk": 4} | changes))


class Collector:
    """A sink that can be waited for."""

    def __init__(self) -> None:
        self.queue: queue.Queue = queue.Queue()

    def __call__(self, event: object) -> None:
        self.queue.put(event)

    def all(self) -> list:
        got = []
        while (event := self.queue.get(timeout=20)) is not None:
            got.append(event)
        return got

    def tokens(self) -> list[int]:
        return [e.id for e in self.all() if isinstance(e, Token)]


def submit(engine: Engine, prompt: list[int], n: int = 5, **more: object) -> tuple[object, Collector]:
    sink = Collector()
    return engine.submit(GenerationRequest(tuple(prompt), n, GREEDY, **more), sink), sink


def test_tokens_are_the_networks_own_and_end_with_finished():
    with Engine(FakeNetwork(), limits()) as engine:
        _, sink = submit(engine, list(range(10)), 6)
        events = sink.all()
    tokens = [e.id for e in events if isinstance(e, Token)]
    assert tokens == expected_greedy(list(range(10)), 6)
    assert isinstance(events[-1], Finished)
    assert (events[-1].finish_reason, events[-1].prompt_tokens, events[-1].completion_tokens) == ("length", 10, 6)
    done = [e.done for e in events if isinstance(e, Progress)]
    assert done == sorted(done)
    assert done[-1] == 10


def test_a_stop_token_ends_and_is_reported():
    expected = expected_greedy([1, 2, 3], 6)
    with Engine(FakeNetwork(), limits()) as engine:
        _, sink = submit(engine, [1, 2, 3], 6, stop_ids=frozenset({expected[2]}))
        events = sink.all()
    assert [e.id for e in events if isinstance(e, Token)] == expected[: expected.index(expected[2]) + 1]
    assert events[-1].finish_reason == "stop"


def test_requests_in_a_batch_get_what_they_get_alone():
    prompts = [[i, i + 1, i + 2, i * 2, 7, 8, 9] for i in range(6)]
    with Engine(FakeNetwork(), limits()) as engine:
        sinks = [submit(engine, p, 5)[1] for p in prompts]
        answers = [s.tokens() for s in sinks]
    assert answers == [expected_greedy(p, 5) for p in prompts]


def test_a_batch_fingerprint_equals_the_solo_one():
    prompt = [4, 5, 6, 7, 8]
    with Engine(FakeNetwork(), limits()) as engine:
        alone = submit(engine, prompt)[1].all()[-1].logits_fingerprint
        sinks = [submit(engine, p)[1] for p in (prompt, [1], [2, 3])]
        together = sinks[0].all()[-1].logits_fingerprint
    assert alone == together


def test_a_cancelled_request_stops_within_a_layer_and_alone():
    gate = threading.Semaphore(0)
    network = FakeNetwork(gate=gate)
    with Engine(network, limits()) as engine:
        first, gone = submit(engine, [1, 2, 3], 50)
        _, stays = submit(engine, [4, 5, 6], 3)
        gate.release(2 * network.layers)  # two passes: both are in the second, and the third waits at its gate
        with network.at_layer:
            assert network.at_layer.wait_for(lambda: len(network.rows_per_pass) == 3 and network.layer == 0, 10)
        together = [alive for _, alive in network.layers_run].count(2)
        engine.cancel(first)
        gate.release(1000)
        assert stays.tokens() == expected_greedy([4, 5, 6], 3)
        ended = gone.all()
        assert not any(isinstance(e, Finished) for e in ended)
        engine.cancel(first)  # twice is harmless
    assert together > 0
    assert [alive for _, alive in network.layers_run].count(2) == together + 1


def test_alone_a_cancelled_pass_ends_at_the_next_layer():
    gate = threading.Semaphore(0)
    network = FakeNetwork(gate=gate)
    with Engine(network, limits()) as engine:
        sequence, sink = submit(engine, [1] * 100, 50)
        with network.at_layer:
            network.at_layer.wait_for(lambda: network.layer == 0, 10)
        engine.cancel(sequence)
        gate.release(1)
        sink.all()
        assert network.layers_run == [(0, 1)]
        gate.release(1000)
        assert submit(engine, [3])[1].tokens() == expected_greedy([3], 5)


def test_cancelled_in_the_queue_it_never_runs():
    gate = threading.Semaphore(0)
    network = FakeNetwork(gate=gate)
    with Engine(network, limits(max_sequences=1)) as engine:
        _, first = submit(engine, [1], 2)
        waiting, gone = submit(engine, [9, 9, 9], 2)
        engine.cancel(waiting)
        gate.release(1000)
        first.all()
        gone.all()
    assert [3] not in network.rows_per_pass
    assert network.states_made == 1


def test_a_read_error_ends_only_the_requests_that_needed_it():
    network = FakeNetwork()
    network.fail[33] = StorageError("read failed", drive="d", file="f", offset=4096, layer=1, expert=5)
    with Engine(network, limits()) as engine:
        good, bad = submit(engine, [1, 2], 4)[1], submit(engine, [33, 2], 4)[1]
        assert isinstance(bad.all()[-1], StorageError)
        assert good.tokens() == expected_greedy([1, 2], 4)
        assert engine.idle


def test_a_bug_in_the_network_ends_the_pass_and_the_engine_lives():
    network = FakeNetwork()
    broken = True
    original = network.forward

    def forward(segments, on_layer):
        if broken:
            raise ZeroDivisionError("boom")
        return original(segments, on_layer)

    network.forward = forward
    with Engine(network, limits()) as engine:
        error = submit(engine, [1])[1].all()[-1]
        assert isinstance(error, SluiceError)
        assert error.http_status == 500
        broken = False
        assert submit(engine, [1])[1].tokens() == expected_greedy([1], 5)


def test_states_are_reused_and_reset():
    network = FakeNetwork()
    with Engine(network, limits(max_sequences=1)) as engine:
        for _ in range(3):
            assert submit(engine, [5, 6])[1].tokens() == expected_greedy([5, 6], 5)
    assert network.states_made == 1


def test_the_queue_is_bounded_and_says_when_to_come_back():
    gate = threading.Semaphore(0)
    with Engine(FakeNetwork(gate=gate), limits(max_sequences=1, max_queue=2)) as engine:
        sinks = [submit(engine, [1])[1]]
        with engine_is_busy(engine):
            sinks += [submit(engine, [2])[1] for _ in range(2)]
            with pytest.raises(QueueFull, match="the queue is full") as full:
                submit(engine, [3])
        assert full.value.http_status == 429
        assert full.value.retry_after_seconds >= 1
        gate.release(10000)
        for sink in sinks:
            sink.all()


@pytest.mark.parametrize(
    ("prompt", "n", "error"),
    [([], 1, RequestError), ([50], 1, RequestError), ([-1], 1, RequestError), ([1], 0, RequestError)],
)
def test_bad_requests_are_refused_at_once(prompt, n, error):
    engine = Engine(FakeNetwork(), limits())
    with pytest.raises(error):
        submit(engine, prompt, n)


def test_context_is_prompt_and_answer_together():
    engine = Engine(FakeNetwork(), limits(context=10))
    with pytest.raises(ContextExceeded, match="context of 10"):
        submit(engine, [1] * 6, 5)


def test_stopping_ends_everyone_with_an_error():
    gate = threading.Semaphore(0)
    network = FakeNetwork(gate=gate)
    engine = Engine(network, limits(max_sequences=1)).__enter__()
    sinks = [submit(engine, [1], 100)[1] for _ in range(3)]
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    gate.release(1000)
    stopper.join(10)
    for sink in sinks:
        assert isinstance(sink.all()[-1], SluiceError)
    with pytest.raises(SluiceError, match="shutting down"):
        submit(engine, [1])
    engine.stop()


def test_draining_refuses_new_and_finishes_old():
    with Engine(FakeNetwork(), limits()) as engine:
        _, sink = submit(engine, [1, 2], 20)
        engine.drain()
        with pytest.raises(SluiceError, match="shutting down"):
            submit(engine, [1])
        assert sink.tokens() == expected_greedy([1, 2], 20)
        assert engine.status()["state"] == "draining"


def test_status_tells_phases_and_queue():
    gate = threading.Semaphore(0)
    network = FakeNetwork(gate=gate)
    with Engine(network, limits(max_sequences=1)) as engine:
        submit(engine, [1] * 10)
        submit(engine, [2])
        with network.at_layer:
            network.at_layer.wait_for(lambda: network.layer == 0, 10)
        status = engine.status()
        assert status["queue"] == {"waiting": 1, "running": 1, "max_queue": 8, "max_sequences": 1}
        assert [r["phase"] for r in status["requests"]] == ["prefill", "queued"]
        gate.release(10000)


async def test_the_loop_client_streams_and_cancels():
    with Engine(FakeNetwork(), limits()) as engine:
        client = LoopClient(engine.vocab_size, engine.limits)
        assert not client.ready
        assert client.status()["state"] == "loading"
        with pytest.raises(SluiceError, match="loading"):
            client.submit(GenerationRequest((1, 2, 3), 5, GREEDY))
        client.attach(engine, lambda: {"memory": {}, "io": {}})
        assert client.ready
        generation = client.submit(GenerationRequest((1, 2, 3), 5, GREEDY))
        tokens = [e.id async for e in generation.events() if isinstance(e, Token)]
        assert tokens == expected_greedy([1, 2, 3], 5)
        endless = client.submit(GenerationRequest((1,), 900, GREEDY))
        async with asyncio.timeout(20):
            async for event in endless.events():
                if isinstance(event, Token):
                    endless.cancel()
        assert client.status().keys() >= {"state", "queue", "requests", "rates", "tokens", "memory", "io"}
        assert engine.idle


async def test_the_loop_client_raises_the_error_in_place_of_the_rest():
    network = FakeNetwork()
    network.fail[7] = SluiceError("no")
    with Engine(network, limits()) as engine:
        client = LoopClient(engine.vocab_size, engine.limits)
        client.attach(engine, dict)
        with pytest.raises(SluiceError, match="no"):
            async for _ in client.submit(GenerationRequest((7,), 5, GREEDY)).events():
                pass
