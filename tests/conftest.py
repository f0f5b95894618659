"""Settings and fixtures every test shares."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A loaded machine must not fail a property: deadlines measure the machine, not the code.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("house")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random K3 of 13 layers and 2 MB in the released layout, with a tokenizer."""
    from sluice.tools.mini import synth

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    synth(folder, preset="tiny")
    return folder
