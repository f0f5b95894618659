"""The vocabularies tests run on: the small one that is always there, and K3's own where the shared data is."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from helpers.shared import shared_path

from sluice.daemon.chat.tokenizer import SPLIT_PATTERN, Tokenizer, load_tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
MINI_DIR = GOLDEN / "mini_vocabulary"
MINI_VOCAB = 4096
K3_VOCAB = 163_840
K3_RANKS = 163_584


@functools.cache
def mini() -> Tokenizer:
    """The small tokenizer: 3,840 ranks, 4,096 ids."""
    return load_tokenizer(MINI_DIR, MINI_VOCAB)


@functools.cache
def k3() -> Tokenizer:
    """The tokenizer with K3's own ranks; skips where they are absent. Its table is the small one's, moved up."""
    ranks = shared_path("fixtures/chat/k3/tiktoken.model")
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((MINI_DIR / "tokenizer_config.json").read_text())
        shift = K3_RANKS - 3840
        config["added_tokens_decoder"] = {str(int(k) + shift): v for k, v in config["added_tokens_decoder"].items()}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        (Path(folder) / "tiktoken.model").symlink_to(ranks)
        return load_tokenizer(Path(folder), K3_VOCAB)


def by_name(name: str) -> Tokenizer:
    """The vocabulary that golden data calls `mini` or `k3`."""
    return {"mini": mini, "k3": k3}[name]()


def golden(name: str) -> Any:
    """A JSON file of the chat room's golden data."""
    return json.loads((GOLDEN / "chat" / name).read_text())


def as_tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The same vocabulary as a `tokenizer.json` document, every split of every token as a merge.

    One recovered merge a token, which most converters write, is wrong for vocabularies in general. The flags are
    the checkpoint's own, three markers not special: the loader must not trust them.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    tokens = [tokenizer.token_bytes(rank) for rank in range(tokenizer.n_ranks)]
    known = set(tokens)
    written = {token: "".join(alphabet[b] for b in token) for token in tokens}
    merges = [
        [written[token[:cut]], written[token[cut:]]]
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token_id,
                "content": name,
                "special": name not in ("<|open|>", "<|close|>", "<|sep|>"),
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
            for name, token_id in sorted(tokenizer.control.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {written[token]: rank for rank, token in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": True,
            "fuse_unk": False,
            "byte_fallback": False,
        },
    }
