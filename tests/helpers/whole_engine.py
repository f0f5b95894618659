"""The assembled engine inside the test's process: settings in, tokens and fingerprints out."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sluice.daemon.engine.assembly import RunningEngine, running_engine
from sluice.daemon.engine.planning import plan_engine, read_model
from sluice.daemon.engine.requests import Finished, GenerationRequest, Sampling, Token
from sluice.daemon.service.settings import Settings, load_settings
from sluice.io.errors import SluiceError
from sluice.io.service import MakeReader

GREEDY = Sampling(temperature=0.0)


def settings_for(model: Path, *overrides: str, roots: Sequence[Path] = ()) -> Settings:
    """Settings of a small engine over `model`, the environment left out."""
    base = ["engine.context=256", "engine.prefill_chunk=7", f"model.path={model}"]
    if roots:
        base.append("model.roots=" + ",".join(map(str, roots)))
    return load_settings(env={}, overrides=[*base, *overrides])


@contextlib.contextmanager
def engine(
    model: Path,
    *overrides: str,
    roots: Sequence[Path] = (),
    make_reader: MakeReader | None = None,
    on_route: Callable[[int, NDArray[np.int32]], None] | None = None,
) -> Iterator[RunningEngine]:
    settings = settings_for(model, *overrides, roots=roots)
    files = read_model(settings)
    plan = plan_engine(files, settings)
    with running_engine(files, plan, settings, make_reader=make_reader, on_route=on_route) as running:
        yield running


class Pending:
    """A request under way in a RunningEngine."""

    def __init__(self, running: RunningEngine, prompt: Sequence[int], max_tokens: int, sampling: Sampling) -> None:
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._running = running
        self.sequence = running.engine.submit(GenerationRequest(tuple(prompt), max_tokens, sampling), self._events.put)

    def result(self, timeout: float = 60.0) -> tuple[list[int], Finished]:
        """Tokens and the end. Raises the request's error; queue.Empty when nothing happens for `timeout` seconds."""
        ids: list[int] = []
        finished: Finished | None = None
        while (event := self._events.get(timeout=timeout)) is not None:
            if isinstance(event, SluiceError):
                raise event
            if isinstance(event, Token):
                ids.append(event.id)
            elif isinstance(event, Finished):
                finished = event
        assert finished is not None, "cancelled"
        return ids, finished

    def cancel(self) -> None:
        self._running.engine.cancel(self.sequence)


def start(running: RunningEngine, prompt: Sequence[int], max_tokens: int = 6, sampling: Sampling = GREEDY) -> Pending:
    return Pending(running, prompt, max_tokens, sampling)


def fingerprint(running: RunningEngine, prompt: Sequence[int], max_tokens: int = 6) -> str:
    """Of a greedy generation run alone."""
    return start(running, prompt, max_tokens).result()[1].logits_fingerprint
