"""`sluice synth`: checkpoints made from a seed, with the real tensor graph and the real file layout.

Owns the values (a well-conditioned random net), the vocabulary that goes with them, and how the files come to lie on
disk; names, shapes and bytes are `layout.py`'s. Everything is written as a stream of small blocks, so a checkpoint
larger than memory needs little of it. The files of a shape and seed are the same on every machine.
"""

from __future__ import annotations

import base64
import fcntl
import json
import math
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from sluice.io.errors import InstanceHeld, PresetError
from sluice.tools.layout import (
    ADDED_TOKENS,
    FULL_K3,
    FULL_KIMI_LINEAR,
    MXFP4_GROUP,
    Shape,
    Shard,
    Tensor,
    config,
    every_fourth,
    index_text,
    recipe,
    shards,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK_ITEMS = 1 << 17  # a quarter MiB of random bits a block: the passes over it stay in the second-level cache
RECIPE_FILE = "sluice_synth.json"
INDEX_FILE = "model.safetensors.index.json"
RANK_FILE = Path(__file__).parent / "data" / "mini_tiktoken.model"

# --- shapes -----------------------------------------------------------------------------------------------------------

# Thirteen layers in blocks of three or four: AttnRes mistakes show only with two full blocks and a part of one.
PRESETS: dict[str, dict[str, Shape]] = {
    "k3": {
        "tiny": replace(
            FULL_K3,
            hidden=64,
            layers=13,
            vocab=512,
            full_attention=every_fourth(13),
            kda_heads=4,
            kda_dim=16,
            heads=4,
            nope=16,
            rope=8,
            v_dim=16,
            q_rank=32,
            kv_rank=32,
            experts=16,
            top_k=4,
            inner=32,
            latent=32,
            dense_inner=96,
            block=3,
            vision=False,
        ),
        "demo": replace(
            FULL_K3,
            hidden=512,
            layers=13,
            vocab=4096,
            full_attention=every_fourth(13),
            kda_heads=8,
            kda_dim=64,
            heads=8,
            nope=64,
            rope=32,
            v_dim=64,
            q_rank=192,
            kv_rank=128,
            experts=64,
            top_k=8,
            inner=256,
            latent=256,
            dense_inner=1536,
            block=4,
            vision=False,
        ),
        "wide": replace(FULL_K3, layers=5, full_attention=every_fourth(5), experts=48, block=2, vision=False),
        "full": FULL_K3,
    },
    "kimi-linear": {
        "tiny": replace(
            FULL_KIMI_LINEAR,
            hidden=64,
            layers=9,
            vocab=512,
            full_attention=every_fourth(9),
            kda_heads=4,
            kda_dim=16,
            heads=4,
            nope=16,
            rope=8,
            v_dim=16,
            kv_rank=32,
            experts=16,
            top_k=4,
            inner=32,
            dense_inner=96,
        ),
        "demo": replace(
            FULL_KIMI_LINEAR,
            hidden=512,
            layers=9,
            vocab=4096,
            full_attention=every_fourth(9),
            kda_heads=8,
            kda_dim=64,
            heads=8,
            nope=64,
            rope=32,
            v_dim=64,
            kv_rank=128,
            experts=64,
            top_k=8,
            inner=128,
            dense_inner=1536,
        ),
        "wide": replace(FULL_KIMI_LINEAR, layers=5, full_attention=every_fourth(5), experts=32),
        "full": FULL_KIMI_LINEAR,
    },
}


def chosen_shape(family: str, preset: str, changes: dict[str, Any]) -> Shape:
    """The preset's shape with `changes` (None = as the preset has it). Raises PresetError naming what is wrong."""
    if family not in PRESETS:
        raise PresetError(f"family {family!r} is unknown; there are: {', '.join(PRESETS)}")
    if preset not in PRESETS[family]:
        raise PresetError(f"preset {preset!r} is unknown; there are: {', '.join(PRESETS[family])}")
    wanted = {name: value for name, value in changes.items() if value is not None}
    if "layers" in wanted and "full_attention" not in wanted and wanted["layers"] > 0:
        wanted["full_attention"] = every_fourth(wanted["layers"])
    return replace(PRESETS[family][preset], **wanted)


# --- values -----------------------------------------------------------------------------------------------------------

Raw = Callable[[int], "NDArray[np.uint64]"]

# Root mean square of a uniformly random E2M1 nibble: {0, .5, 1, 1.5, 2, 3, 4, 6} with either sign.
NIBBLE_RMS = math.sqrt(68.5 / 8)
# How far a group's scale byte lies from its matrix's centre, by the value of a random byte: mostly within one, with
# a tail, as the released experts have it (bytes 110..123).
SCALE_STEPS = [-9] * 2 + [-6] * 6 + [-3] * 24 + [-2] * 32 + [-1] * 64 + [0] * 64 + [1] * 56 + [2] * 8
SCALE_SPREAD = math.sqrt(sum(4.0**step for step in SCALE_STEPS) / len(SCALE_STEPS))


def raw_bits(seed: int, name: str) -> Raw:
    """Random 64-bit words of one tensor. The stream of SFC64 is fixed by numpy's promise, so files are reproducible;
    a stream of its own for each name makes a tensor independent of what else the checkpoint holds."""
    import numpy as np

    return np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(name.encode())])).random_raw


