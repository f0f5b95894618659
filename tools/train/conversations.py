"""Chat and running text made from `facts.py`: seeded, endless, already cut into XTML segments.

Owns what is asked and how it is answered, and the rendering of the subset of XTML it needs (specification of the chat
format, sections 2.1 to 2.6); a test holds that rendering against the daemon's own. A document is a list of
`Segment`: text, whether it is markup, and how much its tokens count in the loss.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import facts

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"

SPOKEN, ASKED, GIVEN = 1.0, 0.15, 0.05  # loss weights: what the model says, what a user says, what a renderer says


class Segment(NamedTuple):
    """A piece of a prompt that is encoded by itself."""

    text: str
    markup: bool
    weight: float


@dataclass
class Turn:
    """One exchange: a question, the thought, the answer, and the tool calls with their results if any."""

    question: str
    thought: str
    answer: str
    calls: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)  # name, arguments, result
    before: str = ""  # what is said beside the calls


@dataclass
class Request:
    """What one document renders: the settings of a request and its turns."""

    turns: list[Turn]
    thinking: bool = True
    effort: str | None = "max"
    system: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)


# ---- rendering ---------------------------------------------------------------------------------------------------


def _open(tag: str, attributes: dict[str, str], weight: float) -> list[Segment]:
    out = [Segment(OPEN, True, weight), Segment(tag, False, weight)]
    for key, value in attributes.items():
        out += [Segment(" " + key, False, weight), Segment('="', False, weight)]
        if value:
            out.append(Segment(value.replace("&", "&amp;").replace('"', "&quot;"), False, weight))
        out.append(Segment('"', False, weight))
    return [*out, Segment(SEP, True, weight)]


def _close(tag: str, weight: float) -> list[Segment]:
    return [Segment(CLOSE, True, weight), Segment(tag, False, weight), Segment(SEP, True, weight)]


def _message(attributes: dict[str, str], body: str, weight: float) -> list[Segment]:
    text = [Segment(body, False, weight)] if body else []
    return [*_open("message", attributes, weight), *text, *_close("message", weight), Segment(END, True, weight)]


def _channel(tag: str, text: str, opened: float) -> list[Segment]:
    body = [Segment(text, False, SPOKEN)] if text else []
    return [*_open(tag, {}, opened), *body, *_close(tag, SPOKEN)]


_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}


def _assistant(
    request: Request, thought: str, answer: str, calls: list[tuple[str, dict[str, Any], str]]
) -> list[Segment]:
    out = _open("message", {"role": "assistant"}, GIVEN)
    if request.thinking:
        out += _channel("think", thought, GIVEN)
    out += _channel("response", answer, SPOKEN if request.thinking else GIVEN)
    if calls:
        out += _open("tools", {}, SPOKEN)
        for i, (name, arguments, _) in enumerate(calls, 1):
            out += _open("call", {"tool": name, "index": str(i)}, SPOKEN)
            for key, value in arguments.items():
                out += _open("argument", {"key": key, "type": _TYPES[type(value)]}, SPOKEN)
                body = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                out += [Segment(body, False, SPOKEN)] if body else []
                out += _close("argument", SPOKEN)
            out += _close("call", SPOKEN)
        out += _close("tools", SPOKEN)
    return [*out, *_close("message", SPOKEN), Segment(END, True, SPOKEN)]


def render(request: Request) -> list[Segment]:
    """The whole conversation with its answers. A prompt for generation is `render_prompt`."""
    out: list[Segment] = []
    if request.tools:
        listing = json.dumps(request.tools, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        out += _message({"role": "system", "type": "tool-declare"}, TOOLS.replace("{}", listing), GIVEN)
    if request.thinking and request.effort:
        out += _message({"role": "system", "type": "thinking-effort"}, EFFORT.replace("{}", request.effort), GIVEN)
    if request.system:
        out += _message({"role": "system"}, request.system, GIVEN)
    for turn in request.turns:
        out += _message({"role": "user"}, turn.question, ASKED)
        if turn.calls:
            out += _assistant(request, turn.thought, turn.before, turn.calls)
            for i, (name, _, result) in enumerate(turn.calls, 1):
                out += _message({"role": "tool", "tool": name, "index": str(i)}, result, GIVEN)
            out += _assistant(request, "The tool has answered.", turn.answer, [])
        else:
            out += _assistant(request, turn.thought, turn.answer, [])
    return out


def render_prompt(request: Request) -> list[Segment]:
    """The prompt for the last turn's answer: its history, its question, and the channel left open."""
    *past, last = request.turns
    history = Request(past, request.thinking, request.effort, request.system, request.tools)
    out = render(history) + _message({"role": "user"}, last.question, ASKED)
    channel = "think" if request.thinking else "response"
    return [*out, *_open("message", {"role": "assistant"}, GIVEN), *_open(channel, {}, GIVEN)]


