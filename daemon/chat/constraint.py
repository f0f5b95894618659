"""Constrained replies: which token may come next, so that JSON always parses and a demanded call is always made.

One grammar a request, compiled by llguidance, over the reply's own markup: thinking stays free until its channel
closes, then the rest of the reply follows the grammar down to the end of the message. What is built here satisfies
the engine's `TokenConstraint` by shape; the engine is not imported.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from sluice.daemon.chat.tokenizer import Tokenizer
from sluice.daemon.chat.xtml import escape_attribute, response_schema, type_name
from sluice.io.errors import RequestError

JSON_TYPES = ("string", "number", "boolean", "null", "object", "array")  # as XTML names them
MAX_REFERENCES = 16  # how deep types are looked for behind $ref and anyOf before any type is assumed

# The compiler recurses through a schema and its references; past about 3,200 levels (as _levels counts them) it ran off
# an 8 MiB stack and took the process with it.
MAX_LEVELS = 1000

# Compact JSON: what the model is asked for, and no white space to loop in. These win over a schema's own x-guidance.
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_LIMITS = LLParserLimits(verbose_errors=False)  # a verbose message repeats the client's schema


class ReplyConstraint:
    """One generation's view of its grammar. `allowed` before each token, `accept` after it, by one thread at a time."""

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer, free: NDArray[np.bool_] | None) -> None:
        """free: the mask while thinking, None if the reply begins with the grammar."""
        assert tokenizer.markers is not None
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._close = tokenizer.markers.close
        self._free = free
        self._bits = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.uint32)

    def allowed(self) -> NDArray[np.bool_]:
        """(vocab_size,) bool, True where the token may come next. Raises RequestError when the grammar outgrows the
        parser's limits."""
        if self._free is not None:
            return self._free
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), count=self._tokenizer.vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Advance past a chosen token. Raises ValueError for one that was not allowed, RequestError as `allowed`."""
        if self._free is not None:
            if not (0 <= token_id < len(self._free) and self._free[token_id]):
                raise ValueError(f"token {token_id} was not allowed here")
            if token_id == self._close:
                self._free = None
            return
        self._check()
        if self._matcher.is_stopped() and token_id in self._tokenizer.stop_ids:
            return
        if self._matcher.validate_tokens([token_id]) != 1:
            raise ValueError(f"token {token_id} was not allowed here")
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _line(self._matcher.get_error())
            raise RequestError(f"the constrained reply cannot go on: {reason}", code="grammar_limit")


class Constrainer:
    """Compiles constraints for one tokenizer; safe to share between threads.

    The grammar library's own form of the vocabulary is built by `warm`, or at the first use: for 163,840 ids about
    3 s and 70 MB.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.markers is None:
            raise ValueError("this tokenizer has no XTML markers")
        self._tokenizer = tokenizer
        self._markers = tokenizer.markers
        self._lock = threading.Lock()
        self._built: LLTokenizer | None = None
        free = np.array([tokenizer.is_text(i) for i in range(tokenizer.vocab_size)])
        free[self._markers.close] = True
        free.flags.writeable = False
        self._free = free

    def warm(self) -> LLTokenizer:
        """The vocabulary as llguidance has it, built once."""
        with self._lock:
            if self._built is None:
                self._built = LLTokenizer(
                    cast(TokenizerWrapper, _Vocabulary(self._tokenizer)),
                    n_vocab=self._tokenizer.vocab_size,
                    eos_token=sorted(self._tokenizer.stop_ids),
                )
            return self._built

    def for_reply(
        self,
        *,
        start: Literal["think", "response"],
        response_format: Any = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: Literal["none", "auto", "required"] = "auto",
        parallel: bool = True,
    ) -> ReplyConstraint | None:
        """The constraint of one reply; None if the request asks for none.

        start: the channel the prompt left open. response_format: as the client sent it; json_object and json_schema
        constrain the response channel. tools: declarations; with `required` at least one of them is called, with
        `auto` beside a JSON format the reply is either JSON or calls. A named choice is `required` with one tool.
        parallel: False allows one call. Compiling may take 100 ms and more: call it off the event loop.
        Raises RequestError with the path of a schema that cannot be compiled, and the reason.
        """
        kind = response_format.get("type") if isinstance(response_format, Mapping) else response_format
        as_json = kind in ("json_object", "json_schema")
        required = tool_choice == "required"
        if not as_json and not required:
            return None
        grammar = _ReplyGrammar(self._tokenizer, self.why_not)
        if as_json:
            schema: Any = {"type": "object"}
            if kind == "json_schema":
                schema = response_schema(response_format) if isinstance(response_format, Mapping) else None
                path = "response_format.json_schema.schema"
                if not isinstance(schema, Mapping):
                    raise RequestError(f"{path} must be an object", param=path)
                reason = self.why_not(schema)
                if reason:
                    raise RequestError(f"{path} cannot be enforced: {reason}", param=path)
            grammar.content_json(schema)
        if tools and tool_choice != "none":
            grammar.add_tools(tools, parallel)
        elif required:
            raise RequestError("tool_choice required needs tools", param="tool_choice")
        text = grammar.text(start, calls_required=required, as_json=as_json)
        matcher = LLMatcher(self.warm(), text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            param = "response_format" if as_json else "tools"
            raise RequestError(f"{param} cannot be enforced: {_line(matcher.get_error())}", param=param)
        free = self._free if start == "think" else None
        return ReplyConstraint(matcher, self._tokenizer, free)

    def why_not(self, schema: Any) -> str:
        """Why a JSON schema cannot be enforced, in one line; empty if it can."""
        if _levels(schema) > MAX_LEVELS:
            return f"with its references followed it is nested deeper than the limit of {MAX_LEVELS} levels"
        try:
            grammar = LLMatcher.grammar_from_json_schema(_compact(schema))
        except (ValueError, TypeError, RecursionError) as error:
            return _line(str(error))
        matcher = LLMatcher(self.warm(), grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a schema that no value fits shows it here only
        return _line(matcher.get_error())


class _Vocabulary:
    """What LLTokenizer asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.markers is not None
        self.eos_token_id = tokenizer.markers.end_of_msg
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_text(i)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """Only whole forced strings come here, to be cut into tokens as the model saw them in training."""
        return self._tokenizer.encode_text(text if isinstance(text, str) else text.decode("utf-8"))


class _ReplyGrammar:
    """The grammar of one reply, in llguidance's Lark dialect: rules gathered, then written out."""

    def __init__(self, tokenizer: Tokenizer, why_not: Callable[[Any], str]) -> None:
        markers = tokenizer.markers
        assert markers is not None
        self._open, self._close, self._sep = (f"<[{i}]>" for i in (markers.open, markers.close, markers.sep))
        self._why_not = why_not
        self._compiled: dict[str, bool] = {}
        self._rules: list[str] = ["text: TEXT?", "TEXT: /(?s:.+)/"]
        self._any_values = False
        self._calls = ""

    def content_json(self, schema: Any) -> None:
        self._rules.append(f"content: {_json_rule(schema)}")

    def add_tools(self, tools: Sequence[Mapping[str, Any]], parallel: bool) -> None:
        names = []
        for number, tool in enumerate(tools):
            function = tool["function"]
            arguments = self._arguments(f"tool{number}", function.get("parameters"))
            name = _literal(f'call tool="{escape_attribute(function["name"])}" index="')
            head = f"{self._open} {name} INDEX {_literal(chr(34))} {self._sep}"
            self._rules.append(f"tool{number}: {head} {arguments} {self._end('call')}")
            names.append(f"tool{number}")
        self._rules += [f"call: {' | '.join(names)}", "INDEX: /[1-9][0-9]{0,3}/"]
        self._calls = self._begin("tools") + (" call+ " if parallel else " call ") + self._end("tools")

    def text(self, start: str, *, calls_required: bool, as_json: bool) -> str:
        """The grammar from the token after `close` where thinking ends, or from the response channel's first."""
        content = "content" if as_json else "text"
        body = f"{content} {self._end('response')}"
        if calls_required:
            body = f"text {self._end('response')} {self._calls}"
        elif self._calls:
            body = f"({body} | {self._end('response')} {self._calls})"
        if start == "think":
            body = f"{_literal('think')} {self._sep} {self._begin('response')} {body}"
        return "\n".join(["%llguidance {}", f"start: {body} {self._end('message')}", *self._rules, ""])

    # Tags

    def _begin(self, tag: str) -> str:
        return f"{self._open} {_literal(tag)} {self._sep}"

    def _end(self, tag: str) -> str:
        return f"{self._close} {_literal(tag)} {self._sep}"

    # Arguments

    def _arguments(self, prefix: str, parameters: Any) -> str:
        """The arguments of one call: declared ones in declared order, required ones always, others where open."""
        schema = parameters if isinstance(parameters, Mapping) else {}
        root = schema
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        listed = schema.get("required")
        required = [key for key in listed if isinstance(key, str)] if isinstance(listed, Sequence) else []
        more = schema.get("additionalProperties", not properties)
        parts = []
        for number, key in enumerate([*properties, *(key for key in required if key not in properties)]):
            alternatives = list(self._argument(key, properties.get(key, True), root))
            if not alternatives:
                if key in required:
                    raise RequestError(f"argument {key!r} of a tool can have no value", param="tools")
                continue
            self._rules.append(f"{prefix}_{number}: {' | '.join(alternatives)}")
            parts.append(f"{prefix}_{number}" + ("" if key in required else "?"))
        if more is not False:
            parts.append(self._any_argument() + "*")
        return " ".join(parts) if parts else '""'

    def _argument(self, key: str, schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
        for kind in sorted(_types(schema, root), key=JSON_TYPES.index):
            head = _literal(f'argument key="{escape_attribute(key)}" type="{kind}"')
            value = self._value(kind, _narrow(schema, kind, root))
            yield f"{self._open} {head} {self._sep} {value} {self._end('argument')}"

    def _value(self, kind: str, schema: Any) -> str:
        if kind == "null":
            return _literal("null")
        if kind == "string":
            choices = _choices(schema)
            literals = [_literal(choice) for choice in choices if isinstance(choice, str)]
            return f"({' | '.join(literals)})" if literals else "text"
        # What cannot be compiled still has a type: the call stays well formed, if not always valid.
        return _json_rule(schema if schema == {"type": kind} or self._compiles(schema) else {"type": kind})

    def _compiles(self, schema: Any) -> bool:
        try:
            text = json.dumps(schema)
        except (ValueError, RecursionError):
            return False
        if text not in self._compiled:
            self._compiled[text] = not self._why_not(schema)
        return self._compiled[text]

    def _any_argument(self) -> str:
        """An argument of any name and any type."""
        if not self._any_values:
            self._any_values = True
            key = f"{_literal('argument key=' + chr(34))} KEY"
            alternatives = [
                f"{self._open} {key} {_literal(f'{chr(34)} type={chr(34)}{kind}{chr(34)}')} {self._sep} "
                f"{self._value(kind, {'type': kind})} {self._end('argument')}"
                for kind in JSON_TYPES
            ]
            self._rules += [f"any_argument: {' | '.join(alternatives)}", 'KEY: /([^"&]|&amp;|&quot;){1,200}/']
        return "any_argument"


# JSON schema, as far as arguments need it


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The XTML types a value of this schema may have; all of them where the schema does not say."""
    if schema is False:
        return set()
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return set(JSON_TYPES)
    found = set(JSON_TYPES)
    if "$ref" in schema:
        found &= _types(_resolve(schema["$ref"], root), root, depth + 1)
    named = schema.get("type")
    if named is not None:
        listed = named if isinstance(named, list) else [named]
        found &= {"number" if one == "integer" else one for one in listed if isinstance(one, str)}
    if "enum" in schema or "const" in schema:
        found &= {type_name(choice) for choice in _choices(schema)}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= set().union(*(_types(option, root, depth + 1) for option in schema[key]))
    if isinstance(schema.get("allOf"), list):
        for option in schema["allOf"]:
            found &= _types(option, root, depth + 1)
    return found


def _narrow(schema: Any, kind: str, root: Mapping[str, Any], depth: int = 0) -> Any:
    """The schema for values of one type, complete in itself: references into the root's definitions still hold."""
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return {"type": kind}
    if "$ref" in schema:
        return _narrow(_resolve(schema["$ref"], root), kind, root, depth + 1)
    narrow = dict(schema)
    named = schema.get("type")
    if isinstance(named, list):
        narrow["type"] = "integer" if kind == "number" and "number" not in named else kind
    elif named is None and not any(key in schema for key in ("anyOf", "oneOf", "allOf", "enum", "const")):
        narrow["type"] = kind
    if isinstance(schema.get("enum"), list):
        narrow["enum"] = [choice for choice in schema["enum"] if type_name(choice) == kind]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            options = [option for option in schema[key] if kind in _types(option, root)]
            narrow[key] = [_narrow(option, kind, root, depth + 1) for option in options]
            if len(options) == 1 and len(narrow) == 1:
                return narrow[key][0]
    if depth == 0:
        for key in ("$defs", "definitions"):
            if key in root:
                narrow.setdefault(key, root[key])
    return narrow


def _resolve(reference: Any, root: Mapping[str, Any]) -> Any:
    """The schema a local reference points at; one that allows anything where it points nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    target: Any = root
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or key not in target:
            return True
        target = target[key]
    return target


def _levels(schema: Any) -> int:
    """An upper bound of how deep a compiler recurses that visits every reference's target once on a path."""
    references: set[str] = set()
    depths: dict[int, int] = {}  # by identity: how many containers are nested in this one, itself included
    stack: list[tuple[Any, bool]] = [(schema, False)] if isinstance(schema, (Mapping, list)) else []
    while stack:
        node, children_done = stack.pop()
        children = node.values() if isinstance(node, Mapping) else node
        if children_done:
            depths[id(node)] = 1 + max((depths.get(id(child), 0) for child in children), default=0)
            continue
        if id(node) in depths:
            continue
        if isinstance(node, Mapping) and isinstance(node.get("$ref"), str):
            references.add(node["$ref"])
            if len(references) > MAX_LEVELS:
                return len(references)
        stack.append((node, True))
        stack += [(child, False) for child in children if isinstance(child, (Mapping, list))]
    whole = depths.get(id(schema), 0)
    # What is not resolved here (an anchor, say) may stand for anything in the document.
    return whole + sum(1 + depths.get(id(_resolve(reference, schema)), whole) for reference in references)


def _choices(schema: Any) -> list[Any]:
    """The values a schema lists, if it lists them."""
    if not isinstance(schema, Mapping):
        return []
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else []


# Lark


def _literal(text: str) -> str:
    return json.dumps(text)


def _json_rule(schema: Any) -> str:
    return "%json " + json.dumps(_compact(schema))


def _compact(schema: Any) -> dict[str, Any]:
    return {**(schema if isinstance(schema, Mapping) else {}), "x-guidance": _COMPACT}


def _line(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:400]
