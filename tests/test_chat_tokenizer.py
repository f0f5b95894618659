"""The tokenizer: both checkpoint formats, both modes, the cuts, and every refusal of the loaders."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from helpers.vocabularies import MINI_DIR, MINI_VOCAB, as_tokenizer_json, by_name, golden, k3, mini
from hypothesis import given
from hypothesis import strategies as st

from sluice.daemon.chat import tokenizer as module
from sluice.daemon.chat.tokenizer import Segment, Tokenizer, added_tokens, cut_text, load_tokenizer, parse_ranks
from sluice.io.errors import RequestError, StoreError

SCALARS = st.text(st.characters(exclude_categories=["Cs"]))


# Golden ids


@pytest.mark.parametrize("vocabulary", ["mini", "k3"])
def test_recorded_texts_have_the_recorded_ids_in_both_modes(vocabulary: str) -> None:
    tokenizer = by_name(vocabulary)
    for case in golden("text_ids.json"):
        text, ids = case["text"], case[vocabulary]
        assert tokenizer.encode_text(text) == ids, text
        assert tokenizer.encode_markup(text) == case.get(f"{vocabulary}_markup", ids), text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("vocabulary", ["mini", "k3"])
def test_very_long_texts_are_cut_where_the_reference_cuts_them(vocabulary: str) -> None:
    tokenizer = by_name(vocabulary)
    for case in golden("long_ids.json"):
        text = "".join(part * times for part, times in case["parts"])
        assert len(text) == case["chars"]
        for key, encode in ((vocabulary, tokenizer.encode_text), (f"{vocabulary}_markup", tokenizer.encode_markup)):
            if key in case:
                ids = encode(text)
                digest = hashlib.sha256(np.array(ids, dtype="<u4").tobytes()).hexdigest()
                assert (len(ids), digest) == (case[key]["count"], case[key]["sha256"]), case["parts"]


def test_names_and_ids_come_from_the_checkpoints_table() -> None:
    tokenizer = k3()
    assert tokenizer.n_ranks == 163_584
    assert tokenizer.markers == (163_587, 163_588, 163_589, 163_586)
    assert tokenizer.stop_ids == {163_585, 163_586, 163_593}
    assert tokenizer.control["<|reserved_token_163592|>"] == 163_592
    assert tokenizer.control["<|media_pad|>"] == 163_605
    assert len(tokenizer.control) == 256
    assert tokenizer.token_bytes(163_587) == b"<|open|>"
    assert not tokenizer.is_text(163_587)
    assert tokenizer.is_text(0)
    assert not tokenizer.is_text(-1)
    with pytest.raises(IndexError, match="163840"):
        tokenizer.token_bytes(163_840)


@pytest.mark.parametrize("name", ["han", "upper", "lower", "lead", "number", "punctuation", "space", "nonspace"])
def test_the_split_patterns_classes_are_those_of_the_recorded_unicode_version(name: str) -> None:
    """An encoding whose pattern is one class, and whose tokens are single bytes, drops what does not match."""
    _check_class(golden("split_classes.json")[name])


def test_contractions_fold_case_as_recorded() -> None:
    _check_class(golden("split_classes.json")["contraction"])


def _check_class(case: dict[str, Any]) -> None:
    encoding = tiktoken.Encoding(
        "class", pat_str=case["pattern"], mergeable_ranks={bytes([b]): b for b in range(256)}, special_tokens={}
    )
    points = [p for p in range(0x110000) if not 0xD800 <= p < 0xE000]
    matched = bytes(encoding.encode_ordinary("".join(map(chr, points)))).decode()
    code = np.frombuffer(matched.encode("utf-32-le"), dtype="<u4")
    assert len(code) == case["count"]
    assert hashlib.sha256(code.tobytes()).hexdigest() == case["sha256"]


def test_white_space_of_the_cutting_rule_is_as_recorded() -> None:
    assert [p for p in range(sys.maxunicode + 1) if chr(p).isspace()] == golden("split_classes.json")["python_isspace"][
        "code_points"
    ]


# Modes


@given(SCALARS)
def test_decoding_what_was_encoded_gives_the_text(text: str) -> None:
    assert mini().decode(mini().encode_text(text)) == text


@given(st.lists(st.one_of(SCALARS, st.sampled_from(sorted(mini().control))), max_size=8).map("".join))
def test_text_mode_never_yields_a_control_token(text: str) -> None:
    assert all(token_id < mini().n_ranks for token_id in mini().encode_text(text))


def test_markup_mode_agrees_with_the_librarys_own_special_tokens() -> None:
    tokenizer = mini()
    encoding = tiktoken.Encoding(
        "mini",
        pat_str=module.SPLIT_PATTERN,
        mergeable_ranks={tokenizer.token_bytes(i): i for i in range(tokenizer.n_ranks)},
        special_tokens=tokenizer.control,
    )
    draw = random.Random(5)
    pieces = [*tokenizer.control, "a", " b", "\n", "<|", "|>", "<|open", "中", " "]
    for _ in range(2000):
        text = "".join(draw.choices(pieces, k=draw.randrange(6)))
        assert tokenizer.encode_markup(text) == encoding.encode(text, allowed_special="all")


def test_segments_are_encoded_each_alone() -> None:
    tokenizer = mini()
    segments = [Segment("a", False), Segment("<|open|>", True), Segment("<|open|>", False), Segment("b", False)]
    ids = tokenizer.encode_segments(segments)
    assert ids.count(tokenizer.control["<|open|>"]) == 1
    assert tokenizer.decode(ids) == "a<|open|><|open|>b"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "中\ud83d"])
def test_a_lone_surrogate_is_refused(text: str) -> None:
    for encode in (mini().encode_text, mini().encode_markup):
        with pytest.raises(RequestError, match="surrogate U\\+D"):
            encode(text)


def test_a_panic_in_the_encoder_is_a_refused_request() -> None:
    """Rust panics derive from BaseException, and would otherwise end the event loop."""

    class Panic(BaseException):
        pass

    def encode(text: str) -> list[int]:
        raise Panic("stack overflow")

    tokenizer = Tokenizer(vocab_size=4, tokens=[b"a"], control={}, stop_ids=(), encode=encode, n_ranks=1)
    with pytest.raises(RequestError, match="Panic"):
        tokenizer.encode_text("aaa")


def test_an_interrupt_passes_through_the_encoders_guard() -> None:
    def encode(text: str) -> list[int]:
        raise KeyboardInterrupt

    tokenizer = Tokenizer(vocab_size=4, tokens=[b"a"], control={}, stop_ids=(), encode=encode, n_ranks=1)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode_text("aaa")


def test_one_tokenizer_serves_many_threads() -> None:
    text = "Hello wörld, 你好 <|open|> 12345\n" * 200
    expected = mini().encode_text(text)
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(mini().encode_text(text))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 8


# Cuts


def cut_plainly(text: str) -> list[str]:
    """The rule as the specification tells it, character by character."""
    pieces = []
    for start in range(0, len(text), module.PART_CHARS):
        part = text[start : start + module.PART_CHARS]
        at, run, space = 0, 0, None
        for index, character in enumerate(part):
            if character.isspace() != space:
                space, run = character.isspace(), 1
            elif run == module.RUN_CHARS:
                pieces.append(part[at:index])
                at, run = index, 1
            else:
                run += 1
        pieces.append(part[at:])
    return pieces


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", " ", "中", "\x1c", "\n", "ab ", "\u3000x"]), st.integers(0, 30)), max_size=12
    )
)
def test_cuts_are_those_of_the_plain_walk(parts: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_CHARS", 64)
        patch.setattr(module, "RUN_CHARS", 10)
        text = "".join(part * times for part, times in parts)
        pieces = list(cut_text(text))
        assert "".join(pieces) == text
        assert [p for p in pieces if p] == [p for p in cut_plainly(text) if p]


def test_a_million_spaces_are_encoded_rather_than_overflow_a_stack() -> None:
    text = " " * 1_200_000 + "x"
    assert mini().decode(mini().encode_text(text)) == text


# The strict loaders


def rank_lines(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens))


BYTES = [bytes([b]) for b in range(256)]


def test_a_rank_file_of_single_bytes_is_read() -> None:
    assert parse_ranks(rank_lines([*BYTES, b"ab"]), "f") == [*BYTES, b"ab"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "256 of the 256 single bytes"),
        (rank_lines(BYTES[:255]), "first 0xFF"),
        (rank_lines(BYTES) + b"!!!! 256\n", "line 257: .* not base64"),
        (rank_lines(BYTES) + b"YWI 256\n", "not base64"),
        (rank_lines(BYTES) + b" 256\n", "empty"),
        (rank_lines(BYTES) + b"YWI=\n", "rank b'' is not a number"),
        (rank_lines(BYTES) + b"YWI= -1\n", "not a number"),
        (rank_lines(BYTES) + b"YWI= 99999999\n", "not a number"),
        (rank_lines(BYTES) + "YWI= \u0663\n".encode(), "not a number"),
        (rank_lines(BYTES) + b"YQ== 256\n", "token b'a' occurs twice"),
        (rank_lines(BYTES) + b"YWI= 255\n", "rank 255 occurs twice"),
        (rank_lines(BYTES) + b"YWI= 257\n", "rank 256 is missing"),
        (rank_lines(BYTES) + b"A" * 2000 + b" 256\n", "over the limit of 1024"),
        (b"\n" * ((16 << 20) + 1), "over the limit of 16777216"),
    ],
)
def test_a_damaged_rank_file_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        parse_ranks(data, "some/tiktoken.model")


def entry(name: object) -> dict[str, object]:
    return {"content": name, "special": False}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "missing or no object"),
        ({}, "missing or no object"),
        ({"added_tokens_decoder": []}, "missing or no object"),
        ({"added_tokens_decoder": {"x": entry("a")}}, "no token id"),
        ({"added_tokens_decoder": {"-1": entry("a")}}, "no token id"),
        ({"added_tokens_decoder": {"9" * 5000: entry("a")}}, "no token id"),
        ({"added_tokens_decoder": {"300": "a"}}, "no usable content"),
        ({"added_tokens_decoder": {"300": entry("")}}, "no usable content"),
        ({"added_tokens_decoder": {"300": entry(7)}}, "no usable content"),
        ({"added_tokens_decoder": {"255": entry("a")}}, "outside 256..599"),
        ({"added_tokens_decoder": {"600": entry("a")}}, "outside 256..599"),
        ({"added_tokens_decoder": {"300": entry("a"), "0300": entry("b")}}, "id 300 occurs twice"),
        ({"added_tokens_decoder": {"300": entry("a"), "301": entry("a")}}, "'a' occurs twice"),
        ({"added_tokens_decoder": {"300": entry("<|reserved_token_301|>")}}, "occurs twice"),
    ],
)
def test_a_damaged_table_of_added_tokens_is_refused(config: object, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        added_tokens(config, 256, 600, "some/tokenizer_config.json")


def test_more_tokens_than_the_model_has_rows_are_refused() -> None:
    with pytest.raises(StoreError, match="do not fit the model's vocabulary, 511"):
        added_tokens({"added_tokens_decoder": {}}, 256, 511, "f")


def test_fewer_tokens_than_the_model_has_rows_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(MINI_DIR, 5000)
    assert "4096 tokens, the model has 5000" in caplog.text
    assert tokenizer.token_bytes(4999) == b""
    assert not tokenizer.is_text(4999)


def copy_mini(folder: Path, change: Any = None) -> Path:
    config = json.loads((MINI_DIR / "tokenizer_config.json").read_text())
    if change:
        change(config)
    (folder / "tiktoken.model").write_bytes((MINI_DIR / "tiktoken.model").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_checkpoint_without_markers_completes_text_but_cannot_chat(tmp_path: Path) -> None:
    copy_mini(tmp_path, lambda config: config["added_tokens_decoder"].pop("3843"))
    with pytest.raises(StoreError, match="lacks <\\|open\\|>"):
        load_tokenizer(tmp_path, MINI_VOCAB)
    tokenizer = load_tokenizer(tmp_path, MINI_VOCAB, chat=False)
    assert tokenizer.markers is None
    assert tokenizer.decode(tokenizer.encode_text("plain")) == "plain"


def test_stop_ids_are_the_union_of_what_the_checkpoints_files_name(tmp_path: Path) -> None:
    copy_mini(tmp_path, lambda config: config.update(eos_token={"content": "[PAD]"}))
    (tmp_path / "config.json").write_text('{"eos_token_id": 3900}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3901, 3842]}')
    assert load_tokenizer(tmp_path, MINI_VOCAB).stop_ids == {3841, 3842, 3849, 3900, 3901, 4095}


@pytest.mark.parametrize("value", [4096, -1, "x", True, [None, 1.5]])
def test_a_stop_id_outside_the_vocabulary_is_refused(tmp_path: Path, value: object) -> None:
    copy_mini(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(StoreError, match="eos_token_id"):
        load_tokenizer(tmp_path, MINI_VOCAB)


def test_absent_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"neither tiktoken\.model nor tokenizer\.json"):
        load_tokenizer(tmp_path, MINI_VOCAB)
    copy_mini(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(StoreError, match=r"tokenizer_config\.json: not JSON"):
        load_tokenizer(tmp_path, MINI_VOCAB)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(StoreError, match="No such file"):
        load_tokenizer(tmp_path, MINI_VOCAB)


# tokenizer.json


def write_tokenizer_json(folder: Path, change: Any = None) -> Path:
    document = as_tokenizer_json(mini())
    if change:
        change(document)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def test_a_tokenizer_json_gives_the_same_tokenizer(tmp_path: Path) -> None:
    other = load_tokenizer(write_tokenizer_json(tmp_path), MINI_VOCAB)
    assert other.markers == mini().markers
    assert other.control == mini().control
    assert other.n_ranks == mini().n_ranks
    assert other.stop_ids == mini().stop_ids
    assert all(other.token_bytes(i) == mini().token_bytes(i) for i in range(MINI_VOCAB))
    assert [other.is_text(i) for i in range(MINI_VOCAB)] == [mini().is_text(i) for i in range(MINI_VOCAB)]
    for case in golden("text_ids.json"):
        assert other.encode_text(case["text"]) == case["mini"]
        assert other.encode_markup(case["text"]) == case.get("mini_markup", case["mini"])


def test_flags_of_a_tokenizer_json_cannot_make_client_text_a_control_token(tmp_path: Path) -> None:
    """`special: false`, as the checkpoint writes it for three markers, makes the library turn a client's marker into
    the control token even in its text mode."""

    def careless(document: dict[str, Any]) -> None:
        for token in document["added_tokens"]:
            token.update(special=False, normalized=True, lstrip=True, rstrip=True)

    other = load_tokenizer(write_tokenizer_json(tmp_path, careless), MINI_VOCAB)
    for name in mini().control:
        assert other.encode_text(f"a {name} b") == mini().encode_text(f"a {name} b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(decoder={"type": "Metaspace"}), "byte-level"),
        (lambda d: d.update(decoder=None), "byte-level"),
        (lambda d: d["added_tokens"].append({"id": 4096, "content": "x"}), "no id below 4096"),
        (lambda d: d["added_tokens"].append({"id": 1, "content": "[BOS]"}), "occurs twice"),
        (lambda d: d["added_tokens"].append("x"), "no id below"),
        (lambda d: d["model"].update(type="Nonsense"), r"tokenizer\.json"),
        (lambda d: d["model"]["vocab"].update(ab=4096), "outside the model's vocabulary"),
        (lambda d: d["model"]["vocab"].update({"中": 4000}), "byte alphabet"),
    ],
)
def test_an_unusable_tokenizer_json_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        load_tokenizer(write_tokenizer_json(tmp_path, change), MINI_VOCAB)
