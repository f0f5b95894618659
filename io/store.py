"""The catalogue: which bytes of which file on which drive hold a tensor or an expert. Reads headers only.

`Store.open` finds the files of a checkpoint over several roots (one root is one drive), checks every
header, and answers questions in O(1) with little memory: names that differ in one number (layer or
expert) share a row of arrays, so that K3's 497,220 tensors cost about 10 MB. It knows no names by heart:
`declare_experts` is told how experts are called. Errors: StoreError.
"""

from __future__ import annotations

import gc
import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from sluice.io import safetensors
from sluice.io.errors import StoreError

ALIGN = 4096
"""Granularity of every direct read: the largest logical block of the drives this is for."""

NUMPY_DTYPES: Mapping[str, DTypeLike] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "U8": np.uint8}
"""How the bytes of a weight appear as arrays; bf16 as its bits, since numpy has no such type."""

RECLAIMED = "SLUICE-RECLAIMED"
"""Marks a folder whose shards `sluice pack --reclaim` has begun to free: they have true headers and holes for data."""

INDEX_NAME = "model.safetensors.index.json"


def align_down(n: int) -> int:
    """The largest multiple of ALIGN that is <= n."""
    return n & -ALIGN


def align_up(n: int) -> int:
    """The smallest multiple of ALIGN that is >= n."""
    return -(-n // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class StoreFile:
    """One file with weights. drive is the root it lies in, as configured; nbytes its whole size."""

    path: Path
    drive: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor. dtype is safetensors' word ("BF16", "F32", "F16", "U8"), offset the byte of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    drive: str
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes of one file: `file` indexes Store.files. checksum: xxh3-64 of these bytes, or None."""

    file: int
    offset: int
    nbytes: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [row0, row0 + rows) of a tensor, and where they lie. A piece with a checksum is read whole."""

    row0: int
    rows: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class ExpertNaming:
    """How routed experts are called.

    template has {layer}, {expert} and {part}; parts are the tensors of one expert; layers those that have
    experts, as the model numbers them; experts is how many each of these layers has.
    """

    template: str
    parts: tuple[str, ...]
    layers: tuple[int, ...]
    experts: int


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One tensor of an expert inside the expert's slot of memory: bytes [at, at + nbytes) of the slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int


@dataclass(frozen=True, slots=True)
class SlotRead:
    """One read that fills a part of a slot: `extent` lands at byte `at`, and at = extent.offset (mod ALIGN)."""

    extent: Extent
    at: int


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """Where one expert is and how it lies in its slot. One read when its bytes are adjacent on disk."""

    layer: int
    expert: int
    parts: tuple[ExpertPart, ...]
    reads: tuple[SlotRead, ...]
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of weights, without slack for alignment."""
        return sum(read.extent.nbytes for read in self.reads)


_NUMBERED = re.compile(r"(.*\.)(0|[1-9][0-9]{0,8})(\..*)", re.DOTALL).fullmatch


class _Series:
    """Tensors whose names differ in one number alone. Columns grow while headers are read, then are sorted.

    array and not numpy: single elements are asked for, half a million times when an index is checked.
    """

    __slots__ = ("dense", "files", "kinds", "numbers", "offsets")

    def __init__(self) -> None:
        self.numbers, self.files, self.kinds, self.offsets = array("i"), array("i"), array("i"), array("q")
        self.dense = False  # numbers are 0, 1, 2, ...

    def freeze(self) -> int | None:
        """Sort by number. Returns a number that stands twice, or None."""
        order = np.argsort(np.array(self.numbers, np.int32), kind="stable")
        for column in ("numbers", "files", "kinds", "offsets"):
            old = getattr(self, column)
            setattr(self, column, array(old.typecode, np.array(old)[order].tobytes()))
        numbers = np.array(self.numbers, np.int64)
        self.dense = bool(np.array_equal(numbers, np.arange(len(numbers))))
        twice = np.flatnonzero(numbers[1:] == numbers[:-1])
        return int(numbers[twice[0]]) if len(twice) else None

    def find(self, number: int) -> tuple[int, int, int] | None:
        """(file, kind, offset) of one number, or None."""
        i = number if self.dense else bisect_left(self.numbers, number)
        if i >= len(self.numbers) or self.numbers[i] != number:
            return None
        return self.files[i], self.kinds[i], self.offsets[i]


class Catalogue(Mapping[str, TensorRecord]):
    """Tensor name to TensorRecord, compact: records are made when asked for."""

    def __init__(self, files: Sequence[StoreFile]) -> None:
        self._files = files
        self._single: dict[str, tuple[int, int, int]] = {}
        self._series: dict[tuple[str, str], _Series] = {}
        self._kinds: list[tuple[str, tuple[int, ...]]] = []
        self._kind_ids: dict[tuple[str, tuple[int, ...]], int] = {}
        self._kind_bytes: list[int] = []
        self._count = 0

    def add(self, file: int, header: safetensors.Header) -> None:
        """Take in one header. Raises StoreError when a name is known already (numbered names: at `freeze`)."""
        offsets = (header.begin + header.data_start).tolist()
        for name, kind, offset in zip(header.names, header.kinds, offsets, strict=True):
            kind_id = self._kind_ids.get(kind)
            if kind_id is None:
                kind_id = self._kind_ids[kind] = len(self._kinds)
                self._kinds.append(kind)
            split = _NUMBERED(name)
            if split is None:
                if name in self._single:
                    other = self._files[self._single[name][0]].path
                    raise StoreError(
                        f"tensor {name[:100]!r} stands in {other.name} and in {self._files[file].path.name}"
                    )
                self._single[name] = (file, kind_id, offset)
                continue
            prefix, number, suffix = split.groups()
            series = self._series.get((prefix, suffix))
            if series is None:
                series = self._series[prefix, suffix] = _Series()
            series.numbers.append(int(number))
            series.files.append(file)
            series.kinds.append(kind_id)
            series.offsets.append(offset)
        self._count += len(header.names)

    def freeze(self) -> None:
        """After the last `add`. Raises StoreError for a name that came twice."""
        self._kind_bytes = [tensor_bytes(dtype, shape) for dtype, shape in self._kinds]
        for (prefix, suffix), series in self._series.items():
            twice = series.freeze()
            if twice is not None:
                raise StoreError(f"tensor {prefix}{twice}{suffix!s} stands in two files")

    def _find(self, name: str) -> tuple[int, int, int] | None:
        found = self._single.get(name)
        if found is not None:
            return found
        split = _NUMBERED(name)
        if split is None:
            return None
        series = self._series.get((split[1], split[3]))
        return None if series is None else series.find(int(split[2]))

    def find(self, name: str) -> tuple[int, str, tuple[int, ...], int] | None:
        """(file index, dtype, shape, offset), or None."""
        found = self._find(name)
        if found is None:
            return None
        file, kind, offset = found
        dtype, shape = self._kinds[kind]
        return file, dtype, shape, offset

    def column(self, prefix: str, suffix: str, count: int) -> tuple[list[int], ...] | None:
        """(files, kinds, offsets) of prefix + 0..count-1 + suffix, or None when one is missing."""
        series = self._series.get((prefix, suffix))
        if series is None or not series.dense or len(series.numbers) < count:
            return None
        return series.files[:count].tolist(), series.kinds[:count].tolist(), series.offsets[:count].tolist()

    def kind(self, kind_id: int) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) by its number."""
        return self._kinds[kind_id]

    def __getitem__(self, name: str) -> TensorRecord:
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        file, kind, offset = found
        dtype, shape = self._kinds[kind]
        where = self._files[file]
        return TensorRecord(name, dtype, shape, where.drive, str(where.path), offset, self._kind_bytes[kind])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def __iter__(self) -> Iterator[str]:
        yield from self._single
        for (prefix, suffix), series in self._series.items():
            for number in series.numbers:
                yield f"{prefix}{number}{suffix}"

    def __len__(self) -> int:
        return self._count


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor: item size times the product of the shape."""
    nbytes = safetensors.ITEM_BYTES[dtype]
    for n in shape:
        nbytes *= n
    return nbytes


class Store:
    """An opened checkpoint: its drives, files, tensors and, once declared, its experts. Holds no descriptor.

    identity: a string that names the checkpoint (sizes and headers), to refuse pins, packs and sessions of another.
    """

    def __init__(
        self, path: Path, drives: Sequence[str], files: Sequence[StoreFile], tensors: Catalogue, identity: str
    ) -> None:
        self.path = path
        self.drives = tuple(drives)
        self.files = tuple(files)
        self.tensors: Mapping[str, TensorRecord] = tensors
        self.identity = identity
        self.naming: ExpertNaming | None = None
        self._catalogue = tensors
        self._rows: dict[int, int] = {}
        self._parts: tuple[tuple[str, tuple[int, ...], int], ...] = ()
        self._expert_file = np.zeros((0, 0, 0), np.int32)
        self._expert_offset = np.zeros((0, 0, 0), np.int64)
        self._slot_bytes = 0

    @staticmethod
    def open(path: str | os.PathLike[str], roots: Sequence[str | os.PathLike[str]] = ()) -> Store:
        """The checkpoint at `path` (a folder, or one .safetensors file), its shards looked for there and in `roots`.

        A folder with a packed store's manifest is opened as such, its files looked for in the same places. A packed
        store in one of the roots is used in place of the shards, if it was made from this checkpoint.
        Raises StoreError: nothing there, shards missing (all are named), a header that is not right, an index and
        headers that disagree, a packed store that is damaged or of another checkpoint or layout version.
        """
        # Half a million short-lived tuples would have the collector walk all of them again and again.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return _open(Path(path), [Path(r) for r in roots])
        finally:
            if collecting:
                gc.enable()

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """The rows of one tensor (first dimension; a scalar is one row), in order. Raises KeyError."""
        found = self._catalogue.find(name)
        if found is None:
            raise KeyError(name)
        file, dtype, shape, offset = found
        return (Piece(0, shape[0] if shape else 1, Extent(file, offset, tensor_bytes(dtype, shape))),)

    # --- experts ---

    def declare_experts(self, naming: ExpertNaming) -> None:
        """Say how experts are called; checks that all are there and alike. Raises StoreError naming one that is not."""
        layers, experts, parts = naming.layers, naming.experts, naming.parts
        file = np.zeros((len(layers), experts, len(parts)), np.int32)
        offset = np.zeros((len(layers), experts, len(parts)), np.int64)
        kinds: list[int | None] = [None] * len(parts)
        for row, layer in enumerate(layers):
            for p, part in enumerate(parts):
                prefix, suffix = naming.template.format(layer=layer, expert="\0", part=part).split("\0")
                column = self._catalogue.column(prefix, suffix, experts)
                if column is None:
                    names = (f"{prefix}{e}{suffix}" for e in range(experts))
                    missing = next(n for n in names if n not in self.tensors)
                    raise StoreError(f"{self.path}: tensor {missing} is missing")
                file[row, :, p], column_kinds, offset[row, :, p] = column
                kind = kinds[p] if kinds[p] is not None else column_kinds[0]
                kinds[p] = kind
                for e, other in enumerate(column_kinds):
                    if other != kind:
                        dtype, shape = self._catalogue.kind(other)
                        first = self._catalogue.kind(kind or 0)
                        raise StoreError(
                            f"{self.path}: tensor {prefix}{e}{suffix} is {dtype} {list(shape)}, "
                            f"the other experts have {first[0]} {list(first[1])}"
                        )
        parts_of = []
        for part, kind in zip(parts, kinds, strict=True):
            dtype, shape = self._catalogue.kind(kind) if kind is not None else ("U8", (0, 0))
            if dtype not in NUMPY_DTYPES:
                raise StoreError(f"{self.path}: experts' {part} is {dtype}, known are {', '.join(NUMPY_DTYPES)}")
            parts_of.append((dtype, shape, tensor_bytes(dtype, shape)))
        self.naming, self._parts = naming, tuple(parts_of)
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._expert_file, self._expert_offset = file, offset
        self._slot_bytes = self._worst_slot()

    def _worst_slot(self) -> int:
        if not self._expert_offset.size:
            return 0
        sizes = np.array([n for _, _, n in self._parts], np.int64)
        order = np.argsort(self._expert_offset, axis=2)
        begins = np.take_along_axis(self._expert_offset, order, 2)
        files = np.take_along_axis(self._expert_file, order, 2)
        adjacent = (begins[..., 1:] == begins[..., :-1] + sizes[order][..., :-1]) & (files[..., 1:] == files[..., :-1])
        whole = int(sizes.sum())
        residue = begins % ALIGN
        one_read = residue[..., 0] + whole
        many_reads = (residue + sizes[order] + ALIGN - 1).sum(axis=2)
        return align_up(int(np.where(adjacent.all(axis=2), one_read, many_reads).max()))

    @property
    def expert_slot_bytes(self) -> int:
        """Bytes of memory that hold any one expert as it is read, a multiple of ALIGN; 0 without experts."""
        return self._slot_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of weights in one expert; 0 without experts."""
        return sum(n for _, _, n in self._parts)

    def expert(self, layer: int, expert: int) -> ExpertRecord:
        """Where one expert lies. Raises KeyError for a layer without experts, IndexError for a number out of range."""
        row = self._rows[layer]
        naming = self.naming
        assert naming is not None
        if not 0 <= expert < naming.experts:
            raise IndexError(f"expert {expert} of layer {layer}, there are {naming.experts}")
        files, offsets = self._expert_file[row, expert].tolist(), self._expert_offset[row, expert].tolist()
        runs: list[list[int]] = []  # file, offset, nbytes, first byte in the slot
        at = [0] * len(offsets)
        used = 0
        for p in sorted(range(len(offsets)), key=lambda i: (files[i], offsets[i])):
            nbytes = self._parts[p][2]
            last = runs[-1] if runs else None
            if last is None or last[0] != files[p] or last[1] + last[2] != offsets[p]:
                start = align_up(used) + offsets[p] % ALIGN
                last = [files[p], offsets[p], 0, start]
                runs.append(last)
            at[p] = last[3] + last[2]
            last[2] += nbytes
            used = at[p] + nbytes
        parts = tuple(
            ExpertPart(name, dtype, shape, at[p])
            for p, (name, (dtype, shape, _)) in enumerate(zip(naming.parts, self._parts, strict=True))
        )
        reads = tuple(SlotRead(Extent(f, o, n), a) for f, o, n, a in runs)
        return ExpertRecord(layer, expert, parts, reads, align_up(used))


# --- opening -------------------------------------------------------------------------------------


def _open(path: Path, roots: list[Path]) -> Store:
    from sluice.io import packed  # it builds on this module

    folders = [path, *(root for root in roots if root.resolve() != path.resolve())]
    where = next((folder for folder in folders if (folder / packed.MANIFEST).is_file()), None)
    if where is None:
        return open_in_place(path, roots)
    store = packed.open_packed(where, folders)
    if where != path:
        identity = open_in_place(path, roots).identity
        if store.identity != identity:
            raise StoreError(
                f"{where / packed.MANIFEST}: packed from checkpoint {store.identity[:40]}, {path} is {identity}; "
                "pack again or leave that root out"
            )
    return store


def open_in_place(path: Path, roots: Sequence[Path], *, reclaimed: bool = False) -> Store:
    """The shards themselves, whatever packed store lies beside them. reclaimed: even when they have begun to be freed,
    for the packer that does it. Raises StoreError."""
    if not reclaimed and (path / RECLAIMED).exists():
        raise StoreError(f"{path}: its shards were given up while being packed ({RECLAIMED} says where to)")
    if not path.exists():
        raise StoreError(f"{path}: no such model folder or file")
    index: safetensors.ShardIndex | None = None
    if path.is_file():
        names, folders = [path.name], [path.parent]
    else:
        folders = [path, *(r for r in roots if r.resolve() != path.resolve())]
        index_path = next((f / INDEX_NAME for f in folders if (f / INDEX_NAME).is_file()), None)
        if index_path is not None:
            index = safetensors.read_index(index_path)
            names = list(index.shards)
        else:
            names = _unindexed(folders)
    found = {name: [f for f in folders if (f / name).is_file()] for name in names}
    missing = [name for name in names if not found[name]]
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise StoreError(
            f"{len(missing)} of {len(names)} shards are missing: {listed}; looked in {', '.join(map(str, folders))}"
        )
    files: list[StoreFile] = []
    catalogue = Catalogue(files)
    identity = _Identity()
    for name in names:
        where = found[name][0]
        header = safetensors.read_header(where / name)
        files.append(StoreFile(where / name, str(where), header.file_bytes))
        catalogue.add(len(files) - 1, header)
        identity.add(name, header)
        if index is not None:
            promised = index.shards[name]
            if promised != (len(header.names), safetensors.name_sum(header.names)):
                raise StoreError(_disagreement(index.path, name, set(header.names)))
    catalogue.freeze()
    drives = list(dict.fromkeys(file.drive for file in files))
    return Store(path, drives, files, catalogue, identity.hex())


def _unindexed(folders: list[Path]) -> list[str]:
    """File names of a checkpoint without an index: all *.safetensors, and all N of a `-of-N` set."""
    names = sorted({entry.name for folder in folders if folder.is_dir() for entry in folder.glob("*.safetensors")})
    if not names:
        raise StoreError(f"no {INDEX_NAME} and no *.safetensors in {', '.join(map(str, folders))}")
    sharded = re.compile(r"(.*-)(\d+)(-of-(\d+)\.safetensors)").fullmatch
    expected = set(names)
    for name in names:
        match = sharded(name)
        if match and int(match[4]) <= 100_000:
            expected |= {f"{match[1]}{i:0{len(match[2])}d}{match[3]}" for i in range(1, int(match[4]) + 1)}
    return sorted(expected)


def _disagreement(index: Path, shard: str, there: set[str]) -> str:
    promised = [n for n, f in safetensors.index_entries(index) if n is not None and f == shard]
    for name in promised:
        if name not in there:
            return f"{index}: tensor {name[:100]!r} should be in {shard}, whose header does not have it"
    if len(set(promised)) != len(promised):
        return f"{index}: the weight_map names a tensor of {shard} twice"
    extra = sorted(there - set(promised))
    return (
        f"{index}: tensor {extra[0][:100]!r} of {shard} is not in the weight_map"
        if extra
        else f"{index}: disagrees with {shard}"
    )


class _Identity:
    """A digest over file names, sizes and headers: the checkpoint's shape (hashing 1.5 TB of data is not for start)."""

    def __init__(self) -> None:
        import xxhash

        self._digest = xxhash.xxh3_128()

    def add(self, name: str, header: safetensors.Header) -> None:
        self._digest.update(f"{name}\0{header.file_bytes}\0{header.data_start}\0".encode())
        self._digest.update(header.begin.tobytes())
        self._digest.update("\0".join(header.names).encode())

    def hex(self) -> str:
        return self._digest.hexdigest()
