"""`sluice synth`: the values, the vocabulary, what lies on disk when, and the full-size mock."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.shared import shared_path
from typer.testing import CliRunner

from sluice.io.errors import InstanceHeld, PresetError
from sluice.tools import mini
from sluice.tools.layout import FULL_K3, Shape, Tensor
from sluice.tools.mini import PRESETS, chosen_shape, held, make, rank_file, tokenizer_config, values

TINY = replace(PRESETS["k3"]["tiny"], layers=4, full_attention=(3,), block=2, experts=4, top_k=2)


def digest(folder: Path) -> str:
    """SHA-256 over names and contents."""
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def array(shape: Shape, tensor: Tensor, seed: int = 0) -> np.ndarray:
    """One tensor's values; bytes for U8."""
    data = b"".join(bytes(block) for block in values(shape, tensor, seed))
    assert len(data) == tensor.nbytes
    if tensor.dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    return np.frombuffer(data, {"F32": "<f4", "U8": "u1"}[tensor.dtype]).reshape(tensor.shape)


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_shape_and_a_seed_give_the_same_files_on_every_machine(tmp_path: Path) -> None:
    make(tmp_path / "a", TINY, seed=7)
    # Recorded 2026-11-29 on x86-64 with numpy 2.4; a change here is a change of every made checkpoint.
    assert digest(tmp_path / "a") == "c71d6a91d2ca12cc2e7ca6a0cfb025a3dd35f8d3cce6867de9dfabe9ee08ae0a"
    make(tmp_path / "b", TINY, seed=8)
    assert digest(tmp_path / "b") != digest(tmp_path / "a")


def test_a_tensor_does_not_depend_on_what_else_the_checkpoint_holds() -> None:
    tensor = Tensor("language_model.model.layers.1.self_attn.q_proj.weight", "BF16", (64, 64))
    assert np.array_equal(array(TINY, tensor), array(PRESETS["k3"]["demo"], tensor))


@pytest.mark.parametrize("count", [1, 3, 4, mini.BLOCK_ITEMS - 1, mini.BLOCK_ITEMS, mini.BLOCK_ITEMS + 5])
@pytest.mark.parametrize(("name", "dtype"), [("a.q_proj.weight", "BF16"), ("a.dt_bias", "F32"), ("w1.x_packed", "U8")])
def test_a_tensor_has_all_its_bytes_astride_every_block(name: str, dtype: str, count: int) -> None:
    array(TINY, Tensor(name, dtype, (count,)))


def test_matrices_keep_the_size_of_what_they_multiply() -> None:
    matrix = array(FULL_K3, Tensor("layers.0.self_attn.q_proj.weight", "BF16", (256, 7168)))
    assert np.sqrt(np.mean(matrix.astype(np.float64) ** 2)) == pytest.approx(1 / math.sqrt(7168), rel=0.01)
    norm = array(FULL_K3, Tensor("layers.0.input_layernorm.weight", "BF16", (7168,)))
    assert norm.mean() == pytest.approx(1, abs=0.01)
    assert 0.05 < norm.std() < 0.2
    proj = array(FULL_K3, Tensor("layers.0.mlp_res_proj.weight", "BF16", (1, 7168)))
    assert proj.std() == pytest.approx(2 / math.sqrt(7168), rel=0.05)


