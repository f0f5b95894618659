"""Free text from Debian packages, and the token rows training reads.

Owns which packages are read and how they are cut into paragraphs, the tokenizer trained on the same text, and the
packing of documents into rows. Every package is named in the model card with its licence.
"""

from __future__ import annotations

import base64
import gzip
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .conversations import CLOSE, END, OPEN, SEP, Segment, conversation, question_lines, render, running_text

PACKAGES = {
    "bible-kjv": "the reader of bible-kjv-text (GPL-2+; run, not read)",
    "bible-kjv-text": "the King James Bible (public domain; package GPL-2+)",
    "fortunes": "short quotations (BSD-style collection licence)",
    "fortunes-min": "short quotations (BSD-style collection licence)",
    "wordnet-base": "glosses of WordNet 3.0 (WordNet licence, permissive)",
    "debian-faq": "the Debian FAQ (GPL-2+)",
}
REPEATED = 0.5  # loss weight of an echo's repetitions
FORTUNES = ("literature", "riddles", "wisdom", "tao", "platitudes", "kids", "love", "people", "science", "art", "work")

PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)  # the pre-tokeniser of the specification, section 1.2

ADDED = {
    0: "[BOS]", 1: "[EOS]", 2: END, 3: OPEN, 4: CLOSE, 5: SEP, 6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]",
    18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>", 65: "<osagent_mode>",
    254: "[UNK]", 255: "[PAD]",
}  # fmt: skip  # offset from the number of ranks: section 1.1


def unpack(folder: Path) -> Path:
    """Download the packages' `.deb` files into `folder` (once) and unpack them; returns the root of their files."""
    folder.mkdir(parents=True, exist_ok=True)
    root = folder / "root"
    if not root.exists():
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
        root.mkdir()
        for package in sorted(folder.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
    return root


def bible(root: Path) -> list[str]:
    """The verses in their order, without numbers."""
    program = [str(root / "usr/bin/bible"), "-p", str(root / "usr/lib"), "-l4000", "gen1:1-rev22:21"]
    raw = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    verses = (re.match(r" *\d+ (.+)", line) for line in raw.splitlines())
    return [" ".join(v[1].split()) for v in verses if v]


def fortunes(root: Path) -> list[str]:
    """The fortunes of the chosen files that read as plain prose."""
    out = []
    for name in FORTUNES:
        path = root / "usr/share/games/fortunes" / name
        if path.exists():
            for piece in path.read_text("utf-8", errors="replace").split("\n%\n"):
                text = re.sub(r"[ \t]+", " ", piece).strip()
                text = re.sub(r" ?\n ?", "\n", text)
                if 30 < len(text) < 600 and text.isascii():
                    out.append(text)
    return out


def glosses(root: Path) -> list[str]:
    """WordNet's short noun definitions as sentences of the form 'A word is ...'."""
    out = []
    for line in (root / "usr/share/wordnet/data.noun").read_text("utf-8").splitlines():
        if line.startswith(" ") or "|" not in line:
            continue
        head, gloss = line.split("|", 1)
        word = head.split()[4].replace("_", " ")
        gloss = gloss.split(";")[0].strip()
        if (
            word.isalpha()
            and word.islower()
            and 3 <= len(word) <= 8
            and 20 < len(gloss) < 70
            and gloss.startswith(("a ", "an ", "the "))
        ):
            article = "An" if word[0] in "aeiou" else "A"
            out.append(f"{article} {word} is {gloss}.")
    return out


def faq(root: Path) -> list[str]:
    """Paragraphs of the Debian FAQ."""
    text = gzip.decompress((root / "usr/share/doc/debian/FAQ/debian-faq.en.txt.gz").read_bytes()).decode(
        "utf-8", "replace"
    )
    pieces = (re.sub(r"\s+", " ", p).strip() for p in text.split("\n\n"))
    return [p for p in pieces if 80 < len(p) < 900 and p.isascii() and "...." not in p]


class Texts:
    """The free texts by name, and a held-out tail of each that training never sees."""

    def __init__(self, root: Path) -> None:
        self.train: dict[str, list[str]] = {}
        self.held: dict[str, list[str]] = {}
        verses = bible(root)
        self.sizes: dict[str, int] = {}
        for name, items in (
            ("bible", verses),
            ("fortunes", fortunes(root)),
            ("glosses", glosses(root)),
            ("faq", faq(root)),
        ):
            if not items:
                raise RuntimeError(f"no text of {name!r} under the unpacked packages")
            if name != "bible":  # verses follow one another; the rest is shuffled so that the tail is like the head
                random.Random(7).shuffle(items)
            cut = len(items) * 98 // 100
            self.train[name], self.held[name] = items[:cut], items[cut:]
            self.sizes[name] = sum(map(len, items))

    def document(self, r: random.Random) -> str:
        """One stretch of free text."""
        name = r.choices(["bible", "fortunes", "glosses", "faq"], [0.5, 0.2, 0.2, 0.1])[0]
        items = self.train[name]
        i = r.randrange(len(items))
        n = {"bible": 6, "glosses": 5}.get(name, 1)
        return (" " if name in ("bible", "glosses") else "\n").join(items[i : i + n])


def train_tokenizer(texts: Texts, ranks: int, seed: int) -> list[bytes]:
    """Byte-level BPE on the mixture the model is trained on; returns the tokens in rank order, 256 bytes first."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    r = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=ranks, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )

    def pieces() -> Iterator[str]:
        for _ in range(6000):
            yield from (s.text for s in render(conversation(r)) if not s.markup)
            yield running_text(r)
            yield texts.document(r)

    tokenizer.train_from_iterator(pieces(), trainer)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    to_byte = {c: b for b, c in _byte_letters().items()}
    tokens = [bytes(to_byte[c] for c in name) for name, _ in vocabulary]
    if len(tokens) != ranks or tokens[:256] != [bytes([b]) for b in _byte_letters()]:
        raise RuntimeError(f"the trainer gave {len(tokens)} tokens, or not the 256 bytes first")
    return tokens


def _byte_letters() -> dict[int, str]:
    """GPT-2's byte alphabet in its own order: printable bytes first, then the other 68."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


def tiktoken_lines(tokens: list[bytes]) -> str:
    """The `tiktoken.model` file."""
    return "".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens))


