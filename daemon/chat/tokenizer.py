"""Text to token ids and back to bytes: one interface over `tiktoken.model` and `tokenizer.json` checkpoints.

Owns the strict readers of both formats, the table of added (control) tokens, the length cuts that come before
the encoder, and the difference between text mode and markup mode. What the control tokens mean is xtml's and
reply's business. Nothing of a checkpoint is ever executed.

Source of every rule: the chat specification, sections 1.1 to 1.8.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sluice.io.errors import RequestError, SluiceError, StoreError

log = logging.getLogger(__name__)

MAX_RANK_FILE_BYTES = 16 << 20
MAX_RANK_LINE_BYTES = 1 << 10
MAX_RANKS = 1_000_000
MAX_JSON_FILE_BYTES = 128 << 20  # tokenizer.json of a 256k vocabulary with merges is about 35 MB
ADDED_TOKENS = 256  # the checkpoint's embedding has this many rows beyond the ranks, most of them nameless

PART_CHARS = 400_000
RUN_CHARS = 25_000

# The split pattern of the tiktoken checkpoints (specification 1.2), one alternative a line. `&&` is class intersection.
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class Markers(NamedTuple):
    """Ids of the control tokens that XTML is made of, as the checkpoint's own table numbers them."""

    open: int
    close: int
    sep: int
    end_of_msg: int


MARKER_NAMES = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")  # in the order of Markers
EXTRA_STOP_NAMES = ("<|end_of_msg|>", "[EOS]", "[EOT]")  # stops if, and only if, the checkpoint's table has them


class Segment(NamedTuple):
    """A stretch of a prompt that is encoded by itself. `markup`: names of control tokens inside become those
    tokens; otherwise they are ordinary characters."""

    text: str
    markup: bool