def uniform(raw: Raw, count: int, rms: float, dtype: str, centre: float = 0.0) -> Iterator[memoryview]:
    """`count` items of uniform distribution around `centre`, as little-endian BF16 or F32 blocks.

    One exact conversion, one multiplication and one addition in float32 each: the same bits everywhere. A block is
    valid until the next is asked for.
    """
    import numpy as np

    step, middle = np.float32(rms * math.sqrt(3.0) / 32768), np.float32(centre)
    # One set of buffers for the whole tensor: fresh ones would cost a page fault for every 4 KiB of file.
    room = min(count, BLOCK_ITEMS)
    floats, halves = np.empty(room, np.float32), np.empty(room, "<u2")
    for start in range(0, count, BLOCK_ITEMS):
        items = min(BLOCK_ITEMS, count - start)
        block = floats[:items]
        np.multiply(raw(-(-items // 4)).view("<i2")[:items], step, out=block, casting="unsafe", dtype=np.float32)
        block += middle
        if dtype == "F32":
            yield block.data.cast("B")
            continue
        bits = block.view(np.uint32)
        bits += np.uint32(0x8000)  # to nearest; what overflows the mantissa moves the exponent, as it must
        # Little-endian: the upper half of each item is the second of its two 16-bit words.
        np.copyto(halves[:items], block.view("<u2")[1::2])
        yield halves[:items].data.cast("B")


def nibbles(raw: Raw, count: int) -> Iterator[memoryview]:
    """`count` packed bytes, every nibble equally likely."""
    for start in range(0, count, 2 * BLOCK_ITEMS):
        size = min(2 * BLOCK_ITEMS, count - start)
        yield raw(-(-size // 8)).data.cast("B")[:size]


def scales(raw: Raw, count: int, rms: float) -> Iterator[bytes]:
    """`count` E8M0 bytes that give a matrix of random nibbles about the root mean square `rms`."""
    centre = 127 + round(math.log2(rms / (NIBBLE_RMS * SCALE_SPREAD)))
    table = bytes(min(max(centre + step, 1), 254) for step in SCALE_STEPS)
    for block in nibbles(raw, count):
        yield bytes(block).translate(table)


def values(shape: Shape, tensor: Tensor, seed: int) -> Iterator[memoryview | bytes]:
    """The bytes of one tensor, block by block.

    Matrices have 1/sqrt(fan in), so that vectors keep their size through the net; gate and up have more, so that
    SiTU's caps are met; AttnRes projections 2/sqrt(H), so that mixes differ from the mean without collapsing to one
    source; norms lie near 1; decays spread over (0.1, 1); the correction bias is of the size of gaps between scores.
    """
    import numpy as np

    name, dtype, count = tensor.name, tensor.dtype, math.prod(tensor.shape)
    raw = raw_bits(seed, name)
    if name.endswith("A_log"):
        heads = np.concatenate([np.frombuffer(block, "<f4") for block in uniform(raw, shape.kda_heads, 0.15, "F32")])
        yield heads.tobytes() + bytes(tensor.nbytes - heads.nbytes)  # past the heads: padding, exactly zero
    elif name.endswith("dt_bias"):
        # g = -5 sigmoid(z) for K3 and -softplus(z) for Kimi-Linear: both between about -2.2 and -0.01 here.
        low, high = (-6.0, -0.8) if shape.family == "k3" else (-4.5, 1.5)
        yield from uniform(raw, count, (high - low) / math.sqrt(12), dtype, (high + low) / 2)
    elif name.endswith("e_score_correction_bias"):
        yield from uniform(raw, count, 0.05, dtype)
    elif "norm" in name.rsplit(".", 2)[-2]:
        yield from uniform(raw, count, 0.1, dtype, 1.0)
    elif name.endswith("res_proj.weight"):
        yield from uniform(raw, count, 2 / math.sqrt(count), dtype)
    elif name.endswith("conv1d.weight"):
        yield from uniform(raw, count, 1 / math.sqrt(tensor.shape[-1]), dtype)
    elif name.endswith("_packed"):
        yield from nibbles(raw, count)
    elif name.endswith("_scale"):
        gain = 0.5 if ".w2." in name else 2.0
        yield from scales(raw, count, gain / math.sqrt(tensor.shape[-1] * MXFP4_GROUP))
    elif name.endswith("embed_tokens.weight"):
        yield from uniform(raw, count, 1.0, dtype)
    else:
        part = name.rsplit(".", 2)[-2]
        gain = {"lm_head": 3.0, "f_b_proj": 0.5, "gate_proj": 2.0, "up_proj": 2.0, "down_proj": 0.5}.get(part, 1.0)
        gain = {"w1": 2.0, "w3": 2.0, "w2": 0.5}.get(part, gain)
        yield from uniform(raw, count, gain / math.sqrt(math.prod(tensor.shape[1:])), dtype)


# --- vocabulary -------------------------------------------------------------------------------------------------------

NAMED_TOKENS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
# These three are in the published table with "special": false, although they are control tokens.
MARKERS = ("<|open|>", "<|close|>", "<|sep|>")
CONSONANTS, VOWELS = "bcdfghjklmnprstvwxyz", "aeiou"


def made_up_words() -> Iterator[bytes]:
    """Distinct pronounceable words with a space before them: " baba", " babe", ...; 10,000 of two syllables, then
    a million of three."""
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    words = [""]
    for length in (1, 2, 3):
        words = [word + syllable for word in words for syllable in syllables]
        if length > 1:
            yield from (f" {word}".encode() for word in words)


def rank_file(vocab: int) -> bytes | None:
    """tiktoken.model with `vocab` - 256 ranks, or None where there is no room for the 256 single bytes.

    Its first 3,840 ranks (256 single bytes, then merges) are the project's own small vocabulary, cut or filled up
    with made-up words. Raises PresetError above 1,013,000 ids.
    """
    ranks = vocab - ADDED_TOKENS
    if ranks < 256:
        return None
    lines = RANK_FILE.read_bytes().splitlines()[:ranks]
    known = {line.split()[0] for line in lines}
    for word in made_up_words():
        if len(lines) == ranks:
            break
        token = base64.b64encode(word)
        if token not in known:
            lines.append(b"%s %d" % (token, len(lines)))
    if len(lines) < ranks:
        raise PresetError(f"vocab {vocab} is above the {len(lines) + ADDED_TOKENS} ids that can be made up")
    return b"\n".join(lines) + b"\n"


def tokenizer_config(vocab: int) -> dict[str, Any]:
    """tokenizer_config.json for `vocab` ids, the last 256 of them K3's added tokens at their published offsets."""

    def entry(name: str) -> dict[str, Any]:
        flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        return {"content": name, **flags, "special": name not in MARKERS}

    first = vocab - ADDED_TOKENS
    plain = ("[BOS]", "[EOS]", "[UNK]", "[PAD]", *MARKERS)
    return {
        "added_tokens_decoder": {str(first + offset): entry(name) for offset, name in NAMED_TOKENS.items()},
        "additional_special_tokens": [name for name in NAMED_TOKENS.values() if name not in plain],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    }


# --- files ------------------------------------------------------------------------------------------------------------


def begin_file(path: Path, blocks: Iterable[memoryview | bytes], nbytes: int | None = None) -> BinaryIO:
    """All of `path` under a temporary name, not yet safe on disk; `finish_file` makes it so. `nbytes` sets the length,
    with a hole after the last block (without it, the blocks' own)."""
    file = open(path.with_name(path.name + ".tmp"), "wb")  # noqa: SIM115  finish_file closes it
    try:
        for block in blocks:
            file.write(block)
        file.flush()
        if nbytes is not None:
            file.truncate(nbytes)
    except BaseException:
        file.close()
        raise
    return file


def finish_file(file: BinaryIO, path: Path) -> None:
    """Syncs what `begin_file` wrote, then gives it its name: the name never stands for half a file."""
    with file:
        os.fsync(file.fileno())
    Path(file.name).replace(path)


def write_file(path: Path, blocks: Iterable[memoryview | bytes]) -> None:
    """Writes `path` whole or not at all."""
    finish_file(begin_file(path, blocks), path)


def sync_folder(path: Path) -> None:
    """Makes the names inside `path` last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The one that may write `folder` (made if absent). Raises InstanceHeld while another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The other one may have finished and renamed the folder between our open and our lock.
            same = os.path.samestat(os.fstat(descriptor), os.stat(folder))
        except (BlockingIOError, FileNotFoundError):
            same = False
        if not same:
            raise InstanceHeld(f"{folder} is being written by another process; wait for it to end")
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Made:
    """What lies in the folder now. `disk_bytes` is what it takes on disk, far below `nbytes` for a mock."""

    path: str
    files: int
    tensors: int
    nbytes: int
    disk_bytes: int
    seconds: float
    already: bool


def survey(folder: Path, tensors: int, seconds: float, already: bool) -> Made:
    stats = [path.stat() for path in folder.iterdir()]
    return Made(
        path=str(folder),
        files=len(stats),
        tensors=tensors,
        nbytes=sum(stat.st_size for stat in stats),
        disk_bytes=sum(stat.st_blocks for stat in stats) * 512,
        seconds=seconds,
        already=already,
    )


def make(
    out: Path,
    shape: Shape,
    seed: int = 0,
    mock: bool = False,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Made:
    """Writes the checkpoint of `shape` and `seed` into the folder `out`, or its headers over holes for a mock.

    `out` appears under its name only when whole. A run that was ended early is taken up where it stopped, one that
    finished is left as it is. `advance` hears (bytes done, bytes in all). Raises PresetError where `out` holds
    something else or the disk is too small, InstanceHeld while another process writes the same folder.
    """
    began = time.monotonic()
    text = recipe(shape, seed, mock)
    files = list(shards(shape))
    tensors = sum(len(shard.tensors) for shard in files)
    out = out.absolute()
    if (out / RECIPE_FILE).is_file() and (out / RECIPE_FILE).read_text() == text:
        return survey(out, tensors, time.monotonic() - began, already=True)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PresetError(f"{out} holds something else; delete it or name another folder")
    partial = out.with_name(f".{out.name}.partial")
    with held(partial):
        if not (partial / RECIPE_FILE).is_file() or (partial / RECIPE_FILE).read_text() != text:
            for path in partial.iterdir():
                path.unlink()
            write_file(partial / RECIPE_FILE, [text.encode()])
        write_shards(partial, files, shape, seed, mock, advance)
        names = [(shard.name, [tensor.name for tensor in shard.tensors]) for shard in files]
        pieces = index_text(sum(shard.data_bytes for shard in files), names)
        write_file(partial / INDEX_FILE, (piece.encode() for piece in pieces))
        write_file(partial / "config.json", [json.dumps(config(shape), indent=2).encode()])
        ranks = rank_file(shape.vocab)
        if ranks is not None:
            write_file(partial / "tiktoken.model", [ranks])
            text_config = json.dumps(tokenizer_config(shape.vocab), indent=1)
            write_file(partial / "tokenizer_config.json", [text_config.encode()])
        sync_folder(partial)
        partial.rename(out)
        sync_folder(out.parent)
    return survey(out, tensors, time.monotonic() - began, already=False)


def write_shards(
    folder: Path, files: list[Shard], shape: Shape, seed: int, mock: bool, advance: Callable[[int, int], None]
) -> None:
    """The shards that `folder` does not have yet. What stands under its final name was synced before it got it."""
    missing = [shard for shard in files if not (folder / shard.name).is_file()]
    total = sum(shard.nbytes for shard in files)
    done = total - sum(shard.nbytes for shard in missing)
    needed = sum(len(shard.head) if mock else shard.nbytes for shard in missing)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise PresetError(
            f"{folder.parent} has {free:,} bytes free, this checkpoint needs {needed:,}; choose another disk"
        )

    def blocks(shard: Shard) -> Iterator[memoryview | bytes]:
        nonlocal done
        yield shard.head
        done += len(shard.head)
        if mock:
            done += shard.data_bytes
            return
        for tensor in shard.tensors:
            for block in values(shape, tensor, seed):
                yield block
                done += len(block)
                advance(done, total)

    # One file is synced while the next is computed: a disk that writes at 400 MB/s is kept busy by half a core.
    with ThreadPoolExecutor(1) as sync:
        synced: Future[None] | None = None
        for shard in missing:
            path = folder / shard.name
            file = begin_file(path, blocks(shard), shard.nbytes if mock else None)
            if synced is not None:
                synced.result()
            synced = sync.submit(finish_file, file, path)
            advance(done, total)
        if synced is not None:
            synced.result()


# --- command ----------------------------------------------------------------------------------------------------------


def layer_list(text: str | None) -> tuple[int, ...] | None:
    """ "4,8,9" as numbers. Raises PresetError."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PresetError(f"full-attention {text!r} is not a list of layer numbers like 4,8,9") from None


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar with rate and time left on the terminal; silent where stderr is not one."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("synth", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


Dim = Annotated[int | None, typer.Option(help="As the preset has it where not given.", show_default=False)]


def synth(
    out: Annotated[Path, typer.Argument(help="Folder to make; it appears under this name when whole.")],
    preset: Annotated[
        str | None, typer.Option(help="tiny (1 MB), demo (0.1 GB), wide (true widths, 5 layers) or full.")
    ] = None,
    family: Annotated[str, typer.Option(help="k3 or kimi-linear.")] = "k3",
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")] = 0,
    mock: Annotated[
        bool, typer.Option("--mock", help="True headers and sizes over holes, no data; of the full size by default.")
    ] = False,
    hidden: Dim = None,
    layers: Dim = None,
    vocab: Dim = None,
    full_attention: Annotated[
        str | None, typer.Option(help="MLA layers, counted from 1: 4,8,9. Each fourth and the last where not given.")
    ] = None,
    kda_heads: Dim = None,
    kda_dim: Dim = None,
    heads: Dim = None,
    nope: Dim = None,
    rope: Dim = None,
    v_dim: Dim = None,
    q_rank: Dim = None,
    kv_rank: Dim = None,
    experts: Dim = None,
    top_k: Dim = None,
    shared: Dim = None,
    inner: Dim = None,
    latent: Dim = None,
    dense_layers: Dim = None,
    dense_inner: Dim = None,
    block: Dim = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a sentence.")] = False,
) -> None:
    """Make a checkpoint of random weights with the real tensor graph and file layout, or an empty one of full size."""
    changes = {
        "hidden": hidden,
        "layers": layers,
        "vocab": vocab,
        "full_attention": layer_list(full_attention),
        "kda_heads": kda_heads,
        "kda_dim": kda_dim,
        "heads": heads,
        "nope": nope,
        "rope": rope,
        "v_dim": v_dim,
        "q_rank": q_rank,
        "kv_rank": kv_rank,
        "experts": experts,
        "top_k": top_k,
        "shared": shared,
        "inner": inner,
        "latent": latent,
        "dense_layers": dense_layers,
        "dense_inner": dense_inner,
        "block": block,
    }
    shape = chosen_shape(family, preset or ("full" if mock else "demo"), changes)
    with progress_bar(quiet=as_json or mock) as advance:
        made = make(out, shape, seed, mock, advance)
    if as_json:
        fields = ("path", "files", "tensors", "nbytes", "disk_bytes", "seconds", "already")
        print(json.dumps({name: getattr(made, name) for name in fields}))
    elif made.already:
        print(f"{made.path}: already made, {made.tensors:,} tensors, {made.nbytes:,} bytes")
    else:
        rate = made.disk_bytes / 1e9 / max(made.seconds, 1e-3)
        print(
            f"{made.path}: {made.files} files, {made.tensors:,} tensors, {made.nbytes:,} bytes"
            f" ({made.disk_bytes / 1e6:,.1f} MB on disk) in {made.seconds:.1f} s, {rate:.2f} GB/s"
        )
