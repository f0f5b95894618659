"""The app: routes, and the edge every request passes on its way in and out.

The edge gives a request its id, checks who asks, turns every error into one JSON reply (or, once a stream has
begun, leaves that to the stream), and writes one log line and the metrics at the end, whatever happened.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.daemon.api.access import Access
from sluice.daemon.api.chat import chat_completions
from sluice.daemon.api.completions import completions
from sluice.daemon.api.errors import ClientLeft, Refusal, ServiceUnavailable, error_kind, error_message, error_reply
from sluice.daemon.api.exchange import Exchange, account_fields
from sluice.daemon.api.house import House
from sluice.daemon.api.limits import Limits
from sluice.daemon.api.openapi import document
from sluice.daemon.api.served import ServedModel
from sluice.daemon.api.tokens import detokenize, tokenize
from sluice.daemon.chat.constraint import Constrainer
from sluice.daemon.engine.requests import EngineClient
from sluice.daemon.service.metrics import CONTENT_TYPE, Metrics
from sluice.io.errors import RequestError, SluiceError

log = logging.getLogger(__name__)
request_log = logging.getLogger("sluice.request")

Handler = Callable[[House, Exchange], Awaitable[None]]

_PREFIXES = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}


class Endpoint:
    """A handler as the ASGI app a starlette Route runs: the exchange was made by the edge."""

    def __init__(self, house: House, handler: Handler) -> None:
        self._house = house
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(self._house, scope["sluice.exchange"])


class Edge:
    """Outermost: nothing that happens below leaves here as an exception, but for cancellation."""

    def __init__(self, app: ASGIApp, house: House) -> None:
        self._app = app
        self._house = house

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # lifespan is off and websockets are not spoken
            return
        connection = scope.get("state", {}).get("connection")
        exchange = Exchange(
            scope=scope,
            receive=receive,
            raw_send=send,
            limits=self._house.limits,
            id=_PREFIXES.get(scope["path"], "req-") + secrets.token_hex(12),
            connection=connection,
        )
        scope["sluice.exchange"] = exchange
        metrics = self._house.metrics
        metrics.open_requests.inc()
        try:
            await self._guarded(exchange, scope)
        finally:
            metrics.open_requests.dec()
            self._tell(exchange)

    async def _guarded(self, exchange: Exchange, scope: Scope) -> None:
        account = exchange.account
        try:
            if self._house.access is not None:
                self._house.access.check(exchange)
            if exchange.connection is not None and exchange.connection.over_limit:
                raise ServiceUnavailable("too many connections are open", 1, close=True)
            if _head_bytes(scope) > exchange.limits.header_bytes:
                # h11 bounds a head that is still arriving; one that came whole is bounded here.
                raise Refusal(431, f"the head is over the limit of {exchange.limits.header_bytes} bytes", close=True)
            await self._app(scope, exchange.receive, exchange.send)
            account.outcome = "ok"
        except asyncio.CancelledError:
            account.outcome = "cancelled"
            raise
        except ClientLeft as exc:
            account.outcome, account.error = "left", exc.reason
            exchange.status = exchange.status or 499
        except Exception as exc:
            await self._fail(exchange, exc)

    async def _fail(self, exchange: Exchange, exc: Exception) -> None:
        account = exchange.account
        account.error = f"{error_kind(exc)}: {error_message(exc)}"
        account.outcome = "refused" if isinstance(exc, RequestError | ServiceUnavailable) else "failed"
        self._house.metrics.errors.labels(error_kind(exc)).inc()
        if not isinstance(exc, SluiceError):
            log.error("request %s met a bug", exchange.id, exc_info=exc)
        if exchange.status:  # a stream has told of it already; a half-sent reply can only be cut
            if not exchange.finished and exchange.connection is not None:
                exchange.connection.abort()
            return
        reply = error_reply(exc)
        headers = reply.headers
        if not exchange.body_read and _has_body(exchange) and ("connection", "close") not in headers:
            headers = (*headers, ("connection", "close"))  # an unread body would be taken for the next request
        try:
            await exchange.reply(reply.body, status=reply.status, headers=headers)
        except ClientLeft as left:
            account.outcome, account.error = "left", left.reason

    def _tell(self, exchange: Exchange) -> None:
        fields = account_fields(exchange)
        account = exchange.account
        self._house.metrics.request_ended(
            route=_route(exchange.path),
            outcome=account.outcome,
            prompt_tokens=account.prompt_tokens,
            cached_tokens=account.cached_tokens,
            completion_tokens=account.completion_tokens,
            choices=account.choices,
            queue_seconds=account.queue_seconds,
            decode_seconds=account.decode_seconds,
            first_token_seconds=account.first_token_seconds,
        )
        quiet = exchange.method == "GET" and account.outcome == "ok"  # probes and scrapes: every few seconds
        request_log.log(
            logging.DEBUG if quiet else logging.INFO,
            "%s %s %s %s",
            fields["method"],
            fields["path"],
            fields["status"],
            account.outcome,
            extra={"fields": fields},
        )


def _head_bytes(scope: Scope) -> int:
    fields = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return fields + len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")


def _has_body(exchange: Exchange) -> bool:
    length = exchange.header(b"content-length")
    return exchange.header(b"transfer-encoding") is not None or (length is not None and length != "0")


def _route(path: str) -> str:
    """The path as a label: a fixed set, whatever clients ask for."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{id}"
    return path if path in _KNOWN else "other"


