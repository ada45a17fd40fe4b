"""How many examples a property is worth: few and the same in the fast profile, many in the deep."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

DEEP = 20  # times as many examples


def register() -> None:
    """Register the profiles; `fast` draws the same examples every time and keeps nothing."""
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
