"""Small checkpoints for tests of io: safetensors files written by the format's rule, and a model of known bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sluice.io.store import ExpertNaming
from sluice.io.trunk import MatrixUse

WORDS = {"BF16": np.uint16, "F32": np.float32, "F16": np.float16, "U8": np.uint8}
PARTS = tuple(f"w{i}.weight_{kind}" for i in (1, 2, 3) for kind in ("packed", "scale"))
PREFIX = "model.layers."
TEMPLATE = PREFIX + "{layer}.experts.{expert}.{part}"


def safetensors_bytes(
    tensors: Mapping[str, tuple[str, NDArray]], metadata: dict[str, str] | None = None, pad: int = 8
) -> bytes:
    """One file: (dtype word, array) by name, data in the order of the mapping, header padded to `pad`."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (word, array) in tensors.items():
        header[name] = {"dtype": word, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % pad)
    return len(raw).to_bytes(8, "little") + raw + b"".join(a.tobytes() for _, a in tensors.values())


def write_checkpoint(
    folders: Sequence[Path], shards: Mapping[str, Mapping[str, tuple[str, NDArray]]], index: bool = True
) -> Path:
    """Shards dealt over the folders in turn, the index in the first. Returns the first folder."""
    for i, (name, tensors) in enumerate(shards.items()):
        folder = folders[i % len(folders)]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(safetensors_bytes(tensors))
    if index:
        weight_map = {t: name for name, tensors in shards.items() for t in tensors}
        (folders[0] / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}, indent=2)
        )
    return folders[0]


def bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bf16 bits as float32, by the definition: the upper half of a float32."""
    return np.left_shift(bits.astype(np.uint32), 16).view(np.float32)


class Toy:
    """A model of random bytes: per layer two matrices, one `whole`, a vector, experts; an embedding and a head.

    `tensors` holds every array by name, so that what io delivers can be compared with what was written.
    """

    def __init__(
        self, layers: int = 3, experts: int = 6, width: int = 96, rows: int = 200, vocabulary: int = 130, seed: int = 1
    ) -> None:
        rng = np.random.default_rng(seed)
        self.layers, self.experts, self.vocabulary = layers, experts, vocabulary
        self.shards: dict[str, dict[str, tuple[str, NDArray]]] = {}
        self.order: list[MatrixUse] = []
        self.vectors: list[str] = []
        self.tensors: dict[str, NDArray] = {}

        def random_bf16(*shape: int) -> tuple[str, NDArray]:
            return "BF16", rng.integers(0, 0x3FFF, shape, dtype=np.uint16)

        for layer in range(layers):
            p = f"{PREFIX}{layer}."
            shard: dict[str, tuple[str, NDArray]] = {
                p + "bias": ("F32", rng.standard_normal(7).astype(np.float32)),
                p + "norm.weight": random_bf16(width),
                p + "down.weight": random_bf16(width, rows),
                p + "kv_b.weight": random_bf16(rows // 2, width),
                p + "up.weight": random_bf16(rows, width),
            }
            for e in sorted(map(str, range(experts))):
                for part in PARTS:
                    shape = (64, 60) if part.endswith("packed") else (64, 7)
                    name = TEMPLATE.format(layer=layer, expert=e, part=part)
                    shard[name] = ("U8", rng.integers(0, 200, shape, dtype=np.uint8))
            self.shards[f"model-{layer + 1:05d}-of-{layers + 1:05d}.safetensors"] = shard
            self.order += [
                MatrixUse(p + "up.weight", row_multiple=8),
                MatrixUse(p + "kv_b.weight", whole=True),
                MatrixUse(p + "down.weight"),
            ]
            self.vectors += [p + "bias", p + "norm.weight"]
        self.shards[f"model-{layers + 1:05d}-of-{layers + 1:05d}.safetensors"] = {
            "model.embed.weight": random_bf16(vocabulary, width),
            "model.norm.weight": ("F16", rng.standard_normal(width).astype(np.float16)),
            "head.weight": random_bf16(vocabulary, width),
        }
        self.order.append(MatrixUse("head.weight", row_multiple=4))
        self.vectors.append("model.norm.weight")
        self.row_tables = ["model.embed.weight"]
        self.naming = ExpertNaming(TEMPLATE, PARTS, tuple(range(layers)), experts)
        for tensors in self.shards.values():
            for name, (_, array) in tensors.items():
                self.tensors[name] = array

    def write(self, *folders: Path) -> Path:
        """The checkpoint's files, dealt over the folders."""
        return write_checkpoint(folders, self.shards)