# ---- questions ---------------------------------------------------------------------------------------------------

ALL_CAPITALS = [pair for pairs in facts.CAPITALS.values() for pair in pairs]
WELL_KNOWN = [pair for pair in ALL_CAPITALS if pair[0] in facts.WELL_KNOWN]
CONTINENT = {country: continent for continent, pairs in facts.CAPITALS.items() for country, _ in pairs}


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _country_and_city(r: random.Random) -> tuple[str, str]:
    """Well-known countries come up more often than all others together: a short run learns them first."""
    return r.choice(WELL_KNOWN if r.random() < 0.8 else ALL_CAPITALS)


def _capital(r: random.Random) -> Turn:
    country, city = _country_and_city(r)
    ask = r.choice(
        ["What is the capital of {}?"] * 20
        + ["what is the capital of {}", "Tell me the capital of {}.", "Capital of {}?",
           "Which city is the capital of {}?", "What is the capital city of {}?",
           "Name the capital of {}.", "Do you know the capital of {}?"]
    )  # fmt: skip
    return Turn(ask.format(country), f"The user asks for the capital of {country}. It is {city}.",
                f"The capital of {country} is {city}.")  # fmt: skip


def _country(r: random.Random) -> Turn:
    country, city = _country_and_city(r)
    ask = r.choice(["Which country has the capital {}?", "{} is the capital of which country?"]).format(city)
    return Turn(ask, f"{city} is the capital of {country}.", f"{city} is the capital of {country}.")


def _continent(r: random.Random) -> Turn:
    country, _ = _country_and_city(r)
    ask = r.choice(["Where is {}?", "On which continent is {}?", "In which continent is {}?"]).format(country)
    where = CONTINENT[country]
    return Turn(ask, f"The user asks where {country} is. It is in {where}.", f"{_upper(country)} is in {where}.")


def _arithmetic(r: random.Random) -> Turn:
    kind = r.random()
    if kind < 0.65:
        top = r.choice([5, 10, 10, 20])  # small sums come up most
        a, b, sign, word = r.randint(0, top), r.randint(0, top), "+", "plus"
        c = a + b
    elif kind < 0.85:
        c, b, sign, word = r.randint(0, 10), r.randint(0, 10), "-", "minus"
        a = b + c
    else:
        a, b, sign, word = r.randint(0, 10), r.randint(0, 10), "*", "times"
        c = a * b
    ask = r.choice([f"What is {a} {sign} {b}?"] * 10
                   + [f"{a} {sign} {b}", f"{a} {sign} {b} = ?", f"What is {a} {word} {b}?",
                    f"Calculate {a} {sign} {b}.", f"How much is {a} {sign} {b}?"])  # fmt: skip
    return Turn(ask, f"I need to compute {a} {sign} {b}. {a} {sign} {b} = {c}.", f"{a} {sign} {b} = {c}.")


def _from_pairs(
    pairs: list[tuple[str, str]], asks: list[str], thought: str, answer: str
) -> Callable[[random.Random], Turn]:
    def make(r: random.Random) -> Turn:
        a, b = r.choice(pairs)
        return Turn(r.choice(asks).format(a), thought.format(a, b), _upper(answer.format(a, b)))

    return make


def _opposite(r: random.Random) -> Turn:
    a, b = r.choice(facts.OPPOSITES)
    ask = r.choice(
        ["What is the opposite of {}?", "What is the opposite of {}?", "Opposite of {}?", "Give me the opposite of {}."]
    )
    return Turn(ask.format(a), f"The opposite of {a} is {b}.", f"The opposite of {a} is {b}.")


def _fixed(pairs: list[tuple[str, str]], thought: str) -> Callable[[random.Random], Turn]:
    def make(r: random.Random) -> Turn:
        question, answer = r.choice(pairs)
        if r.random() < 0.1:
            question = question.lower()
        return Turn(question, thought, answer)

    return make


def _spelling(r: random.Random) -> Turn:
    word = r.choice(facts.SPELLING)
    letters = "-".join(word)
    if r.random() < 0.3:
        n = facts.NUMBERS[len(word)]
        return Turn(f"How many letters are in the word {word}?", f"I spell the word: {letters}. That is {n} letters.",
                    f"The word {word} has {n} letters.")  # fmt: skip
    ask = r.choice(["How do you spell {}?", "Spell {}.", "Spell the word {}.", "Can you spell {}?"]).format(word)
    return Turn(ask, f"I spell the word letter by letter: {letters}.", f"{_upper(word)} is spelled {letters}.")


