"""POST /v1/completions: plain text or token ids in, plain text out."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from msgspec.structs import replace

from sluice.daemon.api.choice import Choice
from sluice.daemon.api.exchange import Exchange
from sluice.daemon.api.house import House
from sluice.daemon.api.schemas import Completion, CompletionRequest, TextChoice, TextLogprobs, read_request, sampling_of
from sluice.daemon.api.serving import Form, check_common, check_fits, clamp_max_tokens, serve, usage_of
from sluice.daemon.chat.reply import Content, ReplyEvent, TextReader
from sluice.daemon.chat.stops import stop_strings
from sluice.daemon.chat.tokenizer import Tokenizer
from sluice.daemon.engine.requests import GenerationRequest, Token
from sluice.io.errors import RequestError

# OpenAI's own default for this route, kept because its clients expect short completions.
_DEFAULT_MAX_TOKENS = 16
_DEFAULT_TEMPERATURE = 1.0


async def completions(house: House, exchange: Exchange) -> None:
    """Serve one request. Raises what `app.Edge` turns into a reply, as long as nothing was sent."""
    body = await exchange.read_json_bytes()
    request = await house.off_loop(lambda: read_request(body, CompletionRequest), len(body))
    house.model.check_name(request.model)
    check_common(request)
    prompt = await prompt_ids(house, request.prompt)
    stops = stop_strings(request.stop)
    tokenizer = house.model.tokenizer
    template = GenerationRequest(
        prompt_ids=tuple(prompt),
        max_tokens=clamp_max_tokens(request.max_tokens or _DEFAULT_MAX_TOKENS, len(prompt), house.engine.context),
        sampling=sampling_of(request, house.engine.vocab_size, _DEFAULT_TEMPERATURE),
        stop_ids=tokenizer.stop_ids,
        top_logprobs=request.logprobs,
        priority=house.priority(exchange, request.priority, 0),
    )
    choices = [
        Choice(index, tokenizer, TextReader(tokenizer, stops=stops), want_logprobs=request.logprobs is not None)
        for index in range(request.n or 1)
    ]
    shell = Completion(
        id=exchange.id,
        object="text_completion",
        created=int(house.wall()),
        model=house.model.name,
        system_fingerprint=house.model.fingerprint,
        choices=[],
    )
    await serve(house, exchange, request, template, TextForm(shell, request, choices, tokenizer, len(prompt)))


class TextForm(Form):
    """The reply of /v1/completions."""

    def __init__(
        self,
        shell: Completion,
        request: CompletionRequest,
        choices: Sequence[Choice],
        tokenizer: Tokenizer,
        prompt_tokens: int,
    ) -> None:
        self.choices = choices
        self._shell = shell
        self._request = request
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._parts: list[list[TextChoice]] = [[] for _ in choices]
        wants_usage = request.stream and request.stream_options and request.stream_options.include_usage
        self._chunk_usage = None if wants_usage else UNSET

    def opening(self) -> list[object]:
        return []

    def chunks(
        self, choice: Choice, events: Sequence[ReplyEvent], logprobs: Sequence[tuple[int, Token]]
    ) -> list[object]:
        part = TextChoice(
            index=choice.index,
            text="".join(event.text for event in events if isinstance(event, Content)),
            logprobs=self._logprobs(logprobs) if self._request.logprobs is not None else None,
            finish_reason=choice.finish_reason,
            logits_fingerprint=choice.fingerprint if self._request.logits_fingerprint and choice.complete else UNSET,
        )
        if not self._request.stream:
            self._parts[choice.index].append(part)
        return [replace(self._shell, choices=[part], usage=self._chunk_usage)]

    def usage_chunk(self) -> object:
        return replace(self._shell, usage=usage_of(self._prompt_tokens, self.choices))

    def whole(self) -> object:
        joined = [_join(parts) for parts in self._parts]
        return replace(self._shell, choices=joined, usage=usage_of(self._prompt_tokens, self.choices))

    def _logprobs(self, entries: Sequence[tuple[int, Token]]) -> TextLogprobs:
        def name(token_id: int) -> str:
            return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

        return TextLogprobs(
            tokens=[name(token.id) for _, token in entries],
            token_logprobs=[token.logprob or 0.0 for _, token in entries],
            # Of two tokens with one lossy text the better one is kept.
            top_logprobs=[{name(i): value for i, value in reversed(token.top)} for _, token in entries],
            text_offset=[offset for offset, _ in entries],
        )


def _join(parts: Sequence[TextChoice]) -> TextChoice:
    """A choice from its deltas."""
    last = parts[-1]
    logprobs = None
    if last.logprobs is not None:
        logprobs = TextLogprobs([], [], [], [])
        for part in parts:
            assert part.logprobs is not None
            logprobs.tokens += part.logprobs.tokens
            logprobs.token_logprobs += part.logprobs.token_logprobs
            logprobs.top_logprobs += part.logprobs.top_logprobs
            logprobs.text_offset += part.logprobs.text_offset
    return replace(last, text="".join(part.text for part in parts), logprobs=logprobs)


async def prompt_ids(house: House, prompt: str | list[int | str | list[int]]) -> list[int]:
    """The prompt as ids, every one checked against the vocabulary, the whole against the context.

    Text is encoded as text: names of control tokens in it stay ordinary characters. Raises RequestError.
    """
    param = "prompt"
    one: str | list[int | str | list[int]] | list[int] = prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise RequestError("prompt must be one text or one list of ids; send one request each", param=param)
        one, param = prompt[0], "prompt[0]"
    if isinstance(one, str):
        text = one
        ids = await house.off_loop(lambda: house.model.tokenizer.encode_text(text), len(text))
    else:
        listed = one
        ids = await house.off_loop(lambda: check_ids(listed, house.engine.vocab_size, param), len(listed))
    check_fits(len(ids), house.engine.context, param)
    return ids


def check_ids(listed: Sequence[object], vocab_size: int, param: str) -> list[int]:
    """A list of token ids from a client: whole numbers in [0, vocab_size), booleans not among them."""
    ids: list[int] = []
    for index, value in enumerate(listed):
        if type(value) is not int:
            raise RequestError(f"{param}[{index}] must be a token id", param=f"{param}[{index}]")
        if not 0 <= value < vocab_size:
            raise RequestError(
                f"{param}[{index}] is {value}; token ids go from 0 to {vocab_size - 1}", param=f"{param}[{index}]"
            )
        ids.append(value)
    return ids