@pytest.mark.parametrize("columns", [3072, 3584, 32])
def test_experts_are_scaled_by_bytes_the_release_would_use(columns: int) -> None:
    scale = array(FULL_K3, Tensor("experts.0.w2.weight_scale", "U8", (512, columns // 32)))
    packed = array(FULL_K3, Tensor("experts.0.w2.weight_packed", "U8", (512, columns // 2)))
    assert 105 <= scale.min() <= scale.max() <= 125
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2)
    squares = (e2m1[packed & 15] ** 2 + e2m1[packed >> 4] ** 2).reshape(512, -1, 16).sum(-1)
    rms = math.sqrt((squares * 4.0 ** (scale.astype(float) - 127)).sum() / (512 * columns))
    assert 0.6 < rms / (0.5 / math.sqrt(columns)) < 1.7


@pytest.mark.parametrize("family", ["k3", "kimi-linear"])
def test_decays_spread_and_what_lies_past_the_heads_is_zero(family: str) -> None:
    shape = PRESETS[family]["full"]
    size = (128,) if family == "k3" else (1, 1, 32, 1)
    a_log = array(shape, Tensor("self_attn.A_log", "F32", size)).ravel()
    bias = array(shape, Tensor("self_attn.dt_bias", "F32", (shape.kda_width,))).reshape(shape.kda_heads, -1)
    assert not a_log[shape.kda_heads :].any()
    assert a_log[: shape.kda_heads].all()
    z = np.exp(a_log[: shape.kda_heads, None]) * bias
    decay = (
        np.exp(-5 / (1 + np.exp(-z))) if family == "k3" else np.exp(-np.exp(a_log[:32, None]) * np.log1p(np.exp(bias)))
    )
    low, middle, high = np.percentile(decay, [5, 50, 95])
    assert 0.05 < low < 0.4
    assert 0.5 < middle < 0.97
    assert 0.97 < high < 1


# --- vocabulary -------------------------------------------------------------------------------------------------------


def test_the_vocabulary_of_4096_is_the_projects_own() -> None:
    fixture = shared_path("fixtures/chat")
    assert rank_file(4096) == (fixture / "mini_tiktoken.model").read_bytes()
    assert tokenizer_config(4096) == json.loads((fixture / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("vocab", [512, 1000, 4096, 5000, 163840])
def test_text_goes_in_and_out_of_every_vocabulary(tmp_path: Path, vocab: int) -> None:
    from sluice.daemon.chat.tokenizer import load_tokenizer

    ranks = rank_file(vocab)
    assert ranks is not None
    (tmp_path / "tiktoken.model").write_bytes(ranks)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(vocab)))
    tokenizer = load_tokenizer(tmp_path, vocab)
    text = "The capital of France is Paris, naïve 北京 baba."
    ids = tokenizer.encode_text(text)
    assert b"".join(tokenizer.token_bytes(number) for number in ids).decode() == text
    assert vocab - 256 + 2 in tokenizer.stop_ids


def test_a_vocabulary_without_room_for_single_bytes_has_no_tokenizer(tmp_path: Path) -> None:
    assert rank_file(511) is None
    make(tmp_path / "a", replace(TINY, vocab=256))
    assert not (tmp_path / "a" / "tiktoken.model").exists()
    assert json.loads((tmp_path / "a" / "config.json").read_text())["text_config"]["eos_token_id"] == 2


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["k3", "kimi-linear"])
def test_our_store_and_the_safetensors_library_read_what_was_made(tmp_path: Path, family: str) -> None:
    import safetensors

    from sluice.daemon.model.config import read_config
    from sluice.daemon.model.names import check_tensors
    from sluice.io.store import Store

    shape = chosen_shape(family, "tiny", {"experts": 4, "top_k": 2})
    made = make(tmp_path / "model", shape)
    store = Store.open(tmp_path / "model")
    assert check_tensors(read_config(tmp_path / "model"), store.tensors) == shape.prefix
    assert len(store.tensors) == made.tensors
    names = set()
    for path in (tmp_path / "model").glob("*.safetensors"):
        with safetensors.safe_open(path, framework="numpy") as file:
            names |= set(file.keys())
            a_log = next((name for name in file.keys() if name.endswith("A_log")), None)  # noqa: SIM118  no iterator
            if a_log is not None:
                assert np.isfinite(file.get_tensor(a_log)).all()
    assert names == set(store.tensors)


def test_a_run_that_was_killed_is_taken_up_and_ends_in_the_same_bytes(tmp_path: Path) -> None:
    make(tmp_path / "whole", TINY)

    def killed_at(limit: int) -> None:
        def advance(done: int, total: int) -> None:
            if done > limit:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "killed", TINY, advance=advance)

    for limit in (0, 50_000, 150_000):
        killed_at(limit)
        assert not (tmp_path / "killed").exists()
    kept = list((tmp_path / ".killed.partial").glob("*.safetensors"))
    before = {path.name: path.stat().st_mtime_ns for path in kept}
    assert before
    make(tmp_path / "killed", TINY)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    assert all((tmp_path / "killed" / name).stat().st_mtime_ns == when for name, when in before.items())
    assert not (tmp_path / ".killed.partial").exists()


def test_what_an_ended_run_of_another_shape_left_is_not_used(tmp_path: Path) -> None:
    def advance(done: int, total: int) -> None:
        if done > 150_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "a", TINY, seed=1, advance=advance)
    make(tmp_path / "a", TINY, seed=2)
    make(tmp_path / "b", TINY, seed=2)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_making_it_again_touches_nothing(tmp_path: Path) -> None:
    first = make(tmp_path / "a", TINY)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    again = make(tmp_path / "a", TINY)
    assert (first.already, again.already) == (False, True)
    assert again.nbytes == first.nbytes
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()} == stamps


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path / "a", TINY)
    with pytest.raises(PresetError, match="holds something else"):
        make(tmp_path / "a", replace(TINY, hidden=96))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PresetError, match="holds something else"):
        make(tmp_path / "file", TINY)
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert make(tmp_path / "empty", TINY).files