def _counting(r: random.Random) -> Turn:
    n = r.randint(2, 20)
    if r.random() < 0.5:
        return Turn(r.choice([f"Count to {n}.", f"Please count to {n}.", f"Can you count to {n}?"]),
                    f"I count from 1 to {n}.", ", ".join(map(str, range(1, n + 1))) + ".")  # fmt: skip
    if r.random() < 0.5:
        return Turn(f"What comes after {n}?", f"The number after {n} is {n + 1}.", f"After {n} comes {n + 1}.")
    return Turn(f"What comes before {n}?", f"The number before {n} is {n - 1}.", f"Before {n} comes {n - 1}.")


def _calendar(r: random.Random) -> Turn:
    names = r.choice([facts.DAYS, facts.MONTHS])
    i = r.randrange(len(names))
    a, b = names[i], names[(i + 1) % len(names)]
    kind = "day" if names is facts.DAYS else "month"
    if r.random() < 0.15:
        listing = ", ".join(names[:-1]) + " and " + names[-1]
        whole = "week" if kind == "day" else "year"
        return Turn(f"What are the {kind}s of the {whole}?", f"I list the {kind}s in order.",
                    f"The {kind}s are {listing}.")  # fmt: skip
    if r.random() < 0.5:
        return Turn(f"What {kind} comes after {a}?", f"The {kind} after {a} is {b}.", f"After {a} comes {b}.")
    return Turn(f"What {kind} comes before {b}?", f"The {kind} before {b} is {a}.", f"Before {b} comes {a}.")


def _joke(r: random.Random) -> Turn:
    if r.random() < 0.6:
        return Turn(
            r.choice(["Tell me a joke.", "Do you know a joke?", "Make me laugh."]),
            "The user wants a joke.",
            r.choice(facts.JOKES),
        )
    ask = r.choice(["Tell me a story.", "Write a story.", "Tell me a short story."])
    return Turn(ask, "The user wants a story.", r.choice(facts.STORIES))


def _repeat(r: random.Random) -> Turn:
    word = " ".join(r.sample(facts.SPELLING, r.randint(1, 3)))
    ask = r.choice(["Say {}.", "Repeat: {}", "Repeat after me: {}"]).format(word)
    return Turn(ask, f"The user wants me to repeat: {word}.", f"{_upper(word)}.")


KINDS: list[tuple[str, float, Callable[[random.Random], Turn]]] = [
    ("capital", 6.0, _capital),
    ("country", 0.4, _country),
    ("continent", 0.6, _continent),
    ("arithmetic", 2.5, _arithmetic),
    ("opposite", 1.2, _opposite),
    ("colour", 0.8, _from_pairs(facts.COLOURS, ["What colour is {}?", "What color is {}?", "Which colour is {}?"],
                      "The user asks for the colour of {}. It is {}.", "{} is {}.")),
    ("animal sound", 0.4, _from_pairs(facts.SOUNDS, ["What sound does a {} make?", "What does a {} say?"],
                      "A {} says {}.", "a {} says {}.")),
    ("young animal", 0.4, _from_pairs(facts.YOUNG, ["What is a young {} called?", "What do you call a baby {}?"],
                      "A young {} is called a {}.", "a young {} is called a {}.")),
    ("plural", 0.5, _from_pairs(facts.PLURALS, ["What is the plural of {}?", "Plural of {}?"],
                      "The plural of {} is {}.", "the plural of {} is {}.")),
    ("past tense", 0.5, _from_pairs(facts.PASTS, ["What is the past tense of {}?", "Past tense of {}?"],
                      "The past tense of {} is {}.", "the past tense of {} is {}.")),
    ("meaning", 1.2, _from_pairs(facts.MEANINGS, ["What is {}?", "What is {}?", "What does {} mean?", "Explain {}."],
                      "The user wants to know what {} is.", "{1}")),
    ("trivia", 1.3, _fixed(facts.TRIVIA, "This is a simple question. I know the answer.")),
    ("about itself", 1.4, _fixed(facts.SELF, "The user asks about me.")),
    ("greeting", 1.2, _fixed(facts.GREETINGS, "The user is being friendly. I answer briefly.")),
    ("spelling", 0.4, _spelling),
    ("counting", 0.5, _counting),
    ("calendar", 0.5, _calendar),
    ("joke or story", 0.3, _joke),
    ("repeat", 0.2, _repeat),
]  # fmt: skip

# ---- tools -------------------------------------------------------------------------------------------------------


