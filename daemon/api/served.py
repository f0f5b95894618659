"""What the HTTP surface knows of the model it serves: names, tokenizer, identity."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.daemon.chat.constraint import Constrainer
from sluice.daemon.chat.tokenizer import Tokenizer
from sluice.io.errors import ModelNotFound


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model behind the door.

    name: the id clients use; aliases: other accepted ids; created: Unix seconds; fingerprint: model identity
    and numerics options, sent as `system_fingerprint`. constrainer: one that is warm already; warming takes
    seconds with the interpreter held, so it belongs before the loop (None: the first request that needs it pays).
    """

    name: str
    tokenizer: Tokenizer
    created: int = 0
    fingerprint: str = ""
    aliases: frozenset[str] = field(default_factory=frozenset)
    owned_by: str = "sluice"
    constrainer: Constrainer | None = None

    def check_name(self, wanted: str | None) -> None:
        """Raises ModelNotFound unless `wanted` is this model; None (absent) means this one, there is no other."""
        if wanted is not None and wanted != self.name and wanted not in self.aliases:
            raise ModelNotFound(f"the model {wanted!r} is not served here; this daemon serves {self.name!r}")

    def entry(self) -> dict[str, str | int]:
        """The model's object in /v1/models."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": self.owned_by}