def test_two_runs_into_one_folder_do_not_mix(tmp_path: Path) -> None:
    with held(tmp_path / ".a.partial"), pytest.raises(InstanceHeld, match="another process"):
        make(tmp_path / "a", TINY)
    make(tmp_path / "a", TINY)


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(PresetError, match="1,000 bytes free"):
        make(tmp_path / "a", TINY)
    assert not list(tmp_path.rglob("*.safetensors*"))


def test_the_command_says_what_it_made_and_refuses_in_one_line(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(mini.synth)
    run = CliRunner().invoke
    made = run(app, [str(tmp_path / "a"), "--preset", "tiny", "--layers", "5", "--experts", "4", "--json"])
    assert made.exit_code == 0, made.output
    report = json.loads(made.output)
    assert report["files"] == 6 + 5
    text = json.loads((tmp_path / "a" / "config.json").read_text())["text_config"]
    assert text["linear_attn_config"]["full_attn_layers"] == [4, 5]
    refused = run(app, [str(tmp_path / "b"), "--preset", "huge"])
    assert isinstance(refused.exception, PresetError)
    assert "tiny, demo, wide, full" in str(refused.exception)


# --- the mock ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("mock") / "k3"
    made = make(folder, FULL_K3, mock=True)
    assert made.tensors == 497_220
    assert made.disk_bytes < 200e6
    yield folder
    shutil.rmtree(folder)  # 139 MB that no later test needs


def test_the_mock_has_every_published_size_and_header(mock: Path) -> None:
    with shared_path("spec/k3_shards.tsv").open() as table:
        rows = list(csv.DictReader(table, delimiter="\t"))
    assert len(rows) == 96
    for row in rows:
        path = mock / row["filename"]
        assert path.stat().st_size == int(row["bytes"]), row
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
        assert length == int(row["header_len"]), row
        assert len(entries) == int(row["tensors"]), row
        experts = [entry["data_offsets"][0] for name, entry in entries.items() if ".experts." in name]
        if row["expert0_offset"] != "-":
            assert 8 + length + experts[0] == int(row["expert0_offset"]), row
            assert experts[0] == int(row["non_expert_bytes"]), row
            assert experts[6] - experts[0] == 17_547_264


def test_the_mock_is_as_large_as_the_release(mock: Path) -> None:
    shards = list(mock.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in shards) == 1_560_936_091_448
    index = (mock / "model.safetensors.index.json").read_bytes()
    assert len(index) == 59_764_096
    parsed = json.loads(index)
    assert parsed["metadata"]["total_size"] == 1_560_860_324_864
    assert len(parsed["weight_map"]) == 497_220
