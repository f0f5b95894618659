"""What goes into one forward pass and what comes out: the rows of several sequences, told apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from sluice.io.errors import SluiceError

if TYPE_CHECKING:
    from sluice.daemon.model.state import SequenceState


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part of a pass: its next tokens.

    token_ids: (T,) int32, T >= 1, each in [0, vocab). logits: which of the T rows are wanted.
    """

    state: SequenceState
    token_ids: NDArray[np.int32]
    logits: Literal["none", "last", "all"] = "last"


@dataclass(frozen=True, slots=True)
class PassResult:
    """logits: per segment None, or float32 (V,) for "last" and (T, V) for "all"; None where dropped or failed.

    failed: why, by segment index: a read or a number that concerned this segment alone (or all of them).
    A dropped or failed segment's state is invalid; the others' results are what they would have been alone.
    """

    logits: list[NDArray[np.float32] | None]
    failed: dict[int, SluiceError] = field(default_factory=dict)
