"""`sluice ask`: one question, one answer, the answer alone on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from sluice.daemon.client.answer import Answer, AnswerEvent, Said, Thought, Waiting, ask_daemon
from sluice.daemon.client.connection import Connection
from sluice.daemon.client.interrupts import interruptible
from sluice.daemon.client.options import (
    Effort,
    MaxTokens,
    Seed,
    Show,
    System,
    Temperature,
    Thinking,
    TokenFile,
    TopP,
    Url,
    connect,
    request_fields,
)
from sluice.daemon.client.screen import Screen, elapsed
from sluice.daemon.options import Json, Socket
from sluice.io.errors import PresetError


def ask(
    question: Annotated[str, typer.Argument(help="The question; '-' reads it from standard input.")],
    system: System = None,
    thinking: Thinking = None,
    effort: Effort = None,
    show_thinking: Show = True,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    schema: Annotated[Path | None, typer.Option(help="A JSON schema (file) that the answer must keep.")] = None,
    socket: Socket = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Ask the running daemon one question. The answer goes to standard output, thinking to the terminal only."""
    text = sys.stdin.read() if question == "-" else question
    if not text.strip():
        raise PresetError("the question is empty")
    messages = [{"role": "system", "content": system}] if system else []
    body: dict[str, Any] = {
        "messages": [*messages, {"role": "user", "content": text}],
        **request_fields(
            thinking=thinking, effort=effort, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
        ),
    }
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _read(schema)}}
    with connect(socket, url, token_file) as connection:
        connection.wait_until_ready(lambda said: print(f"sluice: {said} ...", file=sys.stderr))
        answer = Answer()
        if as_json:
            for _ in ask_daemon(connection, body, answer):
                pass
            print(json.dumps(answer.report(), ensure_ascii=False))
            return
        answer = show_answer(connection, body, answer, sys.stdout, sys.stderr, show_thinking)
    if sys.stderr.isatty():
        print(f"\x1b[2m[{summary(answer)}]\x1b[0m", file=sys.stderr)


def show_answer(
    connection: Connection, body: dict[str, Any], answer: Answer, out: TextIO, aside: TextIO, show_thinking: bool
) -> Answer:
    """Stream an answer to `out`. Thinking goes dim to `out` if that is a terminal, else to `aside` if that is one."""
    progress = Progress(answer)
    screen = Screen(out, note=progress.note)
    thoughts = screen if out.isatty() else Screen(aside) if aside.isatty() else None
    if not show_thinking:
        thoughts = None
    with interruptible(), screen, closing(ask_daemon(connection, body, answer)) as events:
        try:
            _show(events, progress, screen, thoughts)
        finally:
            screen.end_line()
    return answer


def _show(events: Iterator[AnswerEvent], progress: Progress, screen: Screen, thoughts: Screen | None) -> None:
    thinking = False
    for event in events:
        progress.see(event)
        match event:
            case Thought(text) if thoughts is not None:
                thoughts.write(text, dim=True)
                thinking = True
            case Said(text):
                if thinking and thoughts is not None:
                    thoughts.end_line()
                    thoughts.write("\n")
                    thinking = False
                screen.write(text)
            case Waiting():
                screen.refresh()


class Progress:
    """What the daemon is doing for one answer, in a few words: queue, prompt, thinking, rate."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._waiting: Waiting | None = None
        self._thinking = False

    def see(self, event: AnswerEvent) -> None:
        """Take an event into account."""
        if isinstance(event, Waiting):
            self._waiting = event
        else:
            self._waiting = None
            self._thinking = isinstance(event, Thought)

    def note(self) -> str:
        """The line now; empty before anything is known."""
        answer, waiting = self._answer, self._waiting
        if answer.first_token_seconds is None and waiting is not None:
            values = waiting.values
            if waiting.stage == "queued":
                return f"waiting, place {values.get('position', '?')}"
            if waiting.stage == "prefill":
                line = f"reading the prompt, {values.get('done', '?')} of {values.get('total', '?')} tokens"
                try:
                    return line + f", {elapsed(float(values['eta_s']))} left"
                except (KeyError, ValueError):
                    return line
            return "waiting for the first token"
        if answer.first_token_seconds is None:
            return ""
        what = "thinking, " if self._thinking else ""
        rate = answer.tokens_per_second
        return f"{what}{answer.tokens} tokens" + (f", {rate:.2f} a second" if rate else "")


def summary(answer: Answer) -> str:
    """The line after an answer."""
    parts = [f"{answer.tokens} tokens"]
    if answer.tokens_per_second:
        parts.append(f"{answer.tokens_per_second:.2f} a second")
    if answer.first_token_seconds is not None:
        parts.append(f"first after {elapsed(answer.first_token_seconds)}")
    if answer.finish_reason == "length":
        parts.append("cut by the limit")
    return ", ".join(parts)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PresetError(f"--schema {path}: {error}") from None
