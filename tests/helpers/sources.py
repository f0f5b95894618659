"""Weights from plain dicts, behind the seams the network sees: what `sluice.io` does, without a drive.

Owns fakes of TrunkSource and ExpertSource that are stricter than the real ones (order of use, no use of a block
after the next was asked for, shuffled arrival of experts) and that fail when told to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from helpers.reference import Config, Tensors, widen
from numpy.typing import NDArray

from sluice.daemon.model import names
from sluice.daemon.model.config import ModelConfig, parse_config
from sluice.daemon.model.graph import Lookahead, Network
from sluice.io.errors import StorageError
from sluice.io.experts import Expert
from sluice.io.trunk import Block

DTYPES = {"uint16": "BF16", "float32": "F32", "float16": "F16", "uint8": "U8"}


@dataclass(frozen=True)
class Facts:
    """What an index knows of a tensor."""

    dtype: str
    shape: tuple[int, ...]


def facts(tensors: Tensors) -> dict[str, Facts]:
    return {name: Facts(DTYPES[array.dtype.name], array.shape) for name, array in tensors.items()}


class FakeTrunk:
    """order: names of matrices in the order of a pass; None lets them be asked for in any. block_rows: cut
    matrices that are not whole into runs of so many rows, each in a buffer (at an odd address) that is spoiled
    as soon as the next run is asked for. fail_at: the name of a matrix whose read fails."""

    def __init__(
        self,
        tensors: Tensors,
        order: Sequence[names.MatrixUse] | None = None,
        *,
        block_rows: int | None = None,
        fail_at: str | None = None,
    ) -> None:
        self.tensors, self.block_rows, self.fail_at = tensors, block_rows, fail_at
        self.order = None if order is None else [use.name for use in order]
        self.whole_names = None if order is None else {use.name for use in order if use.whole}
        self.expected: list[str] = []
        self.aborted = 0
        self.peeks: list[str] = []

    def vector(self, name: str) -> NDArray[np.float32]:
        return widen(self.tensors[name]).astype(np.float32)

    def blocks(self, name: str) -> Iterator[Block]:
        array = self._take(name)
        step = self.block_rows or len(array)
        for row in range(0, len(array), step):
            run = array[row : row + step]
            memory = np.empty(run.nbytes + 1, np.uint8)
            lent = memory[1:].view(run.dtype).reshape(run.shape)
            lent[...] = run
            yield Block(row, lent)
            memory.fill(0xFF)  # not a number in every format

    @contextmanager
    def whole(self, name: str) -> Iterator[NDArray[Any]]:
        assert self.whole_names is None or name in self.whole_names
        lent = self._take(name).copy()
        yield lent
        lent.view(np.uint8).fill(0xFF)

    def rows(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        assert ids.dtype == np.int64
        return widen(self.tensors[name][ids]).astype(np.float32)

    def peek(self, name: str) -> NDArray[Any] | None:
        self.peeks.append(name)
        return self.tensors[name]

    def begin_pass(self, skip: Collection[str] = ()) -> None:
        assert self.expected == [], "the pass before this one left matrices unread and was not aborted"
        self.expected = [name for name in self.order or () if name not in skip]

    def abort_pass(self) -> None:
        self.aborted += 1
        self.expected = []

    def _take(self, name: str) -> NDArray[Any]:
        if name == self.fail_at:
            raise StorageError("made to fail", drive="fake", file=name)
        if self.order is not None:
            assert self.expected
            assert self.expected.pop(0) == name
        return self.tensors[name]


class FakeExperts:
    """shuffle: a seed for the order of arrival, None for the order asked for. failing: (layer, expert) that cannot
    be read. resident: all are in memory, and lent until the acquisition's exit instead of until the next one arrives.
    `asked` and `hinted` hold every call."""

    def __init__(
        self,
        tensors: Tensors,
        prefix: str = "",
        *,
        shuffle: int | None = None,
        failing: Collection[tuple[int, int]] = (),
        resident: bool = False,
    ) -> None:
        self.resident = resident
        self.parts: dict[tuple[int, int], dict[str, NDArray[Any]]] = {}
        for name, array in tensors.items():
            words = name.removeprefix(prefix).split(".")
            if "experts" in words:
                layer, expert = int(words[2]), int(words[words.index("experts") + 1])
                self.parts.setdefault((layer, expert), {})[".".join(words[words.index("experts") + 2 :])] = array
        self.rng = None if shuffle is None else np.random.default_rng(shuffle)
        self.failing = set(failing)
        self.asked: list[tuple[int, list[int]]] = []
        self.hinted: list[tuple[int, list[int]]] = []
        self.open = 0

    def acquire(self, layer: int, ids: Sequence[int]) -> FakeAcquisition:
        assert len(set(ids)) == len(ids)
        assert all(type(i) is int for i in ids)
        self.asked.append((layer, list(ids)))
        return FakeAcquisition(self, layer, list(ids))

    def hint(self, layer: int, ids: Sequence[int]) -> None:
        assert len(set(ids)) == len(ids)
        self.hinted.append((layer, list(ids)))


class FakeAcquisition:
    def __init__(self, source: FakeExperts, layer: int, ids: list[int]) -> None:
        self.source, self.layer, self.ids = source, layer, ids

        self.was_resident = source.resident
        self.lent: list[NDArray[Any]] = []

    def __enter__(self) -> Self:
        self.source.open += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.source.open -= 1
        self._take_back()

    def _take_back(self) -> None:
        for array in self.lent:
            array.view(np.uint8).fill(0xFF)
        self.lent = []

    def as_they_arrive(self) -> Iterator[Expert]:
        ids = self.ids if self.source.rng is None else [self.ids[i] for i in self.source.rng.permutation(len(self.ids))]
        for expert in ids:
            if (self.layer, expert) in self.source.failing:
                raise StorageError("made to fail", drive="fake", layer=self.layer, expert=expert)
            parts = {name: array.copy() for name, array in self.source.parts[self.layer, expert].items()}
            self.lent += parts.values()
            yield Expert(expert, parts)
            if not self.was_resident:
                self._take_back()


def network(
    config: Config | ModelConfig,
    tensors: Tensors,
    *,
    block_rows: int | None = None,
    shuffle: int | None = None,
    failing: Collection[tuple[int, int]] = (),
    resident: bool = False,
    fail_at: str | None = None,
    lookahead: Lookahead | None = None,
    latent_norm_eps: float | None = None,
    on_route: Callable[[int, NDArray[np.int32]], None] | None = None,
) -> tuple[Network, FakeTrunk, FakeExperts]:
    """A network over fakes. `config`: the published keys, or as read."""
    read = config if isinstance(config, ModelConfig) else parse_config(dict(config), latent_norm_eps=latent_norm_eps)
    binding = names.bind(read, facts(tensors))
    trunk = FakeTrunk(tensors, binding.order, block_rows=block_rows, fail_at=fail_at)
    experts = FakeExperts(tensors, binding.prefix, shuffle=shuffle, failing=failing, resident=resident)
    return Network(read, trunk, experts, prefix=binding.prefix, lookahead=lookahead, on_route=on_route), trunk, experts


def chunks(ids: Sequence[int], size: int) -> Iterator[NDArray[np.int32]]:
    """`ids` in runs of `size` (the last may be shorter)."""
    for at in range(0, len(ids), size):
        yield np.array(ids[at : at + size], np.int32)


def fingerprint(rows: NDArray[np.float32] | Mapping[int, NDArray[np.float32]]) -> str:
    """xxh3-128 over float32 little-endian logit rows."""
    import xxhash

    return xxhash.xxh3_128(np.ascontiguousarray(rows, "<f4").tobytes()).hexdigest()
