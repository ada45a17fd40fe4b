"""How many examples a property is worth: few and the same in the fast profile, many in the deep."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import engine

DEEP = 20  # times as many examples
SHRINKS = 20  # seconds in which a failing example is made smaller: of hypothesis itself 300


def register() -> None:
    """Register the profiles; `fast` draws the same examples every time and keeps nothing."""
    engine.MAX_SHRINKING_SECONDS = SHRINKS  # no setting of `settings`; the smallest so far is told
    quiet = settings(deadline=None, print_blob=True)  # ranks may share a core with the tests
    settings.register_profile("fast", quiet, derandomize=True, database=None)
    settings.register_profile("deep", quiet, max_examples=2000)
    settings.load_profile("fast")


def examples(count: int) -> settings:
    """So many examples in the fast profile, twenty times as many in the deep one."""
    deep = settings.get_current_profile_name() == "deep"
    return settings(
        max_examples=count * DEEP if deep else count, suppress_health_check=list(HealthCheck)
    )
