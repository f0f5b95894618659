"""From a checked request to its reply: submit, follow, and write it streamed or whole.

Both kinds of completion and both ways of answering come through here, and both ways are made of the same
deltas, so that they cannot differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from sluice.daemon.api.choice import Choice
from sluice.daemon.api.errors import ClientLeft
from sluice.daemon.api.exchange import Exchange
from sluice.daemon.api.follow import follow, submit_all
from sluice.daemon.api.house import House
from sluice.daemon.api.schemas import (
    Common,
    CompletionDetails,
    PromptDetails,
    Usage,
    derived_seed,
)
from sluice.daemon.api.sse import EventStream, progress_comment
from sluice.daemon.chat.reply import ReplyEvent
from sluice.daemon.engine.requests import Event, Generation, GenerationRequest, Progress, Token, TokenConstraint
from sluice.io.errors import ContextExceeded, RequestError


class Form(ABC):
    """How one request's reply looks. Objects returned are ready for msgspec."""

    choices: Sequence[Choice]

    @abstractmethod
    def opening(self) -> list[object]:
        """Chunks sent before anything was generated."""

    @abstractmethod
    def chunks(
        self, choice: Choice, events: Sequence[ReplyEvent], logprobs: Sequence[tuple[int, Token]]
    ) -> list[object]:
        """Chunks for what a token added; the last one of a choice carries its finish reason. A whole reply is
        gathered from the same calls."""

    @abstractmethod
    def usage_chunk(self) -> object:
        """The chunk after the last, with usage and no choices."""

    @abstractmethod
    def whole(self) -> object:
        """The reply at once, after every choice is complete."""

    def enough(self, choice: Choice) -> bool:
        """Whether the choice may be cut here although the model would go on."""
        return False


async def serve(
    house: House,
    exchange: Exchange,
    request: Common,
    template: GenerationRequest,
    form: Form,
    constraints: Sequence[TokenConstraint] = (),
) -> None:
    """Run a request to its end. `template` is its first choice; the others differ in their seed, and each has a
    constraint of its own, because constraints have a state."""
    house.admit()
    account = exchange.account
    account.model, account.stream, account.choices = house.model.name, bool(request.stream), len(form.choices)
    account.prompt_tokens, account.priority = len(template.prompt_ids), template.priority
    generations = submit_all(house.engine, seeded(template, len(form.choices), constraints))
    house.running.add(exchange)
    try:
        if request.stream:
            include_usage = bool(request.stream_options and request.stream_options.include_usage)
            await _stream(exchange, generations, form, include_usage)
        else:

            async def gather(index: int, event: Event) -> bool:
                _advance(form, form.choices[index], event)
                return not form.choices[index].complete

            await follow(exchange, generations, gather)
            await exchange.reply_json(form.whole())
        account.finish = form.choices[0].finish_reason or ""
    finally:
        house.running.discard(exchange)
        for generation in generations:
            generation.cancel()


async def _stream(exchange: Exchange, generations: Sequence[Generation], form: Form, include_usage: bool) -> None:
    stream = EventStream(exchange)
    latest: Progress | None = None

    async def deliver(index: int, event: Event) -> bool:
        nonlocal latest
        if isinstance(event, Progress):
            latest = event
            if exchange.clock() - exchange.last_write >= exchange.limits.progress_seconds:
                await stream.comment(progress_comment(event))
            return True
        latest = None
        choice = form.choices[index]
        for chunk in _advance(form, choice, event):
            await stream.data(chunk)
        return not choice.complete

    async def idle() -> None:
        await stream.comment(f"decode tokens={exchange.account.completion_tokens}" if latest is None
                             else progress_comment(latest))  # fmt: skip

    await stream.start()
    try:
        for chunk in form.opening():
            await stream.data(chunk)
        await follow(exchange, generations, deliver, idle)
        if include_usage:
            await stream.data(form.usage_chunk())
        await stream.end()
    except ClientLeft:
        raise
    except Exception as exc:
        await stream.fail(exc)
        raise


def _advance(form: Form, choice: Choice, event: Event) -> list[object]:
    events, logprobs = choice.feed(event)
    if not choice.complete and form.enough(choice):
        more, more_logprobs = choice.cut()
        events, logprobs = events + more, logprobs + more_logprobs
    if events or logprobs or choice.complete:
        return form.chunks(choice, events, logprobs)
    return []


def seeded(
    template: GenerationRequest, choices: int, constraints: Sequence[TokenConstraint] = ()
) -> list[GenerationRequest]:
    """One request a choice, equal but for seed and constraint."""
    sampling = template.sampling
    seed = sampling.seed or 0
    return [
        replace(
            template,
            sampling=replace(sampling, seed=derived_seed(seed, choice)),
            constraint=constraints[choice] if constraints else None,
        )
        for choice in range(choices)
    ]


def usage_of(prompt_tokens: int, choices: Sequence[Choice], reasoning_tokens: int | None = None) -> Usage:
    """The prompt counts once, however many choices it has."""
    completion = sum(choice.tokens for choice in choices)
    usage = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion,
        total_tokens=prompt_tokens + completion,
        prompt_tokens_details=PromptDetails(max(choice.cached_tokens for choice in choices)),
    )
    if reasoning_tokens is not None:
        usage.completion_tokens_details = CompletionDetails(reasoning_tokens)
    return usage


def check_common(request: Common) -> None:
    """What the types cannot say of the fields both routes share."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")


def check_fits(prompt_tokens: int, context: int, param: str) -> None:
    """Raises unless the prompt is not empty and leaves room for one token of answer."""
    if prompt_tokens == 0:
        raise RequestError(f"{param} is empty; there must be at least one token", param=param)
    if prompt_tokens >= context:
        raise ContextExceeded(
            f"{param} has {prompt_tokens} tokens and the context holds {context}, "
            "one of which must be left for the answer",
            param=param,
        )


def clamp_max_tokens(wanted: int | None, prompt_tokens: int, context: int) -> int:
    """At most what the context leaves: agents ask for far more than any window, and mean "as much as fits"."""
    left = context - prompt_tokens
    return left if wanted is None else min(wanted, left)
