"""What a part of the examination is made of: cases with a name, and what came of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OUTCOMES = ("ok", "wrong", "failed", "skipped")


class Wrong(Exception):
    """What was computed is not what it should be."""


class Skipped(Exception):
    """It cannot be done here; the text says why."""


@dataclass(frozen=True)
class Setup:
    """Where a part runs, and how large things are there: `full`, `quick`, or `tiny`."""

    device: str
    size: str = "full"

    @property
    def timed(self) -> bool:
        """Whether times mean anything; elsewhere things are run, and that is all."""
        return self.device == "cuda"

    def pick(self, full: Any, quick: Any, tiny: Any) -> Any:
        """What belongs to the size."""
        return {"full": full, "quick": quick, "tiny": tiny}[self.size]


@dataclass(frozen=True)
class Told:
    """What a case that went well has to tell: a few words, and numbers by name."""

    note: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One thing to be shown; `run` raises `Wrong`, `Skipped`, or whatever goes wrong."""

    name: str
    run: Callable[[], Told]


@dataclass(frozen=True)
class Found:
    """What came of a case.

    ok        it ran, and equals what it is compared with
    wrong     it ran, and does not
    failed    it raised, ended its process, or was not done in time
    skipped   it was not tried
    """

    part: str
    name: str
    outcome: str
    note: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether something has to be mended."""
        return self.outcome in ("wrong", "failed")

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)
