"""Strict reader of safetensors headers and of `model.safetensors.index.json`.

Owns the two formats' grammar and every limit on them; knows nothing of models or of reading data. The
format: 8 bytes little-endian header length, that many bytes of JSON (an object of tensor name to
{dtype, shape, data_offsets}, optionally `__metadata__`), then the data, without holes, to the end of
the file. Nothing of a header is believed before it is checked: length, JSON depth, duplicate names,
types of numbers, dtype x shape = bytes, overlaps, holes, and the end of the file. Errors: StoreError.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sluice.io.errors import StoreError

MAX_HEADER_BYTES = 100_000_000
"""The reference implementation's own limit; the largest header of K3 is 0.82 MB."""
MAX_INDEX_BYTES = 2_000_000_000
MAX_DIMENSIONS = 8
MAX_NAME_BYTES = 4096

ITEM_BYTES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "I32": 4,
    "U32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}


@dataclass(frozen=True, slots=True)
class Header:
    """One file's tensors, in the order of the header, columns side by side.

    data_start: byte of the file where data begins. begin and end: int64, bytes relative to data_start.
    kinds: (dtype, shape) of every tensor, few distinct ones shared. metadata: `__metadata__`, strings only.
    """

    names: list[str]
    kinds: list[tuple[str, tuple[int, ...]]]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    data_start: int
    file_bytes: int
    metadata: dict[str, str]


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _no_float(word: str) -> Any:
    # Nothing in a header is a fraction, and refusing them here lets 1.0 never pass for 1 in a lookup below.
    raise ValueError(f"{word} where only whole numbers may stand")


