"""A network whose next token is a hash of all tokens so far: exact, instant, and stoppable at any layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from sluice.daemon.model.batch import PassResult, Segment
from sluice.io.errors import SluiceError


class FakeState:
    """The tokens seen: the whole state of the fake network."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def reset(self) -> None:
        self.tokens.clear()


class FakeNetwork:
    """Deterministic logits from the tokens seen. `gate` (if given) must be set for each layer to go on;
    `fail` maps a segment's first token to the error its request shall meet at layer 1."""

    layers = 4

    def __init__(self, vocab_size: int = 50, gate: threading.Semaphore | None = None) -> None:
        self.vocab_size = vocab_size
        self.gate = gate
        self.fail: dict[int, SluiceError] = {}
        self.layers_run: list[tuple[int, int]] = []
        self.rows_per_pass: list[list[int]] = []
        self.at_layer = threading.Condition()
        self.layer = -1
        self.states_made = 0

    def new_state(self, context_tokens: int) -> FakeState:
        self.states_made += 1
        return FakeState()

    def forward(self, segments: Sequence[Segment], on_layer: Callable[[int], Sequence[int]]) -> PassResult:
        self.rows_per_pass.append([len(s.token_ids) for s in segments])
        alive = set(range(len(segments)))
        failed: dict[int, SluiceError] = {}
        for layer in range(self.layers):
            alive -= set(on_layer(layer))
            if not alive:
                break
            with self.at_layer:
                self.layer = layer
                self.at_layer.notify_all()
            if self.gate is not None:
                self.gate.acquire()
            if layer == 1:
                for i in list(alive):
                    error = self.fail.get(int(segments[i].token_ids[0]))
                    if error is not None:
                        failed[i] = error
                        alive.discard(i)
            self.layers_run.append((layer, len(alive)))
        logits: list[np.ndarray | None] = [None] * len(segments)
        for i in alive:
            state = segments[i].state
            state.tokens.extend(int(t) for t in segments[i].token_ids)
            if segments[i].logits == "last":
                logits[i] = row_after(state.tokens, self.vocab_size)
        return PassResult(logits, failed)


def row_after(tokens: list[int], vocab_size: int) -> np.ndarray:
    """The fake's logits after `tokens`: (V,) float32."""
    seed = 0
    for t in tokens:
        seed = (seed * 1000003 + t + 1) % 2**61
    return np.random.default_rng(seed).standard_normal(vocab_size).astype(np.float32)


def expected_greedy(prompt: list[int], n: int, vocab_size: int = 50) -> list[int]:
    """What the fake generates greedily: computed without any engine."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(np.argmax(row_after(tokens, vocab_size))))
    return tokens[len(prompt) :]