# ---- the small routes


async def live(house: House, exchange: Exchange) -> None:
    """The loop answers: that is all it says."""
    await exchange.reply_json({"status": "ok"})


async def ready(house: House, exchange: Exchange) -> None:
    """200 when requests are served, 503 while loading or draining."""
    if house.draining:
        await exchange.reply_json({"status": "draining"}, status=503)
    elif not house.engine.ready:
        await exchange.reply_json({"status": "loading"}, status=503)
    else:
        await exchange.reply_json({"status": "ready"})


async def models(house: House, exchange: Exchange) -> None:
    await exchange.reply_json({"object": "list", "data": [house.model.entry()]})


async def model(house: House, exchange: Exchange) -> None:
    """One model by id or alias; ids may contain slashes."""
    house.model.check_name(exchange.scope["path_params"]["id"])
    await exchange.reply_json(house.model.entry())


async def status(house: House, exchange: Exchange) -> None:
    """The engine's own snapshot, with the name of what is served."""
    snapshot = dict(house.engine.status())
    snapshot["model"] = {"name": house.model.name, "system_fingerprint": house.model.fingerprint}
    if house.draining:
        snapshot["state"] = "draining"
    await exchange.reply_json(snapshot)


async def metrics(house: House, exchange: Exchange) -> None:
    await exchange.reply(house.metrics.render(), content_type=CONTENT_TYPE)


async def openapi(house: House, exchange: Exchange) -> None:
    """The surface described for programs."""
    await exchange.reply_json(document())


_ROUTES: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{id:path}", model),
    ("GET", "/v1/status", status),
    ("GET", "/health/live", live),
    ("GET", "/health/ready", ready),
    ("GET", "/metrics", metrics),
    ("GET", "/openapi.json", openapi),
)
_KNOWN = frozenset(path for _, path, _ in _ROUTES)


def _raise(request: Request, exc: Exception) -> Response:
    """starlette's own refusals (404, 405) as ours, so that the edge words them."""
    assert isinstance(exc, HTTPException)
    if exc.status_code == 405:
        allowed = (exc.headers or {}).get("Allow", "")
        message = f"{request.method} is not allowed on {request.url.path[:256]}; allowed: {allowed}"
        raise Refusal(405, message, headers=(("allow", allowed),))
    raise Refusal(exc.status_code, f"there is no {request.url.path[:256]} here")


def create_app(
    engine: EngineClient,
    model: ServedModel,
    limits: Limits | None = None,
    *,
    access: Access | None = None,
) -> Starlette:
    """The whole surface over one engine and one model.

    access: who may ask (None: everyone who can reach it). `app.state.house` is what `server.HttpServer` drains
    and stops; its threads end with the process.
    """
    house = House(
        engine=engine,
        model=model,
        limits=limits or Limits(),
        metrics=Metrics(engine.status, lambda: house.connection_count()),
        threads=ThreadPoolExecutor(2, thread_name_prefix="sluice-text"),
        grammar_threads=ThreadPoolExecutor(1, thread_name_prefix="sluice-grammar"),
        constrainer=None if model.tokenizer.markers is None else model.constrainer or Constrainer(model.tokenizer),
        access=access,
    )
    routes = [Route(path, Endpoint(house, handler), methods=[method]) for method, path, handler in _ROUTES]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _raise})
    app.router.redirect_slashes = False
    app.state.house = house
    app.add_middleware(Edge, house=house)
    return app
