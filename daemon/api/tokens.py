"""POST /tokenize and /detokenize: the prompt's ids as the engine would see them, and back.

The same path as chat and completions, so that a count made here is the count that is charged there.
"""

from __future__ import annotations

from sluice.daemon.api.chat import write_prompt
from sluice.daemon.api.completions import check_ids
from sluice.daemon.api.exchange import Exchange
from sluice.daemon.api.house import House
from sluice.daemon.api.schemas import Content, DetokenizeRequest, TokenizeRequest, Tokens, read_request
from sluice.io.errors import RequestError


async def tokenize(house: House, exchange: Exchange) -> None:
    """Text as text, or a chat with everything a prompt adds around it."""
    body = await exchange.read_json_bytes()
    request = await house.off_loop(lambda: read_request(body, TokenizeRequest), len(body))
    house.model.check_name(request.model)
    tokenizer = house.model.tokenizer
    if (request.content is None) == (request.messages is None):
        raise RequestError("send either content (text) or messages (a chat)", param="content")
    if request.content is not None:
        text = request.content
        ids = await house.off_loop(lambda: tokenizer.encode_text(text), len(text))
    else:
        prompt = await house.off_loop(lambda: write_prompt(request), len(body))
        ids = await house.off_loop(lambda: tokenizer.encode_segments(prompt.segments), prompt.characters)
    await exchange.reply_json(Tokens(ids, len(ids)))


async def detokenize(house: House, exchange: Exchange) -> None:
    """Ids to text: U+FFFD for what is no UTF-8, control tokens as their names."""
    body = await exchange.read_json_bytes()
    request = await house.off_loop(lambda: read_request(body, DetokenizeRequest), len(body))
    house.model.check_name(request.model)
    tokenizer = house.model.tokenizer
    vocab_size = min(house.engine.vocab_size, tokenizer.vocab_size)
    ids = await house.off_loop(lambda: check_ids(request.tokens, vocab_size, "tokens"), len(body))
    await exchange.reply_json(Content(await house.off_loop(lambda: tokenizer.decode(ids), len(body))))
