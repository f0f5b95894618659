"""Settings every test shares."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A loaded machine must not fail a property: deadlines measure the machine, not the code.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("house")
