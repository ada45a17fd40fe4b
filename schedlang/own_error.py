"""Own errors: what only a mistake of schedlang explains, and what a report of it should hold."""

from __future__ import annotations


class OwnError(AssertionError):
    """A mistake of ours, found out before it was said of the user's model."""

    def __init__(self, found: str, *facts: str) -> None:
        from schedlang import __version__

        asked = (f"schedlang {__version__}", *facts, "the model file, and the schedule")
        super().__init__(
            f"an error of schedlang, not of the model: {found}\nplease report it, with\n"
            + "\n".join(f"  {fact}" for fact in asked)
        )
