"""What is known of published checkpoints: the size of every shard of Kimi K3, and the few published checksums.

From the specification, section 2.4: a layer's shard is its header, its trunk and 896 experts of 17,547,264 bytes, and
headers differ only by the digits of the layer number and by the kind of attention.
"""

from __future__ import annotations

import re

K3_REPOSITORY = "moonshotai/Kimi-K3"
K3_TOTAL_SIZE = 1_560_860_324_864  # `metadata.total_size` of the index: bytes of all tensors
K3_SHARDS = 96
_EXPERTS_BYTES = 896 * 17_547_264
_MLA_LAYERS = {*range(3, 92, 4), 92}
_SHA256 = {
    1: "975584c00f85a95fce8ae0f840af8cef69c2ef4db00d34cab3e2cbdfc60f6e51",
    2: "26a3284e1d2cb567934ebef002e6a1813551d646739e8bcb1e9e3fe7f878e0f5",
    96: "9d10c74fc10161bef9463a8541a634a97f521f43c99368ea7243ce0c79cdbf7c",
}
_REST = {94: 584 + 4_697_663_488, 95: 304 + 92_289_024, 96: 19_424 + 802_428_928}


def k3_shard_number(name: str) -> int | None:
    """1..96 for the file name of a K3 shard, None for any other."""
    match = re.fullmatch(r"model-(\d{5})-of-000096\.safetensors", name, re.ASCII)
    return int(match[1]) if match and 1 <= int(match[1]) <= K3_SHARDS else None


def k3_shard_bytes(number: int) -> int:
    """The published size of shard 1..96. Shard L+1 holds layer L; 94 head and embedding, 95 projector, 96 vision."""
    layer = number - 1
    if number in _REST:
        return _REST[number]
    if layer == 0:
        return 2_928 + 2_341_213_184
    if layer in _MLA_LAYERS:
        return (817_616 if layer < 10 else 823_016) + 844_335_616 + _EXPERTS_BYTES
    return (818_704 if layer < 10 else 824_112) + 1_267_744_256 + _EXPERTS_BYTES


def k3_shard_sha256(number: int) -> str | None:
    """The published SHA-256 of a shard, where one is known."""
    return _SHA256.get(number)
