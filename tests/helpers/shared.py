"""Where data of other projects lies: beside the checkout, never inside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("SLUICE_SHARED", Path(__file__).resolve().parents[2].parent / "shared"))


def shared_path(relative: str) -> Path:
    """The file or folder `relative` below the shared data; skips the calling test, saying so, where it is absent."""
    path = SHARED / relative
    if not path.exists():
        reason = f"shared data absent: {path} (set SLUICE_SHARED to the folder that holds it)"
        pytest.skip(reason, allow_module_level=True)
    return path
