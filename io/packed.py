"""The packed store: weights laid out for reading, spread over drives, with a checksum for every record.

Owns the format: the layout (pure: which bytes go where), the manifest, and `PackedStore`, which reads it back.
Writing one is packer.py's. In every output folder lie `trunk.K.bin` and `experts.K.bin`, K the number of the
folder; in the first also the manifest `sluice-pack.json`, the experts' checksums `sluice-pack.sums`, and the model's
small files. Every file begins with a page that names its pack, so that files of two packs are never mixed.

Trunk tensors lie in the order of use, cut into pieces of whole rows (what the ring reads at once), each on a page
boundary, dealt over the folders in proportion to their shares. Every expert is cut at page boundaries into one part
per folder, in proportion too: one expert then arrives at the sum of the drives' rates.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from sluice.io.errors import StoreError
from sluice.io.store import (
    ALIGN,
    NUMPY_DTYPES,
    ExpertNaming,
    ExpertPart,
    ExpertRecord,
    Extent,
    Piece,
    SlotRead,
    Store,
    StoreFile,
    TensorRecord,
    align_up,
    tensor_bytes,
)
from sluice.io.trunk import RING_UNIT_BYTES, MatrixUse, cut_rows

FORMAT = "sluice-pack"
LAYOUT_VERSION = 1
MANIFEST = "sluice-pack.json"
SUMS = "sluice-pack.sums"
MAX_MANIFEST_BYTES = 256 * 2**20
ROW_PIECE_BYTES = 256 * 1024
"""A table of which single rows are read is cut this small, so that a row is read with what its checksum covers."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor of a layout; pieces without checksums until they are written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of every expert that one file holds: bytes [at, at + nbytes) of the expert, one after another."""

    file: int
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """How experts lie. parts: tensors of an expert, in order; slot_bytes: a whole expert, padded to a page."""

    naming: ExpertNaming
    parts: tuple[ExpertPart, ...]
    slot_bytes: int
    cuts: tuple[Cut, ...]

    @property
    def count(self) -> int:
        """Experts of all layers."""
        return len(self.naming.layers) * self.naming.experts


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything goes. identity: of the checkpoint it was made from. files: (name, folder number, bytes)."""

    identity: str
    folders: int
    files: tuple[tuple[str, int, int], ...]
    tensors: tuple[PackedTensor, ...]
    experts: PackedExperts | None

    @property
    def pack_id(self) -> str:
        """A digest of the whole layout: equal layouts of one checkpoint give equal bytes."""
        return xxhash.xxh3_128_hexdigest(json.dumps(to_json(self), sort_keys=True).encode())

    @property
    def data_bytes(self) -> int:
        """Bytes of all files."""
        return sum(nbytes for _, _, nbytes in self.files)


def split_pages(pages: int, shares: Sequence[float]) -> list[int]:
    """`pages` in proportion to the shares, whole and none lost. Pure."""
    total, done, given = sum(shares), 0.0, 0
    counts = []
    for share in shares:
        done += share
        upto = round(pages * done / total)
        counts.append(upto - given)
        given = upto
    return counts


def make_layout(
    store: Store,
    order: Sequence[MatrixUse],
    vectors: Sequence[str],
    row_tables: Sequence[str],
    shares: Sequence[float],
    unit_bytes: int = RING_UNIT_BYTES,
) -> Layout:
    """Where everything of `store` goes when packed over len(shares) folders. Pure: reads headers only.

    shares: how much of the reading each folder's drive is to carry, in any unit. Raises StoreError for missing tensors.
    """
    if not shares or any(share <= 0 for share in shares):
        raise ValueError(f"shares must be positive: {list(shares)}")
    folders = len(shares)
    filled = [ALIGN] * folders  # the first page of each file names the pack
    wanted: dict[str, tuple[int, bool]] = {}  # name -> (bytes of a piece, whole)
    multiples: dict[str, int] = {}
    for name in vectors:
        wanted.setdefault(name, (0, True))
    for use in order:
        wanted.setdefault(use.name, (unit_bytes, use.whole))
        multiples[use.name] = use.row_multiple
    for name in row_tables:
        # A table that is a matrix too (tied embeddings) is cut in between: rows cost more, blocks are more.
        wanted[name] = (ROW_PIECE_BYTES, False) if name not in wanted else (min(unit_bytes, 8 * ROW_PIECE_BYTES), False)
    tensors = []
    for name, (size, whole) in wanted.items():
        record = store.tensors.get(name)
        if record is None:
            raise StoreError(f"{store.path}: tensor {name} is missing")
        rows = record.shape[0] if record.shape else 1
        all_of_it = Piece(0, rows, Extent(0, 0, record.nbytes))
        pieces = []
        for piece in [all_of_it] if whole else cut_rows(all_of_it, size, multiples.get(name, 1)):
            # The folder that is furthest behind its share takes the next piece.
            folder = min(range(folders), key=lambda k: (filled[k] / shares[k], k))
            pieces.append(Piece(piece.row0, piece.rows, Extent(folder, filled[folder], piece.extent.nbytes)))
            filled[folder] += align_up(piece.extent.nbytes)
        tensors.append(PackedTensor(name, record.dtype, record.shape, tuple(pieces)))
    files = [(f"trunk.{k}.bin", k, filled[k]) for k in range(folders)]
    experts = None
    if store.naming is not None:
        parts, at = [], 0
        first = store.expert(store.naming.layers[0], 0)
        for part in first.parts:
            parts.append(ExpertPart(part.name, part.dtype, part.shape, at))
            at += tensor_bytes(part.dtype, part.shape)
        slot = align_up(at)
        cuts, begin = [], 0
        for k, pages in enumerate(split_pages(slot // ALIGN, shares)):
            if pages:
                cuts.append(Cut(len(files), begin, pages * ALIGN))
                begin += pages * ALIGN
                count = len(store.naming.layers) * store.naming.experts
                files.append((f"experts.{k}.bin", k, ALIGN + count * pages * ALIGN))
        experts = PackedExperts(store.naming, tuple(parts), slot, tuple(cuts))
    return Layout(store.identity, folders, tuple(files), tuple(tensors), experts)


# --- the layout as JSON --------------------------------------------------------------------------


def to_json(layout: Layout, sums: Mapping[tuple[str, int], int] | None = None) -> dict[str, Any]:
    """The layout as plain values. sums: (tensor, number of piece) to checksum, when it has been written."""
    tensors: dict[str, Any] = {}
    for tensor in layout.tensors:
        pieces = []
        for i, piece in enumerate(tensor.pieces):
            extent = piece.extent
            row: list[Any] = [piece.row0, piece.rows, extent.file, extent.offset, extent.nbytes]
            pieces.append(row if sums is None else [*row, f"{sums[tensor.name, i]:016x}"])
        tensors[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "pieces": pieces}
    made: dict[str, Any] = {
        "format": FORMAT,
        "layout": LAYOUT_VERSION,
        "identity": layout.identity,
        "folders": layout.folders,
        "files": [list(file) for file in layout.files],
        "tensors": tensors,
        "experts": None,
    }
    if layout.experts is not None:
        experts = layout.experts
        made["experts"] = {
            "template": experts.naming.template,
            "layers": list(experts.naming.layers),
            "experts": experts.naming.experts,
            "parts": [[p.name, p.dtype, list(p.shape), p.at] for p in experts.parts],
            "slot_bytes": experts.slot_bytes,
            "cuts": [[c.file, c.at, c.nbytes] for c in experts.cuts],
        }
    return made


class _Bad(Exception):
    """A value of the manifest that is not what it must be."""


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**62:
        raise _Bad(f"{str(value)[:40]!r} where a whole number from {least} on must stand")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or not value or len(value) > 4096:
        raise _Bad(f"{str(value)[:40]!r} where a text must stand")
    return value


def _list(value: Any, length: int | None = None) -> list[Any]:
    if type(value) is not list or (length is not None and len(value) != length):
        raise _Bad(f"{str(value)[:40]!r} where a list{'' if length is None else f' of {length}'} must stand")
    return value


def _dtype(value: Any) -> str:
    if value not in NUMPY_DTYPES:
        raise _Bad(f"dtype {str(value)[:40]!r}")
    return str(value)


def from_json(value: Any, label: str) -> tuple[Layout, bool]:
    """The checked layout, and whether its pieces carry checksums. Raises StoreError saying what is wrong."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise StoreError(f"{label}: not the manifest of a packed store")
    if value.get("layout") != LAYOUT_VERSION:
        raise StoreError(
            f"{label}: packed with layout version {str(value.get('layout'))[:20]}, "
            f"this program reads {LAYOUT_VERSION}; pack again, or use the program that packed it"
        )
    try:
        return _layout(value)
    except (_Bad, KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{label}: damaged manifest: {type(error).__name__} {str(error)[:150]}") from error


def _layout(value: dict[str, Any]) -> tuple[Layout, bool]:
    folders = _whole(value["folders"], 1)
    files = []
    for file in _list(value["files"]):
        name, folder, nbytes = _list(file, 3)
        if "/" in _text(name) or name.startswith("."):
            raise _Bad(f"file name {name!r}")
        files.append((name, _whole(folder), _whole(nbytes, ALIGN)))
    if len({name for name, _, _ in files}) != len(files) or any(k >= folders for _, k, _ in files):
        raise _Bad("files do not fit the folders")

    def extent(file: Any, offset: Any, nbytes: Any, checksum: int | None) -> Extent:
        if _whole(file) >= len(files) or _whole(offset, ALIGN) % ALIGN:
            raise _Bad(f"extent in file {file} at {offset}")
        if offset + _whole(nbytes) > files[file][2]:
            raise _Bad(f"extent at {offset} of {nbytes} bytes is beyond {files[file][0]}")
        return Extent(file, offset, nbytes, checksum)

    checked = set()
    tensors = []
    for name, tensor in value["tensors"].items():
        shape = tuple(_whole(n) for n in _list(tensor["shape"]))
        dtype = _dtype(tensor["dtype"])
        rows = shape[0] if shape else 1
        row_bytes = tensor_bytes(dtype, shape) // rows if rows else 0
        pieces, row = [], 0
        for piece in _list(tensor["pieces"]):
            row0, n, file, offset, nbytes, *rest = _list(piece)
            checked.add(len(rest))
            if row0 != row or _whole(n) * row_bytes != nbytes:
                raise _Bad(f"pieces of {name[:100]}")
            pieces.append(Piece(row0, n, extent(file, offset, nbytes, int(rest[0], 16) if rest else None)))
            row += n
        if row != rows:
            raise _Bad(f"pieces of {name[:100]}")
        tensors.append(PackedTensor(_text(name), dtype, shape, tuple(pieces)))
    if len(checked) > 1:
        raise _Bad("some pieces have checksums and others do not")
    experts = None
    if value["experts"] is not None:
        e = value["experts"]
        layers = tuple(_whole(n) for n in _list(e["layers"]))
        parts, at = [], 0
        for part in _list(e["parts"]):
            name, dtype, shape, begin = _list(part, 4)
            shape = tuple(_whole(n) for n in _list(shape))
            if begin != at:
                raise _Bad(f"part {name}")
            parts.append(ExpertPart(_text(name), _dtype(dtype), shape, at))
            at += tensor_bytes(dtype, shape)
        naming = ExpertNaming(_text(e["template"]), tuple(p.name for p in parts), layers, _whole(e["experts"], 1))
        naming.template.format(layer=0, expert=0, part="")
        slot = _whole(e["slot_bytes"], ALIGN)
        cuts, begin = [], 0
        for cut in _list(e["cuts"]):
            file, start, nbytes = _list(cut, 3)
            if start != begin or _whole(nbytes, ALIGN) % ALIGN:
                raise _Bad("cuts of experts")
            extent(file, ALIGN, nbytes * len(layers) * naming.experts, None)
            cuts.append(Cut(file, start, nbytes))
            begin += nbytes
        if begin != slot or align_up(at) != slot or len(set(layers)) != len(layers):
            raise _Bad("cuts of experts do not add up")
        experts = PackedExperts(naming, tuple(parts), slot, tuple(cuts))
    return Layout(_text(value["identity"]), folders, tuple(files), tuple(tensors), experts), checked == {1}


def first_page(layout: Layout, pack_id: str, file: int) -> bytes:
    """The page every file begins with."""
    name, _, nbytes = layout.files[file]
    text = json.dumps({"format": FORMAT, "layout": LAYOUT_VERSION, "pack": pack_id, "file": name, "bytes": nbytes})
    return text.encode().ljust(ALIGN, b"\n")


# --- reading it back -----------------------------------------------------------------------------


class PackedStore(Store):
    """An opened packed store. identity is the source checkpoint's: the same weights, laid out otherwise."""

    def __init__(
        self, path: Path, files: Sequence[StoreFile], layout: Layout, sums: np.ndarray[Any, Any] | None
    ) -> None:
        self.path, self.files, self.layout = path, tuple(files), layout
        self.drives = tuple(dict.fromkeys(file.drive for file in files))
        self.identity = layout.identity
        self.naming = None
        self._tensor = {tensor.name: tensor for tensor in layout.tensors}
        self._sums = sums
        self.tensors = _PackedNames(self)
        self._rows: dict[int, int] = {}
        self._slot_bytes = 0

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """See Store."""
        return self._tensor[name].pieces

    def declare_experts(self, naming: ExpertNaming) -> None:
        """See Store: the naming must be the one that was packed."""
        experts = self.layout.experts
        if experts is None or experts.naming != naming:
            packed = "none" if experts is None else f"{experts.naming.template} x {experts.naming.experts}"
            raise StoreError(
                f"{self.path}: packed with other experts ({packed}) than {naming.template} x {naming.experts}"
            )
        self.naming = naming
        self._rows = {layer: row for row, layer in enumerate(naming.layers)}
        self._slot_bytes = experts.slot_bytes

    @property
    def expert_bytes(self) -> int:
        """See Store."""
        experts = self.layout.experts
        return 0 if experts is None else sum(tensor_bytes(p.dtype, p.shape) for p in experts.parts)

    def expert(self, layer: int, expert: int) -> ExpertRecord:
        """See Store."""
        experts, row = self.layout.experts, self._rows[layer]
        assert experts is not None
        if not 0 <= expert < experts.naming.experts:
            raise IndexError(f"expert {expert} of layer {layer}, there are {experts.naming.experts}")
        number = row * experts.naming.experts + expert
        reads = []
        for k, cut in enumerate(experts.cuts):
            checksum = None if self._sums is None else int(self._sums[number, k])
            reads.append(SlotRead(Extent(cut.file, ALIGN + number * cut.nbytes, cut.nbytes, checksum), cut.at))
        return ExpertRecord(layer, expert, experts.parts, tuple(reads), experts.slot_bytes)


class _PackedNames(Mapping[str, TensorRecord]):
    """All tensors by name, the experts' too, whose records name the first of their bytes."""

    def __init__(self, store: PackedStore) -> None:
        self._store = store
        experts = store.layout.experts
        self._suffixes: dict[str, ExpertPart] = {}
        self._prefixes: dict[str, int] = {}
        if experts is not None:
            for part in experts.parts:
                tail = experts.naming.template.format(layer="", expert="\0", part=part.name).rpartition("\0")[2]
                self._suffixes[tail] = part
            for row, layer in enumerate(experts.naming.layers):
                self._prefixes[experts.naming.template.format(layer=layer, expert="\0", part="").partition("\0")[0]] = (
                    row
                )

    def _expert(self, name: str) -> tuple[ExpertPart, int, int] | None:
        experts = self._store.layout.experts
        if experts is None:
            return None
        for tail, part in self._suffixes.items():
            if name.endswith(tail):
                head = name[: len(name) - len(tail)]
                digits = len(head) - len(head.rstrip("0123456789"))
                number, row = head[len(head) - digits :], self._prefixes.get(head[: len(head) - digits])
                if row is not None and number and str(int(number)) == number and int(number) < experts.naming.experts:
                    return part, row, int(number)
        return None

    def __getitem__(self, name: str) -> TensorRecord:
        store = self._store
        tensor = store._tensor.get(name)
        if tensor is not None:
            first = tensor.pieces[0].extent if tensor.pieces else Extent(0, ALIGN, 0)
            file = store.files[first.file]
            nbytes = tensor_bytes(tensor.dtype, tensor.shape)
            return TensorRecord(name, tensor.dtype, tensor.shape, file.drive, str(file.path), first.offset, nbytes)
        found = self._expert(name)
        if found is None:
            raise KeyError(name)
        part, row, expert = found
        experts = store.layout.experts
        assert experts is not None
        cut = next(c for c in experts.cuts if c.at <= part.at < c.at + c.nbytes)
        offset = ALIGN + (row * experts.naming.experts + expert) * cut.nbytes + part.at - cut.at
        file, nbytes = store.files[cut.file], tensor_bytes(part.dtype, part.shape)
        return TensorRecord(name, part.dtype, part.shape, file.drive, str(file.path), offset, nbytes)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._store._tensor or self._expert(name) is not None)

    def __iter__(self) -> Iterator[str]:
        yield from self._store._tensor
        experts = self._store.layout.experts
        if experts is not None:
            naming = experts.naming
            for layer in naming.layers:
                for expert in range(naming.experts):
                    for part in naming.parts:
                        yield naming.template.format(layer=layer, expert=expert, part=part)

    def __len__(self) -> int:
        experts = self._store.layout.experts
        return len(self._store._tensor) + (0 if experts is None else experts.count * len(experts.parts))