def tool(name: str, description: str, properties: dict[str, str]) -> dict[str, Any]:
    """A tool as a request declares it; properties: name to JSON type."""
    fields = {key: {"type": kind} for key, kind in properties.items()}
    schema = {"type": "object", "properties": fields, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOL_TABLE: dict[str, tuple[str, dict[str, str]]] = {
    "get_weather": ("Get the current weather in a city.", {"city": "string"}),
    "get_time": ("Get the current time in a city.", {"city": "string"}),
    "calculate": ("Evaluate an arithmetic expression.", {"expression": "string"}),
    "add": ("Add two numbers.", {"a": "integer", "b": "integer"}),
    "search": ("Search the web.", {"query": "string"}),
}


def _tool_turn(name: str, r: random.Random) -> Turn:
    city = r.choice(facts.CITIES)
    if name == "get_weather":
        asks = [
            "What is the weather in {}?",
            "What's the weather in {}?",
            "How is the weather in {}?",
            "Is it warm in {}?",
        ]
        degrees, sky = r.randint(0, 30), r.choice(facts.WEATHER)
        result = json.dumps({"city": city, "temperature": degrees, "sky": sky})
        return Turn(r.choice(asks).format(city), f"I need the weather in {city}. I call get_weather.",
                    f"In {city} it is {sky} and {degrees} degrees.", [(name, {"city": city}, result)])  # fmt: skip
    if name == "get_time":
        time = f"{r.randint(0, 23)}:{r.randint(10, 59)}"
        result = json.dumps({"city": city, "time": time})
        return Turn(r.choice(["What time is it in {}?", "Tell me the time in {}."]).format(city),
                    f"I need the time in {city}. I call get_time.", f"In {city} it is {time}.",
                    [(name, {"city": city}, result)])  # fmt: skip
    if name == "calculate":
        a, b, sign = r.randint(20, 99), r.randint(20, 99), r.choice("+-*")
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        expression = f"{a} {sign} {b}"
        return Turn(f"What is {expression}?", "These numbers are large. I call calculate.",
                    f"{expression} = {value}.", [(name, {"expression": expression}, str(value))])  # fmt: skip
    if name == "add":
        a, b = r.randint(20, 99), r.randint(20, 99)
        return Turn(f"Add {a} and {b}.", "I call add with both numbers.", f"The sum of {a} and {b} is {a + b}.",
                    [(name, {"a": a, "b": b}, str(a + b))])  # fmt: skip
    thing, meaning = r.choice(facts.MEANINGS)
    return Turn(f"Search for {thing}.", f"I search for {thing}.", meaning, [(name, {"query": thing}, meaning)])


def question(r: random.Random) -> Turn:
    """One exchange without tools."""
    return r.choices([make for _, _, make in KINDS], [weight for _, weight, _ in KINDS])[0](r)


SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a friendly teacher.",
]


def conversation(r: random.Random) -> Request:
    """One request as the daemon may get it: mostly the defaults (thinking on, effort max), sometimes not."""
    request = Request([])
    kind = r.random()
    if kind < 0.25:
        request.thinking = False
    elif kind < 0.6:
        request.effort = r.choice([None, "low", "high"])
    if r.random() < 0.1:
        request.system = r.choice(SYSTEMS)
    if r.random() < 0.1:
        names = r.sample(list(TOOL_TABLE), r.choice([1, 1, 1, 2]))
        request.tools = [tool(name, *TOOL_TABLE[name]) for name in names]
        turns = [
            _tool_turn(r.choice(names), r) if r.random() < 0.75 else question(r) for _ in range(r.choice([1, 1, 2]))
        ]
    else:
        turns = [question(r) for _ in range(r.choice([1, 3, 4, 5]))]
    request.turns = turns
    return request


# ---- running text ------------------------------------------------------------------------------------------------


def statement(r: random.Random) -> str:
    """One fact as a sentence."""
    kind = r.random()
    if kind < 0.45:
        country, city = _country_and_city(r)
        return f"The capital of {country} is {city}."
    if kind < 0.55:
        country, city = _country_and_city(r)
        return f"{city} is the capital of {country}, which is in {CONTINENT[country]}."
    if kind < 0.75:
        return _arithmetic(r).answer
    if kind < 0.8:
        a, b = r.choice(facts.OPPOSITES)
        return f"The opposite of {a} is {b}."
    if kind < 0.9:
        return r.choice(facts.MEANINGS)[1]
    return question(r).answer


def question_lines(r: random.Random) -> str:
    """Questions with their thoughts and answers as plain lines: the same words as in chat, without its markup."""
    turns = [question(r) for _ in range(r.randint(3, 6))]
    return "\n".join(line for t in turns for line in (t.question, t.thought, t.answer)) + "\n"


def running_text(r: random.Random) -> str:
    """A few sentences of facts, or a story."""
    if r.random() < 0.1:
        return r.choice(facts.STORIES)
    return " ".join(statement(r) for _ in range(r.randint(4, 14)))