class Tokenizer:
    """A vocabulary and its encoder; shared, read-only and safe to use from several threads.

    vocab_size: the model's; every id handed out or accepted is below it. n_ranks: how many ids (from 0) are text
    tokens; for tokenizer.json checkpoints, the size of the model's own vocabulary. control: name -> id of every
    added token. markers: None if the checkpoint's table lacks any of them (it can complete text, not chat).
    stop_ids: what ends a generation, from the checkpoint's own files.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        tokens: Sequence[bytes | None],
        control: Mapping[str, int],
        stop_ids: Iterable[int],
        encode: Callable[[str], Sequence[int]],
        n_ranks: int,
    ) -> None:
        """tokens: bytes by id, None where the id is no text token. encode: ordinary text to ids."""
        self.vocab_size = vocab_size
        self.n_ranks = n_ranks
        self.control = dict(control)
        self.control_names = {token_id: name for name, token_id in self.control.items()}
        self.stop_ids = frozenset(stop_ids)
        self.markers = (
            Markers(*(self.control[name] for name in MARKER_NAMES))
            if all(name in self.control for name in MARKER_NAMES)
            else None
        )
        self._tokens = tokens
        self._encode = encode
        # Longest first, so that of two names that begin at the same place the longer one is meant.
        names = sorted(self.control, key=lambda name: (-len(name), name))
        self._control_pattern = re.compile("|".join(map(re.escape, names))) if names else None

    def encode_text(self, text: str) -> list[int]:
        """Ids of text that a client or a tool wrote: names of control tokens inside stay ordinary characters.

        Releases the GIL for long texts; about 5 MB/s, so texts over 32 KiB belong in a worker thread.
        Raises RequestError for a lone surrogate or a text the encoder cannot take.
        """
        _check_scalars(text)
        ids: list[int] = []
        for part in cut_text(text):
            ids.extend(self._encode_guarded(part))
        return ids

    def encode_markup(self, text: str) -> list[int]:
        """Ids of text that the renderer wrote itself: names of control tokens become those tokens, leftmost match.

        Each stretch between control tokens is a text of its own, and no control token reaches over a length cut.
        """
        known = self.control.get(text)
        if known is not None:
            return [known]
        if self._control_pattern is None:
            return self.encode_text(text)
        _check_scalars(text)
        ids: list[int] = []
        for part in cut_text(text):
            at = 0
            for match in self._control_pattern.finditer(part):
                ids.extend(self._encode_guarded(part[at : match.start()]))
                ids.append(self.control[match.group()])
                at = match.end()
            ids.extend(self._encode_guarded(part[at:]))
        return ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a rendered prompt: every segment encoded alone, in its own mode."""
        ids: list[int] = []
        for text, markup in segments:
            ids.extend(self.encode_markup(text) if markup else self.encode_text(text))
        return ids

    def is_text(self, token_id: int) -> bool:
        """Whether the id stands for bytes of text (False for control tokens, unused and out-of-range ids)."""
        return 0 <= token_id < len(self._tokens) and self._tokens[token_id] is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes; a control token's are its name. Raises IndexError outside [0, vocab_size); ids in the
        model's padding have none."""
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        data = self._tokens[token_id] if token_id < len(self._tokens) else None
        return self.control_names.get(token_id, "").encode() if data is None else data

    def decode(self, ids: Iterable[int]) -> str:
        """The whole text of a sequence, U+FFFD for what is not UTF-8; control tokens decode to their names."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def _encode_guarded(self, text: str) -> Sequence[int]:
        if not text:
            return ()
        try:
            return self._encode(text)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            # A Rust panic arrives as a BaseException that `except Exception` would let through to the event loop.
            raise RequestError(f"text of {len(text)} characters cannot be tokenized: {type(error).__name__}") from error


def load_tokenizer(model_dir: Path, vocab_size: int, *, chat: bool = True) -> Tokenizer:
    """The tokenizer of a checkpoint folder: `tiktoken.model` if it has one, else `tokenizer.json`.

    vocab_size: rows of the model's embedding; an id at or above it is refused. chat: refuse a checkpoint whose table
    lacks an XTML marker; with False such a checkpoint loads with `markers` None, for text completion only.
    Raises StoreError that names the file and what is wrong with it.
    """
    if (model_dir / "tiktoken.model").exists():
        tokenizer = _load_tiktoken(model_dir, vocab_size)
    elif (model_dir / "tokenizer.json").exists():
        tokenizer = _load_tokenizer_json(model_dir, vocab_size)
    else:
        raise StoreError(f"{model_dir}: neither tiktoken.model nor tokenizer.json is there, one of them is needed")
    if chat and tokenizer.markers is None:
        missing = ", ".join(name for name in MARKER_NAMES if name not in tokenizer.control)
        raise StoreError(f"{model_dir}: the table of added tokens lacks {missing}, which chat is written with")
    return tokenizer


# Length cuts


def cut_text(text: str) -> Iterator[str]:
    """The pieces a text is cut into before it is encoded; each border is hard. Joined they are the text.

    Every 400,000 code points, then wherever a run of one class (white space by `str.isspace`, or not) would
    reach 25,001. Source: specification 1.3. The cuts also keep the encoder's regex engine off its stack's end.
    """
    if len(text) <= RUN_CHARS:
        yield text
        return
    for start in range(0, len(text), PART_CHARS):
        part = text[start : start + PART_CHARS]
        if len(part) <= RUN_CHARS or not _may_have_long_run(part):
            yield part
            continue
        at = 0
        for run in re.finditer(r"\s+|\S+", part):  # re's \s for str is exactly str.isspace
            for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
                yield part[at:cut]
                at = cut
        yield part[at:]


def _may_have_long_run(part: str) -> bool:
    """Whether some aligned half-run window is all white space or free of it: a run over the limit must fill one."""
    half = RUN_CHARS // 2
    for start in range(0, len(part) - half + 1, half):
        words = part[start : start + half].split(maxsplit=1)
        if not words or len(words[0]) == half:
            return True
    return False


def _check_scalars(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}") from None


# tiktoken.model and tokenizer_config.json


def parse_ranks(data: bytes, where: str) -> list[bytes]:
    """Token bytes by rank from a `tiktoken.model` file's bytes, `where` naming it in messages.

    Lines are `BASE64 SPACE RANK`, ranks dense from 0 in any order. Raises StoreError for bad base64, an empty or
    repeated token, a repeated or missing rank, a missing single byte, or a limit of specification 1.1 overrun.
    """
    if len(data) > MAX_RANK_FILE_BYTES:
        raise StoreError(f"{where}: {len(data)} bytes, over the limit of {MAX_RANK_FILE_BYTES}")
    by_rank: dict[int, bytes] = {}
    seen: set[bytes] = set()
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line:
            continue
        if len(line) > MAX_RANK_LINE_BYTES:
            raise StoreError(f"{where} line {number}: {len(line)} bytes, over the limit of {MAX_RANK_LINE_BYTES}")
        encoded, _, rank_text = line.partition(b" ")
        if not (rank_text.isdigit() and len(rank_text) <= 7):
            raise StoreError(f"{where} line {number}: rank {rank_text[:40]!r} is not a number below {MAX_RANKS}")
        try:
            token = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise StoreError(f"{where} line {number}: {encoded[:40]!r} is not base64: {error}") from None
        rank = int(rank_text)
        if not token:
            raise StoreError(f"{where} line {number}: the token is empty")
        if token in seen:
            raise StoreError(f"{where} line {number}: token {token[:40]!r} occurs twice")
        if rank in by_rank:
            raise StoreError(f"{where} line {number}: rank {rank} occurs twice")
        seen.add(token)
        by_rank[rank] = token
    if len(by_rank) > MAX_RANKS:
        raise StoreError(f"{where}: {len(by_rank)} ranks, over the limit of {MAX_RANKS}")
    ranks = [by_rank[rank] for rank in range(len(by_rank)) if rank in by_rank]
    if len(ranks) != len(by_rank):
        missing = next(rank for rank in range(len(by_rank)) if rank not in by_rank)
        raise StoreError(f"{where}: rank {missing} is missing")
    absent = [byte for byte in range(256) if bytes([byte]) not in seen]
    if absent:
        raise StoreError(f"{where}: {len(absent)} of the 256 single bytes are no tokens, first 0x{absent[0]:02X}")
    return ranks


def added_tokens(config: object, n_ranks: int, vocab_size: int, where: str) -> dict[str, int]:
    """Name -> id of all added tokens: those of `added_tokens_decoder`, and reserved names in the gaps.

    config: parsed tokenizer_config.json. Nameless ids up to n_ranks + 255 are called `<|reserved_token_ID|>`.
    Raises StoreError for a repeated name, an id outside [n_ranks, vocab_size), or a table of another shape.
    """
    table = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(table, dict):
        raise StoreError(f"{where}: added_tokens_decoder is missing or no object")
    if n_ranks + ADDED_TOKENS > vocab_size:
        raise StoreError(
            f"{where}: {n_ranks} ranks and {ADDED_TOKENS} added tokens do not fit the model's vocabulary, {vocab_size}"
        )
    names: dict[int, str] = {}
    for key, entry in table.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 9):
            raise StoreError(f"{where}: added_tokens_decoder key {key!r} is no token id")
        if not (isinstance(name, str) and 0 < len(name) <= MAX_RANK_LINE_BYTES):
            raise StoreError(f"{where}: added token {key} has no usable content")
        token_id = int(key)
        if not n_ranks <= token_id < vocab_size:
            raise StoreError(f"{where}: added token {name!r} has id {key}, outside {n_ranks}..{vocab_size - 1}")
        if token_id in names:
            raise StoreError(f"{where}: added token id {token_id} occurs twice")
        names[token_id] = name
    for token_id in range(n_ranks, n_ranks + ADDED_TOKENS):
        names.setdefault(token_id, f"<|reserved_token_{token_id}|>")
    control: dict[str, int] = {}
    for token_id, name in sorted(names.items()):
        if name in control:
            raise StoreError(f"{where}: added token name {name!r} occurs twice, as {control[name]} and {token_id}")
        control[name] = token_id
    return control


def _load_tiktoken(model_dir: Path, vocab_size: int) -> Tokenizer:
    import tiktoken

    rank_file, config_file = model_dir / "tiktoken.model", model_dir / "tokenizer_config.json"
    ranks = parse_ranks(_read(rank_file, MAX_RANK_FILE_BYTES), str(rank_file))
    config = _read_json(config_file)
    control = added_tokens(config, len(ranks), vocab_size, str(config_file))
    if max(control.values()) + 1 != vocab_size:
        log.warning("%s: %d tokens, the model has %d", config_file, max(control.values()) + 1, vocab_size)
    try:
        encoding = tiktoken.Encoding(
            model_dir.name,
            pat_str=SPLIT_PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens=control,
        )
    except Exception as error:
        raise StoreError(f"{rank_file}: the encoder refuses this vocabulary: {error}") from error
    return Tokenizer(
        vocab_size=vocab_size,
        tokens=ranks,
        control=control,
        stop_ids=_stop_ids(model_dir, config, control, vocab_size),
        encode=encoding.encode_ordinary,
        n_ranks=len(ranks),
    )


def _stop_ids(model_dir: Path, config: object, control: Mapping[str, int], vocab_size: int) -> set[int]:
    """The union of what the checkpoint's files call an end: they name different tokens, and both occur (3.1)."""
    stops = {control[name] for name in EXTRA_STOP_NAMES if name in control}
    eos = config.get("eos_token") if isinstance(config, dict) else None
    if isinstance(eos, dict):  # the serialised form of an added token
        eos = eos.get("content")
    if isinstance(eos, str) and eos in control:
        stops.add(control[eos])
    for name in ("config.json", "generation_config.json"):
        path = model_dir / name
        if not path.exists():
            continue
        document = _read_json(path)
        value = document.get("eos_token_id") if isinstance(document, dict) else None
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                raise StoreError(f"{path}: eos_token_id {token_id!r} is no id below {vocab_size}")
            stops.add(token_id)
    return stops


