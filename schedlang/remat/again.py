"""Modules that run again in backward as one: from what, and which results spare what in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `check` needs no numbers of planners
    from schedlang.remat.operators import Key


@dataclass(frozen=True)
class Again:
    """Modules, in the order of their calls, that run again from what enters them from outside.

    save    the classes of operators whose results are kept for the second run
    chosen  single operators, likewise
    once    what enters several times, of one call or of several, is kept once
    """

    modules: tuple[str, ...]
    save: tuple[str, ...] = ()
    chosen: frozenset[Key] = frozenset()
    once: bool = False

    @property
    def results(self) -> bool:
        """True where more than the inputs is kept."""
        return bool(self.save or self.chosen)
