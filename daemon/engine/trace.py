"""Which experts each token took: the raw material of cache studies."""

from __future__ import annotations

import json
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray


class RouteTrace:
    """Collects routing decisions of one sequence run alone; called by the network after every router.

    Rows are tokens in order. Written as one JSON object a line: {"tok": n, "layers": [[ids], ...]}, the
    MoE layers in model order, ids in rank order.
    """

    def __init__(self) -> None:
        self._layers: dict[int, list[list[int]]] = {}

    def __call__(self, layer: int, ids: NDArray[np.int32]) -> None:
        """ids: (T, k) int32, the experts of T tokens at `layer`, best first."""
        self._layers.setdefault(layer, []).extend(ids.tolist())

    def write(self, out: BinaryIO) -> None:
        columns = [self._layers[layer] for layer in sorted(self._layers)]
        for token, rows in enumerate(zip(*columns, strict=True)):
            out.write(json.dumps({"tok": token, "layers": list(rows)}, separators=(",", ":")).encode() + b"\n")
