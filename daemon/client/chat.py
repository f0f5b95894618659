"""`sluice chat`: a conversation at the terminal. The model's past, reasoning too, is sent back with each question."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sluice.daemon.client.answer import Answer
from sluice.daemon.client.ask import show_answer, summary
from sluice.daemon.client.connection import Connection, DaemonRefused
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
from sluice.daemon.client.screen import DIM, PLAIN, harmless
from sluice.daemon.options import Json, Socket
from sluice.io.errors import DaemonUnreachable, PresetError, SluiceError

HELP = """\
Type and press Enter. A line that ends in \\ goes on in the next; a line of \"\"\" begins a block, the next ends it.
Ctrl-C stops an answer, or clears the line; Ctrl-D leaves.
  /new               begin a new conversation        /undo              take back the last question and its answer
  /retry             answer the last question anew   /system [TEXT]     set, or clear, the system message
  /think on|off      whether the model thinks        /effort low|high|max
  /thoughts dim|hidden                               /status            what the daemon is doing
  /set NAME VALUE    temperature, top_p, top_k, min_p, seed or max_tokens; without a value, the daemon's own
  /save FILE  /load FILE  /help  /exit"""

SETTABLE: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "max_tokens": int,
}


def chat(
    system: System = None,
    thinking: Thinking = None,
    effort: Effort = None,
    show_thinking: Show = True,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    socket: Socket = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Talk to the running daemon. With --json, a question a line comes in, and an answer a line goes out."""
    fields = request_fields(
        thinking=thinking, effort=effort, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    conversation = Conversation(system=system, fields=fields, show_thinking=show_thinking)
    with connect(socket, url, token_file) as connection:
        connection.wait_until_ready(lambda said: print(f"sluice: {said} ...", file=sys.stderr))
        connection.get("/v1/models")  # say at once that nobody is there
        if as_json:
            _serve_lines(connection, conversation, sys.stdin, sys.stdout)
            return
        interactive = sys.stdin.isatty()
        with _line_history() if interactive else contextlib.nullcontext():
            repl(connection, conversation, _questions(interactive), sys.stdout)


@dataclass(slots=True)
class Conversation:
    """Messages so far and what every request carries."""

    system: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    show_thinking: bool = True
    messages: list[dict[str, Any]] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """The next request."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return {"messages": [*head, *self.messages], **self.fields}

    def undo(self) -> str | None:
        """Take back the last question and all that followed; the question, None if there is none."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                text = str(self.messages[index]["content"])
                del self.messages[index:]
                return text
        return None

    def save(self, path: Path) -> None:
        """Raises PresetError if the file cannot be written."""
        document = {"system": self.system, "fields": self.fields, "messages": self.messages}
        try:
            path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
        except OSError as error:
            raise PresetError(f"{path}: {error.strerror or error}") from None

    def load(self, path: Path) -> None:
        """Raises PresetError for a file that `save` has not written; the conversation is then as before."""
        try:
            document = json.loads(path.read_text())
            messages, fields, system = document["messages"], document["fields"], document["system"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PresetError(f"{path}: no saved conversation: {error}") from None
        shaped = isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages)
        if not shaped or not isinstance(fields, dict) or not isinstance(system, str | None):
            raise PresetError(f"{path}: no saved conversation")
        self.messages, self.fields, self.system = messages, fields, system


def repl(connection: Connection, conversation: Conversation, questions: Iterator[str], out: TextIO) -> None:
    """Answer questions and obey commands until they end. Ctrl-C while an answer is written stops that answer only."""
    for text in questions:
        if text.startswith("/"):
            try:
                action = command(text, conversation, connection, out)
            except SluiceError as error:
                _say(out, str(error))
                continue
            if action == "exit":
                return
            if action != "ask":
                continue
        else:
            conversation.messages.append({"role": "user", "content": text})
        _answer(connection, conversation, out)


def command(text: str, conversation: Conversation, connection: Connection, out: TextIO) -> str:
    """Obey one /command. Returns "exit", "ask" (answer what stands) or "". Raises SluiceError."""
    name, _, rest = text[1:].strip().partition(" ")
    rest = rest.strip()
    fields = conversation.fields
    match name:
        case "exit" | "quit" | "q":
            return "exit"
        case "help" | "?" | "h":
            _say(out, HELP)
        case "new" | "clear":
            conversation.messages.clear()
            _say(out, "a new conversation")
        case "undo":
            taken = conversation.undo()
            _say(out, "there is nothing to take back" if taken is None else f"taken back: {taken[:60]}")
        case "retry":
            taken = conversation.undo()
            if taken is None:
                _say(out, "there is no question yet")
                return ""
            conversation.messages.append({"role": "user", "content": taken})
            return "ask"
        case "system":
            conversation.system = rest or None
            _say(out, "system message set" if rest else "no system message")
        case "think" if rest in ("on", "off"):
            fields["thinking"] = rest == "on"
        case "effort" if rest in ("low", "high", "max"):
            fields["reasoning_effort"] = rest
        case "thoughts" if rest in ("dim", "hidden"):
            conversation.show_thinking = rest == "dim"
        case "set":
            _set(rest, fields, out)
        case "save" if rest:
            conversation.save(Path(rest).expanduser())
            _say(out, f"saved {len(conversation.messages)} messages")
        case "load" if rest:
            conversation.load(Path(rest).expanduser())
            _say(out, f"loaded {len(conversation.messages)} messages")
        case "status":
            from sluice.daemon.client.status_view import print_status

            print_status(connection.get("/v1/status"), out)
        case _:
            _say(out, f"/{name} {rest}".strip() + " is no command here; /help lists them")
    return ""


def _set(rest: str, fields: dict[str, Any], out: TextIO) -> None:
    name, _, value = rest.partition(" ")
    if not name:
        _say(out, ", ".join(f"{key} {value}" for key, value in sorted(fields.items())) or "all as the daemon has it")
        return
    if name not in SETTABLE:
        _say(out, f"{name} cannot be set; {', '.join(SETTABLE)} can")
        return
    key = "max_completion_tokens" if name == "max_tokens" else name
    if not value.strip():
        fields.pop(key, None)
        return
    try:
        fields[key] = SETTABLE[name](value)
    except ValueError:
        _say(out, f"{value!r} is no {'number' if SETTABLE[name] is float else 'whole number'}")


def _answer(connection: Connection, conversation: Conversation, out: TextIO) -> None:
    answer = Answer()
    stopped = ""
    try:
        show_answer(connection, conversation.body(), answer, out, out, conversation.show_thinking)
    except KeyboardInterrupt:
        stopped = "stopped; "
    except (DaemonRefused, DaemonUnreachable) as error:
        _say(out, str(error))
    if answer.content or answer.reasoning:
        if stopped or answer.finish_reason is None:
            answer.tool_calls.clear()  # a call cut in half must not be taken for one
        conversation.messages.append(answer.message())
        _say(out, f"[{stopped}{summary(answer)}]")
    else:
        if stopped:
            _say(out, "[stopped]")
        conversation.undo()  # a question without any answer would stand before the next one


def _say(out: TextIO, text: str) -> None:
    text = harmless(text)
    out.write(f"{DIM}{text}{PLAIN}\n" if out.isatty() else text + "\n")
    out.flush()


# Input


def _questions(interactive: bool) -> Iterator[str]:
    """Questions from standard input; the prompt only where somebody sees it."""

    def read(prompt: str) -> str:
        return input(prompt if interactive else "")

    if interactive:
        print("sluice chat; /help for help", file=sys.stderr)
    yield from gather(read)


def gather(read: Callable[[str], str]) -> Iterator[str]:
    """Lines put together to questions: a trailing backslash goes on, a line of three quotes begins or ends a block.

    read: one line for a prompt, raising EOFError at the end and KeyboardInterrupt to drop what was begun.
    """
    lines: list[str] = []
    block = False
    while True:
        try:
            line = read("... " if lines or block else "> ")
        except EOFError:
            break
        except KeyboardInterrupt:
            lines, block = [], False
            print(file=sys.stderr)
            continue
        if line.strip() == '"""':
            if not block:
                block = True
                continue
            block = False
        elif block:
            lines.append(line)
            continue
        elif line.endswith("\\"):
            lines.append(line[:-1])
            continue
        else:
            lines.append(line)
        text, lines = "\n".join(lines), []
        if text.strip():
            yield text
    text = "\n".join(lines)
    if text.strip():
        yield text


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Line editing, with a history that lasts; private to the user, because questions are."""
    try:
        import readline
    except ImportError:  # an interpreter built without it still chats
        yield
        return
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(base) / "sluice" / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(2000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.write_history_file(path)
            path.chmod(0o600)


def _serve_lines(connection: Connection, conversation: Conversation, questions: TextIO, out: TextIO) -> None:
    """For programs: a question a line in, one JSON object a line out, one conversation throughout."""
    from sluice.daemon.client.answer import ask_daemon

    for line in questions:
        text = line.rstrip("\n")
        if not text.strip():
            continue
        conversation.messages.append({"role": "user", "content": text})
        answer = Answer()
        for _ in ask_daemon(connection, conversation.body(), answer):
            pass
        conversation.messages.append(answer.message())
        out.write(json.dumps(answer.report(), ensure_ascii=False) + "\n")
        out.flush()
