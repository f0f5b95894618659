"""What one sequence carries from token to token (specification section 4).

Owns: the KDA matrices, the convolution windows and the latent cache of one sequence, and the position they stand
at. The KDA state is overwritten in place, so it is valid for exactly one position: going back needs a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sluice.daemon.model.config import ModelConfig
from sluice.io.errors import ContextExceeded, StoreError

F32 = NDArray[np.float32]


def state_bytes(config: ModelConfig, context_tokens: int) -> int:
    """Bytes of one sequence's state with room for `context_tokens` tokens."""
    return 4 * (_fixed_numbers(config) + context_tokens * token_numbers(config))


def token_numbers(config: ModelConfig) -> int:
    """float32 numbers the latent caches grow by per token."""
    return len(config.mla_layers) * config.cache_width


def _fixed_numbers(config: ModelConfig) -> int:
    matrices = config.kda_heads * config.kda_head_dim**2
    windows = 3 * (config.conv_kernel_size - 1) * config.kda_width
    return len(config.kda_layers) * (matrices + windows)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sequence's state at `position`. numbers: float32, what `SequenceState.snapshot` laid down, in its order:
    KDA matrices, windows, then `position` rows of every latent cache."""

    position: int
    numbers: F32

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes


class SequenceState:
    """State of one sequence: `position` tokens have been taken in, at most `context_tokens` may be.

    kda: (KDA layers, heads, key, value) float32. windows: (KDA layers, 3, taps - 1, channels) float32, the last raw
    projections of q, k, v, oldest first. latents: (MLA layers, context, latent + shared key) float32.
    `valid` is False while a pass is under way and after one that failed: such a state may only be reset.
    """

    def __init__(self, config: ModelConfig, context_tokens: int) -> None:
        """Raises ContextExceeded if the model's own limit is shorter."""
        if context_tokens < 1:
            raise ValueError(f"a context of {context_tokens} tokens")
        if config.max_positions is not None and context_tokens > config.max_positions:
            raise ContextExceeded(
                f"a context of {context_tokens} tokens exceeds the model's {config.max_positions}; lower engine.context"
            )
        kda, mla, dim = len(config.kda_layers), len(config.mla_layers), config.kda_head_dim
        self.context_tokens = context_tokens
        self.position = 0
        self.valid = True
        self.kda: F32 = np.zeros((kda, config.kda_heads, dim, dim), np.float32)
        self.windows: F32 = np.zeros((kda, 3, config.conv_kernel_size - 1, config.kda_width), np.float32)
        self.latents: F32 = np.zeros((mla, context_tokens, config.cache_width), np.float32)

    @property
    def nbytes(self) -> int:
        return self.kda.nbytes + self.windows.nbytes + self.latents.nbytes

    @property
    def room(self) -> int:
        """Tokens that may still be taken in."""
        return self.context_tokens - self.position

    def reset(self) -> None:
        """Back to before the first token. Latents need no clearing: rows past `position` are never read."""
        self.kda.fill(0)
        self.windows.fill(0)
        self.position = 0
        self.valid = True

    def snapshot_bytes(self) -> int:
        """What `snapshot` would take now."""
        return self.kda.nbytes + self.windows.nbytes + self.latents[:, : self.position].nbytes

    def snapshot(self) -> Snapshot:
        """A copy of everything that matters at this position. Raises StoreError on an invalid state."""
        if not self.valid:
            raise StoreError("a state that a failed pass left behind cannot be kept")
        numbers = np.empty(self.snapshot_bytes() // 4, np.float32)
        for part, stored in self._parts(self.position, numbers):
            stored[...] = part
        return Snapshot(self.position, numbers)

    def restore(self, snapshot: Snapshot) -> None:
        """Stand where `snapshot` was taken. Raises ContextExceeded or StoreError if it does not fit this state."""
        if snapshot.position > self.context_tokens:
            raise ContextExceeded(f"a snapshot of {snapshot.position} tokens, a context of {self.context_tokens}")
        expected = self.kda.size + self.windows.size + self.latents[:, : snapshot.position].size
        if snapshot.numbers.dtype != np.float32 or snapshot.numbers.shape != (expected,) or snapshot.position < 0:
            raise StoreError(f"a snapshot of {snapshot.numbers.size} numbers where {expected} were expected")
        for part, stored in self._parts(snapshot.position, snapshot.numbers):
            part[...] = stored
        self.position = snapshot.position
        self.valid = True

    def _parts(self, position: int, numbers: F32) -> list[tuple[F32, F32]]:
        """Pairs of (live view, its place in `numbers`), same shapes."""
        pairs, at = [], 0
        for live in (self.kda, self.windows, self.latents[:, :position]):
            pairs.append((live, numbers[at : at + live.size].reshape(live.shape)))
            at += live.size
        return pairs