def _pairs(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    # A list and not a dict: a dict would silently keep the last of two equal names.
    return pairs


def read_header(path: Path) -> Header:
    """The checked header of one safetensors file. Raises StoreError naming the file and what is wrong."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            if len(start) < 8:
                raise StoreError(f"{path}: {size} bytes is too short for a safetensors file")
            length = int.from_bytes(start, "little")
            if length > MAX_HEADER_BYTES:
                raise StoreError(f"{path}: header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
            if length < 2 or 8 + length > size:
                raise StoreError(f"{path}: header of {length} bytes does not fit the file of {size} bytes")
            raw = file.read(length)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
    if len(raw) != length:
        raise StoreError(f"{path}: the header ended after {len(raw)} of {length} bytes")
    return parse_header(raw, size, str(path))


def parse_header(raw: bytes, file_bytes: int, label: str) -> Header:
    """The same from the JSON bytes alone; `label` names the file in messages. Pure: reads nothing."""
    if not raw.startswith(b"{"):
        raise StoreError(f"{label}: the header does not begin with an object")
    try:
        entries = json.loads(raw, object_pairs_hook=_pairs, parse_constant=_no_constant, parse_float=_no_float)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{label}: the header is not JSON: {str(error)[:200]}") from error
    names: list[str] = []
    kinds: list[tuple[str, tuple[int, ...]]] = []
    shared: dict[tuple[str, tuple[int, ...]], tuple[tuple[str, tuple[int, ...]], int]] = {}
    begins: list[int] = []
    ends: list[int] = []
    metadata: dict[str, str] = {}
    data_bytes = file_bytes - 8 - len(raw)
    # JSON's true equals 1 in a lookup too; only where one stands somewhere need shapes be looked at one by one.
    booleans = b"true" in raw or b"false" in raw
    for name, entry in entries:
        if name == "__metadata__":
            metadata = _metadata(entry, label)
            continue
        try:
            (first, dtype), (second, shape), (third, offsets) = entry
            if first != "dtype" or second != "shape" or third != "data_offsets":
                fields = dict(entry)
                dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
            begin, end = offsets
            if type(entry[0]) is not tuple:
                raise TypeError
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{label}: tensor {name[:100]!r} must have exactly dtype, shape, two data_offsets"
            ) from error
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= data_bytes:
            raise StoreError(
                f"{label}: tensor {name[:100]!r} has data_offsets {str(offsets)[:80]}, there are {data_bytes} bytes"
            )
        known = None
        if not booleans and type(shape) is list:
            try:
                known = shared.get((dtype, tuple(shape)))
            except TypeError:
                known = None
        if known is None:
            kind, nbytes = _kind(name, dtype, shape, label)
            known = shared.setdefault(kind, (kind, nbytes))
        kind, nbytes = known
        if end - begin != nbytes:
            raise StoreError(
                f"{label}: tensor {name[:100]!r} is {kind[0]} {list(kind[1])}, {nbytes} bytes, not {end - begin}"
            )
        names.append(name)
        kinds.append(kind)
        begins.append(begin)
        ends.append(end)
    if len(set(names)) != len(names):
        seen: set[str] = set()
        twice = next(n for n in names if n in seen or seen.add(n))  # type: ignore[func-returns-value]
        raise StoreError(f"{label}: tensor {twice[:100]!r} stands twice in the header")
    if any(not n or len(n) > MAX_NAME_BYTES for n in names):
        raise StoreError(f"{label}: an empty tensor name, or one over {MAX_NAME_BYTES} bytes")
    begin_array, end_array = np.array(begins, np.int64), np.array(ends, np.int64)
    _check_layout(names, begin_array, end_array, data_bytes, label)
    return Header(names, kinds, begin_array, end_array, 8 + len(raw), file_bytes, metadata)


def _metadata(entry: Any, label: str) -> dict[str, str]:
    if type(entry) is not list or any(type(p) is not tuple or type(p[1]) is not str for p in entry):
        raise StoreError(f"{label}: __metadata__ must map strings to strings")
    return dict(entry)


def _kind(name: str, dtype: Any, shape: Any, label: str) -> tuple[tuple[str, tuple[int, ...]], int]:
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise StoreError(
            f"{label}: tensor {name[:100]!r} has dtype {str(dtype)[:40]!r}, known are {', '.join(ITEM_BYTES)}"
        )
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise StoreError(f"{label}: tensor {name[:100]!r} has shape {str(shape)[:80]}")
    nbytes = ITEM_BYTES[dtype]
    for n in shape:
        nbytes *= n
        if nbytes >= 2**63:
            raise StoreError(f"{label}: tensor {name[:100]!r} has shape {str(shape)[:80]}, which overflows 64 bits")
    return (dtype, tuple(shape)), nbytes


def _check_layout(
    names: list[str], begin: NDArray[np.int64], end: NDArray[np.int64], data_bytes: int, label: str
) -> None:
    if not names:
        if data_bytes:
            raise StoreError(f"{label}: {data_bytes} bytes of data belong to no tensor")
        return
    order = np.lexsort((end, begin))
    first, last = begin[order], end[order]
    if first[0] != 0:
        raise StoreError(f"{label}: {first[0]} bytes at the start of the data belong to no tensor")
    wrong = np.flatnonzero(first[1:] != last[:-1])
    if len(wrong):
        i = int(wrong[0])
        one, two = names[order[i]], names[order[i + 1]]
        what = "overlap" if first[i + 1] < last[i] else "have a hole between them"
        raise StoreError(f"{label}: tensors {one[:100]!r} and {two[:100]!r} {what}")
    if last[-1] != data_bytes:
        raise StoreError(f"{label}: data ends at byte {last[-1]} of {data_bytes}")


# --- the index of a sharded checkpoint ----------------------------------------------------------

_SPACE = rb"[ \t\r\n]*"
_STRING = rb'"([^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*)"'
_ENTRY = re.compile(_SPACE + _STRING + _SPACE + rb":" + _SPACE + _STRING + _SPACE + rb"([,}])")
_EMPTY = re.compile(_SPACE + rb"\}")
_KEY = re.compile(_SPACE + rb'"(\w+)"' + _SPACE + rb":" + _SPACE)
_NEXT = re.compile(_SPACE + rb"([,}])" + _SPACE)


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """What an index promises: per shard file name, how many tensors and the sum of their names' hashes.

    Sums and not sets: the names of K3 alone would hold 70 MB. `explain` reads the file again when a sum
    does not match, to say which name it is. total_bytes: `metadata.total_size`, or None.
    """

    path: Path
    shards: dict[str, tuple[int, int]]
    total_bytes: int | None


def name_sum(names: list[str]) -> int:
    """Order-free sum of the names' hashes, as ShardIndex keeps it (valid within one process)."""
    return sum(map(hash, names)) & (2**64 - 1)


def read_index(path: Path) -> ShardIndex:
    """The checked index. Raises StoreError: unreadable, not JSON, no weight_map, a file name with a folder in it."""
    shards: dict[str, list[int]] = {}
    total: int | None = None
    for name, file in index_entries(path):
        if name is None:
            if type(file) is int:
                total = file
            continue
        slot = shards.get(file)
        if slot is None:
            if not file.endswith(".safetensors") or "/" in file or "\x00" in file or file.startswith("."):
                raise StoreError(f"{path}: {file[:100]!r} is not the plain name of a .safetensors file")
            slot = shards[file] = [0, 0]
        slot[0] += 1
        slot[1] += hash(name)
    if not shards:
        raise StoreError(f"{path}: the weight_map names no tensors")
    return ShardIndex(path, {f: (n, s & (2**64 - 1)) for f, (n, s) in sorted(shards.items())}, total)


def index_entries(path: Path) -> Iterator[tuple[Any, Any]]:
    """(tensor name, file name) of every entry in the order of the file; (None, total_size) for the metadata.

    A scanner over a window of the file and not a parse of the whole: K3's index is 60 MB of JSON, 250 MB as a dict.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
    if len(raw) > MAX_INDEX_BYTES:
        raise StoreError(f"{path}: index of {len(raw)} bytes is over the limit of {MAX_INDEX_BYTES}")
    broken = StoreError(f"{path}: not a safetensors index (JSON object with metadata and weight_map)")
    at = re.compile(_SPACE + rb"\{").match(raw)
    if at is None:
        raise broken
    position = at.end()
    seen: set[bytes] = set()
    while True:
        key = _KEY.match(raw, position)
        if key is None or key[1] in seen:
            raise broken
        seen.add(key[1])
        position = key.end()
        if key[1] == b"weight_map":
            if raw[position : position + 1] != b"{":
                raise broken
            position += 1
            done = _EMPTY.match(raw, position)
            while done is None:
                entry = _ENTRY.match(raw, position)
                if entry is None:
                    raise StoreError(f"{path}: broken at byte {position}")
                name, file, after = entry.groups()
                position = entry.end()
                yield _text(name, path), _text(file, path)
                if after == b"}":
                    break
            else:
                position = done.end()
        else:
            position, value = _other_value(raw, position, path)
            if key[1] == b"metadata" and isinstance(value, dict):
                yield None, value.get("total_size")
        after_value = _NEXT.match(raw, position)
        if after_value is None:
            raise broken
        position = after_value.end()
        if after_value[1] == b"}":
            break
    if position != len(raw) or b"weight_map" not in seen:
        raise broken


def _other_value(raw: bytes, position: int, path: Path) -> tuple[int, Any]:
    window = raw[position : position + 65536].decode("utf-8", "replace")
    try:
        value, used = json.JSONDecoder(parse_constant=_no_constant).raw_decode(window)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: broken at byte {position}: {str(error)[:100]}") from error
    return position + len(window[:used].encode()), value


def _text(raw: bytes, path: Path) -> str:
    try:
        if b"\\" in raw:
            return str(json.loads(b'"' + raw + b'"'))
        return raw.decode()
    except ValueError as error:
        raise StoreError(f"{path}: a string that is not UTF-8 JSON: {raw[:60]!r}") from error
