"""What Slapo's tests assert (Chen et al. 2024), and the schedlang test for each."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Behaviour:
    """One of Slapo's tests: its name, the test here, and the difference, if any."""

    theirs: str
    ours: str
    differs: str = ""


@dataclass(frozen=True)
class Call:
    """A call of Slapo's API, with the rows or Python for it here; without a test it is missing."""

    theirs: str
    why: str
    rows: tuple[str, ...] = ()
    python: str = ""
    test: str = ""


def calls() -> list[Call]:
    """All calls of Slapo's API, in the order in which a schedule uses them."""
    data = tomllib.loads((Path(__file__).parent / "calls.toml").read_text())
    return [Call(**{**entry, "rows": tuple(entry.get("rows", ()))}) for entry in data["call"]]


def behaviours() -> list[Behaviour]:
    """All of Slapo's tests, in the order of its files."""
    data = tomllib.loads((Path(__file__).parent / "behaviours.toml").read_text())
    return [Behaviour(**entry) for entry in data["behaviour"]]