# tokenizer.json


def _load_tokenizer_json(model_dir: Path, vocab_size: int) -> Tokenizer:
    """A byte-level `tokenizer.json`. All its added tokens are made special and un-normalised: with the file's own
    flags, some would turn into control tokens out of a client's text (specification 1.7)."""
    import tokenizers

    path = model_dir / "tokenizer.json"
    document = _read_json(path)
    entries = document.get("added_tokens") if isinstance(document, dict) else None
    control: dict[str, int] = {}
    for entry in entries or []:
        name, token_id = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        if not (isinstance(name, str) and name and isinstance(token_id, int) and 0 <= token_id < vocab_size):
            raise StoreError(f"{path}: added token {name!r} has id {token_id!r}, no id below {vocab_size}")
        if name in control or token_id in control.values():
            raise StoreError(f"{path}: added token {name!r} or its id {token_id} occurs twice")
        control[name] = token_id
        entry.update(special=True, normalized=False)
    if not _is_byte_level(document.get("decoder") if isinstance(document, dict) else None):
        raise StoreError(f"{path}: only byte-level tokenizers can be read (decoder ByteLevel)")
    try:
        encoder = tokenizers.Tokenizer.from_str(json.dumps(document, ensure_ascii=False))
    except Exception as error:
        raise StoreError(f"{path}: {error}") from error
    encoder.encode_special_tokens = True  # control tokens come from our own table, in markup mode only
    encoder.no_truncation()
    encoder.no_padding()

    vocabulary = encoder.get_vocab(with_added_tokens=False)
    top = max(vocabulary.values(), default=-1)
    if not 0 <= top < vocab_size:
        raise StoreError(f"{path}: token id {top} is outside the model's vocabulary of {vocab_size}")
    alphabet = _byte_alphabet()
    tokens: list[bytes | None] = [None] * (top + 1)
    for text, token_id in vocabulary.items():
        try:
            tokens[token_id] = bytes(alphabet[character] for character in text)
        except KeyError:
            if text not in control:
                raise StoreError(f"{path}: token {text!r} is not written in the byte alphabet") from None
    for token_id in control.values():
        if token_id <= top:
            tokens[token_id] = None

    config_path = model_dir / "tokenizer_config.json"
    config = _read_json(config_path) if config_path.exists() else {}

    def encode(text: str) -> Sequence[int]:
        # The batch call releases the GIL, the single call holds it for the whole text.
        ids: Sequence[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return Tokenizer(
        vocab_size=vocab_size,
        tokens=tokens,
        control=control,
        stop_ids=_stop_ids(model_dir, config, control, vocab_size),
        encode=encode,
        n_ranks=min([top + 1, *(i for i in control.values() if i > top)]),
    )


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    inner = decoder.get("decoders")
    return decoder.get("type") == "ByteLevel" or (isinstance(inner, list) and any(map(_is_byte_level, inner)))


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level tokenizers write each byte as, back to the byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


# Files


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
    if len(data) > limit:
        raise StoreError(f"{path}: over the limit of {limit} bytes")
    return data


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read(path, MAX_JSON_FILE_BYTES))
    except SluiceError:
        raise
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: not JSON: {error}") from error