def open_packed(path: Path, folders: Sequence[Path]) -> PackedStore:
    """The packed store whose manifest lies in `path`, its files looked for in `folders`.

    Raises StoreError: a manifest that is damaged or of another layout version, files that are missing, of another
    pack or of another size.
    """
    layout, sums_digest, places = _read_manifest(path / MANIFEST)
    folders = [*folders, *(place for place in places if place not in folders)]
    pack_id = layout.pack_id
    files = []
    for i, (name, _, nbytes) in enumerate(layout.files):
        places = [folder / name for folder in folders if (folder / name).is_file()]
        if not places:
            raise StoreError(f"{name} of the packed store is missing; looked in {', '.join(map(str, folders))}")
        right = [place for place in places if _first_page(place) == first_page(layout, pack_id, i)]
        if not right:
            raise StoreError(f"{places[0]}: belongs to another pack than {path / MANIFEST}")
        if right[0].stat().st_size != nbytes:
            raise StoreError(f"{right[0]}: {right[0].stat().st_size} bytes, the manifest says {nbytes}")
        files.append(StoreFile(right[0], str(right[0].parent), nbytes))
    sums = None
    if layout.experts is not None:
        raw = _read(path / SUMS, 8 * layout.experts.count * len(layout.experts.cuts))
        if xxhash.xxh3_64_hexdigest(raw) != sums_digest:
            raise StoreError(f"{path / SUMS}: damaged, or of another pack than {path / MANIFEST}")
        sums = np.frombuffer(raw, "<u8").reshape(layout.experts.count, len(layout.experts.cuts))
    return PackedStore(path, files, layout, sums)


def _read(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > limit:
                raise StoreError(f"{path}: over {limit} bytes")
            return file.read(limit + 1)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error


def _first_page(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(ALIGN)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error


def _read_manifest(path: Path) -> tuple[Layout, str, list[Path]]:
    """(layout, digest of the experts' checksums, folders where the files were written)."""
    try:
        value = json.loads(_read(path, MAX_MANIFEST_BYTES))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: not JSON: {str(error)[:100]}") from error
    layout, checked = from_json(value, str(path))
    sums = value.get("sums")
    if not checked and layout.tensors:
        raise StoreError(f"{path}: damaged manifest: no checksums")
    places = value.get("places")
    known = [Path(p) for p in places if isinstance(p, str)] if isinstance(places, list) else []
    return layout, sums if isinstance(sums, str) else "", known
