"""The memory plan as a value: named terms, their sum, and the promise that it fits.

What each term is computed from is the business of whoever knows it (`engine.planning`); here they are
added, compared with the limit, printed and exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sluice.daemon.service.limits import MemoryLimit
from sluice.io.errors import BudgetError


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """terms: name -> bytes, in the order they are shown. limit: what they may add up to, and who says so."""

    terms: Mapping[str, int]
    limit: MemoryLimit

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    @property
    def short_bytes(self) -> int:
        """By how much the plan exceeds the limit; 0 when it fits."""
        return max(0, self.total - self.limit.size)

    def check(self, remedy: str = "") -> None:
        """Raises BudgetError, naming the largest terms and the bytes it is short, unless the plan fits."""
        if not self.short_bytes:
            return
        largest = sorted(self.terms.items(), key=lambda term: -term[1])[:3]
        named = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in largest)
        raise BudgetError(
            f"the plan needs {self.total} bytes and the limit is {self.limit.size} ({self.limit.source}): "
            f"{self.short_bytes} bytes short; largest: {named}" + (f"; {remedy}" if remedy else ""),
            self.short_bytes,
        )

    def as_json(self) -> dict[str, object]:
        return {
            "terms": dict(self.terms),
            "total_bytes": self.total,
            "limit_bytes": self.limit.size,
            "limit_source": self.limit.source,
            "short_bytes": self.short_bytes,
        }