def added_names(ranks: int) -> dict[int, str]:
    """All 256 added tokens by id."""
    return {ranks + i: ADDED.get(i, f"<|reserved_token_{ranks + i}|>") for i in range(256)}


class Codec:
    """Text and segments to ids, with tiktoken."""

    def __init__(self, tokens: list[bytes]) -> None:
        import tiktoken

        self.ranks = len(tokens)
        self.special = {name: i for i, name in added_names(self.ranks).items()}
        self.encoding = tiktoken.Encoding(
            "mini", pat_str=PATTERN, mergeable_ranks={t: i for i, t in enumerate(tokens)}, special_tokens=self.special
        )
        self._memo: dict[str, list[int]] = {}

    def text(self, text: str) -> list[int]:
        """Ordinary text."""
        return self.encoding.encode_ordinary(text)

    def segments(self, segments: list[Segment]) -> tuple[list[int], list[float]]:
        """Ids and loss weights of a rendering, each segment encoded alone."""
        ids: list[int] = []
        weights: list[float] = []
        for s in segments:
            if s.markup:
                piece = [self.special[s.text]]
            else:
                if s.text not in self._memo:
                    if len(self._memo) > 200_000:
                        self._memo.clear()
                    self._memo[s.text] = self.text(s.text)
                piece = self._memo[s.text]
            ids += piece
            weights += [s.weight] * len(piece)
        return ids, weights

    def show(self, ids: list[int]) -> str:
        """For reading: everything, control tokens by name."""
        return self.encoding.decode(ids)


def echo(r: random.Random, ranks: int) -> tuple[list[int], list[float]]:
    """Random tokens, repeated: nothing teaches a model faster to look back, which every answer needs."""
    once = [r.randrange(256, ranks) for _ in range(r.randint(4, 20))]
    times = r.randint(3, 6)
    return once * times, [0.0] * len(once) + [REPEATED] * (len(once) * (times - 1))


def rows(codec: Codec, texts: Texts, r: random.Random, length: int) -> Iterator[tuple[list[int], list[float]]]:
    """Endless rows of `length` + 1 ids; every row begins with a whole document, the last one is cut."""
    end = codec.special["[EOS]"]
    while True:
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) <= length:
            kind = r.random()
            if kind < 0.45:
                more, weight = codec.segments(render(conversation(r)))
            elif kind < 0.57:
                more, weight = echo(r, codec.ranks)
            else:
                make = question_lines if kind < 0.83 else running_text if kind < 0.87 else texts.document
                more = [*codec.text(make(r)), end]
                weight = [0.9] * len(more)
            ids += more
            weights += weight
        yield ids[: length + 1], weights[: length + 1]
