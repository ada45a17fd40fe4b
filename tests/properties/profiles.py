"""Hypothesis profiles: few fixed examples in the fast profile, many random ones in the deep."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import engine

DEEP_FACTOR = 20  # factor of the number of examples
SHRINK_SECONDS = 20  # time limit of shrinking; hypothesis' own is 300


def register() -> None:
    """Register the profiles; `fast` draws the same examples every time and keeps nothing."""
    engine.MAX_SHRINKING_SECONDS = SHRINK_SECONDS  # not an option of `settings`
    quiet = settings(deadline=None, print_blob=True)  # ranks may share a core with the tests
    settings.register_profile("fast", quiet, derandomize=True, database=None)
    settings.register_profile("deep", quiet, max_examples=2000)
    settings.load_profile("fast")


def examples(count: int) -> settings:
    """Return settings: `count` examples in the fast profile, twenty times more in the deep one."""
    deep = settings.get_current_profile_name() == "deep"
    return settings(
        max_examples=count * DEEP_FACTOR if deep else count, suppress_health_check=list(HealthCheck)
    )
