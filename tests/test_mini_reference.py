"""The mini model that comes along: its files, and sluice's numbers against the PyTorch implementation's.

`tests/golden/mini_reference.*` come from the same run as the checkpoint (`train_mini.py export`): float64 logits by the
recurrence of the specification, computed from exactly the stored weights.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.daemon.chat.tokenizer import load_tokenizer
from sluice.daemon.model import names
from sluice.daemon.model.batch import Segment
from sluice.daemon.model.config import read_config
from sluice.daemon.model.graph import Network
from sluice.io.experts import plan_cache
from sluice.io.service import IoService
from sluice.io.store import Store
from sluice.io.trunk import plan_trunk
from sluice.tools.train.conversations import Request, Turn, render_prompt

MINI = Path(str(resources.files("sluice.tools") / "data" / "mini"))
GOLDEN = Path(__file__).parent / "golden"
RECORD: dict[str, Any] = json.loads((GOLDEN / "mini_reference.json").read_text())
ARRAYS = np.load(GOLDEN / "mini_reference.npz")
LARGEST_BYTES = 24_000_000


@pytest.fixture(scope="module")
def mini() -> Iterator[Network]:
    """The network over the real readers, with a trunk that is streamed and a cache of a few experts."""
    config = read_config(MINI)
    store = Store.open(MINI)
    binding = names.bind(config, store.tensors, pin_routers=True)
    assert binding.experts is not None
    store.declare_experts(binding.experts)
    trunk = plan_trunk(binding.order, store, 2**21, vectors=binding.vectors, row_tables=binding.row_tables)
    with IoService.open(store, trunk, plan_cache(store, 2**21)) as io:
        yield Network(config, io.trunk, io.experts, prefix=binding.prefix)


def logits(net: Network, ids: np.ndarray) -> np.ndarray:
    result = net.forward([Segment(net.new_state(len(ids)), np.ascontiguousarray(ids, np.int32), "all")])
    assert result.failed == {}
    return np.asarray(result.logits[0])


# ---- the numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(20))
def test_a_reference_prompt_gives_the_reference_logits(mini: Network, number: int) -> None:
    entry = RECORD["prompts"][number]
    span = slice(entry["first"], entry["first"] + entry["count"])
    ours = logits(mini, ARRAYS["ids"][span])
    assert np.array_equal(ours.argmax(-1), ARRAYS["argmax"][span])
    first_row = sum(len(e["positions"]) for e in RECORD["prompts"][:number])
    limit = 2e-5 * (entry["high"] - entry["low"])
    for row, position in enumerate(entry["positions"], first_row):
        assert np.abs(ours[position] - ARRAYS["rows"][row]).max() <= limit


def test_there_are_twenty_prompts() -> None:
    assert len(RECORD["prompts"]) == 20
    assert len(ARRAYS["rows"]) == sum(len(e["positions"]) for e in RECORD["prompts"])


def test_perplexity_is_the_trainer_s(mini: Network) -> None:
    lost = 0.0
    for ids in ARRAYS["held_out"]:
        rows = logits(mini, ids[:-1]).astype(np.float64)
        top = rows.max(-1, keepdims=True)
        normal = top[:, 0] + np.log(np.exp(rows - top).sum(-1))
        lost += float((normal - rows[np.arange(len(rows)), ids[1:]]).sum())
    tokens = ARRAYS["held_out"].size - len(ARRAYS["held_out"])
    assert tokens == RECORD["perplexity"]["tokens"]
    assert np.exp(lost / tokens) == pytest.approx(RECORD["perplexity"]["value"], rel=1e-3)


def test_experts_are_used_evenly_but_not_blindly(mini: Network) -> None:
    """Balancing leaves no expert idle, and neighbouring tokens still share more than chance."""
    seen: list[np.ndarray] = []
    config = read_config(MINI)
    store = Store.open(MINI)
    binding = names.bind(config, store.tensors)
    assert binding.experts is not None
    store.declare_experts(binding.experts)
    trunk = plan_trunk(binding.order, store, 2**30, vectors=binding.vectors, row_tables=binding.row_tables)
    with IoService.open(store, trunk, plan_cache(store, 2**30)) as io:
        net = Network(
            config, io.trunk, io.experts, prefix=binding.prefix, on_route=lambda _, ids: seen.append(ids.copy())
        )
        for ids in ARRAYS["held_out"]:
            logits(net, ids)
    rows = np.concatenate([np.stack(seen[i : i + 12]) for i in range(0, len(seen), 12)], axis=1)  # (12, tokens, k)
    used = [len(np.unique(layer)) for layer in rows]
    assert min(used) >= 0.9 * config.num_experts
    shared = np.mean([(rows[:, 1:, i, None] == rows[:, :-1]).any(-1) for i in range(rows.shape[2])])
    assert shared > 1.5 * config.num_experts_per_token / config.num_experts


# ---- the files ---------------------------------------------------------------------------------------------------


def header(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    assert length % 8 == 0
    out: dict[str, Any] = json.loads(data[8 : 8 + length])
    assert max(t["data_offsets"][1] for t in out.values()) == len(data) - 8 - length
    return out


def test_the_checkpoint_is_small_and_whole() -> None:
    files = list(MINI.iterdir())
    assert sum(f.stat().st_size for f in files) <= LARGEST_BYTES
    assert {"README.md", "config.json", "generation_config.json", "loss.svg", "model.safetensors.index.json"} <= {
        f.name for f in files
    }
    index = json.loads((MINI / "model.safetensors.index.json").read_text())
    shards = sorted(MINI.glob("model-*.safetensors"))
    assert len(shards) == 14
    listed = {name: f.name for f in shards for name in header(f)}
    assert index["weight_map"] == listed
    total = sum(t["data_offsets"][1] - t["data_offsets"][0] for f in shards for t in header(f).values())
    assert index["metadata"]["total_size"] == total


def test_shards_follow_the_layout_rule() -> None:
    """Sorted by dtype F32, BF16, U8 and then by name, without gaps; layer L alone in shard L + 1."""
    order = {"F32": 0, "BF16": 1, "U8": 2}
    for number, file in enumerate(sorted(MINI.glob("model-*.safetensors"))):
        tensors = header(file)
        keys = [(order[t["dtype"]], name.encode()) for name, t in tensors.items()]
        assert keys == sorted(keys)
        at = 0
        for t in tensors.values():
            assert t["data_offsets"][0] == at
            at = t["data_offsets"][1]
        assert all((f"layers.{number}." in name) == (number < 13) for name in tensors)


def test_configuration_and_tensors_agree() -> None:
    config = read_config(MINI)
    binding = names.bind(config, Store.open(MINI).tensors)
    assert binding.prefix == "language_model."
    assert binding.experts is not None


def test_the_tokenizer_has_k3_s_names_at_k3_s_offsets() -> None:
    config = read_config(MINI)
    tokenizer = load_tokenizer(MINI, config.vocab_size)
    assert 2000 <= tokenizer.n_ranks <= 4000
    assert tokenizer.n_ranks + 256 == config.vocab_size
    offsets = {"[BOS]": 0, "[EOS]": 1, "<|end_of_msg|>": 2, "<|open|>": 3, "<|close|>": 4, "<|sep|>": 5, "[PAD]": 255}
    assert {name: tokenizer.control[name] - tokenizer.n_ranks for name in offsets} == offsets
    assert tokenizer.stop_ids >= {tokenizer.control["<|end_of_msg|>"], tokenizer.control["[EOS]"]}
    for text in ("The capital of France is Paris.", "naïve café 你好 🙂", "\x00\xff  \r\n\t"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_text(text))).decode() == text


def test_it_knows_what_it_was_taught(mini: Network) -> None:
    """Greedy, through thinking and response: what the demo asks, and something of each kind the card has at 100%."""
    tokenizer = load_tokenizer(MINI, read_config(MINI).vocab_size)
    for question, answer in (
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is 2 + 3?", "2 + 3 = 5."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("Who are you?", "I am a small language model"),
    ):
        segments = render_prompt(Request([Turn(question, "", "")]))
        ids = [i for s in segments for i in (tokenizer.encode_markup if s.markup else tokenizer.encode_text)(s.text)]
        state, said = mini.new_state(len(ids) + 64), []
        while not said or (said[-1] not in tokenizer.stop_ids and len(said) < 64):
            result = mini.forward([Segment(state, np.array(said[-1:] or ids, np.int32), "last")])
            said.append(int(np.asarray(result.logits[0]).argmax()))
        assert answer in tokenizer.decode(said), (question, tokenizer.decode(said))


def test_training_encoded_prompts_as_the_daemon_does() -> None:
    tokenizer = load_tokenizer(MINI, read_config(MINI).vocab_size)
    segments = render_prompt(Request([Turn("What is the capital of France?", "", "")]))
    ids = [i for s in segments for i in (tokenizer.encode_markup if s.markup else tokenizer.encode_text)(s.text)]
    entry = RECORD["prompts"][0]
    assert entry["name"] == "capital, defaults"
    assert ARRAYS["ids"][: entry["count"]].tolist() == ids
