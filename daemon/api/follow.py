"""Following generations: events in order, heartbeats by the clock, and the client's leaving, in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from sluice.daemon.api.errors import ClientLeft
from sluice.daemon.api.exchange import Exchange
from sluice.daemon.engine.requests import EngineClient, Event, Finished, Generation, GenerationRequest, Token
from sluice.io.errors import SluiceError

# Events between the engine and the writer; a writer that is behind leaves the rest with the engine.
_QUEUE = 64


def submit_all(engine: EngineClient, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """Submit all or none: when one is refused, those before it are cancelled and the refusal raised."""
    accepted: list[Generation] = []
    try:
        for request in requests:
            accepted.append(engine.submit(request))  # noqa: PERF401 - those before a refusal must be known
    except BaseException:
        for generation in accepted:
            generation.cancel()
        raise
    return accepted


async def follow(
    exchange: Exchange,
    generations: Sequence[Generation],
    deliver: Callable[[int, Event], Awaitable[bool]],
    idle: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Hand every event to `deliver(choice, event)` until each generation has ended.

    `deliver` returns False when its choice needs no more (a stop string): that generation is cancelled and
    the rest of its events dropped. `idle` is awaited whenever nothing was written for heartbeat_seconds.
    Whatever happens, no generation runs on after this returns or raises. Raises ClientLeft, the engine's
    SluiceError, or the error the house ended the request with.
    """
    queue: asyncio.Queue[tuple[int, Event | None]] = asyncio.Queue(_QUEUE)
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(exchange.watch())
            readers = [group.create_task(_read(i, g, queue)) for i, g in enumerate(generations)]
            open_choices = set(range(len(generations)))
            while open_choices:
                event = await _next(exchange, queue, idle)
                if event is None:
                    continue
                index, what = event
                if index not in open_choices:
                    continue
                if what is None:
                    raise RuntimeError("a generation ended without saying how")
                _note(exchange, what)
                if not await deliver(index, what):
                    generations[index].cancel()
                    readers[index].cancel()
                    open_choices.discard(index)
                elif isinstance(what, Finished):
                    open_choices.discard(index)
            watcher.cancel()
            for reader in readers:
                reader.cancel()
    except BaseExceptionGroup as errors:
        _raise_one(errors)
    finally:
        for generation in generations:
            generation.cancel()


async def _read(index: int, generation: Generation, queue: asyncio.Queue[tuple[int, Event | None]]) -> None:
    async for event in generation.events():
        await queue.put((index, event))
    await queue.put((index, None))


async def _next(
    exchange: Exchange,
    queue: asyncio.Queue[tuple[int, Event | None]],
    idle: Callable[[], Awaitable[None]] | None,
) -> tuple[int, Event | None] | None:
    """The next event; None after a heartbeat. The clock runs from the last write, not from the last token:
    tokens that are held back must not look like silence."""
    if idle is None:
        return await queue.get()
    left = exchange.last_write + exchange.limits.heartbeat_seconds - exchange.clock()
    if left > 0.0:
        if not queue.empty():
            return queue.get_nowait()
        try:
            async with asyncio.timeout(left):
                return await queue.get()
        except TimeoutError:
            pass
    await idle()
    return None


def _note(exchange: Exchange, event: Event) -> None:
    account = exchange.account
    if isinstance(event, Token):
        if account.first_token_seconds is None:
            account.first_token_seconds = exchange.clock() - exchange.started
        account.completion_tokens += 1
    elif isinstance(event, Finished):
        account.queue_seconds = max(account.queue_seconds, event.queue_seconds)
        account.prefill_seconds = max(account.prefill_seconds, event.prefill_seconds)
        account.decode_seconds = max(account.decode_seconds, event.decode_seconds)
        account.cached_tokens = max(account.cached_tokens, event.cached_tokens)


def _raise_one(errors: BaseExceptionGroup[BaseException]) -> NoReturn:
    """The one error that says most: a bug first (it must not hide), then the client's leaving, then ours."""
    flat: list[BaseException] = []
    stack: list[BaseException] = [errors]
    while stack:
        exc = stack.pop()
        if isinstance(exc, BaseExceptionGroup):
            stack.extend(exc.exceptions)
        else:
            flat.append(exc)
    for kinds in (ClientLeft, SluiceError):
        if all(isinstance(exc, ClientLeft | SluiceError) for exc in flat):
            for exc in flat:
                if isinstance(exc, kinds):
                    raise exc from None
    for exc in flat:
        if not isinstance(exc, ClientLeft | SluiceError):
            raise exc
    raise errors
